"""Which form each matrix takes in an ONNX graph, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec_export import nbits, quantize
from edgespec_export.nbits import NBits
from edgespec_export.weights import Tensor

# Normally distributed weights lose 8 % (Q4_0) and 7 % (Q4_1) of their norm.
MAX_LOSS = 0.1


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight ready for the graph: blocks of codes, or plain floats (out, in)."""

    nbits: NBits | None
    values: NDArray[np.float16] | NDArray[np.float32] | None
    form: str  # "int4", "int4+offset", "int8", "float16", "float32"
    why: str
    is_exact: bool  # the source's own numbers

    def error(self, expected: NDArray[np.float32]) -> float:
        """Relative error against the source's numbers."""
        norm = float(np.linalg.norm(expected))
        return float(np.linalg.norm(self.dequantize() - expected)) / (norm or 1.0)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        if self.nbits is not None:
            return self.nbits.shape
        assert self.values is not None
        return self.values.shape

    def dequantize(self) -> NDArray[np.float32]:
        """The numbers the graph computes with."""
        if self.nbits is not None:
            return self.nbits.dequantize()
        assert self.values is not None
        return self.values.astype(np.float32)


def prepare(tensor: Tensor, quant: str | None) -> Matrix:
    """The form of one matrix under `--quant` (None = what the source deserves).

    Source blocks that MatMulNBits can hold are kept exactly; other quantised types
    become 8-bit, whose rounding is far below that of the source; floats stay floats.
    Under a quant, weights are first put into ggml blocks, so that both containers carry
    the same numbers - but for a tensor that 4 bits distort by more than `MAX_LOSS`
    (relative RMS error), which gets 8 here.
    """
    kind = quantize.kind_for(tensor.name, tensor.shape, quant, tensor.kind)
    if kind in quantize.FLOATS:
        return _floats(tensor, kind)
    nbits.check_block(nbits.BLOCK, tensor.shape[1], tensor.name)
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        coded = nbits.quantize8(tensor.load_f32())
        why = f"{kind} has no exact form; 8 bits keep it"
        return Matrix(coded, None, "int8", why, False)
    if kind == tensor.kind:
        coded = nbits.from_ggml(kind, tensor.load_raw())
        return _coded(coded, f"{kind} of the source, exact", True)
    values = tensor.load_f32()
    made = _coded_as(kind, tensor, values)
    if kind in ("Q4_0", "Q4_1") and made.error(values) > MAX_LOSS:
        why = f"; {kind} would lose more than {MAX_LOSS:.0%}"
        made = _coded_as("Q8_0", tensor, values, why)
    return made


def _coded_as(
    kind: str, tensor: Tensor, values: NDArray[np.float32], why: str = ""
) -> Matrix:
    raw = quantize.quantize(kind, values, f"tensor {tensor.name!r}")
    why = quantize.made_from(kind, tensor.kind) + why
    return _coded(nbits.from_ggml(kind, raw), why, False)


def _coded(coded: NBits, why: str, is_exact: bool) -> Matrix:
    if coded.offsets is None:
        return Matrix(coded, None, f"int{coded.bits}", why, is_exact)
    why += ": 4-bit codes, float offsets"
    return Matrix(coded, None, "int4+offset", why, is_exact)


def _floats(tensor: Tensor, kind: str) -> Matrix:
    values = tensor.load_f32()
    if kind == "F32":
        return Matrix(None, values, "float32", f"{tensor.kind}, exact", True)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    is_exact = np.array_equal(half.astype(np.float32), values)
    if kind == "F16" and not np.isfinite(half).all():
        raise UnsupportedError(
            f"tensor {tensor.name!r}: a weight is not a number or lies beyond what "
            "float16 holds; use f32"
        )
    if kind == "F16" or is_exact:
        how = "exact" if is_exact else "rounded to float16"
        return Matrix(None, half, "float16", f"{tensor.kind}, {how}", is_exact)
    return Matrix(None, values, "float32", "BF16 beyond what float16 holds", True)


def concat(parts: list[Matrix]) -> Matrix | None:
    """One matrix of all rows, or None when the parts differ in form."""
    first = parts[0]
    if any(p.form != first.form for p in parts):
        return None
    if first.nbits is not None:
        coded = [p.nbits for p in parts if p.nbits is not None]
        if not all(nbits.is_same_form(coded[0], c) for c in coded):
            return None
        return Matrix(nbits.concat(coded), None, first.form, first.why, first.is_exact)
    values = np.concatenate([p.values for p in parts if p.values is not None])
    return Matrix(None, values, first.form, first.why, first.is_exact)
