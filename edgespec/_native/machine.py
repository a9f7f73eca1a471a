"""What the processor can do at best, measured in C."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_double, c_int32, c_uint64

import numpy as np
from numpy.typing import NDArray

from edgespec._native.arrays import address
from edgespec._native.library import BUFFER, I32, SIZE, Function

_features = Function("es_cpu_features", ctypes.c_char_p, SIZE)
_read = Function(
    "es_measure_read", BUFFER, SIZE, c_double, POINTER(c_double), POINTER(c_uint64)
)
_kernel = Function("es_int8_kernel", c_int32, result=ctypes.c_char_p)
_int8 = Function("es_measure_int8", c_int32, c_double, POINTER(c_double), I32)


def cpu_features() -> list[str]:
    """Vector features of this processor that the library knows of."""
    out = ctypes.create_string_buffer(256)
    _features(out, len(out))
    return out.value.decode().split()


def int8_kernels() -> list[str]:
    """The int8 kernels this processor runs, best first."""
    return names(_kernel)


def names(function: Function) -> list[str]:
    """What a function of an index gives before it gives NULL."""
    found: list[str] = []
    while (name := function(len(found))) is not None:
        found.append(name.decode())
    return found


def measure_read(data: NDArray[np.uint64], seconds: float) -> tuple[float, int]:
    """Bytes per second of reading data again and again, and the XOR of its words."""
    rate, checksum = c_double(), c_uint64()
    _read(address(data), data.nbytes, seconds, byref(rate), byref(checksum))
    return rate.value, checksum.value


def measure_int8(kernel: int, seconds: float) -> tuple[float, int]:
    """Multiply-accumulates per second of a kernel of int8_kernels(), and its sum."""
    rate, checksum = c_double(), c_int32()
    _int8(kernel, seconds, byref(rate), byref(checksum))
    return rate.value, checksum.value
