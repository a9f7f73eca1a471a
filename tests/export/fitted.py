"""Heads that know what a target says: their drafts are accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgespec_export import forward, head_forward
from edgespec_export.heads import Head
from edgespec_export.weights import Tensor, WeightSet


def fitted(head: Head, weights: WeightSet, text: list[int]) -> Head:
    """The head with a projection that knows this text: least squares."""
    ids = np.array(text)
    hidden, tapped = forward.hidden_states(weights, ids[None], taps=head.taps)
    n = len(ids)
    if head.kind == "medusa":
        eye = np.eye(head.vocab, dtype=np.float32)
        tensors = dict(head.tensors)
        blank = [
            f"medusa.{h}.0.{part}" for h in range(3) for part in ("weight", "bias")
        ]
        for name in blank:
            tensors[name] = stored(name, np.zeros(tensors[name].shape, np.float32))
        for h in range(head.heads):
            x, y = hidden[0, : n - h - 2], eye[ids[h + 2 :]]
            tensors[f"medusa.{h}.output"] = stored(f"medusa.{h}.output", solve(x, y))
        return replace(head, tensors=tensors)
    taps = np.concatenate([tapped[tap][0] for tap in head.taps], axis=-1)[:-1]
    features = head_forward.fuse(head, taps) if head.kind == "eagle3" else taps
    table = weights.tensors["token_embd"].load_f32()
    if "token_embd" in head.tensors:
        table = head.tensors["token_embd"].load_f32()
    rows = np.arange(n - 1)
    probe = replace(
        head,
        draft_vocab=head.hidden,
        d2t=None,
        tensors={
            **head.tensors,
            "output": stored("output", np.eye(64, dtype=np.float32)),
        },
    )
    out, _ = head_forward.step(
        probe, table[ids[1:]], features, rows, np.tri(n - 1, dtype=bool)
    )
    eye = np.eye(head.vocab, dtype=np.float32)
    matrix = solve(out[:-1], eye[ids[2:]])
    matrix = matrix if head.d2t is None else matrix[head.d2t]
    return replace(head, tensors={**head.tensors, "output": stored("output", matrix)})


def solve(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    square = x.T @ x + 0.01 * np.eye(x.shape[1], dtype=np.float32)
    return np.ascontiguousarray(np.linalg.solve(square, x.T @ y).T.astype(np.float32))


def stored(name: str, values: NDArray[np.float32]) -> Tensor:
    return Tensor(
        name, values.shape, "F32", lambda: values.view(np.uint8), lambda: values
    )
