#!/usr/bin/env bash
# torch 2.13.0: an optimizer's state that holds a string comes back from load_state_dict as the text of a
# generator.
#
# Guess: values that are no tensors are handed back as they are. Seen: load_state_dict rebuilds every iterable
# from its items, and a string is one, so "warmup" becomes "<generator object ...>"; whole-number tensors inside
# a list become float32, as the parameter is. Nothing is raised.
#
# Why a training loop cares: optimizers keep names of modes and lists of counts in their state. After a resume
# such an optimizer compares with a text that never matches, and trains another way without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy
env/bin/python -W ignore - <<'END'
import torch


class Phased(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(phase="warmup", counts=[torch.tensor(3)])


def made():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p, Phased([p], lr=0.1)


_, optimizer = made()
optimizer.step()
p, other = made()
other.load_state_dict(optimizer.state_dict())
phase, count = other.state[p]["phase"], other.state[p]["counts"][0]
assert phase.startswith("<generator object"), phase
assert count.dtype == torch.float32, count
print(f"torch {torch.__version__}: a string in an optimizer's state is loaded as {phase[:17]!r}..., an int64 count as {count.dtype}")
END
