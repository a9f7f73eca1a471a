"""Rotary frequencies from config.json or GGUF metadata, every scaling exact or refused.

The formulas are those of transformers' modeling_rope_utils and of ggml's rope; both
agree on "default", "linear", "llama3" and "yarn" and these are the kinds known here.
Computed in double.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError, UnsupportedError
from edgespec_export.weights import Rope

_YARN = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {"factor", "original_max_position_embeddings"} | _YARN,
}
_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}
_DEFAULT_THETA = 10000.0
_MAX_DIM = 1 << 16
_LEAST, _MOST = 1e-30, 1e30  # of any number here: float32 of a GGUF holds them


def base_frequencies(theta: float, dim: int) -> NDArray[np.float64]:
    """Unscaled frequencies, (dim / 2,)."""
    return theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def from_hf(config: Mapping[str, Any], head_dim: int, where: str) -> Rope:
    """Rope of a config.json, in the 5.x (rope_parameters) or 4.x (rope_scaling) style.

    Raises UnsupportedError for a kind or key whose effect is not known here and
    FormatError for missing or impossible values; `where` names the file in
    messages.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and dict(new) != dict(old):
        raise FormatError(
            f"{where}: rope_parameters and rope_scaling disagree: {new} and {old}"
        )
    given = new or old or {}
    if not isinstance(given, Mapping):
        raise FormatError(f"{where}: RoPE parameters must be an object, got {given!r}")
    scaling = dict(given)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedError(
            f"{where}: RoPE parameters that differ by layer are not supported"
        )
    if not isinstance(kind, str) or kind not in _KEYS:
        known = ", ".join(_KEYS)
        raise UnsupportedError(
            f"{where}: RoPE scaling {kind!r} is not supported; known: {known}"
        )
    unknown = sorted(set(scaling) - _KEYS[kind] - _COMMON)
    if unknown:
        raise UnsupportedError(
            f"{where}: unknown RoPE parameters for {kind!r}: {unknown}"
        )
    for part in (scaling, config):
        if part.get("partial_rotary_factor") not in (None, 1, 1.0):
            value = part["partial_rotary_factor"]
            raise UnsupportedError(
                f"{where}: partial_rotary_factor {value}: only 1 is supported"
            )
    theta = scaling.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA
    max_position = config.get("max_position_embeddings")
    if kind in ("llama3", "yarn"):
        # transformers lets the outer key win and falls back to the context length.
        outer = config.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = (
            outer or scaling.get("original_max_position_embeddings") or max_position
        )
        if scaling.get("factor") is None and kind == "yarn" and max_position:
            scaling["factor"] = (
                max_position / scaling["original_max_position_embeddings"]
            )
    theta = _positive(theta, f"{where}: rope_theta")
    return _build(theta, head_dim, kind, scaling, where)


def by_layer_type(
    config: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json as the whole layers and as the windowed ones see it.

    For families whose windowed layers rotate by a base of their own: the 5.x style
    keys rope_parameters by the layer's type, 4.x has rope_local_base_freq and scales
    the whole layers only.
    """
    given = config.get("rope_parameters") or {}
    unknown = sorted(set(given) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(
            f"{where}: rope_parameters: expected full_attention and sliding_attention, "
            f"got {unknown}"
        )
    for key, value in given.items():
        if value is not None and not isinstance(value, Mapping):
            raise FormatError(
                f"{where}: rope_parameters: {key}: expected an object, got {value!r}"
            )
    whole = dict(config) | {"rope_parameters": given.get("full_attention")}
    windowed = dict(config) | {
        "rope_parameters": given.get("sliding_attention"),
        "rope_scaling": None,
        "rope_theta": config.get("rope_local_base_freq"),
    }
    return whole, windowed


def _positive(value: Any, what: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _LEAST < value < _MOST:
        raise FormatError(f"{what}: expected a positive number, got {value!r}")
    return float(value)


def _check_base(theta: float, dim: int, where: str) -> None:
    if dim % 2 or dim > _MAX_DIM or theta <= 1:
        raise FormatError(
            f"{where}: RoPE needs an even dimension of at most {_MAX_DIM} and a base "
            f"above 1, got {dim} and {theta:g}"
        )


def _build(
    theta: float, dim: int, kind: str, scaling: Mapping[str, Any], where: str
) -> Rope:
    def number(key: str) -> float:
        return _positive(scaling.get(key), f"{where}: RoPE {kind!r}: {key}")

    _check_base(theta, dim, where)
    inv_freq = base_frequencies(theta, dim)
    attention_factor = 1.0
    if kind == "linear":
        inv_freq = inv_freq / number("factor")
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, number)
    elif kind == "yarn":
        inv_freq = _yarn(inv_freq, theta, number, scaling, where)
        attention_factor = _yarn_attention(number("factor"), scaling)
    config = {"rope_type": kind, "rope_theta": theta} | {
        key: scaling[key] for key in _KEYS[kind] if scaling.get(key) is not None
    }
    return Rope(theta, dim, kind, inv_freq, attention_factor, config)


def _llama3(
    inv_freq: NDArray[np.float64], number: Callable[[str], float]
) -> NDArray[np.float64]:
    low, high = number("low_freq_factor"), number("high_freq_factor")
    turns = number("original_max_position_embeddings") * inv_freq / (2 * math.pi)
    # Fewer than `low` turns in the original context: interpolate; more than
    # `high`: keep.
    keep = (
        np.clip((turns - low) / (high - low), 0, 1)
        if high != low
        else (turns >= low) * 1.0
    )
    return (1 - keep) * inv_freq / number("factor") + keep * inv_freq


def _yarn(
    inv_freq: NDArray[np.float64],
    theta: float,
    number: Callable[[str], float],
    scaling: Mapping[str, Any],
    where: str,
) -> NDArray[np.float64]:
    if scaling.get("truncate") not in (None, True):
        raise UnsupportedError(
            f"{where}: RoPE 'yarn' with truncate false is not supported"
        )
    dim = 2 * len(inv_freq)
    context = number("original_max_position_embeddings")
    if not context.is_integer():
        raise FormatError(
            f"{where}: RoPE 'yarn': original_max_position_embeddings: expected a whole "
            f"number, got {context}"
        )

    def dimension(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    fast, slow = (
        _positive(scaling.get(key) or default, f"{where}: RoPE 'yarn': {key}")
        for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    low = max(math.floor(dimension(fast)), 0)
    high = min(math.ceil(dimension(slow)), dim - 1)
    ramp = np.clip(
        (np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1
    )
    return inv_freq / number("factor") * ramp + inv_freq * (1 - ramp)


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return _positive(given, "RoPE 'yarn': attention_factor")
    up, down = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if up and down:
        up = _positive(up, "RoPE 'yarn': mscale")
        down = _positive(down, "RoPE 'yarn': mscale_all_dim")
        return _mscale(factor, up) / _mscale(factor, down)
    return _mscale(factor)


def from_gguf(
    metadata: Mapping[str, Any],
    arch: str,
    head_dim: int,
    max_position: int,
    freq_factors: NDArray[np.float32] | None,
    where: str,
) -> Rope:
    """Rope of GGUF metadata as llama.cpp reads it; factors are rope_freqs.weight."""

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.rope.{key}", default)

    for key, neutral in (
        ("scaling.yarn_ext_factor", (-1, 1)),
        ("scaling.yarn_attn_factor", (-1, 1)),
        ("scaling.yarn_log_multiplier", (0,)),
        ("scaling.alpha", (0,)),
    ):
        if get(key, neutral[0]) not in neutral:
            raise UnsupportedError(
                f"{where}: {arch}.rope.{key} = {get(key)} is not supported"
            )

    def number(key: str, default: float) -> float:
        return _positive(get(key, default) or default, f"{where}: {arch}.rope.{key}")

    theta = number("freq_base", _DEFAULT_THETA)
    factor = number("scaling.factor", number("scale_linear", 1))
    kind = get("scaling.type", "linear")
    attention = number("scaling.attn_factor", 1)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{where}: RoPE scaling {kind!r} is not supported; known: none, linear, "
            "yarn"
        )
    is_scaled = kind == "yarn" or (kind == "linear" and factor != 1)
    if freq_factors is not None:
        if is_scaled:
            raise UnsupportedError(
                f"{where}: rope_freqs together with RoPE scaling {kind!r}"
            )
        _check_base(theta, head_dim, where)
        if not ((freq_factors > _LEAST) & (freq_factors < _MOST)).all():
            raise FormatError(
                f"{where}: tensor 'rope_freqs': expected positive numbers"
            )
        if freq_factors.shape != (head_dim // 2,):
            raise FormatError(
                f"{where}: tensor 'rope_freqs': expected shape {(head_dim // 2,)}, got "
                f"{freq_factors.shape}"
            )
        inv_freq = base_frequencies(theta, head_dim) / freq_factors.astype(np.float64)
        config = {"rope_type": "llama3", "rope_theta": theta}
        return Rope(theta, head_dim, "llama3", inv_freq, attention, config)
    if not is_scaled:
        plain = _build(theta, head_dim, "default", {}, where)
        return Rope(theta, head_dim, "default", plain.inv_freq, attention, plain.config)
    scaling: dict[str, Any] = {"factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": get(
                "scaling.original_context_length", max_position
            ),
            "beta_fast": get("scaling.yarn_beta_fast"),
            "beta_slow": get("scaling.yarn_beta_slow"),
            "attention_factor": attention * _mscale(factor) if attention != 1 else None,
        }
        return _build(theta, head_dim, "yarn", scaling, where)
    made = _build(theta, head_dim, "linear", scaling, where)
    return Rope(theta, head_dim, "linear", made.inv_freq, attention, made.config)


def local_from_gguf(
    metadata: Mapping[str, Any], arch: str, head_dim: int, where: str
) -> Rope:
    """Rope of windowed layers with a base of their own; llama.cpp never scales it."""
    key = f"{arch}.rope.freq_base_swa"
    theta = _positive(metadata.get(key, _DEFAULT_THETA), f"{where}: {key}")
    return _build(theta, head_dim, "default", {}, where)


def gguf_scaling(rope: Rope) -> dict[str, Any]:
    """Metadata under "ARCH.rope." that makes llama.cpp compute this rope."""
    keys: dict[str, Any] = {"dimension_count": rope.dim, "freq_base": rope.theta}
    if rope.kind in ("linear", "yarn"):
        keys["scaling.type"] = rope.kind
        keys["scaling.factor"] = float(rope.config["factor"])
    expected = 1.0
    if rope.kind == "yarn":
        expected = _mscale(float(rope.config["factor"]))
        original = rope.config["original_max_position_embeddings"]
        keys["scaling.original_context_length"] = int(original)
        for ours, theirs in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if rope.config.get(ours) is not None:
                keys[f"scaling.{theirs}"] = float(rope.config[ours])
    if rope.attention_factor != expected:
        keys["scaling.attn_factor"] = rope.attention_factor / expected
    return keys


def freq_factors(rope: Rope) -> NDArray[np.float32] | None:
    """Content of rope_freqs.weight, (dim / 2,), for the kind that needs it."""
    if rope.kind != "llama3":
        return None
    return (base_frequencies(rope.theta, rope.dim) / rope.inv_freq).astype(np.float32)
