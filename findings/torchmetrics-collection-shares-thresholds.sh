#!/usr/bin/env bash
# torchmetrics 1.9.0: a MetricCollection gives metrics with different thresholds the same value.
#
# Guess: metrics share a state only if their options are the same. Seen: by default, the collection groups metrics whose
# states are equal after the first batch. If all scores of that batch are far from both thresholds, recall at 0.3 and at
# 0.7 are one metric from then on: only the first is updated, and both show its value.
#
# Why a training loop cares: a model that is sure of itself in the first batch of a validation is common, and a table of
# one metric at several thresholds is, too. The values are wrong without a warning; which one is right depends on names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 numpy torchmetrics==1.9.0
env/bin/python -W ignore - <<'END'
import torch
import torchmetrics
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryRecall

sure = torch.tensor([0.01, 0.99, 0.02, 0.98]), torch.tensor([0, 1, 1, 1])
unsure = torch.tensor([0.5, 0.5, 0.4, 0.9]), torch.tensor([1, 1, 1, 1])


def values(first, second):
    alone = {"low": BinaryRecall(threshold=0.3), "high": BinaryRecall(threshold=0.7)}
    together = MetricCollection({name: metric.clone() for name, metric in alone.items()})
    for batch in (first, second):
        together.update(*batch)
        for metric in alone.values():
            metric.update(*batch)
    shown = {name: round(value.item(), 3) for name, value in together.compute().items()}
    return shown, {name: round(metric.compute().item(), 3) for name, metric in alone.items()}


shown, right = values(sure, unsure)
other, same = values(unsure, sure)
assert shown["low"] == shown["high"] and right["low"] != right["high"], (shown, right)
assert other == same == right, (other, same)
print(
    f"torchmetrics {torchmetrics.__version__}: the collection shows {shown}, each metric alone has {right}; with the "
    f"batches in the other order the collection is right"
)
END
