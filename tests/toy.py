"""TOY: a language model that is a table, so that tests can say what it wants to say.

Byte vocabulary with a few words and control tokens, a target whose logits are a hash of
the last tokens it *sees* (so a wrong KV row or mask changes its output), scripts that
force a reply, and drafters that are right, wrong or random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec import _native
from edgespec.errors import ContextError
from edgespec.session import Session
from edgespec.targets.base import Capabilities
from edgespec.tree.topology import Tree, chain

END, USER, ASSISTANT, SYSTEM, END_2 = 256, 257, 258, 259, 260
WORDS = (b" ha", b" the", b"\n", b"TRE", b" tree", b" Z", b" \xf0\x9f", b"\x8e\x89")
FIRST_WORD = 261
VOCAB = FIRST_WORD + len(WORDS)
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


class ToyTokenizer:
    """Bytes are tokens; words are tokens too, preferred when text is encoded."""

    eos_ids: tuple[int, ...] = (END,)
    special_ids = frozenset({END, USER, ASSISTANT, SYSTEM, END_2})
    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            word = max((w for w in WORDS if data.startswith(w)), key=len, default=b"")
            ids.append(FIRST_WORD + WORDS.index(word) if word else data[0])
            data = data[len(word) or 1 :]
        return ids

    encode_raw = encode

    def text_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return WORDS[token - FIRST_WORD] if FIRST_WORD <= token < VOCAB else b""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.text_bytes, ids)).decode(errors="replace")


class ToyTemplate:
    """ROLE content END, and the opening of the assistant's turn."""

    is_present = True

    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **_: Any,
    ) -> list[int]:
        ids: list[int] = []
        for message in messages:
            content = self._tokenizer.encode(message["content"])
            ids += [ROLES[message["role"]], *content, END]
        return [*ids, ASSISTANT] if add_generation_prompt else ids

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        return False


class ToyTarget:
    """Logits of a row: a hash of the last `order` tokens of its path, by its cache.

    script: a function from the visible sequence to the token to force, or None. The
        cache keeps
    one token per row, so a session that commits or cuts wrongly reads a different past.
    """

    name = "toy"

    def __init__(
        self,
        *,
        context: int = 256,
        order: int = 3,
        script: Callable[[list[int]], int | None] | None = None,
        row_invariant: bool = True,
        spread: float = 3.0,
        banned: Sequence[int] = (END, END_2, USER, ASSISTANT, SYSTEM),
    ) -> None:
        self.vocab = VOCAB
        self.context = context
        self.capabilities = Capabilities(
            tree=True,
            taps=(),
            window=False,
            snapshot=False,
            row_invariant=row_invariant,
        )
        self.script = script
        self.calls: list[tuple[str, int]] = []  # what was asked and how many rows
        self._order = order
        self._spread = spread
        self._banned = list(banned)
        self._cache = np.full(context, -1, dtype=np.int32)
        self._length = 0
        self._open = 0
        self._rows: dict[bytes, NDArray[np.float32]] = {}

    @property
    def length(self) -> int:
        return self._length

    @property
    def cached(self) -> list[int]:
        """The committed rows."""
        return self._cache[: self._length].tolist()

    def forward(
        self, tree: Tree, logit_rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        self.calls.append(("forward", tree.n))
        return self._forward(tree)

    def prefill(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        self.calls.append(("prefill", len(tokens)))
        logits = self._forward(chain(tokens))[-1]
        self._length += len(tokens)
        return logits

    def commit(self, rows: NDArray[np.int32]) -> None:
        rows = np.asarray(rows)
        assert len(rows) == 0 or (rows[-1] < self._open and (np.diff(rows) > 0).all())
        base = self._length
        self._cache[base : base + len(rows)] = self._cache[base + rows]
        self._length += len(rows)
        self._open = 0

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self._length
        self._length = length

    def close(self) -> None:
        self._rows.clear()

    def wants(self, sequence: Sequence[int]) -> int:
        """Its greedy choice after a sequence."""
        return int(self.row(list(sequence)).argmax())

    def row(self, sequence: list[int]) -> NDArray[np.float32]:
        forced = self.script(sequence) if self.script else None
        key = repr((forced, sequence[-self._order :])).encode()
        if key not in self._rows:
            seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
            noise = np.random.default_rng(seed).standard_normal(self.vocab)
            row = (noise * self._spread).astype(np.float32)
            row[self._banned] = -100.0
            if forced is not None:
                row[forced] = 1000.0
            self._rows[key] = row
        return self._rows[key]

    def _forward(self, tree: Tree) -> NDArray[np.float32]:
        if self._length + tree.n > self.context:
            raise ContextError("toy context exceeded")
        base = self._length
        self._cache[base : base + tree.n] = tree.tokens
        self._open = tree.n
        committed = self._cache[:base].tolist()
        return np.stack(
            [self.row(committed + tree.tokens[mask].tolist()) for mask in tree.mask]
        )


def scripted(reply: Sequence[int]) -> Callable[[list[int]], int | None]:
    """A script that says `reply` after the last ASSISTANT token, then falls silent."""

    def script(sequence: list[int]) -> int | None:
        said = (
            len(sequence)
            - 1
            - max(
                (i for i, token in enumerate(sequence) if token == ASSISTANT),
                default=-1,
            )
        )
        return reply[said] if said < len(reply) else END

    return script


class Drafter:
    """Proposes a random tree whose rows follow the target with the given chance."""

    name = "toy"

    def __init__(
        self, target: ToyTarget, *, rows: int = 8, right: float = 1.0, seed: int = 0
    ) -> None:
        self._target = target
        self._rows = rows
        self._right = right
        self._random = np.random.default_rng(seed)

    def propose(self, sequence: NDArray[np.int32]) -> Tree:
        past = sequence.tolist()
        tokens, parent = [past[-1]], [-1]
        paths: list[list[int]] = [past]
        children: list[set[int]] = [set()]
        for _ in range(self._rows - 1):
            is_right = self._random.random() < self._right
            row = (
                len(tokens) - 1 if is_right else int(self._random.integers(len(tokens)))
            )
            wanted = self._target.wants(paths[row])
            token = wanted if is_right else int(self._random.integers(VOCAB))
            if token in children[row]:
                continue
            children[row].add(token)
            parent.append(row)
            tokens.append(token)
            paths.append([*paths[row], token])
            children.append(set())
        return _native.tree_derive(tokens, parent)


class ChainDrafter:
    """Proposes what a function of the sequence says, as a chain."""

    name = "toy"

    def __init__(self, continuation: Callable[[list[int]], Sequence[int]]) -> None:
        self._continuation = continuation

    def propose(self, sequence: NDArray[np.int32]) -> Tree:
        past = sequence.tolist()
        return chain(np.array([past[-1], *self._continuation(past)], dtype=np.int32))


def copycat(target: ToyTarget, length: int) -> ChainDrafter:
    """Drafts exactly what the target will say, beyond any end of sequence."""

    def continuation(past: list[int]) -> list[int]:
        said: list[int] = []
        for _ in range(length):
            said.append(target.wants(past + said))
        return said

    return ChainDrafter(continuation)


def session(target: ToyTarget | None = None, **options: Any) -> Session:
    """A session on the toy model."""
    tokenizer = ToyTokenizer()
    return Session(target or ToyTarget(), tokenizer, ToyTemplate(tokenizer), **options)
