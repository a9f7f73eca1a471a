"""C40: threads by affinity and cgroup quota."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edgespec import cpu


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "fs", root / "membership"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"membership": "0::/\n", "fs/cpu.max": "max 100000\n"}, None),
        ({"membership": "0::/\n", "fs/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "membership": "0::/a/b\n",
                "fs/cpu.max": "800000 100000\n",
                "fs/a/cpu.max": "250000 100000\n",
                "fs/a/b/cpu.max": "max 100000\n",
            },
            2.5,
        ),
        # The path of the host, seen from inside a container.
        ({"membership": "0::/docker/x\n", "fs/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "membership": "4:memory:/m\n3:cpu,cpuacct:/job\n0::/\n",
                "fs/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "fs/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "membership": "3:cpu:/\n",
                "fs/cpu/cpu.cfs_quota_us": "-1\n",
                "fs/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"membership": "nonsense\n\n", "fs/cpu.max": "a b c\n"}, None),
        ({"membership": "0::/\n", "fs/cpu.max": ""}, None),
        ({"membership": "0::/\n", "fs/cpu.max": "100000 0\n"}, None),
    ],
)
def test_c40_quota(
    files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert cpu.cgroup_quota(*tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [(8, None, 8), (8, 2.9, 2), (2, 8.0, 2), (4, 0.5, 1), (1, 1.0, 1)],
)
def test_c40_cores(monkeypatch, affinity, quota, expected) -> None:
    monkeypatch.setattr(cpu, "_affinity", lambda: affinity)
    monkeypatch.setattr(cpu, "cgroup_quota", lambda: quota)
    assert cpu.usable_cores() == expected


def test_c40_the_affinity_mask_counts() -> None:
    assert 1 <= cpu.usable_cores() <= (os.cpu_count() or 1)
    if sys.platform == "linux":
        assert cpu.usable_cores() <= len(os.sched_getaffinity(0))
