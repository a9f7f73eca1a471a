"""How results look: colours where they are wanted, trees, tables, status lines."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from edgespec.stats import Stats
    from edgespec.tree.topology import Tree

DIM, GREEN, RESET = "\x1b[2m", "\x1b[32m", "\x1b[0m"
# What a terminal would act on: text must not move the cursor or retitle windows.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def use_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that wants colours (NO_COLOR, TERM=dumb)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


class TextWriter:
    """Streams a reply: thinking dimmed on a terminal, bytes as they are in a pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_colour = use_colour(stream)
        self._last = "\n"

    def write(self, text: str, *, thinking: bool = False) -> None:
        if not text:
            return
        self._last = text[-1]
        if self._is_terminal:
            text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
        if thinking and self._has_colour:
            text = f"{DIM}{text}{RESET}"
        self._stream.write(text)
        self._stream.flush()

    def end(self) -> None:
        """Ends the line that text was left in the middle of."""
        if self._last != "\n":
            self._stream.write("\n")
            self._last = "\n"
        self._stream.flush()


def status_line(stats: Stats, tokens: int) -> str:
    """One reply in a line: speed, tokens per round, draft."""
    parts = [
        f"{tokens} token{'s' * (tokens != 1)}",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"{stats.tokens_per_round:.2f} tokens/round",
        f"draft {stats.draft}",
        stats.backend,
    ]
    return " · ".join(parts)


def stats_report(stats: Stats) -> list[str]:
    """Everything measured about a reply, in lines."""
    return [
        f"backend {stats.backend}, draft {stats.draft}",
        f"{stats.rounds} rounds, {stats.tokens_per_round:.2f} tokens per round",
        f"{stats.accepted} of {stats.drafted} drafted rows accepted "
        f"({stats.node_yield:.0%}), {stats.acceptance:.0%} of the depth",
        *_depth_lines(stats),
        f"first token after {stats.ttft_s:.2f} s (prompt {stats.prefill_s:.2f} s), "
        f"then {stats.tokens_per_s:.1f} tokens/s for {stats.decode_s:.2f} s",
        f"peak memory {stats.peak_rss_mb:.0f} MB{_draft_memory(stats)}",
    ]


def _draft_memory(stats: Stats) -> str:
    if not stats.draft_weights_mb:
        return ""
    return (
        f", of it the draft's {stats.draft_weights_mb:.1f} MB of weights and "
        f"{stats.draft_state_mb:.1f} MB of keys, values and features"
    )


def _depth_lines(stats: Stats) -> list[str]:
    """How often a draft held, level by level."""
    if not stats.depth_tried:
        return []
    shares = [
        f"{held / tried:.0%}"
        for tried, held in zip(stats.depth_tried, stats.depth_accepted, strict=True)
    ]
    return [f"accepted by depth: {', '.join(shares)}"]


def mark_drafted(pieces: Iterable[tuple[bytes, bool]], *, colour: bool) -> str:
    """A reply from its tokens' bytes, drafted-and-accepted text green or in [brackets].

    A character spread over several tokens counts for the one that completes it.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    runs: list[tuple[str, bool]] = []
    for data, is_drafted in pieces:
        text = decoder.decode(data)
        if text and runs and runs[-1][1] == is_drafted:
            runs[-1] = (runs[-1][0] + text, is_drafted)
        elif text:
            runs.append((text, is_drafted))
    rest = decoder.decode(b"", final=True)
    opening, closing = (GREEN, RESET) if colour else ("[", "]")
    marked = "".join(
        f"{opening}{_CONTROLS.sub('', text)}{closing}"
        if is_drafted
        else _CONTROLS.sub("", text)
        for text, is_drafted in runs
    )
    return marked + rest


def draw_tree(tree: Tree, label: Callable[[int], str] | None = None) -> list[str]:
    """A tree in box characters: of each row its number, rank and what label says."""
    children: dict[int, list[int]] = {}
    for row in range(1, tree.n):
        children.setdefault(int(tree.parent[row]), []).append(row)
    lines: list[str] = []

    def draw(row: int, stem: str, branch: str) -> None:
        what = "root" if row == 0 else f"rank {tree.rank[row]}"
        extra = f"  {label(row)}" if label else ""
        lines.append(f"{stem}{branch}{row} {what}{extra}")
        below = stem + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        below_rows = sorted(children.get(row, []), key=lambda r: int(tree.rank[r]))
        for child in below_rows:
            draw(child, below, "└─ " if child == below_rows[-1] else "├─ ")

    draw(0, "", "")
    return lines


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> list[str]:
    """Aligned columns: the first `left` to the left, numbers to the right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def megabytes(n_bytes: float) -> str:
    """Bytes as a number people read, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:.0f} B"
