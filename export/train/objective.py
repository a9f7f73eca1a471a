"""What drafts learn: the target's own distribution over the draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from edgespec_export.train.packing import Batch

DECAY = 0.8  # weight of a depth beside the one before it
_CHUNK = 256  # rows whose logits are in the cache at a time


class Vocabulary(torch.nn.Module):
    """The tokens a draft knows, and the target's projection onto them.

    Args:
        ids: (m) ascending ids of the target.
        output: (vocab, hidden), the target's head.
    """

    ids: torch.Tensor
    output: torch.Tensor
    known: torch.Tensor

    def __init__(self, ids: NDArray[np.int64], output: NDArray[np.float32]) -> None:
        super().__init__()
        rows = torch.from_numpy(np.ascontiguousarray(output[ids]))
        is_known = torch.zeros(len(output), dtype=torch.bool)
        is_known[torch.from_numpy(ids)] = True
        self.register_buffer("ids", torch.from_numpy(ids), persistent=False)
        self.register_buffer("output", rows, persistent=False)
        self.register_buffer("known", is_known, persistent=False)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Goals:
    """Rows of a batch whose next token is a reply's, and what the target makes of it.

    Rows are counted through the batch, (b, t) flattened.
    """

    rows: torch.Tensor  # (r) int64
    shares: torch.Tensor  # (r, m): softmax over the draft vocabulary

    def at(self, batch: Batch, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `offset` before goals, in the same piece, and which goals have one."""
        has = before(batch, self.rows, offset)
        return self.rows[has] - offset, has


def before(batch: Batch, rows: torch.Tensor, offset: int) -> torch.Tensor:
    """Whether a row's piece begins `offset` or more rows before it."""
    document = batch.document.flatten()
    earlier = (rows - offset).clamp(min=0)
    return (rows >= offset) & (document[earlier] == document[rows])


def reply_rows(batch: Batch) -> torch.Tensor:
    """(r) rows whose next token is the target's own, and whose likeliest is known."""
    follows = torch.zeros_like(batch.written)
    same = batch.document[:, 1:] == batch.document[:, :-1]
    follows[:, :-1] = batch.written[:, 1:] & same
    return (follows & (batch.top >= 0)).flatten().nonzero()[:, 0]


@torch.no_grad()
def goals(batch: Batch, vocabulary: Vocabulary) -> Goals:
    """What to learn from a batch: rows whose likeliest token a draft can say."""
    rows = reply_rows(batch)
    rows = rows[vocabulary.known[batch.top.flatten()[rows]]]
    final = batch.states[:, :, -1].flatten(0, 1)[rows]
    dtype = compute_dtype(final)
    logits = F.linear(final.to(dtype), vocabulary.output.to(dtype))
    shares = torch.empty_like(logits)
    for begin in range(0, len(rows), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        shares[part] = logits[part].float().softmax(-1).to(dtype)
    return Goals(rows, shares)


def loss(
    batch: Batch,
    vocabulary: Vocabulary,
    hidden: list[torch.Tensor],
    offset: Callable[[int], int],
    projection: torch.Tensor,
) -> torch.Tensor:
    """Soft cross-entropy of every depth, weighted DECAY ** depth, a goal's mean.

    Args:
        hidden: by depth, (b, t, hidden) that the projection takes.
        offset: by depth, rows from where a draft is made to the goal's.
        projection: (m, hidden).
    """
    wanted = goals(batch, vocabulary)
    total = projection.new_zeros(())
    for depth, states in enumerate(hidden):
        rows, has = wanted.at(batch, offset(depth))
        given = states.flatten(0, 1)[rows]
        weight = DECAY**depth / max(len(wanted.rows), 1)
        total = total + _soft_loss(given, projection, wanted.shares[has], weight)
    return total


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What matrices are multiplied in here: bfloat16 under autocast."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.float32


def _soft_loss(
    hidden: torch.Tensor, projection: torch.Tensor, shares: torch.Tensor, weight: float
) -> torch.Tensor:
    made: torch.Tensor = _SoftLoss.apply(  # type: ignore[no-untyped-call]
        hidden, projection, shares, weight
    )
    return made


class _SoftLoss(torch.autograd.Function):
    """weight * sum of cross-entropies, its gradient made on the way forward.

    Softmax of logits this wide is a matter of memory; so they are visited once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        projection: torch.Tensor,
        shares: torch.Tensor,
        weight: float,
    ) -> torch.Tensor:
        dtype = compute_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            given, matrix = hidden.to(dtype), projection.to(dtype)
            logits = F.linear(given, matrix)
            total = projection.new_zeros((), dtype=torch.float32)
            for begin in range(0, len(logits), _CHUNK):
                part = slice(begin, begin + _CHUNK)
                logs = logits[part].float().log_softmax(-1)
                share = shares[part].float()
                total -= torch.sum(share * logs)
                logits[part] = (logs.exp_() - share).mul_(weight).to(dtype)
            grad_hidden = logits @ matrix
            needs = projection.requires_grad
            grad_matrix = logits.t() @ given if needs else None
        ctx.save_for_backward(
            grad_hidden.to(hidden.dtype),
            None if grad_matrix is None else grad_matrix.to(projection.dtype),
        )
        return total * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden, projection = ctx.saved_tensors
        (grad,) = grads
        return (
            grad * hidden,
            None if projection is None else grad * projection,
            None,
            None,
        )


@dataclass(slots=True)
class Acceptance:
    """Greedy drafts that the target's greedy tokens confirm, counted by depth."""

    tried: NDArray[np.int64]  # (depths) drafts whose earlier tokens were right
    right: NDArray[np.int64]  # (depths)

    @property
    def by_depth(self) -> list[float]:
        """Share of right tokens at each depth, after right ones only."""
        shares: list[float] = (self.right / np.maximum(self.tried, 1)).tolist()
        return shares

    @property
    def tokens(self) -> float:
        """Tokens a round of a chain this deep emits."""
        return 1.0 + float(np.cumprod(self.by_depth).sum())

    def add(self, other: Acceptance) -> None:
        """Counts another batch's too."""
        self.tried += other.tried
        self.right += other.right


@torch.no_grad()
def acceptance(
    batch: Batch,
    vocabulary: Vocabulary,
    hidden: list[torch.Tensor],
    offset: Callable[[int], int],
    projection: torch.Tensor,
) -> Acceptance:
    """Of chains drafted at every row of greedy replies, as `loss` takes them."""
    rows = reply_rows(batch)
    is_alive = torch.ones(batch.tokens.numel(), dtype=torch.bool)
    tried, right = [], []
    for depth, states in enumerate(hidden):
        # A round's first token comes one row after the draft's, so all depths count
        # from the goal of the first.
        shift = offset(depth)
        goal = rows[before(batch, rows, shift)]
        goal = goal[is_alive[goal - shift]]
        given = states.flatten(0, 1)[goal - shift]
        dtype = compute_dtype(given)
        logits = F.linear(given.to(dtype), projection.to(dtype))
        said = vocabulary.ids[logits.argmax(-1)]
        is_right = said == batch.top.flatten()[goal]
        tried.append(len(goal))
        right.append(int(is_right.sum()))
        is_alive[:] = False
        is_alive[goal[is_right] - shift] = True
    return Acceptance(np.array(tried, np.int64), np.array(right, np.int64))
