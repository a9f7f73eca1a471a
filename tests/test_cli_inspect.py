"""`edgespec inspect`: sizes, types, memory, the floor, what is reached, drawn trees."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

from edgespec import inspection, machine
from edgespec._native import NativeModel, target_memory
from edgespec.cli.app import main
from edgespec.cli.render import draw_tree, mark_drafted, megabytes, table
from edgespec.errors import ModelNotFoundError
from edgespec.machine import Rates
from edgespec.reach import WIDTHS, reach
from edgespec.tree.shape import from_record
from edgespec_export.pipeline import export
from tests.export import checkpoints
from tests.scripted import ScriptedTarget

RATES = Rates(
    threads=2, read_gb_per_s=10.0, int8_gmac_per_s=100.0, int8_kernel="portable"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory with tiny.gguf and the bundle out/ made of it."""
    directory = tmp_path_factory.mktemp("inspect")
    source = checkpoints.gguf_checkpoint(directory / "tiny.gguf")
    export(source, directory / "out", formats=("gguf", "onnx"), check=False)
    return directory


@pytest.fixture
def rates(monkeypatch):
    """The machine is not measured, it is RATES."""
    monkeypatch.setattr(machine, "measure", lambda threads: RATES)


def as_json(capsys, *arguments) -> dict:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gguf_by_its_header(tiny, capsys, rates) -> None:
    data = as_json(capsys, tiny / "tiny.gguf", "--ctx", "100")
    shape = checkpoints.Shape()
    assert data["architecture"]["n_layers"] == shape.n_layers
    assert data["architecture"]["n_kv_heads"] == shape.n_kv_heads
    assert data["architecture"]["is_tied"] is True
    layout = data["containers"]["gguf"]
    assert layout["types"]["Q4_1"] == {"tensors": 14, "bytes": 38400}
    # Tied: the embedding is the head, so every byte is read for each token.
    assert layout["bytes"] == layout["read_bytes"] == 38400 + 21760 + 1280
    kv = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * 2 * 100
    assert data["memory"]["gguf"]["kv"] == kv
    floor = data["floor"]["gguf"]
    assert floor["read_bytes"] == layout["bytes"] + kv
    assert floor["ms"] == pytest.approx((layout["bytes"] + kv) / 10e9 * 1e3)
    assert floor["ms_empty"] == pytest.approx(layout["bytes"] / 10e9 * 1e3)
    assert data["reached"] is None  # a file alone is not run


def test_untied_embedding_is_not_read(tmp_path, capsys) -> None:
    path = checkpoints.gguf_checkpoint(
        tmp_path / "untied.gguf", checkpoints.Shape(is_tied=False), kind="F32"
    )
    layout = as_json(capsys, path, "--no-measure")["containers"]["gguf"]
    shape = checkpoints.Shape()
    vocab = as_json(capsys, path, "--no-measure")["architecture"]["vocab"]
    row_bytes = shape.hidden * 34 // 32  # Q8_0
    assert layout["bytes"] - layout["read_bytes"] == vocab * row_bytes


def test_onnx_by_its_nodes(tiny, capsys, rates) -> None:
    data = as_json(capsys, tiny / "out" / "target.onnx")
    layout = data["containers"]["onnx"]
    assert data["architecture"] is None
    assert data["memory"] is None
    shape = checkpoints.Shape()
    per_layer = (
        shape.hidden * shape.head_dim * (2 * shape.n_heads + 2 * shape.n_kv_heads)
    )
    per_layer += 3 * shape.hidden * shape.ffn
    assert layout["macs"] >= shape.n_layers * per_layer
    assert layout["types"]["uint8"]["bytes"] > 0


@pytest.mark.parametrize(
    ("options", "backend", "container"),
    [([], "native", "gguf"), (["--backend", "onnx"], "onnx", "onnx")],
)
def test_bundle_runs_and_shows_shares(
    tiny, capsys, rates, options, backend, container
) -> None:
    data = as_json(capsys, tiny / "out", "--threads", "1", *options)
    assert set(data["containers"]) == {"gguf", "onnx"}
    assert data["containers"]["gguf"]["note"]
    assert data["reached"]["backend"] == backend
    widths = data["reached"]["widths"]
    assert [width["rows"] for width in widths] == list(WIDTHS)
    for width in widths:
        read = data["containers"][container]["read_bytes"] / width["ms"] / 1e6
        assert width["read_gb_per_s"] == pytest.approx(read)
        assert width["read_share"] == pytest.approx(read / RATES.read_gb_per_s)
    assert data["memory"]["onnx"]["kv"] == 2 * data["memory"]["gguf"]["kv"]


def test_memory_of_a_gguf_is_what_the_engine_asks_for(tiny, capsys) -> None:
    path = tiny / "tiny.gguf"
    found = as_json(capsys, path, "--no-measure", "--ctx", "300")["memory"]["gguf"]
    model = NativeModel(path, threads=1)
    assert found["weights"] == model.info.weight_bytes
    assert found["kv"] + found["buffers"] == target_memory(model, context=300)
    model.close()


def test_shards_are_inspected_as_one(tiny, tmp_path, capsys) -> None:
    first = checkpoints.gguf_checkpoint(tmp_path / "tiny.gguf", n_shards=3)
    whole, parts = (
        as_json(capsys, path, "--no-measure") for path in (tiny / "tiny.gguf", first)
    )
    for data in (whole, parts):
        del data["path"], data["containers"]["gguf"]["file"]
    assert parts == whole


def test_text_for_people(tiny, capsys, rates) -> None:
    arguments = [str(tiny / "out"), "--tree", "chain:2", "--threads", "1"]
    assert main(["inspect", *arguments]) == 0
    out = capsys.readouterr().out
    for part in (
        "llama: 2 layers",
        "target.gguf: 61.4 kB",
        "Q4_1",
        "at a context of 512 tokens",
        "reads 10.0 GB/s",
        "gguf floor",
        "c(n)/c(1)",
        "tree: 3 rows, depth 2",
        "└─ 1 rank 0",
    ):
        assert part in out


def test_without_measuring_nothing_is_timed(tiny, capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda threads: pytest.fail("measured"))
    data = as_json(capsys, tiny / "out", "--no-measure")
    assert data["rates"] is None
    assert data["reached"] is None
    assert data["floor"] == {"gguf": None, "onnx": None}
    assert data["memory"]["gguf"]["total"] > 0


def test_bundle_without_readers_shows_the_manifest(tiny, capsys, monkeypatch) -> None:
    def missing(path):
        raise ImportError("no reader", name="onnx")

    monkeypatch.setattr(inspection, "read_onnx", missing)
    monkeypatch.setattr(inspection, "read_gguf", missing)
    data = as_json(capsys, tiny / "out", "--no-measure")
    layout = data["containers"]["gguf"]
    assert layout["read_bytes"] is None
    assert layout["types"]["Q4_1"] == {"tensors": 14, "bytes": None}
    assert main(["inspect", str(tiny / "tiny.gguf"), "--no-measure"]) == 1
    assert "edgespec[export]" in capsys.readouterr().err


def test_stored_tree_is_drawn(tmp_path, capsys) -> None:
    path = tmp_path / "tree.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("edgespec.tree.parent", [-1, 0, 0, 1])
    writer.add_array("edgespec.tree.rank", [0, 0, 1, 0])
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["inspect", str(path), "--no-measure"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-5:] == [
        "stored tree: 4 rows, depth 2",
        "0 root",
        "├─ 1 rank 0",
        "│  └─ 3 rank 0",
        "└─ 2 rank 1",
    ]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.gguf", b"", 1),
        ("a.gguf", b"GGUF" + b"\0" * 33, 1),
        ("a.onnx", b"\xff\xff\xff", 1),
        ("a.onnx", b"", 1),
    ],
)
def test_c37_malformed_files_are_named_errors(
    tmp_path, capsys, name, content, code
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["inspect", str(path), "--no-measure"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err


def test_usage_errors(tiny, tmp_path, capsys, rates) -> None:
    with pytest.raises(ModelNotFoundError):
        inspection.inspect_file(tmp_path / "none.gguf")
    assert main(["inspect", str(tmp_path / "none.onnx")]) == 1
    graph = str(tiny / "out" / "target.onnx")
    assert main(["inspect", graph, "--measure"]) == 2
    assert main(["inspect", graph, "--tree", "chain:0"]) == 2
    assert "chain:K" in capsys.readouterr().err
    for flags, message in (
        (["--ctx", "0"], "ctx: expected 1 or more, got 0"),
        (["--ctx", "9999999"], "this model's limit, got 9999999"),
        (["--threads", "0"], "threads: expected 1 or more, got 0"),
        (["--threads", "99999"], "threads: expected at most 256, got 99999"),
    ):
        for path in (tiny / "out", tiny / "tiny.gguf"):
            assert main(["inspect", str(path), "--no-measure", *flags]) == 2
            assert message in capsys.readouterr().err


def test_reach_leaves_out_widths_beyond_the_context() -> None:
    target = ScriptedTarget({}, context=20)
    found = reach(target, RATES, read_bytes=1000, macs=10, seconds=0.001)
    assert [width.rows for width in found] == [1, 2, 4, 8]
    assert found[0].ratio == 1.0
    assert target.length == 0


# ---- drawing -------------------------------------------------------------------------


def test_children_are_drawn_by_rank() -> None:
    tree = from_record([-1, 0, 0, 2, 2, 1], [0, 1, 0, 0, 1, 0], where="test")
    assert draw_tree(tree, label=lambda row: f"p{row}") == [
        "0 root  p0",
        "├─ 2 rank 0  p2",
        "│  ├─ 3 rank 0  p3",
        "│  └─ 4 rank 1  p4",
        "└─ 1 rank 1  p1",
        "   └─ 5 rank 0  p5",
    ]


def test_every_row_of_a_large_tree_is_drawn() -> None:
    parent = [-1, *np.random.default_rng(0).integers(0, np.arange(1, 64)).tolist()]
    rank = [parent[:row].count(parent[row]) for row in range(64)]
    lines = draw_tree(from_record(parent, rank, where="test"))
    rows = [int(line.strip("│├└─ ").split()[0]) for line in lines]
    assert sorted(rows) == list(range(64))


def test_table_aligns_columns() -> None:
    assert table(("name", "n"), [("a", "1"), ("long", "100")]) == [
        "name    n",
        "a       1",
        "long  100",
    ]


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (96.5e6, "96.5 MB"),
        (2e9, "2.0 GB"),
    ],
)
def test_sizes(n_bytes, text) -> None:
    assert megabytes(n_bytes) == text


def test_drafted_text_is_marked_by_whole_characters() -> None:
    emoji = "🎉".encode()
    pieces = [(b"a", False), (emoji[:2], False), (emoji[2:], True), (b"b\x1b", True)]
    assert mark_drafted(pieces, colour=False) == "a[🎉b]"
    assert mark_drafted(pieces, colour=True) == "a\x1b[32m🎉b\x1b[0m"
    assert (
        mark_drafted([(emoji[:1], True)], colour=False) == "\N{REPLACEMENT CHARACTER}"
    )
