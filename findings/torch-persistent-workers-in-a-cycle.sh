#!/usr/bin/env bash
# torch 2.13.0: a DataLoader with persistent workers that is part of a reference cycle takes 5 seconds for each worker
# to end, when the garbage collector finds it.
#
# Guess: its workers end as quickly as without the cycle, within some 0.1 s. Seen: without a cycle both workers end at
# once; with one, the collection waits 5 s for each worker, in whatever line of the program it happens.
#
# Why a training loop cares: a trainer refers to its loader, and to itself through callbacks. A notebook that makes both
# anew stands still for 5 s a worker at some later time, and so does a suite of tests at each collection.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
env/bin/python -W ignore - <<'END'
import gc
import time

import torch
from torch.utils.data import DataLoader, TensorDataset


def seconds(cycle):
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4, num_workers=2, persistent_workers=True)
    for _ in loader:
        pass
    if cycle:
        loader.trainer = loader
    begun = time.monotonic()
    del loader
    gc.collect()
    return time.monotonic() - begun


plain, cyclic = seconds(False), seconds(True)
assert plain < 3 and cyclic > 8, (plain, cyclic)
print(f"torch {torch.__version__}: two persistent workers end in {plain:.1f} s, and in {cyclic:.1f} s as part of a cycle")
END
