"""What a verification found, in figures: totals, groups, ratios with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.intervals import median_interval
from edgespec.reply import Reply
from edgespec.verification import Run, rounds_before_loop


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over a group of runs."""

    runs: int
    tokens: int
    identical: int
    unexplained: int
    plain_tokens_per_s: float
    spec_tokens_per_s: float
    tokens_per_round: float
    drafted_per_round: float  # rows forwarded besides the roots
    cut_tokens_per_round: float  # replies cut at the third occurrence of a 16-gram
    cut_drafted_per_round: float
    ratio: float | None  # median over runs
    ratio_low: float | None  # 95 % interval of the median, runs resampled
    ratio_high: float | None


def summarise(runs: Sequence[Run]) -> Summary:
    """Totals, and the median speed ratio with its interval."""
    ratio = median_interval([[run.ratio] for run in runs if run.ratio is not None])
    rounds = [pair for run in runs for pair in run.rounds]
    cut = [
        pair for run in runs for pair in rounds_before_loop(run.spec.tokens, run.rounds)
    ]
    return Summary(
        runs=len(runs),
        tokens=sum(len(run.spec.tokens) for run in runs),
        identical=sum(run.divergence is None for run in runs),
        unexplained=sum(
            run.divergence is not None and not run.divergence.is_explained
            for run in runs
        ),
        plain_tokens_per_s=_rate([run.plain for run in runs]),
        spec_tokens_per_s=_rate([run.spec for run in runs]),
        tokens_per_round=_ratio(
            sum(_round_tokens(run.spec) for run in runs),
            sum(run.spec.stats.rounds for run in runs),
        ),
        drafted_per_round=_drafted(rounds),
        cut_tokens_per_round=_ratio(sum(n for _, n in cut), len(cut)),
        cut_drafted_per_round=_drafted(cut),
        ratio=ratio.middle,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
    )


def by_subtask(runs: Sequence[Run]) -> dict[str, Summary]:
    """Summaries of the groups, in order of appearance."""
    names = [name for name in dict.fromkeys(run.subtask for run in runs) if name]
    return {
        name: summarise([run for run in runs if run.subtask == name]) for name in names
    }


def report(runs: Sequence[Run], about: dict[str, Any]) -> dict[str, Any]:
    """One JSON object: `about` (model, settings), totals, groups, runs."""
    return {
        **about,
        **asdict(summarise(runs)),
        "subtasks": {name: asdict(s) for name, s in by_subtask(runs).items()},
        "details": [
            {
                "prompt": run.prompt,
                "turn": run.turn,
                "subtask": run.subtask,
                "seed": run.seed,
                "ratio": run.ratio,
                "divergence": run.divergence and asdict(run.divergence),
                "plain": _reply_row(run.plain),
                "spec": _reply_row(run.spec),
            }
            for run in runs
        ],
    }


def _reply_row(reply: Reply) -> dict[str, Any]:
    return {
        "tokens": list(reply.tokens),
        "finish_reason": reply.finish_reason,
        "stats": reply.stats.as_dict(),
    }


def _drafted(rounds: Sequence[tuple[int, int]]) -> float:
    return _ratio(sum(rows - 1 for rows, _ in rounds), len(rounds))


def _round_tokens(reply: Reply) -> float:
    return reply.stats.tokens_per_round * reply.stats.rounds


def _rate(replies: Sequence[Reply]) -> float:
    return _ratio(
        sum(_round_tokens(reply) for reply in replies),
        sum(reply.stats.decode_s for reply in replies),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
