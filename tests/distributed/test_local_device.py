"""Each process joins the others with a device of its own, which is its current one."""

import pytest
import torch
from fake_accelerator import Fake
from torch import nn

from distributed.processes import run
from loopkit import Learner
from loopkit.plugins import DDP, ToDevice


def joined(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        fake = Fake(patch)
        fake.joins_by_gloo(patch)

        def to(module, device):
            fake.calls.append(f"move to {device}")
            return module

        patch.setattr(nn.Module, "to", to)
        Learner(nn.Linear(1, 1), plugins=[ToDevice(), DDP()], standard=False)
        return fake.calls, torch.cuda.current_device()  # which fully_shard takes for a mesh


@pytest.mark.timeout(120)
def test_two_processes_join_with_a_device_each():
    for rank, (calls, current) in enumerate(run(joined, 2)):
        own = f"cuda:{rank}"
        moved_and_joined = [f"move to {own}", f"current {rank}", f"join by cpu:gloo,cuda:nccl as {own}"]
        assert calls[:3] == moved_and_joined
        assert (set(calls[3:]), current) == ({f"current {rank}"}, rank)
