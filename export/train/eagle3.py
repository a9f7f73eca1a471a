"""An EAGLE-3 draft: one wide layer on the target's hidden states (arXiv 2503.01840).

Trained the way it will run: a depth's features are its own output of the depth before,
tokens and goals move one to the left, and attention sees the first depth's keys and, of
later depths, those of its own row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edgespec_export.train import objective
from edgespec_export.train.blocks import (
    Gated,
    RMSNorm,
    attend,
    merge,
    rotate,
    rotation,
    split,
)
from edgespec_export.train.objective import Vocabulary
from edgespec_export.train.packing import Batch
from edgespec_export.weights import ModelConfig

TAUGHT = 3  # a fourth step would cost a quarter of the passes
_BRANCH = 0.1  # what attention and MLP add, to begin with


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.n_heads, config.n_kv_heads
        q, kv = (n * config.head_dim for n in (config.n_heads, config.n_kv_heads))
        self.q_proj = nn.Linear(2 * config.hidden, q, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, config.hidden, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        seen: list[list[torch.Tensor]],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """seen: keys and values of the depths before; this one's are added."""
        q = rotate(split(self.q_proj(x), self.heads), turn)
        seen[0].append(rotate(split(self.k_proj(x), self.kv_heads), turn))
        seen[1].append(split(self.v_proj(x), self.kv_heads))
        mixed: torch.Tensor = self.o_proj(merge(attend(q, seen[0], seen[1], visible)))
        return mixed


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden, config.rms_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = Gated(hidden, config.ffn)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        seen: list[list[torch.Tensor]],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        both = [self.input_layernorm(embedded), self.hidden_norm(features)]
        x = features + self.self_attn(torch.cat(both, -1), turn, seen, visible)
        made: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class Eagle3(nn.Module):
    """Parameters have the names of SafeAILab's checkpoints.

    Args:
        config: the target's.
        embedding, output: (vocab, hidden), the target's; frozen.
        ids: (m) ascending ids of the draft vocabulary.
        depths: measured; the first TAUGHT of them are unrolled in training.
    """

    kind = "eagle3"
    embedding: torch.Tensor
    inv_freq: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        embedding: NDArray[np.float32],
        output: NDArray[np.float32],
        ids: NDArray[np.int64],
        depths: int,
    ) -> None:
        super().__init__()
        self.config, self.depths = config, depths
        self.vocabulary = Vocabulary(ids, output)
        embedded = torch.from_numpy(np.array(embedding))
        self.register_buffer("embedding", embedded, persistent=False)
        pairs = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        inv_freq = torch.from_numpy(config.rope.theta**-pairs)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.fc = nn.Linear(3 * config.hidden, config.hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(config.hidden, config.rms_eps)
        self.lm_head = nn.Linear(config.hidden, len(ids), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(self.vocabulary.output)
            for branch in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
                branch.weight.mul_(_BRANCH)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch."""
        return objective.loss(
            batch,
            self.vocabulary,
            self.hidden(batch, min(TAUGHT, self.depths)),
            self.offset,
            self.lm_head.weight,
        )

    def acceptance(self, batch: Batch) -> objective.Acceptance:
        """Of greedy drafts along a batch of greedy replies."""
        return objective.acceptance(
            batch,
            self.vocabulary,
            self.hidden(batch, self.depths),
            self.offset,
            self.lm_head.weight,
        )

    @staticmethod
    def offset(depth: int) -> int:
        """Row j has token j + 1 and says j + 2 + depth, the goal of j + 1 + depth."""
        return 1 + depth

    def hidden(self, batch: Batch, depths: int) -> list[torch.Tensor]:
        """By depth, what the head projects (b, t, hidden)."""
        visible = batch.visible()
        taps = batch.states[:, :, :3].flatten(2).float()
        features = self.fc(taps).float()
        seen: list[list[torch.Tensor]] = [[], []]
        found = []
        for depth in range(depths):
            tokens = batch.tokens.roll(-1 - depth, dims=1)  # past the end: no goals
            turn = rotation(self.inv_freq, batch.position + depth)
            embedded = self.embedding[tokens]
            features = self.midlayer(embedded, features, turn, seen, visible)
            found.append(self.norm(features))
        return found
