"""The neutral weight set: what every source yields and every writer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding, half-split pairing (dimension i with i + dim / 2).

    inv_freq holds the final frequencies, every scaling applied; attention_factor
    multiplies cos and sin (YaRN), 1 otherwise.
    """

    theta: float
    dim: int
    kind: str  # "default" | "linear" | "llama3" | "yarn"
    inv_freq: NDArray[np.float64]  # (dim / 2,)
    attention_factor: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)  # as in config.json


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters of a dense decoder.

    A windowed layer's row at position p sees positions (p - window, p]. Which biases
    and norms a layer has, its tensors tell.
    """

    arch: str  # GGUF name: "llama"
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_position: int
    rms_eps: float
    rope: Rope
    is_tied: bool  # lm_head is the embedding
    attention_scale: float  # of the products of queries and keys
    activation: str = "silu"  # of the gate: "silu" | "gelu" (tanh form)
    embed_scale: float = 1.0  # embedded rows are multiplied by it
    window: int | None = None  # of windowed layers, in positions
    windowed: frozenset[int] = frozenset()  # layers with the window
    local_rope: Rope | None = None  # of windowed layers, where it is another

    def rope_of(self, layer: int) -> Rope:
        """Rotary embedding of a layer."""
        if self.local_rope is not None and layer in self.windowed:
            return self.local_rope
        return self.rope

    def window_of(self, layer: int) -> int | None:
        """Window of a layer, None where it sees everything."""
        return self.window if layer in self.windowed else None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight, loaded when asked for. Rows of q and k are in half-split order."""

    name: str  # as in GGUF without ".weight": "token_embd", "blk.0.attn_q.bias"
    shape: tuple[int, ...]  # numpy order: (out, in) or (n,)
    kind: str  # ggml type name: "F32", "F16", "BF16", "Q4_1", ...
    load_raw: Callable[[], NDArray[np.uint8]]  # () -> (rows, bytes of a row), as stored
    load_f32: Callable[[], NDArray[np.float32]]  # () -> shape


@dataclass(frozen=True, slots=True)
class Origin:
    """Where weights come from and under which terms."""

    source: str  # path's name, "hf:ORG/REPO" or "pypi:NAME"
    format: str  # "gguf" | "safetensors"
    sha256: str | None
    licence: str | None


@dataclass(frozen=True, slots=True)
class WeightSet:
    """A checkpoint in neutral form."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    tokenizer_json: str  # as `tokenizers` reads it
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]  # union of every config of the source
    add_bos: bool  # whether the tokenizer itself puts bos in front of raw text
    temperature: float | None  # the source's generation config
    top_p: float | None
    name: str | None
    origin: Origin
    gguf_metadata: Mapping[str, Any] | None = None  # of a GGUF source
