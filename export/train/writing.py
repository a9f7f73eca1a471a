"""The target writes: many dialogues at once, their next tokens in one pass.

A dialogue is a generator. It yields an Ask and is sent the reply; it yields a Keep when
the sequence in front of it is worth keeping. Which tokens it gets depends on nothing
but itself: rows have the same bits in any batch, and every dialogue draws from a
generator of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec._native import NativeBatch, NativeModel, NativeTargetState
from edgespec.tree.topology import MAX_ROWS

GRAM, MOST_TIMES = 16, 3  # a reply ends where so many tokens come so many times
AHEAD = 4 * MAX_ROWS  # dialogues in work or waiting for an earlier one
_LARGEST = 65504.0  # of float16
_BLOCK = 256  # weights summed before one is looked for among them


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: what the target is to continue, and how."""

    prompt: list[int]
    limit: int  # most tokens
    temperature: float
    stops: frozenset[int]
    is_reply: bool = True  # the assistant's words, which drafts are to learn
    continues: bool = False  # earlier replies in the prompt are the assistant's too


@dataclass(frozen=True, slots=True)
class Reply:
    """What came, the end token included."""

    tokens: list[int]
    is_finished: bool  # at an end token, not cut


@dataclass(frozen=True, slots=True)
class Keep:
    """The wish to keep the last prompt and its reply."""

    kind: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Sequence:
    """One conversation as the target read and wrote it. Its last row has no states."""

    kind: str
    temperature: float
    tokens: NDArray[np.int32]  # (n)
    written: NDArray[np.bool_]  # (n) whether the target wrote the token as a reply
    top: NDArray[np.int32]  # (n) its likeliest next token; -1: not known
    states: NDArray[np.float16]  # (n, taps, hidden)

    @property
    def prompt(self) -> NDArray[np.int32]:
        """What came before the first reply."""
        return self.tokens[: int(np.argmax(self.written))]


Dialogue = Generator[Ask | Keep, Reply | None, None]
MakeDialogue = Callable[[int, np.random.Generator], Dialogue]


class Writer:
    """Runs dialogues on a model of the native engine.

    Args:
        taps: hidden states to keep of every token.
        context: most tokens of a sequence.
        seats: dialogues at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int,
        taps: tuple[int, ...],
        context: int,
        seed: int,
        seats: int = MAX_ROWS,
    ) -> None:
        self._model = NativeModel(path, threads=threads)
        self._model.load()
        info = self._model.info
        self._seed = seed
        self._batch = NativeBatch()
        self._logits = np.empty((MAX_ROWS, info.vocab), np.float32)
        context = min(context, info.max_position)
        self._seats = [_Seat(self._model, context, taps) for _ in range(seats)]

    def run(
        self, make: MakeDialogue, first: int, last: int | None = None
    ) -> Iterator[list[Sequence]]:
        """What dialogues first, first + 1, ... (last excluded) keep, in this order."""
        following, due = first, first
        finished: dict[int, list[Sequence]] = {}
        while last is None or due < last:
            for seat in self._seats:
                while seat.is_free and following < due + AHEAD and following != last:
                    random = np.random.default_rng([self._seed, following])
                    seat.start(following, make(following, random), random)
                    following += 1
                    self._settle(seat, None, finished)
            active = [seat for seat in self._seats if not seat.is_free]
            if active:
                self._step(active, finished)
            while due in finished:
                yield finished.pop(due)
                due += 1

    def close(self) -> None:
        """Frees the model."""
        for seat in self._seats:
            seat.state.close()
        self._model.close()

    def _step(self, active: list[_Seat], finished: dict[int, list[Sequence]]) -> None:
        """Every active dialogue gets its next token."""
        logits = self._logits[: len(active)]
        tokens = [int(seat.tokens[seat.length]) for seat in active]
        self._batch.step([seat.state for seat in active], tokens, logits)
        for seat in active:
            seat.keep_states()
        for seat, token in zip(active, _chosen(active, logits), strict=True):
            reply = seat.add(token)
            if reply is not None:
                self._settle(seat, reply, finished)

    def _settle(
        self, seat: _Seat, reply: Reply | None, finished: dict[int, list[Sequence]]
    ) -> None:
        """Hands a reply over and begins the next one; the seat is free at the end."""
        while seat.advance(reply):
            logits = self._logits[:1]
            reply = seat.read(logits[0]) or seat.add(_chosen([seat], logits)[0])
            if reply is None:
                return
        finished[seat.number] = seat.done


class _Seat:
    """One conversation's place at the target, and the dialogue that has it."""

    def __init__(self, model: NativeModel, context: int, taps: tuple[int, ...]) -> None:
        self.state = NativeTargetState(model, context=context)
        self.state.set_taps(taps)
        self.tokens = np.zeros(context, np.int32)
        self.top = np.zeros(context, np.int32)
        self._written = np.zeros(context, np.bool_)
        self._states = np.zeros((context, len(taps), model.info.hidden), np.float16)
        self.length = 0  # tokens with states
        self.end = 0  # tokens
        self.number = -1
        self.done: list[Sequence] = []
        self._dialogue: Dialogue | None = None

    def start(
        self, number: int, dialogue: Dialogue, random: np.random.Generator
    ) -> None:
        self.number, self._dialogue, self._random = number, dialogue, random
        self.done = []

    @property
    def is_free(self) -> bool:
        return self._dialogue is None

    @property
    def temperature(self) -> float:
        return self._ask.temperature

    def advance(self, reply: Reply | None) -> bool:
        """Whether the dialogue, told this, asks for more; else the seat is free."""
        assert self._dialogue is not None
        try:
            while isinstance(wish := self._dialogue.send(reply), Keep):
                self.done.append(self._copy(wish))
                reply = None
        except StopIteration:
            self._dialogue = None
            return False
        self._ask = wish
        self._reply: list[int] = []
        self._grams: Counter[tuple[int, ...]] = Counter()
        return True

    def read(self, logits: NDArray[np.float32]) -> Reply | None:
        """Reads the prompt; a reply at once when there is no room for one."""
        prompt = np.array(self._ask.prompt, np.int32)
        n = len(prompt)
        if not 0 < n < len(self.tokens):
            return Reply([], is_finished=False)
        old = min(self.end, n)
        same = int(np.argmin(np.append(self.tokens[:old] == prompt[:old], False)))
        flagged = same if self._ask.continues else 0
        self._written[flagged:n] = False
        self.top[flagged:n] = -1
        self.tokens[:n] = prompt
        self.length = min(same, self.length, n - 1)
        self.state.truncate(self.length)
        while self.length < n:
            chunk = prompt[self.length : self.length + MAX_ROWS]
            is_last = self.length + len(chunk) == n
            self.state.prefill(chunk, logits if is_last else None)
            self.keep_states()
        self.end = n
        return None

    def keep_states(self) -> None:
        """Takes over what the target kept of the rows just forwarded."""
        kept = self.state.read_taps()
        np.clip(kept, -_LARGEST, _LARGEST, out=kept)
        self._states[self.length : self.length + len(kept)] = kept
        self.length += len(kept)

    def uniform(self) -> float:
        return self._random.random() if self.temperature else 0.0

    def add(self, token: int) -> Reply | None:
        """Adds a token to the reply; the reply when it ends with it."""
        ask, reply = self._ask, self._reply
        self.tokens[self.end] = token
        self.top[self.end] = -1
        self._written[self.end] = ask.is_reply
        self.end += 1
        reply.append(token)
        if token in ask.stops:
            return Reply(reply, is_finished=True)
        gram = tuple(reply[-GRAM:])
        self._grams[gram] += 1
        if len(gram) == GRAM and self._grams[gram] == MOST_TIMES:
            self.end -= GRAM
            self.length = min(self.length, self.end)
            return Reply(reply[:-GRAM], is_finished=False)
        if len(reply) >= ask.limit or self.end >= len(self.tokens):
            return Reply(reply, is_finished=False)
        return None

    def _copy(self, wish: Keep) -> Sequence:
        n = self.end
        states = self._states[:n].copy()
        states[n - 1] = 0
        top = self.top[:n].copy()
        top[n - 1] = -1
        return Sequence(
            wish.kind,
            wish.temperature,
            self.tokens[:n].copy(),
            self._written[:n].copy(),
            top,
            states,
        )


def _chosen(seats: list[_Seat], logits: NDArray[np.float32]) -> list[int]:
    """Each seat's next token from its row; the row's likeliest is noted."""
    best = logits.argmax(axis=1)
    chosen: list[int] = best.tolist()
    warm = [row for row, seat in enumerate(seats) if seat.temperature > 0]
    for row, seat in enumerate(seats):
        seat.top[seat.end - 1] = best[row]
    if warm:
        temperatures = np.array([seats[row].temperature for row in warm], np.float32)
        drawn = np.array([seats[row].uniform() for row in warm])
        tokens = draw(logits[warm], temperatures, drawn)
        for row, token in zip(warm, tokens.tolist(), strict=True):
            chosen[row] = token
    return chosen


def draw(
    logits: NDArray[np.float32],
    temperatures: NDArray[np.float32],
    uniforms: NDArray[np.float64],
) -> NDArray[np.int64]:
    """A token of every row (n, vocab): where the sum of its softmax passes a uniform.

    A row's token is its own affair: the same in any batch.
    """
    weights = logits - logits.max(axis=1, keepdims=True)
    weights /= temperatures[:, None]
    np.exp(weights, out=weights)
    begins = np.arange(0, weights.shape[1], _BLOCK)
    blocks = np.add.reduceat(weights, begins, axis=1).astype(np.float64)
    tokens = np.empty(len(logits), np.int64)
    for row, block in enumerate(blocks):
        sums = np.cumsum(block)
        goal = uniforms[row] * sums[-1]
        at = int(np.searchsorted(sums, goal, side="right"))
        at = min(at, int(np.flatnonzero(block)[-1]))
        begin = at * _BLOCK
        within = np.cumsum(weights[row, begin : begin + _BLOCK], dtype=np.float64)
        left = goal - (sums[at] - block[at])
        place = int(np.searchsorted(within, left, side="right"))
        last = int(np.flatnonzero(np.diff(within, prepend=0.0))[-1])
        tokens[row] = begin + min(place, last)
    return tokens
