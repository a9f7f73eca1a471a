"""A small draft model: some of the target's layers, taught to answer like all of them.

Embedding and head stay the target's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from edgespec.errors import UnsupportedError, UsageError
from edgespec_export import forward
from edgespec_export.train import objective
from edgespec_export.train.blocks import attend, merge, rotate, rotation, split
from edgespec_export.train.objective import Vocabulary
from edgespec_export.train.packing import Batch
from edgespec_export.weights import ModelConfig, WeightSet

# Of the final norm, to begin with: what a few layers make is not as sure as what all
# did, and a loss that mostly says so teaches little else for the first hundred steps.
_SURENESS = 0.25
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class Pruned(nn.Module):
    """The layers of a target that were kept; parameters have their neutral names.

    Args:
        layers: ascending, of the target.
        ids: (m) tokens it is taught; its head knows all.
        depths: measured.
    Raises UsageError for layers the target does not have or that are not ascending.
    """

    kind = "pruned"
    embedding: torch.Tensor

    def __init__(
        self, target: WeightSet, layers: Sequence[int], ids: np.ndarray, depths: int
    ) -> None:
        super().__init__()
        config = target.config
        check_layers(layers, config)
        self.config, self.layers, self.depths = config, tuple(layers), depths
        self.vocabulary = Vocabulary(ids, forward.head(target))
        embedding = _tensor(target, "token_embd")
        self.register_buffer("embedding", embedding, persistent=False)
        self.blocks = nn.ModuleList(_Layer(target, layer) for layer in layers)
        sureness = 1.0 if len(layers) == config.n_layers else _SURENESS
        self.output_norm = nn.Parameter(_tensor(target, "output_norm") * sureness)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch."""
        hidden = [self.final(batch)]
        output = self.vocabulary.output
        return objective.loss(batch, self.vocabulary, hidden, self.offset, output)

    def acceptance(self, batch: Batch) -> objective.Acceptance:
        """Of greedy drafts along a batch of greedy replies."""
        final = self.final(batch)
        hidden = [final.roll(-depth, dims=1) for depth in range(self.depths)]
        output = self.vocabulary.output
        return objective.acceptance(batch, self.vocabulary, hidden, self.offset, output)

    @staticmethod
    def offset(depth: int) -> int:
        """A row says the token after its own, as the target does."""
        return depth

    def final(self, batch: Batch) -> torch.Tensor:
        """What the target's head projects (b, t, hidden)."""
        x = self.embedding[batch.tokens] * self.config.embed_scale
        for block in self.blocks:
            x = block(x, batch)
        return _norm(x, self.output_norm, self.config.rms_eps)

    def trained(self) -> dict[str, np.ndarray]:
        """Its weights by neutral name, layers counted anew."""
        found = {"output_norm": self.output_norm.detach().float().numpy()}
        for index, block in enumerate(self.blocks):
            for name, value in block.named_parameters():
                neutral = name.removeprefix("weights.").replace("/", ".")
                found[f"blk.{index}.{neutral}"] = value.detach().float().numpy()
        return found


def check_layers(layers: Sequence[int], config: ModelConfig) -> None:
    """UsageError unless the layers ascend and are the target's."""
    is_ascending = list(layers) == sorted(set(layers))
    if not layers or not is_ascending or layers[0] < 0 or layers[-1] >= config.n_layers:
        raise UsageError(
            f"pruned: expected some of layers 0 to {config.n_layers - 1}, ascending, "
            f"such as pruned:0,1; got {list(layers)}"
        )
    if config.windowed:
        raise UnsupportedError(
            "pruned: the layers of this target have windows by their place; pruning "
            "would change them"
        )


class _Layer(nn.Module):
    """One block of the target; what its family lacks, it does not have."""

    inv_freq: torch.Tensor

    def __init__(self, target: WeightSet, index: int) -> None:
        super().__init__()
        self.config = target.config
        rope = target.config.rope_of(index)
        self.factor = rope.attention_factor
        self.register_buffer(
            "inv_freq", torch.from_numpy(rope.inv_freq.copy()), persistent=False
        )
        self.weights = nn.ParameterDict()
        for name in target.tensors:
            match = _LAYER.fullmatch(name)
            if match and int(match[1]) == index:
                value = nn.Parameter(_tensor(target, name))
                self.weights[match[2].replace(".", "/")] = value

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        mixed = self.attention(self.norm("attn_norm", x), batch)
        x = x + self.norm_if_any("post_attention_norm", mixed)
        inside = self.norm("ffn_norm", x)
        gate = F.linear(inside, self.weights["ffn_gate"])
        if self.config.activation == "silu":
            gate = F.silu(gate)
        else:
            gate = F.gelu(gate, approximate="tanh")
        up = F.linear(inside, self.weights["ffn_up"])
        down = F.linear(gate * up, self.weights["ffn_down"])
        return x + self.norm_if_any("post_ffw_norm", down)

    def attention(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        config = self.config
        turn = rotation(self.inv_freq, batch.position, self.factor)
        q = rotate(self.heads("attn_q", x, config.n_heads), turn)
        k = rotate(self.heads("attn_k", x, config.n_kv_heads), turn)
        v = self.heads("attn_v", x, config.n_kv_heads)
        q = q.to(v.dtype)
        mixed = attend(q, [k.to(v.dtype)], [v], batch.visible(), config.attention_scale)
        return F.linear(merge(mixed), self.weights["attn_output"])

    def heads(self, name: str, x: torch.Tensor, count: int) -> torch.Tensor:
        bias = f"{name}/bias"
        rows = F.linear(x, self.weights[name], self.weights.get(bias))
        return self.norm_if_any(f"{name}_norm", split(rows, count))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return _norm(x, self.weights[name], self.config.rms_eps)

    def norm_if_any(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.norm(name, x) if name in self.weights else x


def _tensor(target: WeightSet, name: str) -> torch.Tensor:
    return torch.from_numpy(target.tensors[name].load_f32().copy())


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)
