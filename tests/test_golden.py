"""The replies on the model cards, from the whole program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import edgespec
from edgespec import models
from edgespec.bundle import Bundle
from edgespec.config import Runtime, Sampling, Speculation, Stopping
from edgespec.session import Session

GOLDEN = models.card("smollm2-135m").golden


@pytest.fixture(scope="module", params=["none", "ngram"])
def draft(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["native", "onnx"])
def session(
    smollm2_bundle: Bundle, draft: str, request: pytest.FixtureRequest
) -> Iterator[Session]:
    with edgespec.load(
        smollm2_bundle.directory,
        runtime=Runtime(backend=request.param),
        speculation=Speculation(draft=draft),
    ) as loaded:
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
