"""Phases that declare ``own_updates``: what they have of the engine, and what cannot act there."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import on
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import CancelFit, Learner, Phase, TrainingPhase, ValidationPhase, every, hookimpl
from loopkit.errors import EventError, NonFiniteError, PhaseError, PluginError
from loopkit.events import BackwardBegin, ForwardBegin, LossBegin, UpdateBegin
from loopkit.plugins import (
    DDP,
    Checkpoint,
    ClipGradNorm,
    EarlyStopping,
    GradNoise,
    GradNorm,
    MixedPrecision,
    Schedule,
    SkipSpikes,
    StopOnNonFinite,
    WeightAverage,
)
from loopkit.schedules import linear


class Own(Phase):
    """The loop by hand."""

    name, training, own_updates = "train", True, True

    def step(self, learner, step):
        inputs, targets = step.batch
        step.loss = mse_loss(learner.model(inputs), targets)
        learner.optimizer.zero_grad()
        step.loss.backward()
        learner.optimizer.step()
        step.updated()


class ByInstance(Own):
    own_updates = False

    def __init__(self):
        super().__init__()
        self.own_updates = True


class Inherited(Own):
    """Lists events of updates, as the standard phase does."""

    emits = TrainingPhase.emits


class OfTraining(Own, TrainingPhase):
    pass


FORMS = [Own, ByInstance, Inherited, OfTraining]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make_batches(count=6):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def make_learner(phase=None, **options):
    torch.manual_seed(0)
    options = {"standard": False, "optimizer": sgd, **options}
    return Learner(nn.Linear(3, 2), mse_loss, phases=[phase or Own()], **options)


def by_hand(epochs=1):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for inputs, targets in make_batches():
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return model


# What it has


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_own_updates_are_those_of_the_loop_by_hand_and_are_counted(form, standard):
    learner = make_learner(form(), standard=standard)
    result = learner.fit(make_batches(), make_batches(1), epochs=2)
    assert torch.equal(learner.model.weight, by_hand(2).weight)
    assert (result.steps, result.updates) == (12, 12)


def test_own_updates_end_a_fit_at_its_limit():
    assert make_learner().fit(make_batches(), max_updates=8).steps == 8


def test_update_end_comes_for_each_update_with_its_optimizer():
    seen = []

    def look(learner, step):
        same = [p is q for p, q in zip(step.params, learner.model.parameters(), strict=True)]
        seen.append((step.optimizer_name, step.optimizer is learner.optimizer, all(same), learner.progress.updates))

    make_learner(plugins=[on("update_end", look)]).fit(make_batches(2), epochs=1)
    assert seen == [("optimizer", True, True, 1), ("optimizer", True, True, 2)]


def test_schedules_averages_intervals_and_validations_go_by_own_updates(tmp_path):
    validated = []
    look = on(
        "phase_end", lambda learner, phase: validated.append(learner.progress.updates) if phase.name == "val" else 0
    )
    plugins = [
        Schedule(linear()),
        WeightAverage(0.5),
        Checkpoint(tmp_path / "run", save=every(updates=4), keep=9),
        look,
    ]
    learner = make_learner(plugins=plugins)
    learner.fit(make_batches(), make_batches(1), epochs=2, validate=every(updates=5))
    assert validated == [5, 10, 12]
    assert learner.optimizer.param_groups[0]["lr"] < 0.02
    with learner.plugins["weight_average"].averaged(learner):
        average = learner.model.weight.clone()
    assert not torch.equal(average, learner.model.weight)
    engine = make_learner(TrainingPhase(), plugins=[Schedule(linear()), WeightAverage(0.5)])
    engine.fit(make_batches(), make_batches(1), epochs=2)
    assert torch.equal(learner.model.weight, engine.model.weight)
    with engine.plugins["weight_average"].averaged(engine):
        assert torch.equal(average, engine.model.weight)


class Both(Phase):
    """Two optimizers, of which one is reported by its name; and as many updates as it likes."""

    name, training, own_updates = "train", True, True

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def step(self, learner, step):
        for name in self.names:
            step.updated(name)


def make_pair(phase, **options):
    models = {"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)}
    return Learner(models, None, dict.fromkeys(models, sgd), phases=[phase], standard=False, **options)


@pytest.mark.parametrize(
    ("names", "reported"), [(("two",), ["two"]), ((None,), ["one", "two"]), (("one", "one"), ["one"] * 2)]
)
def test_updated_reports_the_optimizer_that_it_names_or_each(names, reported):
    seen = []
    learner = make_pair(Both(*names), plugins=[on("update_end", lambda step: seen.append(step.optimizer_name))])
    assert learner.fit(make_batches(1), epochs=1).updates == len(reported)
    assert seen == reported


def test_updated_without_an_optimizer_counts_one_update():
    seen = []
    learner = make_learner(Both(None), optimizer=None, plugins=[on("update_end", lambda step: seen.append(step.index))])
    assert learner.fit(make_batches(2), epochs=1).updates == 2
    assert seen == [0, 1]


def test_cancel_by_a_plugin_at_the_end_of_an_own_update_ends_the_fit():
    def stop(learner, **_):
        if learner.progress.updates == 3:
            raise CancelFit("enough")

    result = make_learner(plugins=[on("update_end", stop)]).fit(make_batches(), epochs=2)
    assert (result.reason, result.updates) == ("cancel", 3)


@pytest.mark.parametrize("at", [3, 7])
def test_run_with_own_updates_resumes_in_mid_epoch(at):
    whole = make_learner()
    whole.fit(make_batches(), epochs=2)
    pause = on("step_end", lambda learner: learner.pause() if learner.progress.steps == at else None)
    first = make_learner(plugins=[pause])
    assert first.fit(make_batches(), epochs=2, on_interrupt="return").reason == "pause"
    again = make_learner()
    again.load_state_dict(first.state_dict())
    assert again.fit(make_batches(), epochs=2).updates == 12
    assert torch.equal(again.model.weight, whole.model.weight)


def test_own_loops_run_phases_with_own_updates():
    learner = make_learner()
    with learner.epoch("train") as epoch:
        for batch in make_batches():
            epoch.step(batch)
    for _ in learner.rounds(epochs=1):
        learner.run("train", make_batches())
    assert torch.equal(learner.model.weight, by_hand(2).weight)
    assert learner.progress.updates == 12


def test_explain_lists_no_event_that_does_not_come():
    class Looks:
        @hookimpl
        def update_end(self):
            pass

        @hookimpl(reads=("grads",))
        def update_begin(self):
            pass

    shown = str(make_learner(plugins=[Looks()]).explain("train"))
    assert "update_end" in shown
    assert "update_begin" not in shown


# What it has not


class Calls(Own):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def step(self, learner, step):
        loss = mse_loss(learner.model(step.batch[0]), step.batch[1])
        self.call(step, loss)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda step, loss: step.backward(loss),
            PhaseError,
            r"step.backward in phase 'train'.*it calls loss.backward\(\)",
        ),
        (lambda step, loss: step.update(), PhaseError, r"step.update in phase 'train'.*and then step.updated\(\)"),
        (lambda step, loss: step.update("optimizer"), PhaseError, r"step.update in phase 'train'|no optimizer"),
        (lambda step, loss: step.update(closure=lambda: loss), PhaseError, r"step.update in phase 'train'"),
        (lambda step, loss: step.updated("optimiser"), PhaseError, r"no optimizer is called 'optimiser'.*optimizer"),
        (
            lambda step, loss: step.emit(UpdateBegin),
            EventError,
            r"own_updates is True.*no event of an update comes but",
        ),
        (lambda step, loss: step.emit(BackwardBegin), EventError, r"own_updates is True"),
    ],
)
def test_call_that_a_phase_with_own_updates_does_not_have_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        make_learner(Calls(call)).fit(make_batches(), epochs=1)


class Reports(TrainingPhase):
    def step(self, learner, step):
        super().step(learner, step)
        step.updated()


class Validates(ValidationPhase):
    def step(self, learner, step):
        step.updated()


def test_updated_elsewhere_is_refused():
    with pytest.raises(PhaseError, match=r"step.updated in phase 'train'.*step.update\(\) counts"):
        make_learner(Reports()).fit(make_batches(), epochs=1)
    with pytest.raises(PhaseError, match=r"step.updated in phase 'val'"):
        make_learner(Validates()).evaluate(make_batches())


def test_own_updates_without_training_are_refused():
    class Odd(Phase):
        own_updates = True

        def step(self, learner, step):
            pass

    with pytest.raises(PhaseError, match=r"Odd.own_updates is True, and Odd.training is not"):
        make_learner().run(Odd(), make_batches())


class Clip:
    @hookimpl
    def update_begin(self, step):
        step.skip_update("never")


class Optimizes:
    @hookimpl
    def optimizer_step(self, default):
        default()


ACTING = {
    "clip_grad_norm": lambda: ClipGradNorm(1.0),
    "grad_noise": lambda: GradNoise(0.1),
    "grad_norm": GradNorm,
    "mixed_precision": lambda: MixedPrecision("float16"),
    "skip_spikes": SkipSpikes,
    "stop_on_non_finite": lambda: StopOnNonFinite("skip"),
    "gradients": lambda: StopOnNonFinite(gradients=True),
    "clip": Clip,
    "optimizes": Optimizes,
}


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("name", ACTING)
def test_plugin_that_acts_before_an_update_is_refused_as_the_fit_begins(name, standard):
    learner = make_learner(plugins=[ACTING[name]()], standard=standard)
    with pytest.raises(PluginError, match=r"does not come in phase 'train': Own.own_updates.*leave own_updates out"):
        learner.fit(make_batches(), epochs=1)
    assert learner.progress.steps == 0


@pytest.mark.parametrize("name", ACTING)
def test_plugin_that_acts_before_an_update_is_refused_in_ones_own_loop(name):
    learner = make_learner(plugins=[ACTING[name]()])
    with pytest.raises(PluginError, match=r"does not come in phase 'train'"):
        learner.run("train", make_batches())


def test_plugin_is_named_where_another_phase_trains_through_the_engine(capsys):
    learner = make_learner(Own("own"), plugins=[ClipGradNorm(1.0)])
    learner.run("train", make_batches())
    learner.run("own", make_batches())
    said = "plugin 'clip_grad_norm': update_begin does not come in phase 'own', where own_updates is True"
    assert capsys.readouterr().err.count(said) == 1
    assert learner.progress.updates == 12


@pytest.mark.parametrize("own_loop", [False, True])
def test_accumulate_is_refused(own_loop):
    learner = make_learner(accumulate=4)
    with pytest.raises(PhaseError, match="accumulate is 4, which has no effect in phase 'train'"):
        learner.run("train", make_batches()) if own_loop else learner.fit(make_batches(), epochs=1)
    assert learner.progress.steps == 0


def test_accumulate_that_a_plugin_sets_is_refused():
    def widen(learner, **_):
        learner.accumulate = 2

    with pytest.raises(PhaseError, match="accumulate is 2, which has no effect"):
        make_learner(plugins=[on("step_end", widen)]).fit(make_batches(), epochs=1)


def test_plugins_that_act_elsewhere_pass():
    plugins = [MixedPrecision("bfloat16"), DDP(), EarlyStopping("train/loss", patience=9)]
    assert make_learner(plugins=plugins, standard=True).fit(make_batches(), epochs=1).updates == 6


# The guard against infinite numbers


class Bad(Own):
    def step(self, learner, step):
        super().step(learner, step)
        if step.index == 2:
            step.loss = step.loss * math.nan


@pytest.mark.parametrize(
    "options", [{"standard": True}, {"plugins": [StopOnNonFinite()]}, {"plugins": [StopOnNonFinite(late=True)]}]
)
def test_guard_goes_by_the_loss_and_says_so_once(options, capsys):
    make_learner(**options).fit(make_batches(), epochs=2)
    assert capsys.readouterr().err.count("stop_on_non_finite looks at step.loss when a step ends") == 1
    with pytest.raises(NonFiniteError, match=r"the loss (is|or a gradient was).*"):
        make_learner(Bad(), **options).fit(make_batches(), epochs=1)


class Lossless(Own):
    def step(self, learner, step):
        super().step(learner, step)
        del step.loss


def test_guard_leaves_a_step_without_a_loss_alone():
    assert make_learner(Lossless(), plugins=[StopOnNonFinite()]).fit(make_batches(), epochs=1).updates == 6


# Events of its own


class Emits(Own):
    emits = (ForwardBegin, LossBegin)

    def step(self, learner, step):
        step.inputs, step.targets = step.batch
        step.emit(ForwardBegin)
        step.emit(LossBegin)
        super().step(learner, step)


def test_further_events_come():
    seen = []
    plugins = [on("forward_begin", lambda **_: seen.append(1)), on("loss_begin", lambda **_: seen.append(2), name="b")]
    make_learner(Emits(), plugins=plugins).fit(make_batches(1), epochs=1)
    assert seen == [1, 2]
