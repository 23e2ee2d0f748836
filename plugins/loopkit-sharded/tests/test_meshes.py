"""Checkpoints of models that are sharded along several dimensions."""

from __future__ import annotations

import json

import pytest
import torch
from distributed.processes import run
from small import LIMIT, differing, gathered, make, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from loopkit.checkpoint.storage import listing
from loopkit.distributed import join
from loopkit_sharded import load, save


class Narrow(nn.Module):
    """Two layers that are parallel in one group of processes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(self.up(x).tanh()).clone()  # torch warns of a view


def parallel(size):
    """Layers in two processes each; sharded over the pairs, if there are several."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    made = parallelize_module(Narrow(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return (fully_shard(made, mesh=mesh["dp"]) if size > 2 else made), mesh["dp"]


def learner_of(kind, size):
    if kind == "copies":
        return make(model=Narrow(), fsdp={"mesh": (2, size // 2), "shard": False})
    model, mesh = parallel(size)
    return make(model=model, fsdp={"mesh": mesh, "shard": False, "wrap": None})


def saves(rank, size, kind, directory):
    join(timeout=LIMIT)
    learner = learner_of(kind, size)
    generator = torch.Generator().manual_seed(3)
    learner.fit([(torch.randn(4, 5, generator=generator), torch.randn(4, 1, generator=generator))], epochs=2)
    save(learner, directory)
    again = learner_of(kind, size)
    load(again, directory)
    assert (
        differing(gathered(dict(again.model.named_parameters())), gathered(dict(learner.model.named_parameters())))
        == []
    )
    return whole(learner)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("copies", 2), ("layers", 2), *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in ("copies", "layers"))],
)
def test_any_mesh_is_saved_and_loads_in_one_process_with_the_same_bits(tmp_path, kind, size):
    expected, *_ = run(saves, size, size, kind, tmp_path, timeout=LIMIT)
    alone = make(model=Narrow())
    load(alone, tmp_path)
    assert differing(whole(alone), expected) == []
    if kind == "copies":  # what two processes hold alike is written once
        index = json.loads((listing(tmp_path)[0].path / "parts.json").read_bytes())
        assert {len(each["chunks"]) for each in index["tensors"].values()} <= {1, size // 2}


class Square(Narrow):
    """Both layers have one shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)


def changes_its_layout(rank, directory):
    join(timeout=LIMIT)
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
    learner = make(model=Square(), fsdp={"shard": False})
    learner.fit([batch], epochs=1)
    save(learner, directory)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Square(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    other = make(model=model, fsdp={"mesh": mesh["dp"], "shard": False, "wrap": None})
    load(other, directory)
    moment = other.optimizer.state[other.model.down.weight]["exp_avg"]
    assert moment.placements == other.model.down.weight.placements != other.model.up.weight.placements
    assert differing(whole(learner), whole(other)) == []
    other.fit([batch], epochs=1)


@pytest.mark.slow
def test_checkpoint_of_one_layout_loads_in_another(tmp_path):
    run(changes_its_layout, 2, tmp_path, timeout=LIMIT)
