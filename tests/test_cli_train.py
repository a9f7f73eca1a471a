"""`edgespec train`: from a tiny target to a head's files, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from edgespec.cli.app import main
from edgespec.config import Training
from edgespec_export.sources import heads, hf
from edgespec_export.train import card, layouts, loop, shards, texts, training, writing
from tests.export import families, train_data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> families.Model:
    return train_data.target(tmp_path_factory.mktemp("target") / "a.gguf")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little data, and replies short enough for it to hold many prompts."""
    monkeypatch.setattr(writing, "AHEAD", 8)
    monkeypatch.setattr(texts, "MIX", {"question": 1, "role": 2, "own": 1})
    monkeypatch.setattr(training, "REPLY_TOKENS", 16)
    monkeypatch.setattr(training, "MEASURED_REPLY", 16)


def train(made: families.Model, *options: str) -> int:
    common = ("--minutes", "0.02", "--tokens", "9000", "--threads", "1", "--seed", "1")
    return main(["train", str(made.path), *common, *options])


@pytest.mark.parametrize("head", ["eagle3", "medusa", "pruned:0,7"])
def test_from_a_target_to_a_head(
    made: families.Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    head: str,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "he said"}\n{"prompt": "the river"}\n')
    out = tmp_path / "head"
    options = ["--head", head, "-o", str(out), "--measure", str(prompts)]
    assert train(made, *options, "--draft-vocab", "100") == 0
    printed, talked = capsys.readouterr()
    assert printed == f"{out}\n"
    assert "held-out 0" in talked and "| measured 0" in talked and " = 1." in talked
    report = json.loads((out / training.REPORT).read_text())
    assert report["settings"]["draft_vocab"] == 100
    assert report["target"]["sha256"] == made.weights.origin.sha256
    assert report["data"]["held_out"] > 0 and report["data"]["seed"] == 1
    assert report["tokens_trained_on"] > 0
    assert report["history"][-1]["by_depth"]["measured"]
    written = (out / training.CARD).read_text()
    assert f"--head {head} " in written and made.weights.origin.sha256 in written
    assert "| held-out | 0." in written and "| measured | 0." in written
    licensed = report | {"target": report["target"] | {"licence": "apache-2.0"}}
    (tmp_path / "README.md").write_text(card.text(licensed))
    assert hf.licence(tmp_path) == "apache-2.0"
    if head == "pruned:0,7":
        assert (out / "draft.gguf").is_file()
    else:
        read = heads.read(out, made.weights.config)
        assert (read.kind, read.draft_vocab) == (head, 100)

    assert train(made, *options) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert train(made, *options, "--draft-vocab", "100", "--resume") == 0
    assert train(made, *options, "--resume") == 2
    words = f"made with draft_vocab 100, now {Training().draft_vocab}"
    assert words in capsys.readouterr().err


def test_data_are_shared_by_heads(made: families.Model, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for head, layout in (("medusa", "safeailab"), ("eagle3", "speculators")):
        options = ["--head", head, "-o", str(tmp_path / head), "--data", str(data)]
        assert train(made, *options, "--layout", layout) == 0
        changed = {path: path.stat().st_mtime_ns for path in data.iterdir()}
    assert not (tmp_path / "medusa" / "data").exists()
    assert (
        train(
            made, "--head", "pruned:3", "-o", str(tmp_path / "p"), "--data", str(data)
        )
        == 0
    )
    assert changed == {path: path.stat().st_mtime_ns for path in data.iterdir()}
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--head", "eagle"], "--head: expected eagle3, medusa or pruned:LAYERS"),
        (["--head", "pruned"], "such as pruned:0,1,28,29"),
        (["--head", "medusa:3"], "got 'medusa:3'"),
        (["--head", "medusa:"], "got 'medusa:'"),
        (["--head", "pruned:"], "got 'pruned:'"),
        (["--head", "pruned:0,x"], "expected numbers of layers, got 'pruned:0,x'"),
        (["--head", "pruned:0,8"], "expected some of layers 0 to 7, ascending"),
        (["--head", "medusa", "--layout", "speculators"], "not medusa ones"),
        (["--head", "medusa", "--layout", "x"], "--layout: expected safeailab"),
        (["--head", "medusa", "--minutes", "0"], "--minutes: expected more than 0"),
        (["--head", "medusa", "--minutes", "inf"], "and an end, got inf"),
        (["--head", "medusa", "--seed", "-1"], "--seed: expected 0 to 2^63 - 1"),
        (["--head", "medusa", "--seed", str(2**63)], "--seed: expected 0 to"),
        (["--head", "medusa", "--prompts", "/none"], "prompts: cannot read /none"),
        (["--head", "medusa", "--measure", "/none"], "prompts: cannot read /none"),
        (["--head", "medusa", "--data", __file__], "cannot be a directory: File"),
        (["--head", "medusa", "--tokens", "0"], "--tokens: expected 1 or more"),
        (["--head", "medusa", "--draft-vocab", "0"], "--draft-vocab: expected 1"),
        (["--head", "medusa", "--threads", "0"], "--threads: expected 1 or more"),
        (["--head", "medusa", "--resume"], "no checkpoint; without it"),
        (["--head", "medusa", "--tokens", "20"], "too few for a reply to learn from"),
    ],
)
def test_what_cannot_work_says_so(
    made: families.Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    assert train(made, "-o", str(tmp_path / "out"), *options) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_prompts_to_measure_on_are_read_before_data_are_written(
    made: families.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("nonsense")
    for option in ("--prompts", "--measure"):
        options = ["--head", "medusa", "-o", str(out), option, str(prompts)]
        assert train(made, *options) == 1
        assert "prompts.jsonl, line 1" in capsys.readouterr().err
        assert not out.exists()


def test_data_do_not_grow_under_a_training_that_is_resumed(
    made: families.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--head", "medusa", "-o", str(tmp_path)]
    assert train(made, *options) == 0
    shards = sorted(tmp_path.glob("data/*"))
    assert train(made, *options, "--tokens", "90000", "--resume") == 2
    words = r"made with \d+ tokens of data, now --tokens 90000; .* another --out"
    assert re.search(words, capsys.readouterr().err)
    assert sorted(tmp_path.glob("data/*")) == shards
    assert train(made, *options, "--resume") == 0


def test_damaged_files_of_a_training_are_named(
    made: families.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--head", "medusa", "-o", str(tmp_path), "--resume"]
    assert train(made, *options[:-1]) == 0
    whole = loop.CHECKPOINT, "data/data.json", "data/shard-00000.json"
    arrays = [f"data/shard-00000.{name}.npy" for name in ("states", "tokens")]
    for name in (*whole, *arrays):
        path = tmp_path / name
        kept = path.read_bytes()
        for damaged in (b"", b"{", b"{}", b"[1]", kept[:-9], kept[: len(kept) // 2]):
            path.write_bytes(damaged)
            capsys.readouterr()
            assert train(made, *options) == 1, (name, damaged[:9])
            said = capsys.readouterr().err
            assert f"edgespec: {path}: " in said and "; " in said
            assert "remove " in said or "take another" in said
        path.write_bytes(kept)
    path.unlink()
    assert train(made, *options) == 1
    assert f"edgespec: {path}: missing; remove shard-00000.*" in capsys.readouterr().err
    path.write_bytes(kept)
    torch.save({"settings": {}}, tmp_path / loop.CHECKPOINT)
    assert train(made, *options) == 1
    assert "not a checkpoint: it lacks at, best, losses" in capsys.readouterr().err


def test_altered_files_of_a_training_are_named(
    made: families.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, and read as what they are, but not as anything wrote them."""
    options = ["--head", "medusa", "-o", str(tmp_path), "--resume"]
    assert train(made, *options[:-1]) == 0
    index = tmp_path / "data/shard-00000.json"
    kept = index.read_text()
    shard = json.loads(kept)
    for end in (-7, 0, "40", 1 << 40):
        index.write_text(json.dumps(shard | {"ends": [end, *shard["ends"][1:]]}))
        capsys.readouterr()
        assert train(made, *options) == 1
        assert f"{index}: damaged: not a shard's index; " in capsys.readouterr().err
    index.write_text(kept)
    path = tmp_path / loop.CHECKPOINT
    whole = torch.load(path, weights_only=True)
    cut = {name: tensor[..., :-1] for name, tensor in whole["module"].items()}
    at = {name: value for name, value in whole["at"].items() if name != "history"}
    for changes in (
        {"module": cut},
        {"at": at},
        {"at": whole["at"] | {"where": 1}},
        {"optimizers": whole["optimizers"][:-1]},
        {"best": "good"},
        {"random": torch.zeros(3)},
    ):
        torch.save(whole | changes, path)
        capsys.readouterr()
        assert train(made, *options) == 1, list(changes)
        said = capsys.readouterr().err
        assert f"edgespec: {path}: damaged: " in said and "; remove it" in said


def test_one_training_at_a_time_writes_data(
    made: families.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--head", "medusa", "-o", str(tmp_path)]
    data = tmp_path / "data"
    with shards.written_alone(data):
        assert train(made, *options) == 2
        said = capsys.readouterr().err
        assert f"--data {data}: another training is writing there; wait" in said
        assert not list(data.glob("shard-*"))
    assert train(made, *options) == 0
    with shards.written_alone(data):  # which has all there are to be
        assert train(made, *options, "--resume") == 0


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (np, "save", OSError("9 requested and 5 written")),
        (torch, "save", RuntimeError("[enforce fail] unexpected pos\nat line 9")),
        (layouts, "save_file", SafetensorError("I/O error")),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_no_part(
    made: families.Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    error: Exception,
) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(module, name, full)
    assert train(made, "--head", "medusa", "-o", str(tmp_path)) == 1
    first = str(error).partition("\n")[0]
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"edgespec: {tmp_path}/")
    assert said.endswith(
        f": cannot write: {first}; make room there, or write elsewhere"
    )
    assert not list(tmp_path.rglob("*.part"))


SCRIPT = """
import hashlib, json, sys
from pathlib import Path
from edgespec.cli.app import main
from edgespec_export.train import loop, texts, training, writing

writing.AHEAD, training.REPLY_TOKENS = 8, 16
texts.MIX = {"question": 1, "role": 2, "own": 1}
step, run, seen = loop.Loop._step, loop.Loop.run, []

def noted_step(self, batch):
    seen.append(hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest())
    step(self, batch)

def noted_run(self):
    run(self)
    weights = b"".join(v.detach().numpy().tobytes() for v in self.bare.parameters())
    said = {"weights": hashlib.sha256(weights).hexdigest(), "batches": seen}
    rank = self._accelerator.process_index
    Path(f"{sys.argv[0]}.{rank}.json").write_text(json.dumps(said))

loop.Loop._step, loop.Loop.run = noted_step, noted_run
sys.exit(main(sys.argv[1:]))
"""


def test_two_processes_learn_one_head(made: families.Model, tmp_path: Path) -> None:
    """From batches of their own, with data one of them has written."""
    script, out = tmp_path / "two.py", tmp_path / "head"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    options = ["--head", "eagle3", "-o", str(out), "--minutes", "0.02"]
    options += ["--tokens", "9000", "--threads", "1", "--draft-vocab", "100"]
    options += ["--seed", "1"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), "train", str(made.path), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    first, second = (
        json.loads(script.with_name(f"two.py.{rank}.json").read_text())
        for rank in range(2)
    )
    assert first["weights"] == second["weights"]
    assert len(first["batches"]) == len(second["batches"]) > 0
    assert all(a != b for a, b in zip(first["batches"], second["batches"], strict=True))
    assert heads.read(out, made.weights.config).draft_vocab == 100
    written = json.loads((out / training.REPORT).read_text())
    assert written["history"][-1]["step"] == len(first["batches"])


def test_a_target_too_shallow_for_eagle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = train_data.target(tmp_path / "a.gguf", n_layers=4)
    assert train(made, "--head", "eagle3", "-o", str(tmp_path / "out")) == 2
    assert "7 layers or more" in capsys.readouterr().err
    assert train(made, "--head", "medusa", "-o", str(tmp_path / "out")) == 0


def test_without_the_extra_it_is_named(
    made: families.Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in sys.modules if n.startswith("edgespec_export.train")]:
        monkeypatch.delitem(sys.modules, name)
    import edgespec_export

    monkeypatch.delattr(edgespec_export, "train", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert train(made, "--head", "medusa", "-o", str(tmp_path / "out")) == 1
    assert "pip install 'edgespec[export,train]'" in capsys.readouterr().err
