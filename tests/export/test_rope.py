"""RoPE: transformers and llama.cpp are the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export import gguf_file, rope
from edgespec_export.sources import gguf, hf
from tests.export import checkpoints, llama

YARN = checkpoints.ROPES["yarn"]
KINDS: dict[str, dict[str, Any]] = {
    **checkpoints.ROPES,
    "llama3 no context": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn attention": YARN | {"attention_factor": 1.25},
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn factor 1": YARN | {"factor": 1.0},
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_transformers(kind: str, is_old: bool, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = checkpoints.Shape(theta=theta, head_dim=64)
    config = checkpoints.hf_config(shape, rope=KINDS[kind], is_old_rope=is_old)
    ours = rope.from_hf(config, 64, "config.json")
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    # transformers rounds to float32 at each of its (up to eight) steps.
    expected = theirs.inv_freq.numpy()
    np.testing.assert_allclose(ours.inv_freq, expected, rtol=8e-7, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert ours.kind == KINDS[kind]["rope_type"]


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_keys_give_the_same_rope_back(kind: str, tmp_path: Path) -> None:
    source = hf.read(checkpoints.hf_checkpoint(tmp_path / "hf", rope=KINDS[kind]))
    gguf_file.write(source, "f32", tmp_path / "a.gguf")
    back = gguf.read(tmp_path / "a.gguf").config.rope
    np.testing.assert_allclose(back.inv_freq, source.config.rope.inv_freq, rtol=1e-6)
    factor = source.config.rope.attention_factor
    assert back.attention_factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_llamacpp_computes_what_transformers_computes(
    kind: str, tmp_path: Path
) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    path = checkpoints.hf_checkpoint(tmp_path / "hf", rope=KINDS[kind])
    gguf_file.write(hf.read(path), "f32", tmp_path / "a.gguf")
    ids = np.random.default_rng(3).integers(3, 320, 200)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)[None]).logits[0].numpy()
    got = llama.logits(tmp_path / "a.gguf", ids.tolist())
    assert expected.std() > 1
    assert np.abs(got - expected).max() < 1e-3 * expected.std()


@pytest.mark.parametrize("name", ["dynamic", "longrope", "su", "mrope", "proportional"])
def test_other_scalings_are_refused_by_name(name: str) -> None:
    config = checkpoints.hf_config(rope={"rope_type": name, "factor": 2.0})
    with pytest.raises(UnsupportedError, match=name):
        rope.from_hf(config, 16, "config.json")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"short_factor": [1.0]}, "short_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "differ by layer"),
    ],
)
def test_unknown_parameters_are_refused(extra: dict[str, Any], message: str) -> None:
    config = checkpoints.hf_config(rope={"rope_type": "default"} | extra)
    with pytest.raises(UnsupportedError, match=message):
        rope.from_hf(config, 16, "config.json")


def test_yarn_without_truncation_is_refused() -> None:
    config = checkpoints.hf_config(rope=YARN | {"truncate": False})
    with pytest.raises(UnsupportedError, match="truncate"):
        rope.from_hf(config, 16, "config.json")


def test_missing_or_disagreeing_values_are_format_errors() -> None:
    config = checkpoints.hf_config(rope={"rope_type": "linear"})
    with pytest.raises(FormatError, match="factor"):
        rope.from_hf(config, 16, "config.json")
    both = checkpoints.hf_config(rope="linear") | {"rope_scaling": {"type": "linear"}}
    with pytest.raises(FormatError, match="disagree"):
        rope.from_hf(both, 16, "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scaling.type", "longrope"),
        ("scaling.yarn_ext_factor", 0.5),
        ("scaling.yarn_attn_factor", 2.0),
        ("scaling.yarn_log_multiplier", 0.1),
        ("scaling.alpha", 1000.0),
    ],
)
def test_gguf_scalings_are_refused_by_name(
    key: str, value: Any, tmp_path: Path
) -> None:
    path = checkpoints.gguf_checkpoint(
        tmp_path / "a.gguf", extra={f"llama.rope.{key}": value}
    )
    with pytest.raises(UnsupportedError, match=str(value)):
        gguf.read(path)


def test_gguf_rope_freqs_survive_bit_for_bit(tmp_path: Path) -> None:
    factors = np.linspace(1, 8.3, 8).astype(np.float32)
    path = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", rope_freqs=factors)
    weights = gguf.read(path)
    assert "rope_freqs" not in weights.tensors
    np.testing.assert_array_equal(rope.freq_factors(weights.config.rope), factors)
    base = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(weights.config.rope.inv_freq, base / factors, rtol=1e-12)


def test_gguf_scaling_without_a_type_is_linear_as_in_llamacpp(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.factor": 4.0}
    made = gguf.read(checkpoints.gguf_checkpoint(tmp_path / "a.gguf", extra=extra))
    assert made.config.rope.kind == "linear"
    base = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(made.config.rope.inv_freq, base / 4, rtol=1e-12)
