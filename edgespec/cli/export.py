"""`edgespec export`: a checkpoint in, a bundle out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.terminal import note, progress_bar
from edgespec.errors import BackendError, UsageError


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A .gguf file (of shards, any one) or a Hugging Face checkpoint "
            "directory.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="The bundle to make.")
    ],
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="gguf (default), onnx, or packed: for the native backend alone, which "
            "maps it and starts at once. Repeatable.",
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            "--quant",
            metavar="QUANT",
            help="q4_0, q4_1, q8_0, f16 or f32. Default: what the source holds, be it "
            "quantised or full precision. Of 4 bits, embedding and head get 8, as does "
            "in ONNX any tensor that 4 bits distort by more than a tenth.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="KIND",
            help="Of the ONNX graph: gqa (one fused op) or explicit (plain ops, for "
            "providers without its bias input).",
        ),
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(
            "--taps",
            metavar="I,J,...",
            help="hidden_states indices the ONNX graph also outputs.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model in the bundle.")
    ] = None,
    no_check: Annotated[
        bool,
        typer.Option("--no-check", help="Do not compare the bundle with its source."),
    ] = False,
) -> None:
    """Export a checkpoint into a bundle of GGUF and/or ONNX files.

    The bundle is compared with its source on a fixed text: size, mean KL and top-1
    agreement go to stderr, the bundle's path to stdout.
    """
    try:
        from edgespec_export import onnx_graph, pipeline
    except ImportError as error:
        raise BackendError(
            f"export needs the module {error.name}; "
            "install it with: pip install 'edgespec[export]'"
        ) from error

    lines: list[str] = []
    with progress_bar() as progress:
        pipeline.export(
            source,
            out,
            formats=formats or ["gguf"],
            quant=quant,
            attention=attention or onnx_graph.DEFAULT_ATTENTION,
            taps=parse_taps(taps),
            check=not no_check,
            progress=progress,
            name=name,
            log=lines.append,
        )
    for line in lines:
        note(line)
    typer.echo(str(out))


def parse_taps(text: str | None) -> tuple[int, ...]:
    """Reads "2,15,27". Raises UsageError on anything but numbers and commas."""
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--taps: expected indices such as 2,15,27, got {text!r}"
        ) from None
