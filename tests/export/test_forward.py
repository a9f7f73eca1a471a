"""The numpy forward, the ONNX graphs and both containers against transformers.

Tiny random llama checkpoints; tolerances are shares of the logits' standard deviation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from edgespec_export import forward, gguf_file, onnx_graph, sources
from edgespec_export.rope import base_frequencies
from edgespec_export.weights import Tensor, WeightSet
from tests.export import checkpoints, llama
from tests.export.graphs import Graph

F32, F16 = 1e-4, 2e-3
SHAPES = {
    "gqa tied": checkpoints.Shape(),
    "gqa untied": checkpoints.Shape(is_tied=False),
    "mha tied": checkpoints.Shape(n_kv_heads=4),
    "mha untied": checkpoints.Shape(n_kv_heads=4, is_tied=False),
    "one kv head": checkpoints.Shape(n_kv_heads=1, head_dim=32),
}
TOKENS = np.random.default_rng(3).integers(0, 300, 48)


def transformers_logits(directory: Path) -> NDArray[np.float32]:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
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


@pytest.mark.parametrize("rope", checkpoints.ROPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_f32_equals_transformers(tmp_path: Path, shape: str, rope: str) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf", SHAPES[shape], rope=rope)
    expected = transformers_logits(source)
    weights = sources.read(source)
    assert distance(our_logits(weights), expected) < F32
    gguf_path = tmp_path / "target.gguf"
    gguf_file.write(weights, "f32", gguf_path)
    assert distance(our_logits(sources.read(gguf_path)), expected) < F32
    for attention in onnx_graph.ATTENTIONS:
        path = tmp_path / f"{attention}.onnx"
        onnx_graph.write(weights, path, attention=attention)
        got = Graph(path).forward(TOKENS)["logits"]
        assert distance(got, expected) < F32, attention


def spread(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Root mean square difference in standard deviations."""
    return float(np.sqrt(np.mean((got - expected) ** 2)) / expected.std())


@pytest.mark.parametrize("rope", ["default", "llama3"])
@pytest.mark.parametrize("shape", ["gqa tied", "mha untied"])
@pytest.mark.parametrize(("quant", "limit"), [("f32", F32), ("f16", F16)])
def test_llama_cpp_computes_the_same_from_our_gguf(
    tmp_path: Path, shape: str, rope: str, quant: str, limit: float
) -> None:
    source = checkpoints.hf_checkpoint(
        tmp_path / "hf", SHAPES[shape], rope=rope, dtype=quant.upper()
    )
    path = tmp_path / "target.gguf"
    gguf_file.write(sources.read(source), quant, path)
    got = llama.logits(path, TOKENS.tolist())
    # llama.cpp rounds activations to float16 too, on average as much as the limit
    # allows
    measure = distance if quant == "f32" else spread
    assert measure(got, transformers_logits(source)) < limit


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_f16_equals_transformers(tmp_path: Path, shape: str, dtype: str) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf", SHAPES[shape], dtype=dtype)
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


MUTATIONS = {
    "rope pairing of q": lambda w: swap_pairing(w, "q"),
    "rope pairing of k": lambda w: swap_pairing(w, "k"),
    "norms of a layer": lambda w: swap(w, "blk.0.attn_norm", "blk.0.ffn_norm"),
    "final norm": lambda w: swap(w, "output_norm", "blk.1.attn_norm"),
    "gate and up": lambda w: swap(w, "blk.1.ffn_gate", "blk.1.ffn_up"),
    "k and v": lambda w: swap(w, "blk.0.attn_k", "blk.0.attn_v"),
    "order of layers": lambda w: swap(w, "blk.0.ffn_down", "blk.1.ffn_down"),
    "rope theta": lambda w: replace(
        w,
        config=replace(
            w.config,
            rope=replace(w.config.rope, theta=2e4, inv_freq=base_frequencies(2e4, 16)),
        ),
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_fails_when_something_is_swapped(
    tmp_path: Path, mutation: str
) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf")
    expected = transformers_logits(source)
    wrong = MUTATIONS[mutation](sources.read(source))
    path = tmp_path / "target.onnx"
    onnx_graph.write(wrong, path)
    for got in (our_logits(wrong), Graph(path).forward(TOKENS)["logits"]):
        assert distance(got, expected) > 100 * F16


def test_hidden_states_and_taps_equal_transformers(tmp_path: Path) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf")
    weights = sources.read(source)
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
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
