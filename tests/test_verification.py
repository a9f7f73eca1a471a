"""Figures of a verification: loops cut, rounds counted."""

from __future__ import annotations

import pytest

from edgespec.config import Speculation
from edgespec.engine import check_speculation
from edgespec.errors import UsageError
from edgespec.verification import loop_cut


def test_a_reply_is_cut_where_a_gram_ends_for_the_third_time() -> None:
    fresh = list(range(100, 140))
    assert loop_cut(fresh) == 40
    assert loop_cut([7] * 40) == 18
    assert loop_cut(fresh[:16] * 2) == 32
    assert loop_cut([*fresh[:16] * 3, 1, 2]) == 48
    assert loop_cut([1, 2, 1, 2, 1, 2], n=2) == 6


@pytest.mark.parametrize("slope", [-0.1, float("nan"), float("inf")])
def test_cost_slope_is_checked(slope: float) -> None:
    with pytest.raises(UsageError, match="cost_slope"):
        check_speculation(Speculation(cost_slope=slope))
