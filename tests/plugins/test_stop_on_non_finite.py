"""StopOnNonFinite: at once on the CPU, late on an accelerator (``late=True`` takes that path on the CPU)."""

import copy
import functools
import math

import pytest
import torch
from helpers import batches, make_learner, on

from loopkit import CancelStep, Learner, Phase, TrainingPhase, hookimpl
from loopkit.errors import NonFiniteError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd
from loopkit.plugins import StopOnNonFinite, call_on
from loopkit.plugins.late import LateValues

BAD = [math.nan, math.inf, -math.inf]


def spoilt(count, at, value=math.nan):
    data = batches(count)
    data[at][1][0] = value
    return data


def with_loss(value):
    """A loss function whose loss is ``value`` in the batches that hold a nan."""

    def loss_fn(outputs, targets):
        if targets.isnan().any():
            return outputs.sum() * 0 + value
        return (outputs - targets).square().mean()

    return loss_fn


def learner_with(plugin, value=math.nan, *more, **options):
    learner = make_learner(plugin, *more, **options)
    learner.loss_fn = with_loss(value)
    return learner


@pytest.mark.parametrize("value", BAD)
def test_loss_that_is_not_finite_stops_before_its_backward(value):
    one, other = learner_with(StopOnNonFinite(), value), make_learner()
    with pytest.raises(NonFiniteError, match=f"the loss is {value}"):
        one.fit(spoilt(4, at=2), epochs=1)
    other.fit(batches(2), epochs=1)
    assert torch.equal(one.model.weight, other.model.weight)
    assert one.progress.updates == 2


def test_error_names_phase_epoch_step_and_batch():
    learner = learner_with(StopOnNonFinite())
    learner.fit(batches(3), epochs=1)
    with pytest.raises(NonFiniteError) as caught:
        learner.fit(spoilt(4, at=2), epochs=1)
    assert str(caught.value) == (
        "the loss is nan (phase 'train', epoch 1, step 2; batch: tuple(Tensor[4, 3] float32 cpu, Tensor[4, 1] float32 "
        "cpu)). Its backward has not run: the parameters are those before this step. Look at this batch, or lower lr"
    )


@pytest.mark.parametrize("late", [None, True])
def test_finite_losses_pass(late):
    one, other = make_learner(StopOnNonFinite(late)), make_learner()
    for learner in (one, other):
        learner.fit(batches(4), batches(1), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)


@pytest.mark.parametrize("late", [None, True])
def test_validation_losses_are_not_looked_at(late):
    learner = learner_with(StopOnNonFinite(late))
    assert learner.fit(batches(2), spoilt(2, at=1), epochs=1).reason == "epochs"


class Own(Phase):
    """A loss of its own that is not on the step."""

    training = True
    emits = (BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd)

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward((learner.model(inputs) - targets).square().mean())
        step.update()


@pytest.mark.parametrize("late", [None, True])
def test_phases_without_step_loss_pass(late):
    learner = make_learner(StopOnNonFinite(late))
    learner.run(Own(), batches(3))
    assert learner.progress.updates == 3


def test_loss_of_one_element_is_looked_at():
    learner = make_learner(StopOnNonFinite())
    learner.loss_fn = lambda outputs, targets: outputs.sum().reshape(1) * math.inf
    with pytest.raises(NonFiniteError, match="the loss is"):
        learner.fit(batches(1), epochs=1)


# Late


@pytest.mark.parametrize("value", BAD)
def test_late_loss_that_is_not_finite_stops_some_steps_later(value):
    learner = learner_with(StopOnNonFinite(late=True), value)
    with pytest.raises(NonFiniteError, match="in one of the steps 2 to 2"):
        learner.fit(spoilt(9, at=2), epochs=1)
    assert learner.progress.updates == 3  # on the CPU a value has arrived by the next step


def test_late_error_names_phase_and_epoch():
    learner = learner_with(StopOnNonFinite(late=True))
    with pytest.raises(NonFiniteError) as caught:
        learner.fit(spoilt(4, at=1), epochs=1)
    assert "one of the steps 1 to 1 (phase 'train', epoch 0)" in str(caught.value)
    assert "updates since then have used it" in str(caught.value)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_late_error_of_the_last_step_comes_at_the_end_of_the_pass(count):
    learner = learner_with(StopOnNonFinite(late=True))
    with pytest.raises(NonFiniteError, match=r"in one of the steps \d+ to " + str(count - 1)):
        learner.fit(spoilt(count, at=count - 1), epochs=1)


def test_late_error_covers_the_steps_while_nothing_arrived(monkeypatch):
    polled = []

    def arrived(self):
        polled.append(1)
        return real(self) if len(polled) > 4 else {}

    real = LateValues.arrived
    monkeypatch.setattr(LateValues, "arrived", arrived)
    learner = learner_with(StopOnNonFinite(late=True))
    with pytest.raises(NonFiniteError, match="in one of the steps 1 to 4"):
        learner.fit(spoilt(9, at=2), epochs=1)
    assert learner.progress.updates == 5


def test_late_losses_of_a_failed_pass_are_forgotten():
    learner = learner_with(StopOnNonFinite(late=True))
    with pytest.raises(NonFiniteError):
        learner.fit(spoilt(4, at=1), epochs=1)
    torch.nn.init.zeros_(learner.model.weight)
    torch.nn.init.zeros_(learner.model.bias)
    assert learner.fit(batches(4), epochs=1).reason == "epochs"


def test_late_losses_are_kept_while_another_phase_runs_inside():
    def inside(learner, phase, step):
        if phase.name == "train" and step.index == 1:
            learner.run(TrainingPhase("inner"), batches(2))

    class Keep:
        """The parameters are those before the nan, so that the losses inside are finite."""

        name = "keep"

        @hookimpl(updates=("grads",))
        def update_begin(self, step):
            step.skip_update("no training")

    learner = learner_with(StopOnNonFinite(late=True), math.nan, on("step_end", inside), Keep())
    with pytest.raises(NonFiniteError, match=r"in one of the steps 1 to 1 \(phase 'train'"):
        learner.fit(spoilt(2, at=1), epochs=1)


def test_late_losses_of_cancelled_steps_do_no_harm():
    def cancel(step, **_):
        if step.index == 0:
            raise CancelStep("not this one")

    learner = learner_with(StopOnNonFinite(late=True), math.nan, on("step_begin", cancel))
    assert learner.fit(spoilt(3, at=0), epochs=1).reason == "epochs"
    with pytest.raises(NonFiniteError, match="in one of the steps 0 to 1"):
        learner.fit(spoilt(3, at=1), epochs=1)


def test_late_false_is_the_way_of_the_cpu():
    learner = learner_with(StopOnNonFinite(late=False))
    with pytest.raises(NonFiniteError, match="Its backward has not run"):
        learner.fit(spoilt(4, at=2), epochs=1)


class RootOfZero(torch.autograd.Function):
    """Finite forwards, infinite backwards."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 0


class BadGradient(TrainingPhase):
    def forward(self, learner, inputs):
        outputs = learner.model(inputs)
        return RootOfZero.apply(outputs) if learner.progress.steps == 2 else outputs


def fit_with_a_bad_gradient(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(4)]
    make = functools.partial(torch.optim.SGD, lr=0.1)
    good = Learner(copy.deepcopy(model), torch.nn.MSELoss(), make, standard=False)
    good.run("train", batches[:2])
    guard = StopOnNonFinite(**options)
    learner = Learner(model, torch.nn.MSELoss(), make, plugins=[guard], phases=[BadGradient()], standard=False)
    with pytest.raises(NonFiniteError) as caught:
        learner.run("train", batches)
    return str(caught.value), learner, good


def test_bad_gradient_with_a_finite_loss_is_named_before_the_optimizer_moves():
    message, learner, good = fit_with_a_bad_gradient(gradients=True)
    assert message.startswith("the gradient of parameter 'weight' holds ")
    assert "phase 'train', epoch 0, step 2; batch: tuple(Tensor[4, 3] float32 cpu" in message
    assert all(torch.equal(p, q) for p, q in zip(learner.model.parameters(), good.model.parameters(), strict=True))


def test_bad_gradient_is_noticed_by_the_next_loss_if_gradients_are_not_looked_at():
    message, _, _ = fit_with_a_bad_gradient()
    assert message.startswith("the loss is nan (phase 'train', epoch 0, step 3")


def test_bad_gradient_is_found_late_where_numbers_are_read_late():
    message, _, _ = fit_with_a_bad_gradient(gradients=True, late=True)
    assert message.startswith("the loss or a gradient was infinite or not a number in one of the steps")


def test_bad_gradient_of_an_update_that_is_skipped_is_nobodys_concern():
    def veto(step):
        step.skip_update("a vote")

    model = torch.nn.Linear(3, 2)
    skip = call_on(UpdateBegin, veto, writes=("grads",))
    plugins = [StopOnNonFinite(gradients=True), skip]
    make = functools.partial(torch.optim.SGD, lr=0.1)
    learner = Learner(model, torch.nn.MSELoss(), make, plugins=plugins, phases=[BadGradient()], standard=False)
    learner.run("train", [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(4)])
    assert learner.progress.updates == 0
    assert learner.progress.steps == 4
