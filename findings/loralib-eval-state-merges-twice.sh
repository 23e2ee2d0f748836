#!/usr/bin/env bash
# loralib 0.1.2: a state_dict that is taken in eval mode and loaded into a fresh model counts the adapter twice.
#
# Guess: a state_dict is the same in both modes. Seen: eval() adds the adapter to the frozen weight in place,
# and the state has no word of it. A fresh model is in train mode, so its eval() adds the adapter again. Loaded
# into a model that is in eval mode already, the same state is right.
#
# Why a training loop cares: loops save after a validation, that is in eval mode, and load before training. The
# weights must be taken and put in place while the modules are in train mode, and modes must be changed by
# calling train(), not by writing module.training.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 loralib==0.1.2 numpy
env/bin/python -W ignore - <<'END'
from importlib.metadata import version

import loralib
import torch


def made():
    torch.manual_seed(0)
    return loralib.Linear(8, 8, r=2)


model, inputs = made(), torch.linspace(-1, 1, 8)
torch.nn.init.ones_(model.lora_B)
model.eval()
expected = model(inputs)
fresh = made()
fresh.load_state_dict(model.state_dict())
fresh.eval()
there = made()
there.eval()  # it returns None
there.load_state_dict(model.state_dict())
off, right = ((each(inputs) - expected).abs().max().item() for each in (fresh, there))
assert off > 0.1 and right == 0, (off, right)
print(f"loralib {version('loralib')}: loaded in train mode, then eval(): off by {off:.3f}; loaded in eval mode: off by {right:.3f}")
END
