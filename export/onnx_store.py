"""Initialisers of an ONNX model, streamed into one external data file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

_ALIGN = 4096  # pages, so that a runtime can map a tensor in place
_INLINE_TENSOR = 1024  # bytes; smaller ones stay in the graph
_INLINE_MODEL = 1 << 20  # bytes; a model below this is one file


class Store:
    """Collects initialisers; big ones go to `path` at once, not into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.initializers: list[TensorProto] = []
        self._names: set[str] = set()
        self._file = path.open("wb")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str, array: NDArray[Any]) -> str:
        """Stores an array under a name that must be new; returns the name."""
        if name in self._names:
            raise ValueError(f"initialiser {name} stored twice")
        self._names.add(name)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
        data = np.ascontiguousarray(array)
        if data.nbytes < _INLINE_TENSOR:
            tensor.raw_data = data.tobytes()
        else:
            offset = -(-self._file.tell() // _ALIGN) * _ALIGN
            self._file.seek(offset)
            data.tofile(self._file)
            tensor.data_location = TensorProto.EXTERNAL
            entries = {
                "location": self.path.name,
                "offset": offset,
                "length": data.nbytes,
            }
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def constant(
        self, name: str, values: list[int] | float, kind: type = np.int64
    ) -> str:
        """A small constant, stored once however often it is asked for."""
        if name not in self._names:
            self.add(name, np.array(values, kind))
        return name

    def close(self) -> None:
        """Ends the data file; a small one moves into the graph and disappears."""
        size = self._file.tell()
        self._file.close()
        if size > _INLINE_MODEL:
            return
        for tensor in self.initializers:
            if tensor.data_location == TensorProto.EXTERNAL:
                onnx.external_data_helper.load_external_data_for_tensor(
                    tensor, str(self.path.parent)
                )
                tensor.data_location = TensorProto.DEFAULT
                del tensor.external_data[:]
        self.path.unlink()

    def abort(self) -> None:
        """Drops everything."""
        self._file.close()
        self.path.unlink(missing_ok=True)
