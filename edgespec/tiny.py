"""Models small enough to write by hand: does a backend work at all?

Bytes of the formats themselves, so that no package for writing them is needed.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

_U32, _F32, _STRING = 4, 6, 8  # GGUF value types


def tiny_gguf() -> bytes:
    """A llama model of one layer and 32 tokens, random f32 weights, no tokenizer."""
    hidden, vocab, ffn = 32, 32, 32
    settings = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.vocab_size": vocab,
        "llama.context_length": 64,
        "llama.embedding_length": hidden,
        "llama.block_count": 1,
        "llama.feed_forward_length": ffn,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "no_vocab",
    }
    square = (hidden, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocab, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        **{f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (ffn, hidden),
        "blk.0.ffn_up": (ffn, hidden),
        "blk.0.ffn_down": (hidden, ffn),
    }
    out = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(settings))
    for key, value in settings.items():
        out += _gguf_text(key)
        if isinstance(value, str):
            out += struct.pack("<I", _STRING) + _gguf_text(value)
        else:
            kind, code = (_U32, "I") if isinstance(value, int) else (_F32, "f")
            out += struct.pack(f"<I{code}", kind, value)
    generator = np.random.default_rng(0)
    data = b""
    for name, shape in shapes.items():
        out += _gguf_text(f"{name}.weight") + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", 0, len(data))  # f32, offset
        values = generator.standard_normal(shape).astype("<f4")
        data += np.ones_like(values).tobytes() if len(shape) == 1 else values.tobytes()
    return out + b"\0" * (-len(out) % 32) + data


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tiny_graph() -> tuple[bytes, NDArray[np.float32], NDArray[np.float32]]:
    """An ONNX model of one MatMulNBits (block 32), an input x and its result y.

    Written as protobuf fields, so that no package for writing ONNX is needed.
    """
    k, n = 32, 16
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (n, k), dtype=np.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = generator.uniform(0.01, 0.1, n).astype(np.float32)
    x = generator.standard_normal((1, k)).astype(np.float32)
    weights = (codes.astype(np.float32) - 8) * scales[:, None]
    attributes = {"K": k, "N": n, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = b"".join(
        [
            *(_text(1, name) for name in ("x", "codes", "scales")),
            _text(2, "y"),
            _text(4, "MatMulNBits"),
            *(
                _bytes(5, _text(1, name) + _number(3, value) + _number(20, 2))
                for name, value in attributes.items()
            ),
            _text(7, "com.microsoft"),
        ]
    )
    graph = b"".join(
        [
            _bytes(1, node),
            _text(2, "tiny"),
            _bytes(5, _tensor("codes", 2, (n, 1, k // 2), packed.tobytes())),
            _bytes(5, _tensor("scales", 1, (n,), scales.tobytes())),
            _bytes(11, _value("x", (1, k))),
            _bytes(12, _value("y", (1, n))),
        ]
    )
    opsets = (("", 17), ("com.microsoft", 1))
    model = _number(1, 8) + _bytes(7, graph)
    for domain, version in opsets:
        model += _bytes(8, _text(1, domain) + _number(2, version))
    return model, x, x @ weights.T


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _tensor(name: str, dtype: int, shape: tuple[int, ...], data: bytes) -> bytes:
    sides = b"".join(_number(1, side) for side in shape)
    return sides + _number(2, dtype) + _text(8, name) + _bytes(9, data)


def _value(name: str, shape: tuple[int, ...]) -> bytes:
    sides = b"".join(_bytes(1, _number(1, side)) for side in shape)
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, 1) + _bytes(2, sides)))
