#!/usr/bin/env bash
# webdataset 1.0.2: the count of epochs of detshuffle, which its order depends on, is in no state.
#
# Guess: detshuffle(seed=0) gives an order for each epoch, the same in every process that reaches that epoch. Seen:
# the epoch is a counter of the object, which begins anew in each process. A resumed run has the order of the first
# epoch in the epoch that it goes on with; batches of it come twice, others never.
#
# Why a training loop cares: detshuffle is what the package has for repeatable orders. There is no state_dict to save;
# a loop has to save the attribute `epoch` itself, or give each epoch's number by the function that makes the data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 webdataset==1.0.2 numpy
env/bin/python -W ignore - <<'END'
import webdataset as wds


def made():
    return wds.DataPipeline(lambda: iter(range(20)), wds.detshuffle(10, seed=0))


data = made()
first, second = list(data), list(data)
resumed = made()  # another process, which resumes in the second epoch
got = list(resumed)
stages = [stage for stage in data.pipeline if hasattr(stage, "epoch")]
assert first != second and got == first, (first[:5], second[:5], got[:5])
assert [stage.epoch for stage in stages] == [1] and not hasattr(data, "state_dict"), stages
print(f"webdataset {wds.__version__}: epochs begin {first[:4]} and {second[:4]}; in a new process, the second {got[:4]}")
END
