"""What a training phase must do, and what it must leave to the engine."""

from __future__ import annotations

import pytest
import torch
from helpers import on
from torch import nn
from torch.nn.functional import mse_loss

from loopkit import CancelStep, Learner, Phase, TrainingPhase
from loopkit.errors import PhaseError, StepResultError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def make_batches(count=6):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def make_learner(phase, accumulate=1, **options):
    torch.manual_seed(0)
    options = {"standard": False, "optimizer": sgd, **options}
    return Learner(nn.Linear(3, 2), mse_loss, phases=[phase], accumulate=accumulate, **options)


# A zero_grad that was left in a phase


class Clearing(TrainingPhase):
    """As a loop by hand, which clears the gradients itself."""

    def __init__(self, first, to_none):
        super().__init__()
        self.first, self.to_none = first, to_none

    def step(self, learner, step):
        if self.first:
            learner.optimizer.zero_grad(set_to_none=self.to_none)
        super().step(learner, step)
        if not self.first:
            learner.optimizer.zero_grad(set_to_none=self.to_none)


@pytest.mark.parametrize("to_none", [True, False], ids=["to none", "in place"])
@pytest.mark.parametrize("first", [True, False], ids=["first in the step", "last in the step"])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_zero_grad_that_throws_gradients_of_a_window_away_is_refused(first, to_none, accumulate):
    learner = make_learner(Clearing(first, to_none), accumulate)
    with pytest.raises(PhaseError) as raised:
        learner.fit(make_batches(), epochs=1)
    message = str(raised.value)
    assert message.startswith("phase 'train', step 1: the gradients of the 1 step before it are gone")
    assert f"an update that takes {accumulate}" in message
    assert "delete line " in message
    assert "'learner.optimizer.zero_grad(set_to_none=self.to_none)'; the engine clears" in message


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_where_each_step_is_an_update_does_no_harm(to_none):
    learners = [make_learner(phase) for phase in (Clearing(True, to_none), TrainingPhase())]
    for learner in learners:
        learner.fit(make_batches(), epochs=2)
    assert torch.equal(*(learner.model.weight for learner in learners))


class Twice(TrainingPhase):
    """Clears the gradients between the two backwards of a step."""

    steps = range(99)

    def step(self, learner, step):
        inputs, targets = step.batch
        for _ in range(2):
            if step.index in self.steps:
                learner.optimizer.zero_grad()
            step.backward(learner.loss_fn(learner.model(inputs), targets))
        step.update()


def test_zero_grad_between_two_backwards_of_a_step_is_refused_within_a_window_alone():
    make_learner(Twice()).fit(make_batches(), epochs=1)
    phase = Twice()
    phase.steps = (0,)
    make_learner(phase, 2).fit(make_batches(), epochs=1)  # there was no step before it
    with pytest.raises(PhaseError, match="gradients of the 1 step before it are gone"):
        make_learner(Twice(), 2).fit(make_batches(), epochs=1)


class Silent(TrainingPhase):
    """A loss whose gradients are 0."""

    def loss(self, learner, outputs, targets):
        return super().loss(learner, outputs, targets) * 0.0


def test_gradients_that_are_zero_are_none_that_were_thrown_away():
    learner = make_learner(Silent(), 3)
    learner.fit(make_batches(), epochs=2)
    assert learner.progress.updates == 4


def test_gradients_that_a_plugin_changes_in_place_between_two_steps_are_none_that_were_thrown_away():
    learner = make_learner(TrainingPhase(), 3)
    learner.add(
        on("step_end", lambda learner: [p.grad.mul_(0.5) for p in learner.model.parameters() if p.grad is not None])
    )
    learner.fit(make_batches(), epochs=2)
    assert learner.progress.updates == 4


# step.backward and step.update


class Forgetful(TrainingPhase):
    """Calls some of the two."""

    def __init__(self, backward=False, update=False):
        super().__init__()
        self.backward, self.update = backward, update

    def step(self, learner, step):
        inputs, targets = step.batch
        step.loss = learner.loss_fn(learner.model(inputs), targets)
        if self.backward:
            step.backward(step.loss)
        if self.update:
            step.update()


@pytest.mark.parametrize("standard", [False, True])
def test_step_without_backward_is_refused_after_the_first(standard):
    learner = make_learner(Forgetful(), standard=standard)
    with pytest.raises(StepResultError, match=r"Forgetful.step called no step.backward\(loss\), so nothing is learned"):
        learner.fit(make_batches(3), epochs=1)
    assert learner.progress.steps == 0


@pytest.mark.parametrize("standard", [False, True])
def test_step_without_update_is_refused_after_the_first(standard):
    learner = make_learner(Forgetful(backward=True), standard=standard)
    with pytest.raises(StepResultError, match=r"Forgetful.step called step.backward\(loss\) but not step.update\(\)"):
        learner.fit(make_batches(3), epochs=1)
    assert learner.progress.updates == 0


def test_step_without_update_is_refused_after_the_first_full_window():
    learner = make_learner(Forgetful(backward=True), accumulate=3)
    with pytest.raises(StepResultError, match=r"but not step.update"):
        learner.fit(make_batches(), epochs=1)
    assert learner.progress.steps == 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_step_with_both_passes(accumulate):
    learner = make_learner(Forgetful(True, True), accumulate)
    assert learner.fit(make_batches(7), epochs=2).reason == "epochs"


def test_loop_of_ones_own_is_looked_at_too():
    with pytest.raises(StepResultError, match=r"no step.backward"), make_learner(Forgetful()).epoch("train") as epoch:
        epoch.step(make_batches(1)[0])


def test_step_is_looked_at_after_a_cancelled_one():
    def cancel(step, **_):
        if step.index == 0:
            raise CancelStep("not this one")

    learner = make_learner(Forgetful(), plugins=[on("step_begin", cancel)])
    with pytest.raises(StepResultError, match=r"no step.backward"):
        learner.fit(make_batches(3), epochs=1)


class Bare(Phase):
    """Trains nothing and says so."""

    name = "bare"
    training = True

    def step(self, learner, step):
        step.outputs = learner.model(step.batch[0])


def test_phase_that_announces_no_backward_passes():
    learner = make_learner(Bare())
    learner.run("bare", make_batches(2))
    assert learner.progress.steps == 2


class Critic(Phase):
    """Two optimizers, of which one is not used in each step."""

    name = "critic"
    training = True
    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd)

    def step(self, learner, step):
        inputs, _ = step.batch
        critic, generator = learner.models["critic"], learner.models["generator"]
        step.backward(critic(inputs).mean(), "critic")
        step.update("critic")
        if step.index % 2:
            step.backward(critic(generator(inputs)).mean(), "generator")
            step.update("generator")


def test_phase_with_an_optimizer_used_now_and_then_passes():
    models = {"critic": nn.Linear(3, 1), "generator": nn.Linear(3, 3)}
    learner = Learner(models, None, dict.fromkeys(models, sgd), standard=False)
    learner.run(Critic(), make_batches(4))
    assert learner.progress.updates == 6


def test_skipped_update_passes():
    skip = on("update_begin", lambda step, **_: step.skip_update("not this one"))
    assert make_learner(TrainingPhase(), plugins=[skip]).fit(make_batches(3), epochs=1).updates == 0


# Calls of torch that were kept


class Kept(TrainingPhase):
    """As it was in the loop by hand."""

    def step(self, learner, step):
        inputs, targets = step.batch
        loss = learner.loss_fn(learner.model(inputs), targets)
        loss.backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad()


def test_kept_optimizer_step_is_refused_before_it_updates():
    learner = make_learner(Kept())
    before = learner.model.weight.clone()
    with pytest.raises(
        PhaseError, match=r"Kept.step calls optimizer.step\(\), past the plugins.*write step.update\(\)"
    ) as e:
        learner.fit(make_batches(), epochs=1)
    assert torch.equal(learner.model.weight, before)
    assert "learner.optimizer.step()" in str(e.traceback[-2].statement) + str(e.traceback[-3].statement)


class KeptBackward(Kept):
    def step(self, learner, step):
        inputs, targets = step.batch
        loss = learner.loss_fn(learner.model(inputs), targets)
        loss.backward()


def test_kept_backward_is_named_with_its_line():
    line = r"write step.backward\(loss\) in the place of line \d+ of .*test_training_phases.py, 'loss.backward\(\)'"
    with pytest.raises(StepResultError, match=line):
        make_learner(KeptBackward()).fit(make_batches(), epochs=1)


class Both(TrainingPhase):
    """Updates twice."""

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        learner.optimizer.step()
        step.update()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_optimizer_step_beside_an_update_is_refused(accumulate):
    with pytest.raises(PhaseError, match=r"Both.step calls optimizer.step\(\)"):
        make_learner(Both(), accumulate).fit(make_batches(), epochs=1)


class OwnWay(Both):
    emits = (BackwardBegin, BackwardEnd)

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(learner.loss_fn(learner.model(inputs), targets))
        learner.optimizer.step()


def test_phase_that_announces_no_update_may_update_in_its_own_way():
    make_learner(OwnWay()).fit(make_batches(), epochs=1)


def test_optimizer_has_no_hook_after_the_first_steps():
    seen = []
    look = on("step_end", lambda learner, **_: seen.append(len(learner.optimizer._optimizer_step_pre_hooks)))
    learner = make_learner(TrainingPhase(), 2, plugins=[look])
    learner.fit(make_batches(4), epochs=1)
    assert seen == [1, 0, 0, 0]
    with pytest.raises(ZeroDivisionError):
        make_learner(Failing(), optimizer=learner.optimizer).fit(make_batches(), epochs=1)
    assert not learner.optimizer._optimizer_step_pre_hooks


class Failing(TrainingPhase):
    def step(self, learner, step):
        step.loss = 1 / 0


def test_lbfgs_and_a_plugin_that_steps_the_optimizer_pass():
    class ByClosure(TrainingPhase):
        def step(self, learner, step):
            def closure():
                inputs, targets = step.batch
                loss = learner.loss_fn(learner.model(inputs), targets)
                step.backward(loss)
                return loss

            step.update(closure=closure)

    def twice(default, **_):
        default()
        default()

    for phase, optimizer, plugins in (
        (ByClosure(), lambda params: torch.optim.LBFGS(params, max_iter=3), []),
        (TrainingPhase(), sgd, [on("optimizer_step", twice)]),
    ):
        learner = make_learner(phase, optimizer=optimizer, plugins=plugins)
        assert learner.fit(make_batches(3), epochs=1).updates == 3


# Parameters that are replaced


class Replacing(TrainingPhase):
    def __init__(self, replace):
        super().__init__()
        self.replace = replace

    def step(self, learner, step):
        if not learner.progress.steps:
            self.replace(learner)
        super().step(learner, step)


def replace_weight(learner):
    learner.model.weight = nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize("standard", [False, True])
def test_parameter_that_is_replaced_after_the_first_batch_is_refused_when_an_epoch_begins(standard):
    learner = make_learner(Replacing(replace_weight), standard=standard)
    message = r"parameter 'weight' was replaced after the optimizer had taken it.*p.copy_\(new\)"
    with pytest.raises(PhaseError, match=message):
        learner.fit(make_batches(), epochs=2)
    assert learner.progress.epochs == 1
    with pytest.raises(PhaseError, match=message):
        learner.fit(make_batches(), epochs=2)


def test_module_that_is_replaced_before_the_first_batch_is_refused():
    models = {"one": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "two": nn.Linear(2, 2)}
    learner = Learner(models, mse_loss, {"one": sgd, "two": sgd}, standard=False)
    models["one"][1] = nn.Linear(4, 2)
    with pytest.raises(PhaseError, match=r"parameter 'one.1.weight' was replaced"):
        learner.run("train", make_batches())


def swap(learner):
    replace_weight(learner)
    learner.optimizer.param_groups[0]["params"][0] = learner.model.weight


def parametrize(learner):
    nn.utils.parametrize.register_parametrization(learner.model, "weight", nn.Identity())


@pytest.mark.parametrize("replace", [swap, parametrize], ids=["in the optimizer, too", "by a parametrization"])
def test_parameter_that_the_optimizer_has_is_right(replace):
    learner = make_learner(Replacing(replace))
    assert learner.fit(make_batches(), epochs=3).epochs == 3


# Modules in eval mode


class Modes(TrainingPhase):
    def __init__(self):
        super().__init__()
        self.seen = []

    def step(self, learner, step):
        super().step(learner, step)
        self.seen.append([each.training for each in learner.model.modules()])


class OwnTrain(nn.Sequential):
    def train(self, mode=True):
        return super().train(mode)


def backbone(kind=nn.Sequential):
    return kind(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", [nn.Sequential, OwnTrain])
def test_module_that_was_put_into_eval_mode_stays_there_in_training(kind, capsys):
    model, phase = backbone(kind), Modes()
    model[0].eval()
    learner = Learner(model, mse_loss, sgd, phases=[phase], standard=False)
    statistics = model[0][1].running_mean.clone()
    learner.fit(make_batches(2), make_batches(1), epochs=2)
    assert phase.seen == [[True, False, False, False, True, True]] * 4
    assert torch.equal(model[0][1].running_mean, statistics)
    said = capsys.readouterr().err
    assert said.count("0.0, 0.1 had been put into eval mode when the learner was made, and stay so in training") == 1
    assert [each.training for each in model.modules()] == [True, False, False, False, True, True]


def test_model_that_is_in_eval_mode_as_a_whole_trains(capsys):
    phase = Modes()
    learner = Learner(backbone().eval(), mse_loss, sgd, phases=[phase], standard=False)
    learner.fit(make_batches(1), epochs=1)
    assert phase.seen == [[True] * 6]
    assert "eval mode" not in capsys.readouterr().err


# Windows that no epoch fills


def test_window_that_no_epoch_fills_is_said_once(capsys):
    learner = make_learner(TrainingPhase(), 4)
    learner.fit(make_batches(1), epochs=3)
    said = "accumulate is 4, but an epoch of phase 'train' has 1 batch, and its end closes the window"
    assert capsys.readouterr().err.count(said) == 1
    learner.fit(make_batches(4), epochs=1)
    assert "accumulate" not in capsys.readouterr().err


def test_phase_may_update_several_optimizers_in_turn():
    class InTurn(TrainingPhase):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            step.loss = learner.loss_fn(learner.model(step.inputs), step.targets)
            step.backward(step.loss)
            step.update("a" if step.index % 2 else "b")

    class Forgets(InTurn):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            step.loss = learner.loss_fn(learner.model(step.inputs), step.targets)
            step.backward(step.loss)
            step.update("a")

    def made(phase):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in zip("ab", model, strict=True)}
        return Learner(model, nn.MSELoss(), optimizers, phases=[phase], standard=False)

    data = [(torch.ones(4, 3), torch.ones(4, 1))] * 6
    learner = made(InTurn())
    learner.fit(data, epochs=1)
    assert learner.progress.updates == 6 + 1  # at the end, the window that is open
    with pytest.raises(StepResultError, match=r"not step\.update\(\)"):
        made(Forgets()).fit(data, epochs=1)
