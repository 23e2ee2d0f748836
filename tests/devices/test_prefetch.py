"""Batches that are made and copied ahead: the same ones, in time, and from an exact position."""

import copy
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from devices import simulated as sim
from devices.simulated import simulated
from loopkit import Learner, hookimpl
from loopkit.base import devices
from loopkit.data import LoaderError, Prefetch, TensorLoader, from_function
from loopkit.plugins import ToDevice


def tensors(samples=20):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator)


def loader(**options):
    noise = TensorLoader(*tensors(), batch_size=4, shuffle=True, seed=3)
    return noise.map(lambda batch, generator: (batch[0] + torch.rand(3, generator=generator), batch[1]), seed=5)


def same(one, other):
    return all(
        torch.equal(a.cpu(), b.cpu()) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@simulated()
def test_batches_are_the_loader_s_and_nobody_waits_for_them():
    plain, ahead = loader(), Prefetch(loader(), "sim:1")
    for _ in range(2):
        before, found = sim.waits(), []
        for inputs, targets in ahead:
            assert str(inputs.device) == "sim:1"
            found.append((inputs + 0, targets + 0))  # what the step reads when it runs
        assert sim.waits() == before
        assert same(found, list(plain))


@simulated(late=False, like_mps=True)
def test_without_events_batches_are_the_loader_s():
    found = list(Prefetch(loader(), "sim:1"))
    assert {str(part.device) for batch in found for part in batch} == {"sim:1"}
    assert same(found, list(loader()))


@simulated()
def test_next_batch_is_on_its_way_while_one_is_used(monkeypatch):
    ready, pin = threading.Semaphore(0), devices.pinned

    def pinned(tensor):
        made = pin(tensor)
        ready.release()
        return made

    monkeypatch.setattr(devices, "pinned", pinned)
    batches = iter(Prefetch(from_function(5, lambda n: torch.full((2,), float(n))), "sim"))
    found, queued = [], []
    for number in range(5):
        for _ in range(2 if number == 1 else number < 4 and number > 0):
            assert ready.acquire(timeout=10)
        time.sleep(0.1)  # until the thread has handed it over
        batch = next(batches)
        queued.append(torch.ops.sim.queued(0) > 0)
        found.append(batch.tolist())
    assert found == [[n, n] for n in range(5)]
    assert queued[1:] == [True, True, True, False]  # the next one's copy


@simulated()
def test_copy_that_is_not_waited_for_would_be_seen(monkeypatch):
    monkeypatch.setattr(devices.Lane, "receive", lambda self, event, copies: None)
    batches = Prefetch(TensorLoader(torch.ones(4), batch_size=2), "sim", resident=False)
    assert all((batch + 0).isnan().all() for batch in batches)


@simulated()
def test_tensors_that_fit_are_resident_and_else_they_are_streamed():
    x, y = tensors()
    plain = TensorLoader(x, y, batch_size=4, shuffle=True)
    free = 2 * (x.nbytes + y.nbytes)
    for limit, kept in ((1 << 30, True), (free, True), (free - 1, False)):
        torch.ops.sim.limit(0, torch.accelerator.memory_allocated(0) + limit)
        ahead = Prefetch(TensorLoader(x, y, batch_size=4, shuffle=True), "sim")
        plain.set_epoch(0)
        ahead._kept, ahead._tried = ahead._on_device(), True
        assert (ahead._kept is not None) == kept
        torch.ops.sim.limit(0, 0)
        assert same(list(ahead), list(plain))
        del ahead


@simulated()
def test_memory_that_runs_out_after_all_is_no_error(monkeypatch):
    monkeypatch.setattr(devices, "fits", lambda size, device: True)
    torch.ops.sim.limit(0, 150)
    ahead = Prefetch(TensorLoader(torch.arange(40.0), batch_size=2), "sim")
    assert [batch.tolist() for batch in ahead] == [[2.0 * n, 2.0 * n + 1] for n in range(20)]
    assert ahead._kept is None
    torch.ops.sim.limit(0, 0)
    ahead = Prefetch(TensorLoader(torch.arange(40.0), batch_size=2, shuffle=True), "sim")
    expected = [batch.tolist() for batch in TensorLoader(torch.arange(40.0), batch_size=2, shuffle=True)]
    next(iter(ahead))

    def fail(*given):
        raise torch.OutOfMemoryError("in the middle")

    monkeypatch.setattr(ahead._kept, "_gather", fail)
    ahead.set_epoch(0)
    found = [batch.tolist() for batch in ahead]
    assert (found, ahead._kept) == (expected, None)


class Save:
    """Keep the state after some steps."""

    name = "save"

    def __init__(self):
        self.state = None

    @hookimpl
    def step_end(self, learner):
        if learner.progress.steps == 7:
            self.state = copy.deepcopy(learner.state_dict())


def fitted(data, state=None):
    torch.manual_seed(0)
    save, sgd = Save(), partial(torch.optim.SGD, lr=0.1)
    learner = Learner(nn.Linear(3, 1), nn.MSELoss(), sgd, plugins=[ToDevice("sim"), save], standard=False)
    if state is not None:
        learner.load_state_dict(state)
    learner.fit(data, epochs=2)
    return learner.model.weight, save.state


@simulated()
def test_position_is_that_of_the_batches_that_were_used():
    whole, _ = fitted(loader())
    for first, second in ((Prefetch, Prefetch), (Prefetch, lambda data, device: data)):
        weight, state = fitted(first(loader(), "sim"))
        assert torch.equal(weight, whole)
        assert torch.equal(fitted(second(loader(), "sim"), state)[0], whole)
    assert len(Prefetch(loader(), "sim").shard(1, 2)) == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_streams_the_thread_works_ahead(device):
    found = list(Prefetch(loader(), device))
    assert {part.device.type for batch in found for part in batch} == {device}
    assert device == "meta" or same(found, list(loader()))


def test_error_of_the_loader_comes_after_the_batches_before_it():
    def make(number):
        if number == 2:
            raise OSError("the disk is gone")
        return torch.tensor(number)

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(int(batch) for batch in Prefetch(from_function(4, make), "cpu"))
    assert seen == [0, 1]
    batches = iter(Prefetch(from_function(4, make), "cpu"))
    assert [int(next(batches)) for _ in range(2)] == [0, 1]
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loopkit-prefetch")]


def test_numbers_of_the_global_generator_are_those_of_a_loop_without_a_thread():
    def drawn(batch):
        time.sleep(0.002)  # a thread would draw while the main thread does
        return batch + torch.rand(3)

    def numbers(wrap):
        torch.manual_seed(0)
        batches = wrap(TensorLoader(torch.zeros(12, 3), batch_size=2).map(drawn))
        return [torch.cat([batch, torch.rand(2, 3)]) for _ in range(2) for batch in batches]

    expected = numbers(lambda loader: loader)
    with pytest.warns(UserWarning, match="draws from torch's global generator") as said:
        found = numbers(lambda loader: Prefetch(loader, "cpu"))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(said) == 1


def test_other_loaders_are_refused():
    with pytest.raises(LoaderError, match="num_workers=2, pin_memory=True"):
        Prefetch([torch.zeros(1)], "cpu")
