"""The model in C: a GGUF file's weights, packed for small batches."""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import POINTER, byref, c_char, c_char_p, c_int32
from dataclasses import dataclass
from pathlib import Path

from edgespec._native.library import (
    HANDLE,
    SIZE,
    VOID,
    Function,
    check_structs,
    struct,
)
from edgespec._native.machine import names
from edgespec.errors import BackendError, UsageError
from edgespec.progress import Progress, silent

QUIET_SECONDS = 0.3  # of packing, before it is worth a word


class CModelParams(ctypes.Structure):
    """es_model_params"""

    _fields_ = [
        ("threads", c_int32),
        ("use_mmap", c_int32),
        ("lock", c_int32),
        ("cpu", c_char_p),
    ]


class CModelInfo(ctypes.Structure):
    """es_model_info"""

    _fields_ = [
        ("architecture", c_char * 32),
        ("cpu", c_char * 32),
        ("vocab", c_int32),
        ("layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("ffn", c_int32),
        ("max_position", c_int32),
        ("window", c_int32),
        ("windowed_layers", c_int32),
        ("threads", c_int32),
        ("is_packed", c_int32),
        ("file_bytes", SIZE),
        ("weight_bytes", SIZE),
        ("token_bytes", SIZE),
    ]


struct("es_model_params", CModelParams)
struct("es_model_info", CModelInfo)
_params_default = Function("es_model_params_default", POINTER(CModelParams))
_variant = Function("es_cpu_variant", c_int32, result=c_char_p)
_open = Function("es_model_open", c_char_p, POINTER(CModelParams), POINTER(HANDLE))
_load = Function("es_model_load", HANDLE, POINTER(SIZE), POINTER(SIZE))
_describe = Function("es_model_describe", HANDLE, POINTER(CModelInfo))
_save = Function("es_model_save", HANDLE, c_char_p)
_free = Function("es_model_free", HANDLE, result=VOID)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """es_model_info"""

    architecture: str
    cpu: str  # kernel variant
    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_position: int
    window: int  # of its sliding layers; 0: it has none
    windowed_layers: int
    threads: int
    is_packed: bool  # mapped from a packed file
    file_bytes: int
    weight_bytes: int  # packed
    token_bytes: int  # weights read for one token


def cpu_variants() -> list[str]:
    """Names of the kernel variants this processor runs, best first."""
    return names(_variant)


class NativeModel:
    """A GGUF file, plain or packed, opened and checked; usable once loaded.

    Args:
        threads: that compute, the caller's included.
        use_mmap: map the file instead of reading it into memory.
        lock: keep the weights from being swapped out; MemoryError when refused.
        cpu: a name of cpu_variants(); None: $EDGESPEC_CPU, else the best.

    Raises FormatError for a damaged file, UnsupportedError for an architecture, type or
    option the engine does not know, BackendError when the file cannot be read, and from
    every call in a process forked from the one that opened it.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int,
        use_mmap: bool = True,
        lock: bool = False,
        cpu: str | None = None,
    ) -> None:
        self._handle = HANDLE()
        self._process = os.getpid()
        check_structs("es_model_params", "es_model_info")
        params = CModelParams()
        _params_default(byref(params))
        params.threads = threads
        params.use_mmap = use_mmap
        params.lock = lock
        if cpu is not None:
            params.cpu = cpu.encode()
        _open(os.fsencode(path), byref(params), byref(self._handle))

    def load(self, progress: Progress = silent, what: str = "pack") -> None:
        """Packs the weights, in parts, so that Ctrl-C works; slow work is shown."""
        done, total = SIZE(), SIZE()
        started = time.perf_counter()
        is_shown = False
        while True:
            _load(self.open_handle, byref(done), byref(total))
            is_done = done.value >= total.value
            is_late = time.perf_counter() - started > QUIET_SECONDS
            is_shown = is_shown or (is_late and not is_done)
            if is_shown:
                progress(what, done.value, total.value)
            if is_done:
                return

    @property
    def info(self) -> ModelInfo:
        out = CModelInfo()
        _describe(self.open_handle, byref(out))
        values = {name: getattr(out, name) for name, *_ in CModelInfo._fields_}
        for name in ("architecture", "cpu"):
            values[name] = values[name].decode()
        return ModelInfo(**values | {"is_packed": bool(out.is_packed)})

    def save(self, path: Path) -> None:
        """Writes the loaded weights as a packed file, which appears whole."""
        _save(self.open_handle, os.fsencode(path))

    def close(self) -> None:
        """Frees the weights; its caches have to be closed before. Idempotent."""
        handle, self._handle = getattr(self, "_handle", None), HANDLE()
        # A forked process has no threads to send home; it would wait for them for ever.
        if handle and self._process == os.getpid():
            _free(handle)

    def __del__(self) -> None:
        self.close()

    @property
    def open_handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise UsageError("the model is closed")
        self.check_process()
        return self._handle

    def check_process(self) -> None:
        """Raises BackendError in a process forked from the one that has the threads."""
        if self._process != os.getpid():
            raise BackendError(
                f"the model was loaded in process {self._process} and its threads "
                f"stayed there; process {os.getpid()} was forked from it and has to "
                "load the model itself"
            )
