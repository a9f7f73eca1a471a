"""Rotary embedding of the C core: the exporter, held to transformers, is the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export import rope
from tests.native_attention import ERR_FORMAT, ERR_UNSUPPORTED, NativeError, Rope

DIM, CONTEXT = 64, 4096
LLAMA3 = np.linspace(1, 8, DIM // 2, dtype=np.float32)
KEYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "base": {"freq_base": 5e5},
    "none": {"scaling.type": "none", "scaling.factor": 4.0},
    "linear": {"scaling.type": "linear", "scaling.factor": 2.5},
    "linear by the old key": {"scale_linear": 2.5},
    "factor beats the old key": {"scale_linear": 2.5, "scaling.factor": 4.0},
    "attention factor": {"scaling.attn_factor": 1.25},
    "yarn": {
        "scaling.type": "yarn",
        "scaling.factor": 4.0,
        "scaling.original_context_length": 128,
    },
    "yarn of the model's context": {"scaling.type": "yarn", "scaling.factor": 4.0},
    "yarn betas": {
        "scaling.type": "yarn",
        "scaling.factor": 8.0,
        "scaling.original_context_length": 2048,
        "scaling.yarn_beta_fast": 16.0,
        "scaling.yarn_beta_slow": 2.0,
        "freq_base": 1e6,
    },
    "yarn attention": {
        "scaling.type": "yarn",
        "scaling.factor": 4.0,
        "scaling.original_context_length": 128,
        "scaling.attn_factor": 0.9,
    },
    "yarn factor 1": {
        "scaling.type": "yarn",
        "scaling.factor": 1.0,
        "scaling.original_context_length": 128,
    },
    "neutral": {
        "scaling.yarn_ext_factor": -1.0,
        "scaling.yarn_attn_factor": 1.0,
        "scaling.yarn_log_multiplier": 0.0,
        "scaling.alpha": 0.0,
    },
}


def write(
    path: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray] | None = None
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = f"llama.rope.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    for name, tensor in (tensors or {"other": np.zeros(4, np.float32)}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def truth(keys: dict[str, Any], factors: np.ndarray | None = None) -> Any:
    """As the exporter reads it: floats of a file are float32."""
    metadata = {
        f"llama.rope.{key}": float(np.float32(value))
        if isinstance(value, float)
        else value
        for key, value in keys.items()
    }
    return rope.from_gguf(metadata, "llama", DIM, CONTEXT, factors, "here")


def assert_equal(native: Rope, expected: Any) -> None:
    np.testing.assert_allclose(native.inv_freq, expected.inv_freq, rtol=4e-15, atol=0)
    assert native.attention_factor == pytest.approx(
        expected.attention_factor, rel=1e-15
    )


@pytest.mark.parametrize("kind", KEYS)
def test_frequencies_equal_the_exporter(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", KEYS[kind])
    assert_equal(Rope(path, "llama", DIM, CONTEXT), truth(KEYS[kind]))


def test_factors_of_llama3_are_a_tensor(tmp_path: Path) -> None:
    keys = {"freq_base": 5e5}
    path = write(tmp_path / "a.gguf", keys, {"rope_freqs.weight": LLAMA3})
    assert_equal(Rope(path, "llama", DIM, CONTEXT), truth(keys, LLAMA3))


def test_windowed_layers_have_a_base_of_their_own(tmp_path: Path) -> None:
    scaled = {"freq_base": 1e6, "scaling.type": "linear", "scaling.factor": 8.0}
    for keys in (scaled, scaled | {"freq_base_swa": 5e4}):
        path = write(tmp_path / "a.gguf", keys)
        metadata = {f"llama.rope.{key}": value for key, value in keys.items()}
        expected = rope.local_from_gguf(metadata, "llama", DIM, "here")
        assert_equal(Rope(path, "llama", DIM, local=True), expected)


def test_table_is_the_rounded_cosine_and_sine(tmp_path: Path) -> None:
    keys = KEYS["yarn"] | {"freq_base": 1e6}
    native = Rope(write(tmp_path / "a.gguf", keys), "llama", DIM, CONTEXT)
    positions = [0, 1, 2, 17, 255, 256, 2047, 4096, 131071, 1 << 20]
    cos, sin = native.table(positions)
    angles = np.array(positions, np.float64)[:, None] * native.inv_freq
    for got, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        exact = exact * native.attention_factor
        # Twice rounded, or between two floats by less than double arithmetic tells.
        assert np.abs(got - exact).max() <= 2.0**-24
        assert np.mean(got == exact.astype(np.float32)) > 0.99


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"scaling.type": "longrope"}, "'longrope'"),
        ({"scaling.type": "dynamic", "scaling.factor": 2.0}, "'dynamic'"),
        ({"scaling.type": "Linear"}, "'Linear'"),
        ({"scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
        ({"scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor = 2"),
        ({"scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier = 0.1"),
        ({"scaling.alpha": 3.0}, "scaling.alpha = 3"),
    ],
)
def test_unknown_scalings_are_refused_by_name(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf", keys)
    with pytest.raises(NativeError, match=said) as caught:
        Rope(path, "llama", DIM, CONTEXT)
    assert caught.value.status == ERR_UNSUPPORTED
    assert str(path) in str(caught.value)
    with pytest.raises(UnsupportedError):
        truth(keys)


def test_factors_beside_a_scaling_are_refused(tmp_path: Path) -> None:
    keys = {"scaling.type": "linear", "scaling.factor": 2.0}
    path = write(tmp_path / "a.gguf", keys, {"rope_freqs.weight": LLAMA3})
    with pytest.raises(NativeError, match=r"rope_freqs\.weight.*linear") as caught:
        Rope(path, "llama", DIM, CONTEXT)
    assert caught.value.status == ERR_UNSUPPORTED
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        path = write(tmp_path / "b.gguf", {}, {name: LLAMA3})
        with pytest.raises(NativeError, match=f"{name}.*longrope") as caught:
            Rope(path, "llama", DIM, CONTEXT)
        assert caught.value.status == ERR_UNSUPPORTED


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"freq_base": -1.0}, "freq_base: expected a positive number, got -1"),
        ({"freq_base": float("nan")}, "freq_base"),
        ({"freq_base": float("inf")}, "freq_base"),
        ({"freq_base": 1e-35}, "freq_base"),
        ({"freq_base": 0.5}, "base above 1"),
        ({"scaling.type": "linear", "scaling.factor": -2.0}, "scaling.factor"),
        ({"scaling.type": 3}, "scaling.type"),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 2.0,
                "scaling.original_context_length": 0,
            },
            "original_context_length",
        ),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 2.0,
                "scaling.yarn_beta_fast": -3.0,
            },
            "yarn_beta_fast",
        ),
    ],
)
def test_impossible_values_are_named(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf", keys)
    with pytest.raises(NativeError, match=said) as caught:
        Rope(path, "llama", DIM, CONTEXT)
    assert caught.value.status == ERR_FORMAT


@pytest.mark.parametrize(
    "factors",
    [LLAMA3[:-1], LLAMA3 * 0, -LLAMA3, LLAMA3.reshape(2, -1), LLAMA3 * np.inf],
)
def test_impossible_factors_are_named(factors: np.ndarray, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {}, {"rope_freqs.weight": factors})
    with pytest.raises(NativeError, match=r"rope_freqs\.weight") as caught:
        Rope(path, "llama", DIM, CONTEXT)
    assert caught.value.status == ERR_FORMAT
    if factors.ndim == 1:
        with pytest.raises(FormatError):
            truth({}, factors)


@pytest.mark.parametrize("dim", [0, 7, 1 << 17])
def test_dimensions_are_even_and_bounded(dim: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {})
    with pytest.raises(NativeError, match="even dimension") as caught:
        Rope(path, "llama", dim, CONTEXT)
    assert caught.value.status == ERR_FORMAT
