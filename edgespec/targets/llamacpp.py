"""llama.cpp as the verifying target: trees by sequence ids, one unified KV cache."""

from __future__ import annotations

import ctypes
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec._native import NativeModel
from edgespec.drafts.head import HeadDraft
from edgespec.errors import (
    BackendError,
    ContextError,
    FormatError,
    UnsupportedError,
    UsageError,
)
from edgespec.targets.base import Capabilities, check_tokens
from edgespec.targets.llamacpp_library import layer_states, library, reason
from edgespec.tree.topology import MAX_ROWS, Tree, chain

if TYPE_CHECKING:
    from edgespec.drafts import AnyHead

BATCH = 256  # rows of one decode call
PROBE_WIDTHS = (2, 4, 8)
COMMITTED = 0  # the sequence that holds the committed rows
_NO_SLOT, _ABORTED = 1, 2  # what llama_decode returns


class LlamaCppTarget:
    """A GGUF file in llama.cpp through llama-cpp-python's low-level API.

    Every leaf of a tree is a sequence, and a row belongs to the sequences of all leaves
    below it, so that it sees its ancestors and nothing else. Committed rows belong to
    sequence 0, which doubles as the first leaf's; the others borrow them for one
    forward. `capabilities.row_invariant` is measured at load.

    A draft head gets the hidden states from here, and weights of the target from our
    own engine, which opens the file a second time.

    Args:
        path: the GGUF file, the first one of a sharded model.
        context: KV rows for committed tokens and one tree.
        threads: for batches and single rows alike.
        flash_attention: llama.cpp's fused attention; it rounds differently.

    Raises FormatError for a file that is not GGUF, BackendError when llama-cpp-python
    is missing, too old or refuses the model, UnsupportedError for recurrent models.
    """

    name = "llamacpp"

    def __init__(
        self, path: Path, *, context: int, threads: int, flash_attention: bool = False
    ) -> None:
        if context < 1 or threads < 1:
            raise UsageError(
                f"context and threads: expected 1 or more, got {context} and {threads}"
            )
        self.path = Path(path)
        self.context = context
        self.threads = threads
        _check_file(self.path)
        self._api = api = library()
        model = api.llama_model_load_from_file(
            str(self.path).encode(), api.llama_model_default_params()
        )
        if not model:
            raise BackendError(f"{self.path}: llama.cpp cannot load it{reason()}")
        try:
            self._context = self._new_context(model, flash_attention)
        except BaseException:
            api.llama_model_free(model)
            raise
        self._free = weakref.finalize(self, _free, api, self._context, model)
        self._free.atexit = False  # the process takes the memory with it
        self._memory = api.llama_get_memory(self._context)
        self.vocab: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._n_layers: int = api.llama_model_n_layer(model)
        self._hidden: int = api.llama_model_n_embd(model)
        self._head: HeadDraft | None = None
        self._batch = _Batch(api)
        self._logits = np.empty((1, self.vocab), dtype=np.float32)
        self._length = 0
        self._tree: Tree | None = None  # of the last forward, until committed
        self._is_dirty = False  # the cache holds rows that were never committed
        self.decode_s = 0.0  # spent inside llama_decode so far
        self.capabilities = Capabilities(
            tree=True,
            taps=(),
            window=False,
            snapshot=False,
            row_invariant=self._is_row_invariant(),
            heads=True,
        )

    @property
    def length(self) -> int:
        return self._length

    def forward(
        self, tree: Tree, logit_rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Logits (m, vocab) of at most MAX_ROWS rows asked for; reuses the array."""
        n = tree.n
        if logit_rows is None:
            logit_rows = np.arange(n, dtype=np.int64)
        if not 1 <= n <= self._most or len(logit_rows) > MAX_ROWS:
            raise UsageError(
                f"forward: expected 1 to {self._most} rows and at most {MAX_ROWS} rows "
                f"of logits, got {n} and {len(logit_rows)}"
            )
        self._catch_up()
        self._check_room(n)
        check_tokens(tree.tokens, self.vocab)
        self._drop()
        paths = _leaf_paths(tree)
        self._is_dirty = True
        for leaf in range(1, len(paths)):
            self._api.llama_memory_seq_cp(self._memory, COMMITTED, leaf, -1, -1)
        wanted = np.arange(n) if self._reads_last else logit_rows
        self._batch.fill(tree.tokens, self._length + tree.depth, paths, wanted)
        self._decode()
        if len(logit_rows) > len(self._logits):
            self._logits = np.empty((len(logit_rows), self.vocab), dtype=np.float32)
        logits = self._logits[: len(logit_rows)]
        for k, row in enumerate(logit_rows):
            logits[k] = self._row_logits(int(row))
        self._tree = tree
        return logits

    def prefill(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Forwards and commits a chain of any size; logits (vocab,) of the last row."""
        n = len(tokens)
        check_tokens(tokens, self.vocab)
        self._check_room(n)
        self._catch_up()
        self._drop()
        self._is_dirty = True
        for start in range(0, n, self._most):
            part = tokens[start : start + self._most]
            rows = len(part)
            wanted = np.arange(rows if self._reads_last else 0)
            if start + rows == n and not self._reads_last:
                wanted = np.array([rows - 1])
            self._batch.fill(
                part,
                self._length + start + np.arange(rows),
                np.ones((1, rows), dtype=np.bool_),
                wanted,
            )
            self._decode()
            self._tell(part, np.arange(rows))
        logits: NDArray[np.float32] = self._logits[0]
        logits[:] = self._row_logits(rows - 1)
        self._length += n
        self._is_dirty = False
        return logits

    def commit(self, rows: NDArray[np.int32]) -> None:
        """Keeps a path of the last forward from its root on; no rows: drops all."""
        path = [int(row) for row in rows]
        if path:
            tree = self._tree
            if tree is None or not _is_path(tree, path):
                raise UsageError(
                    "commit: expected a path of the last forward from its root, got "
                    f"{path}"
                )
            self._tell(tree.tokens[path], np.array(path))
            through = _leaf_paths(tree)[:, path[-1]]
            self._keep(int(through.argmax()), len(path))
        self._drop()

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise UsageError(f"truncate: expected 0 to {self._length}, got {length}")
        self._length = length
        self._is_dirty = True
        self._drop()
        self._catch_up()

    def open_head(self, path: Path, *, source: Path | None = None) -> HeadDraft:
        """A draft head for this target; to be closed before it.

        Our engine opens the target's file as well and lends the head what it needs of
        the weights, so that these are in memory twice.

        Raises FormatError naming both sides for a head of another target,
        UnsupportedError where llama.cpp does not give the states the head reads, or
        our engine does not know the model.
        """
        model = NativeModel(self.path, threads=self.threads)
        try:
            model.load()
            head = HeadDraft(model, path, source=source, is_lender_ours=True)
        except BaseException:
            model.close()
            raise
        inner = [tap for tap in head.taps if tap != self._n_layers]
        if inner and layer_states(self._api) is None:
            head.close()
            raise UnsupportedError(
                f"{path}: the head reads hidden states {list(head.taps)}, and this "
                "llama-cpp-python gives none from between layers: --backend native"
            )
        return head

    def attach(self, head: AnyHead | None) -> None:
        """Keeps a head in step from now on; another one begins anew, and so do we."""
        if head is self._head:
            return
        assert head is None or isinstance(head, HeadDraft), "one of open_head"
        self.truncate(0)
        self._keep_states(False)
        self._head = head
        if head is not None:
            head.restart()
            self._keep_states(True)

    def close(self) -> None:
        self._head = None
        self._free()

    @property
    def _reads_last(self) -> bool:
        """Whether the head reads what the final norm gives: then rows are outputs."""
        return self._head is not None and self._n_layers in self._head.taps

    @property
    def _most(self) -> int:
        """Rows of one decode call; llama.cpp has room for so many outputs."""
        return MAX_ROWS if self._reads_last else BATCH

    def _keep_states(self, is_kept: bool) -> None:
        for tap in () if self._head is None else self._head.taps:
            if tap == self._n_layers:
                self._api.llama_set_embeddings(self._context, is_kept)
            elif (found := layer_states(self._api)) is not None:
                found[0](self._context, tap, is_kept)

    def _tell(self, tokens: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        """Tells the head of rows of the last decode about to be committed."""
        head = self._head
        if head is None:
            return
        states = np.empty((len(rows), len(head.taps), self._hidden), np.float32)
        for i, tap in enumerate(head.taps):
            if tap == self._n_layers:
                for k, row in enumerate(rows):
                    states[k, i] = self._last_state(int(row))
            else:
                states[:, i] = self._layer_state(tap)[rows]
        head.append(tokens, states if head.taps else None)

    def _last_state(self, row: int) -> NDArray[np.float32]:
        pointer = self._api.llama_get_embeddings_ith(self._context, row)
        return self._array(pointer, (self._hidden,), self._n_layers)

    def _layer_state(self, tap: int) -> NDArray[np.float32]:
        functions = layer_states(self._api)
        pointer = functions and functions[1](self._context, tap)
        return self._array(pointer, (self._batch.struct.n_tokens, self._hidden), tap)

    def _array(
        self, pointer: Any, shape: tuple[int, ...], tap: int
    ) -> NDArray[np.float32]:
        if not pointer:
            raise BackendError(
                f"{self.path}: llama.cpp gives no hidden states {tap} of this model"
                f"{reason()}; --draft ngram, or --backend native"
            )
        found: NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape)
        return found

    def _catch_up(self) -> None:
        """Cuts what the head was told of and an interrupt kept from being committed."""
        if self._head is not None and self._head.length != self._length:
            self._head.truncate(self._length)

    def _keep(self, leaf: int, rows: int) -> None:
        """Makes the first `rows` tree rows of a leaf's sequence committed ones."""
        api, memory, start = self._api, self._memory, self._length
        if leaf != COMMITTED:
            # A cell must not get a sequence it has, so the first leaf's rows go first.
            api.llama_memory_seq_rm(memory, COMMITTED, start, -1)
            api.llama_memory_seq_cp(memory, leaf, COMMITTED, start, start + rows)
        # From here `_drop` keeps the new rows; an interrupt before it loses them only.
        self._length = start + rows

    def _drop(self) -> None:
        """Frees every cell that is not committed."""
        self._tree = None
        if not self._is_dirty:
            return
        api, memory = self._api, self._memory
        api.llama_memory_seq_keep(memory, COMMITTED)
        if not api.llama_memory_seq_rm(memory, COMMITTED, self._length, -1):
            raise BackendError(
                f"{self.path}: llama.cpp cannot drop rows from {self._length} on"
                + reason()
            )
        self._is_dirty = False

    def _decode(self) -> None:
        started = time.perf_counter()
        status = self._api.llama_decode(self._context, self._batch.struct)
        self.decode_s += time.perf_counter() - started
        if status == 0:
            return
        self._drop()
        if status == _NO_SLOT:
            raise ContextError(
                f"{self._batch.struct.n_tokens} rows behind {self._length} committed "
                f"ones: no free KV cells in a llama.cpp context of {self.context}"
            )
        what = "was aborted" if status == _ABORTED else f"failed ({status})"
        raise BackendError(f"{self.path}: llama_decode {what}{reason()}")

    def _row_logits(self, row: int) -> NDArray[np.float32]:
        pointer = self._api.llama_get_logits_ith(self._context, row)
        if not pointer:
            raise BackendError(
                f"{self.path}: llama.cpp has no logits of row {row}{reason()}"
            )
        row_logits: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (self.vocab,))
        return row_logits

    def _check_room(self, rows: int) -> None:
        if self._length + rows > self.context:
            raise ContextError(
                f"{rows} rows behind {self._length} committed ones do not fit the "
                f"context of {self.context}"
            )

    def _new_context(self, model: Any, flash_attention: bool) -> Any:
        api = self._api
        if api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model):
            raise UnsupportedError(
                f"{self.path}: recurrent state cannot drop rejected rows; the llamacpp "
                "backend needs a model with attention only"
            )
        params = api.llama_context_default_params()
        params.n_ctx = self.context + MAX_ROWS
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = MAX_ROWS
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.kv_unified = True
        params.swa_full = (
            True  # windowed layers keep all rows, so truncating stays exact
        )
        params.no_perf = True
        if hasattr(params, "n_outputs_max"):
            params.n_outputs_max = MAX_ROWS  # else room for BATCH rows of logits
        context = api.llama_init_from_model(model, params)
        if not context:
            raise BackendError(
                f"{self.path}: llama.cpp cannot make a context of {self.context} rows"
                + reason()
            )
        return context

    def _is_row_invariant(self) -> bool:
        """Whether rows keep their bits when forwarded together instead of one by one.

        Quantised activations hide most differences between the kernels for one row and
        for several, so single rows at the same few places would prove little.
        """
        length = 4
        if length + sum(PROBE_WIDTHS) > self.context:
            return False
        count = length + sum(PROBE_WIDTHS)
        tokens = ((np.arange(count) * 7919 + 7) % self.vocab).astype(np.int32)
        self.prefill(tokens[:length])
        is_same = True
        for n in PROBE_WIDTHS:
            rows = tokens[length : length + n]
            alone = []
            for k in range(n):
                alone.append(self.forward(chain(rows[k : k + 1]))[0].copy())
                self.commit(np.zeros(1, dtype=np.int32))
            self.truncate(length)
            is_same = np.array_equal(self.forward(chain(rows)), np.stack(alone))
            if not is_same:
                break
            self.commit(np.arange(n, dtype=np.int32))
            length += n
        self.truncate(0)
        return is_same


class _Batch:
    """A llama_batch over numpy arrays."""

    def __init__(self, api: Any) -> None:
        self._token = np.zeros(BATCH, dtype=np.int32)
        self._pos = np.zeros(BATCH, dtype=np.int32)
        self._n_seq = np.zeros(BATCH, dtype=np.int32)
        self._seq = np.zeros((BATCH, MAX_ROWS), dtype=np.int32)
        self._seq_rows = (ctypes.POINTER(ctypes.c_int32) * BATCH)(
            *(row.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)) for row in self._seq)
        )
        self._wanted = np.zeros(BATCH, dtype=np.int8)
        int32 = ctypes.POINTER(ctypes.c_int32)
        self.struct = api.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(int32),
            embd=None,
            pos=self._pos.ctypes.data_as(int32),
            n_seq_id=self._n_seq.ctypes.data_as(int32),
            seq_id=ctypes.cast(self._seq_rows, ctypes.POINTER(int32)),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[Any],
        paths: NDArray[np.bool_],  # (sequences, rows)
        logit_rows: NDArray[np.int64],
    ) -> None:
        n = len(tokens)
        self.struct.n_tokens = n
        self._token[:n] = tokens
        self._pos[:n] = positions
        for row in range(n):
            sequences = np.flatnonzero(paths[:, row])
            self._n_seq[row] = len(sequences)
            self._seq[row, : len(sequences)] = sequences
        self._wanted[:n] = 0
        self._wanted[logit_rows] = 1


def _leaf_paths(tree: Tree) -> NDArray[np.bool_]:
    """(leaves, rows): which rows lead to a leaf; leaves in row order."""
    is_leaf = np.ones(tree.n, dtype=np.bool_)
    is_leaf[tree.parent[1:]] = False
    return tree.mask[is_leaf]


def _is_path(tree: Tree, rows: list[int]) -> bool:
    if not all(0 <= row < tree.n for row in rows):
        return False
    above = [-1, *rows[:-1]]
    return all(int(tree.parent[row]) == up for row, up in zip(rows, above, strict=True))


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise FormatError(
            f"{path}: expected a GGUF file, got one that starts {magic!r}"
        )


def _free(api: Any, context: Any, model: Any) -> None:
    api.llama_free(context)
    api.llama_model_free(model)
