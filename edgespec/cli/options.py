"""Options that commands share: one flag per field of the dataclasses in `config`."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from edgespec import config
from edgespec.config import (
    Runtime,
    Sampling,
    Speculation,
    Stopping,
    check_sampling,
)
from edgespec.errors import UsageError

Offline = Annotated[
    bool, typer.Option("--offline", help="Never touch the network: cached models only.")
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A bundle directory, a .gguf file, hf:ORG/REPO[:QUANT], or a name of "
        "'edgespec models list'.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        min=0,
        help="Most tokens of a reply. Default: until the context is full.",
    ),
]
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="A name the chat template asks for; VALUE is JSON or plain text, as in "
        "enable_thinking=false. Repeatable.",
    ),
]
UNLIMITED = Stopping().max_tokens
DEFAULT_MODEL = "smollm2-135m"
RESERVED_NAMES = ("messages", "add_generation_prompt")


@dataclass(frozen=True)
class Flag:
    """One option: the field it fills, how it is spelt and read."""

    field: str
    name: str
    kind: Any
    help: str
    metavar: str | None = None
    parse: Callable[[Any], Any] | None = None


def check_text(option: str, *texts: str | None) -> None:
    """Raises UsageError for an argument whose bytes are not UTF-8."""
    for text in texts:
        if text is not None and any("\ud800" <= c <= "\udfff" for c in text):
            raise UsageError(
                f"{option}: expected UTF-8 text, got {os.fsencode(text)!r}"
            )


def parse_logit_bias(entries: list[str]) -> dict[int, float]:
    """Reads ID=VALUE entries; -inf bans a token. Raises UsageError naming a bad one."""
    bias: dict[int, float] = {}
    for entry in entries:
        token, separator, value = entry.partition("=")
        try:
            number = float(value)
            if not (separator and token.strip().isdecimal()):
                raise ValueError
            if math.isnan(number) or number == math.inf:
                raise ValueError
        except ValueError:
            raise UsageError(
                "--logit-bias: expected ID=VALUE, a token id and a number to add to "
                f"its logit (-inf bans it), such as 2=-inf or 421=1.5; got {entry!r}"
            ) from None
        bias[int(token)] = number
    return bias


def parse_template_args(entries: list[str] | None) -> dict[str, Any]:
    """Reads NAME=VALUE entries. Raises UsageError naming a bad one."""
    args: dict[str, Any] = {}
    for entry in entries or ():
        check_text("--template-arg", entry)
        name, separator, value = entry.partition("=")
        if not separator or not name.isidentifier() or name in RESERVED_NAMES:
            raise UsageError(
                "--template-arg: expected NAME=VALUE, a name of the template, not "
                f"{' or '.join(RESERVED_NAMES)}, such as enable_thinking=false; "
                f"got {entry!r}"
            )
        try:
            args[name] = json.loads(value)
        except (ValueError, RecursionError):
            args[name] = value
    return args


_FLAGS: dict[type, tuple[Flag, ...]] = {
    Sampling: (
        Flag(
            "temperature",
            "--temperature",
            float | None,
            f"0 is greedy. Default: the model's, else {config.FALLBACK_TEMPERATURE}.",
        ),
        Flag("top_k", "--top-k", int, "Keep the K likeliest tokens; 0 is off."),
        Flag(
            "top_p",
            "--top-p",
            float | None,
            "Keep the likeliest tokens up to this total probability; 1 is off. "
            f"Default: the model's, else {config.FALLBACK_TOP_P}.",
        ),
        Flag(
            "min_p",
            "--min-p",
            float,
            "Drop tokens below this share of the likeliest one's probability; "
            "0 is off.",
        ),
        Flag(
            "repeat_penalty",
            "--repeat-penalty",
            float,
            "Divides the logits of recent tokens; 1 is off.",
        ),
        Flag(
            "presence_penalty",
            "--presence-penalty",
            float,
            "Subtracted from the logits of recent tokens.",
        ),
        Flag(
            "frequency_penalty",
            "--frequency-penalty",
            float,
            "Subtracted once per recent occurrence.",
        ),
        Flag(
            "logit_bias",
            "--logit-bias",
            list[str],
            "Add VALUE to the logit of token ID; -inf bans it. Repeatable.",
            "ID=VALUE",
            parse_logit_bias,
        ),
        Flag(
            "seed",
            "--seed",
            int | None,
            "Same seed, same text. Default: a fresh one, reported.",
        ),
    ),
    Speculation: (
        Flag(
            "draft",
            "--draft",
            str,
            "Who drafts: none, ngram (what was said before), eagle, medusa or model, "
            "which are heads of the model; :PATH behind the word takes one of yours, "
            "+ngram n-grams beside it. auto: eagle+ngram where the model has such a "
            "head, else ngram. The text is the same with every one.",
        ),
        Flag(
            "tree",
            "--tree",
            str,
            "Shape of the drafts: auto, best:N (always the best N rows, root "
            "included), chain:K or a JSON file with parent and rank.",
        ),
        Flag(
            "cost_slope",
            "--cost-slope",
            float | None,
            "Choose trees as if each further row cost this share of the first, "
            "whatever the clock says: repeatable. Default: costs are measured.",
        ),
        Flag("verify", "--verify", str, "How drafts are verified: coupled."),
    ),
    Runtime: (
        Flag(
            "backend",
            "--backend",
            str,
            "Who runs the model: auto (native where there is a GGUF), native, onnx or "
            "llamacpp.",
        ),
        Flag(
            "threads",
            "--threads",
            int | None,
            "Default: the cores this process may use.",
        ),
        Flag(
            "context",
            "--ctx",
            int | None,
            "Tokens of prompt and reply together. Default: the model's limit, at most "
            f"{config.DEFAULT_CONTEXT}.",
        ),
        Flag(
            "kv",
            "--kv",
            str,
            "How keys and values are kept: f16, or int8 in half the memory.",
        ),
        Flag(
            "window",
            "--window",
            int | None,
            "See only the last so many tokens and the sinks; replies and chats then go "
            "on beyond any context. Default: everything is seen.",
        ),
        Flag(
            "sinks",
            "--sinks",
            int,
            "First tokens that stay visible beside a window.",
        ),
        Flag(
            "mmap",
            "--mmap/--no-mmap",
            bool,
            "Map the weights' file, or read it into memory.",
        ),
        Flag(
            "mlock",
            "--mlock",
            bool,
            "Keep the weights from being swapped out.",
        ),
    ),
}

Command = TypeVar("Command", bound=Callable[..., None])


def settings(command: Command) -> Command:
    """Gives a command the flags of each settings dataclass among its parameters.

    A parameter annotated Sampling, Speculation or Runtime becomes that group's flags on
    the command line; the command receives the filled dataclass, checked.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if kind in _FLAGS}
    parameters = [
        parameter.replace(
            annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY
        )
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name not in groups
    ]
    for kind in groups.values():
        parameters += [_parameter(kind, flag) for flag in _FLAGS[kind]]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = _fill(kind, values)
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run  # type: ignore[return-value]


def _parameter(kind: type, flag: Flag) -> inspect.Parameter:
    option = typer.Option(
        flag.name,
        help=flag.help,
        metavar=flag.metavar,
        rich_help_panel=kind.__name__,
        show_default=flag.parse is None,
    )
    default = [] if flag.parse else getattr(kind(), flag.field)
    return inspect.Parameter(
        flag.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[flag.kind, option],
    )


def _fill(kind: type, values: dict[str, Any]) -> Any:
    chosen: dict[str, Any] = {}
    for flag in _FLAGS[kind]:
        value = values.pop(flag.field)
        chosen[flag.field] = flag.parse(value) if flag.parse else value
    filled = kind(**chosen)
    if isinstance(filled, Sampling):
        check_sampling(filled)
    return filled
