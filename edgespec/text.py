"""Token bytes to text a user can see: incremental UTF-8 and stop strings."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterable

from edgespec.errors import UsageError


class Utf8Stream:
    """Decodes bytes as they come; every piece returned is valid Unicode.

    Half a character is held back until its rest arrives. Bytes that can never become a
    character, and what is incomplete at `flush`, turn into U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end: what is still held back. The stream can be used anew afterwards."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopMatcher:
    """Finds the first stop string in a stream of tokens.

    Matching works on bytes, so it does not depend on how the text falls into tokens or
    blocks: the stop whose last byte comes first wins, the longest one if several end
    there. Bytes that could still become part of a stop are held back.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        try:
            self._stops = [(stop, stop.encode()) for stop in stops]
        except UnicodeEncodeError as error:
            raise UsageError(
                f"stop: expected valid Unicode text, got {error.object!r}"
            ) from None
        if any(not data for _, data in self._stops):
            raise UsageError("stop: expected a string of at least one character")
        self._longest = max((len(data) for _, data in self._stops), default=0)
        self._held = b""
        self._starts: list[int] = []  # offset of every token's first byte
        self._seen = 0
        self.stop: str | None = None  # the string that matched
        self.kept: int | None = None  # once stopped: tokens that belong to the reply

    def push(self, data: bytes) -> bytes:
        """Takes the bytes of one token, returns those that are safe to show.

        After a match `kept` counts the tokens pushed that begin before the stop string,
        so a token that holds the end of the shown text and the start of the stop is
        kept. The bytes returned then end where the stop begins. Further tokens are
        ignored.
        """
        if self.stop is not None:
            return b""
        self._starts.append(self._seen)
        self._seen += len(data)
        held = self._held + data
        origin = self._seen - len(held)
        found = []
        for stop, needle in self._stops:
            at = held.find(needle)
            if at >= 0:
                found.append((at + len(needle), at, stop))
        if found:
            _, at, self.stop = min(found)
            self.kept = bisect_left(self._starts, origin + at)
            self._held = b""
            return held[:at]
        safe = len(held) - self._undecided(held)
        self._held = held[safe:]
        return held[:safe]

    def flush(self) -> bytes:
        """The end without a match: what was held back."""
        held, self._held = self._held, b""
        return held

    def _undecided(self, held: bytes) -> int:
        """Length of the longest tail that begins some stop."""
        for size in range(min(len(held), self._longest - 1), 0, -1):
            tail = held[-size:]
            if any(needle.startswith(tail) for _, needle in self._stops):
                return size
        return 0
