#!/usr/bin/env bash
# torch 2.13.0: one autocast context around the whole training loop trains nothing: the loss is the same in every step.
#
# Guess: an optimizer's step in the context costs some precision, or is an error. Seen: autocast keeps the bfloat16 copy of
# each weight until the outermost context ends, and does not see that the optimizer changed the weight in place. Each
# forward uses the copies of the first one. Gradients still come, the weights move, and nothing warns.
#
# Why a training loop cares: a loop, or a notebook's cell, is easily wrapped as a whole, also around a trainer's fit().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
env/bin/python -W ignore - <<'END'
import contextlib

import torch
from torch import nn


def losses(around):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 4)
    targets = inputs.sum(1, keepdim=True)
    seen = []
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast if around else contextlib.nullcontext():
        for _ in range(5):
            with contextlib.nullcontext() if around else torch.autocast("cpu", torch.bfloat16):
                loss = (model(inputs).float() - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    return seen, (model(inputs) - targets).square().mean().item()


step, _ = losses(around=False)
loop, after = losses(around=True)
assert step[-1] < 0.3 * step[0] and len(set(loop)) == 1 and after != loop[0], (step, loop, after)
print(
    f"torch {torch.__version__}: five steps with autocast around each: {step[0]:.2f} to {step[-1]:.2f}; around the loop: "
    f"{loop[0]:.2f} to {loop[-1]:.2f}, and outside of the context the moved weights give {after:.2f}"
)
END
