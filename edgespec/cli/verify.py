"""`edgespec verify`: the same tokens with speculation on and off, how fast each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.opening import open_session
from edgespec.cli.options import Model, Offline, settings
from edgespec.cli.render import table
from edgespec.cli.results import check_result, write_result
from edgespec.cli.terminal import note, progress_bar
from edgespec.config import Runtime, Sampling, Speculation, check_sampling
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.session import Session
    from edgespec.verification import Run
    from edgespec.verification_report import Summary

MAX_TOKENS = 128
SEED = 1


@settings
def command(
    model: Model,
    speculation: Speculation,
    runtime: Runtime,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='JSON lines with "prompt" or "turns", and maybe "subtask". '
            "Default: a small set of ours.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Tokens per reply.")
    ] = MAX_TOKENS,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 is greedy.")
    ] = 0.0,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            "--seed",
            metavar="N",
            help=f"Above temperature 0, repeatable. Default: {SEED}.",
        ),
    ] = None,
    turns: Annotated[
        int, typer.Option("--turns", min=1, help="Turns of each conversation.")
    ] = 1,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only the first prompts.")
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Everything as JSON; - is stdout."),
    ] = None,
    offline: Offline = False,
) -> None:
    """Check that speculation changes no token, and measure what it gains.

    Runs each prompt with speculation off and on in one loaded model. Where replies
    differ, the target is asked again at both widths: a difference is explained when
    its own rounding moved the logits by more than the gap between the two tokens.
    Exits with 1 when one is not.

    In the table, rows are rows drafted per round, and cut gives tokens per round with
    each reply cut where it loops: at the third occurrence of 16 tokens in a row.

    Examples: edgespec verify smollm2-135m --temperature 0.8 --seed 1 --seed 2

    edgespec verify my-bundle --draft eagle --tree best:5
    """
    from edgespec.verification import read_prompts, verify
    from edgespec.verification_report import report, summarise

    if seed and temperature == 0:
        raise UsageError("--seed: has no effect at --temperature 0; leave one out")
    sampling = [
        Sampling(temperature=temperature, seed=value) for value in seed or [SEED]
    ]
    for choice in sampling:
        check_sampling(choice)
    if json_file not in (None, "-"):
        check_result("--json", Path(json_file), ", or - for stdout")
    chosen = read_prompts(prompts)[:limit]
    session = open_session(model, speculation, runtime, offline=offline)
    with progress_bar() as progress:
        runs = verify(
            session,
            chosen,
            sampling=sampling,
            max_tokens=max_tokens,
            turns=turns,
            progress=progress,
        )
    for run in runs:
        stats = run.spec.stats
        if said := session.engine.misfit(stats.depth_tried, stats.depth_accepted):
            note(said)
    result = report(
        runs,
        {
            **_about(session),
            "temperature": temperature,
            "seeds": [choice.seed for choice in sampling] if temperature else [],
            "max_tokens": max_tokens,
            "prompts": len(chosen),
        },
    )
    if json_file == "-":
        print(json.dumps(result))
    else:
        print("\n".join(_lines(session, runs)))
        if json_file is not None:
            write_result(Path(json_file), json.dumps(result) + "\n")
    if summarise(runs).unexplained:
        raise typer.Exit(1)


def _about(session: Session) -> dict[str, object]:
    return {
        "model": session.name,
        "backend": session.target.name,
        "draft": session.engine.draft_name,
        "row_invariant": session.target.capabilities.row_invariant,
        "argv": sys.argv[1:],
    }


def _lines(session: Session, runs: list[Run]) -> list[str]:
    from edgespec.verification_report import by_subtask, summarise

    invariant = session.target.capabilities.row_invariant
    lines = [
        f"{session.name} on {session.target.name}, "
        f"draft {session.engine.draft_name}; rows "
        f"{'do not depend' if invariant else 'depend'} on the rows beside them",
        "",
    ]
    groups = [*by_subtask(runs).items(), ("all", summarise(runs))]
    header = (
        "prompts",
        "runs",
        "identical",
        "tokens",
        "tokens/round",
        "rows",
        "cut",
        "rows",
        "plain tok/s",
        "spec tok/s",
        "ratio",
        "95 %",
    )
    lines += table(header, [_row(name, group) for name, group in groups])
    for run in runs:
        found = run.divergence
        if found is None:
            continue
        verdict = "explained" if found.is_explained else "NOT EXPLAINED"
        lines.append(
            f"\nprompt {run.prompt + 1}, turn {run.turn + 1}, seed {run.seed}: "
            f"token {found.index} is {found.plain_token} plain, {found.spec_token} "
            f"speculating ({found.width} rows): {verdict}\n"
            f"  gap {_or_cut(found.gap)}; replay moved it by {_or_cut(found.change)} "
            f"behind the same prefix, {_or_cut(found.history_change)} behind each "
            f"arm's own; largest change of a logit {found.logit_change:.4g}"
        )
    return lines


def _row(name: str, group: Summary) -> list[str]:
    interval = "-"
    if group.ratio_low is not None and group.ratio_high is not None:
        interval = f"{group.ratio_low:.2f} to {group.ratio_high:.2f}"
    return [
        name,
        str(group.runs),
        str(group.identical),
        str(group.tokens),
        f"{group.tokens_per_round:.2f}",
        f"{group.drafted_per_round:.2f}",
        f"{group.cut_tokens_per_round:.2f}",
        f"{group.cut_drafted_per_round:.2f}",
        f"{group.plain_tokens_per_s:.1f}",
        f"{group.spec_tokens_per_s:.1f}",
        "-" if group.ratio is None else f"{group.ratio:.2f}",
        interval,
    ]


def _or_cut(value: float | None) -> str:
    return "(cut off)" if value is None else f"{value:.4g}"
