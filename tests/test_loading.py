"""What is checked between a bundle and a session."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from edgespec.bundle import open_bundle
from edgespec.config import Runtime
from edgespec.errors import FormatError
from edgespec.loading import open_session
from edgespec_export.pipeline import export
from tests.export.checkpoints import gguf_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loading")
    source = gguf_checkpoint(directory / "tiny.gguf")
    export(source, directory / "out", formats=("gguf", "onnx"), check=False)
    return directory / "out"


@pytest.mark.parametrize("backend", ["native", "onnx"])
def test_c39_weights_of_another_vocabulary_are_refused(
    tiny: Path, backend: str
) -> None:
    bundle, runtime = open_bundle(tiny), Runtime(backend=backend)
    with open_session(bundle, runtime=runtime) as session:
        vocab = session.target.vocab
    shape = dataclasses.replace(bundle.manifest.architecture, vocab=vocab + 8)
    other = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, architecture=shape)
    )
    words = f"manifest says {vocab + 8}, the {backend} weights have {vocab}"
    with pytest.raises(FormatError, match=words):
        open_session(other, runtime=runtime)


def test_native_is_the_default_where_there_is_a_gguf(tiny: Path) -> None:
    bundle = open_bundle(tiny)
    manifest = bundle.manifest
    for kept, backend in (
        (("gguf", "onnx"), "native"),
        (("gguf",), "native"),
        (("onnx",), "onnx"),
    ):
        dropped = {"target.gguf", "target.onnx"} - {f"target.{form}" for form in kept}
        files = {n: e for n, e in manifest.files.items() if n not in dropped}
        made = dataclasses.replace(manifest, files=files)
        with open_session(dataclasses.replace(bundle, manifest=made)) as session:
            assert session.backend == backend


def test_c39_tokenizer_of_another_vocabulary_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(tiny)
    data = json.loads(bundle.tokenizer_json)
    vocab = bundle.manifest.architecture.vocab
    words = data["model"]["vocab"]
    words |= {f"more {i}": i for i in range(len(words), vocab + 5)}
    monkeypatch.setattr(type(bundle), "tokenizer_json", json.dumps(data))
    with pytest.raises(FormatError, match=f"tokens, the weights {vocab}"):
        open_session(bundle)
