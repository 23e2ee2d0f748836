#!/usr/bin/env bash
# adam-atan2-pytorch 0.4.1: MuonAdamAtan2 takes its parameters in the order of a set, another one in each process.
#
# Guess: its groups have the parameters in the order in which they were given. Seen: with its default
# remove_muon_params_from_params=True, the first group is list(set(params) - set(muon_params)), in the order of
# addresses. A saved state numbers the parameters in that order.
#
# Why a training loop cares: a resumed run loads the moments of one parameter for another, silently where the shapes
# are equal, and with an error in the first step where they differ. Leave the parameters out by yourself, in a list, and
# give remove_muon_params_from_params=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy adam-atan2-pytorch==0.4.1
cat > order.py <<'END'
import random
import sys

import torch
from adam_atan2_pytorch import MuonAdamAtan2

random.seed(int(sys.argv[1]))
kept = [torch.empty(random.randrange(1, 400)) for _ in range(200)]  # as of other work of the script
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
names = {id(p): name for name, p in model.named_parameters()}
optimizer = MuonAdamAtan2([model[0].weight], model.parameters(), lr=0.1)
print(" ".join(names[id(p)] for p in optimizer.param_groups[0]["params"]))
END
for number in 1 2 3 4; do env/bin/python -W ignore order.py $number 2> /dev/null; done > orders
given=$(sort -u orders | wc -l)
[ "$given" -gt 1 ]
echo "adam-atan2-pytorch 0.4.1: four processes have $given orders of the same parameters; the first begins with $(head -1 orders | cut -d ' ' -f 1-4)"
