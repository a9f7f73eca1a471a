"""The target as an ONNX graph that verifies a token tree against shared KV buffers.

Inputs: input_ids int64 [1,n]; tree_mask bool [n,n] (row = query, diagonal set);
tree_depth int64 [n]; past_len int64 [1]; logit_rows int64 [m]; past_key_i, past_value_i
float32 [1,kv,S,d].

Outputs: logits float32 [1,m,vocab]; hidden float32 [1,n,hidden] after the final norm;
tap_k float32 [1,n,hidden] on request; present_key_i, present_value_i, to be bound to
the same memory as the pasts. Rows must come parents first. Row r sits at position
past_len + tree_depth[r]; by that, windowed layers mask what lies further back than
their window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgespec.errors import UnsupportedError, UsageError
from edgespec_export import onnx_weights
from edgespec_export.onnx_attention import (
    Attention,
    ExplicitAttention,
    GroupQueryAttention,
)
from edgespec_export.onnx_ops import Ops
from edgespec_export.onnx_store import Store
from edgespec_export.onnx_weights import Matrix
from edgespec_export.weights import WeightSet

ATTENTIONS: dict[str, type[Attention]] = {
    "gqa": GroupQueryAttention,
    "explicit": ExplicitAttention,
}
DEFAULT_ATTENTION = "explicit"
INPUTS_VERSION = 1
_OPSET = 20
_IR_VERSION = 10
_GQA_HEAD_DIM = 16  # ONNX Runtime rotates heads of multiples of this
_MAX_ROPE_TABLE = 1 << 30  # bytes of cos and sin


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What was written: matrices by form, why each form, bytes of all files."""

    counts: dict[str, int]
    notes: tuple[str, ...]
    bytes: int
    errors: dict[str, float]  # relative, of each matrix that is not exact


def write(
    weights: WeightSet,
    path: Path,
    *,
    quant: str | None = None,
    attention: str = DEFAULT_ATTENTION,
    taps: Iterable[int] = (),
    accuracy_level: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> GraphReport:
    """Writes `path` and, above 1 MB, `path`.data; nothing stays after an error.

    Args:
        quant: q4_0, q4_1, q8_0, f16, f32 or None to keep what the source holds; see
            `onnx_weights.prepare`.
        attention: "gqa" (one fused op) or "explicit" (standard ops).
        taps: hidden_states indices to output, 0 = embedding, n_layers = the final
            norm's output.
        accuracy_level: of MatMulNBits; 4 computes in int8, 0 in float.
        progress: called with (layers done, layers in all).
    Raises UsageError on a tap or attention that does not exist, UnsupportedError on
    shapes and types the graph cannot hold.
    """
    taps = tuple(taps)
    _check(weights, attention, taps)
    store = Store(path.with_name(path.name + ".data"))
    try:
        graph = _Graph(weights, store, quant, attention, taps, accuracy_level)
        model = graph.build(progress)
        store.close()
        model.graph.initializer.extend(store.initializers)
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


def _check(weights: WeightSet, attention: str, taps: tuple[int, ...]) -> None:
    """Refuses what the graph cannot hold or ONNX Runtime cannot run."""
    config = weights.config
    if attention not in ATTENTIONS:
        raise UsageError(f"--attention {attention}: expected {' or '.join(ATTENTIONS)}")
    for tap in taps:
        if not 0 <= tap <= config.n_layers or taps.count(tap) > 1:
            raise UsageError(
                f"tap {tap}: expected distinct indices from 0 (embedding) to "
                f"{config.n_layers} (final norm)"
            )
    ropes = {"": config.rope}
    if config.local_rope is not None:
        ropes[" of windowed layers"] = config.local_rope
    for which, rope in ropes.items():
        if rope.dim != config.head_dim:
            raise UnsupportedError(
                f"rotary dimension {rope.dim}{which} of heads of {config.head_dim}: "
                "only whole heads are rotated"
            )
    if attention == "gqa" and config.head_dim % _GQA_HEAD_DIM:
        raise UnsupportedError(
            f"--attention gqa: heads of {config.head_dim} are no multiple of "
            f"{_GQA_HEAD_DIM}; use explicit"
        )
    size = 4 * config.max_position * sum(rope.dim for rope in ropes.values())
    if size > _MAX_ROPE_TABLE:
        raise UnsupportedError(
            f"a context of {config.max_position} needs rotary tables of {size} "
            f"bytes in the graph, at most {_MAX_ROPE_TABLE} are supported; use "
            "--format gguf, or lower the source's context length"
        )


class _Graph:
    def __init__(
        self,
        weights: WeightSet,
        store: Store,
        quant: str | None,
        attention: str,
        taps: tuple[int, ...],
        accuracy_level: int,
    ) -> None:
        self.weights = weights
        self.config = weights.config
        self.quant = quant
        self.taps = taps
        self.ops = Ops(store, accuracy_level)
        self.attention_name = attention
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.errors: dict[str, float] = {}
        self._outputs: list[onnx.ValueInfoProto] = []

    def build(self, progress: Callable[[int, int], None] | None) -> onnx.ModelProto:
        """Nodes in order: embedding, layers, final norm, head on the rows asked for."""
        ops, config = self.ops, self.config
        rows = ops.shared("count", -1)
        ids = ops.node("Reshape", ["input_ids", rows], name="ids")
        head, x = self._embedding(ids)
        self._tap(0, x)
        attention = ATTENTIONS[self.attention_name](ops, config)
        normed = ops.rms_norm(x, self._vector("blk.0.attn_norm"), config.rms_eps)
        for layer in range(config.n_layers):
            prefix = f"blk.{layer}."
            mixed = attention(layer, self._queries_keys_values(prefix, normed))
            mixed = self._linear([prefix + "attn_output"], mixed)
            mixed = self._norm_if_any(prefix + "post_attention_norm", mixed)
            norm = self._vector(prefix + "ffn_norm")
            normed, x = ops.add_rms_norm(mixed, x, norm, config.rms_eps)
            both = self._linear([prefix + "ffn_gate", prefix + "ffn_up"], normed)
            gated = ops.gated(both, config.activation)
            down = self._linear([prefix + "ffn_down"], gated)
            down = self._norm_if_any(prefix + "post_ffw_norm", down)
            last = layer + 1 == config.n_layers
            name = "output_norm" if last else f"blk.{layer + 1}.attn_norm"
            normed, x = ops.add_rms_norm(down, x, self._vector(name), config.rms_eps)
            self._tap(layer + 1, normed if last else x)
            if progress is not None:
                progress(layer + 1, config.n_layers)
        self._expose("hidden", normed)
        wanted = ops.node("Gather", [normed, "logit_rows"], axis=0)
        logits = ops.matmul(wanted, head, "head")
        ops.node("Unsqueeze", [logits, ops.shared("axis0", 0)], name="logits")
        outputs = [_value("logits", TensorProto.FLOAT, [1, "m", config.vocab])]
        outputs += self._outputs + attention.outputs
        inputs = [
            _value("input_ids", TensorProto.INT64, [1, "n"]),
            _value("tree_mask", TensorProto.BOOL, ["n", "n"]),
            _value("tree_depth", TensorProto.INT64, ["n"]),
            _value("past_len", TensorProto.INT64, [1]),
            _value("logit_rows", TensorProto.INT64, ["m"]),
            *attention.inputs,
        ]
        graph = helper.make_graph(ops.nodes, "target", inputs, outputs)
        model = helper.make_model(
            graph,
            producer_name="edgespec",
            opset_imports=[
                helper.make_opsetid("", _OPSET),
                helper.make_opsetid("com.microsoft", 1),
            ],
        )
        model.ir_version = _IR_VERSION
        return model

    def _embedding(self, ids: str) -> tuple[str, str]:
        """Head's name and embedded rows; a tied head shares the embedding's weights."""
        table = self._matrix("token_embd")
        self.ops.add_matrix("embedding", table)
        x = self.ops.embed(ids, "embedding")
        if self.config.embed_scale != 1:
            scale = self.ops.store.constant(
                "embed_scale", self.config.embed_scale, np.float32
            )
            x = self.ops.node("Mul", [x, scale])
        if self.config.is_tied:
            return "embedding", x
        self.ops.add_matrix("head", self._matrix("output"))
        return "head", x

    def _queries_keys_values(self, prefix: str, x: str) -> str:
        """[n, q | k | v] with what the family adds: biases, norms of each head."""
        ops, config = self.ops, self.config
        tensors = self.weights.tensors
        names = [f"{prefix}attn_{part}" for part in "qkv"]
        qkv = self._linear(names, x)
        if f"{names[0]}.bias" in tensors:
            biases = [tensors[f"{name}.bias"].load_f32() for name in names]
            bias = ops.store.add(prefix + "attn_qkv.bias", np.concatenate(biases))
            qkv = ops.node("Add", [qkv, bias])
        if f"{names[0]}_norm" not in tensors:
            return qkv
        counts = (config.n_heads, config.n_kv_heads)
        gains = [
            np.tile(tensors[f"{name}_norm"].load_f32(), (count, 1))
            for name, count in zip(names, counts, strict=False)
        ]
        gain = ops.store.add(prefix + "attn_qk_norm", np.concatenate(gains))
        width = config.head_dim
        both, v = ops.fresh("q_and_k"), ops.fresh("v")
        sizes = ops.store.constant("qk_v", [sum(counts) * width, counts[1] * width])
        ops.node("Split", [qkv, sizes], outputs=[both, v], axis=-1)
        by_head = ops.store.constant("by_head", [0, sum(counts), width])
        heads = ops.node("Reshape", [both, by_head])
        ones = ops.store.constant("ones", [1] * width, np.float32)
        heads = ops.node("Mul", [ops.rms_norm(heads, ones, config.rms_eps), gain])
        both = ops.node("Reshape", [heads, ops.store.constant("flat", [0, -1])])
        return ops.node("Concat", [both, v], axis=-1)

    def _norm_if_any(self, name: str, x: str) -> str:
        if name not in self.weights.tensors:
            return x
        return self.ops.rms_norm(x, self._vector(name), self.config.rms_eps)

    def _linear(self, names: list[str], x: str) -> str:
        """x times the rows of all the named matrices; one op when their forms agree."""
        parts = [self._matrix(name) for name in names]
        fused = onnx_weights.concat(parts)
        stem = "+".join(names)
        if fused is not None:
            self.ops.add_matrix(stem, fused)
            return self.ops.matmul(x, stem, stem)
        for name, part in zip(names, parts, strict=True):
            self.ops.add_matrix(name, part)
        results = [self.ops.matmul(x, name, name) for name in names]
        return self.ops.node("Concat", results, axis=-1)

    def _matrix(self, name: str) -> Matrix:
        tensor = self.weights.tensors[name]
        matrix = onnx_weights.prepare(tensor, self.quant)
        if not matrix.is_exact:
            self.errors[name] = matrix.error(tensor.load_f32())
        self.counts[matrix.form] += 1
        self.notes[f"{matrix.form} ({matrix.why})"] += 1
        return matrix

    def _vector(self, name: str) -> str:
        values = self.weights.tensors[name].load_f32()
        return self.ops.store.add(name, values.astype(np.float32))

    def _tap(self, index: int, value: str) -> None:
        if index in self.taps:
            self._expose(f"tap_{index}", value)

    def _expose(self, name: str, value: str) -> None:
        self.ops.node("Unsqueeze", [value, self.ops.shared("axis0", 0)], name=name)
        self._outputs.append(
            _value(name, TensorProto.FLOAT, [1, "n", self.config.hidden])
        )


def _value(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
