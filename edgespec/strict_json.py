"""Parsed JSON or TOML into dataclasses: none missing, unknown or mistyped."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from edgespec.errors import FormatError


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Bytes of one JSON object; no key twice, no NaN. Errors start with `where`."""
    try:
        data = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, got {_type_name(data)}")
    return data


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} appears twice")
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


_EXPECTED = {int: "an integer", float: "a number", bool: "a boolean", str: "a string"}


def build(kind: Any, value: Any, where: str, key: str) -> Any:
    """Turns parsed JSON into `kind`: a dataclass, or what its annotations may be.

    These are int, float, str, bool, X | None, tuple[X, ...], Mapping[str, X] and
    Literal. Keys with a default may be missing. Errors locate and compare:
    "where: key: expected X, got Y".
    """

    def fail(expected: str) -> FormatError:
        is_shown = isinstance(value, bool | int | float | str)
        got = f"{value!r:.60}" if is_shown else _type_name(value)
        return FormatError(f"{where}: {key or 'value'}: expected {expected}, got {got}")

    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = next(a for a in arguments if a is not types.NoneType)
        return None if value is None else build(inner, value, where, key)
    if origin is Literal:
        if value not in arguments:
            raise fail(" or ".join(repr(argument) for argument in arguments))
        return value
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            raise fail("an object")
        hints = get_type_hints(kind)
        wanted = {field.name for field in fields(kind)}
        required = {field.name for field in fields(kind) if field.default is MISSING}
        for problem, names in (
            ("unknown", value.keys() - wanted),
            ("missing", required - value.keys()),
        ):
            if names:
                listed = ", ".join(
                    f"{key}{'.' * bool(key)}{n:.40}" for n in sorted(names)
                )
                raise FormatError(f"{where}: {problem} key {listed}")
        prefix = f"{key}." if key else ""
        values = {n: build(hints[n], v, where, prefix + n) for n, v in value.items()}
        return kind(**values)
    if origin is tuple:
        if not isinstance(value, list):
            raise fail("a list")
        return tuple(
            build(arguments[0], item, where, f"{key}[{i}]")
            for i, item in enumerate(value)
        )
    if origin is Mapping:
        if not isinstance(value, dict):
            raise fail("an object")
        return {
            n: build(arguments[1], item, where, f"{key}.{n:.140}")
            for n, item in value.items()
        }
    if kind is float and type(value) in (int, float):
        if abs(value) < 1e18 and math.isfinite(value):
            return float(value)
        raise fail("a finite number")
    if kind is int and type(value) is int:
        if abs(value) < 1 << 62:
            return value
        raise fail("an integer below 2**62")
    if type(value) is not kind:
        raise fail(_EXPECTED[kind])
    return value
