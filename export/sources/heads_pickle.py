"""PyTorch's zip checkpoints (.bin, .pt) without torch and without running anything.

Such a file is a zip archive of `data.pkl` and one stored file per storage. The pickle
is interpreted here: the few instructions a dictionary of tensors needs, on plain
values. A global is a name that is either known below or an error; nothing is ever
imported or called.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export.sources.safetensors_file import StoredTensor

_STORAGES = {
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "BoolStorage": ("BOOL", 1),
    "ByteStorage": ("U8", 1),
}
_TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"
_KNOWN = {_TENSOR, _PARAMETER, _ORDERED} | {f"torch.{name}" for name in _STORAGES}
_MAX_PICKLE = 64 << 20  # bytes
_MAX_DEPTH = 64  # of marks
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    item: int  # bytes of an element
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


class _Mark:
    pass


def read_zip(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a zip checkpoint by name, memory-mapped.

    Raises FormatError for a damaged archive and UnsupportedError, naming it, for
    anything in the pickle that is not part of a dictionary of tensors.
    """
    where = str(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in entries if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise FormatError(
                    f"{where}: not a PyTorch checkpoint: expected one data.pkl in the "
                    f"archive, got {len(pickles)}"
                )
            root = pickles[0].removesuffix("data.pkl")
            size = entries[pickles[0]].file_size
            if size > _MAX_PICKLE:
                raise FormatError(
                    f"{where}: data.pkl of {size} bytes: expected at most {_MAX_PICKLE}"
                )
            order = root + "byteorder"
            if order in entries and archive.read(order).strip() != b"little":
                raise UnsupportedError(f"{where}: big-endian checkpoint")
            found = _Machine(archive.read(pickles[0]), where).run()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise FormatError(f"{where}: damaged zip archive: {error}") from error
    data = np.memmap(path, np.uint8, mode="r")
    tensors = {}
    for name, value in _state(found, where).items():
        entry = entries.get(f"{root}data/{value.storage.key}")
        if entry is None:
            raise FormatError(
                f"{where}: tensor {name!r}: no storage {value.storage.key!r}"
            )
        body = _body(data, entry, where)
        tensors[name] = _place(path, name, value, body)
    return tensors


def _state(found: Any, where: str) -> dict[str, _Tensor]:
    """The dictionary of tensors: the object itself, or its state_dict."""
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise FormatError(
            f"{where}: expected a dictionary of tensors, got {type(found).__name__}"
        )
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, _Tensor):
            raise FormatError(
                f"{where}: expected a dictionary of tensors, got {name!r:.60} that is "
                "none"
            )
    return found


def _body(
    data: NDArray[np.uint8], entry: zipfile.ZipInfo, where: str
) -> NDArray[np.uint8]:
    """Bytes of a stored archive member."""
    start = entry.header_offset
    header = data[start : start + _LOCAL_HEADER.size].tobytes()
    if entry.compress_type != zipfile.ZIP_STORED or len(header) < _LOCAL_HEADER.size:
        raise FormatError(f"{where}: {entry.filename}: expected stored, not compressed")
    magic, n_name, n_extra = _LOCAL_HEADER.unpack(header)
    start += _LOCAL_HEADER.size + n_name + n_extra
    end = start + entry.file_size
    if magic != b"PK\x03\x04" or end > len(data):
        raise FormatError(f"{where}: truncated: {entry.filename} ends at {end}")
    return data[start:end]


def _place(
    path: Path, name: str, value: _Tensor, body: NDArray[np.uint8]
) -> StoredTensor:
    item = value.storage.item
    start = value.offset * item
    end = start + math.prod(value.shape) * item
    if value.storage.count * item != len(body) or end > len(body):
        raise FormatError(
            f"{path}: tensor {name!r}: needs bytes {start} to {end} of a storage of "
            f"{value.storage.count * item}, the archive has {len(body)}"
        )
    return StoredTensor(path, name, value.storage.kind, value.shape, body[start:end])


class _Machine:
    """Runs a pickle on plain values; refuses every instruction it does not need."""

    def __init__(self, code: bytes, where: str) -> None:
        self.code = code
        self.where = where
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The pickled value."""
        while True:
            start = self.at
            opcode = self._take(1)
            if opcode == b".":
                return self._pop()
            step = _STEPS.get(opcode)
            if step is None:
                raise UnsupportedError(
                    f"{self.where}: pickle instruction {opcode!r} at {start}: not part "
                    "of a dictionary of tensors; convert to safetensors"
                )
            try:
                step(self)
            except (KeyError, UnicodeDecodeError) as error:
                raise FormatError(
                    f"{self.where}: damaged pickle at {start}: {error}"
                ) from error

    def _take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.code):
            raise FormatError(f"{self.where}: data.pkl is truncated at {self.at}")
        self.at = end
        return self.code[end - count : end]

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _line(self) -> str:
        end = self.code.find(b"\n", self.at)
        if end < 0:
            raise FormatError(f"{self.where}: data.pkl is truncated at {self.at}")
        return self._take(end + 1 - self.at)[:-1].decode("utf-8")

    def _pop(self) -> Any:
        if not self.stack:
            raise FormatError(
                f"{self.where}: damaged pickle: nothing left at {self.at}"
            )
        return self.stack.pop()

    def _to_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise FormatError(f"{self.where}: damaged pickle: no mark at {self.at}")

    def _top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise FormatError(
                f"{self.where}: damaged pickle: expected a {kind.__name__} at {self.at}"
            )
        return self.stack[-1]

    def pop(self) -> None:
        self._pop()

    def long(self) -> int:
        return int.from_bytes(self._take(self._number("B")), "little", signed=True)

    def mark(self) -> None:
        if sum(isinstance(item, _Mark) for item in self.stack) >= _MAX_DEPTH:
            raise FormatError(f"{self.where}: pickle nested deeper than {_MAX_DEPTH}")
        self.stack.append(_Mark())

    def put(self, key: int) -> None:
        self.memo[key] = self._top(object)

    def text(self, count: int) -> None:
        self.stack.append(self._take(count).decode("utf-8"))

    def global_(self, name: str) -> None:
        if name not in _KNOWN:
            raise UnsupportedError(
                f"{self.where}: the pickle wants {name!r}; only dictionaries of "
                "tensors are read and nothing is run; convert to safetensors"
            )
        self.stack.append(_Global(name))

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self.global_(f"{module}.{name}")

    def tuple_(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2 or not all(isinstance(key, str) for key in items[::2]):
            raise FormatError(f"{self.where}: damaged pickle: a key that is no name")
        target.update(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self.set_items([key, value])

    def build(self) -> None:
        """Attributes of a dictionary, such as a state dict's versions, are dropped."""
        self._pop()
        self._top(dict)

    def storage(self) -> None:
        value = self._pop()
        is_known = (
            isinstance(value, tuple)
            and len(value) == 5
            and value[0] == "storage"
            and isinstance(value[1], _Global)
            and isinstance(value[2], str)
            and _is_count(value[4])
        )
        short = value[1].name.removeprefix("torch.") if is_known else ""
        if short not in _STORAGES:
            raise FormatError(f"{self.where}: damaged pickle: a storage at {self.at}")
        self.stack.append(_Storage(*_STORAGES[short], value[2], value[4]))

    def reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, _Global) or not isinstance(args, tuple):
            raise FormatError(f"{self.where}: damaged pickle: a call at {self.at}")
        if function.name == _ORDERED and args == ():
            self.stack.append({})
        elif function.name == _PARAMETER and args:
            self.stack.append(args[0])
        elif function.name == _TENSOR:
            self.stack.append(self._tensor(args))
        else:
            raise UnsupportedError(f"{self.where}: the pickle calls {function.name}")

    def _tensor(self, args: tuple[Any, ...]) -> _Tensor:
        storage, offset, shape, stride = (*args[:4], None, None, None, None)[:4]
        is_known = (
            isinstance(storage, _Storage)
            and _is_count(offset)
            and isinstance(shape, tuple)
            and isinstance(stride, tuple)
            and all(_is_count(n) for n in shape + stride)
        )
        if not is_known or 0 in shape or not 1 <= len(shape) == len(stride) <= 4:
            raise FormatError(f"{self.where}: impossible tensor at {self.at}")
        dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        if any(s != d for s, d, n in zip(stride, dense, shape, strict=True) if n > 1):
            raise UnsupportedError(
                f"{self.where}: a tensor of shape {shape} is stored with strides "
                f"{stride}; save contiguous tensors"
            )
        return _Tensor(storage, offset, shape)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


_Step = Callable[[_Machine], object]


def _skip(count: int) -> _Step:
    def step(machine: _Machine) -> None:
        machine._take(count)

    return step


def _push(make: Callable[[_Machine], Any]) -> _Step:
    def step(machine: _Machine) -> None:
        machine.stack.append(make(machine))

    return step


_STEPS: dict[bytes, _Step] = {
    b"\x80": _skip(1),  # the protocol
    b"\x95": _skip(8),  # the length of a frame
    b"(": _Machine.mark,
    b"0": _Machine.pop,
    b"N": _push(lambda m: None),
    b"\x88": _push(lambda m: True),
    b"\x89": _push(lambda m: False),
    b"J": _push(lambda m: m._number("i")),
    b"K": _push(lambda m: m._number("B")),
    b"M": _push(lambda m: m._number("H")),
    b"G": _push(lambda m: struct.unpack(">d", m._take(8))[0]),
    b"\x8a": _push(_Machine.long),
    b"X": lambda m: m.text(m._number("I")),
    b"\x8c": lambda m: m.text(m._number("B")),
    b"c": lambda m: m.global_(f"{m._line()}.{m._line()}"),
    b"\x93": _Machine.stack_global,
    b")": _push(lambda m: ()),
    b"]": _push(lambda m: []),
    b"}": _push(lambda m: {}),
    b"t": _push(lambda m: tuple(m._to_mark())),
    b"\x85": lambda m: m.tuple_(1),
    b"\x86": lambda m: m.tuple_(2),
    b"\x87": lambda m: m.tuple_(3),
    b"q": lambda m: m.put(m._number("B")),
    b"r": lambda m: m.put(m._number("I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": _push(lambda m: m.memo[m._number("B")]),
    b"j": _push(lambda m: m.memo[m._number("I")]),
    b"s": _Machine.set_item,
    b"u": lambda m: m.set_items(m._to_mark()),
    b"a": _Machine.pop,  # what lists hold does not matter
    b"e": _Machine._to_mark,
    b"b": _Machine.build,
    b"Q": _Machine.storage,
    b"R": _Machine.reduce,
}
