#!/usr/bin/env bash
# webdataset 1.0.2: .shuffle() gives another order each time, whatever is seeded.
#
# Guess: torch.manual_seed, random.seed and numpy.random.seed make the order repeatable. Seen: the shuffle makes
# a generator of its own from the process id and the time, unless it is given one (rng=) or a seed. No global
# seed reaches it.
#
# Why a training loop cares: seed_everything does not make such a run repeatable, and a checkpoint of the global
# generators does not restore its order: a resume in mid-epoch sees other data. A loop has to compare the data,
# since nothing else shows it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 webdataset==1.0.2 numpy
env/bin/python -W ignore - <<'END'
import random
import time

import numpy as np
import torch
import webdataset as wds


def order(**given):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return list(wds.DataPipeline(lambda: iter(range(1000)), wds.shuffle(100, **given)))


one = order()
time.sleep(1.1)
other = order()
fixed = [order(rng=random.Random(0)) for _ in range(2)]
assert one != other and fixed[0] == fixed[1], (one[:5], other[:5])
print(f"webdataset {wds.__version__}: two orders after the same seeds: {one[:4]}..., {other[:4]}...; with rng= they are equal")
END
