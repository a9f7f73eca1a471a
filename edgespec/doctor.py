"""What this machine offers edgespec, and what is missing and why."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec import _native, cache, cpu, machine
from edgespec.machine import Rates
from edgespec.progress import Progress, silent
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
    usable_cores: int
    affinity_cores: int | None
    cgroup_quota: float | None
    machine_cores: int | None
    rates: Rates
    memory_total: int | None
    memory_available: int | None
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
        "try onnx": try_onnx,
        "try llamacpp": try_llamacpp,
        "look for the hub": lambda: look_for_hub(offline),
    }
    results: list[Any] = []
    for name, step in steps.items():
        progress(f"doctor: {name}", 0, 1)
        results.append(step())
        progress(f"doctor: {name}", 1, 1)
    rates, onnx, llamacpp, hub = results
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
        usable_cores=cpu.usable_cores(),
        affinity_cores=(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        ),
        cgroup_quota=cpu.cgroup_quota(),
        machine_cores=os.cpu_count(),
        rates=rates,
        memory_total=sizes[0] if sizes else None,
        memory_available=sizes[1] if sizes else None,
        backends=(onnx, llamacpp),
        cache_path=str(home),
        cache_bytes=cache.size_of(home) if home.is_dir() else 0,
        cache_free=shutil.disk_usage(existing).free,
        cache_writable=os.access(existing, os.W_OK | os.X_OK),
        hub=hub,
    )


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
    """Loads the llama.cpp library, starts it and asks what it was built for."""

    def run(llama: Any) -> str:
        llama.llama_backend_init()
        info = llama.llama_print_system_info().decode("utf-8", "replace")
        found = [part.strip() for part in info.replace("CPU :", "").split("|")]
        names = [part.split()[0] for part in found if part.endswith("= 1")]
        return f"library loaded; built with {', '.join(names) or 'no features'}"

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


# ---- a graph small enough to write by hand -------------------------------------------


def tiny_graph() -> tuple[bytes, NDArray[np.float32], NDArray[np.float32]]:
    """An ONNX model of one MatMulNBits (block 32), an input x and its result y.

    Written as protobuf fields, so that no package for writing ONNX is needed.
    """
    k, n = 32, 16
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (n, k), dtype=np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = generator.uniform(0.01, 0.1, n).astype(np.float32)
    x = generator.standard_normal((1, k)).astype(np.float32)
    weights = (codes.astype(np.float32) - 8) * scales[:, None]
    attributes = {"K": k, "N": n, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = b"".join(
        [
            *(_text(1, name) for name in ("x", "codes", "scales")),
            _text(2, "y"),
            _text(4, "MatMulNBits"),
            *(
                _bytes(5, _text(1, name) + _number(3, value) + _number(20, 2))
                for name, value in attributes.items()
            ),
            _text(7, "com.microsoft"),
        ]
    )
    graph = b"".join(
        [
            _bytes(1, node),
            _text(2, "tiny"),
            _bytes(5, _tensor("codes", 2, (n, 1, k // 2), packed.tobytes())),
            _bytes(5, _tensor("scales", 1, (n,), scales.tobytes())),
            _bytes(11, _value("x", (1, k))),
            _bytes(12, _value("y", (1, n))),
        ]
    )
    opsets = (("", 17), ("com.microsoft", 1))
    model = _number(1, 8) + _bytes(7, graph)
    for domain, version in opsets:
        model += _bytes(8, _text(1, domain) + _number(2, version))
    return model, x, x @ weights.T


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _tensor(name: str, dtype: int, shape: tuple[int, ...], data: bytes) -> bytes:
    sides = b"".join(_number(1, side) for side in shape)
    return sides + _number(2, dtype) + _text(8, name) + _bytes(9, data)


def _value(name: str, shape: tuple[int, ...]) -> bytes:
    sides = b"".join(_bytes(1, _number(1, side)) for side in shape)
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, 1) + _bytes(2, sides)))
