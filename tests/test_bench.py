"""The benchmark's loop: who runs when, what is counted, what the figures say."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count

import numpy as np
import pytest

from edgespec import bench, bench_report
from edgespec.bench import Arm, Mark, Results, Sample
from edgespec.config import Speculation
from tests.scripted import SecondBranch, scripted_session

HA = "ha ha ha ha ha ha ha ha ha ha"
ANSWERS = {"ha": HA, "hi": "hello", "lo": "la la la lo la la la lo la la la lo"}
ALWAYS = Speculation(tree="chain:3")  # whatever the clock says of its worth
FIELDS = """
method backend tree tokens_per_s ratio_vs_plain ratio_low ratio_high
tokens_per_round acceptance node_yield ttft_ms itl_ms_p50 itl_ms_p95 draft_share
forward_ratio ratio_possible extra_memory_mb identical prompts tokens"""


def make_arms(**target) -> list[Arm]:
    """Plain and drafted on one session, plain on another."""
    one, other = scripted_session(ANSWERS, **target), scripted_session(ANSWERS)
    return [
        Arm("plain", "one", one),
        Arm("ngram", "one", one, speculation=ALWAYS),
        Arm("plain", "other", other),
    ]


def prompts_of(arms: list[Arm], *texts: str) -> list[list[int]]:
    return [arms[0].session.encode(text) for text in texts]


def made_up(
    seconds: float, *, tokens: int = 10, clock: float | None = None, said: int = 1
) -> Sample:
    """A reply at so many seconds per token by the wall and by its own clock."""
    clock = seconds if clock is None else clock
    marks = [Mark(5 + seconds * i, 7 + clock * i, i, i, 0, i) for i in range(tokens)]
    return Sample(tuple([said] * tokens), 0.25, tuple(marks))


def results_of(arms: list[Arm], samples: list[list[list[Sample]]]) -> Results:
    subtasks = ["ab"[i % 2] for i in range(len(samples[0]))]
    return Results(arms, subtasks, 2, samples, [0.0] * len(arms), True)


def test_everybody_goes_first_equally_often() -> None:
    turns = list(bench.schedule(3, 4, 6))
    assert [turn[:2] for turn in turns] == [(r, p) for r in range(6) for p in range(4)]
    assert all(sorted(order) == [0, 1, 2] for _, _, order in turns)
    assert Counter(order[0] for _, _, order in turns) == {0: 8, 1: 8, 2: 8}
    for prompt in range(4):  # on every prompt as well
        firsts = [order[0] for _, p, order in turns if p == prompt]
        assert Counter(firsts) == {0: 2, 1: 2, 2: 2}


def test_arms_take_turns_on_the_same_prompt(monkeypatch) -> None:
    calls = []
    reply = bench.reply

    def noting(arm, prompt, max_tokens):
        calls.append((arm.name, bytes(prompt)))
        return reply(arm, prompt, max_tokens)

    monkeypatch.setattr(bench, "reply", noting)
    arms = make_arms()
    prompts = prompts_of(arms, "ha", "hi")
    results = bench.run(arms, prompts, max_tokens=8, repeats=2)
    del calls[:3]  # warming up
    groups = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [len({name for name, _ in group}) for group in groups] == [3] * 4
    assert [{text for _, text in group} for group in groups] == [
        {bytes(prompts[0])},
        {bytes(prompts[1])},
    ] * 2
    assert len({group[0][0] for group in groups}) > 1
    assert all(len(of) == 2 for of_arm in results.samples for of in of_arm)
    assert results.is_complete


def test_replies_are_counted_as_they_happened() -> None:
    arms = make_arms()
    prompts = prompts_of(arms, "ha", "lo", "hi")
    results = bench.run(arms, prompts, max_tokens=40, repeats=2)
    plain, drafted, _ = bench_report.rows(results)
    said = [len(ANSWERS[q]) + 1 for q in ("ha", "lo", "hi")]
    assert plain.tokens == drafted.tokens == 2 * sum(min(40, n) for n in said)
    assert (plain.tokens_per_round, plain.acceptance, plain.node_yield) == (1, 0, 0)
    assert drafted.tokens_per_round > 1.2
    assert 0 < drafted.node_yield <= drafted.acceptance <= 1
    assert plain.identical
    assert drafted.identical
    assert plain.prompts == 3
    for of_arm in results.samples:
        for sample in (sample for repeats in of_arm for sample in repeats):
            assert sample.marks[-1].tokens == len(sample.tokens) - 1
            assert len(sample.gaps_s) == sample.rounds
            assert sample.ttft_s > 0


def test_no_reply_knows_another_one() -> None:
    """An index that had seen the reply would draft it from its first token on."""
    arms = make_arms()
    results = bench.run(arms, prompts_of(arms, "ha"), max_tokens=64, repeats=4)
    rounds = {sample.rounds for sample in results.samples[1][0]}
    assert len(rounds) == 1
    assert rounds.pop() > len(HA) // 4


def test_sessions_are_left_as_they_were() -> None:
    arms = make_arms()
    engines = [arm.session.engine for arm in arms]
    bench.run(arms, prompts_of(arms, "ha"), max_tokens=8, repeats=1)
    assert [arm.session.engine for arm in arms] == engines
    assert all(arm.session.target.length == 0 for arm in arms)


def test_a_draft_that_breaks_the_cache_is_not_identical() -> None:
    arms = make_arms(breaks_commits=True)
    arms[1].drafter = SecondBranch(HA)
    results = bench.run(arms, prompts_of(arms, "ha"), max_tokens=64, repeats=1)
    verdicts = [row.identical for row in bench_report.rows(results)]
    assert verdicts == [True, False, True]


def test_a_plain_arm_that_wavers_is_not_identical() -> None:
    arms = make_arms()[:1]
    samples = [[[made_up(1), made_up(1, said=2)]]]
    assert not bench_report.rows(results_of(arms, samples))[0].identical


def test_ratios_are_medians_over_pairs() -> None:
    arms = make_arms()
    samples = [
        [[made_up(2e-3), made_up(8e-3)], [made_up(6e-3)]],
        [[made_up(1e-3), made_up(2e-3)], [made_up(2e-3)]],
        [[made_up(4e-3), made_up(16e-3)], [made_up(12e-3)]],
    ]
    results = results_of(arms, samples)
    plain, drafted, other = bench_report.rows(results)
    assert plain.ratio_vs_plain == other.ratio_vs_plain == 1
    assert drafted.ratio_vs_plain == pytest.approx(3)  # of 2, 4 and 3
    assert drafted.ratio_low == pytest.approx(2)
    assert drafted.ratio_high == pytest.approx(4)
    assert plain.tokens_per_s == pytest.approx(1000 / 6)
    assert drafted.itl_ms_p50 == pytest.approx(2)
    ratios = [ratio.middle for ratio in bench_report.against(results, "other")]
    assert ratios == pytest.approx([2, 6, 1])
    nobody = bench_report.against(results, "llamacpp")
    assert [ratio.middle for ratio in nobody] == [None] * 3
    alone = bench_report.rows(results, subtask="b")
    assert (alone[1].prompts, alone[1].ratio_vs_plain) == (1, pytest.approx(3))


def test_drafts_are_weighed_in_forwards_of_plain() -> None:
    arms = make_arms()[:2]

    def made(draft: float, forward: float) -> Sample:
        marks = [
            Mark(i, i, i, i, 0, i, draft_s=draft * i, forward_s=forward * i)
            for i in range(5)
        ]
        return Sample((1,) * 5, 0.1, tuple(marks))

    samples = [
        [[made(0, 2e-3), made(0, 4e-3), made(0, 2e-3)]],
        [[made(5e-4, 3e-3), made(5e-4, 3e-3), made(1e-3, 4e-3)]],
    ]
    plain, drafted = bench_report.rows(results_of(arms, samples))
    assert (plain.tree, plain.draft_share, plain.forward_ratio) == ("", 0, 1)
    assert drafted.tree == "chain:3"
    assert drafted.draft_share == pytest.approx(0.25)  # of 0.25, 0.125 and 0.5
    assert drafted.forward_ratio == pytest.approx(1.5)  # of 1.5, 0.75 and 2
    assert drafted.ratio_possible == pytest.approx(1 / 1.75)


def test_a_library_is_timed_by_its_own_clock_where_it_decodes_plainly() -> None:
    """Its plain arm by its clock; ours on it by the wall, against plain by the wall."""
    session = scripted_session(ANSWERS)
    arms = [
        Arm("plain", "llamacpp", session, by_clock=True),
        Arm("ngram", "llamacpp", session),
        Arm("lookup", "llamacpp", session, by_clock=True),
    ]
    samples = [
        [[made_up(8e-3, clock=6e-3)]],
        [[made_up(4e-3, clock=1e-3)]],
        [[made_up(5e-3, clock=3e-3)]],
    ]
    results = results_of(arms, samples)
    plain, ngram, lookup = bench_report.rows(results)
    assert plain.tokens_per_s == pytest.approx(1000 / 6)
    assert ngram.tokens_per_s == pytest.approx(1000 / 4)
    assert ngram.ratio_vs_plain == pytest.approx(2)
    assert lookup.ratio_vs_plain == pytest.approx(2)
    ratios = [ratio.middle for ratio in bench_report.against(results, "llamacpp")]
    assert ratios == pytest.approx([1, 1.5, 2])


def test_clocks_are_read_between_rounds() -> None:
    ticks = count()
    arm = Arm("plain", "one", scripted_session(ANSWERS), clock=lambda: next(ticks))
    sample = bench.reply(arm, arm.session.encode("hi"), 64)
    assert [mark.clock_s for mark in sample.marks] == list(range(len("hello") + 1))
    assert sample.seconds_per_token(by_clock=True) == 1


def test_replies_are_cut_where_they_loop() -> None:
    marks = tuple(Mark(i, i, 3 * i, 6 * i, 2 * i, 3 * i) for i in range(14))
    looping = Sample((7,) * 40, 0.1, marks)
    cut = looping.cut()
    assert cut.tokens == (7,) * 18  # the third 16-gram of sevens ends here
    assert [mark.tokens for mark in cut.marks] == [0, 3, 6, 9, 12, 15, 17]
    assert cut.seconds_per_token(by_clock=False) == pytest.approx(6 / 17)
    fresh = Sample(tuple(range(40)), 0.1, marks)
    assert fresh.cut() is fresh
    only = Sample((7,), 0.1, marks[:1])
    assert only.cut() is only


def test_replies_without_rounds_have_no_speed() -> None:
    arms = make_arms()
    results = bench.run(arms, prompts_of(arms, "nothing"), max_tokens=1, repeats=1)
    for row in bench_report.rows(results):
        assert row.tokens_per_s is None
        assert row.ratio_vs_plain is None
        assert row.itl_ms_p50 is None
        assert row.tokens == 1


def test_report_has_the_documented_rows() -> None:
    arms = make_arms()
    prompts = prompts_of(arms, "ha", "hi")
    results = bench.run(
        arms, prompts, subtasks=["loud", "quiet"], max_tokens=16, repeats=2
    )
    data = json.loads(json.dumps(bench_report.report(results, {"model": "m"})))
    assert data["model"] == "m"
    assert data["complete"] is True
    loud, quiet = data["subtasks"]["loud"], data["subtasks"]["quiet"]
    rows = [*data["rows"], *data["cut_rows"], *loud, *quiet]
    assert all(list(row) == FIELDS.split() for row in rows)
    assert len(rows) == 3 * (1 + 1 + 2)
    assert [row["prompts"] for row in quiet] == [1, 1, 1]
    assert list(data["against"]) == ["one", "other"]
    assert len(data["replies"]) == 3 * 2 * 2


def test_interrupts_keep_what_all_arms_did() -> None:
    arms = make_arms()
    prompts = prompts_of(arms, "ha", "hi")

    def stop_at(calls: int):
        def progress(what: str, done: int, total: int) -> None:
            if (what, done) == ("measure", calls):
                raise KeyboardInterrupt

        return progress

    results = bench.run(
        arms, prompts, max_tokens=8, repeats=2, progress=stop_at(3 * 3 + 1)
    )
    assert not results.is_complete
    assert [[len(of) for of in of_arm] for of_arm in results.samples] == [[2, 1]] * 3
    assert bench_report.rows(results)[0].prompts == 2
    early = bench.run(arms, prompts, max_tokens=8, repeats=2, progress=stop_at(4))
    assert [row.prompts for row in bench_report.rows(early)] == [1, 1, 1]
    with pytest.raises(KeyboardInterrupt):
        bench.run(arms, prompts, max_tokens=8, repeats=2, progress=stop_at(2))
    assert arms[0].session.target.length == 0


def test_extra_memory_is_beside_plain(monkeypatch) -> None:
    sizes = iter([100.0, 150.0, 150.0, 162.5, 162.5, 180.0])
    monkeypatch.setattr(bench, "resident_mb", lambda: next(sizes, 0.0))
    arms = make_arms()
    results = bench.run(arms, prompts_of(arms, "hi"), max_tokens=4, repeats=1)
    extra = [row.extra_memory_mb for row in bench_report.rows(results)]
    assert extra == [0.0, 12.5, 0.0]
    monkeypatch.setattr(bench, "resident_mb", lambda: None)
    results = bench.run(arms, prompts_of(arms, "hi"), max_tokens=4, repeats=1)
    extra = [row.extra_memory_mb for row in bench_report.rows(results)]
    assert extra == [0.0, None, 0.0]


def test_plain_is_decoded_without_drafts() -> None:
    arms = make_arms()
    target = arms[0].session.target
    bench.reply(arms[0], prompts_of(arms, "ha")[0], 64)
    assert set(target.forwards[1:]) <= {1, len(prompts_of(arms, "ha")[0]) - 1}
    target.forwards.clear()
    bench.reply(arms[1], prompts_of(arms, "ha")[0], 64)
    assert np.max(target.forwards[2:]) > 1
