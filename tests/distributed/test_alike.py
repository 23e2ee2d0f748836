"""Processes that differ are refused, by what they are made with or by parameters; what only looks on may differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed.processes import run
from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.data import TensorLoader
from loopkit.distributed.checksum import checksums, combined
from loopkit.errors import WorldError
from loopkit.metrics import Accuracy
from loopkit.plugins import (
    DDP,
    Checkpoint,
    ClipGradNorm,
    ClipGradValue,
    EarlyStopping,
    LogTo,
    Metrics,
    SkipSpikes,
    WeightAverage,
)


def samples(count=96):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def make_learner(*plugins, loss_fn=None, phases=(), order=(), **more):
    torch.manual_seed(0)
    return Learner(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        loss_fn or nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        plugins=[DDP(timeout=60), *plugins],
        phases=phases,
        order=order,
        standard=False,
        **more,
    )


def loader(seed=3, **more):
    return TensorLoader(*samples(), **{"batch_size": 2, "shuffle": True, "seed": seed, **more})


def torch_loader(seed):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*samples()), batch_size=2, shuffle=True, generator=generator)


class OwnPhase(TrainingPhase):
    pass


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, outputs, targets):
        return self.factor * nn.functional.cross_entropy(outputs, targets)


def smoothed(amount):
    return lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=amount)


CLIPS = [["clip_grad_norm", "clip_grad_value"], ["clip_grad_value", "clip_grad_norm"]]
DIFFERENT = {
    "option": (lambda own: make_learner(ClipGradNorm(1.0 + own)), "option max_norm of plugin 'clip_grad_norm'"),
    "option of an observer of the metrics": (
        lambda own: make_learner(Metrics(), EarlyStopping("train/loss", patience=2 + own)),
        "option patience of plugin 'early_stopping'",
    ),
    "plugin": (lambda own: make_learner(*[WeightAverage(0.9)] * own), "list of plugins"),
    "plugin that talks": (lambda own: make_learner(*[SkipSpikes()] * own), "list of plugins"),
    "metric": (lambda own: make_learner(Metrics(Accuracy(axis=1 - 2 * own))), "option metrics of plugin 'metrics'"),
    "loss": (lambda own: make_learner(loss_fn=[nn.CrossEntropyLoss(), nn.NLLLoss()][own]), "loss"),
    "option of a loss": (lambda own: make_learner(loss_fn=Scaled(1.0 + own)), "loss"),
    "function": (lambda own: make_learner(loss_fn=smoothed(0.1 * own)), "loss"),
    "phase": (lambda own: make_learner(phases=[[TrainingPhase, OwnPhase][own]("train")]), "phase 'train'"),
    "order": (
        lambda own: make_learner(ClipGradNorm(1.0), ClipGradValue(1.0), order=CLIPS[own]),
        "order of plugins",
    ),
}
DATA = {
    "seed": (lambda own: loader(seed=3 + own), "seed of the data of phase 'train'"),
    "batch size": (lambda own: loader(batch_size=2 + own), "batch_size of the data of phase 'train'"),
    "seed of a sampler": (lambda own: torch_loader(3 + own), "seed of the data of phase 'train'"),
}


def refused(rank, table, what):
    made, _ = table[what]
    learner = made(rank) if table is DIFFERENT else make_learner()
    data = made(rank) if table is DATA else loader()
    limit = {"max_steps": 7 + rank} if what == "limit" else {"epochs": 1}
    with pytest.raises(WorldError, match="rank 1 is not set up as rank 0: its") as caught:
        learner.fit(data, **limit)
    assert learner.progress.steps == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("table", "what"), [*((DIFFERENT, what) for what in DIFFERENT), *((DATA, what) for what in DATA)]
)
def test_processes_that_were_made_with_something_else_are_refused_before_the_first_step(table, what):
    for said in run(refused, 2, table, what):
        assert f"its {table[what][1]} differs (" in said


def limited(rank):
    for limit in ("max_steps", "max_updates", "epochs"):
        with pytest.raises(WorldError, match=r"its limit of the fit differs \(.*8.* there, .*7.* on rank 0\)"):
            make_learner().fit(loader(), **{limit: 7 + rank})


def test_processes_with_other_limits_are_refused():
    run(limited, 2)


class Logger:
    def __init__(self):
        self.steps = 0

    @hookimpl
    def step_end(self):
        self.steps += 1


def allowed(rank, directory):
    own = directory / str(rank)
    plugins = [LogTo(own / "log.jsonl"), Checkpoint(own if rank else directory / "all")]
    if rank == 0:
        plugins.append(Logger())
    learner = make_learner(*plugins)
    learner.fit(loader(), epochs=1)
    return [p.detach().clone() for p in learner.model.parameters()]


def test_plugins_that_look_on_and_paths_may_differ(tmp_path):
    one, other = run(allowed, 2, tmp_path)
    assert all(map(torch.equal, one, other))


class Drifts:
    """Changes something in one process alone, and declares nothing."""

    def __init__(self, what, rank):
        self.what, self.rank = what, rank

    @hookimpl
    @torch.no_grad()
    def update_end(self, learner):
        if learner.world.rank == self.rank:
            dict(learner.model.named_parameters())[self.what][..., 0] += 1e-6


def parted(rank, name, who):
    learner = make_learner(Drifts(name, who))
    with pytest.raises(WorldError, match="the processes have parted") as caught:
        learner.fit(loader(), epochs=3)
    return str(caught.value), learner.progress.epochs


@pytest.mark.parametrize(("size", "name", "who", "says"), [(2, "3.bias", 0, 1), (3, "1.weight", 2, 2)])
def test_processes_whose_parameters_part_are_stopped_at_the_end_of_the_epoch(size, name, who, says):
    for said, epochs in run(parted, size, name, who):
        assert f"{name} of rank {says} differs from rank 0" in said
        assert epochs == 1


class Counting(DDP):
    """Keeps the steps at which what is equal was asked for."""

    def __init__(self):
        super().__init__(timeout=60)
        self.asked = []

    def equal(self, learner):
        self.asked.append(learner.progress.steps)
        return super().equal(learner)


def counted(rank):
    ddp = Counting()
    learner = Learner(nn.Linear(6, 3), nn.CrossEntropyLoss(), torch.optim.AdamW, plugins=[ddp], standard=False)
    state = learner.state_dict()
    learner.evaluate(loader())
    learner.fit(loader(), loader(), epochs=10)
    learner.load_state_dict(state)
    learner.fit(loader(), epochs=1)
    return ddp.asked


def test_parameters_are_compared_at_most_once_in_100_steps():
    assert run(counted, 2) == [[24, 144, 24]] * 2


@pytest.mark.parametrize(("sync", "buffers"), [(DDP, True), (lambda: DDP(broadcast_buffers=False), False)])
def test_what_is_compared_are_parameters_and_buffers_that_are_copied(sync, buffers):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    plugin = sync()
    learner = Learner(model, nn.MSELoss(), torch.optim.SGD, plugins=[plugin], standard=False)
    names = [name for name, _ in (*model.named_parameters(), *(model.named_buffers() if buffers else ()))]
    assert list(plugin.equal(learner)) == names


def test_checksum_is_of_every_bit_of_every_tensor():
    tensors = [torch.arange(4.0), torch.tensor([1 + 2j], dtype=torch.complex128), torch.ones(3, dtype=torch.uint8)]
    plain = checksums(tensors)
    assert checksums([tensor.clone() for tensor in tensors]) == plain
    for index, tensor in enumerate(tensors):
        changed = [each.clone() for each in tensors]
        changed[index][-1] = tensor[-1] + (
            1e-6j if tensor.is_complex() else 2**-20 if tensor.is_floating_point() else 1
        )
        now = checksums(changed)
        assert [a == b for a, b in zip(now, plain, strict=True)] == [each != index for each in range(3)]
        assert combined(now) != combined(plain)
    assert combined(plain) <= 2**53
    assert len({combined([number]) for number in range(2000)}) == 2000
