"""Plain C kernels against the formulas of kernels.h in numpy, bit for bit."""

from __future__ import annotations

import math
from ctypes import c_float
from fractions import Fraction

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.native_files import block_floats, pack
from tests.native_kernels import (
    GROUP,
    Rows,
    call,
    fma,
    gemm,
    library,
    reduce_lanes,
    same_bits,
)

F32 = np.float32
INT8, F16 = 1, 0  # es_kv_format
CODES = {
    "IQ4_NL": [
        *(-127, -104, -83, -65, -49, -35, -22, -10),
        *(1, 13, 25, 38, 53, 69, 89, 113),
    ],
    "MXFP4": [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
}
ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q6_K": 32, "Q3_K": 4}
PARTS = {  # of the levels, as pack.h lists them
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "MXFP4"), ("nibbles",)),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K"), ("nibbles", "plane1")),
    "Q8_0": ("bytes",),
    "Q2_K": ("pairs",),
    "Q3_K": ("pairs", "plane1"),
    "Q6_K": ("nibbles", "plane2"),
}
INTEGER = list(PARTS)
SIZES = {"nibbles": 256, "pairs": 128, "plane2": 128, "plane1": 64, "bytes": 512}
# Places of fp16 scales in a block of ggml.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def random_blocks(name: str, rows: int, cols: int) -> np.ndarray:
    """Random bytes with scales of an ordinary size."""
    values, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rng = np.random.default_rng(cols)
    blocks = rng.integers(0, 256, (rows, cols // values, n_bytes), np.uint8)
    for place in HALVES[name]:
        scales = rng.normal(0, 0.02, (rows, cols // values, 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = 110 + blocks[:, :, 0] % 20
    return blocks.reshape(rows, -1)


def tile_levels(name: str, tile: np.ndarray, groups: int) -> np.ndarray:
    """(16 outputs, groups * 32) levels of one tile, less the zero or as codes."""
    size = sum(SIZES[part] for part in PARTS[name])
    levels = np.zeros((groups, 8, 64), np.int64)  # group, d, byte
    for g in range(groups):
        group, shift = tile[g * size : (g + 1) * size].astype(np.int64), 0
        for part in PARTS[name]:
            section, group = group[: SIZES[part]], group[SIZES[part] :]
            vectors = section.reshape(-1, 64)
            for d in range(8):
                if part == "nibbles":
                    field, bits = vectors[d // 2] >> 4 * (d % 2) & 15, 4
                elif part in ("pairs", "plane2"):
                    field, bits = vectors[d // 4] >> 2 * (d % 4) & 3, 2
                elif part == "plane1":
                    field, bits = vectors[0] >> d & 1, 1
                else:
                    field, bits = vectors[d], 8
                levels[g, d] |= field << shift
            shift += bits
    levels = levels.reshape(groups, 8, 16, 4).transpose(2, 0, 1, 3).reshape(16, -1)
    return (
        np.array(CODES[name])[levels] if name in CODES else levels - ZEROS.get(name, 0)
    )


def tile_scales(
    name: str, tile: np.ndarray, groups: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """d and m: (16, groups, 2 halves) float32, sub-scales multiplied in; m signed."""
    rest = tile[groups * sum(SIZES[part] for part in PARTS[name]) :]

    def halves(data: np.ndarray) -> np.ndarray:
        return np.frombuffer(data.tobytes(), np.float16).astype(F32)

    d = np.zeros((16, groups, 2), F32)
    m = np.zeros((16, groups, 2), F32)
    for g in range(groups):
        if name == "MXFP4":
            exponents = rest[16 * g : 16 * g + 16].astype(int) - 128
            d[:, g, :] = np.exp2(exponents.astype(np.float64)).astype(F32)[:, None]
        elif name in ("Q4_1", "Q5_1"):
            d[:, g, :] = halves(rest[64 * g : 64 * g + 32])[:, None]
            m[:, g, :] = halves(rest[64 * g + 32 : 64 * g + 64])[:, None]
        elif name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"):
            d[:, g, :] = halves(rest[32 * g : 32 * g + 32])[:, None]
        else:
            has_m = name not in ("Q3_K", "Q6_K")
            size, head = (320, 64) if has_m else (288, 32)
            block = rest[size * (g // 8) : size * (g // 8 + 1)]
            sub = block[head:].reshape(8, 2, 16)[g % 8]
            d[:, g, :] = halves(block[:32])[:, None]
            if not has_m:
                d[:, g, :] *= sub.view(np.int8).astype(F32).T
                continue
            m[:, g, :] = -halves(block[32:64])[:, None]
            if name == "Q2_K":
                d[:, g, :] *= (sub & 15).astype(F32).T
                m[:, g, :] *= (sub >> 4).astype(F32).T
            else:
                d[:, g, :] *= sub[0].astype(F32)[:, None]
                m[:, g, :] *= sub[1].astype(F32)[:, None]
    return d, None if name not in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") else m


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=4000).astype(F32) for _ in range(2))
    # Sums that end just beside the middle of two floats, where two roundings go wrong.
    c = (-(a.astype(np.float64) * b)).astype(F32) * F32(1.0) + rng.choice(
        [0, 2.0**-25, 1.0, 2.0**20], 4000
    ).astype(F32)
    for x, y, z, got in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [np.nextafter(got, F32(s)) for s in (-np.inf, np.inf)]
        distance = abs(Fraction(float(got)) - exact)
        others = [abs(Fraction(float(v)) - exact) for v in near]
        assert all(distance <= other for other in others)
        if distance in others:
            assert got.view(np.uint32) & 1 == 0


def numpy_quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q and scale of the groups of one row, kernels.h word for word."""
    groups = x.reshape(-1, GROUP)
    a = np.abs(groups).max(axis=1)
    finite = np.isfinite(groups).all(axis=1)
    with np.errstate(all="ignore"):
        r = np.where(a > F32(2.0**-120), F32(127) / a, F32(0)).astype(F32)
        q = np.rint(groups * r[:, None])
    q = np.where(finite[:, None], q, 0).astype(np.int8)
    return q, np.where(finite, a / F32(127), F32(np.nan)).astype(F32)


ORDINARY, NOT_FINITE = [0, 1, 2, 3, 7, 11], [8, 9, 10]


def awkward_rows(k: int) -> np.ndarray:
    """Ordinary rows, then zero, denormal, tiny, huge, one-value, NaN and infinite."""
    rng = np.random.default_rng(k)
    x = rng.normal(size=(12, k)).astype(F32)
    x[3] = 0.0
    x[4] *= F32(2.0**-130)
    x[5] *= F32(2.0**-119)
    x[6] *= F32(2.0**125)
    x[7] = np.where(x[7] < 0, F32(-3), F32(3))
    x[8, k // 2] = np.nan
    x[9, 0] = np.inf
    x[10, k - 1] = -np.inf
    x[11, :GROUP] = -0.0
    return x


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("k", [32, 96, 2048])
def test_quantize(k: int) -> None:
    rows = Rows(awkward_rows(k)).quantize()
    for r, x in enumerate(rows.x):
        q, scale = numpy_quantize(x)
        assert np.array_equal(rows.q[r], q.ravel())
        assert same_bits(rows.scale[r], scale)
        sums = q.astype(np.int32).reshape(-1, 2, 16).sum(axis=2)
        assert np.array_equal(rows.isum[r], sums)
        assert np.array_equal(rows.isum32[r], sums.sum(axis=1))
        assert same_bits(rows.sum[r], (scale[:, None] * sums.astype(F32)).astype(F32))
        assert same_bits(rows.sum32[r], scale * sums.sum(axis=1).astype(F32))
        if np.isfinite(x).all():
            back = q.astype(np.float64) * scale.astype(np.float64)[:, None]
            error = np.abs(back - x.reshape(-1, GROUP)).max(axis=1)
            assert np.all(error <= np.maximum(scale * 0.5001, 2.0**-119))
    assert np.isnan(rows.scale[NOT_FINITE]).any(axis=1).all()
    assert np.all(np.abs(rows.q.astype(int)) <= 127)


def test_quantize_leaves_other_groups_alone() -> None:
    rows = Rows(awkward_rows(96))
    call("quantize", rows.struct, 1, 1, 2)
    fields = (rows.q.reshape(12, 3, 32), rows.scale, rows.sum, rows.sum32)
    for field in (*fields, rows.isum, rows.isum32):
        written = field.reshape(12, 3, -1) != 99
        assert written[1, 1].any()
        written[1, 1] = False
        assert not written.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity on purpose
@pytest.mark.parametrize("cols", [256, 768])
@pytest.mark.parametrize("name", INTEGER)
def test_integer_gemm(name: str, cols: int) -> None:
    kind = GGMLQuantizationType[name]
    n_outputs, groups = 20, cols // GROUP
    blocks = random_blocks(name, n_outputs, cols)
    tiles = pack(kind, blocks, cols)
    rows = Rows(awkward_rows(cols)).quantize()
    got = gemm(kind, tiles, n_outputs, rows, tail=3)
    q = rows.q.astype(np.int64).reshape(len(rows.x), groups, 2, 16)
    halved = name in ("Q2_K", "Q3_K", "Q6_K")
    weights = np.zeros((32, cols), F32)
    weights_apart = np.zeros((32, cols))
    for t, tile in enumerate(tiles):
        levels = tile_levels(name, tile, groups).reshape(16, groups, 2, 16)
        d, m = tile_scales(name, tile, groups)
        dots = np.einsum("ogdi,rgdi->rogd", levels, q)
        y = np.zeros((len(rows.x), 16), F32)
        for g in range(groups):
            for h in range(2 if halved else 1):
                dot = dots[:, :, g, h] if halved else dots[:, :, g].sum(axis=2)
                y = fma(dot.astype(F32), d[:, g, h] * rows.scale[:, g, None], y)
                if m is not None:
                    of = rows.sum[:, g, h] if halved else rows.sum32[:, g]
                    y = fma(m[:, g, h], of[:, None], y)
        assert same_bits(got[:, 16 * t : 16 * t + 16], y)
        values = d[..., None] * levels.astype(F32)
        apart = np.abs(values) + (0 if m is None else np.abs(m[..., None]))
        weights_apart[16 * t : 16 * t + 16] = apart.reshape(16, -1)
        if m is not None:
            values = values + m[..., None]
        weights[16 * t : 16 * t + 16] = values.reshape(16, -1)
    # The same levels and scales are the file's values, and the sums are what they say.
    truth = np.stack([block_floats(kind, row, cols) for row in blocks])
    assert same_bits(np.ascontiguousarray(weights[:n_outputs]), truth)
    assert np.all(weights[n_outputs:] == 0)
    scale = rows.scale[ORDINARY].astype(np.float64)
    x = (q[ORDINARY].reshape(-1, groups, GROUP) * scale[..., None]).reshape(-1, cols)
    exact = x @ truth.T.astype(np.float64)
    # Level and offset are added apart: what cancels in a value does not in the sum.
    size = np.abs(x) @ np.abs(weights_apart[:n_outputs].T)
    assert np.all(np.abs(got[ORDINARY, :n_outputs] - exact) <= 3e-6 * size)
    assert np.isnan(got[NOT_FINITE]).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("cols", [1, 3, 32, 97])
def test_float_gemm(name: str, cols: int) -> None:
    kind = GGMLQuantizationType[name]
    rng = np.random.default_rng(cols)
    w = rng.normal(size=(20, cols)).astype(F32)
    if name == "F16":
        raw = w.astype(np.float16).view(np.uint8)
        w = w.astype(np.float16).astype(F32)
    elif name == "BF16":
        bits = w.view(np.uint32) >> 16
        raw, w = bits.astype(np.uint16).view(np.uint8), (bits << 16).view(F32)
    else:
        raw = w.view(np.uint8)
    tiles = pack(kind, np.ascontiguousarray(raw), cols)
    rows = Rows(rng.normal(size=(5, cols)))
    got = gemm(kind, tiles, 20, rows)
    acc = np.zeros((4, 5, 20), F32)
    for k in range(cols):
        acc[k % 4] = fma(w[:, k], rows.x[:, k, None], acc[k % 4])
    assert same_bits(
        np.ascontiguousarray(got[:, :20]), (acc[0] + acc[1]) + (acc[2] + acc[3])
    )
    assert np.all(got[:, 20:] == 0)


@pytest.mark.parametrize("n", [1, 16, 17, 100, 576])
def test_rms_norm(n: int) -> None:
    rng = np.random.default_rng(n)
    x, w = rng.normal(size=(2, n)).astype(F32)
    out = np.zeros(n, F32)
    call("rms_norm", x, w, n, 1e-5, out)
    lanes = np.zeros(16, F32)
    for i in range(0, n, 16):
        part = x[i : i + 16]
        lanes[: len(part)] = fma(part, part, lanes[: len(part)])
    s = F32(1) / np.sqrt(reduce_lanes(lanes) / F32(n) + F32(1e-5))
    assert same_bits(out, (x * s) * w)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean() + 1e-5) * w
    assert np.allclose(out, exact, rtol=1e-6)
    call("rms_norm", x, w, n, 1e-5, x)
    assert same_bits(x, out)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("n", [2, 24, 64, 80])
def test_rope(n: int, interleaved: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.normal(size=n + 4).astype(F32)
    angle = rng.uniform(0, 6.28, n // 2)
    cos, sin = np.cos(angle).astype(F32), np.sin(angle).astype(F32)
    out = x.copy()
    call("rope", out, cos, sin, n, interleaved)
    first, second = (
        (slice(0, n, 2), slice(1, n, 2))
        if interleaved
        else (
            slice(0, n // 2),
            slice(n // 2, n),
        )
    )
    x0, x1 = x[first], x[second]
    assert same_bits(out[first].copy(), fma(-x1, sin, x0 * cos))
    assert same_bits(out[second].copy(), fma(x0, sin, x1 * cos))
    assert same_bits(out[n:], x[n:])
    turned = (x0 + 1j * x1) * np.exp(1j * angle)
    assert np.allclose(out[first] + 1j * out[second], turned, atol=1e-6)


def test_gates() -> None:
    gate = np.append(np.linspace(-90, 90, 20001), [0.0, 1e30]).astype(F32)
    up = np.random.default_rng(0).normal(size=len(gate)).astype(F32)
    out = np.zeros_like(gate)
    g = gate.astype(np.float64)
    call("swiglu", gate, up, len(gate), out)
    with np.errstate(over="ignore"):
        silu = g / (1 + np.exp(-g))
    assert np.allclose(out, silu * up, rtol=1e-6, atol=1e-35)
    call("geglu", gate, up, len(gate), out)
    gelu = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    assert np.allclose(out, gelu * up, rtol=2e-6, atol=1e-6)
    call("geglu", gate, up, len(gate), gate)
    assert same_bits(gate, out)


def test_add_and_scale() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 37)).astype(F32)
    expected = x + y
    call("add", y, x, 37)
    assert same_bits(y, expected)
    call("scale", y, x, 0.3, 37)
    assert same_bits(y, x * F32(0.3))


class Cache:
    """K and V of one head, 48 slots, stored by the kernels; and as float32."""

    def __init__(self, format: int, head_dim: int) -> None:
        self.format, self.head_dim = format, head_dim
        kind = np.int8 if format == INT8 else np.uint16
        self.keys = np.zeros((3, head_dim, 16), kind)
        self.values = np.zeros((48, head_dim), kind)
        self.key_scale = np.full(48, 9, F32)
        self.value_scale = np.full(48, 9, F32)
        rng = np.random.default_rng(head_dim)
        self.k, self.v = rng.normal(size=(2, 48, head_dim)).astype(F32)
        for slot in range(48):
            where = (head_dim, slot)
            call(
                "kv_store_key", format, self.keys, self.key_scale, *where, self.k[slot]
            )
            call(
                *("kv_store_value", format, self.values, self.value_scale, *where),
                self.v[slot],
            )

    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V (48, head_dim) as stored, without the scales of int8."""
        keys = self.keys.transpose(0, 2, 1).reshape(48, self.head_dim)
        kind = np.int8 if self.format == INT8 else np.float16
        keys = np.ascontiguousarray(keys)
        return keys.view(kind).astype(F32), self.values.view(kind).astype(F32)


@pytest.mark.parametrize("head_dim", [24, 64, 80])
@pytest.mark.parametrize("format", [F16, INT8])
def test_kv_store(format: int, head_dim: int) -> None:
    cache = Cache(format, head_dim)
    for x, kept, scale in zip(
        (cache.k, cache.v),
        cache.kept(),
        (cache.key_scale, cache.value_scale),
        strict=True,
    ):
        if format == F16:
            assert same_bits(kept, x.astype(np.float16).astype(F32))
            assert np.all(scale == 9)
        else:
            a = np.abs(x).max(axis=1)
            assert same_bits(scale, a / F32(127))
            assert np.array_equal(kept, np.rint(x * (F32(127) / a)[:, None]))


def test_kv_store_of_what_is_not_finite() -> None:
    cache = Cache(INT8, 24)
    for slot, value in enumerate([np.nan, np.inf, -np.inf, 0.0]):
        x = np.zeros(24, F32)
        x[5] = value
        call("kv_store_key", INT8, cache.keys, cache.key_scale, 24, slot, x)
        call("kv_store_value", INT8, cache.values, cache.value_scale, 24, slot, x)
    for scale in (cache.key_scale, cache.value_scale):
        assert (
            np.isnan(scale[:3]).all() and scale[3] == 0 and np.isfinite(scale[4:]).all()
        )
    assert all(np.all(kept[:4] == 0) for kept in cache.kept())


@pytest.mark.parametrize(("slot", "count"), [(0, 48), (5, 20), (15, 2), (47, 1)])
@pytest.mark.parametrize("head_dim", [24, 64])
@pytest.mark.parametrize("format", [F16, INT8])
def test_attention(format: int, head_dim: int, slot: int, count: int) -> None:
    cache = Cache(format, head_dim)
    keys, values = cache.kept()
    rng = np.random.default_rng(slot)
    m = 3
    q = rng.normal(size=(m, head_dim)).astype(F32)
    pointers = np.array([row.ctypes.data for row in q], np.uintp)
    score = np.full((m, count + 2), 7, F32)
    where = (head_dim, slot, count)
    call(
        *("attn_scores", format, cache.keys, cache.key_scale, *where, pointers, m),
        *(score, count + 2),
    )
    expected = np.zeros((m, count), F32)
    for i in range(head_dim):
        expected = fma(q[:, i, None], keys[slot : slot + count, i], expected)
    if format == INT8:
        expected = expected * cache.key_scale[slot : slot + count]
    assert same_bits(score[:, :count].copy(), expected)
    assert np.all(score[:, count:] == 7)

    out = rng.normal(size=(m, head_dim)).astype(F32)
    expected = out.copy()
    pointers = np.array([row.ctypes.data for row in out], np.uintp)
    weight = rng.uniform(size=(m, count + 1)).astype(F32)
    call(
        *("attn_mix", format, cache.values, cache.value_scale, *where, weight),
        *(count + 1, m, pointers),
    )
    for c in range(count):
        factor = weight[:, c]
        if format == INT8:
            factor = factor * cache.value_scale[slot + c]
        expected = fma(factor[:, None], values[slot + c], expected)
    assert same_bits(out, expected)


@pytest.mark.parametrize("count", [1, 16, 17, 200])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("sink", [None, 2.5, 60.0])
def test_softmax(count: int, softcap: float, sink: float | None) -> None:
    score = (np.random.default_rng(count).normal(size=count) * 12).astype(F32)
    s = score.astype(np.float64)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    m = max(s.max(), -math.inf if sink is None else sink)
    weights = np.exp(s - m)
    total = weights.sum() + (0 if sink is None else math.exp(sink - m))
    has_sink = int(sink is not None)
    got = call("attn_softmax", score, count, softcap, has_sink, sink or 0.0)
    assert np.allclose(score, weights, rtol=2e-5, atol=1e-30)
    assert math.isclose(got, total, rel_tol=2e-5)
    lanes = np.zeros(16, F32)
    for i in range(0, count, 16):
        lanes[: len(score[i : i + 16])] += score[i : i + 16]
    if sink is None:
        assert got == reduce_lanes(lanes)
    elif not softcap and sink >= score.max():
        assert got == F32(reduce_lanes(lanes) + F32(math.exp(sink - m)))


def test_softmax_of_nan_and_of_a_sink_alone() -> None:
    for place in (0, 7, 19):
        score = np.zeros(20, F32)
        score[place] = np.nan
        assert math.isnan(call("attn_softmax", score, 20, 0.0, 0, 0.0))
    assert call("attn_softmax", np.zeros(1, F32), 0, 0.0, 1, -3.0) == 1.0


def test_halves() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    floats = np.array([library().es_half_to_float(int(h)) for h in halves], F32)
    assert same_bits(floats, halves.view(np.float16).astype(F32))
    rng = np.random.default_rng(0)
    exponents = rng.integers(90, 146, 30000, np.uint32) << 23  # 2^-37 to 2^18
    bits = exponents | rng.integers(0, 1 << 23, 30000, np.uint32)
    bits[::2] &= 0xFFFFF000  # middles between two fp16
    x = bits.view(F32) * np.where(rng.random(30000) < 0.5, F32(-1), F32(1))
    got = np.array([library().es_float_to_half(c_float(v)) for v in x], np.uint16)
    with np.errstate(over="ignore"):
        assert np.array_equal(got, x.astype(np.float16).view(np.uint16))
