"""What draft graphs are made of: matrices, the one layer, the outputs of the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.errors import FormatError, UsageError
from edgespec_export import onnx_weights
from edgespec_export.heads import Head
from edgespec_export.onnx_attention import rope_tables
from edgespec_export.onnx_ops import Ops
from edgespec_export.onnx_store import Store

_PARTS = ("", ".codes", ".scales", ".zeros", ".offsets")


@dataclass(frozen=True, slots=True)
class Tree:
    """A static tree; of row i's children, rank r stands for the r-th best token."""

    parent: NDArray[np.int32]
    rank: tuple[int, ...]
    mask: NDArray[np.bool_]
    depth: NDArray[np.int64]

    @property
    def n(self) -> int:
        return len(self.rank)

    def children(self, row: int) -> list[int]:
        return [i for i in range(self.n) if self.parent[i] == row]


@dataclass(frozen=True, slots=True)
class Options:
    quant: str | None
    target: Path | None
    accuracy_level: int
    twin: Path | None = None  # a graph of the same head, whose matrices are used


class DraftGraph:
    """A draft graph under construction."""

    def __init__(self, head: Head, store: Store, options: Options) -> None:
        self.head = head
        self.ops = Ops(store, options.accuracy_level)
        self.quant = options.quant
        self.target = options.target
        self.twin = options.twin
        self.shared: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.errors: dict[str, float] = {}
        self._known: set[str] = set()
        self._models: dict[Path, dict[str, TensorProto]] = {}

    @property
    def tap_width(self) -> int:
        """Values of the target a row takes."""
        return len(self.head.taps) * self.head.target_hidden

    def input(self, name: str, kind: int, shape: list[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, value: str, kind: int, shape: list[int | str]) -> None:
        self.ops.node("Identity", [value], name=name)
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def fixed(self, name: str, value: NDArray[Any]) -> None:
        """An output that is a constant."""
        tensor = onnx.numpy_helper.from_array(value)
        self.ops.node("Constant", [], name=name, value=tensor)
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        shape = list(value.shape)
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, values: Sequence[int]) -> str:
        """A vector of int64."""
        name = "ids_" + "_".join(map(str, values)).replace("-", "minus")
        return self.ops.store.constant(name, list(values))

    def table(self, pairs: Sequence[tuple[int, int]]) -> str:
        """Rows and columns, int64 [n, 2]."""
        name = "cells_" + "_".join(f"{row}.{column}" for row, column in pairs)
        if name in self.ops.store:
            return name
        return self.ops.store.add(name, np.array(pairs, np.int64).reshape(-1, 2))

    def axis(self, value: int) -> str:
        return self.ops.shared(f"axis{value}", value)

    def draft(self, tree: Tree, tokens: list[str]) -> None:
        """The tree's outputs of the tokens of its levels, and the order of its rows."""
        flat = [
            self.ops.node("Reshape", [level, self.ops.shared("count", -1)])
            for level in tokens
        ]
        joined = self.ops.node("Concat", flat, axis=0) if len(flat) > 1 else flat[0]
        by_level = sorted(range(tree.n), key=lambda row: (tree.depth[row], row))
        order = self.constant([by_level.index(row) for row in range(tree.n)])
        rows = self.ops.node("Gather", [joined, order], axis=0)
        self.output("draft_tokens", rows, TensorProto.INT64, [tree.n])
        self.fixed("tree_parent", tree.parent)
        self.fixed("tree_mask", tree.mask)
        self.fixed("tree_depth", tree.depth)

    def best(self, logits: str, count: int) -> str:
        """The target's ids of the best tokens, [n, count]."""
        scores, ids = self.ops.fresh("scores"), self.ops.fresh("best")
        number = self.constant([count])
        self.ops.node("TopK", [logits, number], outputs=[scores, ids], axis=-1)
        if self.head.d2t is None:
            return ids
        if "target_ids" not in self.ops.store:
            self.ops.store.add("target_ids", self.head.d2t)
        return self.ops.node("Gather", ["target_ids", ids], axis=0)

    def medusa(self, index: int, hidden: str) -> str:
        """Logits [1, draft_vocab] of one of the heads."""
        x = hidden
        for layer in range(self.head.layers):
            name = f"medusa.{index}.{layer}"
            bias = self.vector(f"{name}.bias")
            inner = self.ops.node("Add", [self.times(x, f"{name}.weight"), bias])
            open_ = self.ops.node("Sigmoid", [inner])
            x = self.ops.node("Add", [x, self.ops.node("Mul", [inner, open_])])
        return self.project(x, index)

    def fuse(self, taps: str) -> str:
        """Features of the target's hidden states."""
        head, ops = self.head, self.ops
        if head.kind == "eagle":
            return taps
        if head.norm_before_fc:
            taps = self.norm(taps, "enc.output_norm")
        elif head.fc_norm:
            parts = [ops.fresh("tap") for _ in head.taps]
            ops.node("Split", [taps], outputs=parts, axis=-1, num_outputs=len(parts))
            normed = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            taps = ops.node("Concat", normed, axis=-1)
        return self.times(taps, "fc")

    def enter(self, ids: str, features: str) -> tuple[str, str]:
        """What attention takes, and what its result is added to."""
        self._need("token_embd", "embedding", self.head.vocab)
        rows = self.ops.embed(ids, "token_embd")
        if self.head.kind == "eagle":
            both = self.ops.node("Concat", [rows, features], axis=-1)
            x = self.times(both, "fc")
            if "fc.bias" in self.head.tensors:
                x = self.ops.node("Add", [x, self.vector("fc.bias")])
            return x, x
        normed = self.norm(features, "blk.0.attn_norm_2")
        rows = self.norm(rows, "blk.0.attn_norm")
        x = self.ops.node("Concat", [rows, normed], axis=-1)
        return x, normed if self.head.norm_before_residual else features

    def project(self, out: str, index: int = 0) -> str:
        """Logits [n, draft_vocab]."""
        own = f"medusa.{index}.output"
        if own in self.head.tensors:
            return self.times(out, own)
        self._need("output", "head", self.head.draft_vocab)
        return self.ops.matmul(out, "output", "output")

    def norm(self, x: str, name: str) -> str:
        return self.ops.rms_norm(x, self.vector(name), self.head.eps)

    def times(self, x: str, name: str) -> str:
        """x times one of the head's matrices."""
        self._add(name)
        return self.ops.matmul(x, name, name)

    def vector(self, name: str) -> str:
        if name not in self._known:
            self._known.add(name)
            values = self.head.tensors[name].load_f32()
            self.ops.store.add(name, values.astype(np.float32))
        return name

    def _need(self, name: str, theirs: str, rows: int) -> None:
        """A matrix of the head or, when it has none, the first rows of the target's."""
        if name in self.head.tensors:
            self._add(name)
        elif name not in self._known:
            self._known.add(name)
            if self.target is None:
                raise UsageError("the head uses the target's matrices: name its graph")
            # a tied head is the embedding
            found = self._found_in(self.target, theirs, "embedding")
            for tensor in found.values():
                _keep_rows(tensor, rows)
            self._share(name, found)

    def _share(self, name: str, found: dict[str, TensorProto]) -> None:
        """A matrix whose initialisers lie in another graph's data."""
        for part, tensor in found.items():
            tensor.name = f"{name}{part}"
            self.shared.append(tensor)
        width = found[""].dims[1] if "" in found else self._width(name)
        self.ops.know_matrix(name, found, width)

    def _width(self, name: str) -> int:
        tensor = self.head.tensors.get(name)
        return self.head.hidden if tensor is None else tensor.shape[1]

    def _found_in(self, graph: Path, *stems: str) -> dict[str, TensorProto]:
        """Copies of another graph's initialisers of the first matrix it has."""
        if graph not in self._models:
            model = onnx.load(str(graph), load_external_data=False)
            self._models[graph] = {t.name: t for t in model.graph.initializer}
        initializers = self._models[graph]
        for stem in stems:
            names = {
                part: stem + part for part in _PARTS if stem + part in initializers
            }
            copies = {part: TensorProto() for part in names}
            for part, name in names.items():
                copies[part].CopyFrom(initializers[name])
            if copies:
                return copies
        raise FormatError(f"{graph}: no initialisers of {stems[0]!r}")

    def _add(self, name: str) -> None:
        if name in self._known:
            return
        self._known.add(name)
        if self.twin is not None:
            self._share(name, self._found_in(self.twin, name))
            return
        tensor = self.head.tensors[name]
        # under its own name, 4 bits would become 8 for a projection
        named = replace(tensor, name=f"draft.{name}")
        matrix = onnx_weights.prepare(named, self.quant)
        if not matrix.is_exact:
            self.errors[name] = matrix.error(tensor.load_f32())
        self.counts[matrix.form] += 1
        self.notes[f"{matrix.form} ({matrix.why})"] += 1
        self.ops.add_matrix(name, matrix)


class Block:
    """The one layer of an EAGLE head."""

    def __init__(self, graph: DraftGraph) -> None:
        head = graph.head
        assert head.rope is not None
        self.graph = graph
        self.head = head
        graph.input("past_len", TensorProto.INT64, [1])
        for part in ("key", "value"):
            shape: list[int | str] = [1, head.n_kv_heads, "S", head.head_dim]
            graph.input(f"past_{part}_0", TensorProto.FLOAT, shape)
            name = f"present_{part}_0"
            value = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            graph.outputs.append(value)
        store = graph.ops.store
        cos, sin = rope_tables(head.rope, head.max_position)
        self.tables = store.add("rope.cos", cos), store.add("rope.sin", sin)
        self.hidden = store.add("forbidden", np.array(-np.inf, np.float32))
        self.allowed = store.constant("allowed", 0, np.float32)

    def project(self, x: str, places: str) -> tuple[str, str, str]:
        """Rotated queries [1, heads, n, d], rotated keys and values [1, kv, n, d]."""
        found = []
        for part in "qkv":
            count = self.head.n_heads if part == "q" else self.head.n_kv_heads
            rows = self.graph.times(x, f"blk.0.attn_{part}")
            heads = self._by_heads(rows, f"blk.0.attn_{part}_norm", count)
            found.append(heads if part == "v" else self._rotate(heads, count, places))
        return found[0], found[1], found[2]

    def _by_heads(self, rows: str, norm: str, count: int) -> str:
        ops, width = self.graph.ops, self.head.head_dim
        shape = ops.store.constant(f"by_{count}_heads", [1, -1, count, width])
        heads = ops.node("Reshape", [rows, shape])
        if norm in self.head.tensors:
            heads = self.graph.norm(heads, norm)
        return ops.node("Transpose", [heads], perm=[0, 2, 1, 3])

    def _rotate(self, heads: str, count: int, places: str) -> str:
        ops = self.graph.ops
        # a host that goes on past the head's positions gets bad drafts, nothing worse
        last = ops.store.constant("last_position", [self.head.max_position - 1])
        ids = ops.node(
            "Unsqueeze", [ops.node("Min", [places, last]), self.graph.axis(0)]
        )
        return ops.node(
            "RotaryEmbedding",
            [heads, ids, *self.tables],
            domain="com.microsoft",
            num_heads=count,
            interleaved=0,
        )

    def commit(self, key: str, value: str, slots: str, total: str) -> tuple[str, str]:
        """Writes new rows into the buffers; all rows up to `total`."""
        ops, graph = self.graph.ops, self.graph
        axes = ops.store.constant("axes_slots", [0, 1, 3])
        where = ops.node(
            "Expand", [ops.node("Unsqueeze", [slots, axes]), ops.node("Shape", [key])]
        )
        found = []
        for part, rows in (("key", key), ("value", value)):
            present = ops.node(
                "ScatterElements",
                [f"past_{part}_0", where, rows],
                name=f"present_{part}_0",
                axis=2,
            )
            found.append(
                ops.node("Slice", [present, graph.axis(0), total, graph.axis(2)])
            )
        return found[0], found[1]

    def behind(self, places: str, total: str, *, is_causal: bool) -> str:
        """Bias [n, total] of rows at `places` over the buffers' rows at 0 to total."""
        ops, graph = self.graph.ops, self.graph
        zero = ops.store.constant("scalar0", 0)
        one = ops.store.constant("scalar1", 1)
        end = ops.node("Squeeze", [total, graph.axis(0)])
        keys = ops.node("Range", [zero, end, one])
        return self._bias(places, keys, None, is_causal=is_causal)

    def bias_of_step(self, mask: str, places: str) -> str:
        """Bias [n, past + n]: all of the past, and what the tree's mask shows."""
        ops, graph = self.graph.ops, self.graph
        zero = ops.store.constant("scalar0", 0)
        one = ops.store.constant("scalar1", 1)
        end = ops.node("Squeeze", ["past_len", graph.axis(0)])
        past = ops.node("Range", [zero, end, one])
        keys = ops.node("Concat", [past, places], axis=0)
        count = ops.node("Concat", [ops.node("Shape", [places]), "past_len"], axis=0)
        true = helper.make_tensor("true", TensorProto.BOOL, [1], [True])
        before = ops.node("ConstantOfShape", [count], value=true)
        visible = ops.node("Concat", [before, mask], axis=1)
        return self._bias(places, keys, visible, is_causal=False)

    def _bias(
        self, places: str, keys: str, visible: str | None, *, is_causal: bool
    ) -> str:
        """0 or -inf by visibility, order and the head's window."""
        ops, graph = self.graph.ops, self.graph
        rows = ops.node("Unsqueeze", [places, graph.axis(1)])
        distance = ops.node("Sub", [rows, keys])
        tests = [] if visible is None else [visible]
        if is_causal:
            tests.append(
                ops.node("GreaterOrEqual", [distance, ops.store.constant("scalar0", 0)])
            )
        if self.head.window is not None:
            window = ops.store.constant("window", self.head.window)
            tests.append(ops.node("Less", [distance, window]))
        if not tests:
            zeros = helper.make_tensor("zero", TensorProto.FLOAT, [1], [0.0])
            shape = ops.node("Shape", [distance])
            return ops.node("ConstantOfShape", [shape], value=zeros)
        seen = tests[0]
        for test in tests[1:]:
            seen = ops.node("And", [seen, test])
        return ops.node("Where", [seen, self.allowed, self.hidden])

    def leave(
        self,
        q: str,
        keys: list[str],
        values: list[str],
        bias: str,
        residual: str,
    ) -> tuple[str, str]:
        """What is fed back [n, hidden] and what is projected [n, hidden]."""
        ops, head, graph = self.graph.ops, self.head, self.graph
        mixed = self._attend(q, self._join(keys), self._join(values), bias)
        mixed = graph.times(mixed, "blk.0.attn_output")
        residual = ops.node("Add", [mixed, residual])
        x = graph.norm(residual, "blk.0.ffn_norm")
        both = [graph.times(x, f"blk.0.ffn_{part}") for part in ("gate", "up")]
        gated = ops.gated(ops.node("Concat", both, axis=-1), "silu")
        residual = ops.node("Add", [graph.times(gated, "blk.0.ffn_down"), residual])
        if head.kind == "eagle":
            return residual, residual
        out = graph.norm(residual, "output_norm")
        return out if head.norm_output else residual, out

    def _join(self, parts: list[str]) -> str:
        if len(parts) == 1:
            return parts[0]
        return self.graph.ops.node("Concat", parts, axis=2)

    def _attend(self, q: str, key: str, value: str, bias: str) -> str:
        ops, head = self.graph.ops, self.head
        kv, group = head.n_kv_heads, head.n_heads // head.n_kv_heads
        width = head.head_dim
        # heads of a group share keys: [kv, group, n, d] x [kv, 1, d, total]
        grouped = ops.store.constant("grouped", [kv, group, -1, width])
        q = ops.node("Reshape", [q, grouped])
        shape = ops.store.constant("shared_by_group", [kv, 1, -1, width])
        key, value = (ops.node("Reshape", [rows, shape]) for rows in (key, value))
        turned = ops.node("Transpose", [key], perm=[0, 1, 3, 2])
        scale = ops.store.constant("scale", width**-0.5, np.float32)
        scores = ops.node("Mul", [ops.node("MatMul", [q, turned]), scale])
        scores = ops.node("Add", [scores, bias])
        mixed = ops.node("MatMul", [ops.node("Softmax", [scores], axis=-1), value])
        flat = ops.store.constant("all_heads", [head.n_heads, -1, width])
        mixed = ops.node("Reshape", [mixed, flat])
        mixed = ops.node("Transpose", [mixed], perm=[1, 0, 2])
        return ops.node("Reshape", [mixed, ops.store.constant("flat", [0, -1])])


def _keep_rows(tensor: TensorProto, rows: int) -> None:
    """Cuts an initialiser to its first rows, which lie together wherever it is."""
    n = tensor.dims[0]
    if n == rows:
        return
    if tensor.data_location == TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        entries["length"] = str(int(entries["length"]) // n * rows)
        del tensor.external_data[:]
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
    else:
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // n * rows]
    tensor.dims[0] = rows
