"""Windows, and figures of logits that do not come from a model."""

from __future__ import annotations

import numpy as np

from edgespec.agreement import surprise, windows


def test_windows_drop_the_rest_and_open_with_a_start() -> None:
    ids = list(range(10, 20))
    assert windows(ids, 4).tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert windows(ids, 4, [1]).tolist() == [
        [1, 10, 11, 12],
        [1, 13, 14, 15],
        [1, 16, 17, 18],
    ]
    assert windows(ids, 512).tolist() == [ids]


def test_surprise_is_the_negative_log_of_the_softmax() -> None:
    logits = np.random.default_rng(0).standard_normal((20, 50)).astype(np.float32) * 5
    tokens = np.arange(20) * 7 % 50
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    expected = -np.log(p[np.arange(20), tokens])
    np.testing.assert_allclose(surprise(logits, tokens), expected, rtol=1e-5)
    np.testing.assert_allclose(surprise(logits + 90, tokens), expected, rtol=1e-4)
