"""What moves the weights: Muon where they are matrices, AdamW elsewhere."""

from __future__ import annotations

import torch

_VOCABULARY = "lm_head"  # its rows are tokens, most of them rarely seen
_SMALL = 0.06  # AdamW's rate beside Muon's
_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
# Of Muon, for a training of 18 minutes. Layers of the target have a long way to go; the
# others get better above 0.012 only as the rate falls.
_RATES = {"eagle3": 0.012, "medusa": 0.012, "pruned": 0.045}
_MOST = 0.05


def learning_rate(kind: str, minutes: float) -> float:
    """The highest of a training, lower for longer ones (by the cube root).

    Args:
        kind: eagle3, medusa or pruned.
    """
    return min(_MOST, float(_RATES[kind] * (18 / minutes) ** (1 / 3)))


def optimizers(module: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for a module's inner matrices, AdamW for the rest.

    After as many tokens EAGLE-3 accepts as much as AdamW alone needs twice as many for.

    Args:
        rate: of Muon, in orthogonal matrices per step.
    """
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters():
        is_inner = parameter.ndim == 2 and not name.startswith(_VOCABULARY)
        (matrices if is_inner else others).append(parameter)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, momentum=_MOMENTUM)
        found.append(muon)
    if others:
        adam = torch.optim.AdamW(
            others, lr=rate * _SMALL, betas=_BETAS, weight_decay=0.0
        )
        found.append(adam)
    return found
