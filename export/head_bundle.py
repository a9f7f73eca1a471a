"""The drafts of a bundle: read for its target, made small, written beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.manifest import TARGETS, HeadEntry, WeightsEntry
from edgespec_export import draft_model, head_gguf, onnx_head
from edgespec_export.draft_model import DraftModel
from edgespec_export.draft_vocab import (
    choose_ids,
    known_ids,
    read_counts,
    with_vocabulary,
)
from edgespec_export.heads import Head, share_with_target
from edgespec_export.quantize import QUANTS
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet

DEFAULT_QUANT = "q8_0"  # of heads that come as floats


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Which heads, and how.

    paths: files or directories of any layout `sources.heads` reads, or small models.
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
Draft = Head | DraftModel


def read(options: HeadOptions, target: WeightSet) -> list[Draft]:
    """The drafts as they will be stored.

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
    size, always = options.draft_vocab, target.eos_ids
    drafts: list[Draft] = []
    for path in options.paths:
        if draft_model.is_model(path):
            model = draft_model.read(path, target)
            if size is not None:
                model = draft_model.with_vocabulary(model, size, counts, always)
            drafts.append(model)
            continue
        convention = options.tap_convention
        head = reader.read(path, target.config, tap_convention=convention)
        if size is not None:
            ids = choose_ids(known_ids(head), head.vocab, size, counts, always)
            head = with_vocabulary(head, ids, target)
        drafts.append(share_with_target(head, target))
    if options.tap_convention is not None and not any(map(_has_layer_ids, drafts)):
        raise UsageError(
            f"--tap-convention {options.tap_convention}: no head has layer ids"
        )
    return drafts


def _has_layer_ids(draft: Draft) -> bool:
    return isinstance(draft, Head) and draft.kind == "eagle3"


def taps(drafts: Iterable[Draft]) -> set[int]:
    """Hidden states that EAGLE-3 heads need of the target's graph."""
    heads = [draft for draft in drafts if isinstance(draft, Head)]
    return {tap for head in heads if head.kind == "eagle3" for tap in head.taps}


def check_forms(drafts: Iterable[Draft], forms: Iterable[str]) -> None:
    """UsageError for drafts that go with no container of the target."""
    has_gguf = not {"gguf", "packed"}.isdisjoint(forms)
    for draft in drafts:
        if isinstance(draft, DraftModel) and not has_gguf:
            raise UsageError(
                f"--head {draft.weights.origin.source}: a draft model runs beside "
                "--format gguf or packed"
            )


def write(
    drafts: list[Draft],
    directory: Path,
    target: WeightSet,
    *,
    forms: Iterable[str],
    quant: str | None,
    log: Callable[[str], None],
) -> tuple[tuple[HeadEntry, ...], tuple[WeightsEntry, ...]]:
    """Writes the drafts for the containers of the target that `directory` has.

    GGUF for "gguf" and "packed"; for "onnx", whose graph must be there, graphs with the
    default tree, as deep as a head can.
    """
    entries, weights = [], []
    names: set[str] = set()
    for draft in drafts:
        origin = draft.origin
        kept = None if origin.format == "gguf" else DEFAULT_QUANT
        wanted = quant or kept
        stem = directory / _stem(draft.kind, names)
        if isinstance(draft, DraftModel):
            path = stem.with_name(f"{stem.name}.gguf")
            n_bytes = draft_model.write(draft, path, wanted).n_bytes
            written = {"gguf": (path, n_bytes)}
        else:
            written = _write_head(draft, stem, target, forms, wanted)
        for path, n_bytes in written.values():
            log(
                f"{path.name:<24}{wanted or 'as it was':<12}{n_bytes / 1e6:9.1f} MB   "
                f"drafts {draft.draft_vocab} of {target.config.vocab} tokens"
            )
        entries.append(
            HeadEntry(
                kind=draft.kind,
                name=draft.name or origin.source,
                files={form: path.name for form, (path, _) in written.items()},
                quant=wanted or "",
                draft_vocab=draft.draft_vocab,
                taps=draft.taps,
            )
        )
        weights += [
            WeightsEntry(path.name, origin.licence, origin.source, origin.sha256)
            for path in sorted(directory.glob(f"{stem.name}[.-]*"))
        ]
    return tuple(entries), tuple(weights)


def _write_head(
    head: Head, stem: Path, target: WeightSet, forms: Iterable[str], quant: str | None
) -> dict[str, tuple[Path, int]]:
    """The files of a head and their bytes, by form."""
    is_medusa = head.kind == "medusa"
    depth = head.heads if is_medusa else len(onnx_head.DEFAULT_TREE[0])
    tree = onnx_head.prune(onnx_head.DEFAULT_TREE, depth)
    files = {}
    suffixes = {"gguf": ".gguf", "onnx": ".onnx", "onnx_step": "-step.onnx"}
    paths = {form: stem.with_name(stem.name + end) for form, end in suffixes.items()}
    if not {"gguf", "packed"}.isdisjoint(forms):
        path = paths["gguf"]
        report = head_gguf.write(head, path, target=target, quant=quant, tree=tree)
        files["gguf"] = (path, report.n_bytes)
    if "onnx" in forms:
        graph = stem.with_name(TARGETS["onnx"])
        path, step = paths["onnx"], paths["onnx_step"]
        draw = onnx_head.write_medusa if is_medusa else onnx_head.write_tree
        made = draw(head, path, tree=tree, quant=quant, target=graph)
        files["onnx"] = (path, made.bytes)
        if not is_medusa:
            made = onnx_head.write_step(
                head, step, quant=quant, target=graph, twin=path
            )
            files["onnx_step"] = (step, made.bytes)
    return files


def _stem(kind: str, names: set[str]) -> str:
    """draft-eagle3, draft-eagle3.2, ..."""
    count = 1
    while (stem := f"draft-{kind}" + f".{count}" * (count > 1)) in names:
        count += 1
    names.add(stem)
    return stem
