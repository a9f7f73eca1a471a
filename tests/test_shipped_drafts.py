"""The draft heads that come with edgespec, beside the model they were trained for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import models
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.gguf_header import open_gguf
from edgespec.inspection import inspect_file
from edgespec.session import Session

CARD = models.card("smollm2-135m")
MOST_BYTES = 8_000_000
TOKENS = 64
PROMPTS = (
    "Explain how rain forms, in three sentences.",
    "Write a Python function that reverses a string, then explain it.",
    "What is 17 times 6? Show your steps.",
)
# Tokens per round on PROMPTS that a head of each kind must reach, with trees of 8 rows.
LEAST = {"eagle3": 1.8, "medusa": 1.2, "model": 1.4}
WORDS = {"eagle3": "eagle", "medusa": "medusa", "model": "model"}


@pytest.fixture(scope="module", params=[d.name for d in CARD.drafts])
def drafted(
    request: pytest.FixtureRequest, smollm2_gguf: Path
) -> Iterator[tuple[str, Session]]:
    [draft] = [d for d in CARD.drafts if d.name == request.param]
    with edgespec.load(
        smollm2_gguf,
        runtime=Runtime(context=512),
        speculation=Speculation(
            draft=f"{WORDS[draft.kind]}:{draft.name}", tree="best:8"
        ),
    ) as session:
        yield draft.kind, session


@pytest.fixture(scope="module")
def plain(smollm2_gguf: Path) -> Iterator[Session]:
    with edgespec.load(
        smollm2_gguf,
        runtime=Runtime(context=512),
        speculation=Speculation(draft="none"),
    ) as session:
        yield session


def replies(session: Session, temperature: float) -> tuple[list[list[int]], float]:
    sampling = Sampling(temperature=temperature, top_p=1.0, seed=3)
    tokens, rates = [], []
    for prompt in PROMPTS:
        reply = session.complete(prompt, sampling=sampling, stopping=Stopping(TOKENS))
        tokens.append(list(reply.tokens))
        rates.append(reply.stats.tokens_per_round)
        session.reset()
    return tokens, float(np.mean(rates))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_change_no_token_and_are_often_right(
    drafted: tuple[str, Session], plain: Session, temperature: float
) -> None:
    kind, session = drafted
    expected, one = replies(plain, temperature)
    found, rate = replies(session, temperature)
    assert found == expected
    assert one == 1.0
    assert rate >= LEAST[kind]


@pytest.mark.parametrize("draft", CARD.drafts, ids=lambda draft: draft.name)
def test_they_are_small_and_carry_their_licence(draft: models.CardDraft) -> None:
    assert draft.size <= MOST_BYTES
    metadata = open_gguf(CARD.draft_path(draft)).metadata
    assert metadata["general.license"] == "apache-2.0"


def test_there_is_one_of_every_kind_and_a_card_beside_them() -> None:
    kinds = [draft.kind for draft in CARD.drafts]
    assert sorted(kinds) == ["eagle3", "medusa", "model", "model"]
    told = (CARD.draft_path(CARD.drafts[0]).parent / "README.md").read_text()
    assert "Apache-2.0" in told
    for draft in CARD.drafts:
        assert draft.file in told


def test_auto_is_the_eagle_head_with_n_grams(smollm2_gguf: Path) -> None:
    with edgespec.load(smollm2_gguf, runtime=Runtime(context=512)) as session:
        reply = session.complete(PROMPTS[0], stopping=Stopping(16))
    assert reply.stats.draft == "eagle3+ngram"


def test_inspecting_the_file_lists_them(smollm2_gguf: Path) -> None:
    listed = [draft.option for draft in inspect_file(smollm2_gguf).drafts]
    assert listed == [f"{WORDS[draft.kind]}:{draft.name}" for draft in CARD.drafts]
