"""A draft head in neutral form: what every reader yields and every writer takes.

Tensors have llama.cpp's names without ".weight"; rows of q and k are half-split:

- EAGLE: fc (hidden, inputs), fc.bias, blk.0.attn_norm (of the embedding) and
  blk.0.attn_norm_2 (of the feature), both EAGLE-3's alone, blk.0.attn_q|k|v|output,
  blk.0.attn_q_norm|k_norm, blk.0.ffn_norm|gate|up|down, output_norm, output
  (draft_vocab, hidden), token_embd (vocab, hidden), enc.output_norm (all taps
  together) or fc_norm.I (tap I);
- Medusa: medusa.H.L.weight and medusa.H.L.bias of block L of head H, and the
  projections medusa.H.output, or output for all of them.

What is absent is the target's: token_embd, and output, of which then the rows d2t or
the first draft_vocab ones count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import FormatError
from edgespec_export.quantize import FLOATS
from edgespec_export.weights import ModelConfig, Origin, Rope, Tensor, WeightSet

Kind = Literal["eagle3", "eagle", "medusa"]  # "eagle": versions 1 and 2
_SAME_FLOAT, _SAME_QUANTISED = 0.01, 0.1  # relative RMS error of one weight twice


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head and the sizes of the target it belongs to.

    Rope and the sizes of attention are those of EAGLE heads; Medusa has none.
    """

    kind: Kind
    hidden: int
    target_hidden: int
    target_layers: int
    vocab: int  # the target's
    draft_vocab: int
    taps: tuple[int, ...]  # hidden_states indices; n_layers = after the final norm
    tensors: Mapping[str, Tensor]
    origin: Origin
    d2t: NDArray[np.int64] | None = None  # (draft_vocab,) ascending ids of the target
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    eps: float = 0.0
    rope: Rope | None = None
    max_position: int = 0
    window: int | None = None  # a row at p sees positions (p - window, p]
    norm_before_residual: bool = False  # the normalised feature is what attn adds to
    norm_output: bool = False  # output_norm's result is fed back, not its input
    heads: int = 0  # of Medusa
    layers: int = 0  # residual blocks of each of them
    name: str | None = None

    @property
    def norm_before_fc(self) -> bool:
        """One norm over all taps in front of fc."""
        return "enc.output_norm" in self.tensors

    @property
    def fc_norm(self) -> bool:
        """A norm for each tap in front of fc."""
        return "fc_norm.0" in self.tensors

    @property
    def own_output(self) -> bool:
        """Whether the head brings its projection; else it uses rows of the target's."""
        return bool(outputs(self))


def gguf_name(name: str) -> str:
    """Name of a head's tensor in a GGUF file."""
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def outputs(head: Head) -> list[str]:
    """Names of the projections the head brings."""
    names = ["output", *(f"medusa.{h}.output" for h in range(head.heads))]
    return [name for name in names if name in head.tensors]


def shapes(head: Head) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor a head of these sizes may have."""
    hidden = head.hidden
    projection = (head.draft_vocab, hidden)
    if head.kind == "medusa":
        found: dict[str, tuple[int, ...]] = {"output": projection}
        for h in range(head.heads):
            for layer in range(head.layers):
                found[f"medusa.{h}.{layer}.weight"] = (hidden, hidden)
                found[f"medusa.{h}.{layer}.bias"] = (hidden,)
            found[f"medusa.{h}.output"] = projection
        return found
    is_third = head.kind == "eagle3"
    features = len(head.taps) * head.target_hidden if is_third else 2 * hidden
    inputs = 2 * hidden if is_third else hidden
    q, kv = head.n_heads * head.head_dim, head.n_kv_heads * head.head_dim
    found = {
        "token_embd": (head.vocab, hidden),
        "fc": (hidden, features),
        "blk.0.attn_q": (q, inputs),
        "blk.0.attn_k": (kv, inputs),
        "blk.0.attn_v": (kv, inputs),
        "blk.0.attn_q_norm": (head.head_dim,),
        "blk.0.attn_k_norm": (head.head_dim,),
        "blk.0.attn_output": (hidden, q),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (head.ffn, hidden),
        "blk.0.ffn_up": (head.ffn, hidden),
        "blk.0.ffn_down": (hidden, head.ffn),
        "output": projection,
    }
    if not is_third:
        return found | {"fc.bias": (hidden,)}
    found |= {
        "blk.0.attn_norm": (hidden,),
        "blk.0.attn_norm_2": (hidden,),
        "output_norm": (hidden,),
        "enc.output_norm": (features,),
    }
    return found | {
        f"fc_norm.{i}": (head.target_hidden,) for i in range(len(head.taps))
    }


def optional(head: Head) -> set[str]:
    """Names of the tensors a head may lack."""
    names = {"token_embd", "output", "fc.bias", "blk.0.attn_q_norm"}
    names |= {"blk.0.attn_k_norm", "enc.output_norm"}
    names |= {f"fc_norm.{i}" for i in range(len(head.taps))}
    return names | {f"medusa.{h}.output" for h in range(head.heads)}


def absolute_ids(
    d2t: NDArray[np.integer], member: NDArray[np.bool_] | None, vocab: int, where: str
) -> NDArray[np.int64]:
    """Ids of the target for each id of the draft, ascending.

    Files hold them as they are or as offsets to add to the draft's own ids. Where the
    membership of the target's tokens (t2d) is there, it decides and must agree. Without
    it, what rises from entry to entry are ids: offsets rise only where tokens are left
    out.

    Raises FormatError when neither reading gives distinct ids below `vocab`.
    """
    given = d2t.astype(np.int64)
    shifted = given + np.arange(len(given))

    def fits(ids: NDArray[np.int64]) -> bool:
        is_rising = bool((np.diff(ids) > 0).all())
        if not is_rising or ids[0] < 0 or ids[-1] >= vocab:
            return False
        return member is None or np.array_equal(ids, np.flatnonzero(member))

    if member is not None and len(member) != vocab:
        raise FormatError(
            f"{where}: t2d has {len(member)} entries, the target {vocab} tokens"
        )
    if member is not None and int(member.sum()) != len(given):
        raise FormatError(
            f"{where}: t2d marks {int(member.sum())} tokens, d2t maps {len(given)}"
        )
    readings = [ids for ids in (given, shifted) if fits(ids)]
    if not readings:
        against = "" if member is None else " that t2d marks"
        raise FormatError(
            f"{where}: d2t: neither as ids nor as offsets {len(given)} rising ids "
            f"below {vocab}{against}; got {given[:3].tolist()} to "
            f"{given[-3:].tolist()}"
        )
    return readings[0]


def share_with_target(head: Head, target: WeightSet) -> Head:
    """The head without what the target has too: embeddings, and whole projections.

    A checkpoint's copy counts as the target's own where it differs by no more than
    rounding: of quantised targets, by what quantisation loses. Rows picked by d2t are
    a matrix of their own, several times smaller than the target's: a head gets them
    that lacks a projection.
    """
    tensors = dict(head.tensors)
    embedding = target.tensors["token_embd"]
    projection = target.tensors.get("output", embedding)
    if "token_embd" in tensors and is_same(tensors["token_embd"], embedding):
        del tensors["token_embd"]
    if head.d2t is not None and not head.own_output:
        tensors["output"] = replace(pick_rows(projection, head.d2t), name="output")
    elif head.d2t is None and head.hidden == head.target_hidden:
        names = outputs(head)
        if names and all(is_same(tensors[name], projection) for name in names):
            for name in names:
                del tensors[name]
    return replace(head, tensors=tensors)


def is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether `ours` is the first rows of `theirs` but for rounding.

    Of quantised ones, but for what quantisation loses.
    """
    rows, width = ours.shape
    if width != theirs.shape[1] or rows > theirs.shape[0]:
        return False
    a, b = ours.load_f32(), theirs.load_f32()[:rows]
    is_float = theirs.kind in FLOATS and ours.kind in FLOATS
    limit = _SAME_FLOAT if is_float else _SAME_QUANTISED
    return float(np.linalg.norm(a - b)) <= limit * float(np.linalg.norm(b))


def pick_rows(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """A matrix of some rows of another."""
    return replace(
        tensor,
        shape=(len(rows), *tensor.shape[1:]),
        load_raw=partial(_pick, tensor.load_raw, rows),
        load_f32=partial(_pick, tensor.load_f32, rows),
    )


def _pick(load: Callable[[], NDArray[Any]], rows: NDArray[np.int64]) -> NDArray[Any]:
    return np.ascontiguousarray(load()[rows])


def check_target(head: Head, target: ModelConfig, where: str) -> None:
    """FormatError naming both sides when a head is not made for a target."""

    def differ(what: str, ours: int, theirs: int) -> FormatError:
        return FormatError(
            f"{where}: the head is made for {what} {ours}, the target has {theirs}"
        )

    if head.target_hidden != target.hidden:
        raise differ("a target of hidden size", head.target_hidden, target.hidden)
    if head.vocab != target.vocab:
        raise differ("a vocabulary of", head.vocab, target.vocab)
    if head.target_layers != target.n_layers:
        raise differ("layers:", head.target_layers, target.n_layers)
    if head.hidden != target.hidden and "token_embd" not in head.tensors:
        raise FormatError(
            f"{where}: the head has no embeddings and is {head.hidden} wide, those of "
            f"the target are {target.hidden} wide"
        )
    if head.hidden != target.hidden and not head.own_output:
        raise FormatError(
            f"{where}: the head has no lm_head and is {head.hidden} wide, that of the "
            f"target is {target.hidden} wide"
        )
    for tap in head.taps:
        if not 0 <= tap <= target.n_layers or head.taps.count(tap) > 1:
            raise FormatError(
                f"{where}: the head taps hidden states {list(head.taps)}: expected "
                f"distinct ones of the target's {target.n_layers} layers"
            )
