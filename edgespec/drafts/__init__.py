"""Who drafts. The n-gram draft lives in the C core; other drafts have a module here."""

from __future__ import annotations

from edgespec.errors import UsageError


def native_draft(option: str) -> str:
    """The core's draft for a --draft option: "ngram" or "none"."""
    kinds = {"auto": "ngram", "ngram": "ngram", "none": "none"}
    if option not in kinds:
        raise UsageError(f"draft: expected auto, ngram or none, got {option!r}")
    return kinds[option]


def check_verify(option: str) -> None:
    """Raises UsageError for a verification rule that n-gram drafts cannot use."""
    if option != "coupled":
        raise UsageError(
            f"verify: {option!r} needs a draft that samples its children and knows "
            "their probabilities; n-gram drafts are verified with coupled"
        )
