"""Where edgespec keeps what it fetched and made, and how several processes share it.

    HOME/models/NAME/         files of a known model, as fetched
    HOME/hub/ORG--REPO/       files of a hub repository, and listing.json
    HOME/bundles/NAME-KEY/    bundles made on first use
    HOME/packed/NAME-KEY...   packed copies of models that are slow to pack
    HOME/heads/NAME--HEAD-KEY.gguf   draft heads of yours, converted for a model
    HOME/checked/KEY          marks of large files found as their manifests say

HOME is $EDGESPEC_HOME, else $XDG_CACHE_HOME/edgespec, else ~/.cache/edgespec.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec.errors import EdgeSpecError, ModelNotFoundError, UsageError
from edgespec.progress import Progress, silent

CHUNK = 1 << 20


def home() -> Path:
    """The cache directory; nothing is created."""
    for variable, below in (("EDGESPEC_HOME", ""), ("XDG_CACHE_HOME", "edgespec")):
        value = os.environ.get(variable, "")
        if value:
            # A relative XDG path is to be ignored; ours would change with every cd.
            path = Path(value).expanduser()
            if path.is_absolute():
                return path / below
            if variable == "EDGESPEC_HOME":
                raise UsageError(
                    f"EDGESPEC_HOME: expected an absolute path, got {value}"
                )
    return Path.home() / ".cache" / "edgespec"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds a directory's lock, so that one process at a time changes it.

    The lock is a file beside the directory: removing the directory leaves it valid.
    """
    path = directory.parent / f".{directory.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ModelNotFoundError(
            f"{path.parent}: the cache cannot be written: {error.strerror}; "
            "set EDGESPEC_HOME to a directory that can"
        ) from None
    with os.fdopen(descriptor, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, text: str) -> None:
    """Writes a text file, UTF-8, that appears whole or not at all. Raises OSError."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a device or pipe cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def cannot_write(path: Path, error: Exception) -> EdgeSpecError:
    """What to raise when a library failed to write a file, whatever it raised."""
    # For a full disk they have exceptions without errno, and torch many lines.
    said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return EdgeSpecError(
        f"{path}: cannot write: {said}; make room there, or write elsewhere"
    )


def sha256_of(path: Path, progress: Progress = silent) -> str:
    """Hex digest of a file's contents."""
    digest = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checksum {path.name.removesuffix('.part')}", done, total)
    return digest.hexdigest()


def size_of(*places: Path) -> int:
    """Bytes in these files and all under these directories, linked ones once."""
    files: dict[tuple[int, int], int] = {}
    for place in places:
        for path in [place, *place.rglob("*")]:
            if path.is_file():
                status = path.lstat()
                files[status.st_dev, status.st_ino] = status.st_size
    return sum(files.values())
