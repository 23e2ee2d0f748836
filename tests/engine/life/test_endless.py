"""Fits and epochs that would never end."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import on
from torch import nn

from loopkit import Learner, Phase, TrainingPhase
from loopkit.errors import PhaseError
from loopkit.plugins import MixedPrecision


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def make(loss=nn.functional.mse_loss, **options):
    torch.manual_seed(0)
    return Learner(nn.Linear(3, 1), loss, **{"optimizer": sgd, "standard": False, **options})


def batches(count=50):
    return [(torch.ones(2, 3), torch.ones(2, 1))] * count


def skip_all():
    return on("update_begin", lambda step: step.skip_update("never"))


def infinite(outputs, targets):
    return (outputs - targets).square().mean() * math.inf


class Weightless(TrainingPhase):
    def step(self, learner, step):
        step.weight = torch.tensor(0.0)
        super().step(learner, step)


CASES = {
    "a plugin": lambda **options: make(plugins=[skip_all()], **options),
    "loss scaling": lambda **options: make(infinite, plugins=[MixedPrecision("float32", scaling=True)], **options),
    "no weight": lambda **options: make(phases=[Weightless()], **options),
}


@pytest.mark.parametrize("data", [batches(), iter(batches(5_000))], ids=["epochs", "a stream"])
@pytest.mark.parametrize("case", CASES)
def test_fit_whose_updates_are_all_skipped_ends_after_a_thousand(case, data):
    skipped = []
    learner = CASES[case]()
    learner.add(on("update_skipped", lambda: skipped.append(1), name="count"))
    with pytest.raises(
        PhaseError, match=r"1,000 updates in a row were skipped \(.*\), and the fit ends by max_updates only"
    ):
        learner.fit(list(data)[:5_000] if isinstance(data, list) else itertools.repeat(batches(1)[0]), max_updates=8)
    assert len(skipped) == 1_000


def test_skips_with_updates_between_them_and_fits_with_another_end_go_on():
    steps = itertools.count()
    most = on("update_begin", lambda step: step.skip_update("most") if next(steps) % 900 else None)
    assert make(plugins=[most]).fit(itertools.repeat(batches(1)[0]), max_updates=3).steps == 1801
    assert make(plugins=[skip_all()]).fit(batches(), epochs=30).updates == 0
    assert make(plugins=[skip_all()]).fit(batches(), max_updates=8, max_steps=1_200).updates == 0


class Unreported(Phase):
    """Updates by itself and never reports it."""

    name, training, own_updates = "train", True, True

    def step(self, learner, step):
        pass


class Fills(Unreported):
    def step(self, learner, step):
        if learner.progress.steps < 1_500:
            step.skip()
        else:
            step.updated()


def test_phase_that_never_updates_is_refused_and_one_that_waits_is_not():
    with pytest.raises(PhaseError, match=r"phase 'train' made no update in 1,000 steps.*step.updated\(\)"):
        make(phases=[Unreported()]).fit(batches(), max_updates=8)
    assert make(phases=[Fills()]).fit(batches(), max_updates=8).updates == 8


# Data without an end


def endless():
    while True:
        yield batches(1)[0]


class Endless:
    def __iter__(self):
        return endless()


def stop_at(count, phase):
    """Ends what has no end."""

    def end(learner, step, **_):
        if step.index == count and step.epoch.name == phase:
            raise KeyboardInterrupt

    return on("step_end", end)


RUNS = {
    "fit": ("val", lambda learner: learner.fit(batches(), Endless(), epochs=1)),
    "fit with a function": ("val", lambda learner: learner.fit(batches(), endless, epochs=1)),
    "evaluate": ("val", lambda learner: learner.evaluate(Endless())),
    "run": ("val", lambda learner: learner.run("val", Endless())),
    "predict": ("predict", lambda learner: learner.predict(Endless())),
}


@pytest.mark.parametrize("run", RUNS)
def test_data_without_an_end_is_named_with_the_way_to_bound_it(run, capsys):
    phase, call = RUNS[run]
    with pytest.raises(KeyboardInterrupt):
        call(make(plugins=[stop_at(1_010, phase)], standard=True))
    said = capsys.readouterr().err
    assert said.count(f"the data of phase {phase!r} has no len() and has given 1,000 batches") == 1
    assert "itertools.islice(data, 100)" in said


def test_data_with_a_length_or_an_end_are_not_named(capsys):
    learner = make()
    learner.fit(batches(), batches(1_100), epochs=1)
    learner.evaluate(iter(batches(900)))
    learner.fit(batches(200), iter(batches(1_200)), epochs=1)
    assert "has no len()" not in capsys.readouterr().err
