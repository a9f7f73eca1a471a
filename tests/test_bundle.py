"""Every rule of the bundle format, broken; resolve() without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import bundle as bundles
from edgespec import bundle_files
from edgespec.bundle import Bundle, open_bundle, resolve, write_manifest
from edgespec.errors import (
    EdgeSpecError,
    FormatError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.manifest import MANIFEST, HeadEntry, is_plain_name, parse_manifest

Edit = Callable[[dict[str, Any]], object]


def make_manifest(directory: Path) -> bundles.Manifest:
    """Small files in `directory` and the manifest that describes them."""
    contents = {
        "target.gguf": b"GGUF weights",
        "target.onnx": b"onnx graph",
        "target.onnx.data": b"onnx weights",
        "draft-eagle3.gguf": b"GGUF head",
        "tokenizer.json": b'{"a": 1}',
        "chat_template.jinja": "{{ messages }} \u00e4".encode(),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return bundles.Manifest(
        name="toy",
        architecture=bundles.Architecture(
            "llama", 2, 64, 4, 2, 16, 96, 512, 2048, True, "default"
        ),
        quantisation={
            "gguf": bundles.Container("q4_1", 12, {"Q4_1": 3}, ""),
            "onnx": bundles.Container("int4", 12, {"int4": 3}, "exact"),
        },
        files={name: bundles.describe_file(directory / name) for name in contents},
        tokenizer=bundles.TokenizerEntry(1, False, (0, 2)),
        generation=bundles.Generation(0.2, None),
        onnx=bundles.OnnxEntry("gqa", (0, 2), 1),
        weights=(bundles.WeightsEntry("target.gguf", "Apache-2.0", "hf:a/b", None),),
        check={"gguf": bundles.CheckEntry(0.001, 0.99, 8192)},
        heads=(
            HeadEntry(
                "eagle3",
                "toy head",
                {"gguf": "draft-eagle3.gguf"},
                "q8_0",
                256,
                (0, 1, 2),
            ),
        ),
    )


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    write_manifest(tmp_path, make_manifest(tmp_path))
    return tmp_path


def edit_manifest(directory: Path, edit: Edit) -> None:
    path = directory / "edgespec.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def test_written_manifest_reads_back_equal(toy: Path) -> None:
    bundle = open_bundle(toy)
    assert bundle.manifest == make_manifest(toy)
    assert bundle.path_of("target.onnx") == toy / "target.onnx"
    assert bundle.tokenizer_json == '{"a": 1}'
    assert bundle.chat_template == "{{ messages }} \u00e4"
    assert [p.name for p in toy.iterdir() if p.name.startswith(".")] == []


def test_bundle_without_template_has_none(toy: Path) -> None:
    edit_manifest(toy, lambda m: m["files"].pop("chat_template.jinja"))
    assert open_bundle(toy).chat_template is None


def put(*keys: str | int, value: Any) -> Edit:
    """An edit that sets one key of the manifest."""

    def edit(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return edit


def drop(*keys: str) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return edit


FILE = {"sha256": "0" * 64, "size": 1}
HEAD = {
    "kind": "eagle3",
    "name": "toy head",
    "files": {"gguf": "draft-eagle3.gguf"},
    "quant": "q8_0",
    "draft_vocab": 256,
    "taps": [0, 1, 2],
}
BROKEN: list[tuple[str, Edit, str]] = [
    ("1 unknown key", put("extra", value=1), "unknown key extra"),
    ("1 unknown inner key", put("onnx", "x", value=1), "unknown key onnx.x"),
    ("1 missing key", drop("tokenizer"), "missing key tokenizer"),
    (
        "1 missing inner key",
        drop("architecture", "ffn"),
        "missing key architecture.ffn",
    ),
    ("1 string for number", put("architecture", "ffn", value="96"), "architecture.ffn"),
    (
        "1 bool for number",
        put("architecture", "ffn", value=True),
        "an integer, got True",
    ),
    (
        "1 float for integer",
        put("architecture", "ffn", value=96.0),
        "an integer, got 96.0",
    ),
    ("1 huge integer", put("architecture", "ffn", value=2**62), "below 2\\*\\*62"),
    ("1 number for bool", put("tokenizer", "add_bos", value=0), "a boolean, got 0"),
    (
        "1 list for object",
        put("files", value=[]),
        "files: expected an object, got a list",
    ),
    ("1 object for list", put("weights", value={}), "weights: expected a list"),
    ("1 null for string", put("name", value=None), "name: expected a string, got null"),
    ("1 infinity", put("generation", "temperature", value=1e300), "a finite number"),
    ("2 no version", drop("format_version"), "format_version: expected 1, got None"),
    (
        "2 version 0",
        put("format_version", value=0),
        "format_version: expected 1, got 0",
    ),
    ("2 version true", put("format_version", value=True), "format_version: expected 1"),
    (
        "3 no layers",
        put("architecture", "n_layers", value=0),
        "n_layers: expected at least",
    ),
    (
        "3 negative",
        put("architecture", "vocab", value=-1),
        "vocab: expected at least 1",
    ),
    (
        "3 odd groups",
        put("architecture", "n_kv_heads", value=3),
        "a divisor of n_heads = 4",
    ),
    (
        "4 bad digest",
        put("files", "target.gguf", "sha256", value="A" * 64),
        "64 lower-case",
    ),
    (
        "4 size",
        put("files", "target.gguf", "size", value=-1),
        "size: expected 0 or more",
    ),
    ("4 path", put("files", "../x", value=FILE), "a plain file name, got '../x'"),
    ("4 case", put("files", "Target.gguf", value=FILE), "expected names that differ"),
    ("5 no tokenizer", drop("files", "tokenizer.json"), "expected a tokenizer.json"),
    ("6 onnx missing", put("onnx", value=None), "onnx: expected an object"),
    ("6 no quantisation", drop("quantisation", "gguf"), "quantisation: expected"),
    (
        "6 other container",
        put("quantisation", "x", value=None),
        "quantisation.x: expected",
    ),
    (
        "6 attention",
        put("onnx", "attention", value="x"),
        "'gqa' or 'explicit', got 'x'",
    ),
    (
        "6 tap",
        put("onnx", "taps", value=[3]),
        "onnx.taps: expected a layer's index, got 3",
    ),
    ("6 inputs", put("onnx", "inputs", value=2), "onnx.inputs: expected 1, got 2"),
    (
        "6 check of nothing",
        put("check", "x", value={"kl": 0, "top1": 1, "tokens": 1}),
        "x",
    ),
    (
        "6 top1",
        put("check", "gguf", "top1", value=1.5),
        "top1: expected 0 to 1, got 1.5",
    ),
    ("6 kl", put("check", "gguf", "kl", value=-1), "kl: expected 0 or more, got -1"),
    (
        "6 tokens",
        put("check", "gguf", "tokens", value=0),
        "tokens: expected at least 1",
    ),
    ("6 bytes", put("quantisation", "gguf", "bytes", value=-1), "bytes: expected 0 or"),
    (
        "7 eos too large",
        put("tokenizer", "eos_ids", value=[512]),
        "ids below 512, got 512",
    ),
    (
        "7 eos order",
        put("tokenizer", "eos_ids", value=[2, 0]),
        "eos_ids: expected ascending",
    ),
    (
        "7 eos scalar",
        put("tokenizer", "eos_ids", value=2),
        "eos_ids: expected a list, got 2",
    ),
    ("7 bos", put("tokenizer", "bos_id", value=-1), "bos_id: expected ids below 512"),
    ("7 top_p", put("generation", "top_p", value=0), "top_p: expected above 0"),
    (
        "7 temperature",
        put("generation", "temperature", value=-1),
        "temperature: expected 0",
    ),
    (
        "8 weights file",
        put("weights", 0, "file", value="x"),
        "a file of the bundle, got 'x'",
    ),
    (
        "8 weights digest",
        put("weights", 0, "sha256", value="x"),
        "64 lower-case hex digits",
    ),
    ("9 heads", put("heads", value=["x"]), r"heads\[0\]: expected"),
    *[
        (f"9 {key}", put("heads", value=[HEAD | {key: value}]), message)
        for key, value, message in [
            ("kind", "hydra", r"heads\[0\].kind: expected"),
            ("files", {}, r"heads\[0\].files: expected some of gguf, onnx"),
            (
                "files",
                {"gguf": "draft-x.gguf"},
                "files.gguf: expected a draft-... file",
            ),
            ("files", {"gguf": "target.gguf"}, "files.gguf: expected a draft-... file"),
            ("files", {"other": "draft-eagle3.gguf"}, "files: expected some of"),
            ("draft_vocab", 0, "draft_vocab: expected 1 to 512, got 0"),
            ("draft_vocab", 513, "draft_vocab: expected 1 to 512, got 513"),
            ("taps", [0, 3], "taps: expected a layer's index, got 3"),
        ]
    ],
    ("9 trees", put("trees", value=["x"]), "trees: expected none in version 1"),
]


@pytest.mark.parametrize(
    ("edit", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_broken_manifest_is_refused(toy: Path, edit: Edit, message: str) -> None:
    edit_manifest(toy, edit)
    with pytest.raises(FormatError, match=message) as caught:
        open_bundle(toy)
    assert str(toy / "edgespec.json") in str(caught.value)


def test_rule_7_add_bos_needs_an_id(toy: Path) -> None:
    edit_manifest(toy, lambda m: m["tokenizer"].update(add_bos=True, bos_id=None))
    with pytest.raises(FormatError, match="add_bos: expected false without bos_id"):
        open_bundle(toy)


def test_rule_5_no_target_is_refused(toy: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        del data["files"]["target.gguf"], data["files"]["target.onnx"]

    edit_manifest(toy, edit)
    with pytest.raises(
        FormatError, match=r"files: expected target.gguf or .* or target.onnx"
    ):
        open_bundle(toy)


def test_rule_2_newer_version_is_refused_as_unsupported(toy: Path) -> None:
    edit_manifest(toy, put("format_version", value=2))
    with pytest.raises(UnsupportedError, match="reads 1, got 2; use a newer edgespec"):
        open_bundle(toy)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "expected an object, got a list"),
        (
            b'{"format_version": 1, "format_version": 1}',
            "'format_version' appears twice",
        ),
        (b'{"format_version": NaN}', "NaN is not a number"),
        (b'{"format_version": 1, "name": "\xff"}', "not JSON: 'utf-8' codec"),
        (b"[" * 200_000, "not JSON"),
        (b"9" * 10_000, "not JSON"),
        (b'{"format_version": 1e400}', "format_version: expected 1, got inf"),
    ],
)
def test_rule_1_hostile_json_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_manifest(raw, "here")


def test_rule_1_oversized_manifest_is_not_read(toy: Path) -> None:
    with open(toy / "edgespec.json", "r+b") as file:
        file.truncate(5 << 30)  # sparse: reading it would show
    with pytest.raises(FormatError, match="at most 1048576 bytes, got 5368709120"):
        open_bundle(toy)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "a\\b", "/etc/passwd", "a..b", "c:x", "-x"],
)
def test_rule_4_names_that_are_not_plain(name: str) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["a b", "a\0", "a\n", "\u00e4", "x" * 129, MANIFEST])
def test_rule_4_other_names_that_are_not_plain(name: str) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["target.gguf", "draft-0.onnx.data", "A_1", "x" * 128])
def test_rule_4_plain_names(name: str) -> None:
    assert is_plain_name(name)


def test_rule_4_a_link_is_not_followed(toy: Path, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret"
    (toy / "target.gguf").rename(outside)
    (toy / "target.gguf").symlink_to(outside)
    with pytest.raises(FormatError, match="target.gguf: expected a regular file"):
        open_bundle(toy).path_of("target.gguf")


def test_rule_4_a_pipe_is_not_opened(toy: Path) -> None:
    (toy / "target.gguf").unlink()
    os.mkfifo(toy / "target.gguf")
    with pytest.raises(FormatError, match="target.gguf: expected a regular file"):
        open_bundle(toy).path_of("target.gguf")


def test_rule_9_missing_file(toy: Path) -> None:
    (toy / "target.gguf").unlink()
    with pytest.raises(FormatError, match="target.gguf: missing from the bundle"):
        open_bundle(toy).path_of("target.gguf")


@pytest.mark.parametrize("size", [0, 3, 11])
def test_rule_9_truncated_file(toy: Path, size: int) -> None:
    with open(toy / "target.gguf", "r+b") as file:
        file.truncate(size)
    with pytest.raises(
        FormatError,
        match=f"target.gguf: size: expected 12, got {size}; .*export again",
    ):
        open_bundle(toy).path_of("target.gguf")


def test_rule_9_changed_byte(toy: Path) -> None:
    (toy / "target.gguf").write_bytes(b"GGUF weightS")
    wanted = open_bundle(toy).manifest.files["target.gguf"].sha256
    with pytest.raises(
        FormatError, match=f"target.gguf: sha256: expected {wanted}, got"
    ):
        open_bundle(toy).path_of("target.gguf")


def test_rule_9_changed_data_file_is_noticed_with_its_graph(toy: Path) -> None:
    (toy / "target.onnx.data").write_bytes(b"onnx weightS")
    bundle = open_bundle(toy)
    assert bundle.path_of("target.gguf").exists()
    with pytest.raises(FormatError, match=r"target.onnx.data: sha256"):
        bundle.path_of("target.onnx")


def test_rule_9_unlisted_file_is_not_handed_out(toy: Path) -> None:
    (toy / "other").write_bytes(b"x")
    with pytest.raises(FormatError, match="no other in this bundle"):
        open_bundle(toy).path_of("other")


def test_file_is_hashed_once_and_again_after_a_change(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    original = bundle_files.sha256_of
    monkeypatch.setattr(
        "edgespec.bundle_files.sha256_of",
        lambda path: (hashed.append(path), original(path))[1],
    )
    for _ in range(3):
        open_bundle(toy).path_of("target.gguf")
    assert hashed == [toy / "target.gguf"]
    os.utime(toy / "target.gguf", (1, 1))
    open_bundle(toy).path_of("target.gguf")
    assert len(hashed) == 2


@pytest.mark.parametrize("is_writable", [True, False])
def test_large_file_is_hashed_once_a_machine_and_again_after_a_change(
    toy: Path,
    edgespec_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_writable: bool,
) -> None:
    if not is_writable:
        edgespec_home.write_text("in the way")
    monkeypatch.setattr(bundle_files, "WORTH_A_MARK", 12)
    hashed: list[Path] = []
    original = bundle_files.sha256_of
    monkeypatch.setattr(
        bundle_files,
        "sha256_of",
        lambda path: (hashed.append(path), original(path))[1],
    )

    def open_in_a_new_process() -> None:
        bundle_files._digest_of.cache_clear()
        open_bundle(toy).path_of("target.gguf")

    for _ in range(3):
        open_in_a_new_process()
    assert len(hashed) == (1 if is_writable else 3)
    before = len(hashed)
    os.utime(toy / "target.gguf", (1, 1))
    open_in_a_new_process()
    assert len(hashed) == before + 1
    (toy / "target.gguf").write_bytes(b"GGUF weightS")
    for _ in range(2):  # a wrong file leaves no mark
        with pytest.raises(FormatError, match="sha256"):
            open_in_a_new_process()


def test_template_that_is_not_utf8(toy: Path) -> None:
    manifest = make_manifest(toy)
    (toy / "chat_template.jinja").write_bytes(b"\xff\xfe")
    entry = bundles.describe_file(toy / "chat_template.jinja")
    files = {**manifest.files, "chat_template.jinja": entry}
    write_manifest(toy, replace(manifest, files=files))
    with pytest.raises(FormatError, match=r"chat_template.jinja: not UTF-8"):
        _ = open_bundle(toy).chat_template


def test_bad_manifest_is_not_written(toy: Path) -> None:
    before = (toy / "edgespec.json").read_bytes()
    with pytest.raises(FormatError, match="onnx: expected an object"):
        write_manifest(toy, replace(make_manifest(toy), onnx=None))
    assert (toy / "edgespec.json").read_bytes() == before
    assert not list(toy.glob(".edgespec-*"))


def test_directory_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"it has no edgespec.json; to make one"):
        open_bundle(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such bundle"):
        open_bundle(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="a bundle is a directory"):
        open_bundle(tmp_path / "file")


def test_resolve_directory(toy: Path) -> None:
    assert isinstance(resolve(str(toy)), Bundle)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("nothing-like-it", UsageError, "known models: smollm2-135m; any other: hf:"),
        ("./smollm2-135m", ModelNotFoundError, "no such file or directory"),
        ("missing.gguf", ModelNotFoundError, "missing.gguf: no such file"),
        ("hf:noslash", UsageError, "expected hf:ORG/REPO"),
        ("hf:../../etc", UsageError, "expected hf:ORG/REPO"),
        ("hf:a/b:Q4/1", UsageError, "expected hf:ORG/REPO"),
        ("smollm2-135m", ModelNotFoundError, "--offline; run: edgespec models get"),
        ("hf:a/b", ModelNotFoundError, "not in the cache .* --offline"),
    ],
)
def test_resolve_names_what_is_wrong(
    edgespec_home: Path, model: str, kind: type[EdgeSpecError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        resolve(model, offline=True)


def test_resolve_other_file(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(
        UsageError, match=r"x.bin: expected a bundle directory or a .gguf"
    ):
        resolve(str(tmp_path / "x.bin"))


def test_resolve_damaged_gguf_leaves_nothing(
    tmp_path: Path, edgespec_home: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 29)
    with pytest.raises(FormatError):
        resolve(str(path))
    assert not edgespec_home.exists()
