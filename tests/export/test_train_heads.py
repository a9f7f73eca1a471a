"""Heads in training: what they compute, that they learn, how they are kept."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError, UsageError
from edgespec_export import draft_model, forward, head_forward, sources
from edgespec_export.sources import heads
from edgespec_export.train import layouts, loop, machine, objective, training
from edgespec_export.train.eagle3 import Eagle3
from edgespec_export.train.loop import Budget, Loop, Measure
from edgespec_export.train.medusa import Medusa
from edgespec_export.train.optimizers import learning_rate
from edgespec_export.train.packing import Batch, Batches, pack, pieces
from edgespec_export.train.pruned import Pruned
from edgespec_export.train.shards import Stored
from tests.export import families, train_data

DEPTHS = 3
WIDTH = 160


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> families.Model:
    return train_data.target(tmp_path_factory.mktemp("target") / "a.gguf")


@pytest.fixture(scope="module")
def written(made: families.Model) -> list[Stored]:
    """Two of three to learn from."""
    found = train_data.written(made, 36, 60)
    return [
        train_data.stored(s, is_held_out=i % 3 == 0 and s.temperature == 0)
        for i, s in enumerate(found)
    ]


def head_of(made: families.Model, kind: str, ids: NDArray[np.int64]) -> Any:
    torch.manual_seed(3)
    wanted = training.Wanted(
        head=training.HeadKind.parse(kind), directory=Path(), data=Path()
    )
    if kind == "medusa":
        return Medusa(made.weights.config, forward.head(made.weights), 200, DEPTHS)
    if kind.startswith("pruned"):
        return Pruned(made.weights, wanted.head.layers, ids, DEPTHS)
    return Eagle3(
        made.weights.config,
        made.weights.tensors["token_embd"].load_f32(),
        forward.head(made.weights),
        ids,
        DEPTHS,
    )


def some_ids(count: int = 200) -> NDArray[np.int64]:
    rng = np.random.default_rng(1)
    return np.sort(rng.choice(320, count, replace=False)).astype(np.int64)


def shaken(head: torch.nn.Module) -> torch.nn.Module:
    """Weights as training leaves them: none is one or zero any more."""
    with torch.no_grad():
        for value in head.parameters():
            value += (
                0.1 * value.std().nan_to_num(1.0).clamp(0.3) * torch.randn_like(value)
            )
    return head


# ---- batches ----


def test_pieces_end_with_the_reply_and_have_what_of_its_past_fits() -> None:
    assert [(p.begin, p.end) for p in pieces(0, 10, 60, 100)] == [(0, 60)]
    assert [(p.begin, p.end) for p in pieces(0, 150, 200, 100)] == [(100, 200)]
    assert [(p.begin, p.end) for p in pieces(0, 20, 250, 100)] == [
        (150, 250),
        (50, 150),
        (0, 50),
    ]


def test_rows_hold_every_piece_once_and_little_else(written: list[Stored]) -> None:
    rng = np.random.default_rng(0)
    parts = [p for i in range(400) for p in pieces(i, 5, int(rng.integers(9, 90)), 90)]
    rows = pack(parts, 90)
    assert sorted(p.sequence for row in rows for p in row) == list(range(400))
    sizes = [sum(p.end - p.begin for p in row) for row in rows]
    assert max(sizes) <= 90 and sum(sizes) > 0.9 * 90 * len(rows)


def test_batches_hold_what_sequences_do(written: list[Stored]) -> None:
    batches = Batches(written, width=WIDTH, rows=2, seed=1)
    first, second = batches.epoch(0), batches.epoch(1)
    assert first == Batches(written, width=WIDTH, rows=2, seed=1).epoch(0) != second
    batch = batches.load(first[0])
    documents = 0
    for i, row in enumerate(first[0]):
        at = 0
        for piece in row:
            n = piece.end - piece.begin
            arrays = written[piece.sequence].arrays
            for name in ("tokens", "written", "top", "states"):
                got = getattr(batch, name)[i, at : at + n].numpy()
                assert np.array_equal(got, arrays[name][piece.begin : piece.end])
            assert (batch.document[i, at : at + n] == documents).all()
            assert batch.position[i, at] == piece.begin
            documents, at = documents + 1, at + n
        assert not batch.written[i, at:].any()
        assert (batch.document[i, at:] == -1).all()


# ---- what heads compute ----


def one_sequence(written: list[Stored]) -> Batch:
    batches = Batches(written[:1], width=WIDTH, rows=1, seed=0)
    return batches.load(batches.in_order()[0])


def test_eagle_is_taught_what_it_will_compute_when_it_runs(
    made: families.Model, written: list[Stored], tmp_path: Path
) -> None:
    """Depth d at row j is the d-th drafted row behind the true ones up to j."""
    model = shaken(head_of(made, "eagle3", some_ids()))
    layouts.save(model, made.weights, tmp_path, "safeailab")
    head = heads.read(tmp_path, made.weights.config)
    batch = one_sequence(written)
    with torch.no_grad():
        hidden = model.hidden(batch, DEPTHS)
        logits = [model.lm_head(h)[0].numpy() for h in hidden]
    tokens = batch.tokens[0].numpy()
    embedding = made.weights.tensors["token_embd"].load_f32()
    taps = batch.states[0, :, :3].flatten(1).float().numpy()
    fused = head_forward.fuse(head, taps)
    for j in (3, 17):
        features = list(fused[: j + 1])
        for depth in range(DEPTHS):
            n = j + 1 + depth
            embedded = embedding[tokens[1 : n + 1]]
            got, after = head_forward.step(
                head,
                embedded,
                np.stack(features),
                np.arange(n),
                np.tri(n, dtype=bool),
            )
            expected = logits[depth][j]
            assert np.abs(got[-1] - expected).max() < 0.02 * expected.std()
            features.append(after[-1])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_all_layers_kept_are_the_target(tmp_path: Path, family: str) -> None:
    made = train_data.target(tmp_path / "a.gguf", family, n_layers=3)
    model = Pruned(made.weights, (0, 1, 2), some_ids(), DEPTHS)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 320, (1, 50))
    batch = Batch(
        tokens=torch.from_numpy(tokens),
        written=torch.ones(1, 50, dtype=torch.bool),
        top=torch.zeros(1, 50, dtype=torch.int64),
        document=torch.zeros(1, 50, dtype=torch.int64),
        position=torch.arange(50)[None],
        states=torch.zeros(1, 50, 1, 64, dtype=torch.float16),
    )
    expected, _ = forward.hidden_states(made.weights, tokens)
    with torch.no_grad():
        got = model.final(batch).numpy()
    assert np.abs(got - expected).max() < 1e-4 * expected.std()
    final = torch.from_numpy(expected[:, :, None]).half()
    best = torch.from_numpy(forward.logits(made.weights, expected).argmax(-1))
    batch = replace(batch, states=final, top=best)
    assert model.acceptance(batch).tried[0] == 49


def test_a_draft_that_is_the_target_is_always_right(
    made: families.Model, written: list[Stored]
) -> None:
    layers = tuple(range(train_data.LAYERS))
    everything = np.arange(320, dtype=np.int64)
    model = Pruned(made.weights, layers, everything, DEPTHS)
    greedy = [s for s in written if s.temperature == 0]
    batches = Batches(greedy, width=WIDTH, rows=2, seed=0)
    batch = batches.load(batches.in_order()[0])
    accepted = model.acceptance(batch)
    assert min(accepted.by_depth) > 0.95
    assert accepted.tokens > 3.6
    assert accepted.tried[0] == len(objective.reply_rows(batch))
    few = Pruned(made.weights, layers, np.arange(30, dtype=np.int64), DEPTHS)
    share = float(
        (batch.top.flatten()[objective.reply_rows(batch)] < 30).float().mean()
    )
    assert few.acceptance(batch).by_depth[0] == pytest.approx(share, abs=0.05)


def test_chains_count_only_behind_right_tokens() -> None:
    accepted = objective.Acceptance(np.array([100, 80]), np.array([80, 20]))
    accepted.add(objective.Acceptance(np.array([100, 20]), np.array([20, 5])))
    assert accepted.by_depth == [0.5, 0.25]
    assert accepted.tokens == 1.625


def test_the_loss_and_its_gradient_are_cross_entropy(
    made: families.Model, written: list[Stored]
) -> None:
    model = shaken(head_of(made, "eagle3", some_ids()))
    batches = Batches(written, width=WIDTH, rows=2, seed=0)
    batch = batches.load(batches.epoch(0)[0])
    loss = model(batch)
    loss.backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    wanted = objective.goals(batch, model.vocabulary)
    assert torch.allclose(wanted.shares.sum(-1), torch.ones(len(wanted.rows)))
    documents, written_flags = batch.document.flatten(), batch.written.flatten()
    for row in wanted.rows.tolist():
        assert written_flags[row + 1] and documents[row + 1] == documents[row]
        assert model.vocabulary.known[batch.top.flatten()[row]]
    total = torch.zeros(())
    for depth, hidden in enumerate(model.hidden(batch, DEPTHS)):
        logs = model.lm_head(hidden.flatten(0, 1)).log_softmax(-1)
        for row, shares in zip(wanted.rows.tolist(), wanted.shares, strict=True):
            start = row - 1 - depth
            if start >= 0 and documents[start] == documents[row]:
                total = total - 0.8**depth * (shares * logs[start]).sum()
    total = total / len(wanted.rows)
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    total.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(got[name], parameter.grad, rtol=1e-3, atol=1e-5), name


# ---- learning ----


class Stop(Exception):
    """What a log raises to interrupt."""


def run_loop(
    made: families.Model,
    written: list[Stored],
    kind: str,
    place: Path,
    *,
    steps: int = 60,
    resume: bool = False,
    stop_at: int | None = None,
    interrupt_at: int | None = None,
    settings: dict[str, Any] | None = None,
) -> tuple[list[Measure], Any, list[torch.nn.Module]]:
    """A training whose clock ticks a second a step."""
    place.mkdir(exist_ok=True)
    head = head_of(made, kind, some_ids())
    best: list[torch.nn.Module] = []

    def log(line: str) -> None:
        if stop_at is not None and len(best) and ticks[-1] >= stop_at:
            raise Stop

    ticks = [0]

    def clock() -> float:
        ticks.append(ticks[-1] + 1)
        if ticks[-1] == interrupt_at:
            signal.raise_signal(signal.SIGINT)
        return float(ticks[-1])

    trained = Loop(
        head,
        [s for s in written if not s.is_held_out],
        {"held-out": [s for s in written if s.is_held_out], "other": written[:6]},
        Budget(steps / 60, 0.05, seed=2, width=WIDTH, rows=2),
        place,
        settings=settings or {"head": kind},
        save=lambda module, history, tokens: best.append(module),
        log=log,
        clock=clock,
    )
    if resume:
        trained.resume()
    if stop_at is not None or interrupt_at is not None:
        with pytest.raises(KeyboardInterrupt if stop_at is None else Stop):
            trained.run()
    else:
        trained.run()
    return trained.history, trained.bare, best


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "pruned:0,7"])
def test_heads_learn(
    made: families.Model, written: list[Stored], tmp_path: Path, kind: str
) -> None:
    history, _, best = run_loop(made, written, kind, tmp_path, steps=100)
    assert len(history) == loop.MEASURES
    assert history[-1].step == 100
    first, last = (
        sum(m.loss for m in part) / 5 for part in (history[:5], history[-5:])
    )
    assert last < first - 0.1
    for measure in history:
        assert list(measure.by_depth) == ["held-out", "other"]
        assert all(len(shares) == DEPTHS for shares in measure.by_depth.values())
    tokens = [measure.tokens["held-out"] for measure in history]
    risen = [t for i, t in enumerate(tokens) if t >= max(tokens[: i + 1])]
    assert len(best) == len(risen)
    assert "held-out" in str(history[-1]) and " | other" in str(history[-1])


def test_resumed_training_is_the_uninterrupted_one(
    made: families.Model,
    written: list[Stored],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 7.0)
    expected, whole, _ = run_loop(made, written, "eagle3", tmp_path / "whole")
    run_loop(made, written, "eagle3", tmp_path / "parts", stop_at=20)
    run_loop(made, written, "eagle3", tmp_path / "parts", stop_at=19, resume=True)
    got, parts, _ = run_loop(made, written, "eagle3", tmp_path / "parts", resume=True)
    assert got == expected
    for (name, a), (_, b) in zip(
        whole.state_dict().items(), parts.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_an_interrupted_training_keeps_every_step(
    made: families.Model, written: list[Stored], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    expected, whole, _ = run_loop(made, written, "medusa", tmp_path / "whole")
    run_loop(made, written, "medusa", tmp_path / "parts", interrupt_at=18)
    assert signal.getsignal(signal.SIGINT) is before
    kept = loop.read_checkpoint(tmp_path / "parts", {})
    assert kept["at"]["step"] == 17
    got, parts, _ = run_loop(made, written, "medusa", tmp_path / "parts", resume=True)
    assert got == expected
    for (name, a), (_, b) in zip(
        whole.state_dict().items(), parts.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_the_second_interrupt_does_not_wait() -> None:
    with machine.interrupts_held() as is_interrupted:
        assert not is_interrupted()
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_only_its_own_training_is_resumed(
    made: families.Model, written: list[Stored], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"--resume: .*no checkpoint"):
        run_loop(made, written, "medusa", tmp_path / "none", resume=True)
    run_loop(made, written, "medusa", tmp_path, steps=20)
    with pytest.raises(UsageError, match="made with head 'medusa', now 'other'"):
        run_loop(
            made,
            written,
            "medusa",
            tmp_path,
            resume=True,
            settings={"head": "other"},
        )


def test_rates_rise_and_fall(made: families.Model, written: list[Stored]) -> None:
    assert learning_rate("medusa", 0.1) == 0.05
    assert learning_rate("medusa", 18) == 0.012
    assert 0.005 < learning_rate("eagle3", 170) < 0.006
    assert 0.035 < learning_rate("pruned", 34) < 0.04


# ---- files ----


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_eagle_files_are_what_was_trained(
    made: families.Model, tmp_path: Path, layout: str
) -> None:
    model = shaken(head_of(made, "eagle3", some_ids()))
    layouts.save(model, made.weights, tmp_path, layout, "org/target")
    config = json.loads((tmp_path / "config.json").read_text())
    if layout == "speculators":
        verifier = config["speculators_config"]["verifier"]
        assert verifier["name_or_path"] == "org/target"
        assert verifier["architectures"] == ["LlamaForCausalLM"]
    head = heads.read(tmp_path, made.weights.config, expected="eagle")
    assert (head.kind, head.taps, head.draft_vocab) == ("eagle3", (2, 4, 5), 200)
    assert head.d2t is not None and np.array_equal(head.d2t, some_ids())
    for neutral, name in (
        ("fc", "fc.weight"),
        ("blk.0.attn_q", "midlayer.self_attn.q_proj.weight"),
        ("output", "lm_head.weight"),
    ):
        expected = model.state_dict()[name].half().float().numpy()
        assert np.array_equal(head.tensors[neutral].load_f32(), expected)
    assert ("token_embd" in head.tensors) == (layout == "speculators")
    assert not list(tmp_path.glob(".*"))


def test_medusa_files_are_what_was_trained(
    made: families.Model, written: list[Stored], tmp_path: Path
) -> None:
    model = shaken(head_of(made, "medusa", some_ids()))
    layouts.save(model, made.weights, tmp_path, "safeailab")
    head = heads.read(tmp_path, made.weights.config, expected="medusa")
    assert (head.heads, head.layers, head.draft_vocab) == (DEPTHS, 1, 200)
    assert not head.own_output
    batch = one_sequence(written)
    with torch.no_grad():
        hidden = model.hidden(batch)
    output = forward.head(made.weights)[:200]
    states = batch.states[0, :, -1].float().numpy()
    for depth, logits in enumerate(
        head_forward.medusa(head, states, forward.head(made.weights))
    ):
        expected = hidden[depth][0].numpy() @ output.T
        assert np.abs(logits[:, :200] - expected).max() < 0.01 * expected.std()


def test_a_pruned_draft_is_a_model_of_its_own(
    made: families.Model, written: list[Stored], tmp_path: Path
) -> None:
    model = shaken(head_of(made, "pruned:0,3,7", some_ids()))
    layouts.save(model, made.weights, tmp_path, "safeailab")
    draft = sources.read(tmp_path / "draft.gguf")
    assert draft.config.n_layers == 3
    assert draft.name is not None and draft.name.startswith("layers 0, 3, 7 of")
    taught = draft_model.read(tmp_path, made.weights)
    assert taught.is_sharing
    assert taught.ids is not None and taught.ids.tolist() == some_ids().tolist()
    for name in ("token_embd", "output"):
        assert np.array_equal(
            draft.tensors[name].load_raw(), made.weights.tensors[name].load_raw()
        )
    batch = one_sequence(written)
    got, _ = forward.hidden_states(draft, batch.tokens.numpy())
    n = len(written[0])
    with torch.no_grad():
        expected = model.final(batch).numpy()[:, :n]
    assert np.abs(got[:, :n] - expected).max() < 0.02 * expected.std()


def test_layers_that_cannot_be_kept(made: families.Model, tmp_path: Path) -> None:
    for layers in ((), (1, 0), (0, 0), (8,)):
        with pytest.raises(UsageError, match="some of layers 0 to 7, ascending"):
            Pruned(made.weights, layers, some_ids(), DEPTHS)
    windowed = train_data.target(tmp_path / "g.gguf", "gemma3", window=16)
    with pytest.raises(UnsupportedError, match="windows by their place"):
        Pruned(windowed.weights, (0, 1), some_ids(), DEPTHS)


def test_layouts_that_are_none() -> None:
    with pytest.raises(UsageError, match="--layout: expected safeailab or"):
        layouts.check("eagle3", "vllm")
    with pytest.raises(UsageError, match="not medusa ones"):
        layouts.check("medusa", "speculators")


def test_frequent_tokens_make_the_vocabulary(written: list[Stored]) -> None:
    counts: dict[int, int] = dict.fromkeys(range(320), 0)
    for s in written:
        for token in s.arrays["tokens"][s.arrays["written"]]:
            counts[int(token)] += 1
    expected = sorted(range(320), key=lambda t: (-counts[t], t))[:50]
    assert training.most_frequent(written, 50, 320).tolist() == sorted(expected)
