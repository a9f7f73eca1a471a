"""Draft heads in C against numpy: every kind and flag, whatever was fed and dropped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec._native import cpu_variants, tree_derive
from edgespec._native.trees import tree_to_c
from edgespec.errors import NativeError, UsageError
from tests.export import heads as tiny
from tests.native_drafts import (
    Floats,
    Truth,
    World,
    opened,
    some_taps,
    some_tokens,
    world,
    write,
)

HEADS = {
    "eagle3": tiny.eagle3,
    "residual": lambda: tiny.eagle3(norm_before_residual=True),
    "before fc": lambda: tiny.eagle3(norm_before_fc=True, norm_output=True),
    "fc norms": lambda: tiny.eagle3("speculators", fc_norm=True),
    "whole vocabulary": lambda: tiny.eagle3(draft_vocab=None),
    "qwen": lambda: tiny.eagle3(qwen=True, window=5),
    "own width": lambda: tiny.eagle3(hidden=96, own_embedding=True),
    "eagle": tiny.eagle,
    "eagle without bias": lambda: tiny.eagle(bias=False, own_embedding=False),
    "medusa": tiny.medusa,
    "medusa on the target's": lambda: tiny.medusa(rows=None, layers=2),
    "medusa on the first ids": lambda: tiny.medusa(rows=None, first=100),
}
# children of the root, theirs, and theirs: rows count from the root
PARENT = (0, 0, 0, 1, 1, 3, 2, 1, 5, 7, 7, 11)
MEDUSA = (0, 0, 0, 1, 1, 3, 2)  # three heads, three levels


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("target") / "a.gguf")


def check(got: Floats, expected: Floats, most: float = 1e-3) -> None:
    """Errors in standard deviations; rounded keys and values may stand on an edge."""
    assert got.shape == expected.shape
    assert expected.std() > 0.5
    error = np.abs(got - expected) / expected.std()
    assert np.median(error) < most / 10
    assert error.max() < most


@pytest.mark.parametrize("name", HEADS)
def test_float_heads_give_the_truth(tmp_path: Path, target: World, name: str) -> None:
    """At every row of trees; after commits, repeated drafts, cuts and short feeds."""
    path = tmp_path / "head.gguf"
    head = write(HEADS[name](), path, target.weights)
    parent = MEDUSA if head.kind == "medusa" else PARENT
    drafter, net = opened(target.model(), path)
    truth = Truth(head, target.weights)
    assert net.vocab == head.draft_vocab
    if head.d2t is not None:
        assert np.array_equal(net.ids, head.d2t)
    rows = some_tokens(head, len(parent), 1)
    assert net.begin(3) is None

    def commit(tokens, states) -> None:
        drafter.append(tokens, states)
        truth.append(tokens, states)
        assert drafter.length == len(truth.tokens)

    # a row alone, chains of one pass and of two
    for seed, n in enumerate((1, 9, 70, 2, 3)):
        commit(some_tokens(head, n, seed), some_taps(head, n, seed))
        for root in (4, 5):  # a second root at the same place
            check(net.rows(root, rows, parent), truth.rows(root, rows, parent))
    commit(np.array([6], np.int32), some_taps(head, 1, 90))  # not the root drafted from
    check(net.rows(7, rows, parent), truth.rows(7, rows, parent))
    for length in (84, 40):
        drafter.truncate(length)
        truth.truncate(length)
        if head.kind == "medusa" or (head.window and length == 40):
            assert net.begin(8) is None  # the hidden states it has are all cut
            truth.base = length
            commit(np.array([9], np.int32), some_taps(head, 1, length))
        check(net.rows(8, rows, parent), truth.rows(8, rows, parent))
    drafter.truncate(0)
    assert net.begin(8) is None


@pytest.mark.parametrize("name", ["eagle3", "eagle without bias"])
def test_a_window_is_all_that_is_seen_and_kept(
    tmp_path: Path, target: World, name: str
) -> None:
    """Over several wraps of KV and hidden states; after more tokens than are kept."""
    path = tmp_path / "head.gguf"
    head = write(HEADS[name](), path, target.weights)
    drafter, net = opened(target.model(), path, window=20)
    truth = Truth(head, target.weights, window=20)
    rows = some_tokens(head, len(PARENT), 1)
    rng = np.random.default_rng(5)
    for seed in range(60):
        n = 75 if seed % 20 == 19 else int(rng.integers(1, 9))
        tokens, states = some_tokens(head, n, seed), some_taps(head, n, seed)
        drafter.append(tokens, states)
        truth.append(tokens, states)
        if n > 20:  # it begins again with what it has
            truth.base = len(truth.tokens) - 20
        if seed % 4 == 0 or n > 20:
            root = int(rng.integers(0, head.vocab))
            check(net.rows(root, rows, PARENT), truth.rows(root, rows, PARENT))
        if seed % 7 == 3:
            length = len(truth.tokens) - int(rng.integers(0, 12))
            drafter.truncate(length)
            truth.truncate(length)
    assert drafter.length > 300


def test_c28_positions_far_past_the_heads_own(tmp_path: Path, target: World) -> None:
    """Its 128 bound how far a row looks back, whatever its position is."""
    path = tmp_path / "head.gguf"
    made = tiny.eagle3()
    made.config["max_position_embeddings"] = 128
    head = write(made, path, target.weights)
    assert target.weights.config.max_position >= 512
    drafter, net = opened(target.model(), path)
    assert drafter.head.info.max_position == 128
    truth = Truth(head, target.weights, window=128)
    rows = some_tokens(head, len(PARENT), 1)
    for seed in range(60):
        tokens, states = some_tokens(head, 5, seed), some_taps(head, 5, seed)
        drafter.append(tokens, states)
        truth.append(tokens, states)
        got = net.rows(7, rows, PARENT)
        if seed % 6 == 5 or len(truth.tokens) in (125, 130):
            check(got, truth.rows(7, rows, PARENT))
    assert drafter.length == 300


@pytest.mark.parametrize("quant", ["q4_0", "q8_0", "f16"])
@pytest.mark.parametrize("name", ["eagle3", "before fc", "eagle", "medusa"])
def test_the_same_bits_however_rows_come(
    tmp_path: Path, target: World, name: str, quant: str
) -> None:
    """Whatever the variant, the threads, the chunks fed and the drafts between."""
    path = tmp_path / "head.gguf"
    head = write(HEADS[name](), path, target.weights, quant)
    parent = MEDUSA if head.kind == "medusa" else PARENT
    tokens, states = some_tokens(head, 150, 2), some_taps(head, 150, 2)
    rows = some_tokens(head, len(parent), 1)
    seen, all_rows = set(), None
    cases = [(1, None, 150, 0), (2, None, 7, 3), (3, None, 64, 1), (2, None, 1, 30)]
    cases += [(2, cpu, 50, 2) for cpu in cpu_variants()]
    for threads, cpu, chunk, every in cases:
        drafter, net = opened(target.model(threads, cpu), path)
        for at in range(0, 150, chunk):
            drafter.append(tokens[at : at + chunk], states[at : at + chunk])
            if every and at // chunk % every == 0:
                net.rows(5, rows[::-1], parent)
        all_rows = net.rows(6, rows, parent)
        seen.add(all_rows.tobytes())
        alone = net.begin(6)
        tree = tree_to_c(tree_derive([6, *rows], [-1, *parent]))
        said = {row: net.expand(tree, [row])[0] for row in (1, 2, 3)}
        assert np.array_equal(alone, all_rows[0])
        assert all(np.array_equal(said[row], all_rows[row]) for row in said)
    assert len(seen) == 1
    # and it is what the weights say, but for inputs rounded to eight bits
    truth = Truth(head, target.weights)
    truth.append(tokens, states)
    expected = truth.rows(6, rows, parent)
    off = np.linalg.norm(all_rows - expected) / np.linalg.norm(expected)
    assert off < (2e-3 if quant == "f16" else 0.06)


def test_a_head_as_llama_cpp_writes_it(tmp_path: Path, target: World) -> None:
    """Without a key of ours: taps are the inputs of its layers."""
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    head = write(tiny.eagle3(norm_before_residual=True), ours, target.weights, "q8_0")
    data = ours.read_bytes()
    for key in (b"edgespec.head.taps", b"edgespec.head.target_layers"):
        assert key in data
    theirs.write_bytes(data.replace(b"edgespec.head.", b"nobodys_.head."))
    said = []
    for path in (ours, theirs):
        drafter, net = opened(target.model(), path)
        assert drafter.head.info.taps == tiny.TAPS
        drafter.append(some_tokens(head, 9, 1), some_taps(head, 9, 1))
        said.append(net.rows(3, some_tokens(head, len(PARENT), 1), PARENT))
    assert np.array_equal(*said)


def test_hidden_states_beyond_halves(tmp_path: Path, target: World) -> None:
    path = tmp_path / "head.gguf"
    head = write(tiny.eagle3(), path, target.weights)
    drafter, net = opened(target.model(), path)
    truth = Truth(head, target.weights)
    tokens, states = some_tokens(head, 9, 1), some_taps(head, 9, 1)
    drafter.append(tokens, states * np.float32(2.0**20))
    truth.append(tokens, states)
    # the norms in front of attention see no scale but that of the residual
    rows = net.rows(3, [1, 2], [0, 0])
    assert np.isfinite(rows).all()
    drafter.truncate(0)
    drafter.append(tokens, np.full_like(states, np.nan))
    assert np.isnan(net.rows(3, [1], [0])).any()
    drafter.truncate(0)
    drafter.append(tokens, states)
    check(net.rows(3, [1, 2], [0, 0]), truth.rows(3, [1, 2], [0, 0]))


def test_what_it_tells_of_itself(tmp_path: Path, target: World) -> None:
    made = {
        "eagle3": ("eagle3", 96, 256, 0, tiny.TAPS),
        "eagle": ("eagle", 320, 256, 0, (tiny.LAYERS,)),
        "medusa on the target's": ("medusa", 320, 0, 3, (tiny.LAYERS,)),
        "medusa on the first ids": ("medusa", 100, 0, 3, (tiny.LAYERS,)),
    }
    for name, (kind, vocab, most, depth, taps) in made.items():
        path = tmp_path / f"{kind}.gguf"
        head = write(HEADS[name](), path, target.weights, "q8_0")
        drafter, net = opened(target.model(), path)
        info = drafter.head.info
        assert (info.kind, info.draft_vocab, info.max_position) == (kind, vocab, most)
        assert (info.depth, info.taps, info.hidden) == (depth, taps, head.hidden)
        assert info.file_bytes == path.stat().st_size
        n_weights = sum(np.prod(t.shape) for t in head.tensors.values())
        assert n_weights < info.weight_bytes < 1.3 * n_weights + 3000
        assert drafter.memory > len(taps) * 64 * 2
        small = opened(target.model(), path, window=16)[0]
        assert small.memory < drafter.memory or kind == "medusa"
        assert (net.depth, net.width) == (depth, 8)


def test_misuse_is_told(tmp_path: Path, target: World) -> None:
    path = tmp_path / "head.gguf"
    head = write(tiny.eagle3(), path, target.weights)
    drafter, net = opened(target.model(), path)
    with pytest.raises(UsageError, match=r"window: expected 0 or more, got -1"):
        opened(target.model(), path, window=-1)
    states = some_taps(head, 2, 1)
    for token in (-1, head.vocab):
        with pytest.raises(UsageError, match=rf"tokens\[1\]: .* got {token}"):
            drafter.append([0, token], states)
        with pytest.raises(UsageError, match=rf"root: .* got {token}"):
            net.begin(token)
    assert drafter.length == 0
    drafter.append([1, 2], states)
    for length in (-1, 3):
        with pytest.raises(UsageError, match=rf"length: expected 0 to 2, got {length}"):
            drafter.truncate(length)
    tree = tree_to_c(tree_derive(range(15), [-1, *[0] * 12, 1, 2]))
    with pytest.raises(NativeError, match="before the root's"):
        net.expand(tree, [1])
    net.begin(0)
    for rows in ([], [2, 1], [0], [15], [1, 13], list(range(1, 10))):
        with pytest.raises(UsageError, match="draft: "):
            net.expand(tree, rows)
    with pytest.raises(NativeError, match="row 13 comes before its parent 1"):
        net.expand(tree, [13])
    net.expand(tree, [1])
    net.expand(tree, [13])
    for _ in range(62):
        net.expand(tree, [2])
    with pytest.raises(UsageError, match="rows behind 64 open ones"):
        net.expand(tree, [3])
    net.end()
    with pytest.raises(NativeError, match="before the root's"):
        net.expand(tree, [1])
    path = tmp_path / "medusa.gguf"
    drafter, net = opened(target.model(), write_medusa(path, target))
    drafter.append([1], some_taps(head, 1, 1)[:, :1])
    net.begin(0)
    deep = tree_to_c(tree_derive(range(4), [-1, 0, 1, 2]))
    net.expand(deep, [2])
    with pytest.raises(UsageError, match="above depth 3, got depth 3"):
        net.expand(deep, [3])


def write_medusa(path: Path, target: World) -> Path:
    write(tiny.medusa(), path, target.weights)
    return path
