#!/usr/bin/env bash
# torch 2.13.0: DataLoader(shuffle=True) draws its order at the first batch without workers, and at iter() with
# workers.
#
# Guess: iter(loader) begins the epoch, and draws its order. Seen: the sampler is a generator function, so its
# seed is taken from the global generator when the first index is asked for. Workers ask within iter(), since
# batches are fetched ahead; without workers that is the first next(). A number that is drawn in between changes
# the order in the one case and not in the other.
#
# Why a training loop cares: a loop that draws a number, or restores generators, between iter() and the first
# batch gives other data than a loop that does not, and other data with num_workers=0 than with 1. Restore
# before iter(), and again after the first batch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
env/bin/python -W ignore - <<'END'
import torch
from torch.utils.data import DataLoader


def first_batch(workers, seed_between):
    torch.manual_seed(0)
    batches = iter(DataLoader(range(64), batch_size=4, shuffle=True, num_workers=workers))
    torch.manual_seed(seed_between)
    return next(batches).tolist()


without, with_one = ([first_batch(workers, seed) for seed in (1, 2)] for workers in (0, 1))
assert without[0] != without[1], without
assert with_one[0] == with_one[1], with_one
print(f"torch {torch.__version__}: seeds between iter() and next() change the order without workers {without}, not with one {with_one}")
END
