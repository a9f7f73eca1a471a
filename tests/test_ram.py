"""C40: memory by the machine and by cgroup limits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from edgespec import machine, ram
from tests.processes import python

STAT = "anon 5\nactive_file 30\ninactive_file 70\nfile 100\n"
STAT_1 = "cache 9\ntotal_active_file 4\ntotal_inactive_file 6\n"


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "fs", root / "membership"


def limit(place: str, most: str, used: int, stat: str = STAT) -> dict[str, str]:
    return {
        f"fs/{place}memory.max": f"{most}\n",
        f"fs/{place}memory.current": f"{used}\n",
        f"fs/{place}memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"membership": "0::/\n", **limit("", "max", 500)}, None),
        # Pages of files are given up first, so they are free.
        ({"membership": "0::/\n", **limit("", "1000", 500)}, 600),
        (
            {
                "membership": "0::/a/b\n",
                **limit("", "9000", 500),
                **limit("a/", "800", 600),
                **limit("a/b/", "max", 600),
            },
            300,
        ),
        # The path of the host, seen from inside a container.
        ({"membership": "0::/docker/x\n", **limit("", "700", 100)}, 700),
        ({"membership": "0::/\n", **limit("", "100", 900)}, 0),
        (
            {
                "membership": "4:memory:/m\n3:cpu,cpuacct:/job\n0::/\n",
                "fs/memory/m/memory.limit_in_bytes": "300\n",
                "fs/memory/m/memory.usage_in_bytes": "200\n",
                "fs/memory/m/memory.stat": STAT_1,
            },
            110,
        ),
        ({"membership": "0::/\n", **limit("", "many", 1)}, None),
        ({"membership": "0::/\n", **limit("", "9", 1, "nonsense")}, None),
        ({"membership": "0::/\n", "fs/memory.max": "100\n"}, None),
    ],
)
def test_c40_room_under_the_tightest_limit(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    assert ram.cgroup_room(*tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("sizes", "room", "expected"),
    [((90, 50), None, 50), ((90, 50), 20, 20), ((90, 50), 70, 50), (None, 7, 7)],
)
def test_c40_the_smaller_counts(monkeypatch, sizes, room, expected) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: sizes)
    monkeypatch.setattr(ram, "cgroup_room", lambda: room)
    assert ram.available() == expected


def test_nothing_is_known(monkeypatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: None)
    monkeypatch.setattr(ram, "cgroup_room", lambda: None)
    assert ram.available() is None


def test_of_this_machine() -> None:
    sizes = machine.memory_bytes()
    assert sizes is not None
    have = ram.available()
    assert have is not None
    assert 0 < have <= sizes[0]


def test_freed_memory_goes_back_to_the_system() -> None:
    """Below a block in use, so that the heap does not shrink by itself."""
    code = """
import ctypes
from pathlib import Path
from edgespec import ram
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
blocks = [libc.malloc(2000) for _ in range(20_000)]
for block in blocks:
    ctypes.memset(block, 1, 2000)
last = libc.malloc(2000)  # keeps the end of the heap in use
for block in blocks:
    libc.free(block)
before = resident()
ram.give_back()
print(before - resident())
"""
    done = subprocess.run(python(code), check=True, capture_output=True, text=True)
    assert int(done.stdout) > 30_000_000


def test_other_c_libraries_are_no_error(monkeypatch) -> None:
    def absent(name: object) -> None:
        raise OSError(name)

    monkeypatch.setattr(ram.ctypes, "CDLL", absent)
    ram.give_back()
