"""Drafts found in the text itself, against a plain scan of the same text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals import Ngram, paths

STAR = ([-1] + [0] * 16, [0, *range(16)])  # a static tree: the root and 16 children


class Log:
    """What the index is told, as lists: texts that follow each other, cut at breaks."""

    def __init__(self, capacity: int) -> None:
        self.tokens: list[int | None] = []
        self.capacity = capacity
        self.tail: list[int] = []
        self.fed: list[bool] = []  # whether the token continues what is before it

    def add(self, tokens: list[int]) -> None:
        self.fed += [bool(self.tail) or i > 0 for i in range(len(tokens))]
        self.tokens += tokens
        self.tail += tokens

    def cut(self, tail: list[int]) -> None:
        kept = tail[-24:]  # context is repeated, not learned from again
        self.tokens += [None, *kept]
        self.fed += [False] * (1 + len(kept))
        self.tail = list(tail)

    def followers(self, token: int) -> set[int]:
        first = max(1, len(self.tokens) - self.capacity + 1)
        return {
            self.tokens[i]
            for i in range(first, len(self.tokens))
            if self.fed[i] and self.tokens[i - 1] == token
        }


pieces = st.lists(st.integers(0, 6), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), pieces), min_size=1, max_size=6),
    capacity=st.sampled_from([1, 2, 5, 16, 4096]),
    rows=st.integers(1, 64),
)
def test_every_row_continues_some_text_and_no_continuation_is_missed(
    steps, capacity, rows
):
    """Small capacities have tables of a few entries: collisions and forgetting."""
    ngram, log = Ngram(capacity), Log(capacity)
    for is_cut, tokens in steps:
        if is_cut:
            ngram.cut(tokens)
            log.cut(tokens)
        else:
            ngram.add(tokens)
            log.add(tokens)
    tree = ngram.propose(rows)
    assert 1 <= tree.n <= rows
    assert tree.token[0] == log.tail[-1]
    assert (tree.parent[0], tree.depth[0], tree.mask[0], tree.score[0]) == (-1, 0, 1, 1)
    for i in range(1, tree.n):
        parent = tree.parent[i]
        assert 0 <= parent < i
        assert tree.depth[i] == tree.depth[parent] + 1
        assert tree.mask[i] == tree.mask[parent] | 1 << i
        assert tree.rank[i] == list(tree.parent[:i]).count(parent)
        assert 0 < tree.score[i] < tree.score[parent]
        assert tree.score[i] <= tree.score[i - 1]
        assert tree.token[i] in log.followers(tree.token[parent])
    paths(tree)  # merged by common prefix: no path twice
    star = ngram.fill(*STAR)
    children = {star.token[i] for i in range(1, star.n)}
    assert children <= log.followers(log.tail[-1])
    if capacity == 4096:
        # without collisions or forgetting a walk of 24 steps sees at least this many
        recent = Log(24)
        recent.tokens, recent.fed = log.tokens[-24:], log.fed[-24:]
        assert children >= recent.followers(log.tail[-1])


def test_longer_matches_outweigh_frequent_short_ones():
    ngram = Ngram()
    ngram.add([1, 2, 3, 4, 5, 50] + [8, 5, 60] * 3 + [9, 1, 2, 3, 4, 5])
    tree = ngram.propose(64)
    assert tree.token[1] == 50
    found = paths(tree)
    assert found[(50,)] > found[(60,)]


def test_continuations_share_their_common_prefix():
    ngram = Ngram()
    ngram.add([1, 2, 3, 4, 10, 1, 2, 3, 4, 20, 7, 1])
    found = paths(ngram.propose(64, 0.001))
    assert {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 10), (2, 3, 4, 20)} <= set(found)
    assert found[(2, 3, 4, 20)] > found[(2, 3, 4, 10)]  # the later one


def test_repetition_is_drafted_beyond_the_end_of_the_text():
    ngram = Ngram()
    ngram.add([5, 6, 7] * 10)
    tree = ngram.propose(13)
    deepest = max(range(tree.n), key=lambda i: tree.depth[i])
    path = next(p for p in paths(tree) if len(p) == tree.depth[deepest])
    assert len(path) >= 9
    assert list(path) == ([5, 6, 7] * 10)[: len(path)]


def test_the_floor_is_a_floor_and_rows_are_the_best_ones():
    rng = np.random.default_rng(3)
    ngram = Ngram()
    ngram.add(rng.integers(0, 5, 400))
    full = ngram.propose(64)
    for floor in (0.01, 0.05, 0.3, 1.0):
        tree = ngram.propose(64, floor)
        assert all(tree.score[i] >= np.float32(floor) for i in range(1, tree.n))
        kept = [i for i in range(1, full.n) if full.score[i] >= np.float32(floor)]
        assert list(tree.token[1 : tree.n]) == [full.token[i] for i in kept]
    for rows in (1, 2, 7, 30):
        assert list(ngram.propose(rows).token[:rows]) == list(full.token[:rows])


def test_text_that_was_cut_away_is_found_again_and_cuts_are_not_crossed():
    ngram = Ngram()
    prompt, reply = [1, 2, 3, 4], [30, 31, 32, 33]
    ngram.add(prompt)
    ngram.add(reply)
    ngram.cut(prompt)  # /regen
    found = paths(ngram.propose(8))
    assert (30, 31, 32, 33) in found
    ngram.add([40])
    ngram.cut([33])
    assert ngram.propose(8).n == 1  # 33 was last: nothing has followed it yet
    ngram.add([7])
    ngram.cut([33])
    assert set(paths(ngram.propose(2))) == {(7,)}


def test_memory_is_bounded_and_the_oldest_text_is_forgotten():
    ngram = Ngram(64)
    ngram.add([1, 2, 3])
    ngram.add(range(100, 160))
    ngram.add([1])
    assert (2, 3) in paths(ngram.propose(8))
    ngram.add(range(200, 300))
    ngram.add([1])
    assert ngram.propose(8).n == 1
    for _ in range(50):
        ngram.add(range(100, 140))
    ngram.add([100])
    assert ngram.propose(8).n == 8


def test_a_static_shape_is_filled_by_rank_and_pruned_where_nothing_is_known():
    ngram = Ngram()
    ngram.add([1, 2, 9, 1, 3, 8, 1, 3, 7, 1])
    best = [t for (t, *rest) in sorted(paths(ngram.propose(64))) if not rest]
    tree = ngram.fill([-1, 0, 0, 0, 1, 1, 3, 4], [0, 1, 0, 2, 0, 1, 0, 0])
    assert sorted(best) == [2, 3]
    assert list(tree.token[: tree.n]) == [1, 2, 3, 9, 1]
    assert list(tree.parent[: tree.n]) == [-1, 0, 0, 1, 3]
    assert list(tree.rank[: tree.n]) == [0, 1, 0, 0, 0]
    assert list(tree.depth[: tree.n]) == [0, 1, 1, 2, 3]
    assert tree.mask[4] == 0b11011
    assert tree.score[2] > tree.score[1] > tree.score[3] > 0


def test_nothing_seen_nothing_drafted():
    ngram = Ngram()
    assert ngram.propose(8).n == 1
    ngram.add([4])
    tree = ngram.propose(8)
    assert (tree.n, tree.token[0]) == (1, 4)
    assert ngram.fill(*STAR).n == 1
    for token in (5, 6):
        ngram.cut([])
        tree = ngram.propose(8)
        assert (tree.n, tree.token[0]) == (1, 0)
        ngram.add([token])


def follow(ngram, accept, n_rounds):
    """Root scores of the best row over rounds in which it is always right or wrong."""
    scores = []
    for _ in range(n_rounds):
        tree = ngram.propose(4)
        scores.append(tree.score[1])
        ngram.learn([tree.token[1] if accept else 99])
    return scores


@pytest.mark.parametrize("accept", [True, False])
def test_estimates_follow_what_comes_true(accept):
    ngram = Ngram()
    ngram.add([1, 2, 3, 4, 5, 6] * 3)
    scores = follow(ngram, accept, 40)
    assert all((b > a) == accept for a, b in itertools.pairwise(scores[:20]))
    assert scores[-1] > 0.9 if accept else scores[-1] < 0.3 * scores[0]


def test_only_rows_whose_outcome_is_known_teach():
    """One emitted token says nothing about rows of depth 2."""
    one, two = Ngram(), Ngram()
    for ngram in (one, two):
        ngram.add([1, 2, 3, 1])
    before = paths(one.propose(3))
    one.learn([2])
    two.propose(2)  # without the row of depth 2
    two.learn([2])
    assert paths(one.propose(3)) == paths(two.propose(3)) != before


def test_rows_under_a_wrong_row_are_not_judged():
    one, two = Ngram(), Ngram()
    for ngram in (one, two):
        ngram.add([1, 2, 3, 1])
        ngram.propose(3)
    one.learn([9])
    two.learn([9, 3])
    assert paths(one.propose(3)) == paths(two.propose(3))


def test_generated_text_is_trusted_more_than_text_that_was_fed():
    fed, generated = Ngram(), Ngram()
    fed.add([1, 2, 3])
    generated.add([1])
    generated.learn([2, 3])
    generated.add([2, 3])
    for ngram in (fed, generated):
        ngram.add([1])
    assert generated.propose(2).score[1] > fed.propose(2).score[1]


def test_scores_are_acceptance_frequencies_on_text_with_structure():
    """A source that repeats its earlier phrases three times out of four."""
    rng = np.random.default_rng(11)
    phrases = [rng.integers(0, 500, 6).tolist() for _ in range(12)]
    text = []
    while len(text) < 4000:
        text += (
            phrases[rng.integers(12)] if rng.random() < 0.75 else [rng.integers(500)]
        )
    ngram = Ngram()
    ngram.add(text[:200])
    scores, hits = [], []
    for i in range(200, len(text)):
        if i >= 1000:
            found = paths(ngram.propose(16, 0.02))
            first = {path: score for path, score in found.items() if len(path) == 1}
            scores += first.values()
            hits += [path[0] == text[i] for path in first]
        ngram.propose(16, 0.02)
        ngram.learn([text[i]])
        ngram.add([text[i]])
    scores, hits = np.array(scores), np.array(hits)
    for low, high in [(0.02, 0.3), (0.7, 1.0)]:
        chosen = (scores >= low) & (scores < high)
        assert chosen.sum() > 300
        assert abs(scores[chosen].mean() - hits[chosen].mean()) < 0.05


def test_the_same_calls_give_the_same_trees():
    def run() -> bytes:
        rng = np.random.default_rng(2)
        ngram, out = Ngram(512), b""
        ngram.add(rng.integers(0, 9, 300))
        for _ in range(60):
            tree = ngram.propose(16, 0.01)
            out += bytes(tree)
            ngram.learn(list(tree.token[1:3]))
            ngram.add(rng.integers(0, 9, 3))
        return out

    assert run() == run()


@pytest.mark.parametrize("capacity", [0, (1 << 28) + 1])
def test_impossible_capacities_are_refused(capacity):
    with pytest.raises(ValueError, match="capacity"):
        Ngram(capacity)
