"""Accepted rows move forward in linear KV buffers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec import _native
from edgespec.errors import UsageError


@given(
    n_heads=st.integers(1, 3),
    first=st.integers(0, 5),
    row=st.integers(1, 7),
    path=st.lists(st.integers(0, 15), unique=True, max_size=12).map(sorted),
    dtype=st.sampled_from([np.uint8, np.float16, np.float32]),
)
def test_compact_is_a_gather_that_leaves_the_rest(n_heads, first, row, path, dtype):
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 200, (n_heads, first + 16 + 2, row)).astype(dtype)
    expected = cache.copy()
    expected[:, first : first + len(path)] = cache[:, [first + p for p in path]]
    _native.kv_compact(cache, first, path)
    np.testing.assert_array_equal(cache, expected)


def test_c05_tree_commit_moves_keys_and_values_by_the_same_rows():
    """Rows 0, 2, 5, 9 of a tree of 16: K and V as if that path had been decoded."""
    past, path = 7, [0, 2, 5, 9]
    rng = np.random.default_rng(5)
    tree_keys, tree_values = rng.standard_normal((2, 3, 16, 8)).astype(np.float32)
    for tree_rows in (tree_keys, tree_values):
        cache = rng.standard_normal((3, 32, 8)).astype(np.float32)
        one_by_one = cache.copy()
        for i, row in enumerate(path):
            one_by_one[:, past + i] = tree_rows[:, row]
        cache[:, past : past + 16] = tree_rows
        _native.kv_compact(cache, past, path)
        end = past + len(path)
        np.testing.assert_array_equal(cache[:, :end], one_by_one[:, :end])


@pytest.mark.parametrize("path", [[1, 1], [2, 1], [-1], [0, 0, 1]])
def test_compact_refuses_paths_that_do_not_ascend(path):
    cache = np.arange(40, dtype=np.float32).reshape(1, 10, 4)
    before = cache.copy()
    with pytest.raises(UsageError, match=r"path\[\d\]: expected more than"):
        _native.kv_compact(cache, 2, path)
    np.testing.assert_array_equal(cache, before)


def test_compact_refuses_rows_behind_the_buffer():
    cache = np.zeros((2, 10, 4), np.float32)
    with pytest.raises(UsageError):
        _native.kv_compact(cache, 8, [0, 2])
