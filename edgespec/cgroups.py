"""The control groups of this process, where Linux limits what it may use."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def directories(
    controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP
) -> list[Path]:
    """Where a controller's files of the process' groups and their parents may be.

    Of version 2 (one hierarchy) and version 1 (one per controller, as "cpu,cpuacct").
    Directories that do not exist may be among them.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    # Inside a container the path may name a directory that only the host sees; the
    # mount itself is then the container's own group, so the bases are always looked at
    # too.
    found = [root, root / controller]
    for line in lines:
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            bases = [root]
        elif controller in controllers.split(","):
            bases = [root / controllers, root / controller]
        else:
            continue
        found += [base for base in bases if base not in found]
        for base in bases:
            directory = base / path.lstrip("/")
            while directory != base and base in directory.parents:
                found.append(directory)
                directory = directory.parent
    return found
