"""Speculation on against off: the same tokens, and how much faster?

Both arms run through one session, interleaved: the same prompts, budget, seeds and
counters. Where they part, `replay` asks the target alone who moved the token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec._native import SampleParams
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.engine import Engine
from edgespec.engine import Step as EngineStep
from edgespec.errors import FormatError, UsageError
from edgespec.progress import Progress, silent
from edgespec.replay import Divergence, Recorder, Step, ends_early, explain
from edgespec.reply import Reply

if TYPE_CHECKING:
    from edgespec.session import Session
    from edgespec.targets.base import Target

PLAIN = Speculation(draft="none")
BUILT_IN = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation's user turns, and the group it is counted in."""

    turns: tuple[str, ...]
    subtask: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt and seed, both arms."""

    prompt: int
    turn: int
    subtask: str
    seed: int
    plain: Reply
    spec: Reply
    divergence: Divergence | None
    rounds: tuple[tuple[int, int], ...]  # speculative: rows forwarded, tokens emitted

    @property
    def ratio(self) -> float | None:
        """Decode time per token, plain / speculative; None when an arm had no round."""
        plain, spec = seconds_per_token(self.plain), seconds_per_token(self.spec)
        return plain / spec if plain and spec else None


def loop_cut(tokens: Sequence[int], n: int = 16) -> int:
    """Where an n-gram has occurred for the third time; the length when none does.

    Small models loop at temperature 0, and loops are easily drafted.
    """
    seen: dict[tuple[int, ...], int] = {}
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] == 3:
            return end
    return len(tokens)


def rounds_before_loop(
    tokens: Sequence[int], rounds: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The rounds (rows, tokens) of a reply cut at its loop.

    The first token is the prefill's.
    """
    left = loop_cut(tokens) - 1
    kept: list[tuple[int, int]] = []
    for rows, emitted in rounds:
        if left <= 0:
            break
        kept.append((rows, min(emitted, left)))
        left -= emitted
    return kept


def seconds_per_token(reply: Reply) -> float | None:
    """Decode seconds per token of the rounds; the prefill's token is left out."""
    rate = reply.stats.tokens_per_s
    return 1 / rate if rate else None


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """Reads JSON lines with "prompt" or "turns", maybe "subtask" or "category"."""
    path = path or BUILT_IN
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts: cannot read {path}: {error}") from None
    prompts = [
        _prompt(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise FormatError(f"{path}: no prompts in it")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from None
    turns = row.get("turns", [row.get("prompt")]) if isinstance(row, dict) else None
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn for turn in turns)
    ):
        raise FormatError(
            f'{where}: expected an object with "prompt", a text, or "turns", texts'
        )
    return Prompt(tuple(turns), str(row.get("subtask", row.get("category", ""))))


class Arm(Engine):
    """An engine that keeps what a replay needs, and starts every reply knowing nothing.

    A fresh one per reply: the n-gram index must not know the other arm's reply, nor
    that of another seed. Trees always follow measured times, as they do without a seed.
    """

    params: SampleParams
    prompt: list[int]

    def begin(
        self,
        prompt: Sequence[int],
        params: SampleParams,
        max_new: int,
        *,
        repeatable: bool = False,
        evicted: int = 0,
    ) -> EngineStep:
        self.params, self.prompt = params, list(prompt)
        return super().begin(prompt, params, max_new, evicted=evicted)


def compare(
    session: Session,
    messages: Sequence[dict[str, str]],
    sampling: Sampling,
    stopping: Stopping,
    *,
    prompt: int,
    turn: int,
    subtask: str,
    spec_first: bool = False,
) -> Run:
    """A reply without and one with speculation, and where they first differ.

    The session gets an empty cache and a fresh index for each.
    """
    target, kept = session.target, session.engine
    replies: dict[bool, Reply] = {}
    steps: dict[bool, list[Step]] = {}
    arm = None
    try:
        for speculate in (True, False) if spec_first else (False, True):
            target.truncate(0)
            recorder = Recorder(target)
            arm = Arm(
                recorder,
                eos=kept.eos,
                speculation=session.speculation if speculate else PLAIN,
                drafter=kept.drafter if speculate else None,
                head=kept.head if speculate else None,
            )
            arm.is_speculating = speculate
            session.engine = arm
            replies[speculate] = session.complete(
                messages, sampling=sampling, stopping=stopping
            )
            steps[speculate] = recorder.steps
        assert arm is not None
        divergence = _divergence(
            target, arm, replies[False], replies[True], (steps[False], steps[True])
        )
    finally:
        session.engine = kept
        kept.reset()
    return Run(
        prompt=prompt,
        turn=turn,
        subtask=subtask,
        seed=replies[False].seed,
        plain=replies[False],
        spec=replies[True],
        divergence=divergence,
        rounds=tuple(
            (step.tree.n, len(step.rows))
            for step in steps[True]
            if step.rows is not None
        ),
    )


def _divergence(
    target: Target,
    arm: Arm,
    plain: Reply,
    spec: Reply,
    steps: tuple[list[Step], list[Step]],
) -> Divergence | None:
    index = first_difference(plain.tokens, spec.tokens)
    if index is None:
        return None
    if index >= min(len(plain.tokens), len(spec.tokens)):
        # One reply just ends earlier: that is our doing, no replay can explain it.
        return ends_early(plain.tokens, spec.tokens)
    sequence = np.array([*arm.prompt, *plain.tokens[:index]], np.int32)
    return explain(
        target,
        sequence,
        len(sequence),
        (plain.tokens[index], spec.tokens[index]),
        steps,
        arm.params,
        prompt_tokens=len(arm.prompt),
        chunk=Runtime().prefill_chunk,
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None when they are equal."""
    for i, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def verify(
    session: Session,
    prompts: Sequence[Prompt],
    *,
    sampling: Sequence[Sampling],
    max_tokens: int,
    turns: int = 1,
    progress: Progress = silent,
) -> list[Run]:
    """Runs every prompt with every sampling, speculation off and on.

    The arms take turns to go first.

    Args:
        session: loaded with the speculation to verify; emptied before every reply.
        sampling: one per repetition, seeds given.
        max_tokens: of every reply.
        turns: how many of a prompt's turns; plain's replies are their history.
    """
    runs: list[Run] = []
    total = len(sampling) * sum(min(turns, len(prompt.turns)) for prompt in prompts)
    progress("verify", 0, total)
    for number, prompt in enumerate(prompts):
        for choice in sampling:
            messages: list[dict[str, str]] = []
            for turn, text in enumerate(prompt.turns[:turns]):
                messages.append({"role": "user", "content": text})
                run = compare(
                    session,
                    messages,
                    choice,
                    Stopping(max_tokens=max_tokens),
                    prompt=number,
                    turn=turn,
                    subtask=prompt.subtask,
                    spec_first=len(runs) % 2 == 1,
                )
                runs.append(run)
                messages.append({"role": "assistant", "content": run.plain.text})
                progress("verify", len(runs), total)
    return runs
