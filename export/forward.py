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
    batch, n = tokens.shape
    if positions is None:
        positions = np.arange(n)
    if visible is None:
        visible = np.tri(n, dtype=bool)
    distance = positions[:, None] - positions[None, :]
    tapped: dict[int, NDArray[np.float32]] = {}

    def load(name: str) -> NDArray[np.float32]:
        return weights.tensors[name].load_f32()

    def norm(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return _rms_norm(x, load(name), config.rms_eps)

    x = load("token_embd")[tokens] * np.float32(config.embed_scale)  # (b, n, hidden)
    for layer in range(config.n_layers):
        if layer in taps:
            tapped[layer] = x.copy()
        prefix = f"blk.{layer}."

        def has(name: str, prefix: str = prefix) -> bool:
            return prefix + name in weights.tensors

        h = norm(x, prefix + "attn_norm")
        parts = {}
        for part, count in zip(
            "qkv", (config.n_heads, config.n_kv_heads, config.n_kv_heads), strict=True
        ):
            rows = h @ load(f"{prefix}attn_{part}").T
            if has(f"attn_{part}.bias"):
                rows = rows + load(f"{prefix}attn_{part}.bias")
            parts[part] = _heads(rows, count)
            if has(f"attn_{part}_norm"):
                parts[part] = norm(parts[part], f"{prefix}attn_{part}_norm")
        cos, sin = _rotation(config.rope_of(layer), positions)
        q, k = _rotate(parts["q"], cos, sin), _rotate(parts["k"], cos, sin)
        window = config.window_of(layer)
        seen = visible if window is None else visible & (distance < window)
        bias = np.where(seen, np.float32(0), np.float32(-np.inf))
        mixed = _attend(q, k, parts["v"], bias, config.attention_scale)
        mixed = mixed.reshape(batch, n, -1) @ load(prefix + "attn_output").T
        if has("post_attention_norm"):
            mixed = norm(mixed, prefix + "post_attention_norm")
        x = x + mixed
        h = norm(x, prefix + "ffn_norm")
        gate = _ACTIVATIONS[config.activation](h @ load(prefix + "ffn_gate").T)
        gate *= h @ load(prefix + "ffn_up").T
        down = gate @ load(prefix + "ffn_down").T
        if has("post_ffw_norm"):
            down = norm(down, prefix + "post_ffw_norm")
        x = x + down
        if progress is not None:
            progress(layer + 1, config.n_layers)
    x = norm(x, "output_norm")
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
