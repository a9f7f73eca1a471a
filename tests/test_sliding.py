"""What is left of a conversation longer than the model's positions."""

from __future__ import annotations

import pytest

from edgespec.sliding import Sliding, Window

WINDOWS = [Window(64, 16, 4), Window(64, 16, 0), Window(20, 18, 1), Window(64, 59, 4)]


@pytest.mark.parametrize("window", WINDOWS)
def test_kept_tokens_fit_and_cover_the_window(window: Window) -> None:
    for length in range(400):
        kept = window.kept(range(length))
        assert len(kept) == length - window.dropped(length) <= window.limit
        assert kept[: window.sinks] == list(range(min(length, window.sinks)))
        seen = min(length, window.width)
        assert kept[len(kept) - seen :] == list(range(length - seen, length))


@pytest.mark.parametrize("window", WINDOWS)
def test_a_conversation_grows_until_the_limit_and_then_is_cut_at_once(
    window: Window,
) -> None:
    """A turn's tokens are those of the turn before and more, or the window alone."""
    for length in range(400):
        before, after = window.kept(range(length)), window.kept(range(length + 1))
        if len(before) == window.limit:
            assert len(after) == window.sinks + window.width + 1
        else:
            assert after == [*before, length]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n_prompt", [1, 30, 64, 65, 200])
def test_a_reply_is_cut_as_a_prompt_of_that_length_would_be(
    window: Window, n_prompt: int
) -> None:
    ids = list(range(1000, 1000 + n_prompt))
    sliding = Sliding(window, ids)
    assert sliding.evicted == n_prompt - len(sliding.prompt)
    assert bool(sliding.notice) == (n_prompt > window.limit)
    for n_reply in range(150):
        reply = list(range(n_reply))
        assert sliding.refill(reply).prompt == window.kept([*ids, *reply])
