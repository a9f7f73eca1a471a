"""Files of draft heads that are not what they should be, or not made for the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec._native import NativeHead, NativeModel
from edgespec.errors import (
    BackendError,
    EdgeSpecError,
    FormatError,
    NativeError,
    UnsupportedError,
)
from edgespec.gguf_header import open_gguf
from edgespec_export import head_gguf
from edgespec_export.heads import Head
from edgespec_export.sources import heads as reader
from tests.export import heads as tiny
from tests.export.test_head_gguf import llama_file
from tests.native_drafts import World, world, write

HEADS: dict[str, Callable[[], tiny.Checkpoint]] = {
    "eagle3": lambda: tiny.eagle3("speculators", fc_norm=True),
    "before fc": lambda: tiny.eagle3(norm_before_fc=True, qwen=True),
    "eagle": tiny.eagle,
    "medusa": tiny.medusa,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("target") / "a.gguf")


def read(tmp_path: Path, name: str, target: World) -> Head:
    return reader.read(HEADS[name]().write(tmp_path / "source"), target.weights.config)


def refused(
    target: World,
    head: Head,
    path: Path,
    words: str,
    kind: type[EdgeSpecError] = FormatError,
) -> None:
    head_gguf.write(head, path, target=target.weights)
    with pytest.raises(kind, match=words):
        NativeHead(target.model(), path)


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_other_targets(tmp_path: Path, target: World, name: str) -> None:
    head = read(tmp_path, name, target)
    path = tmp_path / "draft.gguf"
    refused(
        *(target, replace(head, target_layers=9), path),
        r"draft\.gguf: the head is made for layers: 9, the target has 8",
    )
    head_gguf.write(head, path, target=target.weights)
    wide = world(tmp_path / "wide.gguf", hidden=96)
    with pytest.raises(FormatError, match="hidden size 64, the target has 96"):
        NativeHead(wide.model(), path)
    if name != "before fc" and name != "eagle3":  # whose file has the target's words
        more = replace(head, vocab=384)
        more = replace(more, draft_vocab=384) if name == "eagle" else more
        tensors = {k: v for k, v in more.tensors.items() if k != "token_embd"}
        refused(
            *(target, replace(more, tensors=tensors), path),
            "a vocabulary of 384, the target has 320",
        )


def test_taps_of_other_targets(tmp_path: Path, target: World) -> None:
    head = read(tmp_path, "before fc", target)
    path = tmp_path / "draft.gguf"
    for taps in ((2, 4, 8), (-1, 4, 5), (2, 4, 4)):
        refused(
            *(target, replace(head, taps=taps), path),
            "taps hidden state .*distinct ones from 0 to 7, the target has 8 layers",
        )
    for taps in ((), tuple(range(9))):
        refused(
            *(target, replace(head, taps=taps), path),
            f"edgespec.head.taps: expected 1 to 8 hidden states, got {len(taps)}",
        )
    refused(*(target, replace(head, taps=(2, 4)), path), "fc.weight: expected")


def test_layers_of_a_llama_cpp_file(tmp_path: Path, target: World) -> None:
    def taps(name: str, ids: list[int] | None) -> tuple[int, ...]:
        path = llama_file(
            tmp_path / name,
            lambda w: ids and w.add_array("eagle3.target_layers", ids),
        )
        return NativeHead(target.model(), path).info.taps

    assert taps("a", [2, 4, 5]) == (2, 4, 5)
    assert taps("b", [1, 3, 4]) == (2, 4, 5)
    with pytest.raises(UnsupportedError, match="begins with 0: .*--tap-convention"):
        taps("c", [0, 3, 4])
    with pytest.raises(FormatError, match="hidden state 8.* has 8 layers"):
        taps("d", [1, 3, 7])
    with pytest.raises(FormatError, match="extract_layers or eagle3.target_layers"):
        taps("e", None)


@pytest.mark.parametrize("others", [[2, 4, 6], [2, 4], [2, 4, 5, 6]])
def test_layers_under_both_names_agree(
    tmp_path: Path, target: World, others: list[int]
) -> None:
    def write_both(writer: gguf.GGUFWriter, second: list[int] | None) -> None:
        writer.add_array("eagle3.extract_layers", [2, 4, 5])
        if second is not None:
            writer.add_array("eagle3.target_layers", second)

    for i, given in enumerate([None, [2, 4, 5]]):
        path = llama_file(tmp_path / str(i), lambda w, s=given: write_both(w, s))
        assert NativeHead(target.model(), path).info.taps == (2, 4, 5)
    path = llama_file(tmp_path / "b", lambda w: write_both(w, others))
    with pytest.raises(FormatError, match="extract_layers and .*target_layers differ"):
        NativeHead(target.model(), path)


def test_draft_ids_that_are_none(tmp_path: Path, target: World) -> None:
    head = read(tmp_path, "before fc", target)
    assert head.d2t is not None
    path = tmp_path / "draft.gguf"
    for at, value, shown in (
        (-1, 320, "320 behind"),
        (0, -1, "-1 behind -1"),
        (
            5,
            int(head.d2t[4]),
            rf"d2t\[5\]: expected rising ids .* behind {head.d2t[4]}",
        ),
    ):
        ids = head.d2t.copy()
        ids[at] = value
        refused(target, replace(head, d2t=ids), path, shown)
    refused(
        *(target, replace(head, d2t=head.d2t[:-1]), path),
        "d2t: expected 96 values of I64, one for each row of the output, got 95",
    )
    refused(
        *(target, replace(head, d2t=None), path),
        "output has 96 rows and no d2t, the target 320 tokens",
    )
    rest = {k: v for k, v in head.tensors.items() if k != "output"}
    refused(
        *(target, replace(head, tensors=rest), path),
        "output.weight: missing, expected the 96 rows of the target's that d2t names",
        UnsupportedError,
    )


@pytest.mark.parametrize("name", HEADS)
def test_missing_and_misshapen_tensors(
    tmp_path: Path, target: World, name: str
) -> None:
    head = read(tmp_path, name, target)
    path = tmp_path / "draft.gguf"
    optional = {"token_embd", "fc.bias"}
    for key, tensor in head.tensors.items():
        rest = {k: v for k, v in head.tensors.items() if k != key}
        lacking = replace(head, tensors=rest)
        if key in optional:
            head_gguf.write(lacking, path, target=target.weights)
            assert NativeHead(target.model(), path).info.hidden == 64
        elif key not in (
            "output",
            "fc_norm.0",
            "enc.output_norm",
        ):  # or a flag goes too
            refused(target, lacking, path, f"{key}.*: missing, expected")
        if key in ("blk.0.attn_q", "blk.0.attn_k"):
            continue  # rows of heads that are not whole cannot be written
        shorter = replace(
            tensor,
            shape=(tensor.shape[0] - 1, *tensor.shape[1:]),
            load_raw=lambda t=tensor: t.load_f32()[:-1].view(np.uint8),
        )
        refused(
            *(target, replace(head, tensors=head.tensors | {key: shorter}), path),
            f"{key}.*expected|output has|d2t",
        )
    strange = replace(next(iter(head.tensors.values())), name="strange")
    tensors = head.tensors | {"medusa.70.0.bias": strange}
    refused(target, replace(head, tensors=tensors), path, "medusa.70.0.bias: not one")


def test_flags_without_their_tensors(tmp_path: Path, target: World) -> None:
    path = tmp_path / "draft.gguf"
    write(tiny.eagle3(norm_before_fc=True), path, target.weights)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"enc.output_norm.weight", b"enc.output_gnom.weight"))
    with pytest.raises(FormatError, match="enc.output_norm.weight: missing"):
        NativeHead(target.model(), path)
    write(HEADS["eagle3"](), path, target.weights)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"fc_norm.1.weight", b"fc_gnom.1.weight"))
    with pytest.raises(FormatError, match="fc_norm.1.weight: missing"):
        NativeHead(target.model(), path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.head_count_kv", 3, "expected a divisor of the 4 heads, got 3"),
        ("attention.head_count", 0, "head_count: expected 1 to"),
        ("attention.key_length", 15, "expected an even size"),
        ("attention.value_length", 8, "values of 8 .* expected the keys' size 16"),
        ("block_count", 2, "block_count: expected 1, got 2"),
        ("context_length", 0, "context_length: expected 1 to"),
        ("feed_forward_length", 97, "ffn_gate.weight: expected 97 rows of 64, got 96"),
        ("target_hidden_size", 1 << 31, "target_hidden_size: expected 1 to"),
        ("attention.layer_norm_rms_epsilon", 0, "between 0 and 1, got 0"),
    ],
)
def test_keys_that_cannot_be(
    tmp_path: Path, target: World, key: str, value: int, words: str
) -> None:
    path = tmp_path / "draft.gguf"
    write(tiny.eagle3(), path, target.weights)
    data = bytearray(path.read_bytes())
    name = f"eagle3.{key}".encode()
    at = data.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4
    data[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(EdgeSpecError, match=words):
        NativeHead(target.model(), path)


def test_c37_truncated_heads(tmp_path: Path, target: World) -> None:
    path = tmp_path / "draft.gguf"
    write(tiny.eagle3(), path, target.weights)
    data = path.read_bytes()
    edges = [tensor.offset for tensor in open_gguf(path).tensors]
    for size in [0, 37, 1024, *(edge + d for edge in edges for d in (-1, 0, 1))]:
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"draft\.gguf"):
            NativeHead(target.model(), path)
    with pytest.raises(BackendError, match=r"none\.gguf"):
        NativeHead(target.model(), tmp_path / "none.gguf")


def test_files_that_are_no_heads(tmp_path: Path, target: World) -> None:
    path = tmp_path / "draft.gguf"
    write(tiny.medusa(), path, target.weights)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"edgespec-medusa", b"edgespec-gorgon"))
    with pytest.raises(UnsupportedError, match="'edgespec-gorgon' is no draft"):
        NativeHead(target.model(), path)
    path.write_bytes(data)
    unloaded = NativeModel(target.path, threads=1)
    with pytest.raises(NativeError, match="not loaded yet"):
        NativeHead(unloaded, path)
