"""The `edgespec` command: registers the commands and maps errors to exit codes.

Conventions of the command modules beside this one:

- One module per command, named like it, with a function `command` whose parameters are
  typer annotations and whose docstring is the help text. It is registered here with
  `app.command("NAME")(NAME.command)`; a group of subcommands exposes `app` instead.
- A command parses, calls the library and prints. Results go to stdout, everything else
  (progress, notes, statistics) to stderr with `note` and `progress_bar`
  of `edgespec.cli.terminal`.
- Defaults are read from `edgespec.config`, never repeated.
- Heavy imports (onnxruntime, numpy, the exporter) stay inside the function, so that
  `--help` is instant and a missing extra hurts only the commands that need it.
- Errors are raised, not printed: UsageError exits with 2, any other EdgeSpecError and
  what the system refuses (a full disk, a missing permission) with 1, Ctrl-C with 130, a
  closed pipe quietly. Anything else is a bug and keeps its traceback.
- Tests call `main([...])`, which returns the exit code, and read what was printed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from edgespec.cli import (
    bench,
    chat,
    doctor,
    export,
    generate,
    inspect,
    models,
    train,
    verify,
)
from edgespec.cli.terminal import note, prepare_streams
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.version import __version__

app = typer.Typer(
    name="edgespec",
    help="Runs language models with lossless tree speculation.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgespec {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


app.command("chat")(chat.command)
app.command("generate")(generate.command)
app.command("export")(export.command)
app.command("train")(train.command)
app.command("verify")(verify.command)
app.command("bench")(bench.command)
app.command("inspect")(inspect.command)
app.command("doctor")(doctor.command)
app.add_typer(models.app, name="models")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    prepare_streams()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="edgespec")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except EdgeSpecError as error:
        note(f"edgespec: {error}")
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        note(f"edgespec: {_where(error)}: {error.strerror or error}")
        code = 1
    else:
        code = 0
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes once more on its way out; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0 and not isinstance(error, BrokenPipeError):
            note(f"edgespec: {_where(error)}: {error.strerror}")
        code = code or 1
    return code


def _where(error: OSError) -> str:
    """The file an error names; only writing a result fails without one."""
    return os.fsdecode(error.filename) if error.filename else "cannot write the result"
