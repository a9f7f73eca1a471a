"""GGUF checkpoints, whole or in shards, as a neutral weight set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError
from edgespec.gguf_header import (
    GGUFFile,
    Metadata,
    TensorInfo,
    check_shards,
    open_gguf,
    shards,
)
from edgespec.gguf_model import Words, read_words, text
from edgespec_export import rope
from edgespec_export.arch import (
    Architecture,
    by_gguf_name,
    check_names,
    check_shape,
    embed_scale,
    gguf_attention_scale,
    slots,
)
from edgespec_export.quantize import dequantize
from edgespec_export.weights import ModelConfig, Origin, Tensor, WeightSet

_READ = frozenset(
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "vocab_size",
        "expert_count",
        "expert_used_count",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.alpha",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
    ]
)
ROPE_FREQS = "rope_freqs.weight"
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64")


def read(path: Path, *, host: WeightSet | None = None) -> WeightSet:
    """Weights of a GGUF file; of all shards when its name ends in -0000K-of-0000N.gguf.

    Tensors stay on disk until asked for, q and k rows come out in half-split order.

    Args:
        host: whose embedding, projection and tokenizer a draft without them uses; it
            comes out without these tensors.

    Raises FormatError (damaged, truncated, missing or extra tensors, wrong shapes) and
    UnsupportedError (architecture, RoPE scaling, tokenizer), naming file and tensor.
    """
    paths = shards(path)
    files = [open_gguf(file) for file in paths]
    metadata = files[0].metadata
    check_shards(files)
    stored: dict[str, tuple[GGUFFile, TensorInfo]] = {}
    for file in files:
        for info in file.tensors:
            if info.name in stored:
                raise FormatError(
                    f"{file.path}: tensor {info.name!r} is in another shard too"
                )
            stored[info.name] = (file, info)
    where = str(path)
    arch = by_gguf_name(metadata.get("general.architecture"), where)
    factors = _freq_factors(stored) if "llama3" in arch.gguf_ropes else None
    if _EMBEDDING in stored:
        host = None
    sizes = None if host is None else host.config
    config = _config(arch, metadata, stored, factors, sizes, where)
    tensors = _tensors(arch, config, stored, host is not None, where)
    words = host or _words(metadata, config.vocab, where)

    return WeightSet(
        config=config,
        tensors=tensors,
        tokenizer_json=words.tokenizer_json,
        chat_template=words.chat_template,
        bos_id=words.bos_id,
        eos_ids=words.eos_ids,
        add_bos=words.add_bos,
        temperature=words.temperature,
        top_p=words.top_p,
        name=text(metadata, "general.name", where),
        origin=Origin(
            source=path.name,
            format="gguf",
            sha256=sha256(paths),
            licence=text(metadata, "general.license", where),
        ),
        gguf_metadata=metadata,
    )


def _words(metadata: Metadata, vocab: int, where: str) -> Words:
    words = read_words(metadata, where)
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    if n_tokens > vocab:
        raise FormatError(
            f"{where}: {n_tokens} tokens, but the embedding has only {vocab} rows"
        )
    return words


def sha256(paths: Iterable[Path]) -> str:
    """Checksum of a file, or of the lines "checksum  name" of several."""
    sums = []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        sums.append((digest.hexdigest(), path.name))
    if len(sums) == 1:
        return sums[0][0]
    lines = "".join(f"{value}  {name}\n" for value, name in sums)
    return hashlib.sha256(lines.encode()).hexdigest()


def half_split(raw: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """Rows (2i, 2i + 1) of each head to (i, i + d/2)."""
    rows = raw.reshape(n_heads, -1, 2, *raw.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(raw.shape)


def interleaved(raw: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """The inverse of `half_split`."""
    rows = raw.reshape(n_heads, 2, -1, *raw.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(raw.shape)


def _freq_factors(
    stored: dict[str, tuple[GGUFFile, TensorInfo]],
) -> NDArray[np.float32] | None:
    if ROPE_FREQS not in stored:
        return None
    file, info = stored[ROPE_FREQS]
    if info.kind != "F32" or len(info.shape) != 1:
        raise FormatError(
            f"{file.path}: tensor 'rope_freqs': expected a vector of F32, got "
            f"{info.kind} {info.shape}"
        )
    return np.frombuffer(file.raw(info).tobytes(), np.float32)


def _config(
    arch: Architecture,
    metadata: Metadata,
    stored: dict[str, tuple[GGUFFile, TensorInfo]],
    factors: NDArray[np.float32] | None,
    host: ModelConfig | None,
    where: str,
) -> ModelConfig:
    prefix = arch.gguf + "."
    keys = {k.removeprefix(prefix) for k in metadata if k.startswith(prefix)}
    unknown = sorted(keys - _READ - arch.gguf_ignored)
    if unknown:
        names = ", ".join(prefix + key for key in unknown)
        raise UnsupportedError(f"{where}: metadata whose effect is not known: {names}")

    def whole(key: str, default: int | None = None) -> int:
        value = metadata.get(prefix + key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedError(f"{where}: {prefix}{key} differs by layer")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise FormatError(
                f"{where}: {prefix}{key}: expected a positive integer, got {value}"
            )
        return value

    if metadata.get(prefix + "expert_count"):
        raise UnsupportedError(f"{where}: mixture-of-experts models are not supported")
    hidden, n_heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", hidden // n_heads)
    n_kv_heads = whole("attention.head_count_kv", n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if whole(key, head_dim) != head_dim:
            raise UnsupportedError(
                f"{where}: {prefix}{key} {whole(key)} differs from the head size "
                f"{head_dim}"
            )
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{where}: {n_heads} heads do not divide among {n_kv_heads} KV heads"
        )
    context = whole("context_length")
    n_layers = whole("block_count")
    if n_layers > len(stored):
        raise FormatError(f"{where}: {n_layers} layers in {len(stored)} tensors")
    window, windowed = _windows(arch, metadata, n_layers, context, whole, where)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.get(prefix + key):
            raise UnsupportedError(
                f"{where}: {prefix}{key} {metadata[prefix + key]!r:.40} is not "
                "supported"
            )
    if host is None and _EMBEDDING not in stored:
        raise FormatError(
            f"{where}: tensors do not fit the architecture; missing: token_embd"
            + " (a draft that uses its target's: see --head)" * _is_draft(metadata)
        )
    vocab = stored[_EMBEDDING][1].shape[0] if host is None else host.vocab
    if metadata.get(prefix + "vocab_size", vocab) != vocab:
        owner = "the embedding" if host is None else "that of the target"
        raise FormatError(
            f"{where}: {prefix}vocab_size {metadata[prefix + 'vocab_size']}, but "
            f"{owner} has {vocab} rows"
        )
    if host is not None and hidden != host.hidden:
        raise FormatError(
            f"{where}: a draft of width {hidden} without an embedding, that of the "
            f"target has width {host.hidden}"
        )
    eps = metadata.get(prefix + "attention.layer_norm_rms_epsilon")
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise FormatError(
            f"{where}: {prefix}attention.layer_norm_rms_epsilon: got {eps}"
        )
    turned = rope.from_gguf(metadata, arch.gguf, head_dim, context, factors, where)
    if turned.kind not in arch.gguf_ropes:
        raise UnsupportedError(
            f"{where}: RoPE scaling {turned.kind!r} of {arch.gguf} is not supported; "
            f"known: {', '.join(sorted(arch.gguf_ropes))}"
        )
    return ModelConfig(
        arch=arch.gguf,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=whole("feed_forward_length"),
        vocab=vocab,
        max_position=context,
        rms_eps=eps,
        rope=turned,
        is_tied=_OUTPUT not in stored if host is None else host.is_tied,
        attention_scale=gguf_attention_scale(arch, n_layers, hidden, n_heads, head_dim),
        activation=arch.activation,
        embed_scale=embed_scale(arch, hidden),
        window=window,
        windowed=windowed,
        local_rope=rope.local_from_gguf(metadata, arch.gguf, head_dim, where)
        if arch.has_local_rope
        else None,
    )


def _is_draft(metadata: Metadata) -> bool:
    return any(key.startswith("edgespec.draft.") for key in metadata)


def _windows(
    arch: Architecture,
    metadata: Metadata,
    n_layers: int,
    context: int,
    whole: Callable[..., int],
    where: str,
) -> tuple[int | None, frozenset[int]]:
    """Window and windowed layers: all but every so many-th, as llama.cpp has them."""
    key, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    given = metadata.get(f"{arch.gguf}.{key}")
    if not given:
        return None, frozenset()
    window = whole(key)
    if arch.gguf_window_period is None:
        if window < context:
            raise UnsupportedError(
                f"{where}: sliding window {window} is smaller than the context "
                f"{context}; {arch.gguf} has no windows in GGUF"
            )
        return None, frozenset()
    period = whole(pattern, arch.gguf_window_period)
    return window, frozenset(i for i in range(n_layers) if (i + 1) % period)


def _tensors(
    arch: Architecture,
    config: ModelConfig,
    stored: dict[str, tuple[GGUFFile, TensorInfo]],
    is_guest: bool,
    where: str,
) -> dict[str, Tensor]:
    expected = slots(arch, config)
    has_factors = "llama3" in arch.gguf_ropes
    found = [name for name in stored if not (has_factors and name == ROPE_FREQS)]
    by_gguf = {slot.gguf: slot for slot in expected.values()}
    if is_guest:
        for name in (_EMBEDDING, _OUTPUT):
            by_gguf.pop(name, None)
    check_names(by_gguf, found, where)
    tensors = {}
    for full in found:
        file, info = stored[full]
        slot = by_gguf[full]
        check_shape(slot.name, slot.shape, info.shape, str(file.path))
        if info.kind in _NO_WEIGHTS:
            raise UnsupportedError(
                f"{file.path}: tensor {full!r}: cannot read weights of type {info.kind}"
            )
        tensors[slot.name] = Tensor(
            name=slot.name,
            shape=slot.shape,
            kind=info.kind,
            load_raw=partial(_load_raw, file, info, slot.n_heads),
            load_f32=partial(_load_f32, file, info, slot.n_heads),
        )
    return tensors


def _load_raw(file: GGUFFile, info: TensorInfo, n_heads: int) -> NDArray[np.uint8]:
    raw = file.raw(info)
    return half_split(raw, n_heads) if n_heads else raw


def _load_f32(file: GGUFFile, info: TensorInfo, n_heads: int) -> NDArray[np.float32]:
    raw = _load_raw(file, info, n_heads)
    try:
        values = dequantize(info.kind, raw, info.shape[-1])
    except UnsupportedError as error:
        raise UnsupportedError(f"{file.path}: tensor {info.name!r}: {error}") from error
    return values.reshape(info.shape)
