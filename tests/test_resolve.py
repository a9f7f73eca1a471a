"""MODEL to bundle: hub checkpoints, GGUF files, and what is exported again when."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import bundle as bundles
from edgespec import models
from edgespec.bundle import resolve
from edgespec.errors import ModelNotFoundError, UnsupportedError, UsageError
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
    assert set(bundle.manifest.quantisation) == {"gguf", "onnx"}
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


def test_gguf_file_is_exported_again_when_it_changes(
    tmp_path: Path, edgespec_home: Path
) -> None:
    here, there = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for path in (here, there):
        path.parent.mkdir()
        gguf_checkpoint(path)
    first, second = resolve(str(here)), resolve(str(there))
    assert first.directory != second.directory
    assert resolve(str(here)) == first
    assert [s.description for s in models.statuses() if s.name.startswith("file")] == [
        "exported from m.gguf"
    ] * 2
    here.unlink()
    gguf_checkpoint(here)
    again = resolve(str(here))
    assert again.directory != first.directory
    assert not first.directory.exists()
    assert second.directory.exists()


def test_bundles_of_gguf_files_can_be_removed(
    tmp_path: Path, edgespec_home: Path
) -> None:
    path = tmp_path / "m.gguf"
    gguf_checkpoint(path)
    with pytest.raises(ModelNotFoundError, match="nothing of it"):
        models.remove(str(path))
    for called in ("path", "name"):
        bundle = resolve(str(path))
        listed = [s.name for s in models.statuses() if s.name.startswith("file-")]
        (name,) = listed if called == "name" else [str(path)]
        assert models.remove(name) > 1000
        assert not bundle.directory.exists()
    assert path.exists()
    for name in ("file-*", "file-../x", "file-"):
        with pytest.raises(ModelNotFoundError, match="nothing of it"):
            models.remove(name)


def test_empty_model_is_not_this_directory() -> None:
    with pytest.raises(UsageError, match="MODEL is empty"):
        resolve("")


def test_what_a_killed_export_left_is_removed(
    tmp_path: Path, edgespec_home: Path
) -> None:
    path = str(tmp_path / "m.gguf")
    gguf_checkpoint(tmp_path / "m.gguf")
    directory = resolve(path).directory
    left = directory.with_name(f".{directory.name}-a1_b2c3d")
    for again in (resolve, models.remove):
        if again is resolve:
            shutil.rmtree(directory)
        left.mkdir()
        (left / "target.onnx.data").write_bytes(bytes(9999))
        again(path)
        assert not left.exists()


def test_new_exporter_exports_again(
    tmp_path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_checkpoint(tmp_path / "m.gguf")
    first = resolve(str(tmp_path / "m.gguf"))
    monkeypatch.setattr(bundles, "exporter_key", lambda: "another")
    assert resolve(str(tmp_path / "m.gguf")).directory != first.directory


def test_missing_extra_says_what_to_install(
    tmp_path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_checkpoint(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "edgespec_export.pipeline", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'edgespec\[export\]'"):
        resolve(str(tmp_path / "m.gguf"))


def test_missing_extra_is_found_before_the_download(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "edgespec_export.pipeline", None)
    with pytest.raises(UnsupportedError, match="hf:Org/Tiny has to be exported first"):
        resolve("hf:Org/Tiny")
    assert not [path for path in server.requests if "safetensors" in str(path)]


def test_bundle_in_a_read_only_cache_is_used(
    tmp_path: Path, edgespec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_checkpoint(tmp_path / "m.gguf")
    made = resolve(str(tmp_path / "m.gguf"))

    def refuse(directory: Path) -> None:
        raise ModelNotFoundError(f"{directory}: read-only")

    monkeypatch.setattr(bundles, "locked", refuse)
    assert resolve(str(tmp_path / "m.gguf")) == made


def test_cache_that_cannot_be_written_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_checkpoint(tmp_path / "m.gguf")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "m.gguf" / "below"))
    with pytest.raises(ModelNotFoundError, match=r"cannot be written.*EDGESPEC_HOME"):
        resolve(str(tmp_path / "m.gguf"))
