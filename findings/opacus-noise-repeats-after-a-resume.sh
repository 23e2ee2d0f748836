#!/usr/bin/env bash
# opacus 1.6.0: the noise of a DPOptimizer with a generator of its own is drawn again after a resume.
#
# Guess: what state_dict returns lets the noise go on where it was. Seen: the generator is in no state, and a new
# process seeds it as the first one did. The first updates after a resume add the same noise as the first updates of
# the run.
#
# Why a training loop cares: noise that is used twice is no longer private: the difference of two updates does not
# have it. A run that was resumed is also another run than one that was not stopped. A loop has to save the
# generators that an optimizer holds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 opacus==1.6.0 numpy
env/bin/python -W ignore - <<'END'
import opacus
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer


def made():
    torch.manual_seed(0)
    model = GradSampleModule(torch.nn.Linear(2, 1, bias=False))
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1e-6, "expected_batch_size": 1}
    generator = torch.Generator().manual_seed(5)
    return model, DPOptimizer(torch.optim.SGD(model.parameters(), lr=1e6), generator=generator, **options)


def updates(model, optimizer):
    moved = []
    for _ in range(2):
        before = model._module.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        moved.append([round(value, 1) for value in (model._module.weight.detach() - before)[0].tolist()])
    return moved


model, optimizer = made()
first = updates(model, optimizer)
resumed, other = made()
resumed.load_state_dict(model.state_dict())
other.load_state_dict(optimizer.state_dict())
again = updates(resumed, other)
assert first == again, (first, again)
print(f"opacus {opacus.__version__}: the updates of a run are {first}; of the run that is resumed after them, {again}")
END
