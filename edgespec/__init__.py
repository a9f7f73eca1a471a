"""Runs language models on your own device, several tokens per forward, losslessly.

import edgespec

session = edgespec.load("smollm2-135m")
print(session.complete("Name three rivers.").text)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgespec.version import __version__

if TYPE_CHECKING:
    from edgespec.config import Runtime, Sampling, Speculation, Stopping
    from edgespec.loading import load
    from edgespec.memory import Memory
    from edgespec.reply import Delta, Reply, TokenLogprobs
    from edgespec.session import Session
    from edgespec.stats import Stats

# Imported on first use: the command line must answer --help without loading numpy.
_HOMES = {
    "Delta": "reply",
    "Memory": "memory",
    "Reply": "reply",
    "Runtime": "config",
    "Sampling": "config",
    "Session": "session",
    "Speculation": "config",
    "Stats": "stats",
    "Stopping": "config",
    "TokenLogprobs": "reply",
    "load": "loading",
}

__all__ = [
    "Delta",
    "Memory",
    "Reply",
    "Runtime",
    "Sampling",
    "Session",
    "Speculation",
    "Stats",
    "Stopping",
    "TokenLogprobs",
    "__version__",
    "generate",
    "load",
]


def generate(model: str, prompt: str, **options: Any) -> Iterator[Delta]:
    """Loads a model, streams one reply, frees it; options of Session.generate."""
    from edgespec.loading import load

    with load(model) as session:
        yield from session.generate(prompt, **options)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edgespec.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
