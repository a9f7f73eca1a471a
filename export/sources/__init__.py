"""Checkpoints in, one neutral weight set out."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import FormatError, ModelNotFoundError
from edgespec.manifest import MANIFEST
from edgespec_export.sources import gguf, hf
from edgespec_export.weights import WeightSet

__all__ = ["gguf", "hf", "read"]


def read(path: Path) -> WeightSet:
    """Weights of a .gguf file or of a Hugging Face checkpoint directory."""
    if path.is_dir():
        if (path / MANIFEST).is_file():
            raise FormatError(
                f"{path}: is a bundle already; its target.gguf is a source of its own"
            )
        return hf.read(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or directory")
    if path.suffix != ".gguf":
        raise FormatError(f"{path}: expected a .gguf file or a checkpoint directory")
    return gguf.read(path)
