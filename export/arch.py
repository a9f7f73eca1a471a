"""One entry per architecture: keys in config.json and GGUF, tensor names in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export.weights import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One kind of weight. "{i}" in hf stands for the layer."""

    name: str  # neutral, without "blk.N."
    hf: str
    shape: tuple[str, ...]  # of "vocab", "hidden", "q", "kv", "head", "ffn"
    is_per_layer: bool = True
    heads: str | None = None  # "q" or "kv": rows are pairs that RoPE rotates
    hf_offset: float = 0.0  # added to what a checkpoint stores


@dataclass(frozen=True, slots=True)
class TextPart:
    """Where a checkpoint with more than a language model keeps that one."""

    key: str  # of its settings in config.json
    hf_ignored: frozenset[str]  # keys beside it that concern the other parts
    renamed: Mapping[str, str]  # prefix of tensor names -> what is meant
    dropped: tuple[str, ...]  # prefixes of the other parts' tensors


@dataclass(frozen=True, slots=True)
class Architecture:
    """What tells one model family from another."""

    gguf: str
    model_types: Mapping[str, str]  # config.json model_type -> class in "architectures"
    tensors: tuple[TensorSpec, ...]
    head: TensorSpec  # absent when tied to the embedding
    is_interleaved: bool  # GGUF pairs neighbouring q/k rows instead of halves
    hf_fixed: Mapping[str, tuple[Any, ...]]  # key -> values that mean what we compute
    hf_defaults: Mapping[str, Mapping[str, Any]]  # model_type -> values of absent keys
    rms_eps: float  # when config.json leaves it out
    gguf_ignored: frozenset[str] = frozenset()  # keys without influence on the result
    gguf_ropes: frozenset[str] = frozenset({"default", "linear", "yarn"})
    gguf_window_period: int | None = None  # of its layers by default; None: no windows
    hf_read: frozenset[str] = frozenset()  # keys that only this family has
    hf_window: str | None = None  # which layers: "from" a first one, by "pattern"
    hf_text: Mapping[str, TextPart] = field(default_factory=dict)  # by model_type
    activation: str = "silu"
    is_embed_scaled: bool = False  # by the root of the width
    has_local_rope: bool = False  # windowed layers rotate by a base of their own
    wide_scale_layers: int | None = None  # so many: see `gguf_attention_scale`


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor the architecture has under a given configuration."""

    name: str  # neutral: "blk.3.attn_q"
    hf: str
    shape: tuple[int, ...]
    n_heads: int  # heads whose rows GGUF interleaves, 0 for none
    hf_offset: float  # added to what a checkpoint stores

    @property
    def gguf(self) -> str:
        """Name in a GGUF file."""
        return gguf_name(self.name)


def gguf_name(name: str) -> str:
    """Name of a neutral tensor in a GGUF file: weights say so there."""
    return name if name.endswith(".bias") else f"{name}.weight"


_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_EMBEDDING = TensorSpec(
    "token_embd", "model.embed_tokens.weight", ("vocab", "hidden"), False
)
_Q = TensorSpec("attn_q", _ATTENTION + "q_proj.weight", ("q", "hidden"), heads="q")
_K = TensorSpec("attn_k", _ATTENTION + "k_proj.weight", ("kv", "hidden"), heads="kv")
_V = TensorSpec("attn_v", _ATTENTION + "v_proj.weight", ("kv", "hidden"))
_OUTPUT = TensorSpec("attn_output", _ATTENTION + "o_proj.weight", ("hidden", "q"))
_FFN = (
    TensorSpec("ffn_gate", _LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
    TensorSpec("ffn_up", _LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
    TensorSpec("ffn_down", _LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),
)
_HEAD = TensorSpec("output", "lm_head.weight", ("vocab", "hidden"), False)


def _norm(name: str, hf: str, size: str = "hidden", offset: float = 0.0) -> TensorSpec:
    return TensorSpec(name, _LAYER + hf + ".weight", (size,), hf_offset=offset)


def _tensors(*attention: TensorSpec) -> tuple[TensorSpec, ...]:
    """A block with two norms around the given attention."""
    return (
        _EMBEDDING,
        _norm("attn_norm", "input_layernorm"),
        *attention,
        _norm("ffn_norm", "post_attention_layernorm"),
        *_FFN,
        TensorSpec("output_norm", "model.norm.weight", ("hidden",), False),
    )


_BIASES = (
    TensorSpec("attn_q.bias", _ATTENTION + "q_proj.bias", ("q",)),
    TensorSpec("attn_k.bias", _ATTENTION + "k_proj.bias", ("kv",)),
    TensorSpec("attn_v.bias", _ATTENTION + "v_proj.bias", ("kv",)),
)
_GEMMA3_TENSORS = (
    _EMBEDDING,
    _norm("attn_norm", "input_layernorm", offset=1.0),
    _Q,
    _K,
    _V,
    _norm("attn_q_norm", "self_attn.q_norm", "head", 1.0),
    _norm("attn_k_norm", "self_attn.k_norm", "head", 1.0),
    _OUTPUT,
    _norm("post_attention_norm", "post_attention_layernorm", offset=1.0),
    _norm("ffn_norm", "pre_feedforward_layernorm", offset=1.0),
    *_FFN,
    _norm("post_ffw_norm", "post_feedforward_layernorm", offset=1.0),
    TensorSpec("output_norm", "model.norm.weight", ("hidden",), False, hf_offset=1.0),
)
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 4096,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        gguf="llama",
        model_types={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
        tensors=_tensors(_Q, _K, _V, _OUTPUT),
        head=_HEAD,
        is_interleaved=True,
        hf_fixed={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "rope_interleaved": (False, None),
        },
        hf_defaults={"mistral": {"sliding_window": 4096, "num_key_value_heads": 8}},
        rms_eps=1e-6,
        gguf_ignored=frozenset({"tensor_data_layout"}),
        gguf_ropes=frozenset({"default", "linear", "llama3", "yarn"}),
    ),
    "qwen2": Architecture(
        gguf="qwen2",
        model_types={"qwen2": "Qwen2ForCausalLM"},
        tensors=_tensors(_Q, _K, _V, *_BIASES, _OUTPUT),
        head=_HEAD,
        is_interleaved=False,
        hf_fixed={"hidden_act": ("silu",)},
        hf_defaults={"qwen2": _QWEN_DEFAULTS},
        hf_window="from",
        rms_eps=1e-6,
    ),
    "qwen3": Architecture(
        gguf="qwen3",
        model_types={"qwen3": "Qwen3ForCausalLM"},
        tensors=_tensors(
            _Q,
            _K,
            _V,
            _norm("attn_q_norm", "self_attn.q_norm", "head"),
            _norm("attn_k_norm", "self_attn.k_norm", "head"),
            _OUTPUT,
        ),
        head=_HEAD,
        is_interleaved=False,
        hf_fixed={"hidden_act": ("silu",), "attention_bias": (False, None)},
        hf_defaults={"qwen3": _QWEN_DEFAULTS | {"head_dim": 128}},
        hf_window="from",
        rms_eps=1e-6,
    ),
    "gemma3": Architecture(
        gguf="gemma3",
        model_types={
            "gemma3_text": "Gemma3ForCausalLM",
            "gemma3": "Gemma3ForConditionalGeneration",
        },
        tensors=_GEMMA3_TENSORS,
        head=_HEAD,
        is_interleaved=False,
        hf_fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "attention_bias": (False, None),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        hf_defaults={"gemma3_text": _GEMMA3_DEFAULTS, "gemma3": _GEMMA3_DEFAULTS},
        hf_read=frozenset(
            {"query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern"}
        ),
        hf_window="pattern",
        hf_text={
            "gemma3": TextPart(
                key="text_config",
                hf_ignored=frozenset(
                    {
                        "boi_token_index",
                        "eoi_token_index",
                        "image_token_index",
                        "mm_tokens_per_image",
                        "vision_config",
                    }
                ),
                renamed={
                    "language_model.": "",
                    "model.language_model.": "model.",
                },
                dropped=(
                    "multi_modal_projector.",
                    "vision_tower.",
                    "model.multi_modal_projector.",
                    "model.vision_tower.",
                ),
            )
        },
        rms_eps=1e-6,
        gguf_ignored=frozenset({"mm.tokens_per_image"}),
        gguf_ropes=frozenset({"default", "linear"}),
        gguf_window_period=6,
        activation="gelu",
        is_embed_scaled=True,
        has_local_rope=True,
        wide_scale_layers=62,
    ),
}


def by_model_type(config: Mapping[str, Any], where: str) -> Architecture:
    """Architecture of a config.json, or UnsupportedError naming what is not known."""
    model_type = config.get("model_type")
    for arch in ARCHITECTURES.values():
        if isinstance(model_type, str) and model_type in arch.model_types:
            classes = config.get("architectures") or [arch.model_types[model_type]]
            if list(classes) != [arch.model_types[model_type]]:
                raise UnsupportedError(
                    f"{where}: architectures {classes}: expected "
                    f"[{arch.model_types[model_type]!r}] for model_type {model_type!r}"
                )
            return arch
    known = ", ".join(t for a in ARCHITECTURES.values() for t in a.model_types)
    raise UnsupportedError(
        f"{where}: model_type {model_type!r} is not supported; known: {known}"
    )


def by_gguf_name(name: Any, where: str) -> Architecture:
    """Architecture of general.architecture, or UnsupportedError."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedError(
            f"{where}: architecture {name!r} is not supported; known: {known}"
        )
    return ARCHITECTURES[name]


def embed_scale(arch: Architecture, hidden: int) -> float:
    """Factor of embedded rows, as float32 holds it."""
    return float(np.float32(np.sqrt(hidden))) if arch.is_embed_scaled else 1.0


def gguf_attention_scale(
    arch: Architecture, n_layers: int, hidden: int, n_heads: int, head_dim: int
) -> float:
    """What llama.cpp multiplies queries by.

    It is no key of the file: of gemma3, the one size with 62 layers divides by the
    root of hidden / heads, all others by that of the head's size.
    """
    is_wide = n_layers == arch.wide_scale_layers
    return float((hidden // n_heads if is_wide else head_dim) ** -0.5)


def slots(arch: Architecture, config: ModelConfig) -> dict[str, Slot]:
    """Every tensor of the model by neutral name, in the order of the forward pass."""
    sizes = {
        "vocab": config.vocab,
        "hidden": config.hidden,
        "q": config.n_heads * config.head_dim,
        "kv": config.n_kv_heads * config.head_dim,
        "head": config.head_dim,
        "ffn": config.ffn,
    }
    heads = {"q": config.n_heads, "kv": config.n_kv_heads, None: 0}
    found: dict[str, Slot] = {}

    def add(spec: TensorSpec, layer: int | None) -> None:
        name = spec.name if layer is None else f"blk.{layer}.{spec.name}"
        shape = tuple(sizes[s] for s in spec.shape)
        n_heads = heads[spec.heads] if arch.is_interleaved else 0
        hf = spec.hf.format(i=layer)
        found[name] = Slot(name, hf, shape, n_heads, spec.hf_offset)

    per_layer = [spec for spec in arch.tensors if spec.is_per_layer]
    first = next(k for k, spec in enumerate(arch.tensors) if spec.is_per_layer)
    for spec in arch.tensors[:first]:
        add(spec, None)
    for layer in range(config.n_layers):
        for spec in per_layer:
            add(spec, layer)
    for spec in arch.tensors[first:]:
        if not spec.is_per_layer:
            add(spec, None)
    if not config.is_tied:
        add(arch.head, None)
    return found


def check_names(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """FormatError that lists the tensors a checkpoint lacks or has too many."""
    wanted, got = set(expected), set(found)
    problems = []
    for label, names in (("missing", wanted - got), ("unexpected", got - wanted)):
        if names:
            some = sorted(names)
            rest = f" and {len(some) - 12} more" if len(some) > 12 else ""
            problems.append(f"{label}: {', '.join(some[:12])}{rest}")
    if problems:
        raise FormatError(
            f"{where}: tensors do not fit the architecture; {'; '.join(problems)}"
        )


def check_shape(
    name: str, expected: tuple[int, ...], got: tuple[int, ...], where: str
) -> None:
    """FormatError naming the tensor, the expected and the actual shape."""
    if expected != got:
        raise FormatError(
            f"{where}: tensor {name!r}: expected shape {expected}, got {got}"
        )
