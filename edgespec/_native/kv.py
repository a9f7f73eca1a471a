"""KV bookkeeping in C: compaction of linear buffers, and a ring that owns no memory."""

from __future__ import annotations

from ctypes import POINTER, byref, c_int32, c_int64
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec._native.arrays import address, int32
from edgespec._native.library import BUFFER, HANDLE, I32, SIZE, VOID, Function
from edgespec.errors import UsageError

_compact = Function("es_kv_compact", BUFFER, SIZE, SIZE, SIZE, SIZE, BUFFER, c_int32)
_new = Function("es_ring_new", c_int32, c_int32, c_int32, POINTER(HANDLE))
_free = Function("es_ring_free", HANDLE, result=VOID)
_length = Function("es_ring_length", HANDLE, result=c_int64)
_append = Function("es_ring_append", HANDLE, BUFFER, c_int32, BUFFER)
_commit = Function("es_ring_commit", HANDLE, BUFFER, c_int32, BUFFER, BUFFER, I32)
_rollback = Function("es_ring_rollback", HANDLE)
_truncate = Function("es_ring_truncate", HANDLE, c_int64)
_visible = Function("es_ring_visible", HANDLE, c_int64, BUFFER, I32)


def kv_compact(cache: NDArray[Any], first: int, path: ArrayLike) -> None:
    """Moves rows first + path[i] to first + i, in place.

    cache (..., rows, row): C-contiguous; every leading index is a block of its own.
    """
    if not cache.flags.c_contiguous or cache.ndim < 2:
        raise UsageError(
            f"cache: expected a C-contiguous array (..., rows, row), got {cache.shape}"
        )
    rows = int32(path)
    if len(rows) and first + int(rows.max()) >= cache.shape[-2]:
        raise UsageError(
            f"path: expected rows below {cache.shape[-2] - first}, got {rows.max()}"
        )
    row_bytes = cache.shape[-1] * cache.itemsize
    _compact(
        address(cache),
        int(np.prod(cache.shape[:-2])),
        cache.shape[-2] * row_bytes,
        row_bytes,
        first,
        address(rows),
        len(rows),
    )


class Ring:
    """A windowed ring of KV slots: which slot each row lives in. Owns no KV memory."""

    def __init__(self, n_slots: int, sinks: int = 0, window: int = 0) -> None:
        self._handle = HANDLE()
        _new(n_slots, sinks, window, byref(self._handle))
        self.n_slots = n_slots

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _free(self._handle)

    def __len__(self) -> int:
        return int(_length(self._handle))

    def append(self, depth: ArrayLike) -> NDArray[np.int32]:
        """Places rows of these depths behind the committed ones; their slots."""
        depths = int32(depth)
        slots = np.empty(len(depths), np.int32)
        _append(self._handle, address(depths), len(depths), address(slots))
        return slots

    def commit(self, path: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Keeps these rows of the last append; slot moves (from, to) owed, in order."""
        rows = int32(path)
        source, target = np.empty_like(rows), np.empty_like(rows)
        n = c_int32()
        _commit(
            self._handle,
            address(rows),
            len(rows),
            address(source),
            address(target),
            byref(n),
        )
        return source[: n.value], target[: n.value]

    def rollback(self) -> None:
        """Drops the last append."""
        _rollback(self._handle)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions."""
        _truncate(self._handle, length)

    def visible(self, position: int) -> NDArray[np.int32]:
        """Slots of committed positions visible from `position`, in position order."""
        slots = np.empty(self.n_slots, np.int32)
        n = c_int32()
        _visible(self._handle, position, address(slots), byref(n))
        return slots[: n.value]
