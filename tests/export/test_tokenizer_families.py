"""Tokenizers as Qwen and Gemma publish them: llama.cpp's own tokens are the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from edgespec import tokenizer_gguf
from edgespec.errors import UnsupportedError
from edgespec.gguf_header import open_gguf
from edgespec_export import gguf_file
from edgespec_export import tokenizer_gguf as export
from edgespec_export.sources import gguf, hf
from tests.export import checkpoints, llama
from tests.export.test_tokenizer_gguf import (
    byte_level,
    compare,
    encode,
    sentencepiece,
    texts,
    write_vocabulary,
)

QWEN_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_a_tokenizer_as_qwen_has_it(tmp_path: Path) -> None:
    """Its parts as they stand in the published files, tool tokens not special."""
    data = json.loads(byte_level("qwen2").to_str())
    byte_parts = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    byte_parts["type"] = "ByteLevel"
    split = {"type": "Split", "pattern": {"Regex": QWEN_REGEX}, "invert": False}
    split["behavior"] = "Isolated"
    data["normalizer"] = {"type": "NFC"}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_parts]}
    data["post_processor"] = data["decoder"] = byte_parts
    size = len(data["model"]["vocab"])
    for k, token in enumerate(("<tool_call>", "</think>")):
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
        added = {"id": size + k, "content": token, "special": False} | flags
        data["added_tokens"].append(added)
    words = Tokenizer.from_str(json.dumps(data))
    path = checkpoints.hf_checkpoint(tmp_path / "hf", words=words)
    gguf_file.write(hf.read(path), "f16", tmp_path / "a.gguf")
    metadata = open_gguf(tmp_path / "a.gguf").metadata
    assert metadata["tokenizer.ggml.pre"] == "qwen2"
    assert metadata["tokenizer.ggml.token_type"][-2:] == [4, 4]
    back = Tokenizer.from_str(gguf.read(tmp_path / "a.gguf").tokenizer_json)
    with llama.model(tmp_path / "a.gguf", vocab_only=True) as loaded:
        for text in (*texts(300), "a <tool_call>b</think>", "x</think>\n\n1234"):
            for specials in (False, True):
                ours = encode(words, text, specials=specials)
                assert encode(back, text, specials=specials) == ours
                if text.isascii():
                    theirs = llama.tokenize(loaded, text, specials=specials)
                    assert theirs == ours


def gemma(order: str) -> dict[str, Any]:
    """A tokenizer.json as the Gemma family has it: no space in front, runs added.

    order: of the merges of runs, "short" ones first or "long" left halves first, as
    different versions of transformers sort them.
    """
    base = sentencepiece()
    learnt = base["tokenizer.ggml.tokens"][259:-3]
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    runs = ["\n" * n for n in range(1, 5)] + ["▁" * n for n in range(2, 8)]
    plain = ["<unused0>", *runs, "<table>"]
    tokens = [*specials, *turns, *plain, *(f"<0x{b:02X}>" for b in range(256))]
    tokens += [token for token in learnt if token not in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = {
        token: [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        for token in tokens
    }
    first = [pair for token in runs for pair in pairs[token]]
    if order == "long":
        first.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    rest = [pair for token in learnt if token not in runs for pair in pairs[token]]
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    added = [
        {"id": vocab[token], "content": token, "special": token not in plain} | flags
        for token in (*specials, *turns, *plain)
    ]
    space = {"String": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": space, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": space,
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in first + rest],
        },
    }


GEMMA_TEXTS = (
    *(" " * n for n in range(1, 20)),
    *("the" + " " * n + "fox\n" + "\n" * n for n in range(12)),
    "<start_of_turn>user\nthe fox<end_of_turn>\n<start_of_turn>model\n",
    "<table> <unused0>\n\n\n\n\n\nthe ▁▁ fox <bos>",
)


@pytest.mark.parametrize("order", ["short", "long"])
def test_a_tokenizer_as_gemma_has_it(tmp_path: Path, order: str) -> None:
    data = gemma(order)
    words = Tokenizer.from_str(json.dumps(data))
    made = export.metadata(
        json.dumps(data),
        vocab=len(data["model"]["vocab"]) + 3,
        bos_id=2,
        eos_ids=(1, 6),
        add_bos=True,
        chat_template=None,
    )
    assert made["tokenizer.ggml.model"] == "llama"
    assert made["tokenizer.ggml.add_space_prefix"] is False
    assert made["tokenizer.ggml.eot_token_id"] == 6
    assert made["tokenizer.ggml.token_type"][:7] == [3, 3, 3, 2, 3, 3, 3]
    write_vocabulary(tmp_path / "a.gguf", dict(made))
    back = Tokenizer.from_str(tokenizer_gguf.tokenizer_json(made))
    compare(tmp_path / "a.gguf", [words, back], 300)
    with llama.model(tmp_path / "a.gguf", vocab_only=True) as loaded:
        for text in GEMMA_TEXTS:
            for specials in (False, True):
                expected = llama.tokenize(loaded, text, specials=specials)
                for each in (words, back):
                    assert encode(each, text, specials=specials) == expected, text
    text = "  two  spaces\n\n聪🎉 <table>and brown fox   "
    for each in (words, back):
        assert each.decode(encode(each, text, specials=False)) == text


def test_a_gguf_as_llama_cpp_makes_it_of_gemma(tmp_path: Path) -> None:
    """Spaces of user-defined tokens are spaces there, and their scores are low."""
    made = export.metadata(
        json.dumps(gemma("short")),
        vocab=len(gemma("short")["model"]["vocab"]),
        bos_id=2,
        eos_ids=(1,),
        add_bos=True,
        chat_template=None,
    )
    types = made["tokenizer.ggml.token_type"]
    for i, kind in enumerate(types):
        if kind == 4:
            token = made["tokenizer.ggml.tokens"][i]
            made["tokenizer.ggml.tokens"][i] = token.replace("▁", " ")
            made["tokenizer.ggml.scores"][i] = -1000.0
    write_vocabulary(tmp_path / "a.gguf", dict(made))
    words = Tokenizer.from_str(tokenizer_gguf.tokenizer_json(made))
    compare(tmp_path / "a.gguf", [words], 300)
    with llama.model(tmp_path / "a.gguf", vocab_only=True) as loaded:
        for text in GEMMA_TEXTS:
            expected = llama.tokenize(loaded, text)
            assert encode(words, text, specials=False) == expected, text


@pytest.mark.parametrize("change", ["runs", "missing"])
def test_merges_of_gemma_that_no_score_expresses(change: str) -> None:
    data = gemma("short")
    merges = data["model"]["merges"]
    if change == "missing":
        merges.remove(next(pair for pair in merges if "f" in pair[0]))
    else:  # growing to the left, runs longer than the longest token end otherwise
        is_run = [not "".join(pair).strip("▁") for pair in merges]
        runs = [pair for pair, found in zip(merges, is_run, strict=True) if found]
        runs.sort(key=lambda pair: (-len(pair[1]), len(pair[0])))
        rest = [pair for pair, found in zip(merges, is_run, strict=True) if not found]
        data["model"]["merges"] = runs + rest
    with pytest.raises(UnsupportedError, match="SentencePiece"):
        export.metadata(
            json.dumps(data),
            vocab=2000,
            bos_id=2,
            eos_ids=(1,),
            add_bos=False,
            chat_template=None,
        )
