#!/usr/bin/env bash
# torch 2.13.0: a second scheduler over the same optimizer ignores the rate that was set for the second stage.
#
# Guess: a new LambdaLR starts from the rate that the optimizer has. Seen: the first scheduler has left initial_lr in the
# parameter groups; a new one (with last_epoch=-1, which is said to start anew) takes it as the base and writes it at once.
#
# Why a training loop cares: in fine-tuning of two stages, the rate is lowered by hand and a new schedule is made. With
# lr=0.001 set before, training goes on at 0.1, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
env/bin/python -W ignore - <<'END'
import torch
from torch.optim import lr_scheduler

made = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=1.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
}
starts = {}
for name, make in made.items():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    lr_scheduler.StepLR(optimizer, step_size=10)  # the first stage
    optimizer.param_groups[0]["lr"] = 0.001
    scheduler = make(optimizer)
    starts[name] = (optimizer.param_groups[0]["lr"], scheduler.base_lrs[0])
assert starts["LambdaLR"] == (0.1, 0.1), starts
assert starts["LinearLR"] == (0.001, 0.1) and starts["CosineAnnealingLR"] == (0.001, 0.1), starts
print(f"torch {torch.__version__}: set to 0.001, then a new scheduler; its rate and its base are {starts}")
END
