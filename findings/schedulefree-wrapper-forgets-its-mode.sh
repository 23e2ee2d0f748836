#!/usr/bin/env bash
# schedulefree 1.4.1: the mode of a ScheduleFreeWrapper is in no state, so a state that was saved in train mode loses it.
#
# Guess: state_dict holds whether the weights are in their training or their evaluation form, as it does for
# AdamWScheduleFree. Seen: the wrapper returns the state of the optimizer within. A new wrapper is in eval mode, so
# after a load of weights in their training form, train() moves them again.
#
# Why a training loop cares: a checkpoint of the middle of an epoch is of the training form. Resumed as the package
# says, with train(), the run goes on from other weights. A loop has to save the mode, and to put it back.
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


def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, schedulefree.ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.1), momentum=0.9)


model, optimizer = made()
optimizer.train()
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
resumed, other = made()
resumed.load_state_dict(model.state_dict())
other.load_state_dict(optimizer.state_dict())
assert optimizer.train_mode
assert not other.train_mode
assert torch.equal(resumed.weight, model.weight)
other.train()
off = (resumed.weight - model.weight).abs().max().item()
assert off > 1e-3, off
print(f"schedulefree {version('schedulefree')}: a state of train mode, loaded, then train(): weights are off by {off:.4f}")
END
