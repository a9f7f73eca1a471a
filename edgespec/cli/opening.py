"""Loading a model for a command, with progress on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cli.terminal import progress_bar
from edgespec.config import Runtime, Speculation

if TYPE_CHECKING:
    from edgespec.session import Session


def open_session(
    model: str, speculation: Speculation, runtime: Runtime, *, offline: bool
) -> Session:
    """Fetches, makes and loads what MODEL names, as far as that is needed."""
    import edgespec

    with progress_bar() as progress:
        return edgespec.load(
            model,
            runtime=runtime,
            speculation=speculation,
            offline=offline,
            progress=progress,
        )
