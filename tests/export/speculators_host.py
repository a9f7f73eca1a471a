"""A user of the speculators library: loads heads as they are served and trained on.

Run as: python speculators_host.py DIRECTORY...; each has a head and inputs.npz, with
"tokens" (n,) and "taps" (n, taps * hidden). Writes outputs.npz there, with "logits"
(DEPTHS, n, draft tokens), and the head as the library saves it to saved/.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

DEPTHS = 3


def run(directory):
    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(directory, config=config).eval().float()
    model.save_pretrained(directory / "saved")
    given = np.load(directory / "inputs.npz")
    logits = []
    model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    tokens = torch.from_numpy(given["tokens"])[None]
    taps = torch.from_numpy(given["taps"])[None]
    with torch.no_grad():
        model(taps, tokens, torch.zeros_like(tokens), ttt_steps=DEPTHS)
    np.savez(
        directory / "outputs.npz",
        logits=torch.stack(logits[:DEPTHS]).numpy(),
        layers=np.array(config.eagle_aux_hidden_state_layer_ids),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        run(Path(name))
    assert not any(name.startswith("edgespec") for name in sys.modules)
