"""ShardedCheckpoint: processes write their parts, and others go on with them."""

from __future__ import annotations

import torch
from distributed.processes import run
from small import LIMIT, differing, loader, make, whole
from torch.distributed.tensor import DTensor

from loopkit import Learner
from loopkit.checkpoint.storage import listing, verify
from loopkit.plugins import Checkpoint


def trains(rank, processes, directory, epochs):
    learner = make(directory=directory, resume="auto", keep=9)
    learner.fit(loader(processes), epochs=epochs)
    return whole(learner)


def test_resumed_run_is_bitwise_the_one_that_was_not_interrupted(tmp_path):
    straight = run(trains, 2, 2, tmp_path / "straight", 3, timeout=LIMIT)[0]
    run(trains, 2, 2, tmp_path / "cut", 1, timeout=LIMIT)
    resumed = run(trains, 2, 2, tmp_path / "cut", 3, timeout=LIMIT)[0]
    assert differing(straight, resumed) == []
    (first,) = [each for each in listing(tmp_path / "cut") if each.number == 1]
    names = sorted(verify(first.path).files)
    assert [name for name in names if name.startswith("part")] == [
        "part-0000-state.safetensors",
        "part-0000-weights.safetensors",
        "part-0001-state.safetensors",
        "part-0001-weights.safetensors",
        "parts.json",
    ]
