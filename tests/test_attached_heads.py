"""Heads attached to targets and sessions: kept in step, told apart, let go of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec._native import (
    DRAFT,
    PREFILL,
    NativeBatch,
    NativeDrafter,
    NativeHead,
    NativeSession,
    NativeTargetState,
    SampleParams,
    tree_derive,
)
from edgespec.errors import ContextError, NativeError, UsageError
from edgespec.tree.topology import MAX_ROWS
from tests.export import heads as tiny
from tests.native_drafts import Net, Truth, World, some_taps, some_tokens, world, write

VOCAB = tiny.VOCAB
HEADS: dict[str, Callable[[], tiny.Checkpoint]] = {
    "eagle3": tiny.eagle3,
    "eagle": tiny.eagle,
    "medusa": tiny.medusa,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("target") / "a.gguf")


@pytest.fixture(scope="module")
def files(target: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("heads")
    for name, made in HEADS.items():
        write(made(), work / f"{name}.gguf", target.weights)
    return {name: work / f"{name}.gguf" for name in HEADS}


def state_of(target: World, **params) -> NativeTargetState:
    return NativeTargetState(target.model(), **{"context": 512} | params)


def tokens_of(n: int, seed: int = 0):
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


@pytest.mark.parametrize("name", HEADS)
def test_an_attached_drafter_knows_what_a_host_would_tell_it(
    target: World, files: dict[str, Path], name: str
) -> None:
    """After prefills, trees in part committed, dropped rows, batches and cuts."""
    head = NativeHead(target.model(), files[name])
    drafter, told = NativeDrafter(head), NativeDrafter(head)
    state, other = state_of(target), state_of(target)
    state.attach(drafter)
    other.set_taps(head.info.taps)
    logits = np.empty((MAX_ROWS, VOCAB), np.float32)

    def same() -> None:
        assert state.length == other.length == drafter.length == told.length
        root = int(tokens_of(1, state.length)[0])
        mine, theirs = Net(drafter).begin(root), Net(told).begin(root)
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            np.testing.assert_array_equal(mine, theirs)
        Net(drafter).end()
        Net(told).end()

    def prefill(tokens) -> None:
        state.prefill(tokens, None)
        for first in range(0, len(tokens), MAX_ROWS):
            other.prefill(tokens[first : first + MAX_ROWS], None)
            told.append(tokens[first : first + MAX_ROWS], other.read_taps())
        same()

    def forward(tree, rows) -> None:
        for at in (state, other):
            at.forward(tree, None, logits)
        if rows is not None:
            kept = np.array(rows, np.int32)
            state.commit(kept)
            told.append(tree.tokens[kept], other.read_taps()[kept])
            other.commit(kept)
        same()

    prefill(tokens_of(150))
    tree = tree_derive(tokens_of(7, 1), [-1, 0, 0, 1, 2, 2, 5])
    forward(tree, [0, 2, 5, 6])
    forward(tree, None)
    forward(tree, [0])
    forward(tree, [0, 1, 3])
    for length in (155, 100):
        state.truncate(length)
        other.truncate(length)
        told.truncate(length)
        prefill(tokens_of(3, length))
    NativeBatch().step([state, other], [5, 5], logits)
    told.append([5], other.read_taps())
    same()
    state.truncate(0)
    other.truncate(0)
    told.truncate(0)
    prefill(tokens_of(9, 2))


def test_a_drafter_is_attached_where_the_target_is(
    target: World, files: dict[str, Path], tmp_path: Path
) -> None:
    head = NativeHead(target.model(), files["eagle3"])
    drafter, state = NativeDrafter(head), state_of(target)
    state.prefill(tokens_of(5), None)
    with pytest.raises(NativeError, match="told of the target's 5 positions, got 0"):
        state.attach(drafter)
    state.truncate(0)
    state.attach(drafter)
    with pytest.raises(NativeError, match="taps: the attached drafter chose them"):
        state.set_taps([1])
    state.prefill(tokens_of(5), None)
    assert drafter.length == 5
    assert state.read_taps().shape == (5, len(head.info.taps), tiny.HIDDEN)
    state.attach(drafter)  # it is in step
    state.attach(None)
    state.set_taps([1])
    state.prefill(tokens_of(1), None)
    assert drafter.length == 5
    elsewhere = world(tmp_path / "b.gguf")
    with pytest.raises(UsageError, match="another model"):
        state_of(elsewhere).attach(NativeDrafter(head))


def test_a_closed_drafter_is_not_used_again(
    target: World, files: dict[str, Path]
) -> None:
    head = NativeHead(target.model(), files["medusa"])
    drafter, state = NativeDrafter(head), state_of(target)
    session = NativeSession(VOCAB, 512)
    state.attach(drafter)
    session.attach(drafter)
    drafter.close()
    with pytest.raises(UsageError, match="the drafter is closed"):
        state.prefill(tokens_of(5), None)
    with pytest.raises(UsageError, match="the drafter is closed"):
        session.append([1])
    with pytest.raises(UsageError, match="the drafter is closed"):
        state.attach(drafter)
    state.attach(None)
    session.attach(None)
    state.prefill(tokens_of(5), None)
    session.append([1])
    drafter.close()


def test_the_host_tells_a_drafter_in_the_right_shape(
    target: World, files: dict[str, Path]
) -> None:
    head = NativeHead(target.model(), files["eagle3"])
    drafter = NativeDrafter(head)
    taps = np.zeros((2, len(head.info.taps), tiny.HIDDEN), np.float32)
    for states in (None, taps[:1], taps[:, :1], taps[..., 1:]):
        with pytest.raises(UsageError, match="states: expected"):
            drafter.append([1, 2], states)
    with pytest.raises(UsageError, match="tokens"):
        drafter.append([1, VOCAB], taps)
    drafter.append([1, 2], taps)
    with pytest.raises(UsageError, match="length"):
        drafter.truncate(3)
    assert drafter.length == 2


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_levels_wider_than_a_pass_are_the_truth(
    tmp_path: Path, target: World, name: str
) -> None:
    path = tmp_path / "head.gguf"
    head = write(HEADS[name](), path, target.weights)
    drafter = NativeDrafter(NativeHead(target.model(), path))
    truth = Truth(head, target.weights)
    tokens, taps = some_tokens(head, 20, 1), some_taps(head, 20, 1)
    drafter.append(tokens, taps)
    truth.append(tokens, taps)
    parent = [0] * 11 + [*range(1, 12)] + [*range(12, 23)]
    rows = some_tokens(head, len(parent), 2)
    got, expected = Net(drafter).rows(4, rows, parent), truth.rows(4, rows, parent)
    assert np.abs(got - expected).max() < 0.01 * expected.std()


# ---- whole rounds -------------------------------------------------------------------


def reply_of(
    target: World,
    prompt,
    params: SampleParams,
    n: int,
    head: Path | None = None,
    *,
    window: int = 0,
    context: int = 512,
    **session,
) -> list[int]:
    """Rounds in C, and the drafter's length after each of them."""
    state = state_of(target, window=window, sinks=2 if window else 0, context=context)
    core = NativeSession(VOCAB, context, **session)
    drafter = None
    if head is not None:
        drafter = NativeDrafter(NativeHead(target.model(), head))
        state.attach(drafter)
        core.attach(drafter)
    core.append(prompt)
    core.begin_generation(params, n)
    state.prefill(np.asarray(prompt[:-1], np.int32), None)
    reply: list[int] = []
    kind, finish = PREFILL, None
    while finish is None:
        done = state.run(core, kind, None)
        reply += done.tokens
        finish, kind = done.finish, DRAFT
        assert state.length == len(prompt) - 1 + len(reply)
        assert drafter is None or drafter.length == state.length
        assert core.tokens.tolist() == [*prompt, *reply]
    return reply


GREEDY = SampleParams(temperature=0.0)
SAMPLED = SampleParams(temperature=0.8, top_p=0.95, seed=6)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [0, 48])
@pytest.mark.parametrize("name", HEADS)
def test_rounds_with_any_head_give_the_plain_tokens(
    target: World, files: dict[str, Path], name: str, window: int, params: SampleParams
) -> None:
    """Far beyond the window; the head's own positions are longer or shorter."""
    prompt = [*tokens_of(20).tolist()] * 4
    plain = reply_of(target, prompt, params, 70, window=window)
    shape = tree_derive([0] * 12, [-1] + [0] * 9 + [1, 2])
    for tree in ("auto", "best", shape):
        for draft in ("none", "ngram"):
            assert plain == reply_of(
                target,
                prompt,
                params,
                70,
                files[name],
                window=window,
                draft=draft,
                tree=tree,
                rows=7,
            )


@pytest.mark.parametrize("name", HEADS)
def test_c27_heads_draft_into_the_end_of_the_context(
    target: World, files: dict[str, Path], name: str
) -> None:
    prompt = tokens_of(120).tolist()
    plain = reply_of(target, prompt, GREEDY, 99, context=128)
    assert len(plain) == 9
    with_head = reply_of(
        target, prompt, GREEDY, 99, files[name], context=128, tree="best", rows=32
    )
    assert with_head == plain


def test_a_round_that_fails_leaves_head_and_target_in_step(
    target: World, files: dict[str, Path]
) -> None:
    """A session that allows more than the target holds."""
    prompt = tokens_of(30).tolist()
    state = state_of(target, context=36)
    drafter = NativeDrafter(NativeHead(target.model(), files["eagle3"]))
    core = NativeSession(VOCAB, 64, tree="best", rows=4)
    state.attach(drafter)
    core.attach(drafter)
    core.append(prompt)
    core.begin_generation(GREEDY, 30)
    state.prefill(np.array(prompt[:-1], np.int32), None)
    state.run(core, PREFILL, None)

    def go_on() -> None:
        while True:
            state.run(core, DRAFT, None)

    with pytest.raises(ContextError):
        go_on()
    assert drafter.length == state.length == core.length - 1
    state.truncate(20)
    core.truncate(21)
    core.begin_generation(GREEDY, 5)
    while state.run(core, DRAFT, None).finish is None:
        assert drafter.length == state.length
