"""The decode loop: toy targets, scripted and n-gram drafts, every kind of ending."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec._native import (
    DRAFT,
    PLAIN,
    PREFILL,
    NativeSession,
    SampleParams,
    sample_draw,
    sample_process,
    tree_derive,
)
from edgespec.errors import ContextError, NativeError, UsageError
from edgespec.tree.topology import MAX_ROWS, Tree, chain

VOCAB = 24
EOS = 23
GREEDY = SampleParams(temperature=0.0)
Model = Callable[[list[int]], NDArray[np.float32]]
Drafter = Callable[[list[int]], Tree | None]


def random_model(seed: int, vocab: int = VOCAB, spread: float = 2.0) -> Model:
    """Logits from the last two tokens."""

    def logits(sequence: list[int]) -> NDArray[np.float32]:
        rng = np.random.default_rng([seed, *sequence[-2:]])
        return rng.normal(0, spread, vocab).astype(np.float32)

    return logits


def scripted_model(script: list[int], vocab: int = VOCAB) -> Model:
    """Says script[i] at index i of the sequence."""

    def logits(sequence: list[int]) -> NDArray[np.float32]:
        row = np.zeros(vocab, np.float32)
        row[script[len(sequence) % len(script)]] = 5.0
        return row

    return logits


class Host:
    """A target that holds its KV as the list of tokens in it."""

    def __init__(self, model: Model, **params: object) -> None:
        self.model = model
        self.context = int(params.pop("context", 512))  # type: ignore[call-overload]
        self.session = NativeSession(VOCAB, self.context, [EOS], **params)  # type: ignore[arg-type]
        self.kv: list[int] = []

    def generate(
        self,
        max_new: int,
        params: SampleParams = GREEDY,
        drafter: Drafter | None = None,
        kind: int = DRAFT,
    ) -> tuple[list[int], str]:
        """The reply's tokens and why it ended; checks the KV contract on the way."""
        session = self.session
        reply: list[int] = []
        session.begin_generation(params, max_new)
        finish, kinds = None, [PREFILL]
        while finish is None:
            if drafter is not None and not kinds:
                proposal = drafter(session.tokens.tolist())
                if proposal is not None:
                    session.propose(proposal)
            sequence = session.tokens.tolist()
            tree = session.begin(kinds.pop() if kinds else kind)
            self.kv = sequence[:-1]
            assert len(self.kv) + tree.n <= self.context
            assert tree.tokens[0] == sequence[-1]
            assert tree.depth.max() <= max_new - len(reply) - 1
            rows = []
            for i in range(tree.n):
                path = [int(tree.tokens[j]) for j in np.flatnonzero(tree.mask[i])]
                rows.append(self.model(self.kv + path))
            result = session.finish(np.stack(rows), seconds=0.001)
            assert len(result.tokens) == len(result.rows) >= 1
            assert (np.diff(result.rows) > 0).all()
            assert result.rows[0] == 0
            self.kv += [int(tree.tokens[r]) for r in result.rows]
            reply += result.tokens.tolist()
            finish = result.finish
            assert session.tokens.tolist() == [*self.kv, reply[-1]]
        return reply, finish


def plain(
    model: Model, prompt: list[int], max_new: int, params: SampleParams = GREEDY
) -> list[int]:
    """What decoding one token at a time gives, without a session."""
    sequence = list(prompt)
    while len(sequence) < len(prompt) + max_new:
        row = sample_process(params, sequence, model(sequence))
        sequence.append(sample_draw(params, row, len(sequence)))
        if sequence[-1] == EOS:
            break
    return sequence[len(prompt) :]


def fresh(model: Model, prompt: list[int], **params: object) -> Host:
    host = Host(model, **params)
    host.session.append(prompt)
    return host


def bushy(model: Model, rng: np.random.Generator, right: float) -> Drafter:
    """Trees of 12 rows, each the target's greedy choice with chance `right`."""

    def draft(sequence: list[int]) -> Tree:
        paths, parent = [sequence], [-1]
        for i in range(1, 12):
            above = (i - 1) // 2
            choice = int(model(paths[above]).argmax())
            if rng.random() >= right:
                choice = int((choice + rng.integers(1, VOCAB)) % VOCAB)
            parent.append(above)
            paths.append([*paths[above], choice])
        return tree_derive([p[-1] for p in paths], parent)

    return draft


PENALISED = SampleParams(
    temperature=0.9,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    penalty_window=16,
    seed=3,
)


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_any_drafter_gives_the_plain_tokens(
    seed: int, right: float, params: SampleParams
) -> None:
    model = random_model(seed)
    drafter = bushy(model, np.random.default_rng(seed), right)
    host = fresh(model, [1, 2, 3])
    reply, _ = host.generate(80, params, drafter)
    assert reply == plain(model, [1, 2, 3], 80, params)


SHAPE = tree_derive([0] * 7, [-1, 0, 0, 1, 1, 3, 5])


@pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", ["auto", "best", SHAPE], ids=["auto", "best", "shape"])
def test_ngram_drafts_give_the_plain_tokens(
    tree: str | Tree, params: SampleParams
) -> None:
    script = [int(t) for t in np.random.default_rng(0).integers(0, 20, 9)]
    for model in (scripted_model(script), random_model(4)):
        host = fresh(model, script, draft="ngram", tree=tree, rows=8)
        reply, _ = host.generate(60, params)
        assert reply == plain(model, script, 60, params)
        assert host.session.stats().rounds <= len(reply)


def test_repetitive_text_is_drafted() -> None:
    script = [3, 1, 4, 1, 5, 9, 2, 6]
    for tree in ("best", chain(np.zeros(6, np.int32)), "auto"):
        cost = [0.0] + [1.0 + 0.05 * n for n in range(MAX_ROWS)]
        host = fresh(
            scripted_model(script),
            script * 4,
            draft="ngram",
            tree=tree,
            rows=6,
            cost=cost,
        )
        reply, finish = host.generate(64)
        stats = host.session.stats()
        assert (len(reply), finish) == (64, "length")
        assert stats.tokens == 63  # the prefill's token is not a round's
        assert stats.rounds < 32
        assert stats.accepted == stats.tokens - stats.rounds
        assert stats.accepted <= stats.depth <= stats.drafted
        assert stats.forward_seconds == pytest.approx(0.001 * stats.rounds)


def test_a_static_shape_bounds_the_tree() -> None:
    host = fresh(scripted_model([7]), [7] * 20, draft="ngram", tree=SHAPE)
    session = host.session
    session.begin_generation(GREEDY, 40)
    tree = session.begin(DRAFT)
    shape = {tuple(_ranks(SHAPE, i)) for i in range(SHAPE.n)}
    assert 1 < tree.n <= SHAPE.n
    assert {tuple(_ranks(tree, i)) for i in range(tree.n)} <= shape


def _ranks(tree: Tree, row: int) -> list[int]:
    return [int(tree.rank[j]) for j in np.flatnonzero(tree.mask[row])[1:]]


def test_plain_rounds_have_one_row() -> None:
    host = fresh(scripted_model([7]), [7] * 20, draft="ngram", tree="best")
    reply, _ = host.generate(10, kind=PLAIN)
    stats = host.session.stats()
    assert reply == [7] * 10
    assert (stats.rounds, stats.plain_rounds, stats.drafted) == (9, 9, 0)


def test_allowed_tokens_enter_per_row() -> None:
    host = fresh(scripted_model([7]), [7])
    session = host.session
    session.begin_generation(GREEDY, 8)
    session.propose(tree_derive([0, 7, 5], [-1, 0, 1]))
    tree = session.begin()
    logits = np.stack([host.model([7])] * tree.n)
    allowed = np.ones((3, VOCAB), np.bool_)
    allowed[1] = False
    allowed[1, 5] = True  # row 1 may only say 5, row 2 only 6
    allowed[2] = False
    allowed[2, 6] = True
    result = session.finish(logits, allowed)
    assert result.tokens.tolist() == [7, 5, 6]


# ---- endings ------------------------------------------------------------------------


def copy_of(script: list[int], depth: int) -> Drafter:
    """A chain the scripted model accepts whole."""

    def draft(sequence: list[int]) -> Tree:
        at = len(sequence)
        return chain(
            np.array(
                [0] + [script[(at + i) % len(script)] for i in range(depth)], np.int32
            )
        )

    return draft


def test_c17_nothing_after_an_eos_inside_an_accepted_draft() -> None:
    script = [1, 2, 10, EOS, 11, 12, 13, 14]
    host = fresh(scripted_model(script), [1, 2])
    host.session.begin_generation(GREEDY, 20)
    host.session.propose(chain(np.array([0, 10, EOS, 11, 12], np.int32)))
    tree = host.session.begin(DRAFT)
    assert tree.n == 5
    logits = np.stack([host.model([1, 2, 10, EOS, 11, 12][: 2 + i]) for i in range(5)])
    result = host.session.finish(logits)
    assert result.tokens.tolist() == [10, EOS]
    assert result.rows.tolist() == [0, 1]
    assert result.finish == "stop"
    assert host.session.tokens.tolist() == [1, 2, 10, EOS]
    stats = host.session.stats()
    assert (stats.tokens, stats.accepted, stats.drafted) == (2, 2, 4)
    assert stats.tried == stats.held == (1, 1, 0, 0, 0, 0, 0, 0)
    with pytest.raises(NativeError, match="no reply is in progress"):
        host.session.begin(DRAFT)
    # The next turn starts clean.
    host.session.append([4, 5])
    reply, finish = host.generate(2, drafter=copy_of(script, 4))
    assert (reply, finish) == ([13, 14], "length")


def test_acceptance_is_counted_by_depth() -> None:
    script = [1, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    host = fresh(scripted_model(script), [1])

    def wrong_behind_two(sequence: list[int]) -> Tree:
        right = [script[(len(sequence) + i) % len(script)] for i in range(2)]
        return tree_derive(
            [sequence[-1], 3, right[0], right[1], 3, 4], [-1, 0, 0, 2, 3, 4]
        )

    host.generate(10, drafter=wrong_behind_two)
    stats = host.session.stats()
    assert (stats.rounds, stats.accepted) == (3, 6)
    # The last level of the last round does not fit the budget.
    assert stats.tried == (3, 3, 2, 0, 0, 0, 0, 0)
    assert stats.held == (3, 3, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("max_new", [1, 2, 3, 4, 5, 6, 7])
def test_c18_the_budget_is_exact(max_new: int) -> None:
    script = [1, 10, 11, 12, 13, 14, 15, 16]
    host = fresh(scripted_model(script), [1])
    reply, finish = host.generate(max_new, drafter=copy_of(script, 4))
    assert reply == [10, 11, 12, 13, 14, 15, 16][:max_new]
    assert finish == "length"


def test_c18_zero_is_the_hosts_business() -> None:
    host = fresh(scripted_model([1]), [1])
    with pytest.raises(UsageError, match="max_new"):
        host.session.begin_generation(GREEDY, 0)


def test_c18_a_stop_inside_the_budget_is_a_stop() -> None:
    script = [1, 10, 11, EOS, 20, 21, 22]
    for max_new in (3, 5):
        host = fresh(scripted_model(script), [1])
        reply, finish = host.generate(max_new, drafter=copy_of(script, 6))
        assert (reply, finish) == ([10, 11, EOS], "stop")


@pytest.mark.parametrize("n_prompt", range(250, 257))
@pytest.mark.parametrize("draft", ["none", "ngram", "proposed"])
def test_c27_drafts_are_clipped_to_the_context(n_prompt: int, draft: str) -> None:
    host = fresh(
        scripted_model([7]),
        [7] * n_prompt,
        context=256,
        draft="ngram" if draft == "ngram" else "none",
        tree="best",
        rows=32,
    )
    drafter = copy_of([7], 31) if draft == "proposed" else None
    reply, finish = host.generate(1000, drafter=drafter)
    assert finish == "context"
    assert len(reply) == 257 - n_prompt  # the last token needs no KV row
    assert len(host.kv) == 256
    with pytest.raises(ContextError):
        host.session.begin_generation(GREEDY, 1)
    with pytest.raises(ContextError):
        host.session.append([1])
    host.session.truncate(100)
    assert host.generate(3)[0] == [7, 7, 7]


def test_c27_a_prompt_that_does_not_fit_is_an_error() -> None:
    host = Host(scripted_model([7]), context=256)
    with pytest.raises(ContextError, match="257 tokens do not fit"):
        host.session.append([7] * 257)
    assert host.session.length == 0
    host.session.append([7] * 256)


def test_c12_a_seed_repeats_and_seeds_differ() -> None:
    model = random_model(1)

    def run(seed: int) -> list[int]:
        host = fresh(model, [1, 2], draft="ngram", tree="best")
        return host.generate(10, SampleParams(temperature=2.0, seed=seed))[0]

    assert run(42) == run(42) == run(42)
    assert len({tuple(run(seed)) for seed in range(1, 6)}) > 1


def test_c13_penalties_see_the_path_inside_a_tree() -> None:
    def hello(sequence: list[int]) -> NDArray[np.float32]:
        row = np.zeros(VOCAB, np.float32)
        row[5], row[6], row[7] = 3.0, 2.0, 1.5
        return row

    replies = []
    for penalty in (-2.0, 2.0):
        params = SampleParams(temperature=0.0, frequency_penalty=penalty)
        host = fresh(hello, [5])
        drafter = bushy(hello, np.random.default_rng(0), 0.7)
        reply, _ = host.generate(8, params, drafter)
        assert reply == plain(hello, [5], 8, params)
        replies.append(reply)
    assert replies[0] == [5] * 8
    assert replies[1] != replies[0]


def test_c33_ten_replies_on_one_handle_with_errors_between() -> None:
    model = random_model(2)
    no_eos = SampleParams(
        temperature=0.0, logit_bias=((EOS, float("-inf")),), penalty_window=64
    )
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, 20, 200)]
    host = Host(model, draft="ngram", tree="best", context=300)
    replies = []
    for _ in range(10):
        host.session.truncate(0)
        host.session.append(prompt)
        with pytest.raises(ContextError):
            host.session.append([1] * 200)
        host.session.begin_generation(no_eos, 64)
        host.session.begin(PREFILL)
        with pytest.raises(NativeError, match="NaN"):
            host.session.finish(np.full((1, VOCAB), np.nan, np.float32))
        with pytest.raises(NativeError, match="still open"):
            host.session.begin(DRAFT)
        host.session.abandon()
        replies.append(host.generate(64, no_eos))
    assert all(reply == replies[0] for reply in replies)
    assert (len(replies[0][0]), replies[0][1]) == (64, "length")


def test_a_failed_finish_can_be_repeated() -> None:
    host = fresh(scripted_model([7]), [7])
    host.session.begin_generation(GREEDY, 4)
    host.session.begin(PREFILL)
    row = host.model([7])[None]
    with pytest.raises(UsageError, match="expected shape"):
        host.session.finish(row[:, :5])
    with pytest.raises(UsageError, match="seconds"):
        host.session.finish(row, seconds=-1.0)
    assert host.session.finish(row).tokens.tolist() == [7]


def test_evicted_tokens_keep_counting() -> None:
    """After dropping the front the noise goes on where it was, not from the start."""
    params = SampleParams(temperature=1.0, seed=9)
    flat: Model = lambda sequence: np.zeros(VOCAB - 1, np.float32)  # noqa: E731

    def reply(evicted: int, prompt: list[int]) -> list[int]:
        session = NativeSession(VOCAB - 1, 64)
        session.append(prompt)
        session.evicted(evicted)
        session.begin_generation(params, 5)
        tokens: list[int] = []
        while len(tokens) < 5:
            tree = session.begin(PLAIN)
            rows = np.stack([flat([])] * tree.n)
            tokens += session.finish(rows).tokens.tolist()
        return tokens

    assert reply(0, [1] * 12) == reply(8, [1] * 4)
    assert reply(0, [1] * 12) != reply(0, [1] * 4)


# ---- calls out of order -------------------------------------------------------------


def test_calls_out_of_order_are_state_errors() -> None:
    session = NativeSession(VOCAB, 64, [EOS])
    with pytest.raises(NativeError, match="empty"):
        session.begin_generation(GREEDY, 4)
    session.append([1, 2])
    with pytest.raises(NativeError, match="no reply"):
        session.begin(DRAFT)
    with pytest.raises(NativeError, match="no round is open"):
        session.finish(np.zeros((1, VOCAB), np.float32))
    session.abandon()
    session.begin_generation(GREEDY, 4)
    session.begin(PREFILL)
    for call in (
        lambda: session.append([1]),
        lambda: session.truncate(1),
        lambda: session.evicted(1),
        lambda: session.begin_generation(GREEDY, 4),
        lambda: session.propose(tree_derive([0], [-1])),
        lambda: session.begin(DRAFT),
    ):
        with pytest.raises(NativeError, match="open"):
            call()
    session.abandon()
    session.truncate(0)
    with pytest.raises(NativeError, match="empty"):
        session.begin(DRAFT)
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.append([1])


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    session = NativeSession(VOCAB, 64, [EOS])
    for token in (-1, VOCAB):
        with pytest.raises(UsageError, match="expected tokens in"):
            session.append([1, token])
        with pytest.raises(UsageError, match="expected a token in"):
            session.propose(tree_derive([0, token], [-1, 0]))
        with pytest.raises(UsageError, match="eos"):
            NativeSession(VOCAB, 64, [token])
    assert session.length == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 0}, "vocab"),
        ({"context": 0}, "context"),
        ({"rows": 0}, "rows"),
        ({"rows": 65}, "rows"),
        ({"draft": "psychic"}, "draft"),
        ({"tree": "fern"}, "tree"),
        ({"draft": "ngram", "ngram_capacity": 0}, "capacity"),
        ({"cost_slope": -1.0}, "cost_slope"),
        ({"kv_block": -1}, "kv_block"),
        ({"cost": [1.0, -1.0] + [0.0] * 63}, r"cost\[1\]"),
        ({"cost": [1.0]}, "cost: expected 65"),
    ],
)
def test_session_parameters_are_checked(
    change: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {"vocab": VOCAB, "context": 64, **change}
    with pytest.raises(UsageError, match=message):
        NativeSession(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", range(1, 18))
def test_no_tree_straddles_a_block_of_kv_rows(length: int) -> None:
    session = NativeSession(VOCAB, 64, kv_block=8)
    session.append([1] * length)
    session.begin_generation(SampleParams(temperature=0.0), 40)
    session.propose(tree_derive([0, 1, 2, 3, 4], [-1, 0, 0, 1, 3]))
    tree = session.begin(DRAFT)
    first, last = length - 1, length - 1 + tree.n - 1
    assert first // 8 == last // 8
    assert tree.n == min(5, 8 - first % 8)


def test_costs_that_are_given_stay() -> None:
    cost = [0.0, 1.0, 1.5] + [0.0] * 62
    host = fresh(scripted_model([7]), [7], draft="ngram", cost=cost)
    host.generate(20)
    assert host.session.cost().tolist() == cost
    learner = fresh(scripted_model([7]), [7], draft="ngram", tree="best")
    learner.generate(20)
    learned = learner.session.cost()
    assert learned[16] == pytest.approx(0.001)
