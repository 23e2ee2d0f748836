#!/usr/bin/env bash
# torchmetrics 1.9.0: BinaryAccuracy decides for each batch whether its values are logits or probabilities.
#
# Guess: a metric over the same values is the same, however they are cut into batches. Seen: a sigmoid is
# applied to a batch if any of its values lies outside of 0 to 1. A small batch of logits that all lie within is
# taken for probabilities: 0.2 and 0.4, which are above even odds as logits, count as class 0.
#
# Why a training loop cares: the accuracy of a validation depends on the batch size, and the small last batch is
# the one that is read wrongly. A loop, or its user, has to apply the sigmoid, or to compare logits with 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 torchmetrics==1.9.0 numpy
env/bin/python -W ignore - <<'END'
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy

logits, targets = torch.tensor([0.2, 0.4, -3.0, 5.0]), torch.tensor([1, 1, 0, 1])
whole, cut = BinaryAccuracy(), BinaryAccuracy()
whole.update(logits, targets)
for part in (slice(0, 2), slice(2, 4)):
    cut.update(logits[part], targets[part])
values = whole.compute().item(), cut.compute().item()
assert values == (1.0, 0.5), values
print(f"torchmetrics {torchmetrics.__version__}: accuracy of the same four logits in one batch {values[0]}, in two batches {values[1]}")
END
