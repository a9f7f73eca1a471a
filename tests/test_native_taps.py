"""Hidden states the native engine keeps of a forward, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec._native import (
    NativeBatch,
    NativeModel,
    NativeTargetState,
    cpu_variants,
    tree_derive,
)
from edgespec.errors import NativeError, UsageError
from edgespec_export import forward
from tests.export import families
from tests.test_native_truth import PARENTS, loaded, some_tokens


def states(model: NativeModel, n: int, taps: list[int]) -> list[NativeTargetState]:
    made = [NativeTargetState(model, context=256) for _ in range(n)]
    for state in made:
        state.set_taps(taps)
    return made


@pytest.mark.parametrize("family", families.FAMILIES)
def test_taps_are_the_truths(tmp_path: Path, family: str) -> None:
    """In prefill, a tree, and a pass of several sequences."""
    made = families.gguf(tmp_path / "a.gguf", family, kind="F32")
    layers = made.weights.config.n_layers
    taps = [layers, 0, *range(1, layers)]
    tokens = some_tokens(made, 100 + len(PARENTS))
    tree = tree_derive(tokens[100:], PARENTS)
    visible = np.tri(len(tokens), dtype=bool)
    visible[100:, 100:] = tree.mask
    positions = np.concatenate([np.arange(100), 100 + tree.depth])
    _, expected = forward.hidden_states(
        made.weights, tokens[None], positions=positions, visible=visible, taps=taps
    )
    model = loaded(made.path, threads=3)
    first, second = states(model, 2, taps)
    got = []
    for begin in (0, 64):
        first.prefill(tokens[begin : min(begin + 64, 100)], None)
        got.append(first.read_taps())
    logits = np.empty((64, model.info.vocab), np.float32)
    first.forward(tree, np.array([2], np.int32), logits)
    got.append(first.read_taps())
    rows = np.concatenate(got)
    for place, tap in enumerate(taps):
        off = np.abs(rows[:, place] - expected[tap][0]) / expected[tap].std()
        assert np.median(off) < 1e-3  # keys and values are kept as halves
        assert off.max() < 2e-2

    second.prefill(tokens[:30], None)
    first.commit(np.array([0], np.int32))
    NativeBatch().step([second, first], [int(tokens[30]), 7], logits)
    assert np.array_equal(second.read_taps()[0], rows[30])
    first.truncate(100)
    first.prefill(np.array([tokens[100], 7], np.int32), logits[2])
    assert np.array_equal(logits[2], logits[1])


@pytest.mark.parametrize("cpu", cpu_variants())
def test_taps_are_the_same_bits_however_rows_come(tmp_path: Path, cpu: str) -> None:
    made = families.gguf(tmp_path / "a.gguf", "gemma3", kind="Q4_0")
    tokens = some_tokens(made, 64)
    seen = set()
    for threads, chunk in ((1, 64), (2, 7), (3, 1)):
        (state,) = states(loaded(made.path, threads=threads, cpu=cpu), 1, [0, 1, 2])
        rows = []
        for begin in range(0, 64, chunk):
            state.prefill(tokens[begin : begin + chunk], None)
            rows.append(state.read_taps())
        seen.add(np.concatenate(rows).tobytes())
    assert len(seen) == 1


def test_batches_decode_what_single_targets_do(tmp_path: Path) -> None:
    model = loaded(families.gguf(tmp_path / "a.gguf", "qwen3", kind="Q8_0").path)
    several, alone = states(model, 5, []), states(model, 5, [])
    rows = np.empty((5, model.info.vocab), np.float32)
    row = np.empty((1, model.info.vocab), np.float32)
    batch = NativeBatch()
    for step in range(4):
        tokens = [step + 3 * i for i in range(5)]
        batch.step(several, tokens, rows)
        for i, token in enumerate(tokens):
            alone[i].prefill(np.array([token], np.int32), row[0])
            assert np.array_equal(rows[i], row[0])
    assert [state.length for state in several] == [4] * 5
    with pytest.raises(UsageError, match="logits: expected 5"):
        batch.step(several, tokens, rows[:4])
    with pytest.raises(UsageError, match="0 and 1 are the same"):
        batch.step([several[0]] * 2, [1, 2], rows)


def test_taps_that_are_none_and_reads_too_early(tmp_path: Path) -> None:
    model = loaded(families.gguf(tmp_path / "a.gguf", "llama").path)
    layers = model.info.layers
    (state,) = states(model, 1, [])
    for taps, words in (
        ([layers + 1], f"expected hidden states 0 to {layers}, got {layers + 1}"),
        ([-1], "got -1"),
        ([0] * (layers + 2), f"expected 0 to {layers + 1} of them"),
    ):
        with pytest.raises(UsageError, match=words):
            state.set_taps(taps)
    one = np.array([1], np.int32)
    state.prefill(one, None)
    with pytest.raises(NativeError, match="none are set"):
        state.read_taps()
    state.set_taps([layers])
    with pytest.raises(NativeError, match="nothing was forwarded"):
        state.read_taps()
    state.prefill(one, None)
    assert state.read_taps().shape == (1, 1, model.info.hidden)
    state.set_taps([])
    state.prefill(one, None)
    with pytest.raises(NativeError, match="none are set"):
        state.read_taps()
