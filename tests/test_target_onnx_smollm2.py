"""The ONNX Runtime target on the real model: trees around the blocks of its sums."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec._native import tree_derive
from edgespec.bundle import Bundle
from edgespec.targets.onnx import KEY_BLOCK, OnnxTarget
from edgespec.tree.topology import chain

PARENTS = (-1, 0, 0, 1, 2, 2, 4, 3, 0)


@pytest.fixture(scope="module")
def target(smollm2_bundle: Bundle) -> OnnxTarget:
    return OnnxTarget(smollm2_bundle.path_of("target.onnx"), context=320, threads=2)


def extend(target: OnnxTarget, length: int) -> None:
    tokens = np.random.default_rng(0).integers(1000, 40000, length).astype(np.int32)
    target.truncate(min(length, target.length))
    if target.length < length:
        target.prefill(tokens[target.length :])


@pytest.mark.parametrize("length", [119, 125, 127, 128, 246, 254, 255, 256])
def test_c07_tree_rows_equal_single_rows_up_to_a_block(
    target: OnnxTarget, length: int
) -> None:
    assert target.capabilities.row_invariant
    block = target.capabilities.kv_block
    assert block == KEY_BLOCK
    n = min(len(PARENTS), block - length % block)
    tokens = np.arange(5000, 5000 + n, dtype=np.int32)
    tree = tree_derive(tokens, PARENTS[:n])
    extend(target, length)
    in_tree = target.forward(tree).copy()
    for row in range(n):
        target.truncate(length)
        for ancestor in np.flatnonzero(tree.mask[row]):
            alone = target.forward(chain(tokens[ancestor : ancestor + 1]))
            target.commit(np.zeros(1, dtype=np.int32))
        assert np.array_equal(in_tree[row], alone[0])
