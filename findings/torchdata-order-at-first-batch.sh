#!/usr/bin/env bash
# torchdata 0.11.0 with torch 2.13.0: StatefulDataLoader draws its order at the first batch; DataLoader draws it
# at iter().
#
# Guess: iter(loader) begins the epoch in both. Seen: DataLoader takes its sampler's seed from the global
# generator within iter(). StatefulDataLoader takes it when the first batch is asked for. A number that is drawn
# between the two lines changes the order of the one, and not of the other.
#
# Why a training loop cares: a loop that restores generators "after the iterator is made", or draws a number for
# itself there, is exact with one loader and changes the data of the other. Restore before iter() and again
# after the first batch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 torchdata==0.11.0 numpy
env/bin/python -W ignore - <<'END'
import torch
import torchdata
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader


def first_batch(cls, seed_between):
    torch.manual_seed(0)
    batches = iter(cls(range(64), batch_size=4, shuffle=True))
    torch.manual_seed(seed_between)
    return next(batches).tolist()


plain = [first_batch(DataLoader, seed) for seed in (1, 2)]
stateful = [first_batch(StatefulDataLoader, seed) for seed in (1, 2)]
assert plain[0] == plain[1], plain
assert stateful[0] != stateful[1], stateful
print(f"torchdata {torchdata.__version__}, torch {torch.__version__}: seeds after iter() change StatefulDataLoader's order {stateful}, not DataLoader's {plain}")
END
