"""What training asks of the machine: its number format, its memory, its Ctrl-C."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType

import torch


@cache
def prefers_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 clearly faster than float32."""

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        best = math.inf
        for _ in range(4):
            start = time.perf_counter()
            a @ b
            best = min(best, time.perf_counter() - start)
        return best

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    return seconds(torch.bfloat16) * 1.5 < seconds(torch.float32)


def keep_freed_memory() -> None:
    """Has glibc keep freed memory: pages come back at every step, a third of its time.

    Elsewhere it does nothing.
    """
    mallopt = (
        getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    )
    if mallopt is not None:
        mmap_max, trim_threshold = -4, -1
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


@contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Ctrl-C raises nothing inside, where a step would be left half done.

    Yields whether there was one. The second raises KeyboardInterrupt, as does the
    first in a thread that cannot hold it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = threading.Event()

    def hold(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
