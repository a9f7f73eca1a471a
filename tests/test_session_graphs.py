"""Draft heads on the ONNX backend in whole sessions, of a bundle of graphs alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.bundle import Bundle, open_bundle
from edgespec.cli.app import main
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.drafts.graphs import GraphHead
from edgespec.errors import FormatError, UsageError
from edgespec.loading import open_draft, open_session, open_target
from edgespec.session import Session
from edgespec.targets.native import NativeTarget
from edgespec_export import pipeline
from edgespec_export.head_bundle import HeadOptions
from tests.export import heads as tiny
from tests.export.checkpoints import Shape, gguf_checkpoint

SHAPE = Shape(n_layers=tiny.LAYERS)
TEXT = "one two three one two three one two"
TOKENS = 40
WORDS = ("eagle:eagle3", "eagle:eagle", "medusa", "auto", "medusa+ngram")
ON_ONNX = Runtime(backend="onnx", threads=1)
FLAGS = ["--backend", "onnx", "--threads", "1"]


def constant(checkpoint: tiny.Checkpoint) -> tiny.Checkpoint:
    """All logits the same: the first token is always the best."""
    return with_heads(checkpoint, lambda matrix: matrix * 0)


def with_heads(
    checkpoint: tiny.Checkpoint, change: Callable[[np.ndarray], np.ndarray]
) -> tiny.Checkpoint:
    tensors = dict(checkpoint.tensors)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" or name.endswith(".1.weight"):
            tensors[name] = change(tensor)
    return replace(checkpoint, tensors=tensors)


HEADS: dict[str, tuple[tiny.Checkpoint, tiny.Checkpoint, tiny.Checkpoint]] = {
    "random": (tiny.eagle3(), tiny.eagle(own_embedding=False), tiny.medusa(rows=None)),
    "others": (tiny.eagle3(seed=8), tiny.eagle(seed=8), tiny.medusa(seed=8)),
    "constant": (constant(tiny.eagle3()), tiny.eagle(seed=9), constant(tiny.medusa())),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_checkpoint(tmp_path_factory.mktemp("target") / "tiny.gguf", SHAPE)


@pytest.fixture(scope="module")
def bundles(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """By what their heads are like."""
    found = {}
    for name, heads in HEADS.items():
        work = tmp_path_factory.mktemp(name)
        paths = tuple(head.write(work / str(i)) for i, head in enumerate(heads))
        pipeline.export(
            target,
            work / "out",
            formats=("onnx",),
            check=False,
            heads=HeadOptions(paths),
        )
        found[name] = open_bundle(work / "out")
    return found


@pytest.fixture(scope="module")
def bundle(bundles: dict[str, Bundle]) -> Bundle:
    return bundles["random"]


def session_of(
    bundle: Bundle, draft: str, tree: str = "auto", runtime: Runtime = ON_ONNX
) -> Session:
    speculation = Speculation(draft=draft, tree=tree)
    return open_session(bundle, runtime=runtime, speculation=speculation)


def sampled(temperature: float) -> Sampling:
    return Sampling(temperature=temperature, seed=3)


@pytest.fixture(scope="module")
def plain(bundle: Bundle) -> dict[float, tuple[int, ...]]:
    """What the target says, by temperature."""
    with session_of(bundle, "none") as session:
        prompt, stopping = session.encode(TEXT, raw=True), Stopping(TOKENS)
        return {
            t: session.complete(prompt, sampling=sampled(t), stopping=stopping).tokens
            for t in (0.0, 0.8)
        }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", ["auto", "best:6", "chain:3"])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_text_is_the_same_with_every_draft(
    bundles: dict[str, Bundle],
    plain: dict[float, tuple[int, ...]],
    heads: str,
    word: str,
    tree: str,
    temperature: float,
) -> None:
    sampling, stopping = sampled(temperature), Stopping(TOKENS)
    with session_of(bundles[heads], word, tree) as session:
        assert session.target.capabilities.row_invariant
        prompt = session.encode(TEXT, raw=True)
        for _ in range(2):  # the second finds KV rows, index and head as they were
            reply = session.complete(prompt, sampling=sampling, stopping=stopping)
            assert reply.tokens == plain[temperature]
        if tree != "auto":
            assert reply.stats.drafted > 0
        session.is_speculating = False
        reply = session.complete(prompt, sampling=sampling, stopping=stopping)
        assert reply.tokens == plain[temperature]
        assert reply.stats.draft == "none" and reply.stats.drafted == 0
        # The head was kept in step meanwhile.
        session.is_speculating = True
        head = session.engine.head
        assert head is not None and head.length == session.target.length
        again = [*prompt, *reply.tokens]
        more = session.complete(again, sampling=sampling, stopping=Stopping(8))
        session.reset()
        assert head.length == 0
        fresh = session.complete(again, sampling=sampling, stopping=Stopping(8))
        assert more.tokens == fresh.tokens


@pytest.mark.parametrize("draft", ["eagle:eagle3", "eagle:eagle", "medusa"])
def test_a_head_is_told_the_states_of_what_is_committed(
    bundle: Bundle, target: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_of(bundle, draft, "best:6") as session:
        head = session.engine.head
        assert isinstance(head, GraphHead)
        told: list[tuple[np.ndarray, np.ndarray]] = []
        append = head.append

        def noted(ids: np.ndarray, states: np.ndarray) -> None:
            told.append((ids.copy(), states.astype(np.float32)))
            append(ids, states)

        monkeypatch.setattr(head, "append", noted)
        session.complete(TEXT, sampling=sampled(0.0), stopping=Stopping(TOKENS))
        sequence = np.concatenate([ids for ids, _ in told])
        assert sequence.tolist() == session.engine.sequence[: len(sequence)].tolist()
    native = NativeTarget(target, context=512, threads=1)
    expected = native.hidden_states(sequence, head.taps)
    native.close()
    states = np.concatenate([states for _, states in told])
    # Both round; the states of another row would be off by more than their size.
    error = np.linalg.norm(states - expected, axis=-1)
    error /= np.linalg.norm(expected, axis=-1)
    assert error.max() < 0.3 and error.mean() < 0.1


@pytest.mark.parametrize("draft", ["eagle:eagle3", "medusa"])
@pytest.mark.parametrize("tree", ["auto", "best:6", "chain:3"])
def test_what_is_always_right_is_always_accepted(
    bundles: dict[str, Bundle], draft: str, tree: str
) -> None:
    """The constant heads draft one token, and the sampling lets no other through."""
    with session_of(bundles["constant"], draft, tree) as session:
        prompt = session.encode(TEXT, raw=True)
        options = {"stopping": Stopping(TOKENS)}
        head = session.engine.head
        token = 0 if getattr(head, "ids", None) is None else int(head.ids[0])
        sampling = Sampling(temperature=0.0, seed=3, logit_bias={token: 1e4})
        reply = session.complete(prompt, sampling=sampling, **options)
    assert reply.tokens == (token,) * TOKENS
    assert reply.stats.acceptance == 1
    assert reply.stats.tokens_per_round > (1 if tree == "auto" else 2)


@pytest.mark.parametrize("draft", ["none", "eagle:eagle3", "medusa+ngram"])
def test_c28_to_the_end_of_the_context_beyond_the_heads_positions(
    bundle: Bundle, draft: str
) -> None:
    """The head knows 256 positions, the target 512."""
    with session_of(bundle, draft, "best:6") as session:
        endless = dict.fromkeys(session.engine.eos, -1e4)
        sampling = Sampling(temperature=0.0, seed=5, logit_bias=endless)
        reply = session.complete(TEXT, sampling=sampling, stopping=Stopping(None))
        assert reply.finish_reason == "context"
        assert session.engine.sequence.shape == (513,)
        head = session.engine.head
        assert head is None or head.length == session.target.length == 512
    with session_of(bundle, "none") as session:
        alone = session.complete(TEXT, sampling=sampling, stopping=Stopping(None))
    assert reply.tokens == alone.tokens


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_no_more_tokens_than_asked_for(
    bundle: Bundle, plain: dict[float, tuple[int, ...]], most: int
) -> None:
    with session_of(bundle, "medusa", "best:6") as session:
        prompt = session.encode(TEXT, raw=True)
        options = {"sampling": sampled(0.0), "stopping": Stopping(most)}
        assert session.complete(prompt, **options).tokens == plain[0.0][:most]


def test_what_a_draft_takes_is_told(bundle: Bundle) -> None:
    for word in ("eagle", "medusa"):
        with session_of(bundle, word, "best:4") as session:
            stats = session.complete("hi", stopping=Stopping(8)).stats
        assert stats.draft == {"eagle": "eagle3"}.get(word, word)
        assert stats.draft_weights_mb > 0.01
        assert stats.draft_state_mb > 0
        assert stats.depth_tried[0] > 0


def test_auto_is_the_eagle_head_with_ngrams(bundle: Bundle) -> None:
    with session_of(bundle, "auto") as session:
        assert session.draft == "eagle3+ngram"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "eagle:none",
            "neither .* it has eagle:eagle3, eagle:eagle, medusa:medusa and",
        ),
        ("eagle:.", r"on the onnx backend a head is a graph .* --head \."),
        ("model", "model needs the native or the llamacpp backend"),
    ],
)
def test_drafts_that_onnx_does_not_have(
    bundle: Bundle, option: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        session_of(bundle, option)


def test_a_target_without_the_heads_taps(
    bundle: Bundle, target: Path, tmp_path
) -> None:
    options = {"formats": ("onnx",), "check": False}
    pipeline.export(target, tmp_path / "bare", **options)
    bare = open_target(open_bundle(tmp_path / "bare"), ON_ONNX)
    from edgespec.loading import DraftFile

    file = DraftFile(
        bundle.path_of("draft-eagle3.onnx"),
        None,
        bundle.path_of("draft-eagle3-step.onnx"),
    )
    with pytest.raises(FormatError, match=r"reads hidden states \[2, 4, 5\]; .*lacks"):
        open_draft(bare, file)
    bare.close()


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize("draft", ["auto", "eagle", "medusa"])
def test_verify(
    bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    draft: str,
    temperature: str,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": [TEXT, "three one two"]}))
    flags = ["--prompts", str(prompts), "-n", "30", "--json", "-", *FLAGS]
    flags += ["--draft", draft, "--tree", "best:5", "--turns", "2"]
    flags += ["--temperature", temperature]
    assert main(["verify", str(bundle.directory), *flags]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["backend"] == "onnx"
    assert data["identical"] == data["runs"] == 2


def test_bench(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT}))
    flags = ["--prompts", str(prompts), "-n", "12", "--json", "-", "--threads", "1"]
    flags += ["--methods", "plain,ngram,eagle,medusa,auto", "--tree", "best:4"]
    assert main(["bench", str(bundle.directory), *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["backend"]) for row in rows] == [
        (method, "onnx") for method in ("plain", "ngram", "eagle", "medusa", "auto")
    ]
    for row in rows:
        assert row["identical"]
        if row["method"] in ("eagle", "medusa"):
            assert row["draft_share"] > 0
            assert row["extra_memory_mb"] > 0.01
    flags[flags.index("--methods") + 1] = "plain,model"
    assert main(["bench", str(bundle.directory), *flags]) == 2
    assert "model needs the native or the llamacpp backend" in capsys.readouterr().err


def test_generate_and_chat(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for draft in ("none", "eagle", "medusa"):
        flags = [*FLAGS, "--draft", draft, "-n", "20", "--temperature", "0"]
        command = ["generate", str(bundle.directory), "-p", TEXT, "--raw", *flags]
        assert main(command) == 0
        said.append(capsys.readouterr().out)
        assert main(["chat", str(bundle.directory), TEXT, *flags]) == 0
        said.append(capsys.readouterr().out)
    assert said[2:] == said[:2] * 2
