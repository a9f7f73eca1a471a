"""Tiny targets and what they write, for the tests of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgespec.gguf_model import read_gguf_model
from edgespec_export.train.data import Source
from edgespec_export.train.shards import Stored
from edgespec_export.train.writing import Ask, Dialogue, Keep, Sequence, Writer
from tests.export import families

LAYERS = 8
LIMIT = 40  # tokens of a reply
TAPS = (2, 4, 5, 8)


def target(path: Path, family: str = "llama", **sizes: int) -> families.Model:
    """Eight layers, unless `sizes` says else."""
    return families.gguf(
        path, family, **{"n_layers": LAYERS, "is_tied": False, **sizes}
    )


def source(made: families.Model) -> Source:
    return Source(read_gguf_model(made.path), threads=1)


def stored(sequence: Sequence, *, is_held_out: bool = False) -> Stored:
    """A sequence as it comes back from disk."""
    names = ("tokens", "written", "top", "states")
    arrays = {name: getattr(sequence, name) for name in names}
    return Stored(sequence.kind, sequence.temperature, is_held_out, arrays)


def written(
    made: families.Model, count: int = 24, limit: int = LIMIT, *, seats: int = 64
) -> list[Sequence]:
    """What dialogues of random prompts give, every other one greedy."""

    def make(number: int, random: np.random.Generator) -> Dialogue:
        prompt = random.integers(3, 300, 5 + number % 90).tolist()
        warm = 0.8 * (number % 2)
        yield Ask(prompt, limit, warm, frozenset({2}))
        yield Keep("test", warm)

    return run(made, make, count, seats=seats)


def run(
    made: families.Model, make: Callable, count: int, *, seats: int = 64
) -> list[Sequence]:
    """Sequences of so many dialogues, in order."""
    writer = Writer(made.path, threads=1, taps=TAPS, context=400, seed=5, seats=seats)
    try:
        return [s for sequences in writer.run(make, 0, count) for s in sequences]
    finally:
        writer.close()
