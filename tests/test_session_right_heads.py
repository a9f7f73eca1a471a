"""Heads that are right, always the same or another model's, in whole sessions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgespec.bundle import Bundle, open_bundle
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.loading import open_session
from edgespec.session import Reply, Session
from edgespec_export import head_gguf, onnx_head, pipeline, sources
from edgespec_export.head_bundle import HeadOptions
from edgespec_export.heads import share_with_target
from edgespec_export.sources import heads as reader
from edgespec_export.weights import WeightSet
from tests.export import heads as tiny
from tests.export.checkpoints import Shape, gguf_checkpoint
from tests.export.fitted import fitted
from tests.export.test_onnx_head import run_host
from tests.test_session_graphs import HEADS

TEXT = "one two three one two three one two"
TOKENS = 48
BACKENDS = ("native", "onnx")
KINDS = {
    "eagle3": tiny.eagle3(draft_vocab=None),
    "eagle": tiny.eagle(own_embedding=False),
    "medusa": tiny.medusa(),
}
WORDS = ("eagle:eagle3", "eagle:eagle", "medusa")


def session_of(bundle: Bundle, backend: str, draft: str, tree: str = "auto") -> Session:
    return open_session(
        bundle,
        runtime=Runtime(backend=backend, threads=1),
        speculation=Speculation(draft=draft, tree=tree),
    )


def reply_of(session: Session, temperature: float) -> Reply:
    prompt = session.encode(TEXT, raw=True)
    sampling = Sampling(temperature=temperature, seed=3)
    return session.complete(prompt, sampling=sampling, stopping=Stopping(TOKENS))


@dataclass(frozen=True)
class World:
    """A target in both containers, what it says, and where it lies."""

    path: Path
    weights: WeightSet
    prompt: tuple[int, ...]
    plain: dict[tuple[str, float], tuple[int, ...]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    work = tmp_path_factory.mktemp("target")
    path = gguf_checkpoint(work / "tiny.gguf", Shape(n_layers=tiny.LAYERS))
    pipeline.export(path, work / "out", formats=("gguf", "onnx"), check=False)
    bundle, plain = open_bundle(work / "out"), {}
    for backend in BACKENDS:
        with session_of(bundle, backend, "none") as session:
            prompt = tuple(int(i) for i in session.encode(TEXT, raw=True))
            for temperature in (0.0, 0.8):
                reply = reply_of(session, temperature)
                assert len(reply.tokens) == TOKENS
                plain[backend, temperature] = reply.tokens
    return World(path, sources.read(path), prompt, plain)


@dataclass(frozen=True)
class Right:
    """A bundle whose heads know the reply of a backend at a temperature."""

    bundle: Bundle
    backend: str
    temperature: float


@pytest.fixture(
    scope="module", params=[(b, t) for b in BACKENDS for t in (0.0, 0.8)], ids=str
)
def right(
    request: pytest.FixtureRequest,
    world: World,
    tmp_path_factory: pytest.TempPathFactory,
) -> Right:
    backend, temperature = request.param
    work = tmp_path_factory.mktemp("right")
    text = [*world.prompt, *world.plain[request.param]]
    paths = []
    for name, checkpoint in KINDS.items():
        source = checkpoint.write(work / name)
        head = reader.read(source, world.weights.config)
        head = fitted(share_with_target(head, world.weights), world.weights, text)
        paths.append(work / f"{name}.gguf")
        head_gguf.write(head, paths[-1], target=world.weights, quant="f32")
    formats = ("onnx" if backend == "onnx" else "gguf",)
    options = HeadOptions(tuple(paths))
    pipeline.export(
        world.path, work / "out", formats=formats, check=False, heads=options
    )
    return Right(open_bundle(work / "out"), backend, temperature)


@pytest.mark.parametrize("tree", ["auto", "best:6", "chain:3"])
@pytest.mark.parametrize("word", WORDS)
def test_right_heads_give_the_same_text_in_fewer_rounds(
    world: World, right: Right, word: str, tree: str
) -> None:
    with session_of(right.bundle, right.backend, word, tree) as session:
        for _ in range(2):
            reply = reply_of(session, right.temperature)
            assert reply.tokens == world.plain[right.backend, right.temperature]
        if tree != "auto":
            assert reply.stats.tokens_per_round > 1.6


@pytest.mark.parametrize("right", [("onnx", 0.0)], indirect=True, ids=str)
@pytest.mark.parametrize("word", WORDS)
def test_a_host_without_edgespec_takes_as_many_rounds(
    world: World, right: Right, word: str, tmp_path: Path
) -> None:
    """The graphs' tree, grown by the graph there and level by level here."""
    head = next(h for h in right.bundle.manifest.heads if h.name == word.split(":")[-1])
    depth = 3 if word == "medusa" else 9
    parent, rank = onnx_head.prune(onnx_head.DEFAULT_TREE, depth)
    shape = tmp_path / "tree.json"
    shape.write_text(json.dumps({"parent": list(parent), "rank": list(rank)}))
    with session_of(right.bundle, "onnx", word, str(shape)) as session:
        reply = reply_of(session, 0.0)
    assert reply.stats.tokens_per_round > 1.6
    taps = [",".join(map(str, head.taps))] if head.kind == "eagle3" else []
    first, *rest = reply.tokens  # the first one comes of the prompt, without a draft
    ids = ",".join(map(str, [*world.prompt, first]))
    files = [right.bundle.directory / n for n in ("target.onnx", head.files["onnx"])]
    drafted = run_host(*files, len(rest), ids, *taps)
    assert drafted["tokens"] == rest
    assert drafted["forwards"] == reply.stats.rounds


@pytest.fixture(scope="module")
def wrong(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    found = {}
    for kind, heads in HEADS.items():
        work = tmp_path_factory.mktemp(kind)
        paths = tuple(head.write(work / str(i)) for i, head in enumerate(heads))
        options = HeadOptions(paths)
        pipeline.export(world.path, work / "out", check=False, heads=options)
        found[kind] = open_bundle(work / "out")
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", HEADS)
def test_whatever_a_native_head_is_like_the_text_is_the_same(
    world: World, wrong: dict[str, Bundle], kind: str, word: str, temperature: float
) -> None:
    """Random, another model's and one whose proposals never change."""
    for tree in ("auto", "best:6"):
        with session_of(wrong[kind], "native", word, tree) as session:
            reply = reply_of(session, temperature)
        assert reply.tokens == world.plain["native", temperature]
    assert reply.stats.drafted > 0
