"""`edgespec chat`: one question, piped turns, and the terminal with its commands."""

from __future__ import annotations

import errno
import io
import os
import pty
import select
import signal
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import edgespec
from edgespec.cli.app import main
from edgespec.cli.chat import Chat
from edgespec.config import Sampling, Speculation
from edgespec.conversation import Conversation, read_messages
from edgespec.errors import ContextError, FormatError, UsageError
from tests.processes import python
from tests.scripted import scripted_session

ANSWERS = {
    "hi": "hello",
    "bye": "so long",
    "ha": "ha ha ha ha ha ha ha ha",
    "two\nlines": "both",
}


@pytest.fixture
def session():
    # A fixed shape is drafted whatever the clock says of its worth.
    return scripted_session(ANSWERS, speculation=Speculation(tree="chain:3"))


@pytest.fixture
def chat(session) -> Chat:
    return Chat(Conversation(session))


@pytest.fixture
def loads(monkeypatch, session):
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    return session


def pipe(monkeypatch, text: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")))
    monkeypatch.setattr(sys, "stdin", stream)


def prompt_of(session) -> str:
    """Everything the target holds: prompt and reply."""
    return bytes(session.target.rows).decode()


# ---- one question --------------------------------------------------------------------


def test_question_prints_the_reply_alone(loads, capsys) -> None:
    assert main(["chat", "m", "hi"]) == 0
    assert capsys.readouterr().out == "hello\n"


def test_system_text_comes_first(loads, capsys) -> None:
    assert main(["chat", "m", "hi", "--system", "Be brief."]) == 0
    assert prompt_of(loads).startswith("system: Be brief.\nuser: hi\n")


def test_length_of_replies(loads, capsys) -> None:
    assert main(["chat", "m", "hi", "-n", "2"]) == 0
    assert capsys.readouterr().out == "he\n"


def test_question_without_model_says_what_to_type(loads, capsys) -> None:
    assert main(["chat", "What is a tree?"]) == 2
    assert 'edgespec chat smollm2-135m "What is a tree?"' in capsys.readouterr().err


def test_failing_question_exits_with_1(monkeypatch, capsys) -> None:
    session = scripted_session(ANSWERS, context=8)
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    assert main(["chat", "m", "hi"]) == 1
    assert "8" in capsys.readouterr().err


# ---- piped ---------------------------------------------------------------------------


def test_every_line_is_a_turn(loads, monkeypatch, capsys) -> None:
    pipe(monkeypatch, "hi\n\nbye\n")
    assert main(["chat", "m"]) == 0
    assert capsys.readouterr().out == "hello\nso long\n"
    assert prompt_of(loads).startswith("user: hi\nassistant: hello")


def test_commands_work_in_a_pipe(loads, monkeypatch, capsys) -> None:
    pipe(monkeypatch, "hi\n/reset\n/stats\n/exit\nbye\n")
    assert main(["chat", "m"]) == 1  # no reply to show after /reset
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "no reply yet" in err


def test_line_that_is_no_text_is_named_and_the_next_one_taken(
    loads, monkeypatch, capsys
) -> None:
    pipe(monkeypatch, "hi\r\nb\udcff\nbye\n")
    assert main(["chat", "m"]) == 1
    out, err = capsys.readouterr()
    assert out == "hello\nso long\n"
    assert "stdin, line 2: expected UTF-8" in err
    assert "0xff in position 1" in err


@pytest.mark.parametrize("arguments", [["m", "a\udcff"], ["m", "--system", "\udcff"]])
def test_argument_that_is_no_text_exits_with_2(loads, capsys, arguments) -> None:
    assert main(["chat", *arguments]) == 2
    assert "expected UTF-8 text, got b'" in capsys.readouterr().err


def test_reply_ended_by_the_context_says_so(monkeypatch, capsys) -> None:
    session = scripted_session({"hi": "h" * 99}, context=40)
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    assert main(["chat", "m", "hi"]) == 0
    out, err = capsys.readouterr()
    assert set(out) == {"h", "\n"}
    assert "context of 40 tokens is full and ended the reply" in err
    assert main(["chat", "m", "hi", "-n", "3"]) == 0
    assert capsys.readouterr().err == ""


def test_c35_turn_too_long_keeps_the_chat_alive(monkeypatch, capsys) -> None:
    session = scripted_session(ANSWERS, context=40)
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    pipe(monkeypatch, "x" * 100 + "\nhi\n")
    assert main(["chat", "m"]) == 1
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "40" in err


def test_dropped_turns_are_announced(monkeypatch, capsys) -> None:
    session = scripted_session(ANSWERS, context=80)
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    pipe(monkeypatch, "hi\nbye\n" * 3)
    assert main(["chat", "m"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello\nso long\n" * 3
    assert "dropped" in err


# ---- commands ------------------------------------------------------------------------


def test_reset_keeps_the_system_text(session, capsys) -> None:
    chat = Chat(Conversation(session, system="Be brief."))
    for line in ("hi", "/reset", "bye"):
        assert chat.take(line) is True
    roles = [m["role"] for m in chat.conversation.messages]
    assert roles == ["system", "user", "assistant"]
    assert "hi\n" not in prompt_of(session)


def test_regen_answers_again_with_a_fresh_seed(session, capsys) -> None:
    sampling = Sampling(temperature=5.0, seed=1)
    chat = Chat(Conversation(session, sampling=sampling))
    assert chat.take("hi")
    first = chat.conversation.last_reply
    assert chat.take("/regen")
    second = chat.conversation.last_reply
    assert first is not None
    assert second is not None
    assert (first.seed, second.seed != 1) == (1, True)
    assert chat.conversation.turns == 1
    assert len(chat.conversation.messages) == 2


def test_c30_regen_evaluates_one_prompt_token(chat) -> None:
    chat.take("hi")
    chat.take("/regen")
    reply = chat.conversation.last_reply
    assert reply is not None
    assert reply.evaluated_tokens == 1


def test_undo_takes_back_a_turn(chat, capsys) -> None:
    chat.take("hi")
    chat.take("bye")
    assert chat.take("/undo")
    assert "bye" in capsys.readouterr().err
    assert [m["content"] for m in chat.conversation.messages] == ["hi", "hello"]


@pytest.mark.parametrize("command", ["/undo", "/regen", "/stats"])
def test_nothing_to_work_on_is_an_error_not_an_end(chat, capsys, command) -> None:
    assert chat.take(command) is False
    assert capsys.readouterr().err


def test_save_and_load(chat, session, tmp_path, capsys) -> None:
    path = tmp_path / "talk é.json"
    chat.take("hi")
    assert chat.take(f"/save {path}")
    other = Chat(Conversation(session))
    assert other.take(f"/load {path}")
    assert other.conversation.messages == chat.conversation.messages
    assert other.take("bye")
    assert prompt_of(session).startswith("user: hi\nassistant: hello")


def test_save_overwrites_saved_chats_only(chat, tmp_path, capsys) -> None:
    chat.take("hi")
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert chat.take(f"/save {notes}") is False
    assert "exists and is not a saved chat" in capsys.readouterr().err
    assert notes.read_text() == "mine"
    path = tmp_path / "talk.json"
    path.touch()
    for turns in (1, 2):
        assert chat.take(f"/save {path}")
        assert len(read_messages(path)) == 2 * turns
        chat.take("bye")


def test_failed_save_keeps_the_file_that_was_there(
    chat, tmp_path, monkeypatch, capsys
) -> None:
    path = tmp_path / "talk.json"
    chat.take("hi")
    assert chat.take(f"/save {path}")
    before = path.read_bytes()

    def full(self: Path, text: str, **_: str) -> None:
        self.write_bytes(text.encode()[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    assert chat.take(f"/save {path}") is False
    assert f"{path}: cannot save: No space left" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "not a saved chat"),
        ("", "not a saved chat"),
        ("[]", "not a saved chat"),
        ('{"format": "edgespec-chat", "version": 2}', "expected 1, got 2"),
        ('{"format": "edgespec-chat", "version": 1}', "expected a list"),
        (
            '{"format": "edgespec-chat", "version": 1, "messages": [{"role": "me"}]}',
            r"messages\[0\]",
        ),
    ],
)
def test_bad_saved_chats_are_refused(tmp_path, content, message) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(FormatError, match=message):
        read_messages(path)


def test_load_failure_keeps_the_conversation(chat, tmp_path, capsys) -> None:
    chat.take("hi")
    assert chat.take(f"/load {tmp_path / 'none'}") is False
    assert chat.take("/save") is False
    assert chat.take("/load") is False
    assert chat.conversation.turns == 1


def test_spec_off_drafts_nothing_and_says_the_same(chat, session, capsys) -> None:
    chat.take("ha")
    assert max(session.target.forwards[1:]) > 1
    first = chat.conversation.last_reply
    session.target.forwards.clear()
    assert chat.take("/spec off")
    chat.take("/reset")
    chat.take("ha")
    second = chat.conversation.last_reply
    assert set(session.target.forwards[2:]) == {1}
    assert first is not None
    assert second is not None
    assert first.tokens == second.tokens
    assert second.stats.draft == "none"
    assert chat.take("/spec maybe") is False
    assert chat.take("/spec on")
    assert session.is_speculating


def test_set_changes_and_shows(chat, capsys) -> None:
    assert chat.take("/set temperature 0.3")
    assert chat.take("/set top-k 5")
    assert chat.take("/set max-tokens 2")
    assert chat.conversation.sampling == Sampling(temperature=0.3, top_k=5)
    capsys.readouterr()
    assert chat.take("/set")
    shown = capsys.readouterr().err
    assert "temperature 0.3" in shown
    assert "max-tokens 2" in shown
    assert "seed default" in shown
    chat.take("hi")
    assert capsys.readouterr().out == "he\n"
    assert chat.take("/set temperature default")
    assert chat.conversation.sampling.temperature is None


@pytest.mark.parametrize(
    "line",
    [
        "/set nothing 1",
        "/set temperature warm",
        "/set temperature -1",
        "/set temperature inf",
        "/set presence-penalty nan",
        "/set frequency-penalty -inf",
        "/set repeat-penalty inf",
        "/set top-k 1.5",
        "/set max-tokens -1",
        "/set temperature",
        "/nonsense",
        "/",
    ],
)
def test_bad_commands_are_refused_and_change_nothing(chat, capsys, line) -> None:
    before = chat.conversation.settings()
    assert chat.take(line) is False
    assert "edgespec: " in capsys.readouterr().err
    assert chat.conversation.settings() == before


def test_stats_marks_drafted_text(chat, capsys) -> None:
    chat.take("ha")
    capsys.readouterr()
    assert chat.take("/stats")
    out, err = capsys.readouterr()
    assert out == ""
    first = err.splitlines()[0]
    assert first.replace("[", "").replace("]", "") == ANSWERS["ha"]
    assert "[" in first
    assert "tokens per round" in err
    assert "seed" in err


def test_status_line(chat) -> None:
    assert chat.status() == ""
    chat.take("ha")
    for part in ("tokens/s", "tokens/round", "ngram", "scripted"):
        assert part in chat.status()


def test_help_lists_every_command(chat, capsys) -> None:
    assert chat.take("/help")
    text = capsys.readouterr().err
    for name in ("reset", "regen", "undo", "save", "load", "stats", "spec", "set"):
        assert f"/{name}" in text


# ---- a conversation that is stopped or fails -----------------------------------------


def test_closing_a_reply_keeps_what_was_said(session) -> None:
    session.is_speculating = False
    conversation = Conversation(session)
    reply = conversation.ask("bye")
    said = next(reply).text + next(reply).text
    reply.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    assert conversation.last_reply is not None
    assert conversation.last_reply.finish_reason == "cancelled"
    assert "".join(d.text for d in conversation.ask("hi")) == "hello"


def test_failing_turn_changes_nothing() -> None:
    conversation = Conversation(scripted_session(ANSWERS, context=40))
    list(conversation.ask("hi"))
    before = list(conversation.messages)
    with pytest.raises(ContextError):
        list(conversation.ask("x" * 100))
    assert conversation.messages == before
    with pytest.raises(UsageError):
        conversation.set("seed", "-3")


# ---- the terminal --------------------------------------------------------------------


def typed(chat: Chat, keys: str) -> None:
    """Runs the terminal loop on key strokes."""
    with create_pipe_input() as source:
        source.send_text(keys)
        chat.run_terminal(source, DummyOutput())


def test_terminal_enter_sends_and_ctrl_d_leaves(chat, edgespec_home, capsys) -> None:
    typed(chat, "hi\rbye\r\x04")
    assert capsys.readouterr().out == "hello\nso long\n"


@pytest.mark.parametrize("keys", ["two\x1b\rlines\r", "two\\\rlines\r"])
def test_terminal_several_lines(chat, edgespec_home, capsys, keys) -> None:
    typed(chat, keys + "\x04")
    assert capsys.readouterr().out == "both\n"


def test_terminal_pasted_lines_are_one_turn(chat, edgespec_home, capsys) -> None:
    typed(chat, "\x1b[200~two\nlines\x1b[201~\r\x04")
    assert capsys.readouterr().out == "both\n"


def test_terminal_editing_and_history(session, edgespec_home, capsys) -> None:
    typed(Chat(Conversation(session)), "hix\x7f\r\x04")
    typed(Chat(Conversation(session)), "\x1b[A\r\x04")  # up, in a later run
    assert capsys.readouterr().out == "hello\nhello\n"
    history = edgespec_home / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600


def test_terminal_ctrl_c_clears_the_line(chat, edgespec_home, capsys) -> None:
    typed(chat, "nonsense\x03hi\r/exit\r")
    assert capsys.readouterr().out == "hello\n"


def test_terminal_without_a_writable_home(chat, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file" / "below"))
    typed(chat, "hi\r\x04")
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "no history" in err


# A child on a real terminal: a reply to "slow" hangs until Ctrl-C.
CHILD = """
import sys, time
sys.path.append({root!r})
import edgespec
from edgespec.cli.app import main
from tests.scripted import ScriptedTarget, scripted_session

session = scripted_session({{"hi": "hello", "slow": "slowly"}})
forward = session.target.forward

def slow(*arguments):
    if b"user: slow" in bytes(session.target.rows) and len(session.target.rows) > 24:
        print("WAITING", file=sys.stderr, flush=True)
        time.sleep(60)
    return forward(*arguments)

session.target.forward = slow
edgespec.load = lambda *_, **__: session
sys.exit(main(["chat", "m"]))
"""


READY = "\x1b[?2004h"  # the prompt switched bracketed paste on: it reads keys


class Terminal:
    """A child process on a pseudo-terminal."""

    def __init__(self, code: str, environment: dict[str, str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # A suite started in the background hands down an ignored Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execvpe(sys.executable, python(code), environment)
        self.seen = ""

    def wait_for(self, *texts: str) -> None:
        """Until they were printed, in this order, since the last keys."""
        end = time.monotonic() + 30.0
        at = 0
        for text in texts:
            while (found := self.seen.find(text, at)) < 0:
                left = end - time.monotonic()
                assert left > 0, f"no {text!r} in {self.seen[at:]!r}"
                self._read(left)
            at = found + len(text)

    def _read(self, seconds: float) -> bool:
        """Takes what the child printed; False when it closed the terminal."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 4096).decode("utf-8", "replace")
        except OSError:  # how Linux tells the end
            return False
        if "\x1b[6n" in data:  # asked where the cursor is
            os.write(self.fd, b"\x1b[1;1R")
        self.seen += data
        return bool(data)

    def send(self, keys: str) -> None:
        self.seen = ""
        os.write(self.fd, keys.encode())

    def exit_code(self) -> int:
        end = time.monotonic() + 30.0
        while self._read(1.0):
            assert time.monotonic() < end, f"still running: {self.seen!r}"
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


def test_ctrl_c_stops_the_reply_and_keeps_the_chat(edgespec_home) -> None:
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "TERM": "xterm", "EDGESPEC_HOME": str(edgespec_home)}
    environment.pop("NO_COLOR", None)
    child = textwrap.dedent(CHILD.format(root=root))
    with closing(Terminal(child, environment)) as terminal:
        talk(terminal)


def talk(terminal: Terminal) -> None:
    terminal.wait_for("/help lists commands")
    terminal.wait_for("draft ngram", READY)  # the status line before the first reply
    terminal.send("hi\r")
    terminal.wait_for("hello", READY, "tokens/round")
    terminal.send("/reset\r")
    terminal.wait_for("forgotten", READY)
    terminal.send("slow\r")
    terminal.wait_for("WAITING")
    terminal.send("\x03")
    terminal.wait_for("stopped", READY)
    terminal.send("/reset\r")
    terminal.wait_for("forgotten", READY)
    terminal.send("hi\r")
    terminal.wait_for("hello", READY)
    terminal.send("\x04")
    assert terminal.exit_code() == 0
