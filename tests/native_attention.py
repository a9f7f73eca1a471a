"""RoPE and the KV cache of the C core over plain C kernels, compiled for tests."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

NATIVE = Path(__file__).parent.parent / "native"
SOURCES = ["rope.c", "gguf.c", "mapping.c", "blocks.c", "error.c", "kernels/half.c"]
ERR_UNSUPPORTED, ERR_FORMAT = 6, 7


class CRope(ctypes.Structure):
    """es_rope."""

    _fields_ = [
        ("dim", c_int32),
        ("attention_factor", c_double),
        ("inv_freq", POINTER(c_double)),
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
