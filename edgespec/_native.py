"""The binding to the C core: the only file that touches it.

Plain ctypes over native/include/edgespec.h. Arrays are numpy; C reads them during a
call only. The interpreter lock is released while C runs. Statuses become exceptions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_float, c_int32, c_int64, c_uint64
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec.errors import (
    ContextError,
    EdgeSpecError,
    NativeError,
    UnsupportedError,
    UsageError,
)
from edgespec.tree.topology import MAX_ROWS, Tree

ABI = 2
ALL_TOKENS = -1  # penalty_window: the whole sequence


class CTree(ctypes.Structure):
    _fields_ = [
        ("n", c_int32),
        ("token", c_int32 * MAX_ROWS),
        ("parent", c_int32 * MAX_ROWS),
        ("rank", c_int32 * MAX_ROWS),
        ("depth", c_int32 * MAX_ROWS),
        ("mask", c_uint64 * MAX_ROWS),
        ("score", c_float * MAX_ROWS),
    ]


class CSampling(ctypes.Structure):
    _fields_ = [
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("penalty_window", c_int32),
        ("seed", c_uint64),
        ("bias_token", POINTER(c_int32)),
        ("bias_value", POINTER(c_float)),
        ("n_bias", ctypes.c_size_t),
    ]


class CVerdict(ctypes.Structure):
    _fields_ = [
        ("n", c_int32),
        ("token", c_int32 * (MAX_ROWS + 1)),
        ("row", c_int32 * (MAX_ROWS + 1)),
    ]


class CSessionParams(ctypes.Structure):
    _fields_ = [
        ("vocab", c_int32),
        ("context", c_int32),
        ("eos", POINTER(c_int32)),
        ("n_eos", c_int32),
        ("draft", ctypes.c_int),
        ("tree", ctypes.c_int),
        ("rows", c_int32),
        ("shape", POINTER(CTree)),
        ("ngram_capacity", ctypes.c_size_t),
        ("cost", POINTER(c_double)),
        ("cost_slope", c_double),
        ("kv_block", c_int32),
    ]


class CRound(ctypes.Structure):
    _fields_ = [
        ("n", c_int32),
        ("token", c_int32 * (MAX_ROWS + 1)),
        ("row", c_int32 * (MAX_ROWS + 1)),
        ("finish", ctypes.c_int),
    ]


class CStats(ctypes.Structure):
    _fields_ = [
        ("rounds", c_int64),
        ("plain_rounds", c_int64),
        ("tokens", c_int64),
        ("drafted", c_int64),
        ("accepted", c_int64),
        ("depth", c_int64),
        ("forward_seconds", c_double),
        ("draft_seconds", c_double),
    ]


_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "es_tree": CTree,
    "es_sampling": CSampling,
    "es_verdict": CVerdict,
    "es_session_params": CSessionParams,
    "es_round": CRound,
    "es_stats": CStats,
}

_P = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_I32 = POINTER(c_int32)
# name: (result, arguments); a result of None is an es_status and is checked by _call.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "es_version": (ctypes.c_char_p, []),
    "es_abi": (c_int32, []),
    "es_status_name": (ctypes.c_char_p, [ctypes.c_int]),
    "es_struct_size": (_SIZE, [ctypes.c_char_p]),
    "es_error_message": (ctypes.c_char_p, []),
    "es_tree_derive": (None, [POINTER(CTree)]),
    "es_sampling_default": (None, [POINTER(CSampling)]),
    "es_noise": (c_double, [c_uint64, c_uint64, c_int32]),
    "es_sample_process": (None, [POINTER(CSampling), _P, _SIZE, _P, _P, _SIZE]),
    "es_sample_draw": (None, [POINTER(CSampling), _P, _SIZE, c_uint64, _I32]),
    "es_verify_coupled": (
        None,
        [
            POINTER(CTree),
            _P,
            _SIZE,
            _SIZE,
            POINTER(CSampling),
            _P,
            _SIZE,
            c_uint64,
            _P,
            _P,
            POINTER(CVerdict),
        ],
    ),
    "es_verify_rejection": (
        None,
        [
            POINTER(CTree),
            _P,
            _P,
            _SIZE,
            ctypes.c_int,
            c_uint64,
            c_uint64,
            _P,
            POINTER(CVerdict),
        ],
    ),
    "es_kv_compact": (None, [_P, _SIZE, _SIZE, _SIZE, _SIZE, _P, c_int32]),
    "es_ring_new": (None, [c_int32, c_int32, c_int32, POINTER(_P)]),
    "es_ring_free": (ctypes.c_int, [_P]),
    "es_ring_length": (c_int64, [_P]),
    "es_ring_append": (None, [_P, _P, c_int32, _P]),
    "es_ring_commit": (None, [_P, _P, c_int32, _P, _P, _I32]),
    "es_ring_rollback": (None, [_P]),
    "es_ring_truncate": (None, [_P, c_int64]),
    "es_ring_visible": (None, [_P, c_int64, _P, _I32]),
    "es_session_params_default": (None, [POINTER(CSessionParams)]),
    "es_session_new": (None, [POINTER(CSessionParams), POINTER(_P)]),
    "es_session_free": (ctypes.c_int, [_P]),
    "es_session_append": (None, [_P, _P, _SIZE]),
    "es_session_truncate": (None, [_P, _SIZE]),
    "es_session_length": (_SIZE, [_P]),
    "es_session_tokens": (_I32, [_P]),
    "es_session_evicted": (None, [_P, c_uint64]),
    "es_generation_begin": (None, [_P, POINTER(CSampling), c_int64]),
    "es_round_propose": (None, [_P, POINTER(CTree)]),
    "es_round_begin": (None, [_P, ctypes.c_int, POINTER(CTree)]),
    "es_round_finish": (None, [_P, _P, _SIZE, _P, c_double, POINTER(CRound)]),
    "es_round_abandon": (None, [_P]),
    "es_session_stats": (None, [_P, POINTER(CStats)]),
    "es_session_cost": (None, [_P, POINTER(c_double)]),
    "es_cpu_features": (None, [ctypes.c_char_p, _SIZE]),
    "es_measure_read": (
        None,
        [_P, _SIZE, c_double, POINTER(c_double), POINTER(c_uint64)],
    ),
    "es_int8_kernel": (ctypes.c_char_p, [c_int32]),
    "es_measure_int8": (None, [c_int32, c_double, POINTER(c_double), _I32]),
}

_EXCEPTIONS: dict[int, type[EdgeSpecError]] = {
    1: UsageError,
    4: ContextError,
    6: UnsupportedError,
}
_MEMORY = 2


def library_path() -> Path:
    """Where the C library of this package lives."""
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return Path(__file__).with_name(f"libedgespec.{suffix}")


def _load() -> ctypes.CDLL:
    path = library_path()
    if not path.exists():
        raise NativeError(
            f"{path} is missing: the C core is not built. In a source tree run "
            "`cmake -S native -B build && cmake --build build`, else reinstall edgespec"
        )
    library = ctypes.CDLL(str(path))
    abi = library.es_abi()
    if abi != ABI:
        raise NativeError(
            f"{path}: expected ABI {ABI}, got {abi}; rebuild or reinstall"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = ctypes.c_int if result is None else result
        function.argtypes = arguments
    for name, structure in _STRUCTS.items():
        expected = ctypes.sizeof(structure)
        size = library.es_struct_size(name.encode())
        if size != expected:
            raise NativeError(
                f"{path}: {name}: expected {expected} bytes, got {size}; rebuild or "
                "reinstall"
            )
    return library


_library = _load()


def _call(name: str, *arguments: Any) -> None:
    """Calls a function that returns es_status; raises what the status stands for."""
    status = getattr(_library, name)(*arguments)
    if status:
        message = _library.es_error_message().decode("utf-8", "replace")
        if status == _MEMORY:
            raise MemoryError(message)
        raise _EXCEPTIONS.get(status, NativeError)(message)


def _int32(values: ArrayLike) -> NDArray[np.int32]:
    """One dimension of int32; values that would change on the way are refused."""
    array = np.asarray(values)
    if array.dtype != np.int32:
        narrow = array.astype(np.int32)
        if array.size and not np.array_equal(narrow, array):
            raise UsageError(f"expected 32-bit integers, got {array.dtype} {array}")
        array = narrow
    if array.ndim != 1:
        raise UsageError(f"expected one dimension, got shape {array.shape}")
    return np.ascontiguousarray(array)


def _at(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _rows(logits: NDArray[np.float32], what: str) -> tuple[NDArray[np.float32], int]:
    """Logits (rows, vocab) float32 with contiguous rows, copied only if they are not.

    Also their stride in floats, which numpy leaves undefined for a single row.
    """
    if logits.ndim != 2 or logits.dtype != np.float32:
        raise UsageError(
            f"{what}: expected a float32 array (rows, vocab), got {logits.dtype} "
            f"{logits.shape}"
        )
    n, vocab = logits.shape
    if logits.strides[1] != 4 or (
        n > 1 and (logits.strides[0] % 4 or logits.strides[0] < 4 * vocab)
    ):
        logits = np.array(logits, order="C")
    return logits, logits.strides[0] // 4 if n > 1 else vocab


def _allowed(
    allowed: NDArray[np.bool_] | NDArray[np.uint8] | None, rows: int, vocab: int
) -> NDArray[np.uint8] | None:
    """Bool (rows, vocab), or bits packed little-endian (rows, (vocab + 7) / 8)."""
    if allowed is None:
        return None
    given = np.atleast_2d(allowed)
    width = vocab if given.dtype == np.bool_ else (vocab + 7) // 8
    if given.shape != (rows, width) or given.dtype not in (np.bool_, np.uint8):
        raise UsageError(
            f"allowed: expected {rows} rows of {vocab} tokens, bool or packed in "
            f"uint8; got an array of {allowed.dtype} {allowed.shape}"
        )
    if given.dtype == np.bool_:
        return np.packbits(given.astype(np.bool_), axis=-1, bitorder="little")
    return np.ascontiguousarray(given, dtype=np.uint8)


def version() -> str:
    """Version of the C library."""
    return str(_library.es_version().decode())


# ---- trees --------------------------------------------------------------------------


def _tree_to_c(tree: Tree) -> CTree:
    if not 1 <= tree.n <= MAX_ROWS:
        raise UsageError(f"tree: expected 1 to {MAX_ROWS} rows, got {tree.n}")
    out = CTree()
    out.n = tree.n
    for name, values in (
        ("token", tree.tokens),
        ("parent", tree.parent),
        ("rank", tree.rank),
        ("depth", tree.depth),
    ):
        if len(values) != tree.n:
            raise UsageError(f"tree: {name}: expected {tree.n} rows, got {len(values)}")
        np.ctypeslib.as_array(getattr(out, name))[: tree.n] = values
    np.ctypeslib.as_array(out.score)[: tree.n] = 1.0
    return out


def _tree_from_c(tree: CTree) -> Tree:
    n = tree.n
    bits = np.ctypeslib.as_array(tree.mask)[:n, None]
    shifts = np.arange(n, dtype=np.uint64)[None, :]

    def copy(values: Any) -> NDArray[np.int32]:
        return np.array(np.ctypeslib.as_array(values)[:n])

    return Tree(
        tokens=copy(tree.token),
        parent=copy(tree.parent),
        rank=copy(tree.rank),
        depth=copy(tree.depth),
        mask=(bits >> shifts & np.uint64(1)).astype(np.bool_),
    )


def tree_derive(
    tokens: ArrayLike, parent: ArrayLike, rank: ArrayLike | None = None
) -> Tree:
    """Checks a tree and derives its depths and mask.

    Without ranks, siblings rank in row order. Raises UsageError naming the first row
    that breaks a rule.
    """
    tokens, parent = _int32(tokens), _int32(parent)
    if rank is None:
        rank = [int((parent[:i] == p).sum()) for i, p in enumerate(parent)]
    no_mask = np.empty((0, 0), np.bool_)
    tree = Tree(tokens, parent, _int32(rank), np.zeros_like(tokens), no_mask)
    c_tree = _tree_to_c(tree)
    _call("es_tree_derive", byref(c_tree))
    return _tree_from_c(c_tree)


# ---- sampling -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampleParams:
    """es_sampling: every field resolved, nothing left to a default elsewhere."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = ALL_TOKENS
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()


def _sampling_to_c(params: SampleParams) -> tuple[CSampling, tuple[Any, ...]]:
    """The struct and the arrays it points into, which have to outlive it."""
    if not 0 <= params.seed < 1 << 64:
        raise UsageError(f"seed: expected an unsigned 64-bit number, got {params.seed}")
    n = len(params.logit_bias)
    tokens = (c_int32 * n)(*(int(token) for token, _ in params.logit_bias))
    values = (c_float * n)(*(float(value) for _, value in params.logit_bias))
    out = CSampling(
        temperature=params.temperature,
        top_k=min(params.top_k, 2**31 - 1),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        penalty_window=min(params.penalty_window, 2**31 - 1),
        seed=params.seed,
        bias_token=ctypes.cast(tokens, _I32),
        bias_value=ctypes.cast(values, POINTER(c_float)),
        n_bias=n,
    )
    return out, (tokens, values)


def noise(seed: int, index: int, token: int) -> float:
    """Gumbel noise of one token at one index of the sequence."""
    return float(_library.es_noise(seed, index, token))


def sample_process(
    params: SampleParams,
    history: ArrayLike,
    logits: NDArray[np.float32],
    allowed: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
) -> NDArray[np.float32]:
    """A processed copy of one row of logits (vocab,); removed tokens are -inf.

    history is the sequence up to and including the token the row was computed from.
    """
    row = np.array(logits, dtype=np.float32)
    past = _int32(history)
    bits = _allowed(allowed, 1, len(row))
    sampling, keep = _sampling_to_c(params)
    _call(
        "es_sample_process",
        byref(sampling),
        _at(past),
        len(past),
        _at(bits),
        _at(row),
        len(row),
    )
    del keep
    return row


def sample_draw(
    params: SampleParams, processed: NDArray[np.float32], index: int
) -> int:
    """The token drawn from a processed row at this index of the sequence."""
    row = np.ascontiguousarray(processed, dtype=np.float32)
    sampling, keep = _sampling_to_c(params)
    token = c_int32()
    _call("es_sample_draw", byref(sampling), _at(row), len(row), index, byref(token))
    del keep
    return token.value


# ---- verification -------------------------------------------------------------------


class Verdict(NamedTuple):
    """Emitted tokens and the tree row that decided each."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]


def _verdict(out: CVerdict) -> Verdict:
    return Verdict(
        np.array(out.token[: out.n], np.int32), np.array(out.row[: out.n], np.int32)
    )


def verify_coupled(
    tree: Tree,
    logits: NDArray[np.float32],
    params: SampleParams,
    history: ArrayLike,
    index: int,
    allowed: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
) -> Verdict:
    """One rule for every temperature; logits (n, vocab) are raw and stay unchanged."""
    logits, stride = _rows(logits, "logits")
    if len(logits) != tree.n:
        raise UsageError(f"logits: expected {tree.n} rows, got {len(logits)}")
    vocab = logits.shape[1]
    past = _int32(history)
    bits = _allowed(allowed, tree.n, vocab)
    scratch = np.empty(vocab, np.float32)
    sampling, keep = _sampling_to_c(params)
    out = CVerdict()
    _call(
        "es_verify_coupled",
        byref(_tree_to_c(tree)),
        _at(logits),
        stride,
        vocab,
        byref(sampling),
        _at(past),
        len(past),
        index,
        _at(bits),
        _at(scratch),
        byref(out),
    )
    del keep
    return _verdict(out)


def verify_rejection(
    tree: Tree,
    p: NDArray[np.float32],
    q: NDArray[np.float32],
    seed: int,
    index: int,
    *,
    replacement: bool = False,
) -> Verdict:
    """For children sampled from q; p and q (n, vocab) are probabilities."""
    p = np.ascontiguousarray(p, dtype=np.float32)
    q = np.ascontiguousarray(q, dtype=np.float32)
    if p.ndim != 2 or p.shape != q.shape or len(p) != tree.n:
        raise UsageError(
            f"p, q: expected two arrays ({tree.n}, vocab), got {p.shape} and {q.shape}"
        )
    vocab = p.shape[1]
    scratch = np.empty(2 * vocab, np.float32)
    out = CVerdict()
    _call(
        "es_verify_rejection",
        byref(_tree_to_c(tree)),
        _at(p),
        _at(q),
        vocab,
        int(replacement),
        seed,
        index,
        _at(scratch),
        byref(out),
    )
    return _verdict(out)


# ---- KV bookkeeping -----------------------------------------------------------------


def kv_compact(cache: NDArray[Any], first: int, path: ArrayLike) -> None:
    """Moves rows first + path[i] to first + i, in place.

    cache (..., rows, row): C-contiguous; every leading index is a block of its own.
    """
    if not cache.flags.c_contiguous or cache.ndim < 2:
        raise UsageError(
            f"cache: expected a C-contiguous array (..., rows, row), got {cache.shape}"
        )
    rows = _int32(path)
    if len(rows) and first + int(rows.max()) >= cache.shape[-2]:
        raise UsageError(
            f"path: expected rows below {cache.shape[-2] - first}, got {rows.max()}"
        )
    row_bytes = cache.shape[-1] * cache.itemsize
    block = cache.shape[-2] * row_bytes
    _call(
        "es_kv_compact",
        _at(cache),
        int(np.prod(cache.shape[:-2])),
        block,
        row_bytes,
        first,
        _at(rows),
        len(rows),
    )


class Ring:
    """A windowed ring of KV slots: which slot each row lives in. Owns no KV memory."""

    def __init__(self, n_slots: int, sinks: int = 0, window: int = 0) -> None:
        self._handle = _P()
        _call("es_ring_new", n_slots, sinks, window, byref(self._handle))
        self.n_slots = n_slots

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _library.es_ring_free(self._handle)

    def __len__(self) -> int:
        return int(_library.es_ring_length(self._handle))

    def append(self, depth: ArrayLike) -> NDArray[np.int32]:
        """Places rows of these depths behind the committed ones; their slots."""
        depths = _int32(depth)
        slots = np.empty(len(depths), np.int32)
        _call("es_ring_append", self._handle, _at(depths), len(depths), _at(slots))
        return slots

    def commit(self, path: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Keeps these rows of the last append; slot moves (from, to) owed, in order."""
        rows = _int32(path)
        source, target = np.empty_like(rows), np.empty_like(rows)
        n = c_int32()
        _call(
            "es_ring_commit",
            self._handle,
            _at(rows),
            len(rows),
            _at(source),
            _at(target),
            byref(n),
        )
        return source[: n.value], target[: n.value]

    def rollback(self) -> None:
        """Drops the last append."""
        _call("es_ring_rollback", self._handle)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions."""
        _call("es_ring_truncate", self._handle, length)

    def visible(self, position: int) -> NDArray[np.int32]:
        """Slots of committed positions visible from `position`, in position order."""
        slots = np.empty(self.n_slots, np.int32)
        n = c_int32()
        _call("es_ring_visible", self._handle, position, _at(slots), byref(n))
        return slots[: n.value]


# ---- session ------------------------------------------------------------------------

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


class NativeSession:
    """The sequence, the draft and the two halves of the round.

    Args:
        draft: "none" or "ngram".
        tree: "auto" (rows by cost), "best" (always the best `rows`), or a Tree whose
            parents and ranks are the static shape.
        cost: c(n) for n in 0..MAX_ROWS, 0 = unknown; nothing is learned then.
        kv_block: 0, or trees never straddle a multiple of this many KV rows.
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
    ) -> None:
        self._handle = _P()
        self._n = 0  # rows of the open round
        self.vocab = vocab
        drafts = {"none": 0, "ngram": 1}
        modes = {"auto": 0, "best": 1}
        if draft not in drafts:
            raise UsageError(f"draft: expected one of {sorted(drafts)}, got {draft!r}")
        if isinstance(tree, str) and tree not in modes:
            raise UsageError(f"tree: expected one of {sorted(modes)}, got {tree!r}")
        params = CSessionParams()
        _call("es_session_params_default", byref(params))
        params.vocab = vocab
        params.context = context
        ids = (c_int32 * len(eos))(*eos)
        params.eos = ctypes.cast(ids, _I32)
        params.n_eos = len(eos)
        params.draft = drafts[draft]
        params.rows = rows
        params.ngram_capacity = ngram_capacity
        params.kv_block = kv_block
        if isinstance(tree, str):
            params.tree = modes[tree]
        else:
            params.tree = 2
            shape = _tree_to_c(tree)
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
        _call("es_session_new", byref(params), byref(self._handle))

    def close(self) -> None:
        """Frees the handle; the session is unusable afterwards. Idempotent."""
        handle, self._handle = getattr(self, "_handle", None), _P()
        if handle:
            _library.es_session_free(handle)

    def __del__(self) -> None:
        self.close()

    def _session(self) -> ctypes.c_void_p:
        if not self._handle:
            raise UsageError("the session is closed")
        return self._handle

    @property
    def length(self) -> int:
        return int(_library.es_session_length(self._session()))

    @property
    def tokens(self) -> NDArray[np.int32]:
        """A copy of the sequence."""
        n = self.length
        if n == 0:
            return np.empty(0, np.int32)
        return np.array(
            np.ctypeslib.as_array(_library.es_session_tokens(self._handle), (n,))
        )

    def append(self, tokens: ArrayLike) -> None:
        """Adds tokens to the sequence; ContextError when they do not fit."""
        values = _int32(tokens)
        _call("es_session_append", self._session(), _at(values), len(values))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        _call("es_session_truncate", self._session(), length)

    def evicted(self, n: int) -> None:
        """Notes that n tokens were dropped from the front of the conversation."""
        _call("es_session_evicted", self._session(), n)

    def begin_generation(self, params: SampleParams, max_new: int) -> None:
        """Starts a reply of at most max_new (1 or more) tokens."""
        sampling, keep = _sampling_to_c(params)
        _call("es_generation_begin", self._session(), byref(sampling), max_new)
        del keep

    def propose(self, tree: Tree) -> None:
        """Gives the tree of the next DRAFT round, in place of the session's own."""
        _call("es_round_propose", self._session(), byref(_tree_to_c(tree)))

    def begin(self, kind: int = DRAFT) -> Tree:
        """Opens a round; the tree to forward."""
        tree = CTree()
        _call("es_round_begin", self._session(), kind, byref(tree))
        self._n = tree.n
        return _tree_from_c(tree)

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
        logits, stride = _rows(np.atleast_2d(logits), "logits")
        if n and logits.shape != (n, self.vocab):
            raise UsageError(
                f"logits: expected shape ({n}, {self.vocab}), got {logits.shape}"
            )
        bits = _allowed(allowed, n, self.vocab) if n else None
        out = CRound()
        _call(
            "es_round_finish",
            self._session(),
            _at(logits),
            stride,
            _at(bits),
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
        _call("es_round_abandon", self._session())
        self._n = 0

    def stats(self) -> NativeStats:
        """Counts and times of the generation in progress or last finished."""
        out = CStats()
        _call("es_session_stats", self._session(), byref(out))
        return NativeStats(*(getattr(out, name) for name, *_ in CStats._fields_))

    def cost(self) -> NDArray[np.float64]:
        """Learned seconds of a forward over n rows (MAX_ROWS + 1,), 0 = unmeasured."""
        out = np.zeros(MAX_ROWS + 1, np.float64)
        _call(
            "es_session_cost",
            self._session(),
            out.ctypes.data_as(POINTER(c_double)),
        )
        return out


# ---- machine ------------------------------------------------------------------------


def cpu_features() -> list[str]:
    """Vector features of this processor that the library knows of."""
    out = ctypes.create_string_buffer(256)
    _call("es_cpu_features", out, len(out))
    return out.value.decode().split()


def int8_kernels() -> list[str]:
    """The int8 kernels this processor runs, best first."""
    names: list[str] = []
    while (name := _library.es_int8_kernel(len(names))) is not None:
        names.append(name.decode())
    return names


def measure_read(data: NDArray[np.uint64], seconds: float) -> tuple[float, int]:
    """Bytes per second of reading data again and again, and the XOR of its words."""
    rate, checksum = c_double(), c_uint64()
    _call(
        "es_measure_read",
        _at(data),
        data.nbytes,
        seconds,
        byref(rate),
        byref(checksum),
    )
    return rate.value, checksum.value


def measure_int8(kernel: int, seconds: float) -> tuple[float, int]:
    """Multiply-accumulates per second of a kernel of int8_kernels(), and its sum."""
    rate, checksum = c_double(), c_int32()
    _call("es_measure_int8", kernel, seconds, byref(rate), byref(checksum))
    return rate.value, checksum.value
