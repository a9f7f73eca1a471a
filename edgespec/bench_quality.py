"""Perplexity of a text on every backend, and how far each lies from the same truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.agreement import compare, surprise, windows
from edgespec.bench_arms import Opened
from edgespec.errors import UnsupportedError, UsageError
from edgespec.progress import Progress, silent
from edgespec.tokenizer import Tokenizer
from edgespec.tree.topology import MAX_ROWS, chain

if TYPE_CHECKING:
    from edgespec.bundle import Model
    from edgespec.targets.base import Target

WINDOW = 512  # tokens seen at a time
TRUTH = "float32"  # the target's weights, dequantised, in 32-bit arithmetic

# Logits (rows, vocab) of some rows of a window, rows asked for in order.
Answers = Callable[[int, slice], NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Quality:
    """One backend on the text."""

    backend: str
    perplexity: float
    kl: float | None  # mean over tokens of KL(reference || backend), nats
    top1: float | None  # share of tokens with the reference's argmax
    reference: str | None  # a backend, TRUTH, or None: this is the reference
    tokens: int  # whose logits were compared


@dataclass(slots=True)
class _Sum:
    surprise: float = 0.0
    predicted: int = 0
    kl: float = 0.0
    same: int = 0
    tokens: int = 0


def read_text(path: Path | None) -> str:
    """The text asked for, else the one exports are checked on.

    Raises UsageError for one that cannot be read, or when there is none.
    """
    if path is None:
        spec = find_spec("edgespec_export")
        if spec is None or not spec.submodule_search_locations:
            raise UsageError("--quality: name a text with --text FILE")
        path = Path(spec.submodule_search_locations[0], "check_text.txt")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text: cannot read {path}: {error}") from None


def cut(bundle: Model, text: str) -> NDArray[np.int64]:
    """Windows (w, n) of a text in the bundle's tokens.

    Raises UsageError for a text of fewer than 2 tokens.
    """
    entry = bundle.manifest.tokenizer
    tokenizer = Tokenizer(
        bundle.tokenizer_json, entry.bos_id, entry.eos_ids, entry.add_bos
    )
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise UsageError("--text: expected at least 2 tokens")
    start = [entry.bos_id] if entry.add_bos and entry.bos_id is not None else []
    limit = bundle.manifest.architecture.max_position
    return windows(ids, min(WINDOW, limit), start)


def truth(
    bundle: Model, rows: NDArray[np.int64], progress: Progress = silent
) -> Answers | None:
    """What target.gguf's weights say in numpy; None without it or the exporter."""
    if find_spec("edgespec_export") is None or "target.gguf" not in bundle:
        return None
    try:
        from edgespec_export import reference, sources
    except ImportError:  # the [export] extra is missing
        return None
    try:
        weights = sources.read(bundle.path_of("target.gguf"))
        return reference.of_weights(weights, rows, progress).logits
    except UnsupportedError:
        return None


def measure(
    opened: Sequence[Opened],
    rows: NDArray[np.int64],
    expected: Answers | None = None,
    *,
    progress: Progress = silent,
) -> list[Quality]:
    """Every backend over the windows (w, n), all side by side; empties the targets.

    The reference is `expected`, else the first backend. Ctrl-C ends it early, with the
    windows done so far.
    """
    answers = {backend.name: _of(backend.session.target, rows) for backend in opened}
    if expected is not None:
        answers = {TRUTH: expected, **answers}
    reference = next(iter(answers))
    sums = {name: _Sum() for name in answers}
    progress("measure", 0, len(rows))
    try:
        for index, window in enumerate(rows):
            done = {name: _Sum() for name in answers}
            for part in _parts(len(window)):
                _add(done, answers, index, part, window, reference)
            for name, found in done.items():
                _accumulate(sums[name], found)
            progress("measure", index + 1, len(rows))
    except KeyboardInterrupt:
        if not sums[reference].tokens:
            raise
    for backend in opened:
        backend.session.target.truncate(0)
    return [
        Quality(
            backend=name,
            perplexity=float(np.exp(found.surprise / found.predicted)),
            kl=None if name == reference else found.kl / found.tokens,
            top1=None if name == reference else found.same / found.tokens,
            reference=None if name == reference else reference,
            tokens=found.tokens,
        )
        for name, found in sums.items()
    ]


def report(found: Sequence[Quality], about: dict[str, Any]) -> dict[str, Any]:
    """One JSON object: `about`, and a row per backend."""
    return {**about, "quality": [asdict(row) for row in found]}


def _of(target: Target, rows: NDArray[np.int64]) -> Answers:
    """A backend's answers; a window's rows are asked for in order, in parts."""

    def logits(index: int, part: slice) -> NDArray[np.float32]:
        if part.start == 0:
            target.truncate(0)
        tree = chain(rows[index, part].astype(np.int32))
        found = target.forward(tree)
        target.commit(np.arange(tree.n, dtype=np.int32))
        return found

    return logits


def _add(
    sums: dict[str, _Sum],
    answers: dict[str, Answers],
    index: int,
    part: slice,
    window: NDArray[np.int64],
    reference: str,
) -> None:
    following = window[part.start + 1 : part.stop + 1]  # the last row has none
    expected = answers[reference](index, part)
    for name, answer in answers.items():
        got = expected if name == reference else answer(index, part)
        found = sums[name]
        found.surprise += float(surprise(got[: len(following)], following).sum())
        found.predicted += len(following)
        if name != reference:
            kl, is_same, _ = compare(expected, got)
            found.kl += float(kl.sum())
            found.same += int(is_same.sum())
        found.tokens += len(got)


def _accumulate(total: _Sum, part: _Sum) -> None:
    total.surprise += part.surprise
    total.predicted += part.predicted
    total.kl += part.kl
    total.same += part.same
    total.tokens += part.tokens


def _parts(n: int) -> Iterator[slice]:
    for start in range(0, n, MAX_ROWS):
        yield slice(start, min(start + MAX_ROWS, n))
