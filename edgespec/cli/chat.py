"""`edgespec chat`: a conversation on the terminal, from a pipe, or one question."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.opening import open_session
from edgespec.cli.options import (
    DEFAULT_MODEL,
    UNLIMITED,
    MaxTokens,
    Offline,
    TemplateArgs,
    check_text,
    parse_template_args,
    settings,
)
from edgespec.cli.render import (
    TextWriter,
    mark_drafted,
    stats_report,
    status_line,
    use_colour,
)
from edgespec.cli.terminal import note
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.errors import EdgeSpecError, UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

    from edgespec.conversation import Conversation
    from edgespec.reply import Delta

HISTORY = "chat_history"
HELP = """\
/help            this list
/reset           forget the conversation, keep the system text
/regen           answer the last question again, differently
/undo            take back the last question and its answer
/save FILE       save the conversation
/load FILE       go on with a saved one
/stats           the last reply in numbers; drafted and accepted text in green
/spec on|off     speculation; the text is the same either way
/set             show settings
/set KEY VALUE   change one; VALUE "default" restores it
/exit            leave, as Ctrl-D does
Enter sends; Alt-Enter, or a \\ at the end, begins a new line. Ctrl-C stops a reply."""


@settings
def command(
    sampling: Sampling,
    speculation: Speculation,
    runtime: Runtime,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A bundle directory, a .gguf file, hf:ORG/REPO[:QUANT], or a name of "
            "'edgespec models list'.",
        ),
    ] = DEFAULT_MODEL,
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="Answer this and exit."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told first.")
    ] = None,
    max_tokens: MaxTokens = UNLIMITED,
    template_arg: TemplateArgs = None,
    offline: Offline = False,
) -> None:
    """Talk to a model.

    With QUESTION, prints the answer and exits; MODEL then comes first. On a terminal,
    opens a chat: /help lists its commands. From a pipe, every line is one turn.

    Examples: edgespec chat smollm2-135m "What is a tree?"

    edgespec chat my.gguf --draft eagle:my-eagle3-head/
    """
    from edgespec.conversation import Conversation

    if question is None and " " in model.strip() and not Path(model).exists():
        raise UsageError(
            f"chat: {model!r} is no model; to ask a question, name the model first: "
            f'edgespec chat {DEFAULT_MODEL} "{model}"'
        )
    check_text("QUESTION", question)
    check_text("--system", system)
    template_args = parse_template_args(template_arg)
    session = open_session(model, speculation, runtime, offline=offline)
    chat = Chat(
        Conversation(
            session,
            system=system,
            sampling=sampling,
            stopping=Stopping(max_tokens=max_tokens),
            template_args=template_args,
        )
    )
    if question is not None:
        chat.show(chat.conversation.ask(question))
        if sys.stderr.isatty():
            note(chat.status())
    elif sys.stdin.isatty():
        note(f"{chat.describe()}\n/help lists commands, Ctrl-D leaves.")
        chat.run_terminal()
    elif not chat.run_lines(sys.stdin.buffer):
        raise typer.Exit(1)


class Chat:
    """Shows a conversation and obeys its slash commands."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: note(HELP),
            "reset": self._reset,
            "regen": self._regenerate,
            "undo": self._undo,
            "save": self._save,
            "load": self._load,
            "stats": self._stats,
            "spec": self._spec,
            "set": self._set,
        }

    def run_terminal(
        self, source: Input | None = None, output: Output | None = None
    ) -> None:
        """Reads turns with line editing until Ctrl-D or /exit."""
        prompt = _prompt_session(
            lambda: self.status() or self.describe(), source, output
        )
        while True:
            try:
                line = prompt.prompt("> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            if self.take(line) is None:
                return

    def run_lines(self, lines: Iterable[bytes]) -> bool:
        """Takes every line as a turn; whether all of them worked."""
        all_worked = True
        for number, data in enumerate(lines, 1):
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                note(f"edgespec: stdin, line {number}: expected UTF-8 text: {error}")
                all_worked = False
                continue
            worked = self.take(line.rstrip("\r\n"))
            if worked is None:
                break
            all_worked &= worked
        return all_worked

    def take(self, line: str) -> bool | None:
        """One turn or command; whether it worked, None to leave."""
        text = line.strip()
        if text in ("/exit", "/quit"):
            return None
        if not text:
            return True
        try:
            if text.startswith("/"):
                self._obey(text[1:])
            else:
                self.show(self.conversation.ask(line))
        except EdgeSpecError as error:
            note(f"edgespec: {error}")
            return False
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            note("stopped")
        return True

    def show(self, deltas: Generator[Delta, None, None]) -> None:
        """Streams a reply to stdout."""
        writer = TextWriter(sys.stdout)
        try:
            for delta in deltas:
                if delta.notice:
                    writer.end()
                    note(delta.notice)
                writer.write(delta.text, thinking=delta.thinking)
        finally:
            # An interrupt may hit between two deltas: close, so that the turn is kept.
            deltas.close()
            writer.end()
        reply = self.conversation.last_reply
        if reply is not None and reply.finish_reason == "context":
            note(
                f"the context of {self.conversation.session.context} tokens is full "
                "and ended the reply; a larger --ctx lets it go on"
            )
        if reply is not None and reply.notice:
            note(reply.notice)

    def status(self) -> str:
        """The last reply in a line, empty before the first."""
        reply = self.conversation.last_reply
        if reply is None:
            return ""
        return status_line(reply.stats, len(reply.tokens))

    def describe(self) -> str:
        session = self.conversation.session
        return f"{session.name} on {session.backend}, draft {session.draft}"

    def _obey(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if name not in self._commands:
            raise UsageError(f"unknown command /{name}; /help lists the commands")
        self._commands[name](argument.strip())

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        note("conversation forgotten")

    def _regenerate(self, _: str) -> None:
        self.show(self.conversation.regenerate())

    def _undo(self, _: str) -> None:
        note(f"taken back: {self.conversation.undo()}")

    def _save(self, path: str) -> None:
        self.conversation.save(_path("save", path))
        note(f"saved to {path}")

    def _load(self, path: str) -> None:
        self.conversation.load(_path("load", path))
        note(f"loaded {path}: {self.conversation.turns} questions")

    def _stats(self, _: str) -> None:
        reply = self.conversation.last_reply
        if reply is None:
            raise UsageError("/stats: no reply yet")
        spell = self.conversation.session.tokenizer.text_bytes
        note(
            mark_drafted(
                ((spell(p.token), p.is_drafted) for p in self.conversation.pieces),
                colour=use_colour(sys.stderr),
            )
        )
        note("\n".join([*stats_report(reply.stats), f"seed {reply.seed}"]))

    def _spec(self, wanted: str) -> None:
        if wanted not in ("on", "off"):
            raise UsageError(f"/spec: expected on or off, got {wanted!r}")
        self.conversation.session.is_speculating = wanted == "on"
        note(f"speculation {wanted}")

    def _set(self, argument: str) -> None:
        if argument:
            name, _, value = argument.partition(" ")
            self.conversation.set(name.removeprefix("--"), value.strip())
        for name, value in self.conversation.settings().items():
            if not argument or argument.split()[0].removeprefix("--") == name:
                note(f"{name} {'default' if value is None else value}")


def _path(what: str, path: str) -> Path:
    if not path:
        raise UsageError(f"/{what}: expected a file name")
    return Path(path).expanduser()


def _prompt_session(
    status: Callable[[], str], source: Input | None, output: Output | None
) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import ColorDepth
    from prompt_toolkit.output.defaults import create_output

    from edgespec.cache import home

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History
    try:
        home().mkdir(parents=True, exist_ok=True)
        path = home() / HISTORY
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    except OSError as error:
        note(f"no history kept: {error}")
        history = InMemoryHistory()
    return PromptSession(
        history=history,
        multiline=True,
        key_bindings=keys,
        bottom_toolbar=status,
        color_depth=None if use_colour(sys.stdout) else ColorDepth.DEPTH_1_BIT,
        input=source,
        output=output or create_output(always_prefer_tty=True),
    )
