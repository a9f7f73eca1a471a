"""Tiny random draft heads in the layouts of the wild, without any code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray

HIDDEN, VOCAB, LAYERS = 64, 320, 8  # of the target
DRAFT_VOCAB = 96
TAPS = (2, 4, 5)  # the usual ones of eight layers

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """What a head's directory holds."""

    tensors: Arrays
    config: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)  # as the forward knows them

    def write(self, path: Path, container: str = "safetensors") -> Path:
        """A directory of config.json and one file of weights."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        write_weights(path, self.tensors, container)
        return path


def write_weights(path: Path, tensors: Mapping[str, NDArray[Any]], name: str) -> None:
    """`name`: safetensors, or a file name of PyTorch's format."""
    if name == "safetensors":
        plain = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
        safetensors.numpy.save_file(plain, path / "model.safetensors")
        return
    torch.save({k: torch.from_numpy(v.copy()) for k, v in tensors.items()}, path / name)


def _matrix(
    rng: np.random.Generator, n_out: int, n_in: int, gain: float = 1.0
) -> NDArray[np.float32]:
    scale = gain / np.sqrt(n_in)
    return (rng.standard_normal((n_out, n_in)) * scale).astype(np.float32)


def _norm(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)


def _block(
    rng: np.random.Generator, at: str, hidden: int, inputs: int, is_qwen: bool = False
) -> Arrays:
    q, kv, ffn = 64, 32, 96
    made = {
        f"{at}self_attn.q_proj.weight": _matrix(rng, q, inputs, 1.5),
        f"{at}self_attn.k_proj.weight": _matrix(rng, kv, inputs, 1.5),
        f"{at}self_attn.v_proj.weight": _matrix(rng, kv, inputs),
        f"{at}self_attn.o_proj.weight": _matrix(rng, hidden, q),
        f"{at}post_attention_layernorm.weight": _norm(rng, hidden),
        f"{at}mlp.gate_proj.weight": _matrix(rng, ffn, hidden),
        f"{at}mlp.up_proj.weight": _matrix(rng, ffn, hidden),
        f"{at}mlp.down_proj.weight": _matrix(rng, hidden, ffn),
    }
    if is_qwen:
        made[f"{at}self_attn.q_norm.weight"] = _norm(rng, 16)
        made[f"{at}self_attn.k_norm.weight"] = _norm(rng, 16)
    return made


def block_config(hidden: int = HIDDEN, **changes: Any) -> dict[str, Any]:
    """The part of config.json every EAGLE head has."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
    } | changes


def draft_ids(seed: int = 7, count: int = DRAFT_VOCAB) -> NDArray[np.int64]:
    """Ids of the target a draft vocabulary keeps, ascending."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(VOCAB, count, replace=False)).astype(np.int64)


def eagle3(
    layout: str = "safeailab",
    *,
    seed: int = 0,
    hidden: int = HIDDEN,
    draft_vocab: int | None = DRAFT_VOCAB,
    own_embedding: bool = False,
    **flags: Any,
) -> Checkpoint:
    """EAGLE-3 as "safeailab", "specforge" or "speculators" writes it.

    Flags: norm_before_residual, norm_before_fc, fc_norm, norm_output, qwen, window.
    """
    rng = np.random.default_rng(seed)
    is_qwen = flags.get("qwen", False)
    at = "layers.0." if layout == "speculators" else "midlayer."
    n_draft = draft_vocab or VOCAB
    tensors: Arrays = {
        "fc.weight": _matrix(rng, hidden, 3 * HIDDEN),
        f"{at}input_layernorm.weight": _norm(rng, hidden),
        f"{at}hidden_norm.weight": _norm(rng, hidden),
        **_block(rng, at, hidden, 2 * hidden, is_qwen),
        "norm.weight": _norm(rng, hidden),
        "lm_head.weight": _matrix(rng, n_draft, hidden, 2.0),
    }
    if draft_vocab is not None:
        ids = draft_ids(count=draft_vocab)
        tensors["d2t"] = ids - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    if own_embedding or layout == "speculators":
        tensors["embed_tokens.weight"] = _matrix(rng, VOCAB, hidden, 2.0)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = _norm(rng, 3 * HIDDEN)
    if flags.get("fc_norm"):
        for i in range(3):
            tensors[f"fc_norm.{i}.weight"] = _norm(rng, HIDDEN)
    block = block_config(hidden, model_type="qwen3" if is_qwen else "llama")
    if flags.get("window"):
        block |= {
            "layer_types": ["sliding_attention"],
            "sliding_window": flags["window"],
        }
    known = {k: v for k, v in flags.items() if k not in ("qwen", "window")}
    own: dict[str, Any] = {"draft_vocab_size": n_draft}
    if hidden != HIDDEN:
        own["target_hidden_size"] = HIDDEN
    if layout == "safeailab":
        config = block | own | known | {"architectures": ["LlamaForCausalLM"]}
    elif layout == "specforge":
        ids = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}
        config = block | own | {"architectures": ["LlamaForCausalLMEagle3"]}
        config["eagle_config"] = ids | known
    else:
        config = own | known
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "transformer_layer_config": block,
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": 5,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": None, "architectures": []},
            },
        }
    return Checkpoint(tensors, config, dict(flags))


def eagle(
    *, seed: int = 0, bias: bool = True, own_embedding: bool = True
) -> Checkpoint:
    """EAGLE-1/2."""
    rng = np.random.default_rng(seed)
    tensors: Arrays = {
        "fc.weight": _matrix(rng, HIDDEN, 2 * HIDDEN),
        **_block(rng, "layers.0.", HIDDEN, HIDDEN),
    }
    if bias:
        tensors["fc.bias"] = (0.5 * rng.standard_normal(HIDDEN)).astype(np.float32)
    if own_embedding:
        tensors["embed_tokens.weight"] = _matrix(rng, VOCAB, HIDDEN, 2.0)
    config = block_config(architectures=["LlamaForCausalLM"])
    if not bias:
        config["bias"] = False
    return Checkpoint(tensors, config)


def medusa(
    *,
    seed: int = 0,
    heads: int = 3,
    layers: int = 1,
    version: str = "2",
    prefix: str = "",
    rows: int | None = VOCAB,
    first: int | None = None,
) -> Checkpoint:
    """Medusa; "0.1" states two heads whatever it has; rows None: no lm_heads.

    first: tokens drafted, the first ones.
    """
    rng = np.random.default_rng(seed)
    tensors: Arrays = {}
    for h in range(heads):
        for layer in range(layers):
            at = f"{prefix}{h}.{layer}.linear."
            tensors[f"{at}weight"] = _matrix(rng, HIDDEN, HIDDEN)
            bias = 0.5 * rng.standard_normal(HIDDEN)
            tensors[f"{at}bias"] = bias.astype(np.float32)
        if rows is not None:
            matrix = _matrix(rng, rows, HIDDEN, 2.0)
            tensors[f"{prefix}{h}.{layers}.weight"] = matrix
    config: dict[str, Any] = {
        "medusa_num_heads": 2 if version == "0.1" else heads,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "some/model",
    }
    if version != "0.1":
        config["version"] = version
    if first is not None:
        config["draft_vocab_size"] = first
    return Checkpoint(tensors, config)
