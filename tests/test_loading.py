"""What is checked between a bundle and a session."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from edgespec.bundle import open_bundle
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


def test_c39_weights_of_another_vocabulary_are_refused(tiny: Path) -> None:
    bundle = open_bundle(tiny)
    with open_session(bundle) as session:
        vocab = session.target.vocab
    shape = dataclasses.replace(bundle.manifest.architecture, vocab=vocab + 8)
    other = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, architecture=shape)
    )
    words = f"manifest says {vocab + 8}, the onnx weights have {vocab}"
    with pytest.raises(FormatError, match=words):
        open_session(other)


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
