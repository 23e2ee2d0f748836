#!/usr/bin/env bash
# grokadamw 0.1.2: a loaded state has the moments, and the optimizer does not use them: they begin at zero.
#
# Guess: state_dict() and load_state_dict() bring the moments back, as those of torch's AdamW do. Seen: the moments are
# in the groups, with the parameters themselves as keys. A loaded copy has other parameters as keys, which none of the
# model's is equal to, so the next step makes new moments and counts from 1. optimizer.state is empty all the time.
#
# Why a training loop cares: a resumed run goes on without an error, with a warmup of the moments that nobody asked for,
# and each resume adds another set of moments to the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy grokadamw==0.1.2
env/bin/python -W ignore - 2> /dev/null <<'END'
from importlib.metadata import version

import torch
from grokadamw import GrokAdamW


def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, GrokAdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()


whole, optimizer = made()
train(whole, optimizer, 10)
first, before = made()
train(first, before, 5)
torch.save([first.state_dict(), before.state_dict()], "saved.pt")
resumed, after = made()
weights, state = torch.load("saved.pt", weights_only=False)
resumed.load_state_dict(weights)
after.load_state_dict(state)
train(resumed, after, 5)
moments = after.param_groups[0]["state"]
counts = [moments[p]["step"] for p in resumed.parameters()]
difference = (whole.weight - resumed.weight).abs().max().item()
assert counts == [5, 5] and len(moments) == 4 and difference > 0.01, (counts, len(moments), difference)
print(
    f"grokadamw {version('grokadamw')}: 10 steps, and 5 and 5 over a file, differ by {difference:.3f}; "
    f"the moments count {counts} steps, and there are {len(moments)} for 2 parameters"
)
END
