"""RoPE and the KV cache of the C core over plain C kernels, compiled for tests."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from pathlib import Path

import numpy as np

NATIVE = Path(__file__).parent.parent / "native"
SOURCES = [
    *("rope.c", "gguf.c", "gguf_values.c", "mapping.c", "blocks.c", "error.c"),
    *("kvcache.c", "ring.c", "alloc.c", "kernels/half.c", "kernels/generic.c"),
]
ERR_CONTEXT, ERR_UNSUPPORTED, ERR_FORMAT = 4, 6, 7
F16, INT8 = 0, 1


class CRope(ctypes.Structure):
    """es_rope."""

    _fields_ = [
        ("dim", c_int32),
        ("attention_factor", c_double),
        ("inv_freq", POINTER(c_double)),
    ]


class CShape(ctypes.Structure):
    """es_kv_shape."""

    _fields_ = [
        *((name, c_int32) for name in ("layers", "kv_heads", "head_dim")),
        ("windowed", c_void_p),
        *((name, c_int32) for name in ("context", "window", "sinks", "batch")),
        ("format", c_int32),
    ]


class CAttention(ctypes.Structure):
    """es_attention."""

    _fields_ = [
        ("kernels", c_void_p),
        ("heads", c_int32),
        ("softcap", c_float),
        ("sinks", c_void_p),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "attention.so")
        subprocess.run(
            [
                *compiler,
                *("-std=c11", "-O2", "-ffp-contract=off", "-shared", "-fPIC"),
                *(f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src'}"),
                *(str(NATIVE / "src" / source) for source in SOURCES),
                *("-lm", "-o", str(path)),
            ],
            check=True,
        )
        lib = ctypes.CDLL(str(path))
    handle, rope = c_void_p, POINTER(CRope)
    for name, result, arguments in [
        ("es_error_message", c_char_p, []),
        ("es_gguf_open", c_int32, [c_char_p, ctypes.c_bool, POINTER(handle)]),
        ("es_gguf_free", None, [handle]),
        ("es_rope_from_gguf", c_int32, [handle, c_char_p, c_int32, c_int32, rope]),
        ("es_rope_local_from_gguf", c_int32, [handle, c_char_p, c_int32, rope]),
        ("es_rope_clear", None, [rope]),
        ("es_rope_table", None, [rope, handle, c_int32, handle, handle]),
        ("es_kv_new", c_int32, [POINTER(CShape), POINTER(handle)]),
        ("es_kv_free", None, [handle]),
        ("es_kv_bytes", c_size_t, [POINTER(CShape)]),
        ("es_kv_length", c_int64, [handle]),
        ("es_kv_append", c_int32, [handle, handle, handle, c_int32]),
        ("es_kv_store", None, [handle, handle, *[c_int32] * 3, handle, handle]),
        ("es_kv_commit", c_int32, [handle, handle, c_int32]),
        ("es_kv_rollback", None, [handle]),
        ("es_kv_truncate", c_int32, [handle, c_int64]),
        ("es_kv_scratch", c_size_t, [POINTER(CShape), c_int32]),
        (
            "es_kv_attend",
            None,
            [
                handle,
                POINTER(CAttention),
                *[c_int32] * 5,
                *[handle, c_size_t] * 2,
                handle,
            ],
        ),
    ]:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class NativeError(Exception):
    """A status other than ES_OK: `status`, and the message as text."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(library().es_error_message().decode())


def check(status: int) -> None:
    if status != 0:
        raise NativeError(status)


class Rope:
    """Rope of a GGUF file; `local`: that of its windowed layers."""

    def __init__(
        self, path: Path, arch: str, dim: int, context: int = 0, *, local: bool = False
    ) -> None:
        lib, gguf, self.rope = library(), c_void_p(), CRope()
        check(lib.es_gguf_open(os.fsencode(path), True, byref(gguf)))
        if local:
            status = lib.es_rope_local_from_gguf(
                gguf, arch.encode(), dim, byref(self.rope)
            )
        else:
            status = lib.es_rope_from_gguf(
                gguf, arch.encode(), dim, context, byref(self.rope)
            )
        lib.es_gguf_free(gguf)
        check(status)
        self.inv_freq = np.array(self.rope.inv_freq[: dim // 2])
        self.attention_factor = self.rope.attention_factor

    def __del__(self) -> None:
        library().es_rope_clear(byref(self.rope))

    def table(self, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin (n, dim / 2) float32."""
        shape = (len(positions), self.rope.dim // 2)
        cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
        library().es_rope_table(
            byref(self.rope),
            (c_int64 * len(positions))(*positions),
            len(positions),
            cos.ctypes.data,
            sin.ctypes.data,
        )
        return cos, sin


class Cache:
    """A KV cache and the attention of `heads` query heads over it."""

    def __init__(
        self,
        *,
        layers: int = 1,
        kv_heads: int = 1,
        heads: int = 1,
        head_dim: int = 32,
        windowed: list[bool] | None = None,
        context: int = 256,
        window: int = 0,
        sinks: int = 0,
        batch: int = 64,
        kind: int = F16,
        softcap: float = 0.0,
        sink_logits: np.ndarray | None = None,
    ) -> None:
        lib = library()
        self._windowed = None
        if windowed is not None:
            self._windowed = np.array(windowed, np.uint8)
        flags = self._windowed.ctypes.data if self._windowed is not None else None
        shape = (layers, kv_heads, head_dim, flags, context, window, sinks, batch, kind)
        self.shape = CShape(*shape)
        self.handle = c_void_p()
        check(lib.es_kv_new(byref(self.shape), byref(self.handle)))
        self.heads = heads
        self._kernels = ctypes.addressof(c_void_p.in_dll(lib, "es_kernels_generic"))
        self._sinks = sink_logits
        address = sink_logits.ctypes.data if sink_logits is not None else None
        self._attention = CAttention(self._kernels, heads, softcap, address)
        n_floats = lib.es_kv_scratch(byref(self.shape), heads)
        self._scratch = np.empty(n_floats, np.float32)

    def __del__(self) -> None:
        library().es_kv_free(self.handle)

    def __len__(self) -> int:
        return library().es_kv_length(self.handle)

    def bytes(self) -> int:
        return library().es_kv_bytes(byref(self.shape))

    def append(self, parent: list[int] | int, k: np.ndarray, v: np.ndarray) -> None:
        """A tree by its parents, or a chain of so many rows; k and v (layers, rows,
        kv_heads, head_dim) float32."""
        depth = mask = None
        n = parent if isinstance(parent, int) else len(parent)
        if not isinstance(parent, int):
            depth, mask = np.zeros(n, np.int32), np.zeros(n, np.uint64)
            for i, p in enumerate(parent):
                depth[i] = depth[p] + 1 if i else 0
                mask[i] = (mask[p] if i else np.uint64(0)) | np.uint64(1 << i)
        address = [a.ctypes.data if a is not None else None for a in (depth, mask)]
        check(library().es_kv_append(self.handle, *address, n))
        for layer, row, head in np.ndindex(k.shape[:3]):
            library().es_kv_store(
                *(self.handle, self._kernels, layer, head, row),
                k[layer, row, head].ctypes.data,
                v[layer, row, head].ctypes.data,
            )

    def attend(self, layer: int, q: np.ndarray) -> np.ndarray:
        """Rows q (n, heads, head_dim), every KV group at once: the same shape."""
        n, heads, width = q.shape
        group = heads // self.shape.kv_heads
        out = np.full_like(q, np.nan)
        for head in range(0, heads, group):
            library().es_kv_attend(
                *(self.handle, byref(self._attention), layer, head, group, 0, n),
                *(q[0, head].ctypes.data, heads * width),
                *(out[0, head].ctypes.data, heads * width),
                self._scratch.ctypes.data,
            )
        return out

    def commit(self, path: list[int]) -> None:
        rows = np.array(path, np.int32)
        check(library().es_kv_commit(self.handle, rows.ctypes.data, len(path)))

    def rollback(self) -> None:
        library().es_kv_rollback(self.handle)

    def truncate(self, length: int) -> bool:
        """False where a window has lost what the next row would have to see."""
        status = library().es_kv_truncate(self.handle, length)
        if status != ERR_CONTEXT:
            check(status)
        return status == 0
