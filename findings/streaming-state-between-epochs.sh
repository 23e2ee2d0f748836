#!/usr/bin/env bash
# mosaicml-streaming 0.13.0: a state that is taken between two epochs resumes with an epoch without batches.
#
# Guess: StreamingDataLoader.state_dict() between two epochs, or after iter() and before the first batch, is the
# begin of the next epoch. Seen: both are the end of the epoch before. A new loader that loads it has an empty epoch
# first, and all epochs after it are late by one.
#
# Why a training loop cares: the end of an epoch is where most checkpoints are saved. A resumed loop counts an epoch
# in which it has trained nothing, and ends one epoch short of data, silently. Save after the first batch, or leave
# the loader's state out where an epoch is over.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 mosaicml-streaming==0.13.0 numpy
env/bin/python -W ignore - <<'END'
import tempfile
from importlib.metadata import version

import torch

# torchvision beside a build of torch that has not its operators: no images here
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms", "deform_conv2d", "roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool"):
    operators.define(f"{name}(Tensor a) -> Tensor")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

folder = tempfile.mkdtemp()
with MDSWriter(out=folder, columns={"x": "int"}) as writer:
    for index in range(12):
        writer.write({"x": index})


def made():
    data = StreamingDataset(local=folder, batch_size=4, shuffle=True, shuffle_seed=5)
    return StreamingDataLoader(data, batch_size=4)


def epoch(loader):
    return [batch["x"].tolist() for batch in loader]


loader = made()
epoch(loader)
between = loader.state_dict()
batches = iter(loader)
begun = loader.state_dict()
second = [batch["x"].tolist() for batch in batches]
resumed = made()
resumed.load_state_dict(between)
got = [epoch(resumed), epoch(resumed)]
assert begun == between and got == [[], second], (between, begun, got, second)
print(f"mosaicml-streaming {version('mosaicml-streaming')}: the second epoch is {second}; resumed between the epochs: {got[0]}, then {got[1]}")
END
