"""Plain C kernels of the core, compiled for tests, and their formulas in numpy."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from ctypes import POINTER, byref, c_float, c_int32, c_size_t, c_uint16, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from tests.native_files import CPacked

NATIVE = Path(__file__).parent.parent / "native"
SOURCES = ["kernels/generic.c", "kernels/half.c"]
GROUP = 32


class CRows(ctypes.Structure):
    """es_rows."""

    _fields_ = [
        ("n", c_int32),
        ("k", c_int32),
        *((name, c_void_p) for name in ("x", "q", "scale", "sum", "sum32")),
        *((name, c_void_p) for name in ("isum", "isum32")),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernels.so")
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
    rows, tensor, data = POINTER(CRows), POINTER(CPacked), c_void_p
    number = c_int32
    cache = [number, data, data, number, number, number]
    for name, result, arguments in [
        ("gemm", None, [tensor, number, number, rows, number, number, data, c_size_t]),
        ("quantize", None, [rows, number, number, number]),
        ("rms_norm", None, [data, data, number, c_float, data]),
        ("rope", None, [data, data, data, number, number]),
        ("swiglu", None, [data, data, number, data]),
        ("geglu", None, [data, data, number, data]),
        ("add", None, [data, data, number]),
        ("scale", None, [data, data, c_float, number]),
        ("attn_scores", None, [*cache, data, number, data, c_size_t]),
        ("attn_softmax", c_float, [data, number, c_float, number, c_float]),
        ("attn_mix", None, [*cache, data, c_size_t, number, data]),
        ("kv_store_key", None, [number, data, data, number, number, data]),
        ("kv_store_value", None, [number, data, data, number, number, data]),
    ]:
        function = getattr(lib, f"es_generic_{name}")
        function.restype, function.argtypes = result, arguments
    lib.es_half_to_float.restype, lib.es_half_to_float.argtypes = c_float, [c_uint16]
    lib.es_float_to_half.restype, lib.es_float_to_half.argtypes = c_uint16, [c_float]
    return lib


def call(name: str, *arguments: Any) -> Any:
    """Calls es_generic_<name>; arrays become addresses."""
    return getattr(library(), f"es_generic_{name}")(
        *(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments)
    )


class Rows:
    """es_rows over x (n, k) float32; the quantised fields start as rubbish."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = np.ascontiguousarray(x, np.float32)
        n, k = self.x.shape
        groups = k // GROUP
        self.q = np.full((n, k), 99, np.int8)
        self.scale = np.full((n, groups), 99, np.float32)
        self.sum = np.full((n, groups, 2), 99, np.float32)
        self.sum32 = np.full((n, groups), 99, np.float32)
        self.isum = np.full((n, groups, 2), 99, np.int32)
        self.isum32 = np.full((n, groups), 99, np.int32)
        fields = (self.x, self.q, self.scale, self.sum, self.sum32)
        fields += (self.isum, self.isum32)
        self.struct = CRows(n, k, *(field.ctypes.data for field in fields))

    def quantize(self) -> Rows:
        for row in range(len(self.x)):
            call("quantize", byref(self.struct), row, 0, self.scale.shape[1])
        return self


def gemm(
    kind: int, tiles: np.ndarray, n_outputs: int, rows: Rows, *, tail: int = 0
) -> np.ndarray:
    """All outputs of all tiles, padding included: (n, 16 * tiles)."""
    n, k = rows.x.shape
    tensor = CPacked(kind, n_outputs, k, tiles.shape[1], tiles.ctypes.data)
    width = 16 * len(tiles)
    y = np.full((n, width + tail), 7, np.float32)
    arguments = (0, len(tiles), byref(rows.struct), 0, n, y, width + tail)
    call("gemm", byref(tensor), *arguments)
    assert np.all(y[:, width:] == 7)
    return y[:, :width]


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c of float32 with one rounding.

    The product is exact in float64. The sum is rounded to odd there, so that rounding
    it once more to float32 is as if from the exact value (Boldo and Melquiond).
    """
    a, b, c = (np.asarray(v, np.float32).astype(np.float64) for v in (a, b, c))
    product = a * b
    total = np.atleast_1d(product + c)
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    bits += np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)
    return total.astype(np.float32).reshape(np.broadcast(a, b, c).shape)


def reduce_lanes(lanes: np.ndarray) -> np.float32:
    """16 float32 partial results to one: lane l += lane l + 8, + 4, + 2, + 1."""
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit; a NaN equals any NaN."""
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    both_nan = np.isnan(a) & np.isnan(b)
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | both_nan))
