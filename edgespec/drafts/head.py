"""A draft head in the C core: its weights, and what it keeps of one conversation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec._native import NativeDrafter, NativeHead

if TYPE_CHECKING:
    from edgespec._native import NativeModel, NativeSession, NativeTargetState


class HeadDraft:
    """Drafts for one target, whose model it is opened with and outlived by.

    Args:
        path: a GGUF file.
        source: what the user named, None for heads that come with model or edgespec.
        is_lender_ours: the model was opened for this head alone and is closed with it.

    Raises FormatError naming both sides for a head of another target.
    """

    def __init__(
        self,
        model: NativeModel,
        path: Path,
        *,
        source: Path | None = None,
        is_lender_ours: bool = False,
    ) -> None:
        self._head = NativeHead(model, path)
        try:
            self._drafter = NativeDrafter(self._head)
        except BaseException:
            self._head.close()
            raise
        self.info = info = self._head.info
        self.kind = info.kind  # eagle3 | eagle | medusa | model
        self.name = info.kind
        self.taps = info.taps  # hidden states it reads
        self.path = path
        self.source = source
        self.weight_bytes = info.weight_bytes
        self._lender = model if is_lender_ours else None
        if is_lender_ours:
            self.weight_bytes += model.info.weight_bytes
        self.state_bytes = self._drafter.memory  # keys and values, features, scratch

    @property
    def length(self) -> int:
        """Positions it was told of."""
        return self._drafter.length

    def follow(self, target: NativeTargetState) -> None:
        """Is kept in step with an empty target from now on, from nothing."""
        self.restart()
        target.attach(self._drafter)

    def restart(self) -> None:
        """Forgets what it was told of."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` positions."""
        self._drafter.truncate(length)

    def append(
        self, tokens: NDArray[np.int32], states: NDArray[np.float32] | None
    ) -> None:
        """Is told what a target committed that does not do so itself.

        states: (n, taps, hidden) at these tokens; None for a head without taps.
        """
        self._drafter.append(tokens, states)

    def join(self, session: NativeSession) -> None:
        """Drafts for a session's rounds from now on."""
        session.attach(self._drafter)

    def close(self) -> None:
        """Frees the memory; before the target's model. Idempotent."""
        self._drafter.close()
        self._head.close()
        if self._lender is not None:
            self._lender.close()
