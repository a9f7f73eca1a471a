"""Functions of the C core that are not API, compiled on their own for tests."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from ctypes import POINTER, byref, c_double, c_float, c_int32, c_int64, c_size_t
from pathlib import Path

import numpy as np

from edgespec._native import CTree
from edgespec.tree.topology import MAX_ROWS

NATIVE = Path(__file__).parent.parent / "native"
SOURCES = ["draft_ngram.c", "plan.c", "error.c"]


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "internals.so")
        subprocess.run(
            [
                *compiler,
                *("-std=c11", "-O2", "-ffp-contract=off", "-shared", "-fPIC"),
                f"-I{NATIVE / 'include'}",
                *(str(NATIVE / "src" / source) for source in SOURCES),
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
        ("es_error_message", ctypes.c_char_p, []),
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
