"""Token trees: parents and ranks are the record, depth and mask derive from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tree:
    """Row 0 is the root: the last emitted token, not yet in KV. Parents come first."""

    tokens: NDArray[np.int32]  # (n,)
    parent: NDArray[np.int32]  # (n,), parent[0] == -1
    rank: NDArray[np.int32]  # (n,), among the parent's children, best first
    depth: NDArray[np.int32]  # (n,), root 0
    mask: NDArray[np.bool_]  # (n, n), true iff the column is above or is the row

    @property
    def n(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return bool((self.parent == np.arange(self.n) - 1).all())


def chain(tokens: NDArray[np.int32]) -> Tree:
    """A tree without branches; may be longer than MAX_ROWS (prefill)."""
    n = len(tokens)
    index = np.arange(n, dtype=np.int32)
    return Tree(
        tokens=np.ascontiguousarray(tokens, dtype=np.int32),
        parent=index - 1,
        rank=np.zeros(n, dtype=np.int32),
        depth=index,
        mask=np.tri(n, dtype=np.bool_),
    )
