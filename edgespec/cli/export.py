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
    heads: Annotated[
        list[Path] | None,
        typer.Option(
            "--head",
            metavar="PATH",
            help="A draft for the model: a head (Medusa, EAGLE-1/2 or EAGLE-3), or a "
            "small model with the same tokens, as a file or a directory (safetensors, "
            "PyTorch or GGUF). Repeatable.",
        ),
    ] = None,
    head_quant: Annotated[
        str | None,
        typer.Option(
            "--head-quant",
            metavar="QUANT",
            help="Of the heads. Default: q8_0, or what a GGUF holds.",
        ),
    ] = None,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            "--draft-vocab",
            metavar="N[:COUNTS]",
            help="Heads draft N tokens only: those that occur most by COUNTS, a JSON "
            "file of counts by id; without it the first ones.",
        ),
    ] = None,
    tap_convention: Annotated[
        str | None,
        typer.Option(
            "--tap-convention",
            metavar="KIND",
            help="Whether the layer ids of an EAGLE-3 head mean a layer's input or its "
            "output. Needed where the file does not tell.",
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

    Example: edgespec export model.Q4_0.gguf -o my-bundle --head my-eagle3-head/
    """
    try:
        from edgespec_export import head_bundle, onnx_graph, pipeline
    except ImportError as error:
        raise BackendError(
            f"export needs the module {error.name}; "
            "install it with: pip install 'edgespec[export]'"
        ) from error

    count, counts = parse_draft_vocab(draft_vocab)
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
            heads=head_bundle.HeadOptions(
                tuple(heads or ()), head_quant, count, counts, tap_convention
            ),
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


def parse_draft_vocab(text: str | None) -> tuple[int | None, Path | None]:
    """Reads "8192" or "8192:counts.json". Raises UsageError on anything else."""
    if text is None:
        return None, None
    number, colon, path = text.partition(":")
    if not (number.isascii() and number.isdigit()) or bool(colon) != bool(path):
        raise UsageError(
            f"--draft-vocab: expected a number or NUMBER:FILE, got {text!r}"
        )
    return int(number), Path(path) if path else None
