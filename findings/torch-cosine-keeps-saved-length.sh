#!/usr/bin/env bash
# torch 2.13.0: CosineAnnealingLR(T_max=20).load_state_dict(...) of a run with T_max=10 goes on with 10,
# silently.
#
# Guess: the new length counts, or the mismatch raises. Seen: the state of a scheduler holds its constructor's
# arguments, and the load writes them over the new ones. A run that is extended from 10 to 20 epochs gets a rate
# of 0 at epoch 10, then a rate that rises again up to the full one, at the end of training.
#
# Why a training loop cares: "train it for longer" is why people resume. A loop that saves schedulers by their
# state_dict has to compare the arguments of the script with those of the state, and to say which hold.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
env/bin/python -W ignore - <<'END'
import warnings

import torch

warnings.simplefilter("ignore")


def made(length):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)


optimizer, schedule = made(10)
for _ in range(5):
    optimizer.step()
    schedule.step()
longer, extended = made(20)
longer.load_state_dict(optimizer.state_dict())
extended.load_state_dict(schedule.state_dict())
rates = []
for _ in range(15):
    longer.step()
    extended.step()
    rates.append(round(longer.param_groups[0]["lr"], 3))
assert extended.T_max == 10 and rates[4] == 0.0 and rates[-1] == 1.0, (extended.T_max, rates)
print(f"torch {torch.__version__}: CosineAnnealingLR(T_max=20) resumes with T_max {extended.T_max}; rates of epochs 6 to 20: {rates}")
END
