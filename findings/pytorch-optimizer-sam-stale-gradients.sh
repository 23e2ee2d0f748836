#!/usr/bin/env bash
# pytorch_optimizer 4.1.0: SAM.step(closure) without a backward before it uses the gradients of the step before.
#
# Guess: step(closure) evaluates the closure twice, as torch's optimizers with closures evaluate what they need. Seen:
# it evaluates it once, and moves along whatever gradients are there. In the first step there are none, so the update
# is the one of plain SGD; later ones are those of the last step, at other weights. Nothing is raised.
#
# Why a training loop cares: a loop that hands a closure to step(), as it has to for LBFGS, trains with gradients that
# are a step old. It has to evaluate the closure once before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 pytorch_optimizer==4.1.0 numpy
env/bin/python -W ignore - <<'END'
from importlib.metadata import version

import pytorch_optimizer
import torch


def weights(before):
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = pytorch_optimizer.SAM([weight], torch.optim.SGD, lr=0.1, rho=0.5)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    found = []
    for _ in range(3):
        if before:
            closure()
        optimizer.step(closure)
        found.append(round(weight.item(), 3))
    return found


alone, right = weights(False), weights(True)
assert alone[0] == 2.4, alone  # 3 - 0.1 * 6, as SGD
assert right[0] == 2.3, right  # 3 - 0.1 * 7, the gradient at 3.5
print(f"pytorch_optimizer {version('pytorch_optimizer')}: step(closure) alone gives {alone}, after a backward {right}")
END
