"""The slow truth in numpy: noise, processing of logits, the draw, verification.

Written for reading, in float64 wherever the C core's result does not hinge on float32,
and sharing nothing with it but the definitions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgespec._native import SampleParams

Row = NDArray[np.float64]
MASK32 = np.uint64(0xFFFFFFFF)
NOISE, REJECTION = 0, 1  # streams


# ---- random numbers -----------------------------------------------------------------


def philox(counter: ArrayLike, key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10 of counters (..., 4): 32-bit words as uint64 (..., 4)."""
    c = np.array(counter, dtype=np.uint64)
    k0, k1 = (np.uint64(k) for k in key)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c[..., 0]
        b = np.uint64(0xCD9E8D57) * c[..., 2]
        c = np.stack(
            [
                b >> np.uint64(32) ^ c[..., 1] ^ k0,
                b & MASK32,
                a >> np.uint64(32) ^ c[..., 3] ^ k1,
                a & MASK32,
            ],
            axis=-1,
        )
        k0 = (k0 + np.uint64(0x9E3779B9)) & MASK32
        k1 = (k1 + np.uint64(0xBB67AE85)) & MASK32
    return c


def uniform(seed: int, index: int, lanes: ArrayLike, stream: int) -> Row:
    """Uniforms in (0, 1) of 53 bits, one per lane."""
    lanes = np.atleast_1d(np.asarray(lanes, dtype=np.uint64))
    counter = np.empty((len(lanes), 4), np.uint64)
    counter[:, 0], counter[:, 1] = index & 0xFFFFFFFF, index >> 32
    counter[:, 2], counter[:, 3] = lanes, stream
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    bits = (words[:, 0] << np.uint64(32) | words[:, 1]) >> np.uint64(11)
    return np.where(bits == 0, 0.5, bits.astype(np.float64)) * 2.0**-53


def noise(seed: int, index: int, vocab: int) -> Row:
    """Gumbel noise of every token at one index."""
    return -np.log(-np.log(uniform(seed, index, np.arange(vocab), NOISE)))


# ---- one row ------------------------------------------------------------------------


def process(
    params: SampleParams,
    history: Sequence[int],
    logits: ArrayLike,
    allowed: NDArray[np.bool_] | None = None,
) -> NDArray[np.float32]:
    """Processed logits, removed tokens -inf."""
    row = np.array(logits, dtype=np.float32)
    if allowed is not None:
        row[~allowed] = -np.inf
    for token, value in params.logit_bias:
        row[token] += np.float32(value)
    window = params.penalty_window
    seen = (
        list(history) if window < 0 else list(history)[max(len(history) - window, 0) :]
    )
    repetition = np.float32(params.repetition_penalty)
    for token, count in Counter(seen).items():
        row[token] = (
            row[token] * repetition if row[token] < 0 else row[token] / repetition
        )
        row[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        row[token] -= np.float32(params.presence_penalty)
    if params.temperature == 0:
        return row
    row /= np.float32(params.temperature)
    if 0 < params.top_k < len(row):
        kth = np.sort(row)[-params.top_k]
        row[row < kth] = -np.inf
    p = softmax(row)
    if params.top_p < 1:
        order = np.lexsort((np.arange(len(row)), -row.astype(np.float64)))
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        row[order[before >= np.float64(np.float32(params.top_p))]] = -np.inf
    if params.min_p > 0:
        row[p < np.float64(np.float32(params.min_p)) * p.max()] = -np.inf
    return row


def softmax(row: ArrayLike) -> Row:
    """Probabilities in float64."""
    x = np.asarray(row, dtype=np.float64)
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def draw(params: SampleParams, processed: NDArray[np.float32], index: int) -> int:
    """argmax of logits and noise, lowest id among equals."""
    if params.temperature == 0:
        return int(processed.argmax())
    scores = processed.astype(np.float64) + noise(params.seed, index, len(processed))
    return int(scores.argmax())


# ---- trees --------------------------------------------------------------------------


def children(parent: ArrayLike, rank: ArrayLike, row: int) -> list[int]:
    """Rows below `row`, best rank first."""
    ranks = np.asarray(rank)
    rows = np.flatnonzero(np.asarray(parent) == row)
    return [int(i) for i in rows[np.argsort(ranks[rows])]]


def verify_coupled(
    tokens: Sequence[int],
    parent: ArrayLike,
    rank: ArrayLike,
    logits: NDArray[np.float32],
    params: SampleParams,
    history: Sequence[int],
    index: int,
    allowed: NDArray[np.bool_] | None = None,
) -> tuple[list[int], list[int]]:
    """Emitted tokens and the rows that decided them."""
    emitted: list[int] = []
    rows: list[int] = []
    row = 0
    while True:
        bits = None if allowed is None else allowed[row]
        processed = process(params, [*history, *emitted], logits[row], bits)
        token = draw(params, processed, index + len(emitted))
        emitted.append(token)
        rows.append(row)
        below = [c for c in children(parent, rank, row) if tokens[c] == token]
        if not below:
            return emitted, rows
        row = below[0]


# ---- rejection ----------------------------------------------------------------------


def rejection_steps(
    p: Row, q: Row, drawn: Sequence[int], *, replacement: bool
) -> Iterator[tuple[float, Row]]:
    """For each drawn child: its acceptance probability, the target once refused."""
    target, draft = np.array(p, np.float64), np.array(q, np.float64)
    for i, token in enumerate(drawn):
        accept = min(1.0, target[token] / draft[token])
        left = np.maximum(target - draft, 0.0)
        target = left / left.sum() if left.sum() > 0 else target
        yield accept, target
        if not replacement:
            draft = without(draft, drawn[: i + 1])


def without(draft: Row, drawn: Sequence[int]) -> Row:
    """The draft without tokens already drawn; uniform over the rest once empty."""
    draft = draft.copy()
    draft[list(drawn)] = 0.0
    if draft.sum() == 0:
        draft = np.ones_like(draft)
        draft[list(drawn)] = 0.0
    return np.asarray(draft / max(draft.sum(), 1e-300))


def verify_rejection(
    tokens: Sequence[int],
    parent: ArrayLike,
    rank: ArrayLike,
    p: NDArray[np.float32],
    q: NDArray[np.float32],
    seed: int,
    index: int,
    *,
    replacement: bool,
) -> tuple[list[int], list[int]]:
    """Emitted tokens and the rows that decided them, on the C core's uniforms."""
    emitted: list[int] = []
    rows: list[int] = []
    row = 0
    while True:
        below = children(parent, rank, row)
        u = uniform(seed, index + len(emitted), np.arange(len(below) + 1), REJECTION)
        target = normal(p[row])
        steps = rejection_steps(
            target,
            normal(q[row]) if below else target,
            [tokens[c] for c in below],
            replacement=replacement,
        )
        rows.append(row)
        row = -1
        for i, (accept, residual) in enumerate(steps):
            if u[i] < accept:
                row = below[i]
                break
            target = residual
        if row < 0:
            cumulative = np.cumsum(target)
            token = int(
                np.searchsorted(cumulative, u[-1] * cumulative[-1], side="right")
            )
            emitted.append(token)
            return emitted, rows
        emitted.append(tokens[row])


def normal(row: ArrayLike) -> Row:
    """A row of weights as probabilities."""
    x = np.asarray(row, dtype=np.float64)
    return np.asarray(x / x.sum())


# ---- enumeration --------------------------------------------------------------------

Model = Callable[[tuple[int, ...]], Row]
Law = dict[tuple[int, ...], float]  # probability of each sequence of tokens


def draws(
    q: Row, n: int, *, replacement: bool
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every ordered draw of n children from q, with its probability."""
    if n == 0:
        yield 1.0, ()
        return
    for mass, first in draws(q, n - 1, replacement=replacement):
        rest = q if replacement or not first else without(q, first)
        for token in np.flatnonzero(rest > 0):
            yield mass * float(rest[token]), (*first, int(token))


def law_of_rejection(
    target: Model,
    draft: Model,
    widths: Sequence[int],
    length: int,
    *,
    replacement: bool,
    context: tuple[int, ...] = (),
) -> Law:
    """Exact law of the next `length` tokens: one drafted tree, plain sampling after it.

    widths: children per accepted row, by depth.
    """
    law: Law = defaultdict(float)

    def add(mass: float, token: int, rest: Sequence[int]) -> None:
        if mass <= 0:
            return
        if length == 1:
            law[(token,)] += mass
            return
        below = law_of_rejection(
            target,
            draft,
            rest,
            length - 1,
            replacement=replacement,
            context=(*context, token),
        )
        for after_it, m in below.items():
            sequence = (token, *after_it)
            law[sequence] += mass * m

    p, q = target(context), draft(context)
    width = widths[0] if widths else 0
    for mass, drawn in draws(q, width, replacement=replacement):
        left, residual = mass, p
        steps = rejection_steps(p, q, drawn, replacement=replacement)
        for token, (accept, after) in zip(drawn, steps, strict=True):
            add(left * accept, token, widths[1:])
            left *= 1.0 - accept
            residual = after
        for token, share in enumerate(residual):
            add(left * share, token, ())
    return law


def law_of_model(target: Model, length: int) -> Law:
    """Exact law of plain sampling."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*sequence, token): mass * float(share)
            for sequence, mass in law.items()
            for token, share in enumerate(target(sequence))
        }
    return law
