"""How a conversation fits the context, and which tokens stand for old replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgespec.generation import Refilled

if TYPE_CHECKING:
    from edgespec.generation import Making

Message = Mapping[str, Any]

# Dropping down to this share of the context at once keeps later turns from dropping
# again.
KEPT_SHARE = 0.75
STAND_IN = "x"


@dataclass(slots=True)
class Memory:
    """What a conversation remembers beside its messages. One per conversation."""

    dropped: int = 0  # messages left out after the system turns
    evicted: int = 0  # their tokens, which still count in the index of the noise
    replies: dict[int, tuple[str, list[int]]] = field(default_factory=dict)

    def tokens_of(self, index: int, content: object) -> list[int] | None:
        """The tokens a reply was made of, when it still says the same."""
        said, tokens = self.replies.get(index, (None, []))
        return tokens if tokens and said == content else None


class Excerpt:
    """The messages of one call to Session.chat, and how to make them shorter.

    A reply re-encoded from its text need not give the tokens it was made of, so the
    tokens themselves are put where the template puts the text. Where they end is found
    by the end-of-sequence token the template closes a turn with; without one the text
    is encoded.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        memory: Memory,
        *,
        render: Callable[[list[Message]], list[int]],
        eos: Sequence[int],
        context: int,
    ) -> None:
        self.memory = memory
        self.notice = ""
        self._messages = list(messages)
        self._render = render
        self._eos = frozenset(eos)
        self._context = context
        self._start = 0  # messages before it are system turns and always kept
        while self._start < len(messages) and self._role(self._start) == "system":
            self._start += 1
        if self._start + memory.dropped > self._last_question():
            memory.dropped = memory.evicted = 0

    def fit(self) -> list[int]:
        """The prompt, without as many of the oldest turns as its length demands."""
        ids = self.encode()
        if len(ids) <= self._context:
            return ids
        refilled = self._shorten([], len(ids))
        if refilled is None:
            return ids
        self.notice = refilled.notice
        self.memory.evicted += len(ids) - len(refilled.prompt)
        return list(refilled.prompt)

    def refill(self, reply: list[int]) -> Refilled | None:
        """For a context that fills up during the reply."""
        return self._shorten(reply, self._context + 1)

    def keep(self, making: Making) -> None:
        """Remembers the tokens of a reply that has ended."""
        reply = making.reply
        self.memory.evicted = making.evicted
        tokens = list(reply.tokens)
        if tokens and tokens[-1] in self._eos:
            tokens.pop()
        if not reply.thinking:
            self.memory.replies[len(self._messages)] = (reply.text, tokens)

    def encode(self) -> list[int]:
        """Ids of the messages kept, ending in the opening of the assistant's turn."""
        first = self._start + self.memory.dropped
        kept = [*range(self._start), *range(first, len(self._messages))]
        known = {
            place: tokens
            for place, index in enumerate(kept)
            if self._role(index) == "assistant"
            and (
                tokens := self.memory.tokens_of(index, self._messages[index]["content"])
            )
        }
        messages = [
            {**self._messages[index], "content": STAND_IN}
            if place in known
            else self._messages[index]
            for place, index in enumerate(kept)
        ]
        ids = self._render(messages)
        result: list[int] = []
        done = 0
        for place, tokens in known.items():
            opening = self._render(messages[:place])
            n = len(opening)
            closing = next((i for i in range(n, len(ids)) if ids[i] in self._eos), None)
            if ids[:n] != opening or closing is None or n < done:
                return self._render([self._messages[index] for index in kept])
            result += [*ids[done:n], *tokens]
            done = closing
        return result + ids[done:]

    def _shorten(self, reply: list[int], length: int) -> Refilled | None:
        """Drops oldest turns until there is room; None when none can go."""
        before = self.memory.dropped
        ids: list[int] = []
        while self._drop_turn():
            ids = self.encode() + reply
            if len(ids) <= KEPT_SHARE * self._context:
                break
        n_dropped = self.memory.dropped - before
        if not n_dropped or len(ids) > self._context:
            self.memory.dropped = before
            return None
        return Refilled(
            ids,
            f"context of {self._context} tokens full: the oldest {n_dropped} messages "
            f"({length - len(ids)} tokens) were dropped",
        )

    def _drop_turn(self) -> bool:
        """Drops the oldest question with its answers, never the last question."""
        last = self._last_question()
        index = self._start + self.memory.dropped + 1
        while index < last and self._role(index) != "user":
            index += 1
        if index > last:
            return False
        self.memory.dropped = index - self._start
        return True

    def _last_question(self) -> int:
        for index in range(len(self._messages) - 1, -1, -1):
            if self._role(index) == "user":
                return index
        return self._start

    def _role(self, index: int) -> object:
        return self._messages[index].get("role")
