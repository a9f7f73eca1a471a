"""Incremental UTF-8 and stop strings against their definitions."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec.text import StopMatcher, Utf8Stream

stops_of_ab = st.lists(st.text("abü", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(1, 4), min_size=60)


def blocks(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` cut into tokens of the given sizes, the last one what is left."""
    tokens = []
    for size in sizes:
        if not data:
            break
        tokens.append(data[:size])
        data = data[size:]
    return [*tokens, data] if data else tokens


@given(st.binary(max_size=40), cuts)
@example("a🎉é聪".encode(), [1] * 60)
@example(b"\xf0\x9fabc\xff\xe8", [2] * 60)
def test_c23_every_piece_is_valid_unicode(data: bytes, sizes: list[int]) -> None:
    stream = Utf8Stream()
    pieces = [stream.push(token) for token in blocks(data, sizes)]
    for piece in pieces:
        piece.encode()
    assert "".join(pieces) + stream.flush() == data.decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_c23_half_an_emoji_waits_and_ends_as_replacement(size: int) -> None:
    stream = Utf8Stream()
    assert stream.push(b"ok " + "🎉".encode()[:size]) == "ok "
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.push("é".encode()) == "é"


def first_stop(data: bytes, stops: list[str]) -> tuple[int, str] | None:
    """By definition: the stop that is complete first, the longest of those."""
    for end in range(1, len(data) + 1):
        done = [s for s in stops if data[:end].endswith(s.encode())]
        if done:
            longest = max(done, key=lambda s: len(s.encode()))
            return end - len(longest.encode()), longest
    return None


@given(st.text("abü", max_size=40), stops_of_ab, cuts)
@example("xaab", ["ab"], [2] * 60)
@example("abcabd", ["abd", "cab"], [60])
def test_c19_c21_stops_by_definition_in_any_tokens(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    data = text.encode()
    tokens = blocks(data, sizes)
    matcher = StopMatcher(stops)
    shown = b""
    for token in tokens:
        shown += matcher.push(token)
        assert data.startswith(shown)
    expected = first_stop(data, stops)
    if expected is None:
        assert matcher.stop is None
        assert matcher.kept is None
        assert shown + matcher.flush() == data
        return
    at, stop = expected
    assert matcher.stop == stop
    assert shown + matcher.flush() == data[:at]
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    assert matcher.kept == sum(start < at for start in starts)


@pytest.mark.parametrize("before", range(30))
def test_c19_stop_anywhere_in_a_block_cuts_text_and_tokens_alike(before: int) -> None:
    block = [b" x"] * before + [b" ha", b" ha", b" ha"] + [b" y"] * (29 - before)
    matcher = StopMatcher([" ha ha ha"])
    shown = b"".join(map(matcher.push, block))
    assert shown == b" x" * before
    assert matcher.kept == before


def test_c19_a_token_that_straddles_the_cut_is_kept() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push(b"one") == b"one"
    assert matcher.push(b".\n") == b"."
    assert matcher.push(b"\nmore") == b""
    assert matcher.kept == 2
    assert matcher.push(b"ignored") == b""
    assert matcher.flush() == b""


def test_c19_hidden_tokens_in_front_of_the_stop_are_kept() -> None:
    matcher = StopMatcher(["stop"])
    for token in (b"a", b"", b"b", b"", b"stop"):
        matcher.push(token)
    assert matcher.kept == 3


def test_c21_a_held_back_start_of_a_stop_is_shown_at_the_end() -> None:
    for stops in (["TRE\nAAAAAAAA"], ["TRE\nAAAAAAAA", "DUE TRX"]):
        matcher = StopMatcher(stops)
        shown = [matcher.push(t) for t in (b"UNO", b" DU", b"E T", b"RE")]
        assert b"".join(shown) != b"UNO DUE TRE"
        assert b"".join(shown) + matcher.flush() == b"UNO DUE TRE"


def test_only_what_can_still_be_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["abcd", "bx"])
    assert matcher.push(b"zab") == b"z"
    assert matcher.push(b"c") == b""
    assert matcher.push(b"b") == b"abc"
    assert matcher.push(b"b") == b"b"
    assert matcher.push(b"y") == b"by"


def test_stop_of_several_bytes_per_character() -> None:
    matcher = StopMatcher(["🎉"])
    pieces = [b"a\xf0\x9f", b"\x8e", b"\x88b\xf0", b"\x9f\x8e\x89"]
    assert [matcher.push(p) for p in pieces] == [b"a", b"", "🎈b".encode(), b""]
    assert matcher.stop == "🎉"
    assert matcher.kept == 3


def test_a_stop_that_is_no_text_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="stop: expected valid Unicode"):
        StopMatcher(["fine", "\udcff"])


def test_an_empty_stop_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="at least one character"):
        StopMatcher(["ok", ""])
