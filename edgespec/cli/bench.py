"""`edgespec bench`: methods and backends against each other in one interleaved run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgespec.cli.options import Model, Offline
from edgespec.cli.results import check_result, write_result
from edgespec.cli.terminal import note, progress_bar
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.bench_arms import Opened
    from edgespec.bundle import Model as Files
    from edgespec.drafts.head import HeadDraft
    from edgespec.progress import Progress
    from edgespec.verification import Prompt

MAX_TOKENS = 128
REPEATS = 5  # the fewest that an interval is worth anything with
METHODS = "plain,ngram"
TREES = ("chain:3", "best:5", "best:8", "best:16", "best:26")  # of --acceptance
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
            help="plain (always runs: ratios need it), lookup, which is llama.cpp's "
            "own, and what --draft of chat takes: ngram, eagle, medusa, model, auto, "
            f"eagle:PATH, eagle+ngram, ... Default: {METHODS}; with --acceptance every "
            "draft the model has, alone and with n-grams.",
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            metavar="TREE",
            help="Shape of the drafts: auto (rows by cost), best:N (always the N best "
            "rows, root included), chain:K or a JSON file. Repeatable. Default: auto; "
            f"with --acceptance {' '.join(TREES)}.",
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
    is_acceptance: Annotated[
        bool,
        typer.Option(
            "--acceptance",
            help="Count what is accepted of each draft and tree, by depth and rank.",
        ),
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
    With --acceptance, tokens per round of fixed trees at temperatures 0 and 0.8, judged
    along the model's own replies, beside figures others published.

    Examples: edgespec bench smollm2-135m --methods plain,ngram,lookup -n 64

    edgespec bench smollm2-135m --methods eagle,auto --tree best:5 --tree best:8

    edgespec bench smollm2-135m --acceptance --prompts FILE -n 256
    """
    from edgespec import acceptance, bench_arms, bench_plot, bench_quality
    from edgespec.bundle import resolve
    from edgespec.cli import bench_tables
    from edgespec.config import Runtime, Speculation
    from edgespec.engine import check_speculation
    from edgespec.loading import check_runtime
    from edgespec.machine import Bystanders
    from edgespec.verification import read_prompts

    modes = {
        "--cost": is_cost,
        "--quality": is_quality,
        "--acceptance": is_acceptance,
    }
    if sum(modes.values()) > 1:
        raise UsageError(f"{', '.join(modes)}: one at a time")
    mode = next((name for name, is_on in modes.items() if is_on), "")
    has_replies = not mode or is_acceptance
    misplaced = {
        "--methods": not has_replies and methods is not None,
        "--tree": not has_replies and bool(tree),
        "--prompts": not has_replies and prompts is not None,
        "--limit": not has_replies and limit is not None,
        "-n": not has_replies and max_tokens is not None,
        "--backend": is_acceptance and bool(backend),
        "--repeats": (is_quality or is_acceptance) and repeats is not None,
        "--plot": (is_quality or is_acceptance) and plot is not None,
        "--text": not is_quality and text is not None,
    }
    for option in (name for name, is_wrong in misplaced.items() if is_wrong):
        where = f"with {mode}" if mode else "without --quality"
        raise UsageError(f"{option}: has no effect {where}; leave it out")
    wanted = [] if methods is None else bench_arms.parse_methods(methods)
    trees = list(dict.fromkeys(tree or (TREES if is_acceptance else ["auto"])))
    for shape in trees:
        check_speculation(Speculation(tree=shape))
        if is_acceptance:
            acceptance.check_tree(shape)
    check_runtime(Runtime(threads=threads))
    if json_file not in (None, "-"):
        check_result("--json", Path(json_file), ", or - for stdout")
    if plot is not None:
        check_result("--plot", plot)
        bench_plot.check(plot)
    content = bench_quality.read_text(text) if is_quality else ""
    chosen = read_prompts(prompts)[:limit] if has_replies else []

    with progress_bar() as progress:
        bundle = resolve(model, offline=offline, progress=progress)
        asked = [acceptance.BACKEND] if is_acceptance else backend or ()
        names = bench_arms.choose_backends(bundle, asked)
        if methods is None:
            default = METHODS.split(",")
            wanted = bench_arms.drafts_of(bundle) if is_acceptance else default
        bench_arms.check_methods(bundle, wanted, names)
        opened = bench_arms.open_backends(
            bundle, names, threads=threads, progress=progress
        )
        others = Bystanders()
        try:
            if is_cost:
                found = _cost(opened, repeats or REPEATS, progress)
            elif is_quality:
                found = _quality(bundle, opened, content, progress)
            elif is_acceptance:
                bench_arms.open_heads(bundle, opened, wanted, progress)
                limits = max_tokens or MAX_TOKENS
                found = _acceptance(opened, wanted, trees, chosen, limits, progress)
            else:
                bench_arms.keep_better_attention(opened)
                bench_arms.open_heads(bundle, opened, wanted, progress)
                found = _speed(
                    opened,
                    wanted,
                    trees,
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
    if not is_acceptance and (said := bench_tables.warning(about)) is not None:
        note(said)
    if not found.is_complete:
        note("edgespec: interrupted; these are the figures so far")
        raise typer.Exit(INTERRUPTED)


def _speed(
    opened: Sequence[Opened],
    methods: Sequence[str],
    trees: Sequence[str],
    prompts: Sequence[Prompt],
    max_tokens: int,
    repeats: int,
    progress: Progress,
) -> Finding:
    from edgespec import bench, bench_arms, bench_plot, bench_report
    from edgespec.cli import bench_tables

    results = bench.run(
        bench_arms.make_arms(methods, opened, trees),
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


def _acceptance(
    opened: Sequence[Opened],
    methods: Sequence[str],
    trees: Sequence[str],
    prompts: Sequence[Prompt],
    max_tokens: int,
    progress: Progress,
) -> Finding:
    from edgespec import acceptance, acceptance_report, bench_arms
    from edgespec.cli.acceptance_tables import acceptances

    backend = opened[0]
    drafts = [
        acceptance.Draft(method, cast("HeadDraft | None", backend.heads.get(method)))
        for method in methods
        if method not in bench_arms.METHODS
    ]
    if not drafts:
        raise UsageError(
            f"--acceptance: {','.join(methods)} drafts nothing of ours; name ngram or "
            "a head, or leave --methods out"
        )
    found = acceptance.measure(
        backend.session,
        drafts,
        bench_arms.encode(opened, prompts),
        subtasks=[prompt.subtask for prompt in prompts],
        trees=trees,
        max_tokens=max_tokens,
        progress=progress,
    )
    return Finding(
        acceptance_report.report(found, {}),
        acceptances(found),
        found.is_complete,
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
