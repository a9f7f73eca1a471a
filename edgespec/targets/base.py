"""What a verifying target has to offer the session: one protocol, every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UsageError
from edgespec.tree.topology import Tree

if TYPE_CHECKING:
    from edgespec._native import NativeRound, NativeSession
    from edgespec.drafts import AnyHead


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can do, as found out at load."""

    tree: bool  # verifies branching trees; otherwise chains only
    taps: tuple[int, ...]  # hidden_states indices it can return
    window: int  # positions a row sees beside the sinks; 0: all before it
    snapshot: bool  # saves and restores its KV
    row_invariant: bool  # a row's logits do not depend on the rows beside it, by probe
    kv_block: int = 0  # or row invariance needs trees inside blocks of so many KV rows
    sinks: int = 0  # first positions that stay visible beside a window
    rounds: bool = False  # runs whole rounds itself: a RoundTarget
    heads: bool = False  # keeps a draft head in step: a HeadTarget


def check_tokens(tokens: NDArray[np.int32], vocab: int) -> None:
    """UsageError without tokens, or naming the first that no vocabulary row is for."""
    if len(tokens) == 0:
        raise UsageError("expected at least one token")
    outside = (tokens < 0) | (tokens >= vocab)
    if outside.any():
        raise UsageError(f"token {int(tokens[outside][0])}: expected 0 to {vocab - 1}")


class Target(Protocol):
    """A model with its KV cache. One conversation at a time, one thread at a time.

    Rows are forwarded behind the `length` committed ones and stay provisional until
    `commit` or the next `forward`, which drops them.
    """

    name: str  # "native", "onnx", "llamacpp"
    vocab: int
    context: int  # KV rows; with a window, positions
    capabilities: Capabilities

    @property
    def length(self) -> int:
        """Committed KV rows."""
        ...

    def forward(
        self, tree: Tree, logit_rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Logits (m, vocab) float32 of the rows asked for (default all, ascending).

        The array may be reused by the next forward. Raises ContextError when
        length + tree.n exceeds the context.
        """
        ...

    def prefill(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Forwards a chain and commits it; logits (vocab,) of the last row."""
        ...

    def commit(self, rows: NDArray[np.int32]) -> None:
        """Keeps these rows (ascending) of the last forward, drops the others."""
        ...

    def truncate(self, length: int) -> None:
        """Keeps the first `length` committed rows.

        Raises ContextError, nothing changed, when a window has overwritten rows that
        the next one must see. 0 always works.
        """
        ...

    def close(self) -> None:
        """Frees memory; the target is unusable afterwards."""
        ...


class HeadTarget(Target, Protocol):
    """A target that gives a draft head the hidden states of what it commits."""

    def attach(self, head: AnyHead | None) -> None:
        """Keeps this head in step with the committed rows from now on; None: no one.

        Where another was, or none, both begin anew: no rows are committed afterwards.
        """
        ...


class RoundTarget(HeadTarget, Protocol):
    """A target in C, which needs no Python between the halves of a round."""

    def run_round(
        self, session: NativeSession, kind: int, *, keeps_logits: bool
    ) -> tuple[NativeRound, NDArray[np.float32] | None]:
        """Begins, forwards, finishes and commits; logits (n, vocab) if kept.

        The target holds the session's sequence less its last token.
        """
        ...

    def last_tree(self) -> Tree:
        """The tree of the last `run_round`."""
        ...
