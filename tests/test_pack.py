"""Weights in tiles: the values of the file exactly, in the layout pack.h promises."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.native_files import block_floats, pack, packed_row, tile_bytes
from tests.test_blocks import READ, same_bits

FLOATS = ("F32", "F16", "BF16")
TWO_LEVEL = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def random_blocks(name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Rows of blocks of any bytes at all, extreme scales and NaN among them."""
    values, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rng = np.random.default_rng([seed, rows, cols])
    blocks = rng.integers(0, 256, (rows, cols // values * n_bytes), np.uint8)
    blocks[rng.random(rows) < 0.2] = rng.choice([0, 255])
    return blocks


def widths(name: str) -> tuple[int, ...]:
    if name in FLOATS:
        return (1, 3, 32, 97)
    return (256, 512, 1280) if name in TWO_LEVEL else (32, 64, 96, 256, 576)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("name", READ)
def test_rows_of_tiles_are_the_rows_of_blocks(name: str, rows: int) -> None:
    kind = GGMLQuantizationType[name]
    for cols in widths(name):
        blocks = random_blocks(name, rows, cols)
        tiles = pack(kind, blocks, cols)
        for row in range(rows):
            want = block_floats(kind, blocks[row], cols)
            assert same_bits(packed_row(kind, tiles, rows, cols, row), want)


@pytest.mark.parametrize("name", READ)
def test_tiles_are_hardly_more_than_the_blocks(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values, n_bytes = GGML_QUANT_SIZES[kind]
    for cols in (256, 576, 2048):
        if cols % values == 0:
            packed = tile_bytes(kind, cols)
            assert packed % 64 == 0
            assert 16 * cols // values * n_bytes <= packed
            assert packed <= 1.1 * 16 * cols // values * n_bytes


def test_what_has_no_tiles() -> None:
    for name in READ:
        kind = GGMLQuantizationType[name]
        values = 1 if name in FLOATS else GGML_QUANT_SIZES[kind][0]
        assert tile_bytes(kind, 0) == tile_bytes(kind, -256) == 0
        assert tile_bytes(kind, 256) > 0
        if values > 1:
            assert tile_bytes(kind, 256 + values // 2) == 0
    for kind in (-1, 4, 5, 9, 24, 26, 27, 31, 38, 40, 1 << 30):
        assert tile_bytes(kind, 256) == 0


class Tile:
    """One tile read in numpy as pack.h describes it."""

    def __init__(self, name: str, tile: np.ndarray, cols: int) -> None:
        self.tile, self.at, self.groups = tile, 0, cols // 32
        self.d = np.arange(32) // 4  # dword of input k
        self.i = np.arange(32) % 4
        parts = {
            **dict.fromkeys(("Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "Q4_K"), ("nibbles",)),
            **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), ("nibbles", "plane1")),
            "Q6_K": ("nibbles", "plane2"),
            "Q8_0": ("bytes",),
            "Q2_K": ("pairs",),
            "Q3_K": ("pairs", "plane1"),
        }[name]
        self.top = 2 if name == "Q3_K" else 4
        self.level = np.stack([self.group(parts) for _ in range(self.groups)])

    def take(self, n: int) -> np.ndarray:
        self.at += n
        return self.tile[self.at - n : self.at].astype(np.int32)

    def byte(self, vectors: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """(16, 32): byte 4 o + i of the vector of each input k."""
        o = np.arange(16)[:, None]
        return vectors.reshape(-1, 64)[vector[None], 4 * o + self.i[None]]

    def group(self, parts: tuple[str, ...]) -> np.ndarray:
        level, d = np.zeros((16, 32), np.int32), self.d
        for part in parts:
            if part == "nibbles":
                level |= self.byte(self.take(256), d // 2) >> 4 * (d % 2) & 15
            elif part == "pairs":
                level |= self.byte(self.take(128), d // 4) >> 2 * (d % 4) & 3
            elif part == "plane2":
                level |= (self.byte(self.take(128), d // 4) >> 2 * (d % 4) & 3) << 4
            elif part == "plane1":
                level |= (self.byte(self.take(64), 0 * d) >> d & 1) << self.top
            else:
                level |= self.byte(self.take(512), d)
        return level

    def halves(self) -> np.ndarray:
        return self.take(32).astype(np.uint8).view(np.float16).astype(np.float32)


CODES = {
    "IQ4_NL": (
        *(-127, -104, -83, -65, -49, -35, -22, -10),
        *(1, 13, 25, 38, 53, 69, 89, 113),
    ),
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
ZERO = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32, "Q3_K": 4}


def tile_values(name: str, raw: np.ndarray, cols: int) -> np.ndarray:
    """(16, cols) values of a tile, from the text of pack.h."""
    tile, out = Tile(name, raw, cols), []
    level = (tile.level - ZERO.get(name, 0)).astype(np.float32)
    for g in range(tile.groups):
        low = np.zeros((16, 1), np.float32)
        if name == "MXFP4":
            scale = np.exp2(tile.take(16).astype(np.float64) - 128).astype(np.float32)
        elif name not in TWO_LEVEL:
            scale = tile.halves()
            if name in ("Q4_1", "Q5_1"):
                low = tile.halves()[:, None]
        else:
            if g % 8 == 0:
                d = tile.halves()
                dmin = None if name in ("Q6_K", "Q3_K") else tile.halves()
            if name in ("Q4_K", "Q5_K"):
                scale = d * tile.take(16).astype(np.float32)
                low = -(dmin * tile.take(16).astype(np.float32))[:, None]
            else:
                both = tile.take(32).reshape(2, 16)
                if name == "Q2_K":
                    lows = np.repeat(dmin * (both >> 4).astype(np.float32), 16, axis=0)
                    low, both = -lows.T, both & 15
                else:
                    both = both.astype(np.int8)
                scale = np.repeat(d * both.astype(np.float32), 16, axis=0).T
        if name in CODES:
            level[g] = np.array(CODES[name], np.float32)[tile.level[g]]
        factor = scale if scale.ndim == 2 else scale[:, None]
        out.append(factor * level[g] + low)
    assert not tile.tile[tile.at :].any()  # what is left is padding
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize("name", [name for name in READ if name not in FLOATS])
def test_layout_is_what_the_header_says(name: str) -> None:
    kind = GGMLQuantizationType[name]
    cols = 512
    blocks = random_blocks(name, 32, cols, seed=3)
    tiles = pack(kind, blocks, cols)
    with np.errstate(all="ignore"):
        got = np.concatenate([tile_values(name, tile, cols) for tile in tiles])
    want = np.stack([block_floats(kind, row, cols) for row in blocks])
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    assert same.all()


@pytest.mark.parametrize("name", FLOATS)
def test_float_tiles_are_transposed_rows(name: str) -> None:
    n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    blocks = random_blocks(name, 20, 33)
    tiles = pack(GGMLQuantizationType[name], blocks, 33)
    values = tiles[:, : 33 * 16 * n_bytes].reshape(2, 33, 16, n_bytes)
    rows = values.transpose(0, 2, 1, 3).reshape(32, -1)
    assert (rows[:20] == blocks).all()
    assert not rows[20:].any()
    assert not tiles[:, 33 * 16 * n_bytes :].any()


@pytest.mark.parametrize("name", READ)
def test_outputs_past_the_last_are_zero(name: str) -> None:
    kind = GGMLQuantizationType[name]
    tiles = pack(kind, random_blocks(name, 17, 256), 256)
    for row in range(17, 32):
        assert not packed_row(kind, tiles, 32, 256, row).any()
