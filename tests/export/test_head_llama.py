"""llama.cpp loads the EAGLE-3 heads written here and computes the same logits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec_export import gguf_file, head_forward, head_gguf, sources
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet
from tests.export import checkpoints, llama
from tests.export import heads as tiny

HEADS: dict[str, Callable[[], tiny.Checkpoint]] = {
    "plain": tiny.eagle3,
    "residual": lambda: tiny.eagle3(norm_before_residual=True),
    "before fc": lambda: tiny.eagle3(norm_before_fc=True),
    "whole vocabulary": lambda: tiny.eagle3(draft_vocab=None),
    "own embedding": lambda: tiny.eagle3("speculators", own_embedding=True),
}
# Not in llama.h yet, so under the names of C++.
_KEEP = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_KEPT = "_Z26llama_get_embeddings_nextnP13llama_context"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WeightSet]:
    directory = tmp_path_factory.mktemp("target")
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    weights = sources.read(checkpoints.hf_checkpoint(directory / "hf", shape))
    gguf_file.write(weights, None, directory / "target.gguf")
    return directory / "target.gguf", weights


@pytest.mark.parametrize("quant", [None, "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", HEADS)
def test_llama_cpp_loads(
    tmp_path: Path, target: tuple[Path, WeightSet], name: str, quant: str | None
) -> None:
    """It refuses files with tensors or keys missing, left over or misshapen."""
    head = reader.read(HEADS[name]().write(tmp_path / "source"), target[1].config)
    path = tmp_path / "draft.gguf"
    head_gguf.write(head, path, target=target[1], quant=quant)
    with llama.model(path) as loaded:
        assert llama_cpp.llama_model_n_embd(loaded) == 64
        assert llama_cpp.llama_model_n_layer(loaded) == 1
        vocab = llama_cpp.llama_model_get_vocab(loaded)
        assert llama_cpp.llama_vocab_n_tokens(vocab) == tiny.VOCAB


@contextmanager
def context(model: Any, other: Any, rows: int) -> Iterator[Any]:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(64, rows)
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if other is not None:
        params.ctx_other = other
    made = llama_cpp.llama_init_from_model(model, params)
    assert made
    try:
        yield made
    finally:
        llama_cpp.llama_free(made)


def forward(
    run: Any,
    draft: Any,
    features: NDArray[np.float32],
    tokens: NDArray[np.int32] | None,
) -> NDArray[np.float32]:
    """What the head hands on, (n, hidden), of one llama.cpp call."""
    n, width = features.shape
    batch = llama_cpp.llama_batch_init(n, width, 1)
    ids = (ctypes.c_int32 * n)(*([] if tokens is None else tokens.tolist()))
    try:
        batch.n_tokens = n
        ctypes.memmove(batch.embd, features.ctypes.data, features.nbytes)
        if tokens is not None:
            batch.token = ctypes.cast(ids, ctypes.POINTER(ctypes.c_int32))
        for i in range(n):
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = i, 1, 0
            batch.logits[i] = 1
        assert run(draft, batch) == 0
    finally:
        batch.token = ctypes.POINTER(ctypes.c_int32)()
        llama_cpp.llama_batch_free(batch)
    get = getattr(llama_cpp.llama_cpp._lib, _KEPT)
    get.restype, get.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]
    return np.ctypeslib.as_array(get(draft), (n, 64)).copy()


@pytest.mark.parametrize("name", HEADS)
def test_llama_cpp_computes_the_same(
    tmp_path: Path, target: tuple[Path, WeightSet], name: str
) -> None:
    head = reader.read(HEADS[name]().write(tmp_path / "source"), target[1].config)
    path, n = tmp_path / "draft.gguf", 12
    head_gguf.write(head, path, target=target[1])
    rng = np.random.default_rng(4)
    taps = rng.standard_normal((n, 3 * 64)).astype(np.float32)
    tokens = rng.integers(0, tiny.VOCAB, n).astype(np.int32)
    table = head.tensors.get("token_embd", target[1].tensors["token_embd"])
    fused = head_forward.fuse(head, taps)
    logits, out = head_forward.step(
        head,
        table.load_f32()[tokens],
        fused,
        np.arange(n),
        np.tri(n, dtype=bool),
    )
    with (
        llama.model(target[0]) as verifier,
        llama.model(path) as loaded,
        context(verifier, None, n) as other,
        context(loaded, other, n) as draft,
    ):
        keep = getattr(llama_cpp.llama_cpp._lib, _KEEP)
        keep.restype, keep.argtypes = (
            None,
            [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool],
        )
        keep(draft, True, False)
        g = forward(llama_cpp.llama_encode, draft, taps, None)
        np.testing.assert_allclose(g, fused, atol=1e-4)
        fed = forward(llama_cpp.llama_decode, draft, g, tokens)
        np.testing.assert_allclose(fed, out, atol=1e-4)
        flat = llama_cpp.llama_get_logits(draft)
        theirs = np.ctypeslib.as_array(flat, (n, tiny.VOCAB)).copy()
    ids = head_forward.target_ids(head, np.arange(head.draft_vocab))
    assert logits.std() >= 1
    np.testing.assert_allclose(theirs[:, ids], logits, atol=1e-4)
    others = np.setdiff1d(np.arange(tiny.VOCAB), ids)
    assert np.isneginf(theirs[:, others]).all()
