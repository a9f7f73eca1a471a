"""Writing GGUF: bit for bit where nothing changes, and llama.cpp is the judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf as library
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError, UsageError
from edgespec.gguf_header import open_gguf
from edgespec_export import gguf_file
from edgespec_export.sources import gguf, hf
from tests.export import checkpoints, llama

IDS = np.random.default_rng(5).integers(3, 320, 60).tolist()
OURS = {"edgespec.format_version", "edgespec.eos_token_ids"}


def _reference(
    path: Path, ids: Sequence[int], written: Path | None = None
) -> NDArray[np.float32]:
    """Logits of transformers, with the weights of a GGUF file when one is given."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    if written is not None:
        tensors = gguf.read(written).tensors
        for name, parameter in model.named_parameters():
            neutral = checkpoints.gguf_name(name).removesuffix(".weight")
            parameter.data = torch.from_numpy(tensors[neutral].load_f32().copy())
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].numpy()


def _same_tensors_and_metadata(before: Path, after: Path) -> None:
    old, new = open_gguf(before), open_gguf(after)
    assert [t.name for t in old.tensors] == [t.name for t in new.tensors]
    for a, b in zip(old.tensors, new.tensors, strict=True):
        assert (a.shape, a.kind) == (b.shape, b.kind)
        assert old.raw(a).tobytes() == new.raw(b).tobytes()
    assert set(new.metadata) - set(old.metadata) == OURS
    for key, value in old.metadata.items():
        assert new.metadata[key] == value
        assert new.metadata.types[key] == old.metadata.types[key]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_a_gguf_source_comes_out_bit_for_bit(kind: str, tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8).astype(np.float32)
    extra = {"general.description": "größe", "general.file_type": 1234}
    before = checkpoints.gguf_checkpoint(
        tmp_path / "a.gguf", kind=kind, rope_freqs=factors, extra=extra
    )
    gguf_file.write(gguf.read(before), None, tmp_path / "b.gguf")
    _same_tensors_and_metadata(before, tmp_path / "b.gguf")
    # And a second round adds nothing more.
    gguf_file.write(gguf.read(tmp_path / "b.gguf"), None, tmp_path / "c.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


def test_smollm2_comes_out_bit_for_bit(smollm2_gguf: Path, tmp_path: Path) -> None:
    report = gguf_file.write(gguf.read(smollm2_gguf), None, tmp_path / "b.gguf")
    _same_tensors_and_metadata(smollm2_gguf, tmp_path / "b.gguf")
    assert report.kinds["token_embd"] == "Q8_0"
    assert report.n_bytes == (tmp_path / "b.gguf").stat().st_size


def test_odd_metadata_survive(tmp_path: Path) -> None:
    made = gguf.read(checkpoints.gguf_checkpoint(tmp_path / "a.gguf"))
    metadata = made.gguf_metadata
    value = library.GGUFValueType
    metadata.put("x.empty", [], value.ARRAY, value.STRING)
    metadata.put("x.text", "", value.STRING)
    metadata.put("x.tiny", -5, value.INT8)
    metadata.put("x.wide", 2**63 + 1, value.UINT64)
    metadata.put("x.float", float(np.float32(0.1)), value.FLOAT32)
    metadata.put("x.flags", [True, False], value.ARRAY, value.BOOL)
    metadata.put("general.alignment", 64, value.UINT32)
    gguf_file.write(made, None, tmp_path / "b.gguf")
    back = open_gguf(tmp_path / "b.gguf")
    for key, kept in metadata.items():
        assert (back.metadata[key], back.metadata.types[key]) == (
            kept,
            metadata.types[key],
        )
    assert all(t.offset % 64 == 0 for t in back.tensors)


def test_shards_are_written_as_one_file(tmp_path: Path) -> None:
    first = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", n_shards=2)
    gguf_file.write(gguf.read(first), None, tmp_path / "b.gguf")
    whole = gguf.read(tmp_path / "b.gguf")
    assert not any(key.startswith("split.") for key in whole.gguf_metadata)
    assert len(whole.tensors) == 20
    assert llama.logits(tmp_path / "b.gguf", IDS).std() > 1


@pytest.mark.parametrize("rope", ["default", "llama3"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_llamacpp_gives_the_logits_of_transformers(
    n_kv_heads: int, is_tied: bool, rope: str, tmp_path: Path
) -> None:
    shape = checkpoints.Shape(n_kv_heads=n_kv_heads, is_tied=is_tied)
    path = checkpoints.hf_checkpoint(tmp_path / "hf", shape, rope=rope)
    expected = _reference(path, IDS)
    assert expected.std() > 1
    gguf_file.write(hf.read(path), "f32", tmp_path / "a.gguf")
    got = llama.logits(tmp_path / "a.gguf", IDS)
    assert np.abs(got - expected).max() < 1e-4 * expected.std()
    # llama.cpp rounds activations to float16 in front of float16 matrices.
    gguf_file.write(hf.read(path), "f16", tmp_path / "a.gguf")
    got = llama.logits(tmp_path / "a.gguf", IDS)
    assert _rms(got - expected) < 2e-3 * expected.std()


def _rms(x: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(x**2)))


@pytest.mark.parametrize("change", ["swap q and k", "norms", "no permutation"])
def test_the_comparison_notices_mistakes(change: str, tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf", checkpoints.Shape(n_kv_heads=4))
    expected = _reference(path, IDS)
    made = hf.read(path)
    tensors = dict(made.tensors)
    pairs = {
        "swap q and k": ("attn_q", "attn_k"),
        "norms": ("attn_norm", "ffn_norm"),
    }
    if change in pairs:
        a, b = (f"blk.1.{name}" for name in pairs[change])
        raw = tensors[a].load_raw, tensors[b].load_raw
        object.__setattr__(tensors[a], "load_raw", raw[1])
        object.__setattr__(tensors[b], "load_raw", raw[0])
    else:
        q = tensors["blk.0.attn_q"]
        turned = gguf.half_split(q.load_raw(), 4)
        object.__setattr__(q, "load_raw", lambda: turned)
    gguf_file.write(made, "f32", tmp_path / "a.gguf")
    got = llama.logits(tmp_path / "a.gguf", IDS)
    assert np.abs(got - expected).max() > 0.1 * expected.std()


@pytest.mark.parametrize("quant", ["q4_0", "q4_1", "q8_0"])
def test_quantised_files_load_and_hold_what_the_report_says(
    quant: str, tmp_path: Path
) -> None:
    shape = checkpoints.Shape(is_tied=False)
    path = checkpoints.hf_checkpoint(tmp_path / "hf", shape, dtype="BF16")
    report = gguf_file.write(hf.read(path), quant, tmp_path / "a.gguf")
    stored = open_gguf(tmp_path / "a.gguf")
    assert {t.name.removesuffix(".weight"): t.kind for t in stored.tensors} == (
        report.kinds
    )
    assert report.kinds["blk.0.ffn_down"] == quant.upper()
    assert report.kinds["output"] == "Q8_0"
    assert report.kinds["blk.0.attn_norm"] == "F32"
    # What is left is llama.cpp's rounding of activations to 8 bits.
    expected = _reference(path, IDS, written=tmp_path / "a.gguf")
    got = llama.logits(tmp_path / "a.gguf", IDS)
    assert _rms(got - expected) < 0.05 * expected.std()


def test_without_a_quant_half_precision_stays(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf", dtype="BF16")
    gguf_file.write(hf.read(path), None, tmp_path / "a.gguf")
    back = gguf.read(tmp_path / "a.gguf")
    for name, tensor in hf.read(path).tensors.items():
        assert back.tensors[name].kind == ("F32" if "norm" in name else "BF16")
        np.testing.assert_array_equal(back.tensors[name].load_f32(), tensor.load_f32())
    expected, got = _reference(path, IDS), llama.logits(tmp_path / "a.gguf", IDS)
    assert _rms(got - expected) < 2e-2 * expected.std()


def test_a_gguf_source_can_be_quantised_anew(tmp_path: Path) -> None:
    before = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", kind="F32")
    gguf_file.write(gguf.read(before), "q8_0", tmp_path / "b.gguf")
    after = gguf.read(tmp_path / "b.gguf")
    assert after.tensors["blk.1.attn_k"].kind == "Q8_0"
    assert after.gguf_metadata["general.file_type"] == 7
    expected = llama.logits(before, IDS)
    got = llama.logits(tmp_path / "b.gguf", IDS)
    assert _rms(got - expected) < 0.06 * expected.std()


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    gguf_file.write(hf.read(path), "q8_0", tmp_path / "a.gguf")
    names = [t.name for t in open_gguf(tmp_path / "a.gguf").tensors]
    assert names.count("token_embd.weight") == 1
    assert "output.weight" not in names


def test_settings_survive_the_way_through_gguf(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf", eos=[2, 0, 9])
    (path / "README.md").write_text("---\nlicense: mit\n---\n")
    before = hf.read(path)
    gguf_file.write(before, "f16", tmp_path / "a.gguf")
    after = gguf.read(tmp_path / "a.gguf")
    assert after.eos_ids == before.eos_ids == (2, 0, 9)
    assert after.temperature == pytest.approx(0.6)
    same = ("bos_id", "add_bos", "chat_template", "name", "top_p")
    assert all(getattr(after, key) == getattr(before, key) for key in same)
    assert after.origin.licence == "mit"
    a, b = before.config, after.config
    same = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab")
    assert all(getattr(a, key) == getattr(b, key) for key in same)


def test_rows_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    shape = checkpoints.Shape(ffn=100)
    made = hf.read(checkpoints.hf_checkpoint(tmp_path / "hf", shape))
    with pytest.raises(UnsupportedError, match=r"ffn_down.*rows of 100.*blocks of 32"):
        gguf_file.write(made, "q8_0", tmp_path / "a.gguf")
    assert not list(tmp_path.glob("*.gguf"))
    gguf_file.write(made, "f16", tmp_path / "a.gguf")
    assert llama.logits(tmp_path / "a.gguf", IDS).std() > 1


def test_unknown_quant_is_a_usage_error(tmp_path: Path) -> None:
    made = gguf.read(checkpoints.gguf_checkpoint(tmp_path / "a.gguf"))
    with pytest.raises(UsageError, match="q3_x"):
        gguf_file.write(made, "q3_x", tmp_path / "b.gguf")


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    made = gguf.read(checkpoints.gguf_checkpoint(tmp_path / "a.gguf"))
    target = tmp_path / "b.gguf"
    target.write_bytes(b"old")

    def stop(name: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gguf_file.write(made, None, target, progress=stop)
    assert target.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    made = gguf.read(checkpoints.gguf_checkpoint(tmp_path / "a.gguf"))
    seen: list[tuple[str, int, int]] = []
    gguf_file.write(
        made, None, tmp_path / "b.gguf", progress=lambda *step: seen.append(step)
    )
    assert [name for name, _, _ in seen] == list(made.tensors)
    assert seen[-1][1] == seen[-1][2] > 0
