"""The speculators library loads the heads of its layout and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgespec_export import forward, head_forward, sources
from edgespec_export.heads import Head
from edgespec_export.sources import heads as reader
from edgespec_export.train import layouts
from edgespec_export.train.eagle3 import Eagle3
from edgespec_export.train.packing import Batch
from edgespec_export.weights import WeightSet
from tests.export import checkpoints
from tests.export import heads as tiny

HOST = Path(__file__).with_name("speculators_host.py")
FLAGS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
    {"qwen": True, "norm_output": True},
]
N, DEPTHS = 15, 3
Floats = NDArray[np.float32]
pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the library is for Python 3.11 on"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WeightSet]:
    """The library reads the target's embedding and head from its directory."""
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    path = checkpoints.hf_checkpoint(tmp_path_factory.mktemp("target"), shape)
    return path, sources.read(path)


def inputs(path: Path) -> tuple[NDArray[np.int64], Floats]:
    """Tokens behind rows and the rows' taps, also as a file for the library."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, tiny.VOCAB, N)
    taps = rng.standard_normal((N, 3 * tiny.HIDDEN)).astype(np.float32)
    np.savez(path / "inputs.npz", tokens=tokens, taps=taps)
    return tokens, taps


@pytest.fixture(scope="module")
def trained(target: tuple[Path, WeightSet]) -> Eagle3:
    """As training leaves heads: no weight is one or zero."""
    weights = target[1]
    table, projection = weights.tensors["token_embd"].load_f32(), forward.head(weights)
    torch.manual_seed(3)
    model = Eagle3(weights.config, table, projection, tiny.draft_ids(), DEPTHS)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.2 * torch.randn_like(value) / value.shape[-1] ** 0.5
    return model


@pytest.fixture(scope="module")
def served(
    target: tuple[Path, WeightSet],
    trained: Eagle3,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Where the library has run the trained head, and one of each of FLAGS."""
    work = tmp_path_factory.mktemp("heads")
    (work / "trained").mkdir()
    verifier = str(target[0])
    layouts.save(trained, target[1], work / "trained", "speculators", verifier)
    for i, flags in enumerate(FLAGS):
        made = tiny.eagle3("speculators", **flags)
        config = json.loads(json.dumps(made.config))
        config["speculators_config"]["verifier"] = {
            "name_or_path": verifier,
            "architectures": ["LlamaForCausalLM"],
        }
        replace(made, config=config).write(work / str(i))
    for path in work.iterdir():
        inputs(path)
    done = subprocess.run(
        [sys.executable, str(HOST), *map(str, work.iterdir())],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return work


def by_depth(
    head: Head, target: WeightSet, tokens: NDArray[np.int64], taps: Floats
) -> Floats:
    """Logits (DEPTHS, n, draft tokens) of chains that begin behind every row.

    What depth d says at row j stands behind the d tokens that follow j's, each with the
    output of the row before it; the past is the true one up to j.
    """
    table = head.tensors.get("token_embd", target.tensors["token_embd"]).load_f32()
    fused = head_forward.fuse(head, taps)
    said = np.zeros((DEPTHS, N, head.draft_vocab), np.float32)
    for j in range(N):
        features = list(fused[: j + 1])
        for depth in range(min(DEPTHS, N - j)):
            n = j + 1 + depth
            logits, out = head_forward.step(
                head,
                table[tokens[:n]],
                np.stack(features),
                np.arange(n),
                np.tri(n, dtype=bool),
            )
            said[depth, j] = logits[-1]
            features.append(out[-1])
    return said


def check(path: Path, expected: Floats, most: float) -> None:
    found = np.load(path / "outputs.npz")
    assert found["layers"].tolist() == list(tiny.TAPS)
    assert expected.std() >= 1
    for depth in range(DEPTHS):  # of the last rows no tokens are left
        ours, theirs = expected[depth, : N - depth], found["logits"][depth, : N - depth]
        assert np.abs(ours - theirs).max() < most * ours.std()


def test_what_train_writes_is_what_the_library_runs(
    served: Path, trained: Eagle3
) -> None:
    path = served / "trained"
    tokens, taps = inputs(path)
    shape = (1, N + 1)
    batch = Batch(
        tokens=torch.tensor([[0, *tokens.tolist()]]),  # what follows row j is j + 1's
        written=torch.ones(shape, dtype=torch.bool),
        top=torch.zeros(shape, dtype=torch.int64),
        document=torch.zeros(shape, dtype=torch.int64),
        position=torch.arange(N + 1)[None],
        states=torch.from_numpy(np.pad(taps, ((0, 1), (0, 0)))).view(*shape, 3, -1),
    )
    with torch.no_grad():
        hidden = trained.hidden(batch, DEPTHS)
        said = [trained.lm_head(rows)[0, :N].numpy() for rows in hidden]
    check(path, np.stack(said), 0.01)  # weights are stored as halves


@pytest.mark.parametrize("i", range(len(FLAGS)), ids=map(str, FLAGS))
def test_every_flag_is_the_librarys(
    served: Path, target: tuple[Path, WeightSet], i: int
) -> None:
    """Also of heads the library saved itself."""
    path, weights = served / str(i), target[1]
    head = reader.read(path, weights.config)
    check(path, by_depth(head, weights, *inputs(path)), 1e-4)
    saved = reader.read(path / "saved", weights.config)
    for field in ("taps", "norm_before_residual", "norm_output", "norm_before_fc"):
        assert getattr(saved, field) == getattr(head, field), field
    assert saved.tensors.keys() == head.tensors.keys()
    for name, tensor in head.tensors.items():
        np.testing.assert_array_equal(saved.tensors[name].load_f32(), tensor.load_f32())
