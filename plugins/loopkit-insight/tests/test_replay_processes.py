"""``ReplayBundle`` in one of several processes that train together."""

from __future__ import annotations

import pytest
import torch
from distributed.processes import run
from loopkit_sharded import FSDP
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.data import TensorLoader
from loopkit.errors import WorldError
from loopkit.plugins import DDP
from loopkit_insight import ReplayBundle, replay

SIZE = 4  # samples of a process in a step


class Fails:
    """Raises in one step of one process."""

    def __init__(self, rank):
        self.rank = rank

    @hookimpl
    def backward_begin(self, step):
        if self.rank == 1 and step.index == 3:
            raise ArithmeticError(f"too large: {step.inputs.tolist()}")


def make_learner(*plugins):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    return Learner(
        model,
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.05),
        plugins=plugins,
        standard=False,
    )


def failing(rank, directory, sync):
    """The error of this process, its text and its notes."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    learner = make_learner(sync(), ReplayBundle(directory), Fails(rank))
    with pytest.raises(Exception, match=r"too large") as caught:
        learner.fit(TensorLoader(inputs, targets, batch_size=SIZE), epochs=1)
    return type(caught.value).__name__, str(caught.value), list(getattr(caught.value, "__notes__", ()))


@pytest.mark.two_processes
def test_process_that_fails_writes_a_bundle_that_one_process_can_run(tmp_path):
    one, other = run(failing, 2, tmp_path, DDP)
    assert (one[0], other[0]) == ("PeerError", "ArithmeticError")
    (bundle,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert bundle.name.endswith("replay-rank1")
    assert any(str(bundle) in note for note in other[2])
    learner = make_learner(DDP(), Fails(1), ReplayBundle(tmp_path))
    with pytest.raises(ArithmeticError) as caught:
        replay(bundle, learner)
    assert learner.world.size == 1
    assert str(caught.value) == other[1]  # with the batch of that process


@pytest.mark.two_processes
def test_process_with_a_part_of_the_parameters_says_that_it_writes_no_bundle(tmp_path):
    one, other = run(failing, 2, tmp_path, FSDP)
    assert (one[0], other[0]) == ("PeerError", "ArithmeticError")
    assert any("rank 1 of 2 holds a part of the parameters only" in note for note in other[2])


@pytest.mark.two_processes
def test_replay_in_several_processes_is_refused(tmp_path):
    def each(rank):
        with pytest.raises(WorldError, match="without torchrun"):
            replay(tmp_path, make_learner(DDP()))
        return True

    assert run(each, 2) == [True, True]
