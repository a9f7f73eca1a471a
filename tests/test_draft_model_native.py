"""Small models as drafts in C: which files fit, what is told, what is accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec._native import NativeModel
from edgespec._native.head import NativeDrafter, NativeHead
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.errors import EdgeSpecError, FormatError, UnsupportedError
from edgespec.loading import load
from edgespec.session import Session
from edgespec_export import gguf_file, sources
from tests.export import draft_models, families

TEXT = "one two three one two three one two"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> families.Model:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return families.gguf(path, kind="Q8_0", n_layers=4, is_tied=request.param)


@pytest.fixture(scope="module")
def model(target: families.Model) -> NativeModel:
    made = NativeModel(target.path, threads=2)
    made.load()
    return made


def test_what_a_draft_says_of_itself(
    target: families.Model, model: NativeModel, tmp_path: Path
) -> None:
    ids = [*range(0, 320, 5)]
    path = draft_models.write(
        target.weights, (0, 3), tmp_path / "d.gguf", ids=ids, quant="q4_0"
    )
    head = NativeHead(model, path)
    info = head.info
    assert (info.kind, info.hidden, info.draft_vocab) == ("model", 64, 64)
    assert (info.max_position, info.depth, info.taps) == (512, 0, ())
    assert info.file_bytes == path.stat().st_size
    layers = sum(np.prod(t.shape) for t in _matrices(path, target)) * 18 // 32
    rows = 64 * 64 * 34 // 32  # of the target's output
    assert layers + rows <= info.weight_bytes <= layers + rows + 2048
    drafter = NativeDrafter(head)
    kv = 2 * 2 * 2 * 16 * (256 + 4 + 64) * 2
    assert kv <= drafter.memory < kv + 64 * 8 * 4 + (1 << 20)
    drafter.append(np.arange(9), None)
    assert drafter.length == 9
    drafter.truncate(4)
    assert drafter.length == 4
    drafter.close()
    head.close()


def _matrices(path: Path, target: families.Model) -> list[families.WeightSet]:
    read = sources.gguf.read(path, host=target.weights)
    return [t for t in read.tensors.values() if len(t.shape) == 2]


def test_beside_a_packed_target(
    target: families.Model, model: NativeModel, tmp_path: Path
) -> None:
    model.save(tmp_path / "packed.gguf")
    packed = NativeModel(tmp_path / "packed.gguf", threads=1)
    packed.load()
    path = draft_models.write(target.weights, (1,), tmp_path / "d.gguf", ids=[3, 9])
    head = NativeHead(packed, path)
    assert head.info.draft_vocab == 2
    head.close()
    packed.close()


def test_drafts_of_other_targets(
    target: families.Model, model: NativeModel, tmp_path: Path
) -> None:
    weights = draft_models.renamed(target.weights, 0, "<another>")
    other = draft_models.whole(weights, (0,), tmp_path / "other.gguf")
    with pytest.raises(FormatError, match="token 0 is .* and .* another vocabulary"):
        NativeHead(model, other)
    wide = families.gguf(tmp_path / "wide.gguf", hidden=96)
    path = draft_models.write(wide.weights, (0,), tmp_path / "d.gguf")
    with pytest.raises(FormatError, match="is 96 wide, that of the target is 64 wide"):
        NativeHead(model, path)
    path = draft_models.write(weights, (0,), tmp_path / "d.gguf")
    with pytest.raises(FormatError, match="made for vocabulary '.*', the target has"):
        NativeHead(model, path)
    with pytest.raises(UnsupportedError, match="uses its target's embedding"):
        NativeModel(path, threads=1)
    whole = path.read_bytes()
    for n_bytes in (0, 3, 24, 500, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:n_bytes])
        with pytest.raises(EdgeSpecError, match="cut.gguf"):
            NativeHead(model, tmp_path / "cut.gguf")


def test_another_family_and_width_with_the_same_tokens(
    model: NativeModel, tmp_path: Path
) -> None:
    for family in ("qwen2", "qwen3", "gemma3"):
        path = families.gguf(tmp_path / "a.gguf", family, hidden=32, ffn=64).path
        head = NativeHead(model, path)
        assert (head.info.hidden, head.info.draft_vocab) == (32, 320)
        head.close()


# ---- in sessions


def session_of(target: Path, draft: str, tree: str = "chain:4") -> Session:
    return load(
        target,
        runtime=Runtime(threads=1),
        speculation=Speculation(draft=draft, tree=tree),
    )


def sampled(temperature: float) -> Sampling:
    return Sampling(temperature=temperature, seed=5)


@pytest.mark.parametrize(("temperature", "replies"), [(0.0, 1), (0.3, 12)])
def test_a_draft_that_is_the_target_is_always_right(
    target: families.Model, temperature: float, replies: int
) -> None:
    tokens = 0  # few of them are likely, so that noise is computed for what wins
    with (
        session_of(target.path, "none") as plain,
        session_of(target.path, f"model:{target.path}") as session,
    ):
        prompt = session.encode(TEXT, raw=True)
        for seed in range(replies):
            sampling = Sampling(temperature=temperature, top_p=1.0, seed=seed)
            expected = plain.complete(prompt, sampling=sampling, stopping=Stopping(120))
            reply = session.complete(prompt, sampling=sampling, stopping=Stopping(120))
            assert reply.tokens == expected.tokens
            assert reply.stats.rounds <= 2 + len(reply.tokens) / 5
            tokens += len(reply.tokens)
    assert tokens >= 100


def test_a_reply_longer_than_a_draft_looks_back(target: families.Model) -> None:
    with session_of(target.path, "none") as session:
        prompt = session.encode(TEXT, raw=True)
        stopping = Stopping(480 - len(prompt))
        plain = session.complete(prompt, sampling=sampled(0), stopping=stopping)
    assert len(prompt) + len(plain.tokens) == 480
    with session_of(target.path, f"model:{target.path}") as session:
        reply = session.complete(prompt, sampling=sampled(0), stopping=stopping)
    assert reply.tokens == plain.tokens
    assert reply.stats.depth_tried[0] >= reply.stats.rounds - 1  # it never gives up


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_with_any_draft(
    target: families.Model, tmp_path: Path, temperature: float
) -> None:
    near = draft_models.write(
        target.weights, (0, 3), tmp_path / "near.gguf", ids=[*range(1, 320, 2)]
    )
    far = families.gguf(tmp_path / "far.gguf", "gemma3", hidden=32, seed=9).path
    sure = tmp_path / "sure.gguf"
    weights = families.gguf(sure, n_layers=1, is_tied=False, seed=4).weights
    output = np.zeros((320, 64), np.float32)
    output[7] = 3  # one token, whatever is said
    one = replace(
        weights.tensors["output"],
        load_raw=lambda: output.view(np.uint8),
        load_f32=lambda: output,
    )
    tensors = dict(weights.tensors) | {"output": one}
    gguf_file.write(replace(weights, tensors=tensors), None, sure)
    sampling, stopping = sampled(temperature), Stopping(60)
    with session_of(target.path, "none") as session:
        prompt = session.encode(TEXT, raw=True)
        plain = session.complete(prompt, sampling=sampling, stopping=stopping).tokens
    for path in (near, far, sure):
        for tree in ("best:8", "chain:2"):
            with session_of(target.path, f"model:{path}", tree) as session:
                reply = session.complete(prompt, sampling=sampling, stopping=stopping)
                assert reply.tokens == plain
                assert reply.stats.draft == "model"
