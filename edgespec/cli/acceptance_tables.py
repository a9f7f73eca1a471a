"""What `edgespec bench --acceptance` prints for people."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.acceptance import Found
from edgespec.acceptance_report import PUBLISHED, Row, rows, subtasks
from edgespec.cli.render import table

DEPTHS, RANKS = 6, 3  # of each, what the table shows; JSON has all
LEGEND = """\
best:N are the N best rows a draft offers every round, chain:K is K tokens in a row;
rows count the root. By depth: of the rounds whose accepted path came to a row with
children there. Blind: ranked by the head's probabilities alone; else, when sampling,
also by the noise of the draw. Nothing is timed here."""


def acceptances(found: Found) -> list[str]:
    """Tokens per round by draft and tree, what was accepted where, and others'."""
    whole = rows(found)
    lines: list[str] = []
    temperatures = list(dict.fromkeys(row.temperature for row in whole))
    for temperature in temperatures:
        group = [row for row in whole if row.temperature == temperature]
        said = f"temperature {temperature:g}, {group[0].prompts} prompts"
        lines.append(f"tokens per round, {said}, at most {found.max_tokens} tokens:")
        lines += [*_trees(group, "tokens_per_round"), ""]
        lines.append("with replies cut where 16 tokens come for the third time:")
        lines += [*_trees(group, "cut_tokens_per_round"), ""]
        largest = group[-1].tree
        lines.append(f"accepted by depth in {largest} (by rank, best first):")
        lines += [*_depths([row for row in group if row.tree == largest]), ""]
    names = subtasks(found)
    trees = list(dict.fromkeys(row.tree for row in whole))
    middle = trees[len(trees) // 2]
    for temperature in temperatures if names else []:
        lines.append(f"tokens per round of {middle}, temperature {temperature:g}:")
        lines += [*_groups(found, names, middle, temperature), ""]
    lines.append("published, on graphics processors:")
    return [*lines, *_published(), "", LEGEND]


def _trees(group: Sequence[Row], figure: str) -> list[str]:
    """Drafts down, trees across."""
    trees = list(dict.fromkeys(row.tree for row in group))
    cells: dict[str, list[str]] = {}
    for row in group:
        name = _name(row)
        cells.setdefault(name, [name]).append(f"{getattr(row, figure):.2f}")
    return table(["draft", *trees], list(cells.values()))


def _name(row: Row) -> str:
    return f"{row.draft}, blind" if row.is_blind else row.draft


def _depths(group: Sequence[Row]) -> list[str]:
    cells = []
    for row in group:
        shown = [
            f"{depth.accepted:.0%} ({_ranks(depth.by_rank)})"
            for depth in row.by_depth[:DEPTHS]
        ]
        cells.append([_name(row), *shown, *["-"] * (DEPTHS - len(shown))])
    return table(["draft", *map(str, range(1, DEPTHS + 1))], cells)


def _ranks(shares: Sequence[float]) -> str:
    return "+".join(f"{100 * share:.0f}" for share in shares[:RANKS])


def _groups(
    found: Found, names: Sequence[str], tree: str, temperature: float
) -> list[str]:
    """Drafts down, subtasks across."""
    cells: dict[str, list[str]] = {}
    for name in names:
        for row in rows(found, subtask=name):
            if (row.tree, row.temperature) == (tree, temperature):
                line = cells.setdefault(_name(row), [_name(row)])
                line.append(f"{row.tokens_per_round:.2f}")
    return table(["draft", *names], list(cells.values()))


def _published() -> list[str]:
    cells = [
        [
            row.method,
            row.target,
            row.rows,
            f"{row.tokens_per_round:.2f}",
            f"  {row.where}",
        ]
        for row in PUBLISHED
    ]
    lines = table(
        ["method", "target", "rows", "tok/round"], [c[:4] for c in cells], left=2
    )
    return [lines[0], *(a + c[4] for a, c in zip(lines[1:], cells, strict=True))]
