"""How replies end: end tokens, budgets, stop strings; valid UTF-8 on the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.config import Sampling, Stopping
from edgespec.errors import UsageError
from edgespec.generation import Generation
from edgespec.reply import Delta, Reply
from edgespec.transcript import Transcript
from tests import toy

PROMPT = [toy.USER, *b"tell", toy.END, toy.ASSISTANT]
GREEDY = Sampling(temperature=0)
TOKENIZER = toy.ToyTokenizer()
HA, TRE, HALF_1, HALF_2 = 261, 264, 267, 268  # " ha", "TRE", the halves of " U+1F389"


def run(
    reply: list[int],
    *,
    block: int = 4,
    stopping: Stopping | None = None,
    **options,
) -> tuple[Reply, list[Delta], toy.ToyTarget]:
    """A scripted reply, drafted right in blocks."""
    target = toy.ToyTarget(script=toy.scripted(reply))
    drafter = toy.copycat(target, block)
    session = toy.session(target, drafter=drafter, **options)
    generation = session.generate(
        PROMPT, sampling=GREEDY, stopping=stopping, logprobs=1
    )
    deltas = list(generation)
    check_whole(generation, deltas, target)
    return generation.reply, deltas, target


def check_whole(
    generation: Generation, deltas: list[Delta], target: toy.ToyTarget
) -> None:
    """Deltas concatenated are the reply, and the cache ends where the reply ends."""
    reply = generation.reply
    assert "".join(delta.text for delta in deltas) == reply.text
    assert tuple(t for delta in deltas for t in delta.tokens) == reply.tokens
    assert tuple(e for delta in deltas for e in delta.logprobs) == reply.logprobs
    assert len([f for delta in deltas for f in delta.drafted]) == len(reply.tokens)
    assert tuple(entry.token for entry in reply.logprobs) == reply.tokens
    for delta in deltas:
        delta.text.encode()
    whole = [*PROMPT, *reply.tokens]
    assert target.cached == whole[: target.length]
    assert target.length <= len(whole)


def test_c17_nothing_after_an_eos_inside_an_accepted_draft_gets_out() -> None:
    reply, _, target = run([*b"a", toy.END, *b"bc"], block=6)
    assert reply.tokens == (ord("a"), toy.END)
    assert (reply.text, reply.finish_reason) == ("a", "stop")
    assert target.cached == [*PROMPT, ord("a")]


def test_c17_the_next_turn_starts_clean() -> None:
    target = toy.ToyTarget(script=toy.scripted([*b"ok", toy.END, *b"bc"]))
    session = toy.session(target, drafter=toy.copycat(target, 8))
    first = session.complete("one", sampling=GREEDY)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "two"},
    ]
    second = session.complete(messages, sampling=GREEDY)
    expected = [toy.USER, *b"one", toy.END, toy.ASSISTANT, *b"ok", toy.END]
    expected += [toy.USER, *b"two", toy.END, toy.ASSISTANT, *b"ok"]
    assert target.cached == expected
    assert second.text == "ok"


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("block", [1, 4, 30])
def test_c18_the_budget_is_exact(max_tokens: int, block: int) -> None:
    reply, _, target = run(
        [*b"abcdefgh"], block=block, stopping=Stopping(max_tokens=max_tokens)
    )
    assert reply.tokens == tuple(b"abcdefgh"[:max_tokens])
    assert reply.text == "abcdefgh"[:max_tokens]
    assert reply.finish_reason == "length"
    if max_tokens == 0:
        assert target.calls == []


def test_c18_a_stop_within_the_budget_is_a_stop() -> None:
    reply, _, _ = run(
        [10, 11, toy.END, 20, 21, 22], block=6, stopping=Stopping(max_tokens=5)
    )
    assert reply.tokens == (10, 11, toy.END)
    assert reply.finish_reason == "stop"
    reply, _, _ = run([10, 11, toy.END, 20], stopping=Stopping(max_tokens=3))
    assert (reply.tokens, reply.finish_reason) == ((10, 11, toy.END), "stop")
    reply, _, _ = run([10, 11, toy.END, 20], stopping=Stopping(max_tokens=2))
    assert (reply.tokens, reply.finish_reason) == ((10, 11), "length")


@pytest.mark.parametrize("block", [1, 2, 3, 8, 31])
@pytest.mark.parametrize("start", [0, 1, 2, 5, 17])
def test_c19_a_stop_string_cuts_everything_at_the_same_token(block, start) -> None:
    said = [*b"abcdefghijklmnopqrst"[:start], HA, HA, HA, *b" tail of the block"]
    reply, _, target = run(said, block=block, stopping=Stopping(stop=(" ha ha ha",)))
    assert reply.text == "abcdefghijklmnopqrst"[:start]
    assert reply.tokens == tuple(said[:start])
    assert reply.finish_reason == "stop"
    assert target.length == len(PROMPT) + start


def test_c19_a_stop_that_starts_inside_a_token_keeps_that_token() -> None:
    said = [*b"x", HA, HA, *b" y"]
    reply, _, target = run(said, block=8, stopping=Stopping(stop=("a ha",)))
    assert reply.text == "x h"
    assert reply.tokens == (ord("x"), HA)
    assert target.length == len(PROMPT) + 2


def test_c19_of_two_stops_the_first_to_complete_wins() -> None:
    said = [*b"one two three four"]
    reply, _, _ = run(said, stopping=Stopping(stop=("three four", "two", "wo th")))
    assert reply.text == "one "


@pytest.mark.parametrize("stops", [("TRE\nAAAAAAAA",), ("TRE\nAAAAAAAA", "TRE\nB")])
def test_c21_a_stop_half_seen_at_the_end_is_text(stops: tuple[str, ...]) -> None:
    said = [*b"UNO DUE ", TRE]
    reply, deltas, _ = run(said, stopping=Stopping(stop=stops))
    assert reply.text == "UNO DUE TRE"
    assert reply.tokens == (*said, toy.END)
    reply, deltas, _ = run(
        [*said, *b"\nAAAAAAA"], stopping=Stopping(stop=stops, max_tokens=len(said) + 4)
    )
    assert reply.text == "UNO DUE TRE\nAAA"
    assert reply.finish_reason == "length"
    assert "".join(delta.text for delta in deltas) == reply.text


@pytest.mark.parametrize("end", [toy.END, toy.END_2])
@pytest.mark.parametrize("block", [1, 5])
def test_c22_any_of_the_end_tokens_ends_the_reply(end: int, block: int) -> None:
    said = [*b" Tokyo.", end, *b"Human: What is"]
    reply, _, _ = run(said, block=block, eos_ids=(toy.END, toy.END_2))
    assert (reply.text, reply.finish_reason) == (" Tokyo.", "stop")
    assert reply.tokens == tuple(said[:8])


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_c23_an_emoji_in_pieces_is_shown_whole(block: int) -> None:
    said = [*b"hi", HALF_1, HALF_2, *"聪明".encode(), *b"!"]
    reply, deltas, _ = run(said, block=block)
    assert reply.text == "hi \U0001f389聪明!"
    assert all("�" not in delta.text for delta in deltas)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_c23_a_cut_inside_a_character_ends_normally(kept: int) -> None:
    said = [*"聪".encode(), *b"x"]
    reply, _, _ = run(said, stopping=Stopping(max_tokens=kept))
    assert reply.text == ("聪" if kept == 3 else "�")
    assert reply.finish_reason == "length"
    assert len(reply.tokens) == kept


def test_a_stop_string_must_not_be_empty() -> None:
    with pytest.raises(UsageError, match="stop"):
        run([*b"x"], stopping=Stopping(stop=("",)))


@settings(max_examples=200, deadline=None)
@given(
    said=st.lists(st.sampled_from([*b"ab ", HA, TRE, HALF_1, HALF_2]), max_size=24),
    stops=st.lists(st.sampled_from(["a", "ab", " ha h", "ba b", "\U0001f389", "RET"])),
    blocks=st.lists(st.integers(1, 9), min_size=24, max_size=24),
    with_end=st.booleans(),
)
def test_deltas_concatenated_are_the_final_text(said, stops, blocks, with_end) -> None:
    """Whatever the tokens, the stops and the sizes of the rounds."""
    transcript = Transcript(TOKENIZER, stops)
    tokens = [*said, toy.END] if with_end else said
    text, released = "", []
    rest = list(tokens)
    for size in blocks:
        shown = "".join(transcript.push(token) for token in rest[:size])
        rest = rest[size:]
        for delta in transcript.release(shown, is_last=transcript.is_stopped):
            text += delta.text
            released += delta.tokens
        if transcript.is_stopped or not rest:
            break
    if not transcript.is_stopped:
        for delta in transcript.finish():
            text += delta.text
            released += delta.tokens
    data = b"".join(TOKENIZER.text_bytes(token) for token in said)
    found = [
        (at + len(stop.encode()), at)
        for stop in stops
        if (at := data.find(stop.encode())) >= 0
    ]
    cut = min(found)[1] if found else len(data)
    assert transcript.is_stopped == bool(found)
    assert text == transcript.text == data[:cut].decode(errors="replace")
    assert released == transcript.tokens == list(tokens[: len(released)])
    kept = sum(len(TOKENIZER.text_bytes(token)) for token in released)
    assert kept >= cut
    if found:
        last = len(TOKENIZER.text_bytes(released[-1])) if released else 0
        assert kept - last < cut or cut == kept == 0
    else:
        assert released == tokens
