"""The C library: where it is, whether it is the right one, its functions by name.

Plain ctypes over native/include/edgespec.h, whose every function some module beside
this one declares. The interpreter lock is released while C runs. Statuses become
exceptions.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.errors import (
    BackendError,
    ContextError,
    EdgeSpecError,
    FormatError,
    NativeError,
    OutOfMemoryError,
    UnsupportedError,
    UsageError,
)

ABI = 3
HANDLE = ctypes.c_void_p
SIZE = ctypes.c_size_t
BUFFER = ctypes.c_void_p  # the address of a numpy array
I32 = ctypes.POINTER(ctypes.c_int32)

EXCEPTIONS: dict[int, type[EdgeSpecError]] = {
    1: UsageError,
    2: OutOfMemoryError,
    4: ContextError,
    6: UnsupportedError,
    7: FormatError,
    8: BackendError,
}
STRUCTS: dict[str, type[ctypes.Structure]] = {}
FUNCTIONS: dict[str, Function] = {}


class Function:
    """A function of the header, found and given its types when first called.

    result None: it returns an es_status, which raises what it stands for.
    """

    __slots__ = ("_arguments", "_found", "_name", "_result")

    def __init__(self, name: str, *arguments: Any, result: Any = None) -> None:
        self._name, self._arguments, self._result = name, arguments, result
        self._found: Any = None
        FUNCTIONS[name] = self

    def __call__(self, *arguments: Any) -> Any:
        value = (self._found or self._find())(*arguments)
        if value and self._result is None:
            _raise(value)
        return value

    def _find(self) -> Any:
        library = load()
        found = getattr(library, self._name, None)
        if found is None:
            raise NativeError(
                f"{library_path()}: it has no function {self._name}, so it was not "
                "built from this version's sources; rebuild or reinstall edgespec"
            )
        is_void = self._result is VOID
        found.restype = (
            None if is_void else ctypes.c_int if self._result is None else self._result
        )
        found.argtypes = list(self._arguments)
        self._found = found
        return found


class VOID:
    """Result of a function that returns nothing."""


def struct(name: str, layout: type[ctypes.Structure]) -> None:
    """Declares a struct of the header; `check_structs` compares its size."""
    STRUCTS[name] = layout


def check_structs(*names: str) -> None:
    """NativeError when the library lays one of these out differently."""
    for name in names:
        expected = ctypes.sizeof(STRUCTS[name])
        size = load().es_struct_size(name.encode())
        if size != expected:
            raise NativeError(
                f"{library_path()}: {name}: expected {expected} bytes, got {size}; "
                "rebuild or reinstall edgespec"
            )


def library_path() -> Path:
    """Where the C library of this package lives."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(__file__).parent.with_name(f"libedgespec.{suffix}")


@cache
def load() -> ctypes.CDLL:
    """The library; NativeError when it is missing or of another version."""
    path = library_path()
    if not path.exists():
        raise NativeError(
            f"{path} is missing: the C core is not built. In a source tree run "
            "`cmake -S native -B build && cmake --build build`, else reinstall edgespec"
        )
    library = ctypes.CDLL(str(path))
    abi = library.es_abi()
    if abi != ABI:
        raise NativeError(
            f"{path}: expected ABI {ABI}, got {abi}; rebuild or reinstall"
        )
    library.es_struct_size.restype = SIZE
    library.es_struct_size.argtypes = [ctypes.c_char_p]
    library.es_error_message.restype = ctypes.c_char_p
    return library


def _raise(status: int) -> None:
    message = load().es_error_message().decode("utf-8", "replace")
    raise EXCEPTIONS.get(status, NativeError)(message)


_version = Function("es_version", result=ctypes.c_char_p)
# Called by `load` and `_raise` themselves; declared like every other.
Function("es_abi", result=ctypes.c_int32)
Function("es_struct_size", ctypes.c_char_p, result=SIZE)
Function("es_error_message", result=ctypes.c_char_p)
status_name = Function("es_status_name", ctypes.c_int, result=ctypes.c_char_p)


def version() -> str:
    """Version of the C library."""
    return str(_version().decode())
