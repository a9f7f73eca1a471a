"""Fixtures that need a real model; it comes from the cache, or its sources once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec import models
from edgespec.bundle import Bundle, exporter_key, open_bundle
from edgespec_export.pipeline import export


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The Q4_1 file of SmolLM2-135M-Instruct."""
    return models.get("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path, pytestconfig: pytest.Config) -> Bundle:
    """That file as a bundle of GGUF and ONNX, made anew when the exporter changed."""
    directory = pytestconfig.cache.mkdir("smollm2") / exporter_key()[:12]
    if directory.exists():
        return open_bundle(directory)
    return export(
        smollm2_gguf,
        directory,
        formats=("gguf", "onnx"),
        check=False,
        name="smollm2-135m",
    )


@pytest.fixture
def edgespec_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of one's own."""
    home = tmp_path / "edgespec-home"
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    return home
