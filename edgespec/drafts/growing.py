"""Trees for rounds whose head runs outside the C core: grown, merged, cut to what pays.

The same ideas as in the core, for few rows and in numpy: chances as the head states
them, corrected by what was accepted; children ranked by the noise of the draw; one tree
of what head and n-grams say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec._native import SampleParams, noise, tree_derive
from edgespec.drafts.graphs import EagleGraphs, MedusaGraph
from edgespec.tree.topology import MAX_ROWS, Tree

if TYPE_CHECKING:
    from edgespec.drafts.graphs import GraphHead

KIDS = 10  # children kept of a node
WIDTH = 8  # nodes of one level the head is asked about
DEPTHS = 8  # told apart, the last for all deeper
CONTENDERS = 32  # most probable tokens that noise is computed for
SHARP = 0.5  # the target spreads more around the head than its noise alone
SHIFT, SLOPE = -0.4, 0.9  # of the correction, before anything was seen
RATE_SHIFT, RATE_SLOPE = 0.05, 0.005
MEDUSA_CHANCES = (0.45, 0.15, 0.08, 0.05, 0.03)  # by rank; its graph states none
AGREEMENT = 0.5  # of what the less sure draft adds to the surer one
MOST = 0.995  # so that scores fall along a path
# Rounds in a row in which asking the head does not pay, before it pauses for so many,
# and those after a pause, before the next one of twice the length.
PATIENCE, TRIES = 32, 4
FIRST_PAUSE, LONGEST_PAUSE = 8, 128
PASS_PRICE = 0.05  # of a head's pass, c(1) = 1, where times are not looked at


@dataclass(slots=True)
class _Node:
    token: int
    parent: int  # node, before it; the root's is -1
    depth: int
    rank: int = 0
    x: float = 0.0  # logit of what the head says
    chance: float = 1.0  # of being accepted once the parent is
    score: float = 1.0  # of its whole path
    from_head: bool = False
    kids: dict[int, int] = field(default_factory=dict)  # node by token


class _Calibration:
    """How often is right what the head is so sure of: a logistic fit by depth."""

    def __init__(self) -> None:
        self.shift, self.slope = [SHIFT] * DEPTHS, [SLOPE] * DEPTHS

    def chance(self, x: float, depth: int) -> float:
        d = min(depth, DEPTHS) - 1
        return min(MOST, 1 / (1 + math.exp(-(self.shift[d] + self.slope[d] * x))))

    def learn(self, node: _Node, was_right: bool) -> None:
        d = min(node.depth, DEPTHS) - 1
        error = was_right - self.chance(node.x, node.depth)
        self.shift[d] = min(3.0, max(-3.0, self.shift[d] + RATE_SHIFT * error))
        slope = self.slope[d] + RATE_SLOPE * error * node.x
        self.slope[d] = min(2.0, max(0.2, slope))


class Grower:
    """Drafts for one session with a head of graphs.

    Args:
        tree: "auto" (as many rows as pay), "best" (always `rows`), or a static shape.
        rows: at most, root included.
        slope: c(n) / c(1) = 1 + slope * (n - 1), as far as c(n) was not measured.
    """

    def __init__(
        self, head: GraphHead, *, tree: str | Tree, rows: int, slope: float
    ) -> None:
        self.head = head
        self._slope = slope
        self.shape = None if isinstance(tree, str) else tree
        self.is_planned = tree == "auto"
        self.rows = rows
        # At temperature 0 and above it, where the noise takes part in being right.
        self._calibrations = (_Calibration(), _Calibration())
        self._learned = self._calibrations[0]
        self._nodes: list[_Node] = []
        self._params = SampleParams()
        self._evicted = 0
        self._unpaid = 0  # rounds in a row
        self._pause = FIRST_PAUSE
        self._asleep = 0  # rounds until the head is asked again
        self._passes = 0  # of the head for this tree
        self._pass_seconds = 0.0  # smoothed

    def begin(self, params: SampleParams, evicted: int) -> None:
        """A reply starts; evicted: offset of the noise's index."""
        self._params, self._evicted = params, evicted
        self._learned = self._calibrations[params.temperature > 0]
        self._nodes = []

    def propose(
        self,
        lookup: Tree,
        scores: NDArray[np.float32],
        *,
        index: int,
        measured: NDArray[np.float64] | None,
    ) -> Tree:
        """The tree of the next round.

        Args:
            lookup: what n-grams found, or the root alone; scores: of its rows.
            index: of the first drafted token in the sequence.
            measured: (MAX_ROWS + 1,) seconds of a forward by rows, 0 = unknown; None:
                times are not looked at, so that trees repeat.
        """
        self._passes = 0
        self._nodes = [_Node(int(lookup.tokens[0]), -1, 0)]
        if self.shape is not None:
            self._draft_shape(self.shape, index)
            return self._tree(range(len(self._nodes))) if self._nodes[1:] else lookup
        cost = relative_cost(measured, self._slope)
        price = self._price(measured)
        is_asked = not self.is_planned or self._asleep == 0
        if is_asked:
            started = time.perf_counter()
            self._draft(index, self._floor(cost, price))
            self._time(time.perf_counter() - started)
        else:
            self._asleep -= 1
        self._merge(lookup, scores)
        order = sorted(
            range(len(self._nodes)), key=lambda i: (-self._nodes[i].score, i)
        )[: self.rows]
        if self.is_planned:
            order = self._worth(order, cost)
            if is_asked:
                self._weigh(order, cost, price)
        return self._tree(order)

    def learn(self, tokens: Sequence[int]) -> None:
        """The target said these."""
        at, nodes = 0, self._nodes
        for token in tokens:
            if not nodes:
                break
            for kid in nodes[at].kids.values():
                if nodes[kid].from_head:
                    self._learned.learn(nodes[kid], nodes[kid].token == token)
            found = nodes[at].kids.get(int(token))
            if found is None:
                break
            at = found
        self._nodes = []

    # Growing

    def _draft(self, index: int, floor: float) -> None:
        """The head's best nodes, as far as one can be among the best rows."""
        head = self.head
        if isinstance(head, MedusaGraph):
            self._draft_static(head)
            return
        assert isinstance(head, EagleGraphs)
        logits = head.begin(self._nodes[0].token)
        if logits is None:
            return
        self._passes += 1
        level = self._add_kids(0, logits, index, KIDS)
        expanded = {0: -1}  # the head's own numbers
        while True:
            best = sorted((node.score for node in self._nodes), reverse=True)
            least = best[self.rows - 1] if len(best) >= self.rows else 0.0
            least = max(least, floor)
            front = sorted(level, key=lambda i: (-self._nodes[i].score, i))[:WIDTH]
            front = [i for i in front if self._nodes[i].score > least]
            front = front[: MAX_ROWS - len(expanded)]
            if not front:
                return
            logits = self._expand(head, front, expanded)
            level = []
            for i, row in zip(front, logits, strict=True):
                level += self._add_kids(i, row, index, KIDS)

    def _draft_shape(self, shape: Tree, index: int) -> None:
        head = self.head
        if isinstance(head, MedusaGraph):
            self._draft_static(head)
            kept, place = [0], {0: 0}
            by_rank = {(n.parent, n.rank): i for i, n in enumerate(self._nodes)}
            for row in range(1, shape.n):
                above = place.get(int(shape.parent[row]), -1)
                found = by_rank.get((above, int(shape.rank[row])))
                if found is not None:
                    place[row] = found
                    kept.append(found)
            self._keep(sorted(kept))
            return
        assert isinstance(head, EagleGraphs)
        root = head.begin(self._nodes[0].token)
        if root is None:
            return
        self._passes += 1
        node_of, expanded = {0: 0}, {0: -1}
        logits: NDArray[np.float32] = root[None]
        rows = [0] if shape.n > 1 else []  # whose children are known now
        while rows:
            following = []
            for row, said in zip(rows, logits, strict=True):
                children = np.flatnonzero(shape.parent == row)
                ranks = {int(shape.rank[c]): int(c) for c in children}
                added = self._add_kids(node_of[row], said, index, 1 + max(ranks))
                for i in added:
                    if self._nodes[i].rank in ranks:
                        node_of[ranks[self._nodes[i].rank]] = i
                following += [c for c in children.tolist() if c in node_of]
            rows = [row for row in following if (shape.parent == row).any()]
            if rows:
                front = [node_of[row] for row in rows]
                logits = self._expand(head, front, expanded)
        self._keep(sorted(node_of.values()))

    def _expand(
        self, head: EagleGraphs, front: Sequence[int], expanded: dict[int, int]
    ) -> NDArray[np.float32]:
        nodes = [self._nodes[i] for i in front]
        first = len(expanded) - 1
        logits = head.expand(
            [node.token for node in nodes], [expanded[node.parent] for node in nodes]
        )
        expanded.update(zip(front, range(first, first + len(front)), strict=True))
        self._passes += 1
        return logits

    def _draft_static(self, head: MedusaGraph) -> None:
        tokens = head.tokens(self._nodes[0].token)
        if tokens is None:
            return
        self._passes += 1
        place = {0: 0}
        for row in range(1, len(tokens)):
            above = place[int(head.parent[row])]
            rank = head.rank[row]
            said = MEDUSA_CHANCES[min(rank, len(MEDUSA_CHANCES) - 1)]
            place[row] = self._add(above, int(tokens[row]), said, rank)

    def _add_kids(
        self, parent: int, logits: NDArray[np.float32], index: int, most: int
    ) -> list[int]:
        """Adds the best children; a head gone wild (not a number) has none."""
        ids = self.head.ids if isinstance(self.head, EagleGraphs) else None
        most = min(most, len(logits))
        values = logits.astype(np.float64)
        if not np.isfinite(values).all():
            return []
        temperature = self._params.temperature
        for token, bias in self._params.logit_bias:
            at = token if ids is None else int(np.searchsorted(ids, token))
            if at < len(values) and (ids is None or ids[at] == token):
                values[at] += bias
        count = min(len(values), max(CONTENDERS, most) if temperature > 0 else most)
        if temperature > 0:
            values = values / temperature
        best = np.argpartition(values, -count)[-count:]
        best = best[np.lexsort((best, -values[best]))]
        ranked = values[best]
        tokens = best if ids is None else ids[best]
        if temperature > 0:
            at = index + self._nodes[parent].depth + self._evicted
            drawn = [noise(self._params.seed, at % (1 << 64), int(t)) for t in tokens]
            ranked = (ranked - ranked[0] + np.array(drawn)) * SHARP
            order = np.argsort(-ranked, kind="stable")[:most]
            weights = np.exp(ranked - ranked.max())
            said, tokens = (weights / weights.sum())[order], tokens[order]
        else:
            said = np.exp(ranked - values.max()) / np.exp(values - values.max()).sum()
        return [
            self._add(parent, int(token), float(u), rank)
            for rank, (token, u) in enumerate(zip(tokens, said, strict=True))
        ]

    def _add(self, parent: int, token: int, said: float, rank: int) -> int:
        above = self._nodes[parent]
        said = min(0.9999, max(1e-5, said))
        x = math.log(said / (1 - said))
        chance = self._learned.chance(x, above.depth + 1)
        node = _Node(
            token, parent, above.depth + 1, rank, x, chance, above.score * chance, True
        )
        above.kids[token] = len(self._nodes)
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _keep(self, kept: Sequence[int]) -> None:
        """Drops the other nodes; kept ones have their parents among them."""
        place = {old: new for new, old in enumerate(kept)}
        nodes = [self._nodes[i] for i in kept]
        for node in nodes:
            node.parent = place.get(node.parent, -1)
            node.kids = {t: place[k] for t, k in node.kids.items() if k in place}
        self._nodes = nodes

    def _merge(self, lookup: Tree, scores: NDArray[np.float32]) -> None:
        """Adds what n-grams say, and their opinion of what the head says."""
        place = {0: 0}
        touched = False
        for row in range(1, lookup.n):
            parent = int(lookup.parent[row])
            above = float(scores[parent])
            chance = min(MOST, float(scores[row]) / above if above > 0 else 0.0)
            at, token = place[parent], int(lookup.tokens[row])
            node = self._nodes[at]
            found = node.kids.get(token)
            if found is None:
                found = len(self._nodes)
                node.kids[token] = found
                self._nodes.append(
                    _Node(token, at, node.depth + 1, rank=len(node.kids) - 1)
                )
                self._nodes[found].chance = chance
            else:
                theirs = self._nodes[found].chance
                low, high = sorted((chance, theirs))
                self._nodes[found].chance = min(
                    MOST, high + AGREEMENT * (1 - high) * low
                )
            place[row] = found
            touched = True
        if touched:  # parents come first
            for node in self._nodes[1:]:
                node.score = self._nodes[node.parent].score * node.chance

    # Planning

    def _price(self, measured: NDArray[np.float64] | None) -> float:
        """Of a pass of the head, c(1) = 1."""
        if measured is None or not self._pass_seconds or not measured[1]:
            return PASS_PRICE
        return float(self._pass_seconds / measured[1])

    def _time(self, seconds: float) -> None:
        if self._passes:
            each = seconds / self._passes
            kept = self._pass_seconds or each
            self._pass_seconds = kept + 0.1 * (min(each, 4 * kept) - kept)

    def _floor(self, cost: NDArray[np.float64], price: float) -> float:
        """The score below which a node cannot pay for a row, nor for a pass."""
        if not self.is_planned or self.rows < 2:
            return 0.0
        return max(price, float(np.diff(cost[1 : self.rows + 1]).min()))

    def _worth(self, order: list[int], cost: NDArray[np.float64]) -> list[int]:
        """The first rows that together yield most tokens by time."""
        yields = np.cumsum([self._nodes[i].score for i in order])
        rates = yields / cost[1 : len(order) + 1]
        return order[: int(rates.argmax()) + 1]

    def _weigh(
        self, order: Sequence[int], cost: NDArray[np.float64], price: float
    ) -> None:
        """Lets a head pause that does not pay its price; longer each time."""
        gain = sum(self._nodes[i].score for i in order)
        spent = float(cost[len(order)]) + price * self._passes
        if gain > spent:
            self._unpaid, self._pause = 0, FIRST_PAUSE
            return
        self._unpaid += 1
        if self._unpaid >= PATIENCE:
            self._asleep, self._unpaid = self._pause, PATIENCE - TRIES
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _tree(self, order: Sequence[int]) -> Tree:
        """Best rows first, so that clipping takes the worst."""
        place = {node: row for row, node in enumerate(order)}
        nodes = [self._nodes[i] for i in order]
        return tree_derive(
            [node.token for node in nodes],
            [place.get(node.parent, -1) for node in nodes],
        )


def relative_cost(
    measured: NDArray[np.float64] | None, slope: float
) -> NDArray[np.float64]:
    """c(n) / c(1) for n up to MAX_ROWS, [0] unused: what was measured, else the slope.

    Never falling.

    Args:
        measured: (MAX_ROWS + 1,) seconds, 0 = unknown; None: the slope alone.
    """
    rows = np.arange(MAX_ROWS + 1)
    line = 1 + slope * np.maximum(rows - 1, 0)
    if measured is None or not measured.any():
        return line
    known = np.flatnonzero(measured)
    # Between measurements and beyond them the line goes on, scaled to them.
    ratio = np.interp(rows, known, measured[known] / line[known])
    found: NDArray[np.float64] = np.maximum.accumulate(line[1:] * ratio[1:])
    return np.concatenate([[0.0], found / found[0]])
