"""Heads of the wrong kind or target, damaged or hostile: a named error each."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.errors import (
    EdgeSpecError,
    FormatError,
    ModelNotFoundError,
    UnsupportedError,
    UsageError,
)
from edgespec_export import sources
from edgespec_export.sources import heads as reader
from edgespec_export.weights import ModelConfig
from tests.export import checkpoints
from tests.export import heads as tiny

LAYOUTS = {
    "safeailab": lambda: tiny.eagle3("safeailab"),
    "specforge": lambda: tiny.eagle3("specforge", norm_before_fc=True),
    "speculators": lambda: tiny.eagle3("speculators", fc_norm=True, qwen=True),
    "eagle": tiny.eagle,
    "medusa": tiny.medusa,
    "medusa of two": lambda: tiny.medusa(layers=2),
}
FROM_TARGET = {"embed_tokens.weight", "lm_head.weight", "t2d"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    shape = checkpoints.Shape(n_layers=tiny.LAYERS)
    path = checkpoints.hf_checkpoint(tmp_path_factory.mktemp("target"), shape)
    return sources.read(path).config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_tensor_is_named(
    tmp_path: Path, target: ModelConfig, layout: str
) -> None:
    whole = LAYOUTS[layout]()
    for name in whole.tensors:
        rest = {k: v for k, v in whole.tensors.items() if k != name}
        path = replace(whole, tensors=rest).write(tmp_path)
        if name in FROM_TARGET:
            assert reader.read(path, target).kind.startswith("eagle")
            continue
        with pytest.raises(FormatError) as caught:
            reader.read(path, target)
        said = str(caught.value)
        # what a tensor is called depends on the layout, what it does does not
        part = next(p for p in reversed(name.split(".")) if p not in ("weight", "bias"))
        words = {
            "hidden_norm": "attn_norm_2",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "o_proj": "attn_output",
            "norm": "output_norm",
            "input_norm": "enc.output_norm",
        }
        part = words.get(part, part.removesuffix("_proj"))
        part = name.split(".linear")[0] if "linear" in name else part
        assert str(tmp_path) in said
        assert part in said or f"{name.split('.')[0]}.output" in said, (name, said)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, -1])
def test_a_misshapen_tensor_is_named(
    tmp_path: Path, target: ModelConfig, layout: str, axis: int
) -> None:
    whole = LAYOUTS[layout]()
    for name, value in whole.tensors.items():
        shorter = np.delete(value, 0, axis=axis)
        tensors = whole.tensors | {name: shorter}
        path = replace(whole, tensors=tensors).write(tmp_path)
        with pytest.raises(FormatError) as caught:
            reader.read(path, target)
        said = str(caught.value)
        assert str(tmp_path) in said
        sizes = {str(n) for n in value.shape + shorter.shape}
        assert any(size in said for size in sizes), said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_surplus_tensor_is_named(
    tmp_path: Path, target: ModelConfig, layout: str
) -> None:
    whole = LAYOUTS[layout]()
    name = "0.0.linear.other" if "medusa" in layout else "layers.1.mlp.up_proj.weight"
    extra = whole.tensors | {name: np.ones((2, 2), np.float32)}
    path = replace(whole, tensors=extra).write(tmp_path)
    if "medusa" in layout:  # inside a model's shards other tensors are the model's
        assert reader.read(path, target).kind == "medusa"
        return
    with pytest.raises(FormatError, match="unexpected: layers.1.mlp.up_proj"):
        reader.read(path, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("expected", ["eagle", "medusa"])
def test_one_kind_where_another_is_expected(
    tmp_path: Path, target: ModelConfig, layout: str, expected: str
) -> None:
    path = LAYOUTS[layout]().write(tmp_path)
    if ("medusa" in layout) == (expected == "medusa"):
        assert reader.read(path, target, expected=expected).kind.startswith(expected)
        return
    got = "medusa" if "medusa" in layout else "eagle"
    with pytest.raises(FormatError, match=f"expected a head of {expected}, got {got}"):
        reader.read(path, target, expected=expected)


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("config", LAYOUTS)
def test_weights_beside_the_config_of_another_layout(
    tmp_path: Path, target: ModelConfig, weights: str, config: str
) -> None:
    """Tensors decide; where the config says what they are not, both are named."""
    mixed = replace(LAYOUTS[weights](), config=LAYOUTS[config]().config)
    kind = "medusa" if "medusa" in weights else "eagle"
    path = mixed.write(tmp_path)
    try:
        got = reader.read(path, target).kind
    except EdgeSpecError as error:
        got = str(error)
    said = ("config.json", "missing", "expected", "exclude each other")
    is_named = str(path) in got and any(word in got for word in said)
    assert got.startswith(kind) or (weights != config and is_named), got


def test_a_whole_model_is_no_head(tmp_path: Path, target: ModelConfig) -> None:
    path = checkpoints.hf_checkpoint(tmp_path)
    with pytest.raises(FormatError, match="no draft head: expected tensors of Medusa"):
        reader.read(path, target)


def test_a_head_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(EdgeSpecError, match="not known|missing"):
        sources.read(tiny.eagle3().write(tmp_path))


def test_eagle_called_eagle3(tmp_path: Path, target: ModelConfig) -> None:
    """A name does not decide: fc of two widths with plain q_proj is EAGLE-1/2."""
    path = tiny.eagle().write(tmp_path / "some_eagle3")
    assert reader.read(path, target).kind == "eagle"


def test_layers_without_fc_are_named(tmp_path: Path, target: ModelConfig) -> None:
    whole = tiny.eagle()
    del whole.tensors["fc.weight"]
    with pytest.raises(FormatError, match="no draft head.*layers.0.mlp"):
        reader.read(whole.write(tmp_path), target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 80}, "64.*80|80.*64"),
        ({"vocab": 321}, "320.*321"),
    ],
)
def test_another_target(
    tmp_path: Path,
    target: ModelConfig,
    layout: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    whole = LAYOUTS[layout]()
    whole.config.setdefault("vocab_size", tiny.VOCAB)
    path = whole.write(tmp_path)
    with pytest.raises(FormatError, match=message):
        reader.read(path, replace(target, **changes))


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_target_of_fewer_layers(
    tmp_path: Path, target: ModelConfig, layout: str
) -> None:
    path = LAYOUTS[layout]().write(tmp_path)
    with pytest.raises(FormatError, match=r"\[2, 4, 5\].*the target has 5 layers"):
        reader.read(path, replace(target, n_layers=5))


def test_a_padded_vocabulary(tmp_path: Path, target: ModelConfig) -> None:
    whole = tiny.eagle3()
    padded = np.concatenate([whole.tensors["t2d"], np.zeros(64, bool)])
    path = replace(whole, tensors=whole.tensors | {"t2d": padded}).write(tmp_path)
    with pytest.raises(FormatError, match="t2d is for 384 tokens, the target has 320"):
        reader.read(path, target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
    ],
)
def test_settings_of_another_block(
    tmp_path: Path, target: ModelConfig, config: dict[str, Any], message: str
) -> None:
    whole = tiny.eagle3()
    path = replace(whole, config=whole.config | config).write(tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        reader.read(path, target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": 8}, r"q_proj.*\(128, 128\), got \(64, 128\)"),
        ({"num_key_value_heads": 3}, "4 heads do not divide among 3"),
        ({"intermediate_size": 128}, r"gate_proj.*\(128, 64\), got \(96, 64\)"),
        ({"hidden_size": 128}, "hidden_size 128, but fc.weight makes 64"),
        ({"draft_vocab_size": 32000}, "32000, but lm_head.weight has rows 96"),
        ({"target_hidden_size": 128}, "128, but fc.weight takes taps of 64"),
        ({"vocab_size": 32000}, "vocab_size is for 32000 tokens, the target has 320"),
        ({"norm_before_fc": True}, "missing: enc.output_norm"),
        ({"fc_norm": True}, "missing: fc_norm.0, fc_norm.1, fc_norm.2"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"norm_output": 1}, "norm_output: expected true or false"),
        ({"transformer_layer_config": 5}, "transformer_layer_config"),
        ({"rope_theta": -1}, "rope_theta"),
    ],
)
def test_settings_that_contradict_the_tensors(
    tmp_path: Path, target: ModelConfig, config: dict[str, Any], message: str
) -> None:
    whole = tiny.eagle3()
    path = replace(whole, config=whole.config | config).write(tmp_path)
    with pytest.raises(FormatError, match=message):
        reader.read(path, target)


def test_flags_and_tensors_disagree(tmp_path: Path, target: ModelConfig) -> None:
    whole = tiny.eagle3(norm_before_fc=True)
    config = whole.config | {"norm_before_fc": False}
    path = replace(whole, config=config).write(tmp_path / "a")
    with pytest.raises(FormatError, match="norm_before_fc is false.*enc.output_norm"):
        reader.read(path, target)
    both = tiny.eagle3(norm_before_fc=True, fc_norm=True).write(tmp_path / "b")
    with pytest.raises(FormatError, match="exclude each other"):
        reader.read(both, target)


def test_medusa_counts(tmp_path: Path, target: ModelConfig) -> None:
    whole = tiny.medusa(heads=3)
    more = whole.config | {"medusa_num_heads": 5}
    with pytest.raises(FormatError, match="medusa_num_heads 5, but the weights have 3"):
        reader.read(replace(whole, config=more).write(tmp_path), target)
    deeper = whole.config | {"medusa_num_layers": 2}
    with pytest.raises(FormatError, match="medusa_num_layers 2"):
        reader.read(replace(whole, config=deeper).write(tmp_path), target)
    far = whole.tensors | {"900000000.0.linear.weight": np.ones((64, 64), np.float32)}
    with pytest.raises(FormatError, match="900000001 heads in"):
        reader.read(replace(whole, tensors=far).write(tmp_path), target)


def test_medusa_on_the_first_ids(tmp_path: Path, target: ModelConfig) -> None:
    whole = tiny.medusa(rows=96)
    with pytest.raises(FormatError, match="has 96 rows, expected 320"):
        reader.read(whole.write(tmp_path), target)
    stated = replace(whole, config=whole.config | {"draft_vocab_size": 96})
    head = reader.read(stated.write(tmp_path), target)
    assert (head.draft_vocab, head.d2t) == (96, None)


def taps_of(
    path: Path, target: ModelConfig, ids: Any, convention: str | None = None
) -> tuple[int, ...]:
    whole = tiny.eagle3()
    config = whole.config | {"eagle_aux_hidden_state_layer_ids": ids}
    written = replace(whole, config=config).write(path)
    return reader.read(written, target, tap_convention=convention).taps


def test_tap_conventions(tmp_path: Path, target: ModelConfig) -> None:
    assert taps_of(tmp_path, target, None) == (2, 4, 5)
    assert taps_of(tmp_path, target, [2, 4, 5]) == (2, 4, 5)
    assert taps_of(tmp_path, target, [1, 3, 4]) == (2, 4, 5)
    assert taps_of(tmp_path, target, [1, 3, 4], "input") == (1, 3, 4)
    assert taps_of(tmp_path, target, [0, 3, 6], "output") == (1, 4, 7)
    with pytest.raises(UnsupportedError, match=r"\[0, 3, 6\].*--tap-convention input"):
        taps_of(tmp_path, target, [0, 3, 6])
    with pytest.raises(FormatError, match="the target has 8 layers"):
        taps_of(tmp_path, target, [2, 4, 7], "output")
    with pytest.raises(FormatError, match="expected integers"):
        taps_of(tmp_path, target, ["2", 4, 5])
    with pytest.raises(FormatError, match="distinct"):
        taps_of(tmp_path, target, [2, 2, 5])
    with pytest.raises(UsageError, match="--tap-convention middle"):
        taps_of(tmp_path, target, [2, 4, 5], "middle")
    with pytest.raises(UsageError, match="states no eagle_aux"):
        taps_of(tmp_path, target, None, "output")


def test_the_file_may_state_its_convention(tmp_path: Path, target: ModelConfig) -> None:
    whole = tiny.eagle3()
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "tap_convention": "input"}
    path = replace(whole, config=whole.config | ids).write(tmp_path)
    assert reader.read(path, target).taps == (1, 3, 6)


def ids_of(path: Path, target: ModelConfig, **tensors: Any) -> Any:
    whole = tiny.eagle3()
    kept = {k: v for k, v in whole.tensors.items() if k not in ("d2t", "t2d")}
    written = replace(whole, tensors=kept | tensors).write(path)
    return reader.read(written, target).d2t


def test_d2t_as_offsets_or_as_ids(tmp_path: Path, target: ModelConfig) -> None:
    ids = tiny.draft_ids()
    offsets = ids - np.arange(len(ids))
    member = np.isin(np.arange(tiny.VOCAB), ids)
    for given in (ids, offsets):
        np.testing.assert_array_equal(ids_of(tmp_path, target, d2t=given), ids)
        found = ids_of(tmp_path, target, d2t=given, t2d=member)
        np.testing.assert_array_equal(found, ids)
    prefix = ids_of(tmp_path, target, d2t=np.zeros(96, np.int64))
    np.testing.assert_array_equal(prefix, np.arange(96))


def test_d2t_against_t2d(tmp_path: Path, target: ModelConfig) -> None:
    ids = tiny.draft_ids()
    other = np.isin(np.arange(tiny.VOCAB), tiny.draft_ids(seed=8))
    with pytest.raises(FormatError, match="d2t: neither as ids nor as offsets.*t2d"):
        ids_of(tmp_path, target, d2t=ids, t2d=other)
    other[:] = False
    with pytest.raises(FormatError, match="t2d marks 0 tokens, d2t maps 96"):
        ids_of(tmp_path, target, d2t=ids, t2d=other)
    with pytest.raises(FormatError, match="rising ids below 320"):
        ids_of(tmp_path, target, d2t=ids[::-1].copy())
    with pytest.raises(FormatError, match="rising ids below 320"):
        ids_of(tmp_path, target, d2t=ids + 300)
    with pytest.raises(FormatError, match="expected a vector of whole numbers"):
        ids_of(tmp_path, target, d2t=ids.astype(np.float32))


def test_files_that_are_not_there(tmp_path: Path, target: ModelConfig) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        reader.read(tmp_path / "nothing", target)
    with pytest.raises(ModelNotFoundError, match="no weights"):
        reader.read(tmp_path, target)
    (tmp_path / "a.pt").write_bytes(b"PK")
    (tmp_path / "b.pt").write_bytes(b"PK")
    with pytest.raises(FormatError, match="which of a.pt, b.pt is the head"):
        reader.read(tmp_path, target)


def test_an_index_of_shards(tmp_path: Path, target: ModelConfig) -> None:
    whole = tiny.eagle3().write(tmp_path)
    (whole / "model.safetensors").rename(whole / "part.safetensors")
    index = whole / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "part.safetensors"}}))
    assert reader.read(whole, target).kind == "eagle3"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../x.safetensors"}}))
    with pytest.raises(FormatError, match="plain file names"):
        reader.read(whole, target)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_c37_truncated_files(tmp_path: Path, target: ModelConfig, name: str) -> None:
    container = "safetensors" if name.startswith("model") else name
    path = tiny.eagle3().write(tmp_path, container) / name
    data = path.read_bytes()
    for size in [0, 1, 3, 8, 37, 1024, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match=name):
            reader.read(tmp_path, target)


class Runs:
    """What unpickling would run."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("owned"),))


class Sets:
    def __init__(self) -> None:
        self.value = 1


def archive(path: Path, code: bytes, **members: bytes) -> Path:
    """A PyTorch zip file with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", code)
        for name, data in members.items():
            file.writestr(f"a/data/{name}", data)
    return path


GLOBAL = b"\x80\x02c%s\n%s\n"
TENSOR = (
    b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(("
    b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x04tQ%s\x89ccollections\nOrderedDict\n)RtRs."
)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (pickle.dumps(Runs(), 2), "the pickle wants"),
        (pickle.dumps(Sets(), 2), "the pickle wants"),
        (pickle.dumps({"a": Runs()}, 4), "the pickle wants"),
        (GLOBAL % (b"os", b"system") + b"X\x02\x00\x00\x00id\x85R.", "'os.system'"),
        (GLOBAL % (b"builtins", b"eval") + b".", "'builtins.eval'"),
        (GLOBAL % (b"torch", b"load") + b".", "'torch.load'"),
        (GLOBAL % (b"torch.storage", b"_load_from_bytes") + b".", "_load_from_bytes"),
        (b"\x80\x02X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93.", "'os.system'"),
        (b"(X\x02\x00\x00\x00idios\nsystem\n.", "instruction b'i'"),
        (b"\x80\x02\x82\x01.", "instruction"),
        (b"\x80\x02Pname\n.", "instruction b'P'"),
        (b"\x80\x02cos\nsystem", "truncated"),
        (b"\x80\x02h\x05.", "damaged pickle"),
        (b"\x80\x02R.", "nothing left"),
        (b"\x80\x02t.", "no mark"),
        (b"\x80\x02}K\x01K\x02s.", "a key that is no name"),
        (b"\x80\x02]K\x01a.", "expected a dictionary of tensors, got list"),
        (b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", "'a' that is none"),
        (b"(" * 1000 + b".", "nested deeper"),
        (b"\x80\x02N" + b"\x85" * 200000 + b".", "got tuple"),
        (b"\x80\x02X\xff\xff\xff\xff.", "truncated"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "no draft head"),
        (TENSOR % b"K\x00K\x02K\x02\x86K\x02K\x01\x86", "no draft head"),
        (TENSOR % b"K\x01K\x02K\x02\x86K\x02K\x01\x86", "needs bytes 4 to 20"),
        (TENSOR % b"K\x00K\x03K\x03\x86K\x03K\x01\x86", "needs bytes 0 to 36"),
        (TENSOR % b"K\x00K\x02K\x02\x86K\x01K\x02\x86", "stored with strides"),
        (
            TENSOR % b"J\xff\xff\xff\xffK\x02K\x02\x86K\x02K\x01\x86",
            "impossible tensor",
        ),
        (TENSOR % b"K\x00K\x00K\x02\x86K\x02K\x01\x86", "impossible tensor"),
    ],
)
def test_pickles_run_nothing(
    tmp_path: Path,
    target: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
    code: bytes,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "head.pt", code, **{"0": bytes(16)})
    with pytest.raises(EdgeSpecError, match=message) as caught:
        reader.read(path, target)
    assert "head.pt" in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_archives_that_are_none(tmp_path: Path, target: ModelConfig) -> None:
    path = tmp_path / "head.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/other.txt", b"")
    with pytest.raises(FormatError, match="one data.pkl in the archive, got 0"):
        reader.read(path, target)
    archive(path, TENSOR % b"K\x00K\x02K\x02\x86K\x02K\x01\x86")
    with pytest.raises(FormatError, match="no storage '0'"):
        reader.read(path, target)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", TENSOR % b"K\x00K\x02K\x02\x86K\x02K\x01\x86")
        file.writestr("a/data/0", bytes(16))
    with pytest.raises(FormatError, match="expected stored, not compressed"):
        reader.read(path, target)
    bare = io.BytesIO()
    torch.save({"a": torch.ones(2)}, bare, _use_new_zipfile_serialization=False)
    path.write_bytes(bare.getvalue())
    with pytest.raises(FormatError, match="bare pickle"):
        reader.read(path, target)


def test_what_torch_saves_is_read_as_it_is(tmp_path: Path) -> None:
    from edgespec_export.sources.heads_pickle import read_zip

    saved = {
        "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
        "brain": torch.arange(6, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "part": torch.arange(12.0).reshape(4, 3)[1:3],
        "long": torch.tensor([1, -2, 3]),
        "bool": torch.tensor([True, False]),
    }
    module = torch.nn.Linear(3, 2)
    torch.save(saved, tmp_path / "a.pt")
    torch.save({"state_dict": module.state_dict(), "step": 3}, tmp_path / "b.pt")
    found = read_zip(tmp_path / "a.pt")
    assert {name: t.kind for name, t in found.items()} == {
        "half": "F16",
        "brain": "BF16",
        "parameter": "F32",
        "part": "F32",
        "long": "I64",
        "bool": "BOOL",
    }
    for name, value in saved.items():
        raw = value.detach().contiguous().view(torch.uint8).numpy()
        assert found[name].shape == tuple(value.shape)
        assert found[name].data.tobytes() == raw.tobytes()
    assert set(read_zip(tmp_path / "b.pt")) == {"weight", "bias"}
