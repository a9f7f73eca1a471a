"""The n-gram draft graph: its proposals, and a host that runs it without edgespec."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import UsageError
from edgespec_export import onnx_draft, onnx_graph, sources
from tests.export import checkpoints

HOST = Path(__file__).with_name("host_loop.py")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    path = tmp_path_factory.mktemp("draft") / "draft.onnx"
    onnx_draft.write_ngram(path, fallback=(7, 8))
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def propose(draft: onnxruntime.InferenceSession, ids: list[int]) -> list[int]:
    got = draft.run(["draft_tokens"], {"ids": np.array(ids, np.int64)})[0]
    assert got.dtype == np.int64
    return [int(token) for token in got]


def by_hand(ids: list[int]) -> list[int]:
    """The same rule, token by token."""
    last, t = ids[-1], len(ids)
    places = [e for e in range(t - 1) if ids[e] == last]
    pairs = [e for e in places if t > 1 and e > 0 and ids[e - 1] == ids[-2]]

    def latest(allowed: list[int]) -> int | None:
        both = [e for e in pairs if e in allowed]
        return max(both or allowed, default=None)

    best = latest(places)
    if best is None:
        chain = [last] * 3
    else:
        repeated = ids[best + 1 :] * 3
        chain = repeated[:3]
    other = latest([e for e in places if ids[e + 1] != chain[0]])
    spare = 8 if chain[0] == 7 else 7
    return [last, *chain, spare if other is None else ids[other + 1]]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([5], [5, 5, 5, 5, 7]),
        ([7], [7, 7, 7, 7, 8]),
        ([1, 2, 3, 4, 5, 1, 2], [2, 3, 4, 5, 7]),
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [2, 4, 1, 2, 3]),
        ([9, 2, 3, 1, 2, 4, 6, 2, 8, 1, 2], [2, 4, 6, 2, 8]),
        ([1, 2, 1, 2], [2, 1, 2, 1, 7]),
    ],
)
def test_proposals(
    draft: onnxruntime.InferenceSession, ids: list[int], expected: list[int]
) -> None:
    assert by_hand(ids) == expected
    assert propose(draft, ids) == expected


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_proposals_follow_the_rule(
    draft: onnxruntime.InferenceSession, ids: list[int]
) -> None:
    assert propose(draft, ids) == by_hand(ids)


def test_tree_constants(draft: onnxruntime.InferenceSession) -> None:
    names = ["tree_parent", "tree_mask", "tree_depth"]
    parent, mask, depth = draft.run(names, {"ids": np.array([3], np.int64)})
    assert parent.dtype == np.int32
    assert parent.tolist() == [-1, 0, 1, 2, 0]
    assert depth.dtype == np.int64
    assert depth.tolist() == [0, 1, 2, 3, 1]
    assert mask.dtype == np.bool_
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 0, 0, 0, 1],
    ]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two different tokens"):
        onnx_draft.write_ngram(tmp_path / "draft.onnx", fallback=(3, 3))
    with pytest.raises(UsageError, match="row 1: parent 1 does not precede it"):
        onnx_draft.static_tree((-1, 1))


@pytest.mark.parametrize("attention", ["gqa", "explicit"])
def test_host_without_edgespec_reproduces_plain_decoding(
    tmp_path: Path, attention: str
) -> None:
    source = checkpoints.hf_checkpoint(tmp_path / "hf")
    target, draft = tmp_path / "target.onnx", tmp_path / "draft.onnx"
    onnx_graph.write(sources.read(source), target, attention=attention)
    onnx_draft.write_ngram(draft)

    def run(draft_argument: str) -> dict[str, object]:
        command = [sys.executable, str(HOST), str(target), draft_argument]
        command += ["100", "5,9,31,200,17,5,9"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        result: dict[str, object] = json.loads(done.stdout)
        return result

    plain, speculative = run("-"), run(str(draft))
    assert plain["forwards"] == 100
    assert speculative["tokens"] == plain["tokens"]
    assert speculative["forwards"] < 80  # drafts were accepted, or this shows nothing
