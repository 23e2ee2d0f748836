#!/usr/bin/env bash
# torchdata 0.11.0 with torch 2.13.0: a StatefulDataLoader over torch's SubsetRandomSampler does not resume its
# order.
#
# Guess: its state restores the position in the order of the epoch. Seen: the sampler draws its order from
# torch's global generator, which the loader's state does not hold. The resumed loader skips so many batches of
# another order: samples come twice, others never, and nothing is raised. With RandomSampler (shuffle=True) the
# state holds the generator, and it is exact.
#
# Why a training loop cares: SubsetRandomSampler is the usual way to split a data set. The loop has to put the
# generators of the epoch's begin back before it asks the loader for its first batch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 torchdata==0.11.0 numpy
env/bin/python -W ignore - <<'END'
import torch
import torchdata
from torch.utils.data import SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader


def made():
    return StatefulDataLoader(range(12), batch_size=2, sampler=SubsetRandomSampler(range(12)))


torch.manual_seed(0)
loader = made()
batches = iter(loader)
seen = [next(batches).tolist() for _ in range(3)]
state = loader.state_dict()
rest = [batch.tolist() for batch in batches]
torch.manual_seed(7)  # another process
resumed = made()
resumed.load_state_dict(state)
got = [batch.tolist() for batch in resumed]
twice = sorted(set(sum(seen, [])) & set(sum(got, [])))
assert len(got) == len(rest) and got != rest and twice, (rest, got)
print(f"torchdata {torchdata.__version__}, torch {torch.__version__}: the rest was {rest}, the resumed loader gives {got}; {twice} come twice")
END
