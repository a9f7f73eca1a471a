"""What commands share for talking on stderr; results alone go to stdout."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgespec.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


def note(text: str) -> None:
    """Prints one line to stderr."""
    print(text, file=sys.stderr, flush=True)


def prepare_streams() -> None:
    """Gives every standard stream an end, and text the terminal cannot spell a "?"."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A Progress that draws bars on a terminal, and plain lines in a log.

    Work counted in more than 2**20 units is shown as bytes. Nothing is drawn, nor the
    means to draw loaded, before there is something to show.
    """
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(what: str, done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                note(what)

        yield line
        return

    bars: Bars | None = None
    tasks: dict[str, TaskID] = {}

    def draw(what: str, done: int, total: int) -> None:
        nonlocal bars
        if bars is None:
            bars = _bars()
            bars.start()
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total or None)
        bars.update(tasks[what], completed=done, total=total or None)

    try:
        yield draw
    finally:
        if bars is not None:
            bars.stop()


def _bars() -> Bars:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Amount(ProgressColumn):
        as_bytes = DownloadColumn()
        speed = TransferSpeedColumn()
        as_count = MofNCompleteColumn()

        def render(self, task: Task) -> Text:
            if (task.total or task.completed) < 1 << 20:
                return self.as_count.render(task)
            return Text(" ").join([self.as_bytes.render(task), self.speed.render(task)])

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        Amount(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
