"""A benchmark as a picture: tokens per second by arm, or c(n) by backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import BackendError, UsageError

if TYPE_CHECKING:
    from edgespec.bench_cost import Costs
    from edgespec.bench_report import Row


def check(path: Path) -> None:
    """Raises before the work what would be raised after it.

    BackendError without matplotlib, UsageError for a kind of file it cannot write.
    """
    figure, _ = _figure()
    kinds = [f".{kind}" for kind in figure.canvas.get_supported_filetypes()]
    if path.suffix.lower() not in kinds:
        expected = ", ".join(kinds)
        raise UsageError(f"--plot {path}: expected a name ending in one of {expected}")


def speeds(rows: Sequence[Row], title: str, path: Path) -> None:
    """Bars of tokens per second, the ratio to the backend's plain decoding on each."""
    figure, axes = _figure()
    shown = [row for row in rows if row.tokens_per_s is not None]
    names = [f"{row.method}\n{row.backend}" for row in shown]
    bars = axes.bar(names, [row.tokens_per_s for row in shown], color="tab:blue")
    labels = [
        f"{row.tokens_per_s:.0f}"
        if row.method == "plain" or row.ratio_vs_plain is None
        else f"{row.tokens_per_s:.0f}\n{row.ratio_vs_plain:.2f}x "
        f"({row.ratio_low:.2f}-{row.ratio_high:.2f})"
        for row in shown
    ]
    axes.bar_label(bars, labels, fontsize="small")
    axes.margins(y=0.15)
    axes.set_ylabel("tokens per second")
    axes.set_title(title)
    figure.savefig(path)


def costs(found: Costs, title: str, path: Path) -> None:
    """c(n) / c(1) against n, a line per backend and cache length."""
    figure, axes = _figure()
    for name in found.backends:
        for cached in sorted({case.cached for case in found.cases if case.cached}):
            points = [
                (case.rows, relative)
                for case in found.cases
                if case.cached == cached
                and case.shape == "tree"
                and (relative := found.relative(name, case)) is not None
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    label=f"{name}, {cached} cached",
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("rows of one forward, n")
    axes.set_ylabel("c(n) / c(1)")
    axes.set_title(title)
    if axes.lines:
        axes.legend()
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:
    try:
        # Not pyplot: no window, no state shared with the caller.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            "--plot needs matplotlib: pip install 'edgespec[bench]'"
        ) from error
    figure = Figure(figsize=(9, 5), layout="constrained")
    return figure, figure.subplots()
