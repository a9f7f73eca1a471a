"""Acceptance along known replies: the same as that of real rounds, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgespec import acceptance, acceptance_report
from edgespec._native import tree_derive
from edgespec.acceptance import Case, Draft, Found, Tally
from edgespec.cli.app import main
from edgespec.config import Sampling, Speculation, Stopping
from edgespec.errors import UsageError
from edgespec.gguf_model import read_gguf_model
from edgespec.loading import open_session
from edgespec.session import Session
from tests.export.checkpoints import gguf_checkpoint

TREES = ("chain:2", "best:5")
TEXTS = ("one two three one two three one two", "the sky is blue the sky is")
TOKENS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_checkpoint(tmp_path_factory.mktemp("target") / "tiny.gguf")


def session_of(model: Path, **options: str) -> Session:
    return open_session(read_gguf_model(model), speculation=Speculation(**options))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ngrams_accept_what_they_do_in_real_rounds(
    model: Path, temperature: float
) -> None:
    with session_of(model, draft="none") as session:
        prompts = [session.encode(text, raw=True) for text in TEXTS]
        found = acceptance.measure(
            session,
            [Draft("ngram")],
            prompts,
            trees=TREES,
            temperatures=(temperature,),
            max_tokens=TOKENS,
        )
    assert found.is_complete
    by_tree = {row.tree: row for row in acceptance_report.rows(found)}
    for tree in TREES:
        rounds = tokens = drafted = accepted = 0
        tried: dict[int, int] = {}
        for prompt in prompts:
            with session_of(model, draft="ngram", tree=tree) as session:
                stats = session.complete(
                    prompt,
                    sampling=Sampling(temperature=temperature, seed=acceptance.SEED),
                    stopping=Stopping(max_tokens=TOKENS),
                ).stats
            rounds += stats.rounds
            tokens += round(stats.tokens_per_round * stats.rounds)
            drafted += stats.drafted
            accepted += stats.accepted
            for depth, count in enumerate(stats.depth_tried):
                tried[depth] = tried.get(depth, 0) + count
        row = by_tree[tree]
        assert (row.prompts, row.rounds, row.tokens) == (2, rounds, tokens)
        assert row.node_yield == pytest.approx(accepted / drafted)
        assert [depth.tried for depth in row.by_depth[:8]] == [*tried.values()]
        assert rounds < tokens  # something was accepted


def test_rounds_are_counted_by_depth_and_rank() -> None:
    tally = Tally(prompts=1)
    # 7 behind the root is the second best; behind it the best one, 8, is right.
    tree = tree_derive([1, 6, 7, 8, 9, 5], [-1, 0, 0, 2, 2, 3])
    tally.count(tree, [0, 2, 3], [7, 8, 4])
    tally.count(tree, [0], [3])
    tally.count(tree_derive([1], [-1]), [0], [3])
    # The reply ends with an accepted token: the row of it decided nothing.
    tally.count(tree, [0, 2], [7, 9])
    assert tally.tried == [3, 2, 1]
    assert tally.held == [[0, 2], [1, 1], [0]]
    assert (tally.accepted, tally.depth) == (4, 9)
    assert tally.rounds == [(6, 3), (6, 1), (1, 1), (6, 2)]


def test_tallies_add_up() -> None:
    one = Tally(1, [(5, 2)], [(5, 2)], 2, 1, [1], [[1]])
    one.add(Tally(2, [(3, 1), (3, 3)], [(3, 1)], 4, 2, [2, 1], [[0, 1], [1]]))
    assert one == Tally(
        3, [(5, 2), (3, 1), (3, 3)], [(5, 2), (3, 1)], 6, 3, [3, 1], [[1, 1], [1]]
    )


def test_figures_of_a_case() -> None:
    case = Case("eagle", "best:5", 0.0)
    tallies = {
        (case, "a"): Tally(1, [(5, 3), (5, 1)], [(5, 3)], 6, 2, [2, 1], [[1], [0, 1]]),
        (case, "b"): Tally(2, [(5, 2)], [(5, 2)], 3, 1, [1, 1], [[0, 1], []]),
    }
    found = Found(("a", "b"), 64, tallies, 9, True)
    (row,) = acceptance_report.rows(found)
    assert (row.draft, row.tree, row.prompts, row.tokens) == ("eagle", "best:5", 3, 6)
    assert (row.tokens_per_round, row.rows_per_round) == (2.0, 5.0)
    assert row.cut_tokens_per_round == 2.5
    assert row.acceptance == pytest.approx(3 / 9)
    assert row.node_yield == pytest.approx(3 / 12)
    first, second = row.by_depth
    assert (first.tried, first.accepted) == (3, pytest.approx(2 / 3))
    assert first.by_rank == pytest.approx((1 / 3, 1 / 3))
    assert (second.tried, second.by_rank) == (2, (0.0, 0.5))
    (alone,) = acceptance_report.rows(found, subtask="b")
    assert (alone.subtask, alone.prompts, alone.tokens_per_round) == ("b", 2, 2.0)


def test_trees_that_change_are_refused() -> None:
    with pytest.raises(UsageError, match="--tree auto: acceptance is that of a tree"):
        acceptance.check_tree("auto")


def test_interrupted_measurement_keeps_what_is_through(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_of(model, draft="none") as session:
        prompts = [session.encode(text, raw=True) for text in TEXTS]
        complete, calls = session.complete, []

        def impatient(*arguments, **options):
            calls.append(arguments)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return complete(*arguments, **options)

        monkeypatch.setattr(session, "complete", impatient)
        options = {"trees": ["chain:1"], "max_tokens": 8}
        found = acceptance.measure(session, [Draft("ngram")], prompts, **options)
        assert not found.is_complete
        assert {tally.prompts for tally in found.tallies.values()} == {1}
        calls[:] = [()] * 3
        with pytest.raises(KeyboardInterrupt):
            acceptance.measure(session, [Draft("ngram")], prompts, **options)
        assert session.target.length == 0


def test_hidden_states_are_those_of_rounds(model: Path) -> None:
    """Whole, in passes of 64 rows; and nothing is left behind."""
    with session_of(model, draft="none") as session:
        target = session.target
        tokens = np.arange(150, dtype=np.int32) % target.vocab
        states = target.hidden_states(tokens, (0, 2))
        assert states.shape == (150, 2, target.info.hidden)
        few = target.hidden_states(tokens[:70], (2,))
        assert np.array_equal(few[:, 0], states[:70, 1])
        assert target.length == 0


def test_bench_acceptance(model: Path, tmp_path: Path, capsys) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [{"prompt": text, "subtask": text[:3]} for text in TEXTS]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ["--prompts", str(prompts), "-n", "24", "--json", str(out)]
    assert main(["bench", str(model), "--acceptance", *flags, "--threads", "1"]) == 0
    captured = capsys.readouterr()
    data = json.loads(out.read_text())
    trees = ["chain:3", "best:5", "best:8", "best:16", "best:26"]
    for part in (data["acceptance"], data["subtasks"]["one"]):
        assert [row["tree"] for row in part] == trees * 2
        assert {row["draft"] for row in part} == {"ngram"}
        assert [row["temperature"] for row in part] == [0.0] * 5 + [0.8] * 5
    assert data["published"][0]["method"] == "Medusa"
    lines = captured.out.splitlines()
    assert sum(line.split() == ["draft", *trees] for line in lines) == 4
    assert any(line.split() == ["draft", "one", "the"] for line in lines)
    assert any(
        line.split()[:4] == ["EAGLE-2", "Vicuna-7B", "61", "4.35"] for line in lines
    )
    assert "acceptance" in captured.err
    flags = ["--acceptance", "--methods", "plain", "--prompts", str(prompts)]
    assert main(["bench", str(model), *flags]) == 2
    assert "drafts nothing of ours; name ngram or a head" in capsys.readouterr().err
