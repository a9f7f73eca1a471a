"""Training data: what targets write, kept with their hidden states, and what is not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import FormatError, UsageError
from edgespec_export import forward
from edgespec_export.train import data, shards, texts, writing
from edgespec_export.train.texts import Makers, Prompt
from edgespec_export.train.writing import GRAM, Ask, Dialogue, Keep, Reply, draw
from tests.export import families, train_data
from tests.export.train_data import TAPS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> families.Model:
    return train_data.target(tmp_path_factory.mktemp("target") / "a.gguf")


def test_what_is_kept_is_the_target_s_own(made: families.Model) -> None:
    """States, likeliest tokens and greedy replies are what numpy computes."""
    for sequence in train_data.written(made, 12):
        n = len(sequence.tokens)
        final, tapped = forward.hidden_states(
            made.weights, sequence.tokens[None].astype(np.int64), taps=TAPS
        )
        for place, tap in enumerate(TAPS):
            off = np.abs(sequence.states[: n - 1, place] - tapped[tap][0, : n - 1])
            assert off.max() < 0.03 * tapped[tap].std()
        assert not sequence.states[n - 1].any()
        best = forward.logits(made.weights, final[0]).argmax(axis=-1)
        begin = len(sequence.prompt)
        assert sequence.written[begin:].all() and not sequence.written[:begin].any()
        known = sequence.top[begin - 1 : n - 1]
        assert (known == best[begin - 1 : n - 1]).mean() > 0.9  # others were close
        assert (sequence.top[: begin - 1] == -1).all() and sequence.top[n - 1] == -1
        is_greedy = np.array_equal(known, sequence.tokens[begin:])
        assert is_greedy == (sequence.temperature == 0)


def test_a_dialogue_s_tokens_are_its_own_affair(made: families.Model) -> None:
    """The same sequences with any number of dialogues at a time."""
    alone, many = (train_data.written(made, 20, seats=n) for n in (1, 64))
    for a, b in zip(alone, many, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.top, b.top)
        assert np.array_equal(a.states, b.states)
    assert len({tuple(s.tokens) for s in many}) == 20


def test_second_turns_keep_what_the_first_ones_made(made: families.Model) -> None:
    def make(number: int, random: np.random.Generator) -> Dialogue:
        first = yield Ask([1, 5, 9, 30 + number], 20, 0.8, frozenset())
        assert first is not None
        ids = [1, 5, 9, 30 + number, *first.tokens, 2, 8, 8]
        yield Ask([1, 5], 9, 1.0, frozenset(), is_reply=False)  # of no interest
        yield Ask(ids[:-3], 3, 0.0, frozenset(), is_reply=False)
        yield Ask([*ids], 20, 0.0, frozenset(), continues=False)
        yield Keep("second alone", 0.0)
        yield Ask(ids[:4], 20, 0.0, frozenset())
        yield Keep("first", 0.0)
        before = ids[:4]
        again = yield Ask(before, 15, 0.0, frozenset())
        assert again is not None
        yield Ask([*before, *again.tokens, 8, 7], 10, 0.0, frozenset(), continues=True)
        yield Keep("both", 0.0)
        assert (yield Ask([3] * 400, 10, 0.0, frozenset())) is not None

    got = train_data.run(made, make, 3)
    assert [s.kind for s in got[:3]] == ["second alone", "first", "both"]
    for alone, _, both in (got[i : i + 3] for i in range(0, 9, 3)):
        assert alone.written.nonzero()[0].tolist() == list(range(27, 27 + 20))
        assert both.written.nonzero()[0].tolist() == [*range(4, 19), *range(21, 31)]
        _, tapped = forward.hidden_states(
            made.weights, both.tokens[None].astype(np.int64), taps=(8,)
        )
        off = np.abs(both.states[:-1, -1] - tapped[8][0, :-1])
        assert off.max() < 0.03 * tapped[8].std()
        assert np.array_equal(both.top[3:18], both.tokens[4:19])


def test_replies_end_where_they_repeat_themselves(made: families.Model) -> None:
    """Greedy replies of a random model do nothing else in the end."""
    got = [s for s in train_data.written(made, 12, 300) if s.temperature == 0]
    lengths = []
    for sequence in got:
        reply = sequence.tokens[sequence.written].tolist()
        grams = Counter(
            tuple(reply[i : i + GRAM]) for i in range(len(reply) - GRAM + 1)
        )
        assert max(grams.values(), default=0) < 3
        lengths.append(len(reply))
    assert min(lengths) < 200


def test_draws_follow_the_softmax() -> None:
    rng = np.random.default_rng(0)
    row = rng.standard_normal(700).astype(np.float32) * 2
    row[3] = -np.inf
    uniforms = rng.random(20000)
    tokens = draw(
        np.repeat(row[None], len(uniforms), 0),
        np.full(len(uniforms), 0.7, np.float32),
        uniforms,
    )
    shares = np.exp(row.astype(float) / 0.7)
    shares /= shares.sum()
    found = np.bincount(tokens, minlength=700) / len(uniforms)
    assert found[3] == 0
    assert np.abs(found - shares).max() < 4 * np.sqrt(shares.max() / len(uniforms))
    # both ends of the range, where nothing is left behind the last weight
    spike = np.full((2, 600), -np.inf, np.float32)
    spike[:, [7, 300]] = 1.0
    ends = np.array([0.0, np.nextafter(1.0, 0)])
    assert draw(spike, np.ones(2, np.float32), ends).tolist() == [7, 300]


# ---- prompts ----


def test_talk_is_what_the_template_says(made: families.Model) -> None:
    talk = train_data.source(made).talk
    text = talk._tokenizer
    assert text.encode("<|im_start|>user\n", specials=True) == talk.opening
    asked = "<|im_start|>user\nhe said<|im_end|>\n<|im_start|>assistant\n"
    assert talk.prompt("he said") == text.encode(asked, specials=True)
    more = talk.next_turn("and then")
    second = "\n<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n"
    assert more == text.encode(second, specials=True)
    assert talk.next_turn() == text.encode("\n<|im_start|>user\n", specials=True)
    assert talk.eos == {2} == talk.user_ends


def test_every_kind_of_prompt_is_made(made: families.Model) -> None:
    source = train_data.source(made)
    makers = Makers(source.talk, [Prompt(("he said that",))], 24, seed=3)
    got = train_data.run(made, makers.make, 40)
    kinds = Counter(s.kind for s in got)
    for kind in texts.MIX:
        if kind not in ("passage", "own"):
            assert kinds[kind], kind
    assert kinds["article"] > 4
    assert sum(kinds[k] for k in ("summary", "answer", "rewrite", "list")) >= 8
    shares = [s.temperature == 0 for s in got if s.kind not in ("article", "file")]
    assert 0.2 < np.mean(shares) < 0.8
    for sequence in got:
        most = 900 if sequence.kind == "article" else 24
        assert sequence.written.sum() <= 2 * most
        assert sequence.tokens[0] == 1


def test_templates_fill_and_topics_are_there() -> None:
    found = texts.topics()
    assert min(len(section) for section in found.values()) >= 40
    random = np.random.default_rng(0)
    german = {texts._german(random) for _ in range(50)}
    assert len(german) > 45 and all(text.endswith(".") for text in german)
    assert texts._fenced("so: ```c\nint x;\n``` end") == "```c\nint x;\n```"
    assert texts._fenced("no code") == "no code"
    assert texts._whole_sentences("One. Two! Thr") == "One. Two!"
    assert texts._sentences("One is\nhere. Two") == ["One is here.", "Two."]


def test_turns_of_a_file_follow_each_other(
    made: families.Model, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "the fox", "category": "animals"},
        {"turns": ["the dog", "and the river"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    prompts = texts.read_prompts(path)
    assert prompts == [
        Prompt(("the fox",), "animals"),
        Prompt(("the dog", "and the river")),
    ]
    makers = Makers(train_data.source(made).talk, prompts, 30, seed=0)
    dialogue = makers.chat(prompts[1], 0.0)
    ask = dialogue.send(None)
    assert isinstance(ask, Ask) and not ask.continues
    second = dialogue.send(Reply([9, 2], is_finished=True))
    assert isinstance(second, Ask) and second.continues
    assert second.prompt[: len(ask.prompt) + 2] == [*ask.prompt, 9, 2]
    assert dialogue.send(Reply([9], is_finished=False)) == Keep("file", 0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no prompts"),
        ('{"prompt": "a"}\n{', "line 2"),
        ('{"question": "a"}', "line 1: expected an object with prompt"),
        ('{"turns": ["a", 3]}', "expected an object"),
        ('{"turns": []}', "expected an object"),
        ('{"prompt": " "}', "expected an object"),
        ("[1]", "expected an object"),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_prompt_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError, match=words):
        texts.read_prompts(path)


# ---- shards ----


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less work is thrown away by an interruption."""
    monkeypatch.setattr(writing, "AHEAD", 8)
    monkeypatch.setattr(texts, "MIX", {"question": 1, "role": 2, "own": 1})


class Stop(Exception):
    """What a progress raises to interrupt."""


def written_to(
    made: families.Model, place: Path, tokens: int, stop_at: int | None = None
) -> list[shards.Stored]:
    def progress(what: str, done: int, total: int) -> None:
        assert total == tokens
        if stop_at is not None and done > stop_at:
            raise Stop

    write = {"tokens": tokens, "prompts": None, "limit": 24, "seed": 4}
    source = train_data.source(made)
    if stop_at is not None:
        with pytest.raises(Stop):
            data.write(source, place, **write, progress=progress)
    else:
        assert data.write(source, place, **write, progress=progress) >= tokens
    return shards.read_shards(place)


class KilledWriter(shards.ShardWriter):
    """Has no time to write what does not fill a shard."""

    def close(self) -> None:
        if sum(len(s.tokens) for s in self._open) >= shards.SHARD_TOKENS:
            super().close()


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("is_killed", [False, True])
def test_interrupted_data_go_on_as_if_they_had_not_been(
    made: families.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_killed: bool,
) -> None:
    monkeypatch.setattr(shards, "SHARD_TOKENS", 700)
    whole = written_to(made, tmp_path / "whole", 4000)
    for stop_at in (100, 2000, 3000):
        with monkeypatch.context() as patched:
            if is_killed:
                patched.setattr(data, "ShardWriter", KilledWriter)
            some = written_to(made, tmp_path / "parts", 4000, stop_at)
        assert len(some) < len(whole)
        if is_killed:
            assert bool(some) == (stop_at > shards.SHARD_TOKENS)
    (tmp_path / "parts" / ".shard-00003.tokens.npy.1.part").write_text("left over")
    parts = written_to(made, tmp_path / "parts", 4000)
    for a, b in zip(whole, parts, strict=True):
        assert (a.kind, a.temperature) == (b.kind, b.temperature)
        assert all(np.array_equal(a.arrays[n], b.arrays[n]) for n in shards.ARRAYS)
    assert len(list((tmp_path / "whole").glob("shard-*.json"))) >= 4
    assert shards.counts(whole).total() == sum(map(len, whole)) >= 4000
    again = written_to(made, tmp_path / "whole", 4000)
    assert len(again) == len(whole)


@pytest.mark.usefixtures("few_at_a_time")
def test_other_settings_are_not_mixed_in(made: families.Model, tmp_path: Path) -> None:
    written_to(made, tmp_path, 300)
    with pytest.raises(UsageError, match="begun with seed 4, now 5"):
        data.write(
            train_data.source(made),
            tmp_path,
            tokens=600,
            prompts=None,
            limit=24,
            seed=5,
        )
    with pytest.raises(FormatError, match=r"no data\.json"):
        shards.read_settings(tmp_path / "elsewhere")
    (tmp_path / "data.json").write_text('{"format": "other"}')
    with pytest.raises(FormatError, match="expected edgespec-train-data"):
        shards.read_settings(tmp_path)


def test_the_same_sequence_is_kept_once(made: families.Model, tmp_path: Path) -> None:
    sequences = train_data.written(made, 4)
    writer = shards.ShardWriter(tmp_path, {"seed": 1})
    writer.add(sequences)
    writer.add(sequences[:2])
    writer.close()
    assert (writer.next_dialogue, writer.dropped) == (2, 2)
    again = shards.ShardWriter(tmp_path, {"seed": 1})
    again.add(sequences[1:])
    again.close()
    again.close()
    assert (again.next_dialogue, again.dropped) == (3, 5)
    assert len(shards.read_shards(tmp_path)) == 4
    assert shards.ShardWriter(tmp_path, {"seed": 1}).next_dialogue == 3


def test_prompts_are_held_out_whole(made: families.Model) -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 300, (4000, 12)).astype(np.int32)
    share = np.mean([shards.is_held_out(prompt) for prompt in prompts])
    assert 0.04 < share < 0.06
    for sequence in train_data.written(made, 6):
        n = len(sequence.prompt)
        expected = shards.is_held_out(sequence.tokens[:n])
        assert shards.is_held_out(sequence.prompt) == expected


def test_all_replies_to_a_prompt_are_held_out_or_none(
    made: families.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At either temperature, and whatever was asked then."""
    monkeypatch.setattr(shards, "HELD_OUT", 3)

    def make(number: int, random: np.random.Generator) -> Dialogue:
        asked, warm = number // 2, 0.8 * (number % 2)
        prompt = np.random.default_rng(asked).integers(3, 300, 9).tolist()
        reply = yield Ask(prompt, 8, warm, frozenset({2}))
        assert reply is not None
        yield Keep("once", warm)
        again = [*prompt, *reply.tokens, *random.integers(3, 300, 5).tolist()]
        yield Ask(again, 8, warm, frozenset({2}), continues=True)
        yield Keep("twice", warm)

    writer = shards.ShardWriter(tmp_path, {"seed": 1})
    writer.add(train_data.run(made, make, 40))
    writer.close()
    sides: dict[bytes, set[bool]] = {}
    for sequence in shards.read_shards(tmp_path):
        prompt = sequence.arrays["tokens"][:9].tobytes()
        sides.setdefault(prompt, set()).add(sequence.is_held_out)
    assert len(sides) == 20
    assert all(len(side) == 1 for side in sides.values())
    assert 2 <= sum(side == {True} for side in sides.values()) <= 12


def test_prompts_to_measure_on_get_one_greedy_reply(
    made: families.Model, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"the fox {i}", "again"], "category": "c"} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):
        data.write_measure(
            train_data.source(made), tmp_path / "m", path, limit=12, seed=0
        )
        found = shards.read_shards(tmp_path / "m")
        assert [(s.kind, s.temperature) for s in found] == [("c", 0.0)] * 5
        for s in found:
            reply = s.arrays["tokens"][s.arrays["written"]]
            known = s.arrays["top"][:-1][s.arrays["written"][1:]]
            assert np.array_equal(reply, known)
