"""GGUF reader, block formats and packing of the C core, compiled for tests."""

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
    c_bool,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np

NATIVE = Path(__file__).parent.parent / "native"
SOURCES = [
    *("gguf.c", "gguf_values.c", "mapping.c", "blocks.c", "pack.c", "packed_file.c"),
    *("error.c", "kernels/half.c"),
]


class CString(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("n", c_size_t)]

    def bytes(self) -> bytes:
        return ctypes.string_at(self.data, self.n)


class CTensor(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("type", c_int32),
        ("n_dims", c_int32),
        ("dim", c_int64 * 4),
        ("offset", c_uint64),
        ("n_bytes", c_size_t),
        ("part", c_int32),
    ]


class CPacked(ctypes.Structure):
    """es_tensor."""

    _fields_ = [
        ("type", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("tile_bytes", c_size_t),
        ("data", c_void_p),
    ]


class CMatrix(ctypes.Structure):
    """es_packed_matrix."""

    _fields_ = [("name", c_char_p), ("tensor", CPacked)]


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "files.so")
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
    handle, tensor, data = c_void_p, POINTER(CTensor), c_void_p
    found = POINTER(c_bool)
    for name, result, arguments in [
        ("es_error_message", c_char_p, []),
        ("es_gguf_open", c_int32, [c_char_p, c_bool, POINTER(handle)]),
        ("es_gguf_parse", c_int32, [data, c_size_t, c_char_p, POINTER(handle)]),
        ("es_gguf_free", None, [handle]),
        ("es_gguf_size", c_size_t, [handle]),
        ("es_gguf_drop", None, [handle, tensor]),
        ("es_gguf_tensor_count", c_size_t, [handle]),
        ("es_gguf_tensor_at", tensor, [handle, c_size_t]),
        ("es_gguf_find", tensor, [handle, c_char_p]),
        ("es_gguf_data", data, [handle, tensor]),
        ("es_gguf_u32", c_int32, [handle, c_char_p, POINTER(c_uint32), found]),
        ("es_gguf_f32", c_int32, [handle, c_char_p, POINTER(c_float), found]),
        ("es_gguf_bool", c_int32, [handle, c_char_p, POINTER(c_bool), found]),
        ("es_gguf_str", c_int32, [handle, c_char_p, POINTER(CString), found]),
        ("es_gguf_array", c_int32, [handle, c_char_p, POINTER(c_size_t), found]),
        (
            "es_gguf_array_i64",
            c_int32,
            [handle, c_char_p, c_size_t, POINTER(c_int64)],
        ),
        (
            "es_gguf_array_f32",
            c_int32,
            [handle, c_char_p, c_size_t, POINTER(c_float)],
        ),
        (
            "es_gguf_array_str",
            c_int32,
            [handle, c_char_p, c_size_t, POINTER(CString)],
        ),
        ("es_gguf_key_count", c_size_t, [handle]),
        (
            "es_gguf_key_at",
            None,
            [handle, c_size_t, POINTER(CString), POINTER(CString)],
        ),
        ("es_block_floats", None, [c_int32, data, c_size_t, POINTER(c_float)]),
        ("es_pack_tile_bytes", c_size_t, [c_int32, c_int32]),
        (
            "es_pack_tiles",
            None,
            [c_int32, data, c_size_t, *[c_int32] * 4, data],
        ),
        ("es_packed_check", c_int32, [handle, found]),
        (
            "es_packed_tensor",
            c_int32,
            [handle, c_char_p, POINTER(CPacked), found],
        ),
        (
            "es_packed_save",
            c_int32,
            [handle, POINTER(CMatrix), c_size_t, c_char_p],
        ),
        ("es_pack_row", None, [POINTER(CPacked), c_int32, POINTER(c_float)]),
    ]:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class NativeError(Exception):
    """A status other than ES_OK: `status`, and the message as text."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(library().es_error_message().decode())


ERR_ARGUMENT, ERR_MEMORY, ERR_FORMAT, ERR_IO = 1, 2, 7, 8


def check(status: int) -> None:
    if status != 0:
        raise NativeError(status)


class Gguf:
    """A GGUF of the C reader: a path, or bytes to parse."""

    def __init__(self, source: Path | bytes, *, use_mmap: bool = True) -> None:
        self.handle = c_void_p()
        self._bytes = None
        if isinstance(source, bytes):
            self._bytes = ctypes.create_string_buffer(source, max(1, len(source)))
            status = library().es_gguf_parse(
                self._bytes, len(source), b"bytes.gguf", byref(self.handle)
            )
        else:
            status = library().es_gguf_open(
                os.fsencode(source), use_mmap, byref(self.handle)
            )
        check(status)

    def __del__(self) -> None:
        library().es_gguf_free(self.handle)

    def tensors(self) -> list[CTensor]:
        lib = library()
        n = lib.es_gguf_tensor_count(self.handle)
        return [lib.es_gguf_tensor_at(self.handle, i).contents for i in range(n)]

    def find(self, name: str) -> CTensor | None:
        pointer = library().es_gguf_find(self.handle, name.encode())
        return pointer.contents if pointer else None

    def data(self, tensor: CTensor) -> bytes:
        address = library().es_gguf_data(self.handle, byref(tensor))
        return ctypes.string_at(address, tensor.n_bytes)

    def drop(self, tensor: CTensor) -> None:
        library().es_gguf_drop(self.handle, byref(tensor))

    def size(self) -> int:
        return library().es_gguf_size(self.handle)

    def _get(self, function: str, kind: Any, *arguments: Any) -> Any:
        out = kind()
        check(getattr(library(), function)(self.handle, *arguments, byref(out)))
        return out

    def _scalar(self, function: str, kind: Any, key: str) -> Any:
        out, found = kind(), c_bool()
        check(
            getattr(library(), function)(
                self.handle, key.encode(), byref(out), byref(found)
            )
        )
        return out if found.value else None

    def required_u32(self, key: str) -> int:
        out = c_uint32()
        check(library().es_gguf_u32(self.handle, key.encode(), byref(out), None))
        return out.value

    def u32(self, key: str) -> int | None:
        out = self._scalar("es_gguf_u32", c_uint32, key)
        return None if out is None else out.value

    def f32(self, key: str) -> float | None:
        out = self._scalar("es_gguf_f32", c_float, key)
        return None if out is None else out.value

    def bool(self, key: str) -> bool | None:
        out = self._scalar("es_gguf_bool", c_bool, key)
        return None if out is None else out.value

    def str(self, key: str) -> bytes | None:
        out = self._scalar("es_gguf_str", CString, key)
        return None if out is None else out.bytes()

    def count(self, key: str) -> int | None:
        out = self._scalar("es_gguf_array", c_size_t, key)
        return None if out is None else out.value

    def item_i64(self, key: str, index: int) -> int:
        return self._get("es_gguf_array_i64", c_int64, key.encode(), index).value

    def item_f32(self, key: str, index: int) -> float:
        return self._get("es_gguf_array_f32", c_float, key.encode(), index).value

    def item_str(self, key: str, index: int) -> bytes:
        return self._get("es_gguf_array_str", CString, key.encode(), index).bytes()

    def is_packed(self) -> bool:
        out = c_bool()
        check(library().es_packed_check(self.handle, byref(out)))
        return out.value

    def packed(self, name: str) -> CPacked | None:
        out, found = CPacked(), c_bool()
        check(
            library().es_packed_tensor(
                self.handle, name.encode(), byref(out), byref(found)
            )
        )
        return out if found.value else None

    def save_packed(self, matrices: dict[str, CPacked], path: Path) -> None:
        entries = (CMatrix * max(1, len(matrices)))(
            *(CMatrix(name.encode(), tiles) for name, tiles in matrices.items())
        )
        check(
            library().es_packed_save(
                self.handle, entries, len(matrices), os.fsencode(path)
            )
        )

    def entries(self) -> list[tuple[bytes, bytes]]:
        """Name and whole entry of every key, in file order."""
        lib, out = library(), []
        for i in range(lib.es_gguf_key_count(self.handle)):
            name, entry = CString(), CString()
            lib.es_gguf_key_at(self.handle, i, byref(name), byref(entry))
            out.append((name.bytes(), entry.bytes()))
        return out


def block_floats(ggml_type: int, blocks: np.ndarray, n: int) -> np.ndarray:
    """n values of a row of blocks (uint8)."""
    out = np.full(n, 7.0, np.float32)
    blocks = np.ascontiguousarray(blocks, np.uint8)
    library().es_block_floats(
        ggml_type, blocks.ctypes.data, n, out.ctypes.data_as(POINTER(c_float))
    )
    return out


def tile_bytes(ggml_type: int, cols: int) -> int:
    return library().es_pack_tile_bytes(ggml_type, cols)


def pack(ggml_type: int, blocks: np.ndarray, cols: int) -> np.ndarray:
    """Tiles (n_tiles, bytes) of a matrix of blocks (rows, bytes), in two calls."""
    rows, row_bytes = blocks.shape
    n_tiles = -(-rows // 16)
    out = np.full((n_tiles, tile_bytes(ggml_type, cols)), 0xA5, np.uint8)
    for first, last in ((0, n_tiles // 2), (n_tiles // 2, n_tiles)):
        library().es_pack_tiles(
            *(ggml_type, blocks.ctypes.data, row_bytes, rows, cols, first, last),
            out.ctypes.data + first * out.shape[1],
        )
    return out


def packed_row(ggml_type: int, tiles: np.ndarray, rows: int, cols: int, row: int):
    tensor = CPacked(ggml_type, rows, cols, tiles.shape[1], tiles.ctypes.data)
    out = np.full(cols, 7.0, np.float32)
    library().es_pack_row(byref(tensor), row, out.ctypes.data_as(POINTER(c_float)))
    return out
