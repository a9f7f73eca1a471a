"""A row's logits are a function of its ancestors: the same bits however it comes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec._native import NativeModel, NativeTargetState, cpu_variants, tree_derive
from edgespec.tree.topology import MAX_ROWS, Tree
from tests.export import families

PREFIX = 37
COUNTS = (*range(1, 17), 24, 32, 64)
WIDE = {"hidden": 256, "ffn": 512, "n_heads": 8, "head_dim": 32}  # for K-quants
MODELS = {
    "llama-q4_1": ("llama", "Q4_1", {"n_heads": 6, "n_kv_heads": 2}),
    "qwen2-f16": ("qwen2", "F16", {"head_dim": 24}),
    "qwen3-q4_k": ("qwen3", "Q4_K", WIDE | {"n_kv_heads": 1}),
    "gemma3-q5_0": ("gemma3", "Q5_0", {"n_kv_heads": 4}),
}


class Case:
    """A model, a bushy tree of the most rows, and its rows decoded one by one."""

    def __init__(self, path: Path, family: str, kind: str, sizes: dict) -> None:
        made = families.gguf(path, family, kind=kind, embedding="Q8_0", **sizes)
        self.path, self.vocab = made.path, made.weights.config.vocab
        rng = np.random.default_rng(5)
        with_rows = self.opened(1, cpu_variants()[0])
        self.prompt = rng.integers(0, self.vocab, PREFIX + MAX_ROWS).astype(np.int32)
        parents = [-1] + [int(rng.integers(max(0, i - 7), i)) for i in range(1, 64)]
        self.tree = tree_derive(self.prompt[PREFIX:], parents)
        self.rows = self._alone(with_rows)
        self.chain = np.empty((MAX_ROWS, self.vocab), np.float32)
        with_rows.truncate(PREFIX)
        for i in range(MAX_ROWS):
            token = self.prompt[PREFIX + i : PREFIX + i + 1]
            with_rows.prefill(token, self.chain[i])

    def opened(self, threads: int, cpu: str) -> NativeTargetState:
        model = NativeModel(self.path, threads=threads, cpu=cpu)
        model.load()
        return NativeTargetState(model, context=PREFIX + MAX_ROWS)

    def _alone(self, target: NativeTargetState) -> NDArray[np.float32]:
        rows = np.empty((MAX_ROWS, self.vocab), np.float32)
        target.prefill(self.prompt[:PREFIX], None)
        for row in range(MAX_ROWS):
            target.truncate(PREFIX)
            for token in self.tree.tokens[self.tree.mask[row]]:
                target.prefill(np.array([token]), rows[row])
        return rows

    def first(self, n: int) -> Tree:
        return tree_derive(self.tree.tokens[:n], self.tree.parent[:n])


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("bits") / "a.gguf", *MODELS[request.param])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("cpu", cpu_variants())
def test_c07_trees_of_every_size(case: Case, threads: int, cpu: str) -> None:
    target = case.opened(threads, cpu)
    target.prefill(case.prompt[:PREFIX], None)
    got = np.empty((MAX_ROWS, case.vocab), np.float32)
    for n in COUNTS if cpu != "generic" else (1, 5, 64):
        got.fill(np.nan)
        target.forward(case.first(n), None, got)
        assert np.array_equal(got[:n], case.rows[:n]), n
        assert np.isnan(got[n:]).all()


def test_prompts_in_chunks_of_every_size(case: Case) -> None:
    target = case.opened(2, cpu_variants()[0])
    end = np.empty(case.vocab, np.float32)
    n = len(case.prompt)
    for size in (*range(1, 20), 31, 32, 33, 63, 64, 65, n):
        target.truncate(0)
        for begin in range(0, n, size):
            target.prefill(case.prompt[begin : begin + size], end)
            last = min(begin + size, n) - PREFIX - 1
            assert last < 0 or np.array_equal(end, case.chain[last]), size


def test_rows_nobody_asked_for_change_nothing(case: Case) -> None:
    target = case.opened(2, cpu_variants()[0])
    target.prefill(case.prompt[:PREFIX], None)
    rng = np.random.default_rng(1)
    for n_rows in (1, 2, 4, 5, 30):
        rows = np.sort(rng.choice(MAX_ROWS, n_rows, replace=False)).astype(np.int32)
        got = np.empty((n_rows, case.vocab), np.float32)
        target.forward(case.tree, rows, got)
        assert np.array_equal(got, case.rows[rows])
