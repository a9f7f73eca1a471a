"""Reading Hugging Face checkpoints: neutral weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from edgespec.errors import FormatError, ModelNotFoundError, UnsupportedError
from edgespec_export import sources
from edgespec_export.sources import hf
from tests.export import checkpoints
from tests.processes import python


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.hf_checkpoint(tmp_path_factory.mktemp("hf") / "tiny")


def _changed(tmp_path: Path, file: str, **values: Any) -> Path:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    changed = json.loads((path / file).read_text()) | values
    (path / file).write_text(json.dumps(changed))
    return path


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_weights_come_out_as_stored(
    tmp_path: Path, is_tied: bool, n_kv_heads: int
) -> None:
    shape = checkpoints.Shape(n_kv_heads=n_kv_heads, is_tied=is_tied)
    made = sources.read(checkpoints.hf_checkpoint(tmp_path / "hf", shape))
    stored = checkpoints.weights(shape)
    assert ("output" in made.tensors) is not is_tied
    assert len(made.tensors) == len(stored)
    for name, value in stored.items():
        tensor = made.tensors[checkpoints.gguf_name(name).removesuffix(".weight")]
        assert (tensor.shape, tensor.kind) == (value.shape, "F32")
        np.testing.assert_array_equal(tensor.load_f32(), value)
        assert tensor.load_raw().tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_is_widened_exactly(tmp_path: Path, dtype: str) -> None:
    import torch

    made = hf.read(checkpoints.hf_checkpoint(tmp_path / "hf", dtype=dtype))
    value = torch.from_numpy(checkpoints.weights()["model.layers.1.mlp.up_proj.weight"])
    kind = {"F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    tensor = made.tensors["blk.1.ffn_up"]
    assert tensor.kind == dtype
    np.testing.assert_array_equal(tensor.load_f32(), value.to(kind).float().numpy())


def test_shards_equal_the_whole(tmp_path: Path, tiny: Path) -> None:
    parts = hf.read(checkpoints.hf_checkpoint(tmp_path / "hf", n_shards=3))
    for name, tensor in hf.read(tiny).tensors.items():
        np.testing.assert_array_equal(tensor.load_raw(), parts.tensors[name].load_raw())


def test_texts_terms_and_generation_settings(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    (path / "README.md").write_text(
        "---\nlanguage: en\nlicense: mit\n---\nlicense: no\n"
    )
    made = hf.read(path)
    assert made.tokenizer_json == (path / "tokenizer.json").read_text()
    assert made.chat_template == checkpoints.CHAT_TEMPLATE
    assert (made.temperature, made.top_p) == (0.6, None)
    assert (made.origin.licence, made.origin.format) == ("mit", "safetensors")
    assert (made.bos_id, made.add_bos, made.name) == (1, False, "hf")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    assert hf.read(path).chat_template == "{{ messages }}"


def test_named_chat_templates_give_the_default_one(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "yes"},
    ]
    path = _changed(tmp_path, "tokenizer_config.json", chat_template=named)
    assert hf.read(path).chat_template == "yes"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, 2, (2,)), (7, [8, 7], (7, 8, 2)), ([0, 9], 5, (0, 9, 5, 2))],
)
def test_c22_union_of_all_end_tokens(
    tmp_path: Path,
    config: int | list[int],
    generation: int | list[int],
    expected: tuple[int, ...],
) -> None:
    path = checkpoints.hf_checkpoint(
        tmp_path / "hf", config={"eos_token_id": config}, eos=generation
    )
    assert hf.read(path).eos_ids == expected


def test_c22_end_of_turn_only_in_the_template(tmp_path: Path) -> None:
    path = _changed(tmp_path, "tokenizer_config.json", eos_token="<|endoftext|>")
    for file in ("config.json", "generation_config.json"):
        data = json.loads((path / file).read_text()) | {"eos_token_id": 0}
        (path / file).write_text(json.dumps(data))
    assert hf.read(path).eos_ids == (0, 2)


def test_add_bos_from_the_post_processor_and_overruled(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    words = Tokenizer.from_file(str(path / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    words.save(str(path / "tokenizer.json"))
    assert hf.read(path).add_bos is True
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["add_bos_token"] = False
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert hf.read(path).add_bos is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 128}, "sliding_window 128.*forget"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClass"),
        ({"logits_scaling": 8.0, "residual_multiplier": 2.0}, "logits_scaling, resid"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_settings_that_change_the_model_are_refused_by_name(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hf.read(_changed(tmp_path, "config.json", **values))


@pytest.mark.parametrize(
    "value", [0, -1, 1e400, 1.5, "x", "", True, [], [1], {"a": 1}, None], ids=repr
)
def test_wrong_types_never_get_through(tmp_path: Path, value: Any) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf", rope="yarn")
    kept = json.loads((path / "config.json").read_text())
    extra = ["sliding_window", "layer_types", "quantization_config", "rope_scaling"]
    extra += ["original_max_position_embeddings", "partial_rotary_factor"]
    changed = [kept | {key: value} for key in (*kept, *extra)]
    yarn = ["beta_fast", "beta_slow", "mscale", "attention_factor", "truncate"]
    for key in (*kept["rope_parameters"], *yarn):
        rope = kept["rope_parameters"] | {"mscale_all_dim": 1.0, key: value}
        changed.append(kept | {"rope_parameters": rope})
    for config in changed:
        (path / "config.json").write_text(json.dumps(config))
        try:
            made = hf.read(path)
        except (FormatError, UnsupportedError) as error:
            message = str(error)
        else:
            assert np.isfinite(made.config.rope.inv_freq).all()
            continue
        assert "hf" in message or "RoPE" in message


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_what_transformers_itself_saves_is_read(tmp_path: Path, family: str) -> None:
    import transformers

    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    settings = checkpoints.hf_config(rope="yarn")
    for key in ("architectures", "model_type", "torch_dtype"):
        del settings[key]
    config = getattr(transformers, f"{family}Config")(**settings)
    config.sliding_window = None
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(path)
    made = hf.read(path)
    stored = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    np.testing.assert_array_equal(made.tensors["blk.1.ffn_up"].load_f32(), stored)
    # Older versions wrote every key there is.
    whole = config.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(whole))
    assert hf.read(path).config.rope.kind == "yarn"


def test_mistral_without_a_window_key_has_one(tmp_path: Path) -> None:
    settings = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "max_position_embeddings": 8192,
    }
    with pytest.raises(UnsupportedError, match="sliding_window 4096"):
        hf.read(_changed(tmp_path, "config.json", **settings))


def test_mistral_with_a_window_beyond_its_context_is_read(tmp_path: Path) -> None:
    settings = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 512,
    }
    assert hf.read(_changed(tmp_path, "config.json", **settings)).config.arch == "llama"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"unexpected: model\.layers\.1"),
        ({"num_hidden_layers": 10**9}, "layers in 20 tensors"),
        ({"tie_word_embeddings": False}, r"missing: lm_head\.weight"),
        ({"intermediate_size": 128}, r"gate_proj.*\(128, 64\), got \(96, 64\)"),
        ({"vocab_size": 321}, r"embed_tokens.*\(321, 64\), got \(320, 64\)"),
        ({"hidden_size": "64"}, "hidden_size: expected a positive integer"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"eos_token_id": 320}, "eos_token_id 320"),
    ],
)
def test_contradictions_are_format_errors(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        hf.read(_changed(tmp_path, "config.json", **values))


def test_a_stored_head_of_a_tied_model_must_equal_the_embedding(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    tensors = checkpoints.weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    checkpoints.write_safetensors(path / "model.safetensors", tensors)
    assert "output" not in hf.read(path).tensors
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    checkpoints.write_safetensors(path / "model.safetensors", tensors)
    with pytest.raises(FormatError, match="tie_word_embeddings"):
        hf.read(path)


def test_biases_and_stale_buffers(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    at = "model.layers.0.self_attn."
    buffer = {at + "rotary_emb.inv_freq": np.ones(8, np.float32)}
    checkpoints.write_safetensors(
        path / "model.safetensors", checkpoints.weights() | buffer
    )
    assert len(hf.read(path).tensors) == 20
    bias = {at + "q_proj.bias": np.ones(64, np.float32)}
    checkpoints.write_safetensors(
        path / "model.safetensors", checkpoints.weights() | bias
    )
    with pytest.raises(FormatError, match=r"unexpected: .*q_proj\.bias"):
        hf.read(path)


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    checkpoints.tokenizer(330).save(str(path / "tokenizer.json"))
    with pytest.raises(FormatError, match=r"330 tokens.*320 rows"):
        hf.read(path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, file: str) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    (path / file).unlink()
    with pytest.raises(ModelNotFoundError, match=file):
        hf.read(path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_damaged_json_is_a_format_error(tmp_path: Path, file: str) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    (path / file).write_text("{")
    with pytest.raises(FormatError, match=file):
        hf.read(path)


def test_shard_index_is_checked(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf", n_shards=2)
    index = path / "model.safetensors.index.json"
    kept = json.loads(index.read_text())
    outside = {"weight_map": dict.fromkeys(kept["weight_map"], "../x.safetensors")}
    index.write_text(json.dumps(outside))
    with pytest.raises(FormatError, match="not a plain file name"):
        hf.read(path)
    kept["weight_map"]["extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(kept))
    with pytest.raises(FormatError, match="in no file: extra"):
        hf.read(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="00002-of-00002"):
        hf.read(path)


def test_c37_every_truncation_is_a_format_error(tmp_path: Path) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header.pop("__metadata__")
    body = 8 + length
    edges = [body + x for entry in header.values() for x in entry["data_offsets"]]
    cuts = {0, 7, 8, 9, 37, 1024, body, *range(10, body, 101)}
    cuts |= {edge + d for edge in edges for d in (-1, 0, 1)}
    for cut in sorted(c for c in cuts if c < len(whole)):
        file.write_bytes(whole[:cut])
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            hf.read(path)
    file.write_bytes(whole + b"x")
    with pytest.raises(FormatError, match="1 bytes after the last tensor"):
        hf.read(path)


@pytest.mark.parametrize("length", [2**62, 2**64 - 1, 1 << 40])
def test_c37_absurd_header_length(tmp_path: Path, length: int) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    file = path / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(FormatError, match=str(length)):
        hf.read(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}, "bytes 0"),
        ({"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}, "impossible"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "expected bytes 0"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "I64"),
    ],
)
def test_hostile_headers(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    path = checkpoints.hf_checkpoint(tmp_path / "hf")
    text = json.dumps({"x": entry}).encode()
    raw = len(text).to_bytes(8, "little") + text + b"\0" * 8
    (path / "model.safetensors").write_bytes(raw)
    with pytest.raises((FormatError, UnsupportedError), match=message):
        hf.read(path)


def test_reading_needs_no_torch(tiny: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from edgespec_export import sources;"
        f"w = sources.read(Path({str(tiny)!r}));"
        "[t.load_f32() for t in w.tensors.values()];"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run(python(code), check=False).returncode == 0
    loaded = safetensors.numpy.load_file(tiny / "model.safetensors")
    assert set(loaded) == set(checkpoints.weights())
