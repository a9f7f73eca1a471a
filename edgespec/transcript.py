"""A reply taking shape: tokens in, pieces out that can no longer change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from edgespec.chat import ThinkSplitter
from edgespec.reply import Delta, TokenLogprobs
from edgespec.text import StopMatcher, Utf8Stream


class Spelling(Protocol):
    """The part of a tokenizer a transcript needs."""

    def text_bytes(self, token: int) -> bytes: ...


class Transcript:
    """Holds back what could still become a stop string or half a character.

    Tokens are released together with their text. When a stop string completes, text,
    tokens and logprobs all end there: the last token kept is the last one that begins
    before the stop.
    """

    def __init__(
        self, spelling: Spelling, stops: Iterable[str], *, is_thinking: bool = False
    ) -> None:
        self._spelling = spelling
        self._stops = StopMatcher(stops)
        self._utf8 = Utf8Stream()
        self._splitter = ThinkSplitter(is_thinking)
        self._held: list[tuple[int, bool, TokenLogprobs | None, int]] = []
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._pushed = 0  # bytes
        self._shown = 0  # bytes
        self.tokens: list[int] = []  # released
        self.logprobs: list[TokenLogprobs] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All the text released so far, thinking left out."""
        return "".join(self._text)

    @property
    def thinking(self) -> str:
        """The <think> sections released so far."""
        return "".join(self._thoughts)

    def push(
        self,
        token: int,
        is_drafted: bool = False,
        logprob: TokenLogprobs | None = None,
        *,
        is_silent: bool = False,
    ) -> str:
        """Takes one token, returns text that is safe now; `is_stopped` may become true.

        is_silent: the token has no text, whatever its spelling (end of sequence).
        """
        if self.is_stopped:
            return ""
        data = b"" if is_silent else self._spelling.text_bytes(token)
        self._held.append((token, is_drafted, logprob, self._pushed))
        self._pushed += len(data)
        safe = self._stops.push(data)
        self._shown += len(safe)
        text = self._utf8.push(safe)
        if self._stops.stop is not None:
            self.is_stopped = True
            n_kept = max(0, (self._stops.kept or 0) - len(self.tokens))
            del self._held[n_kept:]
            text += self._utf8.flush()
        return text

    def release(self, text: str, *, is_last: bool = False) -> list[Delta]:
        """Deltas of this text and of the tokens that cannot be cut any more."""
        pieces = self._splitter.push(text)
        if is_last:
            pieces += self._splitter.flush()
        everything = is_last or self.is_stopped or self._shown == self._pushed
        n = 0
        while n < len(self._held) and (everything or self._held[n][3] < self._shown):
            n += 1
        free, self._held = self._held[:n], self._held[n:]
        tokens = tuple(token for token, *_ in free)
        drafted = tuple(is_drafted for _, is_drafted, *_ in free)
        logprobs = tuple(entry for _, _, entry, _ in free if entry is not None)
        self.tokens += tokens
        self.logprobs += logprobs
        if not pieces and tokens:
            pieces = [("", False)]
        deltas = []
        for i, (piece, is_thinking) in enumerate(pieces):
            (self._thoughts if is_thinking else self._text).append(piece)
            own = (tokens, drafted, logprobs) if i == 0 else ((), (), ())
            deltas.append(Delta(piece, *own, thinking=is_thinking))
        return deltas

    def finish(self) -> list[Delta]:
        """The end: everything held back. Half a character becomes U+FFFD."""
        text = ""
        if not self.is_stopped:
            held = self._stops.flush()
            self._shown += len(held)
            text = self._utf8.push(held) + self._utf8.flush()
        return self.release(text, is_last=True)
