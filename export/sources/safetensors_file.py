"""Safetensors files, one or sharded, read through a memory map without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, ModelNotFoundError, UnsupportedError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = {"F32": 4, "F16": 2, "BF16": 2}  # types, bytes of an element
_MAX_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    path: Path
    name: str
    kind: str  # "F32" | "F16" | "BF16", or what else was asked for
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # (bytes,), memory-mapped

    def raw(self) -> NDArray[np.uint8]:
        """Bytes as stored, (rows, bytes of a row)."""
        rows = 1 if len(self.shape) < 2 else int(np.prod(self.shape[:-1]))
        return self.data.reshape(rows, -1)


def read_tensors(directory: Path) -> tuple[dict[str, StoredTensor], list[Path]]:
    """Every tensor of a checkpoint directory and the files they came from.

    Raises ModelNotFoundError without weights in this format, FormatError for files
    that break the format or an index that does not match them, UnsupportedError for
    other types.
    """
    paths, index = _files(directory)
    found: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_file(path).items():
            if name in found:
                raise FormatError(
                    f"{path}: tensor {name!r} is in {found[name].path.name} too"
                )
            if index and index.get(name) != path.name:
                raise FormatError(
                    f"{path}: tensor {name!r} is not where {INDEX} says "
                    f"({index.get(name)})"
                )
            found[name] = tensor
    lost = sorted(set(index) - set(found))
    if lost:
        raise FormatError(
            f"{directory / INDEX}: tensors in no file: {', '.join(lost[:12])}"
        )
    return found, paths


def _files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], {}
    if not (directory / INDEX).is_file():
        others = sorted(p.name for p in directory.glob("*.bin"))
        hint = f"; {others[0]} is not read: convert it to safetensors" if others else ""
        raise ModelNotFoundError(f"{directory}: neither {SINGLE} nor {INDEX}{hint}")
    try:
        index = json.loads((directory / INDEX).read_bytes())["weight_map"]
        names = {str(k): str(v) for k, v in index.items()}
    except (
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        raise FormatError(
            f"{directory / INDEX}: no usable weight_map: {error}"
        ) from error
    paths = []
    for name in sorted(set(names.values())):
        path = directory / name
        if Path(name).name != name:
            raise FormatError(f"{directory / INDEX}: {name!r} is not a plain file name")
        if not path.is_file():
            raise ModelNotFoundError(
                f"{path}: named by {INDEX}, but there is no such file"
            )
        paths.append(path)
    return paths, names


def read_file(
    path: Path, types: Mapping[str, int] = WEIGHTS
) -> dict[str, StoredTensor]:
    """Tensors of one file; `types` are the known ones and the bytes of an element."""
    size = path.stat().st_size
    if size < 8:
        raise FormatError(
            f"{path}: truncated: {size} bytes, not even the header length"
        )
    data = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise FormatError(
            f"{path}: truncated or damaged: a header of {length} bytes at offset 8 in "
            f"a file of {size}; fetch it again"
        )
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        return _place(path, entries, data[8 + length :], types)
    except (
        ValueError,
        AttributeError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        if isinstance(error, FormatError | UnsupportedError):
            raise
        raise FormatError(
            f"{path}: the header is not of the format: {error}"
        ) from error


def _place(
    path: Path,
    entries: list[tuple[str, Any]],
    body: NDArray[np.uint8],
    types: Mapping[str, int],
) -> dict[str, StoredTensor]:
    found = {}
    expected = 0
    for name, entry in entries:
        kind, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if kind not in types:
            raise UnsupportedError(
                f"{path}: tensor {name!r} has type {kind}; known: {', '.join(types)}"
            )
        n_bytes = types[kind]
        for length in shape:
            if not isinstance(length, int) or length <= 0:
                raise FormatError(f"{path}: tensor {name!r}: impossible shape {shape}")
            n_bytes *= length
        if start != expected or end - start != n_bytes:
            raise FormatError(
                f"{path}: tensor {name!r}: expected bytes {expected} to "
                f"{expected + n_bytes}, got {start} to {end}"
            )
        if end > len(body):
            raise FormatError(
                f"{path}: truncated: tensor {name!r} at data offset {start} needs "
                f"{n_bytes} bytes, {max(0, len(body) - start)} are left; fetch it again"
            )
        expected = end
        found[name] = StoredTensor(path, name, kind, shape, body[start:end])
    if expected != len(body):
        raise FormatError(f"{path}: {len(body) - expected} bytes after the last tensor")
    return found
