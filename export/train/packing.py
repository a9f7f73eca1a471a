"""Batches: pieces of sequences side by side in rows of one width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from edgespec_export.train.shards import Stored

_OPEN_ROWS = 32  # that a piece may still go into


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [begin, end) of a sequence."""

    sequence: int
    begin: int
    end: int


Row = list[Piece]


@dataclass(slots=True)
class Batch:
    """Rows of tokens. Padding is a document of its own, with nothing to learn."""

    tokens: torch.Tensor  # (b, t) int64
    written: torch.Tensor  # (b, t) bool, replies of the target
    top: torch.Tensor  # (b, t) int64, the target's likeliest next; -1: not known
    document: torch.Tensor  # (b, t) int64, tells pieces apart
    position: torch.Tensor  # (b, t) int64, in the whole sequence
    states: torch.Tensor  # (b, t, taps, hidden) float16

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, f.name).to(device) for f in fields(self)))

    def visible(self, window: int | None = None) -> torch.Tensor:
        """(b, t, t) bool: a token sees what came before in its piece, and itself."""
        same = self.document[:, :, None] == self.document[:, None, :]
        distance = self.position[:, :, None] - self.position[:, None, :]
        seen = same & (distance >= 0)
        return seen if window is None else seen & (distance < window)


def pieces(index: int, first: int, length: int, width: int) -> list[Piece]:
    """A sequence from its first written token on, with what of its past fits too."""
    found, end = [], length
    while end > first:
        begin = max(0, end - width)
        found.append(Piece(index, begin, end))
        end = begin
    return found


def pack(parts: Sequence[Piece], width: int) -> list[Row]:
    """Rows of at most `width` tokens."""
    full: list[Row] = []
    rows: list[tuple[int, Row]] = []  # room left, pieces
    for piece in parts:
        size = piece.end - piece.begin
        fits = [i for i, (room, _) in enumerate(rows) if room >= size]
        if fits:
            best = min(fits, key=lambda i: rows[i][0])
            room, row = rows.pop(best)
            row.append(piece)
            rows.append((room - size, row))
        else:
            rows.append((width - size, [piece]))
        if len(rows) > _OPEN_ROWS:
            fullest = min(range(len(rows)), key=lambda i: rows[i][0])
            full.append(rows.pop(fullest)[1])
    return full + [row for _, row in rows]


class Batches:
    """Batches of sequences, in an order that seed and epoch decide.

    Args:
        width: tokens of a row; rows: of a batch.
    """

    def __init__(
        self, sequences: Sequence[Stored], *, width: int, rows: int, seed: int
    ) -> None:
        self._sequences = sequences
        self._pieces = [
            pieces(i, int(np.argmax(s.arrays["written"])), len(s), width)
            for i, s in enumerate(sequences)
        ]
        self._width, self._rows, self._seed = width, rows, seed

    def epoch(self, number: int) -> list[list[Row]]:
        """What the batches of an epoch hold."""
        random = np.random.default_rng([self._seed, number])
        order = random.permutation(len(self._sequences))
        rows = pack([p for i in order for p in self._pieces[i]], self._width)
        return self._batches([rows[i] for i in random.permutation(len(rows))])

    def in_order(self) -> list[list[Row]]:
        """Every sequence once, for measuring."""
        return self._batches(pack([p for ps in self._pieces for p in ps], self._width))

    def _batches(self, rows: list[Row]) -> list[list[Row]]:
        return [rows[i : i + self._rows] for i in range(0, len(rows), self._rows)]

    def load(self, rows: list[Row]) -> Batch:
        """The tensors of a batch."""
        shape = (len(rows), self._width)
        states = self._sequences[0].arrays["states"]
        made = {
            "tokens": np.zeros(shape, np.int64),
            "written": np.zeros(shape, np.bool_),
            "top": np.full(shape, -1, np.int64),
            "document": np.full(shape, -1, np.int64),
            "position": np.zeros(shape, np.int64),
            "states": np.zeros((*shape, *states.shape[1:]), np.float16),
        }
        made["position"][:] = np.arange(self._width)
        document = 0
        for i, row in enumerate(rows):
            at = 0
            for piece in row:
                arrays = self._sequences[piece.sequence].arrays
                end = at + piece.end - piece.begin
                for name in ("tokens", "written", "top", "states"):
                    made[name][i, at:end] = arrays[name][piece.begin : piece.end]
                made["document"][i, at:end] = document
                made["position"][i, at:end] = np.arange(piece.begin, piece.end)
                document += 1
                at = end
        return Batch(**{name: torch.from_numpy(a) for name, a in made.items()})
