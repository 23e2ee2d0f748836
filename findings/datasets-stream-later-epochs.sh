#!/usr/bin/env bash
# datasets 5.2.0 with torchdata 0.11.0: after a resume every later epoch of a stream begins where the run was
# resumed.
#
# Guess: the position counts for the epoch that is resumed, the next one begins at the first sample. Seen: the
# stream keeps the state that it was given, and begins at it each time that it is iterated. Of 6 batches, each
# later epoch has the last 3. Nothing is raised; a call of set_epoch on the stream ends it.
#
# Why a training loop cares: the resumed run trains on the end of its data for the rest of its life, with epochs
# that are shorter. The loop has to compare the length of an epoch after a resume with the epochs before, or to
# call set_epoch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 torchdata==0.11.0 datasets==5.2.0 numpy
env/bin/python -W ignore - <<'END'
import datasets
import torchdata
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


def made():
    stream = Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset()
    return StatefulDataLoader(stream, batch_size=2)


loader = made()
batches = iter(loader)
for _ in range(3):
    next(batches)
resumed = made()
resumed.load_state_dict(loader.state_dict())
epochs = [[batch["x"].tolist() for batch in resumed] for _ in range(3)]
assert epochs == [[[6, 7], [8, 9], [10, 11]]] * 3, epochs
print(f"datasets {datasets.__version__}, torchdata {torchdata.__version__}: epochs after a resume at batch 3 of 6: {epochs}")
END
