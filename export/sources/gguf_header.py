"""GGUF headers read with suspicion: counts and offsets are checked before use."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_MAX_KEY = 65535
_MIN_TENSOR_INFO = 8 + 1 + 4 + 8 + 4 + 8


class Metadata(dict[str, Any]):
    """Key-value pairs that remember their GGUF types and so can be written back."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, tuple[GGUFValueType, GGUFValueType | None]] = {}

    def put(
        self,
        key: str,
        value: Any,
        type_: GGUFValueType,
        item: GGUFValueType | None = None,
    ) -> None:
        """Set a key with its type; item is the element type of an array."""
        self[key] = value
        self.types[key] = (type_, item)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file."""

    name: str  # as stored, with ".weight"
    shape: tuple[int, ...]  # numpy order
    kind: str
    offset: int  # bytes from the start of the file
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked GGUF file; data is its memory map."""

    path: Path
    version: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    data: NDArray[np.uint8]

    def raw(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """Bytes of a tensor, (rows, bytes of a row), not copied."""
        rows = 1 if len(tensor.shape) == 1 else int(np.prod(tensor.shape[:-1]))
        end = tensor.offset + tensor.n_bytes
        return self.data[tensor.offset : end].reshape(rows, -1)


def open_gguf(path: Path) -> GGUFFile:
    """Read and check a header (GGUF versions 2 and 3, little-endian).

    Raises FormatError naming file, tensor and offset when the file is truncated,
    inconsistent or of another format, UnsupportedError for versions and byte orders
    not read here.
    """
    size = path.stat().st_size
    if size == 0:
        raise FormatError(f"{path}: the file is empty")
    cursor = _Cursor(path, np.memmap(path, np.uint8, mode="r"))
    if cursor.take(4, "the magic") != b"GGUF":
        raise FormatError(f"{path}: not a GGUF file (no 'GGUF' at offset 0)")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        hint = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise UnsupportedError(
            f"{path}: GGUF {hint} is not supported; expected version 2 or 3"
        )
    n_tensors = cursor.number("Q", "the tensor count")
    n_pairs = cursor.number("Q", "the metadata count")
    cursor.expect(n_pairs, 8 + 1 + 4 + 1, f"{n_pairs} metadata entries")
    cursor.expect(n_tensors, _MIN_TENSOR_INFO, f"{n_tensors} tensor entries")
    metadata = Metadata()
    for _ in range(n_pairs):
        start = cursor.offset
        key = cursor.text("a metadata key")
        if not 0 < len(key) <= _MAX_KEY or key in metadata:
            what = "duplicate" if key in metadata else "empty or oversized"
            raise FormatError(
                f"{path}: {what} metadata key {key[:80]!r} at offset {start}"
            )
        metadata.put(key, *cursor.value(key))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"{path}: general.alignment {alignment!r} is no power of two")
    entries = [cursor.tensor_info() for _ in range(n_tensors)]
    tensors = _place(path, entries, cursor.offset, alignment, size)
    return GGUFFile(path, version, metadata, tensors, cursor.data)


def _place(
    path: Path,
    entries: list[tuple[str, tuple[int, ...], int, int]],
    header_end: int,
    alignment: int,
    size: int,
) -> tuple[TensorInfo, ...]:
    """Check that tensors lie one after the other, aligned, inside the file."""
    start = -(-header_end // alignment) * alignment
    names: set[str] = set()
    found = []
    expected = 0
    for name, shape, type_id, offset in entries:
        if name in names:
            raise FormatError(f"{path}: tensor {name!r} appears twice")
        names.add(name)
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise FormatError(
                f"{path}: tensor {name!r} has unknown ggml type {type_id}"
            ) from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise FormatError(
                f"{path}: tensor {name!r}: rows of {shape[-1]} do not divide into "
                f"{kind.name} blocks of {block}"
            )
        n_bytes = block_bytes * (shape[-1] // block)
        for length in shape[:-1]:
            n_bytes *= length
        if offset != expected:
            raise FormatError(
                f"{path}: tensor {name!r}: expected at data offset {expected}, got "
                f"{offset}"
            )
        if start + offset + n_bytes > size:
            raise FormatError(
                f"{path}: truncated: tensor {name!r} at offset {start + offset} needs "
                f"{n_bytes} bytes, the file ends at {size}; fetch it again"
            )
        expected = offset + -(-n_bytes // alignment) * alignment
        found.append(TensorInfo(name, shape, kind.name, start + offset, n_bytes))
    return tuple(found)


class _Cursor:
    """Reads forward through a file, checking each step against its end."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data
        self.view = data.data
        self.offset = 0

    def expect(self, count: int, each: int, what: str) -> None:
        left = len(self.view) - self.offset
        if count * each > left:
            raise FormatError(
                f"{self.path}: truncated or damaged: {what} at offset {self.offset} "
                f"cannot fit in the {left} bytes that follow; fetch it again"
            )

    def take(self, n_bytes: int, what: str) -> bytes:
        self.expect(n_bytes, 1, what)
        self.offset += n_bytes
        return bytes(self.view[self.offset - n_bytes : self.offset])

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[
            0
        ]

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        start = self.offset
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise FormatError(
                f"{self.path}: {what} at offset {start} is not UTF-8"
            ) from None

    def type(self, what: str) -> GGUFValueType:
        start = self.offset
        value = self.number("I", what)
        try:
            return GGUFValueType(value)
        except ValueError:
            raise FormatError(
                f"{self.path}: {what} has unknown type {value} at offset {start}"
            ) from None

    def value(self, key: str) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
        what = f"metadata {key!r}"
        kind = self.type(what)
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(kind, what), kind, None
        item = self.type(what)
        count = self.number("Q", what)
        if item is GGUFValueType.ARRAY:
            raise UnsupportedError(f"{self.path}: {what} is an array of arrays")
        if item is GGUFValueType.STRING:
            self.expect(count, 8, f"{what} of {count} strings")
            return [self.text(what) for _ in range(count)], kind, item
        code = _SCALARS[item]
        self.expect(count, struct.calcsize(code), f"{what} of {count} values")
        raw = self.take(count * struct.calcsize("<" + code), what)
        return list(struct.unpack(f"<{count}{code}", raw)), kind, item

    def scalar(self, kind: GGUFValueType, what: str) -> Any:
        if kind is GGUFValueType.STRING:
            return self.text(what)
        return self.number(_SCALARS[kind], what)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        start = self.offset
        name = self.text("a tensor name")
        what = f"tensor {name!r}"
        n_dims = self.number("I", what)
        if not 1 <= n_dims <= 4:
            raise FormatError(
                f"{self.path}: {what} at offset {start} has {n_dims} dimensions"
            )
        dims = [self.number("Q", what) for _ in range(n_dims)]
        if 0 in dims:
            raise FormatError(
                f"{self.path}: {what} at offset {start} has an empty dimension"
            )
        return (
            name,
            tuple(reversed(dims)),
            self.number("I", what),
            self.number("Q", what),
        )
