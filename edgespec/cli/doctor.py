"""`edgespec doctor`: what this machine offers, what works and why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.options import Offline
from edgespec.cli.render import megabytes
from edgespec.cli.terminal import progress_bar

if TYPE_CHECKING:
    from edgespec.doctor import Diagnosis


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.")
    ] = False,
    offline: Offline = False,
) -> None:
    """Check this machine: processor, memory, backends, cache, hub.

    Measures read bandwidth and int8 rate for about a second. Exits with 1 when no
    backend works.

    Example: edgespec doctor --offline
    """
    from edgespec.doctor import diagnose

    with progress_bar() as progress:
        diagnosis = diagnose(offline=offline, progress=progress)
    if as_json:
        print(json.dumps(diagnosis.as_dict()))
    else:
        print("\n".join(_lines(diagnosis)))
    if not any(backend.works for backend in diagnosis.backends):
        raise typer.Exit(1)


def _lines(found: Diagnosis) -> list[str]:
    rates = found.rates
    quota = "none" if found.cgroup_quota is None else f"{found.cgroup_quota:g} cores"
    affinity = found.affinity_cores or "unknown"
    memory = "unknown"
    if found.memory_total is not None and found.memory_available is not None:
        memory = (
            f"{megabytes(found.memory_total)}, "
            f"{megabytes(found.memory_available)} available"
        )
    free = "unknown" if found.cache_free is None else megabytes(found.cache_free)
    rows = [
        ("edgespec", f"{found.edgespec}, Python {found.python}, {found.system}"),
        (
            "native library",
            f"{found.native_version}, ABI {found.native_abi}, {found.native_path}",
        ),
        ("processor", found.cpu),
        ("features", " ".join(found.features) or "none known"),
        (
            "kernels",
            ", ".join(
                f"{name} (taken)" if name == found.kernel else name
                for name in found.kernels
            ),
        ),
        (
            "usable cores",
            f"{found.usable_cores} (machine {found.machine_cores}, "
            f"affinity {affinity}, cgroup quota {quota})",
        ),
        (
            "read bandwidth",
            f"{rates.read_gb_per_s:.1f} GB/s with {rates.threads} threads",
        ),
        (
            "int8 rate",
            f"{rates.int8_gmac_per_s:.0f} G multiply-accumulates/s "
            f"({rates.int8_kernel})",
        ),
        ("memory", memory),
    ]
    for backend in found.backends:
        state = "works" if backend.works else "does not work"
        version = f" {backend.version}" if backend.version else ""
        rows.append((backend.name, f"{state}{version}: {backend.detail}"))
    writable = "" if found.cache_writable else ", NOT WRITABLE"
    rows += [
        (
            "cache",
            f"{found.cache_path}: {megabytes(found.cache_bytes)} used, {free} free"
            f"{writable}",
        ),
        ("hub", found.hub),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {value}" for name, value in rows]
