"""Medians with bootstrapped intervals, against answers known otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from edgespec.intervals import Interval, median_interval


def test_nothing_measured() -> None:
    assert median_interval([]) == Interval(None, None, None)
    assert median_interval([[], []]) == Interval(None, None, None)


def test_equal_values_leave_no_doubt() -> None:
    assert median_interval([[2.0], [2.0, 2.0], [2.0]]) == Interval(2.0, 2.0, 2.0)


def test_one_group_is_the_textbook_bootstrap_of_a_median() -> None:
    """A drawn median is at most the k-th value iff 6 or more of 11 draws are."""
    values = np.arange(11.0)
    found = median_interval([values.tolist()])
    share = np.array([binom.sf(5, 11, (k + 1) / 11) for k in range(11)])
    assert found.middle == 5.0
    assert found.low == float(np.searchsorted(share, 0.025))
    assert found.high == float(np.searchsorted(share, 0.975))


def test_groups_are_drawn_before_their_values() -> None:
    """Many repeats of two prompts know no more than the two prompts do."""
    found = median_interval([[1.0] * 500, [3.0] * 500])
    assert (found.low, found.high) == (1.0, 3.0)
    alone = median_interval([[1.0, 3.0] * 500])
    assert alone.middle == 2.0
    assert alone.high is not None
    assert alone.low is not None
    assert alone.high - alone.low <= 2.0


def test_groups_may_differ_in_size() -> None:
    found = median_interval([[1.0], [2.0, 2.0, 2.0], []])
    assert found.middle == 2.0
    assert found.low == 1.0
    assert found.high == 2.0


@pytest.mark.parametrize("size", [5, 40])
def test_covers_the_truth_about_as_often_as_it_says(size: int) -> None:
    generator = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        found = median_interval([[v] for v in generator.normal(1.0, 0.2, size)])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.0 <= found.high
    assert hits >= 0.85 * 200
