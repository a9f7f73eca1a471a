"""Draft heads in plain numpy float32: the truth the engine and the graphs are held to.

Shares nothing with them and keeps no cache: all rows at once, any visibility.

An EAGLE row j is the pair of token j + 1's embedding and the feature of row j, at
position j. Features come from the target where it has been (`fuse` of its taps; the
final hidden state for EAGLE-1/2), else from the row before: what `step` returns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec_export.heads import Head

Floats = NDArray[np.float32]


def fuse(head: Head, taps: Floats) -> Floats:
    """EAGLE-3's features (n, hidden) of the target's taps (n, taps * target_hidden)."""
    parts = taps
    if head.norm_before_fc:
        parts = _norm(head, "enc.output_norm", taps)
    elif head.fc_norm:
        each = np.split(taps, len(head.taps), axis=-1)
        normed = [_norm(head, f"fc_norm.{i}", tap) for i, tap in enumerate(each)]
        parts = np.concatenate(normed, axis=-1)
    fused: Floats = parts @ _load(head, "fc").T
    return fused


def step(
    head: Head,
    embeddings: Floats,
    features: Floats,
    positions: NDArray[np.integer],
    visible: NDArray[np.bool_],
    target_output: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Logits (n, draft_vocab) and the features (n, hidden) handed to the next rows.

    Args:
        embeddings: (n, hidden) of each row's token.
        features: (n, hidden).
        positions: (n,) rotary positions, by which the head's window counts.
        visible: (n, n), row = query.
        target_output: (vocab, hidden), for a head that projects by it.
    """
    if head.kind == "eagle3":
        normed = _norm(head, "blk.0.attn_norm_2", features)
        residual = normed if head.norm_before_residual else features
        inputs = np.concatenate(
            [_norm(head, "blk.0.attn_norm", embeddings), normed], -1
        )
    else:
        both = np.concatenate([embeddings, features], axis=-1)
        residual = inputs = both @ _load(head, "fc").T + _bias(head)
    mixed = _attention(head, inputs, positions, visible)
    residual = residual + mixed @ _load(head, "blk.0.attn_output").T
    x = _norm(head, "blk.0.ffn_norm", residual)
    gate, up = x @ _load(head, "blk.0.ffn_gate").T, x @ _load(head, "blk.0.ffn_up").T
    residual = residual + (_silu(gate) * up) @ _load(head, "blk.0.ffn_down").T
    out = residual
    if head.kind == "eagle3":
        out = _norm(head, "output_norm", residual)
    logits = out @ output_rows(head, target_output).T
    return logits, out if head.norm_output else residual


def medusa(
    head: Head, hidden: Floats, target_output: Floats | None = None
) -> NDArray[np.float32]:
    """Logits (heads, n, draft_vocab) of final hidden states (n, hidden)."""
    found = []
    for h in range(head.heads):
        x = hidden
        for layer in range(head.layers):
            name = f"medusa.{h}.{layer}"
            inner = x @ _load(head, f"{name}.weight").T + _load(head, f"{name}.bias")
            x = x + _silu(inner)
        found.append(x @ output_rows(head, target_output, h).T)
    return np.stack(found)


def output_rows(
    head: Head, target_output: Floats | None = None, index: int = 0
) -> Floats:
    """Matrix of the logits, (draft_vocab, hidden); `index` is Medusa's head."""
    for name in (f"medusa.{index}.output", "output"):
        if name in head.tensors:
            return _load(head, name)
    assert target_output is not None, "the head projects by the target's rows"
    return (
        target_output[: head.draft_vocab]
        if head.d2t is None
        else target_output[head.d2t]
    )


def target_ids(head: Head, ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """Ids of the target for ids of the draft, any shape."""
    return ids.astype(np.int64) if head.d2t is None else head.d2t[ids]


def _attention(
    head: Head,
    x: Floats,
    positions: NDArray[np.integer],
    visible: NDArray[np.bool_],
) -> Floats:
    """(n, heads * head_dim)."""
    assert head.rope is not None
    angles = positions[:, None].astype(np.float64) * head.rope.inv_freq
    cos = (np.cos(angles) * head.rope.attention_factor).astype(np.float32)
    sin = (np.sin(angles) * head.rope.attention_factor).astype(np.float32)
    q = _rotate(_heads(head, "q", x, head.n_heads), cos, sin)
    k = _rotate(_heads(head, "k", x, head.n_kv_heads), cos, sin)
    v = _heads(head, "v", x, head.n_kv_heads)
    if head.window is not None:
        visible = visible & (positions[:, None] - positions[None, :] < head.window)
    group = head.n_heads // head.n_kv_heads
    mixed = np.empty_like(q)
    for h in range(head.n_heads):
        scores = q[h] @ k[h // group].T * np.float32(head.head_dim**-0.5)
        scores = np.where(visible, scores, np.float32(-np.inf))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed[h] = shares / shares.sum(axis=-1, keepdims=True) @ v[h // group]
    rows: Floats = mixed.transpose(1, 0, 2).reshape(len(x), -1)
    return rows


def _heads(head: Head, part: str, x: Floats, count: int) -> Floats:
    """(count, n, head_dim), normed where the head has norms for it."""
    rows = x @ _load(head, f"blk.0.attn_{part}").T
    by_head = rows.reshape(len(x), count, head.head_dim).transpose(1, 0, 2)
    name = f"blk.0.attn_{part}_norm"
    return _norm(head, name, by_head) if name in head.tensors else by_head


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _norm(head: Head, name: str, x: Floats) -> Floats:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean + np.float32(head.eps)) * _load(head, name)
    return normed


def _silu(x: Floats) -> Floats:
    product: Floats = x / (1 + np.exp(-np.maximum(x, -80)))
    return product


def _bias(head: Head) -> Floats | np.float32:
    return _load(head, "fc.bias") if "fc.bias" in head.tensors else np.float32(0)


def _load(head: Head, name: str) -> Floats:
    return head.tensors[name].load_f32()
