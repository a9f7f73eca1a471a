"""Attention of a tree of new rows over shared KV buffers: fused, or in plain ops."""

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


SHARE_BITS = 22  # of a softmax share, relative to the largest one


class Attention:
    """What both kinds share: positions, KV names, the additive bias of the tree."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        self.ops = ops
        self.config = config
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._axis0 = ops.shared("axis0", 0)
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
        self.bias = self._over_heads(bias)
        self.windowed_bias = None
        if config.window is not None:
            masked = ops.node("Where", [self._is_near(config.window), bias, hidden])
            self.windowed_bias = self._over_heads(masked)
        self.tables = self._store_tables("rope", config.rope)
        self.local_tables = self.tables
        if config.local_rope is not None:
            self.local_tables = self._store_tables("local_rope", config.local_rope)

    def bias_of(self, layer: int) -> str:
        """What is added to a layer's scores, [1, 1, n, total]."""
        is_windowed = layer in self.config.windowed
        if is_windowed and self.windowed_bias is not None:
            return self.windowed_bias
        return self.bias

    def tables_of(self, layer: int) -> tuple[str, str]:
        """cos and sin of a layer, (positions, dim / 2)."""
        return self.local_tables if layer in self.config.windowed else self.tables

    def _is_near(self, window: int) -> str:
        """[n, total]: which keys lie less than the window behind a row.

        Committed keys sit at the position of their place in the buffer, new ones at
        that of their depth.
        """
        ops = self.ops
        zero = ops.store.constant("scalar0", 0)
        one = ops.store.constant("scalar1", 1)
        past = ops.node("Squeeze", ["past_len", self._axis0])
        past = ops.node("Range", [zero, past, one])
        keys = ops.node("Concat", [past, self.positions], axis=0)
        rows = ops.node("Unsqueeze", [self.positions, ops.shared("axis1", 1)])
        distance = ops.node("Sub", [rows, keys])
        return ops.node("Less", [distance, ops.shared("window", window)])

    def _over_heads(self, bias: str) -> str:
        both = self.ops.store.constant("axes01", [0, 1])
        return self.ops.node("Unsqueeze", [bias, both])

    def _store_tables(self, name: str, rope: Rope) -> tuple[str, str]:
        cos, sin = rope_tables(rope, self.config.max_position)
        store = self.ops.store
        return store.add(f"{name}.cos", cos), store.add(f"{name}.sin", sin)

    def __call__(self, layer: int, qkv: str) -> str:
        """[n, q | k | v] -> [n, heads * head_dim]."""
        raise NotImplementedError

    def _buffers(self, layer: int) -> tuple[str, str, str, str]:
        names = []
        for direction, values in (("past", self.inputs), ("present", self.outputs)):
            for part in ("key", "value"):
                name = f"{direction}_{part}_{layer}"
                names.append(name)
                shape = [1, self.config.n_kv_heads, "S", self.config.head_dim]
                values.append(helper.make_tensor_value_info(name, 1, shape))
        return names[0], names[1], names[2], names[3]


class GroupQueryAttention(Attention):
    """com.microsoft GroupQueryAttention: rotates, writes the buffers, masks.

    On the very first forward (past_len 0) it numbers rows by index: chains only there.
    """

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        super().__init__(ops, config)
        last = ops.node("Sub", [self.total, ops.shared("axis1", 1)])
        self._seqlens = ops.node("Cast", [last], to=TensorProto.INT32)
        self._total = ops.node("Cast", [self.total], to=TensorProto.INT32)
        self._position_ids = ops.node("Unsqueeze", [self.positions, self._axis0])

    def __call__(self, layer: int, qkv: str) -> str:
        """[n, q | k | v] -> [n, heads * head_dim]."""
        ops, config = self.ops, self.config
        past_key, past_value, key, value = self._buffers(layer)
        mixed = ops.fresh("mixed")
        ops.node(
            "GroupQueryAttention",
            [
                ops.node("Unsqueeze", [qkv, self._axis0]),
                "",
                "",
                past_key,
                past_value,
                self._seqlens,
                self._total,
                *self.tables_of(layer),
                self._position_ids,
                self.bias_of(layer),
            ],
            domain="com.microsoft",
            outputs=[mixed, key, value],
            num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads,
            scale=config.attention_scale,
            do_rotary=1,
            rotary_interleaved=0,
        )
        return ops.node("Squeeze", [mixed, self._axis0])


class ExplicitAttention(Attention):
    """Plain ops; the present is the whole buffer, new rows scattered into it."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        super().__init__(ops, config)
        self._position_ids = ops.node("Unsqueeze", [self.positions, self._axis0])
        # buffer slots of the new rows, as ScatterElements wants them: [1, kv, n, d]
        count = ops.node("Squeeze", [self.rows, self._axis0])
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
        minus = ops.shared("axis_last", -1)
        self._by_head = ops.node(
            "Concat",
            [ops.store.constant("heads", [1, config.n_heads]), self.rows, self.total],
            axis=0,
        )
        self._by_kv = ops.node("Concat", [kv, minus, self.total], axis=0)

    def __call__(self, layer: int, qkv: str) -> str:
        """[n, q | k | v] -> [n, heads * head_dim]."""
        ops, config = self.ops, self.config
        n_heads, kv, width = config.n_heads, config.n_kv_heads, config.head_dim
        past_key, past_value, present_key, present_value = self._buffers(layer)
        n_rotated = n_heads + kv
        both, v = ops.fresh("q_and_k"), ops.fresh("v")
        sizes = ops.store.constant("qk_v", [n_rotated * width, kv * width])
        ops.node("Split", [qkv, sizes], outputs=[both, v], axis=-1)
        both = ops.node(
            "RotaryEmbedding",
            [
                ops.node("Unsqueeze", [both, self._axis0]),
                self._position_ids,
                *self.tables_of(layer),
            ],
            domain="com.microsoft",
            num_heads=n_rotated,
            interleaved=0,
        )
        q, k = ops.fresh("q"), ops.fresh("k")
        sizes = ops.store.constant("q_k", [n_heads, kv])
        both = self._by_heads(both, n_rotated)
        ops.node("Split", [both, sizes], outputs=[q, k], axis=1)
        key = self._write(past_key, k, present_key)  # [1, kv, total, d]
        value = self._write(past_value, self._by_heads(v, kv), present_value)
        # heads of a group share keys: [1, kv, group * n, d] x [1, kv, d, total]
        q = ops.node("Reshape", [q, ops.store.constant("by_kv", [1, kv, -1, width])])
        turned = ops.node("Transpose", [key], perm=[0, 1, 3, 2])
        scores = ops.node("MatMul", [q, turned])
        scale = ops.store.constant("scale", config.attention_scale, np.float32)
        scores = ops.node("Mul", [scores, scale])
        scores = ops.node("Reshape", [scores, self._by_head])
        scores = ops.node("Add", [scores, self.bias_of(layer)])
        mixed = self._softmax_times(scores, value)
        flat = ops.store.constant("all_heads", [n_heads, -1, width])
        mixed = ops.node("Reshape", [mixed, flat])
        mixed = ops.node("Transpose", [mixed], perm=[1, 0, 2])
        return ops.node("Reshape", [mixed, ops.store.constant("flat", [0, -1])])

    def _softmax_times(self, scores: str, value: str) -> str:
        """softmax(scores [1, heads, n, total]) times value [1, kv, total, d].

        Shares are whole multiples of 2^-SHARE_BITS of the largest, scaled to integers:
        their sum in double is exact in any order. Masked entries are exact zeros, and
        the product runs over keys in order, in blocks of a fixed number of them. So a
        row's result is the same in a tree, with siblings' rows between its ancestors,
        as in a chain, while the tree's rows lie in one block.
        """
        ops, config = self.ops, self.config
        last = ops.shared("axis_last", -1)
        top = ops.node("ReduceMax", [scores, last], keepdims=1)
        scaled = ops.store.constant("log_share", SHARE_BITS * np.log(2), np.float32)
        top = ops.node("Sub", [top, scaled])
        share = ops.node("Round", [ops.node("Exp", [ops.node("Sub", [scores, top])])])
        fine = ops.node("Cast", [share], to=TensorProto.DOUBLE)
        divisor = ops.node("ReduceSum", [fine, last], keepdims=1)
        divisor = ops.node("Cast", [divisor], to=TensorProto.FLOAT)
        share = ops.node("Reshape", [share, self._by_kv])
        mixed = ops.node("MatMul", [share, value])
        shape = [1, config.n_heads, -1, config.head_dim]
        mixed = ops.node("Reshape", [mixed, ops.store.constant("mixed_shape", shape)])
        return ops.node("Div", [mixed, divisor])

    def _by_heads(self, x: str, count: int) -> str:
        """[.., n, count * d] -> [1, count, n, d]."""
        ops = self.ops
        shape = ops.store.constant(
            f"rows_of_{count}", [1, -1, count, self.config.head_dim]
        )
        return ops.node(
            "Transpose", [ops.node("Reshape", [x, shape])], perm=[0, 2, 1, 3]
        )

    def _write(self, past: str, rows: str, present: str) -> str:
        """Puts [1, kv, n, d] behind the committed rows; returns all visible ones."""
        ops = self.ops
        ops.node("ScatterElements", [past, self._slots, rows], name=present, axis=2)
        start, axis = ops.shared("axis0", 0), ops.shared("axis2", 2)
        return ops.node("Slice", [present, start, self.total, axis])
