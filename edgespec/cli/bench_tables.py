"""What `edgespec bench` prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec.cli.render import table

if TYPE_CHECKING:
    from edgespec.bench import Results
    from edgespec.bench_cost import Costs
    from edgespec.bench_quality import Quality
    from edgespec.bench_report import Row
    from edgespec.intervals import Interval

BUSY = 0.05  # of the processors, beyond which a measurement is worth little
LEGEND = """\
tok/s is the median over replies, of decoding alone. Plain llamacpp and lookup are timed
by llama.cpp's own decode call (and the lookup); all else by the whole loop from Python.
Ratios are medians over pairs of replies, with 95 % intervals. accepted: of the drafted
depth, of rows: of all drafted rows. draft: its time in a round, in forwards of plain;
forward: the round's own; possible: the ratio if nothing else took time. first ms: until
the first token; gap: ms between pieces of text; MB: beside plain; identical: to
plain on the same backend."""

COST_LEGEND = """\
x llamacpp: times faster than llama.cpp with whichever of its attentions is better,
median and 95 % interval of forwards taken in turn. llama.cpp is timed by its own decode
call, the others by the whole call from Python."""


def conditions(about: dict[str, Any]) -> list[str]:
    """Machine, files and libraries, and who else was at work."""
    lines = [
        f"{about['model']} with {about['threads']} threads on {about['cores']} usable "
        f"cores, {about['cpu']}, {about['system']}; edgespec {about['edgespec']}",
        f"processor features: {' '.join(about['features'])}",
        *(f"{name}: sha256 {digest}" for name, digest in about["files"].items()),
        *(f"{name}: {said}" for name, said in about["backends"].items() if said),
    ]
    others = about["others_share"]
    if others is not None:
        lines.append(f"other processes used {others:.0%} of the processors meanwhile")
    return lines


def warning(about: dict[str, Any]) -> str | None:
    """What to say on stderr about a machine that was busy with other things."""
    others = about["others_share"]
    if others is None or others <= BUSY:
        return None
    return (
        f"edgespec: other processes used {others:.0%} of the processors: backends "
        "suffer from that unequally, so measure again on an idle machine"
    )


def speeds(results: Results) -> list[str]:
    """The table of arms, the same of cut replies, and a line per subtask and arm."""
    from edgespec.bench_report import against, rows, subtasks

    bases = [arm.backend for arm in results.arms if arm.method == "plain"]
    other = "llamacpp" if "llamacpp" in bases and len(bases) > 1 else None

    def compared(**which: Any) -> list[Interval | None]:
        if other is None:
            return [None] * len(results.arms)
        return [*against(results, other, **which)]

    whole = rows(results)
    lines = _arm_table(whole, compared(), other)
    lines += ["", LEGEND, "", "Replies cut where 16 tokens come for the third time:"]
    cut = rows(results, is_cut=True)
    lines += _short_table("", cut, compared(is_cut=True), other)
    for name in subtasks(results):
        group = rows(results, subtask=name)
        lines += ["", *_short_table(name, group, compared(subtask=name), other)]
    return lines


def costs(found: Costs) -> list[str]:
    """c(n) of every backend, what the mask costs, and prefill."""
    lines: list[str] = []
    for cached in sorted({case.cached for case in found.cases}):
        cases = [case for case in found.cases if case.cached == cached]
        header, rows = ["rows"], []
        for name in found.backends:
            header += [f"{name} ms", "c(n)/c(1)" if cached else "tok/s", "x llamacpp"]
        for case in cases:
            if case.shape == "chain" and cached:
                continue
            row = [str(case.rows)]
            for name in found.backends:
                seconds = found.median(name, case)
                base = found.best("llamacpp", case)
                if seconds is None:
                    row += ["-", "-", "-"]
                    continue
                relative = found.relative(name, case)
                row += [
                    f"{1e3 * seconds:.2f}",
                    f"{case.rows / seconds:.0f}"
                    if relative is None
                    else f"{relative:.2f}",
                    _interval(found.ratio(base, name, case)) if base else "-",
                ]
            rows.append(row)
        title = f"behind {cached} cached rows" if cached else "prefill"
        lines += [f"{title}:", *table(header, rows, left=0), ""]
        lines += [*_masks(found, cached), ""] if cached else []
    return [*lines, COST_LEGEND]


def qualities(found: Sequence[Quality]) -> list[str]:
    """Perplexity and distance by backend."""
    rows = [
        [
            row.backend,
            f"{row.perplexity:.4f}",
            "-" if row.kl is None else f"{row.kl:.5f}",
            "-" if row.top1 is None else f"{row.top1:.2%}",
            str(row.tokens),
        ]
        for row in found
    ]
    reference = next((row.reference for row in found if row.reference), None)
    against = f" from {reference}" if reference else ""
    return table(
        ("backend", "perplexity", f"KL{against}", "same top-1", "tokens"), rows
    )


def _masks(found: Costs, cached: int) -> list[str]:
    """Branching trees over chains of as many rows."""
    chains = [
        case
        for case in found.cases
        if case.cached == cached and case.shape == "chain" and case.rows > 1
    ]
    rows = [
        [
            str(case.rows),
            *(
                "-" if (cost := found.mask_cost(name, case)) is None else f"{cost:+.1%}"
                for name in found.backends
            ),
        ]
        for case in chains
    ]
    header = ["rows", *found.backends]
    return ["what branching costs over a chain:", *table(header, rows, left=0)]


def _arm_table(
    rows: Sequence[Row], compared: Sequence[Interval | None], other: str | None
) -> list[str]:
    header = [
        *_speed_header("method", other),
        "accepted",
        "of rows",
        "draft",
        "forward",
        "possible",
        "first ms",
        "gap p50",
        "p95",
        "MB",
        "identical",
    ]
    cells = [
        [
            *_speed_cells(row, ratio),
            f"{row.acceptance:.0%}",
            f"{row.node_yield:.0%}",
            _number(row.draft_share, ".2f"),
            _number(row.forward_ratio, ".2f"),
            _number(row.ratio_possible, ".2f"),
            f"{row.ttft_ms:.0f}",
            _number(row.itl_ms_p50, ".2f"),
            _number(row.itl_ms_p95, ".2f"),
            _number(row.extra_memory_mb, ".1f"),
            "yes" if row.identical else "no",
        ]
        for row, ratio in zip(rows, compared, strict=True)
    ]
    return table(header, cells, left=2)


def _short_table(
    name: str,
    rows: Sequence[Row],
    compared: Sequence[Interval | None],
    other: str | None,
) -> list[str]:
    header = _speed_header(f"{name} ({rows[0].prompts})" if name else "method", other)
    cells = [
        _speed_cells(row, ratio) for row, ratio in zip(rows, compared, strict=True)
    ]
    return table(header, cells, left=2)


def _speed_header(first: str, other: str | None) -> list[str]:
    extra = [f"x {other}"] if other else []
    return [first, "backend", "tok/s", "x plain", *extra, "tok/round", "tokens"]


def _speed_cells(row: Row, ratio: Interval | None) -> list[str]:
    return [
        row.method if row.tree in ("", "auto") else f"{row.method} {row.tree}",
        row.backend,
        _number(row.tokens_per_s, ".1f"),
        _ratio(row),
        *([_interval(ratio)] if ratio is not None else []),
        f"{row.tokens_per_round:.2f}",
        str(row.tokens),
    ]


def _ratio(row: Row) -> str:
    if row.method == "plain" or row.ratio_vs_plain is None:
        return "-"
    return f"{row.ratio_vs_plain:.2f} ({row.ratio_low:.2f}-{row.ratio_high:.2f})"


def _interval(ratio: Interval) -> str:
    if ratio.middle is None:
        return "-"
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
