"""Every ggml block type, by ggml itself."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

_BY_GGUF_PY = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_OF_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # rows of multiples of 256
FILE_TYPES = (*_BY_GGUF_PY, *_OF_256, "IQ4_NL", "MXFP4")


def quantize(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Rows (..., cols) as blocks, (..., bytes of a row); floats keep their shape."""
    if kind.name in _BY_GGUF_PY:
        return gguf.quants.quantize(values, kind)
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, cols = int(np.prod(values.shape[:-1])), values.shape[-1]
    assert cols % block == 0, f"{kind.name} needs rows of multiples of {block}"
    values = np.ascontiguousarray(values, np.float32)
    made = np.empty((*values.shape[:-1], cols // block * n_bytes), np.uint8)
    work = _library().ggml_quantize_chunk
    work.restype = ctypes.c_size_t
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (values, made)]
    sizes = [ctypes.c_int64(n) for n in (0, rows, cols)]
    assert work(ctypes.c_int(kind), *pointers, *sizes, None) == made.nbytes
    return made


def _library() -> ctypes.CDLL:
    directory = Path(llama_cpp.__file__).parent / "lib"
    return ctypes.CDLL(str(next(directory.glob("*ggml-base*"))))
