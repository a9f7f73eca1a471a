"""Processing and drawing: against transformers' own processors and the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation import logits_process as hf

from edgespec._native import (
    ALL_TOKENS,
    SampleParams,
    noise,
    sample_draw,
    sample_process,
)
from edgespec.errors import NativeError, UsageError
from tests import oracle

VOCAB = 49152


def f32(value: float) -> float:
    """The float32 next to it: what C gets, and at the tail of a nucleus it matters."""
    return float(np.float32(value))


def row_of(seed: int, vocab: int = VOCAB, spread: float = 4.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


def apply(
    processor: object, row: NDArray[np.float32], history: list[int]
) -> NDArray[np.float32]:
    """One transformers processor on one row, in float64: its sums do not round."""
    scores = torch.tensor(row[None].astype(np.float64))
    out = processor(torch.tensor([history]), scores)  # type: ignore[operator]
    return np.asarray(out[0].numpy(), dtype=np.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("field", "value", "processor"),
    [
        ("top_k", 1, hf.TopKLogitsWarper(1)),
        ("top_k", 40, hf.TopKLogitsWarper(40)),
        ("top_k", 49151, hf.TopKLogitsWarper(49151)),
        ("top_p", f32(0.1), hf.TopPLogitsWarper(f32(0.1))),
        ("top_p", f32(0.95), hf.TopPLogitsWarper(f32(0.95))),
        ("top_p", f32(0.9999), hf.TopPLogitsWarper(f32(0.9999))),
        ("min_p", 0.05, hf.MinPLogitsWarper(0.05)),
        ("min_p", 1e-4, hf.MinPLogitsWarper(1e-4)),
        ("repetition_penalty", 1.3, hf.RepetitionPenaltyLogitsProcessor(1.3)),
        ("repetition_penalty", 0.5, hf.RepetitionPenaltyLogitsProcessor(0.5)),
        ("temperature", 0.7, hf.TemperatureLogitsWarper(0.7)),
        ("temperature", 3.0, hf.TemperatureLogitsWarper(3.0)),
    ],
)
def test_each_filter_equals_transformers(
    field: str, value: float, processor: object, seed: int
) -> None:
    row = row_of(seed)
    history = [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, 500)]
    params = dataclasses.replace(SampleParams(), **{field: value})  # type: ignore[arg-type]
    ours = sample_process(params, history, row)
    theirs = apply(processor, row, history)
    assert np.array_equal(np.isinf(ours), np.isinf(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=3e-7)


def test_logit_bias_equals_transformers() -> None:
    row = row_of(7)
    bias = {3: 2.5, 4: -1.0, 40000: float("-inf")}
    processor = hf.SequenceBiasLogitsProcessor([[[t], v] for t, v in bias.items()])
    ours = sample_process(SampleParams(logit_bias=tuple(bias.items())), [1], row)
    np.testing.assert_allclose(ours, apply(processor, row, [1]), rtol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_whole_chain_equals_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = row_of(seed)
    history = [int(t) for t in rng.integers(0, VOCAB, 64)]
    params = SampleParams(
        temperature=0.75,
        top_k=200,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        logit_bias=((5, 3.0), (6, float("-inf"))),
    )
    theirs = row
    for processor in (
        hf.SequenceBiasLogitsProcessor([[[t], v] for t, v in params.logit_bias]),
        hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        hf.TemperatureLogitsWarper(params.temperature),
        hf.TopKLogitsWarper(params.top_k),
        hf.TopPLogitsWarper(params.top_p),
        hf.MinPLogitsWarper(params.min_p),
    ):
        theirs = apply(processor, theirs, history)
    ours = sample_process(params, history, row)
    assert np.array_equal(np.isinf(ours), np.isinf(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert np.isfinite(ours).sum() > 1


params_strategy = st.builds(
    SampleParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 9_999_999]),
    top_p=st.sampled_from([0.05, 0.31, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 0.97]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    presence_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    penalty_window=st.sampled_from([ALL_TOKENS, 0, 1, 3, 64]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.sampled_from([(), ((1, 1.5),), ((0, float("-inf")), (2, -0.5))]),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    params=params_strategy,
    vocab=st.sampled_from([5, 21, 130, 1000]),
    seed=st.integers(0, 10**6),
    n_history=st.integers(1, 80),
    index=st.integers(0, 2**63),
    is_coarse=st.booleans(),
    is_masked=st.booleans(),
)
def test_process_and_draw_equal_the_oracle(
    params: SampleParams,
    vocab: int,
    seed: int,
    n_history: int,
    index: int,
    is_coarse: bool,
    is_masked: bool,
) -> None:
    rng = np.random.default_rng(seed)
    row = row_of(seed, vocab)
    if is_coarse:  # many equal logits: ties everywhere
        row = np.round(row / 4).astype(np.float32)
    history = [int(t) for t in rng.integers(0, vocab, n_history)]
    allowed = rng.random(vocab) < 0.7
    allowed[3] = True
    mask = allowed if is_masked else None
    ours = sample_process(params, history, row, mask)
    theirs = oracle.process(params, history, row, mask)
    np.testing.assert_array_equal(ours, theirs)
    assert sample_draw(params, ours, index) == oracle.draw(params, theirs, index)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.5])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_lazy_draw_equals_full_noise(temperature: float, spread: float) -> None:
    params = SampleParams(temperature=temperature, seed=11)
    for index in range(25):
        row = sample_process(params, [1], row_of(index, 20_000, spread))
        assert sample_draw(params, row, index) == oracle.draw(params, row, index)


def test_noise_equals_the_oracle() -> None:
    for seed, index in [(0, 0), (1, 2), (2**64 - 1, 2**40 + 5), (12345, 2**64 - 1)]:
        theirs = oracle.noise(seed, index, 500)
        ours = [noise(seed, index, t) for t in range(500)]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


def test_philox_known_answers() -> None:
    for counter, key, expected in [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
    ]:
        assert oracle.philox(counter, key).tolist() == expected


def test_noise_has_gumbel_moments() -> None:
    values = np.array([noise(3, i, t) for i in range(200) for t in range(100)])
    assert abs(values.mean() - np.euler_gamma) < 0.03
    assert abs(values.var() - np.pi**2 / 6) < 0.08


# ---- field cases --------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [5, 21])
@pytest.mark.parametrize("top_k", [0, 5, 6, 21, 22, 9_999_999])
def test_c15_top_k_at_and_beyond_the_vocabulary_is_off(vocab: int, top_k: int) -> None:
    row = row_of(1, vocab)
    ours = sample_process(SampleParams(top_k=top_k), [1], row)
    kept = vocab if top_k in (0, 9_999_999) else min(top_k, vocab)
    assert np.isfinite(ours).sum() == kept


def test_c15_top_k_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="top_k"):
        sample_process(SampleParams(top_k=-1), [1], row_of(1, 5))


def test_c15_every_draw_is_inside_the_nucleus() -> None:
    params = SampleParams(top_k=40, top_p=0.95, seed=5)
    for i in range(300):
        row = sample_process(params, [1], row_of(i, 300))
        assert np.isfinite(row[sample_draw(params, row, i)])


def test_c13_penalties_count_occurrences_in_the_window() -> None:
    row = np.array([4.0, 4.0, 4.0, -4.0], np.float32)
    history = [0, 1, 1, 3]
    penalised = SampleParams(
        temperature=0, frequency_penalty=0.5, presence_penalty=0.25, penalty_window=3
    )
    assert sample_process(penalised, history, row).tolist() == [4.0, 2.75, 4.0, -4.75]
    repeated = SampleParams(temperature=0, repetition_penalty=2.0, penalty_window=2)
    assert sample_process(repeated, history, row).tolist() == [4.0, 2.0, 4.0, -8.0]


def test_c13_repetition_penalty_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="repetition_penalty"):
        sample_process(SampleParams(repetition_penalty=0.0), [1], row_of(1, 5))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("presence_penalty", float("nan")),
        ("penalty_window", -2),
        ("logit_bias", ((5, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((0, float("nan")),)),
        ("logit_bias", ((0, float("inf")),)),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_values_outside_their_range_are_named(field: str, value: object) -> None:
    params = dataclasses.replace(SampleParams(), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=field.split("_")[0]):
        sample_process(params, [1], row_of(1, 5))


def test_history_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="history"):
        sample_process(SampleParams(presence_penalty=1.0), [5], row_of(1, 5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numeric_errors(temperature: float) -> None:
    params = SampleParams(temperature=temperature)
    for at in (0, 17, 20):  # in the vectors and in their remainder
        row = row_of(1, 21)
        row[at] = np.nan
        with pytest.raises(NativeError, match="NaN"):
            sample_process(params, [1], row)
        with pytest.raises(NativeError, match="NaN"):
            sample_draw(params, row, 0)
        row[at] = np.inf
        with pytest.raises(NativeError, match="infinite"):
            sample_process(params, [1], row)
    with pytest.raises(NativeError, match="removed"):
        sample_process(params, [1], row_of(1, 21), np.zeros(21, np.bool_))
    banned = SampleParams(
        temperature=temperature,
        logit_bias=tuple((t, float("-inf")) for t in range(5)),
    )
    with pytest.raises(NativeError, match="removed"):
        sample_process(banned, [1], row_of(1, 5))


def test_the_input_row_is_not_changed() -> None:
    row = row_of(1, 21)
    before = row.copy()
    sample_process(SampleParams(top_k=2), [1], row)
    assert np.array_equal(row, before)
