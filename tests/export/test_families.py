"""Tiny GGUF models of every family: numpy and llama.cpp answer the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.export import families, ggml, llama

IDS = np.random.default_rng(0).integers(3, 300, 60)  # longer than any window here
F32 = 1e-4
# ggml looks the tanh form of gelu up in a table of float16.
TABLE = 5e-3


def limit(family: str) -> float:
    return TABLE if family == "gemma3" else F32


def distance(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference in standard deviations."""
    return float(np.abs(got - expected).max() / expected.std())


@pytest.mark.parametrize(
    ("family", "scaling"),
    [(family, scaling) for family, all_ in families.ROPES.items() for scaling in all_],
)
def test_llama_cpp_answers_as_numpy(tmp_path: Path, family: str, scaling: str) -> None:
    model = families.gguf(tmp_path / "a.gguf", family, scaling=scaling, is_tied=False)
    expected = model.logits(IDS)
    assert expected.std() > 1
    assert distance(llama.logits(model.path, IDS.tolist()), expected) < limit(family)


@pytest.mark.parametrize("kind", families.FILE_TYPES)
def test_every_file_type_can_be_written(tmp_path: Path, kind: str) -> None:
    model = families.gguf(
        tmp_path / "a.gguf", kind=kind, hidden=256, ffn=256, n_heads=4, head_dim=64
    )
    assert model.weights.tensors["blk.0.attn_q"].kind == kind
    expected = model.logits(IDS)
    assert expected.std() > 1
    got = llama.logits(model.path, IDS.tolist())
    # it computes with activations of 8 bits
    spread = np.sqrt(np.mean((got - expected) ** 2)) / expected.std()
    assert spread < (F32 if kind == "F32" else 0.1)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_k_quants_of_every_family(tmp_path: Path, family: str) -> None:
    sizes = {"hidden": 256, "ffn": 256, "n_heads": 4, "head_dim": 64}
    model = families.gguf(
        tmp_path / "a.gguf", family, kind="Q4_K", embedding="Q6_K", **sizes
    )
    expected = model.logits(IDS)
    got = llama.logits(model.path, IDS.tolist())
    spread = np.sqrt(np.mean((got - expected) ** 2)) / expected.std()
    assert spread < 0.1


@pytest.mark.parametrize("kind", families.FILE_TYPES)
def test_blocks_come_back_as_the_numbers_they_stand_for(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((6, 512)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = ggml.quantize(values, type_)
    back = gguf.quants.dequantize(raw, type_)
    loss = np.sqrt(np.mean((back - values) ** 2))
    assert loss < (0.4 if kind == "Q2_K" else 0.2)
