"""Medusa-1: a residual block per depth on the target's last hidden state (2401.10774).

The target's own head, its first rows, projects them all: such heads bring no
vocabulary matrices.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from edgespec_export.train import objective
from edgespec_export.train.objective import Vocabulary
from edgespec_export.train.packing import Batch
from edgespec_export.weights import ModelConfig


class Medusa(nn.Module):
    """Heads that say tokens t + 2, t + 3, ... from the final norm's output at t.

    Args:
        config: the target's.
        output: (vocab, hidden), the target's; frozen.
        rows: of it that the heads know.
        depths: heads.
    """

    kind = "medusa"

    def __init__(
        self,
        config: ModelConfig,
        output: NDArray[np.float32],
        rows: int,
        depths: int,
    ) -> None:
        super().__init__()
        self.config, self.depths = config, depths
        self.vocabulary = Vocabulary(np.arange(rows, dtype=np.int64), output)
        hidden = config.hidden
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depths))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)  # a block begins as the identity

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch."""
        hidden = self.hidden(batch)
        output = self.vocabulary.output
        return objective.loss(batch, self.vocabulary, hidden, self.offset, output)

    def acceptance(self, batch: Batch) -> objective.Acceptance:
        """Of greedy drafts along a batch of greedy replies."""
        hidden = self.hidden(batch)
        output = self.vocabulary.output
        return objective.acceptance(batch, self.vocabulary, hidden, self.offset, output)

    @staticmethod
    def offset(depth: int) -> int:
        """The target itself says t + 1; the first head t + 2, the goal of t + 1."""
        return 1 + depth

    def hidden(self, batch: Batch) -> list[torch.Tensor]:
        """By depth, what the target's head projects (b, t, hidden)."""
        final = batch.states[:, :, -1].float()
        return [final + F.silu(block(final)) for block in self.blocks]
