"""Downloads over HTTP: resumed after an interruption, checked, whole or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.cache import sha256_of
from edgespec.errors import FormatError, ModelNotFoundError
from edgespec.progress import Progress, silent

ATTEMPTS = 5  # without a single new byte in between


@dataclass(frozen=True, slots=True)
class Expected:
    """What a file must turn out to be; None = unknown beforehand."""

    sha256: str | None = None
    size: int | None = None


class FetchError(ModelNotFoundError):
    """One address that could not be fetched, and why, in one line."""


class Interrupted(Exception):
    """A transfer that broke off; what has arrived stays."""


class RangeError(Exception):
    """A server without the part that was asked for."""


def fetch_json(url: str, headers: Mapping[str, str] | None = None) -> Any:
    """A JSON document. Raises FetchError."""
    from edgespec.http import open_url

    try:
        with open_url(url, headers or {}) as response:
            return json.loads(response.read(64 << 20))
    except Interrupted as error:
        raise FetchError(f"{url}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FetchError(f"{url}: the answer is not JSON: {error}") from None


def download(
    url: str,
    target: Path,
    expected: Expected = Expected(),
    *,
    headers: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> None:
    """Fetches `url` into `target`, which appears only when whole and checked.

    Bytes received so far stay in `target`.part, and the next call goes on from there if
    the server still has the same file. The caller holds the lock of the directory.

    Raises:
        FetchError: the address cannot be reached, or the transfer broke off too often.
        FormatError: the bytes are not the expected ones; they are thrown away.
        ModelNotFoundError: the disk is full; nothing stays behind.
    """
    part = target.with_name(target.name + ".part")
    label = f"download {target.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    with removed_when_full(part, _etag_path(part)):
        while True:
            before = _size(part)
            try:
                _transfer(url, part, expected, headers or {}, label, progress)
                break
            except Interrupted as error:
                failures = 0 if _size(part) > before else failures + 1
                if (before == 0 and failures) or failures >= ATTEMPTS:
                    raise FetchError(f"{url}: {error}") from None
        check_download(part, expected, url, progress)
        os.replace(part, target)
        _etag_path(part).unlink(missing_ok=True)


def check_download(
    part: Path, expected: Expected, origin: str, progress: Progress = silent
) -> None:
    """Compares a file with what was expected; deletes it and raises FormatError."""
    found = Expected(
        sha256=sha256_of(part, progress) if expected.sha256 else None, size=_size(part)
    )
    for name in ("size", "sha256"):
        wanted, got = getattr(expected, name), getattr(found, name)
        if wanted is not None and wanted != got:
            part.unlink()
            _etag_path(part).unlink(missing_ok=True)
            raise FormatError(f"{origin}: {name}: expected {wanted}, got {got}")


def require_space(directory: Path, size: int, what: str) -> None:
    """Raises ModelNotFoundError when `size` more bytes cannot fit under a directory."""
    free = shutil.disk_usage(directory).free
    if size > free:
        raise ModelNotFoundError(
            f"{directory}: {what} needs {size / 1e6:.0f} MB and the disk has "
            f"{free / 1e6:.0f} MB free; make room or set EDGESPEC_HOME to another disk"
        )


@contextmanager
def removed_when_full(*paths: Path) -> Iterator[None]:
    """Removes these files and raises ModelNotFoundError when a write finds no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        for path in paths:
            path.unlink(missing_ok=True)
        raise ModelNotFoundError(
            f"{paths[0].parent}: the disk is full ({os.strerror(error.errno)}); "
            "make room or set EDGESPEC_HOME to another disk"
        ) from error


def _transfer(
    url: str,
    part: Path,
    expected: Expected,
    headers: Mapping[str, str],
    label: str,
    progress: Progress,
) -> None:
    """One request: appends what is missing to `part`, or starts it again."""
    from edgespec.http import open_url, read

    done = _size(part)
    etag = _read_etag(part, url)
    # Without a strong validator only a known digest tells whether the halves belong
    # together; without either, start again.
    if done and not (etag or expected.sha256):
        done = 0
    if done and expected.size is not None and done >= expected.size:
        if done == expected.size:
            return
        done = 0
    request = dict(headers)
    if done:
        request["Range"] = f"bytes={done}-"
        if etag:
            request["If-Range"] = etag
    try:
        response = open_url(url, request)
    except RangeError:
        part.unlink(missing_ok=True)
        raise Interrupted("the server has another file than before") from None
    with response:
        if response.status != 206:
            done = 0
        elif _range_start(response.headers.get("Content-Range", "")) != done:
            part.unlink(missing_ok=True)
            raise Interrupted("the server answered with another range than asked for")
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdecimal() else expected.size or 0
        require_space(part.parent, max(0, total - done), label)
        _write_etag(part, url, response.headers.get("ETag", ""))
        with open(part, "r+b" if done else "wb") as file:
            file.seek(done)
            file.truncate()
            progress(label, done, total)
            while chunk := read(response):
                file.write(chunk)
                done += len(chunk)
                if expected.size is not None and done > expected.size:
                    return  # not the file; the size check says so
                progress(label, done, total)
        if total and done < total:
            raise Interrupted(f"the connection closed after {done} of {total} bytes")


def _range_start(header: str) -> int:
    match = re.match(r"bytes (\d{1,18})-", header)
    return int(match[1]) if match else -1


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _etag_path(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _read_etag(part: Path, url: str) -> str:
    try:
        first, _, etag = _etag_path(part).read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return ""
    return etag if first == _url_digest(url) else ""


def _write_etag(part: Path, url: str, etag: str) -> None:
    is_strong = etag.startswith('"')
    text = f"{_url_digest(url)}\n{etag}" if is_strong else ""
    _etag_path(part).write_text(text, encoding="utf-8")


def _url_digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()
