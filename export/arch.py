"""One entry per architecture: keys in config.json and GGUF, tensor names in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export.weights import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One kind of weight. "{i}" in hf stands for the layer."""

    name: str  # neutral, without "blk.N."
    hf: str
    shape: tuple[str, ...]  # of "vocab", "hidden", "q", "kv", "ffn"
    is_per_layer: bool = True
    heads: str | None = None  # "q" or "kv": rows are pairs that RoPE rotates


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
    hf_buffers: tuple[str, ...]  # tensor name suffixes old checkpoints carry needlessly
    rms_eps: float  # when config.json leaves it out
    gguf_ignored: frozenset[
        str
    ]  # keys after "ARCH." without influence on the mathematics


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor the architecture has under a given configuration."""

    name: str  # neutral: "blk.3.attn_q"
    hf: str
    shape: tuple[int, ...]
    n_heads: int  # heads whose rows GGUF interleaves, 0 for none


_LAYER = "model.layers.{i}."
_LLAMA_TENSORS = (
    TensorSpec("token_embd", "model.embed_tokens.weight", ("vocab", "hidden"), False),
    TensorSpec("attn_norm", _LAYER + "input_layernorm.weight", ("hidden",)),
    TensorSpec(
        "attn_q", _LAYER + "self_attn.q_proj.weight", ("q", "hidden"), heads="q"
    ),
    TensorSpec(
        "attn_k", _LAYER + "self_attn.k_proj.weight", ("kv", "hidden"), heads="kv"
    ),
    TensorSpec("attn_v", _LAYER + "self_attn.v_proj.weight", ("kv", "hidden")),
    TensorSpec("attn_output", _LAYER + "self_attn.o_proj.weight", ("hidden", "q")),
    TensorSpec("ffn_norm", _LAYER + "post_attention_layernorm.weight", ("hidden",)),
    TensorSpec("ffn_gate", _LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
    TensorSpec("ffn_up", _LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
    TensorSpec("ffn_down", _LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),
    TensorSpec("output_norm", "model.norm.weight", ("hidden",), False),
)
_HEAD = TensorSpec("output", "lm_head.weight", ("vocab", "hidden"), False)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        gguf="llama",
        model_types={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
        tensors=_LLAMA_TENSORS,
        head=_HEAD,
        is_interleaved=True,
        hf_fixed={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "rope_interleaved": (False, None),
        },
        hf_defaults={"mistral": {"sliding_window": 4096, "num_key_value_heads": 8}},
        hf_buffers=("self_attn.rotary_emb.inv_freq",),
        rms_eps=1e-6,
        gguf_ignored=frozenset({"tensor_data_layout"}),
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


def slots(arch: Architecture, config: ModelConfig) -> dict[str, Slot]:
    """Every tensor of the model by neutral name, in the order of the forward pass."""
    sizes = {
        "vocab": config.vocab,
        "hidden": config.hidden,
        "q": config.n_heads * config.head_dim,
        "kv": config.n_kv_heads * config.head_dim,
        "ffn": config.ffn,
    }
    heads = {"q": config.n_heads, "kv": config.n_kv_heads, None: 0}
    found: dict[str, Slot] = {}

    def add(spec: TensorSpec, layer: int | None) -> None:
        name = spec.name if layer is None else f"blk.{layer}.{spec.name}"
        shape = tuple(sizes[s] for s in spec.shape)
        n_heads = heads[spec.heads] if arch.is_interleaved else 0
        found[name] = Slot(name, spec.hf.format(i=layer), shape, n_heads)

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
