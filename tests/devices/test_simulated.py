"""What the simulated devices show, so that tests that stand on them can fail."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from devices import simulated as sim
from devices.simulated import simulated


def pinned(*size):
    return torch.zeros(size, pin_memory=True)


@simulated()
def test_copy_to_the_host_is_there_when_its_own_device_says_so():
    for device in ("sim:0", "sim:1"):
        other = "sim:1" if device == "sim:0" else "sim:0"
        value, host = torch.ones(3, device=device), pinned(3)
        host.copy_(value, non_blocking=True)
        wrong, own = torch.Event(other), torch.Event(device)
        wrong.record(torch.accelerator.current_stream(torch.device(other)))
        own.record(torch.accelerator.current_stream(torch.device(device)))
        wrong.synchronize()
        assert host.isnan().all()
        assert not own.query()
        own.synchronize()
        assert own.query()
        assert host.tolist() == [1, 1, 1]


@simulated()
def test_copy_to_the_host_is_of_the_moment_and_one_from_there_is_not():
    value, host = torch.ones(2, device="sim"), pinned(2)
    host.copy_(value, non_blocking=True)
    value.fill_(5)
    torch.accelerator.synchronize()
    assert host.tolist() == [1, 1]
    moved = host.to("sim", non_blocking=True)
    host.fill_(7)  # too early
    assert moved.tolist() == [7, 7]
    unpinned = torch.ones(2)
    moved = unpinned.to("sim", non_blocking=True)
    unpinned.fill_(7)
    assert moved.tolist() == [1, 1]


@simulated(like_mps=True)
def test_like_mps_copies_of_unpinned_memory_are_late():
    value, host = torch.ones(2, device="sim"), torch.zeros(2)
    host.copy_(value, non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert host.tolist() == [1, 1]
    moved = host.to("sim", non_blocking=True)
    host.fill_(7)  # too early
    assert moved.tolist() == [7, 7]
    assert torch.ones(2).to("sim").cpu().tolist() == [1, 1]


@simulated(like_mps=True)
def test_like_mps_there_is_no_float64():
    value = torch.ones(2, device="sim")
    for make in (
        value.double,
        lambda: torch.zeros(1, dtype=torch.float64, device="sim"),
        lambda: value.sum(dtype=torch.float64),
    ):
        with pytest.raises(TypeError, match="sim has no Double"):
            make()
    assert (value * 0.5).cpu().double().tolist() == [0.5, 0.5]


@simulated()
def test_event_of_one_device_is_not_recorded_on_a_stream_of_another():
    event, other = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    before = [torch.ops.sim.recorded(n) for n in (0, 1)]
    event.record(torch.accelerator.current_stream(torch.device("sim:1")))
    with pytest.raises(RuntimeError, match="an event of sim:1 is recorded on a stream of sim:0"):
        event.record(torch.accelerator.current_stream(torch.device("sim:0")))
    other.record(torch.accelerator.current_stream(torch.device("sim:0")))
    with pytest.raises(RuntimeError, match="of two devices"):
        event.elapsed_time(other)
    assert [torch.ops.sim.recorded(n) for n in (0, 1)] == [count + 1 for count in before]


@pytest.mark.parametrize("how", ["copy", "in place", "new"])
@pytest.mark.parametrize("waited", [False, True])
@simulated()
def test_side_stream_that_nobody_waits_for_leaves_old_bytes(how, waited):
    value = torch.ones(2, device="sim")
    side = torch.Stream("sim")
    with side:
        if how == "copy":
            value.copy_(torch.full((2,), 4.0).pin_memory(), non_blocking=True)
        elif how == "in place":
            value.mul_(3).add_(1)
        else:
            value = value * 3 + 1
    if waited:
        torch.accelerator.current_stream().wait_stream(side)
    seen = (value + 0).tolist()
    assert all(map(math.isnan, seen)) if how == "new" and not waited else seen == [4, 4] if waited else seen == [1, 1]


@simulated()
def test_reads_are_counted_and_their_lines_named():
    value, before = torch.ones(3, device="sim"), sim.waits()
    value.sum().mul(2)
    torch.full((2,), 3.0, device="sim")
    assert sim.waits() == before
    with sim.told() as lines:
        value.sum().item()
        value.cpu()
        value.nonzero()
        torch.as_tensor([1.0], device="sim")
    assert sim.waits() == before + 4
    assert [(file, line - lines[0][1]) for file, line, _ in lines] == [("test_simulated.py", n) for n in range(4)]
    assert [what for *_, what in lines] == [
        f"the host waits for sim:0 ({what})"
        for what in ("item", "a copy to the host", "aten::nonzero", "a copy from the host")
    ]


@simulated()
def test_memory_is_new_limited_counted_and_of_one_device():
    assert torch.empty(2, device="sim").isnan().all()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    value = torch.ones(1000, device="sim")
    assert torch.accelerator.memory_allocated() == before + 4000
    torch.ops.sim.limit(0, before + 5000)
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 is out of memory"):
        value + 1
    assert torch.ones(1000, device="sim:1").device.index == 1
    torch.ops.sim.limit(0, 0)
    assert torch.accelerator.max_memory_allocated() >= before + 4000
    with pytest.raises(RuntimeError, match="same device"):
        value + value.to("sim:1")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 2))


def trained(device, optimizer, autocast):
    model = net().to(device)
    update = optimizer(model.parameters())
    torch.manual_seed(1)
    for _ in range(5):
        x, y = torch.randn(8, 6), torch.randn(8, 2)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        update.step()
        update.zero_grad()
    return [value.cpu() for value in model.state_dict().values()]


@simulated()
def test_training_is_bitwise_that_of_the_cpu():
    for foreach in (False, True):
        for autocast in (False, True):
            adamw = partial(torch.optim.AdamW, lr=0.01, foreach=foreach)
            for mine, cpu in zip(trained("sim", adamw, autocast), trained("cpu", adamw, autocast), strict=True):
                assert torch.equal(mine, cpu)
