"""The native engine against numpy, every family, type and kernel variant; trees too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec._native import NativeModel, NativeTargetState, cpu_variants, tree_derive
from tests import native_oracle
from tests.export import families

N = 14
EDGE = {"f16": 1e-3, "int8": 1e-2}  # what one of them can move the logits by
PARENTS = (-1, 0, 0, 1, 1, 2, 5, 5, 3)


def loaded(path: Path, threads: int = 1, cpu: str | None = None) -> NativeModel:
    model = NativeModel(path, threads=threads, cpu=cpu)
    model.load()
    return model


def decoded(
    model: NativeModel, tokens: NDArray[np.int32], **options
) -> NDArray[np.float32]:
    """Logits (n, vocab) of tokens that come one by one."""
    target = NativeTargetState(model, context=128, **options)
    rows = np.empty((len(tokens), model.info.vocab), np.float32)
    for i in range(len(tokens)):
        target.prefill(tokens[i : i + 1], rows[i])
    return rows


def sizes(kind: str) -> dict[str, int]:
    """Rows of K-quants are multiples of 256."""
    wide = {"hidden": 256, "ffn": 256, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}
    return wide if kind.endswith("_K") else {}


def some_tokens(model: families.Model, n: int = N) -> NDArray[np.int32]:
    rng = np.random.default_rng(3)
    return rng.integers(0, model.weights.config.vocab, n).astype(np.int32)


def check(
    got: NDArray[np.float32], expected: NDArray[np.floating], most: float = 1e-3
) -> None:
    """Equal but where a rounded key, value or input stood on an edge between two.

    Errors are in standard deviations of the logits.
    """
    error = np.abs(got - expected) / expected.std()
    assert expected.std() > 1
    assert np.median(error) < most / 20
    assert error.max() < most


@pytest.mark.parametrize("kv", ["f16", "int8"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_float_weights_give_the_truth(tmp_path: Path, family: str, kv: str) -> None:
    made = families.gguf(tmp_path / "a.gguf", family, kind="F32")
    tokens = some_tokens(made, 40)
    got = decoded(loaded(made.path), tokens, kv=kv)
    check(got, native_oracle.logits(made.weights, tokens, kv=kv), EDGE[kv])
    # and with its keys and values as they are, what transformers is compared to
    exact = native_oracle.logits(made.weights, tokens, kv="f64")
    assert np.abs(made.logits(tokens) - exact).max() < 1e-4 * exact.std()


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_scaling_of_positions(tmp_path: Path, family: str, scaling: str) -> None:
    if scaling not in families.ROPES[family]:
        return
    made = families.gguf(tmp_path / "a.gguf", family, kind="F32", scaling=scaling)
    tokens = some_tokens(made, 100)
    got = decoded(loaded(made.path), tokens)
    check(got, native_oracle.logits(made.weights, tokens))


@pytest.mark.parametrize("kind", families.FILE_TYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_type_and_variant(tmp_path: Path, family: str, kind: str) -> None:
    made = families.gguf(tmp_path / "a.gguf", family, kind=kind, **sizes(kind))
    tokens = some_tokens(made)
    expected = native_oracle.logits(made.weights, tokens)
    plain = decoded(loaded(made.path, cpu="generic"), tokens)
    off = np.abs(plain - expected).max(axis=1) / expected.std()
    assert off.max() < 0.1  # of inputs on an edge, now and then
    assert off.min() < 1e-4
    for cpu in cpu_variants():
        got = decoded(loaded(made.path, threads=2, cpu=cpu), tokens)
        assert np.array_equal(got, plain), cpu


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("n_kv_heads", [1, 4])
def test_untied_heads_of_any_number(
    tmp_path: Path, family: str, n_kv_heads: int
) -> None:
    shape = {"n_kv_heads": n_kv_heads, "is_tied": False, "head_dim": 8, "ffn": 48}
    made = families.gguf(tmp_path / "a.gguf", family, kind="F32", **shape)
    tokens = some_tokens(made)
    got = decoded(loaded(made.path, threads=3), tokens)
    check(got, native_oracle.logits(made.weights, tokens))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_tree_rows_are_what_the_mask_says(tmp_path: Path, family: str) -> None:
    made = families.gguf(tmp_path / "a.gguf", family, kind="F32")
    tokens = some_tokens(made, 20 + len(PARENTS))
    tree = tree_derive(tokens[20:], PARENTS)
    visible = np.tri(len(tokens), dtype=bool)
    visible[20:, 20:] = tree.mask
    positions = np.concatenate([np.arange(20), 20 + tree.depth])
    model = loaded(made.path, threads=2)
    target = NativeTargetState(model, context=64)
    target.prefill(tokens[:20], None)
    got = np.empty((tree.n, model.info.vocab), np.float32)
    target.forward(tree, None, got)
    expected = native_oracle.logits(
        made.weights, tokens, positions=positions, visible=visible
    )
    check(got, expected[20:])


def test_a_window_of_the_host_hides_what_is_behind_it(tmp_path: Path) -> None:
    made = families.gguf(tmp_path / "a.gguf", "llama", kind="F32")
    tokens = some_tokens(made, 90)
    place = np.arange(90)
    near = place[:, None] - place[None, :] < 12
    visible = np.tri(90, dtype=bool) & (near | (place < 3)[None, :])
    expected = native_oracle.logits(made.weights, tokens, visible=visible)
    model = loaded(made.path)
    got = decoded(model, tokens, window=12, sinks=3)
    check(got, expected)
    target = NativeTargetState(model, context=128, window=12, sinks=3)
    last = np.empty(model.info.vocab, np.float32)
    target.prefill(tokens, last)
    assert np.array_equal(last, got[-1])
