"""What a draft outside the C core has to offer the engine."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.tree.topology import Tree


class Drafter(Protocol):
    """Proposes the tree of the next round, in place of the core's own draft."""

    name: str  # as shown in the statistics

    def propose(self, sequence: NDArray[np.int32]) -> Tree | None:
        """A tree whose root is the sequence's last token; None for a plain round.

        It is clipped to the room left in the context and in the reply. Lossless
        whatever it holds, as long as it is a function of the sequence.
        """
        ...
