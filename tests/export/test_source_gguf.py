"""Reading GGUF: neutral weights, and every way a file can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest

from edgespec.errors import FormatError, ModelNotFoundError, UnsupportedError
from edgespec.gguf_header import open_gguf
from edgespec_export import sources
from edgespec_export.sources import gguf
from tests.export import checkpoints


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.gguf_checkpoint(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_reads_configuration_tokens_and_terms(tiny: Path) -> None:
    made = sources.read(tiny)
    config = made.config
    assert (config.n_layers, config.hidden, config.n_heads) == (2, 64, 4)
    assert (config.n_kv_heads, config.head_dim, config.ffn) == (2, 16, 96)
    assert (config.vocab, config.max_position, config.is_tied) == (320, 512, True)
    assert config.rms_eps == pytest.approx(1e-5)
    assert (made.bos_id, made.eos_ids, made.add_bos) == (1, (2,), False)
    assert made.chat_template == checkpoints.CHAT_TEMPLATE
    assert (made.name, made.origin.licence) == ("Tiny", "apache-2.0")
    assert made.origin.sha256 is not None
    assert made.gguf_metadata is not None


def test_rows_of_q_and_k_come_out_half_split_and_blocks_unchanged(
    tmp_path: Path,
) -> None:
    exact = gguf.read(
        checkpoints.gguf_checkpoint(tmp_path / "a.gguf", kind="F32", embedding=None)
    )
    for hf, value in checkpoints.weights().items():
        name = checkpoints.gguf_name(hf).removesuffix(".weight")
        np.testing.assert_array_equal(exact.tensors[name].load_f32(), value)
    quantised = gguf.read(checkpoints.gguf_checkpoint(tmp_path / "b.gguf", kind="Q4_1"))
    q = quantised.tensors["blk.0.attn_q"]
    plain = checkpoints.weights()["model.layers.0.self_attn.q_proj.weight"]
    expected = library.quants.quantize(plain, library.GGMLQuantizationType.Q4_1)
    assert (q.kind, q.shape) == ("Q4_1", (64, 64))
    np.testing.assert_array_equal(q.load_raw(), expected)


def test_shards_are_found_by_name_and_equal_the_whole(
    tmp_path: Path, tiny: Path
) -> None:
    first = checkpoints.gguf_checkpoint(tmp_path / "tiny.gguf", n_shards=3)
    assert first.name == "tiny-00001-of-00003.gguf"
    whole, parts = gguf.read(tiny), gguf.read(first)
    assert set(whole.tensors) == set(parts.tensors)
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(
            tensor.load_raw(), parts.tensors[name].load_raw(), strict=True
        )
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match="00002-of-00003"):
        gguf.read(first)


def test_a_shard_under_a_name_of_its_own_is_refused(tmp_path: Path) -> None:
    first = checkpoints.gguf_checkpoint(tmp_path / "tiny.gguf", n_shards=2)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(FormatError, match="2 shards"):
        gguf.read(alone)


def test_shards_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    first = checkpoints.gguf_checkpoint(tmp_path / "tiny.gguf", n_shards=3)
    second, third = (tmp_path / f"tiny-0000{k}-of-00003.gguf" for k in (2, 3))
    kept = second.read_bytes()
    third.rename(second)
    third.write_bytes(kept)
    with pytest.raises(FormatError, match=r"split\.no"):
        gguf.read(first)


def test_header_equals_what_gguf_py_reads(tiny: Path) -> None:
    _equals_gguf_py(tiny)


def test_header_of_smollm2_equals_what_gguf_py_reads(smollm2_gguf: Path) -> None:
    _equals_gguf_py(smollm2_gguf)


def _equals_gguf_py(path: Path) -> None:
    ours, theirs = open_gguf(path), library.GGUFReader(path)
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        assert ours.metadata[key] == field.contents()
        types = [t for t in ours.metadata.types[key] if t is not None]
        assert types == field.types
    assert [t.name for t in ours.tensors] == [t.name for t in theirs.tensors]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.shape == tuple(reversed(other.shape.tolist()))
        assert mine.kind == other.tensor_type.name
        assert ours.raw(mine).tobytes() == other.data.tobytes()


def test_c37_every_truncation_is_a_format_error(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    header = open_gguf(tiny)
    edges = [t.offset for t in header.tensors]
    ends = [t.offset + t.n_bytes for t in header.tensors]
    start = edges[0]
    cuts = {0, 37, 1000, 1024, *range(1, 64), *range(64, start, 97)}
    cuts |= {edge + d for edge in edges + ends for d in (-1, 0, 1)}
    path = tmp_path / "cut.gguf"
    for cut in sorted(c for c in cuts if c < ends[-1]):
        path.write_bytes(whole[:cut])
        with pytest.raises(FormatError, match=r"cut\.gguf") as caught:
            gguf.read(path)
        if cut >= start:
            first = next(t for t in header.tensors if t.offset + t.n_bytes > cut)
            assert repr(first.name) in str(caught.value)
            assert f"offset {first.offset}" in str(caught.value)
    # The padding behind the last tensor may be missing.
    path.write_bytes(whole[: ends[-1]])
    assert len(gguf.read(path).tensors) == 20


@pytest.mark.parametrize("offset", [8, 16])
@pytest.mark.parametrize("count", [2**62, 2**64 - 1, 2**40])
def test_c37_absurd_counts_fail_without_allocating(
    tiny: Path, tmp_path: Path, offset: int, count: int
) -> None:
    raw = bytearray(tiny.read_bytes())
    raw[offset : offset + 8] = struct.pack("<Q", count)
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(
        FormatError, match=rf"{count} (tensor|metadata) entries at offset"
    ):
        gguf.read(path)


def test_c37_absurd_lengths_inside_the_header_fail(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    end = open_gguf(tiny).tensors[0].offset
    path = tmp_path / "bad.gguf"
    for offset in range(0, end - 8, 41):
        raw = bytearray(whole)
        raw[offset : offset + 8] = struct.pack("<Q", 2**62 + 1)
        path.write_bytes(raw)
        try:
            gguf.read(path)
        except (FormatError, UnsupportedError):
            continue
        # Text and scores may change without breaking the format.
        assert open_gguf(path).tensors == open_gguf(tiny).tensors


def _patched(source: Path, target: Path, old: bytes, new: bytes) -> Path:
    whole = source.read_bytes()
    assert whole.count(old) >= 1
    assert len(old) == len(new)
    target.write_bytes(whole.replace(old, new, 1))
    return target


def test_c37_zero_length_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    value = struct.pack("<IB", 7, 1)
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 0) + value + b"\0" * 64)
    with pytest.raises(FormatError, match="empty or oversized"):
        gguf.read(path)


def test_unknown_tensor_type_is_named(tiny: Path, tmp_path: Path) -> None:
    name = b"blk.0.attn_v.weight"
    dims = struct.pack("<IQQ", 2, 64, 32)
    kind = int(library.GGMLQuantizationType.Q4_1)
    bad = _patched(
        tiny,
        tmp_path / "a.gguf",
        name + dims + struct.pack("<I", kind),
        name + dims + struct.pack("<I", 999),
    )
    with pytest.raises(FormatError, match=r"blk\.0\.attn_v.*unknown ggml type 999"):
        gguf.read(bad)


def test_rows_that_do_not_divide_are_named(tiny: Path, tmp_path: Path) -> None:
    name = b"blk.0.attn_v.weight"
    bad = _patched(
        tiny,
        tmp_path / "a.gguf",
        name + struct.pack("<IQQ", 2, 64, 32),
        name + struct.pack("<IQQ", 2, 60, 32),
    )
    with pytest.raises(FormatError, match=r"blk\.0\.attn_v.*rows of 60.*blocks of 32"):
        gguf.read(bad)


def test_moved_tensor_is_refused(tiny: Path, tmp_path: Path) -> None:
    dims = struct.pack("<IQQI", 2, 64, 32, 3)
    whole = tiny.read_bytes()
    at = whole.index(b"blk.0.attn_v.weight" + dims) + 19 + len(dims)
    raw = bytearray(whole)
    raw[at : at + 8] = struct.pack("<Q", 32)
    (tmp_path / "a.gguf").write_bytes(raw)
    with pytest.raises(FormatError, match=r"blk\.0\.attn_v.*expected at data offset"):
        gguf.read(tmp_path / "a.gguf")


def test_wrong_shape_names_expected_and_got(tiny: Path, tmp_path: Path) -> None:
    name = b"blk.0.attn_v.weight"
    bad = _patched(
        tiny,
        tmp_path / "a.gguf",
        name + struct.pack("<IQQ", 2, 64, 32),
        name + struct.pack("<IQQ", 2, 32, 64),
    )
    with pytest.raises(FormatError, match=r"\(32, 64\), got \(64, 32\)"):
        gguf.read(bad)


def test_missing_and_unexpected_tensors_are_listed(tiny: Path, tmp_path: Path) -> None:
    bad = _patched(tiny, tmp_path / "a.gguf", b"blk.0.attn_v.w", b"blk.0.attn_x.w")
    with pytest.raises(
        FormatError, match=r"missing: blk\.0\.attn_v.*unexpected.*attn_x"
    ):
        gguf.read(bad)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGML", "not a GGUF file"),
        (b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "big-endian"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxama", "'lxama'"),
        (b"gpt2", b"bert", "'bert'"),
        (b"smollm", b"smellm", "'smellm'"),
        (b"llama.block_count", b"llama.block_cxunt", "block_cxunt"),
        (b"general.name", b"general.n\xffme", "UTF-8"),
    ],
)
def test_unknown_contents_are_named(
    tiny: Path, tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    bad = _patched(tiny, tmp_path / "a.gguf", old, new)
    with pytest.raises((FormatError, UnsupportedError), match=message):
        gguf.read(bad)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 4}, "mixture-of-experts"),
        ({"llama.attention.sliding_window": 64}, "sliding window 64"),
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale"),
        ({"llama.rope.dimension_count": 8}, "dimension_count 8"),
        ({"llama.vocab_size": 999}, "vocab_size 999"),
        ({"llama.block_count": 3}, r"missing: blk\.2"),
        ({"llama.block_count": 2**31}, "layers in 20 tensors"),
        ({"llama.attention.head_count_kv": 3}, "do not divide"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "5000 is no token"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_settings_that_change_the_model_are_refused(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    path = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", extra=extra)
    with pytest.raises((FormatError, UnsupportedError), match=message):
        gguf.read(path)


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**63, 1.5, float("nan"), "x", "", True, [], [1], ["a"], None],
    ids=repr,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_wrong_metadata_types_never_get_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, value: Any
) -> None:
    shape = checkpoints.family_shape(family)
    tiny = checkpoints.gguf_checkpoint(tmp_path / "tiny.gguf", shape)
    extra = ("expert_count", "attention.sliding_window", "rope.scaling.factor")
    extra += ("rope.scaling.yarn_beta_fast", "rope.scaling.type", "rope.scale_linear")
    extra += ("final_logit_softcapping",)
    keys = [*open_gguf(tiny).metadata, "edgespec.eos_token_ids", "general.alignment"]
    for key in [*keys, *(f"{family}.{key}" for key in extra)]:
        file = open_gguf(tiny)
        if key.startswith(f"{family}.rope"):
            kind = "yarn" if family == "llama" else "linear"
            file.metadata[f"{family}.rope.scaling.type"] = kind
        file.metadata[key] = value
        if value is None:
            del file.metadata[key]
        monkeypatch.setattr(gguf, "open_gguf", lambda path, file=file: file)
        try:
            made = gguf.read(tiny)
        except (FormatError, UnsupportedError) as error:
            message = str(error)
        else:
            assert np.isfinite(made.config.rope.inv_freq).all()
            continue
        assert "tiny.gguf" in message


def test_c22_every_end_token_counts(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eom_token_id": 7}
    made = gguf.read(checkpoints.gguf_checkpoint(tmp_path / "a.gguf", extra=extra))
    # 2 = <|im_end|>, which only the chat template says.
    assert made.eos_ids == (0, 7, 2)


def test_neither_file_nor_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nothing"):
        sources.read(tmp_path / "nothing.gguf")
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"\.gguf"):
        sources.read(tmp_path / "a.bin")
