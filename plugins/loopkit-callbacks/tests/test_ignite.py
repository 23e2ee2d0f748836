"""Handlers of Ignite: here, and attached to the real Engine on the same problem."""

import io
from types import SimpleNamespace

import pytest
import torch
from ignite import handlers as known
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Loss
from problems import STEPS, TRAIN, VAL, Record, equal, make_learner, make_model
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from loopkit import Learner, TrainingPhase, hookimpl
from loopkit.errors import PluginError
from loopkit.hooks import implemented
from loopkit.plugins import EarlyStopping, Schedule
from loopkit.schedules import cosine
from loopkit_callbacks import IgniteHandler, LightningCallback

EPOCHS = 3


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.1, **options})


class Real:
    """A trainer and an evaluator of Ignite, and what the optimizer's first group was at each step."""

    def __init__(self, make_optimizer=sgd, train=TRAIN):
        self.train = train
        self.model = make_model()
        self.optimizer = make_optimizer(self.model.parameters())
        self.trainer = create_supervised_trainer(self.model, self.optimizer, nn.functional.mse_loss)
        self.evaluator = create_supervised_evaluator(self.model, {"loss": Loss(nn.functional.mse_loss)})
        self.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: self.evaluator.run(VAL))
        self.seen = []

    def run(self, epochs=EPOCHS):
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.seen.append(now(self.optimizer)))
        self.trainer.run(self.train, max_epochs=epochs)
        return self


class Watch:
    """What the optimizer's groups were at each step."""

    def __init__(self):
        self.seen = []

    @hookimpl(phase=TrainingPhase, reads=("optimizer",))
    def step_end(self, learner):
        self.seen.append(now(learner.optimizer))


def now(optimizer):
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


def score(engine):
    return -engine.state.metrics["loss"]


# EarlyStopping


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 2},
        {"patience": 1, "threshold": 0.0015},
        {"patience": 2, "threshold": 0.004, "cumulative": True},
        {"patience": 9},
    ],
    ids=str,
)
def test_early_stopping_stops_when_it_does_under_the_engine(options):
    real = Real()
    theirs = known.EarlyStopping(score_function=score, trainer=real.trainer, **options)
    real.evaluator.add_event_handler(Events.COMPLETED, theirs)
    real.run(12)
    plugin = IgniteHandler("EarlyStopping", score_function=score, **options)
    learner = make_learner(plugin)
    result = learner.fit(TRAIN, VAL, epochs=12)
    assert learner.progress.updates == real.trainer.state.iteration
    assert (plugin.handler.counter, plugin.handler.best_score) == (theirs.counter, theirs.best_score)
    assert equal(learner.model, real.model)
    if options["patience"] == 9:
        assert (result.reason, result.message) == ("epochs", "")
    else:
        assert (result.reason, result.by) == ("stop", "ignite_early_stopping")
        assert f"{theirs.best_score}" in result.message


def test_the_trainer_of_one_that_is_made_already_is_the_learner():
    ours = known.EarlyStopping(2, score, Engine(lambda engine, batch: None))
    learner = make_learner(IgniteHandler(ours))
    assert learner.fit(TRAIN, VAL, epochs=12).epochs == 7


def test_early_stopping_can_look_at_the_training_after_each_epoch():
    plugin = IgniteHandler(
        "EarlyStopping", Events.EPOCH_COMPLETED, phase="train", patience=2, score_function=lambda e: -e.state.epoch
    )
    result = make_learner(plugin).fit(TRAIN, epochs=12)
    assert (result.epochs, plugin.handler.best_score, plugin.handler.counter) == (3, -1, 2)


# TerminateOnNan


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_terminate_on_nan_ends_at_the_step_at_which_it_does_under_the_engine(value):
    bad = [*TRAIN[:2], (TRAIN[2][0], TRAIN[2][1] * value), TRAIN[3]]
    real = Real(train=bad)
    real.trainer.add_event_handler(Events.ITERATION_COMPLETED, known.TerminateOnNan())
    real.run()
    learner = make_learner(IgniteHandler("TerminateOnNan"))
    result = learner.fit(bad, epochs=EPOCHS)
    assert result.steps == real.trainer.state.iteration == 3
    assert (result.message, result.by) == ("TerminateOnNan: the loss is not finite", "ignite_terminate_on_nan")


def test_terminate_on_nan_can_look_at_outputs_of_a_validation():
    seen = []
    plugin = IgniteHandler("TerminateOnNan", phase="val", output_transform=lambda output: seen.append(output) or output)
    learner = make_learner(plugin)
    learner.fit(TRAIN, VAL, epochs=1)
    assert [part.shape for part in seen[0]] == [(8, 1), (8, 1)]
    assert not seen[0][0].requires_grad


# Phases and metrics


def test_a_phase_that_is_misspelt_is_refused_before_the_first_step():
    learner = make_learner(IgniteHandler("EarlyStopping", phase="vall", patience=1, score_function=score))
    with pytest.raises(PluginError, match=r"no phase is called 'vall'.*did you mean 'val'"):
        learner.fit(TRAIN, VAL, epochs=1)
    assert learner.progress.steps == 0


def test_a_handler_whose_phase_was_not_run_warns():
    learner = make_learner(IgniteHandler("EarlyStopping", patience=1, score_function=score))
    with pytest.warns(UserWarning, match="is for the phase 'val', and no epoch of it was run"):
        learner.fit(TRAIN, epochs=1)


def test_a_metric_that_is_missing_is_named_with_those_that_are_there():
    plugin = IgniteHandler("EarlyStopping", patience=1, score_function=lambda engine: engine.state.metrics["los"])
    with pytest.raises(PluginError, match=r"EarlyStopping uses the metric 'los', .*'loss'.* there are: loss"):
        make_learner(plugin).fit(TRAIN, VAL, epochs=1)


@pytest.mark.parametrize("name", ["lrr", "betas"])
def test_a_hyperparameter_that_the_optimizer_does_not_have_is_refused(name):
    learner = make_learner(IgniteHandler("PiecewiseLinear", param_name=name, milestones_values=[(0, 0.1)]))
    with pytest.raises(PluginError, match=rf"the optimizer has no '{name}'.* there are: lr, momentum"):
        learner.fit(TRAIN, epochs=1)
    assert learner.progress.steps == 0


# ParamScheduler


LINEAR = {"param_name": "lr", "start_value": 0.2, "end_value": 0.01, "cycle_size": 5}
LINEAR_VALUES = [value for _, value in known.LinearCyclicalScheduler.simulate_values(STEPS, **LINEAR)]
COSINE = {"param_name": "momentum", "start_value": 0.9, "end_value": 0.1, "cycle_size": 4, "start_value_mult": 0.9}
PIECES = {"param_name": "lr", "milestones_values": [(1, 0.1), (4, 0.3), (9, 0.02)]}


@pytest.mark.parametrize(
    ("name", "options", "event"),
    [
        ("LinearCyclicalScheduler", LINEAR, Events.ITERATION_STARTED),
        ("CosineAnnealingScheduler", COSINE, Events.ITERATION_STARTED),
        ("PiecewiseLinear", PIECES, Events.ITERATION_STARTED),
        ("PiecewiseLinear", PIECES, Events.ITERATION_COMPLETED),
        ("LinearCyclicalScheduler", LINEAR, Events.ITERATION_STARTED(every=3)),
        ("LinearCyclicalScheduler", {**LINEAR, "cycle_size": 2}, Events.EPOCH_STARTED),
        ("LinearCyclicalScheduler", {**LINEAR, "cycle_size": 2}, Events.EPOCH_COMPLETED),
        ("PiecewiseLinear", PIECES, Events.STARTED | Events.ITERATION_STARTED(every=3)),
    ],
)
def test_a_scheduler_made_by_name_sets_what_it_sets_under_the_engine(name, options, event):
    real = Real()
    real.trainer.add_event_handler(event, getattr(known, name)(real.optimizer, **options))
    real.run()
    watch = Watch()
    learner = make_learner(IgniteHandler(name, event, **options), watch, make_optimizer=sgd)
    learner.fit(TRAIN, VAL, epochs=EPOCHS)
    assert watch.seen == real.seen
    assert len({str(values) for values in watch.seen}) > 1
    assert equal(learner.model, real.model)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("EarlyStopping", {"patiense": 3}, "has no option 'patiense' (did you mean 'patience'?); it takes patience, "),
        ("EarlyStopping", {"phases": "val"}, "has no option 'phases' (did you mean 'phase'?)"),
        ("EarlyStopping", {"patience": 3}, "missing a required argument: 'score_function'"),
        ("PiecewiseLinear", {"milestone_values": []}, "(did you mean 'milestones_values'?)"),
        ("LinearCyclicalScheduler", {**LINEAR, "cycle_sise": 3}, "(did you mean 'cycle_size'?)"),
    ],
)
def test_an_option_of_a_handler_made_by_name_is_checked(name, options, said):
    with pytest.raises(PluginError) as raised:
        IgniteHandler(name, **options)
    assert str(raised.value).startswith(f"IgniteHandler({name!r})")
    assert said in str(raised.value)


def of_torch(optimizer):
    return known.LRScheduler(ExponentialLR(optimizer, 0.7))


def with_warmup(optimizer):
    return known.create_lr_scheduler_with_warmup(ExponentialLR(optimizer, 0.7), 0.001, warmup_duration=3)


def concatenated(optimizer):
    parts = [
        known.LinearCyclicalScheduler(optimizer, **LINEAR),
        known.CosineAnnealingScheduler(optimizer, **{**COSINE, "param_name": "lr"}),
    ]
    return known.ConcatScheduler(parts, durations=[4])


def grouped(optimizer):
    first = known.LinearCyclicalScheduler(optimizer, **LINEAR, param_group_index=0)
    return known.ParamGroupScheduler([first, known.CosineAnnealingScheduler(optimizer, **COSINE, param_group_index=0)])


MADE = [of_torch, with_warmup, concatenated, grouped]


@pytest.mark.parametrize("make", MADE)
def test_a_scheduler_that_is_made_already_sets_what_it_sets_under_the_engine(make):
    real = Real()
    real.trainer.add_event_handler(Events.ITERATION_STARTED, make(real.optimizer))
    real.run()
    model = make_model()
    optimizer = sgd(model.parameters())
    watch = Watch()
    plugin = IgniteHandler(make(optimizer))
    learner = make_learner(plugin, watch, model=model, make_optimizer=lambda _: optimizer)
    learner.fit(TRAIN, VAL, epochs=EPOCHS)
    assert watch.seen == real.seen
    assert len({str(values) for values in watch.seen}) > 1
    assert equal(learner.model, real.model)


@pytest.mark.parametrize("make", MADE)
def test_a_scheduler_goes_on_after_a_resume(make):
    def run(epochs, state=None):
        model = make_model()
        optimizer = sgd(model.parameters())
        watch = Watch()
        learner = make_learner(IgniteHandler(make(optimizer)), watch, model=model, make_optimizer=lambda _: optimizer)
        if state is not None:
            learner.load_state_dict(state)
        learner.fit(TRAIN, max_steps=epochs * STEPS)
        return learner, watch.seen

    whole, seen = run(3)
    first, before = run(1)
    second, after = run(2, first.state_dict())
    assert before + after == seen
    assert equal(second.model, whole.model)


def test_history_of_a_scheduler_is_kept_on_the_engine():
    plugin = IgniteHandler("LinearCyclicalScheduler", **LINEAR, save_history=True)
    make_learner(plugin).fit(TRAIN, epochs=1)
    assert plugin._engine.state.param_history["lr"] == [[value] for value in LINEAR_VALUES]


def test_two_owners_of_the_learning_rate_are_refused():
    first = IgniteHandler("LinearCyclicalScheduler", **LINEAR)
    with pytest.raises(PluginError, match="both own"):
        make_learner(first, IgniteHandler("PiecewiseLinear", **PIECES))
    with pytest.raises(PluginError, match="both own"):
        make_learner(IgniteHandler("PiecewiseLinear", **PIECES), Schedule(cosine()))
    other = IgniteHandler("CosineAnnealingScheduler", **COSINE)
    assert len(make_learner(first, other).plugins) == 3  # the momentum is another's


def test_each_optimizer_can_have_a_scheduler():
    models = {"one": make_model(), "two": make_model()}
    stack = [
        IgniteHandler("PiecewiseLinear", optimizer=name, name=name, param_name="lr", milestones_values=[(0, value)])
        for name, value in (("one", 0.5), ("two", 0.25))
    ]
    learner = Learner(models, None, dict.fromkeys(models, sgd), plugins=stack, standard=False)
    with learner.rounds():
        pass
    stack[0].step_begin(learner, learner.phases["train"], SimpleNamespace(epoch=None))
    assert [optimizer.param_groups[0]["lr"] for optimizer in learner.optimizers.values()] == [0.5, 0.1]


def test_a_scheduler_of_another_optimizer_is_refused():
    other = sgd(make_model().parameters())
    learner = make_learner(IgniteHandler(known.PiecewiseLinear(other, **PIECES)))
    with pytest.raises(PluginError, match="not for an optimizer of the learner"):
        learner.fit(TRAIN, epochs=1)


def test_a_callback_that_logs_the_rate_sees_what_the_scheduler_has_set():
    record = Record()
    monitor = LightningCallback("LearningRateMonitor", logging_interval="step", log_every_n_steps=1)
    learner = make_learner(monitor, IgniteHandler("LinearCyclicalScheduler", **LINEAR), record)
    learner.fit(TRAIN, epochs=1)
    assert [value for _, value, _ in record.lines] == LINEAR_VALUES


# ProgressBar


@pytest.mark.parametrize(
    ("bar", "attach", "event"),
    [
        ({}, {"output_transform": lambda output: {"loss": output}}, Events.ITERATION_COMPLETED),
        ({"desc": "training"}, {}, Events.ITERATION_COMPLETED(every=2)),
        ({"persist": True}, {"closing_event_name": Events.COMPLETED}, Events.EPOCH_COMPLETED),
    ],
)
def test_the_bar_is_drawn_as_under_the_engine(bar, attach, event):
    def options(file):
        form = "{desc}[{n_fmt}/{total_fmt}] {percentage:3.0f}%|{bar}{postfix}"  # without times
        return {"bar_format": form, "file": file, "ncols": 70, "mininterval": 0, "ascii": True, **bar}

    theirs, ours = io.StringIO(), io.StringIO()
    real = Real()
    known.ProgressBar(**options(theirs)).attach(real.trainer, event_name=event, **attach)
    real.run()
    make_learner(IgniteHandler("ProgressBar", event, attach=attach, **options(ours))).fit(TRAIN, VAL, epochs=EPOCHS)
    assert ours.getvalue() == theirs.getvalue()
    assert ("[3/3]" in ours.getvalue()) is ("desc" not in bar or True)


def test_the_bar_of_a_validation_shows_its_metrics():
    file = io.StringIO()
    plugin = IgniteHandler(
        "ProgressBar",
        Events.EPOCH_COMPLETED,
        phase="val",
        attach={"metric_names": "all", "closing_event_name": Events.COMPLETED},
        file=file,
    )
    result = make_learner(plugin).fit(TRAIN, VAL, epochs=1)
    assert f"loss={result.metrics['val/loss']:.3g}" in file.getvalue()


def test_a_bar_that_is_made_already_is_closed_after_an_error():
    bar = known.ProgressBar(file=io.StringIO())
    learner = make_learner(IgniteHandler(bar))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        learner.fit([*TRAIN[:2], (torch.zeros(5, 2), torch.zeros(5, 1))], epochs=1)
    assert bar.pbar is None


def test_the_bar_takes_the_place_of_the_standard_display():
    learner = Learner(
        make_model(), nn.functional.mse_loss, sgd, plugins=[IgniteHandler("ProgressBar", file=io.StringIO())]
    )
    assert "progress" not in learner.plugins


# What is missing and what is refused


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda engine: engine.state.batch, "engine.state.batch"),
        (lambda engine: engine.state.dataloader, "engine.state.dataloader"),
        (lambda engine: engine.state.anything, "engine.state.anything"),
        (lambda engine: engine.run([1]), "engine.run"),
        (lambda engine: engine.terminate_epoch(), "engine.terminate_epoch"),
        (lambda engine: engine.state_dict(), "engine.state_dict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_attribute_is_an_error_that_names_it(use, named):
    learner = make_learner(IgniteHandler("EarlyStopping", patience=1, score_function=use))
    with pytest.raises(PluginError, match="EarlyStopping uses ") as raised:
        learner.fit(TRAIN, VAL, epochs=1)
    assert named in str(raised.value)


def test_every_handler_of_ignite_is_supported_or_refused_with_a_reason():
    from loopkit_callbacks import handler

    bases = {"ParamScheduler", "BaseParamScheduler", "CyclicalScheduler"}  # abstract
    states = {name for name in known.__all__ if name.endswith("StateScheduler")}  # by their base
    functions = {"global_step_from_engine", "create_lr_scheduler_with_warmup"}
    assert set(known.__all__) - bases - states - functions <= {*handler.SUPPORTED, *handler.REFUSED}


def plateau():
    return known.ReduceLROnPlateauScheduler(sgd(make_model().parameters()), "loss")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IgniteHandler("ModelCheckpoint"), "it writes pickles"),
        (lambda: IgniteHandler(known.EMAHandler(make_model())), "EMAHandler cannot run here"),
        (lambda: IgniteHandler(known.StepStateScheduler("x", 1.0, 0.9, 1)), "StateParamScheduler cannot run here"),
        (lambda: IgniteHandler(plateau()), r"use loopkit\.plugins\.Plateau"),
        (lambda: IgniteHandler("EarlyStoping"), "did you mean 'EarlyStopping'"),
        (lambda: IgniteHandler("ConcatScheduler"), "cannot be made by name: give an instance"),
        (lambda: IgniteHandler(lambda engine: None), r"call_on makes a plugin of a function"),
        (lambda: IgniteHandler(known.TerminateOnNan), "TerminateOnNan is a class"),
        (lambda: IgniteHandler(known.TerminateOnNan(), patience=3), "'patience' is an option for a handler"),
        (lambda: IgniteHandler("TerminateOnNan", attach={"metric_names": "all"}), "attach= is only for ProgressBar"),
        (lambda: IgniteHandler("TerminateOnNan", "iteration_ended"), "there is no event 'iteration_ended'"),
        (lambda: IgniteHandler("TerminateOnNan", Events.GET_BATCH_STARTED), "GET_BATCH_STARTED never comes here"),
        (lambda: IgniteHandler("TerminateOnNan", 3), "event is 3"),
        (lambda: IgniteHandler("TerminateOnNan", phase=3), "phase is 3"),
        (lambda: IgniteHandler("ProgressBar", attach=["all"]), r"attach is \['all'\]"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(PluginError, match=message):
        make()


def test_an_adapted_early_stopping_takes_the_place_of_what_provides_the_same():
    learner = make_learner(EarlyStopping("val/loss"))
    learner.replace("early_stopping", IgniteHandler("EarlyStopping", patience=1, score_function=score))
    assert "early_stopping" not in learner.plugins


def test_only_the_hooks_that_a_handler_has_are_called():
    plugin = IgniteHandler("LinearCyclicalScheduler", "epoch_started", **LINEAR)
    assert implemented(plugin) == ["epoch_begin", "fit_begin", "fit_end"]
