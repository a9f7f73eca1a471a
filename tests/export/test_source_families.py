"""qwen2, qwen3 and gemma3 from both sources: what is read, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from edgespec.errors import EdgeSpecError, FormatError, UnsupportedError
from edgespec.gguf_header import open_gguf
from edgespec_export import forward, gguf_file, onnx_graph, reference, sources
from edgespec_export.sources import gguf, hf
from tests.export import checkpoints, families
from tests.export.graphs import Graph

NEW = ("qwen2", "qwen3", "gemma3")
TOKENS = np.random.default_rng(8).integers(3, 300, 40)


def changed(tmp_path: Path, family: str, **values: Any) -> Path:
    """A checkpoint with other values in its config.json; None removes a key."""
    shape = checkpoints.family_shape(family)
    path = checkpoints.hf_checkpoint(tmp_path / "hf", shape)
    config = json.loads((path / "config.json").read_text()) | values
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("family", NEW)
def test_both_sources_hold_the_same_numbers(tmp_path: Path, family: str) -> None:
    shape = checkpoints.family_shape(family)
    ours = hf.read(checkpoints.hf_checkpoint(tmp_path / "hf", shape))
    theirs = families.gguf(tmp_path / "a.gguf", family).weights
    assert set(ours.tensors) == set(theirs.tensors)
    for name, tensor in ours.tensors.items():
        other = theirs.tensors[name]
        assert (tensor.kind, tensor.shape) == (other.kind, other.shape)
        np.testing.assert_array_equal(tensor.load_f32(), other.load_f32())
        np.testing.assert_array_equal(
            tensor.load_raw().reshape(-1), other.load_raw().reshape(-1)
        )
    for key in ("activation", "embed_scale", "window", "windowed", "head_dim", "arch"):
        assert getattr(ours.config, key) == getattr(theirs.config, key)
    assert ours.config.attention_scale == pytest.approx(theirs.config.attention_scale)
    for layer in range(shape.n_layers):
        np.testing.assert_allclose(
            ours.config.rope_of(layer).inv_freq,
            theirs.config.rope_of(layer).inv_freq,
            rtol=1e-6,
        )


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_a_gguf_comes_out_bit_for_bit_and_as_onnx(
    tmp_path: Path, family: str, kind: str
) -> None:
    model = families.gguf(tmp_path / "a.gguf", family, kind=kind)
    gguf_file.write(model.weights, None, tmp_path / "b.gguf")
    before, after = open_gguf(model.path), open_gguf(tmp_path / "b.gguf")
    assert [t.name for t in before.tensors] == [t.name for t in after.tensors]
    for a, b in zip(before.tensors, after.tensors, strict=True):
        assert before.raw(a).tobytes() == after.raw(b).tobytes()
    added = {"edgespec.format_version", "edgespec.eos_token_ids"}
    assert {k: v for k, v in after.metadata.items() if k not in added} == dict(
        before.metadata
    )
    expected = model.logits(TOKENS)
    for attention in onnx_graph.ATTENTIONS:
        path = tmp_path / "target.onnx"
        onnx_graph.write(model.weights, path, attention=attention, accuracy_level=0)
        got = Graph(path).forward(TOKENS)["logits"]
        assert np.abs(got - expected).max() < 2e-4 * expected.std()


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("is_old", [False, True])
def test_what_transformers_itself_saves_is_read(
    tmp_path: Path, family: str, is_old: bool
) -> None:
    shape = checkpoints.family_shape(family)
    path = checkpoints.hf_checkpoint(
        tmp_path / "hf", shape, rope="linear", is_old_rope=is_old
    )
    before = hf.read(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.generation_config.temperature = None
    model.save_pretrained(path)
    for config in (None, model.config.to_dict()):
        if config is not None:  # as older versions wrote it
            (path / "config.json").write_text(json.dumps(config))
        after = hf.read(path)
        for name, tensor in before.tensors.items():
            np.testing.assert_array_equal(
                tensor.load_f32(), after.tensors[name].load_f32()
            )
        for layer in range(shape.n_layers):
            ours, theirs = (w.config.rope_of(layer) for w in (before, after))
            assert ours.config == theirs.config
        assert before.config.windowed == after.config.windowed


@pytest.fixture(scope="module")
def with_vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 that sees pictures, as transformers saves it."""
    shape = checkpoints.family_shape("gemma3")
    path = checkpoints.hf_checkpoint(tmp_path_factory.mktemp("vision") / "hf", shape)
    text = json.loads((path / "config.json").read_text())
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_use_head": False,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=319,
        boi_token_index=318,
        eoi_token_index=317,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    values = checkpoints.weights(shape)
    for name, parameter in model.named_parameters():
        found = values.get(name.replace("model.language_model.", "model."))
        if found is not None:
            parameter.data = torch.from_numpy(found)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_one_with_vision(
    tmp_path: Path, with_vision: Path, prefix: str
) -> None:
    import safetensors.numpy

    stored = safetensors.numpy.load_file(with_vision / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in stored)
    renamed = {k.replace("language_model.model.", prefix): v for k, v in stored.items()}
    for file in with_vision.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoints.write_safetensors(tmp_path / "model.safetensors", renamed)
    made = hf.read(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(with_vision)
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS[None])).logits[0].numpy()
    assert expected.std() > 1
    hidden, _ = forward.hidden_states(made, TOKENS[None])
    got = forward.logits(made, hidden[0])
    assert np.abs(got - expected).max() < 1e-4 * expected.std()
    truth = reference.of_source(made, with_vision, TOKENS[None])
    assert truth.by == "transformers"
    assert np.abs(truth.hidden - hidden).max() < 1e-4 * hidden.std()


def test_defaults_of_a_terse_gemma3() -> None:
    """The published checkpoints leave out what their class has as a default."""
    from edgespec_export.arch import ARCHITECTURES

    defaults = ARCHITECTURES["gemma3"].hf_defaults["gemma3_text"]
    theirs = transformers.Gemma3TextConfig()
    for key, value in defaults.items():
        if key == "rope_theta":
            assert theirs.rope_parameters["full_attention"][key] == value
        elif key == "rope_local_base_freq":
            local = theirs.rope_parameters["sliding_attention"]
            assert local["rope_theta"] == value
        elif key == "sliding_window_pattern":
            assert theirs.layer_types[:value].count("full_attention") == 1
        else:
            assert getattr(theirs, key) == value, key
    for family, kind in (("qwen2", "Qwen2"), ("qwen3", "Qwen3")):
        theirs = getattr(transformers, f"{kind}Config")(use_sliding_window=True)
        for key, value in ARCHITECTURES[family].hf_defaults[family].items():
            assert getattr(theirs, key) == value, key


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, (1,)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 512}, ()),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            (0, 1),
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (0,),
        ),
        ("gemma3", {"sliding_window_pattern": 3}, (0, 1)),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, ()),
    ],
)
def test_which_layers_have_windows(
    tmp_path: Path, family: str, values: dict[str, Any], expected: tuple[int, ...]
) -> None:
    config = hf.read(changed(tmp_path, family, **values)).config
    assert tuple(sorted(config.windowed)) == expected
    assert (config.window is None) is not bool(expected)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"layer_types": ["full_attention", "chunked"]}, "layer_types"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("gemma3", {"layer_types": ["full_attention"]}, "expected 3 of"),
        ("gemma3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ("qwen2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar"),
        ("qwen2", {"qk_layernorm": True}, "qk_layernorm"),
    ],
)
def test_settings_that_change_the_model_are_refused_by_name(
    tmp_path: Path, family: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        hf.read(changed(tmp_path, family, **values))


@pytest.mark.parametrize("family", NEW)
def test_missing_parts_are_named(tmp_path: Path, family: str) -> None:
    shape = checkpoints.family_shape(family)
    path = checkpoints.hf_checkpoint(tmp_path / "hf", shape)
    part = {"qwen2": "q_proj.bias", "qwen3": "k_norm.weight", "gemma3": "q_norm.weight"}
    name = f"model.layers.1.self_attn.{part[family]}"
    tensors = checkpoints.weights(shape)
    del tensors[name]
    checkpoints.write_safetensors(path / "model.safetensors", tensors)
    with pytest.raises(FormatError, match=f"missing: {name}"):
        hf.read(path)


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize(
    "value", [0, -1, 1e400, 1.5, "x", "", True, [], [1], {"a": 1}, None], ids=repr
)
def test_wrong_types_never_get_through(tmp_path: Path, family: str, value: Any) -> None:
    shape = checkpoints.family_shape(family, window=16)
    path = checkpoints.hf_checkpoint(tmp_path / "hf", shape, rope="linear")
    kept = json.loads((path / "config.json").read_text())
    keys = {*kept, "layer_types", "rope_local_base_freq", "rope_scaling", "text_config"}
    configs = [kept | {key: value} for key in keys]
    if family == "gemma3":
        rope = kept["rope_parameters"]
        configs += [
            kept | {"rope_parameters": rope | {key: value}}
            for key in ("full_attention", "sliding_attention")
        ]
        whole = {"model_type": "gemma3", "text_config": kept}
        whole["architectures"] = ["Gemma3ForConditionalGeneration"]
        configs += [whole | {"text_config": config} for config in configs]
        configs.append(whole | {"text_config": value})
    for config in configs:
        (path / "config.json").write_text(json.dumps(config))
        try:
            made = hf.read(path)
        except (FormatError, UnsupportedError) as error:
            message = str(error)
        else:
            assert np.isfinite(made.config.rope.inv_freq).all()
            assert 0 < made.config.attention_scale < 10
            continue
        assert "hf" in message or "RoPE" in message


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("qwen2", {"qwen2.attention.sliding_window": 64}, "qwen2 has no windows"),
        ("qwen3", {"qwen3.attention.scale": 0.5}, r"qwen3\.attention\.scale"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcap"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcap"),
        ("gemma3", {"gemma3.rope.scaling.type": "longrope"}, "'longrope'"),
        ("gemma3", {"gemma3.rope.scaling.type": "yarn"}, "'yarn' of gemma3"),
        ("gemma3", {"gemma3.rope.dimension_count": 8}, "dimension_count 8"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": 0}, "pattern"),
        ("gemma3", {"gemma3.rope.freq_base_swa": -1.0}, "freq_base_swa"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_gguf_settings_that_change_the_model_are_refused(
    tmp_path: Path, family: str, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(EdgeSpecError, match=message):
        families.gguf(tmp_path / "a.gguf", family, extra=extra)


def test_a_gemma3_gguf_says_no_more_than_llama_cpp_needs(tmp_path: Path) -> None:
    """Files in the wild leave the pattern and the base of windowed layers out."""
    model = families.gguf(tmp_path / "a.gguf", "gemma3", n_layers=7)
    file = open_gguf(model.path)
    for key in ("attention.sliding_window_pattern", "rope.freq_base_swa"):
        del file.metadata[f"gemma3.{key}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "open_gguf", lambda path: file)
        config = sources.read(model.path).config
    assert config.windowed == {0, 1, 2, 3, 4, 6}
    assert config.local_rope is not None
    assert config.local_rope.theta == 10000
    del file.metadata["gemma3.attention.sliding_window"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "open_gguf", lambda path: file)
        assert not sources.read(model.path).config.windowed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["full_attention"] + ["sliding_attention"] * 2}, "windows in"),
        ({"query_pre_attn_scalar": 20}, "query_pre_attn_scalar 20: .* only 32"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0}
                }
            },
            "RoPE scaling of windowed layers 'linear'",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 2.0}
                }
            },
            "RoPE scaling 'yarn'",
        ),
    ],
)
def test_what_llama_cpp_cannot_do_is_no_gguf(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    made = hf.read(changed(tmp_path, "gemma3", **values))
    with pytest.raises(UnsupportedError, match=message + ".*use --format onnx"):
        gguf_file.write(made, "f32", tmp_path / "a.gguf")
    onnx_graph.write(made, tmp_path / "target.onnx")
