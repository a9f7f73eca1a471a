"""How much memory this process may still take."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from edgespec import cgroups, machine


def available() -> int | None:
    """Bytes that can be had: of the machine, and under every cgroup limit."""
    sizes = machine.memory_bytes()
    rooms = [sizes[1]] if sizes else []
    group = cgroup_room()
    if group is not None:
        rooms.append(group)
    return min(rooms, default=None)


def cgroup_room(
    root: Path = cgroups.ROOT, membership: Path = cgroups.MEMBERSHIP
) -> int | None:
    """Bytes left under the tightest memory limit, None without one.

    Reads cgroup v2 (memory.max) and v1 (memory.limit_in_bytes). Pages of files count
    as free: the system gives them up first.
    """
    rooms = [
        room
        for directory in cgroups.directories("memory", root, membership)
        for names in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        )
        if (room := _room(directory, *names)) is not None
    ]
    return min(rooms, default=None)


def _room(directory: Path, limit: str, usage: str, prefix: str) -> int | None:
    try:
        most = (directory / limit).read_text().strip()
        if most == "max":
            return None
        free = int(most) - int((directory / usage).read_text())
        lines = (directory / "memory.stat").read_text().splitlines()
        stat = {line.split()[0]: int(line.split()[1]) for line in lines}
    except (OSError, ValueError, IndexError):
        return None
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    return max(0, free + sum(stat.get(name, 0) for name in names))


def give_back() -> None:
    """Returns freed heap memory to the system, where the C library can.

    Reading a tokenizer leaves as much garbage behind as it keeps: tens of megabytes,
    which a model's own large blocks would not reuse.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
