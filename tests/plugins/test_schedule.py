"""Schedules against loops by hand: bitwise equal parameters, and what is refused."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from helpers import on
from loopkit_testing import check_plugin
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, lr_scheduler

from loopkit import CancelStep, Learner, TrainingPhase, ValidationPhase, hookimpl
from loopkit.errors import PluginConflict, PluginError
from loopkit.groups import param_groups
from loopkit.plugins.metrics import Metrics
from loopkit.plugins.schedule import Plateau, Schedule, TorchSchedule
from loopkit.schedules import constant, cosine, linear, one_cycle_momentum, warmup

EPOCHS, LENGTH = 2, 6
TOTAL = EPOCHS * LENGTH


class Model(nn.Module):
    """Two layers with names, and dropout between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.dropout, self.head = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, inputs):
        return self.head(self.dropout(self.body(inputs).tanh()))


def make_batches(count=LENGTH):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(5, 4, generator=generator), torch.randn(5, 1, generator=generator)) for _ in range(count)]


def groups(model):
    return param_groups(model, {"head": {"lr": 0.01}})


def sgd(model):
    return SGD(groups(model), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model):
    return AdamW(groups(model), lr=0.1)


def by_hand(model, optimizer, before=None, after=None, epochs=EPOCHS, k=1, epoch_end=None, batches=None):
    """``before(update)`` and ``after(update)`` come around each update; the data is passed over ``epochs`` times."""
    torch.manual_seed(3)
    update = 0
    model.train()
    for _ in range(epochs):
        for i, (inputs, targets) in enumerate(batches or make_batches()):
            if i % k == 0:
                if before:
                    before(update)
                optimizer.zero_grad()
            (mse_loss(model(inputs), targets) / k).backward()
            if (i + 1) % k == 0:
                optimizer.step()
                if after:
                    after(update)
                update += 1
        if epoch_end:
            epoch_end()
    return model


def learned(make_optimizer, *plugins, epochs=EPOCHS, **options):
    model = Model()
    learner = Learner(model, mse_loss, make_optimizer(model), plugins=plugins, standard=False, **options)
    torch.manual_seed(3)
    learner.fit(make_batches(), epochs=epochs)
    return learner


def assert_same(one, other):
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class Skip:
    """Votes against the updates of these steps."""

    name = "skip"

    def __init__(self, *steps):
        self.steps = steps

    @hookimpl
    def update_begin(self, step):
        if step.index in self.steps:
            step.skip_update("wanted")


class Record:
    """The hyperparameter in force at each update, or of each group if there are several."""

    name = "record"
    volatile = ("values",)

    def __init__(self, key="lr", optimizer="optimizer"):
        self.key, self.optimizer, self.values = key, optimizer, []

    @hookimpl(reads=("optimizer",))
    def update_begin(self, step):
        if step.optimizer_name == self.optimizer:
            values = [group[self.key] for group in step.optimizer.param_groups]
            self.values.append(values if len(values) > 1 else values[0])


def tiny(*plugins, optimizer=None, **options):
    """A learner with one group of lr 1."""
    torch.manual_seed(0)
    make = optimizer or (lambda params: SGD(params, lr=1.0))
    return Learner(nn.Linear(4, 1), mse_loss, make, plugins=plugins, standard=False, **options)


# Schedule, against loops by hand


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_schedule_of_the_lr_equals_a_hand_loop_with_groups_of_their_own_lr(make_optimizer):
    schedule = warmup(3, then=cosine(TOTAL - 3))
    hand = Model()
    optimizer = make_optimizer(hand)
    bases = [group["lr"] for group in optimizer.param_groups]

    def before(update):
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * schedule(update)

    by_hand(hand, optimizer, before)
    assert_same(learned(make_optimizer, Schedule(schedule)).model, hand)


@pytest.mark.parametrize(("key", "make_optimizer"), [("momentum", sgd), ("weight_decay", sgd), ("weight_decay", adamw)])
def test_schedule_of_another_key_equals_a_hand_loop(key, make_optimizer):
    hand = Model()
    optimizer = make_optimizer(hand)
    base = optimizer.param_groups[0][key]

    def before(update):
        for group in optimizer.param_groups:
            group[key] = base * linear(TOTAL)(update)

    by_hand(hand, optimizer, before)
    assert_same(learned(make_optimizer, Schedule(linear(TOTAL), key)).model, hand)


def test_schedule_of_the_first_beta_equals_a_hand_loop():
    schedule = one_cycle_momentum(TOTAL)
    hand = Model()
    optimizer = adamw(hand)

    def before(update):
        for group in optimizer.param_groups:
            group["betas"] = (schedule(update), 0.999)

    by_hand(hand, optimizer, before)
    assert_same(learned(adamw, Schedule(schedule, "betas[0]", absolute=True)).model, hand)


@pytest.mark.parametrize("pattern", ["*.dropout.p", "dropout.p", "drop*.p"])
def test_schedule_of_a_modules_attribute_equals_a_hand_loop(pattern):
    hand = Model()

    def before(update):
        hand.dropout.p = 0.5 * linear(TOTAL)(update)

    by_hand(hand, sgd(hand), before)
    assert_same(learned(sgd, Schedule(linear(TOTAL), attribute=pattern)).model, hand)


def test_schedule_per_epoch_equals_a_hand_loop():
    hand = Model()
    optimizer = sgd(hand)
    bases = [group["lr"] for group in optimizer.param_groups]
    epochs = iter(range(1, 9))

    def epoch_end():
        epoch = next(epochs)
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * 0.5**epoch

    by_hand(hand, optimizer, epoch_end=epoch_end)
    assert_same(learned(sgd, Schedule(lambda epoch: 0.5**epoch, every="epoch")).model, hand)


def test_schedule_with_accumulation_counts_updates():
    hand = Model()
    optimizer = sgd(hand)
    bases = [group["lr"] for group in optimizer.param_groups]

    def before(update):
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"] = base * linear(EPOCHS * LENGTH // 3)(update)

    by_hand(hand, optimizer, before, k=3)
    assert_same(learned(sgd, Schedule(linear()), accumulate=3).model, hand)


def test_schedules_of_several_keys_act_together():
    hand = Model()
    optimizer = sgd(hand)
    bases = [group["lr"] for group in optimizer.param_groups]

    def before(update):
        factor = linear(TOTAL)(update)
        for group, base in zip(optimizer.param_groups, bases, strict=True):
            group["lr"], group["momentum"] = base * factor, 0.9 * factor

    by_hand(hand, optimizer, before)
    made = learned(sgd, Schedule(linear(TOTAL)), Schedule(linear(TOTAL), "momentum"))
    assert_same(made.model, hand)


def test_schedule_sets_a_tensor_lr_in_place():
    lr = torch.tensor(0.1)
    model = nn.Linear(4, 1)
    optimizer = AdamW(model.parameters(), lr=lr, capturable=False, foreach=False)
    learner = Learner(model, mse_loss, optimizer, plugins=[Schedule(linear(4))], standard=False)
    learner.fit(make_batches(2), epochs=1)
    assert optimizer.param_groups[0]["lr"] is lr
    assert torch.equal(lr, torch.tensor(float(torch.tensor(0.1)) * 0.5))


# Schedule: what it counts, and whom it acts on


def test_schedule_keeps_the_ratio_between_groups():
    record = Record()
    learned(sgd, Schedule(linear(TOTAL)), record)
    assert record.values == [[0.1 * linear(TOTAL)(k), 0.01 * linear(TOTAL)(k)] for k in range(TOTAL)]


def test_schedule_does_not_advance_on_a_skipped_update():
    record = Record()
    tiny(Schedule(lambda k: k + 1), record, Skip(1, 2)).fit(make_batches(5), epochs=1)
    assert record.values == [1.0, 2.0, 2.0, 2.0, 3.0]


def test_schedule_acts_on_the_groups_of_a_name():
    record = Record()
    learned(sgd, Schedule(constant(0.5), groups="head"), record, epochs=1)
    assert record.values[0] == [0.1, 0.005]


def test_schedules_of_different_groups_act_side_by_side():
    record = Record()
    plugins = Schedule(constant(0.5), groups="head"), Schedule(constant(2.0), groups="default", name="second")
    learned(sgd, *plugins, record, epochs=1)
    assert record.values[0] == [0.2, 0.005]


def test_schedule_leaves_groups_without_its_key_alone():
    model = nn.Linear(4, 1)
    optimizer = SGD([{"params": [model.weight]}, {"params": [model.bias], "extra": 2.0}], lr=0.1)
    learner = Learner(model, mse_loss, optimizer, plugins=[Schedule(constant(0.5), "extra")], standard=False)
    learner.fit(make_batches(1), epochs=1)
    assert [group.get("extra") for group in optimizer.param_groups] == [None, 1.0]


class TwoPhase(TrainingPhase):
    """The critic learns in every step, the generator in every second one."""

    name = "two"

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(mse_loss(learner.model["critic"](inputs), targets), "critic")
        step.update("critic")
        if step.index % 2:
            step.backward(mse_loss(learner.model["generator"](inputs), targets), "generator")
            step.update("generator")


class Quiet(ValidationPhase):
    def step(self, learner, step):
        """Looks at nothing."""


def two(*plugins):
    models = {"critic": nn.Linear(4, 1), "generator": nn.Linear(4, 1)}
    optimizers = {name: partial(SGD, lr=1.0) for name in models}
    return Learner(models, None, optimizers, plugins=plugins, phases=[TwoPhase()], standard=False)


def test_schedule_of_one_optimizer_counts_its_updates_alone():
    critic, generator = Record(optimizer="critic"), Record(optimizer="generator")
    critic.name = "record_critic"
    two(Schedule(lambda k: k + 1, optimizer="generator"), critic, generator).fit(make_batches(4), epochs=1)
    assert critic.values == [1.0] * 4
    assert generator.values == [1.0, 2.0]


def test_schedule_of_all_optimizers_counts_the_updates_of_the_first():
    critic, generator = Record(optimizer="critic"), Record(optimizer="generator")
    critic.name = "record_critic"
    two(Schedule(lambda k: k + 1), critic, generator).fit(make_batches(4), epochs=1)
    assert critic.values == [1.0, 2.0, 3.0, 4.0]
    assert generator.values == [2.0, 4.0]  # those of the step, though the critic has been updated in it


@pytest.mark.parametrize("turns", [("one", "two"), ("two", "one")], ids="-".join)
def test_schedule_gives_all_optimizers_of_a_step_the_same_update(turns):
    class Turns(TrainingPhase):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            step.loss = sum(mse_loss(model(step.inputs), step.targets) for model in learner.models.values())
            step.backward(step.loss)
            for name in turns:
                if name == "one" or step.index != 2:  # "two" is left out once, so its own updates are fewer
                    step.update(name)

    class Rates:
        def __init__(self):
            self.seen = []

        @hookimpl(reads=("optimizer.lr",))
        def update_begin(self, step):
            self.seen.append((step.index, step.optimizer.param_groups[0]["lr"]))

    models = {"one": nn.Linear(4, 1), "two": nn.Linear(4, 1)}
    optimizers = {name: partial(SGD, lr=1.0) for name in models}
    rates = Rates()
    plugins = [Schedule(lambda k: 1.0 + k), rates]
    learner = Learner(models, None, optimizers, phases=[Turns()], plugins=plugins, standard=False)
    learner.fit(make_batches(), epochs=1)
    assert all(lr == 1.0 + index for index, lr in rates.seen)
    assert [optimizer.param_groups[0]["lr"] for optimizer in learner.optimizers.values()] == [7.0, 7.0]


def test_schedule_of_several_optimizers_is_even_after_a_cancelled_step_and_an_epoch_of_unknown_length():
    class Together(TrainingPhase):
        def step(self, learner, step):
            step.loss = sum(mse_loss(model(step.batch[0]), step.batch[1]) for model in learner.models.values())
            step.backward(step.loss)
            step.update("one")
            if step.index == 1 and learner.progress.epochs == 0:
                raise CancelStep
            step.update("two")

    models = {"one": nn.Linear(4, 1), "two": nn.Linear(4, 1)}
    optimizers = {name: partial(SGD, lr=1.0) for name in models}
    plugin = Schedule(lambda k: 1.0 + k)
    learner = Learner(models, None, optimizers, phases=[Together()], plugins=[plugin], standard=False)
    for accumulate in (1, 4):
        learner.accumulate = accumulate
        learner.fit(lambda: iter(make_batches()), epochs=1)  # 6 batches: with 4, a last update after the last step
        rates = [optimizer.param_groups[0]["lr"] for optimizer in learner.optimizers.values()]
        assert rates == [1.0 + plugin.count] * 2


def test_validation_within_a_step_leaves_the_rates_of_its_later_updates_alone():
    generator = Record(optimizer="generator")
    plain = Record(optimizer="generator")
    validates = on("update_end", lambda learner: learner.run("val", make_batches(1)), "validates")
    two(Schedule(lambda k: k + 1), plain).fit(make_batches(4), epochs=1)
    learner = two(Schedule(lambda k: k + 1), generator, validates)
    learner.phases["val"] = Quiet()
    learner.fit(make_batches(4), epochs=1)
    assert generator.values == plain.values


def test_schedule_of_an_attribute_finds_the_model_by_its_name():
    models = {"critic": nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)), "generator": nn.Sequential(nn.Dropout(0.5))}
    learner = Learner(
        models,
        None,
        {"critic": partial(SGD, lr=1.0)},
        plugins=[Schedule(constant(0.5), attribute="critic.*.p")],
        phases=[CriticPhase()],
        standard=False,
    )
    learner.fit(make_batches(1), epochs=1)
    assert (models["critic"][1].p, models["generator"][0].p) == (0.25, 0.5)


class CriticPhase(TrainingPhase):
    name = "critic"

    def step(self, learner, step):
        inputs, targets = step.batch
        step.backward(mse_loss(learner.model["critic"](inputs), targets))
        step.update()


class AddGroup:
    """Adds a parameter group at the end of a step."""

    name = "add_group"

    def __init__(self, at):
        self.at = at

    @hookimpl
    def step_end(self, learner, step):
        if step.index == self.at:
            learner.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 8.0})


def test_schedule_takes_in_a_group_that_is_added_during_the_fit():
    record = Record()
    tiny(Schedule(lambda k: 2.0**-k), AddGroup(1), record).fit(make_batches(5), epochs=1)
    # the new group joins after the next update
    assert record.values == [1.0, 0.5, [0.25, 8.0], [0.125, 1.0], [0.0625, 0.5]]


def test_schedule_goes_on_after_the_optimizers_state_was_loaded():
    class Reload:
        @hookimpl
        def step_end(self, learner, step):
            learner.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))

    record = Record()
    tiny(Schedule(lambda k: 2.0**-k), Reload(), record).fit(make_batches(4), epochs=1)
    assert record.values == [1.0, 0.5, 0.25, 0.125]


# Schedule: start, and the whole fit


def test_start_is_the_first_k():
    record = Record()
    tiny(Schedule(linear(10), start=4), record).fit(make_batches(3), epochs=1)
    assert record.values == [linear(10)(4), linear(10)(5), linear(10)(6)]


@pytest.mark.parametrize(
    ("limits", "total"),
    [
        ({"epochs": 3}, 6),
        ({"epochs": 3, "max_updates": 5}, 5),
        ({"max_updates": 5}, 5),
        ({"max_steps": 5}, 5),
        ({"epochs": math.inf, "max_steps": 3}, 3),
    ],
)
def test_schedule_without_a_length_ends_with_the_fit(limits, total):
    record = Record()
    learner = tiny(Schedule(cosine()), record)
    learner.fit(make_batches(2), **limits)
    assert record.values == [cosine(total)(k) for k in range(total)]
    assert learner.optimizer.param_groups[0]["lr"] == 0.0


class Both(TrainingPhase):
    """Updates two optimizers in each step."""

    def step(self, learner, step):
        inputs, targets = step.batch
        for name, model in learner.models.items():
            step.backward(mse_loss(model(inputs), targets), name)
            step.update(name)


@pytest.mark.parametrize("limits", [{"epochs": 2}, {"max_updates": 12}, {"max_updates": 11}, {"max_steps": 6}], ids=str)
def test_schedule_without_a_length_ends_with_the_fit_of_two_optimizers(limits):
    def models():
        torch.manual_seed(7)
        return {"one": nn.Linear(4, 1), "two": nn.Linear(4, 1)}

    rates = {"one": 0.1, "two": 0.5}
    optimizers = {name: partial(SGD, lr=rate) for name, rate in rates.items()}
    learner = Learner(models(), None, optimizers, phases=[Both()], plugins=[Schedule(cosine())], standard=False)
    assert learner.fit(make_batches(3), **limits).updates == 12
    by_hand = models()
    for name, model in by_hand.items():
        optimizer = SGD(model.parameters(), lr=rates[name])
        for k, (inputs, targets) in enumerate(make_batches(3) * 2):
            optimizer.param_groups[0]["lr"] = rates[name] * cosine(6)(k)
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        assert all(
            torch.equal(p, q) for p, q in zip(model.parameters(), learner.models[name].parameters(), strict=True)
        )
        assert learner.optimizers[name].param_groups[0]["lr"] == 0.0


def test_schedule_that_is_over_before_the_fit_is_warned_of_once():
    with pytest.warns(
        UserWarning, match=r"cosine\(.* was to span the whole fit, 3 updates, and there are more: phase 'two'"
    ):
        two(Schedule(cosine())).fit(make_batches(6), max_updates=6)  # "generator" is updated in every second step


def test_schedule_without_a_length_per_epoch_ends_with_the_fit():
    record = Record()
    tiny(Schedule(linear(), every="epoch"), record).fit(iter_of(make_batches(2)), epochs=4)
    assert record.values == [value for k in range(4) for value in [linear(4)(k)] * 2]


def test_schedule_without_a_length_spans_the_second_fit_anew():
    record = Record()
    learner = tiny(Schedule(warmup(1, then=linear())), record)
    learner.fit(make_batches(2), epochs=1)
    learner.fit(make_batches(2), epochs=2)
    first, second = (warmup(1, then=linear(n))(0) for n in (1, 3))
    assert record.values == [first, 1.0, second, *(linear(3)(k) for k in range(3))]


def test_schedule_without_a_length_and_with_a_start_ends_with_the_fit():
    record = Record()
    tiny(Schedule(linear(), start=2), record).fit(make_batches(2), epochs=2)
    assert record.values == [linear(6)(k) for k in (2, 3, 4, 5)]


def test_schedule_with_a_length_goes_on_in_the_second_fit():
    record = Record()
    learner = tiny(Schedule(linear(4)), record)
    learner.fit(make_batches(2), epochs=1)
    learner.fit(make_batches(2), epochs=1)
    assert record.values == [linear(4)(k) for k in range(4)]


def iter_of(batches):
    """Data without len()."""
    return lambda: iter(batches)


def test_schedule_without_a_length_is_refused_before_the_first_step_of_a_fit_without_one():
    record = Record()
    learner = tiny(Schedule(warmup(2, then=cosine())), record)
    with pytest.raises(ValueError, match=r"plugin 'schedule': warmup\(2.* spans the whole fit.*updates=.*max_updates="):
        learner.fit(iter_of(make_batches(2)), epochs=2)
    assert record.values == []


def test_schedule_without_a_length_is_refused_outside_a_fit():
    learner = tiny(Schedule(cosine()))
    with pytest.raises(ValueError, match="give the schedule updates="):
        learner.run("train", make_batches(2))


def test_schedule_with_a_length_runs_outside_a_fit():
    learner = tiny(Schedule(linear(4)))
    learner.run("train", make_batches(2))
    assert learner.optimizer.param_groups[0]["lr"] == 0.5


# Schedule: state


def resumed(make_schedule, cut, make_optimizer=None):
    """Record of a run that is cut after a number of updates and goes on in a new learner, and of one that is not."""

    def make(record):
        return tiny(make_schedule(), record, optimizer=make_optimizer)

    class Save:
        @hookimpl(reads=("*",))
        def step_end(self, learner, step):
            if step.index == cut - 1:
                states.append(copy.deepcopy(learner.state_dict()))

    states, whole, second = [], Record(), Record()
    learner = make(whole)
    learner.add(Save())
    learner.fit(make_batches(10), epochs=1)
    again = make(second)
    again.load_state_dict(states[0])
    again.fit(make_batches(10), epochs=1)
    return [*whole.values[:cut], *second.values], whole.values


@pytest.mark.parametrize("schedule", [cosine(), cosine(10), warmup(3, then=linear())])
def test_schedule_goes_on_from_its_state(schedule):
    found, expected = resumed(lambda: Schedule(schedule), 4)
    assert found == expected


def test_schedule_whose_state_is_of_a_finished_fit_spans_the_next_one():
    first, record = Schedule(linear()), Record()
    tiny(first).fit(make_batches(4), epochs=1)
    second = Schedule(linear())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    tiny(second, record).fit(make_batches(2), epochs=1)
    assert record.values == [1.0, 0.5]


def test_schedule_keeps_its_bases_in_its_state():
    schedule = Schedule(linear(4))
    schedule.load_state_dict({"count": 2, "bases": {"optimizer.0.lr": 6.0}, "whole_fit": None})
    record = Record()
    tiny(schedule, record).fit(make_batches(1), epochs=1)
    assert record.values == [3.0]


# Schedule: what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "momentun"}, r"'momentun' has no match \(did you mean 'momentum'\?\); there are: dampening, "),
        ({"optimizer": "optimiser"}, r"'optimiser' has no match \(did you mean 'optimizer'\?\)"),
        ({"groups": "haed"}, r"'haed' has no match \(did you mean 'head'\?\); there are: default, head"),
        ({"attribute": "*.dropuot.p"}, r"'\*.dropuot.p' has no match \(did you mean 'dropout.p'\?\)"),
        ({"attribute": "*.rate"}, r"'\*.rate' has no match; there are: body, dropout, head"),
        ({"key": "nesterov"}, r"optimizer.0.nesterov is False, which is no number"),
        ({"key": "lr[0]"}, r"lr is 0.1: it has no item 0"),
    ],
)
def test_schedule_of_nothing_is_refused_before_the_first_step(options, message):
    record = Record()
    with pytest.raises(PluginError, match=message):
        learned(sgd, Schedule(constant(), **options), record)
    assert record.values == []


@pytest.mark.parametrize(
    ("key", "message"), [("betas", r"is \(0.9, 0.999\).*; write 'betas\[0\]'"), ("betas[2]", "it has no item 2")]
)
def test_schedule_of_a_tuple_is_refused(key, message):
    with pytest.raises(PluginError, match=message):
        learned(adamw, Schedule(constant(), key))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.1,), {}, "0.1 is no function"),
        ((lr_scheduler.StepLR,), {}, "TorchSchedule takes torch's schedulers"),
        ((cosine,), {}, r"cosine is the function that makes a schedule: call it, cosine\(\.\.\.\)"),
        ((warmup,), {}, r"warmup is the function that makes a schedule: call it, warmup\(\.\.\.\)"),
        ((constant(),), {"every": "step"}, "every is 'step'"),
        ((constant(),), {"start": -1}, "start is -1"),
        ((constant(),), {"attribute": "p"}, "write the module's path"),
        ((constant(), "betas[x]"), {}, r"key='betas\[x\]'"),
    ],
)
def test_schedule_refuses_options_out_of_range(arguments, options, message):
    with pytest.raises(PluginError, match=message):
        Schedule(*arguments, **options)


SGD_TORCH = lambda optimizer: lr_scheduler.StepLR(optimizer, 2)  # noqa: E731


@pytest.mark.parametrize(
    "plugins",
    [
        (Schedule(constant()), Schedule(constant(), name="other")),
        (Schedule(constant()), Schedule(constant(), name="other", groups="head")),
        (Schedule(constant()), Plateau("train/loss")),
        (Schedule(constant()), TorchSchedule(SGD_TORCH)),
        (TorchSchedule(SGD_TORCH), Plateau("train/loss")),
        (Schedule(constant(), "betas[0]"), Schedule(constant(), "betas[0]", name="other")),
        (Schedule(constant(), attribute="*.p"), Schedule(constant(), attribute="dropout.p", name="other")),
    ],
)
def test_two_plugins_for_one_hyperparameter_are_refused_when_the_learner_is_built(plugins):
    with pytest.raises(PluginConflict, match="both own"):
        tiny(*plugins, Metrics())


@pytest.mark.parametrize(
    "plugins",
    [
        (Schedule(constant(), "betas[0]"), Schedule(constant(), "betas[1]", name="other")),
        (Schedule(constant(), attribute="*.p"), Schedule(constant(), attribute="*.momentum", name="other")),
        (Schedule(constant(), "weight_decay"), TorchSchedule(SGD_TORCH)),
        (Schedule(constant(), optimizer="critic"), Schedule(constant(), optimizer="generator", name="other")),
        (TorchSchedule(SGD_TORCH, optimizer="critic"), TorchSchedule(SGD_TORCH, optimizer="generator", name="other")),
        (TorchSchedule(SGD_TORCH, optimizer="critic"), Plateau("train/loss", optimizer="generator")),
    ],
)
def test_plugins_for_different_hyperparameters_go_together(plugins):
    tiny(*plugins, Metrics())


def test_schedule_next_to_a_scheduler_that_cycles_the_momentum_is_refused():
    optimizer = SGD(nn.Linear(4, 1).parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    with pytest.raises(PluginConflict, match=r"both own \"optimizer.momentum"):
        tiny(TorchSchedule(scheduler), Schedule(constant(), "momentum"), optimizer=optimizer)


# TorchSchedule


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [2])])


SCHEDULERS = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, TOTAL),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.01], total_steps=TOTAL + 1),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda k: 0.9**k),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "sequential": sequential,
    "chained": chained,
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("every", ["update", "epoch"])
def test_torch_schedule_equals_torch_by_hand(make, every):
    hand = Model()
    optimizer = sgd(hand)
    scheduler = make(optimizer)
    after = (lambda update: scheduler.step()) if every == "update" else None
    by_hand(hand, optimizer, after=after, epoch_end=scheduler.step if every == "epoch" else None)
    made = learned(sgd, TorchSchedule(make, every=every))
    assert_same(made.model, hand)
    assert [g["lr"] for g in made.optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_torch_schedule_takes_a_scheduler_of_the_learners_optimizer():
    model, hand = Model(), Model()
    optimizer, hand_optimizer = sgd(model), sgd(hand)
    plugin = TorchSchedule(lr_scheduler.StepLR(optimizer, 2))
    hand_scheduler = lr_scheduler.StepLR(hand_optimizer, 2)
    by_hand(hand, hand_optimizer, after=lambda update: hand_scheduler.step())
    learner = Learner(model, mse_loss, optimizer, plugins=[plugin], standard=False)
    torch.manual_seed(3)
    learner.fit(make_batches(), epochs=EPOCHS)
    assert_same(model, hand)


def test_torch_schedule_does_not_step_on_a_skipped_update():
    record = Record()
    plugin = TorchSchedule(lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5))
    tiny(plugin, record, Skip(1, 2)).fit(make_batches(5), epochs=1)
    assert record.values == [1.0, 0.5, 0.5, 0.5, 0.25]


def test_torch_schedule_counts_the_updates_of_its_optimizer():
    record = Record(optimizer="generator")
    plugin = TorchSchedule(lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), optimizer="generator")
    two(plugin, record).fit(make_batches(6), epochs=1)
    assert record.values == [1.0, 0.5, 0.25]


def test_torch_schedule_of_one_of_several_optimizers_needs_its_name():
    with pytest.raises(PluginError, match=r"choose one with optimizer=\.\.\. \(critic, generator\)"):
        two(TorchSchedule(SGD_TORCH)).fit(make_batches(2), epochs=1)


def test_torch_schedule_of_an_unknown_optimizer_is_refused():
    with pytest.raises(PluginError, match=r"'critik' has no match \(did you mean 'critic'\?\)"):
        two(TorchSchedule(SGD_TORCH, optimizer="critik")).fit(make_batches(2), epochs=1)


def test_torch_schedule_of_another_optimizer_is_refused_before_the_first_step():
    other = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    record = Record()
    with pytest.raises(
        PluginError, match=r"made for another optimizer than the learner's 'optimizer'; give a function"
    ):
        tiny(TorchSchedule(lr_scheduler.StepLR(other, 1)), record).fit(make_batches(2), epochs=1)
    assert record.values == []


@pytest.mark.parametrize("given", [3, "cosine", None])
def test_torch_schedule_refuses_what_is_no_scheduler(given):
    with pytest.raises(PluginError, match="neither a scheduler nor a function"):
        TorchSchedule(given)


def test_torch_schedule_refuses_reduce_lr_on_plateau():
    with pytest.raises(PluginError, match="use Plateau"):
        TorchSchedule(lr_scheduler.ReduceLROnPlateau(SGD(nn.Linear(1, 1).parameters(), lr=0.1)))


@pytest.mark.parametrize("value", [0.01, 0.2, torch.tensor(0.01)])
def test_torch_schedule_names_the_rate_of_an_earlier_scheduler(value):
    model = Model()
    optimizer = sgd(model)
    lr_scheduler.StepLR(optimizer, 10)  # it notes the rate, which is 0.1
    optimizer.param_groups[0]["lr"] = value
    learner = Learner(
        model, mse_loss, optimizer, plugins=[TorchSchedule(lambda o: lr_scheduler.LambdaLR(o, lambda k: 1))]
    )
    with pytest.warns(UserWarning, match=r"initial_lr=0\.1 of an earlier scheduler.*del optimizer\.param_groups"):
        learner.fit(make_batches(), epochs=1)


class Counts(lr_scheduler.LRScheduler):
    """A scheduler that sets no rate, as for optimizers that compute their own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.last_epoch = 0

    def step(self):
        self.last_epoch += 1

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


@pytest.mark.parametrize("noted", [{}, {"initial_lr": 0.1}, {"initial_lr": None}], ids=str)
@pytest.mark.parametrize("has_rate", [True, False], ids=["None", "missing"])
def test_torch_schedule_takes_an_optimizer_without_a_rate(has_rate, noted):
    class OwnRate(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-0.01)

    model = Model()
    optimizer = OwnRate(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    del group["lr"]
    group.update(noted, **({"lr": None} if has_rate else {}))
    plugin = TorchSchedule(Counts)
    learner = Learner(model, mse_loss, optimizer, plugins=[plugin], standard=False)
    learner.fit(make_batches(), epochs=2)
    assert plugin.scheduler.last_epoch == learner.progress.updates
    learner.remove("torch_schedule")
    assert group.get("lr") is None


@pytest.mark.parametrize(
    ("function", "message"), [(lr_scheduler.ReduceLROnPlateau, "use Plateau"), (lambda o: None, "returned None")]
)
def test_torch_schedule_refuses_a_function_of_something_else(function, message):
    with pytest.raises(PluginError, match=message):
        tiny(TorchSchedule(function)).fit(make_batches(2), epochs=1)


def test_torch_schedule_that_is_stepped_by_hand_too_warns_once_with_the_line():
    class Stepping:
        @hookimpl
        def step_end(self, learner):
            learner.plugins["torch_schedule"].scheduler.step()

    with pytest.warns(
        UserWarning, match=r"StepLR is stepped twice: by plugin 'torch_schedule'.*test_schedule"
    ) as found:
        tiny(TorchSchedule(SGD_TORCH), Stepping()).fit(make_batches(3), epochs=1)
    assert len(found) == 1
    assert f"line {Stepping.step_end.__code__.co_firstlineno + 2}" in str(found[0].message)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_torch_schedule_goes_on_from_its_state(make):
    def make_optimizer(params):
        weight, bias = params
        return SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.01}], momentum=0.9)

    found, expected = resumed(lambda: TorchSchedule(make), 4, make_optimizer)
    assert found == expected


def kinds(value):
    """Every type that a state holds."""
    if isinstance(value, dict):
        return {type(value)}.union(*(kinds(part) for part in value.values()), *(map(kinds, value)))
    if isinstance(value, (list, tuple)):
        return {type(value)}.union(*map(kinds, value))
    return {type(value)}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_torch_schedule_has_a_state_of_plain_values(make):
    plugin = TorchSchedule(make)
    learned(sgd, plugin, epochs=1)
    assert kinds(plugin.state_dict()) <= {dict, list, tuple, str, int, float, bool, type(None)}


def test_torch_schedule_gives_multi_step_lr_its_counter_back():
    plugin = TorchSchedule(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2]))
    tiny(plugin).fit(make_batches(1), epochs=1)
    plugin.load_state_dict(plugin.state_dict())
    assert list(plugin.scheduler.milestones.elements()) == [2, 2]


def test_torch_schedule_keeps_the_attributes_of_an_object_given_to_lambda_lr():
    class Decay:
        def __init__(self, rate):
            self.rate = rate

        def __call__(self, k):
            return self.rate**k

    plugin = TorchSchedule(lambda optimizer: lr_scheduler.LambdaLR(optimizer, Decay(0.5)))
    tiny(plugin).fit(make_batches(1), epochs=1)
    assert plugin.state_dict()["lr_lambdas"] == [{"rate": 0.5}]


def test_torch_schedule_whose_state_holds_a_function_says_what_cannot_be_saved():
    class Odd(lr_scheduler.LRScheduler):
        def __init__(self, optimizer):
            self.shape = {"of": [math.cos]}
            super().__init__(optimizer)

        def get_lr(self):
            return [group["lr"] for group in self.optimizer.param_groups]

    plugin = TorchSchedule(Odd)
    tiny(plugin).fit(make_batches(1), epochs=1)
    with pytest.raises(PluginError, match=r"holds a builtin_function_or_method, Odd\.shape\.of\[0\]"):
        plugin.state_dict()


# Plateau


OPTIONS = {"factor": 0.5, "patience": 0, "threshold": 0.05, "cooldown": 1}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau_equals_torch_by_hand(mode):
    hand = Model()
    optimizer = sgd(hand)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode=mode, **OPTIONS)
    val = make_batches(2)

    def epoch_end():
        hand.eval()
        with torch.no_grad():
            losses = torch.stack([mse_loss(hand(inputs), targets) for inputs, targets in val]).double()
        hand.train()
        scheduler.step(losses.sum().item() / 2)

    by_hand(hand, optimizer, epochs=6, epoch_end=epoch_end)
    model = Model()
    plugins = [Plateau("val/loss", mode=mode, **OPTIONS), Metrics()]
    learner = Learner(model, mse_loss, sgd(model), plugins=plugins, standard=False)
    torch.manual_seed(3)
    learner.fit(make_batches(), val, epochs=6)
    assert learner.optimizer.param_groups[0]["lr"] < 0.1
    assert_same(model, hand)


class Values:
    """Puts given values into the metrics, one for each pass of a phase."""

    name = "values"

    def __init__(self, *values, phase="train", metric="score"):
        self.values, self.phase, self.metric = iter(values), phase, metric

    @hookimpl(writes=("metrics.*/score",))
    def epoch_end(self, learner, phase):
        if phase.name == self.phase:
            learner.metrics[f"{phase.name}/{self.metric}"] = next(self.values)


def lrs(*values, **options):
    """The lr of each epoch, with these values of the metric at their ends."""
    record = Record()
    plateau = Plateau("train/score", factor=0.5, patience=0, **{"mode": "min", **options})
    tiny(plateau, Values(*values), record).fit(make_batches(1), epochs=len(values))
    return record.values


def test_plateau_takes_zero_for_a_value():
    assert lrs(1.0, 0.0, 0.0, 0.0) == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("mode", "values"),
    [("min", (-1.0, -0.95, -0.94)), ("max", (-1.0, -1.05, -1.06)), ("min", (-1.0, -1.05, -1.06))],
)
def test_plateau_below_zero_takes_only_what_is_better_by_the_share(mode, values):
    assert lrs(*values, mode=mode, threshold=0.1) == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(("mode", "value"), [("min", -1.2), ("max", -0.8)])
def test_plateau_below_zero_takes_what_is_better(mode, value):
    assert lrs(-1.0, value, value, value, mode=mode, threshold=0.1) == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau_never_takes_nan_for_the_best(mode):
    assert lrs(1.0, math.nan, 1.0, 1.0, mode=mode) == [1.0, 1.0, 0.5, 0.25]


def test_plateau_whose_first_value_is_nan_takes_the_next_for_the_best():
    assert lrs(math.nan, 3.0, 2.0, 1.0) == [1.0, 0.5, 0.5, 0.5]


def test_plateau_without_its_metric_says_what_there_is():
    plateau = Plateau("train/score", mode="min")
    with pytest.raises(PluginError, match=r"no metric 'train/score'.*did you mean 'train/scores'.*there are: train/s"):
        tiny(plateau, Values(1.0, metric="scores")).fit(make_batches(1), epochs=1)


def test_plateau_of_a_metric_that_nobody_makes_is_refused_before_the_first_step():
    record = Record()
    with pytest.raises(PluginError, match="val/loss"):
        tiny(Plateau("val/loss"), record).fit(make_batches(1), make_batches(1), epochs=1)
    assert record.values == []


def test_plateau_does_not_look_where_nothing_was_trained_since():
    plateau = Plateau("val/score", factor=0.5, patience=0, mode="min")
    learner = tiny(plateau, Values(1.0, 1.0, 1.0, phase="val"))
    learner.evaluate(make_batches(1))
    learner.fit(make_batches(1), make_batches(1), epochs=1)
    learner.evaluate(make_batches(1))
    assert learner.optimizer.param_groups[0]["lr"] == 1.0


def test_plateau_whose_phase_the_fit_does_not_run_is_refused():
    learner = tiny(Plateau("val/loss"), Metrics())
    with pytest.raises(PluginError, match="'plateau', phase_end: reads the metric 'val/loss', but this fit does not"):
        learner.fit(make_batches(1), epochs=1)


def test_plateau_goes_on_from_its_state():
    def plateau():
        return Plateau("train/score", factor=0.5, patience=2, mode="min")

    first, second, record = plateau(), plateau(), Record()
    tiny(first, Values(1.0, 1.0)).fit(make_batches(1), epochs=2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    learner = tiny(second, Values(1.0, 1.0, 1.0), record)
    learner.progress.updates = 2
    learner.fit(make_batches(1), epochs=3)
    assert record.values == [1.0, 1.0, 0.5]


def test_plateau_lowers_a_group_that_was_added_during_the_fit():
    record = Record()
    plateau = Plateau("train/score", factor=0.5, patience=0, mode="min")
    tiny(plateau, Values(1.0, 1.0, 1.0), AddGroup(0), record).fit(make_batches(1), epochs=2)
    assert record.values[-1] == [1.0, 8.0]


@pytest.mark.parametrize("options", [{"factor": 2.0}, {"mode": "least"}])
def test_plateau_with_options_out_of_range_is_refused_before_the_first_step(options):
    record = Record()
    with pytest.raises(ValueError, match=r"Factor|mode is 'least'"):
        tiny(Plateau("train/loss", **options), Metrics(), record).fit(make_batches(1), epochs=1)
    assert record.values == []


def test_plateau_needs_phase_and_metric():
    with pytest.raises(PluginError, match=r"monitor is .*: it is '<phase>/<metric>', such as"):
        Plateau("loss")


# The contract


@pytest.mark.parametrize(
    ("factory", "skip"),
    [
        (lambda: Schedule(warmup(2, then=cosine(6))), []),
        pytest.param(  # the phases run in fits without a length
            lambda: Schedule(cosine()), ["unknown_phases"], marks=pytest.mark.slow
        ),
        pytest.param(lambda: Schedule(linear(6), "momentum", every="epoch"), [], marks=pytest.mark.slow),
        pytest.param(  # some have no dropout
            lambda: Schedule(linear(6), attribute="*.p"), ["unknown_phases"], marks=pytest.mark.slow
        ),
        (lambda: TorchSchedule(SGD_TORCH), ["unknown_phases", "options_kept"]),  # several optimizers; scheduler is made
        (lambda: (Plateau("train/loss"), Metrics()), []),
    ],
    ids=["schedule", "whole_fit", "momentum", "attribute", "torch_schedule", "plateau"],
)
def test_plugin_keeps_the_contract(factory, skip):
    check_plugin(factory, skip=skip)


@pytest.mark.parametrize(
    ("make", "name", "there", "here"),
    [
        (lambda optimizer, n: lr_scheduler.CosineAnnealingLR(optimizer, T_max=n), "T_max", 10, 20),
        (lambda optimizer, n: lr_scheduler.StepLR(optimizer, step_size=n), "step_size", 3, 5),
        (lambda optimizer, n: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=n), "total_steps", 20, 30),
    ],
    ids=["cosine", "steps", "one cycle"],
)
def test_argument_of_a_scheduler_that_the_checkpoint_replaces_is_named(make, name, there, here):
    def learner(n):
        return tiny(TorchSchedule(lambda optimizer: make(optimizer, n)))

    saved = learner(there)
    saved.fit(make_batches(4), epochs=1)
    other = learner(here)
    other.load_state_dict(saved.state_dict())
    with pytest.warns(UserWarning, match=rf"has {name}={there} in the checkpoint, and {name}={here} here"):
        other.fit(make_batches(4), epochs=1)


def test_scheduler_with_the_arguments_of_the_checkpoint_resumes_without_a_word():
    def learner():
        return tiny(TorchSchedule(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4])))

    saved = learner()
    saved.fit(make_batches(3), epochs=1)
    other = learner()
    other.load_state_dict(saved.state_dict())
    other.fit(make_batches(3), epochs=1)
