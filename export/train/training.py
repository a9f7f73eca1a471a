"""From a target to a trained head: data, vocabulary, loop, files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from numpy.typing import NDArray

from edgespec.bundle import Model
from edgespec.cache import write_whole
from edgespec.config import Training
from edgespec.errors import UsageError
from edgespec.progress import Progress, silent
from edgespec_export import forward, sources
from edgespec_export.train import card, data, layouts, shards, texts
from edgespec_export.train.eagle3 import Eagle3
from edgespec_export.train.loop import (
    CHECKPOINT,
    Budget,
    Loop,
    Measure,
    read_checkpoint,
)
from edgespec_export.train.medusa import Medusa
from edgespec_export.train.optimizers import learning_rate
from edgespec_export.train.pruned import Pruned, check_layers
from edgespec_export.train.shards import Stored
from edgespec_export.weights import WeightSet

KINDS = ("eagle3", "medusa", "pruned")
REPORT, CARD = "training.json", "README.md"
DEPTHS = 4  # heads of Medusa; drafts in a row that others are taught or measured on
_DEFAULT = Training()
REPLY_TOKENS = 768  # most of a reply in the data
MEASURED_REPLY = 256  # of one that is measured on
_EAGLE_LAYERS = 7  # that the three taps need
PATIENCE = timedelta(days=7)  # of processes that wait while one writes the data


@dataclass(frozen=True, slots=True)
class HeadKind:
    """What --head says."""

    kind: str
    layers: tuple[int, ...] = ()  # of the target, kept by pruning

    @staticmethod
    def parse(text: str) -> HeadKind:
        """Reads eagle3, medusa or pruned:0,1,29; UsageError for anything else."""
        kind, colon, rest = text.partition(":")
        parts = rest.split(",") if rest else []
        is_pruned = kind == "pruned"
        if kind not in KINDS or not is_pruned == bool(colon) == bool(parts):
            raise UsageError(
                "--head: expected eagle3, medusa or pruned:LAYERS such as "
                f"pruned:0,1,28,29, got {text!r}"
            )
        if not all(part.strip().isdecimal() for part in parts):
            raise UsageError(f"--head: expected numbers of layers, got {text!r}")
        return HeadKind(kind, tuple(int(part) for part in parts))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to train, on what, for how long.

    Args:
        prompts: a file of what people ask; None: the target makes it all up.
        data: where its replies are, or are to go.
        measure: a file of prompts never to train on, to measure on beside held-out
            ones.
        tokens: of data there are to be.
        draft_vocab: tokens a head knows, at most the target's.
    """

    head: HeadKind
    directory: Path
    data: Path
    prompts: Path | None = None
    measure: Path | None = None
    minutes: float = _DEFAULT.minutes
    tokens: int = _DEFAULT.tokens
    resume: bool = False
    layout: str = _DEFAULT.layout
    draft_vocab: int = _DEFAULT.draft_vocab
    seed: int = 0
    threads: int = 1


def train(
    model: Model,
    wanted: Wanted,
    *,
    progress: Progress = silent,
    log: Callable[[str], None] = print,
) -> Path:
    """Writes data as far as they are missing, trains, and keeps the best head.

    Raises UsageError for what does not fit together, before anything is written.
    """
    layouts.check(wanted.head.kind, wanted.layout)
    _check(model, wanted)
    rate = learning_rate(wanted.head.kind, wanted.minutes)
    budget = Budget(wanted.minutes, rate, wanted.seed)
    torch.set_num_threads(wanted.threads)
    torch.manual_seed(wanted.seed)
    source = data.Source(model, wanted.threads)
    target = sources.read(source.path)
    if wanted.head.kind == "pruned":
        check_layers(wanted.head.layers, target.config)
    if wanted.resume:
        _check_resumed(wanted, budget)
    _make_directories(wanted)
    state = _processes()
    progress = progress if state.is_main_process else silent
    with state.main_process_first():
        _write_data(source, wanted, progress)
    stored = shards.read_shards(wanted.data)
    learnt = [s for s in stored if not s.is_held_out]
    measured = {"held-out": _greedy([s for s in stored if s.is_held_out])}
    if wanted.measure is not None:
        measured["measured"] = _greedy(shards.read_shards(_measured_place(wanted)))
    if not learnt or not measured["held-out"]:
        raise UsageError(
            f"--tokens {wanted.tokens}: too few for a reply to learn from and one to "
            "measure on"
        )
    head = make_head(wanted, target, learnt)
    facts = _facts(wanted, budget, target, stored)

    origin = model.manifest.weights[0].origin
    verifier = origin.removeprefix("hf:") if origin.startswith("hf:") else None

    def save(best: torch.nn.Module, history: list[Measure], tokens: int) -> None:
        layouts.save(best, target, wanted.directory, wanted.layout, verifier)
        report = facts | {
            "tokens_trained_on": tokens,
            "history": [asdict(measure) for measure in history],
        }
        text = json.dumps(report, indent=1) + "\n"
        write_whole(wanted.directory / REPORT, text)
        write_whole(wanted.directory / CARD, card.text(report))

    loop = Loop(
        head,
        learnt,
        measured,
        budget,
        wanted.directory,
        settings=facts["settings"],
        save=save,
        progress=progress,
        log=log,
    )
    if wanted.resume:
        loop.resume()
    loop.run()
    return wanted.directory


def is_main_process() -> bool:
    """Whether this is the process that talks and keeps files, of one or of many."""
    return bool(PartialState().is_main_process)


def _processes() -> PartialState:
    """What this process knows of the others, on whatever there is to compute with.

    Unless it is told to use processors, accelerate looks for others only beside GPUs.
    """
    is_gpu_there = getattr(torch, "accelerator", torch.cuda).is_available()
    is_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not is_gpu_there
    return PartialState(cpu=is_cpu, timeout=PATIENCE)


def make_head(
    wanted: Wanted, target: WeightSet, learnt: list[Stored]
) -> torch.nn.Module:
    """The head as it begins."""
    config = target.config
    size = min(wanted.draft_vocab, config.vocab)
    if wanted.head.kind == "medusa":
        return Medusa(config, forward.head(target), size, DEPTHS)
    ids = most_frequent(learnt, size, config.vocab)
    if wanted.head.kind == "pruned":
        return Pruned(target, wanted.head.layers, ids, DEPTHS)
    return Eagle3(
        config,
        target.tensors["token_embd"].load_f32(),
        forward.head(target),
        ids,
        DEPTHS,
    )


def most_frequent(sequences: list[Stored], size: int, vocab: int) -> NDArray[np.int64]:
    """Ascending ids of the tokens that replies have most; of equals the lower ones."""
    counts = np.zeros(vocab, np.int64)
    for sequence in sequences:
        replies = sequence.arrays["tokens"][sequence.arrays["written"]]
        counts += np.bincount(replies, minlength=vocab)
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:size]).astype(np.int64)


def _check(model: Model, wanted: Wanted) -> None:
    shape = model.manifest.architecture
    if not 0 < wanted.minutes < math.inf:
        raise UsageError(
            f"--minutes: expected more than 0, and an end, got {wanted.minutes:g}"
        )
    if not 0 <= wanted.seed < 2**63:
        raise UsageError(f"--seed: expected 0 to 2^63 - 1, got {wanted.seed}")
    for option, value in (
        ("--tokens", wanted.tokens),
        ("--draft-vocab", wanted.draft_vocab),
        ("--threads", wanted.threads),
    ):
        if value < 1:
            raise UsageError(f"{option}: expected 1 or more, got {value}")
    if wanted.head.kind == "eagle3" and shape.n_layers < _EAGLE_LAYERS:
        raise UsageError(
            f"--head eagle3: expected a target of {_EAGLE_LAYERS} layers or more, its "
            f"states behind three of which are read; this one has {shape.n_layers}"
        )
    is_there = (wanted.directory / CHECKPOINT).exists()
    if wanted.resume and not is_there:
        raise UsageError(
            f"--resume: {wanted.directory}: no checkpoint; without it training begins, "
            "with the data there are"
        )
    if is_there and not wanted.resume:
        raise UsageError(
            f"{wanted.directory}: has the checkpoint of a training; --resume goes on "
            "with it"
        )
    # A mistake here is to be known now, and not when hours of data are written.
    for file in (wanted.prompts, wanted.measure):
        if file is not None:
            texts.read_prompts(file)


def _write_data(source: data.Source, wanted: Wanted, progress: Progress) -> None:
    data.write(
        source,
        wanted.data,
        tokens=wanted.tokens,
        prompts=wanted.prompts,
        limit=REPLY_TOKENS,
        seed=wanted.seed,
        progress=progress,
    )
    if wanted.measure is not None:
        data.write_measure(
            source,
            _measured_place(wanted),
            wanted.measure,
            limit=MEASURED_REPLY,
            seed=wanted.seed,
            progress=progress,
        )


def _measured_place(wanted: Wanted) -> Path:
    return wanted.data / "measured"


def _greedy(sequences: list[Stored]) -> list[Stored]:
    return [s for s in sequences if s.temperature == 0]


def _settings(wanted: Wanted, budget: Budget) -> dict[str, Any]:
    """What a training that is resumed must have been begun with, but for the data."""
    return {
        "head": wanted.head.kind,
        "layers": list(wanted.head.layers),
        "draft_vocab": wanted.draft_vocab,
        "depths": DEPTHS,
        "minutes": wanted.minutes,
        "seed": wanted.seed,
        "width": budget.width,
        "rows": budget.rows,
        "learning_rate": budget.rate,
    }


def _make_directories(wanted: Wanted) -> None:
    for option, place in (("--out", wanted.directory), ("--data", wanted.data)):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{option} {place}: cannot be a directory: {error.strerror}; name "
                "another one"
            ) from None


def _check_resumed(wanted: Wanted, budget: Budget) -> None:
    """Before data are written that the checkpoint knows nothing of."""
    kept = read_checkpoint(wanted.directory, _settings(wanted, budget))
    tokens = kept["settings"].get("data_tokens", 0)
    if wanted.tokens > tokens:
        raise UsageError(
            f"--resume: {wanted.directory / CHECKPOINT} was made with {tokens} tokens "
            f"of data, now --tokens {wanted.tokens}; more data need a training of "
            "their own: another --out, and --data with these"
        )


def _facts(
    wanted: Wanted, budget: Budget, target: WeightSet, stored: list[Stored]
) -> dict[str, Any]:
    written = shards.read_settings(wanted.data)
    described = {k: v for k, v in written.items() if k not in ("format", "version")}
    held_out = [s for s in stored if s.is_held_out]
    return {
        "settings": _settings(wanted, budget) | {"data_tokens": sum(map(len, stored))},
        "target": {
            "name": target.name,
            "sha256": target.origin.sha256,
            "licence": target.origin.licence,
        },
        "data": described
        | {
            "tokens_by_kind": dict(shards.counts(stored)),
            "sequences": len(stored),
            "held_out": len(held_out),
            "reply_tokens_in_all": sum(int(s.arrays["written"].sum()) for s in stored),
        },
    }
