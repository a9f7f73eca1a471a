"""Sampling and verification in C."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_double, c_float, c_int32, c_uint64
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec._native.arrays import address, allowed_bits, int32, rows
from edgespec._native.library import BUFFER, I32, SIZE, Function, struct
from edgespec._native.trees import CTree, tree_to_c
from edgespec.errors import UsageError
from edgespec.tree.topology import MAX_ROWS, Tree

ALL_TOKENS = -1  # penalty_window: the whole sequence


class CSampling(ctypes.Structure):
    """es_sampling"""

    _fields_ = [
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("penalty_window", c_int32),
        ("seed", c_uint64),
        ("bias_token", POINTER(c_int32)),
        ("bias_value", POINTER(c_float)),
        ("n_bias", SIZE),
    ]


class CVerdict(ctypes.Structure):
    """es_verdict"""

    _fields_ = [
        ("n", c_int32),
        ("token", c_int32 * (MAX_ROWS + 1)),
        ("row", c_int32 * (MAX_ROWS + 1)),
    ]


struct("es_sampling", CSampling)
struct("es_verdict", CVerdict)
_SAMPLING, _TREE = POINTER(CSampling), POINTER(CTree)
_noise = Function("es_noise", c_uint64, c_uint64, c_int32, result=c_double)
_process = Function("es_sample_process", _SAMPLING, BUFFER, SIZE, BUFFER, BUFFER, SIZE)
_draw = Function("es_sample_draw", _SAMPLING, BUFFER, SIZE, c_uint64, I32)
_coupled = Function(
    "es_verify_coupled",
    _TREE,
    BUFFER,
    SIZE,
    SIZE,
    _SAMPLING,
    BUFFER,
    SIZE,
    c_uint64,
    BUFFER,
    BUFFER,
    POINTER(CVerdict),
)
_rejection = Function(
    "es_verify_rejection",
    _TREE,
    BUFFER,
    BUFFER,
    SIZE,
    ctypes.c_int,
    c_uint64,
    c_uint64,
    BUFFER,
    POINTER(CVerdict),
)
Function("es_sampling_default", _SAMPLING)  # SampleParams states every default


@dataclass(frozen=True, slots=True)
class SampleParams:
    """es_sampling: every field resolved, nothing left to a default elsewhere."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = ALL_TOKENS
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()


def sampling_to_c(params: SampleParams) -> tuple[CSampling, tuple[Any, ...]]:
    """The struct and the arrays it points into, which have to outlive it."""
    if not 0 <= params.seed < 1 << 64:
        raise UsageError(f"seed: expected an unsigned 64-bit number, got {params.seed}")
    n = len(params.logit_bias)
    tokens = (c_int32 * n)(*(int(token) for token, _ in params.logit_bias))
    values = (c_float * n)(*(float(value) for _, value in params.logit_bias))
    out = CSampling(
        temperature=params.temperature,
        top_k=min(params.top_k, 2**31 - 1),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        penalty_window=min(params.penalty_window, 2**31 - 1),
        seed=params.seed,
        bias_token=ctypes.cast(tokens, I32),
        bias_value=ctypes.cast(values, POINTER(c_float)),
        n_bias=n,
    )
    return out, (tokens, values)


def noise(seed: int, index: int, token: int) -> float:
    """Gumbel noise of one token at one index of the sequence."""
    return float(_noise(seed, index, token))


def sample_process(
    params: SampleParams,
    history: ArrayLike,
    logits: NDArray[np.float32],
    allowed: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
) -> NDArray[np.float32]:
    """A processed copy of one row of logits (vocab,); removed tokens are -inf.

    history is the sequence up to and including the token the row was computed from.
    """
    row = np.array(logits, dtype=np.float32)
    past = int32(history)
    bits = allowed_bits(allowed, 1, len(row))
    sampling, keep = sampling_to_c(params)
    _process(
        byref(sampling), address(past), len(past), address(bits), address(row), len(row)
    )
    del keep
    return row


def sample_draw(
    params: SampleParams, processed: NDArray[np.float32], index: int
) -> int:
    """The token drawn from a processed row at this index of the sequence."""
    row = np.ascontiguousarray(processed, dtype=np.float32)
    sampling, keep = sampling_to_c(params)
    token = c_int32()
    _draw(byref(sampling), address(row), len(row), index, byref(token))
    del keep
    return token.value


class Verdict(NamedTuple):
    """Emitted tokens and the tree row that decided each."""

    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]


def _verdict(out: CVerdict) -> Verdict:
    return Verdict(
        np.array(out.token[: out.n], np.int32), np.array(out.row[: out.n], np.int32)
    )


def verify_coupled(
    tree: Tree,
    logits: NDArray[np.float32],
    params: SampleParams,
    history: ArrayLike,
    index: int,
    allowed: NDArray[np.bool_] | NDArray[np.uint8] | None = None,
) -> Verdict:
    """One rule for every temperature; logits (n, vocab) are raw and stay unchanged."""
    logits, stride = rows(logits, "logits")
    if len(logits) != tree.n:
        raise UsageError(f"logits: expected {tree.n} rows, got {len(logits)}")
    vocab = logits.shape[1]
    past = int32(history)
    bits = allowed_bits(allowed, tree.n, vocab)
    scratch = np.empty(vocab, np.float32)
    sampling, keep = sampling_to_c(params)
    out = CVerdict()
    _coupled(
        byref(tree_to_c(tree)),
        address(logits),
        stride,
        vocab,
        byref(sampling),
        address(past),
        len(past),
        index,
        address(bits),
        address(scratch),
        byref(out),
    )
    del keep
    return _verdict(out)


def verify_rejection(
    tree: Tree,
    p: NDArray[np.float32],
    q: NDArray[np.float32],
    seed: int,
    index: int,
    *,
    replacement: bool = False,
) -> Verdict:
    """For children sampled from q; p and q (n, vocab) are probabilities."""
    p = np.ascontiguousarray(p, dtype=np.float32)
    q = np.ascontiguousarray(q, dtype=np.float32)
    if p.ndim != 2 or p.shape != q.shape or len(p) != tree.n:
        raise UsageError(
            f"p, q: expected two arrays ({tree.n}, vocab), got {p.shape} and {q.shape}"
        )
    vocab = p.shape[1]
    scratch = np.empty(2 * vocab, np.float32)
    out = CVerdict()
    _rejection(
        byref(tree_to_c(tree)),
        address(p),
        address(q),
        vocab,
        int(replacement),
        seed,
        index,
        address(scratch),
        byref(out),
    )
    return _verdict(out)
