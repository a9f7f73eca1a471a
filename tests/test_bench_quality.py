"""Perplexity and KL of backends on a text, against straight computations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from edgespec import bench_quality
from edgespec.bench_arms import Opened
from edgespec.bench_quality import TRUTH
from edgespec.bundle import Bundle
from edgespec.errors import UsageError
from tests.toy import VOCAB, ToyTarget, session


class Softer(ToyTarget):
    """The toy's logits, halved."""

    def _forward(self, tree):
        return super()._forward(tree) / 2


ROWS = (np.arange(3 * 150).reshape(3, 150) * 31 % VOCAB).astype(np.int64)


def logits_of(target: ToyTarget, window: np.ndarray) -> np.ndarray:
    tokens = window.tolist()
    return np.stack([target.row(tokens[: i + 1]) for i in range(len(tokens))])


def opened(**targets: ToyTarget) -> list[Opened]:
    return [Opened(name, session(target), "") for name, target in targets.items()]


def test_figures_are_the_textbook_ones() -> None:
    backends = opened(one=ToyTarget(), two=Softer())
    one, two = bench_quality.measure(backends, ROWS)
    rows = np.stack([logits_of(ToyTarget(), window) for window in ROWS])
    for found, scale in ((one, 1.0), (two, 0.5)):
        log = log_softmax(rows.astype(np.float64) * scale, axis=-1)
        nats = -np.take_along_axis(log[:, :-1], ROWS[:, 1:, None], axis=-1)
        assert found.perplexity == pytest.approx(np.exp(nats.mean()), rel=1e-4)
        assert found.tokens == ROWS.size
    p, q = (log_softmax(rows.astype(np.float64) * s, axis=-1) for s in (1.0, 0.5))
    assert two.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-4)
    assert two.top1 == 1.0
    assert (one.kl, one.top1, one.reference) == (None, None, None)
    assert two.reference == "one"
    assert all(backend.session.target.length == 0 for backend in backends)


def test_a_truth_comes_first_when_there_is_one() -> None:
    twin = ToyTarget()

    def truth(index: int, part: slice) -> np.ndarray:
        return logits_of(twin, ROWS[index])[part]

    found = bench_quality.measure(opened(one=ToyTarget(), two=Softer()), ROWS, truth)
    assert [row.backend for row in found] == [TRUTH, "one", "two"]
    assert found[1].kl == pytest.approx(0, abs=1e-6)
    assert found[1].perplexity == pytest.approx(found[0].perplexity)
    assert {row.reference for row in found[1:]} == {TRUTH}
    assert bench_quality.report(found, {"model": "m"})["quality"][2]["backend"] == "two"


def test_interrupts_keep_whole_windows() -> None:
    def progress(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    (found,) = bench_quality.measure(opened(one=ToyTarget()), ROWS, progress=progress)
    assert found.tokens == 2 * 150

    def at_once(what: str, done: int, total: int) -> None:
        if done == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_quality.measure(opened(one=ToyTarget()), ROWS, progress=at_once)


def test_text_is_ours_or_the_one_asked_for(tmp_path, monkeypatch) -> None:
    assert len(bench_quality.read_text(None)) > 30_000
    path = tmp_path / "text"
    path.write_text("wörds")
    assert bench_quality.read_text(path) == "wörds"
    with pytest.raises(UsageError, match="--text: cannot read"):
        bench_quality.read_text(tmp_path)
    monkeypatch.setattr(bench_quality, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--text FILE"):
        bench_quality.read_text(None)


def test_our_text_has_8_k_tokens_of_windows(smollm2_bundle: Bundle) -> None:
    text = bench_quality.read_text(None)
    windows = bench_quality.cut(smollm2_bundle, text)
    assert windows.size >= 8192
    assert windows.shape[1] == 512
    with pytest.raises(UsageError, match="2 tokens"):
        bench_quality.cut(smollm2_bundle, "")
