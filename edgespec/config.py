"""Every default of the runtime, once: the command line and the C core get them here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edgespec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. None: as the model says, else FALLBACK_*."""

    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a fresh one is drawn and reported


LARGEST = 1e6  # temperature or penalty: beyond it 32-bit logits lose all meaning
FALLBACK_TEMPERATURE = 0.7
FALLBACK_TOP_P = 0.95


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafts, how trees are shaped, how they are verified."""

    # auto | none | ngram | eagle | medusa | model; of the last three also KIND:PATH, a
    # head of yours, and KIND+ngram, together with n-grams. auto is eagle+ngram where
    # the model has an EAGLE head and the backend runs it, else ngram.
    draft: str = "auto"
    tree: str = "auto"  # auto | best:N | chain:K | FILE (JSON)
    rows: int = 16  # most rows of one round, root included
    verify: str = "coupled"
    ngram_capacity: int = 1 << 16  # tokens the n-gram index remembers
    cost_slope: float | None = None  # c(n) / c(1) = 1 + slope * (n - 1); None: measured


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where and with what resources the target runs."""

    backend: str = "auto"  # auto | native | onnx | llamacpp
    threads: int | None = None  # None: usable cores (affinity and cgroup quota)
    context: int | None = None  # None: min(DEFAULT_CONTEXT, the model's limit)
    prefill_chunk: int = 256  # rows of one prefill forward
    # Of the native backend alone:
    kv: str = "f16"  # f16 | int8: how keys and values are kept
    window: int | None = None  # None: every position sees all before it
    sinks: int = 4  # first positions that stay visible beside a window
    mmap: bool = True  # map the file instead of reading it into memory
    mlock: bool = False  # keep the weights from being swapped out


@dataclass(frozen=True, slots=True)
class Training:
    """How much a head learns, and what it is to know."""

    minutes: float = 60.0  # of training, after the data
    tokens: int = 3_000_000  # of data
    layout: str = "safeailab"  # | speculators
    draft_vocab: int = 8192  # tokens the head drafts


DEFAULT_CONTEXT = 4096

# By backend: the prior for c(n) / c(1) = 1 + slope * (n - 1) until rounds are timed,
# and the cost itself where timing must not decide (an explicit seed).
COST_SLOPE = {"native": 0.06, "onnx": 0.3, "llamacpp": 0.5}
FALLBACK_COST_SLOPE = 0.4


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a reply ends besides the model's own end-of-sequence tokens."""

    max_tokens: int | None = None  # None: until the context is full
    stop: tuple[str, ...] = ()


def check_sampling(sampling: Sampling) -> None:
    """Raises UsageError naming the first field outside its range."""
    rules: list[tuple[str, object, bool, str]] = [
        (
            "temperature",
            sampling.temperature,
            sampling.temperature is None or 0 <= sampling.temperature <= LARGEST,
            f"0 (greedy) or more, at most {LARGEST:g}",
        ),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        (
            "top_p",
            sampling.top_p,
            sampling.top_p is None or 0 < sampling.top_p <= 1,
            "above 0, at most 1 (off)",
        ),
        ("min_p", sampling.min_p, 0 <= sampling.min_p < 1, "0 (off) or more, below 1"),
        (
            "repeat_penalty",
            sampling.repeat_penalty,
            0 < sampling.repeat_penalty <= LARGEST,
            f"above 0, at most {LARGEST:g}; 1 is off",
        ),
        *(
            (
                name,
                value,
                abs(value) <= LARGEST,
                f"a number within {LARGEST:g}; 0 is off",
            )
            for name, value in (
                ("presence_penalty", sampling.presence_penalty),
                ("frequency_penalty", sampling.frequency_penalty),
            )
        ),
        (
            "penalty_window",
            sampling.penalty_window,
            sampling.penalty_window >= -1,
            "-1 (all), 0 (none) or more",
        ),
        (
            "seed",
            sampling.seed,
            sampling.seed is None or 0 <= sampling.seed < 1 << 64,
            "an unsigned 64-bit number",
        ),
    ]
    for name, value, is_valid, expected in rules:
        if not is_valid:
            raise UsageError(f"{name}: expected {expected}, got {value}")
