"""Whether a draft head belongs to its target: seen by what is accepted of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ENOUGH = 64  # rounds, before which nothing is said
LEAST = 0.1  # acceptance of the root's children; a head that fits has several times it


@dataclass(slots=True)
class Fit:
    """Counts what a head got right at depth 1, and says once that it is too little."""

    name: str  # as statistics call the draft
    path: Path | None = None  # the head, where it is the user's own
    has_taps: bool = False  # it is an EAGLE-3 head: it reads hidden states by number
    tried: int = 0
    held: int = 0
    is_told: bool = False

    def add(self, tried: Sequence[int], held: Sequence[int]) -> None:
        """Counts by depth of one reply."""
        if tried:
            self.tried += tried[0]
            self.held += held[0]

    def notice(self) -> str:
        """What to tell the user, "" when there is nothing, or it was told."""
        if self.is_told or self.tried < ENOUGH or self.held >= LEAST * self.tried:
            return ""
        self.is_told = True
        said = (
            f"the draft {self.name} does not fit this model: of {self.tried} rounds "
            f"{self.held} accepted its first token; the text is as without it, but "
            "comes later"
        )
        if self.path is None:
            return said
        if not self.has_taps:
            return f"{said}; was {self.path} made for this model?"
        return (
            f"{said}; if {self.path} was made for this model, its layer ids may mean "
            "the layers' other side: edgespec export MODEL -o DIR --head "
            f"{self.path} --tap-convention input|output"
        )
