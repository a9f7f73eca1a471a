"""`edgespec bench`: methods and backends against each other in one interleaved run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.options import Model, Offline
from edgespec.cli.results import check_result, write_result
from edgespec.cli.terminal import note, progress_bar
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.bench_arms import Opened
    from edgespec.bundle import Model as Files
    from edgespec.progress import Progress
    from edgespec.verification import Prompt

MAX_TOKENS = 128
REPEATS = 5  # the fewest that an interval is worth anything with
METHODS = "plain,ngram"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Finding:
    """What a mode measured: the JSON object, lines for people, whether all of it."""

    data: dict[str, Any]
    lines: list[str]
    is_complete: bool
    draw: Callable[[str, Path], None] | None = None  # title, file


def command(
    model: Model,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            metavar="M,M,...",
            help="plain (always runs: ratios need it), ngram, and lookup, which is "
            f"llama.cpp's own. Default: {METHODS}.",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Repeatable. Default: all that model and installation have.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='JSON lines with "prompt" or "turns" (the first is asked), and maybe '
            '"subtask". Default: a small set of ours.',
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only the first prompts.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=2,
            help=f"Tokens per reply. Default: {MAX_TOKENS}.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            min=REPEATS,
            help=f"How often everything is measured. Default: {REPEATS}.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Default: the cores this process may use."),
    ] = None,
    is_cost: Annotated[
        bool,
        typer.Option("--cost", help="Measure forwards over 1 to 64 rows, and prefill."),
    ] = False,
    is_quality: Annotated[
        bool,
        typer.Option("--quality", help="Measure perplexity of a text, and KL."),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Of --quality. Default: the text exports are checked on.",
        ),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Everything as JSON; - is stdout."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw speeds or costs."),
    ] = None,
    offline: Offline = False,
) -> None:
    """Measure methods and backends against each other.

    All arms are loaded in one process and take turns on every prompt: same tokens in,
    temperature 0, until the model ends its reply or -n tokens. Ratios are medians over
    pairs of replies with 95 % intervals, prompts and repeats resampled. llama.cpp runs
    with whichever of its attentions is faster. Ctrl-C prints what there is so far.

    With --cost, one forward over n rows instead: all logits, a branching tree, behind
    256 and 2048 cached rows. With --quality, perplexity of a text, and its KL from the
    weights in 32-bit floats (needs the export extra; else from the first backend).

    Example: edgespec bench smollm2-135m --methods plain,ngram,lookup -n 64
    """
    from edgespec import bench_arms, bench_plot, bench_quality
    from edgespec.bundle import resolve
    from edgespec.cli import bench_tables
    from edgespec.config import Runtime
    from edgespec.loading import check_runtime
    from edgespec.machine import Bystanders
    from edgespec.verification import read_prompts

    if is_cost and is_quality:
        raise UsageError("--cost, --quality: one at a time")
    mode = "--cost" if is_cost else "--quality" if is_quality else ""
    misplaced = {
        "--methods": mode and methods is not None,
        "--prompts": mode and prompts is not None,
        "--limit": mode and limit is not None,
        "-n": mode and max_tokens is not None,
        "--repeats": is_quality and repeats is not None,
        "--plot": is_quality and plot is not None,
        "--text": not is_quality and text is not None,
    }
    for option in (name for name, is_wrong in misplaced.items() if is_wrong):
        where = f"with {mode}" if mode else "without --quality"
        raise UsageError(f"{option}: has no effect {where}; leave it out")
    wanted = bench_arms.parse_methods(METHODS if methods is None else methods)
    check_runtime(Runtime(threads=threads))
    if json_file not in (None, "-"):
        check_result("--json", Path(json_file), ", or - for stdout")
    if plot is not None:
        check_result("--plot", plot)
        bench_plot.check(plot)
    content = bench_quality.read_text(text) if is_quality else ""
    chosen = [] if mode else read_prompts(prompts)[:limit]

    with progress_bar() as progress:
        bundle = resolve(model, offline=offline, progress=progress)
        names = bench_arms.choose_backends(bundle, backend or ())
        bench_arms.check_methods(wanted, names)
        opened = bench_arms.open_backends(
            bundle, names, threads=threads, progress=progress
        )
        others = Bystanders()
        try:
            if is_cost:
                found = _cost(opened, repeats or REPEATS, progress)
            elif is_quality:
                found = _quality(bundle, opened, content, progress)
            else:
                bench_arms.keep_better_attention(opened)
                found = _speed(
                    opened,
                    wanted,
                    chosen,
                    max_tokens or MAX_TOKENS,
                    repeats or REPEATS,
                    progress,
                )
            about = bench_arms.about(bundle, opened, threads)
            about["others_share"] = others.share()
        finally:
            bench_arms.close(opened)
    result = json.dumps({**about, **found.data})
    if json_file == "-":
        print(result)
    else:
        print("\n".join([*bench_tables.conditions(about), "", *found.lines]))
        if json_file is not None:
            write_result(Path(json_file), result + "\n")
    if plot is not None and found.draw is not None:
        found.draw(
            f"{about['model']}, {about['threads']} threads, {about['cpu']}", plot
        )
    if (said := bench_tables.warning(about)) is not None:
        note(said)
    if not found.is_complete:
        note("edgespec: interrupted; these are the figures so far")
        raise typer.Exit(INTERRUPTED)


def _speed(
    opened: Sequence[Opened],
    methods: Sequence[str],
    prompts: Sequence[Prompt],
    max_tokens: int,
    repeats: int,
    progress: Progress,
) -> Finding:
    from edgespec import bench, bench_arms, bench_plot, bench_report
    from edgespec.cli import bench_tables

    results = bench.run(
        bench_arms.make_arms(methods, opened),
        bench_arms.encode(opened, prompts),
        subtasks=[prompt.subtask for prompt in prompts],
        max_tokens=max_tokens,
        repeats=repeats,
        progress=progress,
    )
    budget = (
        f"{len(prompts)} prompts, {repeats} repeats, at most {max_tokens} tokens each, "
        "temperature 0"
    )
    return Finding(
        bench_report.report(results, {"max_tokens": max_tokens}),
        [budget, "", *bench_tables.speeds(results)],
        results.is_complete,
        lambda title, path: bench_plot.speeds(bench_report.rows(results), title, path),
    )


def _cost(opened: Sequence[Opened], repeats: int, progress: Progress) -> Finding:
    from edgespec import bench_cost, bench_plot
    from edgespec.cli import bench_tables

    costs = bench_cost.measure(opened, visits=repeats, progress=progress)
    return Finding(
        bench_cost.report(costs, {}),
        bench_tables.costs(costs),
        costs.is_complete,
        lambda title, path: bench_plot.costs(costs, title, path),
    )


def _quality(
    bundle: Files, opened: Sequence[Opened], text: str, progress: Progress
) -> Finding:
    from edgespec import bench_quality
    from edgespec.cli import bench_tables

    windows = bench_quality.cut(bundle, text)
    truth = bench_quality.truth(bundle, windows, progress)
    found = bench_quality.measure(opened, windows, truth, progress=progress)
    return Finding(
        bench_quality.report(found, {"window": windows.shape[1]}),
        bench_tables.qualities(found),
        found[0].tokens == windows.size,
    )
