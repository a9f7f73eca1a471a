"""ONNX Runtime as the verifying target: KV in place, accepted rows compacted in C."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec._native import kv_compact, tree_derive
from edgespec.errors import BackendError, ContextError, FormatError, UsageError
from edgespec.onnx_runtime import open_graph
from edgespec.targets.base import Capabilities, check_tokens
from edgespec.tree.topology import MAX_ROWS, Tree, chain

if TYPE_CHECKING:
    from edgespec.drafts import AnyHead
    from edgespec.drafts.graphs import EagleGraphs, MedusaGraph

# Inputs besides the KV buffers: element type and rank.
INPUTS = {
    "input_ids": ("tensor(int64)", 2),
    "tree_mask": ("tensor(bool)", 2),
    "tree_depth": ("tensor(int64)", 1),
    "past_len": ("tensor(int64)", 1),
    "logit_rows": ("tensor(int64)", 1),
}
# A branching tree whose paths are scattered over its rows, and the prefix before it.
PROBE_PARENTS = (-1, 0, 0, 1, 2, 2, 4)
PROBE_LEAVES = (3, 5, 6)
PROBE_PREFIX = 11
# ONNX Runtime's float matrix product adds up a long inner dimension in blocks: of 128,
# or of 128 times a power of two where the outputs are few. Seen as a changed last bit
# when a tree straddles one.
KEY_BLOCK = 128


class OnnxTarget:
    """A target graph of edgespec_export in ONNX Runtime, on the CPU.

    The KV cache is one array of (layer, key or value, kv head, row, head_dim) float32,
    every part of which is bound as both past and present of its layer, so a forward
    writes its rows behind the committed ones and nothing is copied.

    Row invariance is measured at load. Where only a single row is rounded differently,
    `is_exact` has it forwarded beside a copy of itself, at the price of c(2) instead of
    c(1), so that plain decoding, trees and prefill give the same bits; `has_twin_rows`
    says so. The fused attention op adds up in an order that depends on where in the
    buffer a path's rows lie and stays variant; the explicit attention does not.

    Raises FormatError for a file that is no such graph, BackendError when ONNX Runtime
    fails, both naming the file.
    """

    name = "onnx"

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        threads: int,
        is_exact: bool = True,
        providers: Sequence[str] = (),
    ) -> None:
        if context < 1 or threads < 1:
            raise UsageError(
                f"context and threads: expected 1 or more, got {context} and {threads}"
            )
        self.path = Path(path)
        self.context = context
        self.threads = threads
        self._session = open_graph(self.path, threads, providers)
        n_layers, n_heads, head_dim = self._check_inputs()
        self.vocab, self._hidden, taps = self._check_outputs(n_layers)
        self._n_layers = n_layers
        self._head: AnyHead | None = None
        # What an attached head reads of the open rows, by output of the graph.
        self._states: dict[str, NDArray[np.float32]] = {}
        self._open_tokens = np.zeros(0, np.int32)
        self._length = 0
        self._open_rows = 0
        # One row more than the context: the last one may need a twin.
        self._kv = np.zeros((n_layers, 2, n_heads, context + 1, head_dim), np.float32)
        self._logits = np.empty((1, self.vocab), dtype=np.float32)
        self._binding = self._session.io_binding()
        self._bind_kv()
        self.has_twin_rows = False
        row_invariant = self._make_exact() if is_exact else self._is_row_invariant()
        self.capabilities = Capabilities(
            tree=True,
            taps=taps,
            window=0,
            snapshot=False,
            row_invariant=row_invariant,
            kv_block=KEY_BLOCK if row_invariant else 0,
            heads=True,
        )

    @property
    def length(self) -> int:
        return self._length

    @property
    def kv(self) -> NDArray[np.float32]:
        """The cache itself, (layer, key or value, kv head, row, head_dim)."""
        return self._kv

    def forward(
        self, tree: Tree, logit_rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Logits (m, vocab) of the rows asked for; reused by the next forward."""
        n = tree.n
        check_tokens(tree.tokens, self.vocab)
        if self._head is not None and self._head.length != self._length:
            self._head.truncate(self._length)  # an interrupt came between the two
        if self._length + n > self.context:
            raise ContextError(
                f"{n} rows behind {self._length} committed ones do not fit the context "
                f"of {self.context}"
            )
        if logit_rows is None:
            logit_rows = np.arange(n, dtype=np.int64)
        wanted = len(logit_rows)
        self._open_tokens = tree.tokens
        if self.has_twin_rows:
            if n == 1:
                tree = _with_twin(tree)
            if wanted == 1:
                logit_rows = np.repeat(logit_rows, 2)
        logits = self._logits_buffer(len(logit_rows))
        # Bound by address, so these must stay referenced until the run is over.
        inputs = {
            "input_ids": np.ascontiguousarray(tree.tokens[None], dtype=np.int64),
            "tree_mask": np.ascontiguousarray(tree.mask, dtype=np.bool_),
            "tree_depth": np.ascontiguousarray(tree.depth, dtype=np.int64),
            "past_len": np.array([self._length], dtype=np.int64),
            "logit_rows": np.ascontiguousarray(logit_rows, dtype=np.int64),
        }
        self._open_rows = 0
        try:
            for name, array in inputs.items():
                self._binding.bind_input(
                    name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
                )
            self._binding.bind_output(
                "logits", "cpu", 0, np.float32, (1, *logits.shape), logits.ctypes.data
            )
            self._bind_states(tree.n)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # its exceptions share no base
            raise BackendError(f"{self.path}: ONNX Runtime: {error}") from error
        self._open_rows = n
        return logits[:wanted]

    def prefill(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Forwards a chain at once and commits it; logits (vocab,) of the last row."""
        n = len(tokens)
        logits = self.forward(chain(tokens), np.array([n - 1], dtype=np.int64))
        self._tell(np.arange(n))
        self._length += n
        self._open_rows = 0
        last: NDArray[np.float32] = logits[0]
        return last

    def commit(self, rows: NDArray[np.int32]) -> None:
        rows = np.ascontiguousarray(rows, dtype=np.int32)
        n = len(rows)
        is_ascending = n == 0 or (rows[0] >= 0 and bool((np.diff(rows) > 0).all()))
        if not is_ascending or (n and rows[-1] >= self._open_rows):
            raise UsageError(
                f"commit: expected ascending rows of the last forward's "
                f"{self._open_rows}, got {rows.tolist()}"
            )
        if n and rows[-1] != n - 1:
            kv_compact(self._kv, self._length, rows)
        self._tell(rows)
        self._open_rows = 0
        # Last, so that an interrupt before this line only drops rows.
        self._length += n

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise UsageError(f"truncate: expected 0 to {self._length}, got {length}")
        self._open_rows = 0
        self._length = length
        if self._head is not None:
            self._head.truncate(length)

    def open_head(self, path: Path, step: Path | None) -> EagleGraphs | MedusaGraph:
        """A draft head for this target, of graphs; to be closed before it.

        step: the step graph of an EAGLE head.

        Raises FormatError naming both sides for a head of another target.
        """
        from edgespec.drafts.graphs import EagleGraphs, MedusaGraph, TargetShape

        shape = TargetShape(self.vocab, self._hidden, self._n_layers)
        head: EagleGraphs | MedusaGraph
        if step is None:
            head = MedusaGraph(path, shape, self.threads)
        else:
            head = EagleGraphs(path, step, shape, self.threads)
        lacking = [tap for tap in head.taps if self._output_of(tap) is None]
        if lacking:
            head.close()
            raise FormatError(
                f"{path}: the head reads hidden states {list(head.taps)}; {self.path} "
                f"lacks {lacking}: export the model again with --head"
            )
        return head

    def attach(self, head: AnyHead | None) -> None:
        """Keeps a head in step from now on; another one begins anew, and so do we."""
        if head is self._head:
            return
        self.truncate(0)
        self._head, self._states = None, {}
        self._binding.clear_binding_outputs()
        self._bind_kv()
        if head is not None:
            head.restart()
            names = [self._output_of(tap) for tap in head.taps]
            self._states = {
                name: np.empty((0, self._hidden), np.float32)
                for name in names
                if name is not None
            }
            self._head = head

    def close(self) -> None:
        self._head = None
        for name in ("_binding", "_session", "_kv", "_logits"):
            if hasattr(self, name):
                delattr(self, name)

    def _check_inputs(self) -> tuple[int, int, int]:
        """Layers, KV heads and head size, read off the graph's inputs."""
        found = {value.name: value for value in self._session.get_inputs()}
        keys = [name for name in found if re.fullmatch(r"past_key_\d+", name)]
        wanted = dict(INPUTS)
        for layer in range(max(1, len(keys))):
            for kind in ("key", "value"):
                wanted[f"past_{kind}_{layer}"] = ("tensor(float)", 4)
        _compare_names(self.path, "input", wanted, found)
        for name, (dtype, rank) in wanted.items():
            value = found[name]
            if value.type != dtype or len(value.shape) != rank:
                raise FormatError(
                    f"{self.path}: input {name}: expected {dtype} of rank {rank}, got "
                    f"{value.type} {value.shape}"
                )
        _, n_heads, _, head_dim = found["past_key_0"].shape
        for name, value in found.items():
            if name.startswith("past_") and name != "past_len":
                shape = value.shape
                if (shape[1], shape[3]) != (n_heads, head_dim) or not (
                    isinstance(n_heads, int) and isinstance(head_dim, int)
                ):
                    raise FormatError(
                        f"{self.path}: input {name}: expected fixed numbers of heads "
                        f"and values per head, the same in every layer, got {shape}"
                    )
        return len(keys), n_heads, head_dim

    def _output_of(self, tap: int) -> str | None:
        """The graph's output of a hidden state, None without."""
        if tap == self._n_layers:
            return "hidden"
        return f"tap_{tap}" if tap in self.capabilities.taps else None

    def _bind_states(self, rows: int) -> None:
        """Has the graph write what the head reads of so many rows."""
        for name, array in self._states.items():
            if len(array) < rows:
                array = self._states[name] = np.empty((rows, self._hidden), np.float32)
            shape = (1, rows, self._hidden)
            where = ("cpu", 0, np.float32, shape, array.ctypes.data)
            self._binding.bind_output(name, *where)

    def _tell(self, rows: NDArray[np.int32] | NDArray[np.int64]) -> None:
        """Tells the head of open rows about to be committed."""
        if self._head is not None and len(rows):
            states = np.stack([array[rows] for array in self._states.values()], axis=1)
            self._head.append(self._open_tokens[rows], states)

    def _check_outputs(self, n_layers: int) -> tuple[int, int, tuple[int, ...]]:
        """Vocabulary, hidden size and taps, read off the graph's outputs."""
        found = {value.name: value for value in self._session.get_outputs()}
        taps = sorted(int(name[4:]) for name in found if re.fullmatch(r"tap_\d+", name))
        wanted = ["logits", "hidden", *(f"tap_{tap}" for tap in taps)]
        for layer in range(n_layers):
            wanted += [f"present_key_{layer}", f"present_value_{layer}"]
        _compare_names(self.path, "output", wanted, found)
        vocab = found["logits"].shape[-1]
        if found["logits"].type != "tensor(float)" or not isinstance(vocab, int):
            raise FormatError(
                f"{self.path}: output logits: expected float with a fixed vocabulary, "
                f"got {found['logits'].type} {found['logits'].shape}"
            )
        hidden = found["hidden"].shape[-1]
        for name in ("hidden", *(f"tap_{tap}" for tap in taps)):
            if found[name].shape[-1] != hidden or not isinstance(hidden, int):
                raise FormatError(
                    f"{self.path}: output {name}: expected rows of one fixed size, got "
                    f"{found[name].shape}"
                )
        return vocab, hidden, tuple(taps)

    def _bind_kv(self) -> None:
        for layer, pair in enumerate(self._kv):
            for kind, buffer in zip(("key", "value"), pair, strict=True):
                shape = (1, *buffer.shape)
                for name, bind in (
                    (f"past_{kind}_{layer}", self._binding.bind_input),
                    (f"present_{kind}_{layer}", self._binding.bind_output),
                ):
                    bind(name, "cpu", 0, np.float32, shape, buffer.ctypes.data)

    def _logits_buffer(self, rows: int) -> NDArray[np.float32]:
        if rows > len(self._logits):
            self._logits = np.empty(
                (max(rows, min(2 * len(self._logits), MAX_ROWS)), self.vocab),
                dtype=np.float32,
            )
        return self._logits[:rows]

    def _make_exact(self) -> bool:
        """Row invariance, with twins only if that is what it takes."""
        for self.has_twin_rows in (False, True):
            if self._is_row_invariant():
                return True
        self.has_twin_rows = False
        return False

    def _is_row_invariant(self) -> bool:
        """Whether rows alone, in chains and in a tree have the same bits."""
        n = PROBE_PREFIX + len(PROBE_PARENTS)
        if n > self.context:
            return False
        tokens = ((np.arange(n) * 31 + 7) % self.vocab).astype(np.int32)
        prefix, rest = tokens[:PROBE_PREFIX], tokens[PROBE_PREFIX:]
        tree = tree_derive(rest, PROBE_PARENTS)
        try:
            self.prefill(prefix)
            alone = self.forward(chain(rest[:1])).copy()
            in_tree = self.forward(tree).copy()
            if not np.array_equal(alone, in_tree[:1]):
                return False
            self.truncate(0)
            for part in (prefix[:4], prefix[4:]):
                self.prefill(part)
            for leaf in PROBE_LEAVES:
                path = np.flatnonzero(tree.mask[leaf]).astype(np.int32)
                in_chain = self.forward(chain(tree.tokens[path]))
                if not np.array_equal(in_chain, in_tree[path]):
                    return False
            self.forward(tree)
            self.commit(path)
            behind = self.forward(chain(rest[:5]))[:1].copy()
            self.truncate(PROBE_PREFIX)
            for token in tree.tokens[path]:
                self.forward(chain(np.array([token], dtype=np.int32)))
                self.commit(np.zeros(1, dtype=np.int32))
            return np.array_equal(self.forward(chain(rest[:1])), behind)
        finally:
            self.truncate(0)


def _with_twin(tree: Tree) -> Tree:
    """A lone row and its copy, at the same position, neither seeing the other."""
    return Tree(
        tokens=np.repeat(tree.tokens, 2),
        parent=np.array([-1, -1], dtype=np.int32),
        rank=np.array([0, 1], dtype=np.int32),
        depth=np.zeros(2, dtype=np.int32),
        mask=np.eye(2, dtype=np.bool_),
    )


def _compare_names(
    path: Path, what: str, wanted: Iterable[str], found: Iterable[str]
) -> None:
    wanted, found = list(wanted), list(found)
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    if missing or extra:
        raise FormatError(
            f"{path}: not a target graph of this version: {what}s missing: "
            f"{', '.join(missing) or 'none'}; unexpected: "
            f"{', '.join(extra) or 'none'}. Export it again with edgespec export"
        )
