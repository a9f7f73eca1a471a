"""ggml block formats: the codes with the least squared error, and back.

Layouts as in ggml: Q4_0 = scale f16, 16 bytes (element i low half, i + 16 high half),
codes minus 8; Q4_1 = scale f16, minimum f16, 16 bytes; Q8_0 = scale f16, 32 signed
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError

BLOCK = 32
QUANTS = ("q4_0", "q4_1", "q8_0", "f16", "f32")  # what --quant takes
FLOATS = ("F32", "F16", "BF16")
KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16", "F32")
_ROW_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_F16_MAX = 65504.0
_SIDES = np.array([0.0, 0.5, 1.0], dtype=np.float32)
_CHUNK = 2048  # blocks searched at a time: the working set stays in the L2 cache
_SHRINK_4 = np.linspace(1.06, 0.74, 12, dtype=np.float32)
_SHRINK_AFFINE = np.linspace(0.98, 0.74, 7, dtype=np.float32)
_SHRINK_8 = np.array([0.998, 0.994, 0.99], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Fields of ggml blocks, (rows, blocks) each and codes (rows, blocks, 32)."""

    scales: NDArray[np.float16]
    mins: NDArray[np.float16] | None  # Q4_1
    codes: NDArray[np.uint8] | NDArray[np.int8]  # Q4: 0..15, Q8_0: signed


def kind_for(name: str, shape: tuple[int, ...], quant: str | None, kind: str) -> str:
    """ggml type a tensor of type `kind` gets under `--quant`; both writers ask here.

    Vectors stay float. The embedding doubles as the head, where 4 bits cost most: 8
    bits there.
    """
    if len(shape) == 1:
        return "F32"
    if quant is None:
        return kind
    if quant in ("q4_0", "q4_1") and name in ("token_embd", "output"):
        return "Q8_0"
    return quant.upper()


def made_from(kind: str, source: str) -> str:
    """How a tensor of one ggml type came from another, for notes and reports."""
    is_twice = kind in _ROW_BYTES and source not in FLOATS
    return f"{kind} made from {source}{', rounded twice' * is_twice}"


def quantize(
    kind: str, values: NDArray[np.float32], name: str = "matrix"
) -> NDArray[np.uint8]:
    """Rows (rows, cols) float32 as ggml bytes (rows, bytes of a row).

    Q4_0, Q4_1 and Q8_0 search scale (and minimum) for the least squared error of each
    block of 32; no block ends up worse than under ggml's own rounding.

    Raises, beginning with the name, FormatError for a weight that is no number and
    UnsupportedError for one beyond float16, for rows that are no multiple of 32 and for
    other types.
    """
    rows, cols = values.shape
    if kind == "F32":
        return np.ascontiguousarray(values, dtype=np.float32).view(np.uint8)
    if kind == "F16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            _check_range(values, name)
        return half.view(np.uint8)
    if kind not in _ROW_BYTES:
        raise UnsupportedError(
            f"{name}: cannot write {kind}; known: {', '.join(KINDS)}"
        )
    if cols % BLOCK:
        raise UnsupportedError(
            f"{name}: {kind} needs rows that are multiples of {BLOCK}, got {cols}"
        )
    blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, BLOCK)
    _check_range(blocks, name)
    if kind == "Q4_1":
        packed = _pack_q4_1(blocks)
    elif kind == "Q4_0":
        codes, scales, _ = search_symmetric(blocks, -8, 7, half=True)
        packed = np.concatenate([_bytes(scales), _nibbles(codes + np.int8(8))], axis=1)
    else:
        codes, scales, _ = search_symmetric(blocks, -127, 127, half=True)
        packed = np.concatenate([_bytes(scales), codes.view(np.uint8)], axis=1)
    return packed.reshape(rows, -1)


def _check_range(values: NDArray[np.float32], name: str) -> None:
    """Raises unless float16 holds every weight."""
    top = np.abs(values).max(initial=0)
    if not np.isfinite(top):
        raise FormatError(f"{name}: a weight is infinite or not a number")
    if top > _F16_MAX:
        raise UnsupportedError(f"{name}: a weight lies beyond {_F16_MAX:g}; use f32")


def dequantize(kind: str, raw: NDArray[np.uint8], cols: int) -> NDArray[np.float32]:
    """float32 (rows, cols) of ggml bytes (rows, bytes of a row), any gguf-py type."""
    kind_id = gguf.GGMLQuantizationType[kind]
    raw = np.ascontiguousarray(raw)
    if kind == "F32":
        values = raw.view(np.float32)
    elif kind == "F16":
        values = raw.view(np.float16).astype(np.float32)
    elif kind == "BF16":
        values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        try:
            values = gguf.quants.dequantize(raw, kind_id)
        except NotImplementedError as error:
            raise UnsupportedError(f"cannot read weights of type {kind}") from error
    return values.reshape(len(raw), cols)


def split_blocks(kind: str, raw: NDArray[np.uint8]) -> Blocks:
    """Scales, minima and codes of Q4_0, Q4_1 or Q8_0 rows."""
    if kind not in _ROW_BYTES:
        raise UnsupportedError(f"{kind} is not made of blocks with 4- or 8-bit codes")
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, _ROW_BYTES[kind])
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    if kind == "Q8_0":
        return Blocks(scales, None, np.ascontiguousarray(blocks[..., 2:]).view(np.int8))
    mins = None
    if kind == "Q4_1":
        mins = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
    pairs = blocks[..., -16:]
    return Blocks(scales, mins, np.concatenate([pairs & 15, pairs >> 4], axis=-1))


def search_symmetric(
    blocks: NDArray[np.float32], low: int, high: int, *, half: bool = False
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32]]:
    """Codes low..high, scales and squared errors of blocks (n, size).

    `half` keeps scales to what float16 holds. The scale may be negative: the code range
    reaches one further down than up, and the largest weight decides which side needs
    it.
    """
    count, size = blocks.shape
    codes = np.empty((count, size), np.int8)
    scales = np.empty(count, np.float32)
    losses = np.empty(count, np.float32)
    shrink = _SHRINK_4 if high < 16 else _SHRINK_8
    for start in range(0, count, _CHUNK):
        part = slice(start, start + _CHUNK)
        codes[part], scales[part], losses[part] = _symmetric(
            blocks[part], low, high, shrink, half
        )
    return codes, scales, losses


def _symmetric(
    x: NDArray[np.float32], low: int, high: int, shrink: NDArray[np.float32], half: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    top = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], 1)[:, 0]
    # ggml's own scales first, so that nothing can come out worse than them
    starts = [top / np.float32(low), np.abs(top) / np.float32(high)]
    starts += [top / np.float32(low) * s for s in shrink]
    best = np.zeros_like(top)
    best_loss = np.full_like(top, np.inf)
    for scale in starts:
        best, best_loss = _better(x, _round(scale, half), low, high, best, best_loss)
        codes = _codes(x, _round(scale, half), low, high)
        weight = np.einsum("ij,ij->i", codes, codes)
        fitted = np.einsum("ij,ij->i", x, codes) / np.where(weight > 0, weight, 1)
        best, best_loss = _better(x, _round(fitted, half), low, high, best, best_loss)
    return _codes(x, best, low, high), best, best_loss


def _better(
    x: NDArray[np.float32],
    scale: NDArray[np.float32],
    low: int,
    high: int,
    best: NDArray[np.float32],
    best_loss: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    error = _codes(x, scale, low, high)
    error *= scale[:, None]
    error -= x
    loss = np.einsum("ij,ij->i", error, error)
    is_better = loss < best_loss
    return np.where(is_better, scale, best), np.where(is_better, loss, best_loss)


def _codes(
    x: NDArray[np.float32], scale: NDArray[np.float32], low: int, high: int
) -> NDArray[np.float32]:
    codes = x * _inverse(scale)[:, None]
    np.rint(codes, out=codes)
    return np.clip(codes, low, high, out=codes)


def _pack_q4_1(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    packed = np.empty((len(blocks), _ROW_BYTES["Q4_1"]), np.uint8)
    for start in range(0, len(blocks), _CHUNK):
        x = blocks[start : start + _CHUNK]
        codes, scale, minimum = _affine(x)
        packed[start : start + _CHUNK] = np.concatenate(
            [_bytes(scale), _bytes(minimum), _nibbles(codes)], axis=1
        )
    return packed


def _affine(
    x: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    low, high = x.min(axis=1), x.max(axis=1)
    width = (high - low) / np.float32(15)
    total = x.sum(axis=1)
    best = (width, low, np.full_like(low, np.inf))
    # ggml's own line first, so that nothing can come out worse than it; then shorter
    # ones that keep the low end, the middle or the high end of the range
    starts = [(width, low), (width * np.float32(1.04), low - np.float32(0.3) * width)]
    for shrink in _SHRINK_AFFINE:
        scale = width * shrink
        rest = np.float32(15) * (width - scale)
        starts += [(scale, low + rest * side) for side in _SIDES]
    for scale, minimum in starts:
        scale, minimum = _round(scale, True), _round(minimum, True)
        best = _better_affine(x, scale, minimum, best)
        for _ in range(2):
            scale, minimum = _fit(x, total, _codes_affine(x, scale, minimum))
        best = _better_affine(x, scale, minimum, best)
    return _codes_affine(x, best[0], best[1]), best[0], best[1]


def _fit(
    x: NDArray[np.float32], total: NDArray[np.float32], codes: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Least squares line through (code, weight) of each block."""
    sum_q = codes.sum(axis=1)
    sum_qq = np.einsum("ij,ij->i", codes, codes)
    sum_qx = np.einsum("ij,ij->i", codes, x)
    spread = BLOCK * sum_qq - sum_q * sum_q
    slope = (BLOCK * sum_qx - sum_q * total) / np.where(spread > 0, spread, 1)
    return _round(slope, True), _round((total - slope * sum_q) / BLOCK, True)


def _better_affine(
    x: NDArray[np.float32],
    scale: NDArray[np.float32],
    minimum: NDArray[np.float32],
    best: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    error = _codes_affine(x, scale, minimum)
    error *= scale[:, None]
    error += minimum[:, None]
    error -= x
    loss = np.einsum("ij,ij->i", error, error)
    is_better = loss < best[2]
    return (
        np.where(is_better, scale, best[0]),
        np.where(is_better, minimum, best[1]),
        np.where(is_better, loss, best[2]),
    )


def _codes_affine(
    x: NDArray[np.float32], scale: NDArray[np.float32], minimum: NDArray[np.float32]
) -> NDArray[np.float32]:
    codes = x - minimum[:, None]
    codes *= _inverse(scale)[:, None]
    np.rint(codes, out=codes)
    return np.clip(codes, 0, 15, out=codes)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(scale != 0, 1 / np.where(scale != 0, scale, 1), 0).astype(
        np.float32
    )


def _round(scale: NDArray[np.float32], half: bool) -> NDArray[np.float32]:
    if not half:
        return scale
    return np.clip(scale, -_F16_MAX, _F16_MAX).astype(np.float16).astype(np.float32)


def _bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return values.astype(np.float16)[:, None].view(np.uint8)


def _nibbles(codes: NDArray[np.int8] | NDArray[np.float32]) -> NDArray[np.uint8]:
    whole = codes.astype(np.uint8)
    pairs: NDArray[np.uint8] = whole[:, :16] | (whole[:, 16:] << np.uint8(4))
    return pairs
