"""A model whose replies are written down: real sessions without weights.

Tokens are bytes; 0 ends a reply. A prompt is lines "role: text", then "assistant: ".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec._native import tree_derive
from edgespec.config import Speculation
from edgespec.drafts.base import Drafter
from edgespec.errors import ContextError
from edgespec.session import Session
from edgespec.targets.base import Capabilities
from edgespec.tree.topology import Tree, chain

END = 0
OPENING = "assistant: "
LOUD = 9.0  # logit of the token that is next


class ByteVocabulary:
    eos_ids = (END,)

    def encode_raw(self, text: str) -> list[int]:
        return list(text.encode())

    def text_bytes(self, token: int) -> bytes:
        return b"" if token == END else bytes([token])


class LineTemplate:
    is_present = True

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, opening: Any = "", **_: Any
    ) -> list[int]:
        lines = [f"{m['role']}: {opening}{m['content']}\n" for m in messages]
        return list("".join([*lines, OPENING]).encode())

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        return False


class ScriptedTarget:
    """Knows an answer per question, "ok" for others.

    Args:
        rival: {text said so far: token}: that token comes `gap` below the right one.
        wobble: added to a rival's logit in forwards of several rows.
        breaks_commits: keeps wrong rows when a path has to be moved.
    """

    name = "scripted"
    vocab = 256

    def __init__(
        self,
        answers: Mapping[str, str],
        *,
        context: int = 4096,
        rival: Mapping[str, str] | None = None,
        gap: float = 0.1,
        wobble: float = 0.0,
        breaks_commits: bool = False,
    ) -> None:
        self.answers = answers
        self.context = context
        self.capabilities = Capabilities(True, (), False, False, wobble == 0.0)
        self.rows: list[int] = []
        self.forwards: list[int] = []  # rows of each
        self._rival, self._gap, self._wobble = rival or {}, gap, wobble
        self._breaks_commits = breaks_commits
        self._open: Tree | None = None

    @property
    def length(self) -> int:
        return len(self.rows)

    def forward(
        self, tree: Tree, logit_rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        if self.length + tree.n > self.context:
            raise ContextError(f"no room for {tree.n} rows")
        self._open = tree
        self.forwards.append(tree.n)
        wanted = range(tree.n) if logit_rows is None else logit_rows.tolist()
        logits = [
            self._logits([*self.rows, *tree.tokens[tree.mask[row]]], tree.n)
            for row in wanted
        ]
        return np.array(logits, dtype=np.float32)

    def prefill(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        tree = chain(tokens)
        logits = self.forward(tree, np.array([tree.n - 1]))[0]
        self.commit(np.arange(tree.n, dtype=np.int32))
        return logits

    def commit(self, rows: NDArray[np.int32]) -> None:
        assert self._open is not None
        if self._breaks_commits and len(rows) and rows[-1] != len(rows) - 1:
            rows = np.arange(len(rows))
        self.rows += self._open.tokens[rows].tolist()
        self._open = None

    def truncate(self, length: int) -> None:
        del self.rows[length:]

    def close(self) -> None:
        self.rows = []

    def _logits(self, sequence: Sequence[int], n_rows: int) -> list[float]:
        asked, _, said = bytes(sequence).rpartition(OPENING.encode())
        question = asked.rpartition(b"user: ")[2].removesuffix(b"\n").decode()
        reply = self.answers.get(question, "ok").encode()
        logits = [0.0] * self.vocab
        is_on_script = reply.startswith(said) and len(said) < len(reply)
        logits[reply[len(said)] if is_on_script else END] = LOUD
        rival = self._rival.get(said.decode("utf-8", "replace"))
        if rival is not None:
            wobble = self._wobble if n_rows > 1 else 0.0
            logits[ord(rival)] = LOUD - self._gap + wobble
        return logits


class SecondBranch:
    """Drafts a wrong token and beside it the two next ones: committing moves rows."""

    name = "second"

    def __init__(self, reply: str) -> None:
        self._reply = reply.encode()

    def propose(self, sequence: NDArray[np.int32]) -> Tree | None:
        said = bytes(sequence.tolist()).rpartition(OPENING.encode())[2]
        following = self._reply[len(said) : len(said) + 2]
        if len(following) < 2 or not self._reply.startswith(said):
            return None
        return tree_derive([sequence[-1], ord("!"), *following], [-1, 0, 0, 2])


def scripted_session(
    answers: Mapping[str, str],
    *,
    speculation: Speculation | None = None,
    drafter: Drafter | None = None,
    **target: Any,
) -> Session:
    """A session on a ScriptedTarget, greedy unless asked otherwise."""
    return Session(
        ScriptedTarget(answers, **target),
        ByteVocabulary(),
        LineTemplate(),
        name="scripted",
        temperature=0.0,
        top_p=1.0,
        speculation=speculation,
        drafter=drafter,
    )
