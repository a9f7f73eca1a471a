"""`edgespec train`: a draft head for a model, from what the model itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec import config
from edgespec.cli import options
from edgespec.cli.terminal import note, progress_bar
from edgespec.errors import BackendError

_DEFAULT = config.Training()


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The target, a MODEL with a GGUF: a head belongs to the quantised "
            "weights it was trained on.",
            show_default=False,
        ),
    ],
    head: Annotated[
        str,
        typer.Option(
            "--head",
            metavar="KIND",
            help="eagle3, medusa, or pruned:LAYERS, a draft model of these layers of "
            "the target, such as pruned:0,1.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="DIR", help="Where the head is kept."),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="What people ask: JSON lines with `prompt` or `turns`. The target "
            "makes up more of its own, or all.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Where the target's replies and hidden states are, or go: 4.6 KB a "
            "token for 576 wide ones. Default: DIR/data.",
        ),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            "--measure",
            metavar="FILE",
            help="Prompts to measure on and never to train on, beside the held-out "
            "ones.",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", help="Of training, after the data.")
    ] = _DEFAULT.minutes,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Of data there are to be.")
    ] = _DEFAULT.tokens,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from DIR's last checkpoint.")
    ] = False,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            help="Of an EAGLE-3 head: safeailab or speculators, which vLLM serves.",
        ),
    ] = _DEFAULT.layout,
    draft_vocab: Annotated[
        int,
        typer.Option(
            "--draft-vocab",
            metavar="N",
            help="Tokens the head drafts: the most frequent in replies; of Medusa the "
            "first ones.",
        ),
    ] = _DEFAULT.draft_vocab,
    seed: Annotated[int, typer.Option("--seed", help="Of data and training.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="Default: the cores this process may use."),
    ] = None,
    offline: options.Offline = False,
) -> None:
    """Train a draft head on what its target writes.

    First the target writes data, then the head learns to guess what it writes; both
    go on where they were stopped. Held-out acceptance by depth is printed as it goes:
    of drafts whose earlier tokens were right, the share that is right, and the tokens
    of a round they add up to. The best head is kept. Ctrl-C ends training with a
    checkpoint; there is one every three minutes too.

    Example: edgespec train smollm2-135m --head eagle3 -o my-head --minutes 120

    On several GPUs or machines: accelerate launch -m edgespec train ..., on processors
    torchrun instead. What --data and -o name has to be one place for all of them.
    """
    options.check_text("SOURCE", source)
    try:
        from edgespec_export.train import training
    except ImportError as error:
        raise BackendError(
            f"training needs the module {error.name}; "
            "install it with: pip install 'edgespec[export,train]'"
        ) from error
    from edgespec.bundle import resolve
    from edgespec.cpu import usable_cores

    kind = training.HeadKind.parse(head)
    wanted = training.Wanted(
        head=kind,
        directory=out,
        data=data or out / "data",
        prompts=prompts,
        measure=measure,
        minutes=minutes,
        tokens=tokens,
        resume=resume,
        layout=layout,
        draft_vocab=draft_vocab,
        seed=seed,
        threads=usable_cores() if threads is None else threads,
    )
    with progress_bar() as progress:
        model = resolve(source, offline=offline, progress=progress)
        place = training.train(model, wanted, progress=progress, log=note)
    if training.is_main_process():
        typer.echo(str(place))
