"""Which settings of a config.json are known, and which make another model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export.arch import Architecture

# Keys of config.json that say nothing about the forward pass at inference.
_IGNORED = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "bos_token_id",
        "chat_template",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "do_sample",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "pretraining_tp",
        "return_dict",
        "temperature",
        "top_p",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_bfloat16",
        "use_return_dict",
        "use_sliding_window",
    ]
)
_READ = frozenset(
    [
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "quantization_config",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "rms_norm_eps",
        "vocab_size",
    ]
)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "architectures": list,
    "layer_types": list,
    "max_position_embeddings": int,
    "original_max_position_embeddings": int,
    "quantization_config": dict,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "rope_theta": (int, float),
    "sliding_window": int,
    "tie_word_embeddings": bool,
}


def check_types(config: Mapping[str, Any], where: str) -> None:
    """FormatError for values of another JSON type than their key has."""
    for key, kind in _TYPES.items():
        value = config.get(key)
        is_flag = isinstance(value, bool) and kind is not bool
        if value is not None and (is_flag or not isinstance(value, kind)):
            raise FormatError(f"{where}: {key}: unexpected value {value!r}")


def check_settings(arch: Architecture, config: Mapping[str, Any], where: str) -> None:
    """Refuse, by name, settings under which the model is not the one we compute."""
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise UnsupportedError(
            f"{where}: quantization_config ({method}): export the unquantised "
            "checkpoint"
        )
    for key, allowed in arch.hf_fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UnsupportedError(
                f"{where}: {key} = {config[key]!r} is not supported; expected "
                f"{allowed[0]!r}"
            )
    kinds = config.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise UnsupportedError(f"{where}: layer_types {kinds}: only full_attention")
    window, limit = config.get("sliding_window"), config.get("max_position_embeddings")
    if window is not None and limit is not None and window < limit:
        raise UnsupportedError(
            f"{where}: sliding_window {window} is smaller than max_position_embeddings "
            f"{limit}: attention would have to forget, which this version does not do; "
            f"set max_position_embeddings to {window} to use the model within its "
            "window"
        )
    known = _IGNORED | _READ | set(arch.hf_fixed)
    unknown = {
        k: v for k, v in config.items() if k not in known and v not in (None, False)
    }
    if unknown:
        raise UnsupportedError(
            f"{where}: keys whose effect is not known: {', '.join(sorted(unknown))}; "
            "remove those that do not change the forward pass"
        )
