#!/usr/bin/env bash
# pytorch_warmup 0.2.0 with torch 2.13.0: a warmup that is made after the optimizer's state was loaded lowers the
# loaded rate once more.
#
# Guess: making LinearWarmup(optimizer, 10) changes the rate only at the begin of a run; after load_state_dict of the
# optimizer and of the warmup, the next step has the saved rate. Seen: the constructor multiplies the rate that it
# finds by the factor of step 0, and the warmup's load_state_dict does not put the rate back. The first step after a
# resume has a tenth of the rate, later ones the right one.
#
# Why a training loop cares: the order in which a script makes objects and loads states decides about one step, so
# that a resumed run differs from an uninterrupted one, silently. Make the warmup first, then load the optimizer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 pytorch-warmup==0.2.0 numpy
env/bin/python -W ignore - <<'END'
import copy
from importlib.metadata import version

import pytorch_warmup
import torch


def rates(state=None, warmup_first=True):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if state and not warmup_first:
        optimizer.load_state_dict(state[0])
    warmup = pytorch_warmup.LinearWarmup(optimizer, 10)
    if state and warmup_first:
        optimizer.load_state_dict(state[0])
    if state:
        warmup.load_state_dict(state[1])
    seen, saved = [], None
    for step in range(3 if state else 6):
        if step == 3:
            saved = copy.deepcopy((optimizer.state_dict(), warmup.state_dict()))
        seen.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        with warmup.dampening():
            pass
    return seen, saved


whole, saved = rates()
first, late = rates(saved)[0], rates(saved, warmup_first=False)[0]
assert first == whole[3:] and late[0] < whole[3] / 5 and late[1:] == whole[4:], (whole, first, late)
print(f"pytorch_warmup {version('pytorch-warmup')}: rates {whole[3:]} in one run; resumed {first} or, made after the load, {late}")
END
