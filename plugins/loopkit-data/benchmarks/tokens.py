"""How long a batch of tokens takes: `Tokens`, and a ``DataLoader`` over a memory map of the same file.

    python plugins/loopkit-data/benchmarks/tokens.py

The sides take turns in one process. Printed is the middle of the rounds, and between which the ratio lay.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from loopkit_data import Tokens

BLOCK, BATCH, STEPS, ROUNDS = 256, 32, 200, 9


class Blocks(Dataset):
    """The usual dataset: a slice of a memory map for each sample."""

    def __init__(self, path):
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self):
        return (len(self.tokens) - 1) // BLOCK

    def __getitem__(self, index):
        read = torch.from_numpy(self.tokens[index * BLOCK : (index + 1) * BLOCK + 1].astype(np.int64))
        return read[:-1], read[1:]


def seconds(batches):
    """A batch's time."""
    started = time.perf_counter()
    for _ in range(STEPS):
        next(batches)
    return (time.perf_counter() - started) / STEPS


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(0, 50_000, 20_000_000).astype(np.uint16).tofile(path)
        order = torch.utils.data.RandomSampler(Blocks(path))
        sides = {
            "DataLoader": iter(DataLoader(Blocks(path), BATCH, sampler=order)),
            "Tokens": iter(Tokens(path, block=BLOCK, batch_size=BATCH)),
        }
        for batches in sides.values():
            seconds(batches)
        rounds = [{name: seconds(batches) for name, batches in sides.items()} for _ in range(ROUNDS)]
    ratios = sorted(each["DataLoader"] / each["Tokens"] for each in rounds)
    found = {name: round(1e6 * statistics.median(each[name] for each in rounds), 1) for name in sides}
    ratio = {"ratio": statistics.median(ratios), "from": ratios[0], "to": ratios[-1]}
    print(json.dumps({"us_per_batch": found, **{name: round(value, 2) for name, value in ratio.items()}}))


if __name__ == "__main__":
    main()
