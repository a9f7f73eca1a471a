"""Weights as ONNX Runtime's MatMulNBits takes them: 4 or 8 bits, a scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec_export import quantize

BLOCK = 32
BLOCK_SIZES = (16, 32, 64, 128, 256)  # others give silent zeros in ONNX Runtime

# Zero points cost a fifth of the speed at 8 rows; this much error they have to buy.
_ZERO_POINT_GAIN = 0.75


@dataclass(frozen=True, slots=True)
class NBits:
    """A matrix (rows, cols): scale * (code - zero) + offset, each per block of columns.

    Codes lie in `packed` in column order, a 4-bit pair with the even column in the low
    half. Without `zeros` the zero is 8 (4-bit) or 128 (8-bit). `offsets` is no part of
    MatMulNBits: the graph adds it as a product with the sums of each input block.
    """

    bits: int
    block: int
    packed: NDArray[np.uint8]  # (rows, blocks, block * bits / 8)
    scales: NDArray[np.float32]  # (rows, blocks)
    zeros: NDArray[np.uint8] | None  # (rows, blocks), 8-bit only
    offsets: NDArray[np.float32] | None  # (rows, blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        rows, blocks = self.scales.shape
        return rows, blocks * self.block

    def codes(self) -> NDArray[np.uint8]:
        """Unpacked codes (rows, blocks, block)."""
        if self.bits == 8:
            return self.packed
        pairs = np.stack([self.packed & 15, self.packed >> 4], axis=-1)
        return pairs.reshape(*self.scales.shape, self.block)

    def dequantize(self) -> NDArray[np.float32]:
        """The matrix (rows, cols) this stands for."""
        zero: NDArray[np.float32] | np.float32
        if self.zeros is None:
            zero = np.float32(1 << (self.bits - 1))
        else:
            zero = self.zeros[..., None].astype(np.float32)
        values = self.scales[..., None] * (self.codes().astype(np.float32) - zero)
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.reshape(self.shape)


def check_block(block: int, cols: int, name: str) -> None:
    """Raises UnsupportedError when rows of `cols` inputs do not divide into blocks."""
    if block not in BLOCK_SIZES:
        allowed = ", ".join(map(str, BLOCK_SIZES))
        raise UnsupportedError(
            f"block size {block}: ONNX Runtime computes only {allowed}"
        )
    if cols % block:
        raise UnsupportedError(
            f"{name}: rows of {cols} do not divide into blocks of {block}; use f16"
        )


def concat(parts: list[NBits]) -> NBits:
    """Rows of several matrices with the same columns and form, one below the other."""
    first = parts[0]

    def join(arrays: list[NDArray[Any] | None]) -> NDArray[Any] | None:
        present = [array for array in arrays if array is not None]
        return np.concatenate(present) if present else None

    return NBits(
        first.bits,
        first.block,
        np.concatenate([p.packed for p in parts]),
        np.concatenate([p.scales for p in parts]),
        join([p.zeros for p in parts]),
        join([p.offsets for p in parts]),
    )


def is_same_form(a: NBits, b: NBits) -> bool:
    """Whether the two can be rows of one matrix."""
    return (
        a.bits == b.bits
        and a.block == b.block
        and a.shape[1] == b.shape[1]
        and (a.zeros is None) == (b.zeros is None)
        and (a.offsets is None) == (b.offsets is None)
    )


def from_ggml(kind: str, raw: NDArray[np.uint8]) -> NBits:
    """The same numbers for Q4_0, Q4_1 and Q8_0 bytes (rows, bytes of a row)."""
    fields = quantize.split_blocks(kind, raw)
    scales = fields.scales.astype(np.float32)
    if kind == "Q8_0":
        packed = (fields.codes.astype(np.int16) + 128).astype(np.uint8)
        return NBits(8, BLOCK, packed, scales, None, None)
    packed = pack4(fields.codes.view(np.uint8))
    if fields.mins is None:
        return NBits(4, BLOCK, packed, scales, None, None)
    # d * q + m = d * (q - 8) + (m + 8 d)
    offsets = fields.mins.astype(np.float32) + 8 * scales
    return NBits(4, BLOCK, packed, scales, None, offsets)


def pack4(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes 0..15 (..., block) as pairs (..., block / 2)."""
    pairs: NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return pairs


def quantize8(values: NDArray[np.float32], block: int = BLOCK) -> NBits:
    """8 bits per weight; zero points only where they take a quarter off the error."""
    rows, cols = values.shape
    check_block(block, cols, "matrix")
    blocks = values.reshape(-1, block)
    symmetric, scales, loss = quantize.search_symmetric(blocks, -127, 127)
    with_zero, zero_scales, zeros, zero_loss = _search_zero(blocks)
    shape = (rows, cols // block)
    if np.sqrt(zero_loss.sum()) < _ZERO_POINT_GAIN * np.sqrt(loss.sum()):
        return NBits(
            8,
            block,
            with_zero.reshape(*shape, block),
            zero_scales.reshape(shape),
            zeros.reshape(shape),
            None,
        )
    codes = (symmetric.astype(np.int16) + 128).astype(np.uint8)
    return NBits(
        8, block, codes.reshape(*shape, block), scales.reshape(shape), None, None
    )


def _search_zero(
    blocks: NDArray[np.float32],
) -> tuple[
    NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8], NDArray[np.float32]
]:
    low = np.minimum(blocks.min(axis=1), 0)
    high = np.maximum(blocks.max(axis=1), 0)
    scales = (high - low) / np.float32(255)
    inverse = np.where(scales > 0, 1 / np.where(scales > 0, scales, 1), 0)
    zeros = np.rint(-low * inverse)
    codes = np.clip(np.rint(blocks * inverse[:, None]) + zeros[:, None], 0, 255)
    error = (codes - zeros[:, None]) * scales[:, None] - blocks
    loss = np.einsum("ij,ij->i", error, error)
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8), loss
