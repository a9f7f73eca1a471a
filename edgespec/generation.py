"""One reply: rounds of the engine turned into deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from edgespec._native import SampleParams
from edgespec.engine import Engine, Step
from edgespec.reply import Delta, Reply, top_logprobs
from edgespec.stats import Tally
from edgespec.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a generation, every default resolved."""

    prompt: Sequence[int]
    params: SampleParams
    max_new: int
    logprobs: int
    is_repeatable: bool
    evicted: int = 0  # tokens dropped from the front of the conversation before this
    notice: str = ""  # what the first delta has to tell


@dataclass(frozen=True, slots=True)
class Refilled:
    """A shorter prompt that includes the reply so far, and what was done to get it."""

    prompt: Sequence[int]
    notice: str


# Called with the reply so far when the context is full; None: there is nothing to drop.
Refill = Callable[[list[int]], "Refilled | None"]


class Generation(Iterator[Delta]):
    """Iterates over the deltas of one reply; `reply` is the whole afterwards.

    Closing it early, dropping it, an exception or Ctrl-C in the middle leave the
    session consistent: sequence and KV cache end with the last token handed out.
    """

    def __init__(self, making: Making) -> None:
        self._making = making

    @property
    def seed(self) -> int:
        """Of the noise: the one asked for, else one drawn for this reply."""
        return self._making.seed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, the template's included."""
        return self._making.prompt_tokens

    @property
    def reply(self) -> Reply:
        """The reply so far; finish_reason is "cancelled" unless it came to an end."""
        return self._making.reply

    def on_end(self, call: Callable[[Making], None]) -> None:
        """Has `call` called once the reply is over, however it ended."""
        self._making.on_end(call)

    def __next__(self) -> Delta:
        return next(self._making.deltas)

    def close(self) -> None:
        """Ends the reply here. Idempotent."""
        self._making.deltas.close()

    def __del__(self) -> None:
        # The running generator and what it makes refer to each other: leaving a loop
        # early would otherwise keep the session busy until the garbage collector runs.
        self.close()


class Making:
    """A reply in the making: what runs inside a Generation."""

    def __init__(
        self,
        engine: Engine,
        transcript: Transcript,
        request: Request,
        *,
        refill: Refill | None = None,
        on_end: Callable[[Making], None] | None = None,
    ) -> None:
        self._engine = engine
        self._transcript = transcript
        self._request = request
        self._refill = refill
        self._on_end = [on_end] if on_end else []
        self._tally = Tally()
        self._draft = engine.draft_name
        self._notice = ""
        self._reply: Reply | None = None
        self._prompt: Sequence[int] = request.prompt
        self._emitted: list[
            int
        ] = []  # what the engine emitted, held-back tokens included
        self._n_before = 0  # of these, how many a refilled prompt includes
        self._has_begun = False
        self._evaluated = 0
        self.evicted = request.evicted
        self.deltas = self._run()

    @property
    def seed(self) -> int:
        return self._request.params.seed

    @property
    def prompt_tokens(self) -> int:
        return len(self._request.prompt)

    @property
    def reply(self) -> Reply:
        return self._reply or self._make_reply("cancelled")

    def on_end(self, call: Callable[[Making], None]) -> None:
        self._on_end.append(call)

    def _run(self) -> Generator[Delta, None, None]:
        with self._engine.claim():
            reason = "cancelled"
            try:
                reason = yield from self._generate()
            finally:
                self._settle()
                self._notice = self._engine.misfit(self._tally.tried, self._tally.held)
                self._reply = self._make_reply(reason)
                for call in self._on_end:
                    call(self)

    def _generate(self) -> Generator[Delta, None, str]:
        request = self._request
        if request.notice:
            yield Delta("", notice=request.notice)
        if request.max_new == 0:
            return "length"
        step = self._begin(request.max_new)
        while True:
            started = time.perf_counter()
            deltas = self._deliver(step)
            self._tally.decode_s += time.perf_counter() - started
            yield from deltas
            if self._transcript.is_stopped:
                return "stop"
            if step.finish == "context" and (notice := self._drop_oldest()):
                yield Delta("", notice=notice)
                step = self._begin(request.max_new - len(self._emitted))
                continue
            if step.finish is not None:
                yield from self._transcript.finish()
                return step.finish
            started = time.perf_counter()
            step = self._engine.step()
            self._tally.decode_s += time.perf_counter() - started

    def _begin(self, max_new: int) -> Step:
        started = time.perf_counter()
        self._engine.keeps_logits = self._request.logprobs > 0
        step = self._engine.begin(
            self._prompt,
            self._request.params,
            max_new,
            repeatable=self._request.is_repeatable,
            evicted=self.evicted,
        )
        seconds = time.perf_counter() - started
        self._has_begun = True
        self._tally.prefill_s += seconds
        if self._n_before == 0:
            self._tally.ttft_s = seconds
            self._evaluated = self._engine.evaluated
        return step

    def _deliver(self, step: Step) -> list[Delta]:
        """What a step releases; stops at the token that completes a stop string."""
        transcript, count = self._transcript, self._request.logprobs
        eos = self._engine.eos if step.finish == "stop" else ()
        text = ""
        for token, is_drafted, row in zip(
            step.tokens.tolist(), step.drafted, step.rows, strict=True
        ):
            entry = None
            if count and step.logits is not None:
                entry = top_logprobs(step.logits[row], token, count)
            self._emitted.append(token)
            text += transcript.push(token, is_drafted, entry, is_silent=token in eos)
            if transcript.is_stopped:
                break
        return transcript.release(text, is_last=transcript.is_stopped)

    def _drop_oldest(self) -> str:
        """Makes room by a shorter prompt and says how; "" when nobody offers one."""
        refilled = self._refill(list(self._emitted)) if self._refill else None
        if refilled is None:
            return ""
        prompt = refilled.prompt
        self._tally.add(self._engine.stats)
        length = len(self._prompt) + len(self._emitted) - self._n_before
        self.evicted += length - len(prompt)
        self._prompt = prompt
        self._n_before = len(self._emitted)
        return refilled.notice

    def _settle(self) -> None:
        """Ends sequence and KV cache with the last token handed out."""
        if not self._has_begun:
            return
        self._tally.add(self._engine.stats)
        n_new = max(0, len(self._transcript.tokens) - self._n_before)
        self._engine.cut(len(self._prompt) + n_new)

    def _make_reply(self, reason: str) -> Reply:
        return Reply(
            text=self._transcript.text,
            tokens=tuple(self._transcript.tokens),
            prompt_tokens=self.prompt_tokens,
            finish_reason=reason,
            seed=self.seed,
            stats=self._tally.stats(
                backend=self._engine.target.name,
                draft=self._draft,
                draft_bytes=self._engine.draft_bytes,
            ),
            logprobs=tuple(self._transcript.logprobs),
            evaluated_tokens=self._evaluated,
            thinking=self._transcript.thinking,
            notice=self._notice,
        )
