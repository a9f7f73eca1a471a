"""Verification is lossless: exact laws, and the C core against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec._native import (
    SampleParams,
    sample_draw,
    sample_process,
    tree_derive,
    verify_coupled,
    verify_rejection,
)
from edgespec.errors import NativeError, UsageError
from edgespec.tree.topology import Tree
from tests import oracle


def random_parents(rng: np.random.Generator, n: int) -> list[int]:
    return [-1] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, n)]


def random_tree(rng: np.random.Generator, n: int, vocab: int) -> Tree:
    parent = random_parents(rng, n)
    count = [parent.count(p) for p in range(n)]
    ranks = {p: list(rng.permutation(count[p] + 2)[: count[p]]) for p in range(n)}
    rank = [0] + [int(ranks[p].pop()) for p in parent[1:]]
    return tree_derive(rng.integers(0, vocab, n), parent, rank)


# ---- coupled ------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 5, 9])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_coupled_equals_the_oracle(vocab: int, temperature: float) -> None:
    deepest = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, int(rng.integers(1, 30)), vocab)
        logits = rng.normal(0, 1.5, (tree.n, vocab)).astype(np.float32)
        history = [int(t) for t in rng.integers(0, vocab, 6)]
        allowed = rng.random((tree.n, vocab)) < 0.8
        allowed[:, 0] = True
        mask = allowed if seed % 3 == 0 else None
        params = SampleParams(
            temperature=temperature,
            top_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.6,
            penalty_window=5,
            seed=seed,
        )
        arguments = (logits, params, history, 2**33 + seed, mask)
        ours = verify_coupled(tree, *arguments)
        tokens = tree.tokens.tolist()
        theirs = oracle.verify_coupled(tokens, tree.parent, tree.rank, *arguments)
        assert (ours.tokens.tolist(), ours.rows.tolist()) == theirs
        deepest = max(deepest, len(ours.tokens))
    assert deepest >= 3


def test_coupled_takes_the_best_ranked_of_equal_siblings() -> None:
    tree = tree_derive([9, 1, 1, 2, 0], [-1, 0, 0, 1, 2], [0, 1, 0, 0, 0])
    logits = np.zeros((5, 3), np.float32)
    logits[0, 1] = logits[2, 0] = logits[4, 2] = 1.0
    verdict = verify_coupled(tree, logits, SampleParams(temperature=0), [9], 1)
    assert verdict.tokens.tolist() == [1, 0, 2]
    assert verdict.rows.tolist() == [0, 2, 4]


def test_coupled_reads_strided_logits_and_leaves_them() -> None:
    tree = tree_derive([0, 1], [-1, 0])
    wide = np.zeros((2, 8), np.float32)
    wide[0, 1] = wide[1, 2] = 1.0
    wide[:, 3:] = 9.0
    before = wide.copy()
    verdict = verify_coupled(tree, wide[:, :3], SampleParams(temperature=0), [0], 1)
    assert verdict.tokens.tolist() == [1, 2]
    assert np.array_equal(wide, before)


@pytest.mark.parametrize("how", ["transposed", "broadcast", "reversed", "every other"])
def test_coupled_takes_logits_in_any_layout(how: str) -> None:
    tree = tree_derive([0, 2, 2], [-1, 0, 1])
    base = np.zeros((3, 4), np.float32)
    base[:, 2] = 1.0
    layouts = {
        "transposed": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[0], (3, 4)),
        "reversed": base[::-1],
        "every other": np.repeat(base, 2, axis=1)[:, ::2],
    }
    verdict = verify_coupled(tree, layouts[how], SampleParams(temperature=0), [0], 1)
    assert verdict.tokens.tolist() == [2, 2, 2]


def test_coupled_refuses_what_it_cannot_read() -> None:
    tree = tree_derive([0, 1], [-1, 0])
    logits = np.zeros((2, 3), np.float32)
    with pytest.raises(UsageError, match="expected 2 rows"):
        verify_coupled(tree, logits[:1], SampleParams(), [0], 1)
    with pytest.raises(UsageError, match="float32"):
        verify_coupled(tree, logits.astype(np.float64), SampleParams(), [0], 1)
    with pytest.raises(UsageError, match="allowed"):
        verify_coupled(tree, logits, SampleParams(), [0], 1, np.ones((2, 4), np.bool_))
    logits[0, 0] = np.nan
    with pytest.raises(NativeError, match="NaN"):
        verify_coupled(tree, logits, SampleParams(), [0], 1)


def table(seed: int, vocab: int, context: int) -> NDArray[np.float32]:
    """Toy model: logits after each context of two tokens."""
    rng = np.random.default_rng(seed)
    shape = (vocab,) * context + (vocab,)
    return rng.normal(0, 1.5, shape).astype(np.float32)


@pytest.mark.parametrize("drafter", ["right", "wrong", "random"])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_coupled_is_plain_sampling_token_for_token(
    drafter: str, temperature: float
) -> None:
    vocab, length = 8, 200
    model = table(1, vocab, 2)
    params = SampleParams(
        temperature=temperature,
        top_p=0.95,
        presence_penalty=0.3,
        penalty_window=7,
        seed=4,
    )

    def step(sequence: list[int]) -> int:
        row = sample_process(params, sequence, model[tuple(sequence[-2:])])
        return sample_draw(params, row, len(sequence))

    plain = [0, 1]
    while len(plain) < length:
        plain.append(step(plain))

    rng = np.random.default_rng(5)
    ours, rounds = [0, 1], 0
    while len(ours) < length:
        sequences: list[list[int]] = [ours]
        parent = [-1]
        for i in range(1, 12):
            above = max(0, (i - 1) // 2)
            path = sequences[above]
            token = step(path)
            if drafter == "wrong" or (drafter == "right" and i % 2 == 0):
                token = (token + 1) % vocab
            elif drafter == "random":
                token = int(rng.integers(0, vocab))
            parent.append(above)
            sequences.append([*path, token])
        tree = tree_derive([s[-1] for s in sequences], parent)
        logits = np.stack([model[tuple(s[-2:])] for s in sequences])
        verdict = verify_coupled(tree, logits, params, ours, len(ours))
        ours += verdict.tokens.tolist()
        rounds += 1
    assert ours[:length] == plain
    per_round = (len(ours) - 2) / rounds
    assert per_round == 1 if drafter == "wrong" else per_round > 1.1


# ---- rejection ----------------------------------------------------------------------

VOCAB = 3


def tables(seed: int) -> tuple[oracle.Model, oracle.Model]:
    """A random target and draft over VOCAB tokens; some probabilities are zero."""

    def model(offset: int) -> oracle.Model:
        def probabilities(context: tuple[int, ...]) -> oracle.Row:
            rng = np.random.default_rng([seed, offset, *context, len(context)])
            weights = rng.dirichlet(np.full(VOCAB, 0.8))
            if rng.random() < 0.3:
                weights[rng.integers(0, VOCAB)] = 0.0
            return oracle.normal(weights)

        return probabilities

    return model(1), model(2)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize(
    "widths", [(1,), (1, 1), (2,), (2, 2), (3, 1)], ids=lambda w: "x".join(map(str, w))
)
def test_rejection_law_is_the_target_exactly(
    widths: tuple[int, ...], replacement: bool
) -> None:
    for seed in range(6):
        target, draft = tables(seed)
        law = oracle.law_of_rejection(target, draft, widths, 3, replacement=replacement)
        expected = oracle.law_of_model(target, 3)
        assert law.keys() <= expected.keys()
        for sequence in expected:
            assert abs(law.get(sequence, 0.0) - expected[sequence]) < 1e-12


def test_enumeration_sees_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling the refused position from p itself, a known mistake, must show."""

    def biased(p, q, drawn, *, replacement):  # type: ignore[no-untyped-def]
        for token in drawn:
            yield min(1.0, p[token] / q[token]), p

    monkeypatch.setattr(oracle, "rejection_steps", biased)
    target, draft = tables(1)
    law = oracle.law_of_rejection(target, draft, (1,), 1, replacement=False)
    expected = oracle.law_of_model(target, 1)
    assert max(abs(law.get(s, 0.0) - expected[s]) for s in expected) > 0.01


def draw_children(
    rng: np.random.Generator, q: oracle.Row, n: int, replacement: bool
) -> list[int]:
    drawn: list[int] = []
    for _ in range(n):
        rest = q if replacement or not drawn else oracle.without(q, drawn)
        drawn.append(int(rng.choice(len(q), p=rest)))
    return drawn


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("vocab", [3, 8, 40])
def test_rejection_equals_the_oracle_on_the_same_uniforms(
    vocab: int, replacement: bool
) -> None:
    lengths = set()
    for seed in range(250):
        rng = np.random.default_rng(seed)
        parent = random_parents(rng, int(rng.integers(1, 12)))
        while not replacement and max(parent.count(p) for p in parent) > vocab:
            parent = random_parents(rng, 3)
        n = len(parent)
        p = rng.dirichlet(np.full(vocab, 0.6), n).astype(np.float32)
        q = rng.dirichlet(np.full(vocab, 0.6), n).astype(np.float32)
        q *= rng.random((n, vocab)) < 0.7
        q[np.arange(n), np.arange(n) % vocab] += 1e-3
        q[rng.random(n) < 0.2] = np.eye(vocab)[rng.integers(0, vocab)]  # one-hot
        tokens = np.zeros(n, np.int32)
        for row in range(n):
            below = [i for i in range(n) if parent[i] == row]
            tokens[below] = draw_children(
                rng, oracle.normal(q[row]), len(below), replacement
            )
        tree = tree_derive(tokens, parent)
        ours = verify_rejection(tree, p, q, seed, 7 * seed, replacement=replacement)
        theirs = oracle.verify_rejection(
            tokens.tolist(),
            parent,
            tree.rank,
            p,
            q,
            seed,
            7 * seed,
            replacement=replacement,
        )
        assert (ours.tokens.tolist(), ours.rows.tolist()) == theirs
        lengths.add(len(ours.tokens))
    assert {1, 2, 3} <= lengths


def test_rejection_at_temperature_zero_is_the_argmax_path() -> None:
    """One-hot targets: accepted exactly where the draft drew the argmax."""
    tree = tree_derive([9, 2, 1, 0, 3], [-1, 0, 0, 2, 3])
    p = np.eye(4, dtype=np.float32)[[1, 0, 0, 2, 3]]
    q = np.full((5, 4), 0.25, np.float32)
    for seed in range(20):
        verdict = verify_rejection(tree, p, q, seed, 5)
        assert verdict.tokens.tolist() == [1, 0, 2]
        assert verdict.rows.tolist() == [0, 2, 3]


def test_rejection_refuses_impossible_drafts() -> None:
    p = np.full((3, 4), 0.25, np.float32)
    q = p.copy()
    q[0] = [1, 0, 0, 0]
    with pytest.raises(UsageError, match="row 1: token 2 cannot have been drawn"):
        verify_rejection(tree_derive([0, 2], [-1, 0]), p[:2], q[:2], 1, 1)
    with pytest.raises(UsageError, match=r"row 1: expected a token in \[0, 4\)"):
        verify_rejection(tree_derive([0, 4], [-1, 0]), p[:2], q[:2], 1, 1)
    never = np.array([[0, 0, 0.5, 0.5]] * 3, np.float32)
    with pytest.raises(UsageError, match="row 2: token 0 cannot have been drawn"):
        verify_rejection(tree_derive([0, 0, 0], [-1, 0, 0]), never, p, 1, 1)
    for bad in (np.nan, -0.5, np.inf):
        broken = p.copy()
        broken[0, 1] = bad
        with pytest.raises(NativeError, match="p row 0"):
            verify_rejection(tree_derive([0, 2], [-1, 0]), broken[:2], p[:2], 1, 1)
        with pytest.raises(NativeError, match="q row 0"):
            verify_rejection(tree_derive([0, 2], [-1, 0]), p[:2], broken[:2], 1, 1)
    with pytest.raises(NativeError, match="probability 0"):
        verify_rejection(tree_derive([0], [-1]), p[:1] * 0, q[:1], 1, 1)


def test_c15_a_uniform_near_one_stays_inside_the_support() -> None:
    """The last token with any weight is the last that can be drawn."""
    p = np.zeros((1, 50), np.float32)
    p[0, 10:13] = 1 / 3
    tree = tree_derive([0], [-1])
    drawn = {int(verify_rejection(tree, p, p, s, 0).tokens[0]) for s in range(2000)}
    assert drawn == {10, 11, 12}
