"""Draft heads in torch, from the papers, by the names checkpoints have."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from tests.export.heads import Checkpoint


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotary(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x (heads, n, d), the halves of a head turned together."""
    d = x.shape[-1]
    turns = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.outer(positions.double(), turns)
    both = torch.cat([angles, angles], dim=-1)
    swapped = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], dim=-1)
    return x * both.cos().float() + swapped * both.sin().float()


class Eagle:
    """Any EAGLE checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        found = checkpoint.tensors
        self.w = {
            name.replace("midlayer.", "").replace("layers.0.", ""): torch.from_numpy(v)
            for name, v in found.items()
        }
        self.flags = checkpoint.flags
        self.is_third = "hidden_norm.weight" in self.w

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        if self.flags.get("norm_before_fc"):
            taps = rms(taps, self.w["input_norm.weight"])
        if self.flags.get("fc_norm"):
            parts = taps.chunk(3, dim=-1)
            normed = [
                rms(p, self.w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)
            ]
            taps = torch.cat(normed, dim=-1)
        return F.linear(taps, self.w["fc.weight"])

    def step(
        self,
        embedding: torch.Tensor,
        feature: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w = self.w
        if self.is_third:
            normed = rms(feature, w["hidden_norm.weight"])
            skip = normed if self.flags.get("norm_before_residual") else feature
            x = torch.cat([rms(embedding, w["input_layernorm.weight"]), normed], dim=-1)
        else:
            x = torch.cat([embedding, feature], dim=-1)
            x = F.linear(x, w["fc.weight"], w.get("fc.bias"))
            skip = x
        parts = {}
        for part, count in (("q", 4), ("k", 2), ("v", 2)):
            rows = F.linear(x, w[f"self_attn.{part}_proj.weight"])
            rows = rows.view(len(x), count, 16).transpose(0, 1)
            if f"self_attn.{part}_norm.weight" in w:
                rows = rms(rows, w[f"self_attn.{part}_norm.weight"])
            parts[part] = rows if part == "v" else rotary(rows, positions, 10000.0)
        window = self.flags.get("window")
        if window:
            visible = visible & (positions[:, None] - positions < window)
        keys = parts["k"].repeat_interleave(2, dim=0)
        values = parts["v"].repeat_interleave(2, dim=0)
        mixed = F.scaled_dot_product_attention(
            parts["q"], keys, values, attn_mask=visible
        )
        mixed = mixed.transpose(0, 1).reshape(len(x), -1)
        skip = skip + F.linear(mixed, w["self_attn.o_proj.weight"])
        x = rms(skip, w["post_attention_layernorm.weight"])
        x = F.silu(F.linear(x, w["mlp.gate_proj.weight"])) * F.linear(
            x, w["mlp.up_proj.weight"]
        )
        skip = skip + F.linear(x, w["mlp.down_proj.weight"])
        out = rms(skip, w["norm.weight"]) if self.is_third else skip
        logits = F.linear(out, w.get("lm_head.weight", lm_head))
        return logits, out if self.flags.get("norm_output") else skip


def medusa(
    checkpoint: Checkpoint, hidden: torch.Tensor, lm_head: torch.Tensor
) -> torch.Tensor:
    """(heads, n, rows)."""
    w = {
        name.removeprefix("medusa_head."): torch.from_numpy(v)
        for name, v in checkpoint.tensors.items()
    }
    found = []
    for h in range(1 + max(int(name.split(".")[0]) for name in w)):
        x, layer = hidden, 0
        while f"{h}.{layer}.linear.weight" in w:
            at = f"{h}.{layer}.linear."
            x = x + F.silu(F.linear(x, w[at + "weight"], w[at + "bias"]))
            layer += 1
        found.append(F.linear(x, w.get(f"{h}.{layer}.weight", lm_head)))
    return torch.stack(found)


def as_torch(*arrays: NDArray[np.generic]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(array)) for array in arrays]
