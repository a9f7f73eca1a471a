"""The native engine's forward in numpy doubles, with the roundings it promises.

A weight set in; activations are quantised where a matrix has integer blocks, keys and
values kept as halves or bytes. Written from kernels.h, sharing nothing with the C code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec_export.weights import Rope, WeightSet

_FLOATS = ("F32", "F16", "BF16")
Doubles = NDArray[np.float64]


def logits(
    weights: WeightSet,
    tokens: Sequence[int] | NDArray[np.integer],
    *,
    positions: Sequence[int] | NDArray[np.integer] | None = None,
    visible: NDArray[np.bool_] | None = None,
    kv: str = "f16",
) -> Doubles:
    """Logits (n, vocab) of a sequence, or of one with a tree in its last rows.

    kv: how keys and values are kept: "f16", "int8", or "f64", as they are.
    """
    config = weights.config
    n = len(tokens)
    places = np.arange(n) if positions is None else np.asarray(positions)
    seen = np.tri(n, dtype=bool) if visible is None else visible
    distance = places[:, None] - places[None, :]

    def vector(name: str) -> Doubles:
        return weights.tensors[name].load_f32().astype(np.float64)

    def linear(x: Doubles, name: str) -> Doubles:
        tensor = weights.tensors[name]
        given = x if tensor.kind in _FLOATS else _bytes(x, 32)
        return given @ tensor.load_f32().astype(np.float64).T

    def norm(x: Doubles, name: str) -> Doubles:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + config.rms_eps) * vector(name)

    x = vector("token_embd")[np.asarray(tokens)] * config.embed_scale
    for layer in range(config.n_layers):
        at = f"blk.{layer}."

        def heads(part: str, count: int, h: Doubles, at: str = at) -> Doubles:
            rows = linear(h, f"{at}attn_{part}")
            if f"{at}attn_{part}.bias" in weights.tensors:
                rows = rows + vector(f"{at}attn_{part}.bias")
            rows = rows.reshape(n, count, config.head_dim)
            if f"{at}attn_{part}_norm" in weights.tensors:
                rows = norm(rows, f"{at}attn_{part}_norm")
            return rows

        h = norm(x, at + "attn_norm")
        rope = config.rope_of(layer)
        q = _rotated(heads("q", config.n_heads, h), rope, places)
        k = _kept(_rotated(heads("k", config.n_kv_heads, h), rope, places), kv)
        v = _kept(heads("v", config.n_kv_heads, h), kv)
        window = config.window_of(layer)
        mask = seen if window is None else seen & (distance < window)
        mixed = linear(
            _attend(q * config.attention_scale, k, v, mask), at + "attn_output"
        )
        if at + "post_attention_norm" in weights.tensors:
            mixed = norm(mixed, at + "post_attention_norm")
        x = x + mixed
        h = norm(x, at + "ffn_norm")
        gate = _ACTIVATIONS[config.activation](linear(h, at + "ffn_gate"))
        down = linear(gate * linear(h, at + "ffn_up"), at + "ffn_down")
        if at + "post_ffw_norm" in weights.tensors:
            down = norm(down, at + "post_ffw_norm")
        x = x + down
    return linear(norm(x, "output_norm"), "token_embd" if config.is_tied else "output")


def _bytes(x: Doubles, width: int) -> Doubles:
    """Each `width` neighbours as int8 of their largest."""
    groups = x.reshape(*x.shape[:-1], -1, width)
    most = np.abs(groups).max(axis=-1, keepdims=True)
    scale = np.where(most > 0, most, 1) / 127
    return (np.rint(groups / scale) * scale).reshape(x.shape)


def _kept(rows: Doubles, kv: str) -> Doubles:
    if kv == "int8":
        return _bytes(rows, rows.shape[-1])
    return rows.astype(np.float16).astype(np.float64) if kv == "f16" else rows


def _rotated(rows: Doubles, rope: Rope, places: NDArray[np.integer]) -> Doubles:
    """Half-split pairs of (n, heads, dim): sources have them so, whatever the file."""
    angles = (places[:, None] * rope.inv_freq)[:, None, :]
    cos, sin = (f(angles) * rope.attention_factor for f in (np.cos, np.sin))
    low, high = np.split(rows, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attend(q: Doubles, k: Doubles, v: Doubles, mask: NDArray[np.bool_]) -> Doubles:
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.where(mask[None], np.einsum("qhd,khd->hqk", q, k), -np.inf)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", share, v).reshape(len(q), -1)


def _silu(x: Doubles) -> Doubles:
    return x / (1 + np.exp(-x))


def _gelu(x: Doubles) -> Doubles:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu}
