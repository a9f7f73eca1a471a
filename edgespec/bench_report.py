"""What a benchmark measured, in figures: one row per arm, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from edgespec.bench import Arm, Results, Sample
from edgespec.intervals import Interval, median_interval

Pick = Callable[[Sample], Sample]


@dataclass(frozen=True, slots=True)
class Row:
    """An arm over a group of prompts. None: it had no round to measure."""

    method: str
    backend: str
    tree: str  # as asked for, "" for methods without
    tokens_per_s: float | None  # median over replies
    ratio_vs_plain: float | None  # of the same backend: median over pairs of replies
    ratio_low: float | None
    ratio_high: float | None
    tokens_per_round: float
    acceptance: float  # accepted / sum of tree depths
    node_yield: float  # accepted / drafted
    ttft_ms: float  # median
    itl_ms_p50: float | None  # between pieces of text
    itl_ms_p95: float | None
    # Medians over pairs of replies: of a round drafting in plain tokens, its forward
    # in plain ones, and a reply's tokens per round over their sum.
    draft_share: float | None
    forward_ratio: float | None
    ratio_possible: float | None
    extra_memory_mb: float | None  # beside plain's on the same backend
    identical: bool  # every reply is plain's first one on this backend
    prompts: int
    tokens: int  # of all replies, all repeats


def rows(
    results: Results, *, subtask: str | None = None, is_cut: bool = False
) -> list[Row]:
    """One per arm, over all prompts or those of a subtask, replies whole or cut."""
    pick: Pick = Sample.cut if is_cut else _whole
    chosen = _prompts(results, subtask)
    return [_row(results, index, chosen, pick) for index in range(len(results.arms))]


def against(
    results: Results,
    backend: str,
    *,
    subtask: str | None = None,
    is_cut: bool = False,
) -> list[Interval]:
    """By arm: the median ratio of plain `backend`'s time per token to the arm's.

    Each by its own clock: a foreign library's plain decoding by its decode call alone.
    """
    pick: Pick = Sample.cut if is_cut else _whole
    base = results.find("plain", backend)
    if base is None:
        return [median_interval([])] * len(results.arms)
    chosen = _prompts(results, subtask)
    is_base_by_clock = results.arms[base].by_clock
    return [
        _ratio(
            [results.samples[base][prompt] for prompt in chosen],
            [results.samples[index][prompt] for prompt in chosen],
            pick,
            is_base_by_clock,
            arm.by_clock,
        )
        for index, arm in enumerate(results.arms)
    ]


def subtasks(results: Results) -> list[str]:
    """Names of the groups, in order of appearance."""
    return [name for name in dict.fromkeys(results.subtasks) if name]


def report(results: Results, about: dict[str, Any]) -> dict[str, Any]:
    """One JSON object: `about`, rows, the same of cut replies and of each subtask."""
    found: dict[str, Any] = {
        **about,
        "repeats": results.repeats,
        "complete": results.is_complete,
    }
    found["rows"] = [asdict(row) for row in rows(results)]
    found["cut_rows"] = [asdict(row) for row in rows(results, is_cut=True)]
    found["subtasks"] = {
        name: [asdict(row) for row in rows(results, subtask=name)]
        for name in subtasks(results)
    }
    found["against"] = {
        base.backend: [
            {
                "method": arm.method,
                "backend": arm.backend,
                "tree": arm.tree,
                "ratio": ratio.middle,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
            }
            for arm, ratio in zip(
                results.arms, against(results, base.backend), strict=True
            )
        ]
        for base in results.arms
        if base.method == "plain"
    }
    found["replies"] = [
        {
            "method": arm.method,
            "backend": arm.backend,
            "tree": arm.tree,
            "prompt": prompt,
            "subtask": results.subtasks[prompt],
            "repeat": repeat,
            "tokens": len(sample.tokens),
            "rounds": sample.rounds,
            "seconds_per_token": sample.seconds_per_token(by_clock=arm.by_clock),
            "ttft_ms": 1e3 * sample.ttft_s,
        }
        for arm, of_arm in zip(results.arms, results.samples, strict=True)
        for prompt, repeats in enumerate(of_arm)
        for repeat, sample in enumerate(repeats)
    ]
    return found


def _whole(sample: Sample) -> Sample:
    return sample


def _prompts(results: Results, subtask: str | None) -> list[int]:
    """Those of the group that every arm had its turn on."""
    return [
        prompt
        for prompt, name in enumerate(results.subtasks)
        if subtask in (None, name) and all(of_arm[prompt] for of_arm in results.samples)
    ]


def _row(results: Results, index: int, prompts: Sequence[int], pick: Pick) -> Row:
    arm = results.arms[index]
    base = results.find("plain", arm.backend)
    assert base is not None, "make_arms puts plain first"
    plain = [results.samples[base][prompt] for prompt in prompts]
    own = [results.samples[index][prompt] for prompt in prompts]
    samples = [pick(sample) for repeats in own for sample in repeats]
    ratio = _ratio(plain, own, pick, arm.by_clock, arm.by_clock)
    ends = [sample.marks[-1] for sample in samples]
    accepted = sum(end.accepted for end in ends)
    tokens_per_round = _share(
        sum(end.tokens for end in ends), sum(sample.rounds for sample in samples)
    )
    costs = _costs(plain, own, pick)
    gaps = [gap for sample in samples for gap in sample.gaps_s]
    return Row(
        method=arm.method,
        backend=arm.backend,
        tree=arm.tree,
        tokens_per_s=_median(_rates(samples, arm)),
        ratio_vs_plain=ratio.middle,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        tokens_per_round=tokens_per_round,
        acceptance=_share(accepted, sum(end.depth for end in ends)),
        node_yield=_share(accepted, sum(end.drafted for end in ends)),
        ttft_ms=1e3 * (_median([sample.ttft_s for sample in samples]) or 0.0),
        itl_ms_p50=_percentile_ms(gaps, 50),
        itl_ms_p95=_percentile_ms(gaps, 95),
        draft_share=_median([cost.draft for cost in costs]),
        forward_ratio=_median([cost.forward for cost in costs]),
        ratio_possible=_median([cost.possible for cost in costs]),
        extra_memory_mb=results.extra_mb[index],
        identical=all(
            sample.tokens == expected[0].tokens
            for expected, repeats in zip(plain, own, strict=True)
            for sample in repeats
        ),
        prompts=len(prompts),
        tokens=sum(len(sample.tokens) for sample in samples),
    )


class _Cost(NamedTuple):
    """Of a reply's rounds, in forwards of the plain reply that took turns with it."""

    draft: float
    forward: float
    possible: float  # ratio


def _costs(
    base: Sequence[Sequence[Sample]], own: Sequence[Sequence[Sample]], pick: Pick
) -> list[_Cost]:
    found = []
    for theirs, ours in zip(base, own, strict=True):
        for left, right in zip(theirs, ours, strict=False):
            before, after = pick(left), pick(right)
            if not (before.rounds and after.rounds and before.marks[-1].forward_s):
                continue
            unit = before.marks[-1].forward_s / before.rounds * after.rounds
            end = after.marks[-1]
            draft, forward = end.draft_s / unit, end.forward_s / unit
            if forward:
                tokens = end.tokens / after.rounds
                found.append(_Cost(draft, forward, tokens / (draft + forward)))
    return found


def _rates(samples: Sequence[Sample], arm: Arm) -> list[float]:
    found = (sample.seconds_per_token(by_clock=arm.by_clock) for sample in samples)
    return [1 / seconds for seconds in found if seconds]


def _ratio(
    base: Sequence[Sequence[Sample]],
    own: Sequence[Sequence[Sample]],
    pick: Pick,
    is_base_by_clock: bool,
    is_own_by_clock: bool,
) -> Interval:
    """Of replies that took turns: the same prompt, the same repeat."""
    groups: list[list[float]] = []
    for theirs, ours in zip(base, own, strict=True):
        groups.append([])
        for left, right in zip(theirs, ours, strict=False):
            before = pick(left).seconds_per_token(by_clock=is_base_by_clock)
            after = pick(right).seconds_per_token(by_clock=is_own_by_clock)
            if before and after:
                groups[-1].append(before / after)
    return median_interval(groups)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return float(1e3 * np.percentile(seconds, percent)) if seconds else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
