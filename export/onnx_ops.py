"""Building blocks of the exported graphs: methods add nodes and return a value's name.

Activations are float32 [n, width] throughout; the batch axis appears only where an op
needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgespec_export.onnx_store import Store
from edgespec_export.onnx_weights import Matrix


class Ops:
    """Nodes under construction, and the matrices they use."""

    def __init__(self, store: Store, accuracy_level: int) -> None:
        self.store = store
        self.accuracy_level = accuracy_level
        self.nodes: list[onnx.NodeProto] = []
        self._forms: dict[str, _Form] = {}
        self._block_sums: dict[tuple[str, int], str] = {}
        self._count = 0

    def node(
        self,
        op: str,
        inputs: list[str],
        *,
        name: str | None = None,
        domain: str = "",
        outputs: list[str] | None = None,
        **attributes: Any,
    ) -> str:
        """Adds a node; returns its first output."""
        self._count += 1
        if outputs is None:
            outputs = [name or f"{op}_{self._count}"]
        self.nodes.append(
            helper.make_node(
                op, inputs, outputs, f"{op}_{self._count}", domain=domain, **attributes
            )
        )
        return outputs[0]

    def shared(self, name: str, value: int) -> str:
        """A one-element int64 constant, stored once."""
        return self.store.constant(name, [value])

    def fresh(self, stem: str) -> str:
        """A value name not used before."""
        self._count += 1
        return f"{stem}_{self._count}"

    def rms_norm(self, x: str, weight: str, eps: float) -> str:
        """x / sqrt(mean(x^2) + eps) * weight."""
        return self.node(
            "SimplifiedLayerNormalization",
            [x, weight],
            axis=-1,
            epsilon=eps,
            stash_type=1,
        )

    def add_rms_norm(
        self, x: str, skip: str, weight: str, eps: float
    ) -> tuple[str, str]:
        """RMS norm of x + skip, and the sum itself."""
        normed, total = self.fresh("normed"), self.fresh("residual")
        self.node(
            "SkipSimplifiedLayerNormalization",
            [x, skip, weight],
            domain="com.microsoft",
            outputs=[normed, "", "", total],
            epsilon=eps,
        )
        return normed, total

    def gated(self, both: str, activation: str) -> str:
        """silu(gate) * up of [n, gate | up], or gelu in its tanh form."""
        gate, up = self.fresh("gate"), self.fresh("up")
        self.node("Split", [both], outputs=[gate, up], axis=-1, num_outputs=2)
        if activation == "gelu":
            return self.node("Mul", [self.node("Gelu", [gate], approximate="tanh"), up])
        open_ = self.node("Sigmoid", [gate])
        return self.node("Mul", [self.node("Mul", [gate, open_]), up])

    def add_matrix(self, name: str, matrix: Matrix) -> None:
        """Stores the initialisers of a matrix under its name."""
        coded = matrix.nbits
        if coded is None:
            assert matrix.values is not None
            self.store.add(name, matrix.values)
            self._forms[name] = _Form(matrix.shape, 0, 0, False, False, matrix.form)
            return
        self.store.add(name + ".codes", coded.packed)
        self.store.add(name + ".scales", coded.scales)
        if coded.zeros is not None:
            self.store.add(name + ".zeros", coded.zeros)
        if coded.offsets is not None:
            self.store.add(name + ".offsets", coded.offsets)
        self._forms[name] = _Form(
            coded.shape,
            coded.bits,
            coded.block,
            coded.zeros is not None,
            coded.offsets is not None,
            matrix.form,
        )

    def know_matrix(
        self, name: str, tensors: Mapping[str, TensorProto], width: int
    ) -> None:
        """A matrix of `width` columns whose initialisers are already in the graph.

        Keyed as `add_matrix` names them, without the stem: "", or ".codes", ".scales"
        and perhaps ".zeros" and ".offsets".
        """
        if "" in tensors:
            is_half = tensors[""].data_type == TensorProto.FLOAT16
            form = "float16" if is_half else "float32"
            rows = tensors[""].dims[0]
            self._forms[name] = _Form((rows, width), 0, 0, False, False, form)
            return
        rows, blocks, n_bytes = tensors[".codes"].dims
        block = width // blocks
        self._forms[name] = _Form(
            (rows, width),
            8 * n_bytes // block,
            block,
            ".zeros" in tensors,
            ".offsets" in tensors,
            "",
        )

    def matmul(self, x: str, matrix: str, stem: str) -> str:
        """x times the transposed matrix: [n, in] -> [n, out]."""
        form = self._forms[matrix]
        if form.bits == 0:
            weight = matrix
            if form.name == "float16":
                weight = self.node("Cast", [matrix], to=TensorProto.FLOAT)
            return self.node("Gemm", [x, weight], transB=1)
        inputs = [x, matrix + ".codes", matrix + ".scales"]
        if form.has_zeros:
            inputs.append(matrix + ".zeros")
        product = self.node(
            "MatMulNBits",
            inputs,
            domain="com.microsoft",
            K=form.shape[1],
            N=form.shape[0],
            bits=form.bits,
            block_size=form.block,
            accuracy_level=self.accuracy_level,
        )
        if not form.has_offsets:
            return product
        sums = self._sums(x, form.shape[1], form.block)
        return self.node("Gemm", [sums, matrix + ".offsets", product], transB=1)

    def _sums(self, x: str, width: int, block: int) -> str:
        """Sums of each block of inputs [n, in / block], computed once per x."""
        key = (x, block)
        if key not in self._block_sums:
            name = f"block_sums_{width}_{block}"
            if name not in self.store:
                ones = np.kron(np.eye(width // block), np.ones((block, 1)))
                self.store.add(name, ones.astype(np.float32))
            self._block_sums[key] = self.node("MatMul", [x, name])
        return self._block_sums[key]

    def embed(self, ids: str, matrix: str) -> str:
        """Rows of a matrix as float [n, in]."""
        form = self._forms[matrix]
        if form.bits == 0:
            rows = self.node("Gather", [matrix, ids], axis=0)
            if form.name == "float16":
                rows = self.node("Cast", [rows], to=TensorProto.FLOAT)
            return rows
        codes = self.node("Gather", [matrix + ".codes", ids], axis=0)
        if form.bits == 4:
            codes = self._unpack(codes, form.block)
        values = self.node("Cast", [codes], to=TensorProto.FLOAT)
        last = self.shared("axis_last", -1)
        if form.has_zeros:
            zero = self.node("Gather", [matrix + ".zeros", ids], axis=0)
            zero = self.node("Cast", [zero], to=TensorProto.FLOAT)
            zero = self.node("Unsqueeze", [zero, last])
        else:
            zero = self.store.constant(
                f"zero_{form.bits}", 1 << (form.bits - 1), np.float32
            )
        values = self.node("Sub", [values, zero])
        scale = self.node("Gather", [matrix + ".scales", ids], axis=0)
        values = self.node("Mul", [values, self.node("Unsqueeze", [scale, last])])
        if form.has_offsets:
            offset = self.node("Gather", [matrix + ".offsets", ids], axis=0)
            values = self.node("Add", [values, self.node("Unsqueeze", [offset, last])])
        flat = self.store.constant("flat", [0, -1])
        return self.node("Reshape", [values, flat])

    def _unpack(self, codes: str, block: int) -> str:
        """Pairs [n, blocks, block / 2] -> codes [n, blocks, block], low half first."""
        last = self.shared("axis_last", -1)
        mask = self.store.constant("mask_15", 15, np.uint8)
        four = self.store.constant("shift_4", 4, np.uint8)
        low = self.node("BitwiseAnd", [codes, mask])
        high = self.node("BitShift", [codes, four], direction="RIGHT")
        pair = [self.node("Unsqueeze", [half, last]) for half in (low, high)]
        both = self.node("Concat", pair, axis=-1)
        return self.node(
            "Reshape", [both, self.store.constant(f"block_{block}", [0, 0, block])]
        )


class _Form:
    """What the nodes need to know about a stored matrix."""

    def __init__(
        self,
        shape: tuple[int, int],
        bits: int,
        block: int,
        has_zeros: bool,
        has_offsets: bool,
        name: str,
    ) -> None:
        self.shape = shape
        self.bits = bits
        self.block = block
        self.has_zeros = has_zeros
        self.has_offsets = has_offsets
        self.name = name
