"""What a generation hands out: pieces while it runs, the whole when it is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.stats import Stats


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log-probability and the best ones beside it, of raw target logits.

    Raw: before bias, penalties, temperature and truncation, natural logarithm.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob), best first


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply. Pieces concatenated are its text, tokens and logprobs.

    Text of thinking pieces makes up Reply.thinking, that of the others Reply.text.

    Text that might still become half a character or a stop string is held back, and its
    tokens with it, so a delta may carry tokens without text or text without tokens.
    """

    text: str
    tokens: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()  # per token: came from an accepted draft
    logprobs: tuple[TokenLogprobs, ...] = ()  # per token, empty unless asked for
    thinking: bool = False  # text inside a <think> section
    notice: str = ""  # something the user should know: older turns were dropped


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    text: str
    tokens: tuple[int, ...]  # the end-of-sequence token included when there was one
    prompt_tokens: int
    finish_reason: str  # stop | length | context | cancelled
    seed: int
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()
    evaluated_tokens: int = 0  # prompt tokens forwarded, not found in the KV cache
    thinking: str = ""  # <think> sections with their tags, not part of `text`
    notice: str = ""  # something the user should know, told once: its draft is no good


def top_logprobs(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Of one raw row (vocab,): the token's log-softmax and the `count` highest."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    count = min(count, len(row))
    best = np.argpartition(-row, count - 1)[:count]
    best = best[np.lexsort((best, -row[best]))]
    return TokenLogprobs(
        token=int(token),
        logprob=float(row[token]),
        top=tuple((int(i), float(row[i])) for i in best),
    )
