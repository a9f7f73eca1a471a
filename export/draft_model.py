"""Small language models as drafts of a larger one, and how they are stored.

A draft is a GGUF of its own family whose vocabulary is the target's, token for token.
Two keys say more:

    edgespec.draft.tokens      uint8[]  bit t % 8 of byte t / 8: it drafts token t of
                                        the target; absent: all of them
    edgespec.draft.vocabulary  string   of a file without token_embd and output: both
                                        are its target's, as is the tokenizer, which is
                                        told by this; see `vocabulary_hash`

Rows of the projection that it does not draft with are not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from edgespec.errors import FormatError
from edgespec.gguf_header import Metadata, open_gguf
from edgespec_export import gguf_file, sources, tokenizer_gguf
from edgespec_export.arch import ARCHITECTURES
from edgespec_export.draft_vocab import choose_ids
from edgespec_export.heads import is_same
from edgespec_export.sources.heads_files import is_gguf, read_files, sole_gguf
from edgespec_export.weights import Origin, WeightSet

TOKENS = "edgespec.draft.tokens"
VOCABULARY = "edgespec.draft.vocabulary"
SHARED = ("token_embd", "output")
_WORDS = "tokenizer.ggml.tokens"
_OFFSET, _PRIME = 0xCBF29CE484222325, 0x100000001B3  # FNV-1a of 64 bits
_END = 0xFF  # behind each token: no UTF-8 has it
# Of a file that has to be small.
_KEPT = tuple(
    f"general.{key}"
    for key in ("architecture", "name", "license", "file_type", "quantization_version")
)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A small model for a target; its tensors lack what the two share."""

    weights: WeightSet
    vocabulary: str  # hash of the target's
    ids: NDArray[np.int64] | None = None  # ascending ones it drafts; None: all

    @property
    def is_sharing(self) -> bool:
        """Whether embedding and projection are the target's."""
        return SHARED[0] not in self.weights.tensors

    @property
    def kind(self) -> Literal["model"]:
        """As manifests call it."""
        return "model"

    @property
    def name(self) -> str | None:
        """The source's own."""
        return self.weights.name

    @property
    def origin(self) -> Origin:
        """Where it comes from."""
        return self.weights.origin

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden states it reads: none."""
        return ()

    @property
    def draft_vocab(self) -> int:
        """Tokens it drafts."""
        return self.weights.config.vocab if self.ids is None else len(self.ids)


def is_model(path: Path) -> bool:
    """Whether a file or directory holds a whole decoder, not a draft head."""
    path = sole_gguf(path)
    if is_gguf(path):
        arch = open_gguf(path).metadata.get("general.architecture")
        return isinstance(arch, str) and arch in ARCHITECTURES
    if not path.is_dir() or not (path / "config.json").is_file():
        return False
    if any(path.glob("*.index.json")):
        return True  # no head is that large
    if not any(path.glob("*.safetensors")):
        return False
    names = set(read_files(path).tensors)
    return "model.norm.weight" in names and "fc.weight" not in names


def read(path: Path, target: WeightSet) -> DraftModel:
    """The model of a file or directory as a draft for `target`.

    What is the target's own, but for rounding, is left out: both of embedding and
    projection, or neither.

    Raises FormatError naming both sides where the vocabularies differ, or widths that
    have to be equal, and what the readers of models raise.
    """
    path = sole_gguf(path)
    where = str(path)
    if is_gguf(path):
        weights = sources.gguf.read(path, host=target)
        metadata = weights.gguf_metadata or {}
    else:
        weights, metadata = sources.read(path), {}
    theirs = words(target)
    expected = vocabulary_hash(theirs)
    if SHARED[0] in weights.tensors:
        _check_words(words(weights), theirs, where)
        weights = _share(weights, target)
    elif metadata.get(VOCABULARY) != expected:
        raise FormatError(
            f"{where}: {VOCABULARY}: a draft for the vocabulary "
            f"{metadata.get(VOCABULARY)!r:.40}, the target's is {expected!r}"
        )
    ids = _ids(metadata.get(TOKENS), weights.config.vocab, where)
    return DraftModel(weights, expected, ids)


def with_vocabulary(
    draft: DraftModel,
    count: int,
    counts: NDArray[np.integer] | None,
    always: Iterable[int],
) -> DraftModel:
    """The draft saying `count` tokens alone; see `choose_ids`."""
    vocab = draft.weights.config.vocab
    known = np.arange(vocab) if draft.ids is None else draft.ids
    ids = choose_ids(known, vocab, count, counts, always)
    return replace(draft, ids=None if len(ids) == vocab else ids)


def write(draft: DraftModel, path: Path, quant: str | None) -> gguf_file.WriteReport:
    """Writes the draft as one GGUF file, replacing it only when complete.

    Args:
        quant: one of QUANTS; None keeps the source's types.
    Raises what `gguf_file.write` raises.
    """
    weights = draft.weights
    source = weights.gguf_metadata
    if not isinstance(source, Metadata):
        source = gguf_file.new_metadata(weights)
    made = Metadata()
    for key, value in source.items():
        if not draft.is_sharing or _is_kept(key):
            made.put(key, value, *source.types[key])
    vocab, string = weights.config.vocab, GGUFValueType.STRING
    made.put(f"{weights.config.arch}.vocab_size", vocab, GGUFValueType.UINT32)
    put_ids(made, draft.ids, vocab)
    if draft.is_sharing:
        made.put(VOCABULARY, draft.vocabulary, string)
        weights = replace(weights, eos_ids=())
    return gguf_file.write(replace(weights, gguf_metadata=made), quant, path)


def put_ids(metadata: Metadata, ids: NDArray[np.int64] | None, vocab: int) -> None:
    """Sets or drops the key that says which of `vocab` tokens are drafted."""
    metadata.pop(TOKENS, None)
    if ids is not None:
        is_drafted = np.zeros(vocab, np.uint8)
        is_drafted[ids] = 1
        bits = np.packbits(is_drafted, bitorder="little").tolist()
        metadata.put(TOKENS, bits, GGUFValueType.ARRAY, GGUFValueType.UINT8)


def words(weights: WeightSet) -> list[str]:
    """The vocabulary as a GGUF of these weights has it."""
    source = weights.gguf_metadata
    if source is None or _WORDS not in source:
        source = tokenizer_gguf.metadata(
            weights.tokenizer_json,
            vocab=weights.config.vocab,
            bos_id=weights.bos_id,
            eos_ids=weights.eos_ids,
            add_bos=weights.add_bos,
            chat_template=None,
        )
    found: list[str] = source[_WORDS]
    return found


def vocabulary_hash(tokens: Iterable[str]) -> str:
    """FNV-1a (64 bits, 16 hex digits) of the tokens' UTF-8, each with 0xFF behind."""
    value = _OFFSET
    for token in tokens:
        for byte in (*token.encode(errors="surrogateescape"), _END):
            value = (value ^ byte) * _PRIME & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def _is_kept(key: str) -> bool:
    if key.startswith("general."):
        return key in _KEPT
    return not key.startswith(("tokenizer.", "edgespec."))


def _check_words(ours: list[str], theirs: list[str], where: str) -> None:
    if len(ours) != len(theirs):
        raise FormatError(
            f"{where}: the draft has {len(ours)} tokens, the target {len(theirs)}"
        )
    for token, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise FormatError(
                f"{where}: token {token} is {a!r:.40} in the draft and {b!r:.40} in "
                "the target: another vocabulary"
            )


def _share(weights: WeightSet, target: WeightSet) -> WeightSet:
    """The weights without what is the target's."""
    for name in SHARED:
        ours = weights.tensors.get(name, weights.tensors[SHARED[0]])
        theirs = target.tensors.get(name, target.tensors[SHARED[0]])
        if not is_same(ours, theirs):
            return weights
    tensors = {n: t for n, t in weights.tensors.items() if n not in SHARED}
    return replace(weights, tensors=tensors)


def _ids(bits: Any, vocab: int, where: str) -> NDArray[np.int64] | None:
    if bits is None:
        return None
    is_bytes = isinstance(bits, list) and all(
        type(byte) is int and 0 <= byte < 256 for byte in bits
    )
    ids = np.empty(0, np.int64)
    if is_bytes and len(bits) == (vocab + 7) // 8:
        flags = np.unpackbits(np.array(bits, np.uint8), bitorder="little")
        ids = np.flatnonzero(flags).astype(np.int64)
    if len(ids) == 0 or ids[-1] >= vocab:
        raise FormatError(
            f"{where}: {TOKENS}: expected a bit for each of {vocab} tokens, some set"
        )
    return ids
