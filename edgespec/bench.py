"""All arms in one loop: same prompts, same budget, taking turns in one process.

An arm is a method (plain decoding, trees of n-grams or of a draft head, llama.cpp's own
lookup) on a backend.
Every reply starts with an empty cache, an empty index and unmeasured costs, at
temperature 0, and ends where its model ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from edgespec.config import Sampling, Speculation, Stopping
from edgespec.engine import Engine
from edgespec.progress import Progress, silent
from edgespec.stats import resident_mb
from edgespec.verification import loop_cut

if TYPE_CHECKING:
    from edgespec.drafts import AnyHead
    from edgespec.drafts.base import Drafter
    from edgespec.engine import Step
    from edgespec.session import Session

Clock = Callable[[], float]

WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a reply stood after its prefill or a round; counts exclude the prefill."""

    wall_s: float
    clock_s: float  # by the backend's own clock
    tokens: int
    drafted: int
    accepted: int
    depth: int  # sum over the trees
    draft_s: float = 0.0  # of the rounds, spent drafting
    forward_s: float = 0.0  # and in the target's forwards


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply of one arm."""

    tokens: tuple[int, ...]
    ttft_s: float
    marks: tuple[Mark, ...]  # after the prefill, then after every round
    resident_mb: float | None = None  # of the process, its draft still in memory

    @property
    def rounds(self) -> int:
        return len(self.marks) - 1

    @property
    def gaps_s(self) -> list[float]:
        """What a reader waits from one piece of text to the next."""
        walls = [mark.wall_s for mark in self.marks]
        return [end - start for start, end in pairwise(walls)]

    def seconds_per_token(self, *, by_clock: bool) -> float | None:
        """Of the rounds, by the backend's clock or the wall's; None without rounds."""
        first, last = self.marks[0], self.marks[-1]
        if not last.tokens:
            return None
        if by_clock:
            return (last.clock_s - first.clock_s) / last.tokens
        return (last.wall_s - first.wall_s) / last.tokens

    def cut(self) -> Sample:
        """Without what follows a 16-gram's third occurrence."""
        kept = loop_cut(self.tokens)
        left = kept - 1  # the prefill emitted the first
        if left >= self.marks[-1].tokens:
            return self
        end = next(i for i, mark in enumerate(self.marks) if mark.tokens >= left)
        last = replace(self.marks[end], tokens=left)
        return replace(self, tokens=self.tokens[:kept], marks=(*self.marks[:end], last))


@dataclass(slots=True)
class Arm:
    """A method on a backend, ready to reply.

    Several arms may share a session.
    """

    method: str
    backend: str
    session: Session
    speculation: Speculation = field(default_factory=Speculation)
    drafter: Drafter | None = None
    head: AnyHead | None = None
    clock: Clock | None = None  # seconds a foreign library itself has spent so far
    by_clock: bool = False  # this arm's speed is by that clock, not the wall's

    @property
    def name(self) -> str:
        return f"{self.method} {self.backend}"

    @property
    def tree(self) -> str:
        """The --tree option; "" where there are no trees of ours."""
        is_ours = self.method != "plain" and self.drafter is None
        return self.speculation.tree if is_ours else ""


@dataclass(slots=True)
class Results:
    """What was measured, by arm, prompt and repeat."""

    arms: Sequence[Arm]
    subtasks: Sequence[str]  # of the prompts
    repeats: int
    samples: list[list[list[Sample]]]  # [arm][prompt][repeat]
    extra_mb: list[float | None]  # by arm: memory beside plain's on the same backend
    is_complete: bool = False

    def find(self, method: str, backend: str) -> int | None:
        """An arm's index."""
        for index, arm in enumerate(self.arms):
            if (arm.method, arm.backend) == (method, backend):
                return index
        return None


class Timed(Engine):
    """An engine that notes time and counts whenever tokens come out."""

    def __init__(self, *arguments: Any, clock: Clock | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.marks: list[Mark] = []
        self._clock = clock

    def begin(self, *arguments: Any, **options: Any) -> Step:
        step = super().begin(*arguments, **options)
        self._mark()
        return step

    def step(self) -> Step:
        step = super().step()
        self._mark()
        return step

    def _mark(self) -> None:
        wall = time.perf_counter()
        clock = self._clock() if self._clock else wall
        stats = self.stats
        self.marks.append(
            Mark(
                wall,
                clock,
                stats.tokens,
                stats.drafted,
                stats.accepted,
                stats.depth,
                stats.draft_seconds,
                stats.forward_seconds,
            )
        )


def reply(arm: Arm, prompt: Sequence[int], max_tokens: int) -> Sample:
    """One reply from nothing; the session is left as it was, its cache empty."""
    session = arm.session
    target, kept = session.target, session.engine
    target.truncate(0)
    engine = Timed(
        target,
        eos=kept.eos,
        speculation=arm.speculation,
        drafter=arm.drafter,
        head=arm.head,
        clock=arm.clock,
    )
    engine.is_speculating = arm.method != "plain"
    session.engine = engine
    try:
        said = session.complete(
            prompt,
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=max_tokens),
        )
        resident = resident_mb()
    finally:
        session.engine = kept
        kept.reset()
    return Sample(said.tokens, said.stats.ttft_s, tuple(engine.marks), resident)


def schedule(
    arms: int, prompts: int, repeats: int
) -> Iterator[tuple[int, int, list[int]]]:
    """(repeat, prompt, order of the arms): who goes first changes every time."""
    for repeat in range(repeats):
        for prompt in range(prompts):
            first = (repeat + prompt) % arms
            yield repeat, prompt, [(first + i) % arms for i in range(arms)]


def run(
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    *,
    subtasks: Sequence[str] = (),
    max_tokens: int,
    repeats: int,
    progress: Progress = silent,
) -> Results:
    """Every arm on every prompt, `repeats` times over.

    Ctrl-C ends it early: the arms that had their turn on a prompt are kept together,
    what came after is dropped. Before that there is nothing to keep, so it is raised.

    Args:
        arms: plain of every backend among them, before the backend's other methods.
        prompts: token ids.
        subtasks: of the prompts, "" where they have none.
    """
    results = Results(
        arms,
        subtasks or [""] * len(prompts),
        repeats,
        [[[] for _ in prompts] for _ in arms],
        _warm_up(arms, max(prompts, key=len), max_tokens, progress),
    )
    done, total = 0, len(arms) * len(prompts) * repeats
    progress("measure", 0, total)
    try:
        for _, prompt, order in schedule(len(arms), len(prompts), repeats):
            turn: dict[int, Sample] = {}
            for index in order:
                turn[index] = reply(arms[index], prompts[prompt], max_tokens)
                done += 1
                progress("measure", done, total)
            for index, sample in turn.items():
                results.samples[index][prompt].append(sample)
        results.is_complete = True
    except KeyboardInterrupt:
        if done < len(arms):
            raise
    return results


def _warm_up(
    arms: Sequence[Arm], prompt: Sequence[int], max_tokens: int, progress: Progress
) -> list[float | None]:
    """One short reply per arm; the memory that each added to its backend's plain.

    A head's weights are in memory before that.
    """
    added: list[float | None] = []
    for index, arm in enumerate(arms):
        progress("warm up", index, len(arms))
        before = resident_mb()
        after = reply(arm, prompt, min(max_tokens, WARM_UP_TOKENS)).resident_mb
        if arm.method == "plain":
            added.append(0.0)
        elif before is None or after is None:
            added.append(None)
        else:
            weights = 0 if arm.head is None else arm.head.weight_bytes
            added.append(max(0.0, after - before) + weights / 1e6)
    progress("warm up", len(arms), len(arms))
    return added
