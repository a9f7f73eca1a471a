"""The draft heads a model has: its bundle's own, and those that come with edgespec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgespec import models
from edgespec.bundle_files import Bundle, digest_of
from edgespec.drafts import KINDS, Choice
from edgespec.errors import FormatError, UsageError
from edgespec.gguf_model import GGUFModel
from edgespec.manifest import TARGETS

WORDS = {
    "eagle": "an EAGLE head",
    "medusa": "a Medusa head",
    "model": "a small model",
}


@dataclass(frozen=True, slots=True)
class Available:
    """A head by its kind (eagle3, eagle, medusa or model) and name."""

    kind: str
    name: str
    size: int  # bytes of its file
    origin: str  # "bundle" | "edgespec"
    path: Callable[[], Path]  # its file, checked: a GGUF or, for onnx, a graph
    step: Callable[[], Path] | None = None  # an EAGLE head's second graph

    @property
    def word(self) -> str:
        """What --draft calls its kind."""
        return next(word for word, kinds in KINDS.items() if self.kind in kinds)


def available(bundle: Bundle | GGUFModel, form: str = "gguf") -> list[Available]:
    """Heads for --draft, the bundle's own first.

    Heads come with edgespec for known weights. They are those of every bundle made of
    that file, and of the file itself wherever it lies.

    Args:
        form: "gguf" or "onnx", graphs, which only bundles have.
    """
    found = []
    for head in bundle.manifest.heads:
        file, step = head.files.get(form), head.files.get("onnx_step")
        if file is not None:
            name = file.removeprefix("draft-").removesuffix(f".{form}")
            size = sum(
                entry.size
                for other, entry in bundle.manifest.files.items()
                if other == file or other.startswith(f"{file}.")
            )
            second = None
            if form == "onnx" and step is not None:
                second = partial(bundle.path_of, step)
            path = partial(bundle.path_of, file)
            found.append(Available(head.kind, name, size, "bundle", path, second))
    if form != "gguf":
        return found
    for card in models.cards().values():
        if card.drafts and _is_made_of(bundle, card.file):
            found += [
                Available(
                    draft.kind,
                    draft.name,
                    draft.size,
                    "edgespec",
                    partial(_shipped, card.draft_path(draft), draft),
                )
                for draft in card.drafts
            ]
    return found


def find(
    bundle: Bundle | GGUFModel, choice: Choice, form: str = "gguf"
) -> Available | Path | None:
    """What a choice means for a model; a path is one the user gave.

    Names come first; "./NAME" is always a path. None: "auto", and there is no head.

    Raises UsageError naming what there is when there is no such head.
    """
    heads = available(bundle, form)
    fitting = [head for head in heads if head.kind in choice.kinds]
    fitting.sort(key=lambda head: choice.kinds.index(head.kind))
    if choice.source is None:
        if not fitting and choice.needs_head:
            raise UsageError(
                f"draft: {bundle.manifest.name} has no {choice.word} draft; "
                f"{_list(heads)}; {_remedy(choice, form)}"
            )
        return fitting[0] if fitting else None
    for head in fitting:
        if head.name == choice.source:
            return head
    path = Path(choice.source).expanduser()
    if not path.exists():
        raise UsageError(
            f"draft: {choice.source!r} is neither a file or directory nor "
            f"{WORDS[choice.word]} of {bundle.manifest.name}; {_list(heads)}"
        )
    return path


def _remedy(choice: Choice, form: str) -> str:
    if form == "gguf":
        return f"to use {WORDS[choice.word]} of yours: --draft {choice.word}:PATH"
    return (
        "on the onnx backend a head is a graph of the bundle: export the model with "
        "--format onnx --head PATH"
    )


def _list(heads: Sequence[Available]) -> str:
    names = ", ".join(f"{head.word}:{head.name}" for head in heads)
    return f"it has {names} and ngram" if names else "it has ngram only"


def _is_made_of(bundle: Bundle | GGUFModel, file: models.CardFile) -> bool:
    known = {
        weights.sha256
        for weights in bundle.manifest.weights
        if weights.file in TARGETS.values()
    }
    if file.sha256 in known:
        return True
    if known - {None} or not isinstance(bundle, GGUFModel):
        return False
    is_alike = bundle.path.stat().st_size == file.size
    return is_alike and digest_of(bundle.path, file.sha256) == file.sha256


def _shipped(path: Path, draft: models.CardDraft) -> Path:
    advice = "reinstall edgespec"
    if not path.is_file():
        raise FormatError(f"{path}: missing; {advice}")
    size = path.stat().st_size
    if size != draft.size:
        raise FormatError(f"{path}: size: expected {draft.size}, got {size}; {advice}")
    got = digest_of(path, draft.sha256)
    if got != draft.sha256:
        raise FormatError(
            f"{path}: sha256: expected {draft.sha256}, got {got}; {advice}"
        )
    return path
