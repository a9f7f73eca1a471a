"""A target's chat format from the inside: where turns begin, what ends them."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.chat import ChatTemplate
from edgespec.errors import UsageError
from edgespec.tokenizer import Tokenizer

_STANDINS = ("Apple pie", "zebra")  # texts whose first tokens differ


class Talk:
    """Token ids of turns, the user's and the assistant's.

    Raises UsageError for a model without a chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        if not template.is_present:
            raise UsageError(
                "this model has no chat template: training data are its own chats"
            )
        self._tokenizer, self._template = tokenizer, template
        self.eos = frozenset(tokenizer.eos_ids)
        self.opening = self._opening([])
        ends = [_common(*(ids[::-1] for ids in self._turns([])))[::-1]]
        self.user_ends = self.eos | {
            ids[0] for ids in ends if ids and ids[0] in tokenizer.special_ids
        }

    def prompt(self, text: str) -> list[int]:
        """Ids up to where the assistant answers `text`."""
        return self._template.render([_user(text)])

    def next_turn(self, text: str | None = None) -> list[int] | None:
        """What follows a reply's end token: a second question up to its answer.

        None instead of a text: up to where the user writes it. None is returned for
        templates that do not end replies with an end token.
        """
        reply = {"role": "assistant", "content": _STANDINS[0]}
        before = [_user(_STANDINS[0]), reply]
        first = self._template.render(before, add_generation_prompt=False)
        ends = [i for i, token in enumerate(first) if token in self.eos]
        if not ends:
            return None
        if text is None:
            whole = self._opening(before)
        else:
            whole = self._template.render([*before, _user(text)])
        at = ends[-1] + 1
        return whole[at:] if whole[:at] == first[:at] and len(whole) > at else None

    def text(self, ids: Sequence[int]) -> str:
        """What ids say, without control tokens."""
        return self._tokenizer.decode(ids).strip()

    def _opening(self, before: list[dict[str, str]]) -> list[int]:
        return _common(*self._turns(before))

    def _turns(self, before: list[dict[str, str]]) -> list[list[int]]:
        return [
            self._template.render([*before, _user(text)], add_generation_prompt=False)
            for text in _STANDINS
        ]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _common(a: list[int], b: list[int]) -> list[int]:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b)) if n is None else n]
