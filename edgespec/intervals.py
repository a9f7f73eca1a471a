"""Medians of paired measurements, with intervals from resampling them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
COVERED = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its 95 % interval; None where there was nothing to measure."""

    middle: float | None
    low: float | None
    high: float | None


def median_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """The median of all values, bootstrapped.

    Args:
        groups: what belongs together, such as the repeats of one prompt. Groups are
            drawn with replacement, and then values within each, so that repeating one
            prompt does not pass for having tried many. The draws are the same in every
            call: equal values give equal intervals.
    """
    filled = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not filled:
        return Interval(None, None, None)
    counts = np.array([len(group) for group in filled])
    values = np.full((len(filled), counts.max()), np.nan)
    for row, group in zip(values, filled, strict=True):
        row[: len(group)] = group
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(filled), (RESAMPLES, len(filled), 1))
    places = generator.random((RESAMPLES, *values.shape)) * counts[picks]
    drawn = values[picks, places.astype(np.intp)]
    medians = np.median(drawn.reshape(RESAMPLES, -1), axis=1)
    tail = (1 - COVERED) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(np.concatenate(filled))), float(low), float(high))
