"""Small drafts of tiny targets: some of their layers, stored as a bundle has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGUFValueType

from edgespec.gguf_header import Metadata
from edgespec_export import draft_model, gguf_file
from edgespec_export.weights import WeightSet


def pruned(target: WeightSet, layers: Sequence[int]) -> WeightSet:
    """A model of these layers of a GGUF's."""
    source = target.gguf_metadata
    assert isinstance(source, Metadata)
    metadata = Metadata()
    for key, value in source.items():
        metadata.put(key, value, *source.types[key])
    key = f"{target.config.arch}.block_count"
    metadata.put(key, len(layers), GGUFValueType.UINT32)
    tensors = {n: t for n, t in target.tensors.items() if not n.startswith("blk.")}
    for new, old in enumerate(layers):
        for name, tensor in target.tensors.items():
            if name.startswith(f"blk.{old}."):
                name = name.replace(f"blk.{old}.", f"blk.{new}.")
                tensors[name] = replace(tensor, name=name)
    config = replace(target.config, n_layers=len(layers))
    return replace(target, config=config, tensors=tensors, gguf_metadata=metadata)


def renamed(weights: WeightSet, token: int, word: str) -> WeightSet:
    """The same model, one token of which has another name."""
    made = pruned(weights, range(weights.config.n_layers))
    key = "tokenizer.ggml.tokens"
    assert isinstance(made.gguf_metadata, Metadata)
    words = list(made.gguf_metadata[key])
    words[token] = word
    made.gguf_metadata.put(key, words, *made.gguf_metadata.types[key])
    return made


def whole(target: WeightSet, layers: Sequence[int], path: Path) -> Path:
    """The model of these layers with everything in it."""
    gguf_file.write(pruned(target, layers), None, path)
    return path


def write(
    target: WeightSet,
    layers: Sequence[int],
    path: Path,
    *,
    ids: Sequence[int] | None = None,
    quant: str | None = None,
) -> Path:
    """The draft of these layers without what is the target's."""
    complete = whole(target, layers, path.with_name(f"whole-{path.name}"))
    draft = draft_model.read(complete, target)
    if ids is not None:
        draft = replace(draft, ids=np.array(ids, np.int64))
    draft_model.write(draft, path, quant)
    return path
