"""Draft heads of ours beside a model in llama.cpp: what it tells them, what comes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgespec._native import tree_derive
from edgespec.bundle import Bundle, open_bundle
from edgespec.cli.app import main
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.errors import UnsupportedError, UsageError
from edgespec.loading import open_session
from edgespec.session import Session
from edgespec.targets import llamacpp
from edgespec.targets.llamacpp import LlamaCppTarget
from edgespec.targets.native import NativeTarget
from edgespec.tree.topology import chain
from edgespec_export import pipeline
from edgespec_export.head_bundle import HeadOptions
from tests.export import heads as tiny
from tests.export.checkpoints import Shape, gguf_checkpoint

SHAPE = Shape(n_layers=tiny.LAYERS)
TEXT = "one two three one two three one two"
WORDS = ("eagle:eagle3", "eagle:eagle", "medusa", "model", "eagle+ngram:eagle3")
FILES = ("draft-eagle3.gguf", "draft-eagle.gguf", "draft-medusa.gguf")
PARENTS = [-1, 0, 0, 1, 1, 2, 5]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    work = tmp_path_factory.mktemp("bundle")
    target = gguf_checkpoint(work / "tiny.gguf", SHAPE)
    paths = (
        tiny.eagle3().write(work / "e3"),
        tiny.eagle(own_embedding=False).write(work / "e"),
        tiny.medusa(rows=None).write(work / "m"),
        gguf_checkpoint(work / "small.gguf", Shape(n_layers=1)),
    )
    options = {"formats": ("gguf",), "check": False, "heads": HeadOptions(paths)}
    pipeline.export(target, work / "out", **options)
    return open_bundle(work / "out")


def session_of(bundle: Bundle, draft: str, tree: str = "auto") -> Session:
    return open_session(
        bundle,
        runtime=Runtime(backend="llamacpp", threads=1),
        speculation=Speculation(draft=draft, tree=tree),
    )


def tokens(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, n).astype(np.int32)


@pytest.mark.parametrize("name", FILES)
def test_a_head_is_told_the_states_of_what_is_committed(
    bundle: Bundle, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle.path_of("target.gguf")
    target = LlamaCppTarget(path, context=300, threads=1)
    before = target.prefill(tokens(20, 1)).copy()
    head = target.open_head(bundle.path_of(name))
    target.attach(head)
    assert target.length == 0
    told: list[tuple[np.ndarray, np.ndarray]] = []
    append = head.append

    def noted(ids: np.ndarray, states: np.ndarray) -> None:
        told.append((ids.copy(), states.copy()))
        append(ids, states)

    monkeypatch.setattr(head, "append", noted)
    assert np.array_equal(target.prefill(tokens(20, 1)), before)
    target.truncate(0)
    told.clear()
    target.prefill(tokens(150, 1))  # in parts
    tree = tree_derive(tokens(len(PARENTS), 2), PARENTS)
    for rows in ([0, 2, 5, 6], [0, 1, 4], [0]):
        target.forward(tree)
        target.commit(np.array(rows, np.int32))
        assert head.length == target.length
    target.forward(tree)
    target.commit(np.zeros(0, np.int32))
    assert head.length == target.length == 158
    sequence = np.concatenate([ids for ids, _ in told])
    native = NativeTarget(path, context=300, threads=1)
    expected = native.hidden_states(sequence, head.taps)
    states = np.concatenate([states for _, states in told])
    # Both round; the states of another row would be off by more than their size.
    error = np.linalg.norm(states - expected, axis=-1)
    error /= np.linalg.norm(expected, axis=-1)
    assert error.max() < 0.3 and error.mean() < 0.1
    target.truncate(40)
    assert head.length == 40
    target.attach(None)
    assert np.array_equal(target.prefill(tokens(20, 1)), before)
    head.close()
    for opened in (target, native):
        opened.close()


def test_what_an_interrupt_left_is_cut(bundle: Bundle) -> None:
    target = LlamaCppTarget(bundle.path_of("target.gguf"), context=64, threads=1)
    head = target.open_head(bundle.path_of("draft-medusa.gguf"))
    target.attach(head)
    target.prefill(tokens(5, 1))
    head.append(tokens(3, 2), np.zeros((3, 1, tiny.HIDDEN), np.float32))
    target.prefill(tokens(2, 3))
    assert head.length == target.length == 7
    target.attach(None)
    head.close()
    target.close()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_verify_explains_what_rounding_moved(
    bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    word: str,
    temperature: str,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": [TEXT, "three one two"]}))
    flags = ["--prompts", str(prompts), "-n", "30", "--json", "-", "--threads", "1"]
    flags += ["--draft", word, "--tree", "best:5", "--turns", "2"]
    flags += ["--temperature", temperature, "--backend", "llamacpp"]
    assert main(["verify", str(bundle.directory), *flags]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["backend"] == "llamacpp" and data["runs"] == 2
    for run in data["details"]:
        assert run["spec"]["stats"]["drafted"] > 0


def test_a_draft_that_is_the_target_is_accepted(bundle: Bundle) -> None:
    """But for what the two engines round differently."""
    draft = f"model:{bundle.path_of('target.gguf')}"
    sampling = Sampling(temperature=0.0, seed=3)
    with session_of(bundle, draft, "chain:3") as session:
        stats = session.complete(TEXT, sampling=sampling, stopping=Stopping(40)).stats
    assert stats.draft == "model"
    assert stats.depth_accepted[0] > 0.8 * stats.depth_tried[0] > 5
    assert stats.tokens_per_round > 2.5


@pytest.mark.parametrize("word", WORDS)
def test_turns_go_on_where_the_last_ended(bundle: Bundle, word: str) -> None:
    sampling = Sampling(temperature=0.0, seed=3)
    with session_of(bundle, word, "best:4") as session:
        head = session.engine.head
        assert head is not None
        prompt = session.encode(TEXT, raw=True)
        for is_speculating in (True, False, True):
            session.is_speculating = is_speculating
            reply = session.complete(prompt, sampling=sampling, stopping=Stopping(12))
            assert head.length == session.target.length
            assert (reply.stats.drafted > 0) == is_speculating
            prompt = [*prompt, *reply.tokens, 5]
        session.reset()
        assert head.length == 0


def test_the_weights_it_takes_twice_are_told(bundle: Bundle) -> None:
    whole = bundle.path_of("target.gguf").stat().st_size
    with session_of(bundle, "medusa", "best:4") as session:
        stats = session.complete("hi", stopping=Stopping(8)).stats
    assert stats.draft_weights_mb > whole / 2e6


def test_auto_does_not_take_them_unasked(bundle: Bundle) -> None:
    with session_of(bundle, "auto") as session:
        assert session.draft == "ngram"
        assert session.engine.head is None


def test_a_library_without_layers_states(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llamacpp, "layer_states", lambda api: None)
    words = r"reads hidden states \[2, 4, 5\], .* --backend native"
    with pytest.raises(UnsupportedError, match=words):
        session_of(bundle, "eagle")
    with session_of(bundle, "medusa") as session:
        assert session.draft == "medusa"


def test_more_rows_than_there_is_room_for_states(bundle: Bundle) -> None:
    target = LlamaCppTarget(bundle.path_of("target.gguf"), context=200, threads=1)
    head = target.open_head(bundle.path_of("draft-medusa.gguf"))
    target.attach(head)
    with pytest.raises(UsageError, match="1 to 64 rows"):
        target.forward(chain(tokens(100, 1)), np.array([99]))
    target.attach(None)
    target.forward(chain(tokens(100, 1)), np.array([99]))
    head.close()
    target.close()
