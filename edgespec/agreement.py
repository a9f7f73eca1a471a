"""How far one model's answers lie from another's, on a text cut into windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def windows(
    ids: Sequence[int], length: int, start: Sequence[int] = ()
) -> NDArray[np.int64]:
    """Token ids (w, at most length) of a text, each window opened by `start`.

    A remainder is dropped; a text shorter than one window is one row.
    """
    n = length - len(start)
    count = max(1, len(ids) // n)
    rows = np.array(ids[: count * n], np.int64).reshape(count, -1)
    return np.insert(rows, [0] * len(start), list(start), axis=1)


def compare(
    expected: NDArray[np.float32], got: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.int64]]:
    """Of logits (n, vocab): KL and agreement of argmaxes by row, and got's argmaxes."""
    a = expected - expected.max(axis=1, keepdims=True)
    b = got - got.max(axis=1, keepdims=True)
    weight = np.exp(a)
    total = weight.sum(axis=1, dtype=np.float64)
    weight *= a - b
    mean = weight.sum(axis=1, dtype=np.float64) / total
    kl = mean - np.log(total) + np.log(np.exp(b).sum(axis=1, dtype=np.float64))
    best = got.argmax(axis=1)
    return kl, best == expected.argmax(axis=1), best


def surprise(
    logits: NDArray[np.float32], tokens: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Nats that logits (n, vocab) gave the tokens (n,) that came: -log softmax."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, dtype=np.float64)
    chosen = shifted[np.arange(len(tokens)), tokens].astype(np.float64)
    nats: NDArray[np.float64] = np.log(total) - chosen
    return nats
