"""Draft heads in GGUF: llama.cpp's `eagle3`, and edgespec's own for the other kinds.

`head_gguf` describes the keys and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError
from edgespec.gguf_header import GGUFFile, TensorInfo, open_gguf
from edgespec_export import rope
from edgespec_export.arch import check_names, check_shape
from edgespec_export.heads import Head, Kind, absolute_ids, gguf_name, optional, shapes
from edgespec_export.quantize import dequantize
from edgespec_export.sources.gguf import ROPE_FREQS, half_split, sha256
from edgespec_export.sources.heads_taps import shifted
from edgespec_export.weights import ModelConfig, Origin, Tensor

KIND_OF: dict[str, Kind] = {
    "eagle3": "eagle3",
    "edgespec-eagle": "eagle",
    "edgespec-medusa": "medusa",
}
D2T = "d2t"


def read(path: Path, target: ModelConfig, tap_convention: str | None) -> Head:
    """Draft head of a GGUF file; tensors stay on disk until asked for.

    Raises FormatError and UnsupportedError, naming key or tensor.
    """
    file = open_gguf(path)
    where = str(path)
    arch = file.metadata.get("general.architecture")
    if arch not in KIND_OF:
        known = ", ".join(KIND_OF)
        raise FormatError(f"{where}: {arch!r:.40} is no draft head; known: {known}")
    keys = _Keys(file.metadata, arch, where)
    stored = {info.name: info for info in file.tensors}
    kind = KIND_OF[arch]
    build = _medusa if kind == "medusa" else _eagle
    head = build(kind, keys, file, stored, target, tap_convention)
    head = replace(head, d2t=_d2t(head, file, stored, where))
    return replace(head, tensors=_tensors(head, file, stored, where))


class _Keys:
    """Metadata under the architecture's prefix, typed."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, where: str) -> None:
        self.metadata = metadata
        self.arch = arch
        self.where = where

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise FormatError(
                f"{self.where}: {self.arch}.{key}: expected a whole number, got "
                f"{value!r:.40}"
            )
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.whole(key, default)
        if value == 0:
            raise FormatError(f"{self.where}: {self.arch}.{key}: expected more than 0")
        return value

    def flag(self, key: str) -> bool:
        value = self.metadata.get(key, False)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: {key}: expected true or false")
        return value

    def ids(self, *keys: str) -> tuple[int, ...] | None:
        """The first of several keys that is there; all that are must agree."""
        found = {k: self.metadata[k] for k in keys if k in self.metadata}
        for key, value in found.items():
            is_list = isinstance(value, list) and len(value) > 0
            if not is_list or not all(type(i) is int for i in value):
                raise FormatError(f"{self.where}: {key}: expected whole numbers")
        if any(value != next(iter(found.values())) for value in found.values()):
            raise FormatError(f"{self.where}: {' and '.join(found)} differ: {found}")
        return tuple(next(iter(found.values()))) if found else None


def _eagle(
    kind: Kind,
    keys: _Keys,
    file: GGUFFile,
    stored: Mapping[str, TensorInfo],
    target: ModelConfig,
    tap_convention: str | None,
) -> Head:
    where = keys.where
    if keys.positive("block_count") != 1:
        raise UnsupportedError(
            f"{where}: {keys.arch}.block_count {keys.whole('block_count')}: expected 1"
        )
    hidden, n_heads = (
        keys.positive("embedding_length"),
        keys.positive("attention.head_count"),
    )
    head_dim = keys.positive("attention.key_length", max(hidden // n_heads, 1))
    n_kv_heads = keys.positive("attention.head_count_kv", n_heads)
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{where}: {n_heads} heads do not divide among {n_kv_heads} KV heads"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.positive(key, head_dim) != head_dim:
            raise UnsupportedError(
                f"{where}: {keys.arch}.{key} {keys.whole(key)}: expected the keys' "
                f"size {head_dim}"
            )
    context = keys.positive("context_length")
    eps = file.metadata.get(f"{keys.arch}.attention.layer_norm_rms_epsilon")
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise FormatError(
            f"{where}: {keys.arch}.attention.layer_norm_rms_epsilon: got {eps!r:.40}"
        )
    taps: tuple[int, ...] = (target.n_layers,)
    target_hidden = hidden
    if kind == "eagle3":
        taps = _taps(keys, target, tap_convention)
        target_hidden = keys.positive("target_hidden_size")
    words = file.metadata.get("tokenizer.ggml.tokens")
    n_words = len(words) if isinstance(words, list) else target.vocab
    vocab = keys.positive("vocab_size", n_words)
    output, d2t = stored.get("output.weight"), stored.get(D2T)
    rows = vocab
    if output is not None:
        rows = output.shape[0]
    elif d2t is not None:
        rows = d2t.shape[0]
    factors = None
    if ROPE_FREQS in stored:
        factors = np.frombuffer(file.raw(stored[ROPE_FREQS]).tobytes(), np.float32)
    return Head(
        kind=kind,
        hidden=hidden,
        target_hidden=target_hidden,
        target_layers=keys.metadata.get("edgespec.head.target_layers", target.n_layers),
        vocab=vocab,
        draft_vocab=rows,
        taps=taps,
        tensors={},
        origin=_origin(file, where),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=keys.positive("feed_forward_length"),
        eps=eps,
        rope=rope.from_gguf(
            file.metadata, keys.arch, head_dim, context, factors, where
        ),
        max_position=context,
        window=keys.whole("attention.sliding_window", 0) or None,
        norm_before_residual=keys.flag(f"{keys.arch}.norm_before_residual"),
        norm_output=keys.flag("edgespec.head.norm_output"),
        name=_text(file, "general.name", where),
    )


def _taps(
    keys: _Keys, target: ModelConfig, tap_convention: str | None
) -> tuple[int, ...]:
    """Our own key holds hidden states; llama.cpp's layer ids are the layers' inputs."""
    ours = keys.ids("edgespec.head.taps")
    if ours is not None and tap_convention is None:
        return shifted(ours, target.n_layers, "input", keys.where)
    ids = keys.ids("eagle3.extract_layers", "eagle3.target_layers") or ours
    if ids is None:
        raise FormatError(
            f"{keys.where}: neither eagle3.target_layers nor .extract_layers"
        )
    return shifted(ids, target.n_layers, tap_convention, keys.where)


def _medusa(
    kind: Kind,
    keys: _Keys,
    file: GGUFFile,
    stored: Mapping[str, TensorInfo],
    target: ModelConfig,
    tap_convention: str | None,
) -> Head:
    hidden = keys.positive("embedding_length")
    heads, layers = keys.positive("head_count"), keys.whole("block_count")
    if heads * max(layers, 1) > max(len(stored), heads):
        raise FormatError(
            f"{keys.where}: {heads} heads of {layers} blocks in {len(stored)} tensors"
        )
    return Head(
        kind=kind,
        hidden=hidden,
        target_hidden=hidden,
        target_layers=keys.metadata.get("edgespec.head.target_layers", target.n_layers),
        vocab=keys.positive("vocab_size"),
        draft_vocab=keys.positive("output_rows"),
        taps=(target.n_layers,),
        tensors={},
        origin=_origin(file, keys.where),
        heads=heads,
        layers=layers,
        name=_text(file, "general.name", keys.where),
    )


def _d2t(
    head: Head, file: GGUFFile, stored: Mapping[str, TensorInfo], where: str
) -> NDArray[np.int64] | None:
    info = stored.get(D2T)
    if info is None:
        if head.draft_vocab != head.vocab and head.kind != "medusa":
            raise FormatError(
                f"{where}: output has {head.draft_vocab} rows, the target {head.vocab} "
                "tokens, and there is no d2t"
            )
        if head.draft_vocab > head.vocab:
            raise FormatError(
                f"{where}: {head.draft_vocab} output rows for {head.vocab} tokens"
            )
        return None
    if info.kind != "I64":
        raise FormatError(f"{where}: tensor 'd2t': expected I64, got {info.kind}")
    check_shape(D2T, (head.draft_vocab,), info.shape, where)
    ids = np.frombuffer(file.raw(info).tobytes(), np.int64)
    if not (np.diff(ids) > 0).all():
        raise FormatError(f"{where}: tensor 'd2t': expected rising ids of the target")
    return absolute_ids(ids, None, head.vocab, where)


def _tensors(
    head: Head, file: GGUFFile, stored: Mapping[str, TensorInfo], where: str
) -> dict[str, Tensor]:
    by_gguf = {gguf_name(name): name for name in shapes(head)}
    missable = {gguf_name(name) for name in optional(head)}
    missable -= _needed(file.metadata, head, stored)
    found = [name for name in stored if name not in (D2T, ROPE_FREQS)]
    check_names({n for n in by_gguf if n not in missable or n in stored}, found, where)
    if {gguf_name("enc.output_norm"), gguf_name("fc_norm.0")} <= set(found):
        raise FormatError(f"{where}: norm_before_fc and fc_norm exclude each other")
    counts = {"blk.0.attn_q": head.n_heads, "blk.0.attn_k": head.n_kv_heads}
    expected = shapes(head)
    tensors = {}
    for full in found:
        name, info = by_gguf[full], stored[full]
        check_shape(full, expected[name], info.shape, where)
        load = partial(_load_raw, file, info, counts.get(name, 0))
        tensors[name] = Tensor(
            name, info.shape, info.kind, load, partial(_load_f32, info, load)
        )
    return tensors


def _needed(
    metadata: Mapping[str, Any], head: Head, stored: Mapping[str, TensorInfo]
) -> set[str]:
    """Tensors that the flags call for, or others of their kind."""
    each_tap = {gguf_name(f"fc_norm.{i}") for i in range(len(head.taps))}
    needed: set[str] = set()
    for together in (
        {gguf_name(f"blk.0.attn_{part}_norm") for part in "qk"},
        {gguf_name(f"medusa.{h}.output") for h in range(head.heads)},
        each_tap,
    ):
        if not together.isdisjoint(stored):
            needed |= together
    if metadata.get("eagle3.norm_before_fc"):
        needed.add(gguf_name("enc.output_norm"))
    if metadata.get("edgespec.head.fc_norm"):
        needed |= each_tap
    return needed


def _load_raw(file: GGUFFile, info: TensorInfo, n_heads: int) -> NDArray[np.uint8]:
    raw = file.raw(info)
    return half_split(raw, n_heads) if n_heads else raw


def _load_f32(info: TensorInfo, load: Any) -> NDArray[np.float32]:
    return dequantize(info.kind, load(), info.shape[-1]).reshape(info.shape)


def _origin(file: GGUFFile, where: str) -> Origin:
    return Origin(
        source=file.path.name,
        format="gguf",
        sha256=sha256([file.path]),
        licence=_text(file, "general.license", where),
    )


def _text(file: GGUFFile, key: str, where: str) -> str | None:
    value = file.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{where}: {key}: expected text, got {value!r:.40}")
    return value
