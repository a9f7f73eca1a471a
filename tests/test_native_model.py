"""Opening models in C: what is read of a file, what is refused and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec._native import NativeModel
from edgespec.errors import EdgeSpecError, FormatError, UnsupportedError, UsageError
from tests.export import families
from tests.test_native_truth import decoded, sizes, some_tokens


def opened(path: Path, **options: Any) -> NativeModel:
    return NativeModel(path, **({"threads": 1} | options))


def test_what_a_model_says_of_itself(tmp_path: Path) -> None:
    made = families.gguf(tmp_path / "a.gguf", "gemma3", kind="Q8_0", n_layers=7)
    model = opened(made.path, threads=3, cpu="generic")
    before = model.info
    model.load()
    info = model.info
    assert info == before
    assert (info.architecture, info.cpu, info.threads) == ("gemma3", "generic", 3)
    assert (info.layers, info.hidden, info.heads, info.kv_heads) == (7, 64, 4, 2)
    assert (info.head_dim, info.ffn, info.vocab, info.max_position) == (
        32,
        96,
        320,
        512,
    )
    assert (info.window, info.windowed_layers, info.is_packed) == (16, 4, False)
    assert info.file_bytes == made.path.stat().st_size
    assert info.token_bytes == info.weight_bytes < 1.1 * info.file_bytes


def test_an_embedding_of_its_own_is_not_read_for_every_token(tmp_path: Path) -> None:
    sizes = {"kind": "Q4_0", "is_tied": False}
    info = opened(families.gguf(tmp_path / "a.gguf", **sizes).path).info
    assert info.weight_bytes - info.token_bytes == 320 * 64 // 32 * 18


@pytest.mark.parametrize(
    ("family", "key", "value", "error", "words"),
    [
        ("llama", "expert_count", 8, UnsupportedError, "= 8 is not supported"),
        ("llama", "attn_logit_softcapping", 50.0, UnsupportedError, "= 50"),
        ("gemma3", "final_logit_softcapping", 30.0, UnsupportedError, "= 30"),
        ("llama", "logit_scale", 0.5, UnsupportedError, "effect on llama is not known"),
        ("qwen2", "attention.scale", 0.5, UnsupportedError, "effect on qwen2"),
        ("llama", "attention.sliding_window", 100, UnsupportedError, "= 100"),
        ("qwen3", "attention.sliding_window", 2**31, None, ""),
        ("gemma3", "attention.sliding_window", 2**31, FormatError, "at most"),
        ("gemma3", "attention.sliding_window_pattern", 0, FormatError, "expected 1"),
        ("gemma3", "rope.scaling.type", "yarn", UnsupportedError, "'yarn'"),
        ("llama", "rope.scaling.type", "ntk", UnsupportedError, "ntk"),
        ("llama", "rope.scaling.factor", -1.0, FormatError, "factor"),
        ("llama", "block_count", 3, FormatError, "blk.2.attn_norm.weight: missing"),
        ("llama", "block_count", 1, FormatError, "blk.1.attn_norm.weight: not one"),
        ("llama", "block_count", 2**32 - 1, FormatError, "expected 1 to"),
        ("llama", "embedding_length", 96, FormatError, "expected 320 rows of 96, got"),
        ("llama", "feed_forward_length", 0, FormatError, "expected 1 to"),
        ("llama", "attention.head_count", 3, FormatError, "divisor of the 3 heads"),
        ("llama", "attention.head_count_kv", 5, FormatError, "expected 1 to 4, got 5"),
        ("llama", "attention.key_length", 15, FormatError, "expected an even size"),
        ("llama", "attention.key_length", 2**24, FormatError, "at most"),
        ("llama", "attention.value_length", 32, UnsupportedError, "head's size 16"),
        ("llama", "rope.dimension_count", 8, UnsupportedError, "head's size 16"),
        (
            "llama",
            "attention.layer_norm_rms_epsilon",
            0.0,
            FormatError,
            "between 0 and",
        ),
        ("llama", "context_length", "long", FormatError, "context_length"),
        ("llama", "vocab_size", 321, FormatError, "the 320 rows of token_embd.weight"),
        ("llama", "tensor_data_layout", "Meta AI original pth", None, ""),
    ],
)
def test_keys_that_cannot_be_or_change_the_result(
    tmp_path: Path, family: str, key: str, value: Any, error: Any, words: str
) -> None:
    extra = {f"{family}.{key}": value}
    made = tmp_path / "a.gguf"
    families.checkpoints.gguf_checkpoint(
        made, families.family_shape(family), kind="F32", extra=extra
    )
    if error is None:
        opened(made).load()
        return
    with pytest.raises(error) as caught:
        opened(made)
    assert words in str(caught.value)
    assert "a.gguf" in str(caught.value)


def rewritten(path: Path, out: Path, change) -> Path:
    """The file with its tensors changed: (name, array) -> (name, array) or None."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        kept = change(tensor.name, np.array(tensor.data))
        if kept is not None:
            writer.add_tensor(*kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda n, a: None if n == "blk.1.ffn_up.weight" else (n, a),
            "blk.1.ffn_up.weight: missing, expected 96 rows of 64",
        ),
        (
            lambda n, a: (n.replace("output_norm.weight", "output_norm.bias"), a),
            "output_norm.weight: missing",
        ),
        (
            lambda n, a: (n, a[:-1]) if n == "blk.0.attn_q.weight" else (n, a),
            "blk.0.attn_q.weight: expected 64 rows of 64, got 63 rows of 64",
        ),
        (
            lambda n, a: (n, a.reshape(2, 32, 64)) if "attn_q.w" in n else (n, a),
            "blk.0.attn_q.weight: expected one matrix, got 3 dimensions",
        ),
        (
            lambda n, a: ("token.weight", a) if n == "token_embd.weight" else (n, a),
            "token_embd.weight: expected 1 to",
        ),
        (
            lambda n, a: (n, a.astype(np.int32)) if "ffn_down" in n else (n, a),
            "blk.0.ffn_down.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change, words: str) -> None:
    made = families.gguf(tmp_path / "a.gguf").path
    path = rewritten(made, tmp_path / "b.gguf", change)
    with pytest.raises((FormatError, UnsupportedError)) as caught:
        opened(path)
    assert words in str(caught.value)


def test_a_tensor_the_family_does_not_have(tmp_path: Path) -> None:
    made = families.gguf(tmp_path / "a.gguf", "llama", scaling="llama3").path
    opened(made).load()
    data = made.read_bytes()
    path = tmp_path / "b.gguf"
    path.write_bytes(data.replace(b"rope_freqs.weight", b"rope_freak.weight"))
    with pytest.raises(FormatError, match="rope_freak.weight: not one llama has"):
        opened(path)


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    made = families.gguf(tmp_path / "a.gguf").path
    data = made.read_bytes()
    other = tmp_path / "b.gguf"
    other.write_bytes(data.replace(b"llama", b"lhama", 1))
    with pytest.raises(
        UnsupportedError, match="'lhama' is not supported; known: llama"
    ):
        opened(other)


def test_arguments(tmp_path: Path) -> None:
    made = families.gguf(tmp_path / "a.gguf").path
    for threads in (0, -1, 1025):
        with pytest.raises(UsageError, match="expected 1 to 1024"):
            opened(made, threads=threads)
    with pytest.raises(EdgeSpecError, match="abacus"):
        opened(made, cpu="abacus")


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K"])
def test_loaded_in_memory_of_its_own_is_the_same(tmp_path: Path, kind: str) -> None:
    made = families.gguf(tmp_path / "a.gguf", "llama", kind=kind, **sizes(kind))
    tokens = some_tokens(made)
    rows = []
    for use_mmap in (True, False):
        model = opened(made.path, use_mmap=use_mmap)
        model.load()
        rows.append(decoded(model, tokens))
    assert np.array_equal(*rows)
    packed = tmp_path / "packed.gguf"
    model.save(packed)
    again = opened(packed, threads=2)
    again.load()
    assert again.info.is_packed
    assert np.array_equal(decoded(again, tokens), rows[0])


def test_locked_weights_cannot_be_swapped_out(tmp_path: Path) -> None:
    def locked() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmLck:")[2].split()[0])

    made = families.gguf(tmp_path / "a.gguf", kind="Q8_0")
    model = opened(made.path, lock=True)
    before = locked()
    model.load()
    assert locked() - before >= model.info.weight_bytes
    model.close()
    assert locked() == before
