"""The model in plain numpy float32: the truth the exported graphs are held against.

Written from the weight set alone and sharing nothing with the writers: prefill only, no
KV cache, any visibility mask. One layer's weights are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec_export.weights import Rope, WeightSet


def hidden_states(
    weights: WeightSet,
    tokens: NDArray[np.integer],
    *,
    positions: NDArray[np.integer] | None = None,
    visible: NDArray[np.bool_] | None = None,
    taps: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[NDArray[np.float32], dict[int, NDArray[np.float32]]]:
    """Final-norm output (b, n, hidden) of tokens (b, n), and tapped states by index.

    Args:
        positions: (n,) rotary positions; default 0..n-1.
        visible: (n, n), row = query; default lower triangle.
        taps: as in transformers' hidden_states: 0 = embedding, n_layers = the final
            norm's output.
        progress: called with (layers done, layers in all).
    """
    config = weights.config
    batch, n = tokens.shape
    if positions is None:
        positions = np.arange(n)
    if visible is None:
        visible = np.tri(n, dtype=bool)
    bias = np.where(visible, np.float32(0), np.float32(-np.inf))
    cos, sin = _rotation(config.rope, positions)
    tapped: dict[int, NDArray[np.float32]] = {}

    def load(name: str) -> NDArray[np.float32]:
        return weights.tensors[name].load_f32()

    x = load("token_embd")[tokens]  # (b, n, hidden)
    for layer in range(config.n_layers):
        if layer in taps:
            tapped[layer] = x.copy()
        prefix = f"blk.{layer}."
        h = _rms_norm(x, load(prefix + "attn_norm"), config.rms_eps)
        q, k, v = (h @ load(prefix + f"attn_{part}").T for part in "qkv")
        q = _rotate(_heads(q, config.n_heads), cos, sin)
        k = _rotate(_heads(k, config.n_kv_heads), cos, sin)
        mixed = _attend(q, k, _heads(v, config.n_kv_heads), bias)
        x = x + mixed.reshape(batch, n, -1) @ load(prefix + "attn_output").T
        h = _rms_norm(x, load(prefix + "ffn_norm"), config.rms_eps)
        gate = h @ load(prefix + "ffn_gate").T
        gate /= 1 + np.exp(-np.maximum(gate, -80))
        gate *= h @ load(prefix + "ffn_up").T
        x = x + gate @ load(prefix + "ffn_down").T
        if progress is not None:
            progress(layer + 1, config.n_layers)
    x = _rms_norm(x, load("output_norm"), config.rms_eps)
    if config.n_layers in taps:
        tapped[config.n_layers] = x
    return x, tapped


def logits(weights: WeightSet, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """Head on final-norm rows (..., hidden): (..., vocab)."""
    product: NDArray[np.float32] = hidden @ head(weights).T
    return product


def head(weights: WeightSet) -> NDArray[np.float32]:
    """The head's matrix (vocab, hidden): the embedding when tied."""
    name = "token_embd" if weights.config.is_tied else "output"
    return weights.tensors[name].load_f32()


def _rms_norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: float
) -> NDArray[np.float32]:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normed: NDArray[np.float32] = x / np.sqrt(mean + np.float32(eps)) * weight
    return normed


def _heads(x: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """(b, n, count * d) -> (b, count, n, d)."""
    batch, n, width = x.shape
    rows = x.reshape(batch, n, count, width // count)
    heads: NDArray[np.float32] = rows.transpose(0, 2, 1, 3)
    return heads


def _rotation(
    rope: Rope, positions: NDArray[np.integer]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin (n, dim / 2)."""
    angles = positions[:, None].astype(np.float64) * rope.inv_freq[None, :]
    factor = rope.attention_factor
    return (
        (np.cos(angles) * factor).astype(np.float32),
        (np.sin(angles) * factor).astype(np.float32),
    )


def _rotate(
    x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> NDArray[np.float32]:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate(
        [low * cos - high * sin, high * cos + low * sin, rest], axis=-1
    )


def _attend(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    bias: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Attention of q (b, heads, n, d) over k, v (b, kv, n, d): (b, n, heads * d)."""
    batch, n_heads, n, width = q.shape
    group = n_heads // k.shape[1]
    mixed = np.empty((batch, n, n_heads, width), np.float32)
    scale = np.float32(width**-0.5)
    for index in range(batch):
        for head_index in range(n_heads):
            keys, values = k[index, head_index // group], v[index, head_index // group]
            scores = (q[index, head_index] * scale) @ keys.T + bias
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed[index, :, head_index] = scores @ values
    return mixed.reshape(batch, n, -1)
