"""The numpy forward, the ONNX graphs and both containers against transformers.

Tiny random checkpoints of every family; tolerances are shares of the logits' standard
deviation. The prompt is longer than every window here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from edgespec.errors import UnsupportedError
from edgespec_export import forward, gguf_file, onnx_graph, sources
from edgespec_export.rope import base_frequencies
from edgespec_export.weights import Tensor, WeightSet
from tests.export import checkpoints, families, llama
from tests.export.graphs import Graph

F32, F16 = 1e-4, 2e-3
# llama.cpp looks the tanh form of gelu up in a table of float16: a share of the F16
# limit on average, more where it is worst
TABLE = 5e-3
SHAPES = {
    "gqa tied": {},
    "gqa untied": {"is_tied": False},
    "mha tied": {"n_kv_heads": 4},
    "mha untied": {"n_kv_heads": 4, "is_tied": False},
    "one kv head": {"n_kv_heads": 1, "head_dim": 32},
}
OWN_SHAPES = {
    "qwen2 windows": {"family": "qwen2", "n_layers": 3, "window": 10},
    "qwen3 windows": {"family": "qwen3", "n_layers": 3, "window": 10},
    "gemma3 period": {"family": "gemma3", "n_layers": 7, "period": 3, "window": 5},
    "gemma3 no whole layer": {"family": "gemma3", "period": 6},
    "gemma3 scale": {"family": "gemma3", "query_scalar": 20},
    "gemma3 local base": {"family": "gemma3", "local_theta": 700.0},
}


def shape_of(name: str) -> checkpoints.Shape:
    if name in OWN_SHAPES:
        return checkpoints.family_shape(**OWN_SHAPES[name])
    family, _, kind = name.partition(" ")
    return checkpoints.family_shape(family, **SHAPES[kind])


def cases(*kinds: str) -> list[str]:
    return [f"{family} {kind}" for family in checkpoints.FAMILIES for kind in kinds]


SCALINGS = [name for name in checkpoints.ROPES if name != "default"]
TOKENS = np.random.default_rng(3).integers(0, 300, 48)


def transformers_logits(directory: Path) -> NDArray[np.float32]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        logits: NDArray[np.float32] = (
            model(torch.from_numpy(TOKENS[None])).logits[0].numpy()
        )
    assert logits.std() > 1  # otherwise the tolerances would say little
    return logits


def our_logits(weights: WeightSet) -> NDArray[np.float32]:
    hidden, _ = forward.hidden_states(weights, TOKENS[None])
    return forward.logits(weights, hidden[0])


def distance(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference in standard deviations."""
    return float(np.abs(got - expected).max() / expected.std())


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        *((name, "default") for name in (*cases(*SHAPES), *OWN_SHAPES)),
        *((name, rope) for rope in SCALINGS for name in cases("gqa tied")),
    ],
)
def test_f32_equals_transformers(tmp_path: Path, name: str, rope: str) -> None:
    shape = shape_of(name)
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape, rope=rope)
    expected = transformers_logits(source)
    weights = sources.read(source)
    assert distance(our_logits(weights), expected) < F32
    gguf_path = tmp_path / "target.gguf"
    if is_refused(name, rope):
        with pytest.raises(UnsupportedError, match="llama.cpp knows only"):
            gguf_file.write(weights, "f32", gguf_path)
    else:
        gguf_file.write(weights, "f32", gguf_path)
        assert distance(our_logits(sources.read(gguf_path)), expected) < F32
    for attention in onnx_graph.ATTENTIONS:
        path = tmp_path / f"{attention}.onnx"
        onnx_graph.write(weights, path, attention=attention)
        got = Graph(path).forward(TOKENS)["logits"]
        assert distance(got, expected) < F32, attention


def is_refused(name: str, rope: str) -> bool:
    """Whether llama.cpp has no way to compute this."""
    family = name.split()[0]
    has_own = family.startswith("qwen") and "windows" in name
    return has_own or "scale" in name or rope not in families.ROPES[family]


def spread(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Root mean square difference in standard deviations."""
    return float(np.sqrt(np.mean((got - expected) ** 2)) / expected.std())


def in_gguf(names: list[str], ropes: list[str]) -> list[tuple[str, str]]:
    pairs = [(name, rope) for name in names for rope in ropes]
    return [pair for pair in pairs if not is_refused(*pair)]


@pytest.mark.parametrize(
    ("name", "rope"),
    in_gguf([*cases("gqa tied", "mha untied"), *OWN_SHAPES], ["default"])
    + in_gguf(cases("gqa tied"), SCALINGS),
)
def test_llama_cpp_computes_the_same_from_our_gguf(
    tmp_path: Path, name: str, rope: str
) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape_of(name), rope=rope)
    path = tmp_path / "target.gguf"
    gguf_file.write(sources.read(source), "f32", path)
    got = llama.logits(path, TOKENS.tolist())
    expected = transformers_logits(source)
    is_exact = "gemma3" not in name
    assert distance(got, expected) < (F32 if is_exact else TABLE)
    assert spread(got, expected) < (F32 if is_exact else F16)


@pytest.mark.parametrize("name", cases("gqa tied", "mha untied"))
def test_llama_cpp_in_float16_stays_near(tmp_path: Path, name: str) -> None:
    """It rounds activations too, on average as much as the limit allows."""
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape_of(name), dtype="F16")
    path = tmp_path / "target.gguf"
    gguf_file.write(sources.read(source), "f16", path)
    got = llama.logits(path, TOKENS.tolist())
    assert spread(got, transformers_logits(source)) < F16


@pytest.mark.parametrize("name", cases("gqa tied", "mha untied", "one kv head"))
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_f16_equals_transformers(tmp_path: Path, name: str, dtype: str) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape_of(name), dtype=dtype)
    expected = transformers_logits(source)
    weights = sources.read(source)
    gguf_path, path = tmp_path / "target.gguf", tmp_path / "target.onnx"
    gguf_file.write(weights, "f16", gguf_path)
    assert distance(our_logits(sources.read(gguf_path)), expected) < F16
    for quant in ("f16", None):
        onnx_graph.write(weights, path, quant=quant)
        assert distance(Graph(path).forward(TOKENS)["logits"], expected) < F16


def test_f32_rounded_to_f16_stays_near_transformers(tmp_path: Path) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf")
    weights = sources.read(source)
    path, gguf_path = tmp_path / "target.onnx", tmp_path / "target.gguf"
    gguf_file.write(weights, "f16", gguf_path)
    onnx_graph.write(weights, path, quant="f16")
    expected = transformers_logits(source)
    rounded = our_logits(sources.read(gguf_path))
    assert spread(rounded, expected) < F16
    assert distance(Graph(path).forward(TOKENS)["logits"], rounded) < F32


def mutated(weights: WeightSet, changes: dict[str, Tensor]) -> WeightSet:
    return replace(weights, tensors={**weights.tensors, **changes})


def configured(weights: WeightSet, **changes: Any) -> WeightSet:
    return replace(weights, config=replace(weights.config, **changes))


def swap_pairing(weights: WeightSet, part: str) -> WeightSet:
    """Rows of one head-pairing read as if they were the other."""
    config = weights.config
    name = f"blk.0.attn_{part}"
    tensor = weights.tensors[name]
    heads = config.n_heads if part == "q" else config.n_kv_heads

    def load() -> NDArray[np.float32]:
        return checkpoints.interleave(tensor.load_f32(), heads)

    return mutated(weights, {name: replace(tensor, load_f32=load)})


def swap(weights: WeightSet, a: str, b: str) -> WeightSet:
    tensors = weights.tensors
    first, second = replace(tensors[b], name=a), replace(tensors[a], name=b)
    return mutated(weights, {a: first, b: second})


def without(weights: WeightSet, *names: str) -> WeightSet:
    """Without tensors that a family need not have."""
    left = {k: v for k, v in weights.tensors.items() if k not in names}
    assert len(left) == len(weights.tensors) - len(names)
    return replace(weights, tensors=left)


def plain_norm(weights: WeightSet, name: str) -> WeightSet:
    """A norm whose weights are taken as a checkpoint stores them, not 1 more."""
    tensor = weights.tensors[name]
    return mutated(
        weights, {name: replace(tensor, load_f32=lambda: tensor.load_f32() - 1)}
    )


def other_theta(weights: WeightSet) -> WeightSet:
    rope = weights.config.rope
    changed = replace(rope, theta=2e4, inv_freq=base_frequencies(2e4, rope.dim))
    return configured(weights, rope=changed)


Mutation = Callable[[WeightSet], WeightSet]
MUTATIONS: dict[str, Mutation] = {
    "rope pairing of q": lambda w: swap_pairing(w, "q"),
    "rope pairing of k": lambda w: swap_pairing(w, "k"),
    "norms of a layer": lambda w: swap(w, "blk.0.attn_norm", "blk.0.ffn_norm"),
    "final norm": lambda w: swap(w, "output_norm", "blk.1.attn_norm"),
    "gate and up": lambda w: swap(w, "blk.1.ffn_gate", "blk.1.ffn_up"),
    "k and v": lambda w: swap(w, "blk.0.attn_k", "blk.0.attn_v"),
    "order of layers": lambda w: swap(w, "blk.0.ffn_down", "blk.1.ffn_down"),
    "rope theta": other_theta,
}
HEAD_NORMS = ("blk.0.attn_q_norm", "blk.0.attn_k_norm")
FURTHER: dict[str, dict[str, Mutation]] = {
    "llama": {},
    "qwen2": {
        "no biases": lambda w: without(
            w, *(f"blk.0.attn_{part}.bias" for part in "qkv")
        ),
        "biases of k and v": lambda w: swap(
            w, "blk.0.attn_k.bias", "blk.0.attn_v.bias"
        ),
    },
    "qwen3": {
        "no norms of heads": lambda w: without(w, *HEAD_NORMS),
        "norms of q and k": lambda w: swap(w, *HEAD_NORMS),
    },
    "gemma3": {
        "no norms of heads": lambda w: without(w, *HEAD_NORMS),
        "no norm behind attention": lambda w: without(w, "blk.0.post_attention_norm"),
        "no norm behind the block": lambda w: without(w, "blk.1.post_ffw_norm"),
        "norms around attention": lambda w: swap(
            w, "blk.0.post_attention_norm", "blk.0.attn_norm"
        ),
        "norm without its 1": lambda w: plain_norm(w, "blk.1.ffn_norm"),
        "silu": lambda w: configured(w, activation="silu"),
        "no embedding scale": lambda w: configured(w, embed_scale=1.0),
        "window + 1": lambda w: configured(w, window=w.config.window + 1),
        "window - 1": lambda w: configured(w, window=w.config.window - 1),
        "no windows": lambda w: configured(w, window=1000),
        "other layers": lambda w: configured(w, windowed=frozenset({1, 2})),
        "ropes": lambda w: configured(
            w, rope=w.config.local_rope, local_rope=w.config.rope
        ),
        "one rope": lambda w: configured(w, local_rope=None),
    },
}


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, WeightSet, NDArray[np.float32]]:
    """A family's name, a checkpoint's weights, and what transformers answers."""
    shape = checkpoints.family_shape(request.param)
    path = tmp_path_factory.mktemp("family") / "hf"
    source = checkpoints.hf_checkpoint(path, shape)
    return request.param, sources.read(source), transformers_logits(source)


def test_the_comparison_fails_when_something_is_swapped(
    tmp_path: Path, family: tuple[str, WeightSet, NDArray[np.float32]]
) -> None:
    name, weights, expected = family
    path = tmp_path / "target.onnx"
    scale = 1.1 * weights.config.attention_scale
    for mutation, change in {
        **MUTATIONS,
        **FURTHER[name],
        "scale": lambda w: configured(w, attention_scale=scale),
    }.items():
        wrong = change(weights)
        onnx_graph.write(wrong, path)
        for got in (our_logits(wrong), Graph(path).forward(TOKENS)["logits"]):
            assert distance(got, expected) > 100 * F16, mutation


@pytest.mark.parametrize("name", checkpoints.FAMILIES)
def test_hidden_states_and_taps_equal_transformers(tmp_path: Path, name: str) -> None:
    shape = checkpoints.family_shape(name, n_layers=2)
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape)
    weights = sources.read(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        states = model(
            torch.from_numpy(TOKENS[None]), output_hidden_states=True
        ).hidden_states
    hidden, taps = forward.hidden_states(weights, TOKENS[None], taps=(0, 1, 2))
    path = tmp_path / "target.onnx"
    onnx_graph.write(weights, path, taps=(0, 1, 2))
    got = Graph(path).forward(TOKENS, rows=[0])
    for index, state in enumerate(states):
        expected = state[0].numpy()
        assert distance(taps[index][0], expected) < F32
        assert distance(got[f"tap_{index}"], expected) < F32
    assert distance(got["hidden"], states[-1][0].numpy()) < F32
    np.testing.assert_array_equal(hidden[0], taps[2][0])


def test_windows_are_independent(tmp_path: Path) -> None:
    weights = sources.read(checkpoints.hf_checkpoint(tmp_path / "hf"))
    windows = TOKENS.reshape(3, 16)
    together, _ = forward.hidden_states(weights, windows)
    for window, expected in zip(windows, together, strict=True):
        alone, _ = forward.hidden_states(weights, window[None])
        np.testing.assert_allclose(alone[0], expected, rtol=0, atol=1e-5)
