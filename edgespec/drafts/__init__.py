"""Who drafts: n-grams, which live in the C core, a draft head, or both at once.

`available` says which heads a model has, `conversion` makes one of any published
layout, `head` loads it into the C core. Where the target is an ONNX graph, `graphs`
runs the head and `growing` makes trees of what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.drafts.graphs import EagleGraphs, MedusaGraph
    from edgespec.drafts.head import HeadDraft

    # In the C core, or of graphs beside a target graph.
    AnyHead: TypeAlias = HeadDraft | EagleGraphs | MedusaGraph

NGRAM = "+ngram"
# By --draft word: the kinds of heads it means, best first.
KINDS = {
    "eagle": ("eagle3", "eagle"),
    "medusa": ("medusa",),
    "model": ("model",),
}
EXPECTED = "auto, none, ngram, eagle, medusa, model; a head also with +ngram or :PATH"


@dataclass(frozen=True, slots=True)
class Choice:
    """A --draft option, read.

    word: auto | none | ngram | eagle | medusa | model.
    source: of a head, its name among those the model has, or a path; None: the first.
    with_ngrams: n-grams draft, alone or beside a head.
    """

    word: str
    source: str | None = None
    with_ngrams: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the heads that would do; empty where none is to draft."""
        return KINDS.get("eagle" if self.word == "auto" else self.word, ())

    @property
    def needs_head(self) -> bool:
        """Whether it is an error when there is none: "auto" does without."""
        return self.word in KINDS

    @property
    def core(self) -> str:
        """The C core's own draft: "ngram" or "none"."""
        return "ngram" if self.with_ngrams else "none"


def parse_draft(option: str) -> Choice:
    """Reads a --draft option.

    auto is the EAGLE head, where there is one and it costs the backend no second copy
    of the model, together with n-grams; eagle, medusa and model are a head alone, with
    "+ngram" behind the word together with n-grams; ":PATH" or ":NAME" says which.

    Raises UsageError for anything else.
    """
    name, colon, source = option.partition(":")
    word = name.removesuffix(NGRAM)
    if word in KINDS and bool(colon) == bool(source):
        return Choice(word, source or None, name.endswith(NGRAM))
    if option in ("auto", "ngram", "none"):
        return Choice(option, None, option != "none")
    raise UsageError(f"draft: expected {EXPECTED}, got {option!r}")


def check_verify(option: str) -> None:
    """Raises UsageError for a verification rule that our drafts cannot use."""
    if option != "coupled":
        raise UsageError(
            f"verify: {option!r} needs a draft that samples its children and knows "
            "their probabilities; n-grams and heads draft what is likeliest, and are "
            "verified with coupled"
        )
