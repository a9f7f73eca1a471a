"""Text to token ids and token ids to exact bytes, over the `tokenizers` library."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tokenizers

from edgespec.errors import FormatError, UnsupportedError, UsageError

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_library(tokenizer_json: str) -> tokenizers.Tokenizer:
    """The library's own tokenizer; FormatError for what it does not take."""
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception, and panics that are not even that
        raise FormatError(f"tokenizer.json: cannot be read: {error}") from error


class Tokenizer:
    """One vocabulary, byte-level BPE or SentencePiece with byte fallback.

    Special tokens are those the vocabulary marks as such, plus bos and every eos. They
    have ids but no text of their own: see `text_bytes`. Safe to share between threads.

    Args:
        tokenizer_json: contents of a tokenizer.json.
        bos_id: begin-of-sequence token, None when the model has none.
        eos_ids: every token that ends a reply.
        add_bos: whether raw text (no chat template) starts with bos.

    Raises FormatError when the JSON or an id does not fit, UnsupportedError for
    vocabularies whose tokens have no exact bytes (WordPiece).
    """

    def __init__(
        self,
        tokenizer_json: str,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
    ) -> None:
        self._library = load_library(tokenizer_json)
        # A file saved by a training script may cut or pad every text.
        self._library.no_truncation()
        self._library.no_padding()
        self._lock = threading.Lock()
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.add_bos = add_bos and bos_id is not None

        added = self._library.get_added_tokens_decoder()
        base = self._library.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max([base, *(i + 1 for i in added)])
        self._contents = {i: token.content for i, token in added.items()}
        marked = {i for i, token in added.items() if token.special}
        named = {i for i in (bos_id, *self.eos_ids) if i is not None}
        for i in sorted(named - marked):
            content = self._library.id_to_token(i)
            if content is None:
                raise FormatError(
                    f"bos or eos id {i}: expected one of the vocabulary's "
                    f"{self.vocab_size} ids"
                )
            self._contents[i] = content
        self.special_ids = frozenset(marked | named)
        self._make_special(self._contents[i] for i in sorted(named - marked))

        self._spells_bytes, self._replacements = self._read_decoder()
        self._bytes: dict[int, bytes] = {}
        self._metaspaces = list(_metaspaces_at_start(self._library.pre_tokenizer))

    def encode(
        self, text: str, *, specials: bool = False, at_start: bool = True
    ) -> list[int]:
        """Ids of `text`; bos is never added.

        Args:
            text: any Unicode text; a lone surrogate is a UsageError.
            specials: whether special strings become control tokens. When False they are
                ordinary text.
            at_start: False when the text follows other text of the same sequence, which
                matters to vocabularies that put a space in front of the first word
                only.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"text is not valid Unicode: lone surrogate at character {error.start}"
            ) from error
        with self._lock:
            self._library.encode_special_tokens = not specials
            for space in () if at_start else self._metaspaces:
                space.prepend_scheme = "never"
            try:
                encoded = self._library.encode(text, add_special_tokens=False)
            finally:
                for space in self._metaspaces:
                    space.prepend_scheme = "first"
        ids: list[int] = encoded.ids
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of a text whose special strings are control tokens unless interrupted.

        Every occurrence of the character `mark` is removed before encoding; otherwise
        the ids are those of `encode(text, specials=True)`.
        """
        if mark not in text:
            return self.encode(text, specials=True)
        ids: list[int] = []
        start = 0
        pattern, found = self._special_pattern()
        for match in pattern.finditer(text):
            ids += self._encode_piece(text[start : match.start()], mark, start == 0)
            ids.append(found[(match.lastindex or 0) - 1])
            start = match.end()
        return ids + self._encode_piece(text[start:], mark, start == 0)

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a prompt without template: bos if the model wants it, then text."""
        bos = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return bos + self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a whole sequence without special tokens; invalid UTF-8 as U+FFFD."""
        shown = [i for i in ids if self.text_bytes(i)]
        text: str = self._library.decode(shown, skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Exact bytes of one token; those of a special token spell its name.

        A word at the start of a text keeps the space its vocabulary stores with it. Ids
        that pad the model's logits beyond the vocabulary have no bytes.
        """
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def text_bytes(self, token: int) -> bytes:
        """What the user sees of a token: nothing of a special one but thinking tags."""
        if token in self.special_ids and self._contents[token] not in (
            THINK_OPEN,
            THINK_CLOSE,
        ):
            return b""
        return self.token_bytes(token)

    def token_id(self, content: str) -> int | None:
        """Id of the token that is spelled exactly so, None without one."""
        found: int | None = self._library.token_to_id(content)
        return found

    @property
    def special_strings(self) -> dict[str, int]:
        """Spelling of every special token."""
        return {self._contents[i]: i for i in sorted(self.special_ids)}

    def control_strings(self, template: str) -> dict[str, int]:
        """Special strings and the added tokens a chat template's source spells out.

        From here on `encode(specials=False)` takes the latter for ordinary text too:
        tokens such as <tool_call> carry meaning wherever the template uses them, marked
        special or not.
        """
        spelled = {
            content: i for i, content in self._contents.items() if content in template
        }
        with self._lock:
            self._make_special(
                c for c, i in spelled.items() if i not in self.special_ids
            )
        return {**spelled, **self.special_strings}

    def _special_pattern(self) -> tuple[re.Pattern[str], list[int]]:
        """A group per special token, longest first like the library, and their ids."""
        special = [
            (len(token.content), i, token)
            for i, token in self._library.get_added_tokens_decoder().items()
            if token.special and token.content
        ]
        special.sort(key=lambda entry: (-entry[0], entry[1]))
        alternatives = [
            r"\s*" * token.lstrip
            + f"({re.escape(token.content)})"
            + r"\s*" * token.rstrip
            for _, _, token in special
        ]
        return re.compile("|".join(alternatives) or "(?!)"), [i for _, i, _ in special]

    def _encode_piece(self, text: str, mark: str, at_start: bool) -> list[int]:
        return self.encode(text.replace(mark, ""), at_start=at_start) if text else []

    def _make_special(self, contents: Iterable[str]) -> None:
        tokens = [
            tokenizers.AddedToken(c, special=True, normalized=False) for c in contents
        ]
        if tokens:
            self._library.add_special_tokens(tokens)

    def _read_decoder(self) -> tuple[bool, list[tuple[str, str]]]:
        """Whether tokens use the byte alphabet; else what to replace in them."""
        parts = list(_flatten(self._library.decoder, "decoders"))
        kinds = {part["type"] for part in parts}
        if "ByteLevel" in kinds:
            return True, []
        if not kinds & {"ByteFallback", "Metaspace"}:
            raise UnsupportedError(
                "tokenizer.json: expected a ByteLevel, ByteFallback or Metaspace "
                f"decoder, got {', '.join(sorted(kinds)) or 'none'}; tokens of this "
                "vocabulary have no exact bytes"
            )
        replacements = [
            (part["pattern"]["String"], part["content"])
            for part in parts
            if part["type"] == "Replace" and "String" in part["pattern"]
        ]
        replacements += [
            (part["replacement"], " ") for part in parts if part["type"] == "Metaspace"
        ]
        return False, replacements

    def _spell(self, token: int) -> bytes:
        if token in self._contents:
            return self._contents[token].encode()
        content = self._library.id_to_token(token) if token >= 0 else None
        if content is None:
            return b""
        if self._spells_bytes:
            try:
                return bytes(_BYTE_OF[c] for c in content)
            except KeyError:  # a word outside the byte alphabet stands for itself
                return bytes(content, "utf-8")
        byte = _BYTE_TOKEN.fullmatch(content)
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in self._replacements:
            content = content.replace(old, new)
        return bytes(content, "utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Byte of every character in byte-level vocabularies (GPT-2).

    Bytes that Latin-1 prints are themselves, the others count up from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _flatten(component: Any, children: str) -> Iterator[dict[str, Any]]:
    """Leaf settings of a component, in order; `children` names a Sequence's list."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop(0)
        if part["type"] == "Sequence":
            pending = part[children] + pending
        else:
            yield part


def _metaspaces_at_start(pre_tokenizer: Any) -> Iterator[Any]:
    """The library's Metaspace objects that prefix the first word of a text only."""
    if pre_tokenizer is None:
        return
    settings = json.loads(pre_tokenizer.__getstate__())
    parts = settings.get("pretokenizers", [settings])
    for i, part in enumerate(parts):
        if part["type"] == "Metaspace" and part["prepend_scheme"] == "first":
            yield pre_tokenizer if part is settings else pre_tokenizer[i]
