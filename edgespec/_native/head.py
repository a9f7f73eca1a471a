"""Draft heads in C: weights beside a target's, and the state of one conversation."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec._native.arrays import address, int32
from edgespec._native.library import (
    BUFFER,
    HANDLE,
    SIZE,
    VOID,
    Function,
    check_structs,
    struct,
)
from edgespec._native.model import NativeModel
from edgespec.errors import UsageError

MAX_TAPS = 8
HEAD_KINDS = ("medusa", "eagle", "eagle3", "model")  # by es_head_kind


class CHeadInfo(ctypes.Structure):
    """es_head_info"""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("hidden", c_int32),
        ("draft_vocab", c_int32),
        ("max_position", c_int32),
        ("depth", c_int32),
        ("n_taps", c_int32),
        ("taps", c_int32 * MAX_TAPS),
        ("file_bytes", SIZE),
        ("weight_bytes", SIZE),
    ]


class CDrafterParams(ctypes.Structure):
    """es_drafter_params"""

    _fields_ = [("window", c_int32)]


struct("es_head_info", CHeadInfo)
struct("es_drafter_params", CDrafterParams)
_PARAMS = POINTER(CDrafterParams)
_open = Function("es_head_open", HANDLE, c_char_p, POINTER(HANDLE))
_describe = Function("es_head_describe", HANDLE, POINTER(CHeadInfo))
_free_head = Function("es_head_free", HANDLE, result=VOID)
_params_default = Function("es_drafter_params_default", _PARAMS)
_memory = Function("es_drafter_memory", HANDLE, _PARAMS, POINTER(SIZE))
_new = Function("es_drafter_new", HANDLE, _PARAMS, POINTER(HANDLE))
_free = Function("es_drafter_free", HANDLE, result=VOID)
_length = Function("es_drafter_length", HANDLE, result=c_int64)
_append = Function("es_drafter_append", HANDLE, BUFFER, BUFFER, SIZE)
_truncate = Function("es_drafter_truncate", HANDLE, c_int64)


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """es_head_info"""

    kind: str  # one of HEAD_KINDS
    hidden: int
    draft_vocab: int  # tokens it can say
    max_position: int  # distance its positions span; 0: it has none
    depth: int  # most levels it can draft; 0: any
    taps: tuple[int, ...]  # hidden states of the target it reads, as set_taps has them
    file_bytes: int
    weight_bytes: int  # its own weights, packed


class NativeHead:
    """The weights of a GGUF head, loaded beside its target's.

    Raises FormatError naming both sides for a head of another target.
    """

    def __init__(self, target: NativeModel, path: Path) -> None:
        self._handle = HANDLE()
        self._target = target  # freed after this
        check_structs("es_head_info", "es_drafter_params")
        _open(target.open_handle, os.fsencode(path), byref(self._handle))
        self.target_hidden = target.info.hidden

    @property
    def open_handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise UsageError("the head is closed")
        self._target.check_process()
        return self._handle

    @property
    def info(self) -> HeadInfo:
        out = CHeadInfo()
        _describe(self.open_handle, byref(out))
        return HeadInfo(
            kind=HEAD_KINDS[out.kind],
            hidden=out.hidden,
            draft_vocab=out.draft_vocab,
            max_position=out.max_position,
            depth=out.depth,
            taps=tuple(out.taps[: out.n_taps]),
            file_bytes=out.file_bytes,
            weight_bytes=out.weight_bytes,
        )

    def close(self) -> None:
        """Frees the weights; drafters have to be closed before. Idempotent."""
        handle, self._handle = getattr(self, "_handle", None), HANDLE()
        if handle:
            _free_head(handle)

    def __del__(self) -> None:
        self.close()


class NativeDrafter:
    """What a head keeps of one conversation: tokens, hidden states, KV.

    Args:
        window: positions it looks back; 0: 1024, or the head's limit if less.
    """

    def __init__(self, head: NativeHead, *, window: int = 0) -> None:
        self._handle = HANDLE()
        self.head = head  # freed after this
        self._taps = len(head.info.taps)
        params = CDrafterParams()
        _params_default(byref(params))
        params.window = window
        bytes_ = SIZE()
        _memory(head.open_handle, byref(params), byref(bytes_))
        self.memory = bytes_.value  # bytes
        _new(head.open_handle, byref(params), byref(self._handle))

    @property
    def open_handle(self) -> ctypes.c_void_p:
        self.check_open()
        return self._handle

    def check_open(self) -> None:
        """Raises UsageError once it is closed: for those it is attached to."""
        if not self._handle:
            raise UsageError("the drafter is closed")

    @property
    def length(self) -> int:
        """Positions it was told of."""
        return int(_length(self.open_handle))

    def append(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        states: NDArray[np.float32] | None,
    ) -> None:
        """A target committed these; states (n, taps, hidden), None without taps.

        For targets that do not tell it themselves.
        """
        ids = int32(tokens)
        shape = (len(ids), self._taps, self.head.target_hidden)
        if states is not None or self._taps:
            got = None if states is None else states.shape
            if states is None or states.shape != shape:
                raise UsageError(f"states: expected shape {shape}, got {got}")
            states = np.ascontiguousarray(states, dtype=np.float32)
        _append(self.open_handle, address(ids), address(states), len(ids))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions."""
        _truncate(self.open_handle, length)

    def close(self) -> None:
        """Frees the memory; what it is attached to must not run again. Idempotent."""
        handle, self._handle = getattr(self, "_handle", None), HANDLE()
        if handle:
            _free(handle)

    def __del__(self) -> None:
        self.close()
