"""`edgespec generate`: text to stdout, everything else to stderr, one JSON object."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable

import pytest

import edgespec
from edgespec.cli.app import main
from edgespec.config import Runtime, Speculation
from tests.scripted import scripted_session

ANSWERS = {"hi": "hello there", "ha": "ha ha ha ha ha ha ha ha", "tree": "a 聪明 tree"}
STATS = {
    *("backend", "draft", "rounds", "tokens_per_round", "drafted", "accepted"),
    *("acceptance", "node_yield", "ttft_s", "prefill_s", "decode_s", "tokens_per_s"),
    *("depth_tried", "depth_accepted", "draft_weights_mb", "draft_state_mb"),
    "peak_rss_mb",
}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Models load as scripted sessions; what load was given."""
    calls: list[dict[str, object]] = []

    def load(model: str, **options: object) -> object:
        calls.append({"model": model, **options})
        return scripted_session(ANSWERS, speculation=options["speculation"])  # type: ignore[arg-type]

    monkeypatch.setattr(edgespec, "load", load)
    return calls


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))

    return give


def test_text_to_stdout_and_the_rest_to_stderr(loaded, capsys) -> None:
    assert main(["generate", "m", "-p", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello there\n"
    assert "tokens/s" in err
    assert "tokens/round" in err
    assert "stop" in err
    assert "seed" in err


def test_json_is_one_object_with_the_documented_fields(loaded, capsys) -> None:
    assert main(["generate", "m", "-p", "ha", "--json", "--seed", "7"]) == 0
    out, _ = capsys.readouterr()
    data = json.loads(out)
    assert list(data) == [
        "text",
        "tokens",
        "prompt_tokens",
        "finish_reason",
        "seed",
        "stats",
    ]
    assert data["text"] == ANSWERS["ha"]
    assert data["tokens"] == [*ANSWERS["ha"].encode(), 0]
    assert data["prompt_tokens"] == len("user: ha\nassistant: ")
    assert data["finish_reason"] == "stop"
    assert data["seed"] == 7
    assert set(data["stats"]) == STATS
    assert data["stats"]["draft"] == "ngram"
    assert out.count("\n") == 1


def test_logprobs(loaded, capsys) -> None:
    assert main(["generate", "m", "-p", "hi", "--json", "--logprobs", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [entry["token"] for entry in data["logprobs"]] == data["tokens"]
    first = data["logprobs"][0]
    assert first["top"][0] == [ord("h"), first["logprob"]]
    assert len(first["top"]) == 2
    assert main(["generate", "m", "-p", "hi", "--logprobs", "2"]) == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("n", "text", "reason"),
    [("0", "", "length"), ("1", "h", "length"), ("5", "hello", "length")],
)
def test_exact_number_of_tokens(loaded, capsys, n, text, reason) -> None:
    assert main(["generate", "m", "-p", "hi", "--json", "-n", n]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["text"], data["finish_reason"]) == (text, reason)
    assert len(data["tokens"]) == int(n)


def test_no_tokens_print_nothing(loaded, capsys) -> None:
    assert main(["generate", "m", "-p", "hi", "-n", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_stop_strings(loaded, capsys) -> None:
    arguments = ["generate", "m", "-p", "hi", "--stop", "zzz", "--stop", " th"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "hello\n"


def test_prompt_from_a_file_without_its_last_line_break(
    loaded, capsys, tmp_path
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"hi\n")
    assert main(["generate", "m", "-f", str(path)]) == 0
    assert capsys.readouterr().out == "hello there\n"


@pytest.mark.parametrize("source", [["-"], [], ["-f", "-"]])
def test_prompt_from_stdin(loaded, capsys, stdin, source) -> None:
    stdin(b"hi\n")
    assert main(["generate", "m", *source]) == 0
    assert capsys.readouterr().out == "hello there\n"


def test_raw_prompt_has_no_template(loaded, capsys) -> None:
    raw = "user: hi\nassistant: hel"
    assert main(["generate", "m", "--raw", "-p", raw, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["text"] == "lo there"
    assert data["prompt_tokens"] == len(raw)


def test_characters_of_several_tokens_arrive_whole(loaded, capsys) -> None:
    assert main(["generate", "m", "-p", "tree"]) == 0
    assert capsys.readouterr().out == "a 聪明 tree\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "a", "-f", "b"], "one prompt"),
        (["-p", "a", "-"], "one prompt"),
        (["hello"], "got 'hello'"),
        (["-f", "/nowhere/at/all"], "/nowhere/at/all"),
        (["-p", "a", "-n", "-1"], "-n"),
        (["-p", "a", "--top-p", "0"], "top_p: expected above 0"),
        (["-p", "a", "--repeat-penalty", "0"], "repeat_penalty: expected above 0"),
        (["-p", "a", "--temperature", "nan"], "temperature"),
        (["-p", "a", "--temperature", "inf"], "0 (greedy) or more, at most 1e+06"),
        (["-p", "a", "--presence-penalty", "nan"], "presence_penalty: expected a n"),
        (["-p", "a", "--frequency-penalty", "inf"], "frequency_penalty: expected a n"),
        (["-p", "a\udcff"], "-p: expected UTF-8 text, got b'a\\xff'"),
        (["-p", "a", "--stop", "\udcff"], "--stop: expected UTF-8 text"),
        (["-p", "a", "--logit-bias", "x=1"], "ID=VALUE"),
        (["-p", "a", "--logit-bias", "3"], "ID=VALUE"),
        (["-p", "a", "--logit-bias", "3=inf"], "ID=VALUE"),
        (["-p", "a", "--logit-bias", "3=nan"], "ID=VALUE"),
        (["-p", "a", "--logit-bias", "256=1"], "256"),
        (["-p", "a", "--stop", ""], "stop"),
        (["-p", ""], "empty"),
    ],
)
def test_usage_errors_exit_with_2(loaded, capsys, arguments, message) -> None:
    # The scripted template renders an empty prompt too; raw text shows the error.
    raw = ["--raw"] if arguments == ["-p", ""] else []
    assert main(["generate", "m", *arguments, *raw]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_bad_bytes_are_named(loaded, capsys, stdin) -> None:
    stdin(b"\xff\xfe")
    assert main(["generate", "m", "-"]) == 2
    assert "stdin: expected UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_full_disk_is_one_message(loaded, monkeypatch, capsys, flags) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["generate", "m", "-p", "hi", *flags]) == 1
    assert "cannot write the result: No space left" in capsys.readouterr().err


def test_banned_token_is_not_said(loaded, capsys) -> None:
    bias = ["--logit-bias", f"{ord('h')}=-inf", "--logit-bias", f"{ord('x')}=50"]
    assert main(["generate", "m", "-p", "hi", "-n", "3", *bias]) == 0
    assert capsys.readouterr().out == "xxx\n"


def test_options_reach_the_session(loaded, capsys) -> None:
    flags = ["--backend", "llamacpp", "--threads", "3", "--ctx", "99"]
    flags += ["--draft", "none", "--tree", "chain:2", "--offline"]
    assert main(["generate", "m", "-p", "hi", *flags]) == 0
    (call,) = loaded
    assert call["model"] == "m"
    assert call["offline"] is True
    assert call["runtime"] == Runtime(backend="llamacpp", threads=3, context=99)
    assert call["speculation"] == Speculation(draft="none", tree="chain:2")


def test_template_arguments_reach_the_template(monkeypatch, capsys) -> None:
    session = scripted_session({"7 hi": "seven", "oh hi": "text"})
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    for opening, said in (('"7 "', "seven"), ("oh ", "text")):
        flag = f"opening={opening}"
        assert main(["generate", "m", "-p", "hi", "--template-arg", flag]) == 0
        assert capsys.readouterr().out == said + "\n"
        assert main(["chat", "m", "hi", "--template-arg", flag]) == 0
        assert capsys.readouterr().out == said + "\n"


@pytest.mark.parametrize("entry", ["opening", "=1", "two words=1", "messages=[]"])
def test_template_arguments_that_are_none(loaded, capsys, entry: str) -> None:
    for command in (["generate", "m", "-p", "hi"], ["chat", "m", "hi"]):
        assert main([*command, "--template-arg", entry]) == 2
        assert "--template-arg" in capsys.readouterr().err
    raw = ["--raw", "--template-arg", "opening=1"]
    assert main(["generate", "m", "-p", "hi", *raw]) == 2


def test_defaults_are_those_of_config(loaded, capsys) -> None:
    assert main(["generate", "m", "-p", "hi"]) == 0
    assert loaded[0]["runtime"] == Runtime()
    assert loaded[0]["speculation"] == Speculation()
    assert loaded[0]["offline"] is False


def test_c35_prompt_beyond_the_context_names_the_sizes(monkeypatch, capsys) -> None:
    session = scripted_session(ANSWERS, context=16)
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    assert main(["generate", "m", "-p", "hi", "-n", "50"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    for number in (str(len("user: hi\nassistant: ")), "50", "16"):
        assert number in err
    assert session.target.forwards == []


def test_interrupt_keeps_what_was_said_and_exits_with_130(monkeypatch, capsys) -> None:
    session = scripted_session(ANSWERS, speculation=Speculation(draft="none"))
    forward = session.target.forward

    def interrupted(*arguments: object) -> object:
        if len(session.target.forwards) == 6:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(session.target, "forward", interrupted)
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: session)
    assert main(["generate", "m", "-p", "hi"]) == 130
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert "hello there".startswith(out.strip())
    assert out.strip()
