"""What a native drafter says, level by level, and the truth about it in numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, byref, c_bool, c_float, c_int, c_int32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from edgespec._native import NativeDrafter, NativeHead, NativeModel, tree_derive
from edgespec._native.library import _raise
from edgespec._native.trees import CTree, tree_to_c
from edgespec_export import head_forward, head_gguf, sources
from edgespec_export.heads import Head
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet
from tests.export import checkpoints
from tests.export import heads as tiny

Floats = NDArray[np.float32]
_FLOATS = POINTER(c_float)


class CNet(ctypes.Structure):
    """es_draft_net"""

    _fields_ = [
        ("self", c_void_p),
        ("vocab", c_int32),
        ("ids", POINTER(c_int32)),
        ("depth", c_int32),
        ("width", c_int32),
        (
            "begin",
            CFUNCTYPE(c_int, c_void_p, c_int32, POINTER(_FLOATS), POINTER(c_bool)),
        ),
        (
            "expand",
            CFUNCTYPE(
                c_int,
                *(c_void_p, POINTER(CTree), POINTER(c_int32), c_int32),
                POINTER(_FLOATS),
            ),
        ),
        ("end", CFUNCTYPE(None, c_void_p)),
    ]


class CDrafter(ctypes.Structure):
    """es_drafter, as far as it matters here."""

    _fields_ = [("head", c_void_p), ("net", CNet)]


class Net:
    """The es_draft_net of a drafter; statuses other than ES_OK raise."""

    def __init__(self, drafter: NativeDrafter) -> None:
        self._drafter = drafter
        address = drafter.open_handle.value
        assert address is not None
        self._net = CDrafter.from_address(address).net
        self.vocab, self.depth = self._net.vocab, self._net.depth
        self.width = self._net.width
        ids = self._net.ids
        self.ids = np.array(ids[: self.vocab]) if ids else None

    def begin(self, root: int) -> Floats | None:
        """Logits (vocab) behind the root; None when there is nothing to draft from."""
        out, is_ready = _FLOATS(), c_bool()
        _check(self._net.begin(self._net.self, root, byref(out), byref(is_ready)))
        return self._copy(out, 1)[0] if is_ready.value else None

    def expand(self, tree: CTree, rows: Sequence[int]) -> Floats:
        """Logits (n, vocab) behind rows of a tree."""
        out, given = _FLOATS(), (c_int32 * max(1, len(rows)))(*rows)
        _check(
            self._net.expand(self._net.self, byref(tree), given, len(rows), byref(out))
        )
        return self._copy(out, len(rows))

    def end(self) -> None:
        self._net.end(self._net.self)

    def _copy(self, out: object, n: int) -> Floats:
        return np.array(np.ctypeslib.as_array(out, (n, self.vocab)))

    def rows(self, root: int, tokens: Sequence[int], parent: Sequence[int]) -> Floats:
        """Logits (1 + n, vocab) of a whole draft: root, then tokens, by level."""
        first = self.begin(root)
        assert first is not None
        made = tree_derive([root, *tokens], [-1, *parent])
        tree, found = tree_to_c(made), [first[None]]
        for depth in range(1, made.depth.max() + 1):
            level = [int(row) for row in np.flatnonzero(made.depth == depth)]
            for at in range(0, len(level), self.width):
                found.append(self.expand(tree, level[at : at + self.width]))
        self.end()
        return np.concatenate(found)


def _check(status: int) -> None:
    if status:
        _raise(status)


# ---- tiny heads ----------------------------------------------------------------------


@dataclass
class World:
    """A tiny target, loaded; heads are made for it."""

    path: Path
    weights: WeightSet
    models: dict[tuple[int, str | None], NativeModel] = field(default_factory=dict)

    def model(self, threads: int = 2, cpu: str | None = None) -> NativeModel:
        if (threads, cpu) not in self.models:
            model = NativeModel(self.path, threads=threads, cpu=cpu)
            model.load()
            self.models[threads, cpu] = model
        return self.models[threads, cpu]


def world(path: Path, kind: str = "F32", **shape: Any) -> World:
    """A target of eight layers, hidden 64 and 320 tokens, in `path`."""
    checkpoints.gguf_checkpoint(
        path,
        checkpoints.Shape(n_layers=tiny.LAYERS, **shape),
        kind=kind,
        embedding=kind,
    )
    return World(path, sources.read(path))


def write(
    made: tiny.Checkpoint | Callable[[Head], Head],
    path: Path,
    target: WeightSet,
    quant: str | None = "f32",
) -> Head:
    """The checkpoint as GGUF at `path`, and as it is read back from there."""
    head = reader.read(made.write(path.with_suffix(".source")), target.config)
    head_gguf.write(head, path, target=target, quant=quant)
    return reader.read(path, target.config)


def opened(
    target: NativeModel, path: Path, window: int = 0
) -> tuple[NativeDrafter, Net]:
    drafter = NativeDrafter(NativeHead(target, path), window=window)
    return drafter, Net(drafter)


# ---- truth ---------------------------------------------------------------------------


@contextmanager
def _halves() -> Iterator[None]:
    """Keys and values of the truth are rounded as the cache rounds them."""
    plain_heads, plain_rotate = head_forward._heads, head_forward._rotate
    last = ""

    def heads(head: Head, part: str, x: Floats, count: int) -> Floats:
        nonlocal last
        last = part
        rows = plain_heads(head, part, x, count)
        return rows.astype(np.float16).astype(np.float32) if part == "v" else rows

    def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
        rows = plain_rotate(x, cos, sin)
        return rows.astype(np.float16).astype(np.float32) if last == "k" else rows

    with (
        mock.patch.object(head_forward, "_heads", heads),
        mock.patch.object(head_forward, "_rotate", rotate),
    ):
        yield


@dataclass
class Truth:
    """All rows at once and no cache: what `Net.rows` must say.

    Args:
        base: position of the first pair still seen.
        window: positions a pair sees, itself included; 0: all.
    """

    head: Head
    target: WeightSet
    window: int = 0
    base: int = 0
    tokens: list[int] = field(default_factory=list)
    taps: list[Floats] = field(default_factory=list)

    def append(self, tokens: Sequence[int], taps: Floats) -> None:
        self.tokens += [int(t) for t in tokens]
        self.taps += list(taps.reshape(len(tokens), -1))

    def truncate(self, length: int) -> None:
        del self.tokens[length:], self.taps[length:]

    def rows(self, root: int, tokens: Sequence[int], parent: Sequence[int]) -> Floats:
        output = self.target.tensors.get("output", self.target.tensors["token_embd"])
        projection = output.load_f32()
        kept = np.stack(self.taps[self.base :]).astype(np.float16).astype(np.float32)
        tree = tree_derive([root, *tokens], [-1, *parent])
        if self.head.kind == "medusa":
            said = head_forward.medusa(self.head, kept[-1:], projection)[:, 0]
            return said[tree.depth]
        n, m = len(kept), len(tokens)
        ids = [*self.tokens[self.base + 1 :], root, *tokens]
        table = self.head.tensors.get(
            "token_embd", self.target.tensors["token_embd"]
        ).load_f32()
        # pair n - 1 is the root's; row r > 0 of the tree is pair n - 1 + r
        positions = np.concatenate([np.arange(n), n - 1 + tree.depth[1:]]) + self.base
        visible = np.tri(n + m, dtype=bool)
        visible[n:, n:] = tree.mask[1:, 1:]
        if self.window:
            visible &= positions[:, None] - positions[None, :] < self.window
        features = np.zeros((n + m, self.head.hidden), np.float32)
        is_third = self.head.kind == "eagle3"
        features[:n] = head_forward.fuse(self.head, kept) if is_third else kept
        for _ in range(tree.depth.max() + 1):
            with _halves():
                logits, handed = head_forward.step(
                    self.head, table[ids], features, positions, visible, projection
                )
            features[n:] = handed[n - 1 + tree.parent[1:]]
        return logits[n - 1 :]


def some_taps(head: Head, n: int, seed: int) -> Floats:
    """(n, n_taps, target's hidden)"""
    rng = np.random.default_rng(seed)
    shape = (n, len(head.taps), head.target_hidden)
    return rng.standard_normal(shape).astype(np.float32)


def some_tokens(head: Head, n: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, head.vocab, n).astype(np.int32)
