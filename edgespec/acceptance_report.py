"""What an acceptance measurement found, in figures, and what others published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.acceptance import Case, Found, Tally


@dataclass(frozen=True, slots=True)
class Depth:
    """Of the rounds that came to a row with children of this depth."""

    tried: int
    accepted: float  # share in which one of them was
    by_rank: tuple[float, ...]  # of `tried`, by rank among siblings, best first


@dataclass(frozen=True, slots=True)
class Row:
    """One draft and tree at one temperature, over a group of prompts."""

    draft: str
    tree: str
    temperature: float
    is_blind: bool  # ranked by probability alone
    subtask: str | None  # None: all prompts
    prompts: int
    rounds: int
    tokens: int  # emitted by rounds
    tokens_per_round: float
    rows_per_round: float  # forwarded, roots included
    acceptance: float  # accepted / sum of tree depths
    node_yield: float  # accepted / drafted
    by_depth: tuple[Depth, ...]
    cut_tokens_per_round: float  # replies cut where 16 tokens come for the third time


@dataclass(frozen=True, slots=True)
class Published:
    """Tokens per round as others measured them."""

    method: str
    target: str
    rows: str  # of a tree, root included
    tokens_per_round: float
    by_depth: tuple[float, ...]  # acceptance, where published
    where: str


_SPEC_BENCH = "Spec-Bench, greedy; arXiv 2401.07851"
# Of graphics processors, whose trees are larger than what pays on a processor.
PUBLISHED = (
    Published(
        "Medusa",
        "Vicuna-7B",
        "64",
        2.32,
        (0.56, 0.316, 0.201, 0.147),
        f"{_SPEC_BENCH}; by depth top-1 of the heads, Medusa's own data",
    ),
    Published("EAGLE", "Vicuna-7B", "26", 3.57, (), _SPEC_BENCH),
    Published("EAGLE-2", "Vicuna-7B", "61", 4.35, (), _SPEC_BENCH),
    Published(
        "EAGLE-3",
        "Llama-3.1-8B",
        "60",
        6.23,
        (),
        "mean of five sets, greedy; arXiv 2503.01840",
    ),
    Published("EAGLE-3", "Qwen3 1.7B-32B", "chain", 2.0, (), "1.8 to 2.2; AngelSlim"),
    Published("n-gram lookup", "Vicuna-7B", "chain", 1.73, (), _SPEC_BENCH),
)


def rows(found: Found, *, subtask: str | None = None) -> list[Row]:
    """One per case, in order of measurement; over all prompts, or a subtask's."""
    merged: dict[Case, Tally] = {}
    for (case, group), tally in found.tallies.items():
        if subtask in (None, group):
            merged.setdefault(case, Tally()).add(tally)
    return [_row(case, subtask, tally) for case, tally in merged.items()]


def subtasks(found: Found) -> list[str]:
    """Names of the groups, in order of appearance."""
    return [name for name in found.subtasks if name]


def report(found: Found, about: dict[str, Any]) -> dict[str, Any]:
    """One JSON object: `about`, rows over all prompts and by subtask, published."""
    groups = {name: rows(found, subtask=name) for name in subtasks(found)}
    return {
        **about,
        "complete": found.is_complete,
        "max_tokens": found.max_tokens,
        "tokens": found.tokens,
        "acceptance": [asdict(row) for row in rows(found)],
        "subtasks": {
            name: [asdict(r) for r in group] for name, group in groups.items()
        },
        "published": [asdict(row) for row in PUBLISHED],
    }


def _row(case: Case, subtask: str | None, tally: Tally) -> Row:
    drafted = sum(rows for rows, _ in tally.rounds) - len(tally.rounds)
    return Row(
        draft=case.draft,
        tree=case.tree,
        temperature=case.temperature,
        is_blind=case.is_blind,
        subtask=subtask,
        prompts=tally.prompts,
        rounds=len(tally.rounds),
        tokens=sum(tokens for _, tokens in tally.rounds),
        tokens_per_round=_mean([tokens for _, tokens in tally.rounds]),
        rows_per_round=_mean([rows for rows, _ in tally.rounds]),
        acceptance=tally.accepted / tally.depth if tally.depth else 0.0,
        node_yield=tally.accepted / drafted if drafted else 0.0,
        by_depth=tuple(
            Depth(tried, sum(ranks) / tried, tuple(held / tried for held in ranks))
            for tried, ranks in zip(tally.tried, tally.held, strict=True)
        ),
        cut_tokens_per_round=_mean([tokens for _, tokens in tally.cut]),
    )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
