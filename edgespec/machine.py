"""What this machine can do at best: the two rates that bound every decoder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec import _native

BUFFER_BYTES = 256 << 20  # beyond the last cache level of anything small
WINDOWS = 6  # the best of several short ones: other processes come and go
WINDOW_SECONDS = 0.05

Work = Callable[[Any, float], tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Rates:
    """The best of several short measurements with this many threads."""

    threads: int
    read_gb_per_s: float  # 1e9 bytes
    int8_gmac_per_s: float  # 1e9 u8 x s8 multiply-accumulates
    int8_kernel: str


def measure(
    threads: int, *, buffer_bytes: int = BUFFER_BYTES, window: float = WINDOW_SECONDS
) -> Rates:
    """Reads memory and multiplies with every thread at once, for under a second.

    Args:
        threads: how many threads work at a time, 1 or more.
        buffer_bytes: memory to read, split among the threads.
        window: seconds of one measurement.
    """
    words = max(1, buffer_bytes // 8 // threads)
    shares = [np.full(words, i + 1, dtype=np.uint64) for i in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def best(work: Work, inputs: Sequence[Any]) -> float:
            # ctypes releases the interpreter lock, so the threads really overlap.
            windows = [window] * threads
            return max(
                sum(rate for rate, _ in pool.map(work, inputs, windows))
                for _ in range(WINDOWS)
            )

        read = best(_native.measure_read, shares)
        int8 = best(_native.measure_int8, [0] * threads)
    return Rates(
        threads=threads,
        read_gb_per_s=read / 1e9,
        int8_gmac_per_s=int8 / 1e9,
        int8_kernel=_native.int8_kernels()[0],
    )


class Bystanders:
    """How much of the machine others have used since this was made."""

    def __init__(self) -> None:
        self._start = _cpu_seconds()

    def share(self) -> float | None:
        """Of all processors' time, what went to others; None where nobody counts it."""
        end = _cpu_seconds()
        if self._start is None or end is None:
            return None
        every, busy, own = (
            now - then for now, then in zip(end, self._start, strict=True)
        )
        return min(1.0, max(0.0, busy - own) / every) if every > 0 else None


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Processor seconds so far: there were, used by anybody, used by this process."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
        ticks = [int(word) for word in line.split()[1:9]]  # user ... steal
        hertz = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    idle = sum(ticks[3:5])  # waiting for a disk included
    own = os.times()
    every = sum(ticks)
    return every / hertz, (every - idle) / hertz, own.user + own.system


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "Processor"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> tuple[int, int] | None:
    """(total, available) bytes of memory, None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemTotal"], found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None
