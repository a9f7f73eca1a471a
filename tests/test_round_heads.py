"""Rounds drafted by heads that are right, wrong, random, constant or broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec._native import DRAFT, PLAIN, PREFILL, SampleParams, tree_derive
from edgespec.errors import NativeError, OutOfMemoryError
from edgespec.tree.topology import MAX_ROWS, Tree, chain
from tests.internals import ScriptedDrafter, bound
from tests.test_round import (
    EOS,
    GREEDY,
    PENALISED,
    VOCAB,
    Host,
    Model,
    plain,
    random_model,
    scripted_model,
)

SAMPLED = SampleParams(temperature=0.8, top_p=0.95, seed=5)
SHAPE = tree_derive([0] * 8, [-1, 0, 0, 0, 1, 1, 2, 4])
Says = Callable[[list[int]], NDArray[np.float32]]


@pytest.fixture(autouse=True)
def scripted_library() -> Iterator[None]:
    with bound():
        yield


class HeadHost(Host):
    """A host whose session drafts with a head; `says` sees the whole sequence."""

    def __init__(
        self,
        model: Model,
        says: Says,
        prompt: list[int],
        *,
        ids: list[int] | None = None,
        levels: int = 0,
        **params: object,
    ) -> None:
        super().__init__(model, **params)
        session = self.session

        def behind(path: list[int]) -> NDArray[np.float32]:
            return says([*session.tokens.tolist(), *path[1:]])

        self.drafter = ScriptedDrafter(
            behind, VOCAB, told=lambda: session.length - 1, ids=ids, depth=levels
        )
        session.attach(self.drafter)  # type: ignore[arg-type]
        session.append(prompt)


def right(model: Model) -> Says:
    return model


def wrong(model: Model) -> Says:
    return lambda sequence: -model(sequence)


def unrelated(model: Model) -> Says:
    return random_model(99, spread=4.0)


def stubborn(model: Model) -> Says:
    row = np.zeros(VOCAB, np.float32)
    row[3] = 9.0
    return lambda sequence: row


def broken(model: Model) -> Says:
    return lambda sequence: np.full(VOCAB, np.nan, np.float32)


HEADS = [right, wrong, unrelated, stubborn, broken]
PROMPT = [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("tree", ["auto", "best", SHAPE], ids=["auto", "best", "shape"])
@pytest.mark.parametrize("head", HEADS)
def test_no_head_changes_a_token(
    head: Callable[[Model], Says], tree: str | Tree, draft: str, params: SampleParams
) -> None:
    for seed in range(2):
        model = random_model(seed)
        host = HeadHost(model, head(model), PROMPT, draft=draft, tree=tree, rows=9)
        reply, _ = host.generate(50, params)
        assert reply == plain(model, PROMPT, 50, params)
        stats = host.session.stats()
        assert stats.tokens == len(reply) - 1
        # an EOS the head drafted leaves no room for a token of the target's own
        assert stats.accepted - (stats.tokens - stats.rounds) in (0, reply[-1] == EOS)
        assert stats.accepted <= stats.depth <= stats.drafted
        assert host.drafter.passes >= 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", ["best", SHAPE], ids=["best", "shape"])
def test_a_right_head_is_right_also_under_the_noise(
    tree: str | Tree, params: SampleParams
) -> None:
    """The model itself as its head: what will be drawn is known."""
    params = SampleParams(
        temperature=params.temperature, seed=5, logit_bias=((EOS, float("-inf")),)
    )
    model = random_model(7)
    host = HeadHost(model, model, PROMPT, tree=tree, rows=5)
    host.session.evicted(1000)
    host.generate(60, params)
    stats = host.session.stats()
    assert stats.tokens / stats.rounds > (2.0 if tree == "best" else 3.7)


def test_looking_at_the_noise_pays() -> None:
    params = SampleParams(temperature=1.0, seed=5, logit_bias=((EOS, float("-inf")),))
    model = random_model(7, spread=1.5)
    rates = {}
    for is_blind in (False, True):
        host = HeadHost(model, model, PROMPT, tree=SHAPE, blind_ranks=is_blind)
        host.generate(200, params)
        stats = host.session.stats()
        rates[is_blind] = stats.tokens / stats.rounds
    assert rates[False] > rates[True] + 0.5


def test_a_head_of_few_tokens_drafts_these_only() -> None:
    ids = [2, 3, 5, 7, 11, 13]
    script = [2, 3, 5, 7, 4, 11]
    model = scripted_model(script)
    host = HeadHost(
        model, lambda sequence: model(sequence)[ids], [2], ids=ids, tree="best", rows=4
    )
    session = host.session
    reply, _ = host.generate(40)
    assert reply == plain(model, [2], 40)
    assert session.stats().accepted > 20
    session.begin_generation(GREEDY, 10)
    assert set(session.begin(DRAFT).tokens[1:]) <= set(ids)


@pytest.mark.parametrize("tree", ["auto", "best", SHAPE], ids=["auto", "best", "shape"])
def test_levels_that_would_be_clipped_are_not_run(tree: str | Tree) -> None:
    model = scripted_model([7])
    host = HeadHost(model, model, [7] * 4, tree=tree, rows=16)
    host.session.begin_generation(GREEDY, 3)
    tree_ = host.session.begin(DRAFT)
    assert tree_.depth.max() == host.drafter.passes == 2
    host.session.abandon()
    host.session.begin_generation(GREEDY, 1)
    assert host.session.begin(DRAFT).n == 1
    assert host.drafter.passes == 2  # no draft was begun


# ---- endings ------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_c17_nothing_after_an_eos_the_head_drafted(draft: str) -> None:
    script = [1, 2, 10, EOS, 11, 12, 13, 14]
    model = scripted_model(script)
    host = HeadHost(model, model, [1, 2], draft=draft, tree="best", rows=6)
    reply, finish = host.generate(20)
    assert (reply, finish) == ([10, EOS], "stop")
    assert host.session.tokens.tolist() == [1, 2, 10, EOS]
    host.session.append([4, 5])
    reply, finish = host.generate(2)
    assert (reply, finish) == ([13, 14], "length")


@pytest.mark.parametrize("tree", ["auto", "best", SHAPE], ids=["auto", "best", "shape"])
@pytest.mark.parametrize("max_new", [1, 2, 3, 4, 5, 6, 7])
def test_c18_the_budget_is_exact(max_new: int, tree: str | Tree) -> None:
    script = [1, 10, 11, 12, 13, 14, 15, 16]
    model = scripted_model(script)
    host = HeadHost(model, model, [1], tree=tree, rows=12)
    reply, finish = host.generate(max_new)
    assert reply == [10, 11, 12, 13, 14, 15, 16][:max_new]
    assert finish == "length"


@pytest.mark.parametrize("tree", ["auto", "best", chain(np.zeros(32, np.int32))])
@pytest.mark.parametrize("n_prompt", range(250, 257))
@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_c27_drafts_are_clipped_to_the_context(
    n_prompt: int, tree: str | Tree, draft: str
) -> None:
    model = scripted_model([7])
    host = HeadHost(
        model, model, [7] * n_prompt, context=256, draft=draft, tree=tree, rows=32
    )
    reply, finish = host.generate(1000)
    assert finish == "context"
    assert len(reply) == 257 - n_prompt
    assert len(host.kv) == 256


def test_c10_a_tree_deeper_than_the_heads_is_cut() -> None:
    model = scripted_model([3, 1, 4, 1, 5])
    for tree in ("best", "auto", chain(np.zeros(6, np.int32))):
        host = HeadHost(model, model, [3], tree=tree, rows=6, levels=3)
        reply, _ = host.generate(30)
        assert reply == plain(model, [3], 30)
        host.session.begin_generation(GREEDY, 30)
        assert host.session.begin(DRAFT).depth.max() == 3
    wide = tree_derive([0] * 4, [-1, 0, 0, 2], [0, VOCAB - 1, VOCAB, 0])
    host = HeadHost(model, model, [3], tree=wide)
    host.session.begin_generation(GREEDY, 30)
    assert host.session.begin(DRAFT).rank.tolist() == [0, VOCAB - 1]


def test_trees_stay_inside_their_kv_block() -> None:
    model = scripted_model([7])
    host = HeadHost(model, model, [7] * 5, tree="best", rows=32, kv_block=16)
    host.session.begin_generation(GREEDY, 100)
    while host.session.length < 60:
        at = host.session.length - 1
        tree = host.session.begin(DRAFT)
        assert tree.n <= 16 - at % 16
        rows = np.stack([model([7])] * tree.n)
        host.session.finish(rows)


# ---- the hosts' part ----------------------------------------------------------------


def test_a_drafter_that_was_not_told_is_an_error() -> None:
    model = scripted_model([7])
    host = Host(model, tree="best")
    told = [3]
    drafter = ScriptedDrafter(lambda path: model([7]), VOCAB, told=lambda: told[0])
    host.session.attach(drafter)  # type: ignore[arg-type]
    host.session.append([7] * 6)
    host.session.begin_generation(GREEDY, 10)
    with pytest.raises(NativeError, match="told of 5 positions.*got 3"):
        host.session.begin(DRAFT)
    for kind in (PREFILL, PLAIN):  # neither drafts
        host.session.begin(kind)
        host.session.abandon()
    told[0] = 5
    assert host.session.begin(DRAFT).n > 1
    with pytest.raises(NativeError, match="attach: a round is open"):
        host.session.attach(None)
    host.session.abandon()
    host.session.attach(None)
    assert host.session.begin(DRAFT).n == 1


def test_a_failing_draft_is_an_error_and_the_reply_goes_on() -> None:
    model = random_model(3)
    for tree in ("best", "auto", SHAPE):
        host = HeadHost(model, model, PROMPT, tree=tree, draft="ngram")
        session, reply = host.session, []
        session.begin_generation(GREEDY, 20)
        kind, fails_at = PREFILL, 0
        while len(reply) < 20 and EOS not in reply:
            host.drafter.set(fails_at=fails_at)
            try:
                tree_ = session.begin(kind)
            except OutOfMemoryError:
                host.drafter.set()
                tree_ = session.begin(kind)
            sequence = session.tokens.tolist()[:-1]
            paths = [tree_.tokens[mask].tolist() for mask in tree_.mask]
            rows = np.stack([model(sequence + path) for path in paths])
            reply += session.finish(rows).tokens.tolist()
            kind, fails_at = DRAFT, fails_at % 3 + 1
        assert reply == plain(model, PROMPT, 20)


def test_turns_cuts_and_abandoned_rounds() -> None:
    model = random_model(11)
    host = HeadHost(model, model, PROMPT, tree="best", rows=6, draft="ngram")
    session = host.session
    first, _ = host.generate(20)
    assert first == plain(model, PROMPT, 20)
    length = session.length
    session.truncate(length - 7)
    session.append([4, 9])
    session.begin_generation(GREEDY, 10)
    session.begin(PREFILL)
    session.abandon()
    prompt = session.tokens.tolist()
    reply, _ = host.generate(20, SAMPLED)
    assert reply == plain(model, prompt, 20, SAMPLED)


def test_a_drafter_that_has_no_features_yet_leaves_it_to_ngrams() -> None:
    script = [3, 1, 4, 1, 5, 9, 2, 6]
    model = scripted_model(script)
    for tree in ("best", chain(np.zeros(6, np.int32))):
        host = HeadHost(model, model, script * 4, tree=tree, rows=6, draft="ngram")
        host.drafter.set(is_ready=False)
        host.generate(64)
        assert host.session.stats().rounds < 32


def test_a_static_shape_is_filled_by_the_draft_that_promises_more() -> None:
    script = [3, 1, 4, 1, 5, 9, 2, 6]
    looping, free = scripted_model(script), random_model(7)
    shape = chain(np.zeros(6, np.int32))
    params = SampleParams(logit_bias=((EOS, float("-inf")),))
    for model, says in ((looping, stubborn(looping)), (free, free)):
        rounds = {}
        for draft in ("none", "ngram"):
            host = HeadHost(model, says, script * 4, tree=shape, draft=draft)
            host.generate(200, params)
            rounds[draft] = host.session.stats().rounds
        most = 0.75 if model is looping else 1.2
        assert rounds["ngram"] < most * rounds["none"]


# ---- never slower -------------------------------------------------------------------


def rounds_with(host: CountingHost, max_new: int) -> tuple[int, int]:
    """Rounds of a reply, and those in which the head was asked."""
    session = host.session
    session.begin_generation(GREEDY, max_new)
    kind, finish, rounds, asked = PREFILL, None, 0, 0
    while finish is None:
        before = host.calls
        tree = session.begin(kind)
        rounds += kind == DRAFT
        asked += host.calls > before
        sequence = session.tokens.tolist()[:-1]
        paths = [tree.tokens[mask].tolist() for mask in tree.mask]
        finish = session.finish(
            np.stack([host.model(sequence + p) for p in paths])
        ).finish
        kind = DRAFT
    return rounds, asked


class CountingHost(HeadHost):
    def __init__(self, model: Model, says: Says, prompt: list[int], **params) -> None:
        self.calls = 0

        def counted(sequence: list[int]) -> NDArray[np.float32]:
            self.calls += 1
            return says(sequence)

        super().__init__(model, counted, prompt, **params)


COST = [0.0, *(1 + 0.1 * n for n in range(MAX_ROWS))]


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_head_that_does_not_pay_is_left_alone(draft: str) -> None:
    model = random_model(0)
    host = CountingHost(
        model, wrong(model), PROMPT, draft=draft, cost=COST, context=1024
    )
    rounds = asked = 0
    while rounds < 300:
        host.session.truncate(0)
        host.session.append(PROMPT)
        more = rounds_with(host, 200)
        rounds, asked = rounds + more[0], asked + more[1]
    assert 1 < asked < 0.12 * rounds


def test_a_head_that_pays_is_asked_every_round() -> None:
    script = np.random.default_rng(0).integers(0, 20, 397).tolist()
    model = scripted_model(script)
    host = CountingHost(model, model, script[:3], cost=COST)
    rounds, asked = rounds_with(host, 200)
    assert rounds < 80
    assert asked >= rounds - 1  # the last may have no room to draft


def test_a_head_is_not_asked_where_ngrams_are_sure() -> None:
    script = np.random.default_rng(1).integers(0, 20, 12).tolist()
    model = scripted_model(script)
    host = CountingHost(model, model, script * 8, draft="ngram", cost=COST)
    rounds, asked = rounds_with(host, 300)
    assert asked < 0.3 * rounds
