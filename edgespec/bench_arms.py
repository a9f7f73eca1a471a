"""What a benchmark compares: backends opened side by side, and methods on them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec import _native, machine
from edgespec.bench import Arm, Clock
from edgespec.cache import sha256_of
from edgespec.config import Runtime, Speculation
from edgespec.cpu import usable_cores
from edgespec.drafts import NGRAM, parse_draft
from edgespec.drafts.available import available
from edgespec.errors import BackendError, UsageError
from edgespec.gguf_header import shards
from edgespec.loading import (
    BACKENDS,
    find_draft,
    locate_draft,
    open_draft,
    open_session,
)
from edgespec.progress import Progress, silent
from edgespec.session import Session
from edgespec.tree.topology import Tree, chain
from edgespec.version import __version__

if TYPE_CHECKING:
    from edgespec.bundle import Model
    from edgespec.drafts import AnyHead
    from edgespec.targets.base import HeadTarget, Target
    from edgespec.targets.llamacpp import LlamaCppTarget
    from edgespec.verification import Prompt

METHODS = ("plain", "lookup")  # beside what --draft takes
# What each reads, best first, and the module its installation shows by.
READS = {
    "native": ("target.packed.gguf", "target.gguf"),
    "llamacpp": ("target.gguf",),
    "onnx": ("target.onnx",),
}
MODULES = {"native": "edgespec", "llamacpp": "llama_cpp", "onnx": "onnxruntime"}
PACKAGES = {"llamacpp": "llama-cpp-python", "onnx": "onnxruntime"}
LOOKUP_TOKENS = 2  # what llama-cpp-python's manual advises on processors
ATTENTION_PREFIX, ATTENTION_VISITS, ATTENTION_STEPS = 256, 5, 4


@dataclass(slots=True, eq=False)
class Opened:
    """A backend ready to run, and what it says of itself."""

    name: str
    session: Session
    about: str  # versions and settings, one line
    clock: Clock | None = None  # seconds inside the library's own forward so far
    heads: dict[str, AnyHead] = field(default_factory=dict)  # by method


class Lookup:
    """llama-cpp-python's prompt lookup, the clock included.

    Raises BackendError when the installed one has none.
    """

    name = "lookup"

    def __init__(self) -> None:
        try:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
        except ImportError as error:
            raise BackendError(
                "lookup: this llama-cpp-python has no LlamaPromptLookupDecoding; "
                "pip install -U 'edgespec[llama]'"
            ) from error
        self.seconds = 0.0
        self._find = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)

    def propose(self, sequence: NDArray[np.int32]) -> Tree | None:
        started = time.perf_counter()
        found = self._find(sequence)
        self.seconds += time.perf_counter() - started
        if len(found) == 0:
            return None
        return chain(np.array([sequence[-1], *found], dtype=np.int32))


def choose_backends(bundle: Model, asked: Sequence[str] = ()) -> list[str]:
    """The backends asked for, or all that bundle and installation have.

    Raises UsageError for one that does not exist, FormatError for one whose file the
    bundle lacks, BackendError for one that is not installed.
    """
    known = [name for name in READS if name in BACKENDS]
    for name in asked:
        if name not in known:
            raise UsageError(f"--backend: expected {', '.join(known)}, got {name!r}")
        if _file(bundle, name) is None:
            bundle.path_of(READS[name][-1])  # says what is there, and the remedy
        if find_spec(MODULES[name]) is None:
            raise BackendError(f"--backend {name}: {PACKAGES[name]} is not installed")
    found = [
        name
        for name in known
        if _file(bundle, name) is not None and find_spec(MODULES[name]) is not None
    ]
    chosen = list(dict.fromkeys(asked)) or found
    if not chosen:
        raise UsageError(f"{bundle.directory}: no backend here can run it")
    return chosen


def _file(bundle: Model, backend: str) -> str | None:
    """The file of the bundle that a backend reads, None when there is none."""
    return next((name for name in READS[backend] if name in bundle), None)


def open_backends(
    bundle: Model,
    names: Sequence[str],
    *,
    threads: int | None,
    progress: Progress = silent,
) -> list[Opened]:
    """Loads every backend, llama.cpp without and with flash attention."""
    opened: list[Opened] = []
    try:
        for index, name in enumerate(names):
            progress("load", index, len(names))
            runtime = Runtime(backend=name, threads=threads)
            session = open_session(
                bundle, runtime=runtime, speculation=Speculation(draft="none")
            )
            opened.append(Opened(name, session, ""))
            if name == "llamacpp":
                opened[-1:] = _llamacpp(session)
            else:
                opened[-1].about = _version(name, session.target)
    except BaseException:
        close(opened)
        raise
    progress("load", len(names), len(names))
    return opened


def close(opened: Sequence[Opened]) -> None:
    for backend in opened:
        if backend.heads:
            cast("HeadTarget", backend.session.target).attach(None)
        for head in backend.heads.values():
            head.close()
        backend.session.close()


def open_heads(
    bundle: Model,
    opened: Sequence[Opened],
    methods: Sequence[str],
    progress: Progress = silent,
) -> None:
    """Loads the draft head of every method that has one, each file once.

    Raises UsageError for a method that no backend can run, or a head there is not.
    """
    for method in methods:
        if method in METHODS or not parse_draft(method).kinds:
            continue
        for backend in opened:
            if not _has(bundle, method, backend.name):
                continue
            runtime = Runtime(backend=backend.name)
            found = locate_draft(bundle, method, runtime, progress)
            if found is None:
                continue
            known = {head.path: head for head in backend.heads.values()}
            backend.heads[method] = known.get(found.path) or open_draft(
                backend.session.target, found
            )


def keep_better_attention(opened: list[Opened]) -> None:
    """Closes and drops the slower of llama.cpp's two attentions, if they are there.

    Both are timed in turns, single rows behind a prompt.
    """
    pair = [backend for backend in opened if backend.name.startswith("llamacpp")]
    if len(pair) < 2:
        return
    times: dict[str, list[float]] = {backend.name: [] for backend in pair}
    for backend in pair:
        target = backend.session.target
        prefix = min(ATTENTION_PREFIX, target.context // 2)
        target.prefill(np.arange(prefix, dtype=np.int32) * 31 % target.vocab)
    row = chain(np.zeros(1, dtype=np.int32))
    for visit in range(ATTENTION_VISITS):
        for backend in pair if visit % 2 == 0 else pair[::-1]:
            assert backend.clock is not None
            backend.session.target.forward(row)
            for _ in range(ATTENTION_STEPS):
                before = backend.clock()
                backend.session.target.forward(row)
                times[backend.name].append(backend.clock() - before)
    for backend in pair:
        backend.session.target.truncate(0)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    better, worse = sorted(pair, key=lambda backend: medians[backend.name])
    opened.remove(worse)
    worse.session.close()
    better.about += "; one row takes " + ", ".join(
        f"{1e3 * medians[backend.name]:.2f} ms {how}"
        for backend, how in zip(pair, ("without", "with it"), strict=True)
    )
    better.name = "llamacpp"


def parse_methods(text: str) -> list[str]:
    """Reads "plain,ngram". Raises UsageError naming a method there is not."""
    methods = list(dict.fromkeys(text.split(",")))
    for method in methods:
        if method not in METHODS:
            try:
                is_draft = parse_draft(method).word != "none"
            except UsageError:
                is_draft = False
            if not is_draft:
                raise UsageError(
                    "--methods: expected some of plain, lookup, ngram, eagle, medusa, "
                    f"model, auto, or as --draft has them, got {method!r}"
                )
    return methods


def drafts_of(bundle: Model) -> list[str]:
    """Methods for n-grams and every head a model has, alone and together."""
    heads = available(bundle)
    words = [head.word for head in heads]
    found = ["ngram"]
    for head in heads:
        source = f":{head.name}" if words.count(head.word) > 1 else ""
        found += [f"{head.word}{source}", f"{head.word}{NGRAM}{source}"]
    return found


def check_methods(
    bundle: Model, methods: Sequence[str], backends: Sequence[str]
) -> None:
    """Raises UsageError for a method that no backend, or not the model, has."""
    if "lookup" in methods and "llamacpp" not in backends:
        raise UsageError("--methods lookup: only the llamacpp backend has it")
    for method in methods:
        if method in METHODS or not parse_draft(method).needs_head:
            continue
        if not any(_has(bundle, method, backend) for backend in backends):
            find_draft(bundle, method, backends[0])  # says what there is


def _has(bundle: Model, method: str, backend: str) -> bool:
    """Whether a backend can draft so."""
    try:
        return find_draft(bundle, method, backend) is not None
    except UsageError:
        return False


def encode(opened: Sequence[Opened], prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt's first turn, in the model's chat template.

    Raises UsageError for one that leaves no room for a reply.
    """
    session = opened[0].session
    found: list[list[int]] = []
    for number, prompt in enumerate(prompts, 1):
        ids = session.encode([{"role": "user", "content": prompt.turns[0]}])
        if len(ids) >= session.context:
            raise UsageError(
                f"--prompts: prompt {number} has {len(ids)} tokens, which leaves no "
                f"room in a context of {session.context}; leave it out"
            )
        found.append(ids)
    return found


def make_arms(
    methods: Sequence[str], opened: Sequence[Opened], trees: Sequence[str] = ("auto",)
) -> list[Arm]:
    """Every method on every backend that has it, plain first: ratios need it.

    Drafts of ours come with each of the trees.

    Plain llama.cpp and its own lookup are timed by llama.cpp's decode call (and the
    lookup's), free of our Python; every other arm by the whole loop.
    """
    arms: list[Arm] = []
    for backend in opened:
        clock = backend.clock
        arms.append(
            Arm(
                "plain",
                backend.name,
                backend.session,
                clock=clock,
                by_clock=clock is not None,
            )
        )
        for method in methods:
            if method in METHODS:
                continue
            head = backend.heads.get(method)
            if head is None and parse_draft(method).needs_head:
                continue
            arms += [
                Arm(
                    method,
                    backend.name,
                    backend.session,
                    speculation=Speculation(draft=method, tree=tree),
                    head=head,
                    clock=clock,
                )
                for tree in trees
            ]
        if "lookup" in methods and backend.name == "llamacpp":
            assert clock is not None
            arms.append(_lookup_arm(backend, clock))
    return arms


def _lookup_arm(backend: Opened, clock: Clock) -> Arm:
    lookup = Lookup()
    return Arm(
        "lookup",
        backend.name,
        backend.session,
        drafter=lookup,
        clock=lambda: clock() + lookup.seconds,
        by_clock=True,
    )


def about(
    bundle: Model, opened: Sequence[Opened], threads: int | None
) -> dict[str, Any]:
    """What figures depend on: machine, files, libraries."""
    return {
        "model": bundle.manifest.name,
        "files": _checksums(bundle, [backend.name for backend in opened]),
        "cpu": machine.cpu_name(),
        "features": _native.cpu_features(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": usable_cores(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "threads": usable_cores() if threads is None else threads,
        "edgespec": __version__,
        "backends": {backend.name: backend.about for backend in opened},
        "argv": sys.argv[1:],
    }


def _checksums(bundle: Model, backends: Sequence[str]) -> dict[str, str]:
    """SHA-256 of what the backends read, data files included."""
    read = {_file(bundle, name.partition("-")[0]) for name in backends}
    found = {
        name: entry.sha256
        for name, entry in bundle.manifest.files.items()
        if any(main and name.startswith(main) for main in read)
    }
    if not found:  # a file of its own, without a manifest that lists it
        path = bundle.path_of("target.gguf")
        found = {file.name: sha256_of(file) for file in shards(path)}
    return found


def _llamacpp(session: Session) -> list[Opened]:
    """llama.cpp twice, without and with its fused attention."""
    from edgespec.targets.llamacpp import LlamaCppTarget
    from edgespec.targets.llamacpp_library import library

    plain = session.target
    assert isinstance(plain, LlamaCppTarget)
    info = library().llama_print_system_info().decode("utf-8", "replace")
    said = f"{_version('llamacpp', plain)}; {' '.join(info.split())}"
    opened = [Opened("llamacpp", session, f"{said}; no flash attention", _clock(plain))]
    fused = LlamaCppTarget(
        plain.path, context=plain.context, threads=plain.threads, flash_attention=True
    )
    twin = Session(
        fused,
        session.tokenizer,
        session.template,
        name=session.name,
        eos_ids=session.engine.eos,
    )
    opened.append(
        Opened("llamacpp-fa", twin, f"{said}; flash attention", _clock(fused))
    )
    return opened


def _clock(target: LlamaCppTarget) -> Clock:
    return lambda: target.decode_s


def _version(name: str, target: Target) -> str:
    """A library's version, or which of our kernels the processor got."""
    package = PACKAGES.get(name)
    if package is not None:
        return f"{package} {importlib.metadata.version(package)}"
    kernels = getattr(getattr(target, "info", None), "cpu", None)
    return f"{kernels} kernels" if kernels else ""
