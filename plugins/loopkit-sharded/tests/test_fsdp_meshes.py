"""FSDP over meshes, and of models that are sharded already, that have no values yet, or that are offloaded.

Each is the loop that is written by hand, in every bit.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed.processes import run
from fake_accelerator import Fake
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from loopkit import Learner
from loopkit.data import TensorLoader
from loopkit.distributed import join
from loopkit.errors import PluginError
from loopkit.plugins import ClipGradNorm, ToDevice
from loopkit_sharded import FSDP

LIMIT = 60.0
STEPS, SIZE = 4, 4
CLIP = 0.5


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))


def adam(params):
    return torch.optim.AdamW(params, lr=0.05)


def tensors(parts):
    generator = torch.Generator().manual_seed(3)
    count = STEPS * SIZE * parts
    return torch.randn(count, 6, generator=generator), torch.randn(count, 1, generator=generator)


def train(model, fsdp, parts, optimizer=adam, accumulate=1):
    """By loopkit; ``parts``: into how many the data are cut."""
    plugins = [FSDP(timeout=LIMIT, **fsdp), ClipGradNorm(CLIP)]
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False, accumulate=accumulate)
    x, y = tensors(parts)
    learner.fit(TensorLoader(x, y, batch_size=SIZE), epochs=2)
    return full(learner.model)


def by_hand(model, part, parts, accumulate=1):
    x, y = tensors(parts)
    optimizer = adam(model.parameters())
    for _ in range(2):
        for index in range(STEPS):
            rows = slice((index * parts + part) * SIZE, (index * parts + part + 1) * SIZE)
            due = (index + 1) % accumulate == 0
            if accumulate > 1:
                model.set_requires_gradient_sync(due)
            (nn.functional.mse_loss(model(x[rows]), y[rows]) / accumulate).backward()
            if due:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return full(model)


def full(model):
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def same(one, other):
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def sharded(model, **options):
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


class Narrow(nn.Module):
    """Two layers that are parallel in one group of processes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(self.up(x).tanh()).clone()  # torch warns of a view


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def two_dimensions(rank, size, accumulate):
    """Copies of the model, each of which is sharded over two processes, or over one."""
    join(timeout=LIMIT)
    sizes = (2, size // 2)
    mine = train(net(), {"mesh": sizes, "wrap": nn.Linear}, size, accumulate=accumulate)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "parts"))
    same(mine, by_hand(sharded(net(), mesh=mesh), rank, size, accumulate))
    same(mine, train(net(), {"mesh": mesh, "wrap": nn.Linear}, size, accumulate=accumulate))
    with pytest.raises(PluginError, match=r"mesh is \(3, 1\), and there are"):
        train(net(), {"mesh": (3, 1)}, size)


def sharded_by_the_user(rank, size, accumulate):
    join(timeout=LIMIT)
    mesh = init_device_mesh("cpu", (size,))
    model = sharded(net(), mesh=mesh)
    same(train(model, {}, size, optimizer=adam(model.parameters())), by_hand(sharded(net(), mesh=mesh), rank, size))
    with pytest.raises(PluginError, match=r"is sharded already, .* leave out wrap, mixed_precision, init and offload"):
        train(model, {"mixed_precision": torch.bfloat16}, size)


def tensor_parallel_by_the_user(rank, size, accumulate):
    """Two processes hold a layer together, and get the same batches; with four, two such pairs."""
    join(timeout=LIMIT)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))

    def model():
        made = parallelize_module(Narrow(), mesh["tp"], PLAN)
        return fully_shard(made, mesh=mesh["dp"]) if size > 2 else made

    parts, part = size // 2, mesh["dp"].get_local_rank()
    mine = train(model(), {"mesh": mesh["dp"]}, parts)
    same(mine, by_hand(model(), part, parts))
    learner = Learner(model(), nn.MSELoss(), adam, plugins=[FSDP(mesh=mesh["dp"], timeout=LIMIT)], standard=False)
    with pytest.raises(PluginError, match="several processes have the same batch"):
        learner.predict(TensorLoader(tensors(1)[0], batch_size=SIZE))


def fill(module):
    """A module's values, the same whenever it is called."""
    generator = torch.Generator().manual_seed(module.in_features)
    for p in module.parameters(recurse=False):
        p.copy_(torch.randn(p.shape, generator=generator))


def without_values(rank, size, accumulate):
    """Modules on the meta device are filled unit by unit."""
    join(timeout=LIMIT)
    with torch.device("meta"):
        mine, other = net(), net()
    mesh = init_device_mesh("cpu", (size,))
    sharded(other, mesh=mesh).to_empty(device="cpu")
    filled = net()
    with torch.no_grad():
        for module in filled:
            if isinstance(module, nn.Linear):
                fill(module)
        for p, value in zip(other.parameters(), filled.parameters(), strict=True):
            p.copy_(distribute_tensor(value.detach(), mesh, p.placements, src_data_rank=None))
    same(train(mine, {"wrap": nn.Linear, "init": fill}, size), by_hand(other, rank, size))


def offloaded(rank, size, accumulate):
    join(timeout=LIMIT)
    mesh = init_device_mesh("cpu", (size,))
    other = sharded(net(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    same(train(net(), {"wrap": nn.Linear, "offload": True}, size), by_hand(other, rank, size))


@pytest.mark.parametrize(
    ("act", "size", "accumulate"),
    [
        (two_dimensions, 2, 1),
        (tensor_parallel_by_the_user, 2, 1),
        (without_values, 2, 1),
        *(
            pytest.param(act, size, accumulate, marks=pytest.mark.slow)
            for act, size, accumulate in [
                (two_dimensions, 4, 1),
                (two_dimensions, 4, 2),
                (sharded_by_the_user, 2, 1),
                (sharded_by_the_user, 4, 1),
                (tensor_parallel_by_the_user, 4, 1),
                (without_values, 4, 1),
                (offloaded, 2, 1),
                (offloaded, 4, 1),
            ]
        ),
    ],
)
def test_training_is_bitwise_the_loop_by_hand(act, size, accumulate):
    run(act, size, size, accumulate, timeout=LIMIT)


def test_model_without_values_is_filled_in_one_process_too():
    filled = net()
    with torch.no_grad():
        for module in filled:
            if isinstance(module, nn.Linear):
                fill(module)
    with torch.device("meta"):
        model = net()
    Learner(model, nn.MSELoss(), adam, plugins=[ToDevice(), FSDP(wrap=nn.Linear, init=fill)], standard=False)
    same(full(model), full(filled))


WIDTH, UNITS = 1024, 8


def peak(rank):
    join(timeout=LIMIT)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    small = {"wrap": nn.Linear, "timeout": LIMIT}
    Learner(net(), nn.MSELoss(), adam, plugins=[FSDP(**small)], standard=False)  # what torch imports and keeps
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # freed memory is the system's own again
    base = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest is counted anew
    with torch.no_grad():
        Learner(model, nn.MSELoss(), adam, plugins=[FSDP(init=fill, **small)], standard=False)
    return (memory("VmHWM") - base) / (4 * UNITS * WIDTH * WIDTH)


def memory(field):
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.slow
def test_no_process_ever_holds_the_whole_of_a_model_without_values():
    shares = run(peak, 2, timeout=LIMIT)
    print(shares)
    assert max(shares) < 0.5 + 3 / UNITS  # its half, a unit, and a copy or two of that


def test_options_out_of_range_are_refused():
    for options in ({"mesh": (2, 2, 2)}, {"mesh": (0,)}, {"init": 3}):
        with pytest.raises(PluginError, match=rf"FSDP\({next(iter(options))}="):
            FSDP(**options)
    assert not dist.is_initialized()


def placed(rank, sizes):
    """The mesh that `FSDP` makes on an accelerator, and the device that ``fully_shard`` takes with it."""
    with pytest.MonkeyPatch.context() as patch:
        fake, made = Fake(patch), []
        fake.joins_by_gloo(patch)
        learner = Learner(net(), nn.MSELoss(), adam, plugins=[FSDP(mesh=sizes)], standard=False)

        def init(kind, sizes, *, mesh_dim_names):
            made.append((kind, sizes, mesh_dim_names))
            return SimpleNamespace(device_type=kind)

        patch.setattr(device_mesh, "init_device_mesh", init)
        meshes = [learner.plugins["fsdp"]._mesh_on("cuda") for _ in range(2)]
        assert meshes[0] is meshes[1]
        return made, str(_get_device_from_mesh(meshes[0]))


def test_mesh_on_an_accelerator_is_of_each_process_s_own_device():
    for sizes, names in ((None, ("parts",)), ((2, 1), ("copies", "parts"))):
        found = run(placed, 2, sizes, timeout=60)
        assert found == [([("cuda", sizes or (2,), names)], f"cuda:{rank}") for rank in range(2)]
