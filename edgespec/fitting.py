"""Whether a model fits into memory, said before it is loaded, and what would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec import ram
from edgespec.errors import OutOfMemoryError

SMALLEST_CONTEXT = 256  # proposed: less is no conversation


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes a target takes."""

    weights: int
    file: int  # read into memory while packing
    context: int  # KV rows and scratch

    @property
    def total(self) -> int:
        return self.weights + self.file + self.context


def check_fits(
    need: Callable[[int, str], Need],
    path: Path,
    context: int,
    kv: str,
    *,
    is_windowed: bool = False,
) -> None:
    """Raises OutOfMemoryError naming need, have and the option that would fit.

    need gives the bytes at a context and KV type. Where the system does not say what
    is available, everything fits.
    """
    have = ram.available()
    wanted = need(context, kv)
    if have is None or wanted.total <= have:
        return
    rows = "for the window" if is_windowed else f"for {context} tokens of context"
    parts = f"{_gb(wanted.weights)} of weights, {_gb(wanted.context)} {rows}"
    if wanted.file:
        parts += f", {_gb(wanted.file)} of file without mmap"
    raise OutOfMemoryError(
        f"{path}: needs {_gb(wanted.total)} of memory ({parts}), but only {_gb(have)} "
        f"are available; {_advice(need, context, kv, have, is_windowed)}"
    )


def _advice(
    need: Callable[[int, str], Need],
    context: int,
    kv: str,
    have: int,
    is_windowed: bool,
) -> str:
    def fits(context: int, kv: str, *, mapped: bool = False) -> bool:
        wanted = need(context, kv)
        return wanted.total - (wanted.file if mapped else 0) <= have

    found = []
    if need(context, kv).file and fits(context, kv, mapped=True):
        found.append("without --no-mmap it fits")
    if kv != "int8" and fits(context, "int8"):
        found.append("--kv int8 fits")
    if not is_windowed:
        for form in dict.fromkeys((kv, "int8")):
            if fits(SMALLEST_CONTEXT, form) and context > SMALLEST_CONTEXT:
                low, high = SMALLEST_CONTEXT, context
                while high - low > SMALLEST_CONTEXT:
                    middle = (low + high) // 2
                    low, high = (middle, high) if fits(middle, form) else (low, middle)
                size = low // SMALLEST_CONTEXT * SMALLEST_CONTEXT
                also = "" if form == kv else " with --kv int8"
                found.append(f"--ctx {size}{also} fits")
                break
    wanted = need(context, kv)
    if is_windowed and wanted.weights + wanted.file < have:
        found.append("a smaller --window needs less")
    if not found:
        return "a smaller quantisation of the model is needed, or a smaller model"
    return ", ".join(found)


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e7 else f"{n_bytes / 1e6:.2f} MB"
