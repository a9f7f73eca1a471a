"""Why two runs of one prompt part: the target's own rows, recorded and asked again.

Both runs' calls to the target are written down. At a divergence the row that decided
the token is evaluated at width 1 and at the width of its round, from the same prefix.
Kernels that round differently for one row and for several move the logits; the
divergence is explained only when that moves the two contenders by more than the gap
between them. Replays put an accepted path first in its tree, so that committing it
moves no KV row: an error in our own compaction is not replayed, stays unexplained.
Rounding depends on the place of a row and on the rows beside it, so a replay need not
round as the run did: trees cut to the path and a few more rows are tried as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from edgespec._native import SampleParams, noise, sample_process
from edgespec.errors import UsageError
from edgespec.targets.base import Target
from edgespec.tree.topology import Tree, chain

if TYPE_CHECKING:
    from edgespec._native import NativeRound, NativeSession
    from edgespec.drafts import AnyHead
    from edgespec.targets.base import HeadTarget, RoundTarget

NO_TOKEN = -1  # where a reply has already ended
MOST_OTHERS = 4  # rows beside a path, of replays with trees cut


@dataclass(frozen=True, slots=True)
class Step:
    """One call the target got: a prefill chunk, or a round and the rows it kept."""

    length: int  # committed rows before it
    tree: Tree
    rows: NDArray[np.int32] | None  # kept; None: all (prefill)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two replies to one prompt part, and what the replay found."""

    index: int  # of the token in the reply
    plain_token: int
    spec_token: int
    width: int  # rows of the round that decided the speculative token
    gap: float | None  # plain's winner over the other, by width 1; None: it was cut off
    change: float | None  # of that gap from width 1 to the width, same prefix
    history_change: float | None  # the same, the prefix evaluated as each arm did
    logit_change: float  # largest change of any logit of the row
    is_explained: bool


class Recorder:
    """A target that writes down every call, to be replayed on the target beneath."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.name, self.vocab = target.name, target.vocab
        self.context, self.capabilities = target.context, target.capabilities
        self.steps: list[Step] = []
        self._open: Tree | None = None

    @property
    def length(self) -> int:
        return self.target.length

    def forward(
        self, tree: Tree, logit_rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        self._open = tree
        return self.target.forward(tree, logit_rows)

    def prefill(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        self.steps.append(Step(self.length, chain(tokens), None))
        return self.target.prefill(tokens)

    def commit(self, rows: NDArray[np.int32]) -> None:
        if self._open is not None:
            self.steps.append(Step(self.length, self._open, np.array(rows, np.int32)))
        self._open = None
        self.target.commit(rows)

    def run_round(
        self, session: NativeSession, kind: int, *, keeps_logits: bool
    ) -> tuple[NativeRound, NDArray[np.float32] | None]:
        """For targets that run rounds themselves."""
        target, length = cast("RoundTarget", self.target), self.length
        ran, logits = target.run_round(session, kind, keeps_logits=keeps_logits)
        rows = np.array(ran.rows, np.int32)
        self.steps.append(Step(length, target.last_tree(), rows))
        return ran, logits

    def last_tree(self) -> Tree:
        return cast("RoundTarget", self.target).last_tree()

    def attach(self, head: AnyHead | None) -> None:
        cast("HeadTarget", self.target).attach(head)

    def truncate(self, length: int) -> None:
        self.target.truncate(length)

    def close(self) -> None:
        self.target.close()


@dataclass(frozen=True, slots=True)
class Deciding:
    """The step and the row of it that decided a token of the sequence."""

    steps: list[Step]  # everything before
    step: Step
    row: int


def find_deciding(steps: Sequence[Step], index: int) -> Deciding:
    """What decided the token at `index` of the whole sequence."""
    for i in range(len(steps) - 1, -1, -1):
        step = steps[i]
        if step.rows is None:
            if step.length + step.tree.n == index:
                return Deciding(list(steps[:i]), step, step.tree.n - 1)
        elif step.length < index <= step.length + len(step.rows):
            row = int(step.rows[index - step.length - 1])
            return Deciding(list(steps[:i]), step, row)
    raise UsageError(f"no recorded round decided token {index} of the sequence")


def path_first(tree: Tree, rows: NDArray[np.int32]) -> Tree:
    """The same tree with these rows, a path from the root, in front."""
    others = np.setdiff1d(np.arange(tree.n, dtype=np.int32), rows)
    order = np.concatenate([np.asarray(rows, np.int32), others])
    place = np.empty(tree.n, dtype=np.int32)
    place[order] = np.arange(tree.n, dtype=np.int32)
    parent = tree.parent[order]
    return Tree(
        tokens=tree.tokens[order],
        parent=np.where(parent < 0, -1, place[np.maximum(parent, 0)]).astype(np.int32),
        rank=tree.rank[order],
        depth=tree.depth[order],
        mask=np.ascontiguousarray(tree.mask[np.ix_(order, order)]),
    )


def path_and(tree: Tree, rows: NDArray[np.int32], others: int | None) -> Tree:
    """The same with at most so many of the other rows; None: with all."""
    whole = path_first(tree, rows)
    if others is None:
        return whole
    n = min(len(rows) + others, tree.n)
    return Tree(
        tokens=whole.tokens[:n],
        parent=whole.parent[:n],
        rank=whole.rank[:n],
        depth=whole.depth[:n],
        mask=np.ascontiguousarray(whole.mask[:n, :n]),
    )


def _path_to(tree: Tree, row: int) -> NDArray[np.int32]:
    return np.flatnonzero(tree.mask[row]).astype(np.int32)


def replay_history(
    target: Target, deciding: Deciding, others: int | None = None
) -> NDArray[np.float32]:
    """Logits of the deciding row, every earlier step at its recorded width.

    others: rows beside a path at most; None: all, and the deciding tree as it was.
    """
    target.truncate(0)
    for step in deciding.steps:
        target.truncate(min(step.length, target.length))
        if step.rows is None:
            target.prefill(step.tree.tokens)
        else:
            target.forward(path_and(step.tree, step.rows, others))
            target.commit(np.arange(len(step.rows), dtype=np.int32))
    target.truncate(min(deciding.step.length, target.length))
    tree = deciding.step.tree
    if deciding.step.rows is None:
        return np.array(target.prefill(tree.tokens))
    if others is None:
        return np.array(target.forward(tree)[deciding.row])
    path = _path_to(tree, deciding.row)
    return np.array(target.forward(path_and(tree, path, others))[len(path) - 1])


def replay_widths(
    target: Target, prefix: NDArray[np.int32], deciding: Deciding, chunk: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of the deciding row at width 1 and in its tree, behind one prefix."""
    tree, row = deciding.step.tree, deciding.row
    target.truncate(0)
    for start in range(0, len(prefix), chunk):
        target.prefill(prefix[start : start + chunk])
    wide = np.array(target.forward(tree)[row])
    narrow = wide
    for token in tree.tokens[_path_to(tree, row)]:
        narrow = np.array(target.forward(chain(np.array([token], np.int32)))[0])
        target.commit(np.zeros(1, dtype=np.int32))
    return narrow, wide


def scores(
    logits: NDArray[np.float32],
    params: SampleParams,
    history: NDArray[np.int32],
    tokens: tuple[int, int],
) -> tuple[float, float]:
    """What sampling compares, of two tokens; -inf where cut off."""
    processed = sample_process(params, history, logits)
    values = []
    for token in tokens:
        value = float(processed[token])
        if params.temperature > 0:
            value += noise(params.seed, len(history), token)
        values.append(value)
    return values[0], values[1]


def explain(
    target: Target,
    sequence: NDArray[np.int32],
    index: int,
    tokens: tuple[int, int],
    arms: tuple[Sequence[Step], Sequence[Step]],
    params: SampleParams,
    *,
    prompt_tokens: int,
    chunk: int,
) -> Divergence:
    """Replays the first token in which two runs differ; leaves the target empty.

    Args:
        target: the target itself, not a recorder.
        sequence: prompt and reply up to that token, the same in both runs.
        index: of the token in the whole sequence, len(sequence).
        tokens: what the plain and the speculative run emitted there.
        arms: the recorded steps of the plain and the speculative run.
        params: how both sampled.
        chunk: rows of one forward when the common prefix is evaluated.
    """
    plain, spec = (find_deciding(steps, index) for steps in arms)
    prefix = sequence[: spec.step.length]
    narrow, wide = replay_widths(target, prefix, spec, chunk)
    histories = [replay_history(target, deciding) for deciding in (plain, spec)]

    def margin(logits: NDArray[np.float32]) -> float:
        first, second = scores(logits, params, sequence, tokens)
        # Both removed: neither could have been drawn from this row.
        return float("nan") if first == second == -np.inf else first - second

    pairs = ((narrow, wide), (histories[0], histories[1]))
    margins = [(margin(one), margin(many)) for one, many in pairs]
    changes = [one - many for one, many in margins]
    # The gap: how far plain's token led where nothing but plain's rows were evaluated.
    gap = margins[1][0]
    is_explained = any(
        change > one >= 0 or (np.isposinf(one) and many < 0)
        for (one, many), change in zip(margins, changes, strict=True)
    )
    if not is_explained and gap >= 0:
        for others in range(MOST_OTHERS + 1):
            cut = replay_history(target, spec, others)
            if margin(cut) < 0:
                pairs = (pairs[0], (histories[0], cut))
                changes[1] = gap - margin(cut)
                is_explained = True
                break
    target.truncate(0)
    return Divergence(
        index=index - prompt_tokens,
        plain_token=tokens[0],
        spec_token=tokens[1],
        width=spec.step.tree.n,
        gap=_finite(gap),
        change=_finite(changes[0]),
        history_change=_finite(changes[1]),
        logit_change=max(float(np.abs(one - many).max()) for one, many in pairs),
        is_explained=bool(is_explained),
    )


def ends_early(plain: Sequence[int], spec: Sequence[int]) -> Divergence:
    """The divergence of two replies of which one is the beginning of the other."""
    index = min(len(plain), len(spec))
    return Divergence(
        index=index,
        plain_token=plain[index] if index < len(plain) else NO_TOKEN,
        spec_token=spec[index] if index < len(spec) else NO_TOKEN,
        width=0,
        gap=None,
        change=None,
        history_change=None,
        logit_change=0.0,
        is_explained=False,
    )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
