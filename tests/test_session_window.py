"""Conversations longer than the model's positions, on a target that sees a window."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.config import Sampling, Stopping
from edgespec.conversation import Conversation
from edgespec.errors import ContextError, UsageError
from edgespec.sliding import Window
from edgespec.targets.base import Capabilities
from tests.toy import Drafter, ToyTarget, session

LIMIT, WIDTH, SINKS = 96, 24, 4
SLACK = 16  # rows beyond the window that a ring still holds
GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=0.8, top_p=1.0, seed=7)


class WindowedToy(ToyTarget):
    """Sees the first SINKS and the last WIDTH tokens; knows positions; forgets rows."""

    def __init__(self, **options) -> None:
        super().__init__(context=LIMIT, order=WIDTH, **options)
        self.capabilities = dataclasses.replace(
            self.capabilities, window=WIDTH, sinks=SINKS
        )
        self._longest = 0
        self.refusals = 0

    def row(self, sequence: list[int]) -> np.ndarray:
        position = len(sequence)
        sinks = sequence[: max(0, min(SINKS, position - WIDTH))]
        marks = [position, *sinks, -1]
        # Hashed as a whole: a row that sees too much or too little says something else.
        self._order = len(marks) + WIDTH
        return super().row([*marks, *sequence[-WIDTH:]])

    def truncate(self, length: int) -> None:
        is_lost = self._longest - SLACK > length > 0
        if is_lost and self._longest > WIDTH + SINKS + SLACK:
            self.refusals += 1
            raise ContextError("overwritten")
        super().truncate(length)
        self._longest = length

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        logits = super().prefill(tokens)
        self._longest = max(self._longest, self.length)
        return logits

    def commit(self, rows: np.ndarray) -> None:
        super().commit(rows)
        self._longest = max(self._longest, self.length)


def opened(right: float | None = None):
    """A session whose drafts are right at this rate; None: n-gram."""
    target = WindowedToy()
    if right is None:
        return session(target)
    return session(target, drafter=Drafter(target, right=right))


def reply(made, prompt: Sequence[int], sampling: Sampling, n: int = 400):
    notices, tokens = [], []
    for delta in made.generate(
        list(prompt), sampling=sampling, stopping=Stopping(max_tokens=n)
    ):
        if delta.notice:
            notices.append((len(tokens), delta.notice))
        tokens += delta.tokens
    return made.last_reply, notices


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", [None, 0.0, 0.6, 1.0])
def test_c01_speculation_changes_nothing_beyond_the_positions(
    right: float | None, sampling: Sampling
) -> None:
    prompt = range(40, 90)
    made = opened(right)
    made.is_speculating = False
    plain, told = reply(made, prompt, sampling)
    assert plain.finish_reason == "length"
    assert len(plain.tokens) == 400
    # 50 + 47 tokens fill the positions and one more; each time after, 68 do.
    assert [at for at, _ in told] == [47 + 68 * i for i in range(len(told))]
    assert len(told) == 6
    assert "position 96, the model's last: the 29 tokens still seen" in told[0][1]
    for _ in range(2):
        made.is_speculating = True
        spec, retold = reply(made, prompt, sampling)
        assert spec.tokens == plain.tokens
        assert len(retold) == len(told)
    assert right != 1.0 or spec.stats.accepted > 100


def test_each_reply_starts_where_the_rows_allow() -> None:
    """Rows that the window has overwritten are evaluated again, and only they."""
    made = opened()
    target = made.target
    first, _ = reply(made, range(40, 60), GREEDY, 60)
    again, _ = reply(made, range(40, 60), GREEDY, 60)
    assert target.refusals == 1
    assert again.tokens == first.tokens
    assert again.evaluated_tokens == 20
    longer = [*range(40, 60), *first.tokens]
    more, _ = reply(made, longer, GREEDY, 5)
    assert more.evaluated_tokens == 1
    cold = opened()
    assert reply(cold, longer, GREEDY, 5)[0].tokens == more.tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_c04_every_turn_of_a_long_chat_equals_a_cold_one(sampling: Sampling) -> None:
    made = opened(0.6)
    chat = Conversation(
        made, system="Be brief.", sampling=sampling, stopping=Stopping(max_tokens=24)
    )
    total = 0
    for turn in range(20):
        for _ in chat.ask(f"turn {turn}?"):
            pass
        warm = chat.last_reply
        total += warm.evaluated_tokens
        cold = opened()
        cold.is_speculating = False
        stream = cold.chat(
            chat.messages[:-1],
            sampling=sampling,
            stopping=Stopping(max_tokens=24),
            memory=dataclasses.replace(chat.memory),
        )
        tokens = [token for delta in stream for token in delta.tokens]
        assert tuple(tokens) == warm.tokens
        assert stream.prompt_tokens == warm.prompt_tokens <= LIMIT
    assert chat.memory.evicted > 5 * LIMIT
    assert chat.memory.evicted % (LIMIT - WIDTH - SINKS) == 0
    assert chat.memory.dropped == 0
    # Far less than every turn from the start.
    assert total < 20 * (WIDTH + SINKS + 30)


def test_a_prompt_beyond_the_positions_is_refused_by_generate_only() -> None:
    made = opened()
    with pytest.raises(ContextError, match="97 tokens"):
        made.generate([40] * 97)
    told = [
        delta.notice
        for delta in made.chat(
            [{"role": "user", "content": "x" * 200}],
            sampling=GREEDY,
            stopping=Stopping(max_tokens=2),
        )
        if delta.notice
    ]
    assert told == [
        "the conversation is longer than the model's 96 positions: "
        "136 tokens behind the first 4 were left out"
    ]


def test_a_target_without_a_window_keeps_the_context() -> None:
    made = session(ToyTarget(context=64))
    assert made.window is None
    done = made.complete([40] * 60, sampling=GREEDY)
    assert done.finish_reason == "context"
    assert isinstance(made.target.capabilities, Capabilities)


def test_window_is_read_off_the_target() -> None:
    assert opened().window == Window(LIMIT, WIDTH, SINKS)
    with pytest.raises(UsageError):
        opened().generate([])
