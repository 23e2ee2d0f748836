"""How much memory a save takes above the state that a process holds."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import pytest
import torch
from distributed.processes import run
from small import LIMIT, make
from torch import nn

from loopkit.plugins import SaveOptions
from loopkit_sharded import ShardedCheckpoint

WIDTH = 1024
MMAP_THRESHOLD = -3
"""From how many bytes on memory is the system's own again when it is freed."""


def status(field):
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


class Measured(ShardedCheckpoint):
    """Measures the highest memory during each save, waiting for its end."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.base, self.peaks = None, []

    def _save(self, *args, **options):
        gc.collect()
        self.base = self.base or status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest is counted anew
        super()._save(*args, **options)
        self._writer.join()
        self.peaks.append(status("VmHWM"))


def measure(rank, processes, directory, background):
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    saver = Measured(directory, keep=2, options=SaveOptions(background=background))
    learner = make(saver, model=model, fsdp={"shard": False})
    batch = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    plain = make(
        model=nn.Sequential(nn.Linear(WIDTH, 8)), fsdp={"shard": False}
    )  # what torch imports and keeps for itself
    plain.fit([(batch[0], batch[1][:, :8])], epochs=1)
    learner.fit([batch], epochs=2)
    local = sum(p.to_local().nbytes for p in learner.model.parameters())
    local += sum(v.to_local().nbytes for s in learner.optimizer.state.values() for v in s.values() if v.ndim)
    return [(peak - saver.base) / local for peak in saver.peaks]


@pytest.mark.parametrize(
    ("processes", "background"),
    [
        (2, False),
        (2, True),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_save_takes_little_memory(tmp_path, processes, background):
    factors = run(measure, processes, processes, tmp_path, background, timeout=LIMIT)
    print(processes, background, [[round(each, 2) for each in rank] for rank in factors])
    assert max(map(max, factors)) <= (1.3 if background else 0.3)
