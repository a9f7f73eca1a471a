"""Files that commands write their results to."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from edgespec.cache import write_whole
from edgespec.cli.terminal import note
from edgespec.errors import UsageError


def check_result(option: str, path: Path, instead: str = "") -> None:
    """Finds a result's file impossible before the minutes of work, not after."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        why = (
            "it is a directory" if path.is_dir() else "its directory cannot be written"
        )
        raise UsageError(f"{option} {path}: {why}; name a file{instead}")


def write_result(path: Path, text: str) -> None:
    """Writes a text file whole or not at all; exits with 1 and says why."""
    try:
        write_whole(path, text)
    except OSError as error:
        note(f"edgespec: {path}: cannot write: {error.strerror}")
        raise typer.Exit(1) from None
