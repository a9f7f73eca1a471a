"""Where the tensors of a draft head lie: GGUF, safetensors, or PyTorch's zip files.

A file is known by its first bytes, not by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import FormatError, ModelNotFoundError
from edgespec_export.sources import safetensors_file
from edgespec_export.sources.heads_pickle import read_zip
from edgespec_export.sources.safetensors_file import StoredTensor

_TYPES = safetensors_file.WEIGHTS | {"I64": 8, "I32": 4, "BOOL": 1, "U8": 1}
# By preference; of several files of a kind, which one is the model.
_SUFFIXES = {".safetensors": "model", ".bin": "pytorch_model", ".pt": "", ".pth": ""}
_INDEX = ".index.json"


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A checkpoint as stored."""

    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]  # config.json beside it; empty without one
    paths: tuple[Path, ...]
    where: str  # for messages


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def sole_gguf(path: Path) -> Path:
    """The one GGUF of a directory without safetensors; else the path itself."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        ggufs = sorted(path.glob("*.gguf"))
        return ggufs[0] if len(ggufs) == 1 else path
    return path


def read_files(path: Path) -> HeadFiles:
    """Tensors and configuration of a weights file, or of a directory of them.

    Raises ModelNotFoundError without weights, FormatError for damaged or ambiguous
    ones.
    """
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or directory")
    paths = [path] if path.is_file() else _weights(path)
    found: dict[str, StoredTensor] = {}
    for file in paths:
        for name, tensor in _read(file).items():
            if name in found:
                raise FormatError(
                    f"{file}: tensor {name!r} is in {found[name].path.name} too"
                )
            found[name] = tensor
    directory = path.parent if path.is_file() else path
    config = _config(directory / "config.json")
    return HeadFiles(found, config, tuple(paths), str(path))


def _read(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        first = file.read(9)
    if first[:4] == b"PK\x03\x04":
        return read_zip(path)
    if len(first) < 9 or first[8:] == b"{":
        return safetensors_file.read_file(path, _TYPES)
    if first[:1] == b"\x80":
        raise FormatError(
            f"{path}: a bare pickle, as PyTorch wrote before 1.6: load it with torch "
            "and save it as safetensors"
        )
    raise FormatError(f"{path}: neither GGUF nor safetensors nor a PyTorch zip file")


def _weights(directory: Path) -> list[Path]:
    """The files of a directory: those of an index, else all of the preferred kind."""
    for suffix, stem in _SUFFIXES.items():
        index = sorted(directory.glob(f"*{suffix}{_INDEX}"))
        if len(index) == 1:
            return _indexed(index[0])
        files = sorted(directory.glob(f"*{suffix}"))
        files = [file for file in files if file.stem == stem] or files
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:6])
            raise FormatError(
                f"{directory}: which of {names} is the head? Name the file"
            )
        if files:
            return files
    raise ModelNotFoundError(
        f"{directory}: no weights: expected a file in {', '.join(_SUFFIXES)} or .gguf"
    )


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        paths = [index.parent / name for name in names if Path(name).name == name]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise FormatError(f"{index}: no usable weight_map: {error}") from error
    if len(paths) != len(names):
        raise FormatError(f"{index}: expected plain file names, got {names[:6]}")
    for path in paths:
        if not path.is_file():
            raise ModelNotFoundError(
                f"{path}: named by {index.name}, but there is no such file"
            )
    return paths


def _config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected an object, got {type(value).__name__}")
    return value
