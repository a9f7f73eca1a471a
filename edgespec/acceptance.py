"""How many drafted tokens a target accepts, by draft, tree, depth and rank.

The target's own reply is the truth at every temperature: a tree is verified by the
noise of a seed, so what it accepts of any draft lies along that reply. It is computed
once; then every draft and tree is judged along it by real rounds of the C core, whose
logits are written down instead of computed. Heads get the target's hidden states, from
one more pass over the reply; rows have the same bits there as in rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec._native import DRAFT, PREFILL, NativeSession, Round
from edgespec.config import Sampling, Stopping
from edgespec.drafts import parse_draft
from edgespec.errors import UsageError
from edgespec.progress import Progress, silent
from edgespec.targets.native import NativeTarget
from edgespec.tree.shape import best_rows, read_shape
from edgespec.tree.topology import MAX_ROWS, Tree
from edgespec.verification import rounds_before_loop

if TYPE_CHECKING:
    from edgespec.drafts.head import HeadDraft
    from edgespec.session import Session

BACKEND = "native"  # heads run beside it, and its rows have the same bits anywhere
TEMPERATURES = (0.0, 0.8)
SEED = 1
_LOUD = 1e4  # logit of the token that is next: no noise reaches it


@dataclass(frozen=True, slots=True)
class Draft:
    """A --draft option and the head it means."""

    option: str
    head: HeadDraft | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured along a reply."""

    draft: str
    tree: str
    temperature: float
    # Of a head's tokens when sampling: by probability and the noise of the draw, as
    # sessions do it, or by probability alone, to see what the noise is worth.
    is_blind: bool = False


@dataclass(slots=True)
class Tally:
    """Counts of one case over replies."""

    prompts: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)  # rows, tokens
    cut: list[tuple[int, int]] = field(default_factory=list)  # before replies loop
    depth: int = 0  # sum over the trees
    accepted: int = 0
    # By depth, the root's children first: rounds that came to a row with children ...
    tried: list[int] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)  # ... by rank of the accepted

    def count(self, tree: Tree, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """One round: rows[i] decided tokens[i]."""
        self.rounds.append((tree.n, len(tokens)))
        self.depth += int(tree.depth.max())
        for depth, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            children = np.flatnonzero(tree.parent == row)
            if len(children) == 0:
                break
            if depth == len(self.tried):
                self.tried.append(0)
                self.held.append([])
            self.tried[depth] += 1
            ranks = self.held[depth]
            most = int(tree.rank[children].max())
            ranks += [0] * (most + 1 - len(ranks))
            for child in children[tree.tokens[children] == token]:
                ranks[int(tree.rank[child])] += 1
                self.accepted += 1

    def add(self, other: Tally) -> None:
        self.prompts += other.prompts
        self.rounds += other.rounds
        self.cut += other.cut
        self.depth += other.depth
        self.accepted += other.accepted
        for depth, (tried, ranks) in enumerate(
            zip(other.tried, other.held, strict=True)
        ):
            if depth == len(self.tried):
                self.tried.append(0)
                self.held.append([])
            self.tried[depth] += tried
            mine = self.held[depth]
            mine += [0] * (len(ranks) - len(mine))
            for rank, held in enumerate(ranks):
                mine[rank] += held


@dataclass(slots=True)
class Found:
    """What was measured, by case and subtask."""

    subtasks: tuple[str, ...]
    max_tokens: int
    tallies: dict[tuple[Case, str], Tally] = field(default_factory=dict)
    tokens: int = 0  # of the replies
    is_complete: bool = False


def measure(
    session: Session,
    drafts: Sequence[Draft],
    prompts: Sequence[Sequence[int]],
    *,
    subtasks: Sequence[str] = (),
    trees: Sequence[str],
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int,
    progress: Progress = silent,
) -> Found:
    """Every draft and tree along the replies of a native target.

    Ctrl-C ends it early: prompts that are through are kept.
    """
    for tree in trees:
        check_tree(tree)
    taps = sorted({t for draft in drafts if draft.head for t in draft.head.info.taps})
    subtasks = subtasks or [""] * len(prompts)
    found = Found(tuple(dict.fromkeys(subtasks)), max_tokens)
    done, total = 0, len(prompts) * len(temperatures)
    progress("acceptance", 0, total)
    try:
        for prompt, subtask in zip(prompts, subtasks, strict=True):
            results: list[tuple[Case, Tally]] = []
            n_tokens = 0
            for temperature in temperatures:
                reply = _Reply(session, prompt, temperature, max_tokens, taps)
                n_tokens += len(reply.tokens)
                for draft in drafts:
                    is_alone = not parse_draft(draft.option).with_ngrams
                    for is_blind in (False, True)[: 1 + (temperature > 0 and is_alone)]:
                        for tree in trees:
                            case = Case(draft.option, tree, temperature, is_blind)
                            tally = reply.judge(draft, tree, is_blind=is_blind)
                            results.append((case, tally))
                done += 1
                progress("acceptance", done, total)
            found.tokens += n_tokens
            for case, tally in results:
                found.tallies.setdefault((case, subtask), Tally()).add(tally)
        found.is_complete = True
    except KeyboardInterrupt:
        if not found.tallies:
            raise
    finally:
        session.target.truncate(0)
    return found


def check_tree(option: str) -> None:
    """UsageError for a --tree option that is none, or not the same every round."""
    if read_shape(option) is None and best_rows(option) is None:
        raise UsageError(
            f"--tree {option}: acceptance is that of a tree: best:N, chain:K or a file"
        )


class _Reply:
    """The target's reply to a prompt, and what it thought at each token."""

    def __init__(
        self,
        session: Session,
        prompt: Sequence[int],
        temperature: float,
        max_tokens: int,
        taps: Sequence[int],
    ) -> None:
        target = session.target
        assert isinstance(target, NativeTarget)
        sampling = Sampling(temperature=temperature, seed=SEED)
        reply = session.complete(
            list(prompt),
            sampling=sampling,
            stopping=Stopping(max_tokens=max_tokens),
        )
        self.tokens = reply.tokens
        self._prompt = np.array(prompt, np.int32)
        self._script = np.array([*prompt, *reply.tokens], np.int32)
        self._taps = {tap: i for i, tap in enumerate(taps)}
        self._states = target.hidden_states(self._script, taps) if taps else None
        self._eos = session.engine.eos
        self._context = target.context
        self._params = session.sample_params(sampling)
        self._max_tokens = max_tokens
        self._logits = np.zeros((MAX_ROWS, target.vocab), np.float32)

    def judge(self, draft: Draft, tree: str, *, is_blind: bool) -> Tally:
        """The rounds of one draft and tree along the reply."""
        head, tally = draft.head, Tally(prompts=1)
        core = self._core(draft.option, tree, is_blind=is_blind)
        try:
            core.append(self._prompt)
            core.begin_generation(self._params, self._max_tokens)
            if head is not None:
                head.restart()
                head.join(core)
            states = self._states_of(head)
            drawn = core.begin(PREFILL)
            finish = self._finish(core, drawn).finish
            n = len(self._prompt)
            self._feed(head, states, 0, n)
            while finish is None:
                drawn = core.begin(DRAFT)
                verdict = self._finish(core, drawn)
                finish, start, n = verdict.finish, n, n + len(verdict.tokens)
                tally.count(drawn, verdict.rows.tolist(), verdict.tokens.tolist())
                self._feed(head, states, start, n)
        finally:
            core.close()
        tally.cut = rounds_before_loop(self.tokens, tally.rounds)
        return tally

    def _core(self, option: str, tree: str, *, is_blind: bool) -> NativeSession:
        shape, best = read_shape(tree), best_rows(tree)
        return NativeSession(
            self._logits.shape[1],
            self._context,
            self._eos,
            draft=parse_draft(option).core,
            tree="best" if shape is None else shape,
            rows=best or MAX_ROWS,
            blind_ranks=is_blind,
        )

    def _finish(self, core: NativeSession, tree: Tree) -> Round:
        """Closes a round with logits by which the script is what is said."""
        coming = self._script[core.length :].tolist()
        said, row = [], 0
        for token in coming:
            said.append((row, token))
            following = np.flatnonzero((tree.parent == row) & (tree.tokens == token))
            if len(following) == 0:
                break
            row = int(following[0])
        for row, token in said:
            self._logits[row, token] = _LOUD
        try:
            return core.finish(self._logits[: tree.n])
        finally:
            for row, token in said:
                self._logits[row, token] = 0.0

    def _states_of(self, head: HeadDraft | None) -> NDArray[np.float32] | None:
        """(tokens, taps, hidden) that a head reads."""
        if head is None or self._states is None:
            return None
        return self._states[:, [self._taps[tap] for tap in head.info.taps]]

    def _feed(
        self,
        head: HeadDraft | None,
        states: NDArray[np.float32] | None,
        start: int,
        end: int,
    ) -> None:
        """Tells a head of committed positions."""
        if head is not None:
            seen = None if states is None else states[start:end]
            head.append(self._script[start:end], seen)
