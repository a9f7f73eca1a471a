"""Hugging Face checkpoint directories as a neutral weight set."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from edgespec.errors import FormatError, ModelNotFoundError
from edgespec.tokenizer import load_library
from edgespec.tokenizer_gguf import ends_of_turn
from edgespec_export import rope
from edgespec_export.arch import (
    Architecture,
    TextPart,
    by_model_type,
    check_names,
    check_shape,
    embed_scale,
    slots,
)
from edgespec_export.quantize import dequantize
from edgespec_export.sources.gguf import sha256
from edgespec_export.sources.hf_settings import (
    check_settings,
    check_types,
    text_settings,
    windows,
)
from edgespec_export.sources.safetensors_file import StoredTensor, read_tensors
from edgespec_export.weights import ModelConfig, Origin, Tensor, WeightSet

_BUFFERS = ("self_attn.rotary_emb.inv_freq",)  # in old checkpoints, needlessly
_LICENCE = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)


def read(directory: Path) -> WeightSet:
    """Weights of a directory with config.json, safetensors and tokenizer.json.

    Raises ModelNotFoundError (a file is missing), FormatError (damaged files,
    missing or extra tensors, wrong shapes) and UnsupportedError (settings under
    which the model would be another one), naming file, key or tensor.
    """
    config_json = _json(directory / "config.json")
    where = str(directory / "config.json")
    check_types(config_json, where)
    arch = by_model_type(config_json, where)
    model_type = config_json["model_type"]
    text_part = arch.hf_text.get(model_type)
    if text_part is not None:
        config_json = text_settings(text_part, config_json, where)
    config_json = dict(arch.hf_defaults.get(model_type, {})) | config_json
    check_settings(arch, config_json, where)
    stored, paths = read_tensors(directory)
    if text_part is not None:
        stored = _text_tensors(text_part, stored)
    stored = {k: v for k, v in stored.items() if not k.endswith(_BUFFERS)}
    config = _config(arch, config_json, len(stored), where)
    tensors = _tensors(arch, config, stored, str(directory))
    text, words = _tokenizer(directory)
    size = max(words.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > config.vocab:
        raise FormatError(
            f"{directory / 'tokenizer.json'}: {size} tokens, but the embedding has "
            f"only {config.vocab} rows"
        )
    settings = _json(directory / "tokenizer_config.json", is_optional=True)
    generation = _json(directory / "generation_config.json", is_optional=True)
    template = _chat_template(directory, settings)
    bos_id = _special(settings, "bos_token", words, directory)
    if bos_id is None:
        bos_id = _first(_ids(config_json, "bos_token_id", config.vocab, where))
    ids = _ids(config_json, "eos_token_id", config.vocab, where)
    ids += _ids(
        generation, "eos_token_id", config.vocab, f"{directory}/generation_config.json"
    )
    ids += [_special(settings, "eos_token", words, directory)]
    names = [words.id_to_token(i) or "" for i in range(size)]
    ids += [i for i in ends_of_turn(template or "", names) if i != bos_id]
    return WeightSet(
        config=config,
        tensors=tensors,
        tokenizer_json=text,
        chat_template=template,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(i for i in ids if i is not None)),
        add_bos=_adds_bos(settings, words, bos_id),
        temperature=_number(generation, "temperature", 0, 1e9, directory),
        top_p=_number(generation, "top_p", 1e-9, 1, directory),
        name=directory.resolve().name,
        origin=Origin(
            source=directory.resolve().name,
            format="safetensors",
            sha256=sha256(paths),
            licence=licence(directory),
        ),
    )


def _json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if is_optional:
            return {}
        raise ModelNotFoundError(
            f"{path}: no such file; it is part of every checkpoint"
        )
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def _config(
    arch: Architecture, config: Mapping[str, Any], n_tensors: int, where: str
) -> ModelConfig:
    def whole(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise FormatError(
                f"{where}: {key}: expected a positive integer, got {value!r}"
            )
        if value >= 1 << 31:
            raise FormatError(f"{where}: {key}: expected less than 2^31, got {value}")
        return value

    hidden, n_heads = whole("hidden_size"), whole("num_attention_heads")
    n_kv_heads = whole("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise FormatError(
            f"{where}: {n_heads} heads do not divide among {n_kv_heads} KV heads"
        )
    head_dim = whole("head_dim", hidden // n_heads)
    n_layers = whole("num_hidden_layers")
    if n_layers > n_tensors:
        raise FormatError(f"{where}: {n_layers} layers in {n_tensors} tensors")
    window, windowed = windows(arch, config, n_layers, where)
    scalar = config.get("query_pre_attn_scalar", head_dim)
    if not isinstance(scalar, int | float) or not 0 < scalar < 1 << 31:
        raise FormatError(
            f"{where}: query_pre_attn_scalar: expected a positive number, got "
            f"{scalar!r}"
        )
    settings, local = config, None
    if arch.has_local_rope:
        settings, local = rope.by_layer_type(config, where)
    eps = config.get("rms_norm_eps", arch.rms_eps)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise FormatError(
            f"{where}: rms_norm_eps: expected a number between 0 and 1, got {eps!r}"
        )
    return ModelConfig(
        arch=arch.gguf,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=whole("intermediate_size"),
        vocab=whole("vocab_size"),
        max_position=whole("max_position_embeddings"),
        rms_eps=eps,
        rope=rope.from_hf(settings, head_dim, where),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        attention_scale=float(scalar**-0.5),
        activation=arch.activation,
        embed_scale=embed_scale(arch, hidden),
        window=window,
        windowed=windowed,
        local_rope=None if local is None else rope.from_hf(local, head_dim, where),
    )


def _tensors(
    arch: Architecture, config: ModelConfig, stored: dict[str, StoredTensor], where: str
) -> dict[str, Tensor]:
    expected = slots(arch, config)
    by_hf = {slot.hf: slot for slot in expected.values()}
    if config.is_tied and arch.head.hf in stored:
        _check_tie(arch, stored, expected["token_embd"].hf, where)
        stored = {k: v for k, v in stored.items() if k != arch.head.hf}
    check_names(by_hf, stored, where)
    tensors = {}
    for hf, slot in by_hf.items():
        source = stored[hf]
        check_shape(hf, slot.shape, source.shape, str(source.path))
        load = partial(_load_f32, source, slot.hf_offset)
        is_stored = slot.hf_offset == 0
        tensors[slot.name] = Tensor(
            name=slot.name,
            shape=slot.shape,
            kind=source.kind if is_stored else "F32",
            load_raw=source.raw if is_stored else partial(_raw_f32, load),
            load_f32=load,
        )
    return tensors


def _text_tensors(
    part: TextPart, stored: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Tensors of the language model, under the names they have when alone."""
    found = {}
    for name, tensor in stored.items():
        if name.startswith(part.dropped):
            continue
        for prefix, meant in part.renamed.items():
            if name.startswith(prefix):
                name = meant + name.removeprefix(prefix)
                break
        found[name] = tensor
    return found


def _check_tie(
    arch: Architecture, stored: dict[str, StoredTensor], embedding: str, where: str
) -> None:
    head, other = stored[arch.head.hf], stored.get(embedding)
    if (
        other is None
        or head.shape != other.shape
        or not np.array_equal(head.data, other.data)
    ):
        raise FormatError(
            f"{where}: tie_word_embeddings is true, but {arch.head.hf} differs from "
            f"{embedding}"
        )


def _load_f32(source: StoredTensor, offset: float) -> NDArray[np.float32]:
    values = dequantize(source.kind, source.raw(), source.shape[-1])
    if offset:
        values = values + np.float32(offset)
    return values.reshape(source.shape)


def _raw_f32(load: Callable[[], NDArray[np.float32]]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(load()).reshape(1, -1).view(np.uint8)


def _tokenizer(directory: Path) -> tuple[str, tokenizers.Tokenizer]:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"{path}: no such file; load the tokenizer with transformers and save it "
            "to get one"
        )
    text = _text(path)
    try:
        return text, load_library(text)
    except FormatError as error:
        raise FormatError(f"{directory}: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8: {error}") from error


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The template transformers would use: its own file before the configuration."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    found = _json(directory / "chat_template.json", is_optional=True).get(
        "chat_template"
    )
    found = found or settings.get("chat_template")
    if isinstance(found, list):
        found = next(
            (
                entry.get("template")
                for entry in found
                if isinstance(entry, dict) and entry.get("name") == "default"
            ),
            None,
        )
    is_text = isinstance(found, str) and not re.search("[\ud800-\udfff]", found)
    if found is not None and not is_text:
        raise FormatError(
            f"{directory}: chat_template: expected text, got {found!r:.80}"
        )
    return found


def _special(
    settings: Mapping[str, Any], key: str, words: tokenizers.Tokenizer, directory: Path
) -> int | None:
    value = settings.get(key)
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is None:
        return None
    token = words.token_to_id(text) if isinstance(text, str) else None
    if token is None:
        raise FormatError(
            f"{directory / 'tokenizer_config.json'}: {key} {text!r} is not in "
            "tokenizer.json"
        )
    return int(token)


def _ids(
    config: Mapping[str, Any], key: str, vocab: int, where: str
) -> list[int | None]:
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab:
            raise FormatError(
                f"{where}: {key} {i!r} is no token of a vocabulary of {vocab}"
            )
    return list(ids)


def _first(ids: list[int | None]) -> int | None:
    return ids[0] if ids else None


def _adds_bos(
    settings: Mapping[str, Any], words: tokenizers.Tokenizer, bos_id: int | None
) -> bool:
    if bos_id is None:
        return False
    given = settings.get("add_bos_token")
    if isinstance(given, bool):
        return given
    return words.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _number(
    generation: Mapping[str, Any],
    key: str,
    least: float,
    most: float,
    directory: Path,
) -> float | None:
    value = generation.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise FormatError(
            f"{directory / 'generation_config.json'}: {key}: expected a number from "
            f"{least:g} to {most:g}, got {value!r}"
        )
    return float(value)


def licence(directory: Path) -> str | None:
    """What the front matter of a checkpoint's README.md states."""
    readme = directory / "README.md"
    if not readme.is_file():
        return None
    text = readme.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---"):
        return None
    match = _LICENCE.search(text[3:].split("\n---", 1)[0])
    return match[1].strip("\"'") if match else None
