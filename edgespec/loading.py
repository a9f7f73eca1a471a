"""From a MODEL argument or a bundle to a session."""

from __future__ import annotations

from pathlib import Path

from edgespec.bundle import Bundle, resolve
from edgespec.chat import ChatTemplate
from edgespec.config import DEFAULT_CONTEXT, Runtime, Speculation
from edgespec.cpu import usable_cores
from edgespec.engine import check_speculation
from edgespec.errors import EdgeSpecError, FormatError, UsageError
from edgespec.progress import Progress
from edgespec.session import Session
from edgespec.targets.base import Target
from edgespec.tokenizer import Tokenizer

BACKENDS = ("auto", "onnx", "llamacpp")
MOST_THREADS = 256  # thousands are minutes of starting them, and then a crash


def load(
    model: str | Path,
    *,
    runtime: Runtime | None = None,
    speculation: Speculation | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Session:
    """Opens a MODEL: a bundle directory, a .gguf, hf:ORG/REPO[:QUANT] or a known name.

    Raises ModelNotFoundError, FormatError, BackendError and UsageError as they apply;
    options are checked before anything is fetched.
    """
    runtime = runtime or Runtime()
    speculation = speculation or Speculation()
    check_speculation(speculation)
    check_runtime(runtime)
    bundle = resolve(str(model), offline=offline, progress=progress)
    return open_session(bundle, runtime=runtime, speculation=speculation)


def open_session(
    bundle: Bundle,
    *,
    runtime: Runtime | None = None,
    speculation: Speculation | None = None,
) -> Session:
    """A session on an opened bundle."""
    runtime = runtime or Runtime()
    manifest = bundle.manifest
    entry = manifest.tokenizer
    tokenizer = Tokenizer(
        bundle.tokenizer_json, entry.bos_id, entry.eos_ids, entry.add_bos
    )
    template = ChatTemplate(bundle.chat_template, tokenizer)
    generation = manifest.generation
    target = open_target(bundle, runtime)
    try:
        _check_vocabulary(bundle, tokenizer.vocab_size, target)
    except EdgeSpecError:
        target.close()
        raise
    return Session(
        target,
        tokenizer,
        template,
        name=manifest.name,
        eos_ids=entry.eos_ids,
        temperature=generation.temperature if generation else None,
        top_p=generation.top_p if generation else None,
        speculation=speculation,
        prefill_chunk=runtime.prefill_chunk,
    )


def open_target(bundle: Bundle, runtime: Runtime) -> Target:
    """The target a runtime asks for: onnx where there is a graph, else llamacpp."""
    limit = bundle.manifest.architecture.max_position
    check_runtime(runtime, limit)
    context = (
        min(DEFAULT_CONTEXT, limit) if runtime.context is None else runtime.context
    )
    threads = usable_cores() if runtime.threads is None else runtime.threads
    backend = runtime.backend
    if backend == "auto":
        backend = "onnx" if "target.onnx" in bundle else "llamacpp"
    if backend == "onnx":
        from edgespec.targets.onnx import OnnxTarget

        return OnnxTarget(
            bundle.path_of("target.onnx"), context=context, threads=threads
        )
    from edgespec.targets.llamacpp import LlamaCppTarget

    return LlamaCppTarget(
        bundle.path_of("target.gguf"), context=context, threads=threads
    )


def _check_vocabulary(bundle: Bundle, spelt: int, target: Target) -> None:
    """Weights of another vocabulary would talk, and talk nonsense."""
    stated = bundle.manifest.architecture.vocab
    if target.vocab != stated:
        raise FormatError(
            f"{bundle.directory}: vocabulary: the manifest says {stated}, the "
            f"{target.name} weights have {target.vocab}; export again"
        )
    if spelt > stated:
        raise FormatError(
            f"{bundle.directory}: vocabulary: the tokenizer has {spelt} tokens, the "
            f"weights {stated}; export again with the model's own tokenizer"
        )


def check_runtime(runtime: Runtime, limit: int | None = None) -> None:
    """Raises UsageError naming the first option outside its range.

    limit: the model's positions, once they are known.
    """
    if runtime.backend not in BACKENDS:
        raise UsageError(
            f"backend: expected {', '.join(BACKENDS)}, got {runtime.backend!r}"
        )
    for name, value in (
        ("threads", runtime.threads),
        ("ctx", runtime.context),
        ("prefill_chunk", runtime.prefill_chunk),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{name}: expected 1 or more, got {value}")
    most = max(MOST_THREADS, usable_cores())
    if runtime.threads is not None and runtime.threads > most:
        raise UsageError(f"threads: expected at most {most}, got {runtime.threads}")
    if limit is not None and runtime.context is not None and runtime.context > limit:
        raise UsageError(
            f"ctx: expected 1 to {limit}, this model's limit, got {runtime.context}"
        )
