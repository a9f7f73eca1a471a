"""The container of packed weights: what it keeps, and what it refuses."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from tests.native_files import (
    ERR_ARGUMENT,
    ERR_FORMAT,
    ERR_IO,
    CPacked,
    Gguf,
    NativeError,
    block_floats,
    pack,
    packed_row,
)
from tests.test_blocks import READ, same_bits
from tests.test_pack import random_blocks

ROWS, COLS = 35, 256


def write_source(path: Path, names: tuple[str, ...] = tuple(READ)) -> None:
    """A matrix of every type, two small float tensors, metadata of every kind."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "", "z" * 300] * 40)
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "packed\x00name")
    writer.add_custom_alignment(128)
    for name in names:
        blocks = random_blocks(name, ROWS, COLS)
        kind = GGMLQuantizationType[name]
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    writer.add_tensor("norm.weight", np.arange(7, dtype=np.float32))
    writer.add_tensor("cube", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def packed_matrices(source: Gguf, keep: list[np.ndarray]) -> dict[str, CPacked]:
    matrices = {}
    for tensor in source.tensors():
        if tensor.n_dims == 2:
            cols, rows = tensor.dim[0], tensor.dim[1]
            blocks = np.frombuffer(source.data(tensor), np.uint8).reshape(rows, -1)
            tiles = pack(tensor.type, blocks, cols)
            keep.append(tiles)
            matrices[tensor.name.decode()] = CPacked(
                tensor.type, rows, cols, tiles.shape[1], tiles.ctypes.data
            )
    return matrices


def save(source: Gguf, path: Path) -> None:
    keep: list[np.ndarray] = []
    source.save_packed(packed_matrices(source, keep), path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "source.gguf"
    write_source(path)
    return path


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    path = source.with_name("target.packed.gguf")
    save(Gguf(source), path)
    return path


@pytest.mark.parametrize("use_mmap", [True, False])
def test_every_value_comes_back(source: Path, packed: Path, use_mmap: bool) -> None:
    first, second = Gguf(source), Gguf(packed, use_mmap=use_mmap)
    assert not first.is_packed()
    assert second.is_packed()
    for tensor in first.tensors():
        name = tensor.name.decode()
        tiles = second.packed(name)
        assert first.packed(name) is None
        if tensor.n_dims != 2:
            assert tiles is None
            copy = second.find(name)
            assert copy is not None
            assert list(copy.dim) == list(tensor.dim)
            assert second.data(copy) == first.data(tensor)
            continue
        assert tiles is not None
        assert (tiles.rows, tiles.cols, tiles.type) == (ROWS, COLS, tensor.type)
        assert tiles.data % 64 == 0
        n_tiles = -(-ROWS // 16)
        data = np.frombuffer(second.data(second.find(name)), np.uint8)
        blocks = np.frombuffer(first.data(tensor), np.uint8).reshape(ROWS, -1)
        for row in (0, 17, ROWS - 1):
            got = packed_row(tiles.type, data.reshape(n_tiles, -1), ROWS, COLS, row)
            assert same_bits(got, block_floats(tensor.type, blocks[row], COLS))
    assert second.packed("nobody") is None


def test_metadata_is_kept_byte_for_byte(source: Path, packed: Path) -> None:
    before = [k for k in Gguf(source).entries() if k[0] != b"general.alignment"]
    after = Gguf(packed).entries()
    assert after[: len(before)] == before
    assert {name for name, _ in after[len(before) :]} == {
        b"general.alignment",
        *(b"edgespec.packed." + k for k in (b"version", b"names", b"types")),
        *(b"edgespec.packed." + k for k in (b"rows", b"cols")),
    }


def test_gguf_py_opens_it(source: Path, packed: Path) -> None:
    reader = GGUFReader(packed)
    assert reader.fields["general.alignment"].contents() == 64
    assert reader.fields["edgespec.packed.version"].contents() == 1
    names = reader.fields["edgespec.packed.names"].contents()
    types = reader.fields["edgespec.packed.types"].contents()
    assert names == [t.name for t in reader.tensors]
    assert [t.name for t in GGUFReader(source).tensors] == names
    for tensor, kind in zip(reader.tensors, types, strict=True):
        assert tensor.data_offset % 64 == 0
        if kind >= 0:
            assert tensor.tensor_type == GGMLQuantizationType.I8
            assert tensor.shape.tolist() == [tensor.n_bytes]


def test_a_packed_source_is_saved_again_unchanged(packed: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    Gguf(packed).save_packed({}, again)
    assert again.read_bytes() == packed.read_bytes()


def test_saving_over_the_mapped_source_is_safe(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "same.gguf"
    path.write_bytes(source.read_bytes())
    mapped = Gguf(path)
    save(mapped, path)
    assert not mapped.is_packed()
    assert Gguf(path).is_packed()
    assert os.listdir(tmp_path) == ["same.gguf"]


def test_a_matrix_that_is_not_there_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="'nobody'") as caught:
        Gguf(source).save_packed({"nobody": CPacked()}, tmp_path / "x.gguf")
    assert caught.value.status == ERR_ARGUMENT
    assert not os.listdir(tmp_path)


FULL = """
import resource, sys
from pathlib import Path
from tests.native_files import Gguf, NativeError
from tests.test_packed_file import save
source, target = Gguf(Path(sys.argv[1])), Path(sys.argv[2])
for limit in map(int, sys.argv[3:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save(source, target)
    except NativeError as error:
        print(limit, error.status, error, len(list(target.parent.iterdir())))
"""


def test_c37_a_full_disk_leaves_nothing_behind(
    source: Path, packed: Path, tmp_path: Path
) -> None:
    """A limit on the size of files fails writes as a full disk does."""
    size = packed.stat().st_size
    target = tmp_path / "target.packed.gguf"
    limits = [0, 1000, size // 2, size - 1]
    run = subprocess.run(
        [sys.executable, "-c", FULL, source, target, *map(str, limits)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    lines = run.stdout.splitlines()
    assert lines == [
        f"{limit} {ERR_IO} {target}: cannot be written: File too large 0"
        for limit in limits
    ]


def test_places_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for target in (tmp_path / "none" / "x.gguf", tmp_path / "directory"):
        with pytest.raises(NativeError, match="cannot be written") as caught:
            save(Gguf(source), target)
        assert caught.value.status == ERR_IO
        assert str(target) in str(caught.value)
    assert os.listdir(tmp_path) == ["directory"]


def value_offset(raw: bytes, key: bytes) -> int:
    """Where the value of a key begins."""
    entry = struct.pack("<Q", len(key)) + key
    assert raw.count(entry) == 1
    return raw.index(entry) + len(entry) + 4


def test_another_version_asks_for_the_file_anew(packed: Path) -> None:
    raw = bytearray(packed.read_bytes())
    at = value_offset(raw, b"edgespec.packed.version")
    raw[at : at + 4] = struct.pack("<I", 2)
    changed = Gguf(bytes(raw))
    for call in (changed.is_packed, lambda: changed.packed("Q4_0.weight")):
        with pytest.raises(
            NativeError, match="version 2.*make the file again"
        ) as caught:
            call()
        assert caught.value.status == ERR_FORMAT


def _aligned(raw: bytes, path: Path) -> Gguf:
    path.write_bytes(raw)
    return Gguf(path)


def tiles_fit(file: Gguf, name: str) -> int | None:
    """Bytes of the tiles of a tensor; None where it is refused."""
    try:
        tiles = file.packed(name)
    except NativeError:
        return None
    assert tiles is not None
    return -(-tiles.rows // 16) * tiles.tile_bytes


@pytest.mark.parametrize("key", ["types", "rows", "cols"])
def test_c37_hostile_numbers_in_a_packed_file(
    packed: Path, tmp_path: Path, key: str
) -> None:
    """Every entry of the arrays, set to values that would read past the tensor."""
    raw = packed.read_bytes()
    first = value_offset(raw, b"edgespec.packed." + key.encode()) + 12
    reader = Gguf(packed)
    tensors = reader.tensors()
    wrong = [-2, 0, 1, 31, 2**31 - 1, -(2**31), ROWS + 16, COLS * 2, 9, 24]
    for i, tensor in enumerate(tensors):
        was = struct.unpack_from("<i", raw, first + 4 * i)[0]
        tiles = reader.packed(tensor.name.decode())
        for value in wrong:
            changed = bytearray(raw)
            struct.pack_into("<i", changed, first + 4 * i, value)
            file = _aligned(bytes(changed), tmp_path / "changed.gguf")
            if value == was or (tiles is None and key != "types"):
                assert file.is_packed()
                continue
            name = tensor.name.decode()
            fits = tiles_fit(file, name)
            if fits is None:
                with pytest.raises(NativeError, match=name) as caught:
                    file.is_packed()
                assert caught.value.status == ERR_FORMAT
            else:  # another reading of the same number of bytes
                assert fits == tensor.n_bytes


def test_arrays_of_another_length_are_refused(packed: Path, tmp_path: Path) -> None:
    arrays: dict[str, list] = {"names": ["norm.weight"], "types": [-1]}
    arrays |= {"rows": [0], "cols": [0]}
    for key in arrays:
        writer = gguf.GGUFWriter(tmp_path / "short.gguf", "llama")
        writer.add_uint32("edgespec.packed.version", 1)
        for other, items in arrays.items():
            times = 2 if other == key else 1
            writer.add_array(f"edgespec.packed.{other}", items * times)
        writer.add_tensor("norm.weight", np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(NativeError, match=f"{key}' has 2 items") as caught:
            Gguf(tmp_path / "short.gguf").is_packed()
        assert caught.value.status == ERR_FORMAT


def test_a_reordered_file_is_refused(packed: Path, tmp_path: Path) -> None:
    raw = packed.read_bytes()
    start = value_offset(raw, b"edgespec.packed.names")
    at = raw.index(b"Q4_0.weight", start)
    changed = raw[:at] + b"Q4_9.weight" + raw[at + 11 :]
    with pytest.raises(NativeError, match=r"another name for tensor 'Q4_0\.weight'"):
        _aligned(changed, tmp_path / "x.gguf").is_packed()


def test_c37_a_packed_file_cut_anywhere_is_refused(packed: Path) -> None:
    raw = packed.read_bytes()
    edges = {
        edge + by
        for t in GGUFReader(packed).tensors
        for edge in (t.data_offset, t.data_offset + t.n_bytes)
        for by in (-1, 0, 1)
    }
    last = max(t.data_offset + t.n_bytes for t in GGUFReader(packed).tensors)
    for n in sorted(e for e in edges | {0, 37, 1024} if e < last):
        with pytest.raises(NativeError) as caught:
            Gguf(raw[:n])
        assert caught.value.status == ERR_FORMAT
        assert "bytes.gguf" in str(caught.value)


def test_metadata_of_another_kind_is_refused(packed: Path) -> None:
    raw = packed.read_bytes()
    for key in (b"version", b"types", b"rows", b"cols"):
        # The type of the value, of an array that of its items: as wide, but floats.
        at = value_offset(raw, b"edgespec.packed." + key) - 4 * (key == b"version")
        changed = bytearray(raw)
        struct.pack_into("<I", changed, at, GGUFValueType.FLOAT32)
        with pytest.raises(NativeError, match=key.decode()) as caught:
            Gguf(bytes(changed)).is_packed()
        assert caught.value.status == ERR_FORMAT


def test_a_split_source_becomes_one_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(
        tmp_path / "m.gguf", "llama", split_max_tensors=4, small_first_shard=True
    )
    for name in READ[:6]:
        blocks = random_blocks(name, ROWS, COLS)
        writer.add_tensor(
            f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType[name]
        )
    writer.write_header_to_file(tmp_path / "m.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = sorted(tmp_path.glob("m-*.gguf"))[0]
    save(Gguf(first), tmp_path / "one.gguf")
    one = Gguf(tmp_path / "one.gguf")
    assert one.is_packed()
    assert len(one.tensors()) == 6
    assert not [name for name, _ in one.entries() if name.startswith(b"split.")]
