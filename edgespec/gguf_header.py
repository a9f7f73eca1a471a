"""GGUF headers read with suspicion: counts and offsets are checked before use."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, ModelNotFoundError, UnsupportedError

# Value types, numbered by the GGUF specification.
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
# Tensor types, numbered by ggml: name, values of a block, bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
DEFAULT_ALIGNMENT = 32
_MAX_KEY = 65535
_MIN_TENSOR_INFO = 8 + 1 + 4 + 8 + 4 + 8
_LENGTH = struct.Struct("<Q")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Metadata(dict[str, Any]):
    """Key-value pairs that remember their GGUF types and so can be written back."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, tuple[int, int | None]] = {}

    def put(self, key: str, value: Any, type_: int, item: int | None = None) -> None:
        """Sets a key with its type; item is the element type of an array."""
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
    """Reads and checks a header (GGUF versions 2 and 3, little-endian).

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
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise FormatError(f"{path}: general.alignment {alignment!r} is no power of two")
    entries = [cursor.tensor_info() for _ in range(n_tensors)]
    tensors = _place(path, entries, cursor.offset, alignment, size)
    return GGUFFile(path, version, metadata, tensors, cursor.data)


def shards(path: Path) -> list[Path]:
    """The files of a GGUF, in order: several when it is called -0000K-of-0000N.gguf.

    Raises ModelNotFoundError naming an absent one, FormatError for "4 of 3".
    """
    match = _SHARD.fullmatch(path.name)
    count = int(match[3]) if match else 1
    paths = [path]
    if match:
        if not 1 <= int(match[2]) <= count:
            raise FormatError(f"{path}: shard {match[2]} of {match[3]} cannot be")
        paths = [
            path.with_name(f"{match[1]}-{k + 1:05d}-of-{match[3]}.gguf")
            for k in range(count)
        ]
    for file in paths:
        if not file.is_file():
            raise ModelNotFoundError(
                f"{file}: no such file; {path.name} has {count} part(s)"
            )
    return paths


def check_shards(files: list[GGUFFile]) -> None:
    """FormatError when the files do not say they are the shards of one model."""
    count = files[0].metadata.get("split.count", 1) or 1
    if count != len(files):
        raise FormatError(
            f"{files[0].path}: says it has {count} shards, but its name stands for "
            f"{len(files)}"
        )
    if count == 1:
        return
    total = files[0].metadata.get("split.tensors.count")
    found = sum(len(file.tensors) for file in files)
    if total is not None and total != found:
        raise FormatError(
            f"{files[0].path}: expected {total} tensors in all shards, got {found}"
        )
    for k, file in enumerate(files):
        if file.metadata.get("split.no") != k:
            raise FormatError(
                f"{file.path}: expected split.no {k}, got "
                f"{file.metadata.get('split.no')}"
            )


def logical_tensors(file: GGUFFile) -> list[TensorInfo]:
    """The tensors as a model has them: tiles of a packed file by their own shape."""
    metadata = file.metadata
    if "edgespec.packed.version" not in metadata:
        return list(file.tensors)
    columns = [
        metadata.get(f"edgespec.packed.{key}", ())
        for key in ("names", "types", "rows", "cols")
    ]
    found = []
    shapes = {name: row for name, *row in zip(*columns, strict=False)}
    for tensor in file.tensors:
        kind, rows, cols = shapes.get(tensor.name, (-1, 0, 0))
        if kind in TENSOR_TYPES:
            tensor = replace(tensor, shape=(rows, cols), kind=TENSOR_TYPES[kind][0])
        found.append(tensor)
    return found


def _place(
    path: Path,
    entries: list[tuple[str, tuple[int, ...], int, int]],
    header_end: int,
    alignment: int,
    size: int,
) -> tuple[TensorInfo, ...]:
    """Checks that tensors lie one after the other, aligned, inside the file."""
    start = -(-header_end // alignment) * alignment
    names: set[str] = set()
    found = []
    expected = 0
    for name, shape, type_id, offset in entries:
        if name in names:
            raise FormatError(f"{path}: tensor {name!r} appears twice")
        names.add(name)
        if type_id not in TENSOR_TYPES:
            raise FormatError(
                f"{path}: tensor {name!r} has unknown ggml type {type_id}"
            )
        kind, block, block_bytes = TENSOR_TYPES[type_id]
        if shape[-1] % block:
            raise FormatError(
                f"{path}: tensor {name!r}: rows of {shape[-1]} do not divide into "
                f"{kind} blocks of {block}"
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
        found.append(TensorInfo(name, shape, kind, start + offset, n_bytes))
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
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        """A vocabulary has a hundred thousand: one loop, no call per string."""
        found = []
        view, end, offset = self.view, len(self.view), self.offset
        for _ in range(count):
            self.offset = offset
            if end - offset < 8:
                self.expect(8, 1, what)
            (length,) = _LENGTH.unpack_from(view, offset)
            offset += 8
            if length > end - offset:
                self.offset = offset
                self.expect(length, 1, what)
            try:
                found.append(str(view[offset : offset + length], "utf-8"))
            except UnicodeDecodeError:
                raise FormatError(
                    f"{self.path}: {what} at offset {offset} is not UTF-8"
                ) from None
            offset += length
        self.offset = offset
        return found

    def type(self, what: str) -> int:
        start = self.offset
        value: int = self.number("I", what)
        if value not in SCALARS and value not in (STRING, ARRAY):
            raise FormatError(
                f"{self.path}: {what} has unknown type {value} at offset {start}"
            )
        return value

    def value(self, key: str) -> tuple[Any, int, int | None]:
        what = f"metadata {key!r}"
        kind = self.type(what)
        if kind != ARRAY:
            return self.scalar(kind, what), kind, None
        item = self.type(what)
        count = self.number("Q", what)
        if item == ARRAY:
            raise UnsupportedError(f"{self.path}: {what} is an array of arrays")
        if item == STRING:
            self.expect(count, 8, f"{what} of {count} strings")
            return self.texts(count, what), kind, item
        code = SCALARS[item]
        self.expect(count, struct.calcsize("<" + code), f"{what} of {count} values")
        raw = self.take(count * struct.calcsize("<" + code), what)
        return list(struct.unpack(f"<{count}{code}", raw)), kind, item

    def scalar(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        return self.number(SCALARS[kind], what)

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
