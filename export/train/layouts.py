"""Trained heads as others read them: SafeAILab's files, speculators', a GGUF."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file

from edgespec.cache import cannot_write, write_whole
from edgespec.errors import UsageError
from edgespec.gguf_header import Metadata
from edgespec_export import draft_model, gguf_file
from edgespec_export.train.eagle3 import Eagle3
from edgespec_export.train.medusa import Medusa
from edgespec_export.train.pruned import Pruned
from edgespec_export.weights import ModelConfig, Tensor, WeightSet

LAYOUTS = ("safeailab", "speculators")
WEIGHTS, CONFIG = "model.safetensors", "config.json"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
_SPECULATORS_VERSION = "0.9.0"
_SPECULATIVE_TOKENS = 5
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def check(kind: str, layout: str) -> None:
    """UsageError for a layout that has no such head."""
    if layout not in LAYOUTS:
        raise UsageError(f"--layout: expected {' or '.join(LAYOUTS)}, got {layout!r}")
    if layout == "speculators" and kind != "eagle3":
        raise UsageError(f"--layout speculators: has EAGLE-3 heads, not {kind} ones")


def save(
    head: torch.nn.Module,
    target: WeightSet,
    directory: Path,
    layout: str,
    verifier: str | None = None,
) -> None:
    """Writes a head's files, each appearing whole. The configuration comes last.

    Args:
        verifier: where speculators find the target, a repository or a directory in
            Hugging Face's format; without it their users have to say it.
    """
    if isinstance(head, Pruned):
        _pruned(head, target, directory / "draft.gguf")
        return
    if isinstance(head, Medusa):
        config, tensors = _medusa(head, target)
        _save(tensors, directory / MEDUSA_WEIGHTS)
    else:
        assert isinstance(head, Eagle3)
        if layout == "speculators":
            config, tensors = _speculators(head, verifier)
        else:
            config, tensors = _safeailab(head)
        _save(tensors, directory / WEIGHTS)
    write_whole(directory / CONFIG, json.dumps(config, indent=2) + "\n")


def _eagle_tensors(head: Eagle3) -> dict[str, torch.Tensor]:
    ids = head.vocabulary.ids
    is_known = torch.zeros(len(head.embedding), dtype=torch.bool)
    is_known[ids] = True
    weights = {name: value.half() for name, value in head.state_dict().items()}
    return weights | {"d2t": ids - torch.arange(len(ids)), "t2d": is_known}


def _block(config: ModelConfig) -> dict[str, Any]:
    """The one layer as a Llama configuration."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": config.vocab,
        "tie_word_embeddings": False,
    }


def _safeailab(head: Eagle3) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = _block(head.config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(head.vocabulary),
        "torch_dtype": "float16",
    }
    return config, _eagle_tensors(head)


def _speculators(
    head: Eagle3, verifier: str | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in _eagle_tensors(head).items()
    }
    tensors["embed_tokens.weight"] = head.embedding.half()
    layers = head.config.n_layers
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": _SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "draft_vocab_size": len(head.vocabulary),
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformer_layer_config": _block(head.config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [_CLASSES[head.config.arch]],
            },
        },
    }
    return config, tensors


def _medusa(
    head: Medusa, target: WeightSet
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors = {}
    for index, block in enumerate(head.blocks):
        for name, value in block.state_dict().items():
            tensors[f"{index}.0.linear.{name}"] = value.half()
    config = {
        "architectures": ["MedusaModel"],
        "medusa_num_heads": head.depths,
        "medusa_num_layers": 1,
        "base_model_name_or_path": target.name,
        "vocab_size": head.config.vocab,
        "draft_vocab_size": len(head.vocabulary),
        "torch_dtype": "float16",
        "version": "2",
    }
    return config, tensors


def _pruned(head: Pruned, target: WeightSet, path: Path) -> None:
    """A model of the target's family with fewer layers, its matrices as halves.

    It says which tokens it was taught, which others than ours do not mind.
    """
    shared = ("token_embd", "output")
    tensors = {n: t for n, t in target.tensors.items() if n in shared}
    for name, value in head.trained().items():
        tensors[name] = _stored(name, value)
    metadata = target.gguf_metadata
    made = None
    if isinstance(metadata, Metadata):
        made = Metadata()
        for key, item in metadata.items():
            made.put(key, item, *metadata.types[key])
        key = f"{target.config.arch}.block_count"
        made.put(key, len(head.layers), GGUFValueType.UINT32)
        kept = ", ".join(map(str, head.layers))
        name = f"layers {kept} of {target.name or target.origin.source}"
        made.put("general.name", name, GGUFValueType.STRING)
        ids = head.vocabulary.ids.numpy()
        is_all = len(ids) == target.config.vocab
        draft_model.put_ids(made, None if is_all else ids, target.config.vocab)
    config = replace(target.config, n_layers=len(head.layers))
    pruned = replace(target, config=config, tensors=tensors, gguf_metadata=made)
    try:
        gguf_file.write(pruned, None, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _stored(name: str, value: NDArray[np.float32]) -> Tensor:
    is_matrix = value.ndim > 1
    kept = value.astype(np.float16 if is_matrix else np.float32)

    def raw() -> NDArray[np.uint8]:
        return np.ascontiguousarray(np.atleast_2d(kept)).view(np.uint8)

    load: Callable[[], NDArray[np.float32]] = partial(kept.astype, np.float32)
    return Tensor(name, value.shape, "F16" if is_matrix else "F32", raw, load)


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    whole = {name: value.contiguous() for name, value in tensors.items()}
    try:
        save_file(whole, part, metadata={"format": "pt"})
        part.chmod(0o644)  # as every other file; safetensors makes it the owner's
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
