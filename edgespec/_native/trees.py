"""Trees in C."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_uint64
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec._native.arrays import int32
from edgespec._native.library import Function, struct
from edgespec.errors import UsageError
from edgespec.tree.topology import MAX_ROWS, Tree


class CTree(Structure):
    """es_tree"""

    _fields_ = [
        ("n", c_int32),
        ("token", c_int32 * MAX_ROWS),
        ("parent", c_int32 * MAX_ROWS),
        ("rank", c_int32 * MAX_ROWS),
        ("depth", c_int32 * MAX_ROWS),
        ("mask", c_uint64 * MAX_ROWS),
        ("score", c_float * MAX_ROWS),
    ]


struct("es_tree", CTree)
_derive = Function("es_tree_derive", POINTER(CTree))


def tree_to_c(tree: Tree) -> CTree:
    """A tree without its mask, which C derives."""
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


def tree_from_c(tree: CTree) -> Tree:
    """A copy."""
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


def derived(tree: Tree) -> CTree:
    """A tree with the depths and mask C derives; UsageError naming a bad row."""
    out = tree_to_c(tree)
    _derive(byref(out))
    return out


def tree_derive(
    tokens: ArrayLike, parent: ArrayLike, rank: ArrayLike | None = None
) -> Tree:
    """Checks a tree and derives its depths and mask.

    Without ranks, siblings rank in row order. Raises UsageError naming the first row
    that breaks a rule.
    """
    tokens, parent = int32(tokens), int32(parent)
    if rank is None:
        rank = [int((parent[:i] == p).sum()) for i, p in enumerate(parent)]
    no_mask = np.empty((0, 0), np.bool_)
    return tree_from_c(
        derived(Tree(tokens, parent, int32(rank), np.zeros_like(tokens), no_mask))
    )
