"""MODEL to files: hub checkpoints, GGUF files, and what is made anew when."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import bundle as bundles
from edgespec import gguf_model, models
from edgespec.bundle import resolve
from edgespec.errors import (
    EdgeSpecError,
    FormatError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec.gguf_header import open_gguf
from edgespec_export.pipeline import export
from edgespec_export.sources.gguf import read as read_gguf
from tests.export.checkpoints import gguf_checkpoint, hf_checkpoint
from tests.hub_server import COMMIT, Hub, serve


@pytest.fixture
def server(
    monkeypatch: pytest.MonkeyPatch, edgespec_home: Path, tmp_path: Path
) -> Iterator[Hub]:
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        gguf_checkpoint(tmp_path / "tiny.gguf")
        hf_checkpoint(tmp_path / "tiny")
        running.repos["Org/Tiny-GGUF"] = {
            "tiny-F32.gguf": (tmp_path / "tiny.gguf").read_bytes()
        }
        running.repos["Org/Tiny"] = {
            path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()
        }
        yield running


def test_hub_gguf_becomes_a_bundle_once(server: Hub) -> None:
    bundle = resolve("hf:Org/Tiny-GGUF:F32")
    assert set(bundle.manifest.quantisation) == {"gguf"}
    assert {w.origin for w in bundle.manifest.weights} == {"hf:Org/Tiny-GGUF"}
    assert {w.licence for w in bundle.manifest.weights} == {"mit"}
    assert bundle.directory.parent.name == "bundles"
    server.requests.clear()
    assert resolve("hf:Org/Tiny-GGUF:F32") == bundle
    assert resolve("hf:Org/Tiny-GGUF:F32", offline=True) == bundle
    assert server.requests == []


def test_hub_checkpoint_is_exported_as_asked(server: Hub) -> None:
    bundle = resolve("hf:Org/Tiny:q8_0")
    assert bundle.manifest.quantisation["gguf"].kind == "q8_0"
    assert bundle.manifest.name == "Tiny"


def test_new_commit_is_exported_after_get_and_ousts_the_old(
    server: Hub, edgespec_home: Path
) -> None:
    old = resolve("hf:Org/Tiny-GGUF")
    server.commit = COMMIT[::-1]
    assert resolve("hf:Org/Tiny-GGUF") == old
    models.get("hf:Org/Tiny-GGUF")
    new = resolve("hf:Org/Tiny-GGUF")
    assert new.directory != old.directory
    assert not old.directory.exists()


def test_unreachable_hub_leaves_nothing_half_made(
    server: Hub, edgespec_home: Path
) -> None:
    server.status = 503
    with pytest.raises(ModelNotFoundError, match="HTTP 503"):
        resolve("hf:Org/Tiny")
    assert [p for p in edgespec_home.rglob("*") if p.suffix != ".lock"] == [
        edgespec_home / "hub"
    ]


def test_gguf_file_is_used_where_it_lies(tmp_path: Path, edgespec_home: Path) -> None:
    path = gguf_checkpoint(tmp_path / "m.gguf")
    model = resolve(str(path))
    assert model.path_of("target.gguf") == path
    assert model.manifest.name == "Tiny"
    assert model.manifest.architecture.vocab == read_gguf(path).config.vocab
    assert [entry.origin for entry in model.manifest.weights] == ["m.gguf"]
    assert not edgespec_home.exists()
    with pytest.raises(FormatError, match=r"no target.onnx.*edgespec export .*onnx"):
        model.path_of("target.onnx")


def test_shards_are_used_where_they_lie(tmp_path: Path, edgespec_home: Path) -> None:
    whole = resolve(str(gguf_checkpoint(tmp_path / "m.gguf")))
    (tmp_path / "s").mkdir()
    first = gguf_checkpoint(tmp_path / "s" / "m.gguf", n_shards=3)
    for shard in sorted(first.parent.iterdir()):
        model = resolve(str(shard))
        assert model.path_of("target.gguf") == first
        assert model.manifest.architecture == whole.manifest.architecture
        assert model.manifest.quantisation == whole.manifest.quantisation
        assert model.tokenizer_json == whole.tokenizer_json
    assert not edgespec_home.exists()
    first.with_name(first.name.replace("00001-of", "00002-of")).unlink()
    with pytest.raises(ModelNotFoundError, match="00002-of-00003"):
        resolve(str(first))


def test_gguf_and_its_export_say_the_same(tmp_path: Path) -> None:
    path = gguf_checkpoint(tmp_path / "m.gguf")
    bare, made = resolve(str(path)), export(path, tmp_path / "out", check=False)
    assert bare.tokenizer_json == made.tokenizer_json
    assert bare.chat_template == made.chat_template
    for name in ("name", "architecture", "tokenizer", "generation"):
        assert getattr(bare.manifest, name) == getattr(made.manifest, name)
    ours, theirs = (model.manifest.quantisation["gguf"] for model in (bare, made))
    assert (ours.kind, ours.types, ours.note) == (
        theirs.kind,
        theirs.types,
        theirs.note,
    )


def test_hub_shards_are_not_copied_and_not_asked_for_twice(
    server: Hub, tmp_path: Path, edgespec_home: Path
) -> None:
    (tmp_path / "s").mkdir()
    first = gguf_checkpoint(tmp_path / "s" / "m.gguf", n_shards=2)
    server.repos["Org/Shards"] = {
        path.name: path.read_bytes() for path in first.parent.iterdir()
    }
    model = resolve("hf:Org/Shards")
    assert model.path_of("target.gguf").parent == edgespec_home / "hub" / "Org--Shards"
    assert model.manifest.name == "Shards"
    assert {w.licence for w in model.manifest.weights} == {"mit"}
    assert not (edgespec_home / "bundles").exists()
    server.requests.clear()
    assert resolve("hf:Org/Shards") == model
    assert server.requests == []
    assert models.remove("hf:Org/Shards") > 1000
    assert not model.path_of("target.gguf").exists()


def test_fetched_gguf_takes_its_space_once(server: Hub, edgespec_home: Path) -> None:
    bundle = resolve("hf:Org/Tiny-GGUF")
    fetched = edgespec_home / "hub" / "Org--Tiny-GGUF" / "tiny-F32.gguf"
    assert os.path.samefile(bundle.path_of("target.gguf"), fetched)
    (status,) = [s for s in models.statuses() if s.name == "hf:Org/Tiny-GGUF"]
    assert fetched.stat().st_size < status.size < 1.9 * fetched.stat().st_size


def test_where_links_do_not_work_the_file_is_copied(
    server: Hub, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    copied = resolve("hf:Org/Tiny-GGUF").path_of("target.gguf")
    fetched = edgespec_home / "hub" / "Org--Tiny-GGUF" / "tiny-F32.gguf"
    assert copied.read_bytes() == fetched.read_bytes()
    assert not os.path.samefile(copied, fetched)


def test_full_disk_leaves_nothing_half_made(
    server: Hub, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundles, "_link_or_copy", refuse)
    with pytest.raises(EdgeSpecError, match="cannot write the bundle: no space left"):
        resolve("hf:Org/Tiny-GGUF")
    left = [p.name for p in (edgespec_home / "bundles").iterdir()]
    assert all(name.endswith(".lock") for name in left)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("tokenizer.ggml.model", None, FormatError, "has no tokenizer"),
        ("tokenizer.ggml.model", "no_vocab", FormatError, "has no tokenizer"),
        ("tokenizer.ggml.model", "bert", UnsupportedError, "'bert' is not supported"),
        ("tokenizer.ggml.pre", "secret", UnsupportedError, "'secret' is not supported"),
        ("tokenizer.chat_template", 7, FormatError, "chat_template: expected text"),
        ("general.sampling.temp", -1.0, FormatError, "general.sampling.temp"),
        ("general.architecture", None, FormatError, "not a language model"),
    ],
)
def test_gguf_whose_words_cannot_be_read_says_why(
    key: str,
    value: object,
    error: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = gguf_checkpoint(tmp_path / "m.gguf")
    file = open_gguf(path)
    if value is None:
        del file.metadata[key]
    else:
        file.metadata[key] = value
    monkeypatch.setattr(gguf_model, "open_gguf", lambda _: file)
    with pytest.raises(error, match=words) as caught:
        resolve(str(path))
    assert str(path) in str(caught.value)


def test_empty_model_is_not_this_directory() -> None:
    with pytest.raises(UsageError, match="MODEL is empty"):
        resolve("")


def test_what_a_killed_command_left_is_removed(
    server: Hub, edgespec_home: Path
) -> None:
    model = "hf:Org/Tiny-GGUF"
    directory = resolve(model).directory
    left = directory.with_name(f".{directory.name}-a1_b2c3d")
    for again in (resolve, models.remove):
        if again is resolve:
            shutil.rmtree(directory)
        left.mkdir()
        (left / "target.gguf").write_bytes(bytes(9999))
        again(model)
        assert not left.exists()


@pytest.mark.parametrize(
    ("model", "key"),
    [("hf:Org/Tiny-GGUF", "reader_key"), ("hf:Org/Tiny", "exporter_key")],
)
def test_new_version_makes_its_bundles_anew(
    model: str, key: str, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(model)
    monkeypatch.setattr(bundles, key, lambda: "another")
    assert resolve(model).directory != first.directory


def test_no_extra_is_needed_for_a_gguf(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("edgespec_export")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("edgespec_export", "gguf", "onnx", "safetensors", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, name, None)
    fetched = resolve("hf:Org/Tiny-GGUF")
    bare = resolve(str(gguf_path := tmp_path / "tiny.gguf"))
    assert fetched.tokenizer_json == bare.tokenizer_json
    assert bare.path_of("target.gguf") == gguf_path


def test_missing_extra_is_found_before_the_download(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "edgespec_export.pipeline", None)
    with pytest.raises(UnsupportedError, match="hf:Org/Tiny has to be exported first"):
        resolve("hf:Org/Tiny")
    assert not [path for path in server.requests if "safetensors" in str(path)]


def test_bundle_in_a_read_only_cache_is_used(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolve("hf:Org/Tiny-GGUF")

    def refuse(directory: Path) -> None:
        raise ModelNotFoundError(f"{directory}: read-only")

    monkeypatch.setattr(bundles, "locked", refuse)
    assert resolve("hf:Org/Tiny-GGUF") == made


def test_cache_that_cannot_be_written_says_what_to_set(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "tiny.gguf" / "below"))
    with pytest.raises(ModelNotFoundError, match=r"cannot be written.*EDGESPEC_HOME"):
        resolve("hf:Org/Tiny-GGUF")
