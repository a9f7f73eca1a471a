"""`edgespec models`: known models, what of them is here, fetching, making, removing."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.cli.options import Offline
from edgespec.cli.terminal import note, progress_bar

app = typer.Typer(help="List, fetch, export and remove models.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A name of 'edgespec models list', or hf:ORG/REPO[:QUANT].",
        show_default=False,
    ),
]


@app.command("list")
def list_models() -> None:
    """List known models: name, whether present, size, description."""
    from edgespec import models

    rows = [("NAME", "PRESENT", "SIZE", "DESCRIPTION")]
    for status in models.statuses():
        size = status.size or status.download_size
        rows.append(
            (
                status.name,
                "yes" if status.is_present else "no",
                f"{size / 1e6:.0f} MB" if size else "",
                status.description,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, row[3]]))


@app.command()
def get(name: Name, offline: Offline = False) -> None:
    """Fetch a model's checkpoint, resuming where it broke off; print its path.

    Example: edgespec models get smollm2-135m
    """
    from edgespec import models

    with progress_bar() as progress:
        path = models.get(name, offline=offline, progress=progress)
    typer.echo(str(path))


@app.command()
def build(name: Name, offline: Offline = False) -> None:
    """Fetch a model, make its bundle as chat does on first use; print its path.

    Example: edgespec models build smollm2-135m
    """
    from edgespec.bundle import resolve

    with progress_bar() as progress:
        bundle = resolve(name, offline=offline, progress=progress)
    typer.echo(str(bundle.directory))


@app.command()
def rm(name: Name) -> None:
    """Remove a model's files and what was made of them.

    Example: edgespec models rm smollm2-135m
    """
    from edgespec import models

    freed = models.remove(name)
    note(f"{name}: removed {freed / 1e6:.0f} MB")
