"""How close a backend's real forwards come to what the machine can do."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from edgespec.machine import Rates
from edgespec.targets.base import Target
from edgespec.tree.topology import chain

WIDTHS = (1, 2, 4, 8, 16, 32)
COMMITTED = 128  # rows in the cache while measuring
SECONDS = 0.25  # of each width


@dataclass(frozen=True, slots=True)
class Reached:
    """What a backend's real forward over some rows reaches of the machine's best."""

    rows: int
    ms: float
    ratio: float  # c(n) / c(1)
    read_gb_per_s: float
    read_share: float
    gmac_per_s: float
    int8_share: float


def reach(
    target: Target,
    rates: Rates,
    *,
    read_bytes: int,
    macs: int,
    committed: int = COMMITTED,
    seconds: float = SECONDS,
) -> list[Reached]:
    """Times forwards of several widths, logits of all rows; leaves the target empty.

    Widths that do not fit the context are left out.

    Args:
        read_bytes: weights one forward reads.
        macs: multiply-accumulates with weights per row.
        seconds: spent on each width.
    """
    committed = min(committed, target.context // 2)
    tokens = ((np.arange(committed + max(WIDTHS)) * 31 + 7) % target.vocab).astype(
        np.int32
    )
    target.truncate(0)
    if committed:
        target.prefill(tokens[:committed])
    found: list[Reached] = []
    for rows in WIDTHS:
        if committed + rows > target.context:
            break
        tree = chain(tokens[committed : committed + rows])
        target.forward(tree)
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            target.forward(tree)
            times.append(time.perf_counter() - start)
        taken = statistics.median(times)
        read, gmac = read_bytes / taken / 1e9, macs * rows / taken / 1e9
        found.append(
            Reached(
                rows=rows,
                ms=taken * 1e3,
                ratio=taken * 1e3 / found[0].ms if found else 1.0,
                read_gb_per_s=read,
                read_share=read / rates.read_gb_per_s,
                gmac_per_s=gmac,
                int8_share=gmac / rates.int8_gmac_per_s,
            )
        )
    target.truncate(0)
    return found
