"""Pieces of decoders in torch."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


def split(x: torch.Tensor, count: int) -> torch.Tensor:
    """(b, t, count * d) -> (b, count, t, d)"""
    b, t, width = x.shape
    return x.view(b, t, count, width // count).transpose(1, 2)


def merge(x: torch.Tensor) -> torch.Tensor:
    """(b, count, t, d) -> (b, t, count * d)"""
    return x.transpose(1, 2).flatten(2)


def rotation(
    inv_freq: torch.Tensor, position: torch.Tensor, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (b, 1, t, d / 2) of positions (b, t)."""
    angles = position[:, None, :, None].double() * inv_freq.double()
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x (b, heads, t, d), the halves of a head turned together."""
    cos, sin = turn
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return turned.to(x.dtype)


def attend(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    visible: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention (b, heads, t, d) over all of keys[0], and of the others one's own row.

    Args:
        q: (b, heads, t, d).
        keys, values: each (b, kv heads, t, d).
        visible: (b, t, t) bool, for keys[0].
    """
    b, heads, t, width = q.shape
    kv = keys[0].shape[1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    if len(keys) == 1:
        mixed: torch.Tensor = F.scaled_dot_product_attention(
            q,
            keys[0],
            values[0],
            attn_mask=visible[:, None],
            scale=scale,
            enable_gqa=heads != kv,
        )
        return mixed
    group = heads // kv
    grouped = (q * scale).view(b, kv, group, t, width)
    rows = grouped.flatten(2, 3)
    scores = (rows @ keys[0].transpose(-1, -2)).view(b, kv, group, t, t)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    own = [(grouped * k[:, :, None]).sum(-1, keepdim=True) for k in keys[1:]]
    shares = torch.cat([scores, *own], dim=-1).softmax(-1)
    mixed = (shares[..., :t].flatten(2, 3) @ values[0]).view(grouped.shape)
    for i, value in enumerate(values[1:]):
        mixed = mixed + shares[..., t + i : t + i + 1] * value[:, :, None]
    return mixed.flatten(1, 2)
