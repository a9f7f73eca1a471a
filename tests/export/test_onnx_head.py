"""Draft graphs of heads against the numpy forward, and a host that wires them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from edgespec.errors import FormatError, UsageError
from edgespec_export import head_forward, onnx_graph, onnx_head, sources
from edgespec_export.draft_vocab import choose_ids, known_ids, with_vocabulary
from edgespec_export.heads import Head, outputs, share_with_target
from edgespec_export.sources import heads as reader
from edgespec_export.weights import Tensor, WeightSet
from tests.export import checkpoints
from tests.export import heads as tiny
from tests.export.fitted import fitted
from tests.export.graphs import random_parent, tree

HOST = Path(__file__).with_name("head_host.py")
EAGLES: dict[str, Callable[[], tiny.Checkpoint]] = {
    "eagle3": tiny.eagle3,
    "residual": lambda: tiny.eagle3(norm_before_residual=True),
    "before fc": lambda: tiny.eagle3(norm_before_fc=True, norm_output=True),
    "fc norms": lambda: tiny.eagle3("speculators", fc_norm=True),
    "qwen": lambda: tiny.eagle3(qwen=True, window=5),
    "whole vocabulary": lambda: tiny.eagle3(draft_vocab=None),
    "own width": lambda: tiny.eagle3(hidden=96, own_embedding=True),
    "eagle": tiny.eagle,
    "eagle on the target's": lambda: tiny.eagle(own_embedding=False),
}
MEDUSAS: dict[str, Callable[[], tiny.Checkpoint]] = {
    "medusa": tiny.medusa,
    "medusa of two": lambda: tiny.medusa(layers=2),
    "medusa on the target's": lambda: tiny.medusa(rows=None),
    "medusa on the first ids": lambda: tiny.medusa(rows=None, first=100),
}
TREE = ((-1, 0, 0, 1, 0, 1, 3, 4, 6, 3), (0, 1, 0, 0, 3, 2, 1, 0, 0, 0))


@pytest.fixture(scope="module", params=[None, "q8_0"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, WeightSet]:
    """The target's graph, full or of 8 bits, in a directory drafts are written to."""
    directory = tmp_path_factory.mktemp("target")
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    weights = sources.read(checkpoints.hf_checkpoint(directory / "hf", shape))
    path = directory / "target.onnx"
    onnx_graph.write(weights, path, quant=request.param, taps=tiny.TAPS)
    return path, weights


def read(path: Path, checkpoint: tiny.Checkpoint, target: WeightSet) -> Head:
    return reader.read(checkpoint.write(path), target.config)


def open_session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )


def target_matrix(path: Path, name: str) -> NDArray[np.float32]:
    """The target's embedding as its graph has it."""
    model = onnx.load(str(path))
    found = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    if name in found:
        return found[name].astype(np.float32)
    codes = found[f"{name}.codes"].astype(np.float32) - 128
    values = codes * found[f"{name}.scales"][..., None]
    return values.reshape(len(values), -1)


def best(head: Head, logits: NDArray[np.float32], rank: int) -> int:
    order = np.argsort(-logits, kind="stable")
    return int(head_forward.target_ids(head, order[rank : rank + 1])[0])


def grow(
    head: Head,
    table: NDArray[np.float32],
    lm_head: NDArray[np.float32],
    tokens: NDArray[np.integer],
    taps: NDArray[np.float32],
) -> list[int]:
    """Tokens of TREE behind committed rows, one numpy forward per row of the tree."""
    parent, rank = TREE
    features = head_forward.fuse(head, taps) if head.kind == "eagle3" else taps
    n = len(tokens)
    drafted = [int(tokens[-1])]
    at = [n - 1]  # rows of the growing sequence that tree rows are
    visible = np.tri(n, dtype=bool)
    places = np.arange(n)
    embedded = table[tokens]

    def run() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return head_forward.step(head, embedded, features, places, visible, lm_head)

    for row in range(1, len(parent)):
        above = at[parent[row]]
        logits, out = run()
        token = best(head, logits[above], rank[row])
        drafted.append(token)
        embedded = np.concatenate([embedded, table[[token]]])
        features = np.concatenate([features, out[[above]]])
        places = np.append(places, places[above] + 1)
        grown = np.eye(len(places), dtype=bool)
        grown[:-1, :-1] = visible
        grown[-1, :-1] = visible[above]
        visible = grown
        at.append(len(places) - 1)
    return drafted


@pytest.mark.parametrize("quant", [None, "q4_0"])
@pytest.mark.parametrize("name", EAGLES)
def test_the_unrolled_tree(
    tmp_path: Path, target: tuple[Path, WeightSet], name: str, quant: str | None
) -> None:
    """Over three rounds whose committed rows stay in the buffers."""
    head = read(tmp_path, EAGLES[name](), target[1])
    path = target[0].with_name("draft.onnx")
    onnx_head.write_tree(
        head, path, tree=TREE, quant=quant, target=target[0], accuracy_level=0
    )
    session = open_session(path)
    theirs = target_matrix(target[0], "embedding")
    head = as_written(head, quant)
    table = theirs
    if "token_embd" in head.tensors:
        table = head.tensors["token_embd"].load_f32()
    rng = np.random.default_rng(3)
    width = len(head.taps) * head.target_hidden
    tokens = rng.integers(0, tiny.VOCAB, 18)
    taps = rng.standard_normal((18, width)).astype(np.float32)
    buffers = {
        f"past_{part}_0": np.full((1, 2, 64, 16), 9, np.float32)
        for part in ("key", "value")
    }
    past = 0
    for m in (9, 1, 8):
        rows = slice(past, past + m)
        got = session.run(
            None,
            {
                "tokens": tokens[rows],
                "taps": taps[rows],
                "past_len": np.array([past], np.int64),
                **buffers,
            },
        )
        named = dict(zip([o.name for o in session.get_outputs()], got, strict=True))
        past += m
        expected = grow(head, table, theirs, tokens[:past], taps[:past])
        assert named["draft_tokens"].tolist() == expected
        mask, depth = tree(TREE[0])
        assert named["tree_parent"].tolist() == list(TREE[0])
        assert named["tree_parent"].dtype == np.int32
        np.testing.assert_array_equal(named["tree_mask"], mask)
        np.testing.assert_array_equal(named["tree_depth"], depth)
        for part in ("key", "value"):
            buffers[f"past_{part}_0"] = named[f"present_{part}_0"]
            assert (named[f"present_{part}_0"][:, :, past:] == 9).all()


def as_written(head: Head, quant: str | None) -> Head:
    """The head with the numbers the graph has."""
    from edgespec_export import onnx_weights

    def rounded(tensor: Tensor) -> Tensor:
        if len(tensor.shape) == 1:
            return tensor
        named = replace(tensor, name=f"draft.{tensor.name}")
        values = onnx_weights.prepare(named, quant).dequantize()
        return replace(tensor, load_f32=lambda: values)

    return replace(head, tensors={n: rounded(t) for n, t in head.tensors.items()})


@pytest.mark.parametrize("has_twin", [False, True])
@pytest.mark.parametrize("name", EAGLES)
def test_the_step(
    tmp_path: Path, target: tuple[Path, WeightSet], name: str, has_twin: bool
) -> None:
    """Rows with the target's features, rows fed back, and a tree of both."""
    head = read(tmp_path, EAGLES[name](), target[1])
    path = target[0].with_name("step.onnx")
    twin = target[0].with_name("twin.onnx") if has_twin else None
    if twin is not None:
        onnx_head.write_tree(head, twin, tree=TREE, target=target[0])
    onnx_head.write_step(head, path, target=target[0], accuracy_level=0, twin=twin)
    session = open_session(path)
    theirs = target_matrix(target[0], "embedding")
    table = theirs
    if "token_embd" in head.tensors:
        table = head.tensors["token_embd"].load_f32()
    rng = np.random.default_rng(6)
    width = len(head.taps) * head.target_hidden
    past, k, n = 7, 2, 9
    tokens = rng.integers(0, tiny.VOCAB, past + n)
    taps = rng.standard_normal((past + k, width)).astype(np.float32)
    fed = rng.standard_normal((n - k, head.hidden)).astype(np.float32)
    mask, depth = tree(
        [-1, 0, *(1 + p for p in random_parent(rng, n - 2)[:1]), 1, 2, 3, 2, 5, 6]
    )
    visible = np.tri(past + n, dtype=bool)
    visible[past:, past:] = mask
    places = np.concatenate([np.arange(past), past + depth])
    fused = head_forward.fuse(head, taps) if head.kind == "eagle3" else taps
    features = np.concatenate([fused, fed])
    logits, out = head_forward.step(
        head, table[tokens], features, places, visible, theirs
    )
    buffers = {
        f"past_{part}_0": np.full((1, 2, 64, 16), 9, np.float32)
        for part in ("key", "value")
    }
    no_rows = np.zeros((0, head.hidden), np.float32)
    first = session.run(
        None,
        {
            "tokens": tokens[:past],
            "taps": taps[:past],
            "features": no_rows,
            "tree_mask": np.tri(past, dtype=bool),
            "tree_depth": np.arange(past),
            "past_len": np.array([0], np.int64),
            **buffers,
        },
    )
    named = dict(zip([o.name for o in session.get_outputs()], first, strict=True))
    np.testing.assert_allclose(named["logits"], logits[:past], atol=1e-4)
    second = session.run(
        None,
        {
            "tokens": tokens[past:],
            "taps": taps[past:],
            "features": fed,
            "tree_mask": mask,
            "tree_depth": depth,
            "past_len": np.array([past], np.int64),
            **{n.replace("present", "past"): named[n] for n in named if "present" in n},
        },
    )
    named = dict(zip([o.name for o in session.get_outputs()], second, strict=True))
    assert logits.std() >= 1
    np.testing.assert_allclose(named["logits"], logits[past:], atol=1e-4)
    np.testing.assert_allclose(named["feature"], out[past:], atol=1e-4)
    ids = head_forward.target_ids(head, np.arange(head.draft_vocab))
    np.testing.assert_array_equal(named["d2t"], ids)


@pytest.mark.parametrize("rows", [None, 100])
@pytest.mark.parametrize("name", MEDUSAS)
def test_medusa(
    tmp_path: Path, target: tuple[Path, WeightSet], name: str, rows: int | None
) -> None:
    head = read(tmp_path, MEDUSAS[name](), target[1])
    if rows is not None:
        counts = np.random.default_rng(0).integers(0, 9, tiny.VOCAB)
        counts = None if not outputs(head) else counts
        head = with_vocabulary(
            head, choose_ids(known_ids(head), tiny.VOCAB, rows, counts), target[1]
        )
    path = target[0].with_name("medusa.onnx")
    pruned = onnx_head.prune(TREE, 3)
    onnx_head.write_medusa(head, path, tree=pruned, target=target[0], accuracy_level=0)
    session = open_session(path)
    hidden = np.random.default_rng(8).standard_normal((1, 64)).astype(np.float32)
    got = session.run(None, {"root": np.array([7]), "hidden": hidden})
    named = dict(zip([o.name for o in session.get_outputs()], got, strict=True))
    theirs = target_matrix(target[0], "embedding")
    logits = head_forward.medusa(head, hidden, theirs)
    _, depth = tree(pruned[0])
    expected = [7]
    for row in range(1, len(depth)):
        expected.append(best(head, logits[depth[row] - 1, 0], pruned[1][row]))
    assert named["draft_tokens"].tolist() == expected
    assert named["tree_parent"].tolist() == list(pruned[0])


def test_what_the_target_has_is_not_stored_again(
    tmp_path: Path, target: tuple[Path, WeightSet]
) -> None:
    """A head's graph points into the target's data, where that is a file of its own."""
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    words = checkpoints.tokenizer(vocab_size=320)
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape, words=words)
    weights = sources.read(source)
    wide = {  # large enough for a data file
        **weights.tensors,
        "token_embd": grown(weights.tensors["token_embd"], 6000),
    }
    config = replace(weights.config, vocab=6000)
    big = replace(weights, tensors=wide, config=config)
    graph = tmp_path / "target.onnx"
    onnx_graph.write(big, graph)
    assert graph.with_name("target.onnx.data").exists()
    checkpoint = tiny.medusa(rows=None)
    head = reader.read(checkpoint.write(tmp_path / "head"), config)
    small = with_vocabulary(head, choose_ids(known_ids(head), head.vocab, 3000), big)
    path = tmp_path / "draft.onnx"
    onnx_head.write_medusa(small, path, tree=onnx_head.prune(TREE, 3), target=graph)
    model = onnx.load(str(path), load_external_data=False)
    (shared,) = [t for t in model.graph.initializer if t.name == "output"]
    entries = {entry.key: entry.value for entry in shared.external_data}
    assert entries["location"] == "target.onnx.data"
    assert (list(shared.dims), entries["length"]) == ([3000, 64], str(3000 * 64 * 4))
    assert path.stat().st_size < 100_000
    hidden = np.random.default_rng(8).standard_normal((1, 64)).astype(np.float32)
    (tokens,) = open_session(path).run(
        ["draft_tokens"], {"root": np.array([7]), "hidden": hidden}
    )
    theirs = wide["token_embd"].load_f32()
    logits = head_forward.medusa(small, hidden, theirs)
    assert tokens[1] == best(small, logits[0, 0], TREE[1][1])


def grown(tensor: Tensor, rows: int) -> Tensor:
    values = np.random.default_rng(0).standard_normal((rows, 64)).astype(np.float32)
    return Tensor(
        tensor.name, (rows, 64), "F32", lambda: values.view(np.uint8), lambda: values
    )


@pytest.mark.parametrize(
    ("parent", "rank", "message"),
    [
        ((-1, 1), (0, 0), "parent 1 does not precede it"),
        ((0, 0), (0, 0), "a root first"),
        ((-1, 0), (0,), "as many ranks as parents"),
        ((-1, 0, 0), (0, 1, 1), r"its children's ranks \[1, 1\] repeat"),
        ((-1, 0), (0, 320), r"ranks \[320\] of 320 draft tokens"),
        ((-1, 0), (0, -1), "ranks"),
    ],
)
def test_trees_that_cannot_be(
    tmp_path: Path,
    target: tuple[Path, WeightSet],
    parent: tuple[int, ...],
    rank: tuple[int, ...],
    message: str,
) -> None:
    head = read(tmp_path / "head", tiny.medusa(), target[1])
    with pytest.raises(UsageError, match=message):
        onnx_head.write_medusa(head, tmp_path / "draft.onnx", tree=(parent, rank))
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_c10_trees_deeper_than_medusa_has_heads(
    tmp_path: Path, target: tuple[Path, WeightSet]
) -> None:
    head = read(tmp_path / "head", tiny.medusa(heads=3), target[1])
    chain = ((-1, 0, 1, 2, 3), (0,) * 5)
    with pytest.raises(UsageError, match="4 tokens deep, the head has 3 heads"):
        onnx_head.write_medusa(head, tmp_path / "draft.onnx", tree=chain)
    assert onnx_head.prune(chain, 3) == ((-1, 0, 1, 2), (0,) * 4)


def test_c28_positions_beyond_the_heads(
    tmp_path: Path, target: tuple[Path, WeightSet]
) -> None:
    """A head trained on 16 positions drafts on behind a longer conversation."""
    checkpoint = tiny.eagle3()
    checkpoint.config["max_position_embeddings"] = 16
    head = read(tmp_path / "head", checkpoint, target[1])
    assert head.max_position == 16
    path = target[0].with_name("short.onnx")
    onnx_head.write_tree(head, path, tree=TREE, target=target[0])
    rng = np.random.default_rng(1)
    buffers = {
        f"past_{part}_0": rng.standard_normal((1, 2, 64, 16)).astype(np.float32)
        for part in ("key", "value")
    }
    (tokens,) = open_session(path).run(
        ["draft_tokens"],
        {
            "tokens": np.array([5]),
            "taps": rng.standard_normal((1, 192)).astype(np.float32),
            "past_len": np.array([40], np.int64),
            **buffers,
        },
    )
    assert tokens[0] == 5
    assert np.isin(tokens[1:], tiny.draft_ids()).all()


def test_wrong_arguments(tmp_path: Path, target: tuple[Path, WeightSet]) -> None:
    head = read(tmp_path / "head", tiny.eagle(own_embedding=False), target[1])
    path = tmp_path / "draft.onnx"
    with pytest.raises(UsageError, match="name its graph"):
        onnx_head.write_tree(head, path, tree=TREE)
    with pytest.raises(UsageError, match="must lie beside"):
        onnx_head.write_tree(head, path, tree=TREE, target=target[0])
    with pytest.raises(UsageError, match="a head of eagle has no graph 'medusa'"):
        onnx_head.write_medusa(head, path, tree=TREE)
    step = tmp_path / "step.onnx"
    whole = read(tmp_path / "other", tiny.eagle3(own_embedding=True), target[1])
    onnx_head.write_step(whole, step)
    with pytest.raises(FormatError, match="no initialisers of 'embedding'"):
        onnx_head.write_tree(head, path, tree=TREE, target=step)
    assert not path.exists()


def run_host(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, str(HOST), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    "name", ["whole vocabulary", "eagle on the target's", "medusa"]
)
def test_a_host_without_edgespec_reproduces_plain_decoding(
    tmp_path: Path, target: tuple[Path, WeightSet], name: str
) -> None:
    prompt = "5,9,31,200,17,5,9"
    plain = run_host(target[0], "-", 80, prompt)
    assert plain["forwards"] == 80
    head = read(tmp_path, {**EAGLES, **MEDUSAS}[name](), target[1])
    text = [int(i) for i in prompt.split(",")] + plain["tokens"]
    head = fitted(share_with_target(head, target[1]), target[1], text)
    if head.kind == "eagle3":
        counts = np.bincount(text, minlength=head.vocab)
        head = with_vocabulary(
            head, choose_ids(known_ids(head), head.vocab, 96, counts), target[1]
        )
    path = target[0].with_name("wired.onnx")
    draft = onnx_head.DEFAULT_TREE
    if head.kind == "medusa":
        onnx_head.write_medusa(head, path, tree=draft, target=target[0])
    else:
        onnx_head.write_tree(head, path, tree=draft, target=target[0])
    taps = [",".join(map(str, head.taps))] if head.kind == "eagle3" else []
    drafted = run_host(target[0], path, 80, prompt, *taps)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["forwards"] < 60  # drafts were accepted, or this shows nothing
