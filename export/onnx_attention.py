"""Attention over shared KV buffers with a tree of new rows: one fused op, or standard ops."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec_export.onnx_ops import Ops
from edgespec_export.weights import ModelConfig, Rope


def rope_tables(
    rope: Rope, positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin (positions, dim / 2), angles in double, attention factor applied."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * rope.inv_freq[None, :]
    factor = rope.attention_factor
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    return cos.astype(np.float32), sin.astype(np.float32)


class _Attention:
    """What both kinds share: positions, KV names, the additive bias of the tree."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        self.ops = ops
        self.config = config
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        zero, one = ops.shared("axis0", 0), ops.shared("axis1", 1)
        shape = ops.node("Shape", ["tree_depth"])
        self.rows = shape  # int64 [1]
        self.total = ops.node("Add", ["past_len", shape])  # int64 [1]
        self.positions = ops.node("Add", ["past_len", "tree_depth"])  # int64 [n]
        past_shape = ops.node("Concat", [shape, "past_len"], axis=0)
        visible = ops.node(
            "ConstantOfShape",
            [past_shape],
            value=helper.make_tensor("v", 1, [1], [0.0]),
        )
        allowed = ops.store.constant("allowed", 0, np.float32)
        hidden = ops.store.add("forbidden", np.array(-np.inf, np.float32))
        tree = ops.node("Where", ["tree_mask", allowed, hidden])
        bias = ops.node("Concat", [visible, tree], axis=1)
        both = ops.store.constant("axes01", [0, 1])
        self.bias = ops.node("Unsqueeze", [bias, both])  # [1, 1, n, total]
        cos, sin = rope_tables(config.rope, config.max_position)
        self.cos = ops.store.add("rope.cos", cos)
        self.sin = ops.store.add("rope.sin", sin)
        self._axes = (zero, one)

    def _buffers(self, layer: int) -> tuple[str, str, str, str]:
        names = []
        for direction, values in (("past", self.inputs), ("present", self.outputs)):
            for part in ("key", "value"):
                name = f"{direction}_{part}_{layer}"
                names.append(name)
                shape = [1, self.config.n_kv_heads, "S", self.config.head_dim]
                values.append(helper.make_tensor_value_info(name, 1, shape))
        return names[0], names[1], names[2], names[3]


class GroupQueryAttention(_Attention):
    """com.microsoft GroupQueryAttention: rotates, writes the buffers, masks by index and bias."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        super().__init__(ops, config)
        last = ops.node("Sub", [self.total, ops.shared("axis1", 1)])
        self._seqlens = ops.node("Cast", [last], to=TensorProto.INT32)
        self._total = ops.node("Cast", [self.total], to=TensorProto.INT32)
        self._position_ids = ops.node("Unsqueeze", [self.positions, self._axes[0]])

    def __call__(self, layer: int, qkv: str) -> str:
        """[n, q | k | v] -> [n, heads * head_dim]."""
        ops, config = self.ops, self.config
        past_key, past_value, key, value = self._buffers(layer)
        mixed = ops.fresh("mixed")
        ops.node(
            "GroupQueryAttention",
            [
                ops.node("Unsqueeze", [qkv, self._axes[0]]),
                "",
                "",
                past_key,
                past_value,
                self._seqlens,
                self._total,
                self.cos,
                self.sin,
                self._position_ids,
                self.bias,
            ],
            domain="com.microsoft",
            outputs=[mixed, key, value],
            num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads,
            do_rotary=1,
            rotary_interleaved=0,
        )
        return ops.node("Squeeze", [mixed, self._axes[0]])


class ExplicitAttention(_Attention):
    """Standard ops only; the whole buffer is the present, new rows scattered into it."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        super().__init__(ops, config)
        # [n, 1, d / 2], to broadcast over heads
        self._cos, self._sin = (
            ops.node(
                "Unsqueeze",
                [ops.node("Gather", [table, self.positions], axis=0), self._axes[1]],
            )
            for table in (self.cos, self.sin)
        )
        # buffer slots of the new rows, as ScatterElements wants them: [1, kv, n, d]
        count = ops.node("Squeeze", [self.rows, self._axes[0]])
        zero = ops.store.constant("scalar0", 0)
        one = ops.store.constant("scalar1", 1)
        slots = ops.node("Add", [ops.node("Range", [zero, count, one]), "past_len"])
        slots = ops.node(
            "Unsqueeze", [slots, ops.store.constant("axes_slots", [0, 1, 3])]
        )
        kv = ops.store.constant("kv_heads", [1, config.n_kv_heads])
        width = ops.store.constant("head_dim", [config.head_dim])
        shape = ops.node("Concat", [kv, self.rows, width], axis=0)
        self._slots = ops.node("Expand", [slots, shape])

    def __call__(self, layer: int, qkv: str) -> str:
        """[n, q | k | v] -> [n, heads * head_dim]."""
        ops, config = self.ops, self.config
        n_heads, kv, width = config.n_heads, config.n_kv_heads, config.head_dim
        past_key, past_value, present_key, present_value = self._buffers(layer)
        shape = ops.store.constant("by_head", [0, -1, width])
        heads = ops.node("Reshape", [qkv, shape])  # [n, heads + 2 kv, d]
        q, k, v = ops.fresh("q"), ops.fresh("k"), ops.fresh("v")
        sizes = ops.store.constant("qkv_heads", [n_heads, kv, kv])
        ops.node("Split", [heads, sizes], outputs=[q, k, v], axis=1)
        q, k = self._rotate(q), self._rotate(k)
        key = self._write(past_key, k, present_key)  # [1, kv, total, d]
        value = self._write(past_value, v, present_value)
        # the heads of a group share their keys: [kv, group * n, d] against [kv, total, d]
        q = ops.node("Transpose", [q], perm=[1, 0, 2])  # [heads, n, d]
        grouped = ops.store.constant("grouped", [1, kv, n_heads // kv, -1, width])
        q = ops.node("Reshape", [q, grouped])
        axis2 = ops.shared("axis2", 2)
        key = ops.node("Unsqueeze", [key, axis2])
        value = ops.node("Unsqueeze", [value, axis2])
        scores = ops.node(
            "MatMul", [q, ops.node("Transpose", [key], perm=[0, 1, 2, 4, 3])]
        )
        scale = ops.store.constant("scale", width**-0.5, np.float32)  # type: ignore[arg-type]
        scores = ops.node("Add", [ops.node("Mul", [scores, scale]), self.bias])
        mixed = ops.node("MatMul", [ops.node("Softmax", [scores], axis=-1), value])
        flat = ops.store.constant("all_heads", [n_heads, -1, width])
        mixed = ops.node("Reshape", [mixed, flat])
        mixed = ops.node("Transpose", [mixed], perm=[1, 0, 2])
        return ops.node("Reshape", [mixed, ops.store.constant("flat", [0, -1])])

    def _rotate(self, x: str) -> str:
        """Half-split rotation of [n, heads, d]."""
        ops = self.ops
        low, high = ops.fresh("low"), ops.fresh("high")
        ops.node("Split", [x], outputs=[low, high], axis=-1, num_outputs=2)

        def product(half: str, table: str) -> str:
            return ops.node("Mul", [half, table])

        first = ops.node("Sub", [product(low, self._cos), product(high, self._sin)])
        second = ops.node("Add", [product(high, self._cos), product(low, self._sin)])
        return ops.node("Concat", [first, second], axis=-1)

    def _write(self, past: str, rows: str, present: str) -> str:
        """Puts new rows [n, kv, d] behind the committed ones; returns all visible rows."""
        ops = self.ops
        rows = ops.node("Transpose", [rows], perm=[1, 0, 2])
        rows = ops.node("Unsqueeze", [rows, self._axes[0]])
        ops.node("ScatterElements", [past, self._slots, rows], name=present, axis=2)
        start, axis = ops.shared("axis0", 0), ops.shared("axis2", 2)
        return ops.node("Slice", [present, start, self.total, axis])
