"""Which of the target's tokens a head drafts: the fewer, the faster it is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, ModelNotFoundError, UsageError
from edgespec_export.heads import Head, outputs, pick_rows
from edgespec_export.weights import WeightSet


def read_counts(path: Path, vocab: int) -> NDArray[np.int64]:
    """How often each of `vocab` tokens occurs, (vocab,), from a JSON file.

    It holds a list with a count for each id, or an object from ids to counts.

    Raises FormatError naming the entry for anything else.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file of token counts")
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    if isinstance(data, list):
        if len(data) != vocab:
            raise FormatError(
                f"{path}: {len(data)} counts, the target has {vocab} tokens"
            )
        data = dict(enumerate(data))
    if not isinstance(data, dict):
        raise FormatError(f"{path}: expected a list of counts, or an object by id")
    counts = np.zeros(vocab, np.int64)
    for key, count in data.items():
        token = int(key) if str(key).isascii() and str(key).isdigit() else -1
        if not 0 <= token < vocab or type(count) is not int or not 0 <= count < 1 << 62:
            raise FormatError(
                f"{path}: {key!r:.40}: {count!r:.40}: expected an id below {vocab} and "
                "how often it occurs"
            )
        counts[token] = count
    return counts


def known_ids(head: Head) -> NDArray[np.int64]:
    """Target ids the head drafts, ascending."""
    return np.arange(head.draft_vocab) if head.d2t is None else head.d2t


def choose_ids(
    known: NDArray[np.int64],
    vocab: int,
    count: int,
    counts: NDArray[np.integer] | None = None,
    always: Iterable[int] = (),
) -> NDArray[np.int64]:
    """The `count` target ids worth drafting, ascending.

    By how often they occur, of equals the lower id first; without counts the lowest,
    as byte-pair vocabularies are roughly in that order. Ids in `always` come first.

    Args:
        known: ascending ids a draft knows; no other is chosen.
        vocab: tokens of the target.
        counts: (vocab,) how often each of them occurs.
    Raises UsageError for more ids than are known.
    """
    if not 1 <= count <= len(known):
        raise UsageError(
            f"--draft-vocab {count}: expected 1 to {len(known)}, what it drafts"
        )
    if counts is not None and counts.shape != (vocab,):
        raise UsageError(
            f"--draft-vocab: {len(counts)} counts, the target has {vocab} tokens"
        )
    weight = -known if counts is None else counts[known]
    is_first = np.isin(known, list(always))
    order = np.lexsort((known, -weight, ~is_first))
    return np.sort(known[order[:count]]).astype(np.int64)


def with_vocabulary(head: Head, ids: NDArray[np.int64], target: WeightSet) -> Head:
    """The head drafting these target ids alone, ascending; see `choose_ids`.

    Its projections keep their rows. A head without one gets the target's rows, unless
    it is a Medusa head and the ids are the first ones: these cost nothing.
    """
    if len(ids) == head.vocab:
        return head
    rows = np.searchsorted(known_ids(head), ids)
    tensors = dict(head.tensors)
    is_prefix = np.array_equal(ids, np.arange(len(ids)))
    for name in outputs(head):
        tensors[name] = pick_rows(tensors[name], rows)
    if not outputs(head) and not (head.kind == "medusa" and is_prefix):
        theirs = target.tensors.get("output", target.tensors["token_embd"])
        tensors["output"] = replace(pick_rows(theirs, ids), name="output")
    is_free = head.kind == "medusa" and is_prefix
    return replace(
        head, draft_vocab=len(ids), d2t=None if is_free else ids, tensors=tensors
    )
