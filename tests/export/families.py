"""Tiny random GGUF models of every family, and what they answer in numpy.

model = families.gguf(tmp_path / "a.gguf", "qwen3", kind="Q4_0", n_kv_heads=4)
model.logits([1, 5, 9])  # (3, vocab)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec_export import forward, rope, sources
from edgespec_export.weights import WeightSet
from tests.export import checkpoints
from tests.export.checkpoints import FAMILIES, Shape, family_shape
from tests.export.ggml import FILE_TYPES

__all__ = ["FAMILIES", "FILE_TYPES", "ROPES", "Model", "gguf"]

# Scalings a GGUF of the family can hold.
ROPES = {
    "llama": ("default", "linear", "llama3", "yarn"),
    "qwen2": ("default", "linear", "yarn"),
    "qwen3": ("default", "linear", "yarn"),
    "gemma3": ("default", "linear"),
}


@dataclass(frozen=True)
class Model:
    """A GGUF file and its weights as numpy sees them."""

    path: Path
    shape: Shape
    weights: WeightSet

    def logits(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        *,
        positions: Sequence[int] | NDArray[np.integer] | None = None,
        visible: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float32]:
        """Logits (n, vocab) of the dequantised weights, float32 throughout.

        Args:
            positions: (n,); default 0..n-1. A window counts by them.
            visible: (n, n), row = query; default lower triangle. For a tree behind a
                prefix: the triangle, with the tree's own mask in its last corner.
        """
        hidden, _ = forward.hidden_states(
            self.weights,
            np.asarray(tokens)[None],
            positions=None if positions is None else np.asarray(positions),
            visible=visible,
        )
        return forward.logits(self.weights, hidden[0])


def gguf(
    path: Path,
    family: str = "llama",
    *,
    kind: str = "F32",
    embedding: str | None = None,
    scaling: str = "default",
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Model:
    """Writes a random model of a family to `path`.

    Args:
        kind: ggml type of the matrices, one of FILE_TYPES; embedding: that of the
            embedding and the head, default the same.
        scaling: of RoPE, one of ROPES[family].
        extra: more metadata.
        sizes: fields of `checkpoints.Shape`; K-quants need hidden, ffn and
            n_heads * head_dim to be multiples of 256.
    """
    shape = family_shape(family, **sizes)
    parameters = dict(checkpoints.ROPES[scaling]) | {"rope_theta": shape.theta}
    settings = {"rope_parameters": parameters, "max_position_embeddings": 512}
    made = rope.from_hf(settings, shape.head_dim, "a test")
    keys = {f"{family}.rope.{k}": v for k, v in rope.gguf_scaling(made).items()}
    for known in ("dimension_count", "freq_base"):
        del keys[f"{family}.rope.{known}"]
    checkpoints.gguf_checkpoint(
        path,
        shape,
        kind=kind,
        embedding=embedding,
        seed=seed,
        extra=keys | dict(extra or {}),
        rope_freqs=rope.freq_factors(made),
    )
    return Model(path, shape, sources.read(path))
