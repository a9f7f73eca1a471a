"""Tokenizers out of GGUF metadata: a tokenizer.json that gives llama.cpp's tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import FormatError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # what SentencePiece writes for a space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = "digits"  # every digit a word of its own


@dataclass(frozen=True, slots=True)
class Split:
    """How a byte-level BPE cuts text into words, and what goes with it."""

    steps: tuple[str, ...]  # regular expressions applied in turn, or DIGITS
    ignore_merges: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # llama.cpp's default when the file does not say
    is_nfc: bool = False  # the original tokenizer normalises; llama.cpp does not


_SMOLLM = Split((DIGITS, _GPT2))
_PLAIN = Split((_GPT2,))
_LLAMA3_REGEX = _WORDS + r"\p{N}{1,3}" + _TAIL
_LLAMA3 = Split((_LLAMA3_REGEX,), ignore_merges=True, add_bos=True)
_QWEN2 = Split((_WORDS + r"\p{N}" + _TAIL,), is_nfc=True)
# Names of tokenizer.ggml.pre. The first of equal entries is what an export writes.
SPLITS: dict[str, Split] = {
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "codeshell": _SMOLLM,
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": Split((_LLAMA3_REGEX,)),
    "dbrx": Split((_LLAMA3_REGEX,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Split((_TEKKEN,), ignore_merges=True, add_bos=True),
    "default": Split(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
}
# Tokens that end a turn in the chat templates of known models.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|endoftext|>",
    "</s>",
)


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """tokenizer.json for the vocabulary in GGUF metadata.

    Byte-level BPE ("gpt2") is cut as tokenizer.ggml.pre says; SentencePiece ("llama")
    gets merges from its scores and byte fallback. Control and unknown tokens become
    special added tokens, user-defined ones plain added tokens. Whether bos is put in
    front is not part of the result: see `add_bos`.

    Raises UnsupportedError for models and pre-tokenizers not known here,
    FormatError when the metadata contradict themselves.
    """
    model = _text(metadata, "tokenizer.ggml.model")
    tokens = _tokens(metadata)
    types = _list(metadata, "token_type", len(tokens), int) or [NORMAL] * len(tokens)
    if model == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif model == "llama":
        parts = _sentencepiece(metadata, tokens, types)
    else:
        raise UnsupportedError(
            f"tokenizer.ggml.model {model!r} is not supported; known: gpt2, llama"
        )
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
    }
    return json.dumps(whole | parts, ensure_ascii=False)


def bos_id(metadata: Mapping[str, Any]) -> int | None:
    """Begin-of-sequence id, None when the vocabulary has none."""
    default = 1 if metadata.get("tokenizer.ggml.model") == "llama" else None
    return _id(metadata, "tokenizer.ggml.bos_token_id", default)


def add_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether raw text starts with bos, with llama.cpp's defaults for silent files."""
    given = metadata.get("tokenizer.ggml.add_bos_token")
    if given is not None:
        return bool(given)
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    split = SPLITS.get(_text(metadata, "tokenizer.ggml.pre") or "default")
    return split is not None and split.add_bos


def eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a reply: eos, eot, eom, ours, the template's end of turn."""
    default = 2 if metadata.get("tokenizer.ggml.model") == "llama" else None
    ids = [_id(metadata, "tokenizer.ggml.eos_token_id", default)]
    ids += [_id(metadata, f"tokenizer.ggml.{k}_token_id", None) for k in ("eot", "eom")]
    tokens = _tokens(metadata)
    ours = metadata.get("edgespec.eos_token_ids", [])
    known = range(len(tokens))
    if not isinstance(ours, list | tuple) or any(i not in known for i in ours):
        raise FormatError(f"edgespec.eos_token_ids: {ours!r:.80} are not all tokens")
    ids += ours
    template = _text(metadata, "tokenizer.chat_template") or ""
    bos = bos_id(metadata)
    ids += [i for i in ends_of_turn(template, tokens) if i != bos]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def ends_of_turn(template: str, tokens: Sequence[str]) -> list[int]:
    """Ids of the known end-of-turn tokens that a chat template writes."""
    return [tokens.index(t) for t in END_OF_TURN if t in template and t in tokens]


def byte_level_parts(
    split: Split, vocab: Mapping[str, int], merges: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """normalizer to model of a tokenizer.json with byte-level BPE."""
    steps: list[dict[str, Any]] = []
    for step in split.steps:
        if step == DIGITS:
            steps.append({"type": "Digits", "individual_digits": True})
        else:
            pattern = {"type": "Split", "pattern": {"Regex": step}}
            steps.append(pattern | {"behavior": "Isolated", "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(byte_level | {"use_regex": False})
    return {
        "normalizer": {"type": "NFC"} if split.is_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=split.ignore_merges),
    }


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = _text(metadata, "tokenizer.ggml.pre") or "default"
    if pre not in SPLITS:
        raise UnsupportedError(
            f"tokenizer.ggml.pre {pre!r} is not supported; known: {', '.join(SPLITS)}"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    entries = _list(metadata, "merges", None, str)
    if entries is None:  # every text would fall apart into its bytes
        raise FormatError("tokenizer.ggml.merges is missing")
    lines = dict.fromkeys(entries)  # repeated merges count where they first appear
    merges = []
    for line in lines:
        left, _, right = line[1:].partition(" ")
        pair = (line[:1] + left, right)
        unknown = [t for t in (*pair, "".join(pair)) if t not in vocab]
        if unknown:
            raise FormatError(
                f"tokenizer.ggml.merges: {line!r} needs {unknown[0]!r}, which is no "
                "token"
            )
        merges.append(pair)
    return byte_level_parts(SPLITS[pre], vocab, merges)


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> dict[str, Any]:
    scores = _list(metadata, "scores", len(tokens), float)
    if scores is None:
        raise FormatError("tokenizer.ggml.scores is missing: merges cannot be ordered")
    vocab = {token: i for i, token in enumerate(tokens)}
    absent = next((b for b in range(256) if f"<0x{b:02X}>" not in vocab), None)
    unknown = next(
        (t for t, k in zip(tokens, types, strict=True) if k == UNKNOWN), None
    )
    if absent is not None:
        raise FormatError(f"tokenizer.ggml.tokens: no token for byte 0x{absent:02X}")
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    scheme = _text(metadata, "edgespec.tokenizer.prepend_scheme")
    # Metaspace differs from a plain prefix after special tokens ("first") and in front
    # of spaces (both); GGUF proper knows the plain prefix only.
    is_metaspace = has_prefix and scheme in ("first", "always")
    normalizers: list[dict[str, Any]] = []
    if has_prefix:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    pattern = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme}
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None
        if is_metaspace
        else {"type": "Sequence", "normalizers": [*normalizers, pattern]},
        "pre_tokenizer": metaspace | {"split": False} if is_metaspace else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _bpe(
            vocab,
            merges_by_score(tokens, types, scores),
            unknown=unknown,
            has_bytes=True,
        ),
    }


def merges_by_score(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges that build each token from any two others, the highest score first.

    Control, unknown and byte tokens are neither built nor used: text that spells
    one stays text.
    """
    usable = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (NORMAL, USER_DEFINED) and token
    }
    found: list[tuple[float, int, int, int]] = []
    for token, i in usable.items():
        for cut in range(1, len(token)):
            left, right = usable.get(token[:cut]), usable.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _bpe(
    vocab: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    *,
    ignore_merges: bool = False,
    unknown: str | None = None,
    has_bytes: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": has_bytes,
        "byte_fallback": has_bytes,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocab),
        "merges": [list(pair) for pair in merges],
    }


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _list(metadata, "tokens", None, str)
    if not tokens:
        raise FormatError("tokenizer.ggml.tokens is missing or empty")
    # llama.cpp renames tokens without text in the same way.
    named = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if len(set(named)) != len(named):
        twice = Counter(named).most_common(1)[0][0]
        raise FormatError(f"tokenizer.ggml.tokens: {twice!r} appears twice")
    return named


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise FormatError(f"{key}: expected text, got {value!r:.80}")
    return value


def _list(
    metadata: Mapping[str, Any], key: str, length: int | None, kind: type
) -> list[Any] | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return None
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, kind) for value in values
    ):
        raise FormatError(f"tokenizer.ggml.{key}: expected an array of {kind.__name__}")
    if length is not None and len(values) != length:
        raise FormatError(
            f"tokenizer.ggml.{key}: expected {length} entries, got {len(values)}"
        )
    return list(values)


def _id(metadata: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = metadata.get(key, default)
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list | tuple) else 0
    if value is None:
        return None
    if isinstance(value, int) and 0 <= value < count:
        return value
    if key in metadata:
        raise FormatError(f"{key} = {value} is no token of a vocabulary of {count}")
    return None
