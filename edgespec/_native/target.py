"""The target in C: one conversation's KV rows over a model, and whole rounds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32, c_int64
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec._native.arrays import address, int32
from edgespec._native.head import NativeDrafter
from edgespec._native.library import (
    BUFFER,
    HANDLE,
    SIZE,
    VOID,
    Function,
    check_structs,
    struct,
)
from edgespec._native.model import NativeModel
from edgespec._native.session import FINISH, CRound, NativeSession
from edgespec._native.trees import CTree, derived, tree_from_c
from edgespec.errors import UsageError
from edgespec.tree.topology import MAX_ROWS, Tree

KV_TYPES = ("f16", "int8")  # by es_kv_type


class CTargetParams(ctypes.Structure):
    """es_target_params"""

    _fields_ = [
        ("context", c_int32),
        ("window", c_int32),
        ("sinks", c_int32),
        ("kv", ctypes.c_int),
    ]


struct("es_target_params", CTargetParams)
_PARAMS, _TREE = POINTER(CTargetParams), POINTER(CTree)
_params_default = Function("es_target_params_default", _PARAMS)
_memory = Function("es_target_memory", HANDLE, _PARAMS, POINTER(SIZE))
_new = Function("es_target_new", HANDLE, _PARAMS, POINTER(HANDLE))
_free = Function("es_target_free", HANDLE, result=VOID)
_length = Function("es_target_length", HANDLE, result=c_int64)
_forward = Function("es_target_forward", HANDLE, _TREE, BUFFER, c_int32, BUFFER)
_prefill = Function("es_target_prefill", HANDLE, BUFFER, SIZE, BUFFER)
_commit = Function("es_target_commit", HANDLE, BUFFER, c_int32)
_truncate = Function("es_target_truncate", HANDLE, c_int64)
_run = Function(
    "es_round_run", HANDLE, HANDLE, ctypes.c_int, _TREE, BUFFER, POINTER(CRound)
)
_forward_many = Function(
    "es_target_forward_many", POINTER(HANDLE), POINTER(_TREE), c_int32, BUFFER
)
_set_taps = Function("es_target_set_taps", HANDLE, BUFFER, c_int32)
_attach = Function("es_target_attach", HANDLE, HANDLE)
_read_taps = Function("es_target_read_taps", HANDLE, c_int32, BUFFER)
_FIRST = np.zeros(1, np.int32)


class NativeRound(NamedTuple):
    """A round that ran in C: what was emitted, and what was committed for it."""

    tokens: list[int]  # emitted
    rows: list[int]  # tree rows that decided them, committed
    committed: list[int]  # the tokens of these rows
    is_last_drafted: bool  # whether the last token is accepted too, not drawn anew
    finish: str | None


class NativeTargetState:
    """es_target: KV rows and scratch. One thread at a time.

    Args:
        context: positions; ignored with a window.
        kv: one of KV_TYPES.
        window: 0, or positions every layer sees beside the first `sinks`.
    """

    def __init__(
        self,
        model: NativeModel,
        *,
        context: int,
        kv: str = "f16",
        window: int = 0,
        sinks: int = 0,
    ) -> None:
        self._handle = HANDLE()
        self._model = model  # freed after this
        params = target_params(context=context, kv=kv, window=window, sinks=sinks)
        _new(model.open_handle, byref(params), byref(self._handle))
        self._tree, self._round = CTree(), CRound()
        self._taps = self._rows = 0  # kept hidden states; rows of the last forward
        self._drafter: NativeDrafter | None = None  # kept while C knows it
        self._hidden = model.info.hidden

    @property
    def length(self) -> int:
        """Committed positions."""
        return int(_length(self.open_handle))

    @property
    def open_handle(self) -> ctypes.c_void_p:
        if self._drafter is not None:
            self._drafter.check_open()
        return self._own_handle()

    def _own_handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise UsageError("the target is closed")
        self._model.check_process()
        return self._handle

    def forward(
        self, tree: Tree, rows: NDArray[np.int32] | None, logits: NDArray[np.float32]
    ) -> None:
        """Logits of these rows, None: all, to (m, vocab) contiguous floats."""
        wanted = None if rows is None else int32(rows)
        n = tree.n if wanted is None else len(wanted)
        if len(logits) < n or not logits.flags.c_contiguous:
            raise UsageError(f"logits: expected {n} contiguous rows, got {len(logits)}")
        _forward(
            self.open_handle,
            byref(derived(tree)),
            address(wanted),
            n,
            address(logits),
        )
        self._rows = tree.n

    def prefill(
        self, tokens: NDArray[np.int32], logits: NDArray[np.float32] | None
    ) -> None:
        """Forwards and commits a chain; the last row's logits to (vocab,) floats."""
        ids = int32(tokens)
        _prefill(self.open_handle, address(ids), len(ids), address(logits))
        self._rows = (len(ids) - 1) % MAX_ROWS + 1

    def commit(self, rows: NDArray[np.int32]) -> None:
        kept = int32(rows)
        _commit(self.open_handle, address(kept), len(kept))

    def truncate(self, length: int) -> None:
        """ContextError, nothing changed, when rows to be seen are overwritten."""
        _truncate(self.open_handle, length)

    def run(
        self, session: NativeSession, kind: int, logits: NDArray[np.float32] | None
    ) -> NativeRound:
        """Begin, forward, finish and commit; logits of the tree's rows if wanted."""
        tree, out = self._tree, self._round
        _run(
            session.open_handle,
            self.open_handle,
            kind,
            byref(tree),
            None if logits is None else logits.ctypes.data,
            byref(out),
        )
        self._rows, n = tree.n, out.n
        tokens, rows = out.token[:n], out.row[:n]
        spelt, parent, last = tree.token[: tree.n], tree.parent[: tree.n], rows[-1]
        return NativeRound(
            tokens,
            rows,
            [spelt[row] for row in rows],
            any(
                parent[row] == last and spelt[row] == tokens[-1]
                for row in range(last + 1, tree.n)
            ),
            FINISH[out.finish],
        )

    def attach(self, drafter: NativeDrafter | None) -> None:
        """Tells a drafter of all that is committed and cut from now on; None: no more.

        The taps become those its head wants, and cannot be set meanwhile. UsageError
        for a drafter of another model, NativeError when their lengths differ.
        """
        _attach(self._own_handle(), None if drafter is None else drafter.open_handle)
        self._drafter = drafter
        self._taps = 0 if drafter is None else len(drafter.head.info.taps)
        self._rows = 0

    def set_taps(self, ids: NDArray[np.int32] | Sequence[int]) -> None:
        """Keeps these hidden states of every forward from now on.

        Their numbers are those of transformers: 0 is the embedding, `layers` comes
        after the final norm.
        """
        taps = int32(ids)
        _set_taps(self.open_handle, address(taps), len(taps))
        self._taps, self._rows = len(taps), 0

    def read_taps(self) -> NDArray[np.float32]:
        """The states kept (rows, taps, hidden) of the last forward, of its every row.

        Of a prefill its last rows: (n - 1) % MAX_ROWS + 1 of them.
        """
        out = np.empty((self._rows, self._taps, self._hidden), np.float32)
        _read_taps(self.open_handle, self._rows, address(out))
        return out

    def last_tree(self) -> Tree:
        """A copy of the tree of the last `run`."""
        return tree_from_c(self._tree)

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        handle, self._handle = getattr(self, "_handle", None), HANDLE()
        if handle:
            _free(handle)
        self._drafter = None

    def __del__(self) -> None:
        self.close()


class NativeBatch:
    """The next token of many conversations, at most MAX_ROWS, in one pass."""

    def __init__(self) -> None:
        self._trees = [CTree(n=1) for _ in range(MAX_ROWS)]
        for tree in self._trees:
            tree.parent[0] = -1
        self._pointers = (_TREE * MAX_ROWS)(*map(ctypes.pointer, self._trees))

    def step(
        self,
        targets: Sequence[NativeTargetState],
        tokens: Sequence[int],
        logits: NDArray[np.float32],
    ) -> None:
        """Forwards and commits tokens[i] in targets[i]; row i of logits is of it.

        Args:
            targets: distinct ones of one model.
            logits: (len(targets) or more, vocab), contiguous.
        """
        if len(logits) < len(targets) or not logits.flags.c_contiguous:
            raise UsageError(
                f"logits: expected {len(targets)} contiguous rows, got {len(logits)}"
            )
        for tree, token in zip(self._trees, tokens, strict=False):
            tree.token[0] = token
        handles = (HANDLE * len(targets))(*(t.open_handle for t in targets))
        _forward_many(handles, self._pointers, len(targets), address(logits))
        for target in targets:
            target._rows = 1
            target.commit(_FIRST)


def target_params(
    *, context: int, kv: str = "f16", window: int = 0, sinks: int = 0
) -> CTargetParams:
    """The struct; UsageError for a KV type that is none."""
    if kv not in KV_TYPES:
        raise UsageError(f"kv: expected {' or '.join(KV_TYPES)}, got {kv!r}")
    check_structs("es_target_params")
    params = CTargetParams()
    _params_default(byref(params))
    params.context, params.window, params.sinks = context, window, sinks
    params.kv = KV_TYPES.index(kv)
    return params


def target_memory(
    model: NativeModel,
    *,
    context: int,
    kv: str = "f16",
    window: int = 0,
    sinks: int = 0,
) -> int:
    """Bytes a target would take for KV rows and scratch; an open model will do."""
    params = target_params(context=context, kv=kv, window=window, sinks=sinks)
    bytes_ = SIZE()
    _memory(model.open_handle, byref(params), byref(bytes_))
    return bytes_.value
