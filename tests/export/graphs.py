"""Runs exported target graphs with KV buffers in place, for the tests beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray


class Graph:
    """A target graph, its buffers, and the number of committed rows."""

    def __init__(self, path: Path, capacity: int = 128) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.buffers = {
            i.name: np.full((1, i.shape[1], capacity, i.shape[3]), 9, np.float32)
            for i in self.session.get_inputs()
            if i.name.startswith(("past_key_", "past_value_"))
        }
        self.length = 0

    def forward(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        mask: NDArray[np.bool_] | None = None,
        depth: NDArray[np.integer] | None = None,
        rows: Sequence[int] | None = None,
    ) -> dict[str, NDArray[np.float32]]:
        """Outputs by name without the batch axis; commits nothing."""
        n = len(tokens)
        mask = np.tri(n, dtype=bool) if mask is None else mask
        depth = np.arange(n) if depth is None else depth
        binding = self.session.io_binding()
        inputs = {
            "input_ids": np.asarray(tokens, np.int64)[None],
            "tree_mask": mask,
            "tree_depth": np.asarray(depth, np.int64),
            "past_len": np.array([self.length], np.int64),
            "logit_rows": np.arange(n) if rows is None else np.array(rows, np.int64),
        }
        for name, value in inputs.items():
            binding.bind_cpu_input(name, value)
        names = [name for name in self.outputs if not name.startswith("present")]
        for name in names:
            binding.bind_output(name)
        for name, buffer in self.buffers.items():
            where = ("cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
            binding.bind_input(name, *where)
            binding.bind_output(name.replace("past", "present"), *where)
        self.session.run_with_iobinding(binding)
        values = binding.get_outputs()[: len(names)]
        return {n: v.numpy()[0].copy() for n, v in zip(names, values, strict=True)}

    def prefill(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Forwards and commits a chain."""
        if len(tokens):
            self.forward(tokens, rows=[len(tokens) - 1])
        self.length += len(tokens)


def tree(parent: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Mask and depth of a topological tree."""
    n = len(parent)
    mask, depth = np.eye(n, dtype=bool), np.zeros(n, np.int64)
    for row in range(1, n):
        mask[row] |= mask[parent[row]]
        depth[row] = depth[parent[row]] + 1
    return mask, depth


def random_parent(rng: np.random.Generator, n: int) -> list[int]:
    """A random branching tree."""
    return [-1, *(int(rng.integers(0, row)) for row in range(1, n))]
