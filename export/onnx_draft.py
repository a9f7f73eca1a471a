"""A draft as an ONNX graph that carries its static tree: n-gram lookup in standard ops.

Input `ids` int64 [t], the whole sequence, its last token not yet in the target's KV.
Outputs: draft_tokens int64 [n] (row 0 echoes the root), and the constants tree_parent
int32 [n], tree_mask bool [n,n], tree_depth int64 [n], ready for the target graph's
inputs.

The tree is a chain of three and one branch beside its first token. The chain continues
the latest earlier place where the last two tokens stood, else the last one; one that
reaches the end goes round again. The branch is the latest other continuation. Where
nothing matches stand the root itself and a fallback token: wrong drafts cost rows,
never tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.errors import UsageError

PARENT = (-1, 0, 1, 2, 0)
_CHAIN = 3
_OPSET = 20
_IR_VERSION = 10


def static_tree(
    parent: tuple[int, ...],
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    """Parents, mask (n, n) with row = query, and depths of a topological tree."""
    n = len(parent)
    mask = np.eye(n, dtype=bool)
    depth = np.zeros(n, np.int64)
    for row in range(1, n):
        if not 0 <= parent[row] < row:
            raise UsageError(
                f"tree row {row}: parent {parent[row]} does not precede it"
            )
        mask[row] |= mask[parent[row]]
        depth[row] = depth[parent[row]] + 1
    return np.array(parent, np.int32), mask, depth


def write_ngram(path: Path, fallback: tuple[int, int] = (0, 1)) -> None:
    """Writes the n-gram draft; the fallbacks are two different token ids."""
    if fallback[0] == fallback[1]:
        raise UsageError(f"fallback: expected two different tokens, got {fallback}")
    parent, mask, depth = static_tree(PARENT)
    graph = _Nodes()
    first, rest, branch = _lookup(graph, fallback)
    root = graph.add("Gather", ["ids", graph.const([-1])])
    graph.add("Concat", [root, first, rest, branch], output="draft_tokens", axis=0)
    constants = {"tree_parent": parent, "tree_mask": mask, "tree_depth": depth}
    for name, value in constants.items():
        tensor = numpy_helper.from_array(value)
        graph.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
    n = len(PARENT)
    outputs = [
        helper.make_tensor_value_info("draft_tokens", TensorProto.INT64, [n]),
        helper.make_tensor_value_info("tree_parent", TensorProto.INT32, [n]),
        helper.make_tensor_value_info("tree_mask", TensorProto.BOOL, [n, n]),
        helper.make_tensor_value_info("tree_depth", TensorProto.INT64, [n]),
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["t"])]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "ngram", inputs, outputs, graph.initializers),
        producer_name="edgespec",
        opset_imports=[helper.make_opsetid("", _OPSET)],
    )
    model.ir_version = _IR_VERSION
    onnx.checker.check_model(model)
    onnx.save_model(model, str(path))


def _lookup(graph: _Nodes, fallback: tuple[int, int]) -> tuple[str, str, str]:
    """First token [1] of the chain, the rest [2], and the branch [1]."""
    add, const = graph.add, graph.const
    zero, one, end = const([0]), const([1]), const([1 << 62])
    length = add("Shape", ["ids"])  # [1]
    last = add("Gather", ["ids", const([-1])])
    minus_two = add("Max", [add("Sub", [length, const([2])]), zero])
    before_last = add("Gather", ["ids", minus_two])
    # place e: ids[e] equals the last token and ids[e + 1] continued it; 0 <= e <= t - 2
    here = add("Slice", ["ids", zero, const([-1]), zero])
    following = add("Slice", ["ids", one, end, zero])
    shifted = add("Concat", [const([-1]), here], axis=0)
    ahead = add("Slice", [shifted, zero, const([-1]), zero])
    is_one = add("Equal", [here, last])
    is_two = add("And", [is_one, add("Equal", [ahead, before_last])])
    places = add("Range", [graph.scalar(0), add("Size", [here]), graph.scalar(1)])
    bonus = add("Where", [is_two, length, zero])
    score = add("Where", [is_one, add("Add", [places, bonus]), const([-1])])

    def best(scores: str) -> tuple[str, str]:
        """Latest best place [1] and whether there is one; place t - 2 without."""
        padded = add("Concat", [const([-1]), scores], axis=0)
        at = add("ArgMax", [padded], axis=0, keepdims=1)
        top = add("Gather", [padded, at])
        is_found = add("GreaterOrEqual", [top, zero])
        place = add("Sub", [at, one])
        nowhere = add("Sub", [length, const([2])])
        return add("Where", [is_found, place, nowhere]), is_found

    place, _ = best(score)
    start = add("Add", [place, one])
    period = add("Sub", [length, start])
    steps = add("Mod", [const(list(range(_CHAIN))), period])
    chain = add("Gather", ["ids", add("Add", [start, steps])])
    first = add("Slice", [chain, zero, one, zero])
    rest = add("Slice", [chain, one, end, zero])
    is_other = add("Not", [add("Equal", [following, first])])
    place, is_found = best(add("Where", [is_other, score, const([-1])]))
    branch = add("Gather", ["ids", add("Add", [place, one])])
    is_taken = add("Equal", [first, const([fallback[0]])])
    spare = add("Where", [is_taken, const([fallback[1]]), const([fallback[0]])])
    return first, rest, add("Where", [is_found, branch, spare])


class _Nodes:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._constants: dict[tuple[int, ...] | int, str] = {}

    def add(
        self,
        op: str,
        inputs: list[str],
        *,
        output: str | None = None,
        **attributes: int,
    ) -> str:
        output = output or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def const(self, values: list[int]) -> str:
        return self._constant(tuple(values), np.array(values, np.int64))

    def scalar(self, value: int) -> str:
        return self._constant(value, np.array(value, np.int64))

    def _constant(self, key: tuple[int, ...] | int, value: NDArray[np.int64]) -> str:
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = name
            self.initializers.append(numpy_helper.from_array(value, name))
        return self._constants[key]
