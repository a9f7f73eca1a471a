"""The KV cache of the C core against numpy over a list that never saw a rejected row.

native/tests/test_kvcache.c holds every variant of the kernels to the same bits; here
the formulas themselves are checked, in float64.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native_attention import ERR_CONTEXT, F16, INT8, Cache, NativeError


def rounded(x: np.ndarray, kind: int) -> np.ndarray:
    """K or V rows (..., head_dim) as the cache keeps them."""
    if kind == F16:
        return x.astype(np.float16).astype(np.float64)
    # In float32 as documented: a value near the middle of two steps may take either.
    most = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
    scale = most / np.float32(127)
    steps = np.rint(x.astype(np.float32) * (np.float32(127) / most))
    return steps.astype(np.float64) * scale


@dataclasses.dataclass
class Truth:
    """Committed rows as lists by position, and attention by its definition."""

    kind: int
    windowed: list[bool]
    window: int
    sinks: int
    softcap: float
    sink_logits: np.ndarray | None
    k: list[np.ndarray] = dataclasses.field(default_factory=list)
    v: list[np.ndarray] = dataclasses.field(default_factory=list)

    def attend(
        self, layer: int, q: np.ndarray, k: list[np.ndarray], v: list[np.ndarray]
    ) -> np.ndarray:
        """One row q (heads, head_dim) behind the committed rows and its ancestors k, v
        (each (layers, kv_heads, head_dim), itself last)."""
        keys = np.stack([row[layer] for row in self.k + k], axis=1)
        values = np.stack([row[layer] for row in self.v + v], axis=1)
        position = keys.shape[1] - 1
        seen = np.arange(position + 1)
        if self.windowed[layer]:
            seen = seen[(seen < self.sinks) | (seen > position - self.window)]
        out = np.empty_like(q, np.float64)
        for head in range(len(q)):
            group = head // (len(q) // len(keys))
            scores = rounded(keys[group, seen], self.kind) @ q[head].astype(np.float64)
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            extra = [] if self.sink_logits is None else [self.sink_logits[head]]
            most = max([*scores, *extra])
            weights = np.exp(scores - most)
            total = weights.sum() + sum(np.exp(np.array(extra) - most))
            out[head] = weights @ rounded(values[group, seen], self.kind) / total
        return out


shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2]),
        "group": st.sampled_from([1, 2, 3]),
        "head_dim": st.sampled_from([32, 40, 64, 80, 96, 128, 256]),
        "kind": st.sampled_from([F16, INT8]),
        "windowed": st.sampled_from([[False, False], [False, True], [True, True]]),
        "window": st.integers(1, 20),
        "sinks": st.integers(0, 5),
        "softcap": st.sampled_from([0.0, 5.0, 30.0]),
        "has_sinks": st.booleans(),
    }
)


@given(shape=shapes, data=st.data(), seed=st.integers(0, 1 << 31))
@settings(max_examples=60, deadline=None)
def test_rows_see_what_a_cache_without_rejections_holds(shape, data, seed) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, width = shape["kv_heads"], shape["head_dim"]
    heads = kv_heads * shape["group"]
    logits = rng.normal(size=heads).astype(np.float32) if shape["has_sinks"] else None
    cache = Cache(
        layers=2,
        heads=heads,
        context=120,
        sink_logits=logits,
        **{k: v for k, v in shape.items() if k not in ("group", "has_sinks")},
    )
    truth = Truth(
        *(shape[k] for k in ("kind", "windowed", "window", "sinks", "softcap")), logits
    )
    is_bounded = not all(shape["windowed"])
    for _ in range(data.draw(st.integers(1, 10))):
        n = data.draw(st.sampled_from([1, 2, 3, 5, 8, 16, 33, 64]))
        is_chain = data.draw(st.booleans())
        parent = [-1, *(data.draw(st.integers(max(0, i - 6), i)) for i in range(n - 1))]
        k, v = rng.normal(size=(2, 2, n, kv_heads, width)).astype(np.float32)
        q = rng.normal(size=(n, heads, width), scale=0.3).astype(np.float32)
        if is_bounded and len(cache) + n > 120:
            with pytest.raises(NativeError) as caught:
                cache.append(n, k, v)
            assert caught.value.status == ERR_CONTEXT
            assert cache.truncate(0)
            truth.k, truth.v = [], []
            continue
        cache.append(n if is_chain else parent, k, v)
        paths: list[list[int]] = []
        for i in range(n):
            before = i - 1 if is_chain else parent[i]
            paths.append([*(paths[before] if i else []), i])
        for layer in range(2):
            got = cache.attend(layer, q)
            for i in {0, n // 2, n - 1}:
                rows = [[a[:, j] for j in paths[i]] for a in (k, v)]
                expected = truth.attend(layer, q[i], *rows)
                np.testing.assert_allclose(got[i], expected, rtol=2e-4, atol=2e-5)
        action = data.draw(st.sampled_from(["commit", "commit", "rollback", "cut"]))
        if action == "commit":
            path = paths[data.draw(st.integers(0, n - 1))]
            cache.commit(path)
            truth.k += [k[:, j] for j in path]
            truth.v += [v[:, j] for j in path]
        elif action == "cut":
            length = data.draw(st.integers(0, len(cache)))
            if cache.truncate(length):
                del truth.k[length:], truth.v[length:]
            else:
                assert any(shape["windowed"])
        else:
            cache.rollback()
        assert len(cache) == len(truth.k)


def test_c01_wraps_after_rejected_drafts() -> None:
    """600 tokens through a ring of 256 slots, a draft rejected in every round."""
    rng = np.random.default_rng(1)
    window = 256 - 64
    cache = Cache(head_dim=32, windowed=[True], window=window, context=4096)
    truth = Truth(F16, [True], window, 0, 0.0, None)
    while len(cache) < 600:
        k, v = rng.normal(size=(2, 1, 7, 1, 32)).astype(np.float32)
        q = rng.normal(size=(7, 1, 32)).astype(np.float32)
        cache.append([-1, 0, 0, 1, 2, 4, 4], k, v)
        got = cache.attend(0, q)
        path = [0, 2, 4]
        rows = [[a[:, j] for j in path] for a in (k, v)]
        expected = truth.attend(0, q[4], *rows)
        np.testing.assert_allclose(got[4], expected, rtol=2e-4, atol=2e-5)
        cache.commit(path[: 1 + len(cache) % 3])
        n = len(cache) - len(truth.k)
        truth.k += rows[0][:n]
        truth.v += rows[1][:n]


def resident() -> int:
    """Bytes of memory this process really has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_memory_is_taken_when_rows_come_and_no_sooner() -> None:
    """c40: a context nobody uses costs nothing, and turns over it cost nothing more."""
    rng = np.random.default_rng(2)
    k, v = rng.normal(size=(2, 8, 64, 2, 128)).astype(np.float32)
    before = resident()
    cache = Cache(layers=8, kv_heads=2, head_dim=128, context=1 << 16)
    assert cache.bytes() > 1 << 29
    assert resident() - before < 4 << 20
    after = []
    for _ in range(20):
        cache.truncate(0)
        for _ in range(2):
            cache.append(64, k, v)
            cache.commit(list(range(64)))
        after.append(resident())
    assert after[0] - before < 16 << 20
    assert after[-1] - after[0] < 1 << 20


def test_a_window_bounds_the_memory() -> None:
    whole = Cache(layers=2, context=4096).bytes()
    mixed = Cache(layers=2, context=4096, windowed=[False, True], window=64).bytes()
    small = Cache(layers=2, context=4096, windowed=[True, True], window=64).bytes()
    assert small < mixed < 0.6 * whole and small < 0.05 * whole
