"""Values no checkpoint should have: a named error before anything is computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import EdgeSpecError, FormatError, UnsupportedError
from edgespec_export import onnx_graph, pipeline, reference, sources
from tests.export import checkpoints

DEEP = "[" * 100_000
ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = "tokenizer_config.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.hf_checkpoint(tmp_path / "hf")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (CONFIG, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (CONFIG, {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        (CONFIG, {"head_dim": 10**12}, "head_dim: expected less than"),
        (CONFIG, {"head_dim": 1 << 30}, "even dimension of at most"),
        (CONFIG, {"max_position_embeddings": 1 << 33}, "max_position_embeddings"),
        (CONFIG, {"rope_parameters": ROPE | {"rope_theta": 1e300}}, "rope_theta"),
        (CONFIG, {"rope_parameters": ROPE | {"factor": 1e-300}}, "factor"),
        (GENERATION, {"temperature": float("nan")}, f"{GENERATION}: temperature"),
        (GENERATION, {"temperature": 1e300}, f"{GENERATION}: temperature"),
        (GENERATION, {"top_p": 5}, f"{GENERATION}: top_p"),
        (TOKENIZER, {"bos_token": 5}, "bos_token 5"),
        (TOKENIZER, {"eos_token": {"content": ["x"]}}, "eos_token"),
        (TOKENIZER, {"chat_template": 5}, "chat_template: expected text"),
        (TOKENIZER, {"chat_template": "\ud800"}, "chat_template: expected text"),
        (TOKENIZER, {"chat_template": [{"name": "default", "template": 1}]}, "text"),
    ],
)
def test_absurd_values_of_a_directory(
    source: Path, file: str, values: dict[str, Any], message: str
) -> None:
    path = source / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(FormatError, match=message):
        sources.read(source)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "model.safetensors"]
)
def test_bottomless_json(source: Path, file: str) -> None:
    text = DEEP.encode()
    if file == "model.safetensors":
        text = len(text).to_bytes(8, "little") + text
    (source / file).write_bytes(text)
    with pytest.raises(FormatError, match=file):
        sources.read(source)


def test_bottomless_shard_index(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(DEEP)
    with pytest.raises(FormatError, match="no usable weight_map"):
        sources.read(source)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer.json"])
def test_text_that_is_not_utf8(source: Path, file: str) -> None:
    (source / file).write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match=f"{file}: not UTF-8"):
        sources.read(source)


def test_template_lists_with_other_things_in_them(source: Path) -> None:
    path = source / TOKENIZER
    entries = ["x", {"name": ["y"]}, {"name": "default", "template": "{{ z }}"}]
    path.write_text(json.dumps({"chat_template": entries}))
    assert sources.read(source).chat_template == "{{ z }}"


def test_a_tokenizer_at_which_the_library_panics(source: Path) -> None:
    path = source / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["continuing_subword_prefix"] = "##"
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"tokenizer\.json: cannot be read"):
        sources.read(source)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.sampling.temp": float("nan")}, r"general\.sampling\.temp"),
        ({"general.sampling.temp": "x"}, r"general\.sampling\.temp"),
        ({"general.sampling.top_p": 3.0}, r"general\.sampling\.top_p"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicated key")
def test_absurd_values_of_a_gguf(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    path = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", extra=extra)
    with pytest.raises(FormatError, match=message):
        sources.read(path)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_that_are_no_factors(tmp_path: Path, factor: float) -> None:
    factors = np.full(8, factor, np.float32)
    path = checkpoints.gguf_checkpoint(tmp_path / "a.gguf", rope_freqs=factors)
    with pytest.raises(FormatError, match="rope_freqs.*positive"):
        sources.read(path)


@pytest.mark.parametrize("name", ["m-00001-of-00000", "m-00000-of-00002", "m-3-of-2"])
def test_shards_that_cannot_be(tmp_path: Path, name: str) -> None:
    name = name.replace("-3-of-2", "-00003-of-00002")
    path = checkpoints.gguf_checkpoint(tmp_path / f"{name}.gguf")
    with pytest.raises(FormatError, match=r"shard 0000\d of 0000\d cannot be"):
        sources.read(path)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    path = checkpoints.gguf_checkpoint(tmp_path / "a.gguf")
    norm = b"blk.0.attn_norm.weight" + (1).to_bytes(4, "little")
    norm += (64).to_bytes(8, "little")
    raw = path.read_bytes()
    assert norm + bytes(4) in raw
    path.write_bytes(raw.replace(norm + bytes(4), norm + b"\x1a\0\0\0"))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_norm.*type I32"):
        sources.read(path)


@pytest.mark.parametrize("form", pipeline.FORMATS)
@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_1", "q4_0"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_weights_no_block_can_hold_are_named(
    tmp_path: Path, source: Path, form: str, quant: str, value: float
) -> None:
    tensors = checkpoints.weights()
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    checkpoints.write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(EdgeSpecError, match=r"'blk\.0\.ffn_up': a weight"):
        pipeline.export(
            source, tmp_path / "b", formats=(form,), quant=quant, check=False
        )


def test_a_source_that_answers_nothing(source: Path) -> None:
    tensors = checkpoints.weights()
    tensors["model.norm.weight"][0] = np.inf
    checkpoints.write_safetensors(source / "model.safetensors", tensors)
    weights = sources.read(source)
    with pytest.raises(FormatError, match="weights are damaged"):
        reference.of_source(weights, None, np.array([[1, 2, 3]]))


def test_graphs_onnx_runtime_would_refuse(tmp_path: Path, source: Path) -> None:
    weights = sources.read(source)
    endless = replace(weights.config, max_position=1 << 30)
    odd = replace(
        weights.config, head_dim=24, rope=replace(weights.config.rope, dim=24)
    )
    with pytest.raises(UnsupportedError, match="context of 1073741824"):
        onnx_graph.write(replace(weights, config=endless), tmp_path / "a.onnx")
    with pytest.raises(UnsupportedError, match="heads of 24.*use explicit"):
        onnx_graph.write(
            replace(weights, config=odd), tmp_path / "a.onnx", attention="gqa"
        )
    assert not list(tmp_path.glob("a.onnx*"))
