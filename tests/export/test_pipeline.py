"""Exports as a whole: the bundle appears complete, or nothing does."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec._native import NativeModel
from edgespec.bundle import open_bundle
from edgespec.errors import EdgeSpecError, FormatError, ModelNotFoundError, UsageError
from edgespec.inspection import inspect_file
from edgespec.targets.native import NativeTarget
from edgespec.targets.onnx import OnnxTarget
from edgespec_export import check, gguf_file, onnx_graph, pipeline
from edgespec_export.weights import Origin
from tests.export import checkpoints

TOKENS = 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.hf_checkpoint(tmp_path_factory.mktemp("pipeline") / "hf")


def export(source: Path, out: Path, **arguments: Any) -> Any:
    return pipeline.export(source, out, check_tokens=TOKENS, **arguments)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_bundle_of_a_checkpoint(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "bundle"
    seen: list[str] = []
    lines: list[str] = []
    bundle = export(
        source,
        out,
        formats=("gguf", "onnx"),
        quant="q8_0",
        taps=(1,),
        progress=lambda what, done, total: seen.append(what),
        log=lines.append,
    )
    assert names(tmp_path) == ["bundle"]
    assert names(out) == [
        "chat_template.jinja",
        "edgespec.json",
        "target.gguf",
        "target.onnx",
        "tokenizer.json",
    ]
    manifest = bundle.manifest
    assert open_bundle(out).manifest == manifest
    for name in manifest.files:
        bundle.path_of(name)
    shape = checkpoints.Shape()
    assert manifest.architecture.arch == "llama"
    assert manifest.architecture.ffn == shape.ffn
    assert manifest.architecture.is_tied
    assert manifest.tokenizer.eos_ids == (checkpoints.EOS,)
    assert manifest.generation.temperature == 0.6
    assert manifest.onnx is not None
    assert (manifest.onnx.attention, manifest.onnx.taps) == (
        onnx_graph.DEFAULT_ATTENTION,
        (1,),
    )
    assert manifest.quantisation["gguf"].kind == "q8_0"
    assert manifest.quantisation["gguf"].types == {"F32": 5, "Q8_0": 15}
    assert manifest.quantisation["onnx"].types == {"int8": 15}
    assert "Q8_0 made from F32" in manifest.quantisation["onnx"].note
    assert {entry.file for entry in manifest.weights} == {"target.gguf", "target.onnx"}
    for entry in manifest.check.values():
        assert 0 <= entry.kl < check.MAX_KL["q8_0"]
        assert entry.tokens == TOKENS
    assert {"write target.gguf", "write target.onnx", "run the source"} <= set(seen)
    text = "\n".join(lines)
    assert "target.gguf " in text
    assert "against transformers" in text
    assert "argmaxes" in text
    assert "ffn_down" in text


def test_bundle_of_a_gguf_keeps_its_blocks(tmp_path: Path) -> None:
    source = checkpoints.gguf_checkpoint(tmp_path / "tiny-model.gguf")
    origin = Origin("pypi:thing", "gguf", "ab" * 32, "MIT")
    bundle = export(
        source,
        tmp_path / "bundle",
        formats=("gguf", "onnx"),
        name="given",
        origin_override=origin,
    )
    manifest = bundle.manifest
    assert manifest.name == "given"
    assert manifest.quantisation["gguf"].kind == "q4_1"
    assert manifest.quantisation["gguf"].note == "the source's blocks, bit for bit"
    assert manifest.quantisation["onnx"].kind == "int4/int8"
    assert "Q4_1 of the source, exact" in manifest.quantisation["onnx"].note
    assert (manifest.check["gguf"].kl, manifest.check["gguf"].top1) == (0, 1)
    assert manifest.check["onnx"].kl < 0.02
    with pytest.raises(FormatError, match=r"bundle already; its target\.gguf"):
        export(tmp_path / "bundle", tmp_path / "again")
    again = export(bundle.path_of("target.gguf"), tmp_path / "q4_0", quant="q4_0")
    assert again.manifest.quantisation["gguf"].note == (
        "Q4_0 made from Q4_1, rounded twice: 14"
    )
    for entry in manifest.weights:
        assert (entry.licence, entry.origin) == ("MIT", "pypi:thing")
        assert entry.sha256 == "ab" * 32


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_bundles_of_the_other_families(tmp_path: Path, family: str, kind: str) -> None:
    shape = checkpoints.family_shape(family)
    if kind == "hf":
        source = checkpoints.hf_checkpoint(tmp_path / "hf", shape)
    else:
        source = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", shape)
    bundle = export(source, tmp_path / "bundle", formats=("gguf", "onnx"))
    assert bundle.manifest.architecture.arch == family
    assert bundle.manifest.architecture.head_dim == shape.head_dim
    assert bundle.manifest.check["gguf"].kl < 1e-6
    assert bundle.manifest.check["onnx"].kl < check.MAX_KL["q8_0"]
    assert inspect_file(bundle.path_of("target.gguf")).architecture == (
        bundle.manifest.architecture
    )
    target = OnnxTarget(bundle.path_of("target.onnx"), context=64, threads=1)
    assert target.capabilities.row_invariant
    target.close()


@pytest.mark.parametrize("quant", [None, "q4_1"])
def test_packed_weights_answer_as_their_gguf(
    tmp_path: Path, source: Path, quant: str | None
) -> None:
    """The same logits, bit for bit, whether packed when exported or when loaded."""
    both = export(source, tmp_path / "both", formats=("packed", "gguf"), quant=quant)
    alone = export(source, tmp_path / "alone", formats=("packed",), quant=quant)
    assert names(tmp_path / "alone") == [
        *("chat_template.jinja", "edgespec.json", "target.packed.gguf"),
        "tokenizer.json",
    ]
    packed = alone.path_of("target.packed.gguf")
    assert packed.read_bytes() == both.path_of("target.packed.gguf").read_bytes()
    made, entry = alone.manifest.quantisation["packed"], alone.manifest.check["packed"]
    assert made.types == both.manifest.quantisation["gguf"].types
    assert made.bytes == packed.stat().st_size
    assert 0 <= entry.kl < check.MAX_KL[quant or "f32"]
    assert [weights.file for weights in alone.manifest.weights] == [packed.name]
    logits = []
    for path in (packed, both.path_of("target.gguf")):
        target = NativeTarget(path, context=32, threads=1)
        assert target.info.is_packed == (path == packed)
        logits.append(target.prefill(np.arange(1, 20, dtype=np.int32)).copy())
        target.close()
    assert (logits[0] == logits[1]).all()


def test_without_check(tmp_path: Path, source: Path) -> None:
    lines: list[str] = []
    bundle = export(source, tmp_path / "b", quant="q4_0", check=False, log=lines.append)
    assert "q4_0" in lines[0]
    assert " MB" in lines[0]
    assert bundle.manifest.check == {}
    assert bundle.manifest.onnx is None


def test_an_older_bundle_is_replaced(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "bundle"
    export(source, out, quant="q8_0", check=False)
    export(source, out, quant="q4_0", formats=("onnx",), check=False)
    assert names(tmp_path) == ["bundle"]
    assert "target.gguf" not in names(out)
    assert open_bundle(out).manifest.quantisation["onnx"].types == {
        "int4": 14,
        "int8": 1,
    }


def test_an_empty_directory_is_filled(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "bundle"
    out.mkdir()
    export(source, out, check=False)
    assert "edgespec.json" in names(out)


def test_what_is_no_bundle_stays(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.txt").write_text("dear reader")
    with pytest.raises(UsageError, match="exists and is not a bundle"):
        export(source, out)
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(UsageError, match="not a directory"):
        export(source, file)
    inside = checkpoints.hf_checkpoint(tmp_path / "bundle" / "hf")
    (tmp_path / "bundle" / "edgespec.json").write_text("{}")
    with pytest.raises(UsageError, match="the source lies inside"):
        export(inside, tmp_path / "bundle")
    assert names(tmp_path) == ["bundle", "file", "thesis"]
    assert names(out) == ["chapter1.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"formats": ("onnx", "tflite")},
            "--format tflite: expected gguf, onnx or",
        ),
        ({"formats": ()}, "no format"),
        ({"quant": "q3_k"}, "--quant q3_k: expected one of"),
        ({"formats": ("onnx",), "attention": "flash"}, "--attention flash"),
        ({"attention": "flash"}, "--attention flash"),
        ({"formats": ("onnx",), "taps": (9,)}, "tap 9"),
        ({"taps": (1,)}, "--taps: only the ONNX graph"),
    ],
)
def test_options_that_do_not_exist(
    tmp_path: Path, source: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export(source, tmp_path / "bundle", **arguments)
    assert names(tmp_path) == []


def test_a_missing_source(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        export(tmp_path / "nothing", tmp_path / "bundle")
    assert names(tmp_path) == []


def test_a_template_that_is_no_jinja_is_refused(tmp_path: Path, source: Path) -> None:
    broken = shutil.copytree(source, tmp_path / "hf")
    path = broken / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{% for message in messages %}"
    path.write_text(json.dumps(config))
    with pytest.raises(FormatError, match="chat template, line 1"):
        export(broken, tmp_path / "bundle")
    assert names(tmp_path) == ["hf"]


def fail(error: BaseException) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    return run


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    out = tmp_path_factory.mktemp("older") / "bundle"
    export(source, out, quant="q4_0", check=False)
    return out


PLACES: dict[str, tuple[Any, str]] = {
    "gguf": (gguf_file, "_encode"),
    "onnx": (onnx_graph._Graph, "_linear"),
    "packed": (NativeModel, "save"),
    "check": (check, "compare"),
    "manifest": (pipeline.bundles, "write_manifest"),
    "publish": (Path, "rename"),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (FULL, EdgeSpecError)],
)
def test_interruptions_leave_everything_as_it_was(
    tmp_path: Path,
    source: Path,
    older: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    shutil.copytree(older, tmp_path / "old")
    before = {p.name: p.read_bytes() for p in older.iterdir()}
    for out in (tmp_path / "new", tmp_path / "old"):
        with monkeypatch.context() as patch:
            patch.setattr(*PLACES[where], fail(error))
            with pytest.raises(raised):
                export(source, out, formats=pipeline.FORMATS, quant="q8_0")
    assert names(tmp_path) == ["old"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()} == before


def test_a_failed_swap_puts_the_old_bundle_back(
    tmp_path: Path, source: Path, older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "old"
    shutil.copytree(older, out)
    rename = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if target == out and not self.name.endswith("-old"):
            raise FULL
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(EdgeSpecError, match="cannot write the bundle"):
        export(source, out, check=False)
    assert names(tmp_path) == ["old"]
    assert open_bundle(out).manifest.quantisation["gguf"].kind == "q4_0"


def test_too_far_from_the_source_fails(tmp_path: Path, source: Path) -> None:
    with pytest.raises(FormatError, match=r"mean KL .* at most 1e-09 allowed"):
        export(source, tmp_path / "bundle", quant="q4_0", max_kl=1e-9)
    assert names(tmp_path) == []


def test_command(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgespec.cli.app import main

    out = tmp_path / "bundle"
    arguments = ["export", str(source), "-o", str(out), "--no-check"]
    arguments += ["--format", "onnx", "--quant", "q4_1", "--name", "tiny"]
    assert main([*arguments, "--attention", "explicit", "--taps", "0,2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    data = json.loads((out / "edgespec.json").read_text())
    assert data["name"] == "tiny"
    assert data["onnx"] == {"attention": "explicit", "taps": [0, 2], "inputs": 1}
    assert main([*arguments, "--taps", "one"]) == 2
    assert "--taps: expected indices" in capsys.readouterr().err


def test_smollm2_stays_near_its_source(tmp_path: Path, smollm2_gguf: Path) -> None:
    bundle = pipeline.export(
        smollm2_gguf,
        tmp_path / "bundle",
        formats=("gguf", "onnx"),
        check_tokens=1024,
    )
    assert bundle.manifest.check["gguf"].kl == 0
    assert bundle.manifest.check["onnx"].kl < 0.01
    assert bundle.manifest.check["onnx"].top1 > 0.95
    assert bundle.manifest.quantisation["onnx"].types == {"int4+offset": 210, "int8": 1}
