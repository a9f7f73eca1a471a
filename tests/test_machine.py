"""What the processor can do: every kernel computes the same sum, rates make sense."""

from __future__ import annotations

import ctypes
import sys
from functools import reduce
from operator import xor
from pathlib import Path

import numpy as np
import pytest

from edgespec import _native, machine
from edgespec.errors import UsageError


def test_int8_kernels_agree_with_numpy_modulo_their_repeats() -> None:
    kernels = _native.int8_kernels()
    assert kernels[-1] == "portable"
    assert len(set(kernels)) == len(kernels)
    i = np.arange(512)
    dot = int(((i * 7 % 128) * (i * 5 % 255 - 127)).sum())
    expected = ctypes.c_int32(dot * 2048).value
    for kernel in range(len(kernels)):
        rate, checksum = _native.measure_int8(kernel, 0.005)
        assert checksum == expected, kernels[kernel]
        assert rate > 1e8, kernels[kernel]


@pytest.mark.parametrize("n_words", [1, 7, 31, 32, 33, 64, 1000])
def test_reading_visits_every_word(n_words: int) -> None:
    words = np.random.default_rng(n_words).integers(
        0, 1 << 63, n_words, dtype=np.uint64
    )
    rate, checksum = _native.measure_read(words, 0.001)
    assert checksum == reduce(xor, words.tolist())
    assert rate > 0


def test_features_name_what_the_system_names() -> None:
    features = _native.cpu_features()
    assert len(set(features)) == len(features)
    cpuinfo = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                flags |= set(line.partition(":")[2].split())
    known = {"sse4_1", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni"}
    if flags:
        assert set(features) & known == flags & known


def test_best_kernel_matches_the_features() -> None:
    features, kernels = set(_native.cpu_features()), _native.int8_kernels()
    assert ("avx512_vnni" in kernels) <= ("avx512_vnni" in features)
    assert ("avx2" in kernels) == ("avx2" in features)


def test_bad_arguments_are_named() -> None:
    words = np.zeros(4, dtype=np.uint64)
    with pytest.raises(UsageError, match="seconds"):
        _native.measure_read(words, 0.0)
    with pytest.raises(UsageError, match="seconds"):
        _native.measure_int8(0, float("nan"))
    with pytest.raises(UsageError, match="aligned"):
        _native.measure_read(words[:0], 0.001)
    n = len(_native.int8_kernels())
    for kernel in (-1, n):
        with pytest.raises(UsageError, match=f"expected 0..{n - 1}"):
            _native.measure_int8(kernel, 0.001)


def test_rates_add_up_over_threads() -> None:
    rates = machine.measure(2, buffer_bytes=1 << 20, window=0.002)
    assert rates.threads == 2
    assert rates.read_gb_per_s > 0.1
    assert rates.int8_gmac_per_s > 0.1
    assert rates.int8_kernel == _native.int8_kernels()[0]


def test_names_and_memory_of_this_machine() -> None:
    assert machine.cpu_name()
    sizes = machine.memory_bytes()
    if sys.platform == "linux":
        assert sizes is not None
        total, available = sizes
        assert 0 < available <= total


def test_bystanders_share_is_what_others_took(monkeypatch) -> None:
    # There were, used by anybody, used by us: seconds so far.
    readings = iter([(100.0, 60.0, 10.0), (120.0, 72.0, 17.0)])
    monkeypatch.setattr(machine, "_cpu_seconds", lambda: next(readings))
    assert machine.Bystanders().share() == pytest.approx((12 - 7) / 20)
    monkeypatch.setattr(machine, "_cpu_seconds", lambda: None)
    assert machine.Bystanders().share() is None


def test_processor_seconds_only_grow() -> None:
    before = machine._cpu_seconds()
    sum(i * i for i in range(300_000))
    after = machine._cpu_seconds()
    assert before is not None
    assert after is not None
    assert all(now >= then for now, then in zip(after, before, strict=True))
    assert after[2] <= after[1] <= after[0]
