"""How many cores this process may really use: by affinity and cgroup quotas."""

from __future__ import annotations

import os
from pathlib import Path

from edgespec import cgroups


def usable_cores() -> int:
    """Cores of the affinity mask, at most the CPU quota rounded down, at least 1."""
    cores = _affinity()
    quota = cgroup_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def cgroup_quota(
    root: Path = cgroups.ROOT, membership: Path = cgroups.MEMBERSHIP
) -> float | None:
    """The tightest CPU quota, in cores, of this process' cgroups and their parents.

    Reads cgroup v2 (cpu.max) and v1 (cpu.cfs_quota_us / cpu.cfs_period_us). None when
    there is no quota or no cgroup file system.
    """
    quotas = [
        quota
        for directory in cgroups.directories("cpu", root, membership)
        if (quota := _quota_v2(directory) or _quota_v1(directory)) is not None
    ]
    return min(quotas, default=None)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota_v2(directory: Path) -> float | None:
    try:
        quota, period = (directory / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(directory: Path) -> float | None:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        period = int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
