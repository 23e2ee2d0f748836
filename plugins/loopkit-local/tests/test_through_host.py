"""Copies to the host and back: few, late, and bitwise those of each tensor by itself."""

import pytest
import torch
from devices import simulated as sim
from devices.simulated import simulated
from distributed.processes import run
from small import same

from loopkit.author import devices
from loopkit.distributed import join
from loopkit_local import averaging
from loopkit_local.averaging import Average, Parts, to_devices, to_host

SHAPES = [(3, 2), (), (0, 4), (5,), (2, 3, 4, 4)]


def some(device, seed=0):
    """Tensors of many shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    made = [10 * torch.randn(shape, generator=generator) for shape in SHAPES]
    made[-1] = made[-1].to(memory_format=torch.channels_last)
    made += [each.bfloat16() for each in made] + [torch.complex(made[0], -made[0]).conj(), made[0].double()]
    return [each.to(device) for each in (*made, made[0].long(), torch.tensor(True))]


@pytest.fixture
def copies(monkeypatch):
    """How many copies are made to the host, and to a device."""
    made = {"to_host": 0, "to_device": 0}

    def counted(name):
        copy = getattr(devices, name)

        def count(*args):
            made[name] += 1
            return copy(*args)

        monkeypatch.setattr(devices, name, count)

    for name in made:
        counted(name)
    return made


def parts_of(tensors):
    return Parts(tensors[:9], {("model", n): tensor for n, tensor in enumerate(tensors[9:12])}, tensors[12:])


@pytest.mark.parametrize("limit", [averaging.BUCKET_BYTES, 16])
@simulated()
def test_tensors_go_to_the_host_and_back_by_few_copies_that_nobody_waits_for(copies, limit, monkeypatch):
    monkeypatch.setattr(averaging, "BUCKET_BYTES", limit)
    tensors, own = [*some("sim:0"), *some("sim:1", 1)], [*some("cpu"), *some("cpu", 1)]
    before = sim.waits()
    snapshot = Parts(tensors).snapshot(host=True)
    for tensor in tensors:
        tensor.zero_()  # what comes after the copy
    assert not same(snapshot.params, own)  # it is not there yet
    snapshot.arrival.wait()
    assert same(snapshot.params, own)
    back = to_devices(snapshot.params, tensors)
    assert sim.waits() == before
    assert [each.device for each in back] == [each.device for each in tensors]
    assert same([each.cpu() for each in back], own)
    kinds = 2 * len({each.dtype for each in some("cpu")})
    if limit == 16:  # bytes: some need several copies, and some tensors share one
        assert kinds < copies["to_host"] < len(tensors)
        assert copies["to_device"] == copies["to_host"]
    else:
        assert copies == {"to_host": kinds, "to_device": kinds}


def test_copies_on_the_host_are_copies_of_their_own():
    for tensors in (some("cpu"), [torch.ones(3)]):
        made = to_host(tensors)
        assert same(made, tensors)
        for tensor in tensors:
            tensor.zero_()
        assert made[0].count_nonzero()


def test_parts_keep_their_keys_and_dtypes():
    parts = parts_of(some("cpu"))
    for made in (parts.snapshot(host=True), parts.snapshot(host=False)):
        assert list(made.others) == list(parts.others)
        assert same(made.tensors(), parts.tensors())
        assert [each.dtype for each in made.tensors()] == [each.dtype for each in parts.tensors()]


def averaged(rank, host):
    join("gloo")
    average = Average(parts_of(some("cpu", rank)).snapshot(host), [1.0 + rank], background=host)
    average.wait()
    return [each.resolve_conj() for each in average.result.tensors()]


def test_averages_are_bitwise_those_of_each_tensor_by_itself():
    one, other = run(averaged, 2, True)
    assert same(one, other)
    assert same(one, run(averaged, 2, False)[0])


def test_values_of_another_dtype_are_rounded_as_by_the_target():
    targets = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros((), dtype=torch.float64)]
    values = [torch.tensor([1.001, 2.003, 3.007]), torch.tensor(0.1)]
    made = to_devices(values, targets)
    assert same(made, [value.to(target.dtype) for value, target in zip(values, targets, strict=True)])
