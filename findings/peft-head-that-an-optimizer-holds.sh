#!/usr/bin/env bash
# peft 0.21.2: an optimizer that was made before get_peft_model trains a head that is no longer used, without an error.
#
# Guess: modules_to_save keeps the module that is there, and frees its parameters. Seen: it trains a deep copy; the module
# that the optimizer holds stays as original_module, frozen, and gets no gradient. Every step of that optimizer succeeds
# and changes nothing.
#
# Why a training loop cares: model and optimizer are often made together, and the adapter is added later, as by a
# trainer's plugin. The run ends with the loss it began with, or with LoRA trained and the head as it was made.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy peft==0.21.2
env/bin/python -W ignore - <<'END'
import peft
import torch
from torch import nn

torch.manual_seed(0)
base = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(base[2].parameters(), lr=0.1)  # the head
model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], modules_to_save=["2"]))
held = {id(p) for group in optimizer.param_groups for p in group["params"]}
names = [name for name, p in model.named_parameters() if id(p) in held]
before = [p.detach().clone() for p in model.parameters()]
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
moved = [name for (name, p), old in zip(model.named_parameters(), before) if not torch.equal(p, old)]
with_gradient = [name for name, p in model.named_parameters() if p.grad is not None and ".2." in name]
assert not moved and all("original_module" in name for name in names), (moved, names)
assert with_gradient and all("modules_to_save" in name for name in with_gradient), with_gradient
print(f"peft {peft.__version__}: after five steps {len(moved)} parameters have moved; the optimizer holds {names}")
END
