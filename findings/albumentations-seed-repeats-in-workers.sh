#!/usr/bin/env bash
# albumentations 2.0.8 with torch 2.13.0: with a seed and worker processes, each epoch has the same augmentations.
#
# Guess: Compose(..., seed=1) makes the augmentations repeatable from run to run, and new in each epoch. Seen: so it
# is without workers. Each worker gets a copy of the generators as they are in the main process, where they never
# move: every epoch draws the augmentations of the first one again, and two workers draw the same as each other.
# With persistent_workers=True epochs differ.
#
# Why a training loop cares: a seed is how one makes a run repeatable. Here the training then sees one fixed set of
# augmented images, and nothing shows it. Neither is the generators' place in a checkpoint of the main process.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q torch==2.13.0 albumentations==2.0.8 numpy
env/bin/python -W ignore - <<'END'
import albumentations as A
import numpy as np
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self):
        self.augment = A.Compose([A.RandomBrightnessContrast(p=1.0)], seed=1)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        image = np.full((4, 4, 3), 100, np.uint8)  # all images are the same, so that only the augmentation differs
        return int(self.augment(image=image)["image"].sum())


def epochs(**options):
    loader = DataLoader(Images(), batch_size=2, **options)
    return [[batch.tolist() for batch in loader] for _ in range(3)]


alone, worker, workers = epochs(), epochs(num_workers=1), epochs(num_workers=2)
kept = epochs(num_workers=1, persistent_workers=True)
assert alone[0] != alone[1] and kept == alone, (alone, kept)
assert worker[0] == worker[1] == worker[2] == alone[0], worker
assert workers[0][0] == workers[0][1], workers
print(f"albumentations {A.__version__}: epochs {alone} without workers, {worker} with one, {workers} with two")
END
