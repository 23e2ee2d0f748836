"""StopOnNonFinite: at once on the CPU, late on an accelerator (``late=True`` takes that path on the CPU)."""

import copy
import functools
import math
from dataclasses import fields

import pytest
import torch
from helpers import batches, make_learner, on
from torch import nn

from loopkit import CancelStep, Learner, Phase, TrainingPhase, fresh, hookimpl
from loopkit.errors import NonFiniteError, PluginError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin, UpdateEnd
from loopkit.hooks import implemented
from loopkit.plugins import MixedPrecision, Schedule, StopOnNonFinite, call_on
from loopkit.plugins.late import LateValues
from loopkit.schedules import cosine

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
        "the loss is nan (phase 'train', epoch 2, step 2; batch: tuple(Tensor[4, 3] float32 cpu, Tensor[4, 1] float32 "
        "cpu)). Its backward has not run: the parameters are those before this step. Look at this batch, or lower lr"
    )


@pytest.mark.parametrize("late", [None, True])
def test_finite_losses_pass(late):
    one, other = make_learner(StopOnNonFinite(late=late)), make_learner()
    for learner in (one, other):
        learner.fit(batches(4), batches(1), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)


@pytest.mark.parametrize("late", [None, True])
def test_validation_losses_are_not_looked_at(late):
    learner = learner_with(StopOnNonFinite(late=late))
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
    learner = make_learner(StopOnNonFinite(late=late))
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
    assert "one of the steps 1 to 1 (phase 'train', epoch 1)" in str(caught.value)
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
    assert "phase 'train', epoch 1, step 2; batch: tuple(Tensor[4, 3] float32 cpu" in message
    assert all(torch.equal(p, q) for p, q in zip(learner.model.parameters(), good.model.parameters(), strict=True))


def test_bad_gradient_is_noticed_by_the_next_loss_if_gradients_are_not_looked_at():
    message, _, _ = fit_with_a_bad_gradient()
    assert message.startswith("the loss is nan (phase 'train', epoch 1, step 3")


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


# Going on


def normed(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, momentum=None), torch.nn.Linear(4, 1))


def adam(params):
    return torch.optim.Adam(params, lr=0.05)


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def trained(data, *plugins, optimizer=adam, phases=(), epochs=1, **options):
    learner = Learner(
        normed(), torch.nn.MSELoss(), optimizer, plugins=plugins, phases=phases, standard=False, **options
    )
    learner.fit(data, epochs=epochs)
    return learner


def everything(learner):
    """Parameters, buffers and optimizer state as one list of tensors."""
    state = [
        value
        for p in learner.model.parameters()
        for value in learner.optimizer.state[p].values()
        if isinstance(value, torch.Tensor)
    ]
    return [*learner.model.state_dict().values(), *state]


def same(one, other):
    a, b = everything(one), everything(other)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def poisoned(count, *at):
    """Batches whose inputs at some places hold a nan: outputs, loss and running statistics get one, too."""
    data = batches(count)
    for index in at:
        data[index][0][0, 0] = math.nan
    return data


def without(data, *at):
    return [batch for index, batch in enumerate(data) if index not in at]


@pytest.mark.parametrize("optimizer", [adam, momentum])
@pytest.mark.parametrize("at", [(0,), (2,), (5,), (1, 2)])
def test_skip_of_a_bad_loss_is_as_if_the_batch_had_not_been_there(optimizer, at):
    data = poisoned(6, *at)
    with pytest.warns(UserWarning, match="the loss is nan .*: skipped"):
        one = trained(data, StopOnNonFinite("skip"), optimizer=optimizer)
    assert same(one, trained(without(data, *at), optimizer=optimizer))
    assert one.progress.updates == 6 - len(at)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_skip_of_a_bad_loss_leaves_its_window_to_the_other_batches(at):
    data = poisoned(7, at)
    with pytest.warns(UserWarning, match="skipped"):
        one = trained(data, StopOnNonFinite("skip"), accumulate=3)
    assert same(one, trained(without(data, at), accumulate=3))


class InfiniteGradient(TrainingPhase):
    """The gradient is bad in the steps named, although the loss is good."""

    def __init__(self, *steps):
        super().__init__()
        self.steps = steps

    def forward(self, learner, inputs):
        outputs = learner.model(inputs)
        return RootOfZero.apply(outputs) if learner.current.epoch.steps - 1 in self.steps else outputs


@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_skip_of_a_bad_gradient_is_as_if_the_batch_had_not_been_there(optimizer):
    data = batches(5)
    with pytest.warns(UserWarning, match=r"the gradient of parameter '0.weight' .*epoch 1, step 2; batch: tuple"):
        one = trained(data, StopOnNonFinite("skip"), optimizer=optimizer, phases=[InfiniteGradient(2)])
    assert same(one, trained(without(data, 2), optimizer=optimizer))
    assert one.progress.updates == 4


@pytest.mark.parametrize("at", [2, 3])
def test_skip_of_a_bad_gradient_is_as_if_the_window_had_not_been_there(at):
    data = batches(6)
    with pytest.warns(UserWarning, match="skipped"):
        one = trained(data, StopOnNonFinite("skip"), phases=[InfiniteGradient(at)], accumulate=2)
    assert same(one, trained(without(data, 2, 3), accumulate=2))


def test_skip_is_bounded_in_a_row_and_a_good_update_begins_anew():
    with pytest.warns(UserWarning, match="in a row"):
        learner = trained(poisoned(8, 1, 2, 4, 5), StopOnNonFinite("skip", max_skips=2))
    assert learner.progress.updates == 4
    guard = StopOnNonFinite("skip", max_skips=2)
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(NonFiniteError, match=r"step 4; batch.*2 in a row were skipped"),
    ):
        trained(poisoned(8, 2, 3, 4), guard)


def test_skip_names_a_parameter_that_is_bad_already():
    model = normed()
    with torch.no_grad():
        model[2].weight[0, 1] = math.inf
    learner = make_learner(StopOnNonFinite("skip", max_skips=0), model=model)
    with pytest.raises(NonFiniteError, match=r"Parameter '2.weight' holds inf already"):
        learner.fit(batches(2), epochs=1)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_policy_that_meets_nothing_bad_changes_nothing(policy):
    data = batches(5)
    assert same(trained(data, StopOnNonFinite(policy, snapshot_every=1), epochs=2), trained(data, epochs=2))


def test_rollback_goes_back_to_the_snapshot_and_on_with_the_next_batch():
    data = poisoned(7, 4)
    with pytest.warns(UserWarning, match="step 4; batch.*back to the state after 3 updates"):
        one = trained(data, StopOnNonFinite("rollback", snapshot_every=3))
    assert same(one, trained(without(data, 3, 4)))
    assert (one.progress.updates, one.progress.steps) == (6, 6)


def test_rollback_before_the_first_update_clears_the_optimizers_state():
    data = poisoned(4, 1)
    with pytest.warns(UserWarning, match="back to the state after 0 updates"):
        one = trained(data, StopOnNonFinite("rollback"))
    assert same(one, trained(without(data, 0, 1)))


def test_rollback_of_a_bad_gradient_drops_the_open_window():
    data = batches(8)
    with pytest.warns(UserWarning, match="the gradient of parameter '0.weight'"):
        one = trained(data, StopOnNonFinite("rollback", snapshot_every=1), phases=[InfiniteGradient(3)], accumulate=2)
    assert same(one, trained(without(data, 2, 3), accumulate=2))
    assert one.progress.updates == 3
    with pytest.warns(UserWarning, match="the loss is nan"):
        one = trained(poisoned(7, 3), StopOnNonFinite("rollback", snapshot_every=1), accumulate=2)
    assert same(one, trained(without(batches(7), 2, 3), accumulate=2))


def test_rollback_undoes_an_update_that_spoilt_the_parameters():
    def spoil(learner, step, **_):
        if step.index == 2:
            with torch.no_grad():
                learner.model[0].bias[1] = math.nan

    data = batches(6)
    with pytest.warns(UserWarning, match=r"parameter '0.bias' holds nan .*back to the state after 2 updates"):
        one = trained(data, StopOnNonFinite("rollback", snapshot_every=1), on("update_end", spoil, updates=("params",)))
    assert same(one, trained(without(data, 2)))


def test_rollback_is_bounded():
    with (
        pytest.warns(UserWarning, match="back to"),
        pytest.raises(NonFiniteError, match=r"step 6; batch.*after 2 rollbacks"),
    ):
        trained(poisoned(8, 2, 4, 6), StopOnNonFinite("rollback", max_rollbacks=2, snapshot_every=1))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_policies_with_a_closure_raise(policy):
    class Closing(TrainingPhase):
        def step(self, learner, step):
            inputs, targets = step.batch

            def closure():
                step.loss = learner.loss_fn(learner.model(inputs), targets)
                step.backward(step.loss)
                return step.loss

            step.update(closure=closure)

    with pytest.raises(NonFiniteError, match="an update with a closure is not undone"):
        trained(
            poisoned(3, 1),
            StopOnNonFinite(policy),
            phases=[Closing()],
            optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1),
        )


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_gradient_overflow_of_loss_scaling_is_not_counted(policy):
    scaling = MixedPrecision("float32", scaling=True, init_scale=2.0**127)
    guard = StopOnNonFinite(policy, max_skips=0, max_rollbacks=0)
    learner = trained([(x * 1e3, y) for x, y in batches(20)], scaling, guard)
    assert scaling.skipped > 0
    assert learner.progress.updates == 20 - scaling.skipped
    assert (guard.skips, guard.rollbacks) == (0, 0)


@pytest.mark.parametrize("late", [None, True])
def test_gradient_overflow_of_loss_scaling_is_not_counted_where_the_optimizer_is_fused(late):
    scaling = MixedPrecision("float32", scaling=True, init_scale=2.0**127)
    fused = lambda params: torch.optim.Adam(params, lr=0.05, fused=True)  # noqa: E731
    learner = trained(
        [(x * 1e3, y) for x, y in batches(20)], scaling, StopOnNonFinite(gradients=True, late=late), optimizer=fused
    )
    assert scaling.skipped > 0
    assert not hasattr(learner.optimizer, "found_inf")


# On the device


@pytest.mark.parametrize("scaling", [False, True])
def test_late_fused_optimizer_skips_from_the_bad_update_on(scaling, monkeypatch):
    real = LateValues.arrived
    monkeypatch.setattr(LateValues, "arrived", lambda self: {})  # nothing arrives before the end of the pass
    monkeypatch.setattr(LateValues, "wait", real)
    fused = lambda params: torch.optim.Adam(params, lr=0.05, fused=True)  # noqa: E731
    more = [MixedPrecision("float32", scaling=True, init_scale=4.0)] if scaling else []
    phases = [] if scaling else [InfiniteGradient(3)]  # which with loss scaling would be an overflow
    plugins = [StopOnNonFinite(gradients=True, late=True), *more]
    learner = Learner(normed(), torch.nn.MSELoss(), fused, plugins=plugins, phases=phases, standard=False)
    with pytest.raises(NonFiniteError, match=r"in one of the steps 0 to 5 .* the parameters are those before it"):
        learner.fit(poisoned(6, 3) if scaling else batches(6), epochs=1)
    again = [fresh(each) for each in more]
    good = Learner(normed(), torch.nn.MSELoss(), fused, plugins=again, standard=False)
    good.fit(batches(3), epochs=1)
    for p, q in zip(learner.model.parameters(), good.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not hasattr(learner.optimizer, "found_inf")


def test_late_bad_loss_makes_the_fused_optimizer_skip():
    fused = lambda params: torch.optim.Adam(params, lr=0.05, fused=True)  # noqa: E731
    learner = Learner(
        normed(),
        torch.nn.MSELoss(),
        fused,
        plugins=[StopOnNonFinite(gradients=True, late=True)],
        standard=False,
    )
    with pytest.raises(NonFiniteError, match="those before it"):
        learner.fit(poisoned(6, 3), epochs=1)
    good = Learner(normed(), torch.nn.MSELoss(), fused, standard=False)
    good.fit(batches(3), epochs=1)
    assert torch.equal(learner.model[0].weight, good.model[0].weight)


def test_suspect_until_the_numbers_are_read_and_settle_reads_them():
    seen = []

    def ask(learner, step, **_):
        seen.append(guard.suspect(learner))
        if step.index < 2:
            guard.settle(learner)
            seen.append(guard.suspect(learner))
        else:
            with pytest.raises(NonFiniteError, match="in one of the steps 2 to 2") as caught:
                guard.settle(learner)
            raise caught.value

    guard = StopOnNonFinite(late=True)
    learner = learner_with(guard, math.nan, on("step_end", ask, reads=("*",)))
    assert not guard.suspect(learner)
    guard.settle(learner)
    with pytest.raises(NonFiniteError):
        learner.fit(spoilt(4, at=2), epochs=1)
    assert seen == [True, False, True, False, True]
    assert not guard.suspect(learner)


def test_settle_of_the_immediate_way_has_nothing_to_wait_for():
    guard = StopOnNonFinite()
    learner = make_learner(guard, on("step_end", lambda learner, **_: guard.settle(learner), reads=("*",)))
    learner.fit(batches(2), epochs=1)
    assert not guard.suspect(learner)


# State and arguments


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_state_goes_on_exactly(policy):
    def make():
        return StopOnNonFinite(policy, snapshot_every=3, max_rollbacks=2)

    data = poisoned(10, 4, 7)
    with pytest.warns(UserWarning, match="skipped|back to"):
        straight = trained(data, make())
    first = make()
    with pytest.warns(UserWarning, match="skipped|back to"):
        half = trained(data[:5], first)
    second = make()
    other = Learner(normed(1), torch.nn.MSELoss(), adam, plugins=[second], standard=False)
    other.model.load_state_dict(half.model.state_dict())
    other.optimizer.load_state_dict(half.optimizer.state_dict())
    for counter in fields(half.progress):
        setattr(other.progress, counter.name, getattr(half.progress, counter.name))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with pytest.warns(UserWarning, match="skipped|back to"):
        other.fit(data[5:], epochs=1)
    assert same(straight, other)
    assert second.state_dict()["rollbacks"] == (2 if policy == "rollback" else 0)


def test_state_of_raise_is_empty():
    assert StopOnNonFinite().state_dict() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "rolback"}, "did you mean 'rollback'"),
        ({"policy": "skip", "late": True}, "has to know before"),
        ({"policy": "skip", "gradients": False}, "has to know before"),
        ({"max_skips": -1}, "max_skips=-1"),
        ({"max_rollbacks": -1}, "max_rollbacks=-1"),
        ({"snapshot_every": 0}, "snapshot_every=0"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(PluginError, match=message):
        StopOnNonFinite(**options)


def test_raise_listens_to_no_more_than_it_needs():
    found = implemented(StopOnNonFinite())
    assert {"step_begin", "update_begin", "update_end", "update_skipped", "epoch_context"}.isdisjoint(found)
    found = implemented(StopOnNonFinite(gradients=True))
    assert "step_begin" not in found
    assert {"update_begin", "update_end", "update_skipped", "epoch_context"} <= set(found)


def test_skip_in_a_pass_inside_a_step_leaves_the_outer_copies_alone():
    data = poisoned(4, 2)

    def inside(learner, phase, step):
        if phase.name == "train" and step.index == 2:
            seen.append(copy.deepcopy(learner.current.epoch.saved_stores()["stop_on_non_finite"]["buffers"]))
            learner.run(TrainingPhase("inner"), poisoned(2, 0))
            seen.append(copy.deepcopy(learner.current.epoch.saved_stores()["stop_on_non_finite"]["buffers"]))

    seen = []
    guard = StopOnNonFinite("skip")
    with pytest.warns(UserWarning, match="skipped"):
        trained(data, guard, on("loss_begin", inside, updates=("params", "buffers")))
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_lazy_models_get_their_snapshot_when_they_have_parameters():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d(), torch.nn.Linear(4, 1))
    data = poisoned(5, 3)
    learner = make_learner(StopOnNonFinite("rollback", snapshot_every=1), model=model, lr=0.01)
    with pytest.warns(UserWarning, match="back to the state after 3 updates"):
        learner.fit(data, epochs=1)
    assert all(value.isfinite().all() for value in model.state_dict().values())


class Growing(torch.optim.SGD):
    """Keeps what it has learned about its rate in its groups, as some optimizers without a rate of their own do."""

    def __init__(self, params, lr, **options):
        super().__init__(params, lr, **options)
        for group in self.param_groups:
            group.update(d=1.0, k=0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.5
            group["lr"] = 0.01 * group["d"]
        return super().step(closure)


class Counted(Growing):
    """Keeps it beside its groups."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scale = 1.0

    def step(self, closure=None):
        super().step(closure)
        self.scale *= 0.5

    def state_dict(self):
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state):
        super().load_state_dict({key: value for key, value in state.items() if key != "scale"})
        self.scale = state["scale"]


@pytest.mark.parametrize("kind", [Growing, Counted])
def test_rollback_puts_back_what_an_optimizer_keeps_in_its_groups_and_beside_them(kind):
    def run(data, *plugins):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = kind(model.parameters(), lr=0.01, momentum=0.9)
        Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False).fit(data, epochs=1)
        return optimizer.state_dict()

    def spoil(learner, **_):
        if learner.progress.updates == 4:
            with torch.no_grad():
                learner.model.weight.fill_(math.nan)

    good = batches(6)
    guard = StopOnNonFinite("rollback", snapshot_every=1)
    with pytest.warns(UserWarning, match="back to the state after 3 updates"):
        state = run(good, guard, on("update_end", spoil, updates=("params",)))
    assert state["param_groups"][0]["k"] == 5  # the fourth is undone
    assert state["param_groups"][0]["d"] == 1.5**5
    assert state.get("scale", 0.5**5) == 0.5**5


def test_rollback_leaves_a_rate_that_a_plugin_changes():
    rates = []

    def note(learner, **_):
        rates.append(learner.optimizer.param_groups[0]["lr"])

    model = nn.Linear(3, 1)
    plugins = [StopOnNonFinite("rollback", snapshot_every=9), Schedule(cosine()), on("update_end", note, name="z")]
    learner = Learner(model, nn.MSELoss(), Shown(model.parameters(), lr=0.1), plugins=plugins, standard=False)
    data = poisoned(6, 3)
    with pytest.warns(UserWarning, match="back to the state after 0 updates"):
        learner.fit(data, epochs=1)
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates)


class Shown(torch.optim.SGD):
    """An optimizer of another package."""
