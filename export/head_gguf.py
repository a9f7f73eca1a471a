"""Writes a draft head as one GGUF file.

EAGLE-3 is llama.cpp's architecture "eagle3", key for key and tensor for tensor: q and k
rows are pairs that RoPE rotates, d2t (I64) holds the target's ids, and the target's
vocabulary is in it, as llama.cpp wants one. `eagle3.target_layers`, in older versions
`eagle3.extract_layers`, are the taps. What llama.cpp has no words for is in

    edgespec.head.taps            int32[]  hidden_states indices, in fc's order
    edgespec.head.target_layers   uint32   of the target
    edgespec.head.norm_output     bool     output_norm's result is fed back
    edgespec.head.fc_norm         bool     a norm for each tap: fc_norm.I.weight
    edgespec.tree.parent, .rank   int32[]  the static tree, when there is one

and in the tensors fc_norm.I and blk.0.attn_q_norm, attn_k_norm, which it refuses.
"edgespec-eagle" (EAGLE-1/2) has the same keys and tensors under its own name, with
fc.bias and without the three norms of EAGLE-3. "edgespec-medusa" has

    edgespec-medusa.embedding_length, .vocab_size, .head_count
    edgespec-medusa.block_count   uint32   residual blocks of each head
    edgespec-medusa.output_rows   uint32   rows of a projection

and the tensors medusa.H.L.weight and .bias, medusa.H.output.weight, or output.weight
for all heads, or neither: then the first output_rows of the target's count.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError, UsageError
from edgespec.gguf_header import Metadata
from edgespec_export import rope, tokenizer_gguf
from edgespec_export.gguf_file import FORMAT_VERSION, Writer, WriteReport
from edgespec_export.heads import Head, gguf_name
from edgespec_export.quantize import QUANTS, quantize
from edgespec_export.sources.gguf import ROPE_FREQS, interleaved
from edgespec_export.sources.heads_gguf import D2T, KIND_OF
from edgespec_export.weights import Tensor, WeightSet

_ARCH_OF = {kind: arch for arch, kind in KIND_OF.items()}
_TYPES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}


def write(
    head: Head,
    path: Path,
    *,
    target: WeightSet,
    quant: str | None = None,
    tree: tuple[Sequence[int], Sequence[int]] | None = None,
) -> WriteReport:
    """Write `head` to `path`, replacing it only when complete.

    Args:
        target: whose vocabulary an "eagle3" file carries.
        quant: of the matrices, one of QUANTS; None keeps the source's types.
        tree: parents and ranks of the static tree's rows.

    Raises UsageError for an unknown quant, UnsupportedError naming a tensor whose
    rows the block size does not divide.
    """
    if quant is not None and quant not in QUANTS:
        raise UsageError(f"unknown quant {quant!r}; known: {', '.join(QUANTS)}")
    kinds = {name: _kind(tensor, quant) for name, tensor in head.tensors.items()}
    metadata = _metadata(head, target)
    if tree is not None:
        for key, values in zip(("parent", "rank"), tree, strict=True):
            _put_ids(metadata, f"edgespec.tree.{key}", values)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writer = Writer(temporary, _ARCH_OF[head.kind])
    try:
        for key, value in metadata.items():
            kind, item = metadata.types[key]
            of_item = None if item is None else GGUFValueType(item)
            writer.add_key_value(key, value, GGUFValueType(kind), of_item)
        _write_tensors(writer, head, kinds)
        writer.close()
        n_bytes = temporary.stat().st_size
        temporary.replace(path)
    except BaseException:
        writer.close()
        temporary.unlink(missing_ok=True)
        raise
    return WriteReport(n_bytes, kinds)


def _kind(tensor: Tensor, quant: str | None) -> str:
    """Vectors stay float; a head's projection is no finer than the rest of it."""
    if len(tensor.shape) == 1:
        return "F32"
    kind = tensor.kind if quant is None else quant.upper()
    block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    if tensor.shape[-1] % block:
        raise UnsupportedError(
            f"tensor {tensor.name!r}: rows of {tensor.shape[-1]} do not divide into "
            f"{kind} blocks of {block}; use f16"
        )
    return kind


def _write_tensors(writer: Writer, head: Head, kinds: dict[str, str]) -> None:
    vectors: dict[str, tuple[NDArray[Any], GGMLQuantizationType]] = {}
    if head.d2t is not None:
        vectors[D2T] = (head.d2t, GGMLQuantizationType.I64)
    factors = None if head.rope is None else rope.freq_factors(head.rope)
    if factors is not None:
        vectors[ROPE_FREQS] = (factors, GGMLQuantizationType.F32)
    for name, (values, kind) in vectors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes, kind)
    for name, tensor in head.tensors.items():
        kind = GGMLQuantizationType[kinds[name]]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[-1] // block * block_bytes
        writer.add_tensor_info(
            gguf_name(name),
            (*tensor.shape[:-1], row_bytes),
            np.dtype(np.uint8),
            int(np.prod(tensor.shape[:-1])) * row_bytes,
            kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values, _ in vectors.values():
        writer.write_tensor_data(np.ascontiguousarray(values))
    pairs = {"blk.0.attn_q": head.n_heads, "blk.0.attn_k": head.n_kv_heads}
    for name, tensor in head.tensors.items():
        raw = _encode(tensor, kinds[name])
        if name in pairs:
            raw = interleaved(raw, pairs[name])
        writer.write_tensor_data(np.ascontiguousarray(raw))


def _encode(tensor: Tensor, kind: str) -> NDArray[np.uint8]:
    """Bytes (rows, bytes of a row)."""
    if kind == tensor.kind:
        return tensor.load_raw()
    values = tensor.load_f32().reshape(-1, tensor.shape[-1])
    return quantize(kind, values, f"tensor {tensor.name!r}")


def _metadata(head: Head, target: WeightSet) -> Metadata:
    arch, made = _ARCH_OF[head.kind], Metadata()
    plain: dict[str, Any] = {
        "general.type": "model",
        "general.name": head.name,
        "general.license": head.origin.licence,
        "general.quantization_version": int(gguf.GGML_QUANT_VERSION),
        "edgespec.format_version": FORMAT_VERSION,
        "edgespec.head.target_layers": head.target_layers,
    }
    sizes = _medusa_sizes(head) if head.kind == "medusa" else _eagle_sizes(head)
    plain |= {f"{arch}.{key}": value for key, value in sizes.items()}
    if head.kind == "eagle3":
        plain |= {
            "eagle3.target_hidden_size": head.target_hidden,
            "eagle3.norm_before_residual": head.norm_before_residual,
            "eagle3.norm_before_fc": head.norm_before_fc,
            "edgespec.head.norm_output": head.norm_output,
            "edgespec.head.fc_norm": head.fc_norm,
        }
    for key, value in plain.items():
        if value is not None and value != "":
            made.put(key, value, _TYPES[type(value)])
    _put_ids(made, "edgespec.head.taps", head.taps)
    if head.kind == "eagle3":
        for key in ("target_layers", "extract_layers"):
            _put_ids(made, f"eagle3.{key}", head.taps)
        _put_words(made, target)
    return made


def _medusa_sizes(head: Head) -> dict[str, Any]:
    return {
        "embedding_length": head.hidden,
        "vocab_size": head.vocab,
        "head_count": head.heads,
        "block_count": head.layers,
        "output_rows": head.draft_vocab,
    }


def _eagle_sizes(head: Head) -> dict[str, Any]:
    assert head.rope is not None
    sizes = {
        "block_count": 1,
        "context_length": head.max_position,
        "embedding_length": head.hidden,
        "feed_forward_length": head.ffn,
        "attention.head_count": head.n_heads,
        "attention.head_count_kv": head.n_kv_heads,
        "attention.key_length": head.head_dim,
        "attention.value_length": head.head_dim,
        "attention.layer_norm_rms_epsilon": head.eps,
        "attention.sliding_window": head.window,
        "vocab_size": head.vocab,
    }
    return sizes | {f"rope.{k}": v for k, v in rope.gguf_scaling(head.rope).items()}


def _put_ids(made: Metadata, key: str, values: Sequence[int]) -> None:
    ids = [int(value) for value in values]
    made.put(key, ids, GGUFValueType.ARRAY, GGUFValueType.INT32)


def _put_words(made: Metadata, target: WeightSet) -> None:
    """The target's vocabulary; its chat template is not a draft's business."""
    source = target.gguf_metadata
    if not isinstance(source, Metadata):
        source = tokenizer_gguf.metadata(
            target.tokenizer_json,
            vocab=target.config.vocab,
            bos_id=target.bos_id,
            eos_ids=target.eos_ids,
            add_bos=target.add_bos,
            chat_template=None,
        )
    for key, value in source.items():
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
            made.put(key, value, *source.types[key])
