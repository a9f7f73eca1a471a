"""Which settings of a config.json are known, and which make another model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export.arch import Architecture, TextPart

# Keys of config.json that say nothing about the forward pass at inference.
_IGNORED = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_dropout",
        "cache_implementation",
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
    ]
)
_READ = frozenset(
    [
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
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
        "use_sliding_window",
        "vocab_size",
    ]
)


_WINDOWED, _WHOLE = "sliding_attention", "full_attention"  # of layer_types

_TYPES: dict[str, type | tuple[type, ...]] = {
    "architectures": list,
    "layer_types": list,
    "max_position_embeddings": int,
    "max_window_layers": int,
    "original_max_position_embeddings": int,
    "quantization_config": dict,
    "query_pre_attn_scalar": (int, float),
    "rope_local_base_freq": (int, float),
    "rope_parameters": dict,
    "rope_scaling": dict,
    "rope_theta": (int, float),
    "sliding_window": int,
    "sliding_window_pattern": int,
    "text_config": dict,
    "tie_word_embeddings": bool,
    "use_sliding_window": bool,
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
    known = _IGNORED | _READ | arch.hf_read | set(arch.hf_fixed)
    unknown = {
        k: v for k, v in config.items() if k not in known and v not in (None, False)
    }
    if unknown:
        raise UnsupportedError(
            f"{where}: keys whose effect is not known: {', '.join(sorted(unknown))}; "
            "remove those that do not change the forward pass"
        )


def text_settings(
    part: TextPart, config: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Settings of the language model in a checkpoint that is more than one.

    Keys beside it that do not concern other parts count where it lacks them.
    """
    inner: Mapping[str, Any] | None = config.get(part.key)
    if inner is None:
        raise FormatError(f"{where}: {part.key} is missing")
    check_types(inner, f"{where}: {part.key}")
    outer = part.hf_ignored | {part.key, "architectures", "model_type"}
    beside = {key: value for key, value in config.items() if key not in outer}
    return beside | dict(inner)


def windows(
    arch: Architecture, config: Mapping[str, Any], n_layers: int, where: str
) -> tuple[int | None, frozenset[int]]:
    """Window in positions and the layers that have it, as transformers decides."""
    kinds = config.get("layer_types")
    window, limit = config.get("sliding_window"), config.get("max_position_embeddings")
    if arch.hf_window == "from" and not config.get("use_sliding_window"):
        window = None
    if kinds is not None and (
        len(kinds) != n_layers or any(kind not in (_WINDOWED, _WHOLE) for kind in kinds)
    ):
        raise UnsupportedError(
            f"{where}: layer_types {kinds}: expected {n_layers} of {_WHOLE} and "
            f"{_WINDOWED}"
        )
    if arch.hf_window is None:
        if kinds is not None and _WINDOWED in kinds:
            raise UnsupportedError(f"{where}: layer_types {kinds}: only {_WHOLE}")
        if window is not None and limit is not None and window < limit:
            raise UnsupportedError(
                f"{where}: sliding_window {window} is smaller than "
                f"max_position_embeddings {limit}: attention would have to forget, "
                f"which this version does not do; set max_position_embeddings to "
                f"{window} to use the model within its window"
            )
        return None, frozenset()
    if kinds is None and arch.hf_window == "pattern":
        period = _least(config, "sliding_window_pattern", 1, where)
        windowed = {i for i in range(n_layers) if (i + 1) % period}
    elif kinds is None and window is None:
        windowed = set()
    elif kinds is None:
        windowed = set(range(_least(config, "max_window_layers", 0, where), n_layers))
    else:
        windowed = {i for i, kind in enumerate(kinds) if kind == _WINDOWED}
    if windowed:
        window = _least(config, "sliding_window", 1, where)
    is_idle = window is not None and limit is not None and window >= limit
    if not windowed or (is_idle and not arch.has_local_rope):
        return None, frozenset()
    return window, frozenset(windowed)


def _least(config: Mapping[str, Any], key: str, least: int, where: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < least:
        raise FormatError(
            f"{where}: {key}: expected an integer of at least {least}, got {value!r}"
        )
    return value
