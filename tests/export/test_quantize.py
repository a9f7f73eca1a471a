"""Block formats: layouts against gguf-py, errors against its own rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export import nbits, onnx_weights, quantize
from edgespec_export.weights import Tensor

BLOCK_KINDS = ("Q4_0", "Q4_1", "Q8_0")


def ggml(kind: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """gguf-py's own rounding, and back."""
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(values, type_)
    return gguf.quants.dequantize(raw, type_)


def ours(kind: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Our codes, read back by gguf-py."""
    raw = quantize.quantize(kind, values)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


def rmse(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))


def weights(seed: int, shape: tuple[int, int] = (96, 256)) -> NDArray[np.float32]:
    """Gaussian rows of different scale with some outliers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * rng.uniform(0.01, 2, (shape[0], 1))
    values[rng.random(shape) < 0.005] *= 6
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_worse_than_under_ggmls_rounding(kind: str, seed: int) -> None:
    values = weights(seed)
    blocks = (-1, 32)
    theirs = ((ggml(kind, values) - values).reshape(blocks) ** 2).sum(axis=1)
    mine = ((ours(kind, values) - values).reshape(blocks) ** 2).sum(axis=1)
    assert (mine <= theirs * (1 + 1e-5)).all()


@pytest.mark.parametrize(("kind", "gain"), [("Q4_0", 0.97), ("Q4_1", 0.97)])
def test_search_lowers_the_error_of_four_bits(kind: str, gain: float) -> None:
    values = weights(5)
    mine, theirs = ours(kind, values), ggml(kind, values)
    assert rmse(mine, values) < gain * rmse(theirs, values)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_search_is_near_the_best_scale_of_a_fine_grid(kind: str) -> None:
    values = weights(6, (4, 64))
    got = ((ours(kind, values) - values).reshape(-1, 32) ** 2).sum(axis=1)
    for block, loss in zip(values.reshape(-1, 32), got, strict=True):
        assert loss <= 1.06 * grid_best(kind, block.astype(np.float64))


def grid_best(kind: str, block: NDArray[np.float64]) -> float:
    """Least squared error over a dense grid of scales (and minima)."""
    low, high = {"Q4_0": (-8, 7), "Q4_1": (0, 15)}[kind]
    span = np.ptp(block) if kind == "Q4_1" else np.abs(block).max()
    steps = span / (15 if kind == "Q4_1" else high)
    best = np.inf
    minima = np.linspace(block.min(), block.min() + 0.2 * span, 40)
    for scale in steps * np.linspace(0.7, 1.15, 90):
        for sign in (1, -1):
            for minimum in minima if kind == "Q4_1" else (0.0,):
                codes = np.rint((block - minimum) / (sign * scale)).clip(low, high)
                error = codes * sign * scale + minimum - block
                best = min(best, float((error**2).sum()))
    return best


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_quantised_weights_survive_a_second_time(kind: str) -> None:
    once = ours(kind, weights(7))
    assert rmse(ours(kind, once), once) < 2e-3 * float(np.std(once))


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, "F16", "F32", "Q6_K"])
def test_dequantize_equals_gguf(kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(0).integers(0, 60, (3, 512 // block * size), np.uint8)
    got = quantize.dequantize(kind, raw, 512)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, type_))


def test_bfloat16() -> None:
    values = np.array([[1.0, -2.5, 3.0e38, 1e-30]], np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    expected = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(quantize.dequantize("BF16", raw, 4), expected)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(BLOCK_KINDS),
    values=st.lists(
        st.floats(-1e4, 1e4, width=32) | st.just(0.0), min_size=32, max_size=32
    ),
)
def test_any_block_is_at_least_as_good(kind: str, values: list[float]) -> None:
    block = np.array([values], np.float32)
    limit = rmse(ggml(kind, block), block)
    assert rmse(ours(kind, block), block) <= limit * (1 + 1e-5) + 1e-30


def test_zeros_and_constants_are_exact() -> None:
    for kind in BLOCK_KINDS:
        zeros = np.zeros((2, 64), np.float32)
        np.testing.assert_array_equal(ours(kind, zeros), zeros)
    constant = np.full((1, 32), 0.75, np.float32)
    np.testing.assert_array_equal(ours("Q4_1", constant), constant)


def test_refused_inputs() -> None:
    with pytest.raises(UnsupportedError, match="multiples of 32, got 48"):
        quantize.quantize("Q4_0", np.ones((1, 48), np.float32))
    with pytest.raises(UnsupportedError, match="cannot write Q5_K"):
        quantize.quantize("Q5_K", np.ones((1, 256), np.float32))
    with pytest.raises(FormatError, match="infinite or not a number"):
        quantize.quantize("Q8_0", np.full((1, 32), np.nan, np.float32))
    with pytest.raises(UnsupportedError, match="65504"):
        quantize.quantize("F16", np.full((1, 32), 1e5, np.float32))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_nbits_holds_ggml_blocks_exactly(kind: str) -> None:
    raw = quantize.quantize(kind, weights(8))
    coded = nbits.from_ggml(kind, raw)
    assert coded.bits == (8 if kind == "Q8_0" else 4)
    expected = quantize.dequantize(kind, raw, 256)
    # d * q + m against d * (q - 8) + (m + 8 d): the same up to one rounding
    tolerance = 1e-6 * float(np.abs(expected).max()) if kind == "Q4_1" else 0
    np.testing.assert_allclose(coded.dequantize(), expected, rtol=0, atol=tolerance)


def test_eight_bits_take_zero_points_only_where_they_pay() -> None:
    centred = nbits.quantize8(weights(9))
    assert centred.zeros is None
    shifted_values = weights(9) * 0.1 + np.float32(1)
    shifted = nbits.quantize8(shifted_values)
    assert shifted.zeros is not None
    for coded, values in ((centred, weights(9)), (shifted, shifted_values)):
        error = np.linalg.norm(coded.dequantize() - values)
        assert error < 0.01 * np.linalg.norm(values)


@pytest.mark.parametrize("block", [0, 8, 24, 33, 512, 1024])
def test_c08_block_sizes_that_onnxruntime_gets_wrong_are_refused(block: int) -> None:
    with pytest.raises(UnsupportedError, match="computes only 16, 32, 64, 128, 256"):
        nbits.check_block(block, 4096, "blk.0.attn_q")


def test_rows_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q.*rows of 48"):
        nbits.check_block(32, 48, "blk.0.attn_q")


def _tensor(values: NDArray[np.float32]) -> Tensor:
    raw = quantize.quantize("F32", values)
    return Tensor("blk.0.ffn_up", values.shape, "F32", lambda: raw, lambda: values)


@pytest.mark.parametrize("quant", ["q4_0", "q4_1"])
def test_onnx_gives_8_bits_to_what_4_bits_distort(quant: str) -> None:
    tame = np.random.default_rng(3).standard_normal((64, 128)).astype(np.float32)
    wild = tame.copy()
    wild[:, ::32], wild[:, 1::32] = 30, -30  # two of each block hide the others
    small = onnx_weights.prepare(_tensor(tame), quant)
    assert small.form.startswith("int4")
    assert small.error(tame) < onnx_weights.MAX_LOSS
    assert small.why.startswith(f"{quant.upper()} made from F32")
    large = onnx_weights.prepare(_tensor(wild), quant)
    assert large.form == "int8"
    assert large.error(wild) < 0.02
    expected = f"Q8_0 made from F32; {quant.upper()} would lose more than 10%"
    assert large.why == expected


def test_what_is_rounded_twice_is_said() -> None:
    assert quantize.made_from("Q4_0", "BF16") == "Q4_0 made from BF16"
    assert quantize.made_from("F16", "Q4_1") == "F16 made from Q4_1"
    assert quantize.made_from("Q4_0", "Q4_1") == "Q4_0 made from Q4_1, rounded twice"
