"""The session in C: the sequence, the draft and the two halves of the round."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int32, c_int64, c_uint64
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec._native.arrays import address, allowed_bits, int32, rows
from edgespec._native.head import NativeDrafter
from edgespec._native.library import (
    BUFFER,
    HANDLE,
    I32,
    SIZE,
    VOID,
    Function,
    check_structs,
    struct,
)
from edgespec._native.sampling import CSampling, SampleParams, sampling_to_c
from edgespec._native.trees import CTree, tree_from_c, tree_to_c
from edgespec.errors import UsageError
from edgespec.tree.topology import MAX_ROWS, Tree

STATS_LEVELS = 8  # depths that statistics tell apart


class CSessionParams(ctypes.Structure):
    """es_session_params"""

    _fields_ = [
        ("vocab", c_int32),
        ("context", c_int32),
        ("eos", POINTER(c_int32)),
        ("n_eos", c_int32),
        ("draft", ctypes.c_int),
        ("tree", ctypes.c_int),
        ("rows", c_int32),
        ("shape", POINTER(CTree)),
        ("ngram_capacity", SIZE),
        ("cost", POINTER(c_double)),
        ("cost_slope", c_double),
        ("kv_block", c_int32),
        ("blind_ranks", c_int32),
    ]


class CRound(ctypes.Structure):
    """es_round"""

    _fields_ = [
        ("n", c_int32),
        ("token", c_int32 * (MAX_ROWS + 1)),
        ("row", c_int32 * (MAX_ROWS + 1)),
        ("finish", ctypes.c_int),
    ]


class CStats(ctypes.Structure):
    """es_stats"""

    _fields_ = [
        ("rounds", c_int64),
        ("plain_rounds", c_int64),
        ("tokens", c_int64),
        ("drafted", c_int64),
        ("accepted", c_int64),
        ("depth", c_int64),
        ("forward_seconds", c_double),
        ("draft_seconds", c_double),
        ("tried", c_int64 * STATS_LEVELS),
        ("held", c_int64 * STATS_LEVELS),
    ]


struct("es_session_params", CSessionParams)
struct("es_round", CRound)
struct("es_stats", CStats)
_TREE, _PARAMS = POINTER(CTree), POINTER(CSessionParams)
_params_default = Function("es_session_params_default", _PARAMS)
_new = Function("es_session_new", _PARAMS, POINTER(HANDLE))
_free = Function("es_session_free", HANDLE, result=VOID)
_append = Function("es_session_append", HANDLE, BUFFER, SIZE)
_truncate = Function("es_session_truncate", HANDLE, SIZE)
_length = Function("es_session_length", HANDLE, result=SIZE)
_tokens = Function("es_session_tokens", HANDLE, result=I32)
_evicted = Function("es_session_evicted", HANDLE, c_uint64)
_begin_generation = Function("es_generation_begin", HANDLE, POINTER(CSampling), c_int64)
_propose = Function("es_round_propose", HANDLE, _TREE)
_begin = Function("es_round_begin", HANDLE, ctypes.c_int, _TREE)
_finish = Function(
    "es_round_finish", HANDLE, BUFFER, SIZE, BUFFER, c_double, POINTER(CRound)
)
_abandon = Function("es_round_abandon", HANDLE)
_attach = Function("es_session_attach", HANDLE, HANDLE)
_stats = Function("es_session_stats", HANDLE, POINTER(CStats))
_cost = Function("es_session_cost", HANDLE, POINTER(c_double))

PREFILL, PLAIN, DRAFT = 0, 1, 2
FINISH = (None, "stop", "length", "context")  # by es_finish


class Round(NamedTuple):
    """What one round emitted, the rows to commit (as many), and why the reply ends."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]
    finish: str | None  # None: it goes on


class NativeStats(NamedTuple):
    """es_stats of the generation in progress or last finished, less the prefill."""

    rounds: int
    plain_rounds: int
    tokens: int
    drafted: int
    accepted: int
    depth: int
    forward_seconds: float
    draft_seconds: float
    tried: tuple[int, ...]  # by depth: rounds that came to a row with such children
    held: tuple[int, ...]  # of these, rounds that accepted one


class NativeSession:
    """The sequence, the draft and the two halves of the round.

    Args:
        draft: "none" or "ngram".
        tree: "auto" (rows by cost), "best" (always the best `rows`), or a Tree whose
            parents and ranks are the static shape.
        cost: c(n) for n in 0..MAX_ROWS, 0 = unknown; nothing is learned then.
        kv_block: 0, or trees never straddle a multiple of this many KV rows.
        blind_ranks: a head's tokens rank by probability alone also when sampling, to
            measure what ranking them by the noise of the draw is worth.
    """

    def __init__(
        self,
        vocab: int,
        context: int,
        eos: Sequence[int] = (),
        *,
        draft: str = "none",
        tree: str | Tree = "auto",
        rows: int = 16,
        ngram_capacity: int = 1 << 16,
        cost: Sequence[float] | None = None,
        cost_slope: float | None = None,
        kv_block: int = 0,
        blind_ranks: bool = False,
    ) -> None:
        self._handle = HANDLE()
        check_structs("es_tree", "es_sampling", "es_session_params")
        check_structs("es_round", "es_stats")
        self._n = 0  # rows of the open round
        self.scores = np.ones(1, np.float32)  # of the last tree's paths; root 1
        self._drafter: NativeDrafter | None = None  # kept while C knows it
        self.vocab = vocab
        drafts = {"none": 0, "ngram": 1}
        modes = {"auto": 0, "best": 1}
        if draft not in drafts:
            raise UsageError(f"draft: expected one of {sorted(drafts)}, got {draft!r}")
        if isinstance(tree, str) and tree not in modes:
            raise UsageError(f"tree: expected one of {sorted(modes)}, got {tree!r}")
        params = CSessionParams()
        _params_default(byref(params))
        params.vocab = vocab
        params.context = context
        ids = (c_int32 * len(eos))(*eos)
        params.eos = ctypes.cast(ids, I32)
        params.n_eos = len(eos)
        params.draft = drafts[draft]
        params.rows = rows
        params.ngram_capacity = ngram_capacity
        params.kv_block = kv_block
        params.blind_ranks = blind_ranks
        if isinstance(tree, str):
            params.tree = modes[tree]
        else:
            params.tree = 2
            shape = tree_to_c(tree)
            params.shape = ctypes.pointer(shape)
        if cost is not None:
            if len(cost) != MAX_ROWS + 1:
                raise UsageError(
                    f"cost: expected {MAX_ROWS + 1} values, got {len(cost)}"
                )
            costs = (c_double * (MAX_ROWS + 1))(*cost)
            params.cost = ctypes.cast(costs, POINTER(c_double))
        if cost_slope is not None:
            params.cost_slope = cost_slope
        _new(byref(params), byref(self._handle))

    def close(self) -> None:
        """Frees the handle; the session is unusable afterwards. Idempotent."""
        handle, self._handle = getattr(self, "_handle", None), HANDLE()
        if handle:
            _free(handle)
        self._drafter = None

    def __del__(self) -> None:
        self.close()

    @property
    def open_handle(self) -> ctypes.c_void_p:
        if self._drafter is not None:
            self._drafter.check_open()
        return self._own_handle()

    def _own_handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise UsageError("the session is closed")
        return self._handle

    @property
    def length(self) -> int:
        return int(_length(self.open_handle))

    @property
    def tokens(self) -> NDArray[np.int32]:
        """A copy of the sequence."""
        n = self.length
        if n == 0:
            return np.empty(0, np.int32)
        return np.array(np.ctypeslib.as_array(_tokens(self.open_handle), (n,)))

    def append(self, tokens: ArrayLike) -> None:
        """Adds tokens to the sequence; ContextError when they do not fit."""
        values = int32(tokens)
        _append(self.open_handle, address(values), len(values))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        _truncate(self.open_handle, length)

    def evicted(self, n: int) -> None:
        """Notes that n tokens were dropped from the front of the conversation."""
        _evicted(self.open_handle, n)

    def attach(self, drafter: NativeDrafter | None) -> None:
        """Drafts with a head from the next DRAFT round on; None: no more.

        Beside n-grams where the session has them. The drafter has to be told of every
        committed token: an attached target does it, other hosts call its `append`. A
        round raises NativeError when it was not.
        """
        _attach(self._own_handle(), None if drafter is None else drafter.open_handle)
        self._drafter = drafter

    def begin_generation(self, params: SampleParams, max_new: int) -> None:
        """Starts a reply of at most max_new (1 or more) tokens."""
        sampling, keep = sampling_to_c(params)
        _begin_generation(self.open_handle, byref(sampling), max_new)
        del keep

    def propose(self, tree: Tree) -> None:
        """Gives the tree of the next DRAFT round, in place of the session's own."""
        _propose(self.open_handle, byref(tree_to_c(tree)))

    def begin(self, kind: int = DRAFT) -> Tree:
        """Opens a round; the tree to forward."""
        tree = CTree()
        _begin(self.open_handle, kind, byref(tree))
        self._n = tree.n
        self.scores = np.array(tree.score[: tree.n], np.float32)
        return tree_from_c(tree)

    def finish(
        self,
        logits: NDArray[np.float32],
        allowed: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
        seconds: float = 0.0,
    ) -> Round:
        """Closes the round: logits (tree.n, vocab) in, emitted tokens out.

        After an error the round is still open: finish again or abandon it.
        """
        n = self._n
        logits, stride = rows(np.atleast_2d(logits), "logits")
        if n and logits.shape != (n, self.vocab):
            raise UsageError(
                f"logits: expected shape ({n}, {self.vocab}), got {logits.shape}"
            )
        bits = allowed_bits(allowed, n, self.vocab) if n else None
        out = CRound()
        _finish(
            self.open_handle,
            address(logits),
            stride,
            address(bits),
            seconds,
            byref(out),
        )
        self._n = 0
        return Round(
            np.array(out.token[: out.n], np.int32),
            np.array(out.row[: out.n], np.int32),
            FINISH[out.finish],
        )

    def abandon(self) -> None:
        """Drops an open round; nothing is emitted."""
        _abandon(self.open_handle)
        self._n = 0

    def stats(self) -> NativeStats:
        """Counts and times of the generation in progress or last finished."""
        out = CStats()
        _stats(self.open_handle, byref(out))
        values = {name: getattr(out, name) for name, *_ in CStats._fields_}
        for name in ("tried", "held"):
            values[name] = tuple(values[name])
        return NativeStats(**values)

    def cost(self) -> NDArray[np.float64]:
        """Learned seconds of a forward over n rows (MAX_ROWS + 1,), 0 = unmeasured."""
        out = np.zeros(MAX_ROWS + 1, np.float64)
        _cost(
            self.open_handle,
            out.ctypes.data_as(POINTER(c_double)),
        )
        return out
