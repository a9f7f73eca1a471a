"""Target graphs: trees against sequential decoding, ops against numpy, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.errors import UnsupportedError, UsageError
from edgespec_export import forward, nbits, onnx_graph, onnx_ops, quantize, sources
from edgespec_export.onnx_attention import rope_tables
from edgespec_export.onnx_store import Store
from edgespec_export.onnx_weights import Matrix
from edgespec_export.weights import WeightSet
from tests.export import checkpoints
from tests.export.graphs import Graph, random_parent, tree

ATTENTIONS = tuple(onnx_graph.ATTENTIONS)
RNG = np.random.default_rng(11)
PROMPT = RNG.integers(0, 300, 70)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> WeightSet:
    directory = tmp_path_factory.mktemp("hf")
    return sources.read(checkpoints.hf_checkpoint(directory / "hf"))


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def of_family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> WeightSet:
    """Weights of each family; the window of gemma3 is shorter than the prompts."""
    shape = checkpoints.family_shape(request.param)
    directory = tmp_path_factory.mktemp("hf")
    return sources.read(checkpoints.hf_checkpoint(directory / "hf", shape))


@pytest.fixture(scope="module", params=ATTENTIONS)
def graph(
    request: pytest.FixtureRequest,
    of_family: WeightSet,
    tmp_path_factory: pytest.TempPathFactory,
) -> Graph:
    path = tmp_path_factory.mktemp("graph") / "target.onnx"
    onnx_graph.write(of_family, path, attention=request.param)
    return Graph(path)


@pytest.mark.parametrize("past", [1, 2, 7, 63, 70])
@pytest.mark.parametrize("n", [3, 8, 16])
def test_tree_rows_equal_sequential_decoding(graph: Graph, past: int, n: int) -> None:
    rng = np.random.default_rng(past * 100 + n)
    parent = random_parent(rng, n)
    mask, depth = tree(parent)
    tokens = rng.integers(0, 300, n)
    graph.length = 0
    graph.prefill(PROMPT[:past])
    got = graph.forward(tokens, mask, depth)["logits"]
    for row in range(n):
        graph.length = past
        for ancestor in np.flatnonzero(mask[row]):
            expected = graph.forward([tokens[ancestor]])["logits"][0]
            graph.length += 1
        assert np.abs(got[row] - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("past", [0, 1, 30])
def test_tree_rows_equal_the_numpy_forward(
    graph: Graph, of_family: WeightSet, past: int, request: pytest.FixtureRequest
) -> None:
    if past == 0 and "gqa" in request.node.callspec.id:
        # the fused op numbers the rows of a first forward by index: chains only
        parent = [-1, 0, 1, 2, 3, 4]
    else:
        parent = [-1, 0, 0, 1, 1, 2]
    mask, depth = tree(parent)
    tokens = RNG.integers(0, 300, len(parent))
    graph.length = 0
    graph.prefill(PROMPT[:past])
    got = graph.forward(tokens, mask, depth)
    visible = np.tri(past + len(parent), dtype=bool)
    visible[past:, past:] = mask
    hidden, _ = forward.hidden_states(
        of_family,
        np.concatenate([PROMPT[:past], tokens])[None],
        positions=np.concatenate([np.arange(past), past + depth]),
        visible=visible,
    )
    expected = forward.logits(of_family, hidden[0, past:])
    assert np.abs(got["logits"] - expected).max() < 1e-4 * expected.std()
    assert np.abs(got["hidden"] - hidden[0, past:]).max() < 1e-4 * hidden.std()


def test_a_wrong_depth_or_mask_is_noticed(graph: Graph) -> None:
    parent = [-1, 0, 0, 1, 1, 2]
    mask, depth = tree(parent)
    tokens = RNG.integers(0, 300, len(parent))
    graph.length = 0
    graph.prefill(PROMPT[:20])
    expected = graph.forward(tokens, mask, depth)["logits"]
    chain = np.tri(len(parent), dtype=bool)
    for wrong in ((chain, depth), (mask, np.arange(len(parent)))):
        got = graph.forward(tokens, *wrong)["logits"]
        assert np.abs(got - expected).max() > 0.05 * expected.std()


def test_c05_a_path_with_gaps_commits_like_rows_one_by_one(graph: Graph) -> None:
    parent = [-1, 0, 0, 0, 1, 2, 4, 5, 5, 7, 2, 10, 10, 3, 13, 9]
    path = [0, 2, 5, 7]
    mask, depth = tree(parent)
    tokens = RNG.integers(0, 300, len(parent))
    past = 12
    graph.length = 0
    graph.prefill(PROMPT[:past])
    graph.forward(tokens, mask, depth)
    rows = [past + row for row in path]
    for buffer in graph.buffers.values():
        buffer[:, :, past : past + len(path)] = buffer[:, :, rows]
    committed = {k: v[:, :, : past + 4].copy() for k, v in graph.buffers.items()}
    graph.length = past + len(path)
    after = graph.forward([5])["logits"]
    graph.length = past
    for row in path:
        graph.forward([tokens[row]])
        graph.length += 1
    for name, buffer in graph.buffers.items():
        rows_one_by_one = buffer[:, :, : past + 4]
        np.testing.assert_allclose(committed[name], rows_one_by_one, atol=2e-5)
    assert np.abs(graph.forward([5])["logits"] - after).max() < 1e-4 * after.std()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q4_0"),
        ("llama", "Q4_1"),
        ("llama", "Q8_0"),
        ("qwen2", "Q4_1"),
        ("qwen3", "Q4_0"),
        ("gemma3", "Q4_0"),
        ("gemma3", "Q8_0"),
    ],
)
def test_explicit_rows_are_the_same_bits_in_a_tree_and_in_a_chain(
    tmp_path: Path, family: str, kind: str
) -> None:
    """With int8 activations; at two rows or more, one row runs other kernels."""
    shape = checkpoints.family_shape(family)
    source = checkpoints.gguf_checkpoint(tmp_path / "s.gguf", shape, kind=kind)
    path = tmp_path / "target.onnx"
    onnx_graph.write(sources.read(source), path, attention="explicit")
    graph = Graph(path)
    for past in (1, 5, 31, 60):
        rng = np.random.default_rng(past)
        mask, depth = tree(random_parent(rng, 12))
        tokens = rng.integers(0, 300, 12)
        graph.length = 0
        graph.prefill(PROMPT[: max(2, past)])
        graph.length = past
        got = graph.forward(tokens, mask, depth)["logits"]
        for row in range(12):
            graph.length = past
            for ancestor in np.flatnonzero(mask[row]):
                expected = graph.forward([tokens[ancestor], 0])["logits"][0]
                graph.length += 1
            np.testing.assert_array_equal(got[row], expected)


def test_logit_rows_pick_rows(graph: Graph) -> None:
    graph.length = 0
    everything = graph.forward(PROMPT[:9])["logits"]
    some = graph.forward(PROMPT[:9], rows=[8, 2])["logits"]
    np.testing.assert_allclose(some, everything[[8, 2]], atol=1e-5)


@pytest.mark.parametrize("embedding", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_every_block_type_computes_its_dequantised_weights(
    tmp_path: Path, kind: str, embedding: str
) -> None:
    source = checkpoints.gguf_checkpoint(
        tmp_path / "s.gguf", kind=kind, embedding=embedding
    )
    weights = sources.read(source)
    hidden, _ = forward.hidden_states(weights, PROMPT[None, :24])
    expected = forward.logits(weights, hidden[0])
    path = tmp_path / "target.onnx"
    report = onnx_graph.write(weights, path, accuracy_level=0)
    got = Graph(path).forward(PROMPT[:24])["logits"]
    assert np.abs(got - expected).max() < 2e-4 * expected.std()
    assert not report.errors
    onnx_graph.write(weights, path, accuracy_level=4)
    got = Graph(path).forward(PROMPT[:24])["logits"]
    assert np.sqrt(np.mean((got - expected) ** 2)) < 0.06 * expected.std()


def test_mixed_types_in_one_layer(tmp_path: Path, weights: WeightSet) -> None:
    tensors = dict(weights.tensors)
    for name, kind in (("attn_k", "Q8_0"), ("attn_v", "Q4_0"), ("ffn_up", "Q4_1")):
        tensor = tensors[f"blk.1.{name}"]
        raw = quantize.quantize(kind, tensor.load_f32())
        values = quantize.dequantize(kind, raw, tensor.shape[1])
        tensors[tensor.name] = replace(
            tensor,
            kind=kind,
            load_raw=lambda raw=raw: raw,
            load_f32=lambda values=values: values,
        )
    mixed = replace(weights, tensors=tensors)
    path = tmp_path / "target.onnx"
    report = onnx_graph.write(mixed, path, accuracy_level=0)
    assert report.counts["int8"] == report.counts["int4"] == 1
    hidden, _ = forward.hidden_states(mixed, PROMPT[None, :24])
    expected = forward.logits(mixed, hidden[0])
    got = Graph(path).forward(PROMPT[:24])["logits"]
    assert np.abs(got - expected).max() < 2e-4 * expected.std()


def test_types_without_exact_form_become_eight_bits(tmp_path: Path) -> None:
    source = checkpoints.gguf_checkpoint(tmp_path / "s.gguf", kind="Q5_0")
    report = onnx_graph.write(sources.read(source), tmp_path / "target.onnx")
    assert report.counts == {"int8": 15}
    assert any("Q5_0 has no exact form" in note for note in report.notes)
    assert 0 < max(report.errors.values()) < 0.01


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_embeddings_are_stored_once(tmp_path: Path, is_tied: bool) -> None:
    shape = checkpoints.Shape(is_tied=is_tied)
    source = checkpoints.gguf_checkpoint(tmp_path / "s.gguf", shape)
    path = tmp_path / "target.onnx"
    onnx_graph.write(sources.read(source), path)
    rows = [t for t in onnx.load(path).graph.initializer if t.dims[:1] == [320]]
    codes = [t for t in rows if t.data_type == TensorProto.UINT8]
    assert len(codes) == (1 if is_tied else 2)


def test_big_graphs_keep_their_weights_outside(tmp_path: Path) -> None:
    shape = checkpoints.Shape(hidden=256, ffn=512, n_layers=1)
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape)
    path = tmp_path / "target.onnx"
    report = onnx_graph.write(sources.read(source), path)
    data = tmp_path / "target.onnx.data"
    assert data.stat().st_size > 1 << 20
    assert path.stat().st_size < 1 << 17
    assert report.bytes == path.stat().st_size + data.stat().st_size
    assert Graph(path).forward([1, 2])["logits"].shape == (2, 320)


def test_small_graphs_are_one_file(tmp_path: Path, weights: WeightSet) -> None:
    onnx_graph.write(weights, tmp_path / "target.onnx", quant="q4_0")
    assert [p.name for p in tmp_path.iterdir()] == ["target.onnx"]


def test_refused_arguments_leave_nothing(tmp_path: Path, weights: WeightSet) -> None:
    path = tmp_path / "target.onnx"
    odd = checkpoints.Shape(hidden=64, ffn=80)
    ragged = sources.read(checkpoints.hf_checkpoint(tmp_path / "hf", odd))
    partial = replace(
        weights,
        config=replace(weights.config, rope=replace(weights.config.rope, dim=8)),
    )
    cases: list[tuple[WeightSet, dict[str, Any], type[Exception], str]] = [
        (weights, {"attention": "flash"}, UsageError, "expected gqa or explicit"),
        (weights, {"taps": (3,)}, UsageError, "tap 3: expected distinct indices"),
        (weights, {"taps": (1, 1)}, UsageError, "tap 1: expected distinct"),
        (partial, {}, UnsupportedError, "rotary dimension 8 of heads of 16"),
        (ragged, {"quant": "q4_0"}, UnsupportedError, "ffn_down: rows of 80"),
    ]
    for source, arguments, error, message in cases:
        with pytest.raises(error, match=message):
            onnx_graph.write(source, path, **arguments)
        assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def run(
    tmp_path: Path,
    ops: onnx_ops.Ops,
    output: str,
    inputs: dict[str, NDArray[Any]],
) -> NDArray[np.float32]:
    """Runs the nodes collected in ops."""
    ops.store.close()
    values = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in inputs.items()
    ]
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    graph = helper.make_graph(ops.nodes, "op", values, [result], ops.store.initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    got: NDArray[np.float32] = session.run([output], inputs)[0]
    return got


@pytest.mark.parametrize("block", nbits.BLOCK_SIZES)
@pytest.mark.parametrize("level", [0, 4])
def test_c08_eight_bit_matmul(tmp_path: Path, block: int, level: int) -> None:
    for shift in (0, 0.2):
        values = (RNG.standard_normal((48, 512)) * 0.1 + shift).astype(np.float32)
        coded = nbits.quantize8(values, block)
        assert (coded.zeros is not None) == bool(shift)
        check_matmul(tmp_path, coded, level)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("level", [0, 4])
def test_c08_ggml_matmul(tmp_path: Path, kind: str, level: int) -> None:
    values = RNG.standard_normal((48, 512)).astype(np.float32)
    coded = nbits.from_ggml(kind, quantize.quantize(kind, values))
    check_matmul(tmp_path, coded, level)


def check_matmul(tmp_path: Path, coded: nbits.NBits, level: int) -> None:
    ops = onnx_ops.Ops(Store(tmp_path / "data"), level)
    ops.add_matrix("w", Matrix(coded, None, "", "", True))
    x = RNG.standard_normal((5, 512)).astype(np.float32)
    got = run(tmp_path, ops, ops.matmul("x", "w", "w"), {"x": x})
    expected = x.astype(np.float64) @ coded.dequantize().T
    limit = 1e-5 if level == 0 else 0.05
    assert np.abs(got - expected).max() < limit * expected.std()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_c08_embedding_lookup(tmp_path: Path, kind: str) -> None:
    raw = quantize.quantize(kind, RNG.standard_normal((40, 64)).astype(np.float32))
    ops = onnx_ops.Ops(Store(tmp_path / "data"), 4)
    ops.add_matrix("w", Matrix(nbits.from_ggml(kind, raw), None, "", "", True))
    ids = np.array([3, 0, 39, 3])
    got = run(tmp_path, ops, ops.embed("ids", "w"), {"ids": ids})
    expected = quantize.dequantize(kind, raw, 64)[ids]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_c08_rms_norms(tmp_path: Path) -> None:
    ops = onnx_ops.Ops(Store(tmp_path / "data"), 4)
    x, skip = RNG.standard_normal((2, 3, 64)).astype(np.float32) * 5
    weight = RNG.standard_normal(64).astype(np.float32)
    ops.store.add("g", weight)

    def norm(v: NDArray[np.float32]) -> NDArray[np.float64]:
        v64 = v.astype(np.float64)
        return v64 / np.sqrt((v64**2).mean(axis=1, keepdims=True) + 1e-3) * weight

    plain = ops.rms_norm("x", "g", 1e-3)
    normed, total = ops.add_rms_norm(plain, "skip", "g", 1e-3)
    joined = ops.node("Concat", [plain, normed, total], axis=0)
    got = run(tmp_path, ops, joined, {"x": x, "skip": skip})
    added = norm(x).astype(np.float32) + skip
    np.testing.assert_allclose(got[:3], norm(x), atol=1e-5)
    np.testing.assert_allclose(got[3:6], norm(added), atol=1e-5)
    np.testing.assert_allclose(got[6:], added, atol=1e-5)


def test_c08_geglu(tmp_path: Path) -> None:
    ops = onnx_ops.Ops(Store(tmp_path / "data"), 4)
    both = RNG.standard_normal((3, 64)).astype(np.float32) * 4
    got = run(tmp_path, ops, ops.gated("x", "gelu"), {"x": both})
    gate, up = both[:, :32].astype(np.float64), both[:, 32:]
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    expected = gate / 2 * (1 + np.tanh(inner)) * up
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_c08_swiglu(tmp_path: Path) -> None:
    ops = onnx_ops.Ops(Store(tmp_path / "data"), 4)
    both = RNG.standard_normal((3, 64)).astype(np.float32) * 4
    got = run(tmp_path, ops, ops.gated("x", "silu"), {"x": both})
    gate, up = both[:, :32], both[:, 32:]
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, atol=2e-5)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_c08_attention_with_a_tree(
    tmp_path: Path, weights: WeightSet, name: str
) -> None:
    config = weights.config
    heads, kv, width = config.n_heads, config.n_kv_heads, config.head_dim
    mask, depth = tree([-1, 0, 0, 2, 1])
    past, n = 9, 5
    ops = onnx_ops.Ops(Store(tmp_path / "data"), 4)
    attention = onnx_graph.ATTENTIONS[name](ops, config)
    output = attention(0, "qkv")
    qkv = RNG.standard_normal((n, (heads + 2 * kv) * width)).astype(np.float32)
    key, value = RNG.standard_normal((2, 1, kv, 32, width)).astype(np.float32)
    inputs = {
        "qkv": qkv,
        "tree_mask": mask,
        "tree_depth": depth,
        "past_len": np.array([past]),
        "past_key_0": key,
        "past_value_0": value,
    }
    got = run(tmp_path, ops, output, inputs)
    cos, sin = rope_tables(config.rope, 64)

    def rotate(x: NDArray[np.float32]) -> NDArray[np.float32]:
        low, high = np.split(x, 2, axis=-1)
        c, s = cos[past + depth][:, None], sin[past + depth][:, None]
        return np.concatenate([low * c - high * s, high * c + low * s], axis=-1)

    q, k, v = np.split(qkv.reshape(n, -1, width), [heads, heads + kv], axis=1)
    q, k = rotate(q), rotate(k)
    expected = np.empty((n, heads, width))
    for head in range(heads):
        group = head // (heads // kv)
        for row in range(n):
            keys = np.concatenate([key[0, group, :past], k[mask[row], group]])
            values = np.concatenate([value[0, group, :past], v[mask[row], group]])
            score = np.exp(keys @ q[row, head] / np.sqrt(width))
            expected[row, head] = score @ values / score.sum()
    np.testing.assert_allclose(got, expected.reshape(n, -1), atol=1e-5)
