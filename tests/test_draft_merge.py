"""Two drafts' trees as one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec._native import CTree
from tests.internals import merge, paths
from tests.test_draft_grow import check


def tree_of(scores: dict[tuple[int, ...], float], root: int = 0) -> CTree:
    """A tree of these paths, best first."""
    order = sorted(scores, key=lambda path: (-scores[path], len(path)))
    tree = CTree(n=1)
    tree.token[0], tree.parent[0], tree.mask[0], tree.score[0] = root, -1, 1, 1.0
    row = {(): 0}
    for path in order:
        i, parent = tree.n, row[path[:-1]]
        row[path] = i
        tree.token[i], tree.parent[i], tree.score[i] = path[-1], parent, scores[path]
        tree.rank[i] = list(tree.parent[1:i]).count(parent)
        tree.depth[i], tree.mask[i] = len(path), tree.mask[parent] | 1 << i
        tree.n += 1
    return tree


@st.composite
def trees(draw) -> CTree:
    """Of up to 64 rows; the chances of siblings add up to 1 at most."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    rows, tokens = draw(st.integers(1, 64)), draw(st.sampled_from([2, 4, 12]))
    scores: dict[tuple[int, ...], float] = {}
    mass: dict[tuple[int, ...], float] = {}
    known = [()]
    for _ in range(4 * rows):
        above = known[rng.integers(len(known))]
        path = (*above, int(rng.integers(tokens)))
        left = 1 - mass.get(above, 0.0)
        if path in scores or len(scores) + 1 >= rows or len(path) > 12:
            continue
        chance = float(left * rng.choice([0.0, 0.3, 0.9, rng.random()]))
        mass[above] = mass.get(above, 0.0) + chance
        scores[path] = scores.get(above, 1.0) * chance
        known.append(path)
    return tree_of(scores)


@settings(max_examples=150, deadline=None)
@given(
    a=trees(),
    b=trees(),
    rows=st.integers(1, 64),
    floor=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_any_two_trees_merge_soundly(a, b, rows, floor) -> None:
    tree = merge(a, b, rows, floor)
    check(tree)
    assert tree.n <= rows
    assert (np.diff(tree.score[1 : tree.n]) <= 0).all()
    assert all(score >= np.float32(floor) for score in tree.score[1 : tree.n])
    for i in range(1, tree.n):
        assert tree.rank[i] == list(tree.parent[1:i]).count(tree.parent[i])
    found = set(paths(tree))
    union = set(paths(a)) | set(paths(b))
    assert found <= union
    if rows == 64 and floor == 0 and len(union) < 64:
        assert found == union


@settings(max_examples=60, deadline=None)
@given(a=trees(), rows=st.integers(1, 64))
def test_a_tree_and_nothing_is_the_tree(a, rows) -> None:
    nothing = tree_of({})
    for tree in (merge(a, nothing, rows), merge(nothing, a, rows)):
        alone = paths(a)
        for path, score in paths(tree).items():
            assert score == pytest.approx(alone[path], rel=0.1)
        assert tree.n == min(rows, a.n)


def test_paths_both_propose_are_one_path_and_surer() -> None:
    a = tree_of({(1,): 0.6, (1, 2): 0.3, (5,): 0.1})
    b = tree_of({(1,): 0.5, (1, 3): 0.2, (1, 2): 0.1})
    found = paths(merge(a, b))
    assert set(found) == {(1,), (1, 2), (1, 3), (5,)}
    assert 0.6 < found[(1,)] < 0.8
    assert found[(1, 2)] / found[(1,)] > 0.5
    assert found[(1, 3)] == pytest.approx(found[(1,)] * 0.4)


def test_what_each_alone_finds_likely_is_in_the_tree() -> None:
    a = tree_of({(1,): 0.8, (1, 1): 0.7, (1, 1, 1): 0.6, (2,): 0.05})
    b = tree_of({(3,): 0.9, (3, 4): 0.85, (5,): 0.02})
    assert set(paths(merge(a, b, 6))) == {(1,), (1, 1), (1, 1, 1), (3,), (3, 4)}


def test_the_chances_of_siblings_do_not_exceed_one() -> None:
    a, b = tree_of({(1,): 0.9, (2,): 0.05}), tree_of({(3,): 0.8})
    found = paths(merge(a, b))
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    assert found[(1,)] > found[(3,)] > found[(2,)]


def test_the_floor_holds_for_the_merged_scores() -> None:
    a, b = tree_of({(1,): 0.4, (2,): 0.3}), tree_of({(1,): 0.4})
    assert set(paths(merge(a, b, 64, 0.35))) == {(1,)}
    assert set(paths(merge(a, b, 64, 0.6))) == set()
