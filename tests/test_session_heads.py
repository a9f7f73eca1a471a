"""Draft heads in whole sessions: the same text with every one, what is told of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec import acceptance, acceptance_report
from edgespec.acceptance import Draft
from edgespec.bundle import Bundle, open_bundle
from edgespec.cli.app import main
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.drafts.fit import ENOUGH
from edgespec.errors import FormatError, UsageError
from edgespec.gguf_model import read_gguf_model
from edgespec.loading import load, open_session
from edgespec.session import Session
from edgespec_export import pipeline
from edgespec_export.head_bundle import HeadOptions
from tests.export import heads as tiny
from tests.export.checkpoints import Shape, gguf_checkpoint

SHAPE = Shape(n_layers=tiny.LAYERS)
TEXT = "one two three one two three one two"
TOKENS = 48
WORDS = ("eagle:eagle3", "eagle:eagle", "medusa", "model")
THREADS = ["--threads", "1"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_checkpoint(tmp_path_factory.mktemp("target") / "tiny.gguf", SHAPE)


@pytest.fixture(scope="module")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """With a draft of every kind."""
    work = tmp_path_factory.mktemp("bundle")
    paths = (
        tiny.eagle3().write(work / "e3"),
        tiny.eagle(own_embedding=False).write(work / "e"),
        tiny.medusa(rows=None).write(work / "m"),
        gguf_checkpoint(work / "small.gguf", Shape(n_layers=1)),
    )
    pipeline.export(target, work / "out", check=False, heads=HeadOptions(paths))
    return open_bundle(work / "out")


def session_of(bundle: Bundle, draft: str, tree: str = "auto") -> Session:
    return open_session(
        bundle,
        runtime=Runtime(threads=1),
        speculation=Speculation(draft=draft, tree=tree),
    )


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
@pytest.mark.parametrize("word", [*WORDS, "auto", "medusa+ngram", "model+ngram"])
def test_the_text_is_the_same_with_every_draft(
    bundle: Bundle,
    plain: dict[float, tuple[int, ...]],
    word: str,
    tree: str,
    temperature: float,
) -> None:
    with session_of(bundle, word, tree) as session:
        prompt, stopping = session.encode(TEXT, raw=True), Stopping(TOKENS)
        for _ in range(2):  # the second finds KV rows, index and head as they were
            reply = session.complete(
                prompt, sampling=sampled(temperature), stopping=stopping
            )
            assert reply.tokens == plain[temperature]
        session.is_speculating = False
        reply = session.complete(
            prompt, sampling=sampled(temperature), stopping=stopping
        )
        assert reply.tokens == plain[temperature]
        assert reply.stats.draft == "none"
        # The head was kept in step meanwhile.
        session.is_speculating = True
        again = [*prompt, *reply.tokens]
        more = session.complete(
            again, sampling=sampled(temperature), stopping=Stopping(8)
        )
        session.reset()
        fresh = session.complete(
            again, sampling=sampled(temperature), stopping=Stopping(8)
        )
        assert more.tokens == fresh.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("runtime", "tokens"),
    [
        (Runtime(threads=1, window=40), 600),  # beyond the model's 512 positions
        (Runtime(threads=1, kv="int8"), 40),
        (Runtime(threads=1, context=80), None),  # until it is full
    ],
)
def test_windows_and_narrow_caches_change_nothing(
    bundle: Bundle, runtime: Runtime, tokens: int | None, temperature: float
) -> None:
    said = []
    for draft in ("none", "eagle", "medusa+ngram", "model"):
        speculation = Speculation(draft, tree="best:6")
        with open_session(bundle, runtime=runtime, speculation=speculation) as session:
            endless = dict.fromkeys(session.engine.eos, -1e4)
            sampling = Sampling(temperature=temperature, seed=5, logit_bias=endless)
            reply = session.complete(TEXT, sampling=sampling, stopping=Stopping(tokens))
            said.append((reply.tokens, reply.finish_reason))
    assert said[1:] == said[:1] * 3
    assert len(said[0][0]) == (tokens or len(said[0][0]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_heads_accept_along_a_reply_what_they_do_in_real_rounds(
    bundle: Bundle, temperature: float
) -> None:
    words = (*WORDS, "medusa+ngram")
    with session_of(bundle, "none") as session:
        prompt = session.encode(TEXT, raw=True)
        target = session.target
        drafts = []
        for word in words:
            with session_of(bundle, word) as other:
                assert other.engine.head is not None
                path = other.engine.head.path
            drafts.append(Draft(word, target.open_head(path)))  # type: ignore[attr-defined]
        found = acceptance.measure(
            session,
            drafts,
            [prompt],
            trees=["best:6", "chain:2"],
            temperatures=[temperature],
            max_tokens=TOKENS,
        )
        for draft in drafts:
            assert draft.head is not None
            draft.head.close()
    rows = [row for row in acceptance_report.rows(found) if not row.is_blind]
    assert len(rows) == 2 * len(words)
    for row in rows:
        with session_of(bundle, row.draft, row.tree) as session:
            stats = session.complete(
                prompt,
                sampling=Sampling(temperature=temperature, seed=acceptance.SEED),
                stopping=Stopping(TOKENS),
            ).stats
        assert row.rounds == stats.rounds
        assert row.tokens_per_round == pytest.approx(stats.tokens_per_round)
        assert row.node_yield == pytest.approx(stats.node_yield)
        assert row.acceptance == pytest.approx(stats.acceptance)
        tried = tuple(depth.tried for depth in row.by_depth[:8])
        assert tried == stats.depth_tried
    blind = [row for row in acceptance_report.rows(found) if row.is_blind]
    assert len(blind) == (2 * len(WORDS) if temperature else 0)


def test_auto_is_the_eagle_head_with_ngrams(bundle: Bundle) -> None:
    with session_of(bundle, "auto") as session:
        assert session.draft == "eagle3+ngram"
        head = session.engine.head
        assert head is not None and head.path.name == "draft-eagle3.gguf"
    with session_of(bundle, "eagle:eagle") as session:
        assert session.draft == "eagle"


def test_auto_without_heads_is_ngrams(target: Path) -> None:
    with load(target, runtime=Runtime(threads=1)) as session:
        assert session.draft == "ngram"


def test_what_a_draft_takes_is_told(bundle: Bundle) -> None:
    with session_of(bundle, "eagle", "best:4") as session:
        stats = session.complete("hi", stopping=Stopping(8)).stats
    assert stats.draft == "eagle3"
    assert stats.draft_weights_mb > 0.05
    assert stats.draft_state_mb > 0
    assert stats.depth_tried[0] > 0
    with session_of(bundle, "ngram") as session:
        stats = session.complete("hi", stopping=Stopping(8)).stats
    assert (stats.draft_weights_mb, stats.draft_state_mb) == (0, 0)


def test_a_head_of_yours_by_path(
    target: Path, tmp_path: Path, edgespec_home: Path
) -> None:
    path = tiny.eagle3().write(tmp_path / "head")
    with load(target, speculation=Speculation(f"eagle:{path}")) as session:
        assert session.draft == "eagle3"
        assert session.engine.head is not None
        assert session.engine.head.source == path


def test_a_gguf_for_another_target_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    wide = gguf_checkpoint(tmp_path / "wide.gguf", Shape(n_layers=8, hidden=96))
    head = bundle.directory / "draft-eagle3.gguf"
    with pytest.raises(FormatError, match=r"64\b.*96\b|96\b.*64\b"):
        load(wide, speculation=Speculation(f"eagle:{head}"))


def test_a_head_that_does_not_fit_is_told_once(
    bundle: Bundle, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights are right once in a blue moon."""
    path = bundle.directory / "draft-eagle3.gguf"
    speculation = Speculation(f"eagle:{path}", tree="chain:1")
    options = {"sampling": sampled(0.8), "stopping": Stopping(2 * ENOUGH)}
    with load(target, speculation=speculation) as session:
        prompt = session.encode(TEXT, raw=True)
        first = session.complete(prompt, **options)
        second = session.complete(prompt, **options)
    assert "eagle3 does not fit" in first.notice
    assert f"--head {path} --tap-convention" in first.notice
    assert second.notice == ""
    flags = ["--draft", f"eagle:{path}", "--tree", "chain:1", "-n", str(2 * ENOUGH)]
    flags += ["--temperature", "0.8", "--seed", "3", *THREADS]
    assert main(["generate", str(target), "-p", TEXT, "--raw", *flags]) == 0
    assert capsys.readouterr().err.count("does not fit") == 1
    assert main(["chat", str(target), TEXT, *flags]) == 0
    assert capsys.readouterr().err.count("does not fit") == 1


def test_verify_with_a_head(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT}))
    flags = ["--prompts", str(prompts), "-n", "100", "--json", "-", *THREADS]
    flags += ["--draft", "eagle", "--tree", "chain:1", "--temperature", "0.8"]
    for seed in range(6):
        flags += ["--seed", str(seed)]
    assert main(["verify", str(bundle.directory), *flags]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["draft"] == "eagle3"
    assert data["identical"] == data["runs"] == 6
    assert data["details"][0]["plain"]["stats"]["draft"] == "none"
    assert captured.err.count("does not fit") == 1


def test_bench_of_heads(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT}))
    flags = ["--prompts", str(prompts), "-n", "12", "--json", "-", *THREADS]
    flags += ["--backend", "native", "--methods", "plain,ngram,eagle,medusa,model,auto"]
    flags += ["--tree", "best:4", "--tree", "chain:2"]
    assert main(["bench", str(bundle.directory), *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["tree"]) for row in rows] == [
        ("plain", ""),
        *(
            (method, tree)
            for method in ("ngram", "eagle", "medusa", "model", "auto")
            for tree in ("best:4", "chain:2")
        ),
    ]
    for row in rows:
        assert row["identical"]
        assert row["forward_ratio"] > 0
        if row["method"] not in ("plain", "ngram"):
            assert row["draft_share"] > 0
            assert row["extra_memory_mb"] > 0.01


def test_bench_acceptance_of_every_draft(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT}))
    flags = ["--prompts", str(prompts), "-n", "12", "--tree", "best:4", *THREADS]
    command = ["bench", str(bundle.directory), "--acceptance", *flags]
    assert main([*command, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["acceptance"]
    assert list(dict.fromkeys(row["draft"] for row in rows)) == [
        "ngram",
        *("eagle:eagle3", "eagle+ngram:eagle3", "eagle:eagle", "eagle+ngram:eagle"),
        *("medusa", "medusa+ngram", "model", "model+ngram"),
    ]
    assert main([*command, "--methods", "eagle"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("eagle, blind ") for line in lines) == 3


def test_a_head_is_needed_where_it_is_asked_for(bundle: Bundle) -> None:
    with session_of(bundle, "none") as session:
        words = "draft: eagle needs a head"
        with pytest.raises(UsageError, match=words):
            Session(session.target, session.tokenizer, speculation=Speculation("eagle"))


def test_model_of_a_file(target: Path, tmp_path: Path) -> None:
    small = gguf_checkpoint(tmp_path / "small.gguf", Shape(n_layers=1))
    with open_session(
        read_gguf_model(target), speculation=Speculation(f"model:{small}")
    ) as session:
        assert session.draft == "model"
        assert session.complete("hi", stopping=Stopping(8)).stats.draft == "model"
