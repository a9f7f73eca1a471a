"""Bundles with draft heads: what `export --head` writes, and the options around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgespec.bundle import open_bundle
from edgespec.cli.app import main
from edgespec.cli.export import parse_draft_vocab
from edgespec.errors import FormatError, ModelNotFoundError, UsageError
from edgespec_export import pipeline, sources
from edgespec_export.draft_vocab import read_counts
from edgespec_export.head_bundle import HeadOptions
from edgespec_export.sources import heads as reader
from tests.export import checkpoints
from tests.export import heads as tiny
from tests.export.test_onnx_head import run_host


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    return checkpoints.hf_checkpoint(tmp_path_factory.mktemp("target") / "hf", shape)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("heads")
    made = {
        "eagle3": tiny.eagle3(),
        "other": tiny.eagle3("specforge", seed=1),
        "eagle": tiny.eagle(own_embedding=False),
        "medusa": tiny.medusa(rows=None),
    }
    (directory / "medusa").mkdir()
    readme = "---\nlicense: apache-2.0\n---\n"
    (directory / "medusa" / "README.md").write_text(readme)
    return {name: head.write(directory / name) for name, head in made.items()}


def export(source: Path, out: Path, options: HeadOptions, **arguments: Any) -> Any:
    return pipeline.export(source, out, check=False, heads=options, **arguments)


def test_heads_in_both_containers(
    tmp_path: Path, source: Path, heads: dict[str, Path]
) -> None:
    out, lines = tmp_path / "bundle", []
    bundle = export(
        source,
        out,
        HeadOptions(tuple(heads.values())),
        formats=("gguf", "onnx"),
        log=lines.append,
    )
    assert sorted(path.name for path in out.glob("draft-*")) == [
        "draft-eagle-step.onnx",
        "draft-eagle.gguf",
        "draft-eagle.onnx",
        "draft-eagle3-step.onnx",
        "draft-eagle3.2-step.onnx",
        "draft-eagle3.2.gguf",
        "draft-eagle3.2.onnx",
        "draft-eagle3.gguf",
        "draft-eagle3.onnx",
        "draft-medusa.gguf",
        "draft-medusa.onnx",
    ]
    manifest = open_bundle(out).manifest
    assert [head.kind for head in manifest.heads] == [
        *("eagle3", "eagle3", "eagle", "medusa")
    ]
    first, second, _, last = manifest.heads
    assert (first.name, first.quant, first.taps) == ("eagle3", "q8_0", tiny.TAPS)
    assert (first.draft_vocab, last.draft_vocab) == (tiny.DRAFT_VOCAB, tiny.VOCAB)
    assert second.files["onnx_step"] == "draft-eagle3.2-step.onnx"
    assert last.files == {"gguf": "draft-medusa.gguf", "onnx": "draft-medusa.onnx"}
    origins = {entry.file: entry for entry in manifest.weights}
    assert set(origins) == {n for n in manifest.files if n.startswith(("dr", "ta"))}
    assert origins["draft-medusa.gguf"].licence == "apache-2.0"
    assert origins["draft-eagle3.2.gguf"].origin == "other"
    assert manifest.onnx is not None
    assert set(tiny.TAPS) <= set(manifest.onnx.taps)
    assert any("draft-eagle3.gguf" in line and "96 of 320" in line for line in lines)

    weights = sources.read(source)
    for head in manifest.heads:
        bundle.path_of(head.files["gguf"])
        again = reader.read(out / head.files["gguf"], weights.config)
        assert (again.kind, again.taps) == (head.kind, head.taps)
    plain = run_host(out / "target.onnx", "-", 20, "5,9,31")
    for head in manifest.heads:
        taps = [",".join(map(str, head.taps))] if head.kind == "eagle3" else []
        draft = out / head.files["onnx"]
        drafted = run_host(out / "target.onnx", draft, 20, "5,9,31", *taps)
        assert drafted["tokens"] == plain["tokens"]


def test_only_the_containers_of_the_target(
    tmp_path: Path, source: Path, heads: dict[str, Path]
) -> None:
    options = HeadOptions((heads["eagle3"],), quant="q4_0")
    bundle = export(source, tmp_path / "a", options, formats=("packed",))
    (entry,) = bundle.manifest.heads
    assert entry.files == {"gguf": "draft-eagle3.gguf"}
    assert entry.quant == "q4_0"
    bundle = export(source, tmp_path / "b", options, formats=("onnx",))
    (entry,) = bundle.manifest.heads
    assert set(entry.files) == {"onnx", "onnx_step"}


def test_a_gguf_head_stays_as_it_is(
    tmp_path: Path, source: Path, heads: dict[str, Path]
) -> None:
    options = HeadOptions((heads["eagle3"],), quant="q4_0")
    export(source, tmp_path / "a", options)
    again = HeadOptions((tmp_path / "a" / "draft-eagle3.gguf",))
    bundle = export(source, tmp_path / "b", again)
    assert bundle.manifest.heads[0].quant == ""
    config = sources.read(source).config
    first = reader.read(tmp_path / "a" / "draft-eagle3.gguf", config)
    second = reader.read(tmp_path / "b" / "draft-eagle3.gguf", config)
    for name, tensor in first.tensors.items():
        assert second.tensors[name].kind == tensor.kind
        np.testing.assert_array_equal(
            second.tensors[name].load_raw(), tensor.load_raw()
        )


def test_draft_vocabularies(
    tmp_path: Path, source: Path, heads: dict[str, Path]
) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"300": 9, "17": 8, "5": 7}))
    both = (heads["eagle"], heads["medusa"])
    options = HeadOptions(both, draft_vocab=4, counts=counts)
    bundle = export(source, tmp_path / "a", options)
    assert [head.draft_vocab for head in bundle.manifest.heads] == [4, 4]
    config = sources.read(source).config
    for name in ("draft-eagle.gguf", "draft-medusa.gguf"):
        head = reader.read(tmp_path / "a" / name, config)
        assert head.d2t is not None
        # with what ends a reply, however often it occurs
        assert set(head.d2t) == {checkpoints.EOS, 5, 17, 300}
    options = HeadOptions((heads["medusa"],), draft_vocab=100)
    export(source, tmp_path / "b", options, formats=("gguf", "onnx"))
    head = reader.read(tmp_path / "b" / "draft-medusa.gguf", config)
    assert (head.d2t, head.draft_vocab, head.own_output) == (None, 100, False)
    model = onnx.load(str(tmp_path / "b" / "draft-medusa.onnx"))
    dims = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    assert dims["output"] == [100, 64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab": 10}, "--draft-vocab 10: there is no --head"),
        ({"quant": "q4_0"}, "--head-quant q4_0: there is no --head"),
        ({"tap_convention": "input"}, "--tap-convention input: there is no --head"),
        ({"paths": ["eagle3"], "quant": "q3"}, "--head-quant q3: expected one of"),
        ({"paths": ["medusa"], "tap_convention": "input"}, "no head has layer ids"),
        ({"paths": ["eagle3"], "draft_vocab": 97}, "expected 1 to 96"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path,
    source: Path,
    heads: dict[str, Path],
    options: dict[str, Any],
    message: str,
) -> None:
    paths = tuple(heads[name] for name in options.pop("paths", ()))
    with pytest.raises(UsageError, match=message):
        export(source, tmp_path / "a", HeadOptions(paths, **options))
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_head_leaves_nothing_behind(tmp_path: Path, source: Path) -> None:
    with pytest.raises(FormatError, match="no draft head"):
        export(source, tmp_path / "a", HeadOptions((source / "model.safetensors",)))
    assert list(tmp_path.iterdir()) == []


def test_token_counts(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"

    def counts(value: Any) -> list[int]:
        path.write_text(json.dumps(value))
        return read_counts(path, 3).tolist()

    assert counts([4, 0, 9]) == [4, 0, 9]
    assert counts({"2": 9}) == [0, 0, 9]
    for value, message in [
        ([1, 2], "2 counts, the target has 3 tokens"),
        ([1, 2, -1], "2: -1: expected an id below 3"),
        ({"3": 1}, "'3': 1: expected an id below 3"),
        ({"a": 1}, "'a': 1: expected an id below 3"),
        ({"1": 1.5}, "'1': 1.5"),
        ({"1": True}, "'1': True"),
        (7, "expected a list of counts, or an object by id"),
    ]:
        with pytest.raises(FormatError, match=message):
            counts(value)
    path.write_text("[")
    with pytest.raises(FormatError, match="not JSON"):
        read_counts(path, 3)
    with pytest.raises(ModelNotFoundError, match="no such file of token counts"):
        read_counts(tmp_path / "nothing", 3)


def test_the_option_with_a_number_and_a_file() -> None:
    assert parse_draft_vocab(None) == (None, None)
    assert parse_draft_vocab("8192") == (8192, None)
    assert parse_draft_vocab("64:a:b.json") == (64, Path("a:b.json"))
    for text in ("", "many", "-1", "64:", ":a.json"):
        with pytest.raises(UsageError, match="expected a number or NUMBER:FILE"):
            parse_draft_vocab(text)


def test_command_line(
    tmp_path: Path,
    source: Path,
    heads: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "bundle"
    command = ["export", str(source), "-o", str(out), "--no-check"]
    command += ["--head", str(heads["eagle3"]), "--head", str(heads["medusa"])]
    command += ["--head-quant", "q4_0", "--draft-vocab", "64"]
    command += ["--tap-convention", "input"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{out}\n"
    assert "draft-medusa.gguf" in shown.err
    manifest = open_bundle(out).manifest
    assert [(h.kind, h.draft_vocab) for h in manifest.heads] == [
        ("eagle3", 64),
        ("medusa", 64),
    ]
    assert main([*command[:-1], "sideways"]) == 2
    assert "--tap-convention sideways: expected input or output" in (
        capsys.readouterr().err
    )
