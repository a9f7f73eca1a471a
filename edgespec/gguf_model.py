"""A GGUF file as a model: the sizes, the words and the defaults its metadata state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec import tokenizer_gguf
from edgespec.errors import FormatError, UnsupportedError
from edgespec.gguf_header import (
    TensorInfo,
    check_shards,
    logical_tensors,
    open_gguf,
    shards,
)
from edgespec.manifest import (
    TARGETS,
    Architecture,
    Container,
    Generation,
    Manifest,
    TokenizerEntry,
    WeightsEntry,
)

BIT_FOR_BIT = "the source's blocks, bit for bit"


@dataclass(frozen=True, slots=True)
class Words:
    """How a model reads and writes text, and what it likes to be sampled with."""

    tokenizer_json: str
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    temperature: float | None
    top_p: float | None


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """A .gguf file used where it lies; serves a session like a bundle of it.

    Its manifest says what a bundle's would, and lists no files.
    """

    path: Path  # the first one of a sharded model
    manifest: Manifest
    tokenizer_json: str
    chat_template: str | None
    stem: str | None = None  # what the cache calls it, None: it is not of the cache

    @property
    def directory(self) -> Path:
        """The file itself: where a bundle has its directory."""
        return self.path

    def path_of(self, name: str) -> Path:
        """The file's own path for "target.gguf"; FormatError for anything else."""
        if name not in self:
            raise FormatError(
                f"{self.path}: no {name}, it is a GGUF file alone; to make one: "
                f"edgespec export {self.path} -o DIR --format "
                f"{'onnx' if 'onnx' in name else 'gguf'}"
            )
        return self.path

    def __contains__(self, name: str) -> bool:
        return name == TARGETS["gguf"]


def read_gguf_model(
    path: Path,
    *,
    name: str | None = None,
    origin: str | None = None,
    sha256: str | None = None,
    licence: str | None = None,
    stem: str | None = None,
) -> GGUFModel:
    """Reads the headers of a GGUF file, or of all its shards.

    Args:
        path: any one of the shards.
        name, origin, sha256, licence: what the caller knows better than the file.

    Raises FormatError and UnsupportedError naming file and key.
    """
    paths = shards(path)
    files = [open_gguf(file) for file in paths]
    check_shards(files)
    where, metadata = str(path), files[0].metadata
    tensors = [tensor for file in files for tensor in logical_tensors(file)]
    words = read_words(metadata, where)
    generation = Generation(words.temperature, words.top_p)
    manifest = Manifest(
        name=name or text(metadata, "general.name", where) or path.stem,
        architecture=_require(read_architecture(metadata, tensors), where),
        quantisation={"gguf": _container(tensors)},
        files={},
        tokenizer=TokenizerEntry(
            words.bos_id, words.add_bos, tuple(sorted(words.eos_ids))
        ),
        generation=generation,
        onnx=None,
        weights=(
            WeightsEntry(
                TARGETS["gguf"],
                licence or text(metadata, "general.license", where),
                origin or path.name,
                sha256,
            ),
        ),
        check={},
    )
    return GGUFModel(
        paths[0], manifest, words.tokenizer_json, words.chat_template, stem
    )


def read_words(metadata: Mapping[str, Any], where: str) -> Words:
    """Tokenizer, chat template and sampling defaults; errors start with `where`."""
    if metadata.get("tokenizer.ggml.model", "no_vocab") == "no_vocab":
        raise FormatError(
            f"{where}: the file has no tokenizer (tokenizer.ggml.model); use one that "
            "was converted with its tokenizer"
        )
    try:
        tokenizer = tokenizer_gguf.tokenizer_json(metadata)
        bos_id = tokenizer_gguf.bos_id(metadata)
        eos_ids = tokenizer_gguf.eos_ids(metadata)
        add_bos = tokenizer_gguf.add_bos(metadata)
    except (FormatError, UnsupportedError) as error:
        raise type(error)(f"{where}: {error}") from error
    return Words(
        tokenizer_json=tokenizer,
        chat_template=text(metadata, "tokenizer.chat_template", where),
        bos_id=bos_id,
        eos_ids=eos_ids,
        add_bos=add_bos,
        temperature=_number(metadata, "general.sampling.temp", 0, 1e9, where),
        top_p=_number(metadata, "general.sampling.top_p", 1e-9, 1, where),
    )


def read_architecture(
    metadata: Mapping[str, Any], tensors: list[TensorInfo]
) -> Architecture | None:
    """Sizes by the metadata of any decoder; None when the main ones are missing."""
    arch = metadata.get("general.architecture")

    def whole(key: str, default: int = 0) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, list):  # one per layer
            value = max((v for v in value if isinstance(v, int)), default=default)
        return value if isinstance(value, int) else default

    heads, hidden = whole("attention.head_count"), whole("embedding_length")
    if not isinstance(arch, str) or heads < 1 or hidden < 1:
        return None
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    words = metadata.get("tokenizer.ggml.tokens", ())
    vocab = whole("vocab_size", len(words) if isinstance(words, list) else 0)
    return Architecture(
        arch=arch,
        n_layers=whole("block_count"),
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=whole("attention.head_count_kv", heads),
        head_dim=whole("attention.key_length", hidden // heads),
        ffn=whole("feed_forward_length"),
        vocab=shapes.get("token_embd.weight", (vocab,))[0],
        max_position=whole("context_length"),
        is_tied="output.weight" not in shapes,
        rope=str(metadata.get(f"{arch}.rope.scaling.type", "default")),
    )


def text(metadata: Mapping[str, Any], key: str, where: str) -> str | None:
    """A string, None when absent; FormatError for anything else."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{where}: {key}: expected text, got {value!r:.80}")
    return value


def _number(
    metadata: Mapping[str, Any], key: str, least: float, most: float, where: str
) -> float | None:
    value = metadata.get(key)
    if value is None or (isinstance(value, float) and least <= value <= most):
        return value
    raise FormatError(
        f"{where}: {key}: expected a number from {least:g} to {most:g}, got "
        f"{value!r:.80}"
    )


def _require(shape: Architecture | None, where: str) -> Architecture:
    if shape is None:
        raise FormatError(
            f"{where}: not a language model: general.architecture, its head_count or "
            "its embedding_length is missing"
        )
    return shape


def _container(tensors: list[TensorInfo]) -> Container:
    matrices = Counter(tensor.kind for tensor in tensors if len(tensor.shape) > 1)
    return Container(
        kind=matrices.most_common(1)[0][0].lower() if matrices else "",
        bytes=sum(tensor.n_bytes for tensor in tensors),
        types=dict(sorted(Counter(tensor.kind for tensor in tensors).items())),
        note=BIT_FOR_BIT,
    )
