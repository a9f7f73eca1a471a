"""The native engine on the real model: agreement, drafts of any kind, memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgespec._native import (
    DRAFT,
    PREFILL,
    NativeModel,
    NativeSession,
    NativeTargetState,
    SampleParams,
    cpu_variants,
    tree_derive,
)
from edgespec.targets.llamacpp import LlamaCppTarget
from edgespec.tree.topology import Tree, chain
from edgespec_export import forward, sources
from tests.processes import python

TEXT = "Explain to a child why the sky is blue. Then compose a short travel report."
TOKENS = 40
PARENTS = (-1, 0, 0, 1, 2, 2, 4, 3, 0)


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> NativeModel:
    made = NativeModel(smollm2_gguf, threads=2)
    made.load()
    return made


def tokens(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(1000, 40000, n).astype(np.int32)


def greedy(target: LlamaCppTarget, prompt: list[int]) -> list[int]:
    logits = target.prefill(np.array(prompt, dtype=np.int32))
    reply: list[int] = []
    while len(reply) < TOKENS:
        reply.append(int(logits.argmax()))
        logits = target.forward(chain(np.array(reply[-1:], dtype=np.int32)))[0]
        target.commit(np.zeros(1, dtype=np.int32))
    return reply


def test_argmax_differs_from_llama_cpp_only_at_near_ties(
    model: NativeModel, smollm2_gguf: Path
) -> None:
    theirs = LlamaCppTarget(smollm2_gguf, context=256, threads=1)
    weights = sources.read(smollm2_gguf)
    prompt = Tokenizer.from_str(weights.tokenizer_json).encode(TEXT).ids
    reply = greedy(theirs, prompt)
    fed = np.array(prompt + reply[:-1], dtype=np.int32)
    ours = NativeTargetState(model, context=256)
    ours.prefill(fed[: len(prompt) - 1], None)
    rows = np.empty((TOKENS, model.info.vocab), np.float32)
    ours.forward(chain(fed[len(prompt) - 1 :]), None, rows)
    hidden, _ = forward.hidden_states(weights, fed[None])
    truth = forward.logits(weights, hidden[0, len(prompt) - 1 :])
    misses = np.flatnonzero(rows.argmax(axis=1) != reply)
    top = np.sort(truth[misses], axis=1)
    assert (top[:, -1] - top[:, -2] < 0.4).all()
    assert len(misses) <= 0.1 * TOKENS
    assert np.sqrt(((rows - truth) ** 2).mean()) < 0.06 * truth.std()


def test_the_variants_of_this_processor_give_the_same_bits(
    model: NativeModel, smollm2_gguf: Path
) -> None:
    ids = tokens(60)
    tree = tree_derive(ids[51:], PARENTS)
    found = []
    for cpu in [name for name in cpu_variants() if name != "generic"]:
        made = model
        if cpu != model.info.cpu:
            made = NativeModel(smollm2_gguf, threads=1, cpu=cpu)
            made.load()
        target = NativeTargetState(made, context=64)
        target.prefill(ids[:51], None)
        found.append(np.empty((tree.n, made.info.vocab), np.float32))
        target.forward(tree, None, found[-1])
    assert all(np.array_equal(found[0], other) for other in found)


Drafter = Callable[[list[int], int], Tree]


def right(reply: list[int], at: int) -> Tree:
    """Their row of best rank is wrong, the second is what follows."""
    follows = [*reply[at : at + 3], 5, 5, 5]
    spelt = [0, follows[0] + 1, follows[0], follows[1], follows[2] + 1, follows[2]]
    return tree_derive(np.array(spelt, np.int32), (-1, 0, 0, 2, 3, 3))


def wrong(reply: list[int], at: int) -> Tree:
    follows = [*reply[at : at + 1], 5][0]
    spelt = np.arange(9, dtype=np.int32) + follows + 1
    return tree_derive(spelt % 49152, PARENTS)


def anything(reply: list[int], at: int) -> Tree:
    return tree_derive(tokens(9, seed=at), PARENTS)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_token(model: NativeModel, temperature: float) -> None:
    prompt = tokens(30, seed=4)

    def replied(drafter: Drafter | None, known: list[int]) -> tuple[list[int], int]:
        session = NativeSession(vocab=model.info.vocab, context=128, eos=())
        target = NativeTargetState(model, context=128)
        session.append(prompt)
        session.begin_generation(
            SampleParams(temperature=temperature, top_p=0.95, seed=9), TOKENS
        )
        target.prefill(prompt[:-1], None)
        reply = list(target.run(session, PREFILL, None).tokens)
        rounds, finish = 0, None
        while finish is None:
            if drafter is not None:
                session.propose(drafter(known, len(reply)))
            done = target.run(session, DRAFT, None)
            reply += done.tokens
            rounds, finish = rounds + 1, done.finish
        return reply, rounds

    plain, rounds = replied(None, [])
    assert (len(plain), rounds) == (TOKENS, TOKENS - 1)
    for drafter in (right, wrong, anything):
        drafted, rounds = replied(drafter, plain)
        assert drafted == plain, drafter.__name__
        assert rounds < TOKENS / 3 if drafter is right else rounds > TOKENS / 2


MEMORY = """
import resource
import sys
from pathlib import Path

import numpy as np

from edgespec._native import NativeModel, NativeTargetState, target_memory

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
model = NativeModel(Path(sys.argv[1]), threads=2)
model.load()
target = NativeTargetState(model, context=512)
logits = np.empty(model.info.vocab, np.float32)
turns = []
for turn in range(100):
    for _ in range(4):
        target.prefill(np.arange(turn, turn + 3, dtype=np.int32), logits)
    if target.length > 480:
        target.truncate(0)
    turns.append(peak())
print(turns[-1] - before - model.info.weight_bytes - target_memory(model, context=512))
print(turns[-1] - turns[45])
"""


def test_memory_is_the_weights_and_the_rows_and_stays(smollm2_gguf: Path) -> None:
    made = subprocess.run(
        [*python(MEMORY), str(smollm2_gguf)], capture_output=True, text=True, check=True
    )
    beside, grown = map(int, made.stdout.split())
    assert beside < 40 << 20
    assert grown < 1 << 20
