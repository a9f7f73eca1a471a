"""Sequences on disk: shards that appear whole, and an index that says what they are.

data.json               what wrote them: model, taps, seed, prompts
shard-00000.json        sequences of the shard: ends, kinds, ...; written last
shard-00000.tokens.npy  (n,) int32, sequence behind sequence
shard-00000.written.npy (n,) bool, tokens that are replies of the target
shard-00000.top.npy     (n,) int32, likeliest next tokens; -1: not known
shard-00000.states.npy  (n, taps, hidden) float16, hidden states
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.cache import cannot_write, write_whole
from edgespec.errors import FormatError, UsageError
from edgespec_export.train.writing import Sequence

FORMAT, VERSION = "edgespec-train-data", 1
INDEX = "data.json"
ARRAYS = ("tokens", "written", "top", "states")
SHARD_TOKENS = 1 << 16
HELD_OUT = 20  # one prompt of so many


@dataclass(frozen=True, slots=True)
class Stored:
    """A sequence of a shard; its arrays stay on disk until they are sliced."""

    kind: str
    temperature: float
    is_held_out: bool
    arrays: Mapping[str, NDArray[Any]]  # by ARRAYS, memory-mapped

    def __len__(self) -> int:
        return len(self.arrays["tokens"])


class ShardWriter:
    """Adds sequences to a directory, a shard at a time; the last one when closed.

    Args:
        settings: what wrote the data; a directory begun with others is refused.
    Raises UsageError naming the setting that differs.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        index = directory / INDEX
        if index.exists():
            _check_settings(index, settings)
        else:
            whole = {"format": FORMAT, "version": VERSION, **settings}
            write_whole(index, json.dumps(whole, indent=1) + "\n")
        self._shards = shard_indices(directory)
        self._seen = {digest for s in self._shards for digest in s["digests"]}
        self.next_dialogue = self._shards[-1]["next_dialogue"] if self._shards else 0
        self.tokens: int = sum(s["ends"][-1] for s in self._shards if s["ends"])
        self.dropped = sum(s["dropped"] for s in self._shards)
        self._open: list[Sequence] = []
        self._digests: list[str] = []
        self._dropped = 0

    def add(self, sequences: list[Sequence]) -> None:
        """The next dialogue's sequences. Ones that are there already are dropped."""
        for sequence in sequences:
            digest = _digest(sequence.tokens)
            if digest in self._seen or not sequence.written.any():
                self._dropped += 1
                self.dropped += 1
                continue
            self._seen.add(digest)
            self._open.append(sequence)
            self._digests.append(digest)
            self.tokens += len(sequence.tokens)
        self.next_dialogue += 1
        if sum(len(s.tokens) for s in self._open) >= SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """Writes what is not yet on disk."""
        if not self._open and not self._dropped:
            return
        stem = f"shard-{len(self._shards):05d}"
        for name in ARRAYS:
            parts = [getattr(sequence, name) for sequence in self._open]
            if parts:
                _save(self.directory / f"{stem}.{name}.npy", np.concatenate(parts))
        ends = np.cumsum([len(s.tokens) for s in self._open], dtype=np.int64)
        shard = {
            "ends": ends.tolist(),
            "kinds": [s.kind for s in self._open],
            "temperatures": [s.temperature for s in self._open],
            "held_out": [is_held_out(s.prompt) for s in self._open],
            "digests": self._digests,
            "dropped": self._dropped,
            "next_dialogue": self.next_dialogue,
        }
        write_whole(self.directory / f"{stem}.json", json.dumps(shard) + "\n")
        self._shards.append(shard)
        self._open, self._digests, self._dropped = [], [], 0


@contextmanager
def written_alone(directory: Path) -> Iterator[None]:
    """Keeps other processes from writing shards there. UsageError when one does."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--data {directory}: another training is writing there; wait until it "
                "trains, or name another directory"
            ) from None
        yield
    finally:
        os.close(descriptor)


def read_settings(directory: Path) -> dict[str, Any]:
    """data.json; FormatError when there is none or it is of another kind."""
    index = directory / INDEX
    if not index.is_file():
        raise FormatError(f"{directory}: no {INDEX}: not training data")
    found = _read_json(index)
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise FormatError(
            f"{index}: expected {FORMAT} {VERSION}, got {found.get('format')} "
            f"{found.get('version')}; take another --data directory"
        )
    return found


def read_shards(directory: Path) -> list[Stored]:
    """All sequences of a directory, in the order they were written."""
    found = []
    for number, shard in enumerate(shard_indices(directory)):
        if not shard["ends"]:
            continue
        stem = f"shard-{number:05d}"
        tokens = shard["ends"][-1]
        arrays = {name: _read_array(directory, stem, name, tokens) for name in ARRAYS}
        begin = 0
        for i, end in enumerate(shard["ends"]):
            found.append(
                Stored(
                    shard["kinds"][i],
                    shard["temperatures"][i],
                    shard["held_out"][i],
                    {name: array[begin:end] for name, array in arrays.items()},
                )
            )
            begin = end
    return found


def counts(stored: list[Stored]) -> Counter[str]:
    """Tokens by kind."""
    found: Counter[str] = Counter()
    for sequence in stored:
        found[sequence.kind] += len(sequence)
    return found


def is_held_out(prompt: NDArray[np.int32]) -> bool:
    """Whether a prompt's replies are for measuring: 5 % are, by the prompt alone."""
    return int(_digest(prompt)[:8], 16) % HELD_OUT == 0


def shard_indices(directory: Path) -> list[dict[str, Any]]:
    """The shards' indices, from the first one on without a gap."""
    found: list[dict[str, Any]] = []
    while (path := directory / f"shard-{len(found):05d}.json").is_file():
        shard = _read_json(path)
        lists = ("ends", "kinds", "temperatures", "held_out", "digests")
        is_whole = all(isinstance(shard.get(name), list) for name in lists) and all(
            isinstance(shard.get(name), int) for name in ("dropped", "next_dialogue")
        )
        is_whole = is_whole and len({len(shard[name]) for name in lists}) == 1
        if not is_whole or not _ascend(shard["ends"]):
            raise FormatError(f"{path}: damaged: not a shard's index; {_again(path)}")
        found.append(shard)
    return found


def _ascend(ends: list[Any]) -> bool:
    is_counted = all(type(end) is int for end in ends)
    return is_counted and all(a < b for a, b in pairwise([0, *ends]))


def _read_array(directory: Path, stem: str, name: str, tokens: int) -> NDArray[Any]:
    path = directory / f"{stem}.{name}.npy"
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise FormatError(f"{path}: missing; {_again(path)}") from None
    except (ValueError, EOFError) as error:
        raise FormatError(f"{path}: truncated or damaged; {_again(path)}") from error
    if len(array) != tokens:
        raise FormatError(
            f"{path}: expected {tokens} tokens, got {len(array)}; {_again(path)}"
        )
    return array


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: damaged: {error}; {_again(path)}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: damaged: expected an object; {_again(path)}")
    return found


def _again(path: Path) -> str:
    """What to do about a damaged file; shards are written in order."""
    stem, _, _ = path.name.partition(".")
    if path.name == INDEX:
        return "take another --data directory"
    return f"remove {stem}.* and the shards behind it: they are written again"


def _check_settings(index: Path, settings: Mapping[str, Any]) -> None:
    stored = read_settings(index.parent)
    for name, value in settings.items():
        if stored.get(name) != value:
            raise UsageError(
                f"{index}: begun with {name} {stored.get(name)!r}, now {value!r}; "
                "take another --data directory"
            )


def _digest(tokens: NDArray[np.int32]) -> str:
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:16]


def _save(path: Path, array: NDArray[Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            np.save(file, array)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise cannot_write(path, error) from error
