#!/usr/bin/env bash
# monai 1.6.1: a DataLoader without workers seeds the random transforms anew when it is made.
#
# Guess: transform.set_random_state(5) decides what the transforms draw. Seen: the constructor of monai's DataLoader
# draws a seed from torch's global generator, and seeds every transform of the data set with it. So the augmentation
# depends on torch's seed, and on how many loaders were made before. With torch's own DataLoader the state stays.
#
# Why a training loop cares: another loader, such as one for validation, that is made before gives the run other
# data. A comparison of two programs has to make their loaders at the same place.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 monai==1.6.1 numpy
env/bin/python -W ignore - <<'END'
import monai
import torch
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, RandShiftIntensity


def drawn(seed, loader=DataLoader):
    transform = Compose([RandShiftIntensity(1.0, prob=1.0)])
    transform.set_random_state(5)
    torch.manual_seed(seed)
    batches = loader(Dataset([torch.zeros(1)] * 3, transform), batch_size=3)
    torch.manual_seed(0)
    return [round(value, 3) for value in next(iter(batches)).flatten().tolist()]


assert drawn(0) != drawn(1), drawn(0)
assert drawn(0, torch.utils.data.DataLoader) == drawn(1, torch.utils.data.DataLoader)
print(f"monai {monai.__version__}: with set_random_state(5), torch's seeds 0 and 1 give {drawn(0)} and {drawn(1)}")
END
