"""How long work reports where it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as (what, done, total): a label such as "download x.gguf", then units done so
far and in all (bytes or tensors; total 0 = unknown). done == total ends it."""


def silent(what: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""
