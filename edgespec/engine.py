"""Token level of a session: prompt in, rounds out, sequence and KV in step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from edgespec._native import DRAFT, PLAIN, PREFILL, NativeSession, Round, SampleParams
from edgespec.config import COST_SLOPE, FALLBACK_COST_SLOPE, Speculation
from edgespec.drafts import check_verify, parse_draft
from edgespec.drafts.fit import Fit
from edgespec.drafts.head import HeadDraft
from edgespec.errors import BackendError, ContextError, UsageError
from edgespec.tree.shape import best_rows, read_shape
from edgespec.tree.topology import MAX_ROWS, Tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgespec._native import NativeStats
    from edgespec.drafts import AnyHead
    from edgespec.drafts.base import Drafter
    from edgespec.drafts.growing import Grower
    from edgespec.targets.base import HeadTarget, RoundTarget, Target


def check_speculation(speculation: Speculation) -> Tree | None:
    """The static shape asked for, None for others; UsageError for what cannot work."""
    parse_draft(speculation.draft)
    check_verify(speculation.verify)
    if not 1 <= speculation.rows <= MAX_ROWS:
        raise UsageError(f"rows: expected 1 to {MAX_ROWS}, got {speculation.rows}")
    slope = speculation.cost_slope
    if slope is not None and not 0 <= slope < math.inf:
        raise UsageError(f"cost_slope: expected 0 or more, got {slope}")
    return read_shape(speculation.tree)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward emitted."""

    tokens: NDArray[np.int32]  # (m,)
    drafted: tuple[bool, ...]  # (m,) accepted from the draft
    logits: NDArray[np.float32] | None  # (n, vocab), valid until the next step
    rows: NDArray[np.int32]  # (m,) the row of logits that decided each token
    finish: str | None  # stop | length | context, None: it goes on


class Engine:
    """Drives one target with the C core: begin, then step until a step says finish.

    The KV cache always holds a prefix of the sequence, whatever was interrupted where:
        rows are
    recorded before they are committed and forgotten after they are cut.

    One caller at a time: `claim` raises BackendError for a second one.

    Args:
        drafter: proposes trees in place of the core's draft and of the head.
        head: drafts beside n-grams where the speculation wants them; of the target's
            model; closed with the engine. Trees of heads outside the core are grown by
            a `Grower`.
    """

    def __init__(
        self,
        target: Target,
        *,
        eos: Sequence[int],
        speculation: Speculation | None = None,
        prefill_chunk: int = 256,
        drafter: Drafter | None = None,
        head: AnyHead | None = None,
    ) -> None:
        speculation = speculation or Speculation()
        shape = check_speculation(speculation)
        choice = parse_draft(speculation.draft)
        if choice.needs_head and head is None:
            raise UsageError(
                f"draft: {speculation.draft} needs a head, and none is given"
            )
        best = best_rows(speculation.tree)
        rows = best or speculation.rows
        if not target.capabilities.tree and (shape is None or not shape.is_chain):
            shape = read_shape(f"chain:{max(1, rows - 1)}")
        self.target = target
        self.draft = choice.core
        self.drafter = drafter
        self.head = head if choice.kinds else None
        self._fit = None
        if self.head is not None:
            name, is_eagle3 = self._full_name(self.head), self.head.kind == "eagle3"
            self._fit = Fit(name, self.head.source, has_taps=is_eagle3)
        self.is_speculating = True
        self.keeps_logits = True  # whether a step gives them; may change in between
        self.evaluated = 0  # prompt tokens forwarded by the last begin
        self.eos = tuple(eos)
        self._tree: str | Tree = "auto" if best is None else "best"
        if shape is not None:
            self._tree = shape
        self._rows = rows
        self._capacity = speculation.ngram_capacity
        self._chunk = prefill_chunk
        self._slope = COST_SLOPE.get(target.name, FALLBACK_COST_SLOPE)
        self._is_cost_given = speculation.cost_slope is not None
        if speculation.cost_slope is not None:
            self._slope = speculation.cost_slope
        self._resident: list[
            int
        ] = []  # resident[:target.length] is what the KV rows hold
        self._learning: NativeSession | None = None
        self._core: NativeSession | None = None
        self._grower: Grower | None = None  # of the core's draft, for a head outside it
        self._learning_grower: Grower | None = None
        self._growing_seconds = 0.0  # of the reply
        self._learning_evicted = 0
        self._lock = threading.Lock()

    @property
    def draft_name(self) -> str:
        """For the statistics: none | ngram | eagle3 | eagle3+ngram | a drafter's."""
        if not self.is_speculating:
            return "none"
        if self.drafter is not None:
            return self.drafter.name
        return self.draft if self.head is None else self._full_name(self.head)

    @property
    def draft_bytes(self) -> tuple[int, int]:
        """Of the head: weights, and what it keeps of the conversation."""
        head = self.head
        return (0, 0) if head is None else (head.weight_bytes, head.state_bytes)

    def misfit(self, tried: Sequence[int], held: Sequence[int]) -> str:
        """Adds a reply's counts by depth; what to tell of a head that does not fit."""
        if self._fit is None or not self.is_speculating:
            return ""
        self._fit.add(tried, held)
        return self._fit.notice()

    @property
    def sequence(self) -> NDArray[np.int32]:
        """Prompt and reply so far, evicted tokens excluded."""
        return self._open_core.tokens

    @property
    def stats(self) -> NativeStats:
        """Of the generation begun last."""
        stats = self._open_core.stats()
        seconds = stats.draft_seconds + self._growing_seconds
        return stats._replace(draft_seconds=seconds)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Exclusive use of the target; BackendError while someone else has it."""
        if not self._lock.acquire(blocking=False):
            raise BackendError(
                "the session is busy with another reply: finish or close that "
                "one first, or load a session per thread"
            )
        try:
            yield
        finally:
            self._lock.release()

    def begin(
        self,
        prompt: Sequence[int],
        params: SampleParams,
        max_new: int,
        *,
        repeatable: bool = False,
        evicted: int = 0,
    ) -> Step:
        """Prefills what the KV cache lacks of the prompt and draws the first token.

        At least the last prompt token is forwarded. repeatable: trees depend on the
        prompt and on what follows alone, not on timing or earlier replies; needed where
        kernels round differently for different numbers of rows. evicted: tokens dropped
        from the front of the conversation, which count in the index of the noise.
        """
        if len(prompt) > self.target.context:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens, the context "
                f"{self.target.context}; {max_new} new tokens were asked for"
            )
        if self.target.capabilities.heads:
            cast("HeadTarget", self.target).attach(self.head)
        core = self._core = self._core_for(repeatable)
        core.abandon()
        common = _common_prefix(core.tokens, prompt)
        core.truncate(common)
        core.append(prompt[common:])
        self._shift_index(core, evicted)
        core.begin_generation(params, max_new)
        self._growing_seconds = 0.0
        if self._grower is not None:
            self._grower.begin(params, evicted)
        tree = core.begin(PREFILL)
        logits = self._prefill(prompt).reshape(1, -1)
        return self._step(tree, core.finish(logits), logits)

    def step(self) -> Step:
        """One round: draft, forward, verify, commit."""
        core, target = self._open_core, self.target
        if self.is_speculating and self.drafter is not None:
            proposed = self.drafter.propose(core.tokens)
            if proposed is not None:
                core.propose(proposed)
        kind = DRAFT if self.is_speculating else PLAIN
        if target.capabilities.rounds:
            return self._run_round(core, kind)
        if kind == DRAFT and self._grower is not None:
            self._grow(core, self._grower)
        tree = core.begin(kind)
        started = time.perf_counter()
        logits = target.forward(tree)
        seconds = time.perf_counter() - started
        verdict = core.finish(logits, seconds=seconds)
        if kind == DRAFT and self._grower is not None:
            self._grower.learn(verdict.tokens.tolist())
        self._resident += tree.tokens[verdict.rows].tolist()
        target.commit(verdict.rows)
        return self._step(tree, verdict, logits)

    def cut(self, length: int) -> None:
        """Keeps `length` tokens of the sequence, and no KV beyond them."""
        core = self._open_core
        core.abandon()
        self._keep_rows(length)
        if length < core.length:
            core.truncate(length)

    def reset(self) -> None:
        """Empties the KV cache, the sequence and what draft and planner learned."""
        self.target.truncate(0)
        self._resident.clear()
        self._free_cores()

    def close(self) -> None:
        self._free_cores()
        if self.head is not None:
            if self.target.capabilities.heads:
                cast("HeadTarget", self.target).attach(None)
            self.head.close()
        self.target.close()

    def _free_cores(self) -> None:
        for core in (self._core, self._learning):
            if core is not None:
                core.close()
        self._core = self._learning = None
        self._grower = self._learning_grower = None
        self._learning_evicted = 0

    @property
    def _open_core(self) -> NativeSession:
        if self._core is None:
            raise BackendError("no reply was begun yet, or the session is closed")
        return self._core

    def _core_for(self, repeatable: bool) -> NativeSession:
        if repeatable:
            self._grower = self._new_grower()
            return self._new_core(is_learning=False)
        if self._learning is None:
            self._learning = self._new_core(is_learning=not self._is_cost_given)
            self._learning_grower = self._new_grower()
        self._grower = self._learning_grower
        return self._learning

    def _new_grower(self) -> Grower | None:
        head = self.head
        if head is None or self.drafter is not None or isinstance(head, HeadDraft):
            return None
        from edgespec.drafts.growing import Grower

        return Grower(head, tree=self._tree, rows=self._rows, slope=self._slope)

    def _grow(self, core: NativeSession, grower: Grower) -> None:
        """Proposes a tree of what n-grams and a head outside the core say."""
        started = time.perf_counter()
        lookup = core.begin(DRAFT)
        core.abandon()
        is_learning = core is self._learning and not self._is_cost_given
        tree = grower.propose(
            lookup,
            core.scores,
            index=core.length,
            measured=core.cost() if is_learning else None,
        )
        core.propose(tree)
        self._growing_seconds += time.perf_counter() - started

    def _full_name(self, head: AnyHead) -> str:
        return head.name if self.draft == "none" else f"{head.name}+{self.draft}"

    def _new_core(self, *, is_learning: bool) -> NativeSession:
        cost = [0.0, *(1 + self._slope * n for n in range(MAX_ROWS))]
        head = self.head if self.drafter is None else None
        is_outside = head is not None and not isinstance(head, HeadDraft)
        core = NativeSession(
            self.target.vocab,
            self.target.context,
            self.eos,
            draft=self.draft if self.drafter is None else "none",
            # What a grower cuts to what pays is not cut before.
            tree="best" if is_outside and self._tree == "auto" else self._tree,
            rows=self._rows,
            ngram_capacity=self._capacity,
            cost=None if is_learning else cost,
            cost_slope=self._slope,
            kv_block=self.target.capabilities.kv_block,
        )
        if isinstance(head, HeadDraft):
            head.join(core)
        return core

    def _shift_index(self, core: NativeSession, evicted: int) -> None:
        """Conversations share a core; the offset wraps at 2^64, so it can go back."""
        if core is self._learning:
            core.evicted((evicted - self._learning_evicted) % (1 << 64))
            self._learning_evicted = evicted
        elif evicted:
            core.evicted(evicted)

    def _prefill(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Forwards the part of the prompt that is not in the KV cache, in chunks."""
        target = self.target
        held = self._resident[: target.length]
        self._keep_rows(min(_common_prefix(held, prompt), len(prompt) - 1))
        reused = target.length
        # The last token goes alone where the number of rows changes the bits, so that
        # the same prompt gives the same logits whether its KV rows are there already or
        # not.
        end = len(prompt)
        body = end if target.capabilities.row_invariant else end - 1
        bounds = [*range(reused, body, self._chunk), body]
        bounds += [end] if body < end else []
        self.evaluated = end - reused
        for first, last in pairwise(bounds):
            chunk = np.array(prompt[first:last], dtype=np.int32)
            self._resident += chunk.tolist()
            logits = target.prefill(chunk)
        return logits

    def _keep_rows(self, length: int) -> None:
        """Keeps `length` KV rows, or none where a window has lost what they see."""
        if length < self.target.length:
            try:
                self.target.truncate(length)
            except ContextError:
                self.target.truncate(0)
        del self._resident[self.target.length :]

    def _run_round(self, core: NativeSession, kind: int) -> Step:
        """A round that the target runs by itself, KV rows committed."""
        target = cast("RoundTarget", self.target)
        ran, logits = target.run_round(core, kind, keeps_logits=self.keeps_logits)
        self._resident += ran.committed
        drafted = [True] * len(ran.tokens)
        drafted[-1] = ran.is_last_drafted
        return Step(
            np.array(ran.tokens, np.int32),
            tuple(drafted),
            logits,
            np.array(ran.rows, np.int32),
            ran.finish,
        )

    def _step(self, tree: Tree, verdict: Round, logits: NDArray[np.float32]) -> Step:
        drafted = tuple(
            bool(((tree.parent == row) & (tree.tokens == token)).any())
            for row, token in zip(verdict.rows, verdict.tokens, strict=True)
        )
        return Step(verdict.tokens, drafted, logits, verdict.rows, verdict.finish)


def _common_prefix(
    left: Sequence[int] | NDArray[np.int32], right: Sequence[int]
) -> int:
    n = min(len(left), len(right))
    differs = np.asarray(left[:n]) != np.asarray(right[:n])
    return int(differs.argmax()) if differs.any() else n
