"""Draft heads as ONNX graphs whose outputs carry the static tree.

All graphs that draft give draft_tokens int64 [n] (row 0 echoes the root) and the
constants tree_parent int32 [n], tree_mask bool [n,n] and tree_depth int64 [n], ready
for the target graph's inputs.

Medusa, one graph: inputs root int64 [1] and hidden float32 [1,hidden], the target's
`hidden` at the row whose logits gave the root.

EAGLE, the tree graph: inputs tokens int64 [m], taps float32 [m, taps * hidden],
past_len int64 [1], past_key_0 and past_value_0 float32 [1,kv,S,d]. Row i is a committed
token's taps (EAGLE-1/2: its `hidden`) and the token that followed; the last one is the
root. The m rows go into the buffers behind past_len; present_key_0 and present_value_0
are to be bound to the pasts' memory. Next time past_len is m more.

EAGLE, the step graph, for hosts that grow trees themselves: inputs tokens int64 [n],
taps float32 [k, ...] of the first k rows and features float32 [n-k,hidden] of the
others, what the graph gave as `feature` for the row before; tree_mask, tree_depth,
past_len and buffers as the target's. Outputs logits float32 [n, draft_vocab], feature
float32 [n,hidden], the presents. `d2t` int64 [draft_vocab] holds the target's ids.

The models' metadata say what a host has to know of the head: edgespec.kind, .taps (the
target's hidden states it reads), .vocab, .hidden and .layers of the target, and
.max_position, 0 where there is none.

Where a head uses the target's embedding or projection, its graph points into the file
where the target's graph keeps its weights; the step graph can so use the tree graph's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgespec.errors import UnsupportedError, UsageError
from edgespec_export.heads import Head
from edgespec_export.onnx_draft import static_tree
from edgespec_export.onnx_graph import GraphReport
from edgespec_export.onnx_head_parts import Block, DraftGraph, Options, Tree
from edgespec_export.onnx_store import Store

# Eight rows, three tokens deep, wide where the best token is not sure.
DEFAULT_TREE = ((-1, 0, 0, 0, 1, 1, 2, 4), (0, 0, 1, 2, 0, 1, 0, 0))
_OPSET = 20
_IR_VERSION = 10


def make_tree(parent: Sequence[int], rank: Sequence[int], head: Head) -> Tree:
    """Checks a tree against a head.

    Raises UsageError for rows before their parents, a rank twice or beyond the
    vocabulary, and a tree deeper than Medusa has heads.
    """
    if len(parent) != len(rank) or not parent or parent[0] != -1:
        raise UsageError(
            f"tree: expected as many ranks as parents and a root first, got "
            f"{list(parent)} and {list(rank)}"
        )
    parents, mask, depth = static_tree(tuple(parent))
    tree = Tree(parents, tuple(rank), mask, depth)
    for row in range(tree.n):
        ranks = [rank[child] for child in tree.children(row)]
        if len(set(ranks)) < len(ranks):
            raise UsageError(f"tree row {row}: its children's ranks {ranks} repeat")
        if any(not 0 <= r < head.draft_vocab for r in ranks):
            raise UsageError(
                f"tree row {row}: ranks {ranks} of {head.draft_vocab} draft tokens"
            )
    deepest = int(depth.max())
    if head.kind == "medusa" and deepest > head.heads:
        raise UsageError(
            f"the tree is {deepest} tokens deep, the head has {head.heads} heads"
        )
    return tree


def prune(
    tree: tuple[Sequence[int], Sequence[int]], depth: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parents and ranks of the rows at most `depth` deep."""
    _, _, depths = static_tree(tuple(tree[0]))
    kept = [row for row in range(len(depths)) if depths[row] <= depth]
    place = {row: i for i, row in enumerate(kept)} | {-1: -1}
    return (
        tuple(place[tree[0][row]] for row in kept),
        tuple(tree[1][row] for row in kept),
    )


def write_medusa(
    head: Head,
    path: Path,
    *,
    tree: tuple[Sequence[int], Sequence[int]],
    quant: str | None = None,
    target: Path | None = None,
    accuracy_level: int = 4,
) -> GraphReport:
    """Writes a Medusa head as one graph; see `write_tree` for the arguments."""

    def build(graph: DraftGraph) -> None:
        made = make_tree(*tree, head)
        graph.input("root", TensorProto.INT64, [1])
        hidden = graph.input("hidden", TensorProto.FLOAT, [1, head.hidden])
        tokens = ["root"]
        for level in range(1, int(made.depth.max()) + 1):
            rows = [row for row in range(made.n) if made.depth[row] == level]
            logits = graph.medusa(level - 1, hidden)
            best = graph.best(logits, 1 + max(made.rank[row] for row in rows))
            ranks = graph.constant([made.rank[row] for row in rows])
            tokens.append(graph.ops.node("Gather", [best, ranks], axis=1))
        graph.draft(made, tokens)

    return _write(head, path, "medusa", build, Options(quant, target, accuracy_level))


def write_tree(
    head: Head,
    path: Path,
    *,
    tree: tuple[Sequence[int], Sequence[int]],
    quant: str | None = None,
    target: Path | None = None,
    accuracy_level: int = 4,
) -> GraphReport:
    """Writes an EAGLE head with its static tree unrolled.

    Args:
        tree: parents and ranks of its rows.
        quant: of the matrices, as for the target's graph.
        target: the target's graph beside `path`, for what the head shares with it.
        accuracy_level: of MatMulNBits; 4 computes in int8, 0 in float.

    Raises UsageError on a tree the head cannot draft, UnsupportedError on shapes the
    graph cannot hold, FormatError for a target's graph without the shared matrix.
    """

    def build(graph: DraftGraph) -> None:
        made = make_tree(*tree, head)
        ops = graph.ops
        graph.input("tokens", TensorProto.INT64, ["m"])
        taps = graph.input("taps", TensorProto.FLOAT, ["m", graph.tap_width])
        layer = Block(graph)
        count = ops.node("Shape", ["tokens"])
        total = ops.node("Add", ["past_len", count])
        zero = ops.store.constant("scalar0", 0)
        one = ops.store.constant("scalar1", 1)
        first = graph.axis(0)
        rows = ops.node("Range", [zero, ops.node("Squeeze", [count, first]), one])
        places = ops.node("Add", [rows, "past_len"])
        x, residual = graph.enter("tokens", graph.fuse(taps))
        q, key, value = layer.project(x, places)
        key, value = layer.commit(key, value, places, total)
        bias = layer.behind(places, total, is_causal=True)
        feature, out = layer.leave(q, [key], [value], bias, residual)
        last = ops.node("Gather", [feature, graph.constant([-1])], axis=0)
        out = ops.node("Gather", [out, graph.constant([-1])], axis=0)
        root = ops.node("Gather", ["tokens", graph.constant([-1])], axis=0)
        _unroll(graph, layer, made, root, last, out, (key, value), total)

    return _write(
        head, path, "eagle_tree", build, Options(quant, target, accuracy_level)
    )


def write_step(
    head: Head,
    path: Path,
    *,
    quant: str | None = None,
    target: Path | None = None,
    accuracy_level: int = 4,
    twin: Path | None = None,
) -> GraphReport:
    """Writes one step of an EAGLE head; see `write_tree` for the arguments.

    Args:
        twin: the tree graph of the same head beside `path`, whose matrices are used.
    """

    def build(graph: DraftGraph) -> None:
        ops = graph.ops
        graph.input("tokens", TensorProto.INT64, ["n"])
        taps = graph.input("taps", TensorProto.FLOAT, ["k", graph.tap_width])
        fed = graph.input("features", TensorProto.FLOAT, ["r", head.hidden])
        mask = graph.input("tree_mask", TensorProto.BOOL, ["n", "n"])
        graph.input("tree_depth", TensorProto.INT64, ["n"])
        layer = Block(graph)
        count = ops.node("Shape", ["tokens"])
        total = ops.node("Add", ["past_len", count])
        zero = ops.store.constant("scalar0", 0)
        one = ops.store.constant("scalar1", 1)
        rows = ops.node("Squeeze", [count, graph.axis(0)])
        slots = ops.node("Add", [ops.node("Range", [zero, rows, one]), "past_len"])
        places = ops.node("Add", ["tree_depth", "past_len"])
        features = ops.node("Concat", [graph.fuse(taps), fed], axis=0)
        x, residual = graph.enter("tokens", features)
        q, key, value = layer.project(x, places)
        key, value = layer.commit(key, value, slots, total)
        bias = layer.bias_of_step(mask, places)
        feature, out = layer.leave(q, [key], [value], bias, residual)
        logits = graph.project(out)
        graph.output("logits", logits, TensorProto.FLOAT, ["n", head.draft_vocab])
        graph.output("feature", feature, TensorProto.FLOAT, ["n", head.hidden])
        ids = np.arange(head.draft_vocab) if head.d2t is None else head.d2t
        graph.fixed("d2t", ids.astype(np.int64))

    return _write(
        head, path, "eagle_step", build, Options(quant, target, accuracy_level, twin)
    )


def _unroll(
    graph: DraftGraph,
    layer: Block,
    tree: Tree,
    root: str,
    feature: str,
    out: str,
    prefix: tuple[str, str],
    total: str,
) -> None:
    """Adds the levels of a static tree behind the root's row, and the outputs."""
    ops = graph.ops
    tokens, keys, values = [root], [prefix[0]], [prefix[1]]
    parents = [0]  # rows whose children's tokens `out` gives
    fed: list[int] = []  # rows whose keys are there, in order
    for level in range(1, int(tree.depth.max()) + 1):
        rows = [row for row in range(tree.n) if tree.depth[row] == level]
        best = graph.best(graph.project(out), 1 + max(tree.rank[row] for row in rows))
        place = {row: i for i, row in enumerate(parents)}
        where = [(place[int(tree.parent[row])], tree.rank[row]) for row in rows]
        picked = ops.node("GatherND", [best, graph.table(where)])
        tokens.append(picked)
        inner = [row for row in rows if tree.children(row)]
        if not inner:
            continue
        ids = ops.node(
            "Gather", [picked, graph.constant([rows.index(r) for r in inner])]
        )
        above = graph.constant([place[int(tree.parent[row])] for row in inner])
        x, residual = graph.enter(ids, ops.node("Gather", [feature, above], axis=0))
        step = ops.node("Sub", [total, graph.axis(1)])  # the root's own position
        deeper = graph.constant([level] * len(inner))
        places = ops.node("Add", [step, deeper])
        q, key, value = layer.project(x, places)
        keys.append(key)
        values.append(value)
        fed += inner
        bias = layer.behind(places, total, is_causal=False)
        among = np.where(tree.mask[np.ix_(inner, fed)], 0, -np.inf)
        if graph.head.window is not None:
            far = tree.depth[inner][:, None] - tree.depth[fed] >= graph.head.window
            among = np.where(far, -np.inf, among)
        name = ops.store.add(f"tree_bias_{level}", among.astype(np.float32))
        bias = ops.node("Concat", [bias, name], axis=1)
        feature, out = layer.leave(q, keys, values, bias, residual)
        parents = inner
    graph.draft(tree, tokens)


def _write(
    head: Head,
    path: Path,
    name: str,
    build: Callable[[DraftGraph], None],
    options: Options,
) -> GraphReport:
    is_medusa = head.kind == "medusa"
    if is_medusa != (name == "medusa"):
        raise UsageError(f"a head of {head.kind} has no graph {name!r}")
    if not is_medusa and head.rope is not None and head.rope.dim != head.head_dim:
        raise UnsupportedError(
            f"rotary dimension {head.rope.dim} of heads of {head.head_dim}: only whole "
            "heads are rotated"
        )
    for other in (options.target, options.twin):
        if other is not None and other.parent.resolve() != path.parent.resolve():
            raise UsageError(
                f"{path}: must lie beside {other}, whose weights it shares"
            )
    store = Store(path.with_name(path.name + ".data"))
    try:
        graph = DraftGraph(head, store, options)
        build(graph)
        store.close()
        made = helper.make_graph(graph.ops.nodes, name, graph.inputs, graph.outputs)
        made.initializer.extend(store.initializers)
        made.initializer.extend(graph.shared)
        model = helper.make_model(
            made,
            producer_name="edgespec",
            opset_imports=[
                helper.make_opsetid("", _OPSET),
                helper.make_opsetid("com.microsoft", 1),
            ],
        )
        model.ir_version = _IR_VERSION
        helper.set_model_props(model, _about(head))
        onnx.save_model(model, str(path))
    except BaseException:
        store.abort()
        path.unlink(missing_ok=True)
        raise
    size = path.stat().st_size
    if store.path.exists():
        size += store.path.stat().st_size
    notes = tuple(f"{why}: {count}" for why, count in sorted(graph.notes.items()))
    return GraphReport(dict(sorted(graph.counts.items())), notes, size, graph.errors)


def _about(head: Head) -> dict[str, str]:
    """What a host has to know of the head, as the model's metadata."""
    return {
        "edgespec.kind": head.kind,
        "edgespec.taps": ",".join(map(str, head.taps)),
        "edgespec.vocab": str(head.vocab),
        "edgespec.hidden": str(head.target_hidden),
        "edgespec.layers": str(head.target_layers),
        "edgespec.max_position": str(head.max_position),
    }
