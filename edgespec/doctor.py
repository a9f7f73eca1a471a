"""What this machine offers edgespec, and what is missing and why."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec import _native, cache, cpu, machine, ram
from edgespec.errors import EdgeSpecError
from edgespec.machine import Rates
from edgespec.progress import Progress, silent
from edgespec.targets.base import Target
from edgespec.tiny import tiny_gguf, tiny_graph
from edgespec.tree.shape import from_record
from edgespec.version import __version__

HUB = "https://huggingface.co"
HUB_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Backend:
    """Whether a backend works here, and what was found out."""

    name: str
    works: bool
    version: str | None
    detail: str  # why not, or what ran


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything `edgespec doctor` prints."""

    edgespec: str
    python: str
    system: str
    cpu: str
    features: tuple[str, ...]
    native_version: str
    native_abi: int
    native_path: str
    kernels: tuple[str, ...]  # variants this processor runs, best first
    kernel: str | None  # the one the native backend took
    usable_cores: int
    affinity_cores: int | None
    cgroup_quota: float | None
    machine_cores: int | None
    rates: Rates
    memory_total: int | None
    memory_available: int | None  # under every cgroup limit too
    backends: tuple[Backend, ...]
    cache_path: str
    cache_bytes: int
    cache_free: int | None
    cache_writable: bool
    hub: str  # "reachable", "not asked (--offline)" or why not

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(*, offline: bool = False, progress: Progress = silent) -> Diagnosis:
    """Looks at everything; takes a second or two, the hub's timeout apart."""
    steps: dict[str, Callable[[], Any]] = {
        "measure the processor": lambda: machine.measure(cpu.usable_cores()),
        "try native": try_native,
        "try onnx": try_onnx,
        "try llamacpp": try_llamacpp,
        "look for the hub": lambda: look_for_hub(offline),
    }
    results: list[Any] = []
    for name, step in steps.items():
        progress(f"doctor: {name}", 0, 1)
        results.append(step())
        progress(f"doctor: {name}", 1, 1)
    rates, (native, kernel), onnx, llamacpp, hub = results
    sizes = machine.memory_bytes()
    home = cache.home()
    existing = next(p for p in (home, *home.parents) if p.exists())
    return Diagnosis(
        edgespec=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=machine.cpu_name(),
        features=tuple(_native.cpu_features()),
        native_version=_native.version(),
        native_abi=_native.ABI,
        native_path=str(_native.library_path()),
        kernels=tuple(_native.cpu_variants()),
        kernel=kernel,
        usable_cores=cpu.usable_cores(),
        affinity_cores=(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        ),
        cgroup_quota=cpu.cgroup_quota(),
        machine_cores=os.cpu_count(),
        rates=rates,
        memory_total=sizes[0] if sizes else None,
        memory_available=ram.available(),
        backends=(native, onnx, llamacpp),
        cache_path=str(home),
        cache_bytes=cache.size_of(home) if home.is_dir() else 0,
        cache_free=shutil.disk_usage(existing).free,
        cache_writable=_is_writable(existing),
        hub=hub,
    )


def _is_writable(directory: Path) -> bool:
    """By trying: permissions say nothing of read-only disks, and root has them all."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def look_for_hub(offline: bool) -> str:
    """Whether the Hugging Face hub answers, within HUB_SECONDS."""
    if offline:
        return "not asked (--offline)"
    endpoint = os.environ.get("HF_ENDPOINT", HUB)
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            return "reachable"
    except urllib.error.HTTPError:
        return "reachable"  # it answered
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"not reachable: {endpoint}: {reason}"


def try_native() -> tuple[Backend, str | None]:
    """Forwards a branching tree of a tiny model; also the kernel variant it took."""
    from edgespec.targets.native import NativeTarget

    threads = cpu.usable_cores()
    version = _native.version()
    try:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "tiny.gguf")
            path.write_bytes(tiny_gguf())
            target = NativeTarget(path, context=32, threads=threads)
            kernel = target.info.cpu
            _run_tree(target)
    except (EdgeSpecError, OSError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        return Backend("native", False, version, reason), None
    detail = f"ran a tree with {threads} threads and {kernel} kernels"
    return Backend("native", True, version, detail), kernel


def _run_tree(target: Target) -> None:
    try:
        target.prefill(np.array([1, 2, 3], dtype=np.int32))
        logits = target.forward(from_record([-1, 0, 0], [0, 0, 1], where="doctor"))
        if not np.isfinite(logits).all():
            raise RuntimeError(f"{target.name} computes NaN")
    finally:
        target.close()


def try_onnx() -> Backend:
    """Runs the 4-bit matrix product our graphs are made of, on a tiny graph."""

    def run(ort: Any) -> str:
        model, inputs, expected = tiny_graph()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        (found,) = session.run(None, {"x": inputs})
        if not np.allclose(found, expected, rtol=0.02, atol=0.02):
            raise RuntimeError("MatMulNBits computes wrong values")
        return "ran a 4-bit product; " + ", ".join(ort.get_available_providers())

    return _attempt("onnx", "onnxruntime", run, "pip install onnxruntime")


def try_llamacpp() -> Backend:
    """Forwards a branching tree of a tiny model; tells what llama.cpp was built for."""

    def run(llama: Any) -> str:
        from edgespec.targets.llamacpp import LlamaCppTarget

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "tiny.gguf")
            path.write_bytes(tiny_gguf())
            _run_tree(LlamaCppTarget(path, context=32, threads=1))
        info = llama.llama_print_system_info().decode("utf-8", "replace")
        found = [part.strip() for part in info.replace("CPU :", "").split("|")]
        names = [part.split()[0] for part in found if part.endswith("= 1")]
        return f"ran a tree; built with {', '.join(names) or 'no features'}"

    return _attempt(
        "llamacpp", "llama_cpp", run, "pip install 'edgespec[llama]' (compiles C++)"
    )


def _attempt(name: str, module: str, run: Callable[[Any], str], remedy: str) -> Backend:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        if error.name == module:
            return Backend(name, False, None, f"{module} is not installed: {remedy}")
        return Backend(name, False, None, f"{module} cannot be imported: {error}")
    except Exception as error:  # a foreign library failing to load, whatever it raises
        return Backend(name, False, None, f"{module} cannot be imported: {error}")
    version = getattr(found, "__version__", None)
    try:
        return Backend(name, True, version, run(found))
    except Exception as error:  # the point is to report whatever goes wrong
        return Backend(name, False, version, f"{type(error).__name__}: {error}")
