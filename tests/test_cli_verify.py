"""`edgespec verify`: identity, differences explained or not, and its report."""

from __future__ import annotations

import json

import numpy as np
import pytest

import edgespec
from edgespec import replay
from edgespec._native import tree_derive
from edgespec.cli.app import main
from edgespec.config import Sampling, Speculation
from edgespec.errors import FormatError, UsageError
from edgespec.replay import NO_TOKEN, ends_early, path_and, path_first
from edgespec.verification import first_difference, read_prompts, verify
from edgespec.verification_report import by_subtask, summarise
from tests.scripted import SecondBranch, scripted_session

HA = "ha ha ha ha ha ha ha ha ha ha"
ANSWERS = {"ha": HA, "hi": "hello", "lo": "la la la lo la la la lo la la la lo"}
# Within the repeats, where rounds have several rows.
RIVAL = {HA[:15]: "x"}
ALWAYS = Speculation(tree="chain:3")  # whatever the clock says of its worth


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "ha", "subtask": "loud"},
        {"turns": ["lo", "ha"], "subtask": "loud"},
        {"turns": ["hi"], "subtask": "quiet"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


@pytest.fixture
def load(monkeypatch):
    def use(**target):
        session = scripted_session(ANSWERS, speculation=ALWAYS, **target)
        monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
        return session

    return use


def test_identical_replies_exit_with_0(load, prompts, capsys) -> None:
    session = load()
    assert main(["verify", "m", "--prompts", str(prompts), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "scripted"
    assert data["backend"] == "scripted"
    assert (data["runs"], data["identical"], data["unexplained"]) == (3, 3, 0)
    assert data["seeds"] == []
    assert data["tokens_per_round"] > 1.2
    assert list(data["subtasks"]) == ["loud", "quiet"]
    assert data["subtasks"]["loud"]["runs"] == 2
    assert all(d["plain"]["tokens"] == d["spec"]["tokens"] for d in data["details"])
    plain = data["details"][0]["plain"]["stats"]
    assert plain["drafted"] == 0
    assert plain["draft"] == "none"
    assert data["details"][0]["spec"]["stats"]["drafted"] > 0
    assert session.target.length == 0


def test_arms_know_nothing_of_each_other(load, prompts) -> None:
    session = load()
    once = verify(
        session,
        read_prompts(prompts)[:1],
        sampling=[Sampling(temperature=0.0, seed=1)],
        max_tokens=64,
    )
    # Twice the same question, the second with the speculative arm first: same rounds.
    twice = verify(
        session,
        read_prompts(prompts)[:1] * 2,
        sampling=[Sampling(temperature=0.0, seed=1)],
        max_tokens=64,
    )
    drafted = {run.spec.stats.drafted > 0 for run in [*once, *twice]}
    assert drafted == {True}
    assert len({run.spec.tokens for run in [*once, *twice]}) == 1
    # An index that had seen the reply would draft it whole from the first token on.
    first = len(HA) // 3
    assert all(run.spec.stats.rounds > first // 3 for run in [*once, *twice])


def test_table_for_people(load, prompts, capsys) -> None:
    load()
    assert main(["verify", "m", "--prompts", str(prompts)]) == 0
    out = capsys.readouterr().out
    header, *rows = out.splitlines()[2:]
    assert header.split()[:3] == ["prompts", "runs", "identical"]
    assert [row.split()[0] for row in rows] == ["loud", "quiet", "all"]
    assert rows[-1].split()[1:3] == ["3", "3"]


def test_rounding_of_wide_rows_is_explained(load, prompts, capsys) -> None:
    load(rival=RIVAL, gap=0.1, wobble=0.3)
    assert main(["verify", "m", "--prompts", str(prompts), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["identical"], data["unexplained"]) == (2, 0)
    found = data["details"][0]["divergence"]
    assert found["index"] == 15
    assert found["plain_token"] == ord(HA[15])
    assert found["spec_token"] == ord("x")
    assert found["width"] > 1
    assert found["gap"] == pytest.approx(0.1, abs=1e-5)
    assert found["change"] == pytest.approx(0.3, abs=1e-5)
    assert found["is_explained"] is True
    assert data["row_invariant"] is False


def test_rounding_that_only_trees_cut_show_is_explained(
    load, prompts, monkeypatch
) -> None:
    """Replays of whole trees round as one row does, though the run did not."""
    widths, history = replay.replay_widths, replay.replay_history

    def one_width(*args):
        narrow, _ = widths(*args)
        return narrow, narrow

    def rounded(target, deciding, others=None):
        logits = history(target, deciding, others)
        if others is None and deciding.step.tree.n > 1:
            logits[ord("x")] -= 0.3
        return logits

    monkeypatch.setattr(replay, "replay_widths", one_width)
    monkeypatch.setattr(replay, "replay_history", rounded)
    session = load(rival=RIVAL, gap=0.1, wobble=0.3)
    sampling = [Sampling(temperature=0.0, seed=1)]
    (run,) = verify(
        session, read_prompts(prompts)[:1], sampling=sampling, max_tokens=40
    )
    found = run.divergence
    assert found is not None and found.is_explained
    assert found.change == 0
    assert found.history_change == pytest.approx(0.3, abs=1e-5)


def test_sampled_divergences_are_replayed_with_their_noise(load, prompts) -> None:
    session = load(rival=RIVAL, gap=0.1, wobble=3.0)
    choices = [Sampling(temperature=1.0, seed=seed) for seed in range(8)]
    runs = verify(session, read_prompts(prompts)[:1], sampling=choices, max_tokens=40)
    found = [run.divergence for run in runs if run.divergence is not None]
    assert found
    assert all(divergence.is_explained for divergence in found)
    assert all(d.gap is not None and 0 <= d.gap < 3.0 for d in found)
    assert {run.seed for run in runs} == set(range(8))


def test_branches_that_lose_nothing_are_identical(load, prompts, capsys) -> None:
    load(drafter=SecondBranch(HA))
    assert main(["verify", "m", "--prompts", str(prompts), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["identical"] == data["runs"]
    assert data["details"][0]["spec"]["stats"]["tokens_per_round"] > 2


def test_lost_rows_are_not_explained(load, prompts, capsys) -> None:
    load(breaks_commits=True, drafter=SecondBranch(HA))
    assert main(["verify", "m", "--prompts", str(prompts), "--json", "-"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["unexplained"] >= 1
    broken = [d["divergence"] for d in data["details"] if d["divergence"]]
    assert not any(divergence["is_explained"] for divergence in broken)


def test_unexplained_divergence_is_told_to_people(load, prompts, capsys) -> None:
    load(breaks_commits=True, drafter=SecondBranch(HA))
    assert main(["verify", "m", "--prompts", str(prompts)]) == 1
    assert "NOT EXPLAINED" in capsys.readouterr().out


def test_several_turns_and_seeds(load, prompts, capsys) -> None:
    load()
    flags = ["--turns", "2", "--temperature", "0.5", "--seed", "1", "--seed", "2"]
    assert main(["verify", "m", "--prompts", str(prompts), *flags, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["runs"] == 2 * 4
    assert data["seeds"] == [1, 2]
    assert {(d["prompt"], d["turn"]) for d in data["details"]} == {
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
    }


def test_json_file_and_limit(load, prompts, tmp_path, capsys) -> None:
    load()
    path = tmp_path / "out.json"
    arguments = ["--prompts", str(prompts), "--limit", "1", "-n", "3"]
    assert main(["verify", "m", *arguments, "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    assert data["runs"] == 1
    assert len(data["details"][0]["plain"]["tokens"]) == 3
    assert "all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "temperature 0"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "1", "--seed", "-1"], "seed"),
        (["--prompts", "/nowhere/at/all"], "/nowhere/at/all"),
        (["-n", "0"], "-n"),
        (["--json", "/nowhere/at/all"], "its directory cannot be written"),
        (["--json", "/"], "--json /: it is a directory"),
    ],
)
def test_usage_errors(load, capsys, flags, message) -> None:
    load()
    assert main(["verify", "m", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["{", "[" * 100_000, "3", "{}", '{"prompt": 3}', '{"prompt": ""}', '{"turns": []}'],
)
def test_bad_prompt_files_name_the_line(tmp_path, line) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(FormatError, match="line 2"):
        read_prompts(path)


def test_empty_prompt_file(tmp_path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n")
    with pytest.raises(FormatError, match="no prompts"):
        read_prompts(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path)


def test_built_in_prompts_are_ours_to_use() -> None:
    prompts = read_prompts()
    assert len(prompts) >= 10
    assert all(prompt.subtask for prompt in prompts)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1
    found = ends_early([1, 2], [1])
    assert (found.plain_token, found.spec_token) == (2, NO_TOKEN)
    assert not found.is_explained


def test_path_first_is_the_same_tree() -> None:
    tree = tree_derive([10, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 4])
    rows = np.array([0, 2, 4, 5], dtype=np.int32)
    moved = path_first(tree, rows)
    assert moved.tokens.tolist() == [10, 12, 14, 15, 11, 13]
    again = tree_derive(moved.tokens, moved.parent, moved.rank)
    np.testing.assert_array_equal(again.mask, moved.mask)
    np.testing.assert_array_equal(again.depth, moved.depth)
    before = {tuple(tree.tokens[tree.mask[row]]) for row in range(tree.n)}
    assert before == {tuple(moved.tokens[moved.mask[row]]) for row in range(moved.n)}


@pytest.mark.parametrize("others", [0, 1, 2, 9])
def test_a_tree_cut_keeps_the_path(others: int) -> None:
    tree = tree_derive([10, 11, 12, 13, 14, 15], [-1, 0, 0, 1, 2, 4])
    rows = np.array([0, 2, 4], dtype=np.int32)
    cut = path_and(tree, rows, others)
    assert cut.tokens.tolist() == [10, 12, 14, 11, 13, 15][: 3 + others]
    again = tree_derive(cut.tokens, cut.parent, cut.rank)
    np.testing.assert_array_equal(again.mask, cut.mask)


def test_ratio_is_a_median_with_an_interval(load, prompts) -> None:
    runs = verify(
        load(),
        read_prompts(prompts),
        sampling=[Sampling(temperature=0.0, seed=1)],
        max_tokens=32,
    )
    total = summarise(runs)
    assert total.ratio is not None
    assert total.ratio_low is not None
    assert total.ratio_high is not None
    assert total.ratio_low <= total.ratio <= total.ratio_high
    assert total.ratio == pytest.approx(float(np.median([run.ratio for run in runs])))
    assert set(by_subtask(runs)) == {"loud", "quiet"}
    assert summarise([]).ratio is None
