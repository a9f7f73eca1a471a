"""`edgespec doctor`: what works, and why what does not does not."""

from __future__ import annotations

import importlib.util
import json
import sys
import types

import numpy as np
import onnx
import pytest

from edgespec import doctor, tiny
from edgespec._native import ABI
from edgespec.cli.app import main
from edgespec.inspection import inspect_file
from edgespec.machine import Rates


@pytest.fixture
def quick(monkeypatch, edgespec_home):
    """No measuring, a cache of its own."""
    rates = Rates(2, 12.5, 400.0, "portable")
    monkeypatch.setattr(doctor.machine, "measure", lambda threads: rates)
    return edgespec_home


def test_lines_for_people(quick, capsys) -> None:
    assert main(["doctor", "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert names == [
        *("edgespec", "native library", "processor", "features", "kernels"),
        *("usable cores", "read bandwidth", "int8 rate", "memory"),
        *("native", "onnx", "llamacpp", "cache", "hub"),
    ]
    by_name = dict(zip(names, lines, strict=True))
    assert "12.5 GB/s with 2 threads" in by_name["read bandwidth"]
    assert "works" in by_name["onnx"]
    assert by_name["kernels"].count("(taken)") == 1
    assert "threads and" in by_name["native"]
    assert str(quick) in by_name["cache"]
    assert "not asked" in by_name["hub"]
    assert not quick.exists()  # looking changes nothing


def test_json(quick, capsys) -> None:
    assert main(["doctor", "--offline", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rates"]["int8_gmac_per_s"] == 400.0
    assert data["usable_cores"] >= 1
    assert data["native_abi"] == ABI
    assert data["kernels"][-1] == "generic"
    assert data["kernel"] in data["kernels"]
    assert [backend["name"] for backend in data["backends"]] == [
        "native",
        "onnx",
        "llamacpp",
    ]
    for backend in data["backends"][:2]:
        assert backend["works"] is True
        assert backend["version"]
    assert data["kernel"] in data["backends"][0]["detail"]


def test_no_backend_exits_with_1(quick, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(doctor, "tiny_gguf", lambda: b"GGUF")
    assert main(["doctor", "--offline"]) == 1
    out = capsys.readouterr().out
    assert "native" in out
    assert "does not work" in out
    assert "onnxruntime is not installed: pip install onnxruntime" in out
    assert "pip install 'edgespec[llama]'" in out


def test_backend_that_breaks_says_why(monkeypatch) -> None:
    broken = types.ModuleType("llama_cpp")
    broken.__version__ = "9.9"  # type: ignore[attr-defined]

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("libgomp is missing")

    monkeypatch.setitem(sys.modules, "llama_cpp", broken)
    monkeypatch.setattr("edgespec.targets.llamacpp.LlamaCppTarget", fail)
    found = doctor.try_llamacpp()
    assert not found.works
    assert found.version == "9.9"
    assert "libgomp is missing" in found.detail


def test_runtime_that_computes_nonsense_does_not_work(monkeypatch) -> None:
    model, inputs, expected = tiny.tiny_graph()
    monkeypatch.setattr(doctor, "tiny_graph", lambda: (model, inputs, expected + 1))
    found = doctor.try_onnx()
    assert not found.works
    assert "wrong values" in found.detail


def test_llamacpp_runs_a_tree_where_it_is_installed() -> None:
    found = doctor.try_llamacpp()
    is_installed = importlib.util.find_spec("llama_cpp") is not None
    assert found.works == is_installed, found.detail
    assert ("ran a tree" if is_installed else "not installed") in found.detail


def test_tiny_gguf_is_a_valid_file(tmp_path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny.tiny_gguf())
    found = inspect_file(path)
    assert found.architecture is not None
    assert found.architecture.n_layers == 1
    assert found.layouts["gguf"].types["F32"].tensors == 11


def test_tiny_graph_is_a_valid_model() -> None:
    data, x, y = tiny.tiny_graph()
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model)
    (node,) = model.graph.node
    assert (node.op_type, node.domain) == ("MatMulNBits", "com.microsoft")
    attributes = {a.name: a.i for a in node.attribute}
    assert attributes == {
        "K": 32,
        "N": 16,
        "bits": 4,
        "block_size": 32,
        "accuracy_level": 4,
    }
    assert (x.shape, y.shape) == ((1, 32), (1, 16))
    assert float(np.abs(y).max()) > 0.1


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense"])
def test_hub_out_of_reach_is_not_an_error(monkeypatch, endpoint) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert doctor.look_for_hub(False).startswith("not reachable")
    assert doctor.look_for_hub(True) == "not asked (--offline)"
