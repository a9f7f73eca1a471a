"""Draft heads as ONNX graphs, run beside a target graph: weights, features, KV.

What the graphs take and give stands in `edgespec_export.onnx_head`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.errors import BackendError, FormatError
from edgespec.onnx_runtime import open_graph
from edgespec.tree.topology import MAX_ROWS

WINDOW = 1024  # positions an EAGLE head looks back, at most
FEW = 8  # pairs the step graph feeds, with logits of each; the tree graph takes more
CHUNK = 128  # pairs of one run
SPARE = 8  # positions of a head's limit left for the levels of a tree
_AGAIN = "export the model again with --head"


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a head has to agree with."""

    vocab: int
    hidden: int
    layers: int


class GraphHead:
    """What every head of graphs has: files, what they say, and their target's states.

    Raises FormatError naming both sides for a head of another target.
    """

    def __init__(
        self, path: Path, step: Path | None, target: TargetShape, threads: int
    ) -> None:
        self.path = path
        self.source: Path | None = None  # they are always their bundle's own
        self._session = open_graph(path, threads)
        said = _read(self._session, path)
        self.kind: str = said["kind"]  # eagle3 | eagle | medusa
        self.name = self.kind
        self.taps = tuple(int(tap) for tap in said["taps"].split(","))
        self.max_position = int(said["max_position"])  # 0: it has none
        for key, theirs in (
            ("vocab", target.vocab),
            ("hidden", target.hidden),
            ("layers", target.layers),
        ):
            if int(said[key]) != theirs:
                raise FormatError(
                    f"{path}: {key}: the head is for a target of {said[key]}, this one "
                    f"has {theirs}; {_AGAIN}"
                )
        files = [path] if step is None else [path, step]
        self.weight_bytes = sum(
            part.stat().st_size
            for file in files
            for part in file.parent.glob(f"{file.name}*")
        )
        self.length = 0  # positions it was told of

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self.__dict__.pop("_session", None)


class MedusaGraph(GraphHead):
    """A Medusa head: one graph from the last hidden state to the tokens of its tree."""

    def __init__(self, path: Path, target: TargetShape, threads: int) -> None:
        super().__init__(path, None, target, threads)
        self.state_bytes = 4 * target.hidden
        self._hidden: NDArray[np.float32] | None = None  # at the last position told of
        zeros = np.zeros((1, target.hidden), np.float32)
        _, self.parent, depth = self._run(0, zeros)
        self.depth = int(depth.max())
        seen: dict[int, int] = {-1: 0}
        self.rank = []  # among the parent's children, best first, as rows are stored
        for above in self.parent.tolist():
            self.rank.append(seen.get(above, 0))
            seen[above] = self.rank[-1] + 1

    def append(self, tokens: NDArray[np.int32], states: NDArray[np.float32]) -> None:
        """The target committed these; states (n, 1, hidden)."""
        self._hidden = states[-1].astype(np.float32)
        self.length += len(tokens)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions."""
        if length != self.length:
            self._hidden, self.length = None, length

    def restart(self) -> None:
        """Forgets what it was told of."""
        self.truncate(0)

    def tokens(self, root: int) -> NDArray[np.int64] | None:
        """Of the rows of its tree; None without a hidden state to draft from."""
        if self._hidden is None:
            return None
        found: NDArray[np.int64] = self._run(root, self._hidden)[0]
        return found

    def _run(self, root: int, hidden: NDArray[np.float32]) -> Any:
        names = ["draft_tokens", "tree_parent", "tree_depth"]
        inputs = {"root": np.array([root], np.int64), "hidden": hidden}
        try:
            return self._session.run(names, inputs)
        except Exception as error:  # its exceptions share no base
            raise BackendError(f"{self.path}: ONNX Runtime: {error}") from error


class EagleGraphs(GraphHead):
    """An EAGLE head: the tree graph takes long prompts in, the step graph the rest.

    Position j of the draft KV holds the target's features at j and the token behind.
    Appending only stores; what is pending is fed when a draft is asked for. Positions
    count from where the KV begins, so that conversations of any length stay below the
    head's own limit: when the KV is full, it begins anew half a window back.
    """

    depth = 0  # levels it can draft: any

    def __init__(
        self, path: Path, step: Path, target: TargetShape, threads: int
    ) -> None:
        super().__init__(path, step, target, threads)
        self._step = open_graph(step, threads)
        self._step_path = step
        if _read(self._step, step) != _read(self._session, path):
            raise FormatError(f"{step}: not of the same head as {path}; {_AGAIN}")
        limit = self.max_position or WINDOW
        self.window = max(2, min(WINDOW, limit - SPARE))
        shapes = {value.name: value.shape for value in self._step.get_inputs()}
        _, heads, _, head_dim = shapes["past_key_0"]
        shape = (1, heads, self.window + MAX_ROWS, head_dim)
        self._kv = {kind: np.zeros(shape, np.float32) for kind in ("key", "value")}
        self._width = shapes["features"][1]  # of what a step gives back
        wide = shapes["taps"][1]
        self._features = np.zeros((self.window, wide), np.float32)  # rings by position
        self._tokens = np.zeros(self.window, np.int64)
        self.state_bytes = sum(
            array.nbytes for array in (*self._kv.values(), self._features, self._tokens)
        )
        self.restart()
        nothing = np.zeros(1, np.int64)
        first = self._forward(nothing, self._features[:1], outputs=("d2t",))
        ids: NDArray[np.int64] = first[0]
        is_same = np.array_equal(ids, np.arange(len(ids)))
        self.ids = None if is_same else ids  # of the target, by draft token
        if ids.max() >= target.vocab:
            raise FormatError(
                f"{step}: d2t: token {ids.max()}, but the target has {target.vocab}; "
                f"{_AGAIN}"
            )

    def restart(self) -> None:
        """Forgets what it was told of."""
        self.length = 0
        self._first = 0  # position from which on features are there, but for the ring
        self._base = self._end = 0  # positions the KV holds
        self._root = -1  # token of the last of them
        self._open = _Open(self._width)

    def append(self, tokens: NDArray[np.int32], states: NDArray[np.float32]) -> None:
        """The target committed these; states (n, taps, hidden)."""
        n = len(tokens)
        if n and self._end == self.length and tokens[0] != self._root:
            self._end -= 1  # it was drafted behind another token
        kept = min(n, self.window)
        places = np.arange(self.length + n - kept, self.length + n) % self.window
        self._tokens[places] = tokens[n - kept :]
        self._features[places] = states.reshape(n, -1)[n - kept :]
        self.length += n

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions."""
        # The ring has newer rows in place of those further back.
        self._first = min(length, max(self._first, self.length - self.window))
        self._end = min(self._end, length - 1)
        self.length = length

    def begin(self, root: int) -> NDArray[np.float32] | None:
        """Logits (draft_vocab,) of the tokens behind `root`, the sequence's last token.

        None without features to draft from.
        """
        self._open = _Open(self._width)
        oldest = max(self._first, self.length - self.window)
        if oldest >= self.length:
            return None
        self._end = min(self._end, self.length - 1)  # the last pair gives the logits
        is_full = self.length - self._base > self.window
        if self._end <= self._base or self._end < oldest or is_full:
            is_long = self.length - oldest >= self.window
            self._base = self.length - self.window // 2 if is_long else oldest
            self._end = self._base
        while (pending := self.length - self._end) > 0:
            n = min(CHUNK, pending - 1) if pending > FEW else pending
            positions = np.arange(self._end, self._end + n)
            # The token behind the last position told of is the root.
            behind = self._tokens[(positions + 1) % self.window]
            if n == pending:
                behind[-1] = root
            features = self._features[positions % self.window]
            if n == pending:
                logits, given = self._forward(behind, features)
            else:
                self._feed(behind, features)
            self._end += n
        self._root = root
        self._open.feature = given[-1]
        found: NDArray[np.float32] = logits[-1]
        return found

    def expand(
        self, tokens: Sequence[int], parents: Sequence[int]
    ) -> NDArray[np.float32]:
        """Logits (n, draft_vocab) behind rows, in order, of one depth.

        parents: numbers of rows expanded since `begin`, in that order; -1: the root.
        """
        rows = self._open
        rows.add(tokens, parents)
        logits, given = self._forward(rows.tokens, rows.features, behind=rows)
        rows.given = given
        found: NDArray[np.float32] = logits[-len(tokens) :]
        return found

    def close(self) -> None:
        for name in ("_step", "_kv", "_features"):
            self.__dict__.pop(name, None)
        super().close()

    def _feed(self, tokens: NDArray[np.int64], taps: NDArray[np.float32]) -> None:
        inputs: dict[str, NDArray[Any]] = {"tokens": tokens, "taps": taps}
        self._run(self._session, self.path, inputs, ("draft_tokens",))

    def _forward(
        self,
        tokens: NDArray[np.int64],
        features: NDArray[np.float32],
        *,
        behind: _Open | None = None,
        outputs: Sequence[str] = ("logits", "feature"),
    ) -> list[Any]:
        """A step of rows with the target's features, or of open ones."""
        n, wide = len(tokens), self._features.shape[1]
        inputs: dict[str, NDArray[Any]] = {"tokens": tokens}
        if behind is None:
            inputs["taps"] = features
            inputs["features"] = np.zeros((0, self._width), np.float32)
            inputs["tree_depth"] = np.arange(n, dtype=np.int64)
            inputs["tree_mask"] = np.tri(n, dtype=np.bool_)
        else:
            inputs["taps"] = np.zeros((0, wide), np.float32)
            inputs["features"] = features
            inputs["tree_depth"] = behind.depth
            inputs["tree_mask"] = behind.mask
        return self._run(self._step, self._step_path, inputs, outputs)

    def _run(
        self,
        session: ort.InferenceSession,
        path: Path,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
    ) -> list[Any]:
        past = np.array([self._end - self._base], np.int64)
        # Bound by address, so these must stay referenced until the run is over.
        arrays = {
            name: np.ascontiguousarray(value)
            for name, value in {**inputs, "past_len": past}.items()
        }
        try:
            binding = session.io_binding()
            for name in outputs:
                binding.bind_output(name)
            for name, array in arrays.items():
                binding.bind_cpu_input(name, array)
            for kind, array in self._kv.items():
                where = ("cpu", 0, np.float32, array.shape, array.ctypes.data)
                binding.bind_input(f"past_{kind}_0", *where)
                binding.bind_output(f"present_{kind}_0", *where)
            session.run_with_iobinding(binding)
            return [value.numpy() for value in binding.get_outputs()[: len(outputs)]]
        except Exception as error:  # its exceptions share no base
            raise BackendError(f"{path}: ONNX Runtime: {error}") from error


class _Open:
    """Rows of the tree being grown that the head was asked about."""

    def __init__(self, width: int) -> None:
        self.tokens = np.zeros(0, np.int64)
        self.depth = np.zeros(0, np.int64)  # the root's children: 0
        self.features = np.zeros((0, width), np.float32)
        self.mask = np.zeros((0, 0), np.bool_)
        self.feature: NDArray[np.float32] | None = None  # behind the root
        self.given = self.features  # by row, once it was forwarded

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        n, k = len(self.tokens), len(tokens)
        mask = np.eye(n + k, dtype=np.bool_)
        mask[:n, :n] = self.mask
        above, depths = [], []
        for row, parent in enumerate(parents, n):
            if parent < 0:
                above.append(self.feature)
                depths.append(0)
            else:
                mask[row, : n + k] |= mask[parent]
                above.append(self.given[parent])
                depths.append(int(self.depth[parent]) + 1)
        self.tokens = np.concatenate([self.tokens, np.array(tokens, np.int64)])
        self.depth = np.concatenate([self.depth, np.array(depths, np.int64)])
        self.features = np.concatenate([self.features, np.array(above, np.float32)])
        self.mask = mask


def _read(session: ort.InferenceSession, path: Path) -> dict[str, str]:
    """What a draft graph says of its head."""
    found = session.get_modelmeta().custom_metadata_map
    keys = ("kind", "taps", "vocab", "hidden", "layers", "max_position")
    missing = [key for key in keys if f"edgespec.{key}" not in found]
    if missing:
        raise FormatError(
            f"{path}: not a draft graph of this version: it does not say its "
            f"{', '.join(missing)}; {_AGAIN}"
        )
    return {key: found[f"edgespec.{key}"] for key in keys}
