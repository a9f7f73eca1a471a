"""Chat templates rendered to token ids; thinking sections found in streamed text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.errors import FormatError, UsageError
from edgespec.tokenizer import THINK_CLOSE, THINK_OPEN, Tokenizer


class ChatTemplate:
    """A model's Jinja chat template, with the names transformers gives it.

    Control tokens come from the template alone. A special string inside a message or a
    template argument is interrupted by a private-use character while the template runs
    and encoded as ordinary text afterwards. Only the thinking tags of an assistant
    message, and tokens the vocabulary does not mark as special, stay whole there,
    because templates look for them in earlier replies.

    Args:
        template: Jinja source; None for a model without one, `render` is an error then.
        tokenizer: the vocabulary the ids are for.
        bos_token, eos_token: what the template knows under these names; by default the
            spelling of the tokenizer's bos and first eos.

    Raises FormatError when the source is not valid Jinja.
    """

    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._source = template or ""
        self._names: dict[str, Any] = {}
        eos_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        for name, token, token_id in (
            ("bos_token", bos_token, tokenizer.bos_id),
            ("eos_token", eos_token, eos_id),
        ):
            if token is None and token_id is not None:
                token = tokenizer.token_bytes(token_id).decode()
            if token is not None:
                self._names[name] = token
        if template is None:
            self._template = None
            return
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise FormatError(
                f"chat template, line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise FormatError(f"chat template: nested too deeply: {error}") from error
        controls = tokenizer.control_strings(template)
        self._everywhere = _Marker(controls)
        self._in_replies = _Marker(
            set(tokenizer.special_strings) - {THINK_OPEN, THINK_CLOSE}
        )

    @property
    def is_present(self) -> bool:
        """Whether the model has a template at all."""
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> list[int]:
        """Ids of a conversation as the template says: bos only where it writes it.

        Args:
            messages: dicts with "role" and "content" and what else the template reads.
                Keys whose value is None are left out.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_args: further names for the template, such as enable_thinking or
                tools.

        Raises UsageError without a template, for messages that are not plain data, and
        with the template's own words when it refuses the conversation.
        """
        if self._template is None:
            raise UsageError(
                "this model has no chat template; use edgespec generate --raw, or pass "
                "a plain prompt"
            )
        plain = [
            _plain(message, f"messages[{i}]") for i, message in enumerate(messages)
        ]
        for i, message in enumerate(plain):
            if not isinstance(message, dict):
                raise UsageError(
                    f"messages[{i}]: expected a mapping with role and content, got"
                    f" {type(message).__name__}"
                )
        args = {name: _plain(value, name) for name, value in template_args.items()}
        mark = _unused_character(
            json.dumps([plain, args], ensure_ascii=False), self._source
        )
        marked = [
            (
                self._in_replies
                if message.get("role") == "assistant"
                else self._everywhere
            ).apply({k: v for k, v in message.items() if v is not None}, mark)
            for message in plain
        ]
        names = {
            "tools": None,
            "documents": None,
            **self._names,
            **self._everywhere.apply(args, mark),
        }
        try:
            text = self._template.render(
                messages=marked, add_generation_prompt=add_generation_prompt, **names
            )
        except Exception as error:  # whatever the template's expressions run into
            # raise_exception() raises the base class itself.
            is_refusal = type(error) is jinja2.TemplateError
            what = "refuses" if is_refusal else "failed on these messages"
            raise UsageError(f"the model's chat template {what}: {error}") from error
        return self._tokenizer.encode_marked(text, mark)

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a rendered prompt ends inside an opened thinking section."""
        tail = b"".join(self._tokenizer.token_bytes(i) for i in prompt[-16:])
        return tail.decode(errors="replace").rstrip().endswith(THINK_OPEN)


class ThinkSplitter:
    """Splits streamed text at <think> and </think>.

    The pieces joined are the text pushed, unchanged; the tags count as thinking. What
    could still become a tag is held back. A section that is never closed lasts to the
    end.
    """

    def __init__(self, inside: bool = False) -> None:
        self._inside = inside
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Pieces (text, is_thinking), none empty."""
        held = self._held + text
        pieces: list[tuple[str, bool]] = []
        while True:
            tag = THINK_CLOSE if self._inside else THINK_OPEN
            at = held.find(tag)
            if at < 0:
                break
            if self._inside:
                at += len(tag)
            pieces.append((held[:at], self._inside))
            held = held[at:]
            if not self._inside:
                pieces.append((tag, True))
                held = held[len(tag) :]
            self._inside = not self._inside
        safe = len(held) - _prefix_at_end(held, (tag,))
        pieces.append((held[:safe], self._inside))
        self._held = held[safe:]
        return _joined(pieces)

    def flush(self) -> list[tuple[str, bool]]:
        """The end: what is still held back."""
        held, self._held = self._held, ""
        return [(held, self._inside)] if held else []


class _Marker:
    """Interrupts control strings inside data with a mark."""

    def __init__(self, controls: Iterable[str]) -> None:
        self._controls = sorted(controls, key=len, reverse=True)
        # Templates may change the case of content, so "<|IM_END|>" is interrupted as
        # well.
        self._pattern = re.compile(
            "|".join(re.escape(c) for c in self._controls) or "(?!)", re.IGNORECASE
        )

    def apply(self, value: Any, mark: str, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: self.apply(v, mark, k) for k, v in value.items()}
        if isinstance(value, list):
            return [self.apply(v, mark, key) for v in value]
        if not isinstance(value, str):
            return value
        marked = self._pattern.sub(lambda match: _interrupt(match[0], mark), value)
        # The rest of a control string could come from the text the template puts
        # behind. Roles are exempt: templates build control strings from them.
        if key != "role" and _prefix_at_end(marked, self._controls):
            marked += mark
        return marked


def _interrupt(control: str, mark: str) -> str:
    # Behind the first character, so that templates that strip content find it where it
    # was.
    return control[0] + mark + control[1:]


def _prefix_at_end(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that properly starts one of `strings`."""
    longest = max((len(s) for s in strings), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        tail = text[-size:]
        if any(len(s) > size and s.startswith(tail) for s in strings):
            return size
    return 0


def _joined(pieces: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [
        (joined, thinking)
        for thinking, group in itertools.groupby(pieces, key=lambda piece: piece[1])
        if (joined := "".join(text for text, _ in group))
    ]


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types only: templates are foreign code and get no objects."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    raise UsageError(
        f"{where}: expected text, numbers, lists or mappings, got "
        f"{type(value).__name__}"
    )


def _unused_character(*texts: str) -> str:
    """A private-use character that occurs in none of the texts."""
    used = set().union(*texts)
    planes = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
    for code in itertools.chain(*planes):
        if chr(code) not in used:
            return chr(code)
    raise UsageError("the conversation uses every private-use character of Unicode")


class _GenerationBlock(Extension):
    """{% generation %}: marks the assistant's text for training; here just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> Iterator[None]:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
