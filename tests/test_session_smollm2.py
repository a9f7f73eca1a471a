"""Field cases on the real model: reuse, earlier turns, seeds, stops, emoji."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.bundle import Bundle
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.conversation import Conversation
from edgespec.errors import UsageError
from edgespec.loading import open_session
from edgespec.session import Session
from edgespec.transcript import Transcript
from tests.processes import python

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", params=["native", "onnx"])
def session(
    smollm2_bundle: Bundle, request: pytest.FixtureRequest
) -> Iterator[Session]:
    runtime = Runtime(backend=request.param, context=512)
    with open_session(smollm2_bundle, runtime=runtime) as opened:
        yield opened


def say(session: Session, prompt, n: int = 24, sampling: Sampling = GREEDY, **options):
    return session.complete(
        prompt, sampling=sampling, stopping=Stopping(max_tokens=n), **options
    )


def test_c30_a_shorter_prompt_after_a_longer_one(session: Session) -> None:
    long = "Here's a funny joke. No, wait, here's a bunch of Zs: Z Z Z Z Z Z Z Z Z Z"
    session.reset()
    fresh = say(session, "Here's a funny joke.", raw=True)
    session.reset()
    say(session, long, raw=True)
    second = say(session, "Here's a funny joke.", raw=True)
    assert second.evaluated_tokens == 1
    assert second.tokens == fresh.tokens
    again = say(session, "Here's a funny joke.", raw=True)
    assert (again.evaluated_tokens, again.tokens) == (1, fresh.tokens)


def test_c04_turn_two_on_the_cache_of_turn_one_equals_a_cold_session(
    session: Session,
) -> None:
    session.reset()
    chat = Conversation(session, sampling=GREEDY, stopping=Stopping(max_tokens=24))
    list(chat.ask("Name three rivers in Europe."))
    list(chat.ask("And three mountains?"))
    warm = chat.last_reply
    assert warm is not None
    assert warm.evaluated_tokens < warm.prompt_tokens - 24
    session.reset()
    cold = session.chat(chat.messages[:-1], memory=chat.memory, sampling=GREEDY)
    tokens = [token for delta in cold for token in delta.tokens][:24]
    assert cold.reply.evaluated_tokens == cold.prompt_tokens == warm.prompt_tokens
    assert tuple(tokens) == warm.tokens


def test_c04_the_same_greedy_prompt_four_times(session: Session) -> None:
    session.reset()
    replies = [say(session, "Count to ten.") for _ in range(4)]
    assert len({reply.tokens for reply in replies}) == 1


def test_c34_fifty_turns_at_512_tokens(session: Session) -> None:
    session.reset()
    chat = Conversation(
        session,
        system="Be brief.",
        sampling=GREEDY,
        stopping=Stopping(max_tokens=8),
    )
    notices = []
    for turn in range(50):
        question = f"Say the number {turn}."
        notices += [delta.notice for delta in chat.ask(question) if delta.notice]
        reply = chat.last_reply
        assert reply is not None
        assert reply.finish_reason in ("stop", "length")
        assert len(reply.tokens) == 8 or reply.finish_reason == "stop"
        assert reply.prompt_tokens <= 512
    assert chat.turns == 50
    assert len(notices) >= 2
    assert 0 < chat.memory.dropped < 100
    # The system turn is still what the context begins with.
    opening = session.tokenizer.encode_raw("Be brief.")
    held = session.engine.sequence[:20].tolist()
    assert any(held[i : i + len(opening)] == opening for i in range(20))


def test_c34_the_second_turn_knows_the_first(session: Session) -> None:
    session.reset()
    chat = Conversation(
        session, sampling=Sampling(seed=1), stopping=Stopping(max_tokens=40)
    )
    list(chat.ask("which is bigger, 9.11 or 9.9?"))
    first = chat.last_reply
    assert first is not None
    list(chat.ask("why"))
    second = chat.last_reply
    assert second is not None
    told = first.prompt_tokens + len(first.tokens)
    assert second.prompt_tokens > told
    new = second.prompt_tokens - told
    # All but the last token of turn 1 was in the cache already.
    assert second.evaluated_tokens in (new, new + 1, new + 2)
    list(chat.regenerate())
    again = chat.last_reply
    assert again is not None
    assert again.evaluated_tokens == 1
    assert again.seed != second.seed


def test_c12_a_seed_in_one_session_and_in_other_processes(
    session: Session, smollm2_bundle: Bundle
) -> None:
    prompt = "A robot may not injure a human being"
    code = f"""
import json
from pathlib import Path
from edgespec.bundle import open_bundle
from edgespec.config import Runtime, Sampling, Stopping
from edgespec.loading import open_session
bundle = open_bundle(Path({str(smollm2_bundle.directory)!r}))
session = open_session(bundle, runtime=Runtime({session.backend!r}, context=512))
sampling, stopping = Sampling(temperature=2.0, seed=42), Stopping(max_tokens=10)
reply = session.complete({prompt!r}, sampling=sampling, stopping=stopping)
print(json.dumps(reply.tokens))
"""
    session.reset()
    seeds = {
        seed: say(session, prompt, 10, Sampling(temperature=2.0, seed=seed)).tokens
        for seed in (42, 1, 2, 3, 4, 5, 42)
    }
    session.reset()
    here = [
        say(session, prompt, 10, Sampling(temperature=2.0, seed=42)) for _ in range(3)
    ]
    there = [
        subprocess.run(python(code), check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert {tuple(json.loads(text)) for text in there} == {seeds[42]}
    assert {reply.tokens for reply in here} == {seeds[42]}
    assert len(set(seeds.values())) > 1


def test_c13_penalties_change_the_reply(session: Session) -> None:
    prompt = "Repeat the word 'hello' multuple times: hello"
    said = {
        penalty: say(
            session,
            prompt,
            8,
            Sampling(temperature=0, frequency_penalty=penalty),
            raw=True,
        ).tokens
        for penalty in (-2.0, 2.0)
    }
    assert said[-2.0] != said[2.0]
    session.is_speculating = False
    for penalty, tokens in said.items():
        sampling = Sampling(temperature=0, frequency_penalty=penalty)
        assert say(session, prompt, 8, sampling, raw=True).tokens == tokens
    session.is_speculating = True
    with pytest.raises(UsageError, match="repeat_penalty"):
        say(session, prompt, 8, Sampling(repeat_penalty=0))


def test_c19_a_stop_of_three_tokens(session: Session) -> None:
    laugh = [3250, 421, 421, 421, 421]
    assert session.tokenizer.encode_raw(" ha ha ha") == [421, 421, 421]
    bias = Sampling(temperature=0, logit_bias={421: 60.0})
    reply = session.complete(
        laugh, sampling=bias, stopping=Stopping(max_tokens=32, stop=(" ha ha ha",))
    )
    assert (reply.text, reply.tokens, reply.finish_reason) == ("", (), "stop")
    assert session.target.length == len(laugh)


@pytest.mark.parametrize("block", [1, 2, 5])
@pytest.mark.parametrize(
    ("ids", "whole"),
    [((10813, 232, 227), "\U0001f389"), ((179, 219, 120, 22178, 232), "聪明")],
)
def test_c23_characters_in_pieces(session: Session, ids, whole, block: int) -> None:
    for n in range(1, len(ids) + 1):
        transcript = Transcript(session.tokenizer, ())
        for first in range(0, n, block):
            pushed = [transcript.push(t) for t in ids[first : min(n, first + block)]]
            transcript.release("".join(pushed))
        assert "\ufffd" not in transcript.text
        transcript.finish()
        if n == len(ids):
            assert transcript.text == whole
        else:
            kept, cut = transcript.text[:-1], transcript.text[-1]
            assert whole.startswith(kept)
            assert cut == "\ufffd" or transcript.text == "聪"
        assert transcript.tokens == list(ids[:n])


def test_c23_a_budget_that_ends_inside_an_emoji(session: Session) -> None:
    bias = Sampling(temperature=0, logit_bias={10813: 1000.0})
    reply = say(session, "Say it.", 1, bias)
    assert reply.tokens == (10813,)
    assert (reply.text, reply.finish_reason) == ("\ufffd", "length")


def test_c35_options_that_do_not_fit_the_model(smollm2_bundle: Bundle) -> None:
    for runtime, error, words in (
        (Runtime(context=1 << 20), UsageError, "ctx"),
        (Runtime(context=0), UsageError, "ctx"),
        (Runtime(threads=0), UsageError, "threads"),
        (Runtime(threads=100_000), UsageError, "threads: expected at most 256"),
        (Runtime(prefill_chunk=0), UsageError, "prefill_chunk"),
        (Runtime(backend="metal"), UsageError, "backend"),
    ):
        with pytest.raises(error, match=words):
            open_session(smollm2_bundle, runtime=runtime)


def bushy(rows: int) -> str:
    """A tree of two children per row, as a --tree file holds it."""
    above = [-1, *((row - 1) // 2 for row in range(1, rows))]
    rank = [0, *((row - 1) % 2 for row in range(1, rows))]
    return json.dumps({"parent": above, "rank": rank})


@pytest.mark.parametrize("tree", ["auto", "chain:5", "8", "26", "63"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_c06_no_tree_changes_a_token(
    smollm2_bundle: Bundle,
    session: Session,
    tree: str,
    temperature: float,
    tmp_path: Path,
) -> None:
    if tree.isdigit():
        path = tmp_path / "tree.json"
        path.write_text(bushy(int(tree)))
        tree = str(path)
    prompt = "Write the numbers from one to ten, then the same numbers again."
    sampling = Sampling(temperature=temperature, seed=3)
    session.reset()
    session.is_speculating = False
    plain = say(session, prompt, 48, sampling)
    session.is_speculating = True
    options = Speculation(tree=tree, cost_slope=0.1)
    with open_session(
        smollm2_bundle,
        runtime=Runtime(backend=session.backend, context=512),
        speculation=options,
    ) as drafting:
        assert drafting.target.capabilities.row_invariant
        drafted = say(drafting, prompt, 48, sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.accepted > 0
    assert drafted.stats.rounds < plain.stats.rounds
