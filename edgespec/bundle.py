"""The bundle: a directory holding one exported model, described by `edgespec.json`.

Format, version 1. Every rule has a test that breaks it.

1. `edgespec.json` is UTF-8 JSON of at most 1 MiB: one object, no key twice, no NaN or
   infinity, nested at most as deep as below. A missing or unknown key, or a value of
   another type, is an error naming the key.
2. `format_version` is 1. A newer one is refused, never half-read.
3. `architecture`: sizes of the decoder, all at least 1; heads are a multiple of KV heads.
4. `files` maps each file beside the manifest to its sha256 (64 lower-case hex digits) and
   size. Names are plain: letters, digits, `.`, `_`, `-`, starting with a letter or digit,
   no `..`, at most 128 characters, none equal to another but for case, none
   `edgespec.json`. Files are regular files, not links: nothing outside is ever read.
5. `tokenizer.json` and at least one of `target.gguf` and `target.onnx` are there;
   `chat_template.jinja` and data files such as `target.onnx.data` may be.
6. `quantisation` and `check` are keyed by container, `gguf` or `onnx`; `quantisation` has
   exactly those whose target file exists, `check` some of them. `onnx` is an object when
   `target.onnx` exists and null otherwise.
7. `tokenizer`: every token id is in [0, vocab); `eos_ids` ascend and are the union over
   all configs of the source. `generation`: null, or temperature >= 0 and 0 < top_p <= 1.
8. `weights` names, for each file with weights, its licence, origin and the sha256 of what
   it was made from (null where unknown). `heads` and `trees` are empty in version 1.
9. A file is used only after its size and sha256 were found as stated.

A bundle appears at once (written beside its final place, then renamed), so one that
exists is whole.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tempfile
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from edgespec.cache import sha256_of
from edgespec.errors import FormatError, ModelNotFoundError, UnsupportedError

FORMAT_VERSION = 1
MANIFEST = "edgespec.json"
MANIFEST_LIMIT = 1 << 20
TARGETS = {"gguf": "target.gguf", "onnx": "target.onnx"}
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
class CheckEntry:
    """Measured against the source: mean KL per token in nats, top-1 agreement in [0, 1]."""

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
    heads: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; its files are checked when they are asked for."""

    directory: Path
    manifest: Manifest

    def path_of(self, name: str) -> Path:
        """The checked file, after its data files ("target.onnx" -> "target.onnx.data").

        Raises FormatError naming the file, what was expected and what was found.
        """
        if name not in self.manifest.files:
            listed = ", ".join(sorted(self.manifest.files))
            raise FormatError(
                f"{self.directory}: no {name} in this bundle, only {listed}"
            )
        for other, entry in self.manifest.files.items():
            if other == name or other.startswith(name + "."):
                _check_file(self.directory / other, entry)
        return self.directory / name

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer, as `tokenizers` reads it."""
        return self._text(TOKENIZER)

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template, None for a base model."""
        return self._text(CHAT_TEMPLATE) if CHAT_TEMPLATE in self else None

    def _text(self, name: str) -> str:
        path = self.path_of(name)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not UTF-8: {error}") from None


def open_bundle(path: Path) -> Bundle:
    """Reads and checks a bundle's manifest; the other files when they are used."""
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such bundle")
    if not path.is_dir():
        raise FormatError(f"{path}: a bundle is a directory with {MANIFEST}")
    manifest_path = path / MANIFEST
    if not manifest_path.exists():
        raise FormatError(
            f"{path}: not a bundle, it has no {MANIFEST}; "
            f"to make one: edgespec export {path} -o DIR"
        )
    size = _regular_size(manifest_path)
    if size > MANIFEST_LIMIT:
        raise FormatError(
            f"{manifest_path}: expected at most {MANIFEST_LIMIT} bytes, got {size}"
        )
    return Bundle(path, parse_manifest(manifest_path.read_bytes(), str(manifest_path)))


def describe_file(path: Path) -> FileEntry:
    """The entry that `files` needs for a file."""
    return FileEntry(sha256=sha256_of(path), size=path.stat().st_size)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes `edgespec.json` at once; refuses a manifest that could not be read back."""
    data = {"format_version": FORMAT_VERSION} | asdict(manifest)
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    target = directory / MANIFEST
    parse_manifest(text.encode(), str(target))
    handle, temporary = tempfile.mkstemp(prefix=".edgespec-", dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def parse_manifest(raw: bytes, where: str = MANIFEST) -> Manifest:
    """Reads a manifest's bytes; errors start with `where` and the key concerned."""
    try:
        data = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not a JSON manifest: {error}") from None
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, got {_type_name(data)}")
    version = data.pop("format_version", None)
    if type(version) is not int or version < 1:
        raise FormatError(f"{where}: format_version: expected 1, got {version!r:.40}")
    if version > FORMAT_VERSION:
        raise UnsupportedError(
            f"{where}: format_version: this edgespec reads {FORMAT_VERSION}, "
            f"got {version}; use a newer edgespec"
        )
    manifest: Manifest = _build(Manifest, data, where, "")
    _check_rules(manifest, where)
    return manifest


def is_plain_name(name: str) -> bool:
    """Whether a file name may stand in a manifest (rule 4)."""
    return (
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) is not None
        and ".." not in name
        and name != MANIFEST
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} appears twice")
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _build(kind: Any, value: Any, where: str, key: str) -> Any:
    """Turns JSON into `kind`, a dataclass or one of the annotations used in them."""

    def fail(expected: str) -> FormatError:
        got = repr(value) if isinstance(value, int | float) else _type_name(value)
        return FormatError(
            f"{where}: {key or 'manifest'}: expected {expected}, got {got}"
        )

    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = next(a for a in arguments if a is not types.NoneType)
        return None if value is None else _build(inner, value, where, key)
    if origin is Literal:
        if value not in arguments:
            raise FormatError(
                f"{where}: {key}: expected one of {', '.join(arguments)}, got {value!r:.40}"
            )
        return value
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise fail("an object")
        hints = get_type_hints(kind)
        wanted = {field.name for field in fields(kind)}
        for problem, names in (
            ("unknown", value.keys() - wanted),
            ("missing", wanted - value.keys()),
        ):
            if names:
                listed = ", ".join(
                    f"{key}{'.' * bool(key)}{n:.40}" for n in sorted(names)
                )
                raise FormatError(f"{where}: {problem} key {listed}")
        prefix = f"{key}." if key else ""
        return kind(
            **{n: _build(hints[n], v, where, prefix + n) for n, v in value.items()}
        )
    if origin is tuple:
        if not isinstance(value, list):
            raise fail("a list")
        return tuple(
            _build(arguments[0], item, where, f"{key}[{i}]")
            for i, item in enumerate(value)
        )
    if origin is Mapping:
        if not isinstance(value, dict):
            raise fail("an object")
        return {
            n: _build(arguments[1], item, where, f"{key}.{n:.140}")
            for n, item in value.items()
        }
    if kind is float and type(value) in (int, float):
        if abs(value) < 1e18 and math.isfinite(value):
            return float(value)
        raise fail("a finite number")
    if kind is int and type(value) is int:
        if abs(value) < 1 << 62:
            return value
        raise fail("an integer below 2**62")
    if type(value) is not kind:
        names = {
            int: "an integer",
            float: "a number",
            bool: "a boolean",
            str: "a string",
        }
        raise fail(names[kind])
    return value


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
    for key in ("heads", "trees"):
        got = getattr(manifest, key)
        require(not got, key, "none in version 1", got)


def _require_sha256(require: Any, key: str, value: str) -> None:
    is_digest = re.fullmatch(r"[0-9a-f]{64}", value) is not None
    require(is_digest, key, "64 lower-case hex digits", value)


def _regular_size(path: Path) -> int:
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise FormatError(f"{path}: missing from the bundle") from None
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: expected a regular file, not a link or directory")
    return status.st_size


def _check_file(path: Path, entry: FileEntry) -> None:
    size = _regular_size(path)
    if size != entry.size:
        raise FormatError(f"{path}: size: expected {entry.size}, got {size}")
    status = path.stat()
    _check_digest(path, entry.sha256, (size, status.st_mtime_ns, status.st_ino))


@cache
def _check_digest(path: Path, expected: str, identity: tuple[int, int, int]) -> None:
    """Cached by the file's identity, so that an unchanged file is hashed once a process."""
    got = sha256_of(path)
    if got != expected:
        raise FormatError(f"{path}: sha256: expected {expected}, got {got}")
