"""Training data: the target's own replies and hidden states, until there are enough."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.bundle import Model
from edgespec.cache import sha256_of
from edgespec.chat import ChatTemplate
from edgespec.manifest import TARGETS
from edgespec.progress import Progress, silent
from edgespec.tokenizer import Tokenizer
from edgespec_export.train.shards import HELD_OUT, ShardWriter, written_alone
from edgespec_export.train.talk import Talk
from edgespec_export.train.texts import Makers, Prompt, Random, read_prompts
from edgespec_export.train.writing import Dialogue, Writer

CONTEXT = 2048  # most tokens of a sequence


@dataclass(frozen=True)
class Source:
    """A target as it will run: its file, its words, the hidden states drafts want."""

    model: Model
    threads: int
    talk: Talk = field(init=False)

    def __post_init__(self) -> None:
        entry = self.model.manifest.tokenizer
        tokenizer = Tokenizer(
            self.model.tokenizer_json, entry.bos_id, entry.eos_ids, entry.add_bos
        )
        template = ChatTemplate(self.model.chat_template, tokenizer)
        object.__setattr__(self, "talk", Talk(tokenizer, template))

    @property
    def path(self) -> Path:
        """Its GGUF file."""
        return self.model.path_of(TARGETS["gguf"])

    @property
    def taps(self) -> tuple[int, ...]:
        """Low, middle, high as EAGLE-3 has them, then the final norm's output.

        The last alone of targets too shallow for three.
        """
        layers = self.model.manifest.architecture.n_layers
        inner = (2, layers // 2, layers - 3)
        is_deep = inner[0] < inner[1] < inner[2]
        return (*inner, layers) if is_deep else (layers,)

    def writer(self, seed: int) -> Writer:
        return Writer(
            self.path,
            threads=self.threads,
            taps=self.taps,
            context=CONTEXT,
            seed=seed,
        )


def write(
    source: Source,
    directory: Path,
    *,
    tokens: int,
    prompts: Path | None,
    limit: int,
    seed: int,
    progress: Progress = silent,
) -> int:
    """Goes on writing until the directory has so many tokens; how many there are.

    The same arguments give the same sequences, however often it is interrupted.

    Args:
        prompts: a file of JSON lines; None: the target makes up its questions.
        limit: most tokens of a reply.
    Raises UsageError when the directory was begun with other arguments, or another
    process is writing there.
    """
    settings = _settings(source, prompts, limit, seed)
    there = ShardWriter(directory, settings).tokens
    if there >= tokens:
        return there
    asked = read_prompts(prompts) if prompts else []
    makers = Makers(source.talk, asked, limit, seed)
    with (
        written_alone(directory),  # before what is there is read for good
        closing(ShardWriter(directory, settings)) as shards,
        closing(source.writer(seed)) as writer,
    ):
        for sequences in writer.run(makers.make, shards.next_dialogue):
            shards.add(sequences)
            progress("write", min(shards.tokens, tokens), tokens)
            if shards.tokens >= tokens:
                break
    return shards.tokens


def write_measure(
    source: Source,
    directory: Path,
    prompts: Path,
    *,
    limit: int,
    seed: int,
    progress: Progress = silent,
) -> None:
    """Greedy replies to the first turns of a file, to measure drafts on, once."""
    settings = _settings(source, prompts, limit, seed)
    asked = read_prompts(prompts)
    if ShardWriter(directory, settings).next_dialogue >= len(asked):
        return

    def make(number: int, random: Random) -> Dialogue:
        first = Prompt(asked[number].turns[:1], asked[number].kind)
        return Makers(source.talk, [], limit, seed).chat(first, 0.0)

    with (
        written_alone(directory),
        closing(ShardWriter(directory, settings)) as shards,
        closing(source.writer(seed)) as writer,
    ):
        for sequences in writer.run(make, shards.next_dialogue, len(asked)):
            shards.add(sequences)
            progress("write for measuring", shards.next_dialogue, len(asked))


def _settings(
    source: Source, prompts: Path | None, limit: int, seed: int
) -> dict[str, Any]:
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest() if prompts else None
    return {
        "model": source.model.manifest.name,
        "sha256": sha256_of(source.path),
        "taps": list(source.taps),
        "prompts": digest,
        "reply_tokens": limit,
        "context": CONTEXT,
        "seed": seed,
        "held_out_one_of": HELD_OUT,
    }
