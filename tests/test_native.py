"""The built C library as its users meet it: loading, symbols, header, alignment."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec import _native
from edgespec._native import library as binding
from edgespec._native.session import CRound
from edgespec.errors import NativeError
from edgespec.tree.topology import MAX_ROWS

HEADER = Path(__file__).parent.parent / "native" / "include" / "edgespec.h"


def declared() -> set[str]:
    """Names of the functions the header exports."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    return set(re.findall(r"ES_API[^;(]*?\b(es_\w+)\(", text))


def test_the_binding_covers_the_header_exactly() -> None:
    assert declared() == set(binding.FUNCTIONS)


def test_constants_equal_the_header() -> None:
    text = HEADER.read_text()
    found = dict(re.findall(r"#define (ES_(?:ABI|MAX_ROWS|VERSION)) (\S+)", text))
    assert int(found["ES_ABI"]) == _native.ABI
    assert int(found["ES_MAX_ROWS"]) == MAX_ROWS
    assert found["ES_VERSION"].strip('"') == _native.version()


def test_only_the_api_is_visible() -> None:
    library = ctypes.CDLL(str(_native.library_path()))
    assert all(hasattr(library, name) for name in declared())
    for internal in ("es_fail", "es_philox", "es_sample_row", "es_ngram_new"):
        assert not hasattr(library, internal)


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_compiles_alone(language: str) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run(
        [*compiler, "-x", language, "-Wall", "-Wextra", "-Werror", "-pedantic"]
        + (["-std=c11"] if language == "c" else ["-std=c++11"])
        + ["-fsyntax-only", str(HEADER)],
        check=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="ELF only")
def test_load_segments_fit_pages_of_16_kib() -> None:
    image = _native.library_path().read_bytes()
    assert image[:5] == b"\x7fELF\x02"
    (offset,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    aligns = []
    for i in range(count):
        kind, *_, align = struct.unpack_from("<IIQQQQQQ", image, offset + i * size)
        if kind == 1:  # PT_LOAD
            aligns.append(align)
    assert aligns
    assert min(aligns) >= 0x4000


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Has the library looked for again, now and afterwards."""
    binding.load.cache_clear()
    yield
    binding.load.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_a_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(binding, "library_path", lambda: tmp_path / "libedgespec.so")
    with pytest.raises(NativeError, match="cmake -S native"):
        binding.load()


@pytest.mark.usefixtures("unloaded")
def test_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "ABI", _native.ABI + 1)
    with pytest.raises(NativeError, match="expected ABI"):
        binding.load()


def test_another_struct_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(binding.STRUCTS, "es_stats", CRound)
    with pytest.raises(NativeError, match=r"es_stats: expected \d+ bytes, got 192"):
        binding.check_structs("es_stats")


def test_every_struct_has_the_librarys_size() -> None:
    assert len(binding.STRUCTS) == 11
    binding.check_structs(*binding.STRUCTS)


def test_a_function_of_another_version_is_named() -> None:
    absent = binding.Function("es_of_next_year")
    del binding.FUNCTIONS["es_of_next_year"]
    with pytest.raises(NativeError, match="no function es_of_next_year.*reinstall"):
        absent()


def test_every_status_has_an_exception() -> None:
    names = [binding.status_name(i).decode() for i in range(9)]
    assert names[0] == "ok"
    assert len(set(names)) == 9
    assert "unknown" not in names
    assert {names[i] for i in binding.EXCEPTIONS} == {
        "argument",
        "memory",
        "context",
        "unsupported",
        "format",
        "io",
    }


def test_out_of_memory_is_a_memory_error() -> None:
    """A context whose token buffer no machine has room for."""
    with pytest.raises(MemoryError, match="no memory"), _address_space(1 << 20):
        _native.NativeSession(2**31 - 1, 2**31 - 1)


class _address_space:
    """Lets the process grow by `more` bytes only."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __enter__(self) -> None:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + self.more
        resource.setrlimit(resource.RLIMIT_AS, (limit, self.before[1]))

    def __exit__(self, *_: object) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, self.before)
