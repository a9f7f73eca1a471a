"""Writes a weight set as one GGUF file that llama.cpp loads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError, UsageError
from edgespec.gguf_header import Metadata
from edgespec_export import rope, tokenizer_gguf
from edgespec_export.arch import ARCHITECTURES, gguf_attention_scale, slots
from edgespec_export.quantize import QUANTS, kind_for, quantize
from edgespec_export.sources.gguf import ROPE_FREQS, interleaved
from edgespec_export.weights import ModelConfig, Tensor, WeightSet

Progress = Callable[[str, int, int], None]  # tensor, bytes done, bytes in all
FORMAT_VERSION = 1
_FILE_TYPES = {
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q4_1": LlamaFileType.MOSTLY_Q4_1,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "f16": LlamaFileType.MOSTLY_F16,
    "f32": LlamaFileType.ALL_F32,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "F16": LlamaFileType.MOSTLY_F16,
    "F32": LlamaFileType.ALL_F32,
}
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was written."""

    n_bytes: int  # of the file
    kinds: dict[str, str]  # neutral tensor name -> ggml type


def write(
    weights: WeightSet, quant: str | None, path: Path, progress: Progress | None = None
) -> WriteReport:
    """Write `weights` to `path`, replacing it only when complete.

    Without `quant` the source's types stay: blocks of a GGUF source and its
    metadata come out bit for bit. Vectors are F32, a tied embedding is stored once,
    and keys "edgespec.*" are added.

    Args:
        weights: from any source.
        quant: one of QUANTS or None.
        path: the .gguf file.
        progress: called after each tensor.

    Raises UsageError for an unknown quant, UnsupportedError naming a tensor whose
    rows the block size does not divide.
    """
    if quant is not None and quant not in QUANTS:
        raise UsageError(f"unknown quant {quant!r}; known: {', '.join(QUANTS)}")
    kinds = {t.name: _kind(weights, t, quant) for t in weights.tensors.values()}
    metadata = _metadata(weights, quant)
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writer = Writer(temporary, weights.config.arch)
    writer.data_alignment = alignment
    try:
        for key, value in metadata.items():
            if key != "general.architecture":
                kind, item = metadata.types[key]
                of_item = None if item is None else GGUFValueType(item)
                writer.add_key_value(key, value, GGUFValueType(kind), of_item)
        _write_tensors(writer, weights, kinds, progress)
        writer.close()
        n_bytes = temporary.stat().st_size
        temporary.replace(path)
    except BaseException:
        writer.close()
        temporary.unlink(missing_ok=True)
        raise
    return WriteReport(n_bytes, kinds)


def _check(config: ModelConfig) -> None:
    """Refuses what a GGUF cannot say, so that llama.cpp would compute another model."""
    arch = ARCHITECTURES[config.arch]

    def refuse(what: str, got: Any, expected: Any) -> None:
        raise UnsupportedError(
            f"{what} {got}: llama.cpp knows only {expected} for {config.arch}; use "
            "--format onnx"
        )

    known = ", ".join(sorted(arch.gguf_ropes))
    if config.rope.kind not in arch.gguf_ropes:
        refuse("RoPE scaling", repr(config.rope.kind), known)
    local = config.local_rope
    if local is not None and local.kind != "default":
        refuse("RoPE scaling of windowed layers", repr(local.kind), "none")
    scale = gguf_attention_scale(
        arch, config.n_layers, config.hidden, config.n_heads, config.head_dim
    )
    if not math.isclose(config.attention_scale, scale):
        refuse(
            "query_pre_attn_scalar", f"{config.attention_scale**-2:g}", f"{scale**-2:g}"
        )
    if config.window is not None:
        if arch.gguf_window_period is None:
            refuse("sliding_window", config.window, "whole layers")
        if _window_period(config) is None:
            layers = sorted(config.windowed)
            refuse("windows in layers", layers, "all but every so many-th layer")


def _window_period(config: ModelConfig) -> int | None:
    """The n of which every n-th layer and no other has no window."""
    for period in range(1, config.n_layers + 2):
        if config.windowed == {i for i in range(config.n_layers) if (i + 1) % period}:
            return period
    return None


class Writer(gguf.GGUFWriter):  # type: ignore[misc]
    """gguf-py refuses empty arrays, which files in the wild have."""

    def _pack_val(
        self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None
    ) -> bytes:
        if vtype is GGUFValueType.ARRAY and len(val) == 0 and sub_type is not None:
            head = self._pack("I", vtype) if add_vtype else b""
            return bytes(head + self._pack("I", sub_type) + self._pack("Q", 0))
        return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))


def _kind(weights: WeightSet, tensor: Tensor, quant: str | None) -> str:
    if quant is None and weights.gguf_metadata is not None:
        return tensor.kind
    kind = kind_for(tensor.name, tensor.shape, quant, tensor.kind)
    block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    if tensor.shape[-1] % block:
        raise UnsupportedError(
            f"tensor {tensor.name!r}: rows of {tensor.shape[-1]} do not divide into "
            f"{kind} blocks of {block}; use f16"
        )
    return kind


def _write_tensors(
    writer: gguf.GGUFWriter,
    weights: WeightSet,
    kinds: dict[str, str],
    progress: Progress | None,
) -> None:
    expected = slots(ARCHITECTURES[weights.config.arch], weights.config)
    factors = rope.freq_factors(weights.config.rope)
    if factors is not None:
        kind = GGMLQuantizationType.F32
        writer.add_tensor_info(
            ROPE_FREQS, factors.shape, factors.dtype, factors.nbytes, kind
        )
    sizes = {}
    for tensor in weights.tensors.values():
        kind = GGMLQuantizationType[kinds[tensor.name]]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[-1] // block * block_bytes
        sizes[tensor.name] = int(np.prod(tensor.shape[:-1])) * row_bytes
        writer.add_tensor_info(
            expected[tensor.name].gguf,
            (*tensor.shape[:-1], row_bytes),
            np.dtype(np.uint8),
            sizes[tensor.name],
            kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    done, total = 0, sum(sizes.values())
    for name, tensor in weights.tensors.items():
        raw = _encode(tensor, kinds[name])
        if expected[name].n_heads:
            raw = interleaved(raw, expected[name].n_heads)
        writer.write_tensor_data(np.ascontiguousarray(raw))
        done += sizes[name]
        if progress is not None:
            progress(name, done, total)


def _encode(tensor: Tensor, kind: str) -> NDArray[np.uint8]:
    """Bytes (rows, bytes of a row) of a tensor under another or the same type."""
    if kind == tensor.kind:
        return tensor.load_raw()
    values = tensor.load_f32().reshape(-1, tensor.shape[-1])
    return quantize(kind, values, f"tensor {tensor.name!r}")


def _metadata(weights: WeightSet, quant: str | None) -> Metadata:
    source = weights.gguf_metadata
    if isinstance(source, Metadata):
        made = Metadata()
        for key, value in source.items():
            if key not in _SPLIT_KEYS:
                made.put(key, value, *source.types[key])
    else:
        made = new_metadata(weights)
    u32 = GGUFValueType.UINT32
    if quant is not None or source is None:
        matrix = max(t.kind for t in weights.tensors.values() if len(t.shape) > 1)
        made.put("general.file_type", int(_FILE_TYPES[quant or matrix]), u32)
        version = int(gguf.GGML_QUANT_VERSION)
        made.put("general.quantization_version", version, u32)
    made.put("edgespec.format_version", FORMAT_VERSION, u32)
    if weights.eos_ids:
        ids = list(weights.eos_ids)
        made.put(
            "edgespec.eos_token_ids", ids, GGUFValueType.ARRAY, GGUFValueType.INT32
        )
    return made


def new_metadata(weights: WeightSet) -> Metadata:
    """Sizes and tokenizer of weights that were no GGUF.

    Raises UnsupportedError for what a GGUF cannot say.
    """
    config, made = weights.config, Metadata()
    _check(config)
    types = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    plain: dict[str, Any] = {
        "general.architecture": config.arch,
        "general.type": "model",
        "general.name": weights.name,
        "general.license": weights.origin.licence,
        "general.sampling.temp": weights.temperature,
        "general.sampling.top_p": weights.top_p,
    }
    sizes: dict[str, Any] = {
        "block_count": config.n_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "vocab_size": config.vocab,
    }
    if config.window is not None and config.local_rope is not None:
        sizes["attention.sliding_window"] = config.window
        sizes["attention.sliding_window_pattern"] = _window_period(config)
        sizes["rope.freq_base_swa"] = config.local_rope.theta
    sizes |= {f"rope.{k}": v for k, v in rope.gguf_scaling(config.rope).items()}
    plain |= {f"{config.arch}.{key}": value for key, value in sizes.items()}
    for key, value in plain.items():
        if value is not None and value != "":
            made.put(key, value, types[type(value)])
    words = tokenizer_gguf.metadata(
        weights.tokenizer_json,
        vocab=config.vocab,
        bos_id=weights.bos_id,
        eos_ids=weights.eos_ids,
        add_bos=weights.add_bos,
        chat_template=weights.chat_template,
    )
    for key, value in words.items():
        made.put(key, value, *words.types[key])
    return made
