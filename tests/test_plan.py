"""How many rows a round forwards: costs learned or given, scores corrected."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.tree.topology import MAX_ROWS
from tests.internals import Plan, chain

ROWS = np.arange(1, MAX_ROWS + 1)


def best_by_enumeration(scores, cost) -> int:
    tokens = 1 + np.cumsum([0.0, *scores])
    return 1 + int(np.argmax(tokens / cost[: len(tokens)]))


def run(plan, tree, accepted, seconds, n_rounds):
    """Rows chosen over rounds of one tree; accepted(rows) of them come true."""
    rows = []
    for _ in range(n_rounds):
        forwarded = chain(tree.score[1 : tree.n])
        forwarded.n = plan.choose(tree)
        rows.append(forwarded.n)
        plan.learn(forwarded, 1 + accepted(forwarded.n - 1), seconds(forwarded.n))
    return np.array(rows)


@settings(deadline=None)
@given(
    scores=st.lists(st.floats(0.01, 0.99), max_size=20),
    steps=st.lists(st.floats(0.001, 1), min_size=MAX_ROWS - 1, max_size=MAX_ROWS - 1),
)
def test_given_costs_choose_the_best_rate(scores, steps):
    scores = np.sort(scores)[::-1].astype(np.float32).astype(float)
    cost = 1 + np.concatenate([[0.0], np.cumsum(steps)])
    plan = Plan(cost)
    n = plan.choose(chain(scores))
    tokens = 1 + np.cumsum([0.0, *scores])
    rates = tokens / cost[: len(tokens)]
    assert rates[n - 1] == pytest.approx(rates.max())
    np.testing.assert_allclose(plan.cost(), cost)


@settings(deadline=None)
@given(st.data())
def test_gaps_in_given_costs_are_filled_without_falling(data):
    known = data.draw(st.dictionaries(st.integers(1, MAX_ROWS), st.floats(0.5, 9)))
    slope = data.draw(st.floats(0, 0.5))
    cost = Plan([known.get(n, 0) for n in ROWS], slope).cost()
    assert (cost > 0).all()
    assert (np.diff(cost) >= -1e-12).all()
    if not known:
        np.testing.assert_allclose(cost, 1 + slope * (ROWS - 1))
    points = sorted(known)
    if all(known[a] <= known[b] for a, b in itertools.pairwise(points)):
        np.testing.assert_allclose(
            cost[np.array(points, int) - 1], sorted(known.values())
        )
        inside = (points[0] <= ROWS) & (points[-1] >= ROWS) if points else ROWS < 0
        np.testing.assert_allclose(
            cost[inside],
            np.interp(ROWS, points or [1], sorted(known.values()) or [1])[inside],
        )


def test_given_costs_ignore_the_clock():
    cost = 1 + 0.1 * (ROWS - 1)
    plan = Plan(cost)
    tree = chain([0.8, 0.6, 0.4, 0.2])
    for n in (1, 3, 5):
        tree.n = n
        plan.learn(tree, 1, forward=1000.0 * n, draft=50.0)
    np.testing.assert_array_equal(plan.measured(), cost)
    np.testing.assert_allclose(plan.cost(), cost)


def test_costs_are_learned_through_noise_and_outliers():
    rng = np.random.default_rng(0)
    plan = Plan(slope=0.5)

    def truth(n):
        return 0.010 + 0.0004 * (n - 1)

    for i in range(400):
        n = int(rng.integers(1, 17))
        slow = 10 if i % 23 == 5 else 1  # the machine did something else
        plan.learn(chain([0.5] * (n - 1)), 1, truth(n) * slow * rng.uniform(0.95, 1.1))
    np.testing.assert_allclose(plan.cost()[:16], truth(ROWS[:16]), rtol=0.15)
    assert (plan.measured()[16:] == 0).all()
    assert (np.diff(plan.cost()) >= 0).all()


def test_the_first_round_drafts_by_the_prior():
    assert Plan(slope=0.05).choose(chain([0.9, 0.8])) == 3
    assert Plan(slope=0.5).choose(chain([0.4, 0.1])) == 1


def test_drafting_stops_when_rows_cost_more_than_they_bring():
    plan = Plan(slope=0.02)
    tree = chain([0.5, 0.25, 0.12])
    rows = run(plan, tree, lambda k: k > 0, lambda n: 0.01 * n, 1000)
    assert rows[0] == 4
    assert (rows[-500:] > 1).mean() < 0.05  # rare tries go on


def test_scores_that_do_not_come_true_stop_drafting():
    plan = Plan(1 + 0.2 * (ROWS - 1))
    rows = run(plan, chain([0.9, 0.8, 0.7]), lambda k: 0, lambda n: 0.0, 1000)
    assert rows[0] == 4
    cost = 1 + 0.2 * (rows - 1)
    assert cost.sum() < 1000 * 1.03  # never slower: all rounds, the first ones included
    assert (rows[-400:] > 1).sum() <= 2


def test_scores_that_are_too_low_are_scaled_up():
    plan = Plan(1 + 0.3 * (ROWS - 1))
    tree = chain([0.31, 0.25])
    rows = run(plan, tree, lambda k: k, lambda n: 0.0, 50)
    assert rows[0] == 2
    assert rows[-1] == 3


def test_llamacpp_pr_22168_acceptance_recovers_when_a_text_turns_repetitive():
    """However long nothing was accepted, repeating text is soon drafted for again."""
    for n_bad in (20, 200, 5000):
        plan = Plan(1 + 0.2 * (ROWS - 1))
        tree = chain([0.9, 0.8, 0.7])
        run(plan, tree, lambda k: 0, lambda n: 0.0, n_bad)
        rows = run(plan, tree, lambda k: k, lambda n: 0.0, min(n_bad, 512) + 60)
        assert (rows[-30:] == 4).all()


def test_a_cost_measured_badly_once_is_measured_again():
    plan = Plan(slope=0.05)
    tree = chain([0.9, 0.8, 0.7])

    def seconds(n, calls=[0]):  # noqa: B006
        calls[0] += 1
        return 0.06 if calls[0] == 1 else 0.01 + 0.0005 * (n - 1)

    rows = run(plan, tree, lambda k: k, seconds, 500)
    assert (rows[-20:] == 4).all()


def test_costs_that_fall_later_are_noticed():
    plan = Plan(slope=0.05)
    tree = chain([0.6, 0.4])
    rows = run(plan, tree, lambda k: min(k, 1), lambda n: 0.01 * n, 300)
    assert (rows[-50:] == 1).mean() > 0.9
    rows = run(plan, tree, lambda k: min(k, 1), lambda n: 0.01 + 0.0002 * (n - 1), 1500)
    assert (rows[-50:] > 1).mean() > 0.9  # c(1) is measured now and then


def test_a_slow_draft_has_to_pay_too():
    plan, tree = Plan(slope=0.1), chain([0.6])
    forwarded = chain([0.6])
    assert plan.choose(tree) == 2
    for n in (1, 2) * 40:
        forwarded.n = n
        plan.learn(forwarded, 1 + (n == 2), 0.01 + 0.001 * (n - 1), draft=0.02)
    assert plan.choose(tree) == 1


def test_the_floor_loses_no_row_that_would_pay():
    steps = 1 + 0.4 * ((ROWS - 1) // 4)
    for cost in (1 + 0.1 * (ROWS - 1), steps, 1 + 0.01 * ROWS**1.5):
        plan = Plan(cost)
        floor = plan.floor()
        assert 0 < floor < 1
        for first in np.linspace(0.05, 0.95, 19):
            scores = first * 0.8 ** np.arange(20)
            n = plan.choose(chain(scores))
            assert n == best_by_enumeration(scores.astype(np.float32), cost)
            assert n == 1 or scores[n - 2] >= floor


# ---- a head -------------------------------------------------------------------------

NOTHING = chain([])


def head_rounds(plan, without, with_head, accepted, n_rounds, passes=3, seconds=None):
    """Whether the head was asked, by round; accepted(is_asked, rows) rows come true."""
    asked = []
    for _ in range(n_rounds):
        plan.head_ran(0)
        is_asked = plan.wants_head(without)
        tree = chain((with_head if is_asked else without).score[1:8])
        tree.n = (with_head if is_asked else without).n
        plan.head_ran(passes if is_asked else 0)
        tree.n = plan.choose(tree)
        time, draft = seconds(tree.n, is_asked) if seconds else (0.0, 0.0)
        plan.learn(tree, 1 + accepted(is_asked, tree.n - 1), time, draft)
        asked.append(is_asked)
    return np.array(asked)


COST = 1 + 0.1 * (ROWS - 1)


def test_a_head_that_is_right_is_asked_always() -> None:
    head = chain([0.6, 0.4, 0.3])
    asked = head_rounds(Plan(COST), NOTHING, head, lambda is_asked, k: min(k, 1), 300)
    assert asked.all()


def test_a_head_that_is_wrong_is_tried_ever_more_rarely() -> None:
    head = chain([0.6, 0.4, 0.3])
    asked = head_rounds(Plan(COST), NOTHING, head, lambda is_asked, k: 0, 2000)
    assert 3 <= asked[:20].sum() <= 12
    assert asked[-1000:].mean() < 0.02
    assert asked[-1000:].any()


def test_a_head_is_asked_again_when_it_becomes_right() -> None:
    plan, head = Plan(COST), chain([0.6, 0.4, 0.3])
    head_rounds(plan, NOTHING, head, lambda is_asked, k: 0, 1000)
    asked = head_rounds(plan, NOTHING, head, lambda is_asked, k: min(k, 2), 700)
    assert asked[-60:].all()


def test_ngrams_that_are_surer_than_the_head_go_alone() -> None:
    plan, head = Plan(COST), chain([0.6, 0.4, 0.3])
    sure = chain([0.95, 0.9, 0.85, 0.8, 0.75])
    head_rounds(plan, NOTHING, head, lambda is_asked, k: min(k, 1), 50)
    asked = head_rounds(plan, sure, head, lambda is_asked, k: k, 200)
    assert not asked.any()
    asked = head_rounds(plan, NOTHING, head, lambda is_asked, k: min(k, 1), 5)
    assert asked.all()  # they do not count against it


def test_a_head_that_costs_more_than_it_brings_is_left_alone() -> None:
    """Measured: half a plain token for each of three passes."""
    plan, head = Plan(slope=0.1), chain([0.6, 0.4, 0.3])

    def seconds(n, is_asked):
        return 0.002 * (1 + 0.1 * (n - 1)), 0.003 if is_asked else 1e-5

    asked = head_rounds(
        plan, NOTHING, head, lambda is_asked, k: min(k, 1), 1500, 3, seconds
    )
    assert asked[-500:].mean() < 0.03
    assert plan.level_price() == pytest.approx(0.5, rel=0.1)

    def cheaper(n, is_asked):
        return 0.002 * (1 + 0.1 * (n - 1)), 0.0003 if is_asked else 1e-5

    asked = head_rounds(
        plan, NOTHING, head, lambda is_asked, k: min(k, 1), 1500, 3, cheaper
    )
    assert asked[-100:].mean() > 0.9  # plain rounds for c(1) come between
    assert plan.level_price() == pytest.approx(0.05 * 1.5, rel=0.2)


def test_what_the_head_took_is_spent_whatever_is_forwarded() -> None:
    """So rows are worth a forward that would not have been worth the draft."""
    tree = chain([0.25])
    plan = Plan(1 + 0.3 * (ROWS - 1))
    assert plan.choose(tree) == 1
    plan.head_ran(4)
    assert plan.choose(tree) == 2
