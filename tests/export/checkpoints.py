"""Tiny random checkpoints, written without any of the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.export import ggml

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS, END_OF_TEXT = 1, 2, 0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then it runs to the river "
    "where the water is cold and the stones are round; he said that she was there. "
    "def main(): return the_value + 1  # and so on\n\n    indented code\n"
)


@dataclass(frozen=True)
class Shape:
    """Family and sizes of a tiny model; every row length is a multiple of 32.

    A window makes the layers of qwen2 and qwen3 from `first_windowed` on look back
    that far, and those of gemma3 that are not every `period`-th.
    """

    n_layers: int = 2
    hidden: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    max_position: int = 512
    rms_eps: float = 1e-5
    theta: float = 10000.0
    is_tied: bool = True
    family: str = "llama"
    window: int | None = None
    first_windowed: int = 1
    period: int = 2
    local_theta: float = 10000.0
    query_scalar: float | None = None  # of gemma3; default head_dim


FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def family_shape(family: str, **changes: Any) -> Shape:
    """A shape with what the family is known for: wide heads, windows, bases."""
    own: dict[str, Any] = {
        "llama": {},
        "qwen2": {"theta": 1e6},
        "qwen3": {"head_dim": 32, "theta": 1e6},
        "gemma3": {
            "n_layers": 3,
            "head_dim": 32,
            "window": 16,
            "theta": 1e5,
            "rms_eps": 1e-6,
        },
    }[family]
    return Shape(**(own | {"family": family} | changes))


def tokenizer(vocab_size: int = 320, specials: tuple[str, ...] = SPECIALS) -> Tokenizer:
    """A byte-level BPE with the pre-tokenizer of SmolLM, the specials first."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([_CORPUS] * 4, trainer)
    return made


def weights(
    shape: Shape = Shape(), *, vocab: int = 320, seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """Random weights under their Hugging Face names, q and k rows half-split.

    Scaled so that logits have a standard deviation of about 2, attention is far from
    uniform and every norm differs from every other.
    """
    rng = np.random.default_rng(seed)

    def matrix(n_out: int, n_in: int, gain: float) -> NDArray[np.float32]:
        scale = gain / np.sqrt(n_in)
        return (rng.standard_normal((n_out, n_in)) * scale).astype(np.float32)

    is_gemma = shape.family == "gemma3"  # which stores what is added to 1

    def norm(size: int = shape.hidden, gain: float = 1.0) -> NDArray[np.float32]:
        values = gain * (1 + 0.3 * rng.standard_normal(size)) - is_gemma
        return values.astype(np.float32)

    q_rows = shape.n_heads * shape.head_dim
    kv_rows = shape.n_kv_heads * shape.head_dim
    made = {"model.embed_tokens.weight": matrix(vocab, shape.hidden, 2.0)}
    for i in range(shape.n_layers):
        at = f"model.layers.{i}"
        made |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": matrix(q_rows, shape.hidden, 1.3),
            f"{at}.self_attn.k_proj.weight": matrix(kv_rows, shape.hidden, 1.3),
            f"{at}.self_attn.v_proj.weight": matrix(kv_rows, shape.hidden, 1.0),
            f"{at}.self_attn.o_proj.weight": matrix(shape.hidden, q_rows, 1.0),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.mlp.gate_proj.weight": matrix(shape.ffn, shape.hidden, 1.0),
            f"{at}.mlp.up_proj.weight": matrix(shape.ffn, shape.hidden, 1.0),
            f"{at}.mlp.down_proj.weight": matrix(shape.hidden, shape.ffn, 1.0),
        }
        if shape.family == "qwen2":
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                bias = 0.5 * rng.standard_normal(rows).astype(np.float32)
                made[f"{at}.self_attn.{part}_proj.bias"] = bias
        if shape.family in ("qwen3", "gemma3"):
            for part in "qk":
                name = f"{at}.self_attn.{part}_norm.weight"
                made[name] = norm(shape.head_dim, 1.3)
        if is_gemma:
            # like the embedding, which is scaled by the root of the width
            gain = 0.5 * shape.hidden**0.5
            for part in ("post_attention", "post_feedforward"):
                made[f"{at}.{part}_layernorm.weight"] = norm(gain=gain)
            made[f"{at}.pre_feedforward_layernorm.weight"] = norm()
    made["model.norm.weight"] = norm()
    if not shape.is_tied:
        made["lm_head.weight"] = matrix(vocab, shape.hidden, 2.0)
    return made


def hf_config(
    shape: Shape = Shape(),
    *,
    vocab: int = 320,
    rope: str | Mapping[str, Any] = "default",
    is_old_rope: bool = False,
) -> dict[str, Any]:
    """config.json of a checkpoint, in the old (4.x) or new (5.x) RoPE style."""
    scaling = dict(ROPES[rope] if isinstance(rope, str) else rope)
    is_plain = scaling["rope_type"] == "default"
    family = shape.family
    config: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "vocab_size": vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    if family == "gemma3":
        config["hidden_activation"] = "gelu_pytorch_tanh"
        config["query_pre_attn_scalar"] = shape.query_scalar or shape.head_dim
        config["sliding_window"] = shape.window
        config["sliding_window_pattern"] = shape.period
    else:
        config["hidden_act"] = "silu"
    if family != "qwen2":
        config["attention_bias"] = False
    if family == "llama":
        config["mlp_bias"] = False
    elif family.startswith("qwen"):
        config["use_sliding_window"] = shape.window is not None
        config["sliding_window"] = shape.window
        config["max_window_layers"] = shape.first_windowed
    if is_old_rope:
        config["rope_theta"] = shape.theta
        config["rope_scaling"] = None if is_plain else scaling
        if family == "gemma3":
            config["rope_local_base_freq"] = shape.local_theta
    elif family == "gemma3":
        local = {"rope_type": "default", "rope_theta": shape.local_theta}
        config["rope_parameters"] = {
            "full_attention": {"rope_theta": shape.theta} | scaling,
            "sliding_attention": local,
        }
    else:
        config["rope_parameters"] = {"rope_theta": shape.theta} | scaling
    return config


def bfloat16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of x rounded to nearest even bfloat16."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], *, dtype: str = "F32"
) -> None:
    """One safetensors file in dtype F32, F16 or BF16."""
    if dtype != "BF16":
        kind = {"F32": np.float32, "F16": np.float16}[dtype]
        cast = {k: np.ascontiguousarray(v.astype(kind)) for k, v in tensors.items()}
        safetensors.numpy.save_file(cast, path, metadata={"format": "pt"})
        return
    header: dict[str, Any] = {}
    body = b""
    for name, value in tensors.items():
        raw = bfloat16(np.ascontiguousarray(value, dtype=np.float32)).tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(value.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def hf_checkpoint(
    directory: Path,
    shape: Shape = Shape(),
    *,
    rope: str | Mapping[str, Any] = "default",
    is_old_rope: bool = False,
    dtype: str = "F32",
    n_shards: int = 1,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    eos: int | list[int] = EOS,
    words: Tokenizer | None = None,
) -> Path:
    """A complete checkpoint directory: config, weights, tokenizer, chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    words = words or tokenizer()
    vocab = words.get_vocab_size()
    settings = hf_config(shape, vocab=vocab, rope=rope, is_old_rope=is_old_rope)
    settings |= config or {}

    def write(name: str, value: Any) -> None:
        (directory / name).write_text(json.dumps(value))

    write("config.json", settings)
    write("generation_config.json", {"eos_token_id": eos, "temperature": 0.6})
    write(
        "tokenizer_config.json",
        {
            "bos_token": SPECIALS[BOS],
            "eos_token": SPECIALS[EOS],
            "chat_template": CHAT_TEMPLATE,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    words.save(str(directory / "tokenizer.json"))
    tensors = weights(shape, vocab=vocab, seed=seed)
    if n_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors, dtype=dtype)
        return directory
    names = list(tensors)
    where = {}
    for k in range(n_shards):
        file = f"model-{k + 1:05d}-of-{n_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[k::n_shards]}
        write_safetensors(directory / file, part, dtype=dtype)
        where |= dict.fromkeys(part, file)
    write("model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return directory


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_NAMES = _GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(hf: str, family: str = "llama") -> str:
    """GGUF name of a Hugging Face tensor, with ".weight" or ".bias"."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if hf in plain:
        return plain[hf]
    _, _, layer, rest = hf.split(".", 3)
    names = _GEMMA3_NAMES if family == "gemma3" else _GGUF_NAMES
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{names[part]}.{kind}"


def neutral_name(hf: str, family: str = "llama") -> str:
    """Name of a Hugging Face tensor in a weight set."""
    return gguf_name(hf, family).removesuffix(".weight")


def interleave(x: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """Rows of q or k from half-split pairs (i, i + d/2) to neighbours (2i, 2i + 1)."""
    rows = x.reshape(n_heads, 2, -1, *x.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(x.shape))


def gguf_checkpoint(
    path: Path,
    shape: Shape = Shape(),
    *,
    kind: str = "Q4_1",
    embedding: str | None = "Q8_0",
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    rope_freqs: NDArray[np.float32] | None = None,
    n_shards: int = 1,
) -> Path:
    """The same weights as `hf_checkpoint` as GGUF, matrices of the given ggml type.

    K-quants need rows of multiples of 256.
    With several shards the files are path's stem plus -00001-of-0000N.gguf, and the
    first of them is returned.
    """
    words = tokenizer()
    tensors = weights(shape, vocab=words.get_vocab_size(), seed=seed)
    blocks: list[tuple[str, NDArray[Any], gguf.GGMLQuantizationType]] = []
    if rope_freqs is not None:
        f32 = gguf.GGMLQuantizationType.F32
        blocks.append(("rope_freqs.weight", rope_freqs.astype(np.float32), f32))
    for hf, value in tensors.items():
        if shape.family == "llama" and "q_proj" in hf:
            value = interleave(value, shape.n_heads)
        if shape.family == "llama" and "k_proj" in hf:
            value = interleave(value, shape.n_kv_heads)
        if shape.family == "gemma3" and "norm" in hf:
            value = value + np.float32(1)
        is_embedding = hf in ("model.embed_tokens.weight", "lm_head.weight")
        wanted = embedding if is_embedding and embedding else kind
        type_ = gguf.GGMLQuantizationType["F32" if value.ndim == 1 else wanted]
        raw = ggml.quantize(value, type_)
        blocks.append((gguf_name(hf, shape.family), raw, type_))
    paths = [path]
    if n_shards > 1:
        stem = path.name.removesuffix(".gguf")
        paths = [
            path.with_name(f"{stem}-{k + 1:05d}-of-{n_shards:05d}.gguf")
            for k in range(n_shards)
        ]
    for k, file in enumerate(paths):
        writer = gguf.GGUFWriter(file, shape.family)
        if n_shards > 1:
            writer.add_uint16("split.no", k)
            writer.add_uint16("split.count", n_shards)
            writer.add_int32("split.tensors.count", len(blocks))
        if k == 0:
            _add_metadata(writer, shape, words, extra or {})
        for name, raw, type_ in blocks[k::n_shards]:
            writer.add_tensor(name, raw, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def _add_metadata(
    writer: gguf.GGUFWriter, shape: Shape, words: Tokenizer, extra: Mapping[str, Any]
) -> None:
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.max_position)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    if shape.family == "gemma3":
        writer.add_sliding_window(shape.window)
        writer.add_sliding_window_pattern(shape.period)
        writer.add_float32("gemma3.rope.freq_base_swa", shape.local_theta)
    writer.add_vocab_size(words.get_vocab_size())
    size = words.get_vocab_size()
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([words.id_to_token(i) for i in range(size)])
    writer.add_token_types(
        [control if words.id_to_token(i) in SPECIALS else normal for i in range(size)]
    )
    merges = json.loads(words.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in extra.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](key, value)
