"""The replies on the model cards, from the whole program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import edgespec
from edgespec import models
from edgespec.bundle import Bundle
from edgespec.config import Sampling, Speculation, Stopping
from edgespec.session import Session

GOLDEN = models.card("smollm2-135m").golden


@pytest.fixture(scope="module", params=["none", "ngram"])
def session(
    smollm2_bundle: Bundle, request: pytest.FixtureRequest
) -> Iterator[Session]:
    speculation = Speculation(draft=request.param)
    directory = str(smollm2_bundle.directory)
    with edgespec.load(directory, speculation=speculation) as loaded:
        yield loaded


@pytest.mark.parametrize("golden", GOLDEN, ids=[g.prompt[:20] for g in GOLDEN])
def test_golden_reply(session: Session, golden: models.Golden) -> None:
    reply = session.complete(
        [{"role": "user", "content": golden.prompt}],
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=len(golden.tokens)),
    )
    assert list(reply.tokens) == list(golden.tokens)
    assert reply.text == golden.text
    assert reply.prompt_tokens == len(golden.prompt_tokens)
    ids = session.encode([{"role": "user", "content": golden.prompt}])
    assert list(ids) == list(golden.prompt_tokens)
