"""Which hidden states of the target an EAGLE-3 head was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import FormatError, UnsupportedError, UsageError

CONVENTIONS = ("input", "output")
_KEY = "eagle_aux_hidden_state_layer_ids"


def target_taps(
    settings: Mapping[str, Any], n_layers: int, convention: str | None, where: str
) -> tuple[int, ...]:
    """Indices into hidden_states of the layer ids a config.json states.

    An id means the input of that layer, which is the index itself ("input"), or its
    output, one more ("output"). Without a word from the user or the file itself
    (tap_convention), ids that begin with 2 are inputs and ids that begin with 1 are
    outputs, as both are written for the same layers. A file without ids means the
    inputs of layers 2, n / 2 and n - 3.

    Raises UnsupportedError when the convention is not clear, FormatError for ids the
    target does not have.
    """
    if convention not in (None, *CONVENTIONS):
        raise UsageError(
            f"--tap-convention {convention}: expected {' or '.join(CONVENTIONS)}"
        )
    usual = (2, n_layers // 2, n_layers - 3)
    given = settings.get(_KEY)
    if given is None:
        if convention == "output":
            raise UsageError(
                f"--tap-convention: {where} states no {_KEY}; the usual inputs of "
                f"layers {list(usual)} are meant"
            )
        return _checked(usual, n_layers, f"{where}: no {_KEY}, so the usual ones")
    is_list = isinstance(given, list) and len(given) > 0
    if not is_list or not all(type(i) is int for i in given):
        raise FormatError(f"{where}: {_KEY}: expected integers, got {given!r:.60}")
    return shifted(
        tuple(given), n_layers, convention or settings.get("tap_convention"), where
    )


def shifted(
    ids: tuple[int, ...], n_layers: int, convention: str | None, where: str
) -> tuple[int, ...]:
    """Ids under a convention as indices; without one, by the first id."""
    if convention is None:
        if ids[0] not in (1, 2):
            raise UnsupportedError(
                f"{where}: layer ids {list(ids)}: inputs or outputs of these layers? "
                "Say --tap-convention input or --tap-convention output"
            )
        convention = "output" if ids[0] == 1 else "input"
    if convention not in CONVENTIONS:
        raise FormatError(
            f"{where}: tap_convention: expected {' or '.join(CONVENTIONS)}, got "
            f"{convention!r:.40}"
        )
    taps = tuple(i + (convention == "output") for i in ids)
    return _checked(taps, n_layers, f"{where}: layer ids {list(ids)}")


def _checked(taps: tuple[int, ...], n_layers: int, what: str) -> tuple[int, ...]:
    """Past the last layer the hidden state is normed, which no head was trained on."""
    is_inside = all(0 <= tap < n_layers for tap in taps)
    if not is_inside or len(set(taps)) != len(taps):
        raise FormatError(
            f"{what}: hidden states {list(taps)}, expected distinct ones from 0 to "
            f"{n_layers - 1}: the target has {n_layers} layers"
        )
    return taps
