"""Memory of a device: its limit makes steps smaller, and its peak is a metric."""

import io

import pytest
import torch
from helpers import on
from torch import nn

from devices.simulated import apart, simulated
from loopkit import Learner
from loopkit.plugins import Metrics, Progress, ToDevice

SECOND = "sim:1"


def learner(*plugins, device=SECOND):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2048), nn.Tanh(), nn.Linear(2048, 1))
    return Learner(
        model, nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.1), plugins=[ToDevice(device), *plugins], standard=False
    )


def batches(count=3, size=64):
    torch.manual_seed(2)
    return [(torch.randn(size, 6), torch.randn(size, 1)) for _ in range(count)]


@simulated()
def test_limit_of_a_device_makes_steps_smaller_with_the_bits_of_that_size():
    micro_batch = pytest.importorskip("loopkit_recipes").MicroBatch
    tried = learner(micro_batch("auto"))
    torch.ops.sim.limit(1, torch.accelerator.memory_allocated(1) + 900_000)  # the activations of 64 take 1 MB
    tried.fit(batches(), epochs=2)
    fitted = tried.plugins["micro_batch"].state_dict()["fits"]
    values = [p.cpu() for p in tried.model.parameters()]
    tried.replace("micro_batch", micro_batch(64))
    with pytest.raises(torch.OutOfMemoryError):  # whose traceback keeps what was allocated
        tried.fit(batches(), epochs=1)
    torch.ops.sim.limit(1, 0)
    assert fitted in (32, 16)
    fixed = learner(micro_batch(fitted))
    fixed.fit(batches(), epochs=2)
    for mine, theirs in zip(values, fixed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs.cpu())


@simulated()
def test_peak_of_an_epoch_is_in_its_metrics_and_its_line():
    peak, out = pytest.importorskip("loopkit_insight").PeakMemory(), io.StringIO()
    trained = learner(peak, Metrics(), Progress(bar=False, file=out))
    peaks = []
    for size in (64, 8):
        data = batches(size=size)
        trained.fit(data, data[:1], epochs=1)
        peaks.append([trained.metrics[f"{phase}/peak_memory"] for phase in ("train", "val")])
    held = 4 * sum(p.numel() for p in trained.model.parameters())
    assert peaks[0][0] > held + 2 * 64 * 2048 * 4 > peaks[1][0] > peaks[1][1] > held
    assert "train/peak_memory 1." in out.getvalue()


@simulated()
def test_peak_of_an_epoch_holds_over_one_that_a_hook_runs():
    peak, data = pytest.importorskip("loopkit_insight").PeakMemory(), batches(size=64)
    probe = on("step_end", lambda learner, phase: phase.training and learner.evaluate(data[:1]))
    plain, probed = learner(peak), learner(type(peak)(), probe)
    for trained in (plain, probed):
        trained.fit(data, epochs=1)
    assert probed.metrics["train/peak_memory"] >= plain.metrics["train/peak_memory"]


@apart
def test_peak_is_no_metric_of_the_cpu():
    trained = learner(pytest.importorskip("loopkit_insight").PeakMemory(), device="cpu")
    trained.fit(batches(1, 4), epochs=1)
    assert "train/peak_memory" not in trained.metrics
