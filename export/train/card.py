"""The README.md beside a trained head: its licence, data, recipe and acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TITLES = {
    "eagle3": "EAGLE-3 head",
    "medusa": "Medusa heads",
    "pruned": "Draft model of layers {layers}",
}


def text(facts: Mapping[str, Any]) -> str:
    """A model card in the hub's form, its front matter first.

    Args:
        facts: what training.json holds; the last measure is the kept head's.
    """
    settings, target, data = facts["settings"], facts["target"], facts["data"]
    layers = ", ".join(map(str, settings["layers"]))
    title = _TITLES[settings["head"]].format(layers=layers)
    lines = ["---"]
    if target["licence"] is not None:
        lines.append(f"license: {target['licence']}")
    lines += ["tags: [speculative-decoding]", "---", ""]
    lines += [
        f"# {title} for {target['name']}",
        "",
        f"Drafts for these weights, sha256 `{target['sha256']}`, and shares what it "
        "can with them; its licence is theirs.",
        "",
        "## Data",
        "",
        f"{settings['data_tokens']:,} tokens in {data['sequences']:,} conversations, "
        f"replies written by the target itself (up to {data['reply_tokens']} tokens, "
        f"context {data['context']}, seed {data['seed']}), by kind: "
        + ", ".join(f"{k} {n:,}" for k, n in data["tokens_by_kind"].items())
        + f". {data['held_out']} conversations were held out by prompt.",
        "",
        "## Recipe",
        "",
        f"`edgespec train --head {_option(settings)} --minutes {settings['minutes']:g} "
        f"--draft-vocab {settings['draft_vocab']} --seed {settings['seed']}`: "
        f"{facts['tokens_trained_on']:,} tokens were trained on, sequences of "
        f"{settings['width']} tokens, {settings['rows']} at a time, "
        f"{settings['depths']} depths measured.",
        "",
        "## Acceptance at temperature 0",
        "",
        "Of drafts whose earlier tokens were right, the share that is right, and the "
        f"tokens of a round with a chain of {settings['depths']}:",
        "",
        *_table(facts["history"][-1], settings["depths"]),
    ]
    return "\n".join(lines) + "\n"


def _option(settings: Mapping[str, Any]) -> str:
    layers = ",".join(map(str, settings["layers"]))
    return f"{settings['head']}:{layers}" if layers else str(settings["head"])


def _table(measure: Mapping[str, Any], depths: int) -> list[str]:
    numbers = [str(depth + 1) for depth in range(depths)]
    lines = [
        f"| text | {' | '.join(numbers)} | tokens per round |",
        f"| --- |{' --- |' * (depths + 1)}",
    ]
    for name, shares in measure["by_depth"].items():
        cells = " | ".join(f"{share:.3f}" for share in shares)
        lines.append(f"| {name} | {cells} | {measure['tokens'][name]:.2f} |")
    return lines
