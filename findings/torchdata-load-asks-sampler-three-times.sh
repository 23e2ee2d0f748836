#!/usr/bin/env bash
# torchdata 0.11.0: a StatefulDataLoader that resumes asks its sampler for three iterators.
#
# Guess: a load puts the position back, and the epoch is drawn once, as without a load. Seen: the sampler's __iter__ is
# called three times. A sampler that draws its order from a generator of its own has drawn three orders by then, so the
# rest of the epoch has other samples, and so has every later epoch. Nothing is raised.
#
# Why a training loop cares: a sampler is allowed to draw in __iter__, as torch's own do. A loop has to put the
# generators of the epoch's begin back for each of these calls, and those of the pause after them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 torchdata==0.11.0 numpy
env/bin/python -W ignore - <<'END'
import torch
import torchdata
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader


class Drawing(Sampler):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        return iter(torch.randperm(12, generator=self.generator).tolist())

    def __len__(self):
        return 12


def made():
    sampler = Drawing()
    return sampler, StatefulDataLoader(torch.arange(12), batch_size=2, sampler=sampler)


sampler, loader = made()
batches = iter(loader)
for _ in range(3):
    next(batches)
state = loader.state_dict()
expected = [batch.tolist() for batch in batches]
assert sampler.calls == 1, sampler.calls
sampler, resumed = made()
resumed.load_state_dict(state)
rest = [batch.tolist() for batch in resumed]
assert sampler.calls == 3, sampler.calls
assert rest != expected, rest
print(f"torchdata {torchdata.__version__}: {sampler.calls} iterators; the rest of the epoch is {rest}, not {expected}")
END
