"""The windowed ring against a cache that never forgets and never saw a rejected row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec._native import Ring
from edgespec.errors import ContextError, EdgeSpecError, UsageError


class Caches:
    """A ring with the memory its owner keeps, and the list it must look like."""

    def __init__(self, n_slots: int, sinks: int, window: int) -> None:
        self.ring = Ring(n_slots, sinks, window)
        self.n_slots, self.sinks, self.window = n_slots, sinks, window
        self.memory = np.full(n_slots, -1)
        self.truth: list[int] = []  # row id by position
        self.ids = itertools.count()
        self.n_wraps = 0

    def seen(self, position: int) -> list[int]:
        """Row ids the row at `position` must find among the committed ones."""
        return [
            row
            for p, row in enumerate(self.truth[: position + 1])
            if p < self.sinks or self.window == 0 or p > position - self.window
        ]

    def fits(self, n: int) -> bool:
        """Whether n rows can be written without touching what the lowest one sees."""
        length, room = len(self.truth), self.n_slots - self.sinks
        lost = length + n - 1 - room
        lowest = max(self.sinks, length - self.window + 1 if self.window else 0)
        return n <= self.n_slots and (lost < self.sinks or lost < lowest)

    def append(self, depth: list[int]) -> list[int]:
        slots = self.ring.append(depth)
        assert len(set(slots.tolist())) == len(depth)
        ids = [next(self.ids) for _ in depth]
        self.memory[slots] = ids
        self.n_wraps += int((np.diff(slots) < 0).any())
        for d in set(depth):
            assert set(self.visible(len(self.truth) + d)).isdisjoint(ids)
        return ids

    def commit(self, ids: list[int], path: list[int]) -> None:
        for source, target in zip(*self.ring.commit(path), strict=True):
            self.memory[target] = self.memory[source]
        self.truth += [ids[row] for row in path]

    def visible(self, position: int) -> list[int]:
        return self.memory[self.ring.visible(position)].tolist()

    def check(self) -> None:
        length = len(self.truth)
        assert len(self.ring) == length
        for position in (length, length + 1, length + 3):
            assert self.visible(position) == self.seen(position)
        for position in range(length):
            try:
                rows = self.visible(position)
            except ContextError:
                continue  # overwritten, and said so
            assert rows == self.seen(position)


def random_tree(rng: np.random.Generator, n: int) -> tuple[list[int], list[int]]:
    """Depths of a tree of n rows and a root path in it."""
    parent = [-1, *(int(rng.integers(0, i)) for i in range(1, n))]
    depth = [0] * n
    for i in range(1, n):
        depth[i] = depth[parent[i]] + 1
    row = int(rng.integers(0, n))
    path = []
    while row >= 0:
        path.append(row)
        row = parent[row]
    return depth, path[::-1]


@settings(max_examples=150, deadline=None)
@given(
    sinks=st.integers(0, 5),
    window=st.integers(0, 9),
    extra=st.integers(0, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_history_equals_a_cache_that_never_saw_rejected_rows(
    sinks, window, extra, seed
):
    rng = np.random.default_rng(seed)
    caches = Caches(sinks + max(window, 1) + extra, sinks, window)
    for _ in range(40):
        action = rng.choice(["tree", "tree", "tree", "rollback", "chunk", "truncate"])
        length = len(caches.truth)
        if action == "truncate":
            target = int(rng.integers(0, length + 1))
            before = caches.truth
            try:
                caches.ring.truncate(target)
                caches.truth = caches.truth[:target]
            except ContextError:
                caches.truth = before
        else:
            n = int(rng.integers(1, 9))
            depth, path = random_tree(rng, n)
            if action == "chunk":
                depth = path = list(range(n))
            if not caches.fits(n):
                with pytest.raises(ContextError):
                    caches.ring.append(depth)
            else:
                ids = caches.append(depth)
                if action == "rollback":
                    caches.ring.rollback()
                else:
                    caches.commit(ids, path)
        caches.check()


def test_c02_rollback_removes_exactly_the_rejected_rows_at_every_offset_and_size():
    sinks, window, room = 2, 5, 12
    for offset in range(3 * room):
        for n in range(1, room - window + 2):
            for n_kept in range(n + 1):
                caches = Caches(sinks + room, sinks, window)
                for _ in range(offset):
                    caches.commit(caches.append([0]), [0])
                ids = caches.append(list(range(n)))
                caches.commit(ids, list(range(n_kept)))
                assert len(caches.ring) == offset + n_kept
                caches.check()


def test_c02_truncate_after_a_wrap_removes_exactly_or_raises():
    sinks, window, room = 1, 4, 9
    for length in range(1, 3 * room):
        for target in range(length + 1):
            caches = Caches(sinks + room, sinks, window)
            for _ in range(length):
                caches.commit(caches.append([0]), [0])
            lowest = max(sinks, target - window + 1)
            if lowest < target and lowest < length - room:
                with pytest.raises(ContextError, match="overwritten"):
                    caches.ring.truncate(target)
                assert len(caches.ring) == length
            else:
                caches.ring.truncate(target)
                caches.truth = caches.truth[:target]
            caches.check()
            for _ in range(2 * room):  # and the ring goes on working
                caches.commit(caches.append([0]), [0])
                caches.check()


def test_c01_wraps_after_rejected_drafts_leave_no_trace():
    """Capacity 256, 600 tokens, trees of which a part is rejected."""
    rng = np.random.default_rng(1)
    caches = Caches(256, 4, 256 - 4 - 16)
    n_rejected_wraps = 0
    while len(caches.truth) < 600:
        depth, path = random_tree(rng, int(rng.integers(2, 17)))
        wraps = caches.n_wraps
        ids = caches.append(depth)
        n_rejected_wraps += caches.n_wraps > wraps and len(path) < len(depth)
        caches.commit(ids, path)
        assert caches.visible(len(caches.truth)) == caches.seen(len(caches.truth))
    assert n_rejected_wraps >= 2


def test_c05_commit_of_a_scattered_path_keeps_its_rows():
    caches = Caches(40, 0, 0)
    caches.commit(caches.append(list(range(7))), list(range(7)))
    depth = [0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]
    caches.commit(caches.append(depth), [0, 2, 5, 9])
    assert caches.truth[7:] == [7, 9, 12, 16]
    caches.check()


def test_without_a_window_the_capacity_is_the_context():
    caches = Caches(10, 0, 0)
    caches.commit(caches.append(list(range(8))), list(range(8)))
    with pytest.raises(ContextError):
        caches.ring.append([0, 1, 2])
    caches.commit(caches.append([0, 1]), [0, 1])
    with pytest.raises(ContextError):
        caches.ring.append([0])
    caches.check()


@pytest.mark.parametrize(
    ("n_slots", "sinks", "window"), [(0, 0, 0), (4, -1, 2), (4, 0, -1), (4, 2, 3)]
)
def test_impossible_rings_are_refused(n_slots, sinks, window):
    with pytest.raises(UsageError, match="ring"):
        Ring(n_slots, sinks, window)


@pytest.mark.parametrize("depth", [[1], [0, 0], [0, 2], [0, -1], []])
def test_depths_of_no_tree_are_refused(depth):
    with pytest.raises(UsageError):
        Ring(8).append(depth)


@pytest.mark.parametrize("path", [[0, 3], [1, 0], [0, 0], [4], [1], [0, 1, 2]])
def test_paths_of_no_tree_are_refused(path):
    caches = Caches(8, 0, 0)
    ids = caches.append([0, 1, 1, 2])  # rows 1, 2 below the root, 3 below one of them
    with pytest.raises(UsageError, match="path"):
        caches.ring.commit(path)
    caches.commit(ids, [0, 2, 3])  # the batch is still open
    caches.check()


def test_calls_out_of_order_are_refused():
    ring = Ring(8)
    for call in (ring.rollback, lambda: ring.commit([0])):
        with pytest.raises(EdgeSpecError):
            call()
    ring.append([0])
    for call in (lambda: ring.append([0]), lambda: ring.truncate(0)):
        with pytest.raises(EdgeSpecError):
            call()
    ring.rollback()
    with pytest.raises(UsageError):
        ring.truncate(1)
    with pytest.raises(UsageError):
        ring.visible(-1)
