"""A dry run goes through all phases, and leaves everything as it was; anomaly detection names the forward call."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Learner, PredictionPhase, ValidationPhase, every
from loopkit.data import TensorLoader
from loopkit.errors import PluginError
from loopkit.plugins import Checkpoint, EarlyStopping, History, LogMetrics, LogTo, Metrics, Schedule, WeightAverage
from loopkit.schedules import cosine
from loopkit_insight import DetectAnomaly, dry_run

TENSORS = torch.arange(24.0).reshape(8, 3) / 24, torch.ones(8, 1)
SETS = {
    "list": lambda: batches(4),
    "loader": lambda: TensorLoader(*TENSORS, batch_size=2, shuffle=True),
    "shuffled": lambda: DataLoader(TensorDataset(*TENSORS), 2, shuffle=True),
    "own generator": lambda: DataLoader(TensorDataset(*TENSORS), 2, shuffle=True, generator=torch.Generator()),
    "function": lambda: lambda: batches(4),
}


def learner_of(path, *plugins):
    """A learner with all that writes."""
    stack = [Metrics(), History(), Schedule(cosine(updates=16)), WeightAverage(0.9), EarlyStopping("val/loss")]
    writing = [Checkpoint(path / "saved", save=every(updates=1)), LogTo(path / "log"), LogMetrics(every=1)]
    return make_learner(*stack, *writing, *plugins, model=nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)))


@pytest.mark.parametrize("kind", SETS)
def test_dry_run_changes_and_writes_nothing(kind, tmp_path):
    def fitted(path, dry):
        torch.manual_seed(0)
        learner = learner_of(path)
        train, val = SETS[kind](), SETS[kind]()
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(5)
        if dry:
            before = copy.deepcopy(learner.state_dict())
            found = dry_run(learner, train, val, predict=val)
            assert {"train/loss", "val/loss"} <= found.keys()
            assert not list(path.iterdir())
            assert str(before) == str(learner.state_dict())
            assert not learner.metrics
        learner.fit(train, val, epochs=2)
        return [p.tolist() for p in learner.model.parameters()], learner.metrics, random.random(), torch.rand(1).item()

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert fitted(tmp_path / "a", False) == fitted(tmp_path / "b", True)


def by_lightning(count):
    """The batches that Lightning trains and validates in such a run."""
    lightning = pytest.importorskip("lightning")
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch):
            seen.append("train")
            return self.layer(batch[0]).mean()

        def validation_step(self, batch, index):
            seen.append("val")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(fast_dev_run=count, accelerator="cpu", **options)
    trainer.fit(Module(), *(DataLoader(TensorDataset(*TENSORS), 2) for _ in range(2)))
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 3])
def test_dry_run_goes_over_the_batches_that_lightning_does(count):
    seen = []  # functions are shared by a copy

    def loss(outputs, targets):
        seen.append("train" if torch.is_grad_enabled() else "val")
        return nn.functional.mse_loss(outputs, targets)

    loader = TensorLoader(*TENSORS, batch_size=2)
    learner = Learner(nn.Linear(3, 1), loss, torch.optim.SGD, standard=False)
    dry_run(learner, loader, loader, batches=count)
    assert seen == by_lightning(count)


def test_mistakes_of_each_phase_are_found():
    class Broken(PredictionPhase):
        def step(self, learner, step):
            raise ValueError("in predict")

    class BrokenVal(ValidationPhase):
        def step(self, learner, step):
            raise ValueError("in val")

    with pytest.raises(ValueError, match="in val"):
        dry_run(make_learner(phases=[BrokenVal()]), batches(3), batches(3))
    learner = make_learner(phases=[Broken()])
    dry_run(learner, batches(3), batches(3))
    with pytest.raises(ValueError, match="in predict"):
        dry_run(learner, batches(3), batches(3), predict=batches(2))


def test_plugin_that_is_named_takes_no_part():
    breaking = on("step_end", lambda: 1 / 0, "breaking")
    with pytest.raises(ZeroDivisionError):
        dry_run(make_learner(breaking), batches(3))
    dry_run(make_learner(breaking), batches(3), without=["breaking"])
    dry_run(make_learner(breaking), batches(3), without="breaking")
    with pytest.raises(ZeroDivisionError):
        dry_run(make_learner(breaking), batches(3), without="breaking_too")


@pytest.mark.parametrize("make", [lambda: iter(batches(3)), lambda: (each for each in batches(3))])
def test_data_that_cannot_begin_again_raise(make):
    with pytest.raises(PluginError, match="whose place cannot be put back"):
        dry_run(make_learner(), make())
    with pytest.raises(PluginError, match="batches is 0"):
        dry_run(make_learner(), batches(3), batches=0)


class Root(nn.Module):
    """Its gradient at 0 is nan, and its output is not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return (self.weight * 0.0).sqrt() * inputs[:, :1] * 0.0


def test_anomaly_names_the_forward_call_of_a_nan():
    learner = make_learner(DetectAnomaly(), model=Root())
    with (
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        pytest.raises(RuntimeError, match="returned nan"),
    ):
        learner.fit(batches(1), epochs=1)
    assert not torch.is_anomaly_enabled()
    make_learner(DetectAnomaly(check_nan=False), model=Root()).fit(batches(1), epochs=1)


def test_anomaly_detection_changes_no_bit():
    ends = []
    for plugins in ([], [DetectAnomaly()]):
        learner = make_learner(*plugins)
        learner.fit(batches(4), batches(1), epochs=2)
        ends.append([p.tolist() for p in learner.model.parameters()])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("word", ["optuna_pruning", "log", "try_validation"])
def test_plugin_that_writes_takes_no_part_whatever_its_name(word):
    calls = []
    writes = on("phase_end", lambda: calls.append(1), "other")
    writes.provides = word
    dry_run(make_learner(writes), batches(4), batches(4))
    assert calls == []
