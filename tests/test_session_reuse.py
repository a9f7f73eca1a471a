"""Prompts after prompts: prefix reuse, full contexts, conversations."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.config import Sampling, Stopping
from edgespec.errors import ContextError
from edgespec.memory import Memory
from edgespec.session import Session
from tests import toy

GREEDY = Sampling(temperature=0)
ZS = [*b"Here's a funny joke. No, wait, here's a bunch of Zs:", *[266] * 10]
JOKE = [*b"Here's a funny joke."]


def say(session: Session, prompt, n: int = 20, **options):
    return session.complete(
        prompt, sampling=GREEDY, stopping=Stopping(max_tokens=n), **options
    )


def fresh(prompt, n: int = 20, **options):
    return say(toy.session(toy.ToyTarget(**options)), prompt, n).tokens


def test_c30_a_shorter_prompt_after_a_longer_one_is_not_stale() -> None:
    session = toy.session(toy.ToyTarget(order=40))
    say(session, ZS)
    second = say(session, JOKE)
    assert second.tokens == fresh(JOKE, order=40)
    assert second.evaluated_tokens == 1


@pytest.mark.parametrize("row_invariant", [True, False])
def test_c30_the_same_prompt_again_evaluates_one_token(row_invariant: bool) -> None:
    target = toy.ToyTarget(order=40, row_invariant=row_invariant)
    session = toy.session(target)
    replies = [say(session, JOKE) for _ in range(3)]
    assert [reply.evaluated_tokens for reply in replies] == [len(JOKE), 1, 1]
    assert {reply.tokens for reply in replies} == {fresh(JOKE, order=40)}
    prefills = [rows for what, rows in target.calls if what == "prefill"]
    whole = [len(JOKE)] if row_invariant else [len(JOKE) - 1, 1]
    assert prefills == [*whole, 1, 1]


def test_c30_regenerating_a_turn_evaluates_one_token() -> None:
    session, memory = toy.session(), Memory()
    messages = [{"role": "user", "content": "tell me"}]
    stopping = Stopping(max_tokens=20)
    generations = [
        session.chat(messages, memory=memory, stopping=stopping) for _ in range(2)
    ]
    for generation in generations:
        list(generation)
    first, again = (generation.reply for generation in generations)
    assert again.evaluated_tokens == 1
    assert again.seed != first.seed
    repeated = session.complete(
        messages, sampling=Sampling(seed=again.seed), stopping=stopping
    )
    assert repeated.tokens == again.tokens


def test_c04_the_same_greedy_prompt_four_times_gives_the_same_reply() -> None:
    session = toy.session(toy.ToyTarget(order=1))
    replies = [say(session, JOKE, 80) for _ in range(4)]
    assert len({reply.tokens for reply in replies}) == 1
    assert replies[-1].stats.accepted > 0


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.sampled_from([*b"ab"]), min_size=1, max_size=12),
        min_size=1,
        max_size=8,
    ),
    chunk=st.integers(1, 5),
    right=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_prompt_after_any_other_equals_a_fresh_process(
    prompts, chunk, right
) -> None:
    target = toy.ToyTarget(order=12)
    drafter = toy.Drafter(target, right=right)
    session = toy.session(target, drafter=drafter, prefill_chunk=chunk)
    held: list[int] = []
    for prompt in prompts:
        reply = say(session, prompt, 6)
        assert reply.tokens == fresh(prompt, 6, order=12)
        shared = 0
        while shared < min(len(held), len(prompt) - 1):
            if held[shared] != prompt[shared]:
                break
            shared += 1
        assert reply.evaluated_tokens == len(prompt) - shared
        held = target.cached
        assert held == [*prompt, *reply.tokens][: len(held)]


@pytest.mark.parametrize("length", range(250, 257))
def test_c27_drafts_are_clipped_to_the_room_left(length: int) -> None:
    target = toy.ToyTarget(context=256)
    session = toy.session(target, drafter=toy.Drafter(target, rows=32, right=0.8))
    prompt = [*b"0123456789" * 26][:length]
    reply = session.complete(prompt, sampling=GREEDY)
    assert reply.finish_reason == "context"
    assert len(reply.tokens) == 256 - length + 1
    assert reply.tokens == fresh(prompt, 256 - length + 1)
    assert target.length == 256


def test_c27_c35_a_prompt_that_does_not_fit_says_the_three_numbers() -> None:
    target = toy.ToyTarget(context=256)
    session = toy.session(target)
    with pytest.raises(ContextError) as caught:
        session.generate([1] * 257, stopping=Stopping(max_tokens=33))
    assert re.findall(r"\d+", str(caught.value)) == ["257", "33", "256"]
    assert target.calls == []
    assert len(say(session, JOKE).tokens) == 20


def test_c33_ten_replies_on_one_handle_and_an_error_between() -> None:
    session = toy.session(toy.ToyTarget(context=300))
    prompt = [*b"flag emojis! " * 16][:200]
    for i in range(10):
        if i == 5:
            with pytest.raises(ContextError):
                session.complete([1] * 301)
        assert len(say(session, [*prompt[:-1], 65 + i], 64).tokens) == 64


def test_c34_turn_two_is_fed_the_tokens_of_turn_one() -> None:
    """Also where the reply's text would encode to other tokens: bytes, not words."""
    target = toy.ToyTarget(script=toy.scripted([*b"the tree ha", toy.END]))
    session, memory = toy.session(target), Memory()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "which is bigger, 9.11 or 9.9?"},
    ]
    first = session.chat(messages, memory=memory, sampling=GREEDY)
    list(first)
    turn_1 = [*session.encode(messages), *first.reply.tokens]
    messages += [
        {"role": "assistant", "content": first.reply.text},
        {"role": "user", "content": "why"},
    ]
    assert session.encode(messages)[: len(turn_1)] != turn_1
    second = session.chat(messages, memory=memory, sampling=GREEDY)
    list(second)
    prompt = target.cached[: second.prompt_tokens]
    assert prompt[: len(turn_1)] == turn_1
    # The end token, then the new turn.
    assert second.reply.evaluated_tokens == len(prompt) - len(turn_1) + 1
    # A reply that was edited counts as text.
    messages[2] = {"role": "assistant", "content": "the tree haha"}
    edited = session.chat(messages, memory=memory, sampling=GREEDY)
    assert edited.prompt_tokens == len(session.encode(messages))


def conversation(context: int, turns: int, sampling: Sampling, **options):
    target = toy.ToyTarget(context=context)
    session = toy.session(target, **options)
    memory = Memory()
    messages = [{"role": "system", "content": "sys"}]
    notices, replies = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        generation = session.chat(
            messages,
            memory=memory,
            sampling=sampling,
            stopping=Stopping(max_tokens=24),
        )
        notices += [delta.notice for delta in generation if delta.notice]
        replies.append(generation.reply)
        messages.append({"role": "assistant", "content": generation.reply.text})
        assert target.cached[:4] == [toy.SYSTEM, *b"sys"]
        assert bytes(t for t in target.cached if t < 256).find(b"%d" % turn) >= 0
    return replies, notices, memory


def test_c34_fifty_turns_in_a_small_context() -> None:
    replies, notices, memory = conversation(128, 50, GREEDY)
    assert all(len(reply.tokens) == 24 for reply in replies)
    assert all(reply.finish_reason == "length" for reply in replies)
    assert len(notices) > 5
    assert all("oldest" in notice and "128" in notice for notice in notices)
    # Questions go with their answers, and the last question never goes.
    assert 2 * len(notices) <= memory.dropped <= 98
    assert memory.dropped % 2 == 0
    # Dropping makes room for more than one turn: few turns evaluate the whole prompt.
    whole = [reply.evaluated_tokens == reply.prompt_tokens for reply in replies]
    assert not any(whole[1:3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_c34_speculation_changes_nothing_while_turns_are_dropped(temperature) -> None:
    sampling = Sampling(temperature=temperature, seed=11)
    plain, notices, _ = conversation(96, 12, sampling, drafter=None)
    target = toy.ToyTarget()
    drafted, notices_2, _ = conversation(
        96, 12, sampling, drafter=toy.Drafter(target, rows=9, right=0.8)
    )
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert notices == notices_2 and notices
    assert any(reply.stats.accepted for reply in drafted)


def test_dropped_tokens_still_count_in_the_index_of_the_noise() -> None:
    """A refilled context must not replay the noise of the tokens it replaced."""
    session, memory = toy.session(toy.ToyTarget(context=64)), Memory()
    messages = [
        {"role": "user", "content": "a" * 30},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c" * 10},
    ]
    length = len(session.encode(messages))
    generation = session.chat(
        messages,
        memory=memory,
        sampling=Sampling(temperature=1.0, seed=3),
        stopping=Stopping(max_tokens=40),
    )
    list(generation)
    reply = generation.reply
    assert len(reply.tokens) == 40
    assert memory.dropped == 2
    assert memory.evicted == 30 + 2 + 1 + 2
    assert length + 40 > 64


def test_c35_a_single_question_too_long_keeps_the_conversation_usable() -> None:
    session, memory = toy.session(toy.ToyTarget(context=64)), Memory()
    messages = [{"role": "user", "content": "hi"}]
    list(session.chat(messages, memory=memory, stopping=Stopping(max_tokens=5)))
    long = [*messages, {"role": "user", "content": "x" * 80}]
    with pytest.raises(ContextError, match="64"):
        session.chat(long, memory=memory)
    again = session.chat(messages, memory=memory, stopping=Stopping(max_tokens=5))
    assert len(list(again)) > 0
    assert again.reply.evaluated_tokens == 1


def test_a_reply_longer_than_all_that_can_be_dropped_ends_with_context() -> None:
    session = toy.session(toy.ToyTarget(context=64))
    generation = session.chat([{"role": "user", "content": "hi"}], sampling=GREEDY)
    list(generation)
    assert generation.reply.finish_reason == "context"
    assert generation.prompt_tokens + len(generation.reply.tokens) == 65
