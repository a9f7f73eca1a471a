"""Opening, checking and writing bundles; `edgespec.manifest` states the format."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from edgespec.cache import home, sha256_of
from edgespec.errors import FormatError, ModelNotFoundError
from edgespec.manifest import (
    CHAT_TEMPLATE,
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_LIMIT,
    TARGETS,
    TOKENIZER,
    FileEntry,
    Manifest,
    parse_manifest,
)

ADVICE = (
    "; the bundle is damaged: delete its directory and export again "
    "(in the cache the next use does that)"
)
WORTH_A_MARK = 1 << 20  # bytes of a file whose checksum is worth remembering


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; its files are checked when they are asked for."""

    directory: Path
    manifest: Manifest
    stem: str | None = None  # what the cache calls it, None: it is not of the cache

    def path_of(self, name: str) -> Path:
        """The checked file, after its data files ("target.onnx" -> "target.onnx.data").

        Raises FormatError naming the file, what was expected and what was found.
        """
        if name not in self.manifest.files:
            listed = ", ".join(sorted(self.manifest.files))
            advice = ""
            if name in TARGETS.values() and TARGETS["gguf"] in self.manifest.files:
                advice = (
                    f"; to make one: edgespec export {self.directory / TARGETS['gguf']}"
                    f" -o DIR --format {'onnx' if 'onnx' in name else 'packed'}"
                )
            raise FormatError(
                f"{self.directory}: no {name} in this bundle, only {listed}{advice}"
            )
        for other, entry in self.manifest.files.items():
            if other == name or other.startswith(name + "."):
                _check_file(self.directory / other, entry)
        return self.directory / name

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer, as `tokenizers` reads it."""
        return self._text(TOKENIZER)

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template, None for a base model."""
        return self._text(CHAT_TEMPLATE) if CHAT_TEMPLATE in self else None

    def _text(self, name: str) -> str:
        path = self.path_of(name)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not UTF-8: {error}") from None


def open_bundle(path: Path) -> Bundle:
    """Reads and checks a bundle's manifest; the other files when they are used."""
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such bundle")
    if not path.is_dir():
        raise FormatError(f"{path}: a bundle is a directory with {MANIFEST}")
    manifest_path = path / MANIFEST
    if not manifest_path.exists():
        raise FormatError(
            f"{path}: not a bundle, it has no {MANIFEST}; "
            f"to make one: edgespec export {path} -o DIR, or of a draft head: "
            f"edgespec export MODEL -o DIR --head {path}"
        )
    size = _regular_size(manifest_path)
    if size > MANIFEST_LIMIT:
        raise FormatError(
            f"{manifest_path}: expected at most {MANIFEST_LIMIT} bytes, got {size}"
        )
    return Bundle(path, parse_manifest(manifest_path.read_bytes(), str(manifest_path)))


def describe_file(path: Path, sha256: str | None = None) -> FileEntry:
    """The entry that `files` needs for a file; its checksum may be known already."""
    return FileEntry(sha256=sha256 or sha256_of(path), size=path.stat().st_size)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes `edgespec.json` at once; refuses a manifest it could not read back."""
    data = {"format_version": FORMAT_VERSION} | asdict(manifest)
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    target = directory / MANIFEST
    parse_manifest(text.encode(), str(target))
    handle, temporary = tempfile.mkstemp(prefix=".edgespec-", dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _regular_size(path: Path) -> int:
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise FormatError(f"{path}: missing from the bundle{ADVICE}") from None
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: expected a regular file, not a link or directory")
    return status.st_size


def _check_file(path: Path, entry: FileEntry) -> None:
    size = _regular_size(path)
    if size != entry.size:
        raise FormatError(f"{path}: size: expected {entry.size}, got {size}{ADVICE}")
    got = digest_of(path, entry.sha256)
    if got != entry.sha256:
        raise FormatError(f"{path}: sha256: expected {entry.sha256}, got {got}{ADVICE}")


def digest_of(path: Path, expected: str) -> str:
    """A file's sha256, not computed again where it was found as expected before.

    By the file's size, time and inode. What was found is remembered as an empty file
    in the cache, where that can be written; reading gigabytes again takes longer than
    to start them.
    """
    status = path.stat()
    identity = (status.st_size, status.st_mtime_ns, status.st_ino)
    return _digest_of(path, expected, identity)


@cache
def _digest_of(path: Path, expected: str, identity: tuple[int, int, int]) -> str:
    mark = None
    if identity[0] >= WORTH_A_MARK:
        told = f"{path.absolute()}\0{expected}\0{identity}"
        mark = home() / "checked" / hashlib.sha256(told.encode()).hexdigest()
        if mark.exists():
            return expected
    got = sha256_of(path)
    if got == expected and mark is not None:
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError:
            pass
    return got
