"""Packed copies of cached models: a file that maps at once instead of being packed.

A copy is worth its disk space only where packing takes long. It is named after what it
was made of, so a stale one is never found; one that cannot be read is ignored and, when
packing was slow again, written anew.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cache import home
from edgespec.errors import BackendError, EdgeSpecError, OutOfMemoryError
from edgespec.gguf_header import shards
from edgespec.progress import Progress, silent

if TYPE_CHECKING:
    from edgespec._native import NativeModel

SECONDS = 1.0  # of packing, from which on a copy is kept
SUFFIX = ".packed.gguf"
KEY_DIGITS = 12
SPARE_BYTES = 1 << 30  # of the disk, never taken for a copy


def place(stem: str, path: Path) -> Path:
    """Where the copy of a file is kept; by size, time and inode of all its shards."""
    identity = hashlib.sha256()
    for file in shards(path):
        status = file.stat()
        identity.update(
            f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}".encode()
        )
    key = identity.hexdigest()[:KEY_DIGITS]
    return home() / "packed" / f"{stem}-{key}{SUFFIX}"


def copies_of(stem: str) -> list[Path]:
    """Every copy kept for a stem of the cache; `stem` may hold wildcards."""
    key = "[0-9a-f]" * KEY_DIGITS
    return sorted((home() / "packed").glob(f"{stem}-{key}{SUFFIX}"))


def opened(
    path: Path, copy: Path | None, open_model: Callable[[Path], NativeModel]
) -> NativeModel:
    """The model of the copy where there is a good one, else of the file itself."""
    if copy is not None and copy.is_file():
        try:
            return open_model(copy)
        except OutOfMemoryError:
            raise
        except EdgeSpecError:
            pass
    return open_model(path)


def load(
    model: NativeModel, path: Path, copy: Path | None, progress: Progress = silent
) -> None:
    """Packs an opened model; keeps a copy when that took long and there is room."""
    started = time.perf_counter()
    model.load(progress, f"pack {path.name}")
    seconds = time.perf_counter() - started
    if copy is None or model.info.is_packed or seconds < SECONDS:
        return
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(copy.parent).free
        if free < model.info.weight_bytes + SPARE_BYTES:
            return
        progress(f"keep {copy.name}", 0, 1)
        model.save(copy)
        progress(f"keep {copy.name}", 1, 1)
        stem = copy.name.removesuffix(SUFFIX)[: -KEY_DIGITS - 1]
        for other in copies_of(stem):
            if other != copy:
                other.unlink(missing_ok=True)
    except (BackendError, OSError):
        return  # a cache that cannot be written: nothing is lost but time
