"""Trees grown from a head's logits: which rows, how sure, how they come true."""

from __future__ import annotations

import itertools
from math import exp, inf, log, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec._native import SampleParams, noise
from tests.internals import Grow, ScriptedDrafter, paths

VOCAB = 7
SAMPLED = SampleParams(temperature=0.7, seed=11)


def random_head(seed: int, vocab: int = VOCAB, spread: float = 2.0):
    """Logits of the path."""

    def says(path):
        rng = np.random.default_rng([seed, *path])
        return rng.normal(0, spread, vocab).astype(np.float32)

    return says


def table_head(table, vocab: int = VOCAB):
    """says table[path less the root]: token -> probability, the rest evenly spread."""

    def says(path):
        row = np.full(vocab, -20.0, np.float32)
        for token, p in table.get(tuple(path[1:]), {}).items():
            row[token] = log(p)
        return row

    return says


def grown(says, vocab: int = VOCAB, target_vocab: int | None = None, **net) -> Grow:
    return Grow(ScriptedDrafter(says, vocab, **net), target_vocab or vocab)


def check(tree, *, rows=64) -> None:
    """What every tree owes: closed under ancestors, siblings apart, best first."""
    assert 1 <= tree.n <= 64
    assert (tree.parent[0], tree.depth[0], tree.mask[0], tree.score[0]) == (-1, 0, 1, 1)
    ranks, tokens = set(), set()
    for i in range(1, tree.n):
        parent = tree.parent[i]
        assert 0 <= parent < i
        assert tree.depth[i] == tree.depth[parent] + 1
        assert tree.mask[i] == tree.mask[parent] | 1 << i
        assert 0 <= tree.score[i] <= tree.score[parent]
        ranks.add((parent, tree.rank[i]))
        tokens.add((parent, tree.token[i]))
    assert len(ranks) == len(tokens) == tree.n - 1


def chances(logits, shift=0.0, slope=1.0):
    """Of each token, before anything was learned."""
    u = np.exp(logits - logits.max())
    u = np.clip(u / u.sum(), 1e-5, 0.9999)
    return 1 / (1 + np.exp(-(shift + slope * np.log(u / (1 - u)))))


# ---- the best rows ------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 3, 5, 9])
@pytest.mark.parametrize("seed", range(6))
def test_the_best_rows_are_those_of_the_whole_tree(seed: int, rows: int) -> None:
    says = random_head(seed)
    tree = grown(says).best(rows=rows, depth=4)
    check(tree)
    every = {}
    for path in itertools.chain.from_iterable(
        itertools.product(range(VOCAB), repeat=d) for d in range(1, 5)
    ):
        above = every.get(path[:-1], 1.0)
        every[path] = above * float(chances(says([0, *path[:-1]]))[path[-1]])
    best = sorted(every.values(), reverse=True)[: rows - 1]
    np.testing.assert_allclose(list(tree.score[1:rows]), best, rtol=0.02)
    for path, score in paths(tree).items():
        assert score == pytest.approx(every[path], rel=0.05)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 64),
    depth=st.integers(0, 64),
    levels=st.integers(0, 5),
    width=st.integers(1, 8),
    vocab=st.sampled_from([1, 2, 5, 40, 200]),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.8]),
    floor=st.sampled_from([0.0, 0.05, 0.9]),
)
def test_any_request_gives_a_sound_tree(
    seed, rows, depth, levels, width, vocab, spread, temperature, floor
) -> None:
    ids = np.sort(np.random.default_rng(seed).permutation(3 * vocab)[:vocab])
    grow = grown(
        random_head(seed, vocab, spread),
        vocab,
        3 * vocab,
        ids=ids.tolist(),
        depth=levels,
        width=width,
    )
    request = {
        "params": SampleParams(temperature=temperature, seed=seed),
        "rows": rows,
        "depth": depth,
        "floor": floor,
        "root": 1,
    }
    tree = grow.best(**request)
    check(tree)
    most = min(depth, levels or 64)
    assert max(tree.depth[: tree.n]) <= most
    assert set(tree.token[1 : tree.n]) <= set(ids.tolist())
    assert all(score >= np.float32(floor) for score in tree.score[1 : tree.n])
    assert (np.diff(tree.score[1 : tree.n]) <= 0).all()
    assert grow.passes == grow.drafter.passes <= most
    again = grow.best(**request)
    assert paths(again) == paths(tree)
    assert list(again.token[: again.n]) == list(tree.token[: tree.n])


def test_a_sure_head_is_followed_deeply_and_a_doubtful_one_widely() -> None:
    sure = table_head({(1,) * d: {1: 0.99} for d in range(20)})
    tree = grown(sure).best(rows=8)
    assert list(tree.depth[:8]) == list(range(8))
    doubtful = table_head({(): dict.fromkeys(range(6), 0.15)})
    tree = grown(doubtful).best(rows=7)
    assert list(tree.depth[1:7]) == [1] * 6
    assert list(tree.rank[1:7]) == list(range(6))


def test_levels_that_cannot_pay_are_not_forwarded() -> None:
    says = table_head({(1,) * d: {1: 0.5, 2: 0.3} for d in range(20)})
    passes = []
    for price in (0.0, 0.02, 0.05, 0.2, 1.0):
        grow = grown(says)
        check(grow.best(rows=16, price=price))
        passes.append(grow.passes)
    assert passes == sorted(passes, reverse=True)
    assert passes[0] > passes[2] > passes[-1] == 1
    grow = grown(says)
    assert max(grow.best(rows=16, depth=3).depth) == 3
    assert grow.passes == 3
    assert grow.best(rows=1).n == grow.best(depth=0).n == 1
    assert grow.passes == 0


def test_nothing_to_say_nothing_drafted() -> None:
    grow = grown(random_head(0))
    grow.drafter.set(is_ready=False)
    assert grow.best().n == 1
    assert grow.passes == 0
    assert grow.shape([-1, 0, 1], [0, 0, 0]).n == 1


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_logits_that_are_no_numbers_draft_nothing(bad: float) -> None:
    for params in (SampleParams(temperature=0.0), SAMPLED):
        grow = grown(lambda path: np.full(VOCAB, bad, np.float32))
        assert grow.best(params=params).n == 1
        some = np.array([0, bad, 1, 0, 0, 0, 0], np.float32)
        check(grown(lambda path: some).best(params=params))  # noqa: B023


def test_a_failing_pass_is_an_error_and_the_next_draft_works() -> None:
    grow = grown(random_head(0))
    for fails_at in (1, 2, 3):
        grow.drafter.set(fails_at=fails_at)
        with pytest.raises(ValueError, match="no memory"):
            grow.best(rows=16)
        with pytest.raises(ValueError, match="no memory"):
            grow.shape([-1, 0, 1, 2], [0, 0, 0, 0])
        grow.learn([1, 2])  # there is nothing to judge
        grow.drafter.set()
        assert grow.best(rows=16).n >= 16


def test_a_net_that_cannot_be_is_refused() -> None:
    for vocab, width in ((0, 8), (4, 0), (4, 9)):
        with pytest.raises(ValueError, match="vocabulary and 1 to 8 rows"):
            grown(random_head(0), vocab, width=width)


# ---- what may be drafted ------------------------------------------------------------


def test_banned_tokens_are_not_drafted_and_bias_counts() -> None:
    ids = [3, 5, 8, 13]
    row = np.array([2, 1, 0, -1], np.float32)
    grow = Grow(ScriptedDrafter(lambda path: row, 4, ids=ids), 20)
    bias = ((2, -1.0), (3, -inf), (13, 5.0), (19, -inf))
    for temperature in (0.0, 0.8):
        params = SampleParams(temperature=temperature, logit_bias=bias, seed=1)
        tree = grow.best(params=params, rows=20)
        assert 3 not in list(tree.token[1 : tree.n])
        assert {5, 8, 13} <= set(tree.token[1 : tree.n])
    tree = grow.best(params=SampleParams(temperature=0.0, logit_bias=bias))
    assert tree.token[1] == 13


def test_tokens_the_target_cannot_say_are_not_drafted() -> None:
    def says(path):
        return np.arange(VOCAB, dtype=np.float32)

    assert set(grown(says, target_vocab=4).best().token[1:30]) <= {0, 1, 2, 3}
    grow = Grow(ScriptedDrafter(says, VOCAB, ids=[0, 2, 4, 6, 8, 10, 12]), 7)
    tree = grow.best()
    assert set(tree.token[1 : tree.n]) == {0, 2, 4, 6}
    assert Grow(ScriptedDrafter(says, VOCAB, ids=range(9, 16)), 7).best().n == 1


# ---- static shapes ------------------------------------------------------------------


def test_a_shape_takes_the_child_of_each_rank() -> None:
    says = random_head(3)
    parent, rank = [-1, 0, 0, 0, 1, 1, 3, 4], [0, 2, 0, 5, 1, 0, 0, 0]
    grow = grown(says)
    tree = grow.shape(parent, rank)
    check(tree)
    assert list(tree.parent[:8]) == parent
    assert list(tree.rank[:8]) == rank
    assert grow.passes == 3
    path: list[list[int]] = [[0]]
    for i in range(1, 8):
        above = path[parent[i]]
        order = np.argsort(-says(above), kind="stable")
        assert tree.token[i] == order[rank[i]]
        path.append([*above, tree.token[i]])


def test_c10_rows_a_head_cannot_fill_are_left_out() -> None:
    """A tree of 5 levels on a head of 3, ranks beyond the vocabulary."""
    chain = ([-1, 0, 1, 2, 3, 4], [0] * 6)
    grow = grown(random_head(1), depth=3)
    tree = grow.shape(*chain)
    assert list(tree.depth[: tree.n]) == [0, 1, 2, 3]
    assert max(grow.best(rows=64).depth) == 3
    for params in (SampleParams(temperature=0.0), SAMPLED):
        tree = grown(random_head(1)).shape(
            [-1, 0, 0, 1, 2, 0], [0, 6, 7, 0, 0, 63], params=params
        )
        check(tree)
        assert list(tree.parent[: tree.n]) == [-1, 0, 1]
        assert list(tree.rank[: tree.n]) == [0, 6, 0]


def test_ranks_reach_far_into_a_large_vocabulary() -> None:
    says = random_head(5, 300)
    star = ([-1] + [0] * 63, [0, *range(1, 64)])
    order = np.argsort(-says([0]), kind="stable")
    tree = grown(says, 300).shape(*star)
    assert list(tree.token[1:64]) == order[1:64].tolist()
    tree = grown(says, 300).shape(*star, params=SAMPLED)
    check(tree)
    assert tree.n == 64


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_level_wider_than_the_net_takes_several_passes(width: int) -> None:
    says = random_head(2, 50)
    parent = [-1] + [0] * 12 + list(range(1, 13)) + list(range(13, 25))
    rank = [0, *range(12)] + [0] * 24
    grow = grown(says, 50, width=width)
    tree = grow.shape(parent, rank)
    check(tree)
    assert list(tree.parent[: tree.n]) == parent
    assert grow.passes == 1 + 2 * -(-12 // width)
    for row in (24, 36):
        above = [t for t in range(row) if tree.mask[row] >> t & 1]
        path = [tree.token[t] for t in above]
        assert tree.token[row] == says(path).argmax()


def test_a_whole_medusa_tree_is_filled_in_three_levels() -> None:
    width = 4
    nodes = [(), *((a,) for a in range(width))]
    nodes += [(a, b) for a in range(3) for b in range(3)]
    nodes += [(a, b, 0) for a in range(2) for b in range(2)]
    row = {path: i for i, path in enumerate(nodes)}
    parent = [-1] + [row[path[:-1]] for path in nodes[1:]]
    rank = [0] + [path[-1] for path in nodes[1:]]
    grow = grown(random_head(4), depth=3)
    tree = grow.shape(parent, rank)
    assert tree.n == len(nodes)
    assert grow.passes == 3


# ---- sampling -----------------------------------------------------------------------


def drawn(logits, index: int, params: SampleParams) -> list[int]:
    """Tokens by what the verifier will compare, best first."""
    scores = [
        logits[t] / params.temperature + noise(params.seed, index, t)
        for t in range(len(logits))
    ]
    return sorted(range(len(logits)), key=lambda t: -scores[t])


@pytest.mark.parametrize("index", [0, 1000, (1 << 40) + 3])
def test_children_rank_by_the_noise_that_will_decide(index: int) -> None:
    says = random_head(8)
    grow = grown(says)
    tree = grow.shape(
        [-1, 0, 0, 0, 1, 1, 4], [0, 0, 1, 2, 0, 1, 0], params=SAMPLED, index=index
    )
    first = drawn(says([0]), index, SAMPLED)
    assert list(tree.token[1:4]) == first[:3]
    second = drawn(says([0, first[0]]), index + 1, SAMPLED)
    assert list(tree.token[4:6]) == second[:2]
    third = drawn(says([0, first[0], second[0]]), index + 2, SAMPLED)
    assert tree.token[6] == third[0]
    best = grow.best(rows=9, params=SAMPLED, index=index)
    assert best.token[1] == first[0]


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}],
    ids=lambda f: next(iter(f)),
)
def test_noise_lifts_nothing_the_targets_filters_will_cut(filters) -> None:
    """Of three likely tokens two come first, whatever the noise; the others follow."""
    row = np.log(np.array([0.4, 0.35, 0.17, 0.05, 0.02, 0.009, 0.001], np.float32))
    star = ([-1, 0, 0, 0], [0, 0, 1, 2])
    params = SampleParams(temperature=1.0, seed=3, **filters)
    for index in range(40):
        tree = grown(lambda path: row).shape(*star, params=params, index=index)
        order = drawn(row, index, params)
        first = [t for t in order if t < 2]
        assert tree.n == 4
        if row[first[1]] + noise(3, index, first[1]) > row[2] - 1:
            assert list(tree.token[1:4]) == [*first, 2]


def test_blind_ranks_leave_the_noise_out() -> None:
    says = random_head(8)
    tree = grown(says).shape(
        [-1, 0, 0, 0], [0, 0, 1, 2], params=SAMPLED, index=5, is_blind=True
    )
    assert list(tree.token[1:4]) == np.argsort(-says([0]))[:3].tolist()


@pytest.mark.parametrize("is_blind", [False, True])
def test_looking_at_the_noise_finds_what_will_be_drawn(is_blind: bool) -> None:
    """Of a head whose logits are the target's and some error, four children each."""
    params = SampleParams(temperature=1.0, seed=4)
    rng = np.random.default_rng(0)
    hits, expected = 0, 0.0
    for index in range(300):
        target = rng.normal(0, 2, 60)
        head = (target + rng.normal(0, 0.5, 60)).astype(np.float32)
        grow = Grow(ScriptedDrafter(lambda path: head, 60, depth=1), 60)  # noqa: B023
        tree = grow.best(rows=5, params=params, index=index, is_blind=is_blind)
        hits += drawn(target, index, params)[0] in list(tree.token[1:5])
        expected += sum(tree.score[1:5])
    rate = hits / 300
    assert (0.45 < rate < 0.75) if is_blind else (rate > 0.9)


# ---- learning -----------------------------------------------------------------------


def follow(grow: Grow, accept, n_rounds: int, **request) -> list[float]:
    """Scores of the best child over rounds in which it comes true as accept says."""
    scores = []
    for i in range(n_rounds):
        tree = grow.best(rows=4, **request)
        scores.append(tree.score[1])
        grow.learn([tree.token[1] if accept(i) else 99])
    return scores


@pytest.mark.parametrize("params", [SampleParams(temperature=0.0), SAMPLED])
def test_scores_become_frequencies(params: SampleParams) -> None:
    rng = np.random.default_rng(1)
    says = table_head({(): {1: 0.9, 2: 0.05}})
    for truth in (0.2, 0.5, 0.95):
        grow = grown(says)
        scores = follow(grow, lambda i: rng.random() < truth, 600, params=params)  # noqa: B023
        assert np.mean(scores[-200:]) == pytest.approx(truth, abs=0.1)


def test_depths_are_judged_apart_and_only_below_what_came_true() -> None:
    says = table_head({(1,) * d: {1: 0.8, 2: 0.1} for d in range(6)})
    grow = grown(says)
    before = paths(grow.best(rows=4, depth=3))
    for _ in range(200):
        grow.best(rows=4, depth=3)
        grow.learn([1, 99])  # the first level holds, the second does not
    after = paths(grow.best(rows=4, depth=3))
    assert after[(1,)] > before[(1,)]
    assert after[(1, 1)] / after[(1,)] < 0.5 * before[(1, 1)] / before[(1,)]
    assert after[(1, 1, 1)] / after[(1, 1)] == pytest.approx(
        before[(1, 1, 1)] / before[(1, 1)], rel=0.3
    )


def test_what_was_forgotten_is_not_judged() -> None:
    from tests.internals import library

    grow = grown(table_head({(): {1: 0.8}}))
    before = grow.best(rows=4).score[1]
    for _ in range(50):
        grow.best(rows=4)
        library().es_grow_forget(grow.handle)
        grow.learn([6])
    assert grow.best(rows=4).score[1] == before
    assert exp(-1) < before < 1
