"""Small tokenizers of every kind the runtime reads, made here."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>")
CORPUS = (
    "the quick brown fox jumps over the lazy dog; he said that she was there. "
    "user assistant system\nHello world, I am here. uno due tre ha ha ha\n"
)
WORDS = ("a", "b", "c", "h", "i", "e", "l", "o", "w", "r", "d", "<", ">", "s", "/")


def byte_level(*, added: tuple[str, ...] = (), is_special: bool = False) -> str:
    """A byte-level BPE, specials at 0 to 2; `added` follow the merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        min_frequency=1,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([CORPUS] * 4, trainer)
    made.add_tokens(
        [AddedToken(text, special=is_special, normalized=False) for text in added]
    )
    return made.to_str()


def sentencepiece(scheme: str) -> str:
    """A BPE with byte fallback as the Llama 2 family has it; <s> is 1, </s> is 2.

    scheme: "first" puts a space in front of the text, "every" in front of every piece
    between special tokens, "never" nowhere.
    """
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    vocab += ["▁", *WORDS, "▁h", "▁hi", "lo", "▁w", "▁a"]
    merges = [("▁", "h"), ("▁h", "i"), ("l", "o"), ("▁", "w"), ("▁", "a")]
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if scheme != "never":
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    steps = [prepend, space] if scheme == "every" else [space]
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": {
                "direction": "Right",
                "max_length": 4,
                "strategy": "LongestFirst",
                "stride": 0,
            },
            "padding": None,
            "added_tokens": [{"id": i, "content": vocab[i], **flags} for i in range(3)],
            "normalizer": None
            if scheme == "first"
            else {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": metaspace if scheme == "first" else None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": back},
            "model": {
                "type": "BPE",
                "unk_token": "<unk>",
                "byte_fallback": True,
                "fuse_unk": True,
                "vocab": {token: i for i, token in enumerate(vocab)},
                "merges": merges,
            },
        }
    )
