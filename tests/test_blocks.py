"""Block formats of the C core against gguf-py's, bit for bit."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.native_files import block_floats

READ = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "MXFP4", "F16", "BF16", "F32"),
]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit; a NaN equals any NaN."""
    a, b = a.view(np.uint32), b.view(np.uint32)
    nan = (a & 0x7FFFFFFF) > 0x7F800000
    other = (b & 0x7FFFFFFF) > 0x7F800000
    return bool(np.all((a == b) | (nan & other)))


def dequantized(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN and infinity among scales
        return np.ascontiguousarray(gguf.quants.dequantize(blocks, kind).ravel())


@pytest.mark.parametrize("name", READ)
def test_random_blocks_dequantise_as_in_gguf_py(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values, n_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    n = 4096
    blocks = rng.integers(0, 256, (n, n_bytes), np.uint8)
    got = block_floats(kind, blocks, n * values)
    assert same_bits(got, dequantized(blocks.reshape(1, -1), kind))


@pytest.mark.parametrize("name", READ)
def test_every_byte_value_at_every_place(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values, n_bytes = GGML_QUANT_SIZES[kind]
    base = np.random.default_rng(1).integers(0, 256, n_bytes, np.uint8)
    blocks = np.repeat(base[None], n_bytes * 256, axis=0)
    for place in range(n_bytes):
        blocks[place * 256 : (place + 1) * 256, place] = np.arange(256)
    got = block_floats(kind, blocks, len(blocks) * values)
    assert same_bits(got, dequantized(blocks.reshape(1, -1), kind))
