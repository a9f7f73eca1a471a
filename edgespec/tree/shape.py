"""Static tree shapes: the --tree option, its JSON files and Medusa's rank paths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgespec.errors import FormatError, UsageError
from edgespec.tree.topology import MAX_ROWS, Tree


def best_rows(option: str) -> int | None:
    """Rows of "best:N", root included; None for any other --tree option.

    Raises UsageError for a number of rows that cannot be.
    """
    if not option.startswith("best:"):
        return None
    digits = option.removeprefix("best:")
    rows = int(digits) if digits.isdecimal() else 0
    if not 2 <= rows <= MAX_ROWS:
        raise UsageError(
            f"tree: best:N takes 2 to {MAX_ROWS} rows, root included, got {option!r}"
        )
    return rows


def read_shape(option: str) -> Tree | None:
    """The shape a --tree option asks for; None for "auto" and "best:N".

    "chain:K" is K drafted tokens in a row. Anything else is a JSON file: an object
    {"parent": [-1, ...], "rank": [0, ...]}, or a list of Medusa rank paths such as
    [[0], [1], [0, 0]] (the root is implied, its children's ranks come first).

    Raises UsageError for a bad option, FormatError for a bad file.
    """
    if option == "auto" or best_rows(option) is not None:
        return None
    if option.startswith("chain:"):
        return _chain(option)
    path = Path(option)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"tree: expected auto, best:N, chain:K or a JSON file, got {option!r} "
            f"({error.strerror or error})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from None
    return _from_json(data, where=str(path))


def from_record(parent: Sequence[int], rank: Sequence[int], *, where: str) -> Tree:
    """A shape from its record; FormatError names the first row that breaks a rule."""
    n = len(parent)
    if n != len(rank):
        raise FormatError(f"{where}: {n} parents but {len(rank)} ranks")
    if not 1 <= n <= MAX_ROWS:
        raise FormatError(
            f"{where}: expected 1 to {MAX_ROWS} rows, root included, got {n}"
        )
    if parent[0] != -1 or rank[0] != 0:
        raise FormatError(f"{where}: row 0 is the root: parent -1 and rank 0")
    depth = np.zeros(n, dtype=np.int32)
    mask = np.eye(n, dtype=np.bool_)
    seen: set[tuple[int, int]] = set()
    for row in range(1, n):
        if not 0 <= parent[row] < row:
            raise FormatError(
                f"{where}: row {row}: expected a parent among rows 0 to {row - 1}, "
                f"got {parent[row]}"
            )
        if rank[row] < 0 or (parent[row], rank[row]) in seen:
            raise FormatError(
                f"{where}: row {row}: rank {rank[row]} is negative or a sibling's"
            )
        seen.add((parent[row], rank[row]))
        depth[row] = depth[parent[row]] + 1
        mask[row] |= mask[parent[row]]
    return Tree(
        tokens=np.zeros(n, dtype=np.int32),
        parent=np.array(parent, dtype=np.int32),
        rank=np.array(rank, dtype=np.int32),
        depth=depth,
        mask=mask,
    )


def from_rank_paths(paths: Sequence[Sequence[int]], *, where: str) -> Tree:
    """A shape from Medusa choices: a path lists the ranks from the root to a row."""
    rows: dict[tuple[int, ...], int] = {(): 0}
    parent, rank = [-1], [0]
    for path in sorted({tuple(path) for path in paths}, key=lambda p: (len(p), p)):
        if not path:
            continue
        if path[:-1] not in rows:
            raise FormatError(
                f"{where}: path {list(path)} has no parent path {list(path[:-1])}"
            )
        rows[path] = len(parent)
        parent.append(rows[path[:-1]])
        rank.append(path[-1])
    return from_record(parent, rank, where=where)


def _chain(option: str) -> Tree:
    digits = option.removeprefix("chain:")
    length = int(digits) if digits.isdecimal() else 0
    if not 1 <= length < MAX_ROWS:
        raise UsageError(
            f"tree: chain:K takes 1 to {MAX_ROWS - 1} drafted tokens, got {option!r}"
        )
    return from_record([*range(-1, length)], [0] * (length + 1), where=option)


def _from_json(data: object, *, where: str) -> Tree:
    if isinstance(data, list):
        if not all(isinstance(path, list) and _are_ints(path) for path in data):
            raise FormatError(
                f"{where}: expected rank paths: a list of lists of numbers"
            )
        return from_rank_paths(data, where=where)
    if not isinstance(data, dict) or set(data) != {"parent", "rank"}:
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise FormatError(f'{where}: expected the keys "parent" and "rank", got {got}')
    parent, rank = data["parent"], data["rank"]
    if not (_are_ints(parent) and _are_ints(rank)):
        raise FormatError(f'{where}: "parent" and "rank" must be lists of numbers')
    return from_record(parent, rank, where=where)


def _are_ints(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31
        for value in values
    )
