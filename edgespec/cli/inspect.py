"""`edgespec inspect`: what a model is made of, what it needs, what the wall allows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.opening import open_session
from edgespec.cli.options import Offline, settings
from edgespec.cli.render import draw_tree, megabytes, table
from edgespec.cli.terminal import note, progress_bar
from edgespec.config import Runtime, Speculation
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.inspection import Inspection
    from edgespec.machine import Rates
    from edgespec.reach import Reached
    from edgespec.tree.topology import Tree


@settings
def command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A bundle, a .gguf, a .onnx, or a model's name."
        ),
    ],
    runtime: Runtime,
    tree: Annotated[
        str | None,
        typer.Option("--tree", help="Draw this tree: chain:K or a JSON file."),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Time this machine and the model's real forwards, a few seconds. "
            "Default: the machine always, the model unless PATH is a single file.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.")
    ] = False,
    offline: Offline = False,
) -> None:
    """Show a model's architecture, types, memory needs and speed limit.

    The floor is the memory wall: the bytes one token has to read, over the measured
    read bandwidth. The share reached comes from forwards of the real backend.

    Example: edgespec inspect smollm2-135m --ctx 2048 --tree chain:4
    """
    from edgespec import cpu, machine
    from edgespec.inspection import as_object, default_context
    from edgespec.loading import check_runtime
    from edgespec.tree.shape import read_shape

    wanted = read_shape(tree) if tree is not None else None
    check_runtime(runtime)
    found, is_single_file = _inspect(path, offline)
    shape = found.architecture
    check_runtime(runtime, shape.max_position or None if shape else None)
    context = runtime.context or (default_context(shape) if shape else None)
    if measure and found.path.suffix == ".onnx":
        raise UsageError(f"--measure: {path} is a graph alone; give its bundle")
    rates = reached = None
    if measure is not False:
        rates = machine.measure(runtime.threads or cpu.usable_cores())
        if measure or not is_single_file:
            reached = _reach(path, runtime, found, rates, offline)
    if as_json:
        data = as_object(found) | _computed(found, context, rates)
        data["rates"] = rates and asdict(rates)
        data["reached"] = reached and {
            "backend": reached[0],
            "widths": [asdict(width) for width in reached[1]],
        }
        print(json.dumps(data))
        return
    lines = _describe(found)
    if shape is not None and context is not None:
        lines += _needs(found, context, rates)
    if reached is not None:
        lines += _reached_lines(*reached)
    for title, drawn in (("stored tree", found.tree), ("tree", wanted)):
        if drawn is not None:
            lines += ["", *_tree_lines(title, drawn)]
    print("\n".join(lines))


def _inspect(path: str, offline: bool) -> tuple[Inspection, bool]:
    from edgespec.bundle import resolve
    from edgespec.inspection import inspect_bundle, inspect_file

    if Path(path).suffix in (".gguf", ".onnx") and not path.startswith("hf:"):
        return inspect_file(Path(path)), True
    with progress_bar() as progress:
        return inspect_bundle(resolve(path, offline=offline, progress=progress)), False


def _reach(
    path: str, runtime: Runtime, found: Inspection, rates: Rates, offline: bool
) -> tuple[str, list[Reached]] | None:
    from edgespec.reach import reach

    session = open_session(path, Speculation(draft="none"), runtime, offline=offline)
    backend = session.target.name
    containers = ("onnx",) if backend == "onnx" else ("packed", "gguf")
    layout = next((found.layouts[c] for c in containers if c in found.layouts), None)
    if layout is None or layout.read_bytes is None or layout.macs is None:
        note(
            f"shares not told: the bytes {backend} reads are unknown; "
            "reading the file needs: pip install 'edgespec[export]'"
        )
        return None
    note(f"timing {backend}")
    return backend, reach(
        session.target, rates, read_bytes=layout.read_bytes, macs=layout.macs
    )


def _computed(
    found: Inspection, context: int | None, rates: Rates | None
) -> dict[str, Any]:
    from edgespec.inspection import floor, memory

    if context is None or found.architecture is None:
        return {"context": context, "memory": None, "floor": None}
    floors = {
        name: rates and floor(found, name, context, rates) for name in found.layouts
    }
    return {
        "context": context,
        "memory": {
            name: asdict(need) | {"total": need.total}
            for name in found.layouts
            for need in [memory(found, name, context)]
        },
        "floor": {name: value and asdict(value) for name, value in floors.items()},
    }


def _describe(found: Inspection) -> list[str]:
    lines = [f"{found.name}  {found.path}"]
    shape = found.architecture
    if shape is not None:
        lines.append(
            f"{shape.arch}: {shape.n_layers} layers, hidden {shape.hidden}, "
            f"{shape.n_heads} heads, {shape.n_kv_heads} KV heads of {shape.head_dim}, "
            f"ffn {shape.ffn}, vocabulary {shape.vocab}"
            f"{', tied' if shape.is_tied else ''}, rope {shape.rope}, "
            f"positions {shape.max_position}"
        )
    for layout in found.layouts.values():
        rows = [
            [
                kind,
                str(use.tensors),
                "-" if use.bytes is None else megabytes(use.bytes),
                "-"
                if use.bytes is None or not layout.bytes
                else f"{use.bytes / layout.bytes:.1%}",
            ]
            for kind, use in sorted(
                layout.types.items(), key=lambda item: -(item[1].bytes or 0)
            )
        ]
        lines += [
            "",
            f"{layout.file}: {megabytes(layout.bytes)} of weights"
            f"{' (' + layout.note + ')' if layout.note else ''}",
            *table(("type", "tensors", "bytes", "share"), rows),
        ]
    if found.drafts:
        drafts = [
            [f"--draft {draft.option}", draft.origin, megabytes(draft.bytes)]
            for draft in found.drafts
        ]
        lines += ["", *table(("draft", "of", "file"), drafts, left=2)]
    return lines


def _needs(found: Inspection, context: int, rates: Rates | None) -> list[str]:
    from edgespec.inspection import floor, memory

    lines = ["", f"at a context of {context} tokens:"]
    rows = []
    for name in found.layouts:
        need = memory(found, name, context)
        sizes = (need.weights, need.kv, need.buffers, need.total)
        rows.append([name, *(megabytes(size) for size in sizes)])
    lines += table(("memory", "weights", "KV", "buffers (est.)", "total"), rows)
    if rates is None:
        return lines
    lines += [
        "",
        f"this machine, {rates.threads} threads: "
        f"reads {rates.read_gb_per_s:.1f} GB/s, "
        f"{rates.int8_gmac_per_s:.0f} G int8 multiply-accumulates/s "
        f"({rates.int8_kernel})",
    ]
    for name in found.layouts:
        wall = floor(found, name, context, rates)
        if wall is not None:
            lines.append(
                f"{name} floor: {megabytes(wall.read_bytes)} per token, "
                f"{wall.ms:.2f} ms at best with the context full, "
                f"{wall.ms_empty:.2f} ms with it empty"
            )
    return lines


def _reached_lines(backend: str, reached: list[Reached]) -> list[str]:
    rows = [
        [
            str(width.rows),
            f"{width.ms:.2f}",
            f"{width.ratio:.2f}",
            f"{width.read_gb_per_s:.1f}",
            f"{width.read_share:.0%}",
            f"{width.gmac_per_s:.0f}",
            f"{width.int8_share:.1%}",
        ]
        for width in reached
    ]
    header = ("rows", "ms", "c(n)/c(1)", "GB/s", "of best", "GMAC/s", "of best")
    return ["", f"{backend}, one forward:", *table(header, rows)]


def _tree_lines(title: str, tree: Tree) -> list[str]:
    return [
        f"{title}: {tree.n} rows, depth {int(tree.depth.max())}",
        *draw_tree(tree),
    ]
