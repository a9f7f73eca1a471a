"""The check passes what was written right and fails what was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edgespec.errors import FormatError
from edgespec_export import check, gguf_file, onnx_graph, reference, sources
from edgespec_export.weights import WeightSet
from tests.export import checkpoints
from tests.export.test_forward import MUTATIONS

TEXT = checkpoints._CORPUS * 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.hf_checkpoint(tmp_path_factory.mktemp("check") / "hf")


@pytest.fixture(scope="module")
def weights(source: Path) -> WeightSet:
    return sources.read(source)


@pytest.fixture(scope="module")
def truth(weights: WeightSet) -> reference.Reference:
    return reference.of_weights(weights, check.windows(weights, TEXT, 128))


def naive_kl(
    expected: NDArray[np.float32], got: NDArray[np.float32]
) -> NDArray[np.float64]:
    p = np.exp(expected.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    q = np.exp(got.astype(np.float64))
    q /= q.sum(axis=1, keepdims=True)
    kl: NDArray[np.float64] = (p * np.log(p / q)).sum(axis=1)
    return kl


def test_compare_is_the_textbook_divergence() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 20, 50)).astype(np.float32) * 3
    kl, is_same, best = check.compare(a, b)
    np.testing.assert_allclose(kl, naive_kl(a, b), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(best, b.argmax(axis=1))
    np.testing.assert_array_equal(is_same, a.argmax(axis=1) == b.argmax(axis=1))
    assert np.abs(check.compare(a, a + 7)[0]).max() < 1e-5


def test_windows(weights: WeightSet) -> None:
    short = replace(weights, config=replace(weights.config, max_position=24))
    everything = check.windows(weights, TEXT, 100)
    assert everything.shape == (1, 100)
    cut = check.windows(short, TEXT, 100)
    assert cut.shape == (4, 24)
    np.testing.assert_array_equal(cut.reshape(-1), everything[0, :96])
    with_bos = check.windows(replace(short, add_bos=True, bos_id=1), TEXT, 100)
    assert with_bos.shape == (4, 24)
    assert (with_bos[:, 0] == 1).all()
    np.testing.assert_array_equal(with_bos[:, 1:].reshape(-1), everything[0, :92])
    with pytest.raises(FormatError, match="at least 2 tokens"):
        check.windows(weights, "")


def test_the_text_is_long_enough() -> None:
    assert len(check.TEXT.read_text(encoding="utf-8").split()) > 6000


def test_transformers_and_numpy_agree_on_the_source(
    source: Path, weights: WeightSet, truth: reference.Reference
) -> None:
    other = reference.of_source(weights, source, truth.windows)
    assert (other.by, truth.by) == ("transformers", "numpy")
    a, b = other.logits(0, slice(0, 128)), truth.logits(0, slice(0, 128))
    assert np.abs(a - b).max() < 1e-4 * a.std()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_every_family_against_transformers_and_itself(
    tmp_path: Path, family: str
) -> None:
    shape = checkpoints.family_shape(family)
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape)
    weights = sources.read(source)
    truth = reference.of_source(weights, source, check.windows(weights, TEXT, 128))
    assert truth.by == "transformers"
    path, gguf_path = tmp_path / "target.onnx", tmp_path / "target.gguf"
    report = onnx_graph.write(weights, path, quant="q8_0")
    gguf_file.write(weights, "q8_0", gguf_path)
    results = [check.check_onnx(path, weights, truth, report.errors)]
    results.append(check.check_gguf(gguf_path, weights, truth))
    for result in results:
        assert 0 < result.kl < check.MAX_KL["q8_0"]
    # a GGUF source written as it is needs no run to be found the same
    stored = sources.read(gguf_path)
    gguf_file.write(stored, None, tmp_path / "again.gguf")
    own = reference.of_weights(stored, truth.windows)
    again = check.check_gguf(tmp_path / "again.gguf", stored, own)
    assert (again.kl, again.top1, again.errors) == (0, 1, {})


@pytest.mark.parametrize("change", ["window", "windowed", "local_rope"])
def test_another_window_is_another_model(tmp_path: Path, change: str) -> None:
    shape = checkpoints.family_shape("gemma3")
    path = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", shape, kind="F32")
    weights = sources.read(path)
    values = {"window": 5, "windowed": frozenset({0}), "local_rope": None}
    wrong = replace(weights, config=replace(weights.config, **{change: values[change]}))
    truth = reference.of_weights(wrong, check.windows(weights, TEXT, 128))
    assert check.check_gguf(path, wrong, truth).kl > 0.05


def test_a_config_that_transformers_reads_otherwise_is_refused(
    source: Path, weights: WeightSet, truth: reference.Reference
) -> None:
    wrong = replace(weights, config=replace(weights.config, n_heads=2))
    with pytest.raises(FormatError, match="num_attention_heads: transformers reads 4"):
        reference.of_source(wrong, source, truth.windows)


@pytest.mark.parametrize("attention", onnx_graph.ATTENTIONS)
def test_f32_graph_is_exact(
    tmp_path: Path, weights: WeightSet, truth: reference.Reference, attention: str
) -> None:
    path = tmp_path / "target.onnx"
    report = onnx_graph.write(weights, path, attention=attention)
    result = check.check_onnx(path, weights, truth, report.errors)
    assert result.kl < 1e-6
    assert result.top1 == 1
    assert (result.tokens, result.errors, result.flips) == (128, {}, None)


@pytest.mark.parametrize("quant", ["q8_0", "q4_1", "q4_0", "f16"])
def test_both_containers_lose_about_the_same(
    tmp_path: Path, weights: WeightSet, truth: reference.Reference, quant: str
) -> None:
    path, gguf_path = tmp_path / "target.onnx", tmp_path / "target.gguf"
    report = onnx_graph.write(weights, path, quant=quant)
    gguf_file.write(weights, quant, gguf_path)
    onnx_check = check.check_onnx(path, weights, truth, report.errors)
    gguf_check = check.check_gguf(gguf_path, weights, truth)
    for container, result in (("onnx", onnx_check), ("gguf", gguf_check)):
        check.require(container, result, quant, None)
        assert result.kl > 0
    assert onnx_check.errors.keys() == gguf_check.errors.keys()
    for name, error in gguf_check.errors.items():
        assert onnx_check.errors[name] == pytest.approx(error, rel=1e-3)
    if quant != "f16":
        assert onnx_check.flips is not None
        assert onnx_check.flips_of == 128


def test_kept_gguf_blocks_need_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints.gguf_checkpoint(tmp_path / "s.gguf")
    weights = sources.read(source)
    truth = reference.of_source(weights, source, check.windows(weights, TEXT, 64))
    path = tmp_path / "target.gguf"
    gguf_file.write(weights, None, path)
    monkeypatch.setattr(
        check.forward, "hidden_states", lambda *_, **__: pytest.fail("ran")
    )
    result = check.check_gguf(path, weights, truth)
    assert (result.kl, result.top1, result.errors) == (0, 1, {})


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("quant", ["f16", "q4_0"])
def test_swapped_weights_fail_the_check(
    tmp_path: Path,
    weights: WeightSet,
    truth: reference.Reference,
    mutation: str,
    quant: str,
) -> None:
    wrong = MUTATIONS[mutation](weights)
    path, gguf_path = tmp_path / "target.onnx", tmp_path / "target.gguf"
    onnx_graph.write(wrong, path, quant=quant)
    result = check.check_onnx(path, weights, truth, {})
    with pytest.raises(FormatError, match=r"target\.onnx: mean KL .* allowed"):
        check.require("onnx", result, quant, 0.05)
    gguf_file.write(wrong, quant, gguf_path)
    result = check.check_gguf(gguf_path, weights, truth)
    with pytest.raises(FormatError, match=r"target\.gguf: mean KL"):
        check.require("gguf", result, "f16", None)


def test_not_a_number_fails(weights: WeightSet) -> None:
    result = check.Check(float("nan"), 0, 1, "numpy", {}, None, 0)
    with pytest.raises(FormatError, match="mean KL"):
        check.require("onnx", result, None, None)


def test_c08_flips_of_int8_activations_are_counted(tmp_path: Path) -> None:
    source = checkpoints.gguf_checkpoint(tmp_path / "s.gguf")
    weights = sources.read(source)
    truth = reference.of_weights(weights, check.windows(weights, TEXT, 128))
    path = tmp_path / "target.onnx"
    report = onnx_graph.write(weights, path)
    result = check.check_onnx(path, weights, truth, report.errors)
    # against float activations = against the dequantised source
    assert result.flips == round((1 - result.top1) * 128)
    levels = {
        attribute.i
        for node in onnx.load(path).graph.node
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    }
    assert levels == {4}  # the file itself stays as it was
