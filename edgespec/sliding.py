"""A conversation longer than a model's positions, for a target that sees a window.

The target's positions only grow, and end at the model's limit. There the tokens still
seen - the sinks and the window - are read anew as a short prompt, and the conversation
goes on behind them. What is left out depends on the length of the conversation alone,
never on where a round happened to end, so that speculation changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.generation import Refilled


@dataclass(frozen=True, slots=True)
class Window:
    """What a target sees: `sinks` first tokens and the last `width`, up to `limit`."""

    limit: int  # positions; more than sinks + width
    width: int
    sinks: int

    def dropped(self, length: int) -> int:
        """Tokens left out behind the sinks of a conversation of so many tokens."""
        stride = self.limit - self.sinks - self.width
        excess = max(0, length - self.limit)
        return -(-excess // stride) * stride

    def kept(self, ids: Sequence[int]) -> list[int]:
        """The tokens that stand for a whole conversation."""
        return [*ids[: self.sinks], *ids[self.sinks + self.dropped(len(ids)) :]]


class Sliding:
    """One reply to a whole conversation `ids`, however long."""

    def __init__(self, window: Window, ids: Sequence[int]) -> None:
        self._window, self._ids = window, list(ids)
        self.prompt = window.kept(ids)
        self.evicted = window.dropped(len(ids))

    @property
    def notice(self) -> str:
        """What a prompt has to tell that is not the whole conversation."""
        if not self.evicted:
            return ""
        return (
            f"the conversation is longer than the model's {self._window.limit} "
            f"positions: {self.evicted} tokens behind the first {self._window.sinks} "
            "were left out"
        )

    def refill(self, reply: list[int]) -> Refilled:
        """For a reply that reaches the last position."""
        prompt = self._window.kept([*self._ids, *reply])
        return Refilled(
            prompt,
            f"position {self._window.limit}, the model's last: the {len(prompt)} "
            "tokens still seen were read anew",
        )
