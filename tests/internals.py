"""Functions of the C core that are not API, compiled on their own for tests."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_bool,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
)
from pathlib import Path
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from edgespec._native import CTree, SampleParams
from edgespec._native import library as binding
from edgespec._native.sampling import CSampling, sampling_to_c
from edgespec.tree.topology import MAX_ROWS

NATIVE = Path(__file__).parent.parent / "native"
SOURCES = [
    *("draft_ngram", "draft_grow", "draft_merge", "plan", "session", "round", "verify"),
    *("sample", "philox", "tree", "alloc", "error"),
]


SAY = CFUNCTYPE(None, POINTER(c_int32), c_int32, POINTER(c_float))
TOLD = CFUNCTYPE(c_int64)


class CRequest(ctypes.Structure):
    """es_grow_request"""

    _fields_ = [
        ("root", c_int32),
        ("rows", c_int32),
        ("depth", c_int32),
        ("floor", c_float),
        ("price", c_double),
        ("vocab", c_int32),
        ("sampling", POINTER(CSampling)),
        ("index", c_uint64),
        ("is_blind", c_bool),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "internals.so")
        subprocess.run(
            [
                *compiler,
                *("-std=c11", "-O2", "-ffp-contract=off", "-shared", "-fPIC"),
                *(f"-I{NATIVE / name}" for name in ("include", "src")),
                *(str(NATIVE / "src" / f"{source}.c") for source in SOURCES),
                str(NATIVE / "tests" / "scripted_drafter.c"),
                *("-lm", "-o", str(path)),
            ],
            check=True,
        )
        lib = ctypes.CDLL(str(path))
    handle, tree, floats = ctypes.c_void_p, POINTER(CTree), POINTER(c_double)
    tokens, plan = POINTER(c_int32), POINTER(CPlan)
    for name, result, arguments in [
        ("es_ngram_new", c_int32, [c_size_t, POINTER(handle)]),
        ("es_ngram_free", None, [handle]),
        ("es_ngram_add", None, [handle, tokens, c_size_t]),
        ("es_ngram_break", None, [handle, tokens, c_size_t]),
        ("es_ngram_propose", None, [handle, c_int32, c_float, tree]),
        ("es_ngram_fill", None, [handle, tree, tree]),
        ("es_ngram_learn", None, [handle, tokens, c_int32]),
        ("es_plan_init", None, [plan, floats, c_double]),
        ("es_plan_floor", c_float, [plan]),
        ("es_plan_choose", c_int32, [plan, tree]),
        ("es_plan_learn", None, [plan, tree, c_int32, c_double, c_double]),
        ("es_plan_cost", c_double, [plan, c_int32]),
        ("es_plan_measured", None, [plan, floats]),
        ("es_plan_wants_head", c_bool, [plan, tree]),
        ("es_plan_level_price", c_double, [plan]),
        ("es_plan_head_ran", None, [plan, c_int32]),
        ("es_merge", None, [tree, tree, c_int32, c_float, tree]),
        ("scripted_new", handle, [c_int32, tokens, c_int32, c_int32, SAY, TOLD]),
        ("scripted_free", None, [handle]),
        ("scripted_set", None, [handle, c_int32, c_int32]),
        ("scripted_passes", c_int32, [handle]),
        ("es_drafter_net", handle, [handle]),
        ("es_grow_new", c_int32, [handle, POINTER(handle)]),
        ("es_grow_free", None, [handle]),
        ("es_grow_best", c_int32, [handle, POINTER(CRequest), tree]),
        ("es_grow_shape", c_int32, [handle, POINTER(CRequest), tree, tree]),
        ("es_grow_passes", c_int32, [handle]),
        ("es_grow_learn", None, [handle, tokens, c_int32]),
        ("es_grow_forget", None, [handle]),
        ("es_error_message", ctypes.c_char_p, []),
        ("es_struct_size", c_size_t, [ctypes.c_char_p]),
    ]:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _ids(tokens) -> tuple[ctypes.Array, int]:
    return (c_int32 * max(1, len(tokens)))(*(int(t) for t in tokens)), len(tokens)


class Ngram:
    def __init__(self, capacity: int = 1 << 12) -> None:
        self.handle = ctypes.c_void_p()
        status = library().es_ngram_new(capacity, byref(self.handle))
        if status != 0:
            raise ValueError(library().es_error_message().decode())

    def __del__(self) -> None:
        library().es_ngram_free(self.handle)

    def add(self, tokens) -> None:
        library().es_ngram_add(self.handle, *_ids(tokens))

    def cut(self, tail) -> None:
        library().es_ngram_break(self.handle, *_ids(tail))

    def learn(self, tokens) -> None:
        library().es_ngram_learn(self.handle, *_ids(tokens))

    def propose(self, rows: int = MAX_ROWS, floor: float = 0.0) -> CTree:
        tree = CTree()
        library().es_ngram_propose(self.handle, rows, floor, byref(tree))
        return tree

    def fill(self, parent, rank) -> CTree:
        shape, tree = CTree(n=len(parent)), CTree()
        shape.parent[: len(parent)] = list(parent)
        shape.rank[: len(rank)] = list(rank)
        library().es_ngram_fill(self.handle, byref(shape), byref(tree))
        return tree


def paths(tree: CTree) -> dict[tuple[int, ...], float]:
    """Score by the tokens from the root (left out) to a row."""
    found: dict[tuple[int, ...], float] = {}
    rows: list[tuple[int, ...]] = [()]
    for i in range(1, tree.n):
        rows.append((*rows[tree.parent[i]], tree.token[i]))
        assert rows[i] not in found
        found[rows[i]] = tree.score[i]
    return found


class ScriptedDrafter:
    """What a head says is a function of the path from the root on.

    Args:
        says: path, the root first -> logits (len(ids) or vocab,).
        told: the positions it has been told of.
        ids: of the target, ascending, by draft token.
    """

    def __init__(
        self,
        says: Callable[[list[int]], NDArray[np.float32]],
        vocab: int,
        *,
        told: Callable[[], int] = lambda: 0,
        ids: Sequence[int] | None = None,
        depth: int = 0,
        width: int = 8,
    ) -> None:
        def say(path, n, out) -> None:
            row = says(path[:n])
            np.ctypeslib.as_array(out, (len(row),))[:] = row

        self._say, self._told = SAY(say), TOLD(told)
        self._ids = None if ids is None else (c_int32 * len(ids))(*ids)
        self.open_handle = ctypes.c_void_p(
            library().scripted_new(
                vocab if ids is None else len(ids),
                self._ids,
                depth,
                width,
                self._say,
                self._told,
            )
        )

    def __del__(self) -> None:
        library().scripted_free(self.open_handle)

    def check_open(self) -> None:
        pass

    def set(self, *, is_ready: bool = True, fails_at: int = 0) -> None:
        """fails_at: the pass of a draft that fails, the first is 1; 0: none."""
        library().scripted_set(self.open_handle, is_ready, fails_at)

    @property
    def passes(self) -> int:
        """Of the last draft; it has ended."""
        passes = library().scripted_passes(self.open_handle)
        assert passes >= 0
        return int(passes)


class Grow:
    def __init__(self, drafter: ScriptedDrafter, target_vocab: int) -> None:
        self.handle = ctypes.c_void_p()
        self.drafter = drafter
        self._vocab = target_vocab
        net = library().es_drafter_net(drafter.open_handle)
        if library().es_grow_new(net, byref(self.handle)) != 0:
            raise ValueError(library().es_error_message().decode())

    def __del__(self) -> None:
        library().es_grow_free(self.handle)

    def _request(
        self,
        *,
        root: int = 0,
        rows: int = MAX_ROWS,
        depth: int = MAX_ROWS,
        floor: float = 0.0,
        price: float = 0.0,
        params: SampleParams = SampleParams(temperature=0.0),  # noqa: B008
        index: int = 0,
        is_blind: bool = False,
    ) -> CRequest:
        sampling, self._keep = sampling_to_c(params)
        self._sampling = sampling
        return CRequest(
            root,
            rows,
            depth,
            floor,
            price,
            self._vocab,
            ctypes.pointer(sampling),
            index,
            is_blind,
        )

    def best(self, **request) -> CTree:
        tree = CTree()
        _check(
            library().es_grow_best(
                self.handle, byref(self._request(**request)), byref(tree)
            )
        )
        return tree

    def shape(self, parent, rank, **request) -> CTree:
        shape, tree = CTree(n=len(parent)), CTree()
        shape.parent[: len(parent)] = list(parent)
        shape.rank[: len(rank)] = list(rank)
        _check(library().es_tree_derive(byref(shape)))
        _check(
            library().es_grow_shape(
                self.handle, byref(self._request(**request)), byref(shape), byref(tree)
            )
        )
        return tree

    def learn(self, tokens) -> None:
        library().es_grow_learn(self.handle, *_ids(tokens))

    @property
    def passes(self) -> int:
        return library().es_grow_passes(self.handle)


def _check(status: int) -> None:
    if status != 0:
        raise ValueError(library().es_error_message().decode())


def merge(a: CTree, b: CTree, rows: int = MAX_ROWS, floor: float = 0.0) -> CTree:
    tree = CTree()
    library().es_merge(byref(a), byref(b), rows, floor, byref(tree))
    return tree


@contextmanager
def bound() -> Iterator[None]:
    """Sessions of the binding are those of `library`, and take scripted drafters."""
    functions = binding.FUNCTIONS.values()
    found = [function._found for function in functions]
    for function in functions:
        function._found = None
    try:
        with mock.patch.object(binding, "load", library):
            yield
    finally:
        for function, before in zip(functions, found, strict=True):
            function._found = before


class CPlan(ctypes.Structure):
    """Opaque here: more room than struct es_plan takes."""

    _fields_ = [("bytes", c_int64 * (8 * (MAX_ROWS + 1) + 64))]


class Plan:
    def __init__(self, cost=None, slope: float = 0.05) -> None:
        self.state = CPlan()
        given = None if cost is None else (c_double * (MAX_ROWS + 1))(0, *cost)
        library().es_plan_init(byref(self.state), given, slope)

    def choose(self, tree: CTree) -> int:
        return library().es_plan_choose(byref(self.state), byref(tree))

    def learn(self, tree: CTree, n_tokens: int, forward=0.0, draft=0.0) -> None:
        args = (byref(self.state), byref(tree), n_tokens, forward, draft)
        library().es_plan_learn(*args)

    def wants_head(self, tree: CTree) -> bool:
        return library().es_plan_wants_head(byref(self.state), byref(tree))

    def head_ran(self, passes: int) -> None:
        library().es_plan_head_ran(byref(self.state), passes)

    def level_price(self) -> float:
        return library().es_plan_level_price(byref(self.state))

    def floor(self) -> float:
        return library().es_plan_floor(byref(self.state))

    def cost(self) -> np.ndarray:
        """c(1) .. c(MAX_ROWS)"""
        lib = library()
        rows = range(1, MAX_ROWS + 1)
        return np.array([lib.es_plan_cost(byref(self.state), n) for n in rows])

    def measured(self) -> np.ndarray:
        out = (c_double * (MAX_ROWS + 1))()
        library().es_plan_measured(byref(self.state), out)
        return np.array(out[1:])


def chain(scores) -> CTree:
    """A chain whose rows have these scores."""
    tree = CTree(n=1 + len(scores))
    tree.score[0], tree.parent[0] = 1.0, -1
    for i, score in enumerate(scores, start=1):
        tree.parent[i], tree.depth[i], tree.score[i] = i - 1, i, score
    return tree
