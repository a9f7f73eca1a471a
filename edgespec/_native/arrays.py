"""numpy arrays as C reads them: type, order and strides checked, copied if need be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.errors import UsageError


def int32(values: ArrayLike) -> NDArray[np.int32]:
    """One dimension of int32; values that would change on the way are refused."""
    array = np.asarray(values)
    if array.dtype != np.int32:
        narrow = array.astype(np.int32)
        if array.size and not np.array_equal(narrow, array):
            raise UsageError(f"expected 32-bit integers, got {array.dtype} {array}")
        array = narrow
    if array.ndim != 1:
        raise UsageError(f"expected one dimension, got shape {array.shape}")
    return np.ascontiguousarray(array)


def address(array: NDArray[Any] | None) -> int | None:
    """Where the values are; the caller keeps the array alive during the call."""
    return None if array is None else array.ctypes.data


def rows(logits: NDArray[np.float32], what: str) -> tuple[NDArray[np.float32], int]:
    """Logits (rows, vocab) float32 with contiguous rows, copied only if they are not.

    Also their stride in floats, which numpy leaves undefined for a single row.
    """
    if logits.ndim != 2 or logits.dtype != np.float32:
        raise UsageError(
            f"{what}: expected a float32 array (rows, vocab), got {logits.dtype} "
            f"{logits.shape}"
        )
    n, vocab = logits.shape
    if logits.strides[1] != 4 or (
        n > 1 and (logits.strides[0] % 4 or logits.strides[0] < 4 * vocab)
    ):
        logits = np.array(logits, order="C")
    return logits, logits.strides[0] // 4 if n > 1 else vocab


def allowed_bits(
    allowed: NDArray[np.bool_] | NDArray[np.uint8] | None, n_rows: int, vocab: int
) -> NDArray[np.uint8] | None:
    """Bool (rows, vocab), or bits packed little-endian (rows, (vocab + 7) / 8)."""
    if allowed is None:
        return None
    given = np.atleast_2d(allowed)
    width = vocab if given.dtype == np.bool_ else (vocab + 7) // 8
    if given.shape != (n_rows, width) or given.dtype not in (np.bool_, np.uint8):
        raise UsageError(
            f"allowed: expected {n_rows} rows of {vocab} tokens, bool or packed in "
            f"uint8; got an array of {allowed.dtype} {allowed.shape}"
        )
    if given.dtype == np.bool_:
        return np.packbits(given.astype(np.bool_), axis=-1, bitorder="little")
    return np.ascontiguousarray(given, dtype=np.uint8)
