"""From a MODEL argument or a bundle to a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec import packed_copy, ram
from edgespec.bundle import Model, resolve
from edgespec.chat import ChatTemplate
from edgespec.config import DEFAULT_CONTEXT, Runtime, Speculation
from edgespec.cpu import usable_cores
from edgespec.drafts import parse_draft
from edgespec.drafts.available import Available, find
from edgespec.engine import check_speculation
from edgespec.errors import EdgeSpecError, FormatError, UnsupportedError, UsageError
from edgespec.manifest import TARGETS
from edgespec.progress import Progress, silent
from edgespec.session import Session
from edgespec.targets.base import Target
from edgespec.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgespec.drafts import AnyHead

# Backends that run heads, and in which form they take them.
HEAD_BACKENDS = {"native": "gguf", "onnx": "onnx", "llamacpp": "gguf"}
BACKENDS = ("auto", "native", "onnx", "llamacpp")
KV_TYPES = ("f16", "int8")
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
    found = resolve(str(model), offline=offline, progress=progress)
    return open_session(
        found, runtime=runtime, speculation=speculation, progress=progress
    )


def open_session(
    bundle: Model,
    *,
    runtime: Runtime | None = None,
    speculation: Speculation | None = None,
    progress: Progress | None = None,
) -> Session:
    """A session on an opened bundle, or on a .gguf file that serves as one.

    Raises UsageError for a draft the model does not have or the backend cannot run.
    """
    runtime = runtime or Runtime()
    speculation = speculation or Speculation()
    manifest = bundle.manifest
    draft = locate_draft(bundle, speculation.draft, runtime, progress)
    entry = manifest.tokenizer
    tokenizer = Tokenizer(
        bundle.tokenizer_json, entry.bos_id, entry.eos_ids, entry.add_bos
    )
    template = ChatTemplate(bundle.chat_template, tokenizer)
    ram.give_back()
    generation = manifest.generation
    target = open_target(bundle, runtime, progress)
    try:
        _check_vocabulary(bundle, tokenizer.vocab_size, target)
        head = None if draft is None else open_draft(target, draft)
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
        head=head,
    )


@dataclass(frozen=True, slots=True)
class DraftFile:
    """A head to be opened: its files, and what the user called it by."""

    path: Path  # a GGUF or, for onnx, a graph
    source: Path | None  # None: it is the model's own
    step: Path | None = None  # an EAGLE head's second graph


def locate_draft(
    bundle: Model, option: str, runtime: Runtime, progress: Progress | None = None
) -> DraftFile | None:
    """The head that a --draft option means, converted if need be; None without one.

    Raises UsageError where there is no such head or the backend cannot run one.
    """
    found = find_draft(bundle, option, backend_of(bundle, runtime))
    if found is None:
        return None
    if isinstance(found, Path):
        from edgespec.drafts.conversion import as_gguf

        choice = parse_draft(option)
        return DraftFile(as_gguf(found, bundle, choice, progress or silent), found)
    step = None if found.step is None else found.step()
    return DraftFile(found.path(), None, step)


def find_draft(bundle: Model, option: str, backend: str) -> Available | Path | None:
    """The head that a --draft option means on a backend; a path is one the user gave.

    Raises UsageError where there is no such head or the backend cannot run it.
    """
    choice = parse_draft(option)
    if not choice.kinds or backend not in HEAD_BACKENDS:
        return None  # an unknown backend is refused where it would be opened
    form = HEAD_BACKENDS[backend]
    if backend == "llamacpp" and not choice.needs_head:
        return None  # it would take the weights twice, which is for the user to say
    if form == "onnx" and choice.word == "model":
        raise UsageError(
            f"draft: {option} needs the native or the llamacpp backend; on onnx there "
            "are eagle, medusa and ngram"
        )
    found = find(bundle, choice, form)
    if form == "onnx" and isinstance(found, Path):
        raise UsageError(
            f"draft: {found}: on the onnx backend a head is a graph of the bundle: "
            f"export the model with --format onnx --head {found}"
        )
    return found


def open_draft(target: Target, draft: DraftFile) -> AnyHead:
    """Loads a head for a target; to be closed before it.

    Raises FormatError naming both sides for a head of another target.
    """
    if target.name == "onnx":
        from edgespec.targets.onnx import OnnxTarget

        assert isinstance(target, OnnxTarget)
        return target.open_head(draft.path, draft.step)
    from edgespec.targets.llamacpp import LlamaCppTarget
    from edgespec.targets.native import NativeTarget

    assert isinstance(target, NativeTarget | LlamaCppTarget)
    return target.open_head(draft.path, source=draft.source)


def backend_of(bundle: Model, runtime: Runtime) -> str:
    """The backend a runtime means for a model: native, onnx or llamacpp."""
    if runtime.backend != "auto":
        return runtime.backend
    has_weights = any(TARGETS[form] in bundle for form in ("packed", "gguf"))
    return "native" if has_weights else "onnx"


def open_target(
    bundle: Model, runtime: Runtime, progress: Progress | None = None
) -> Target:
    """The target a runtime asks for; by itself native where there is a GGUF."""
    limit = bundle.manifest.architecture.max_position
    check_runtime(runtime, limit)
    context = (
        min(DEFAULT_CONTEXT, limit) if runtime.context is None else runtime.context
    )
    threads = usable_cores() if runtime.threads is None else runtime.threads
    backend = backend_of(bundle, runtime)
    if backend == "native":
        return _open_native(bundle, runtime, context, threads, progress or silent)
    _refuse_native_options(runtime, backend)
    if backend == "onnx":
        from edgespec.targets.onnx import OnnxTarget

        return OnnxTarget(
            bundle.path_of(TARGETS["onnx"]), context=context, threads=threads
        )
    from edgespec.targets.llamacpp import LlamaCppTarget

    return LlamaCppTarget(
        bundle.path_of(TARGETS["gguf"]), context=context, threads=threads
    )


def _open_native(
    bundle: Model, runtime: Runtime, context: int, threads: int, progress: Progress
) -> Target:
    from edgespec.targets.native import NativeTarget

    form = "packed" if TARGETS["packed"] in bundle else "gguf"
    path = bundle.path_of(TARGETS[form])
    can_keep = bundle.stem is not None and form == "gguf"
    try:
        return NativeTarget(
            path,
            context=context,
            threads=threads,
            kv=runtime.kv,
            window=runtime.window,
            sinks=runtime.sinks,
            use_mmap=runtime.mmap,
            lock=runtime.mlock,
            packed=packed_copy.place(bundle.stem or "", path) if can_keep else None,
            progress=progress,
        )
    except UnsupportedError as error:
        others = [
            f"--backend {name}"
            for name, container in (("onnx", "onnx"), ("llamacpp", "gguf"))
            if TARGETS[container] in bundle and not _native_options(runtime)
        ]
        raise UnsupportedError(
            f"{error}; {' or '.join(others)} may run it" if others else str(error)
        ) from error


def _native_options(runtime: Runtime) -> list[str]:
    """The options given that no other backend has."""
    default = Runtime()
    return [
        option
        for name, option in (
            ("kv", "--kv"),
            ("window", "--window"),
            ("mmap", "--no-mmap"),
            ("mlock", "--mlock"),
        )
        if getattr(runtime, name) != getattr(default, name)
    ]


def _refuse_native_options(runtime: Runtime, backend: str) -> None:
    for option in _native_options(runtime):
        raise UsageError(f"{option}: only the native backend has it, not {backend}")


def _check_vocabulary(bundle: Model, spelt: int, target: Target) -> None:
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
        ("window", runtime.window),
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
    if runtime.kv not in KV_TYPES:
        raise UsageError(f"kv: expected {' or '.join(KV_TYPES)}, got {runtime.kv!r}")
    if runtime.sinks < 0:
        raise UsageError(f"sinks: expected 0 or more, got {runtime.sinks}")
    if runtime.window is None:
        return
    if runtime.context is not None:
        raise UsageError(
            "ctx: with a window a conversation has no end, and the window alone says "
            "how much of it is seen; leave one out"
        )
    if limit is not None and runtime.window + runtime.sinks >= limit:
        raise UsageError(
            f"window: expected window and sinks together below {limit}, this model's "
            f"limit, got {runtime.window} + {runtime.sinks}"
        )
