"""A model too large for the memory is refused with an option that would fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgespec import fitting
from edgespec.errors import EdgeSpecError, OutOfMemoryError
from edgespec.fitting import Need, check_fits

MB = 10**6
PATH = Path("big.gguf")
ROW = {"f16": 100_000, "int8": 52_000}  # bytes of one position


def needing(weights: int, file: int = 0, scratch: int = 5 * MB):
    def need(context: int, kv: str) -> Need:
        return Need(weights, file, scratch + context * ROW[kv])

    return need


def refusal(monkeypatch, have: int, need, context=4096, kv="f16", **options) -> str:
    monkeypatch.setattr(fitting.ram, "available", lambda: have)
    with pytest.raises(OutOfMemoryError) as caught:
        check_fits(need, PATH, context, kv, **options)
    return str(caught.value)


def test_what_fits_is_loaded(monkeypatch) -> None:
    need = needing(1000 * MB)
    for have in (need(4096, "f16").total, 10**12, None):
        monkeypatch.setattr(fitting.ram, "available", lambda have=have: have)
        check_fits(need, PATH, 4096, "f16")


def test_need_and_have_are_named(monkeypatch) -> None:
    message = refusal(monkeypatch, 1100 * MB, needing(1000 * MB))
    assert message.startswith("big.gguf: needs 1.41 GB of memory (1.00 GB of weights, ")
    assert "0.41 GB for 4096 tokens of context), but only 1.10 GB" in message


@pytest.mark.parametrize("kv", ["f16", "int8"])
@pytest.mark.parametrize("have", [1050, 1100, 1200, 1210])
def test_the_context_offered_fits_and_is_the_largest(monkeypatch, have, kv) -> None:
    need = needing(1000 * MB)
    message = refusal(monkeypatch, have * MB, need, 8192, kv)
    found = re.search(r"--ctx (\d+)( with --kv int8)? fits", message)
    assert found is not None
    size, form = int(found[1]), "int8" if found[2] else kv
    assert size % fitting.SMALLEST_CONTEXT == 0
    assert need(size, form).total <= have * MB
    larger = size + 2 * fitting.SMALLEST_CONTEXT
    assert need(larger, form).total > have * MB


def test_smaller_keys_and_values_are_offered_where_they_are_enough(monkeypatch) -> None:
    message = refusal(monkeypatch, 1250 * MB, needing(1000 * MB))
    assert "--kv int8 fits" in message
    message = refusal(monkeypatch, 1250 * MB, needing(1000 * MB), 8192, "int8")
    assert "--kv int8 fits" not in message


def test_weights_alone_too_large_need_a_smaller_quantisation(monkeypatch) -> None:
    message = refusal(monkeypatch, 900 * MB, needing(1000 * MB))
    advice = "a smaller quantisation of the model is needed, or a smaller model"
    assert message.endswith(f"; {advice}")


def test_a_window_is_not_told_to_take_a_smaller_context(monkeypatch) -> None:
    need = needing(1000 * MB)
    message = refusal(monkeypatch, 1250 * MB, need, is_windowed=True)
    assert "for the window" in message
    assert "--ctx" not in message
    assert "--kv int8 fits" in message


def test_a_window_too_large_is_told_to_shrink(monkeypatch) -> None:
    need = needing(1000 * MB)
    message = refusal(monkeypatch, 1010 * MB, need, is_windowed=True)
    assert message.endswith("; a smaller --window needs less")
    message = refusal(monkeypatch, 900 * MB, need, is_windowed=True)
    assert "--window" not in message


def test_mapping_is_offered_where_reading_is_too_much(monkeypatch) -> None:
    need = needing(1000 * MB, file=900 * MB)
    message = refusal(monkeypatch, 2000 * MB, need)
    assert "0.90 GB of file without mmap" in message
    assert "without --no-mmap it fits" in message


def test_it_is_a_memory_error_and_ours() -> None:
    assert issubclass(OutOfMemoryError, MemoryError)
    assert issubclass(OutOfMemoryError, EdgeSpecError)
