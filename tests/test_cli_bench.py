"""`edgespec bench`: options, tables, JSON, pictures, and what cannot work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgespec import bench, bench_arms
from edgespec.bench_arms import Lookup, Opened
from edgespec.bundle import Bundle
from edgespec.cli.app import main
from edgespec.errors import BackendError, FormatError, UsageError
from edgespec.gguf_model import read_gguf_model
from edgespec.verification import Prompt
from edgespec_export import pipeline
from tests.export.checkpoints import gguf_checkpoint
from tests.scripted import scripted_session

THREADS = ["--threads", "1"]
ANSWERS = {"ha": "ha ha ha ha ha ha ha ha", "hi": "hello"}


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return gguf_checkpoint(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def tiny(tiny_gguf, tmp_path_factory) -> Bundle:
    """A random model in both containers."""
    out = tmp_path_factory.mktemp("bundles") / "tiny"
    return pipeline.export(tiny_gguf, out, formats=["gguf", "onnx"], check=False)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"turns": ["ha", "again"], "category": "loud"},
        {"prompt": "hi", "subtask": "quiet"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def scripted(monkeypatch, tiny):
    """Scripted models in place of the backends."""

    def open_backends(bundle, names, *, threads, progress):
        return [
            Opened(name, scripted_session(ANSWERS), f"{name} 1.0")
            for name in ("native", "onnx")
        ]

    monkeypatch.setattr("edgespec.bundle.resolve", lambda *_, **__: tiny)
    monkeypatch.setattr(bench_arms, "open_backends", open_backends)


def test_a_real_run(prompts, tiny, tmp_path, capsys) -> None:
    directory, file = str(tiny.directory), tmp_path / "out.json"
    flags = ["--prompts", prompts, "--limit", "1", "-n", "4", "--json", str(file)]
    methods = ["--methods", "plain,ngram,lookup", *THREADS]
    assert main(["bench", directory, *flags, *methods]) == 0
    data = json.loads(file.read_text())
    names = ["native", "llamacpp", "onnx"]
    found = [(row["method"], row["backend"]) for row in data["rows"]]
    for name in names:
        assert ("plain", name) in found
        assert ("ngram", name) in found
    assert ("lookup", "llamacpp") in found
    assert len(found) == 2 * len(names) + 1
    for row in data["rows"]:
        assert row["tokens_per_s"] > 0
        assert row["tokens"] % 5 == 0
        assert row["ttft_ms"] > 0
    assert (data["threads"], data["repeats"], data["max_tokens"]) == (1, 5, 4)
    sums = data["files"]
    assert sums["target.gguf"] == tiny.manifest.files["target.gguf"].sha256
    said = data["backends"]["llamacpp"]
    assert "llama-cpp-python" in said
    assert "CPU :" in said  # llama.cpp's own words
    assert data["backends"]["native"].endswith(" kernels")
    assert "flash attention" in said
    assert "ms without" in said
    captured = capsys.readouterr()
    assert sums["target.gguf"] in captured.out
    lines = captured.out.splitlines()
    assert any(line.split()[:2] == ["lookup", "llamacpp"] for line in lines)
    assert any(line.startswith("loud (1)") for line in lines)
    assert "measure" in captured.err


def test_real_costs(tiny, capsys) -> None:
    assert main(["bench", str(tiny.directory), "--cost", *THREADS]) == 0
    out = capsys.readouterr().out
    header = next(line for line in out.splitlines() if line.startswith("rows"))
    assert "llamacpp ms" in header
    assert "llamacpp-fa ms" in header
    assert "what branching costs over a chain" in out


def test_real_quality(tiny, tmp_path, capsys) -> None:
    text = tmp_path / "text"
    text.write_text("The sky is blue because the air scatters blue light the most.")
    flags = ["--quality", "--text", str(text), "--json", "-", *THREADS]
    assert main(["bench", str(tiny.directory), *flags]) == 0
    rows = {
        row["backend"]: row for row in json.loads(capsys.readouterr().out)["quality"]
    }
    assert list(rows) == ["float32", "native", "llamacpp", "llamacpp-fa", "onnx"]
    truth = rows.pop("float32")
    assert truth["perplexity"] > 10  # it knows nothing
    for row in rows.values():
        assert 0 <= row["kl"] < 0.05
        assert row["reference"] == "float32"
        assert row["tokens"] == truth["tokens"]
        assert row["perplexity"] == pytest.approx(truth["perplexity"], rel=0.1)
    assert (
        main(["bench", str(tiny.directory), "--quality", *THREADS, "--text", str(text)])
        == 0
    )
    assert "KL from float32" in capsys.readouterr().out


def test_tables_and_pictures(scripted, prompts, tmp_path, capsys) -> None:
    plot = tmp_path / "speed.svg"
    flags = ["--prompts", prompts, "-n", "20", "--plot", str(plot)]
    assert main(["bench", "m", *flags]) == 0
    out = capsys.readouterr().out
    assert "native: native 1.0" in out
    assert "cut where 16 tokens" in out
    assert "quiet (1)" in out
    assert plot.read_text().lstrip().startswith("<?xml")
    plot.unlink()
    assert main(["bench", "m", "--cost", "--plot", str(plot)]) == 0
    assert plot.exists()
    assert "behind 256 cached rows" in capsys.readouterr().out


def test_a_busy_machine_is_told(scripted, prompts, monkeypatch, capsys) -> None:
    monkeypatch.setattr("edgespec.machine.Bystanders.share", lambda self: 0.31)
    assert main(["bench", "m", "--prompts", prompts, "-n", "4"]) == 0
    captured = capsys.readouterr()
    assert "31%" in captured.out
    assert "idle machine" in captured.err
    monkeypatch.setattr("edgespec.machine.Bystanders.share", lambda self: None)
    assert main(["bench", "m", "--prompts", prompts, "-n", "4", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["others_share"] is None
    assert "idle machine" not in captured.err


def test_interrupts_print_what_there_is(scripted, prompts, monkeypatch, capsys) -> None:
    reply, calls = bench.reply, []

    def impatient(*arguments):
        calls.append(arguments)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return reply(*arguments)

    monkeypatch.setattr(bench, "reply", impatient)
    flags = ["--prompts", prompts, "-n", "4", "--json", "-"]
    assert main(["bench", "m", *flags]) == 130
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["complete"] is False
    assert data["rows"][0]["tokens"] > 0
    assert "interrupted" in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "hydra"], "--methods: expected some of plain, lookup, ngram"),
        (["--methods", "none"], "--methods: expected some of plain, lookup, ngram"),
        (["--methods", "medusa"], "has no medusa draft; it has ngram only"),
        (
            ["--methods", "eagle", "--backend", "llamacpp"],
            "has no eagle draft; it has ngram only",
        ),
        (["--tree", "best:1"], "tree: best:N takes 2 to 64"),
        (["--tree", "bush"], "tree: expected auto, best:N, chain:K"),
        (["--cost", "--tree", "best:5"], "--tree: has no effect with --cost"),
        (["--acceptance", "--tree", "auto"], "acceptance is that of a tree"),
        (["--acceptance", "--cost"], "one at a time"),
        (["--acceptance", "--backend", "native"], "--backend: has no effect"),
        (["--acceptance", "--repeats", "5"], "--repeats: has no effect"),
        (["--methods", ""], "--methods"),
        (["--repeats", "4"], "--repeats"),
        (["-n", "1"], "-n"),
        (["--threads", "0"], "threads"),
        (["--prompts", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--json", "/nowhere/at/all"], "its directory cannot be written"),
        (["--plot", "/"], "it is a directory"),
        (["--plot", "speed.xyz"], ".svg"),
        (["--cost", "--quality"], "one at a time"),
        (["--cost", "--methods", "plain"], "--methods: has no effect with --cost"),
        (["--quality", "--repeats", "5"], "--repeats: has no effect with --quality"),
        (["--text", "x"], "--text: has no effect without --quality"),
        (["--quality", "--text", "/nowhere/at/all"], "--text: cannot read"),
        (["--backend", "tpu"], "--backend: expected"),
        (["--backend", "onnx", "--methods", "lookup"], "only the llamacpp backend"),
    ],
)
def test_usage_errors(named, capsys, flags, message) -> None:
    assert main(["bench", named, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def named(monkeypatch, tiny) -> str:
    """A model that claims to have an ONNX graph too; never opened."""

    class Both:
        directory, manifest = tiny.directory, tiny.manifest

        def __contains__(self, name: str) -> bool:
            return name in ("target.gguf", "target.onnx")

    monkeypatch.setattr("edgespec.bundle.resolve", lambda *_, **__: Both())
    return "m"


def test_backends_that_are_not_there(tiny_gguf, monkeypatch) -> None:
    model = read_gguf_model(tiny_gguf)
    assert "onnx" not in bench_arms.choose_backends(model)
    with pytest.raises(FormatError, match="--format onnx"):
        bench_arms.choose_backends(model, ["onnx"])
    monkeypatch.setattr(bench_arms, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="llama-cpp-python"):
        bench_arms.choose_backends(model, ["llamacpp"])
    with pytest.raises(UsageError, match="no backend"):
        bench_arms.choose_backends(model)


def test_checksums_of_a_file_of_its_own(tiny_gguf, tiny: Bundle) -> None:
    about = bench_arms.about(read_gguf_model(tiny_gguf), [], None)
    assert list(about["files"]) == [tiny_gguf.name]
    assert len(about["files"][tiny_gguf.name]) == 64


def test_plots_need_matplotlib(monkeypatch, capsys) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["bench", "m", "--plot", "speed.png"]) == 1
    assert "pip install 'edgespec[bench]'" in capsys.readouterr().err


def test_a_prompt_without_room_for_a_reply_is_named() -> None:
    opened = [Opened("one", scripted_session(ANSWERS, context=40), "")]
    short, long = Prompt(("hi",)), Prompt(("hi" * 40,))
    assert len(bench_arms.encode(opened, [short, short])) == 2
    with pytest.raises(UsageError, match="prompt 2 has .* context of 40"):
        bench_arms.encode(opened, [short, long])


def test_lookup_drafts_what_followed_before() -> None:
    lookup = Lookup()
    tree = lookup.propose(np.array([5, 6, 7, 8, 9, 5, 6], dtype=np.int32))
    assert tree is not None
    assert tree.tokens.tolist() == [6, 7, 8]
    assert tree.is_chain
    assert lookup.propose(np.array([1, 2, 3], dtype=np.int32)) is None
    assert lookup.seconds > 0


def test_the_faster_attention_is_kept() -> None:
    def clocked(name: str, seconds: float) -> Opened:
        session = scripted_session(ANSWERS)
        target = session.target
        return Opened(name, session, name, lambda: seconds * len(target.forwards))

    slow, fast = clocked("llamacpp", 3e-3), clocked("llamacpp-fa", 2e-3)
    other = Opened("onnx", scripted_session(ANSWERS), "")
    opened = [slow, fast, other]
    bench_arms.keep_better_attention(opened)
    assert opened == [fast, other]
    assert fast.name == "llamacpp"
    assert "3.00 ms without, 2.00 ms with" in fast.about
    assert fast.session.target.length == 0
    bench_arms.keep_better_attention(opened)
    assert opened == [fast, other]
