"""Draft heads written as GGUF: read back, run again, and loaded by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import EdgeSpecError, FormatError, UnsupportedError, UsageError
from edgespec.gguf_header import open_gguf
from edgespec_export import head_forward, head_gguf, sources
from edgespec_export.draft_vocab import choose_ids, known_ids, with_vocabulary
from edgespec_export.heads import Head, share_with_target
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet
from tests.export import checkpoints
from tests.export import heads as tiny

HEADS: dict[str, Callable[[], tiny.Checkpoint]] = {
    "eagle3": tiny.eagle3,
    "residual": lambda: tiny.eagle3(norm_before_residual=True),
    "before fc": lambda: tiny.eagle3(norm_before_fc=True, norm_output=True),
    "fc norms": lambda: tiny.eagle3("speculators", fc_norm=True),
    "qwen": lambda: tiny.eagle3(qwen=True, window=5),
    "own width": lambda: tiny.eagle3(hidden=96, own_embedding=True),
    "eagle": tiny.eagle,
    "eagle without bias": lambda: tiny.eagle(bias=False, own_embedding=False),
    "medusa": tiny.medusa,
    "medusa on the target's": lambda: tiny.medusa(rows=None, layers=2),
    "medusa on the first ids": lambda: tiny.medusa(rows=None, first=100),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> WeightSet:
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    return sources.read(
        checkpoints.hf_checkpoint(tmp_path_factory.mktemp("target"), shape)
    )


def read(path: Path, name: str, target: WeightSet) -> Head:
    return reader.read(HEADS[name]().write(path / "source"), target.config)


def run(head: Head, target: WeightSet) -> NDArray[np.float32]:
    """Logits of a few rows."""
    rng = np.random.default_rng(2)
    n = 7
    lm_head = target.tensors["token_embd"].load_f32()
    if head.kind == "medusa":
        hidden = rng.standard_normal((n, head.hidden)).astype(np.float32)
        return head_forward.medusa(head, hidden, lm_head)
    width = len(head.taps) * head.target_hidden
    given = rng.standard_normal((n, width)).astype(np.float32)
    features = head_forward.fuse(head, given) if head.kind == "eagle3" else given
    table = head.tensors.get("token_embd", target.tensors["token_embd"]).load_f32()
    embedded = table[rng.integers(0, head.vocab, n)]
    visible = np.tri(n, dtype=bool)
    places = np.arange(n)
    first, out = head_forward.step(head, embedded, features, places, visible, lm_head)
    again, _ = head_forward.step(head, embedded, out, places, visible, lm_head)
    return np.concatenate([first, again])


@pytest.mark.parametrize("name", HEADS)
def test_written_and_read_again(tmp_path: Path, target: WeightSet, name: str) -> None:
    head = read(tmp_path, name, target)
    path = tmp_path / "draft.gguf"
    report = head_gguf.write(head, path, target=target)
    assert report.n_bytes == path.stat().st_size
    again = reader.read(path, target.config)
    for field in (
        *("kind", "hidden", "target_hidden", "target_layers", "vocab", "draft_vocab"),
        *("taps", "n_heads", "n_kv_heads", "head_dim", "ffn", "max_position", "window"),
        *("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"),
        *("heads", "layers", "name"),
    ):
        assert getattr(again, field) == getattr(head, field), field
    assert again.eps == pytest.approx(head.eps)
    if head.d2t is None:
        assert again.d2t is None
    else:
        np.testing.assert_array_equal(again.d2t, head.d2t)
    assert set(again.tensors) == set(head.tensors)
    for key, tensor in head.tensors.items():
        np.testing.assert_array_equal(again.tensors[key].load_f32(), tensor.load_f32())
    assert run(head, target).std() >= 1
    np.testing.assert_allclose(
        run(again, target), run(head, target), atol=1e-5, rtol=1e-6
    )


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("quant", "loss"), [("f32", 0), ("f16", 2e-3), ("q8_0", 0.03), ("q4_0", 0.4)]
)
def test_quantised(
    tmp_path: Path, target: WeightSet, name: str, quant: str, loss: float
) -> None:
    head = read(tmp_path, name, target)
    path = tmp_path / "draft.gguf"
    kinds = head_gguf.write(head, path, target=target, quant=quant).kinds
    matrices = {k for n, k in kinds.items() if len(head.tensors[n].shape) == 2}
    assert matrices == {quant.upper()}
    assert {kinds[n] for n in kinds if len(head.tensors[n].shape) == 1} <= {"F32"}
    again = reader.read(path, target.config)
    expected, got = run(head, target), run(again, target)
    assert np.linalg.norm(got - expected) <= loss * np.linalg.norm(expected)
    kept = tmp_path / "kept.gguf"  # what is quantised already stays bit for bit
    head_gguf.write(again, kept, target=target)
    for key, tensor in reader.read(kept, target.config).tensors.items():
        assert tensor.kind == again.tensors[key].kind
        np.testing.assert_array_equal(tensor.load_raw(), again.tensors[key].load_raw())


def test_what_a_file_holds(tmp_path: Path, target: WeightSet) -> None:
    """llama.cpp's names, ids, row order and keys, without this project's reader."""
    checkpoint = tiny.eagle3(norm_before_residual=True)
    head = reader.read(checkpoint.write(tmp_path / "source"), target.config)
    path = tmp_path / "draft.gguf"
    head_gguf.write(head, path, target=target, tree=([-1, 0, 0], [0, 0, 1]))
    file = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in file.fields.items()}
    assert fields["general.architecture"] == "eagle3"
    for key in ("eagle3.extract_layers", "eagle3.target_layers", "edgespec.head.taps"):
        assert fields[key] == [2, 4, 5]
    assert fields["eagle3.target_hidden_size"] == 64
    assert fields["eagle3.norm_before_residual"] is True
    assert fields["edgespec.head.target_layers"] == tiny.LAYERS
    assert fields["edgespec.tree.parent"] == [-1, 0, 0]
    assert fields["edgespec.tree.rank"] == [0, 0, 1]
    assert len(fields["tokenizer.ggml.tokens"]) == tiny.VOCAB
    stored = {tensor.name: tensor for tensor in file.tensors}
    assert set(stored) == {
        *("d2t", "fc.weight", "output.weight", "output_norm.weight"),
        *(
            f"blk.0.attn_{n}.weight"
            for n in ("norm", "norm_2", "q", "k", "v", "output")
        ),
        *(f"blk.0.ffn_{n}.weight" for n in ("norm", "gate", "up", "down")),
    }
    assert stored["d2t"].tensor_type == gguf.GGMLQuantizationType.I64
    np.testing.assert_array_equal(stored["d2t"].data, tiny.draft_ids())
    q = checkpoint.tensors["midlayer.self_attn.q_proj.weight"]
    pairs = q.reshape(4, 2, 8, 128).swapaxes(1, 2).reshape(64, 128)
    np.testing.assert_array_equal(stored["blk.0.attn_q.weight"].data, pairs)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_ropes(tmp_path: Path, target: WeightSet, rope: str) -> None:
    whole = tiny.eagle3()
    config = whole.config | {"rope_scaling": checkpoints.ROPES[rope]}
    source = replace(whole, config=config).write(tmp_path / "source")
    head = reader.read(source, target.config)
    path = tmp_path / "draft.gguf"
    head_gguf.write(head, path, target=target)
    again = reader.read(path, target.config)
    assert head.rope is not None
    assert again.rope is not None
    assert again.rope.kind == rope
    np.testing.assert_allclose(again.rope.inv_freq, head.rope.inv_freq, rtol=1e-6)
    assert again.rope.attention_factor == pytest.approx(head.rope.attention_factor)


def llama_file(path: Path, changes: Callable[[gguf.GGUFWriter], None]) -> Path:
    """An eagle3 file as llama.cpp's converter makes one, but for `changes`."""
    checkpoint = tiny.eagle3()
    writer = gguf.GGUFWriter(path, "eagle3")
    for key, value in {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "vocab_size": tiny.VOCAB,
        "target_hidden_size": 64,
    }.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("eagle3.rope.freq_base", 10000.0)
    names = {
        "input_layernorm": "attn_norm",
        "hidden_norm": "attn_norm_2",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    writer.add_tensor("d2t", tiny.draft_ids())
    others = {"fc": "fc", "norm": "output_norm", "lm_head": "output"}
    for name, value in checkpoint.tensors.items():
        short = name.removesuffix(".weight")
        if short in others:
            writer.add_tensor(f"{others[short]}.weight", value)
        elif short.startswith("midlayer."):
            theirs = names[short.removeprefix("midlayer.")]
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            if heads:
                rows = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2)
                value = np.ascontiguousarray(rows).reshape(value.shape)
            writer.add_tensor(f"blk.0.{theirs}.weight", value)
    changes(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("key", ["extract_layers", "target_layers"])
def test_a_file_of_llama_cpps_converter(
    tmp_path: Path, target: WeightSet, key: str
) -> None:
    path = llama_file(
        tmp_path / "theirs.gguf", lambda w: w.add_array(f"eagle3.{key}", [2, 4, 5])
    )
    got = reader.read(path, target.config)
    expected = reader.read(tiny.eagle3().write(tmp_path / "hf"), target.config)
    assert got.taps == expected.taps
    np.testing.assert_allclose(run(got, target), run(expected, target), atol=1e-5)


def vector(writer: gguf.GGUFWriter, name: str, size: int) -> None:
    writer.add_tensor(name, np.ones(size, np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            lambda w: w.add_uint32("eagle3.attention.value_length", 8),
            "eagle3.attention.value_length 8: expected the keys' size 16",
        ),
        (
            lambda w: w.add_uint32("eagle3.rope.dimension_count", 8),
            "eagle3.rope.dimension_count 8: expected the keys' size 16",
        ),
        (
            lambda w: w.add_string("eagle3.rope.scaling.type", "longrope"),
            "RoPE scaling 'longrope' is not supported",
        ),
        (
            lambda w: w.add_uint32("eagle3.norm_before_residual", 1),
            "norm_before_residual: expected",
        ),
        (
            lambda w: w.add_bool("eagle3.norm_before_fc", True),
            "missing: enc.output_norm.weight",
        ),
        (lambda w: vector(w, "fc.bias", 64), "unexpected: fc.bias"),
        (lambda w: vector(w, "t2d", 320), "unexpected: t2d"),
        (
            lambda w: vector(w, "blk.1.ffn_norm.weight", 64),
            "unexpected: blk.1.ffn_norm.weight",
        ),
        (
            lambda w: vector(w, "blk.0.attn_q_norm.weight", 16),
            "missing: blk.0.attn_k_norm.weight",
        ),
        (
            lambda w: [
                vector(w, "enc.output_norm.weight", 192),
                *(vector(w, f"fc_norm.{i}.weight", 64) for i in range(3)),
            ],
            "norm_before_fc and fc_norm exclude each other",
        ),
    ],
)
def test_heads_unlike_llama_cpps(
    tmp_path: Path,
    target: WeightSet,
    changes: Callable[[gguf.GGUFWriter], Any],
    message: str,
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_array("eagle3.target_layers", [2, 4, 5])
        changes(writer)

    path = llama_file(tmp_path / "theirs.gguf", change)
    with pytest.raises(EdgeSpecError, match=message) as caught:
        reader.read(path, target.config)
    assert str(path) in str(caught.value)


def test_layer_ids_of_a_gguf(tmp_path: Path, target: WeightSet) -> None:
    def taps(name: str, ids: list[int], convention: str | None = None) -> Any:
        path = tmp_path / name
        if not path.exists():
            llama_file(path, lambda w: w.add_array("eagle3.target_layers", ids))
        return reader.read(path, target.config, tap_convention=convention).taps

    assert taps("a", [1, 3, 4]) == (2, 4, 5)
    assert taps("a", [1, 3, 4], "input") == (1, 3, 4)
    with pytest.raises(UnsupportedError, match="--tap-convention"):
        taps("b", [0, 3, 4])
    assert taps("b", [0, 3, 4], "output") == (1, 4, 5)
    with pytest.raises(FormatError, match="the target has 8 layers"):
        taps("c", [2, 4, 8])
    both = llama_file(
        tmp_path / "d",
        lambda w: (
            w.add_array("eagle3.target_layers", [2, 4, 5]),
            w.add_array("eagle3.extract_layers", [2, 4, 6]),
        )[0],
    )
    with pytest.raises(FormatError, match="differ"):
        reader.read(both, target.config)
    with pytest.raises(FormatError, match="neither eagle3.target_layers"):
        reader.read(llama_file(tmp_path / "e", lambda w: None), target.config)


@pytest.mark.parametrize("name", HEADS)
def test_another_target(tmp_path: Path, target: WeightSet, name: str) -> None:
    head = read(tmp_path, name, target)
    path = tmp_path / "draft.gguf"
    head_gguf.write(head, path, target=target)
    for changes, message in [
        ({"hidden": 80}, "64.*80"),
        ({"vocab": 384}, "320.*384"),
        ({"n_layers": 9}, "layers: 8, the target has 9"),
    ]:
        with pytest.raises(FormatError, match=message):
            reader.read(path, replace(target.config, **changes))


def test_files_of_other_models(tmp_path: Path, target: WeightSet) -> None:
    model = checkpoints.gguf_checkpoint(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match="'llama' is no draft head"):
        reader.read(model, target.config)
    medusa = read(tmp_path, "medusa", target)
    head_gguf.write(medusa, tmp_path / "draft.gguf", target=target)
    with pytest.raises(FormatError, match="expected a head of eagle, got medusa"):
        reader.read(tmp_path / "draft.gguf", target.config, expected="eagle")
    with pytest.raises(EdgeSpecError, match="is not supported"):
        sources.read(tmp_path / "draft.gguf")


@pytest.mark.parametrize("name", ["before fc", "fc norms", "qwen", "eagle", "medusa"])
def test_missing_and_misshapen_tensors(
    tmp_path: Path, target: WeightSet, name: str
) -> None:
    head = read(tmp_path, name, target)
    path = tmp_path / "draft.gguf"
    kept = {"token_embd", "output", "fc.bias"}
    for key, tensor in head.tensors.items():
        rest = {k: v for k, v in head.tensors.items() if k != key}
        head_gguf.write(replace(head, tensors=rest), path, target=target)
        if key in kept:
            assert reader.read(path, target.config).kind == head.kind
        elif key != "enc.output_norm":  # without which the file claims none
            with pytest.raises(FormatError, match=f"missing: {key}"):
                reader.read(path, target.config)
        shape = (tensor.shape[0] - 1, *tensor.shape[1:])
        shorter = replace(
            tensor,
            shape=shape,
            load_raw=lambda t=tensor: t.load_f32()[:-1].view(np.uint8),
        )
        if key in ("blk.0.attn_q", "blk.0.attn_k"):
            continue  # rows of heads that are not whole cannot be written
        tensors = head.tensors | {key: shorter}
        head_gguf.write(replace(head, tensors=tensors), path, target=target)
        with pytest.raises(FormatError, match=f"{key}|d2t|output"):
            reader.read(path, target.config)


def test_c37_truncated_heads(tmp_path: Path, target: WeightSet) -> None:
    head = read(tmp_path, "eagle3", target)
    path = tmp_path / "draft.gguf"
    head_gguf.write(head, path, target=target)
    data = path.read_bytes()
    edges = [tensor.offset for tensor in open_gguf(path).tensors]
    for size in [37, 1024, *(edge + d for edge in edges for d in (-1, 0, 1))]:
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match="draft.gguf"):
            reader.read(path, target.config)


def test_wrong_arguments(tmp_path: Path, target: WeightSet) -> None:
    head = read(tmp_path, "eagle3", target)
    with pytest.raises(UsageError, match="unknown quant 'q3'"):
        head_gguf.write(head, tmp_path / "draft.gguf", target=target, quant="q3")
    narrow = replace(head.tensors["fc"], shape=(64, 100))
    tensors = {**head.tensors, "fc": narrow}
    with pytest.raises(UnsupportedError, match="'fc': rows of 100.*use f16"):
        head_gguf.write(
            replace(head, tensors=tensors),
            tmp_path / "draft.gguf",
            target=target,
            quant="q4_0",
        )
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_nothing_of_the_targets_is_stored_twice(
    tmp_path: Path, target: WeightSet
) -> None:
    embedding = target.tensors["token_embd"].load_f32()
    whole = tiny.eagle()
    whole.tensors["embed_tokens.weight"] = embedding.astype(np.float16)
    head = reader.read(whole.write(tmp_path / "a"), target.config)
    shared = share_with_target(head, target)
    assert set(head.tensors) - set(shared.tensors) == {"token_embd"}
    whole.tensors["embed_tokens.weight"] = embedding * 1.1
    other = reader.read(whole.write(tmp_path / "b"), target.config)
    assert share_with_target(other, target).tensors.keys() == other.tensors.keys()

    medusa = tiny.medusa()
    for h in range(3):
        medusa.tensors[f"{h}.1.weight"] = embedding
    head = reader.read(medusa.write(tmp_path / "c"), target.config)
    shared = share_with_target(head, target)
    assert not shared.own_output
    np.testing.assert_allclose(run(shared, target), run(head, target), atol=1e-5)


def test_a_quantised_targets_embeddings_are_its_own(tmp_path: Path) -> None:
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    source = checkpoints.hf_checkpoint(tmp_path / "hf", shape)
    full = sources.read(source)
    from edgespec_export import gguf_file

    gguf_file.write(full, "q8_0", tmp_path / "target.gguf")
    quantised = sources.read(tmp_path / "target.gguf")
    whole = tiny.eagle()
    whole.tensors["embed_tokens.weight"] = full.tensors["token_embd"].load_f32()
    head = reader.read(whole.write(tmp_path / "head"), quantised.config)
    assert "token_embd" not in share_with_target(head, quantised).tensors


@pytest.mark.parametrize("name", HEADS)
def test_smaller_vocabularies(tmp_path: Path, target: WeightSet, name: str) -> None:
    head = read(tmp_path, name, target)
    known = np.arange(head.draft_vocab) if head.d2t is None else head.d2t
    counts = np.random.default_rng(1).integers(0, 50, head.vocab)
    full = run(head, target)
    for given in (None, counts):
        ids = choose_ids(
            known_ids(head), head.vocab, 32, given, always=[int(known[-1])]
        )
        assert int(known[-1]) in ids
        assert (np.diff(ids) > 0).all()
        small = with_vocabulary(head, ids, target)
        assert small.draft_vocab == 32
        columns = np.searchsorted(known, ids)
        np.testing.assert_allclose(run(small, target), full[..., columns], atol=1e-5)
        path = tmp_path / "draft.gguf"
        head_gguf.write(small, path, target=target)
        again = reader.read(path, target.config)
        np.testing.assert_allclose(run(again, target), full[..., columns], atol=1e-5)
        np.testing.assert_array_equal(
            head_forward.target_ids(again, np.arange(32)), ids
        )


def test_which_ids(tmp_path: Path, target: WeightSet) -> None:
    head = read(tmp_path, "medusa", target)
    counts = np.zeros(320, np.int64)
    counts[[300, 5, 17]] = [9, 8, 8]
    assert choose_ids(known_ids(head), head.vocab, 2, counts).tolist() == [5, 300]
    assert choose_ids(known_ids(head), head.vocab, 2, counts, always=[2]).tolist() == [
        2,
        300,
    ]
    assert choose_ids(known_ids(head), head.vocab, 3).tolist() == [0, 1, 2]
    whole = choose_ids(known_ids(head), head.vocab, 320)
    assert with_vocabulary(head, whole, target) is head
    with pytest.raises(UsageError, match="expected 1 to 320"):
        choose_ids(known_ids(head), head.vocab, 321)
    with pytest.raises(UsageError, match="3 counts, the target has 320 tokens"):
        choose_ids(known_ids(head), head.vocab, 3, counts[:3])


def test_the_first_ids_cost_a_medusa_head_nothing(
    tmp_path: Path, target: WeightSet
) -> None:
    head = read(tmp_path, "medusa on the target's", target)
    small = with_vocabulary(head, choose_ids(known_ids(head), head.vocab, 100), target)
    assert small.tensors.keys() == head.tensors.keys()
    assert (small.draft_vocab, small.d2t) == (100, None)
    some = with_vocabulary(
        head, choose_ids(known_ids(head), head.vocab, 2, always=[3, 9]), target
    )
    assert some.tensors["output"].shape == (2, 64)
