"""The model in plain numpy float32: the truth the exported graphs are held against.

Written from the weight set alone and sharing nothing with the writers: prefill only, no
KV cache, any visibility mask. One layer's weights are in memory at a time.
"""

from __future__ import annotations

import math
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
        positions: (n,) rotary positions, by which windows count; default 0..n-1.
        visible: (n, n), row = query; default lower triangle. Windows take from it.
        taps: as in transformers' hidden_states: 0 = embedding, scaled, n_layers = the
            final norm's output.
        progress: called with (layers done, layers in all).
    """
    config = weights.config
    n = tokens.shape[1]
    if positions is None:
        positions = np.arange(n)
    if visible is None:
        visible = np.tri(n, dtype=bool)
    tapped: dict[int, NDArray[np.float32]] = {}
    embedding = weights.tensors["token_embd"].load_f32()
    x = embedding[tokens] * np.float32(config.embed_scale)  # (b, n, hidden)
    del embedding
    for index in range(config.n_layers):
        if index in taps:
            tapped[index] = x.copy()
        layer = _Layer(weights, index)
        mixed = layer.attention(layer.norm("attn_norm", x), positions, visible)
        x = x + layer.norm_if_any("post_attention_norm", mixed)
        down = layer.feed_forward(layer.norm("ffn_norm", x))
        x = x + layer.norm_if_any("post_ffw_norm", down)
        if progress is not None:
            progress(index + 1, config.n_layers)
    x = _rms_norm(x, weights.tensors["output_norm"].load_f32(), config.rms_eps)
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


class _Layer:
    """One block; what a family lacks, its weights do not have."""

    def __init__(self, weights: WeightSet, index: int) -> None:
        self.config = weights.config
        self.index = index
        self._tensors = weights.tensors

    def load(self, name: str) -> NDArray[np.float32]:
        return self._tensors[f"blk.{self.index}.{name}"].load_f32()

    def has(self, name: str) -> bool:
        return f"blk.{self.index}.{name}" in self._tensors

    def norm(self, name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return _rms_norm(x, self.load(name), self.config.rms_eps)

    def norm_if_any(self, name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.norm(name, x) if self.has(name) else x

    def attention(
        self,
        x: NDArray[np.float32],
        positions: NDArray[np.integer],
        visible: NDArray[np.bool_],
    ) -> NDArray[np.float32]:
        config = self.config
        cos, sin = _rotation(config.rope_of(self.index), positions)
        q = _rotate(self._heads("attn_q", x, config.n_heads), cos, sin)
        k = _rotate(self._heads("attn_k", x, config.n_kv_heads), cos, sin)
        v = self._heads("attn_v", x, config.n_kv_heads)
        window = config.window_of(self.index)
        if window is not None:
            visible = visible & (positions[:, None] - positions[None, :] < window)
        bias = np.where(visible, np.float32(0), np.float32(-np.inf))
        mixed = _attend(q, k, v, bias, config.attention_scale)
        out: NDArray[np.float32] = mixed @ self.load("attn_output").T
        return out

    def _heads(
        self, name: str, x: NDArray[np.float32], count: int
    ) -> NDArray[np.float32]:
        rows = x @ self.load(name).T
        if self.has(f"{name}.bias"):
            rows = rows + self.load(f"{name}.bias")
        return self.norm_if_any(f"{name}_norm", _heads(rows, count))

    def feed_forward(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        gate = _ACTIVATIONS[self.config.activation](x @ self.load("ffn_gate").T)
        gate *= x @ self.load("ffn_up").T
        out: NDArray[np.float32] = gate @ self.load("ffn_down").T
        return out


def _rms_norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], eps: float
) -> NDArray[np.float32]:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normed: NDArray[np.float32] = x / np.sqrt(mean + np.float32(eps)) * weight
    return normed


def _silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    product: NDArray[np.float32] = x / (1 + np.exp(-np.maximum(x, -80)))
    return product


def _gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The tanh form."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    product: NDArray[np.float32] = np.float32(0.5) * x * (1 + np.tanh(inner))
    return product


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu}


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
    scale: float,
) -> NDArray[np.float32]:
    """Attention of q (b, heads, n, d) over k, v (b, kv, n, d): (b, n, heads * d)."""
    batch, n_heads, n, width = q.shape
    group = n_heads // k.shape[1]
    mixed = np.empty((batch, n, n_heads, width), np.float32)
    for index in range(batch):
        for head_index in range(n_heads):
            keys, values = k[index, head_index // group], v[index, head_index // group]
            scores = (q[index, head_index] * np.float32(scale)) @ keys.T + bias
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed[index, :, head_index] = scores @ values
    return mixed.reshape(batch, n, -1)
