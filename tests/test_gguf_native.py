"""GGUF reader of the C core: against gguf-py, and on split, odd or damaged files."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from tests.native_files import (
    ERR_ARGUMENT,
    ERR_FORMAT,
    ERR_IO,
    Gguf,
    NativeError,
)
from tests.test_pack import random_blocks

KIND = GGUFValueType


def metadata_only(*keys: tuple[str, GGUFValueType, object]) -> bytes:
    """A GGUF without tensors, packed by hand."""
    formats = "BbHhIif?xxQqd"
    out = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys))
    for key, kind, value in keys:
        name = key.encode()
        out += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)
        if kind == KIND.STRING:
            assert isinstance(value, bytes)
            out += struct.pack("<Q", len(value)) + value
        else:
            out += struct.pack("<" + formats[kind], value)
    return out


@pytest.fixture(scope="module")
def smollm2_reader(smollm2_gguf: Path) -> GGUFReader:
    return GGUFReader(smollm2_gguf)


@pytest.mark.parametrize("use_mmap", [True, False])
def test_smollm2_reads_as_in_gguf_py(
    smollm2_gguf: Path, smollm2_reader: GGUFReader, use_mmap: bool
) -> None:
    ours, theirs = Gguf(smollm2_gguf, use_mmap=use_mmap), smollm2_reader
    assert ours.size() == smollm2_gguf.stat().st_size
    assert len(ours.tensors()) == len(theirs.tensors)
    for mine, other in zip(ours.tensors(), theirs.tensors, strict=True):
        assert mine.name.decode() == other.name
        assert mine.type == other.tensor_type
        assert mine.offset == other.data_offset
        assert mine.n_bytes == other.n_bytes
        assert list(mine.dim[: mine.n_dims]) == other.shape.tolist()
        assert list(mine.dim[mine.n_dims :]) == [1] * (4 - mine.n_dims)
    last = theirs.tensors[-1]
    found = ours.find(last.name)
    assert found is not None
    assert ours.data(found) == last.data.tobytes()
    assert ours.find("nobody") is None
    architecture = theirs.fields["general.architecture"].contents()
    assert ours.str("general.architecture") == architecture.encode()
    for key in ("block_count", "embedding_length", "attention.head_count_kv"):
        want = theirs.fields[f"{architecture}.{key}"].contents()
        assert ours.u32(f"{architecture}.{key}") == want
    tokens = theirs.fields["tokenizer.ggml.tokens"].contents()
    assert ours.count("tokenizer.ggml.tokens") == len(tokens)
    for i in (0, 1, 63, 64, 65, 127, 128, 31444, len(tokens) - 1):
        assert ours.item_str("tokenizer.ggml.tokens", i) == tokens[i].encode()
    kinds = theirs.fields["tokenizer.ggml.token_type"].contents()
    assert ours.item_i64("tokenizer.ggml.token_type", 2) == kinds[2]


def test_integers_of_every_width_convert_when_they_fit() -> None:
    limits = {
        KIND.UINT8: (0, 255),
        KIND.INT8: (-128, 127),
        KIND.UINT16: (0, 2**16 - 1),
        KIND.INT16: (-(2**15), 2**15 - 1),
        KIND.UINT32: (0, 2**32 - 1),
        KIND.INT32: (-(2**31), 2**31 - 1),
        KIND.UINT64: (0, 2**64 - 1),
        KIND.INT64: (-(2**63), 2**63 - 1),
    }
    for kind, (low, high) in limits.items():
        for value in (low, high, 0, 1, 77):
            file = Gguf(metadata_only(("k", kind, value)))
            if 0 <= value < 2**32:
                assert file.u32("k") == value
                continue
            with pytest.raises(NativeError, match="'k'") as caught:
                file.u32("k")
            assert caught.value.status == ERR_FORMAT
            assert str(value) in str(caught.value)


def test_floats_bools_and_strings() -> None:
    file = Gguf(
        metadata_only(
            ("f32", KIND.FLOAT32, 0.1),
            ("f64", KIND.FLOAT64, 0.1),
            ("big", KIND.FLOAT64, 1e300),
            ("infinite", KIND.FLOAT64, -math.inf),
            ("yes", KIND.BOOL, True),
            ("no", KIND.BOOL, False),
            ("text", KIND.STRING, b"\xff\x00 any bytes"),
            ("empty", KIND.STRING, b""),
        )
    )
    assert file.f32("f32") == file.f32("f64") == np.float32(0.1)
    assert file.f32("infinite") == -math.inf
    with pytest.raises(NativeError, match="'big' has 1e\\+300"):
        file.f32("big")
    assert file.bool("yes") is True
    assert file.bool("no") is False
    assert file.str("text") == b"\xff\x00 any bytes"
    assert file.str("empty") == b""


def test_an_absent_key_and_one_of_another_kind() -> None:
    file = Gguf(metadata_only(("k", KIND.STRING, b"x"), ("n", KIND.UINT8, 1)))
    for read in (file.u32, file.f32, file.bool, file.str, file.count):
        assert read("absent") is None
    with pytest.raises(NativeError, match="'absent' is missing") as caught:
        file.required_u32("absent")
    assert caught.value.status == ERR_FORMAT
    for read, key, want in (
        *((file.u32, "k", "an integer"), (file.f32, "n", "a float")),
        *((file.bool, "n", "a bool"), (file.str, "n", "a string")),
        (file.count, "n", "an array"),
    ):
        with pytest.raises(NativeError, match=f"'{key}' is .*, expected {want}"):
            read(key)


def test_arrays(tmp_path: Path) -> None:
    words = [f"{'é' * (i % 7)}{i}" for i in range(1000)]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("words", words)
    writer.add_array("numbers", list(range(-5, 300)))
    writer.add_array("floats", [0.5, -2.25])
    writer.add_array("truths", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = Gguf(tmp_path / "a.gguf")
    assert file.count("words") == 1000
    assert [file.item_str("words", i).decode() for i in range(1000)] == words
    assert [file.item_i64("numbers", i) for i in range(305)] == list(range(-5, 300))
    assert [file.item_f32("floats", i) for i in range(2)] == [0.5, -2.25]
    for key, n in (("words", 1000), ("numbers", 305)):
        with pytest.raises(NativeError, match=f"'{key}' has {n} items") as caught:
            file.item_i64(key, n)
        assert caught.value.status == ERR_ARGUMENT
    for read, key in (
        *((file.item_i64, "words"), (file.item_i64, "truths")),
        *((file.item_f32, "numbers"), (file.item_str, "floats")),
        (file.item_i64, "general.architecture"),
    ):
        with pytest.raises(NativeError, match=f"'{key}' is ") as caught:
            read(key, 0)
        assert caught.value.status == ERR_FORMAT


def test_versions(tmp_path: Path) -> None:
    raw = bytearray(metadata_only(("k", KIND.UINT8, 9)))
    for version, ok in ((1, False), (2, True), (3, True), (4, False)):
        raw[4:8] = struct.pack("<I", version)
        if ok:
            assert Gguf(bytes(raw)).u32("k") == 9
        else:
            with pytest.raises(NativeError, match=f"version {version}, expected 2 or"):
                Gguf(bytes(raw))
    raw[4:8] = struct.pack(">I", 3)
    with pytest.raises(NativeError, match="big-endian"):
        Gguf(bytes(raw))
    (tmp_path / "x.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(NativeError, match="not a GGUF.*'version https://'"):
        Gguf(tmp_path / "x.gguf")


def write_model(path: Path, **options: object) -> None:
    writer = gguf.GGUFWriter(path, "llama", **options)  # type: ignore[arg-type]
    writer.add_uint32("llama.block_count", 2)
    for i, name in enumerate(["Q4_0", "Q8_0", "Q6_K", "Q5_1", "IQ4_NL"]):
        blocks = random_blocks(name, 3, 256, seed=i)
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[name])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    write_model(path)
    return path


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    write_model(tmp_path / "m.gguf", split_max_tensors=2)
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert paths[0].name == "m-00001-of-00003.gguf"
    return paths


@pytest.mark.parametrize("use_mmap", [True, False])
def test_a_split_model_opens_as_one(
    whole: Path, split: list[Path], use_mmap: bool
) -> None:
    one, many = Gguf(whole), Gguf(split[0], use_mmap=use_mmap)
    assert many.size() == sum(p.stat().st_size for p in split)
    assert many.u32("llama.block_count") == 2
    assert {t.part for t in many.tensors()} == {0, 1, 2}
    names = [t.name for t in one.tensors()]
    assert [t.name for t in many.tensors()] == names
    for tensor in one.tensors():
        other = many.find(tensor.name.decode())
        assert other is not None
        assert many.data(other) == one.data(tensor)


def test_parts_of_a_split_model_that_do_not_fit(split: list[Path]) -> None:
    with pytest.raises(NativeError, match="one of 3 files.*-00001-of-00003") as caught:
        Gguf(split[1])
    assert caught.value.status == ERR_FORMAT
    renamed = split[0].with_name("model.gguf")
    renamed.write_bytes(split[0].read_bytes())
    with pytest.raises(NativeError, match="one of 3 files of a split model"):
        Gguf(renamed)
    last = split[2].read_bytes()
    split[2].write_bytes(split[1].read_bytes())
    with pytest.raises(NativeError, match="itself file 2 of 3, expected file 3 of 3"):
        Gguf(split[0])
    split[2].write_bytes(last[:-100])
    with pytest.raises(NativeError, match="00003-of-00003.*past the end") as caught:
        Gguf(split[0])
    assert caught.value.status == ERR_FORMAT
    split[2].unlink()
    with pytest.raises(NativeError, match="00003-of-00003.*cannot be opened") as caught:
        Gguf(split[0])
    assert caught.value.status == ERR_IO


def test_a_tensor_in_two_parts_and_a_wrong_total(split: list[Path]) -> None:
    raw = split[1].read_bytes()
    split[1].write_bytes(raw.replace(b"Q6_K", b"Q4_0"))
    with pytest.raises(NativeError, match="tensor 'Q4_0' is in two of the files"):
        Gguf(split[0])
    split[1].write_bytes(raw)
    first = split[0].read_bytes()
    key = b"split.tensors.count"
    at = first.index(key) + len(key) + 4
    split[0].write_bytes(first[:at] + struct.pack("<i", 6) + first[at + 4 :])
    with pytest.raises(NativeError, match="is 6, the files have 5 tensors"):
        Gguf(split[0])


def test_dropped_pages_of_a_mapped_file_come_back(smollm2_gguf: Path) -> None:
    file = Gguf(smollm2_gguf)
    biggest = max(file.tensors(), key=lambda t: t.n_bytes)
    before = file.data(biggest)
    held = resident()
    file.drop(biggest)
    assert held - resident() > biggest.n_bytes // 2
    assert file.data(biggest) == before


def test_dropped_pages_of_a_read_file_leave_the_neighbours_alone(
    smollm2_gguf: Path,
) -> None:
    mapped, file = Gguf(smollm2_gguf), Gguf(smollm2_gguf, use_mmap=False)
    held = resident()
    dropped = {t.name for t in file.tensors() if t.n_dims == 2}
    for tensor in file.tensors():
        if tensor.name in dropped:
            file.drop(tensor)
    assert held - resident() > file.size() // 2
    for tensor in file.tensors():
        if tensor.name not in dropped:
            assert file.data(tensor) == mapped.data(tensor)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("use_mmap", [True, False])
def test_c37_a_model_cut_short_is_refused(
    whole: Path, tmp_path: Path, use_mmap: bool
) -> None:
    raw, path = whole.read_bytes(), tmp_path / "cut.gguf"
    edges = {
        edge + by
        for t in GGUFReader(whole).tensors
        for edge in (t.data_offset, t.data_offset + t.n_bytes)
        for by in (-1, 0, 1)
    }
    last = GGUFReader(whole).tensors[-1]
    end = last.data_offset + last.n_bytes
    for n in sorted(e for e in edges | {0, 37, 1024} if e < end):
        path.write_bytes(raw[:n])
        with pytest.raises(NativeError, match=r"cut\.gguf: ") as caught:
            Gguf(path, use_mmap=use_mmap)
        assert caught.value.status == ERR_FORMAT


def test_files_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, status in (("pipe", ERR_IO), (".", ERR_IO), ("none", ERR_IO)):
        with pytest.raises(NativeError) as caught:
            Gguf(tmp_path / name)
        assert caught.value.status == status
        assert str(tmp_path) in str(caught.value)
    with pytest.raises(NativeError, match=r"not a GGUF.*\(0 bytes\)"):
        Gguf(tmp_path / "empty")


def test_a_long_path_does_not_push_the_reason_out(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    (deep / "short.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 16)
    with pytest.raises(NativeError, match=r"short\.gguf: header, at byte 8: number"):
        Gguf(deep / "short.gguf")
