"""What loopkit does on devices: nothing is read too early, nobody waits in a step, and the numbers are the CPU's."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from devices import simulated as sim
from devices.simulated import simulated
from loopkit import Learner, TrainingPhase, checkpoint, every
from loopkit.base import devices, generators
from loopkit.checkpoint.background import Snapshot
from loopkit.distributed.weighting import Weighting
from loopkit.engine.step.window import Window
from loopkit.errors import NonFiniteError
from loopkit.logs import read_log
from loopkit.logs.record import Records
from loopkit.logs.transfer import Transfer
from loopkit.losses import focal_loss
from loopkit.plugins import (
    Checkpoint,
    ClipGradNorm,
    LogMetrics,
    LogTo,
    Metrics,
    MixedPrecision,
    StopOnNonFinite,
    ToDevice,
    WeightAverage,
)
from loopkit.plugins.late import LateValues, read

SECOND = "sim:1"


def batches(count, size=4):
    torch.manual_seed(2)
    return [(torch.randn(size, 3), torch.randn(size, 1)) for _ in range(count)]


def learner(*plugins, device=SECOND, lr=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    return Learner(
        model, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr), plugins=[ToDevice(device), *plugins], standard=False
    )


def weights(trained):
    return [value.cpu() for value in trained.model.state_dict().values()]


def same(one, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@simulated()
def test_background_checkpoint_of_a_model_on_another_device_is_whole(tmp_path):
    trained = learner(Checkpoint(tmp_path, save=every(updates=2)))
    trained.fit(batches(5), epochs=2)
    loaded = learner(device="cpu")
    checkpoint.load(loaded, tmp_path)
    assert same(weights(loaded), weights(trained))


@simulated()
def test_copies_for_a_background_save_are_waited_for_on_each_device():
    snapshot, before = Snapshot(), sim.waits()
    for value in (1.0, 2.0):  # the second time in the same memory
        tensors = {str(n): torch.full((2,), value, device=f"sim:{n}") for n in (0, 1)}
        snapshot.take(SimpleNamespace(tensors={"model": tensors}))
        assert all(copy.isnan().all() for copy in tensors.values())
        snapshot.wait()
        assert [copy.tolist() for copy in tensors.values()] == [[value, value]] * 2
    assert sim.waits() == before


@simulated()
def test_cost_measures_on_the_device_of_the_model():
    cost = pytest.importorskip("loopkit_insight").Cost(show=False)
    trained, before = learner(cost), sim.waits()
    marks = [torch.ops.sim.recorded(n) for n in (0, 1)]
    trained.fit(batches(4), epochs=1)
    assert sim.waits() == before
    assert [torch.ops.sim.recorded(n) for n in (0, 1)] == [marks[0], marks[1] + 8]  # before and after each step
    assert [row[3] for row in cost.table().rows if row[1] == "device"] == [4]


@simulated()
def test_late_values_of_two_devices_are_not_read_too_early():
    late = LateValues()
    values = {"a": torch.full((), 0.5, device=SECOND), "b": torch.tensor(2), "c": 3.0}
    before = sim.waits()
    late.send(values)
    assert late.arrived() == {}
    assert late.arrived() == {"a": 0.5, "b": 2.0, "c": 3.0}
    late.send(values)
    assert late.wait() == {"a": 0.5, "b": 2.0, "c": 3.0}
    assert sim.waits() == before
    assert read({"a": torch.ones((), device="sim:0"), "b": torch.ones((), device=SECOND)}) == {"a": 1.0, "b": 1.0}


@simulated()
def test_scalars_of_a_device_are_read_by_one_wait():
    values = {
        "a": torch.full((), 0.5, device=SECOND),
        "b": torch.ones(1, device=SECOND),
        "c": torch.tensor(2),
        "d": 3.0,
    }
    before = sim.waits()
    assert read(values) == {"a": 0.5, "b": 1.0, "c": 2.0, "d": 3.0}
    assert sim.waits() == before + 1


@simulated()
def test_logged_scalars_of_two_devices_are_not_read_too_early():
    values = {name: torch.full((), 1.5, device=device) for name, device in (("first", "sim:0"), ("second", SECOND))}
    transfer = Transfer(Records([(None, values, ("", 0, 0, 0), 0.0)]))
    assert not transfer.arrived
    assert transfer.records().groups[0].values == {"first": 1.5, "second": 1.5}


@simulated()
def test_guard_reads_losses_late_and_finds_the_bad_one():
    data = batches(6)
    trained = learner(StopOnNonFinite(gradients=True))
    before = sim.waits()
    trained.fit(data, epochs=2)
    assert sim.waits() == before
    data[3] = (data[3][0] * float("nan"), data[3][1])
    with pytest.raises(NonFiniteError):
        learner(StopOnNonFinite()).fit(data, epochs=1)


@simulated(late=False)
def test_guard_of_a_device_that_is_waited_for_waits_seldom():
    data = batches(20)
    trained = learner(StopOnNonFinite())
    moved = sim.waits()
    for inputs, targets in data:
        _ = [devices.to_device(part, torch.device(SECOND)) for part in (inputs, targets)]
    moved = sim.waits() - moved  # there each batch is waited for
    before = sim.waits()
    trained.fit(data, epochs=1)
    assert sim.waits() - before - moved <= 2


@simulated(late=False, like_mps=True)
def test_copies_that_no_event_tells_of_are_waited_for():
    device, buffer = torch.device(SECOND), None
    for value in (1.0, 2.0):  # the second time in the same memory
        buffer = devices.to_host(torch.full((2,), value, device=device), buffer)
        assert devices.Arrival([device]).here
        assert buffer.tolist() == [value, value]
    moved = devices.to_device(buffer, device)
    buffer.fill_(7)
    assert moved.tolist() == [2, 2]


@simulated(late=False, like_mps=True)
def test_late_values_logs_and_copies_for_a_save_are_whole_where_no_event_tells():
    late, value = LateValues(), torch.full((), 0.5, device=SECOND)
    late.send({"a": value, "b": torch.tensor(2), "c": 3.0})
    assert late.arrived() == {}
    assert late.wait() == {"a": 0.5, "b": 2.0, "c": 3.0}
    transfer = Transfer(Records([(None, {"first": value, "second": torch.tensor(0.1)}, ("", 0, 0, 0), 0.0)]))
    assert transfer.records().groups[0].values == {"first": 0.5, "second": torch.tensor(0.1).item()}
    snapshot, tensors = Snapshot(), {str(n): torch.ones(2, device=f"sim:{n}") for n in (0, 1)}
    snapshot.take(SimpleNamespace(tensors={"model": tensors}))
    snapshot.wait()
    assert [copy.tolist() for copy in tensors.values()] == [[1, 1]] * 2


class Reused:
    """A loader that makes each batch in the memory of the one before."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        memory = [torch.empty_like(part) for part in self.data[0]]
        for batch in self.data:
            for mine, part in zip(memory, batch, strict=True):
                mine.copy_(part)
            yield tuple(memory)
            for mine in memory:
                mine.fill_(math.nan)


@simulated(late=False, like_mps=True)
def test_fit_like_on_mps_is_logged_guarded_saved_and_loaded_as_on_the_cpu(tmp_path):
    found = []
    for device in (SECOND, "cpu"):

        def made(name, device=device):
            plugins = [StopOnNonFinite(gradients=True), ClipGradNorm(1.0), WeightAverage(0.9), Metrics()]
            logs = [LogTo(tmp_path / f"{name}-log"), LogMetrics(every=1)]
            return learner(*plugins, *logs, Checkpoint(tmp_path / name, save=every(updates=2)), device=device)

        trained = made(f"{device}-first".replace(":", ""))
        trained.fit(Reused(batches(5)), batches(2), epochs=2)
        again = made(f"{device}-second".replace(":", ""))
        checkpoint.load(again, tmp_path / f"{device}-first".replace(":", ""))
        assert same(weights(again), weights(trained))
        again.fit(Reused(batches(5)), batches(2), epochs=3)
        log = read_log(tmp_path / f"{device}-first-log".replace(":", ""))
        found.append((weights(again), log.values("train/loss"), log.values("val/loss"), again.metrics))
        bad = batches(3)
        bad[1][0].fill_(math.nan)
        with pytest.raises(NonFiniteError):
            made("bad").fit(bad, epochs=1)
    (mine, *mine_logged), (cpu, *cpu_logged) = found
    assert same(mine, cpu)
    for values, expected in zip(mine_logged, cpu_logged, strict=True):
        assert values == pytest.approx(expected, rel=1e-6)  # sums in float32


@simulated(like_mps=True)
def test_distance_of_an_average_needs_no_float64():
    averaging = pytest.importorskip("loopkit_local.averaging")
    before, after = ([torch.full((2,), value, device=device) for device in ("sim:0", SECOND)] for value in (3.0, 1.0))
    assert averaging.distance(before, after) == 2.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@simulated()
def test_standard_stack_does_not_wait_in_a_step_and_is_bitwise_the_cpu_s(dtype):
    def stack(device):
        plugins = [Metrics(), StopOnNonFinite(gradients=True), ClipGradNorm(1.0), WeightAverage(0.9)]
        plugins += [] if dtype == "float32" else [MixedPrecision(dtype)]
        return learner(*plugins, device=device)

    mine, cpu = stack(SECOND), stack("cpu")
    for trained in (mine, cpu):
        trained.fit(batches(6), epochs=1)
    assert same(weights(mine), weights(cpu))
    assert mine.metrics == cpu.metrics
    waits = []
    for count in (2, 8):
        before = sim.waits()
        mine.fit(batches(count), epochs=1)
        waits.append(sim.waits() - before)
    assert waits[0] == waits[1]  # of the epoch, none of its steps


@simulated()
def test_numbers_and_lists_get_to_a_device_without_a_wait():
    outputs, targets = torch.randn(4, 3, device=SECOND), torch.tensor([0, 1, 2, 1]).to(SECOND)
    before = sim.waits()
    loss = focal_loss(outputs, targets, alpha=[0.2, 0.3, 0.5])
    part = devices.scalar(3.0, torch.device(SECOND), torch.float32)
    ToDevice(SECOND).move_batch(batches(1)[0])
    assert sim.waits() == before
    assert loss.item() == focal_loss(outputs.cpu(), targets.cpu(), alpha=[0.2, 0.3, 0.5]).item()
    assert part.item() == 3.0


@simulated()
def test_share_of_a_weighted_average_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(2))
    weighting, before = Weighting(True), sim.waits()
    shares = [weighting.share(weight, torch.device(SECOND), 2) for weight in (4.0, torch.tensor(4.0))]
    assert sim.waits() == before
    assert [share.item() for share in shares] == [1.0, 1.0]


@pytest.mark.parametrize("on", ["cpu", "sim:0", "sim:1"])
@simulated()
def test_window_with_tensor_weights_scales_gradients_on_two_devices(on):
    params = [nn.Parameter(torch.ones(2, device=device)) for device in ("sim:0", "sim:1")]
    window = Window("optimizer", torch.optim.SGD(params, 0.1), 2, True)
    before = sim.waits()
    for weight in (1.0, 3.0):
        step, tensor = object(), torch.full((), weight, device=on)
        window.enter(step, tensor)
        for p in params:
            p.grad = torch.ones_like(p) if p.grad is None else p.grad
    window.rescale()
    assert sim.waits() == before
    assert [p.grad.tolist() for p in params] == [[0.5, 0.5]] * 2


class Halves(nn.Module):
    """A model over two devices."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).to(first), nn.Linear(4, 1).to(second)

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight.device))


class OnTwo(TrainingPhase):
    def unpack(self, batch):
        inputs, targets = batch
        model = self.model
        return inputs.to(model.first.weight.device), targets.to(model.second.weight.device)


def over(first, second, *plugins):
    model = Halves(first, second)
    phase = OnTwo()
    phase.model = model
    return Learner(
        model, nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.1), plugins=plugins, phases=[phase], standard=False
    )


@simulated()
def test_model_over_two_devices_is_averaged_guarded_and_saved_as_on_the_cpu(tmp_path):
    states = []
    for number, places in enumerate([("sim:0", "sim:1"), ("cpu", "cpu")]):
        average = WeightAverage(0.9)
        plugins = [average, StopOnNonFinite(gradients=True), Checkpoint(tmp_path / str(number))]
        trained = over(*places, *plugins)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained.fit(batches(6), epochs=2)
        averaged = [value.cpu() for value in average.model_state(trained).values()]
        loaded = over("cpu", "cpu", WeightAverage(0.9), StopOnNonFinite(gradients=True))
        checkpoint.load(loaded, tmp_path / str(number))
        assert same(weights(loaded), weights(trained))
        states.append([*weights(trained), *averaged])
    assert same(*states)


@simulated()
def test_generators_of_the_devices_are_in_the_state():
    state = generators.save()
    assert [values.dtype for values in state["sim"]] == [torch.uint8] * 2
    generators.restore(state)


@simulated()
def test_lane_that_was_waited_for_has_done_its_work():
    value, before = torch.ones(2, device=SECOND), sim.waits()
    lane = devices.Lane(torch.device(SECOND))
    lane.follow()
    with lane.stream:
        value.mul_(3)
    assert (value + 0).tolist() == [1, 1]
    lane.wait()
    assert (value + 0).tolist() == [3, 3]
    assert sim.waits() == before + 2  # of the reads
