"""What a reply cost: the same counts and times with every backend and draft."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from edgespec._native import NativeStats


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of one reply; rounds leave out the prefill and its token."""

    backend: str  # onnx | llamacpp | ...
    draft: str  # none | ngram | eagle3 | eagle3+ngram | ...
    rounds: int  # forwards, plain ones included
    tokens_per_round: float  # tokens emitted by rounds / rounds
    drafted: int  # tree rows forwarded, roots excluded
    accepted: int  # of these, rows that became tokens
    acceptance: float  # accepted / sum of tree depths
    node_yield: float  # accepted / drafted
    # By depth, the root's children first: rounds whose accepted path came to a row with
    # children of this depth, and those that accepted one of them.
    depth_tried: tuple[int, ...]
    depth_accepted: tuple[int, ...]
    draft_weights_mb: float  # of a draft head, 0 without one
    draft_state_mb: float  # its keys and values, features of the target, scratch
    ttft_s: float  # from the call to the first token
    prefill_s: float  # forwards of the prompt
    decode_s: float  # rounds: drafting, forward, verification, text
    tokens_per_s: float  # tokens emitted by rounds / decode_s
    peak_rss_mb: float  # of the process so far

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Adds up a reply while it is made, over one or more native generations."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    tried: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def add(self, native: NativeStats) -> None:
        self.rounds += native.rounds
        self.tokens += native.tokens
        self.drafted += native.drafted
        self.accepted += native.accepted
        self.depth += native.depth
        self.tried = _sum(self.tried, native.tried)
        self.held = _sum(self.held, native.held)

    def stats(self, *, backend: str, draft: str, draft_bytes: tuple[int, int]) -> Stats:
        """Args:
        draft_bytes: weights and state of a draft head.
        """
        levels = sum(tried > 0 for tried in self.tried)  # none below an untried one
        return Stats(
            backend=backend,
            draft=draft,
            rounds=self.rounds,
            tokens_per_round=_ratio(self.tokens, self.rounds),
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance=_ratio(self.accepted, self.depth),
            node_yield=_ratio(self.accepted, self.drafted),
            depth_tried=self.tried[:levels],
            depth_accepted=self.held[:levels],
            draft_weights_mb=draft_bytes[0] / 1e6,
            draft_state_mb=draft_bytes[1] / 1e6,
            ttft_s=self.ttft_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            tokens_per_s=_ratio(self.tokens, self.decode_s),
            peak_rss_mb=peak_rss_mb(),
        )


def peak_rss_mb() -> float:
    """Largest resident size of this process so far, in MB (1e6 bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def resident_mb() -> float | None:
    """Resident size of this process now, in MB (1e6 bytes); None if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
