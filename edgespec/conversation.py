"""A chat: the messages, and the commands that change them. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cache import write_whole
from edgespec.config import Sampling, Stopping, check_sampling
from edgespec.errors import FormatError, UsageError
from edgespec.memory import Memory
from edgespec.reply import Delta, Reply

if TYPE_CHECKING:
    from edgespec.session import Session

FORMAT = "edgespec-chat"
VERSION = 1
SETTABLE: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top-k": ("top_k", int),
    "top-p": ("top_p", float),
    "min-p": ("min_p", float),
    "repeat-penalty": ("repeat_penalty", float),
    "presence-penalty": ("presence_penalty", float),
    "frequency-penalty": ("frequency_penalty", float),
    "penalty-window": ("penalty_window", int),
    "seed": ("seed", int),
}
MAX_TOKENS = "max-tokens"


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of the last reply, and whether a draft had it."""

    token: int
    is_drafted: bool


class Conversation:
    """One chat with one session.

    A turn that fails leaves the conversation as it was; one that is stopped halfway
    (its iterator closed, or Ctrl-C) keeps what was said so far.
    """

    def __init__(
        self,
        session: Session,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.session = session
        self.sampling = sampling or Sampling()
        self.stopping = stopping or Stopping()
        self.template_args = template_args
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.memory = Memory()
        self.pieces: list[Piece] = []  # of the last reply
        self.last_reply: Reply | None = None

    @property
    def turns(self) -> int:
        """How many times the user spoke."""
        return sum(message["role"] == "user" for message in self.messages)

    def ask(self, text: str) -> Generator[Delta, None, None]:
        """Adds a user turn and streams the reply."""
        return self._reply([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Generator[Delta, None, None]:
        """Streams another reply to the last question, under a fresh seed."""
        return self._reply(self._until_last_question("regenerate"), fresh=True)

    def undo(self) -> str:
        """Takes the last question and its reply back; returns the question."""
        messages = self._until_last_question("undo")
        self.messages = messages[:-1]
        return messages[-1]["content"]

    def reset(self) -> None:
        """Forgets everything but the system turn."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self.memory, self.pieces, self.last_reply = Memory(), [], None

    def set(self, name: str, value: str) -> None:
        """Changes one sampling value, or max-tokens. Raises UsageError naming it."""
        if name == MAX_TOKENS:
            number = _number(name, value, int)
            if number is not None and number < 0:
                raise UsageError(f"{name}: expected 0 or more, got {value}")
            self.stopping = replace(self.stopping, max_tokens=number)
            return
        if name not in SETTABLE:
            known = ", ".join([*SETTABLE, MAX_TOKENS])
            raise UsageError(f"unknown setting {name!r}; known: {known}")
        field, kind = SETTABLE[name]
        changed = replace(self.sampling, **{field: _number(name, value, kind)})
        check_sampling(changed)
        self.sampling = changed

    def settings(self) -> dict[str, Any]:
        """What `set` can change, as it is now; None = the model's or no limit."""
        values = {name: getattr(self.sampling, f) for name, (f, _) in SETTABLE.items()}
        return values | {MAX_TOKENS: self.stopping.max_tokens}

    def save(self, path: Path) -> None:
        """Writes the messages as JSON, over nothing but an earlier save.

        A file of that name stays as it is when this fails.
        """
        if path.is_file() and path.stat().st_size:
            try:
                read_messages(path)
            except FormatError:
                raise UsageError(
                    f"{path}: exists and is not a saved chat; choose another name"
                ) from None
        data = {"format": FORMAT, "version": VERSION, "messages": self.messages}
        try:
            write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UsageError(f"{path}: cannot save: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Replaces the messages by saved ones."""
        self.messages = read_messages(path)
        self.memory, self.pieces, self.last_reply = Memory(), [], None

    def _until_last_question(self, what: str) -> list[dict[str, str]]:
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                return self.messages[: i + 1]
        raise UsageError(f"nothing to {what}: no question was asked yet")

    def _reply(
        self, messages: list[dict[str, str]], *, fresh: bool = False
    ) -> Generator[Delta, None, None]:
        sampling = replace(self.sampling, seed=None) if fresh else self.sampling
        said: list[str] = []
        pieces: list[Piece] = []
        stream = self.session.chat(
            messages,
            sampling=sampling,
            stopping=self.stopping,
            memory=self.memory,
            template_args=self.template_args,
        )
        is_kept = True
        try:
            with closing(stream):
                for delta in stream:
                    pieces += map(Piece, delta.tokens, delta.drafted)
                    if not delta.thinking:
                        said.append(delta.text)
                    yield delta
        except Exception:
            is_kept = False
            raise
        finally:
            # Stopped before the first word, the question counts as not asked.
            if is_kept and (pieces or said):
                answer = {"role": "assistant", "content": "".join(said)}
                self.messages = [*messages, answer]
                self.pieces, self.last_reply = pieces, stream.reply


def read_messages(path: Path) -> list[dict[str, str]]:
    """Reads a saved chat. Raises FormatError naming what is wrong with the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot load: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a saved chat: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"{path}: not a saved chat: no format {FORMAT!r}")
    if data.get("version") != VERSION:
        raise FormatError(
            f"{path}: version: expected {VERSION}, got {data.get('version')!r}"
        )
    messages = data.get("messages")
    if not isinstance(messages, list):
        raise FormatError(f"{path}: messages: expected a list")
    for i, message in enumerate(messages):
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or message["role"] not in ("system", "user", "assistant")
            or not isinstance(message["content"], str)
        ):
            raise FormatError(
                f"{path}: messages[{i}]: expected a role (system, user or assistant) "
                "and a content text"
            )
    return messages


def _number(name: str, value: str, kind: type) -> Any:
    if value == "default":
        return Stopping().max_tokens if name == MAX_TOKENS else _default(name)
    try:
        return kind(value)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise UsageError(
            f"{name}: expected {expected} or default, got {value!r}"
        ) from None


def _default(name: str) -> Any:
    return getattr(Sampling(), SETTABLE[name][0])
