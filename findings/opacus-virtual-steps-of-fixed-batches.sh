#!/usr/bin/env bash
# opacus 1.6.0: an update of two virtual steps over fixed batches is twice as large as the update of both batches.
#
# Guess: signal_skip_step, by which BatchMemoryManager accumulates, gives the mean over both batches, as two
# backward calls before one step do. Seen: step divides by expected_batch_size, which make_private took from the
# loader, times the backward calls since the last step, even a skipped one. So two virtual steps of 6 samples are
# divided by 6, and two backward calls by 12.
#
# Why a training loop cares: with gradient accumulation the loader has the small batches, so an update by virtual steps
# is too large by the number of steps. Noise, which is divided as well, grows with it. BatchMemoryManager splits large
# batches of the loader, where the division is right. A loop that divides the loss itself halves gradients once more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 opacus==1.6.0 numpy
env/bin/python -W ignore - <<'END'
import opacus
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

DATA = TensorDataset(torch.ones(12, 1))


def moved(virtual):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(DATA, batch_size=6),
        noise_multiplier=0.0,
        max_grad_norm=10.0,
        poisson_sampling=False,
    )
    optimizer.zero_grad()
    for skipped in (True, False):
        model(torch.ones(6, 1)).mean().backward()
        if virtual:
            optimizer.signal_skip_step(skipped)
            optimizer.step()
            optimizer.zero_grad()
    if not virtual:
        optimizer.step()
    return model._module.weight.item()


both, virtual = moved(False), moved(True)
assert (both, virtual) == (-1.0, -2.0), (both, virtual)
print(f"opacus {opacus.__version__}: two backward calls and a step move by {both}, two virtual steps by {virtual}")
END
