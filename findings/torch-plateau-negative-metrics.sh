#!/usr/bin/env bash
# torch 2.13.0: ReduceLROnPlateau takes a metric below zero that becomes worse for one that improves.
#
# Guess: the default threshold of 0.0001 is a share of the best value's size. Seen: the best value itself is multiplied by
# 0.9999, so with mode="min" a best value of -1 is beaten by -0.99995. A loss that rises by less than the threshold an
# epoch is a new best one in each epoch, and the rate is never lowered. The same holds for mode="max".
#
# Why a training loop cares: log-likelihoods, evidence bounds and rewards are below zero. With threshold=0.01, a loss that
# rose from -1 to -0.78 in 50 epochs never lowered the rate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
env/bin/python -W ignore - <<'END'
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def run(first, change):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, patience=2, threshold=0.01)
    value = first
    for _ in range(50):
        scheduler.step(value)
        value += change * abs(value)
    return optimizer.param_groups[0]["lr"], value, scheduler.num_bad_epochs


above, _, _ = run(1.0, 0.005)  # a loss that rises by half a percent an epoch
below, last, bad = run(-1.0, 0.005)
assert above < 1e-6 and below == 1.0 and bad == 0, (above, below, bad)
print(
    f"torch {torch.__version__}: ReduceLROnPlateau lowers the rate to {above:.0e} for a loss that rises from 1, and "
    f"leaves it at {below} for one that rises from -1 to {last:.2f}"
)
END
