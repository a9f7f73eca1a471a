"""What the source itself answers on the check text: transformers' own model, or ours in
numpy.

With the reference extra installed, a Hugging Face checkpoint is loaded by the class
that optimum's task lookup names for it. Optimum's ONNX exporter is not used: it is a
separate package (optimum-onnx) that, as of its release 0.1.0, requires transformers <
4.58 and so cannot stand beside the one that reads current checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError
from edgespec.progress import Progress, silent
from edgespec_export import forward
from edgespec_export.weights import WeightSet


@dataclass(frozen=True, slots=True)
class Reference:
    """Final-norm states of every window, and the head that makes logits of them."""

    by: str  # "transformers" or "numpy"
    windows: NDArray[np.int64]  # (w, n) token ids
    hidden: NDArray[np.float32]  # (w, n, hidden)
    head: NDArray[np.float32]  # (vocab, hidden)

    def logits(self, window: int, rows: slice) -> NDArray[np.float32]:
        """Logits (rows, vocab) of some rows of a window."""
        product: NDArray[np.float32] = self.hidden[window, rows] @ self.head.T
        return product


def of_source(
    weights: WeightSet,
    source: Path | None,
    windows: NDArray[np.int64],
    progress: Progress = silent,
) -> Reference:
    """The reference for a weight set read from `source`.

    A directory is run by transformers when torch, transformers and optimum are there;
    everything else by the dequantised weights in numpy. Raises FormatError when what
    comes out is not finite.
    """
    if source is not None and source.is_dir() and has_transformers():
        reference = _transformers(weights, source, windows, progress)
    else:
        reference = of_weights(weights, windows, progress)
    if not np.isfinite(reference.hidden).all():
        raise FormatError(
            "the source's own answers on the check text are not numbers: its weights "
            "are damaged"
        )
    return reference


def of_weights(
    weights: WeightSet, windows: NDArray[np.int64], progress: Progress = silent
) -> Reference:
    """The reference in numpy float32."""
    hidden, _ = forward.hidden_states(
        weights,
        windows,
        progress=lambda done, total: progress("run the source", done, total),
    )
    return Reference("numpy", windows, hidden, forward.head(weights))


def has_transformers() -> bool:
    """Whether the reference extra is installed."""
    return all(find_spec(name) for name in ("torch", "transformers", "optimum"))


def _transformers(
    weights: WeightSet,
    source: Path,
    windows: NDArray[np.int64],
    progress: Progress,
) -> Reference:
    import torch
    from optimum.exporters.tasks import TasksManager
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, local_files_only=True)
    text = config.get_text_config()
    for key, got in (
        ("num_hidden_layers", weights.config.n_layers),
        ("hidden_size", weights.config.hidden),
        ("num_attention_heads", weights.config.n_heads),
        ("vocab_size", weights.config.vocab),
    ):
        expected = getattr(text, key)
        if expected != got:
            raise FormatError(
                f"{source}: {key}: transformers reads {expected}, we read {got}"
            )
    kind = TasksManager.get_model_class_for_task(
        "text-generation", model_type=config.model_type
    )
    model = kind.from_pretrained(source, dtype=torch.float32, local_files_only=True)
    model.eval()
    hidden = np.empty((*windows.shape, weights.config.hidden), np.float32)
    with torch.no_grad():
        for index, window in enumerate(windows):
            states = model.model(torch.from_numpy(window[None])).last_hidden_state
            hidden[index] = states[0].numpy()
            progress("run the source", index + 1, len(windows))
        head = model.get_output_embeddings().weight.numpy().copy()
    return Reference("transformers", windows, hidden, head)
