"""Small models as drafts: read, compared with their target, stored without its part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.bundle import open_bundle
from edgespec.errors import EdgeSpecError, FormatError, UsageError
from edgespec.gguf_header import open_gguf
from edgespec_export import draft_model, pipeline, sources
from edgespec_export.head_bundle import HeadOptions
from tests.export import checkpoints, draft_models, families

KEYS = (draft_model.TOKENS, draft_model.VOCABULARY)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> families.Model:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return families.gguf(path, kind="Q8_0", n_layers=4)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def any_target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> families.Model:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return families.gguf(path, kind="Q8_0", n_layers=4, is_tied=request.param)


def names(path: Path) -> set[str]:
    return {tensor.name for tensor in open_gguf(path).tensors}


def test_what_is_the_targets_is_not_stored(
    any_target: families.Model, tmp_path: Path
) -> None:
    weights = any_target.weights
    path = draft_models.write(
        weights, (0, 3), tmp_path / "d.gguf", ids=[1, 9, 319], quant="q4_0"
    )
    file = open_gguf(path)
    layer = {name.split(".", 2)[2] for name in names(path) if name.startswith("blk.0")}
    assert names(path) == {"output_norm.weight"} | {
        f"blk.{i}.{name}" for i in (0, 1) for name in layer
    }
    assert not any(key.startswith("tokenizer.") for key in file.metadata)
    assert file.metadata["llama.vocab_size"] == 320
    tokens = weights.gguf_metadata["tokenizer.ggml.tokens"]
    assert file.metadata[draft_model.VOCABULARY] == draft_model.vocabulary_hash(tokens)
    kinds = {t.kind for t in file.tensors if len(t.shape) > 1}
    assert kinds == {"Q4_0"}

    again = draft_model.read(path, weights)
    assert again.is_sharing
    assert (again.draft_vocab, again.taps, again.kind) == (3, (), "model")
    assert again.ids is not None and again.ids.tolist() == [1, 9, 319]
    assert again.weights.config.is_tied == weights.config.is_tied
    pruned = draft_models.pruned(weights, (0, 3))
    for name, tensor in again.weights.tensors.items():
        expected = pruned.tensors[name].load_f32()
        got = tensor.load_f32()
        limit = 0 if got.ndim == 1 else 0.1 * np.linalg.norm(expected)
        assert np.linalg.norm(got - expected) <= limit, name
    # and stored once more it is the same
    draft_model.write(again, tmp_path / "again.gguf", None)
    stored = open_gguf(tmp_path / "again.gguf")
    assert stored.metadata == file.metadata
    assert all(
        np.array_equal(stored.raw(a), file.raw(b))
        for a, b in zip(stored.tensors, file.tensors, strict=True)
    )


def test_a_hash_known_elsewhere() -> None:
    # FNV-1a of nothing, and of "a" and 0xFF
    assert draft_model.vocabulary_hash([]) == "cbf29ce484222325"
    assert (
        draft_model.vocabulary_hash(["a"])
        == f"{(0xAF63DC4C8601EC8C ^ 255) * 0x100000001B3 % 2**64:016x}"
    )
    assert draft_model.vocabulary_hash(["ab"]) != draft_model.vocabulary_hash(
        ["a", "b"]
    )


def test_weights_of_its_own_stay(target: families.Model, tmp_path: Path) -> None:
    other = families.gguf(tmp_path / "a.gguf", "qwen3", hidden=32, ffn=64, seed=5)
    draft = draft_model.read(other.path, target.weights)
    assert not draft.is_sharing
    path = tmp_path / "draft.gguf"
    draft_model.write(replace(draft, ids=np.arange(8, dtype=np.int64)), path, "q8_0")
    assert "token_embd.weight" in names(path)
    read = sources.read(path)  # a model like any other
    assert (read.config.arch, read.config.hidden) == ("qwen3", 32)
    again = draft_model.read(path, target.weights)
    assert again.ids is not None and again.ids.tolist() == [*range(8)]


def test_a_checkpoint_directory(target: families.Model, tmp_path: Path) -> None:
    shape = checkpoints.Shape(n_layers=1)
    path = checkpoints.hf_checkpoint(tmp_path / "hf", shape, seed=3)
    assert draft_model.is_model(path)
    draft = draft_model.read(path, target.weights)
    assert not draft.is_sharing  # another embedding
    draft_model.write(draft, tmp_path / "d.gguf", "q8_0")
    assert draft_model.read(tmp_path / "d.gguf", target.weights).draft_vocab == 320


def test_into_a_bundle(target: families.Model, tmp_path: Path) -> None:
    made = tmp_path / "trained"
    made.mkdir()
    one = draft_models.whole(target.weights, (0, 3), made / "draft.gguf")
    two = draft_models.whole(target.weights, (1,), tmp_path / "two.gguf")
    lines: list[str] = []
    options = HeadOptions((one.parent, two), quant="q4_0", draft_vocab=100)
    bundle = pipeline.export(
        target.path, tmp_path / "b", check=False, heads=options, log=lines.append
    )
    manifest = open_bundle(bundle.directory).manifest
    assert [(h.kind, h.files, h.draft_vocab, h.quant) for h in manifest.heads] == [
        ("model", {"gguf": "draft-model.gguf"}, 100, "q4_0"),
        ("model", {"gguf": "draft-model.2.gguf"}, 100, "q4_0"),
    ]
    assert any("draft-model.2.gguf" in line and "100 of 320" in line for line in lines)
    weights = sources.read(bundle.directory / "target.gguf")
    for name in ("draft-model.gguf", "draft-model.2.gguf"):
        draft = draft_model.read(bundle.directory / name, weights)
        assert draft.is_sharing
        assert draft.ids is not None
        assert set(draft.ids) >= set(target.weights.eos_ids)
    with pytest.raises(UsageError, match="runs beside --format gguf or packed"):
        pipeline.export(
            target.path, tmp_path / "c", formats=("onnx",), check=False, heads=options
        )


def test_another_targets_draft(target: families.Model, tmp_path: Path) -> None:
    path = draft_models.write(target.weights, (0, 3), tmp_path / "d.gguf")
    wide = families.gguf(tmp_path / "wide.gguf", hidden=96)
    with pytest.raises(FormatError, match="width 64 .* target has width 96"):
        draft_model.read(path, wide.weights)
    words = list(target.weights.gguf_metadata["tokenizer.ggml.tokens"])
    words[300] = "another"
    metadata = dict(target.weights.gguf_metadata) | {"tokenizer.ggml.tokens": words}
    other = replace(target.weights, gguf_metadata=metadata)
    with pytest.raises(FormatError, match="a draft for the vocabulary .* target's is"):
        draft_model.read(path, other)
    whole = tmp_path / "whole-d.gguf"
    with pytest.raises(FormatError, match="token 300 is .* and 'another' in the targ"):
        draft_model.read(whole, other)
    metadata["tokenizer.ggml.tokens"] = words[:-1]
    with pytest.raises(FormatError, match="draft has 320 tokens, the target 319"):
        draft_model.read(whole, other)
    with pytest.raises(FormatError, match=r"missing: token_embd \(a draft that uses"):
        sources.read(path)


@pytest.mark.parametrize(
    ("value", "item"),
    [
        ([0] * 40, gguf.GGUFValueType.UINT8),  # nothing drafted
        ([1] * 39, gguf.GGUFValueType.UINT8),
        ([255] * 41, gguf.GGUFValueType.UINT8),
        ([0.5] * 40, gguf.GGUFValueType.FLOAT32),
        ([256] * 40, gguf.GGUFValueType.INT32),
    ],
)
def test_tokens_that_cannot_be(
    target: families.Model, tmp_path: Path, value: Any, item: Any
) -> None:
    weights = draft_models.pruned(target.weights, (0,))
    weights.gguf_metadata.put(  # type: ignore[union-attr]
        draft_model.TOKENS, value, gguf.GGUFValueType.ARRAY, item
    )
    path = tmp_path / "d.gguf"
    draft_model.gguf_file.write(weights, None, path)
    with pytest.raises(FormatError, match="a bit for each of 320 tokens, some set"):
        draft_model.read(path, target.weights)


def test_tensors_missing_or_misshapen(target: families.Model, tmp_path: Path) -> None:
    path = draft_models.write(target.weights, (0, 3), tmp_path / "d.gguf")
    draft = draft_model.read(path, target.weights)
    for name, tensor in draft.weights.tensors.items():
        rest = {n: t for n, t in draft.weights.tensors.items() if n != name}
        weights = replace(draft.weights, tensors=rest)
        draft_model.write(replace(draft, weights=weights), tmp_path / "x.gguf", None)
        with pytest.raises(FormatError, match=f"missing: {name}"):
            draft_model.read(tmp_path / "x.gguf", target.weights)
        wrong = replace(
            tensor,
            shape=(tensor.shape[0] // 2, *tensor.shape[1:]),
            load_raw=lambda t=tensor: _half(t.load_raw(), len(t.shape)),
        )
        weights = replace(draft.weights, tensors=rest | {name: wrong})
        draft_model.write(replace(draft, weights=weights), tmp_path / "x.gguf", None)
        with pytest.raises(FormatError, match=f"'{name}': expected shape"):
            draft_model.read(tmp_path / "x.gguf", target.weights)
    whole = path.read_bytes()
    for n_bytes in (0, 3, 24, 500, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:n_bytes])
        with pytest.raises(EdgeSpecError, match="cut.gguf"):
            draft_model.read(tmp_path / "cut.gguf", target.weights)


def _half(raw: Any, n_dims: int) -> Any:
    return raw[: len(raw) // 2] if n_dims > 1 else raw[:, : raw.shape[1] // 2]
