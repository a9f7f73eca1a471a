"""The ONNX bundle follows llama.cpp's own greedy replies, except at near-ties."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgespec.bundle import Bundle
from edgespec.loading import open_session
from edgespec.targets.llamacpp import LlamaCppTarget
from edgespec.targets.onnx import OnnxTarget
from edgespec.tree.topology import chain
from edgespec_export import forward, sources

PROMPTS = (
    "Compose a short travel report about a week in Norway.",
    "Explain to a child why the sky is blue.",
    "A shop sells pens at 3 for 2 dollars. What do 12 pens cost?",
)
TOKENS = 40


def greedy(target: LlamaCppTarget, prompt: list[int]) -> list[int]:
    logits = target.prefill(np.array(prompt, dtype=np.int32))
    reply: list[int] = []
    while len(reply) < TOKENS:
        reply.append(int(logits.argmax()))
        logits = target.forward(chain(np.array(reply[-1:], dtype=np.int32)))[0]
        target.commit(np.zeros(1, dtype=np.int32))
    target.truncate(0)
    return reply


def test_argmax_differs_from_llama_cpp_only_at_near_ties(
    smollm2_gguf: Path, smollm2_bundle: Bundle
) -> None:
    weights = sources.read(smollm2_gguf)
    with open_session(smollm2_bundle) as session:
        prompts = [session.encode(prompt) for prompt in PROMPTS]
    theirs = LlamaCppTarget(smollm2_gguf, context=512, threads=1)
    ours = OnnxTarget(smollm2_bundle.path_of("target.onnx"), context=512, threads=2)
    n_misses = 0
    for prompt in prompts:
        reply = greedy(theirs, prompt)
        fed = np.array(prompt + reply[:-1], dtype=np.int32)
        ours.truncate(0)
        ours.prefill(fed[: len(prompt) - 1])
        said = ours.forward(chain(fed[len(prompt) - 1 :])).argmax(axis=1)
        misses = np.flatnonzero(said != reply)
        n_misses += len(misses)
        hidden, _ = forward.hidden_states(weights, fed[None])
        rows = forward.logits(weights, hidden[0, len(prompt) - 1 :][misses])
        top = np.sort(rows, axis=1)
        assert (top[:, -1] - top[:, -2] < 0.4).all()
    assert n_misses <= 0.06 * TOKENS * len(PROMPTS)
