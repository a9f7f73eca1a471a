"""Draft heads as ONNX graphs: what they say of rows, and the trees grown of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec._native import SampleParams, noise, tree_derive
from edgespec.drafts import growing
from edgespec.drafts.graphs import EagleGraphs, MedusaGraph, TargetShape
from edgespec.drafts.growing import Grower, relative_cost
from edgespec.errors import BackendError, FormatError
from edgespec.tree.shape import from_rank_paths
from edgespec.tree.topology import MAX_ROWS, Tree
from edgespec_export import head_forward, onnx_graph, onnx_head, sources
from edgespec_export.heads import Head
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet
from tests.export import checkpoints
from tests.export import heads as tiny
from tests.native_drafts import Truth, some_taps, some_tokens

TARGET = TargetShape(tiny.VOCAB, tiny.HIDDEN, tiny.LAYERS)
SEED = 5
KINDS = {
    "eagle3": tiny.eagle3,
    "norms": lambda: tiny.eagle3(fc_norm=True, norm_before_residual=True),
    "whole vocabulary": lambda: tiny.eagle3(draft_vocab=None, norm_output=True),
    "windowed": lambda: tiny.eagle3(qwen=True, window=5),
    "own width": lambda: tiny.eagle3(hidden=96, own_embedding=True),
    "eagle": tiny.eagle,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WeightSet]:
    """A graph of floats, and what it was made of."""
    work = tmp_path_factory.mktemp("target")
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    weights = sources.read(checkpoints.hf_checkpoint(work / "hf", shape))
    path = work / "target.onnx"
    onnx_graph.write(weights, path, taps=tiny.TAPS)
    return path, weights


def made(
    target: tuple[Path, WeightSet], checkpoint: tiny.Checkpoint, work: Path
) -> tuple[Head, EagleGraphs]:
    head = reader.read(checkpoint.write(work), target[1].config)
    path = target[0].with_name(f"draft-{work.name}.onnx")
    step = target[0].with_name(f"draft-{work.name}-step.onnx")
    options = {"target": target[0], "accuracy_level": 0}
    onnx_head.write_tree(head, path, tree=onnx_head.DEFAULT_TREE, **options)
    onnx_head.write_step(head, step, twin=path, **options)
    return head, EagleGraphs(path, step, TARGET, 1)


def told(net: EagleGraphs, truth: Truth, n: int, seed: int) -> None:
    """Both are told of the same n positions."""
    head = truth.head
    tokens, taps = some_tokens(head, n, seed), some_taps(head, n, seed)
    net.append(tokens, taps)
    truth.append(tokens.tolist(), taps)


def agree(net: EagleGraphs, truth: Truth, root: int, seed: int = 0) -> None:
    """The root's children and those of a small tree, level by level."""
    truth.window = truth.head.window or 0
    parent = [0, 0, 1, 1, 2, 3]  # rows of the tree, the root being 0
    tokens = some_tokens(truth.head, len(parent), seed).tolist()
    expected = truth.rows(root, tokens, parent)
    said = net.begin(root)
    assert said is not None
    np.testing.assert_allclose(said, expected[0], atol=0.03)
    for level in ([1, 2], [3, 4, 5], [6]):
        rows = net.expand(
            [tokens[row - 1] for row in level], [parent[row - 1] - 1 for row in level]
        )
        np.testing.assert_allclose(rows, expected[level], atol=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_a_forward_over_everything(
    target: tuple[Path, WeightSet], tmp_path: Path, kind: str
) -> None:
    head, net = made(target, KINDS[kind](), tmp_path)
    truth = Truth(head, target[1])
    told(net, truth, 1, 1)
    agree(net, truth, 3)
    told(net, truth, 40, 2)  # by the tree graph, but for the last rows
    agree(net, truth, 4)
    agree(net, truth, 7)  # another root at the same place
    told(net, truth, 3, 3)  # and another token came of it
    agree(net, truth, 5)
    for length in (43, 20):
        net.truncate(length)
        truth.truncate(length)
        agree(net, truth, 6)
    told(net, truth, 2, 4)
    net.truncate(21)
    truth.truncate(21)
    told(net, truth, 9, 5)
    agree(net, truth, 8)
    net.close()


def test_the_roots_pair_is_kept_when_the_root_was_committed(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    truth = Truth(head, target[1])
    told(net, truth, 5, 1)
    agree(net, truth, 9)
    tokens, taps = np.array([9, 4], np.int32), some_taps(head, 2, 2)
    net.append(tokens, taps)
    truth.append([9, 4], taps)
    agree(net, truth, 1)


def test_c28_conversations_go_on_beyond_the_heads_positions(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> None:
    """256 positions; a window keeps every distance below them."""
    head, net = made(target, tiny.eagle3(), tmp_path)
    truth = Truth(head, target[1])
    assert net.max_position == 256 and net.window < 256
    rng = np.random.default_rng(0)
    bases = set()
    for seed in range(40):
        told(net, truth, int(rng.integers(1, 40)), seed)
        if seed % 3 == 0:
            net.begin(3)
            truth.base = net._base
            bases.add(net._base)
            agree(net, truth, 3, seed)
    assert net.length > 700 and len(bases) > 3
    # A prompt longer than the window at once, and back into what the ring forgot.
    told(net, truth, 600, 99)
    net.begin(3)
    truth.base = net._base
    agree(net, truth, 3)
    net.truncate(300)
    assert net.begin(3) is None
    truth.truncate(300)
    told(net, truth, 4, 100)
    truth.base = 300
    agree(net, truth, 3)


def test_nothing_told_nothing_drafted(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    assert net.begin(3) is None
    net.append(some_tokens(head, 4, 0), some_taps(head, 4, 0))
    assert net.begin(3) is not None
    net.restart()
    assert net.length == 0 and net.begin(3) is None


@pytest.fixture
def medusa(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> tuple[Head, MedusaGraph, Path]:
    head = reader.read(tiny.medusa().write(tmp_path), target[1].config)
    path = target[0].with_name("draft-medusa.onnx")
    tree = onnx_head.DEFAULT_TREE
    onnx_head.write_medusa(head, path, tree=tree, target=target[0], accuracy_level=0)
    return head, MedusaGraph(path, TARGET, 1), path


def test_medusa_reads_the_last_hidden_state(
    medusa: tuple[Head, MedusaGraph, Path], target: tuple[Path, WeightSet]
) -> None:
    head, net, _ = medusa
    assert net.tokens(3) is None
    taps = some_taps(head, 6, 1)
    net.append(some_tokens(head, 6, 1), taps)
    logits = head_forward.medusa(head, taps[-1])[:, 0]
    tokens = net.tokens(3)
    assert tokens is not None and tokens[0] == 3
    tree = tree_derive([0] * len(tokens), net.parent, net.rank)
    for row in range(1, tree.n):
        best = np.argsort(-logits[tree.depth[row] - 1], kind="stable")
        assert tokens[row] == best[tree.rank[row]]
    net.truncate(6)
    assert net.tokens(3) is not None
    net.truncate(5)  # whose hidden state is not kept
    assert net.tokens(3) is None


@pytest.mark.parametrize("key", ["vocab", "hidden", "layers"])
def test_a_head_of_another_target_names_both(
    medusa: tuple[Head, MedusaGraph, Path], key: str
) -> None:
    sizes = {"vocab": 320, "hidden": 64, "layers": 8}
    other = TargetShape(**sizes | {key: 96})
    with pytest.raises(FormatError, match=f"{key}: .*{sizes[key]}, this one has 96"):
        MedusaGraph(medusa[2], other, 1)


def test_graphs_that_say_nothing_of_their_head(
    medusa: tuple[Head, MedusaGraph, Path], tmp_path: Path
) -> None:
    model = onnx.load(str(medusa[2]), load_external_data=True)
    del model.metadata_props[2:]
    path = tmp_path / "draft.onnx"
    onnx.save_model(model, str(path))
    with pytest.raises(FormatError, match=r"does not say its .*; export .* --head"):
        MedusaGraph(path, TARGET, 1)


def test_graphs_of_two_heads(target: tuple[Path, WeightSet], tmp_path: Path) -> None:
    _, one = made(target, tiny.eagle3(), tmp_path / "one")
    _, other = made(target, tiny.eagle(), tmp_path / "other")
    with pytest.raises(FormatError, match="not of the same head"):
        EagleGraphs(one.path, other.path.with_name("draft-other-step.onnx"), TARGET, 1)


def test_what_onnx_runtime_refuses_names_the_file(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    net.append(some_tokens(head, 2, 0), some_taps(head, 2, 0))
    with pytest.raises(BackendError, match=r"draft-.*-step\.onnx: ONNX Runtime"):
        net.begin(10**9)  # beyond the embedding


# Trees


def root(token: int = 3) -> Tree:
    return tree_derive([token], [-1])


ONE = np.ones(1, np.float32)


def greedy(net: EagleGraphs, tree: str | Tree, rows: int, slope: float) -> Grower:
    grower = Grower(net, tree=tree, rows=rows, slope=slope)
    grower.begin(SampleParams(temperature=0), 0)
    return grower


def proposed(grower: Grower, lookup: Tree | None = None, **options: object) -> Tree:
    options = {"index": 10, "measured": None} | options
    return grower.propose(lookup or root(), ONE, **options)  # type: ignore[arg-type]


def test_a_static_shape_is_filled_by_rank(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    truth = Truth(head, target[1])
    told(net, truth, 12, 1)
    shape = from_rank_paths([[0], [2], [0, 1], [2, 0], [0, 1, 0]], where="test")
    tree = proposed(greedy(net, shape, 16, 0.1))
    assert sorted(tree.depth) == sorted(shape.depth)
    paths = {(): 0}
    for row in range(1, shape.n):
        key = next(k for k, v in paths.items() if v == shape.parent[row])
        paths[(*key, int(shape.rank[row]))] = row
    # Row by row: the token is the r-th best behind its parent.
    for path in list(paths)[1:]:
        tokens: list[int] = []
        for i, rank in enumerate(path):
            said = truth.rows(3, tokens, list(range(len(tokens))))[i]
            order = np.argsort(-said, kind="stable")
            tokens.append(int(head_forward.target_ids(head, order)[rank]))
        at = 0
        for token in tokens:
            (at,) = (
                row
                for row in range(1, tree.n)
                if tree.parent[row] == at and tree.tokens[row] == token
            )


@pytest.mark.parametrize("rows", [2, 5, 16, MAX_ROWS])
def test_the_best_rows_come_first(
    target: tuple[Path, WeightSet], tmp_path: Path, rows: int
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    net.append(some_tokens(head, 12, 1), some_taps(head, 12, 1))
    grower = greedy(net, "best", rows, 0.1)
    tree = proposed(grower)
    assert tree.n == rows
    assert tree.tokens[0] == 3
    scores = np.array([node.score for node in grower._nodes])
    kept = np.sort(scores)[::-1][:rows]
    by_row = [1.0]
    for row in range(1, tree.n):
        path = np.flatnonzero(tree.mask[row])
        at = 0
        for above in path[1:]:
            at = grower._nodes[at].kids[int(tree.tokens[above])]
        by_row.append(grower._nodes[at].score)
    np.testing.assert_allclose(by_row, kept)


def test_sampling_ranks_by_the_noise_of_the_draw(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    truth = Truth(head, target[1])
    told(net, truth, 12, 1)
    grower = Grower(net, tree="best", rows=4, slope=0.1)
    grower.begin(SampleParams(temperature=0.8, seed=SEED), evicted=2)
    tree = proposed(grower)
    logits = truth.rows(3, [], [])[0] / np.float32(0.8)
    best = np.argsort(-logits, kind="stable")[: growing.CONTENDERS]
    ids = head_forward.target_ids(head, best)
    drawn = logits[best] + np.array([noise(SEED, 12, int(t)) for t in ids])
    assert tree.tokens[1] == ids[drawn.argmax()]


def test_ngrams_join_the_heads_tree(
    target: tuple[Path, WeightSet], tmp_path: Path
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    net.append(some_tokens(head, 12, 1), some_taps(head, 12, 1))
    grower = greedy(net, "best", 6, 0.1)
    alone = proposed(grower)
    both = int(alone.tokens[1])
    other = next(t for t in range(tiny.VOCAB) if t not in alone.tokens)
    lookup = tree_derive([3, both, other, other], [-1, 0, 0, 1])
    scores = np.array([1, 0.6, 0.3, 0.55], np.float32)
    merged = grower.propose(lookup, scores, index=10, measured=None)
    assert merged.n == 6
    assert merged.tokens[1] == both
    found = {(int(merged.tokens[i]), int(merged.parent[i])) for i in range(1, merged.n)}
    assert (other, 1) in found and (other, 0) in found


def test_a_head_that_never_pays_is_asked_less_and_less(
    target: tuple[Path, WeightSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, net = made(target, tiny.eagle3(), tmp_path)
    net.append(some_tokens(head, 12, 1), some_taps(head, 12, 1))
    asked = 0
    begin = net.begin

    def counted(token: int) -> np.ndarray:
        nonlocal asked
        asked += 1
        return begin(token)

    monkeypatch.setattr(net, "begin", counted)
    grower = greedy(net, "auto", 16, 0.3)
    wrong = next(t for t in range(tiny.VOCAB) if t not in set(head.d2t.tolist()))
    for _ in range(400):
        tree = proposed(grower)
        grower.learn([wrong])
    assert tree.n == 1
    assert asked < 90
    # And a head that is sure and right is asked always.
    monkeypatch.setattr(net, "begin", lambda token: 2 * counted(token))
    grower = greedy(net, "auto", 16, 0.3)
    best = int(proposed(greedy(net, "best", 2, 0.3)).tokens[1])
    asked, rows = 0, 0
    for _ in range(200):
        tree = proposed(grower)
        rows += tree.n > 1
        grower.learn([best])
    assert asked == 200 and rows > 150


def test_logits_that_are_no_numbers_are_no_draft(
    target: tuple[Path, WeightSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, net = made(target, tiny.eagle3(), tmp_path)
    logits = np.full(tiny.DRAFT_VOCAB, np.nan, np.float32)
    monkeypatch.setattr(net, "begin", lambda token: logits)
    for tree in ("auto", "best", from_rank_paths([[0], [1]], where="test")):
        grower = greedy(net, tree, 8, 0.1)
        assert proposed(grower).n == 1
        grower.learn([3])


def test_costs_follow_what_was_measured() -> None:
    line = relative_cost(None, 0.3)
    assert line[1] == 1 and line[5] == pytest.approx(2.2)
    measured = np.zeros(MAX_ROWS + 1)
    assert np.array_equal(relative_cost(measured, 0.3), line)
    measured[[1, 2, 4]] = 0.010, 0.011, 0.010  # a late measurement below an early one
    cost = relative_cost(measured, 0.3)
    assert cost[1:5].tolist() == pytest.approx([1, 1.1, 1.1, 1.1])
    assert (np.diff(cost[1:]) >= 0).all() and cost[64] > 2
    measured = np.zeros(MAX_ROWS + 1)
    measured[3] = 0.016  # never a plain round: the slope says what one takes
    assert relative_cost(measured, 0.3)[1:4].tolist() == pytest.approx([1, 1.3, 1.6])
