from __future__ import annotations

import math
import pdb
import random
import traceback
from pathlib import Path

import pytest
import torch
from helpers import batches, keeps_contract, on
from torch import nn

from loopkit import Learner, TrainingPhase
from loopkit.checkpoint import storage
from loopkit.checkpoint.bundle import Contents
from loopkit.errors import CancelStep, CheckpointError, NonFiniteError, StateError
from loopkit.plugins import MixedPrecision, StopOnNonFinite, WeightAverage
from loopkit_insight import ReplayBundle, replay


class Fails(TrainingPhase):
    """Draws numbers, and raises an error that tells everything which the step began with."""

    def __init__(self, at=5, where="forward"):
        super().__init__()
        self.at, self.where = at, where

    def fail(self, learner, step, where):
        if step.index == self.at and where == self.where:
            grads = [float(p.grad.sum()) if p.grad is not None else None for p in learner.model.parameters()]
            state = [value.double().sum().item() for value in learner.model.state_dict().values()]
            moments = [float(value.sum()) for p in learner.optimizer.state.values() for value in p.values()]
            numbers = random.random(), torch.rand(1).item()
            raise ArithmeticError(f"{step.epoch.where(step)} {step.batch} {grads} {state} {moments} {numbers}")

    def step(self, learner, step):
        self.fail(learner, step, "before")
        step.inputs, step.targets = step.batch
        step.outputs = learner.model(step.inputs)
        self.fail(learner, step, "forward")
        step.loss = learner.loss_fn(step.outputs, step.targets)
        step.backward(step.loss)
        self.fail(learner, step, "backward")
        step.update()
        self.fail(learner, step, "update")


def make(*plugins, phase=None, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    options.setdefault("phases", [phase or Fails()])
    adam = lambda params: torch.optim.Adam(params, lr=0.05)  # noqa: E731
    return Learner(model, nn.MSELoss(), adam, plugins=plugins, standard=False, **options)


def failed(learner, data=None, error=ArithmeticError, **options):
    """The error of a fit, and the bundle that its note names."""
    with pytest.raises(error) as caught:
        learner.fit(batches(8) if data is None else data, epochs=2, **options)
    notes = [note for note in caught.value.__notes__ if "run again from" in note]
    assert len(notes) == 1
    return caught.value, Path(notes[0].split("run again from ")[1])


def again(path, learner, error=ArithmeticError, **options):
    with pytest.raises(error) as caught:
        replay(path, learner, **options)
    return caught.value


@pytest.mark.parametrize("where", ["before", "forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_replay_gives_the_same_error(where, accumulate, tmp_path):
    error, path = failed(make(ReplayBundle(tmp_path), phase=Fails(5, where), accumulate=accumulate))
    random.seed(99)
    other = make(ReplayBundle(tmp_path), phase=Fails(5, where), accumulate=accumulate, seed=7)
    assert str(again(path, other)) == str(error)
    assert len(storage.listing(tmp_path)) == 1, "the replay wrote a bundle, too"


def test_replay_in_the_second_epoch_and_twice(tmp_path):
    class Second(Fails):
        def fail(self, learner, step, where):
            if learner.progress.epochs == 1:
                super().fail(learner, step, where)

    error, path = failed(make(ReplayBundle(tmp_path), phase=Second(3)))
    assert "epoch 2, step 3" in str(error)
    learner = make(phase=Second(3), seed=7)
    for _ in range(2):
        assert str(again(path, learner, anomaly=False)) == str(error)


def test_replay_after_the_update_says_that_the_parameters_are_those_after_it(tmp_path):
    _, path = failed(make(ReplayBundle(tmp_path), phase=Fails(5, "update")))
    error = again(path, make(phase=Fails(5, "update"), seed=7))
    assert any("1 updates came before the error" in note for note in error.__notes__)


@pytest.mark.parametrize("hook", ["step_begin", "forward_begin", "loss_begin", "backward_end", "update_begin"])
def test_replay_of_an_error_in_a_hook(hook, tmp_path):
    def act(learner, step, **_):
        if step.index == 4:
            raise ValueError(f"{torch.rand(3)} {learner.model[0].weight} {learner.model[1].running_mean}")

    def plugin():
        return on(hook, act)

    error, path = failed(make(ReplayBundle(tmp_path), plugin(), phases=[]), error=ValueError)
    same = again(path, make(plugin(), phases=[], seed=7), error=ValueError)
    if hook == "step_begin":
        assert str(same) == str(error)
    assert str(same).split("running")[0] == str(error).split("running")[0]


def test_replay_of_an_error_in_step_end(tmp_path):
    def act(step, **_):
        if step.index == 4:
            raise ValueError("at the end")

    error, path = failed(make(ReplayBundle(tmp_path), on("step_end", act), phases=[]), error=ValueError)
    assert str(again(path, make(on("step_end", act), phases=[]), error=ValueError)) == str(error)


def nan_data():
    data = batches(8)
    data[5][0][0, 0] = math.nan
    return data


@pytest.mark.parametrize("more", [[], [WeightAverage], [lambda: MixedPrecision("bfloat16")]])
def test_replay_of_a_loss_that_is_not_finite(more, tmp_path):
    plugins = lambda: [StopOnNonFinite(), *(each() for each in more)]  # noqa: E731
    error, path = failed(make(ReplayBundle(tmp_path), *plugins(), phases=[]), nan_data(), NonFiniteError)
    learner = make(*plugins(), phases=[], seed=7)
    assert str(again(path, learner, NonFiniteError)) == str(error)


def test_replay_names_the_function_whose_backward_gave_nan(tmp_path):
    class Root(TrainingPhase):
        def step(self, learner, step):
            inputs, _ = step.batch
            step.loss = learner.model(inputs * 0 if step.index == 2 else inputs).sub(learner.model(inputs)).abs().sum()
            if step.index == 2:
                step.loss = (learner.model[3].weight * 0).sum().sqrt()
            step.backward(step.loss)
            step.update()

    plugins = lambda: [StopOnNonFinite(gradients=True)]  # noqa: E731
    error, path = failed(make(ReplayBundle(tmp_path), *plugins(), phase=Root()), error=NonFiniteError)
    with pytest.warns(UserWarning, match="Error detected in"):
        same = again(path, make(*plugins(), phase=Root(), seed=7), NonFiniteError)
    assert str(same) == str(error)
    assert any("anomaly detection: Function 'MulBackward0' returned nan" in note for note in same.__notes__)
    plain = again(path, make(*plugins(), phase=Root(), seed=7), NonFiniteError, anomaly=False)
    assert not any("anomaly" in note for note in plain.__notes__)
    assert not torch.is_anomaly_enabled()


def test_replay_of_a_validation_step(tmp_path):
    def act(phase, step, **_):
        if phase.name == "val" and step.index == 1:
            raise ValueError(f"{step.batch} {step.outputs}")

    plugins = lambda: [WeightAverage(), on("step_end", act, reads=("batch", "outputs"))]  # noqa: E731
    learner = make(ReplayBundle(tmp_path), *plugins(), phases=[])
    error, path = failed(learner, batches(4), ValueError, val=batches(3, seed=1))
    assert str(again(path, make(*plugins(), phases=[], seed=7), ValueError)) == str(error)


def test_replay_where_nothing_fails_returns_the_step(tmp_path):
    _, path = failed(make(ReplayBundle(tmp_path)))
    step = replay(path, make(phases=[], seed=7))
    assert step.index == 5
    assert torch.equal(step.batch[0], batches(8)[5][0])


def test_replay_does_not_move_the_batch_again(tmp_path):
    def shift(batch, **_):
        return batch[0] + torch.rand(1), batch[1]

    error, path = failed(make(ReplayBundle(tmp_path), on("move_batch", shift, updates=("batch",))))
    assert str(again(path, make(on("move_batch", shift, updates=("batch",)), seed=7))) == str(error)


def test_replay_with_debugger_starts_it_where_the_error_was_raised(tmp_path, monkeypatch):
    _, path = failed(make(ReplayBundle(tmp_path)))
    seen = []
    monkeypatch.setattr(pdb, "post_mortem", seen.append)
    error = again(path, make(seed=7), debugger=True)
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert len(seen) == 1
    assert traceback.extract_tb(seen[0])[-1].name == frames[-1] == "fail"


def test_the_failed_learner_is_left_as_the_error_left_it(tmp_path):
    one, other = make(ReplayBundle(tmp_path)), make()
    torch.manual_seed(0)
    failed(one)
    torch.manual_seed(0)
    with pytest.raises(ArithmeticError):
        other.fit(batches(8), epochs=2)
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_that_cannot_be_saved_is_refused_at_the_first_step(tmp_path):
    learner = make(ReplayBundle(tmp_path), phases=[])
    with pytest.raises(StateError, match=r"cannot save this batch \(phase 'train', epoch 1, step 0\).*object"):
        learner.fit([(*batches(1)[0], object())], epochs=1)
    assert learner.progress.steps == 0


def test_a_directory_that_cannot_be_written_is_refused_at_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        make(ReplayBundle(tmp_path / "file"), phases=[]).fit(batches(2), epochs=1)


def test_a_bundle_that_cannot_be_written_is_noted_on_the_error(tmp_path):
    def bad(step, **_):
        if step.index == 2:
            step.batch.append(object())
            raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error") as caught:
        make(ReplayBundle(tmp_path), on("step_begin", bad), phases=[]).fit([list(b) for b in batches(4)], epochs=1)
    assert any("could not write the step: StateError" in note for note in caught.value.__notes__)


def test_cancels_and_interrupts_write_nothing(tmp_path):
    def act(step, **_):
        if step.index == 1:
            raise CancelStep("a cancel")
        if step.index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(ReplayBundle(tmp_path), on("loss_begin", act), phases=[]).fit(batches(4), epochs=1)
    assert list(storage.listing(tmp_path)) == []


def test_errors_between_steps_write_nothing(tmp_path):
    def loader():
        yield from batches(2)
        raise OSError("the loader")

    with pytest.raises(OSError, match="the loader"):
        make(ReplayBundle(tmp_path), phases=[]).fit(loader, epochs=1)
    assert list(storage.listing(tmp_path)) == []


def test_a_checkpoint_is_no_bundle(tmp_path):
    learner = make(phases=[])
    path = storage.write(tmp_path, Contents.of(learner, learner.state_dict()).files(), {}).path
    with pytest.raises(CheckpointError, match="not a bundle"):
        replay(path, learner)


def test_replay_bundle_keeps_the_contract(tmp_path):
    keeps_contract(lambda: ReplayBundle(tmp_path), "replay_bundle")
