"""c(n): what a forward over n rows costs, every backend in turn in one process.

Logits of all rows, behind short and long caches, as branching trees and as chains: the
difference is what the ancestor mask costs. Backends take turns in bursts of a few
forwards, so that each runs with warm threads and all share the same disturbances.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec._native import tree_derive
from edgespec.bench import Clock
from edgespec.bench_arms import Opened
from edgespec.intervals import Interval, median_interval
from edgespec.progress import Progress, silent
from edgespec.targets.base import Target
from edgespec.tree.topology import Tree, chain

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
CHAINS = (4, 8, 16, 64)  # widths also timed without branches
CACHED = (256, 2048)
BURST = 3  # timed forwards of one visit, after one that is not
SETTLE = 0.03  # seconds, for another library's waiting threads to stop spinning
PREFILL = 512


@dataclass(frozen=True, order=True, slots=True)
class Case:
    """What is timed: rows behind cached ones; cached 0 is a prefill."""

    cached: int
    rows: int
    shape: str  # tree | chain


@dataclass(slots=True)
class Costs:
    """Seconds of every forward, by backend and case, one list per visit."""

    backends: Sequence[str]
    cases: Sequence[Case]
    visits: int
    seconds: dict[tuple[str, Case], list[list[float]]] = field(default_factory=dict)
    is_complete: bool = False

    def median(self, backend: str, case: Case) -> float | None:
        """Seconds; None where nothing was measured."""
        found = self._all(backend, case)
        return statistics.median(found) if found else None

    def relative(self, backend: str, case: Case) -> float | None:
        """c(n) / c(1) behind the same cache."""
        one = self.median(backend, Case(case.cached, 1, "tree"))
        many = self.median(backend, case)
        return many / one if one and many else None

    def mask_cost(self, backend: str, case: Case) -> float | None:
        """Time of a tree over that of a chain of as many rows, less 1."""
        causal = self.median(backend, Case(case.cached, case.rows, "chain"))
        tree = self.median(backend, Case(case.cached, case.rows, "tree"))
        return tree / causal - 1 if causal and tree else None

    def best(self, family: str, case: Case) -> str | None:
        """Of the backends called `family...`, the fastest one."""
        found = [
            (seconds, name)
            for name in self.backends
            if name.startswith(family)
            and (seconds := self.median(name, case)) is not None
        ]
        return min(found)[1] if found else None

    def ratio(self, base: str, backend: str, case: Case) -> Interval:
        """How many times faster than `base`: median over pairs taken in turn."""
        ours = self.seconds.get((backend, case), [])
        theirs = self.seconds.get((base, case), [])
        return median_interval(
            [
                [slow / fast for slow, fast in zip(left, right, strict=True)]
                for left, right in zip(theirs, ours, strict=False)
            ]
        )

    def _all(self, backend: str, case: Case) -> list[float]:
        visits = self.seconds.get((backend, case), [])
        return [seconds for visit in visits for seconds in visit]


def measure(
    opened: Sequence[Opened], *, visits: int, progress: Progress = silent
) -> Costs:
    """Times all widths on all backends; leaves the targets empty.

    Ctrl-C ends it early, with what there is. Cases that do not fit the smallest context
    are left out.

    Args:
        visits: how often each case comes round; BURST forwards each time.
    """
    room = min(backend.session.target.context for backend in opened)
    cases = [case for case in _cases() if case.cached + case.rows <= room]
    costs = Costs([backend.name for backend in opened], cases, visits)
    total = visits * len(cases) * len(opened)
    done = 0
    progress("measure", done, total)
    try:
        for cached in sorted({case.cached for case in cases}):
            for backend in opened:
                _fill(backend.session.target, cached)
            for visit in range(visits):
                for case in (case for case in cases if case.cached == cached):
                    order = [(visit + i) % len(opened) for i in range(len(opened))]
                    taken = {i: _burst(opened[i], case) for i in order}
                    for i, seconds in taken.items():
                        key = (opened[i].name, case)
                        costs.seconds.setdefault(key, []).append(seconds)
                    done += len(opened)
                    progress("measure", done, total)
        costs.is_complete = True
    except KeyboardInterrupt:
        if not costs.seconds:
            raise
    for backend in opened:
        backend.session.target.truncate(0)
    return costs


def branching(tokens: NDArray[np.int32]) -> Tree:
    """Every row two children, as far as rows go."""
    parents = [-1, *((row - 1) // 2 for row in range(1, len(tokens)))]
    return tree_derive(tokens, parents)


def report(costs: Costs, about: dict[str, Any]) -> dict[str, Any]:
    """One JSON object: `about`, and a row per backend and case."""
    rows = []
    for name in costs.backends:
        for case in costs.cases:
            seconds = costs.median(name, case)
            if seconds is None:
                continue
            rows.append(
                {
                    "backend": name,
                    **asdict(case),
                    "ms": 1e3 * seconds,
                    "relative": costs.relative(name, case) if case.cached else None,
                    "tokens_per_s": case.rows / seconds,
                    **_against(costs, name, case),
                }
            )
    return {
        **about,
        "repeats": costs.visits * BURST,
        "complete": costs.is_complete,
        "cost": rows,
    }


def _against(costs: Costs, name: str, case: Case) -> dict[str, Any]:
    """Against llama.cpp with whichever attention is faster here."""
    base = costs.best("llamacpp", case)
    ratio = costs.ratio(base, name, case) if base else Interval(None, None, None)
    return {
        "ratio_vs_llamacpp": ratio.middle,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }


def _cases() -> Iterator[Case]:
    yield Case(0, PREFILL, "chain")
    for cached in CACHED:
        for rows in WIDTHS:
            yield Case(cached, rows, "tree")
            if rows in CHAINS:
                yield Case(cached, rows, "chain")


def _tokens(target: Target, count: int) -> NDArray[np.int32]:
    return (np.arange(count) * 7919 % target.vocab).astype(np.int32)


def _fill(target: Target, cached: int) -> None:
    """Makes the cache hold that many rows, keeping what is there."""
    target.truncate(min(target.length, cached))
    missing = _tokens(target, cached)[target.length :]
    for start in range(0, len(missing), 256):
        target.prefill(missing[start : start + 256])


def _burst(backend: Opened, case: Case) -> list[float]:
    """Seconds of a few forwards, by the library's own clock where it has one."""
    time.sleep(SETTLE)
    target = backend.session.target
    clock: Clock = backend.clock or time.perf_counter
    tokens = _tokens(target, case.rows)
    seconds: list[float] = []
    if not case.cached:
        for _ in range(BURST):
            target.truncate(0)
            before = clock()
            target.prefill(tokens)
            seconds.append(clock() - before)
        return seconds
    tree = chain(tokens) if case.shape == "chain" else branching(tokens)
    target.forward(tree)
    for _ in range(BURST):
        before = clock()
        target.forward(tree)
        seconds.append(clock() - before)
    return seconds
