"""Speculation on against off: the same tokens, and how much faster?

Both arms run through one session, interleaved: the same prompts, budget, seeds and
counters. Where they part, `replay` asks the target alone who moved the token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec._native import SampleParams
from edgespec.config import Runtime, Sampling, Stopping
from edgespec.engine import Engine
from edgespec.engine import Step as EngineStep
from edgespec.errors import FormatError, UsageError
from edgespec.progress import Progress, silent
from edgespec.replay import Divergence, Recorder, Step, ends_early, explain
from edgespec.reply import Reply

if TYPE_CHECKING:
    from edgespec.session import Session

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
RESAMPLES = 2000


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

    @property
    def ratio(self) -> float | None:
        """Decode time per token, plain / speculative; None when an arm had no round."""
        plain, spec = seconds_per_token(self.plain), seconds_per_token(self.spec)
        return plain / spec if plain and spec else None


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over a group of runs."""

    runs: int
    tokens: int
    identical: int
    unexplained: int
    plain_tokens_per_s: float
    spec_tokens_per_s: float
    tokens_per_round: float
    ratio: float | None  # median over runs
    ratio_low: float | None  # 95 % interval of the median, runs resampled
    ratio_high: float | None


def seconds_per_token(reply: Reply) -> float | None:
    """Decode seconds per token of the rounds; the prefill's token is left out."""
    rate = reply.stats.tokens_per_s
    return 1 / rate if rate else None


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """Reads JSON lines with "prompt" or "turns", and optionally "subtask"."""
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
    except ValueError as error:
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
    return Prompt(tuple(turns), str(row.get("subtask", "")))


class Arm(Engine):
    """An engine that keeps what a replay needs, and starts every reply knowing nothing.

    A fresh one per reply: the n-gram index must not know the other arm's reply, nor that
    of another seed. Trees always follow measured times, as they do without a seed.
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
    spec_first: bool = False,
) -> tuple[Reply, Reply, Divergence | None]:
    """One reply without and one with speculation: plain, speculative, first difference.

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
            arm = Arm(recorder, eos=kept.eos, speculation=session.speculation)
            arm.is_speculating = speculate
            session.engine = arm
            replies[speculate] = session.complete(
                messages, sampling=sampling, stopping=stopping
            )
            steps[speculate] = recorder.steps
    finally:
        session.engine = kept
        kept.forget()
    plain, spec = replies[False], replies[True]
    index = first_difference(plain.tokens, spec.tokens)
    if index is None:
        return plain, spec, None
    if index >= min(len(plain.tokens), len(spec.tokens)):
        # One reply just ends earlier: that is our doing, no replay can explain it.
        return plain, spec, ends_early(plain.tokens, spec.tokens)
    assert arm is not None
    sequence = np.array([*arm.prompt, *plain.tokens[:index]], np.int32)
    divergence = explain(
        target,
        sequence,
        len(sequence),
        (plain.tokens[index], spec.tokens[index]),
        (steps[False], steps[True]),
        arm.params,
        prompt_tokens=len(arm.prompt),
        chunk=Runtime().prefill_chunk,
    )
    return plain, spec, divergence


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
                plain, spec, divergence = compare(
                    session,
                    messages,
                    choice,
                    Stopping(max_tokens=max_tokens),
                    spec_first=len(runs) % 2 == 1,
                )
                runs.append(
                    Run(
                        prompt=number,
                        turn=turn,
                        subtask=prompt.subtask,
                        seed=plain.seed,
                        plain=plain,
                        spec=spec,
                        divergence=divergence,
                    )
                )
                messages.append({"role": "assistant", "content": plain.text})
                progress("verify", len(runs), total)
    return runs


def summarise(runs: Sequence[Run]) -> Summary:
    """Totals, and the median speed ratio with its interval."""
    ratios = np.array([run.ratio for run in runs if run.ratio is not None])
    low = high = middle = None
    if len(ratios):
        generator = np.random.default_rng(0)
        picks = generator.integers(0, len(ratios), (RESAMPLES, len(ratios)))
        medians = np.median(ratios[picks], axis=1)
        middle = float(np.median(ratios))
        low, high = (float(q) for q in np.quantile(medians, [0.025, 0.975]))
    return Summary(
        runs=len(runs),
        tokens=sum(len(run.spec.tokens) for run in runs),
        identical=sum(run.divergence is None for run in runs),
        unexplained=sum(
            run.divergence is not None and not run.divergence.is_explained
            for run in runs
        ),
        plain_tokens_per_s=_rate([run.plain for run in runs]),
        spec_tokens_per_s=_rate([run.spec for run in runs]),
        tokens_per_round=_ratio(
            sum(_round_tokens(run.spec) for run in runs),
            sum(run.spec.stats.rounds for run in runs),
        ),
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
    )


def by_subtask(runs: Sequence[Run]) -> dict[str, Summary]:
    """Summaries of the groups, in order of appearance."""
    names = [name for name in dict.fromkeys(run.subtask for run in runs) if name]
    return {
        name: summarise([run for run in runs if run.subtask == name]) for name in names
    }


def report(runs: Sequence[Run], about: dict[str, Any]) -> dict[str, Any]:
    """One JSON object: `about` (model, settings), totals, groups, runs."""
    return {
        **about,
        **asdict(summarise(runs)),
        "subtasks": {name: asdict(s) for name, s in by_subtask(runs).items()},
        "details": [
            {
                "prompt": run.prompt,
                "turn": run.turn,
                "subtask": run.subtask,
                "seed": run.seed,
                "ratio": run.ratio,
                "divergence": run.divergence and asdict(run.divergence),
                "plain": _reply_row(run.plain),
                "spec": _reply_row(run.spec),
            }
            for run in runs
        ],
    }


def _reply_row(reply: Reply) -> dict[str, Any]:
    return {
        "tokens": list(reply.tokens),
        "finish_reason": reply.finish_reason,
        "stats": reply.stats.as_dict(),
    }


def _round_tokens(reply: Reply) -> float:
    return reply.stats.tokens_per_round * reply.stats.rounds


def _rate(replies: Sequence[Reply]) -> float:
    return _ratio(
        sum(_round_tokens(reply) for reply in replies),
        sum(reply.stats.decode_s for reply in replies),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
