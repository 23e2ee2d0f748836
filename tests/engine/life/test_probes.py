"""Epochs that a hook runs: their data go on where they were, and so does all that reads their metrics."""

from __future__ import annotations

import pytest
import torch
from helpers import on

from engine.life.runs import STEPS, at, end, kill, killed, make, rows, same, tensors, train, val
from loopkit import PredictionPhase, ValidationPhase, checkpoint, every
from loopkit.data import TensorLoader
from loopkit.plugins import Checkpoint, EarlyStopping, Plateau


class Probe(PredictionPhase):
    """A validation of its own; were it a ``ValidationPhase``, ``fit`` would validate by it."""

    name = "probe"
    emits = ValidationPhase.emits
    unpack = ValidationPhase.unpack
    step = ValidationPhase.step


def drawn(seed=5):
    """Shuffled data that are others in each epoch."""

    def noisy(batch, generator):
        return batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]

    return TensorLoader(*tensors(14, seed), batch_size=4, shuffle=True, seed=seed).map(noisy, seed=seed)


def probing(run, after="val"):
    """A plugin that runs other epochs after each epoch of a phase."""

    def probe(learner, phase):
        if phase.name == after:
            run(learner)

    return on("phase_end", probe, "probing", writes=("metrics.probe/loss",), before=("early_stopping", "schedule"))


def one():
    """Runs the probe over one loader."""
    data = drawn()
    return probing(lambda learner: learner.run("probe", data))


READERS = {
    "nothing": list,
    "early_stopping": lambda: [EarlyStopping("probe/loss", patience=2)],
    "plateau": lambda: [Plateau("probe/loss", patience=0, factor=0.5)],
}


def learner_of(probe, readers, *plugins, seed=1):
    return make(probe, *readers(), *plugins, seed=seed, phases=[Probe()])


def saver(directory):
    return Checkpoint(directory, best="probe/loss", resume="auto", keep=9)


def best(directory):
    found = checkpoint.best(directory).about
    return found["progress"]["epochs"], found["metrics"]["probe/loss"]


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("readers", READERS.values(), ids=READERS)
def test_probe_of_a_run_that_was_killed_between_epochs_has_the_same_metrics(readers, epochs, tmp_path):
    straight = learner_of(one(), readers, saver(tmp_path / "whole"))
    result = straight.fit(train(), val(), epochs=6)
    death = at(kill, "epoch_begin", epochs=epochs, name="death")
    with killed():
        learner_of(one(), readers, saver(tmp_path / "cut"), death).fit(train(), val(), epochs=6)
    again = learner_of(one(), readers, saver(tmp_path / "cut"), seed=99)
    resumed = again.fit(train(), val(), epochs=6)
    assert [row.get("probe/loss") for row in rows(straight)] == [row.get("probe/loss") for row in rows(again)]
    assert (result.reason, result.by, result.epochs) == (resumed.reason, resumed.by, resumed.epochs)
    assert straight.optimizer.param_groups[0]["lr"] == again.optimizer.param_groups[0]["lr"]
    assert best(tmp_path / "whole") == best(tmp_path / "cut")
    same(end(straight), end(again))


def test_probe_within_an_epoch_goes_on_after_a_kill(tmp_path):
    def within(directory, *plugins, seed=1):
        data = drawn()

        def probe(learner, phase, step):
            if phase.training and step.index == STEPS - 2:
                learner.run("probe", data)

        return learner_of(
            on("step_end", probe, "probing"),
            list,
            Checkpoint(directory, save=every(updates=1), resume="auto"),
            *plugins,
            seed=seed,
        )

    straight = within(tmp_path / "whole")
    straight.fit(train(), epochs=3)
    death = at(kill, "step_begin", epochs=1, index=STEPS - 1, name="death")
    with killed():
        within(tmp_path / "cut", death).fit(train(), epochs=3)
    again = within(tmp_path / "cut", seed=99)
    again.fit(train(), epochs=3)
    same(end(straight), end(again))


# What works today


def two_lists():
    """New lists each time, which have no position."""

    def run(learner):
        for seed in (1, 2):
            learner.evaluate(list(zip(*(part.split(4) for part in tensors(8, seed)), strict=True)))

    return probing(run, after="train")


def two_loaders():
    """Two loaders in turn, with the phase of the fit's own validation."""
    one, other = (TensorLoader(*tensors(8, seed), batch_size=4) for seed in (1, 2))

    def run(learner):
        learner.evaluate(one)
        learner.evaluate(other)

    return probing(run, after="train")


@pytest.mark.parametrize("probe", [two_lists, two_loaders])
def test_several_data_in_one_hook_go_on_after_a_kill(probe, tmp_path):
    straight = learner_of(probe(), list)
    straight.fit(train(), val(), epochs=3)
    with killed():
        death = at(kill, "step_begin", epochs=1, index=2, name="death")
        learner_of(probe(), list, Checkpoint(tmp_path, save=every(updates=1), resume="auto"), death).fit(
            train(), val(), epochs=3
        )
    again = learner_of(probe(), list, Checkpoint(tmp_path, resume="auto"), seed=99)
    again.fit(train(), val(), epochs=3)
    same(end(straight), end(again))
