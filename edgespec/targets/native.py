"""Our own engine as the verifying target: a GGUF file, the weights packed for trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec import packed_copy
from edgespec._native import (
    NativeModel,
    NativeRound,
    NativeSession,
    NativeTargetState,
    target_memory,
)
from edgespec.drafts.head import HeadDraft
from edgespec.fitting import Need, check_fits
from edgespec.progress import Progress, silent
from edgespec.targets.base import Capabilities, check_tokens
from edgespec.tree.topology import MAX_ROWS, Tree

if TYPE_CHECKING:
    from edgespec.drafts import AnyHead


class NativeTarget:
    """A GGUF file, whole, in shards or packed, in the C engine.

    A row's logits are a function of its ancestors alone: the same bits in any tree, in
    prefill and decoding, with any number of threads, on any processor.

    Args:
        path: the GGUF file, the first one of a sharded model.
        context: positions of prompt and reply; with a window they run to the model's
            own limit instead.
        kv: "f16" or "int8", how keys and values are kept.
        window: positions every layer sees beside the first `sinks`; None: all.
        use_mmap: map the file instead of reading it into memory.
        lock: keep the weights from being swapped out; OutOfMemoryError when refused.
        cpu: kernel variant; None: $EDGESPEC_CPU, else the best for this processor.
        packed: where a packed copy of the file may be kept, None: nowhere.

    Raises FormatError for a damaged file, UnsupportedError for an architecture or type
    the engine does not know, OutOfMemoryError before anything large is taken.
    """

    name = "native"

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        threads: int,
        kv: str = "f16",
        window: int | None = None,
        sinks: int = 0,
        use_mmap: bool = True,
        lock: bool = False,
        cpu: str | None = None,
        packed: Path | None = None,
        progress: Progress = silent,
    ) -> None:
        self.path = Path(path)
        self.threads = threads

        def opened(file: Path) -> NativeModel:
            return NativeModel(
                file, threads=threads, use_mmap=use_mmap, lock=lock, cpu=cpu
            )

        self._model = packed_copy.opened(self.path, packed, opened)
        self.info = info = self._model.info
        self.vocab = info.vocab
        shape = {"window": window or 0, "sinks": sinks if window else 0}
        self.context = info.max_position if window else context

        def need(context: int, kv: str) -> Need:
            return Need(
                weights=info.weight_bytes,
                file=0 if use_mmap or info.is_packed else info.file_bytes,
                context=target_memory(self._model, context=context, kv=kv, **shape),
            )

        check_fits(need, self.path, self.context, kv, is_windowed=bool(window))
        packed_copy.load(self._model, self.path, packed, progress)
        self._state = NativeTargetState(
            self._model, context=self.context, kv=kv, **shape
        )
        self._logits = np.empty((MAX_ROWS, self.vocab), dtype=np.float32)
        self._head: HeadDraft | None = None
        self.capabilities = Capabilities(
            tree=True,
            taps=(),
            window=window or 0,
            snapshot=False,
            row_invariant=True,
            sinks=shape["sinks"],
            rounds=True,
            heads=True,
        )

    @property
    def length(self) -> int:
        return self._state.length

    def forward(
        self, tree: Tree, logit_rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Logits (m, vocab) of the rows asked for; reused by the next forward."""
        check_tokens(tree.tokens, self.vocab)
        rows = None if logit_rows is None else np.asarray(logit_rows, dtype=np.int32)
        self._state.forward(tree, rows, self._logits)
        return self._logits[: tree.n if rows is None else len(rows)]

    def prefill(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        check_tokens(tokens, self.vocab)
        logits: NDArray[np.float32] = self._logits[0]
        self._state.prefill(tokens, logits)
        return logits

    def commit(self, rows: NDArray[np.int32]) -> None:
        self._state.commit(rows)

    def truncate(self, length: int) -> None:
        self._state.truncate(length)

    def run_round(
        self, session: NativeSession, kind: int, *, keeps_logits: bool
    ) -> tuple[NativeRound, NDArray[np.float32] | None]:
        logits = self._logits if keeps_logits else None
        return self._state.run(session, kind, logits), logits

    def last_tree(self) -> Tree:
        return self._state.last_tree()

    def hidden_states(
        self, tokens: NDArray[np.int32], taps: Sequence[int]
    ) -> NDArray[np.float32]:
        """(n, taps, hidden) of a sequence, numbered as transformers does.

        Starts from nothing, and leaves nothing: neither rows nor a head attached.
        """
        check_tokens(tokens, self.vocab)
        self.attach(None)
        self._state.truncate(0)
        self._state.set_taps(taps)
        try:
            found = []
            for start in range(0, len(tokens), MAX_ROWS):
                self._state.prefill(tokens[start : start + MAX_ROWS], None)
                found.append(self._state.read_taps())
        finally:
            self._state.set_taps(())
            self._state.truncate(0)
        return np.concatenate(found)

    def open_head(self, path: Path, *, source: Path | None = None) -> HeadDraft:
        """A draft head for this target; to be closed before it. See `HeadDraft`."""
        return HeadDraft(self._model, path, source=source)

    def attach(self, head: AnyHead | None) -> None:
        if head is self._head:
            return
        assert head is None or isinstance(head, HeadDraft), "one of its own model"
        self._state.truncate(0)
        if head is None:
            self._state.attach(None)
        else:
            head.follow(self._state)
        self._head = head

    def close(self) -> None:
        self._head = None
        self._state.close()
        self._model.close()
