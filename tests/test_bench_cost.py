"""c(n): which forwards are timed, in what order, and what is made of the times."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec import bench_cost
from edgespec.bench_arms import Opened
from edgespec.bench_cost import BURST, PREFILL, Case, Costs
from tests.scripted import scripted_session
from tests.toy import ToyTarget, session


class Counting(ToyTarget):
    """Its clock ticks once per row forwarded."""

    def __init__(self, log: list[tuple[str, int, bool, int]], name: str) -> None:
        super().__init__(context=4096)
        self.log, self.label, self.ticks = log, name, 0

    def forward(self, tree, logit_rows=None):
        assert logit_rows is None, "logits of all rows"
        self.log.append((self.label, tree.n, tree.is_chain, self.length))
        self.ticks += tree.n
        return np.zeros((tree.n, self.vocab), np.float32)

    def prefill(self, tokens):
        self.ticks += len(tokens)
        self._length += len(tokens)
        return np.zeros(self.vocab, np.float32)


@pytest.fixture
def pair() -> tuple[list[Opened], list[tuple[str, int, bool, int]]]:
    log: list[tuple[str, int, bool, int]] = []
    opened = []
    for name in ("one", "llamacpp"):
        target = Counting(log, name)

        def clock(target: Counting = target) -> float:
            return float(target.ticks)

        opened.append(Opened(name, session(target), "", clock))
    return opened, log


def test_every_width_behind_every_cache_with_all_backends_in_turn(pair) -> None:
    opened, log = pair
    costs = bench_cost.measure(opened, visits=5)
    assert costs.is_complete
    for cached in (256, 2048):
        for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64):
            found = costs.seconds["one", Case(cached, rows, "tree")]
            assert [len(visit) for visit in found] == [BURST] * 5
            assert 5 * BURST >= 15
            assert costs.median("one", Case(cached, rows, "tree")) == rows
            assert costs.relative("llamacpp", Case(cached, rows, "tree")) == rows
    assert {length for _, _, _, length in log} == {256, 2048}
    assert all(
        is_chain == (n < 3) for _, n, is_chain, _ in log if n not in (4, 8, 16, 64)
    )
    assert {is_chain for _, n, is_chain, _ in log if n == 16} == {True, False}
    bursts = [log[i : i + BURST + 1] for i in range(0, len(log), BURST + 1)]
    assert all(len(set(burst)) == 1 for burst in bursts)
    names = [burst[0][0] for burst in bursts]
    turns = [names[i : i + 2] for i in range(0, len(names), 2)]
    assert {tuple(turn) for turn in turns} == {("one", "llamacpp"), ("llamacpp", "one")}
    assert costs.median("one", Case(0, PREFILL, "chain")) == PREFILL
    assert all(backend.session.target.length == 0 for backend in opened)


def test_a_small_context_leaves_out_what_does_not_fit() -> None:
    opened = [Opened("one", scripted_session({}, context=300), "")]
    costs = bench_cost.measure(opened, visits=1)
    assert costs.is_complete
    assert max(case.cached + case.rows for case in costs.cases) == 256 + 32
    assert all(case.cached for case in costs.cases)


def test_branches_are_as_wide_as_they_can_be() -> None:
    tree = bench_cost.branching(np.arange(7, dtype=np.int32))
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert bench_cost.branching(np.zeros(1, np.int32)).n == 1


def test_figures_from_times() -> None:
    one, eight = Case(256, 1, "tree"), Case(256, 8, "tree")
    chain = Case(256, 8, "chain")
    costs = Costs(
        ["native", "llamacpp", "llamacpp-fa"],
        [one, eight, chain],
        2,
        {
            ("native", one): [[2e-3, 2e-3, 9e-3], [2e-3, 1e-3, 2e-3]],
            ("native", eight): [[3e-3, 3e-3, 3e-3], [3e-3, 3e-3, 3e-3]],
            ("native", chain): [[2.5e-3] * 3] * 2,
            ("llamacpp", one): [[6e-3] * 3] * 2,
            ("llamacpp", eight): [[24e-3] * 3] * 2,
            ("llamacpp-fa", one): [[5e-3] * 3] * 2,
            ("llamacpp-fa", eight): [[30e-3] * 3] * 2,
        },
        True,
    )
    assert costs.relative("native", eight) == pytest.approx(1.5)
    assert costs.relative("llamacpp", eight) == pytest.approx(4)
    assert costs.mask_cost("native", eight) == pytest.approx(0.2)
    assert costs.mask_cost("llamacpp", eight) is None
    assert costs.best("llamacpp", one) == "llamacpp-fa"
    assert costs.best("llamacpp", eight) == "llamacpp"
    assert costs.best("onnx", one) is None
    assert costs.ratio("llamacpp", "native", eight).middle == pytest.approx(8)
    rows = bench_cost.report(costs, {"model": "m"})["cost"]
    of = {(row["backend"], row["rows"], row["shape"]): row for row in rows}
    assert of["native", 8, "tree"]["ratio_vs_llamacpp"] == pytest.approx(8)
    assert of["native", 1, "tree"]["ratio_vs_llamacpp"] == pytest.approx(2.5)
    assert of["native", 1, "tree"]["ms"] == pytest.approx(2)
    assert of["native", 8, "chain"]["ratio_vs_llamacpp"] is None
    assert len(rows) == 7


def test_interrupts_keep_what_was_timed(pair) -> None:
    opened, _ = pair

    def progress(what: str, done: int, total: int) -> None:
        if done == 12:
            raise KeyboardInterrupt

    costs = bench_cost.measure(opened, visits=5, progress=progress)
    assert not costs.is_complete
    assert len(costs.seconds["one", Case(0, PREFILL, "chain")]) == 5
    assert bench_cost.report(costs, {})["complete"] is False

    def at_once(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_cost.measure(opened, visits=5, progress=at_once)
