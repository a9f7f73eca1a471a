"""Draft heads of every layout in the wild as one neutral form.

Layouts: Medusa 0.1, 1 and 2; EAGLE-1/2; EAGLE-3 as SafeAILab's code, SpecForge and
speculators write it; llama.cpp's `eagle3` GGUF and edgespec's own. Which one a file is,
its tensors' names and shapes tell, never its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export import rope
from edgespec_export.arch import check_names, check_shape
from edgespec_export.heads import (
    Head,
    Kind,
    absolute_ids,
    check_target,
    optional,
    shapes,
)
from edgespec_export.quantize import FLOATS, dequantize
from edgespec_export.sources import heads_gguf, hf
from edgespec_export.sources.gguf import sha256
from edgespec_export.sources.heads_files import (
    HeadFiles,
    is_gguf,
    read_files,
    sole_gguf,
)
from edgespec_export.sources.heads_taps import target_taps
from edgespec_export.sources.safetensors_file import StoredTensor
from edgespec_export.weights import ModelConfig, Origin, Tensor

_PREFIXES = ("draft_model.", "model.")
_BLOCK = "midlayer."  # "layers.0." in speculators and EAGLE-1/2
_NAMES = {
    "fc.weight": "fc",
    "fc.bias": "fc.bias",
    "embed_tokens.weight": "token_embd",
    "lm_head.weight": "output",
    "norm.weight": "output_norm",
    "input_norm.weight": "enc.output_norm",
    f"{_BLOCK}input_layernorm.weight": "blk.0.attn_norm",
    f"{_BLOCK}hidden_norm.weight": "blk.0.attn_norm_2",
    f"{_BLOCK}self_attn.q_proj.weight": "blk.0.attn_q",
    f"{_BLOCK}self_attn.k_proj.weight": "blk.0.attn_k",
    f"{_BLOCK}self_attn.v_proj.weight": "blk.0.attn_v",
    f"{_BLOCK}self_attn.o_proj.weight": "blk.0.attn_output",
    f"{_BLOCK}self_attn.q_norm.weight": "blk.0.attn_q_norm",
    f"{_BLOCK}self_attn.k_norm.weight": "blk.0.attn_k_norm",
    f"{_BLOCK}post_attention_layernorm.weight": "blk.0.ffn_norm",
    f"{_BLOCK}mlp.gate_proj.weight": "blk.0.ffn_gate",
    f"{_BLOCK}mlp.up_proj.weight": "blk.0.ffn_up",
    f"{_BLOCK}mlp.down_proj.weight": "blk.0.ffn_down",
}
# Of training alone, or computed anew.
_IGNORED = re.compile(r"verifier_(norm|lm_head)\.weight|.*rotary_emb\.inv_freq")
_MEDUSA = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
_EPS, _MAX_POSITION = 1e-6, 2048  # of a Llama config that leaves them out


def read(
    path: Path,
    target: ModelConfig,
    *,
    expected: str | None = None,
    tap_convention: str | None = None,
) -> Head:
    """Draft head of a file or directory, for a target.

    Args:
        expected: "eagle" (any version) or "medusa", when it must be one.
        tap_convention: what an EAGLE-3 head's own layer ids mean, see `target_taps`;
            other heads have none.

    Raises FormatError naming tensor or key and both sides: a damaged file, one of
    another layout, missing, misshapen or surplus tensors, another target's sizes;
    UnsupportedError for settings under which it would be another head.
    """
    path = sole_gguf(path)
    if is_gguf(path):
        head = heads_gguf.read(path, target, tap_convention)
    else:
        head = _read_checkpoint(read_files(path), target, tap_convention)
    if expected is not None and not head.kind.startswith(expected):
        raise FormatError(f"{path}: expected a head of {expected}, got {head.kind}")
    check_target(head, target, str(path))
    return head


def _read_checkpoint(
    files: HeadFiles, target: ModelConfig, tap_convention: str | None
) -> Head:
    where = files.where
    medusa = {n: t for n, t in files.tensors.items() if _MEDUSA.fullmatch(n)}
    if medusa:
        return _medusa(files, medusa, target)
    stored = _plain_names(files.tensors, where)
    kind = _eagle_kind(stored, where)
    return _eagle(kind, files, stored, target, tap_convention)


def _plain_names(
    tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Tensors without optional prefixes, the one block as EAGLE-3 calls it."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name.startswith("layers.0."):
            name = _BLOCK + name.removeprefix("layers.0.")
        if name in found:
            raise FormatError(
                f"{where}: tensors {found[name].name!r} and {tensor.name!r} are one"
            )
        if not _IGNORED.fullmatch(name):
            found[name] = tensor
    return found


def _eagle_kind(stored: Mapping[str, StoredTensor], where: str) -> Kind:
    fc, q = stored.get("fc.weight"), stored.get(f"{_BLOCK}self_attn.q_proj.weight")
    if fc is None or q is None or len(fc.shape) != 2 or len(q.shape) != 2:
        some = ", ".join(sorted(t.name for t in stored.values())[:6])
        raise FormatError(
            f"{where}: no draft head: expected tensors of Medusa "
            "(0.0.linear.weight) or of EAGLE (fc.weight and q_proj.weight of one "
            f"block), got {some or 'none'}"
        )
    hidden, features = fc.shape
    if q.shape[1] == 2 * hidden:
        return "eagle3"
    if q.shape[1] == hidden and features == 2 * hidden:
        return "eagle"
    raise FormatError(
        f"{where}: tensors {fc.name!r} {fc.shape} and {q.name!r} {q.shape} fit neither "
        f"EAGLE-3 (q_proj takes {2 * hidden}) nor EAGLE-1/2 (fc takes {2 * hidden}, "
        f"q_proj {hidden})"
    )


class _Settings:
    """config.json with typed access; keys of a block may lie deeper."""

    def __init__(self, files: HeadFiles) -> None:
        self.where = f"{files.where}: config.json"
        inner = files.config.get("transformer_layer_config", {})
        given = files.config.get("eagle_config") or {}
        for key, part in (("transformer_layer_config", inner), ("eagle_config", given)):
            if not isinstance(part, dict):
                raise FormatError(f"{self.where}: {key}: expected an object")
        self.values: dict[str, Any] = {**files.config, **inner, **given}

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise FormatError(
                f"{self.where}: {key}: expected a positive integer, got {value!r:.40}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise FormatError(
                f"{self.where}: {key}: expected true or false, got {value!r:.40}"
            )
        return value

    def agree(self, key: str, got: int, what: str) -> None:
        """FormatError when the key is there and says otherwise than the tensors."""
        if self.values.get(key) is not None and self.whole(key) != got:
            raise FormatError(
                f"{self.where}: {key} {self.values[key]}, but {what} {got}"
            )

    def refuse_unknown(self) -> None:
        """UnsupportedError for what would make the block another one."""
        expected = {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "num_hidden_layers": (1,),
            "quantization_config": (),
        }
        for key, allowed in expected.items():
            value = self.values.get(key)
            if value is not None and value not in allowed:
                wanted = f"expected {allowed[0]!r}" if allowed else "not supported"
                raise UnsupportedError(f"{self.where}: {key} = {value!r:.60}: {wanted}")

    def window(self) -> int | None:
        is_windowed = "sliding_attention" in (self.values.get("layer_types") or ())
        return self.whole("sliding_window") if is_windowed else None


def _eagle(
    kind: Kind,
    files: HeadFiles,
    stored: dict[str, StoredTensor],
    target: ModelConfig,
    tap_convention: str | None,
) -> Head:
    where = files.where
    if not files.config:
        raise FormatError(
            f"{where}: no config.json beside the weights: it has the heads"
        )
    settings = _Settings(files)
    settings.refuse_unknown()
    maps = {key: stored.pop(key, None) for key in ("d2t", "t2d")}
    tensors = {_neutral(name): tensor for name, tensor in stored.items()}
    hidden, features = tensors["fc"].shape
    settings.agree("hidden_size", hidden, "fc.weight makes")
    n_heads = settings.whole("num_attention_heads")
    head_dim = settings.whole("head_dim", max(hidden // n_heads, 1))
    n_kv_heads = settings.whole("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{settings.where}: {n_heads} heads do not divide among {n_kv_heads} KV "
            "heads"
        )
    taps: tuple[int, ...] = (target.n_layers,)
    target_hidden = hidden
    if kind == "eagle3":
        taps = target_taps(settings.values, target.n_layers, tap_convention, where)
        if features % len(taps):
            raise FormatError(
                f"{where}: fc.weight takes {features} features, which {len(taps)} taps "
                "do not divide"
            )
        target_hidden = features // len(taps)
        settings.agree("target_hidden_size", target_hidden, "fc.weight takes taps of")
    vocab = _vocab(settings, tensors, maps["t2d"], target, where)
    draft_vocab = _draft_vocab(settings, tensors.get("output"), maps["d2t"], vocab)
    d2t = _d2t(maps["d2t"], maps["t2d"], vocab, draft_vocab, where)
    head = Head(
        kind=kind,
        hidden=hidden,
        target_hidden=target_hidden,
        target_layers=target.n_layers,
        vocab=vocab,
        draft_vocab=draft_vocab,
        taps=taps,
        tensors={},
        origin=_origin(files),
        d2t=d2t,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=settings.whole("intermediate_size"),
        eps=_eps(settings),
        rope=rope.from_hf(settings.values, head_dim, settings.where),
        max_position=settings.whole("max_position_embeddings", _MAX_POSITION),
        window=settings.window(),
        norm_before_residual=settings.flag("norm_before_residual", False),
        norm_output=settings.flag("norm_output", False),
        name=Path(where).resolve().name,
    )
    needed = _flagged(kind, settings, tensors, len(taps), where)
    return _with_tensors(head, tensors, needed, where)


def _neutral(name: str) -> str:
    match = re.fullmatch(r"fc_norm\.(\d+)\.weight", name)
    return f"fc_norm.{match[1]}" if match else _NAMES.get(name, name)


def _flagged(
    kind: str,
    settings: _Settings,
    tensors: Mapping[str, StoredTensor],
    n_taps: int,
    where: str,
) -> set[str]:
    """Optional tensors that the settings call for; refuses those they rule out."""
    needed = {
        name
        for pair in [("blk.0.attn_q_norm", "blk.0.attn_k_norm")]
        if any(name in tensors for name in pair)
        for name in pair
    }
    if settings.values.get("model_type") == "qwen3":
        needed |= {"blk.0.attn_q_norm", "blk.0.attn_k_norm"}
    flags = {
        "norm_before_fc": ["enc.output_norm"],
        "fc_norm": [f"fc_norm.{i}" for i in range(n_taps)],
    }
    if kind == "eagle":
        flags = {"bias": ["fc.bias"]}
    for key, names in flags.items():
        is_there = any(name in tensors for name in names)
        if settings.flag(key, key == "bias" or is_there):
            needed.update(names)
        elif is_there:
            raise FormatError(
                f"{where}: config.json says {key} is false, but there is a tensor "
                f"{names[0]!r}"
            )
    if "enc.output_norm" in needed and "fc_norm.0" in needed:
        raise FormatError(f"{where}: norm_before_fc and fc_norm exclude each other")
    return needed


def _vocab(
    settings: _Settings,
    tensors: Mapping[str, StoredTensor],
    t2d: StoredTensor | None,
    target: ModelConfig,
    where: str,
) -> int:
    """The target's vocabulary as the head knows it."""
    said = {}
    if settings.values.get("vocab_size") is not None:
        said["config.json's vocab_size"] = settings.whole("vocab_size")
    if "token_embd" in tensors:
        said["embed_tokens"] = tensors["token_embd"].shape[0]
    if t2d is not None:
        said["t2d"] = t2d.shape[0]
    for what, vocab in said.items():
        if vocab != target.vocab:
            raise FormatError(
                f"{where}: {what} is for {vocab} tokens, the target has {target.vocab}"
            )
    return target.vocab


def _draft_vocab(
    settings: _Settings,
    output: StoredTensor | None,
    d2t: StoredTensor | None,
    vocab: int,
) -> int:
    rows = vocab
    if output is not None:
        rows = output.shape[0]
        settings.agree("draft_vocab_size", rows, f"{output.name} has rows")
    elif d2t is not None:
        rows = d2t.shape[0]
        settings.agree("draft_vocab_size", rows, "d2t has entries")
    return rows


def _d2t(
    d2t: StoredTensor | None,
    t2d: StoredTensor | None,
    vocab: int,
    draft_vocab: int,
    where: str,
) -> NDArray[np.int64] | None:
    if d2t is None:
        if draft_vocab != vocab:
            raise FormatError(
                f"{where}: lm_head has {draft_vocab} rows, the target {vocab} tokens, "
                "and there is no d2t"
            )
        return None
    check_shape("d2t", (draft_vocab,), d2t.shape, where)
    member = None if t2d is None else _values(t2d).astype(bool)
    ids = absolute_ids(_values(d2t), member, vocab, where)
    return None if draft_vocab == vocab else ids


def _values(tensor: StoredTensor) -> NDArray[np.integer]:
    """Whole numbers of a vector."""
    types = {"I64": np.int64, "I32": np.int32, "BOOL": np.uint8, "U8": np.uint8}
    if tensor.kind not in types or len(tensor.shape) != 1:
        raise FormatError(
            f"{tensor.path}: tensor {tensor.name!r}: expected a vector of whole "
            f"numbers, got {tensor.kind} {tensor.shape}"
        )
    return np.frombuffer(tensor.data.tobytes(), types[tensor.kind])


def _eps(settings: _Settings) -> float:
    eps = settings.values.get("rms_norm_eps", _EPS)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise FormatError(
            f"{settings.where}: rms_norm_eps: expected a number between 0 and 1, got "
            f"{eps!r:.40}"
        )
    return eps


def _medusa(
    files: HeadFiles, stored: Mapping[str, StoredTensor], target: ModelConfig
) -> Head:
    where = files.where
    settings = _Settings(files)
    blocks: dict[tuple[int, int], list[str]] = {}
    projections: dict[int, tuple[int, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _MEDUSA.fullmatch(name)
        assert match is not None
        head, layer, part = int(match[1]), int(match[2]), match[4]
        if match[3]:
            blocks.setdefault((head, layer), []).append(part)
            tensors[f"medusa.{head}.{layer}.{part}"] = tensor
        elif part == "weight":
            projections[head] = (layer, tensor)
            tensors[f"medusa.{head}.output"] = tensor
        else:
            raise FormatError(f"{where}: tensor {name!r}: a projection has no bias")
    heads = 1 + max([h for h, _ in blocks] + list(projections))
    layers = 1 + max((layer for _, layer in blocks), default=-1)
    if heads * max(layers, 1) > len(tensors):
        raise FormatError(f"{where}: {heads} heads in {len(tensors)} tensors: missing")
    for head, (layer, tensor) in projections.items():
        if layer != layers:
            raise FormatError(
                f"{where}: tensor {tensor.name!r}: expected block {layers - 1} of head "
                f"{head} before it, or the projection to be {head}.{layers}.weight"
            )
    _check_counts(settings, heads, layers)
    first = min(tensors)
    hidden = tensors[first].shape[-1]
    vocab = _vocab(settings, {}, None, target, where)
    rows = settings.whole("draft_vocab_size", vocab)
    for _, tensor in projections.values():
        if tensor.shape[0] != rows:
            raise FormatError(
                f"{where}: the projection {tensor.name!r} has {tensor.shape[0]} rows, "
                f"expected {rows}, the target's tokens or config.json's "
                "draft_vocab_size"
            )
    draft = Head(
        kind="medusa",
        hidden=hidden,
        target_hidden=hidden,
        target_layers=target.n_layers,
        vocab=vocab,
        draft_vocab=rows,
        taps=(target.n_layers,),
        tensors={},
        origin=_origin(files),
        heads=heads,
        layers=layers,
        name=Path(where).resolve().name,
    )
    needed = {f"medusa.{h}.output" for h in range(heads)} if projections else set()
    return _with_tensors(draft, tensors, needed, where)


def _check_counts(settings: _Settings, heads: int, layers: int) -> None:
    """v0.1 says 2 heads and has 5: more than stated is fine, fewer are not."""
    stated = settings.whole("medusa_num_heads", heads)
    if stated > heads:
        raise FormatError(
            f"{settings.where}: medusa_num_heads {stated}, but the weights have {heads}"
        )
    settings.agree("medusa_num_layers", layers, "each head has blocks:")


def _with_tensors(
    head: Head, stored: Mapping[str, StoredTensor], needed: set[str], where: str
) -> Head:
    """The head with its tensors, all there and of the expected shapes."""
    expected = shapes(head)
    missable = optional(head) - needed
    wanted = [name for name in expected if name not in missable or name in stored]
    shown = {name: tensor.name for name, tensor in stored.items()}
    check_names(wanted, stored, where)
    tensors = {}
    for name in wanted:
        source = stored[name]
        check_shape(shown[name], expected[name], source.shape, str(source.path))
        if source.kind not in FLOATS:
            raise UnsupportedError(
                f"{source.path}: tensor {source.name!r} has type {source.kind}; known: "
                f"{', '.join(FLOATS)}"
            )
        tensors[name] = Tensor(
            name, source.shape, source.kind, source.raw, partial(_load_f32, source)
        )
    return replace(head, tensors=tensors)


def _load_f32(source: StoredTensor) -> NDArray[np.float32]:
    values = dequantize(source.kind, source.raw(), source.shape[-1])
    return values.reshape(source.shape)


def _origin(files: HeadFiles) -> Origin:
    path = Path(files.where)
    directory = path if path.is_dir() else path.parent
    is_zip = files.paths[0].suffix != ".safetensors"
    return Origin(
        source=path.resolve().name,
        format="pytorch" if is_zip else "safetensors",
        sha256=sha256(files.paths),
        licence=hf.licence(directory),
    )
