#!/usr/bin/env bash
# schedulefree 1.4.1: optimizer.eval() followed by optimizer.train() does not give the same bits back.
#
# Guess: the two calls undo each other, so a validation in between changes nothing. Seen: each is an
# interpolation in float32, and 0.5 % of the weights differ in their last bits after the pair.
#
# Why a training loop cares: a run that validates, or saves in the evaluated form, more often than another one
# ends elsewhere. A save must not switch, and a resumed run must make the same switches as the one that was not
# stopped.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 schedulefree==1.4.1 numpy
env/bin/python -W ignore - <<'END'
from importlib.metadata import version

import schedulefree
import torch

torch.manual_seed(0)
model = torch.nn.Linear(20, 20)
optimizer = schedulefree.SGDScheduleFree(model.parameters(), lr=0.1, momentum=0.9)
optimizer.train()
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
before = model.weight.detach().clone()
optimizer.eval()
optimizer.train()
changed = int((model.weight != before).sum())
assert 0 < changed < 400, changed
assert torch.allclose(model.weight, before)
print(f"schedulefree {version('schedulefree')}: eval() and train() change the bits of {changed} of {before.numel()} weights")
END
