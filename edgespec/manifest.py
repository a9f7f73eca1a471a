"""The bundle format: a directory holding one exported model, and its `edgespec.json`.

Format, version 1. Every rule has a test that breaks it.

1. `edgespec.json` is UTF-8 JSON of at most 1 MiB: one object, no key twice, no NaN or
   infinity. A missing or unknown key, or a value of another type, is an error naming
   the key.
2. `format_version` is 1. A newer one is refused, never half-read.
3. `architecture`: sizes of the decoder, all at least 1; heads are a multiple of KV
   heads.
4. `files` maps each file beside the manifest to its sha256 (64 lower-case hex digits)
   and size. Names are plain: letters, digits, `.`, `_`, `-`, starting with a letter or
   digit, no `..`, at most 128 characters, none equal to another but for case, none
   `edgespec.json`. Files are regular files, not links: nothing outside is ever read.
5. `tokenizer.json` and at least one of `target.gguf`, `target.packed.gguf` and
   `target.onnx` are there; `chat_template.jinja` and data files such as
   `target.onnx.data` may be.
6. `quantisation` and `check` are keyed by container, `gguf`, `packed` or `onnx`;
   `quantisation` has exactly those whose target file exists, `check` some of them.
   `onnx` is an object when `target.onnx` exists and null otherwise; its taps are
   hidden_states indices.
7. `tokenizer`: every token id is in [0, vocab); `eos_ids` ascend and are the union over
   all configs of the source; `add_bos` needs a `bos_id`. `generation`: null, or
   temperature >= 0 and 0 < top_p <= 1.
8. `weights` names, for each file with weights, its licence, origin and the sha256 of
   what it was made from (null where unknown).
9. `heads` names the drafts: `kind` is eagle3, eagle (versions 1 and 2), medusa or
   model, a small one; `files` maps gguf, onnx (the graph that drafts a tree) and
   onnx_step (one step of an EAGLE head) to files called `draft-...`; `taps` are
   hidden_states indices, `n_layers` being the final norm's output; `draft_vocab` counts
   the tokens it can draft. `trees` is empty.
10. A file is used only after its size and sha256 were found as stated; an unchanged one
   (size, time and inode) is not read for that again on the same machine.

A bundle appears at once (written beside its final place, then renamed), so one that
exists is whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from edgespec.errors import FormatError, UnsupportedError
from edgespec.strict_json import build, parse_object

FORMAT_VERSION = 1
MANIFEST = "edgespec.json"
MANIFEST_LIMIT = 1 << 20
TARGETS = {
    "gguf": "target.gguf",
    "packed": "target.packed.gguf",  # of the native backend alone; maps at once
    "onnx": "target.onnx",
}
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of the decoder; `arch` as GGUF names it."""

    arch: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_position: int
    is_tied: bool
    rope: str  # "default" | "linear" | "llama3" | "yarn"


@dataclass(frozen=True, slots=True)
class Container:
    """How one container stores the weights."""

    kind: str  # as asked for: "q4_1", "f16", "int4/int8"
    bytes: int  # of all weights
    types: Mapping[str, int]  # tensors by block type
    note: str  # why, in a sentence; may be empty


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a file must be like to be used."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class TokenizerEntry:
    """Special ids; add_bos says whether raw text gets bos in front."""

    bos_id: int | None
    add_bos: bool
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """The source's generation defaults; None where it states none."""

    temperature: float | None
    top_p: float | None


@dataclass(frozen=True, slots=True)
class OnnxEntry:
    """The variant of the ONNX graph."""

    attention: Literal["gqa", "explicit"]
    taps: tuple[int, ...]  # hidden_states indices it outputs
    inputs: int  # version of the graph's inputs, 1


@dataclass(frozen=True, slots=True)
class WeightsEntry:
    """Where the weights in a file come from."""

    file: str
    licence: str | None
    origin: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HeadEntry:
    """A draft head, or a draft model, of the bundle."""

    kind: Literal["eagle3", "eagle", "medusa", "model"]
    name: str
    files: Mapping[str, str]  # "gguf" | "onnx" | "onnx_step" -> file
    quant: str  # of its matrices, "" as the source has them
    draft_vocab: int
    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckEntry:
    """Against the source: mean KL per token in nats, top-1 agreement in [0, 1]."""

    kl: float
    top1: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `edgespec.json`."""

    name: str
    architecture: Architecture
    quantisation: Mapping[str, Container]
    files: Mapping[str, FileEntry]
    tokenizer: TokenizerEntry
    generation: Generation
    onnx: OnnxEntry | None
    weights: tuple[WeightsEntry, ...]
    check: Mapping[str, CheckEntry]
    heads: tuple[HeadEntry, ...] = ()
    trees: tuple[str, ...] = ()


def parse_manifest(raw: bytes, where: str = MANIFEST) -> Manifest:
    """Reads a manifest's bytes; errors start with `where` and the key concerned."""
    data = parse_object(raw, where)
    version = data.pop("format_version", None)
    if type(version) is not int or version < 1:
        raise FormatError(f"{where}: format_version: expected 1, got {version!r:.40}")
    if version > FORMAT_VERSION:
        raise UnsupportedError(
            f"{where}: format_version: this edgespec reads {FORMAT_VERSION}, "
            f"got {version}; use a newer edgespec"
        )
    manifest: Manifest = build(Manifest, data, where, "")
    _check_rules(manifest, where)
    return manifest


def is_plain_name(name: str) -> bool:
    """Whether a file name may stand in a manifest (rule 4)."""
    return (
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None
        and ".." not in name
        and name != MANIFEST
    )


def _check_rules(manifest: Manifest, where: str) -> None:
    def require(is_kept: bool, key: str, expected: str, got: object) -> None:
        if not is_kept:
            raise FormatError(f"{where}: {key}: expected {expected}, got {got!r:.150}")

    shape = manifest.architecture
    for field in fields(Architecture):
        value = getattr(shape, field.name)
        if type(value) is int:
            require(value >= 1, f"architecture.{field.name}", "at least 1", value)
    require(
        shape.n_heads % shape.n_kv_heads == 0,
        "architecture.n_kv_heads",
        f"a divisor of n_heads = {shape.n_heads}",
        shape.n_kv_heads,
    )

    folded: set[str] = set()
    for name, entry in manifest.files.items():
        require(is_plain_name(name), "files", "a plain file name", name)
        require(name.lower() not in folded, "files", "names that differ", name)
        folded.add(name.lower())
        require(entry.size >= 0, f"files.{name}.size", "0 or more", entry.size)
        _require_sha256(require, f"files.{name}.sha256", entry.sha256)
    require(TOKENIZER in manifest.files, "files", f"a {TOKENIZER}", [*manifest.files])

    present = {kind for kind, name in TARGETS.items() if name in manifest.files}
    require(bool(present), "files", " or ".join(TARGETS.values()), [*manifest.files])
    containers = set(manifest.quantisation)
    require(containers == present, "quantisation", f"{present}", containers)
    require(
        set(manifest.check) <= present, "check", f"some of {present}", [*manifest.check]
    )
    require(
        (manifest.onnx is not None) == ("onnx" in present),
        "onnx",
        "an object" if "onnx" in present else "null without target.onnx",
        manifest.onnx,
    )
    for kind, container in manifest.quantisation.items():
        for key, count in {"bytes": container.bytes, **container.types}.items():
            require(count >= 0, f"quantisation.{kind}.{key}", "0 or more", count)
    for kind, check in manifest.check.items():
        require(check.kl >= -1e-6, f"check.{kind}.kl", "0 or more", check.kl)
        require(0 <= check.top1 <= 1, f"check.{kind}.top1", "0 to 1", check.top1)
        require(check.tokens >= 1, f"check.{kind}.tokens", "at least 1", check.tokens)
    if manifest.onnx is not None:
        require(manifest.onnx.inputs == 1, "onnx.inputs", "1", manifest.onnx.inputs)
        for tap in manifest.onnx.taps:
            require(0 <= tap <= shape.n_layers, "onnx.taps", "a layer's index", tap)

    eos_ids, bos_id = manifest.tokenizer.eos_ids, manifest.tokenizer.bos_id
    expected = f"ids below {shape.vocab}"
    for token in eos_ids:
        require(0 <= token < shape.vocab, "tokenizer.eos_ids", expected, token)
    require(
        list(eos_ids) == sorted(set(eos_ids)), "tokenizer.eos_ids", "ascending", eos_ids
    )
    require(
        bos_id is None or 0 <= bos_id < shape.vocab,
        "tokenizer.bos_id",
        expected,
        bos_id,
    )
    require(
        bos_id is not None or not manifest.tokenizer.add_bos,
        "tokenizer.add_bos",
        "false without bos_id",
        True,
    )
    temperature, top_p = manifest.generation.temperature, manifest.generation.top_p
    require(
        temperature is None or temperature >= 0,
        "generation.temperature",
        "0 or more",
        temperature,
    )
    require(
        top_p is None or 0 < top_p <= 1, "generation.top_p", "above 0, at most 1", top_p
    )
    for i, source in enumerate(manifest.weights):
        listed = source.file in manifest.files
        require(listed, f"weights[{i}].file", "a file of the bundle", source.file)
        if source.sha256 is not None:
            _require_sha256(require, f"weights[{i}].sha256", source.sha256)
    for i, head in enumerate(manifest.heads):
        _check_head(manifest, head, f"heads[{i}]", require)
    require(not manifest.trees, "trees", "none in version 1", manifest.trees)


def _check_head(manifest: Manifest, head: HeadEntry, key: str, require: Any) -> None:
    shape = manifest.architecture
    known = ("gguf", "onnx", "onnx_step")
    files = set(head.files) <= set(known) and len(head.files) > 0
    require(files, f"{key}.files", f"some of {', '.join(known)}", [*head.files])
    for kind, name in head.files.items():
        is_listed = name in manifest.files and name.startswith("draft-")
        expected = "a draft-... file of the bundle"
        require(is_listed, f"{key}.files.{kind}", expected, name)
    is_within = 1 <= head.draft_vocab <= shape.vocab
    expected = f"1 to {shape.vocab}"
    require(is_within, f"{key}.draft_vocab", expected, head.draft_vocab)
    for tap in head.taps:
        require(0 <= tap <= shape.n_layers, f"{key}.taps", "a layer's index", tap)


def _require_sha256(require: Any, key: str, value: str) -> None:
    is_digest = re.fullmatch(r"[0-9a-f]{64}", value) is not None
    require(is_digest, key, "64 lower-case hex digits", value)
