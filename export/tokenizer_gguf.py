"""Tokenizers into GGUF metadata, so that llama.cpp gives tokenizer.json's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gguf import GGUFValueType

from edgespec.errors import FormatError, UnsupportedError
from edgespec.gguf_header import Metadata
from edgespec.tokenizer_gguf import (
    BYTE,
    CONTROL,
    DIGITS,
    END_OF_TURN,
    NORMAL,
    SPACE,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Split,
    merges_by_score,
)

_PREFIX = "tokenizer.ggml."
_LONGEST_RUN = 64  # of spaces in one token; Gemma's is 31
_GPT2 = SPLITS["gpt-2"].steps[0]


def metadata(
    tokenizer_json: str,
    *,
    vocab: int,
    bos_id: int | None,
    eos_ids: Sequence[int],
    add_bos: bool,
    chat_template: str | None,
) -> Metadata:
    """Metadata "tokenizer.*" for a vocabulary padded to `vocab` rows of the embedding.

    The pre-tokenizer is identified by its structure, not by a name. llama.cpp
    prefixes a space at the start of a text and after every special token; vocabularies
    that do so for the first word only ("first") or not in front of another space
    ("first", "always") keep the difference under our own key
    edgespec.tokenizer.prepend_scheme, which llama.cpp does not read.

    Raises UnsupportedError for tokenizers llama.cpp has no equal of, FormatError
    for more tokens than rows.
    """
    data = json.loads(tokenizer_json)
    model = data.get("model") or {}
    if model.get("type") != "BPE":
        raise UnsupportedError(
            f"tokenizer.json: model {model.get('type')!r} is not supported; expected "
            "'BPE'"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise UnsupportedError(
                f"tokenizer.json: {key} {model[key]!r}: llama.cpp has no equal of it"
            )
    made = Metadata()
    tokens, types = _vocabulary(data, vocab, has_bytes=bool(model.get("byte_fallback")))
    merges = [_pair(merge) for merge in model.get("merges") or ()]
    if model.get("byte_fallback"):
        _sentencepiece(made, data, tokens, types, merges)
    else:
        _byte_level(made, data, merges)
    _array(made, "tokens", tokens, GGUFValueType.STRING)
    _array(made, "token_type", types, GGUFValueType.INT32)
    _ids(made, tokens, bos_id, eos_ids)
    unknown = model.get("unk_token")
    if unknown in tokens:
        index = tokens.index(unknown)
        made.put(_PREFIX + "unknown_token_id", index, GGUFValueType.UINT32)
    made.put(_PREFIX + "add_bos_token", add_bos, GGUFValueType.BOOL)
    if chat_template:
        made.put("tokenizer.chat_template", chat_template, GGUFValueType.STRING)
    return made


def pre_tokenizer_name(data: Mapping[str, Any]) -> str:
    """tokenizer.ggml.pre of a parsed tokenizer.json, by the structure of its parts."""
    steps = _steps(data.get("pre_tokenizer"))
    ignore_merges = bool(data["model"].get("ignore_merges"))
    normalizers = [
        part["type"] for part in _parts(data.get("normalizer"), "normalizers")
    ]
    if normalizers not in ([], ["NFC"]):
        raise UnsupportedError(
            f"tokenizer.json: normalizer {normalizers} is not supported"
        )
    looked_for = Split(steps, ignore_merges, is_nfc=normalizers == ["NFC"])
    for name, known in SPLITS.items():
        same = Split(known.steps, known.ignore_merges, is_nfc=known.is_nfc)
        if same == looked_for:
            return name
    raise UnsupportedError(
        "tokenizer.json: no pre-tokenizer of llama.cpp known here cuts text by "
        f"{list(steps)} with ignore_merges {ignore_merges} and normalizer {normalizers}"
    )


def _steps(pre: Mapping[str, Any] | None) -> tuple[str, ...]:
    found: list[str] = []
    has_bytes = False
    for part in _parts(pre, "pretokenizers"):
        kind = part["type"]
        if kind == "Digits" and part.get("individual_digits"):
            found.append(DIGITS)
        elif (
            kind == "Split"
            and part.get("behavior") in ("Isolated", "Removed")
            and "Regex" in part["pattern"]
            and bool(part.get("invert")) == (part["behavior"] == "Removed")
        ):
            regex = part["pattern"]["Regex"]
            # One digit at a time, spelt as an expression.
            found.append(DIGITS if regex == r"\p{N}" else regex)
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            has_bytes = True
            if part.get("use_regex", True):
                found.append(_GPT2)
        else:
            raise UnsupportedError(f"tokenizer.json: pre-tokenizer {dict(part)}")
    if not has_bytes:
        raise UnsupportedError(
            "tokenizer.json: BPE neither byte-level nor with byte fallback"
        )
    return tuple(found)


def _parts(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def _byte_level(
    made: Metadata, data: Mapping[str, Any], merges: list[list[str]]
) -> None:
    made.put(_PREFIX + "model", "gpt2", GGUFValueType.STRING)
    made.put(_PREFIX + "pre", pre_tokenizer_name(data), GGUFValueType.STRING)
    lines = [" ".join(pair) for pair in merges]
    _array(made, "merges", lines, GGUFValueType.STRING)


def _sentencepiece(
    made: Metadata,
    data: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    merges: list[list[str]],
) -> None:
    """Scores that make llama.cpp merge as `merges` say, or UnsupportedError."""
    absent = next((b for b in range(256) if f"<0x{b:02X}>" not in tokens), None)
    if absent is not None:
        raise FormatError(f"tokenizer.json: no token for byte 0x{absent:02X}")
    rank: dict[str, int] = {}
    for left, right in merges:
        rank.setdefault(left + right, len(rank))
    scores = [-float(rank.get(token, len(rank) + i)) for i, token in enumerate(tokens)]
    if len(rank) + len(tokens) > 1 << 24:
        raise UnsupportedError("tokenizer.json: too many tokens for scores in float32")
    # Added tokens are cut out of the text before anything is merged, so those that a
    # normalised text cannot spell anew are never built and build nothing.
    cut = {t["content"] for t in data.get("added_tokens") or ()}
    cut = {text for text in cut if SPACE not in text}
    given, rebuilt = (
        [(a, b) for a, b in pairs if cut.isdisjoint((a, b, a + b))]
        for pairs in (merges, merges_by_score(tokens, types, scores))
    )
    if not _merge_alike(given, rebuilt):
        raise UnsupportedError(
            "tokenizer.json: its merges are not those a SentencePiece vocabulary has, "
            "so llama.cpp would cut text differently"
        )
    has_prefix, scheme = _space_prefix(data)
    made.put(_PREFIX + "model", "llama", GGUFValueType.STRING)
    made.put(_PREFIX + "pre", "default", GGUFValueType.STRING)
    made.put(_PREFIX + "add_space_prefix", has_prefix, GGUFValueType.BOOL)
    if scheme and has_prefix:
        made.put("edgespec.tokenizer.prepend_scheme", scheme, GGUFValueType.STRING)
    _array(made, "scores", scores, GGUFValueType.FLOAT32)


def _merge_alike(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> bool:
    """Whether merges in our order give what llama.cpp makes of them by score.

    It does not tell apart the ways to one token. Runs of spaces may come in another
    order as long as they come first and every run is cut alike.
    """
    if set(ours) != set(theirs):
        return False
    texts, other_texts = (
        [left + right for left, right in pairs] for pairs in (ours, theirs)
    )
    if texts == other_texts:
        return True
    is_run = [not text.strip(SPACE) for text in texts]
    n_runs = sum(is_run)
    if not all(is_run[:n_runs]) or texts[n_runs:] != other_texts[n_runs:]:
        return False
    by_way: dict[tuple[int, int], int] = {}
    by_length: dict[int, int] = {}
    for left, right in ours[:n_runs]:
        by_way.setdefault((len(left), len(right)), len(by_way))
    for text in other_texts[:n_runs]:
        by_length.setdefault(len(text), len(by_length))
    by_score = {way: by_length[sum(way)] for way in by_way}
    longest = max(len(text) for text in texts[:n_runs])
    return longest <= _LONGEST_RUN and all(
        _cut_run(n, by_way) == _cut_run(n, by_score) for n in range(1, 2 * longest + 3)
    )


def _cut_run(n: int, ranks: Mapping[tuple[int, int], int]) -> list[int]:
    """Lengths of the pieces of a run of n: the best rank first, then the leftmost."""
    pieces = [1] * n
    while True:
        pairs = list(pairwise(pieces))
        known = [(ranks[pair], at) for at, pair in enumerate(pairs) if pair in ranks]
        if not known:
            return pieces
        _, at = min(known)
        pieces[at : at + 2] = [sum(pieces[at : at + 2])]


def _space_prefix(data: Mapping[str, Any]) -> tuple[bool, str | None]:
    parts = [
        *_parts(data.get("normalizer"), "normalizers"),
        *_parts(data.get("pre_tokenizer"), "pretokenizers"),
    ]
    has_prefix, scheme, is_replaced = False, None, False
    for part in parts:
        if part["type"] == "Prepend" and part["prepend"] == SPACE:
            has_prefix = True
        elif part["type"] == "Replace" and part["pattern"] == {"String": " "}:
            is_replaced = part["content"] == SPACE
        elif part["type"] == "Metaspace" and not part.get("split", True):
            is_replaced = part.get("replacement") == SPACE
            scheme = part.get("prepend_scheme", "always")
            has_prefix = scheme != "never"
        elif (
            is_replaced
            and part["type"] == "Split"
            and part["pattern"] == {"String": " "}
        ):
            pass  # no space is left to split at
        else:
            raise UnsupportedError(
                f"tokenizer.json: step {dict(part)} with byte fallback"
            )
    if not is_replaced:
        raise UnsupportedError(
            "tokenizer.json: byte fallback without U+2581 for spaces"
        )
    return has_prefix, scheme


def _vocabulary(
    data: Mapping[str, Any], rows: int, *, has_bytes: bool
) -> tuple[list[str], list[int]]:
    words: dict[int, str] = {i: token for token, i in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(words, NORMAL)
    if has_bytes:
        kinds |= {
            i: BYTE
            for i, t in words.items()
            if len(t) == 6 and t[:3] == "<0x" and t[5] == ">"
        }
    for token in data.get("added_tokens") or ():
        stripped = [k for k in ("lstrip", "rstrip", "single_word") if token.get(k)]
        if stripped:
            raise UnsupportedError(
                f"tokenizer.json: added token {token['content']!r} with {stripped[0]}"
            )
        words[token["id"]] = token["content"]
        is_control = token.get("special") or token["content"] in END_OF_TURN
        kinds[token["id"]] = CONTROL if is_control else USER_DEFINED
        if token["content"] == data["model"].get("unk_token") and has_bytes:
            kinds[token["id"]] = UNKNOWN
    if words and max(words) >= rows:
        raise FormatError(
            f"tokenizer.json has {max(words) + 1} tokens, the embedding only {rows} "
            "rows"
        )
    # llama.cpp wants one token for every row, and every one another.
    taken = set(words.values())
    for i in range(rows):
        if i not in words:
            words[i], kinds[i] = f"[PAD{i}]", UNUSED
            while words[i] in taken:
                words[i] = f"[{words[i]}]"
    order = range(rows)
    return [words[i] for i in order], [kinds[i] for i in order]


def _ids(
    made: Metadata, tokens: Sequence[str], bos_id: int | None, eos_ids: Sequence[int]
) -> None:
    if bos_id is not None:
        made.put(_PREFIX + "bos_token_id", bos_id, GGUFValueType.UINT32)
    if eos_ids:
        made.put(_PREFIX + "eos_token_id", eos_ids[0], GGUFValueType.UINT32)
    for i in eos_ids[1:]:
        key = "eom_token_id" if tokens[i] == "<|eom_id|>" else "eot_token_id"
        if tokens[i] in END_OF_TURN and _PREFIX + key not in made:
            made.put(_PREFIX + key, i, GGUFValueType.UINT32)


def _array(made: Metadata, key: str, values: list[Any], item: GGUFValueType) -> None:
    made.put(_PREFIX + key, values, GGUFValueType.ARRAY, item)


def _pair(merge: str | Sequence[str]) -> list[str]:
    if isinstance(merge, str):
        left, _, right = merge.partition(" ")
        return [left, right]
    return list(merge)
