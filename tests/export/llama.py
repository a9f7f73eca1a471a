"""llama.cpp through its low-level API: logits and tokens of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: Any) -> None:
    pass


llama_cpp.llama_log_set(_quiet, None)
llama_cpp.llama_backend_init()


@contextmanager
def model(path: Path, *, vocab_only: bool = False) -> Iterator[Any]:
    """A loaded model, freed afterwards."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = vocab_only
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert loaded, f"llama.cpp does not load {path}"
    try:
        yield loaded
    finally:
        llama_cpp.llama_model_free(loaded)


def logits(path: Path, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits (tokens, vocab) of one sequence, float32 KV cache."""
    with model(path) as loaded:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(64, len(ids))
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = llama_cpp.llama_init_from_model(loaded, params)
        assert context
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for i, token in enumerate(ids):
                batch.token[i] = token
                batch.pos[i] = i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = 1
            assert llama_cpp.llama_decode(context, batch) == 0
            vocab = llama_cpp.llama_model_get_vocab(loaded)
            n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
            flat = llama_cpp.llama_get_logits(context)
            return np.ctypeslib.as_array(flat, (len(ids), n_vocab)).copy()
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)


def tokenize(
    loaded: Any, text: str, *, specials: bool = False, add_bos: bool = False
) -> list[int]:
    """llama.cpp's own tokens of a text."""
    raw = text.encode()
    room = (llama_cpp.llama_token * (len(raw) + 16))()
    vocab = llama_cpp.llama_model_get_vocab(loaded)
    count = llama_cpp.llama_tokenize(
        vocab, raw, len(raw), room, len(room), add_bos, specials
    )
    assert count >= 0
    return list(room[:count])
