"""Speculation on = off, and what a reply reports, on the TOY model."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.config import Sampling, Speculation, Stopping
from edgespec.errors import BackendError, FormatError, NativeError, UsageError
from edgespec.reply import Reply
from edgespec.tree.shape import from_rank_paths, read_shape
from tests import toy
from tests.processes import python

PROMPT = [toy.USER, *b"tell", toy.END, toy.ASSISTANT]
GREEDY = Sampling(temperature=0)


def complete(
    target: toy.ToyTarget, sampling: Sampling, n: int = 40, **options
) -> Reply:
    with toy.session(target, **options) as session:
        reply = session.complete(
            PROMPT, sampling=sampling, stopping=Stopping(max_tokens=n)
        )
        kept = len(PROMPT) + len(reply.tokens) - 1
        assert target.cached == [*PROMPT, *reply.tokens][:kept]
    return reply


@settings(max_examples=60, deadline=None)
@given(
    right=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    rows=st.integers(1, 64),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.6, 1.5]),
    top_k=st.sampled_from([0, 5]),
    penalty=st.sampled_from([1.0, 1.3]),
    n=st.integers(1, 40),
)
def test_any_drafter_gives_the_plain_reply(
    right: float,
    rows: int,
    seed: int,
    temperature: float,
    top_k: int,
    penalty: float,
    n: int,
) -> None:
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=0.95,
        repeat_penalty=penalty,
        frequency_penalty=penalty - 1,
        penalty_window=9,
        seed=seed,
    )
    plain = complete(
        toy.ToyTarget(), sampling, n, speculation=Speculation(draft="none")
    )
    target = toy.ToyTarget()
    drafter = toy.Drafter(target, rows=rows, right=right, seed=seed % 1000)
    drafted = complete(target, sampling, n, drafter=drafter)
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert len(drafted.tokens) == n
    assert plain.stats.drafted == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_ngram_draft_gives_the_plain_reply_in_fewer_forwards(temperature) -> None:
    # Of order 1 the toy runs into short loops, which n-grams foresee.
    sampling = Sampling(temperature=temperature, top_k=3, seed=7)
    plain = complete(
        toy.ToyTarget(order=1), sampling, 200, speculation=Speculation("none")
    )
    cheap, dear = (
        complete(
            toy.ToyTarget(order=1),
            sampling,
            200,
            speculation=Speculation("ngram", cost_slope=slope),
        )
        for slope in (0.1, 100.0)
    )
    assert cheap.tokens == dear.tokens == plain.tokens
    assert cheap.stats.accepted > 0
    assert cheap.stats.rounds < plain.stats.rounds == 199
    assert dear.stats.drafted == 0


def test_a_perfect_draft_is_accepted_whole() -> None:
    target = toy.ToyTarget()
    reply = complete(target, GREEDY, 41, drafter=toy.copycat(target, 4))
    assert reply.stats.rounds == 8
    assert reply.stats.tokens_per_round == 5.0
    assert reply.stats.accepted == reply.stats.drafted == 32
    assert reply.stats.acceptance == reply.stats.node_yield == 1.0
    assert reply.stats.tokens_per_s > 0 and reply.stats.peak_rss_mb > 1


def shapes() -> dict[str, Speculation]:
    wide = {"parent": [-1, *[0] * 7], "rank": [0, *range(7)]}
    deep = [[0] * n for n in range(1, 6)]
    bushy = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    full = {
        "parent": [-1, *(i // 2 for i in range(63))],
        "rank": [0, *(i % 2 for i in range(63))],
    }
    return {"wide": wide, "deep": deep, "bushy": bushy, "full": full}  # type: ignore


@pytest.mark.parametrize("shape", ["chain:1", "chain:5", "chain:63", *shapes()])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_c06_tree_shape_never_changes_the_text(
    shape: str, temperature: float, tmp_path: Path
) -> None:
    option = shape
    if shape in shapes():
        path = tmp_path / "tree.json"
        path.write_text(json.dumps(shapes()[shape]))
        option = str(path)
    sampling = Sampling(temperature=temperature, top_k=4, seed=3)
    plain = complete(
        toy.ToyTarget(order=1), sampling, 120, speculation=Speculation("none")
    )
    shaped = complete(
        toy.ToyTarget(order=1), sampling, 120, speculation=Speculation(tree=option)
    )
    assert shaped.tokens == plain.tokens
    assert shaped.stats.drafted > 0


def test_best_of_every_branch_is_committed_from_where_it_lies() -> None:
    """C05 on the toy: the right path is scattered over the rows of a wide tree."""
    target = toy.ToyTarget()

    class Scattered:
        name = "scattered"

        def propose(self, sequence):
            past = sequence.tolist()
            path = []
            for _ in range(3):
                path.append(target.wants(past + path))
            wrong = [(path[0] + 1 + i) % 250 for i in range(9)]
            tokens = [past[-1], wrong[0], path[0], wrong[1], wrong[2], path[1]]
            parent = [-1, 0, 0, 0, 2, 2]
            tokens += [wrong[3], wrong[4], wrong[5], path[2]]
            parent += [1, 3, 5, 5]
            return toy._native.tree_derive(tokens, parent)

    plain = complete(toy.ToyTarget(), GREEDY, 30, speculation=Speculation("none"))
    reply = complete(target, GREEDY, 30, drafter=Scattered())
    assert reply.tokens == plain.tokens
    assert reply.stats.tokens_per_round > 3


def test_c12_a_seed_repeats_within_a_session_and_across_processes() -> None:
    code = (
        "from tests import toy; from edgespec.config import *;"
        "s = toy.session(toy.ToyTarget(row_invariant=False));"
        "print(list(s.complete('A robot', sampling=Sampling(temperature=2.0, seed=42),"
        " stopping=Stopping(max_tokens=10)).tokens))"
    )
    root = Path(__file__).parent.parent
    outputs = {
        subprocess.run(
            python(code),
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(3)
    }
    assert len(outputs) == 1
    with toy.session() as session:

        def run(seed: int | None) -> tuple[int, ...]:
            return session.complete(
                "A robot",
                sampling=Sampling(temperature=2.0, seed=seed),
                stopping=Stopping(max_tokens=10),
            ).tokens

        assert [list(run(42)) for _ in range(3)] == [json.loads(outputs.pop())] * 3
        assert len({run(seed) for seed in range(1, 6)}) > 1
        assert len({run(None) for _ in range(5)}) > 1


def test_c12_a_drawn_seed_is_reported_and_repeats_the_reply() -> None:
    with toy.session() as session:
        first = session.complete("x", stopping=Stopping(max_tokens=20))
        again = session.complete(
            "x", sampling=Sampling(seed=first.seed), stopping=Stopping(max_tokens=20)
        )
        other = session.complete("x", stopping=Stopping(max_tokens=20))
    assert again.tokens == first.tokens
    assert other.seed != first.seed


def test_c13_penalties_equal_plain_and_count_the_tree_path() -> None:
    said = {}
    for penalty in (-2.0, 2.0):
        sampling = Sampling(temperature=0, frequency_penalty=penalty, seed=1)
        target = toy.ToyTarget(order=1)
        said[penalty] = complete(target, sampling, 60, speculation=Speculation("none"))
        for rows, right in ((8, 1.0), (20, 0.5)):
            target = toy.ToyTarget(order=1)
            drafter = toy.Drafter(target, rows=rows, right=right)
            drafted = complete(target, sampling, 60, drafter=drafter)
            assert drafted.tokens == said[penalty].tokens
    assert said[-2.0].tokens != said[2.0].tokens
    with toy.session() as session, pytest.raises(UsageError, match="repeat_penalty"):
        session.generate("x", sampling=Sampling(repeat_penalty=0))


def test_logprobs_are_those_of_the_raw_row_that_decided_each_token() -> None:
    target = toy.ToyTarget()
    with toy.session(target, drafter=toy.copycat(target, 4)) as session:
        generation = session.generate(
            PROMPT,
            sampling=Sampling(temperature=1.2, seed=5),
            logprobs=3,
            stopping=Stopping(max_tokens=20),
        )
        deltas = list(generation)
    reply = generation.reply
    assert [entry for delta in deltas for entry in delta.logprobs] == list(
        reply.logprobs
    )
    for i, entry in enumerate(reply.logprobs):
        row = target.row([*PROMPT, *reply.tokens[:i]]).astype(float)
        expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        order = np.argsort(-expected, kind="stable")[:3]
        assert entry.token == reply.tokens[i]
        assert entry.logprob == pytest.approx(expected[entry.token])
        assert [token for token, _ in entry.top] == order.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[order])


def test_drafted_flags_mark_exactly_the_accepted_tokens() -> None:
    target = toy.ToyTarget()
    with toy.session(target, drafter=toy.copycat(target, 3)) as session:
        generation = session.generate(
            PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=10)
        )
        flags = [flag for delta in generation for flag in delta.drafted]
    assert flags == [False, *[True, True, True, False] * 2, False]
    assert sum(flags) == generation.reply.stats.accepted


def test_speculation_can_be_switched_between_replies() -> None:
    target = toy.ToyTarget()
    with toy.session(target, drafter=toy.copycat(target, 4)) as session:
        stopping = Stopping(max_tokens=20)
        on = session.complete(PROMPT, sampling=GREEDY, stopping=stopping)
        session.is_speculating = False
        off = session.complete(PROMPT, sampling=GREEDY, stopping=stopping)
        assert (on.stats.draft, off.stats.draft) == ("toy", "none")
        assert off.stats.rounds == 19 > on.stats.rounds
        assert on.tokens == off.tokens


@pytest.mark.parametrize(
    ("option", "error", "words"),
    [
        (Speculation(verify="rejection"), UsageError, "verify.*n-gram"),
        (Speculation(draft="medusa"), UsageError, "draft"),
        (Speculation(tree="chain:0"), UsageError, "chain:K"),
        (Speculation(tree="chain:64"), UsageError, "chain:K"),
        (Speculation(tree="chain:x"), UsageError, "chain:K"),
        (Speculation(tree="/no/such/tree.json"), UsageError, "tree"),
        (Speculation(rows=65), UsageError, "rows"),
        (Speculation(rows=0), UsageError, "rows"),
    ],
)
def test_speculation_that_cannot_work_is_an_error(option, error, words) -> None:
    with pytest.raises(error, match=words):
        toy.session(speculation=option)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ('{"parent": [-1]}', "parent"),
        ('{"parent": [-1, 0], "rank": [0]}', "2 parents but 1 ranks"),
        ('{"parent": [0], "rank": [0]}', "root"),
        ('{"parent": [-1, 1], "rank": [0, 0]}', "row 1"),
        ('{"parent": [-1, 0, 0], "rank": [0, 1, 1]}', "row 2"),
        ('{"parent": [-1, 0.5], "rank": [0, 1]}', "numbers"),
        (json.dumps({"parent": [-1, *[0] * 64], "rank": [0, *range(64)]}), "65"),
        ("[[0, 0]]", "no parent path"),
        ("[" * 100_000, "not JSON"),
        ("[[0], 1]", "list of lists"),
        ("[[0], [-1]]", "negative"),
        ("3", "parent"),
    ],
)
def test_a_broken_tree_file_is_named(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(FormatError, match=words) as caught:
        read_shape(str(path))
    assert str(path) in str(caught.value)


def test_rank_paths_become_parents_and_ranks() -> None:
    tree = from_rank_paths([[1], [0], [0, 2], [1, 0], [0, 2, 0]], where="paths")
    assert tree.parent.tolist() == [-1, 0, 0, 1, 2, 3]
    assert tree.rank.tolist() == [0, 0, 1, 2, 0, 0]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 3]
    assert tree.mask[5].tolist() == [True, True, False, True, False, True]


def test_a_target_that_only_does_chains_gets_chains() -> None:
    target = toy.ToyTarget(order=1)
    capabilities = target.capabilities
    target.capabilities = type(capabilities)(False, (), False, False, True)
    seen = []
    forward = target.forward
    target.forward = lambda tree, rows=None: (seen.append(tree), forward(tree, rows))[1]
    complete(target, GREEDY, 60)
    assert max(tree.n for tree in seen) > 1
    assert all(tree.is_chain for tree in seen)


def test_two_sessions_alternate_and_each_equals_its_own_fresh_run() -> None:
    prompts = ([*b"first talk"], [*b"another one"])
    fresh = [
        toy.session().complete(p, sampling=GREEDY, stopping=Stopping(max_tokens=30))
        for p in prompts
    ]
    sessions = [toy.session() for _ in prompts]
    running = [
        session.generate(p, sampling=GREEDY, stopping=Stopping(max_tokens=30))
        for session, p in zip(sessions, prompts, strict=True)
    ]
    for _ in range(31):
        for generation in running:
            next(generation, None)
    assert [g.reply.tokens for g in running] == [reply.tokens for reply in fresh]


def test_two_threads_on_one_session_get_a_reply_or_busy() -> None:
    target = toy.ToyTarget()
    inside, leave = threading.Event(), threading.Event()
    prefill = target.prefill

    def slow_prefill(tokens):
        inside.set()
        assert leave.wait(60)
        return prefill(tokens)

    target.prefill = slow_prefill
    session = toy.session(target)
    replies: list[Reply] = []
    stopping = Stopping(max_tokens=12)
    first = threading.Thread(
        target=lambda: replies.append(
            session.complete(PROMPT, sampling=GREEDY, stopping=stopping)
        )
    )
    first.start()
    assert inside.wait(60)
    with pytest.raises(BackendError, match="busy"):
        session.complete(PROMPT, sampling=GREEDY, stopping=stopping)
    with pytest.raises(BackendError, match="busy"):
        session.close()
    with pytest.raises(BackendError, match="busy"):
        session.reset()
    leave.set()
    first.join()
    again = session.complete(PROMPT, sampling=GREEDY, stopping=stopping)
    assert replies[0].tokens == again.tokens


def test_many_threads_hammer_one_session_without_harm() -> None:
    session = toy.session(toy.ToyTarget(order=1))
    expected = session.complete(
        PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=30)
    ).tokens
    outcomes: list[object] = []

    def work() -> None:
        for _ in range(20):
            try:
                reply = session.complete(
                    PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=30)
                )
                outcomes.append(reply.tokens)
            except BackendError as error:
                outcomes.append("busy" if "busy" in str(error) else error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 80
    assert set(outcomes) <= {expected, "busy"}
    assert expected in outcomes


def test_a_loop_that_is_left_leaves_the_session_free() -> None:
    session = toy.session(toy.ToyTarget())
    for _ in session.generate(PROMPT, sampling=GREEDY):
        break
    reply = session.complete(PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=3))
    assert len(reply.tokens) == 3


def test_leaving_a_session_ends_its_reply_and_lets_an_error_through() -> None:
    generation = None

    def stumble() -> None:
        nonlocal generation
        with toy.session(toy.ToyTarget()) as session:
            generation = session.generate(PROMPT, sampling=GREEDY)
            next(generation)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stumble()
    assert generation is not None
    assert generation.reply.finish_reason == "cancelled"


class Stumbling(toy.ToyTarget):
    """Raises once, at the given call."""

    def __init__(self, where: str, at: int, error: BaseException) -> None:
        super().__init__(order=2)
        self._where, self._at, self._error = where, at, error

    def _stumble(self, where: str) -> None:
        if where == self._where:
            self._at -= 1
            if self._at == 0:
                raise self._error

    def forward(self, tree, logit_rows=None):
        logits = super().forward(tree, logit_rows)
        self._stumble("forward")
        return logits

    def prefill(self, tokens):
        logits = super().prefill(tokens)
        self._stumble("prefill")
        return logits

    def commit(self, rows):
        self._stumble("before commit")
        super().commit(rows)
        self._stumble("after commit")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BackendError("device lost")])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    "where", ["forward", "prefill", "before commit", "after commit"]
)
def test_an_interrupted_reply_leaves_the_session_as_good_as_new(
    where, at, error
) -> None:
    expected = complete(toy.ToyTarget(order=2), GREEDY, 30)
    target = Stumbling(where, at, error)
    session = toy.session(target, drafter=toy.copycat(target, 3), prefill_chunk=2)
    with pytest.raises(type(error)):
        session.complete(PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=30))
    assert session.last_reply.finish_reason == "cancelled"
    said = session.last_reply.tokens
    assert said == expected.tokens[: len(said)]
    whole = [*PROMPT, *expected.tokens]
    assert target.cached == whole[: target.length]
    reply = session.complete(PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=30))
    assert reply.tokens == expected.tokens


@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_abandoned_generator_keeps_what_was_handed_out(after: int) -> None:
    target = toy.ToyTarget()
    session = toy.session(target, drafter=toy.copycat(target, 3))
    generation = session.generate(PROMPT, sampling=GREEDY)
    said: list[int] = []
    for _ in range(after):
        said += next(generation).tokens
    generation.close()
    generation.close()
    assert list(generation.reply.tokens) == said
    assert target.length <= len(PROMPT) + len(said)
    assert target.cached == [*PROMPT, *said][: target.length]
    session.complete("something else", stopping=Stopping(max_tokens=5))
    again = session.complete(PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=30))
    assert again.tokens == complete(toy.ToyTarget(), GREEDY, 30).tokens


def test_a_nan_among_the_logits_is_an_error_not_a_token() -> None:
    target = toy.ToyTarget()
    row = target.row
    target.row = lambda sequence: (
        row(sequence) * (np.nan if len(sequence) == 12 else 1.0)
    )
    session = toy.session(target)
    with pytest.raises(NativeError, match="NaN: the weights are damaged"):
        session.complete(PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=30))
    target.row = row
    reply = session.complete(PROMPT, sampling=GREEDY, stopping=Stopping(max_tokens=30))
    assert reply.tokens == complete(toy.ToyTarget(), GREEDY, 30).tokens


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "empty"),
        ("", {"raw": True}, "empty"),
        ([1, toy.VOCAB], {}, "prompt.1."),
        ([1, -1], {}, "prompt.1."),
        ([1, "a"], {}, "prompt.1."),
        ([1, True], {}, "prompt.1."),
        ("x", {"logprobs": -1}, "logprobs"),
        ("x", {"logprobs": toy.VOCAB + 1}, "logprobs"),
        ("x", {"stopping": Stopping(max_tokens=-1)}, "max_tokens"),
        ("x", {"stopping": Stopping(stop=("",))}, "stop"),
        ("x", {"sampling": Sampling(temperature=-1)}, "temperature"),
        ("x", {"sampling": Sampling(logit_bias={toy.VOCAB: 1.0})}, "logit_bias"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(prompt, options, words) -> None:
    target = toy.ToyTarget()
    with pytest.raises(UsageError, match=words):
        toy.session(target).generate(prompt, **options)
    assert target.calls == []
