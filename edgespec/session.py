"""One loaded model: prompts in, replies out, the KV cache reused from call to call."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from edgespec._native import SampleParams
from edgespec.config import (
    FALLBACK_TEMPERATURE,
    FALLBACK_TOP_P,
    Runtime,
    Sampling,
    Speculation,
    Stopping,
    check_sampling,
)
from edgespec.drafts.base import Drafter
from edgespec.engine import Engine
from edgespec.errors import ContextError, UsageError
from edgespec.generation import Generation, Making, Refill, Request
from edgespec.memory import Excerpt, Memory
from edgespec.reply import Reply
from edgespec.sliding import Sliding, Window
from edgespec.targets.base import Target
from edgespec.transcript import Transcript

if TYPE_CHECKING:
    from edgespec.drafts import AnyHead

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

UNLIMITED = 1 << 31  # more than any context


class Template(Protocol):
    """What a session needs of a chat template."""

    @property
    def is_present(self) -> bool: ...

    def render(
        self, messages: Sequence[Message], **template_args: Any
    ) -> list[int]: ...

    def opens_thinking(self, prompt: Sequence[int]) -> bool: ...


class Vocabulary(Protocol):
    """What a session needs of a tokenizer."""

    eos_ids: tuple[int, ...]

    def encode_raw(self, text: str) -> list[int]: ...

    def text_bytes(self, token: int) -> bytes: ...


class Session:
    """A target with its tokenizer, template and draft. One reply at a time.

    Speculation never changes a token: `is_speculating = False` gives the same reply,
    slower. A call during another reply raises BackendError.

    Repeatability: with an explicit seed, a target whose rows are not invariant gets
    trees that depend on the prompt and the reply alone, from a fixed cost table instead
    of measured times, so runs repeat. Without a seed measured times choose the trees,
    and where such a target rounds differently for other tree sizes a near-tie may then
    fall differently.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Vocabulary,
        template: Template | None = None,
        *,
        name: str = "",
        eos_ids: Sequence[int] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        speculation: Speculation | None = None,
        prefill_chunk: int | None = None,
        drafter: Drafter | None = None,
        head: AnyHead | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.name = name
        self.last_reply: Reply | None = None
        self._latest: weakref.ref[Generation] | None = None
        self.speculation = speculation or Speculation()
        self._temperature = FALLBACK_TEMPERATURE if temperature is None else temperature
        self._top_p = FALLBACK_TOP_P if top_p is None else top_p
        self.engine = Engine(
            target,
            eos=tokenizer.eos_ids if eos_ids is None else eos_ids,
            speculation=self.speculation,
            prefill_chunk=prefill_chunk or Runtime().prefill_chunk,
            drafter=drafter,
            head=head,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        generation = None if self._latest is None else self._latest()
        if generation is not None:
            with suppress(ValueError):  # another thread is inside: close() tells
                generation.close()
        self.close()

    @property
    def target(self) -> Target:
        """What verifies; another one may take its place between replies."""
        return self.engine.target

    @target.setter
    def target(self, target: Target) -> None:
        self.engine.target = target

    @property
    def backend(self) -> str:
        return self.target.name

    @property
    def draft(self) -> str:
        """none | ngram | eagle3 | eagle3+ngram | ..., as speculation is now."""
        return self.engine.draft_name

    @property
    def is_speculating(self) -> bool:
        """Whether rounds draft; may be changed between replies."""
        return self.engine.is_speculating

    @is_speculating.setter
    def is_speculating(self, wanted: bool) -> None:
        self.engine.is_speculating = wanted

    @property
    def context(self) -> int:
        """KV rows: prompt and reply together. With a window, the model's positions."""
        return self.target.context

    @property
    def window(self) -> Window | None:
        """What the target sees of a conversation; None: all, up to the context."""
        seen = self.target.capabilities
        if not seen.window:
            return None
        return Window(self.context, seen.window, seen.sinks)

    def generate(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        logprobs: int = 0,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Streams a reply.

        Args:
            prompt: text, token ids, or messages with "role" and "content". Text is one
                user message when the model has a chat template, unless `raw`.
            sampling: unset temperature and top_p come from the model; an unset seed is
                drawn.
            logprobs: how many alternatives to report per token; 0 reports none.
            raw: text is the prompt itself, without a chat template.

        Raises UsageError for values out of range and ContextError for a prompt that
        does not fit, both before anything is computed.
        """
        ids = self.encode(prompt, raw=raw, template_args=template_args)
        window = self.window
        return self._start(
            ids,
            sampling=sampling,
            stopping=stopping,
            logprobs=logprobs,
            refill=Sliding(window, ids).refill if window else None,
        )

    def complete(self, prompt: Prompt, **options: Any) -> Reply:
        """The whole reply at once; options as for `generate`."""
        generation = self.generate(prompt, **options)
        for _ in generation:
            pass
        return generation.reply

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        stopping: Stopping | None = None,
        logprobs: int = 0,
        memory: Memory | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Streams the assistant's next turn, the last message being the user's.

        Where `generate` stops for a full context, this drops the oldest turns, keeps
        the system turn, prefills the rest, says so in `Delta.notice` and goes on. With
        a window both go on, whatever the length.

        Args:
            memory: kept by the caller from turn to turn: what was dropped, and the
                exact tokens of earlier replies, so that a turn evaluates only what is
                new.
        """
        memory = Memory() if memory is None else memory
        excerpt = Excerpt(
            messages,
            memory,
            render=lambda kept: self.encode(kept, template_args=template_args),
            eos=self.engine.eos,
            context=self.context,
        )
        window = self.window
        refill: Refill
        if window:
            sliding = Sliding(window, excerpt.encode())
            prompt, refill = sliding.prompt, sliding.refill
            evicted, notice = sliding.evicted, sliding.notice
        else:
            prompt, refill = excerpt.fit(), excerpt.refill
            evicted, notice = memory.evicted, excerpt.notice
        generation = self._start(
            prompt,
            sampling=sampling,
            stopping=stopping,
            logprobs=logprobs,
            refill=refill,
            evicted=evicted,
            notice=notice,
        )
        generation.on_end(excerpt.keep)
        return generation

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids a prompt stands for, as described at `generate`."""
        has_template = self.template is not None and self.template.is_present
        if isinstance(prompt, str):
            if raw or not has_template:
                return self._checked(self.tokenizer.encode_raw(prompt))
            prompt = [{"role": "user", "content": prompt}]
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            if self.template is None:
                raise UsageError(
                    "this model has no chat template: pass text or token ids"
                )
            return self._checked(
                self.template.render(items, **dict(template_args or {}))
            )
        return self._checked(items)

    def _check_room(self, ids: Sequence[int], stopping: Stopping) -> None:
        """Raises ContextError for a prompt that leaves no row for the context."""
        if len(ids) > self.context:
            given = stopping.max_tokens
            wanted = "unlimited" if given is None else given
            advice = "" if self.window else " or raise --ctx"
            raise ContextError(
                f"the prompt has {len(ids)} tokens and {wanted} new tokens (max_new) "
                f"were asked for, but the context (ctx) holds {self.context}: shorten "
                f"the prompt{advice}"
            )

    def reset(self) -> None:
        """Empties the KV cache, the sequence and the draft's memory of earlier text."""
        with self.engine.claim():
            self.engine.reset()

    def close(self) -> None:
        """Frees the model's memory. BackendError while a reply is being made."""
        with self.engine.claim():
            self.engine.close()

    def _start(
        self,
        ids: list[int],
        *,
        sampling: Sampling | None,
        stopping: Stopping | None,
        logprobs: int,
        refill: Refill | None = None,
        evicted: int = 0,
        notice: str = "",
    ) -> Generation:
        stopping, sampling = stopping or Stopping(), sampling or Sampling()
        self._check_room(ids, stopping)
        if not 0 <= logprobs <= self.target.vocab:
            raise UsageError(
                f"logprobs: expected 0 to {self.target.vocab}, got {logprobs}"
            )
        is_seeded = sampling.seed is not None
        request = Request(
            prompt=ids,
            params=self.sample_params(sampling),
            max_new=self._max_new(stopping),
            logprobs=logprobs,
            is_repeatable=is_seeded and not self.target.capabilities.row_invariant,
            evicted=evicted,
            notice=notice,
        )
        is_thinking = self.template is not None and self.template.opens_thinking(ids)
        making = Making(
            self.engine,
            Transcript(self.tokenizer, stopping.stop, is_thinking=is_thinking),
            request,
            refill=refill,
            on_end=self._keep,
        )
        generation = Generation(making)
        self._latest = weakref.ref(generation)
        return generation

    def _keep(self, making: Making) -> None:
        self.last_reply = making.reply

    def _checked(self, ids: Sequence[Any]) -> list[int]:
        if not ids:
            raise UsageError("the prompt is empty: at least one token is needed")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise UsageError(
                    f"prompt[{i}]: expected text, token ids or messages, got "
                    f"{type(token).__name__}"
                )
            if not 0 <= int(token) < self.target.vocab:
                raise UsageError(
                    f"prompt[{i}]: expected a token id below {self.target.vocab}, "
                    f"got {token}"
                )
        return [int(token) for token in ids]

    def _max_new(self, stopping: Stopping) -> int:
        wanted = stopping.max_tokens
        if wanted is not None and wanted < 0:
            raise UsageError(f"max_tokens: expected 0 or more, got {wanted}")
        return UNLIMITED if wanted is None else wanted

    def sample_params(self, sampling: Sampling) -> SampleParams:
        """The sampling with every default resolved; UsageError for what cannot be."""
        check_sampling(sampling)
        for token in sampling.logit_bias:
            if not 0 <= token < self.target.vocab:
                raise UsageError(
                    f"logit_bias: expected token ids below {self.target.vocab}, "
                    f"got {token}"
                )
        given = sampling
        return SampleParams(
            temperature=self._temperature
            if given.temperature is None
            else given.temperature,
            top_k=given.top_k,
            top_p=self._top_p if given.top_p is None else given.top_p,
            min_p=given.min_p,
            repetition_penalty=given.repeat_penalty,
            frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            penalty_window=given.penalty_window,
            seed=secrets.randbits(64) if given.seed is None else given.seed,
            logit_bias=tuple(sorted(given.logit_bias.items())),
        )
