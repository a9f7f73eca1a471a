"""Draft heads of every layout read, and their forward against torch's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from edgespec_export import head_forward, sources
from edgespec_export.heads import Head
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet
from tests.export import checkpoints, head_torch
from tests.export import heads as tiny
from tests.export.graphs import random_parent, tree

torch.set_num_threads(1)

EAGLE3_FLAGS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
    {"qwen": True, "norm_output": True},
    {"window": 5},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> WeightSet:
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    return sources.read(
        checkpoints.hf_checkpoint(tmp_path_factory.mktemp("target"), shape)
    )


def check_eagle(head: Head, checkpoint: tiny.Checkpoint, target: WeightSet) -> None:
    """Logits and features of a tree behind a prompt, fed back along its paths."""
    rng = np.random.default_rng(5)
    prompt, n = 9, 21
    parent = [*range(-1, prompt - 1)]
    parent += [prompt - 1 + p + 1 for p in random_parent(rng, n - prompt)]
    parent[prompt] = prompt - 1
    visible, positions = tree(parent)
    embedding = target.tensors["token_embd"].load_f32()
    if "token_embd" in head.tensors:
        embedding = head.tensors["token_embd"].load_f32()
        np.testing.assert_array_equal(
            embedding, checkpoint.tensors["embed_tokens.weight"]
        )
    lm_head = target.tensors["token_embd"].load_f32()
    embedded = embedding[rng.integers(0, head.vocab, n)]
    reference = head_torch.Eagle(checkpoint)
    if head.kind == "eagle3":
        taps = rng.standard_normal((n, 3 * head.target_hidden)).astype(np.float32)
        features = head_forward.fuse(head, taps)
        theirs = reference.fuse(torch.from_numpy(taps))
    else:
        features = rng.standard_normal((n, head.hidden)).astype(np.float32)
        theirs = torch.from_numpy(features.copy())
    place, mask, rows, projection = head_torch.as_torch(
        positions, visible, embedded, lm_head
    )
    for _ in range(3):  # each time the rows behind the prompt see their parents' output
        logits, out = head_forward.step(
            head, embedded, features, positions, visible, lm_head
        )
        expected, fed = reference.step(rows, theirs, place, mask, projection)
        assert expected.std() >= 1
        np.testing.assert_allclose(logits, expected.numpy(), atol=1e-4, rtol=0)
        np.testing.assert_allclose(out, fed.numpy(), atol=1e-4, rtol=0)
        for row in range(prompt, n):
            features[row] = out[parent[row]]
            theirs[row] = fed[parent[row]]


@pytest.mark.parametrize("flags", EAGLE3_FLAGS, ids=str)
@pytest.mark.parametrize("layout", ["safeailab", "specforge", "speculators"])
def test_eagle3(
    tmp_path: Path, target: WeightSet, layout: str, flags: dict[str, Any]
) -> None:
    checkpoint = tiny.eagle3(layout, **flags)
    head = reader.read(checkpoint.write(tmp_path / "head"), target.config)
    assert (head.kind, head.taps) == ("eagle3", tiny.TAPS)
    assert (head.vocab, head.draft_vocab) == (tiny.VOCAB, tiny.DRAFT_VOCAB)
    assert head.d2t is not None
    np.testing.assert_array_equal(head.d2t, tiny.draft_ids())
    assert head.norm_before_fc is bool(flags.get("norm_before_fc"))
    assert head.fc_norm is bool(flags.get("fc_norm"))
    check_eagle(head, checkpoint, target)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt"])
def test_eagle3_in_a_zip_file(tmp_path: Path, target: WeightSet, name: str) -> None:
    checkpoint = tiny.eagle3()
    path = checkpoint.write(tmp_path, name)
    check_eagle(reader.read(path, target.config), checkpoint, target)
    by_file = reader.read(path / name, target.config)
    assert by_file.origin.format == "pytorch"
    check_eagle(by_file, checkpoint, target)


def test_eagle3_of_its_own_width(tmp_path: Path, target: WeightSet) -> None:
    checkpoint = tiny.eagle3(hidden=96, own_embedding=True)
    head = reader.read(checkpoint.write(tmp_path), target.config)
    assert (head.hidden, head.target_hidden) == (96, 64)
    check_eagle(head, checkpoint, target)


def test_eagle3_over_the_whole_vocabulary(tmp_path: Path, target: WeightSet) -> None:
    checkpoint = tiny.eagle3(draft_vocab=None)
    head = reader.read(checkpoint.write(tmp_path), target.config)
    assert (head.d2t, head.draft_vocab) == (None, tiny.VOCAB)
    check_eagle(head, checkpoint, target)


@pytest.mark.parametrize(
    "config",
    [
        {"tie_word_embeddings": True},  # copied from the target's; it has its own
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4}},
        {"head_dim": None, "eagle_config": None, "norm_before_fc": None},
        {"eagle_aux_hidden_state_layer_ids": None, "embed_requires_grad": True},
    ],
    ids=str,
)
def test_settings_that_say_nothing_new(
    tmp_path: Path, target: WeightSet, config: dict[str, Any]
) -> None:
    whole = tiny.eagle3()
    kept = {k: v for k, v in (whole.config | config).items() if k != "rope_theta" or v}
    changed = replace(whole, config=kept)
    check_eagle(reader.read(changed.write(tmp_path), target.config), changed, target)


@pytest.mark.parametrize("container", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(
    tmp_path: Path, target: WeightSet, dtype: torch.dtype, container: str
) -> None:
    """As public heads are stored, with ids of 32 bits and what only training needs."""
    whole = tiny.eagle3()
    tensors = {name: torch.from_numpy(v.copy()) for name, v in whole.tensors.items()}
    floats = {n: t.to(dtype) for n, t in tensors.items() if t.is_floating_point()}
    halves = tensors | floats
    halves["d2t"] = halves["d2t"].int()
    rest = {
        "verifier_norm.weight": torch.ones(tiny.HIDDEN),
        "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    if container == "model.safetensors":
        safetensors.torch.save_file(halves | rest, tmp_path / container)
    else:
        torch.save(halves | rest, tmp_path / container)
    (tmp_path / "config.json").write_text(json.dumps(whole.config))
    head = reader.read(tmp_path, target.config)
    assert head.d2t is not None
    np.testing.assert_array_equal(head.d2t, tiny.draft_ids())
    read = {name: value.float().numpy() for name, value in floats.items()}
    check_eagle(head, replace(whole, tensors=read), target)


def test_prefixes_of_names_do_not_matter(tmp_path: Path, target: WeightSet) -> None:
    checkpoint = tiny.eagle3()
    named = {f"model.{name}": value for name, value in checkpoint.tensors.items()}
    written = tiny.Checkpoint(named, checkpoint.config).write(tmp_path)
    check_eagle(reader.read(written, target.config), checkpoint, target)


def test_lm_head_of_the_target(tmp_path: Path, target: WeightSet) -> None:
    checkpoint = tiny.eagle3(draft_vocab=None)
    del checkpoint.tensors["lm_head.weight"]
    head = reader.read(checkpoint.write(tmp_path), target.config)
    assert not head.own_output
    check_eagle(head, checkpoint, target)


@pytest.mark.parametrize("container", ["safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_eagle_1_and_2(
    tmp_path: Path, target: WeightSet, container: str, bias: bool, own_embedding: bool
) -> None:
    checkpoint = tiny.eagle(bias=bias, own_embedding=own_embedding)
    head = reader.read(checkpoint.write(tmp_path, container), target.config)
    assert (head.kind, head.taps) == ("eagle", (tiny.LAYERS,))
    assert ("fc.bias" in head.tensors) is bias
    check_eagle(head, checkpoint, target)


@pytest.mark.parametrize("container", ["safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize(
    "options",
    [
        {"version": "0.1", "heads": 5},
        {"version": "1"},
        {"version": "2", "layers": 2},
        {"rows": None},
    ],
    ids=str,
)
def test_medusa(
    tmp_path: Path, target: WeightSet, container: str, options: dict[str, Any]
) -> None:
    checkpoint = tiny.medusa(**options)
    head = reader.read(checkpoint.write(tmp_path, container), target.config)
    assert head.kind == "medusa"
    assert (head.heads, head.layers) == (
        options.get("heads", 3),
        options.get("layers", 1),
    )
    check_medusa(head, checkpoint, target)


def check_medusa(head: Head, checkpoint: tiny.Checkpoint, target: WeightSet) -> None:
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((6, tiny.HIDDEN)).astype(np.float32)
    lm_head = target.tensors["token_embd"].load_f32()
    expected = head_torch.medusa(checkpoint, *head_torch.as_torch(hidden, lm_head))
    assert expected.std() >= 1
    got = head_forward.medusa(head, hidden, lm_head)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-4, rtol=0)


def test_medusa_inside_the_shards_of_a_model(tmp_path: Path, target: WeightSet) -> None:
    path = checkpoints.hf_checkpoint(
        tmp_path,
        checkpoints.Shape(n_layers=tiny.LAYERS),
        config={"medusa_num_heads": 3, "medusa_num_layers": 1},
    )
    checkpoint = tiny.medusa(prefix="medusa_head.")
    from safetensors.numpy import load_file, save_file

    weights = load_file(path / "model.safetensors")
    save_file(weights | checkpoint.tensors, path / "model.safetensors")
    check_medusa(reader.read(path, target.config), checkpoint, target)
