"""Fixtures that need a real model; it comes from the cache, or its sources once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec import models
from edgespec.bundle import Bundle, resolve


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The Q4_1 file of SmolLM2-135M-Instruct."""
    return models.get("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path) -> Bundle:
    """That file as a bundle of GGUF and ONNX, made anew when the exporter changed."""
    return resolve("smollm2-135m", offline=True)


@pytest.fixture
def edgespec_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of one's own."""
    home = tmp_path / "edgespec-home"
    monkeypatch.setenv("EDGESPEC_HOME", str(home))
    return home
