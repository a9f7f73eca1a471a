"""`edgespec generate`: one prompt in, one reply out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.opening import open_session
from edgespec.cli.options import (
    UNLIMITED,
    MaxTokens,
    Model,
    Offline,
    TemplateArgs,
    check_text,
    parse_template_args,
    settings,
)
from edgespec.cli.render import TextWriter, status_line
from edgespec.cli.terminal import note
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.errors import UsageError

if TYPE_CHECKING:
    from edgespec.reply import Reply


@settings
def command(
    model: Model,
    sampling: Sampling,
    speculation: Speculation,
    runtime: Runtime,
    source: Annotated[
        str | None,
        typer.Argument(metavar="-", help="- reads the prompt from stdin."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from FILE."),
    ] = None,
    max_tokens: MaxTokens = UNLIMITED,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="STR", help="End before this text. Repeatable."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text itself, without chat template."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
    logprobs: Annotated[
        int,
        typer.Option(
            "--logprobs",
            min=0,
            help="With --json: log-probabilities of each token and the K best.",
        ),
    ] = 0,
    template_arg: TemplateArgs = None,
    offline: Offline = False,
) -> None:
    """Answer one prompt.

    The text goes to stdout as it is made, statistics to stderr. The prompt is a user's
    message unless --raw; of a file or stdin the last line break is dropped.

    Example: edgespec generate smollm2-135m -p "Name three rivers." -n 64
    """
    if logprobs and not as_json:
        raise UsageError("--logprobs: only shown in the object of --json; add --json")
    check_text("--stop", *(stop or ()))
    template_args = parse_template_args(template_arg)
    if raw and template_args:
        raise UsageError("--template-arg: --raw uses no template; leave one out")
    text = _read_prompt(source, prompt, file)
    stopping = Stopping(max_tokens=max_tokens, stop=tuple(stop or ()))
    session = open_session(model, speculation, runtime, offline=offline)
    generation = session.generate(
        text,
        sampling=sampling,
        stopping=stopping,
        logprobs=logprobs,
        raw=raw,
        template_args=template_args,
    )
    if as_json:
        for delta in generation:
            if delta.notice:
                note(delta.notice)
        reply = generation.reply
        if reply.notice:
            note(reply.notice)
        is_utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
        print(json.dumps(_as_object(reply, logprobs), ensure_ascii=not is_utf8))
        return
    writer = TextWriter(sys.stdout)
    try:
        for delta in generation:
            if delta.notice:
                note(delta.notice)
            writer.write(delta.text, thinking=delta.thinking)
    finally:
        generation.close()
        writer.end()
    reply = generation.reply
    if reply.notice:
        note(reply.notice)
    note(
        f"{status_line(reply.stats, len(reply.tokens))} · "
        f"{reply.finish_reason} · seed {reply.seed}"
    )


def _read_prompt(source: str | None, prompt: str | None, file: str | None) -> str:
    if source not in (None, "-"):
        raise UsageError(
            f"generate: expected -p TEXT, -f FILE or - after MODEL, got {source!r}"
        )
    if source is None and prompt is None and file is None and not sys.stdin.isatty():
        source = "-"
    given = [option for option in (source, prompt, file) if option is not None]
    if len(given) != 1:
        raise UsageError(
            "generate: give one prompt: -p TEXT, -f FILE, or - for stdin; "
            f"got {len(given)}"
        )
    if prompt is not None:
        check_text("-p", prompt)
        return prompt
    if file == "-" or source == "-":
        data, where = sys.stdin.buffer.read(), "stdin"
    else:
        assert file is not None
        where = file
        try:
            data = Path(file).read_bytes()
        except OSError as error:
            raise UsageError(f"-f {file}: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: expected UTF-8 text: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")


def _as_object(reply: Reply, logprobs: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": reply.text,
        "tokens": list(reply.tokens),
        "prompt_tokens": reply.prompt_tokens,
        "finish_reason": reply.finish_reason,
        "seed": reply.seed,
        "stats": reply.stats.as_dict(),
    }
    if logprobs:
        result["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "top": entry.top}
            for entry in reply.logprobs
        ]
    return result
