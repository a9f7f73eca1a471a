"""The draft heads of a bundle: read for its target, made small, written beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.manifest import TARGETS, HeadEntry, WeightsEntry
from edgespec_export import head_gguf, onnx_head
from edgespec_export.draft_vocab import choose_ids, read_counts, with_vocabulary
from edgespec_export.heads import Head, share_with_target
from edgespec_export.quantize import QUANTS
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet

DEFAULT_QUANT = "q8_0"  # of heads that come as floats


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Which heads, and how.

    paths: files or directories of any layout `sources.heads` reads.
    quant: of their matrices; None keeps what a GGUF holds and makes floats q8_0.
    draft_vocab: how many tokens they draft; None: what they know.
    counts: JSON of how often tokens occur, by which these are chosen.
    tap_convention: of EAGLE-3 heads, "input" or "output".
    """

    paths: tuple[Path, ...] = ()
    quant: str | None = None
    draft_vocab: int | None = None
    counts: Path | None = None
    tap_convention: str | None = None


NO_HEADS = HeadOptions()


def read(options: HeadOptions, target: WeightSet) -> list[Head]:
    """The heads as they will be stored.

    Raises UsageError for options without a head they concern, and what the reader
    raises.
    """
    given = {
        "--draft-vocab": options.draft_vocab,
        "--head-quant": options.quant,
        "--tap-convention": options.tap_convention,
    }
    for option, value in given.items():
        if value is not None and not options.paths:
            raise UsageError(f"{option} {value}: there is no --head")
    if options.quant is not None and options.quant not in QUANTS:
        raise UsageError(
            f"--head-quant {options.quant}: expected one of {', '.join(QUANTS)}"
        )
    counts = None
    if options.counts is not None:
        counts = read_counts(options.counts, target.config.vocab)
    heads = []
    for path in options.paths:
        convention = options.tap_convention
        head = reader.read(path, target.config, tap_convention=convention)
        if options.draft_vocab is not None:
            ids = choose_ids(head, options.draft_vocab, counts, target.eos_ids)
            head = with_vocabulary(head, ids, target)
        heads.append(share_with_target(head, target))
    if options.tap_convention is not None and all(h.kind != "eagle3" for h in heads):
        raise UsageError(
            f"--tap-convention {options.tap_convention}: no head has layer ids"
        )
    return heads


def taps(heads: Iterable[Head]) -> set[int]:
    """Hidden states that EAGLE-3 heads need of the target's graph."""
    return {tap for head in heads if head.kind == "eagle3" for tap in head.taps}


def write(
    heads: list[Head],
    directory: Path,
    target: WeightSet,
    *,
    forms: Iterable[str],
    quant: str | None,
    log: Callable[[str], None],
) -> tuple[tuple[HeadEntry, ...], tuple[WeightsEntry, ...]]:
    """Writes the heads for the containers of the target that `directory` has.

    GGUF for "gguf" and "packed"; for "onnx", whose graph must be there, graphs with the
    default tree, as deep as a head can.
    """
    has_gguf = not {"gguf", "packed"}.isdisjoint(forms)
    entries, weights = [], []
    names: set[str] = set()
    for head in heads:
        kept = None if head.origin.format == "gguf" else DEFAULT_QUANT
        wanted = quant or kept
        stem = _stem(head.kind, names)
        depth = head.heads if head.kind == "medusa" else len(onnx_head.DEFAULT_TREE[0])
        tree = onnx_head.prune(onnx_head.DEFAULT_TREE, depth)
        files = {}
        if has_gguf:
            files["gguf"] = f"{stem}.gguf"
            path = directory / files["gguf"]
            report = head_gguf.write(head, path, target=target, quant=wanted, tree=tree)
            log(_line(files["gguf"], wanted, report.n_bytes, head))
        if "onnx" in forms:
            graph = directory / TARGETS["onnx"]
            files["onnx"] = f"{stem}.onnx"
            path = directory / files["onnx"]
            is_medusa = head.kind == "medusa"
            draw = onnx_head.write_medusa if is_medusa else onnx_head.write_tree
            made = draw(head, path, tree=tree, quant=wanted, target=graph)
            log(_line(path.name, wanted, made.bytes, head))
            if not is_medusa:
                files["onnx_step"] = f"{stem}-step.onnx"
                step = directory / files["onnx_step"]
                made = onnx_head.write_step(
                    head, step, quant=wanted, target=graph, twin=path
                )
                log(_line(step.name, wanted, made.bytes, head))
        entries.append(
            HeadEntry(
                kind=head.kind,
                name=head.name or head.origin.source,
                files=files,
                quant=wanted or "",
                draft_vocab=head.draft_vocab,
                taps=head.taps,
            )
        )
        weights += [
            WeightsEntry(
                path.name,
                head.origin.licence,
                head.origin.source,
                head.origin.sha256,
            )
            for path in sorted(directory.glob(f"{stem}[.-]*"))
        ]
    return tuple(entries), tuple(weights)


def _stem(kind: str, names: set[str]) -> str:
    """draft-eagle3, draft-eagle3.2, ..."""
    count = 1
    while (stem := f"draft-{kind}" + f".{count}" * (count > 1)) in names:
        count += 1
    names.add(stem)
    return stem


def _line(name: str, quant: str | None, n_bytes: int, head: Head) -> str:
    return (
        f"{name:<24}{quant or 'as it was':<12}{n_bytes / 1e6:9.1f} MB   drafts "
        f"{head.draft_vocab} of {head.vocab} tokens"
    )
