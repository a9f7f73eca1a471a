"""Token trees: the rules of the record and what derives from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec._native import tree_derive
from edgespec.errors import UsageError
from edgespec.tree.topology import MAX_ROWS, chain


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, MAX_ROWS), st.integers(0, 10**6))
def test_depth_and_mask_follow_from_parents(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parent = [-1] + [int(rng.integers(0, i)) for i in range(1, n)]
    tree = tree_derive(np.arange(n), parent)
    for i in range(n):
        path = [i]
        while path[-1] != 0:
            path.append(parent[path[-1]])
        assert tree.depth[i] == len(path) - 1
        assert np.flatnonzero(tree.mask[i]).tolist() == sorted(path)
    assert tree.tokens.tolist() == list(range(n))
    for i in range(n):
        ranks = tree.rank[np.flatnonzero(np.array(parent) == i)]
        assert ranks.tolist() == list(range(len(ranks)))


def test_a_chain_is_derived_like_any_tree() -> None:
    direct = chain(np.arange(MAX_ROWS, dtype=np.int32))
    derived = tree_derive(direct.tokens, direct.parent, direct.rank)
    assert derived.is_chain
    assert np.array_equal(derived.mask, direct.mask)
    assert np.array_equal(derived.depth, direct.depth)


def test_ranks_may_leave_gaps() -> None:
    tree = tree_derive([7, 8, 9], [-1, 0, 0], [0, 5, 2])
    assert tree.rank.tolist() == [0, 5, 2]
    assert not tree.is_chain


@pytest.mark.parametrize(
    ("parent", "rank", "message"),
    [
        ([], [], "1 to 64 rows"),
        ([-1] + [0] * MAX_ROWS, [0] * (MAX_ROWS + 1), "1 to 64 rows"),
        ([0], [0], "row 0 is the root"),
        ([-1, 1], [0, 0], "row 1: expected a parent"),
        ([-1, -1], [0, 0], "row 1: expected a parent"),
        ([-1, 0, 0], [0, 1, 1], "row 2: rank 1 is taken"),
        ([-1, 0], [0, -1], "row 1: expected a rank"),
        ([-1, 0], [0, 64], "row 1: expected a rank"),
    ],
)
def test_broken_trees_are_refused(
    parent: list[int], rank: list[int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tree_derive(np.zeros(len(parent)), parent, rank)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="32-bit"):
        tree_derive([2**31], [-1])
    with pytest.raises(UsageError, match="32-bit"):
        tree_derive([0.5], [-1])
