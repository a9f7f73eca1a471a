"""An exported container against its source: tensor errors, KL and top-1 on a text.

A container fails above `MAX_KL` of its quantisation. The KL of a kept or 8-bit source
is that of int8 activations; the 4-bit limits leave room for models that quantise badly,
and still stop one whose layout is wrong, which lands above 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgespec import agreement
from edgespec.agreement import compare
from edgespec.cpu import usable_cores
from edgespec.errors import BackendError, FormatError
from edgespec.progress import Progress, silent
from edgespec.targets.native import NativeTarget
from edgespec.tree.topology import chain
from edgespec_export import forward, sources
from edgespec_export.reference import Reference
from edgespec_export.weights import ModelConfig, WeightSet

MAX_KL = {None: 0.02, "f32": 1e-4, "f16": 1e-3, "q8_0": 0.02, "q4_1": 0.4, "q4_0": 0.8}
TEXT = Path(__file__).with_name("check_text.txt")
WINDOW = 512  # tokens run at a time
_ROWS = 64  # logit rows held at a time: two of them, (64, vocab) each


@dataclass(frozen=True, slots=True)
class Check:
    """One container's distance from its source."""

    kl: float  # mean over tokens of KL(source || container), nats
    top1: float  # share of tokens with the same argmax
    tokens: int
    by: str  # what ran the source
    errors: dict[str, float]  # relative error of each tensor that is not exact
    flips: int | None  # argmaxes that int8 activations change against float ones
    flips_of: int  # tokens looked at for it


def windows(
    weights: WeightSet, text: str | None = None, limit: int | None = None
) -> NDArray[np.int64]:
    """Token ids (w, n) of the text, n = 512 or the model's limit.

    A remainder is dropped; a text shorter than one window is one row. `limit` cuts the
    number of tokens.
    """
    tokenizer = Tokenizer.from_str(weights.tokenizer_json)
    if text is None:
        text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:limit]
    if len(ids) < 2:
        raise FormatError("the check text must have at least 2 tokens")
    if max(ids) >= weights.config.vocab:
        raise FormatError(
            f"token {max(ids)} of the tokenizer lies beyond the vocabulary of "
            f"{weights.config.vocab}"
        )
    start = [weights.bos_id] if weights.add_bos and weights.bos_id is not None else []
    return agreement.windows(ids, min(WINDOW, weights.config.max_position), start)


def check_onnx(
    path: Path,
    weights: WeightSet,
    reference: Reference,
    errors: dict[str, float],
    progress: Progress = silent,
) -> Check:
    """Runs target.onnx over the windows; `errors` come from writing it."""
    session = _session(path.read_bytes(), path)
    kl, top1 = [], []
    count = len(reference.windows)
    first: NDArray[np.int64] | None = None
    for index, window in enumerate(reference.windows):
        hits: list[NDArray[np.int64]] = []
        for rows, got in _onnx_logits(session, weights, window):
            divergence, is_same, best = compare(reference.logits(index, rows), got)
            kl.append(divergence)
            top1.append(is_same)
            hits.append(best)
        if first is None:
            first = np.concatenate(hits)
        progress("check target.onnx", index + 1, count)
    assert first is not None
    flips = _flips(path, weights, reference.windows[0], first)
    all_kl, all_top1 = np.concatenate(kl), np.concatenate(top1)
    return Check(
        float(all_kl.mean()),
        float(all_top1.mean()),
        len(all_kl),
        reference.by,
        errors,
        flips,
        0 if flips is None else len(first),
    )


def check_gguf(
    path: Path, weights: WeightSet, reference: Reference, progress: Progress = silent
) -> Check:
    """Reads target.gguf back and runs its dequantised weights over the windows.

    Where every tensor came out bit for bit the numbers follow without running anything.
    """
    written = sources.gguf.read(path)
    errors = tensor_errors(weights, written)
    tokens = reference.windows.size
    if not errors and reference.by == "numpy" and _is_same_model(weights, written):
        return Check(0.0, 1.0, tokens, reference.by, {}, None, 0)
    hidden, _ = forward.hidden_states(
        written,
        reference.windows,
        progress=lambda done, total: progress("check target.gguf", done, total),
    )
    head = forward.head(written)
    kl, top1 = [], []
    for index in range(len(reference.windows)):
        for rows in _row_slices(reference.windows.shape[1]):
            got = hidden[index, rows] @ head.T
            divergence, is_same, _ = compare(reference.logits(index, rows), got)
            kl.append(divergence)
            top1.append(is_same)
    return Check(
        float(np.concatenate(kl).mean()),
        float(np.concatenate(top1).mean()),
        tokens,
        reference.by,
        errors,
        None,
        0,
    )


def check_packed(
    path: Path,
    reference: Reference,
    errors: dict[str, float],
    progress: Progress = silent,
) -> Check:
    """Runs target.packed.gguf in the native engine over the windows.

    `errors` are those of the GGUF it was packed from, whose values it has.
    """
    kl, top1 = [], []
    count, length = reference.windows.shape
    target = NativeTarget(path, context=length, threads=usable_cores())
    try:
        for index, window in enumerate(reference.windows):
            target.truncate(0)
            for rows in _row_slices(length):
                tree = chain(window[rows].astype(np.int32))
                got = target.forward(tree)
                divergence, is_same, _ = compare(reference.logits(index, rows), got)
                target.commit(np.arange(tree.n, dtype=np.int32))
                kl.append(divergence)
                top1.append(is_same)
            progress(f"check {path.name}", index + 1, count)
    finally:
        target.close()
    all_kl, all_top1 = np.concatenate(kl), np.concatenate(top1)
    return Check(
        float(all_kl.mean()),
        float(all_top1.mean()),
        len(all_kl),
        reference.by,
        errors,
        None,
        0,
    )


def tensor_errors(weights: WeightSet, written: WeightSet) -> dict[str, float]:
    """Relative error of each tensor that is not exact."""
    errors = {}
    for name, tensor in weights.tensors.items():
        other = written.tensors[name]
        if other.kind == tensor.kind and np.array_equal(
            other.load_raw().reshape(-1), tensor.load_raw().reshape(-1)
        ):
            continue
        error = relative_error(tensor.load_f32(), other.load_f32())
        if error > 0:
            errors[name] = error
    return errors


def require(
    container: str, check: Check, quant: str | None, limit: float | None
) -> None:
    """Raises FormatError when a container lies above its limit."""
    allowed = MAX_KL[quant] if limit is None else limit
    if not check.kl <= allowed:  # also catches NaN
        worst = sorted(check.errors.items(), key=lambda item: -item[1])[:3]
        tensors = ", ".join(f"{name} {error:.1%}" for name, error in worst) or "none"
        raise FormatError(
            f"target.{container}: mean KL against the source is {check.kl:.4g}, "
            f"at most {allowed:g} allowed (top-1 {check.top1:.1%}); largest tensor "
            f"errors: {tensors}. Choose a finer --quant, or --no-check to export it "
            "regardless"
        )


def relative_error(expected: NDArray[np.float32], got: NDArray[np.float32]) -> float:
    """Norm of the difference over the norm of what was expected."""
    norm = float(np.linalg.norm(expected))
    difference = float(np.linalg.norm(got - expected))
    return difference / norm if norm else difference


def _is_same_model(a: WeightSet, b: WeightSet) -> bool:
    plain = [f.name for f in fields(ModelConfig) if "rope" not in f.name]
    if any(getattr(a.config, name) != getattr(b.config, name) for name in plain):
        return False
    ropes = [(w.config.rope, w.config.local_rope or w.config.rope) for w in (a, b)]
    return all(
        np.array_equal(mine.inv_freq, other.inv_freq)
        and mine.attention_factor == other.attention_factor
        for mine, other in zip(*ropes, strict=True)
    )


def _row_slices(n: int) -> Iterator[slice]:
    for start in range(0, n, _ROWS):
        yield slice(start, min(start + _ROWS, n))


def _session(model: bytes, path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores()
    options.log_severity_level = 4  # errors come back as exceptions
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.parent)
    )
    try:
        return onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its exceptions share no base
        raise BackendError(f"{path.name}: ONNX Runtime: {error}") from error


def _onnx_logits(
    session: onnxruntime.InferenceSession, weights: WeightSet, window: NDArray[np.int64]
) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    """Prefills a window in one forward, then asks for the head's rows in pieces."""
    config, n = weights.config, len(window)
    buffer = np.zeros((1, config.n_kv_heads, n, config.head_dim), np.float32)
    inputs = {
        "input_ids": window[None],
        "tree_mask": np.tri(n, dtype=bool),
        "tree_depth": np.arange(n, dtype=np.int64),
        "past_len": np.zeros(1, np.int64),
        "logit_rows": np.arange(n, dtype=np.int64),
    }
    for layer in range(config.n_layers):
        inputs[f"past_key_{layer}"] = inputs[f"past_value_{layer}"] = buffer
    try:
        logits = session.run(["logits"], inputs)[0][0]
    except Exception as error:  # its exceptions share no base
        raise BackendError(f"target.onnx: ONNX Runtime: {error}") from error
    for rows in _row_slices(n):
        yield rows, logits[rows]


def _flips(
    path: Path, weights: WeightSet, window: NDArray[np.int64], best: NDArray[np.int64]
) -> int | None:
    """Argmaxes of one window that change when MatMulNBits computes in float."""
    model = onnx.load(str(path), load_external_data=False)
    found = False
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level":
                found = found or attribute.i != 0
                attribute.i = 0
    if not found:
        return None
    session = _session(model.SerializeToString(), path)
    exact = [got.argmax(axis=1) for _, got in _onnx_logits(session, weights, window)]
    return int((np.concatenate(exact) != best).sum())
