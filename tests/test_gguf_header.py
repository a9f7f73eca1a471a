"""The header's own tables; reading it is tested with the exporter's sources."""

from __future__ import annotations

import struct

import gguf

from edgespec.gguf_header import ARRAY, SCALARS, STRING, TENSOR_TYPES


def test_tensor_types_are_ggmls() -> None:
    theirs = {
        int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()
    }
    shared = TENSOR_TYPES.keys() & theirs.keys()
    assert len(shared) >= 30
    assert {i: TENSOR_TYPES[i] for i in shared} == {i: theirs[i] for i in shared}


def test_value_types_are_the_specifications() -> None:
    theirs = {int(kind): kind.name for kind in gguf.GGUFValueType}
    assert {*SCALARS, STRING, ARRAY} == set(theirs)
    assert (theirs[STRING], theirs[ARRAY]) == ("STRING", "ARRAY")
    sizes = {"8": 1, "16": 2, "32": 4, "64": 8, "BOOL": 1}
    for number, code in SCALARS.items():
        name = theirs[number]
        bits = "".join(c for c in name if c.isdigit()) or name
        assert struct.calcsize("<" + code) == sizes[bits]
        is_signed = name.startswith("INT")
        assert code.islower() == (is_signed or name.startswith("FLOAT")) or name in (
            "BOOL",
        )
