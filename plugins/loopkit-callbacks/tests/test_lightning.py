"""Callbacks of Lightning: here, and under the real Trainer on the same problem."""

import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from problems import STEPS, TRAIN, VAL, Record, equal, make_learner
from torch.optim.lr_scheduler import LambdaLR
from trainers import fit, sgd

from lightning.pytorch import callbacks as known  # isort: skip  # after trainers, which silences its import

from loopkit import data, every, hookimpl
from loopkit.errors import PluginError
from loopkit.hooks import implemented
from loopkit.plugins import EarlyStopping, TorchSchedule
from loopkit_callbacks import LightningCallback

# EarlyStopping


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 2},
        {"patience": 1, "min_delta": 0.0015},
        {"patience": 3, "mode": "max"},
        {"stopping_threshold": 0.3585},
        {"divergence_threshold": 0.365},
        {"monitor": "train/loss", "min_delta": 0.004, "patience": 2},
        {"patience": 1, "check_on_train_epoch_end": False},
        {"patience": 9},
    ],
    ids=str,
)
def test_early_stopping_stops_when_it_does_under_the_trainer(options):
    options = {"monitor": "val/loss", **options}
    theirs, ours = known.EarlyStopping(**options), known.EarlyStopping(**options)
    real = fit(theirs, max_epochs=12)
    learner = make_learner(LightningCallback(ours))
    result = learner.fit(TRAIN, VAL, epochs=12)
    stopped = theirs.stopping_reason.value != 0
    assert result.reason == ("stop" if stopped else "epochs")
    assert learner.progress.updates == real.trainer.global_step
    assert equal(learner.model, real.model)
    names = ("stopped_epoch", "wait_count", "stopping_reason")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    if options["monitor"] == "val/loss":
        assert torch.equal(ours.best_score, theirs.best_score)
        assert ours.stopping_reason_message == theirs.stopping_reason_message
        assert result.message == (ours.stopping_reason_message or "")
    assert result.by == ("lightning_early_stopping" if stopped else "")


def test_early_stopping_with_validation_every_second_epoch():
    theirs, ours = (known.EarlyStopping("val/loss", patience=1, min_delta=0.01) for _ in range(2))
    real = fit(theirs, max_epochs=12, check_val_every_n_epoch=2)
    learner = make_learner(LightningCallback(ours))
    learner.fit(TRAIN, VAL, epochs=12, validate=every(epochs=2))
    assert 2 < real.trainer.current_epoch < 12
    assert learner.progress.epochs == real.trainer.current_epoch
    assert ours.stopped_epoch == theirs.stopped_epoch
    assert equal(learner.model, real.model)


def test_early_stopping_on_a_metric_that_is_not_finite():
    ours = known.EarlyStopping("val/loss")
    bad = [(VAL[0][0], VAL[0][1] * float("nan"))]
    result = make_learner(LightningCallback(ours)).fit(TRAIN, bad, epochs=3)
    assert (result.epochs, result.message) == (1, ours.stopping_reason_message)
    assert "not finite" in result.message


def test_a_metric_can_have_the_name_that_the_callback_knows():
    ours = known.EarlyStopping("val_loss", mode="max", patience=2)
    result = make_learner(LightningCallback(ours, metrics={"val_loss": "val/loss"})).fit(TRAIN, VAL, epochs=12)
    assert result.message == ours.stopping_reason_message
    assert "val_loss" in result.message


def test_a_monitor_that_is_no_metric_of_a_phase_is_refused():
    with pytest.raises(PluginError, match=r"monitors 'val_loss'.*metrics=\{'val_loss': 'val/loss'\}"):
        LightningCallback(known.EarlyStopping("val_loss"))


def test_a_metric_that_nothing_makes_is_refused_before_the_first_step():
    learner = make_learner(LightningCallback(known.EarlyStopping("val/accuracy")))
    with pytest.raises(PluginError, match=r"'metrics\.val/accuracy', which no plugin makes"):
        learner.fit(TRAIN, VAL, epochs=1)
    assert learner.progress.steps == 0


def test_early_stopping_that_has_nothing_to_look_at_is_refused():
    learner = make_learner(LightningCallback(known.EarlyStopping("val/loss")))
    with pytest.raises(PluginError, match="reads the metric 'val/loss', but this fit does not run phase 'val'"):
        learner.fit(TRAIN, epochs=1)


def test_an_evaluation_outside_of_a_fit_is_not_looked_at():
    ours = known.EarlyStopping("val/loss")
    learner = make_learner(LightningCallback(ours))
    learner.fit(TRAIN, VAL, epochs=1)
    best = ours.best_score.clone()
    learner.evaluate([(x, 0 * y) for x, y in VAL])
    assert torch.equal(ours.best_score, best)


# LearningRateMonitor


def factor(step):
    return 1 / (1 + step)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_the_learning_rates_are_logged_as_under_the_trainer(interval, every):
    def with_schedule(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, factor), "interval": interval}]

    options = {"logging_interval": interval, "log_momentum": True, "log_weight_decay": True}
    theirs, ours = (known.LearningRateMonitor(**options) for _ in range(2))
    real = fit(theirs, make_optimizers=with_schedule, max_epochs=3, log_every_n_steps=every)
    schedule = TorchSchedule(
        lambda optimizer: LambdaLR(optimizer, factor), every="update" if interval == "step" else "epoch"
    )
    record = Record()
    learner = make_learner(
        LightningCallback(ours, log_every_n_steps=every),
        schedule,
        record,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    )
    learner.fit(TRAIN, VAL, epochs=3)
    assert [(name, value) for name, value, _ in record.lines] == [(name, value) for name, value, _ in real.lines]
    assert len(record.lines) == 3 * (3 if interval == "epoch" else 3 * STEPS // every)
    assert ours.lrs == theirs.lrs
    assert equal(learner.model, real.model)


def test_several_groups_have_the_names_that_lightning_gives():
    def groups(parameters):
        first, *rest = parameters
        return torch.optim.Adam([{"params": [first]}, {"params": rest, "lr": 0.01, "name": "rest"}], lr=0.1)

    theirs, ours = (known.LearningRateMonitor(log_momentum=True) for _ in range(2))
    real = fit(theirs, make_optimizers=groups, max_epochs=1, log_every_n_steps=2)
    record = Record()
    make_learner(LightningCallback(ours, log_every_n_steps=2), record, make_optimizer=groups).fit(TRAIN, VAL, epochs=1)
    assert [line[:2] for line in record.lines] == [line[:2] for line in real.lines]
    assert {name for name, *_ in record.lines} >= {"lr-Adam/pg1", "lr-Adam/rest"}


# Timer


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by a second whenever the timer looks at it."""
    from lightning.pytorch.callbacks import timer

    seconds = iter(range(10**6))
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.usefixtures("clock")
def test_the_timer_stops_at_the_step_at_which_it_does_under_the_trainer(interval):
    options = {"duration": timedelta(seconds=9), "interval": interval}
    theirs, ours = known.Timer(**options), known.Timer(**options)
    real = fit(theirs, val=None, max_epochs=20)
    learner = make_learner(LightningCallback(ours))
    result = learner.fit(TRAIN, epochs=20)
    assert (result.reason, result.by) == ("stop", "lightning_timer")
    assert 0 < learner.progress.updates == real.trainer.global_step < 20 * STEPS
    assert equal(learner.model, real.model)


def test_the_time_of_a_timer_goes_on_after_a_resume(clock):
    first = known.Timer(duration=timedelta(seconds=1000))
    learner = make_learner(LightningCallback(first))
    learner.fit(TRAIN, epochs=1)
    state = learner.state_dict()
    ours = known.Timer(duration=timedelta(seconds=1000))
    resumed = make_learner(LightningCallback(ours))
    resumed.load_state_dict(state)
    assert ours.time_elapsed() == state["plugins"]["lightning_timer"]["callback"]["time_elapsed"]["train"] > STEPS


def test_a_timer_that_is_over_ends_the_fit_before_its_first_step():
    result = make_learner(LightningCallback("Timer", duration={"seconds": 0})).fit(TRAIN, epochs=1)
    assert (result.reason, result.steps) == ("stop", 0)


# DeviceStatsMonitor


@pytest.mark.parametrize("every", [1, 3])
def test_device_statistics_have_the_names_and_steps_that_they_have_under_the_trainer(every):
    real = fit(known.DeviceStatsMonitor(), max_epochs=2, log_every_n_steps=every)
    record = Record()
    plugin = LightningCallback(known.DeviceStatsMonitor(), log_every_n_steps=every)
    make_learner(plugin, record).fit(TRAIN, VAL, epochs=2)
    assert [name for name, *_ in record.lines] == [name for name, *_ in real.lines]
    assert "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in [name for name, *_ in record.lines]
    assert all(0 <= value <= 100 for _, value, _ in record.lines)


# LambdaCallback


PARTS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
ALL = (
    *("setup", "on_fit_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *(f"on_{stage}_{part}" for stage in ("train", "validation") for part in PARTS),
    *("on_fit_end", "teardown"),
)


def recorder(lines):
    """A callback whose every hook writes down where it comes, and the loss that it sees."""

    def hook(name):
        def called(trainer, pl_module, *values, **named):
            outputs = values[0] if values and name == "on_train_batch_end" else {}
            loss = values[0] if name == "on_before_backward" else outputs.get("loss")
            index = values[-1] if "batch" in name and name != "on_validation_batch_end" else None
            assert trainer.current_epoch == pl_module.current_epoch
            lines.append(
                (name, trainer.current_epoch, trainer.global_step, index, None if loss is None else loss.item())
            )

        return called

    return known.LambdaCallback(**{name: hook(name) for name in ALL})


def test_every_hook_comes_when_it_does_under_the_trainer():
    theirs, ours = [], []
    real = fit(recorder(theirs), max_epochs=2)
    learner = make_learner(LightningCallback(recorder(ours)))
    learner.fit(TRAIN, VAL, epochs=2)
    assert ours == theirs
    assert {name for name, *_ in ours} == set(ALL)
    assert equal(learner.model, real.model)


def test_every_hook_comes_with_accumulation_and_without_validation():
    theirs, ours = [], []
    fit(recorder(theirs), val=None, max_epochs=2, accumulate_grad_batches=2)
    make_learner(LightningCallback(recorder(ours)), accumulate=2).fit(TRAIN, epochs=2)
    assert [line[:4] for line in ours] == [line[:4] for line in theirs]  # Lightning divides the losses by 2


def test_a_change_that_is_declared_is_made_as_under_the_trainer():
    def clamp(trainer, pl_module, optimizer):
        for p in pl_module.parameters():
            p.grad.clamp_(-0.01, 0.01)

    real = fit(known.LambdaCallback(on_before_optimizer_step=clamp), max_epochs=2)
    plugin = LightningCallback(known.LambdaCallback(on_before_optimizer_step=clamp), updates=("grads",), reads=())
    learner = make_learner(plugin)
    learner.fit(TRAIN, VAL, epochs=2)
    assert equal(learner.model, real.model)
    assert "updates grads" in str(learner.explain("train"))


def test_what_a_module_logs_goes_to_the_learner():
    def log(trainer, pl_module, *_):
        pl_module.log("epoch", trainer.current_epoch, prog_bar=True)
        pl_module.log_dict({"twice": 2 * trainer.current_epoch, "loss": trainer.callback_metrics["train/loss"]})
        pl_module.log("hidden", 1.0, logger=False)

    record = Record()
    learner = make_learner(LightningCallback(known.LambdaCallback(on_train_epoch_end=log)), record)
    result = learner.fit(TRAIN, epochs=2)
    assert [name for name, *_ in record.lines] == ["epoch", "twice", "loss"] * 2
    assert [float(value) for _, value, _ in record.lines[3:5]] == [1.0, 2.0]
    assert float(record.lines[5][1]) == torch.tensor(result.metrics["train/loss"]).item()


def test_a_metric_that_is_missing_is_named_with_those_that_are_there():
    callback = known.LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.callback_metrics["train/los"])
    with pytest.raises(PluginError, match=r"LambdaCallback uses the metric 'train/los', .* there are: train/loss"):
        make_learner(LightningCallback(callback)).fit(TRAIN, epochs=1)


def test_stopping_from_a_callback():
    def stop(trainer, pl_module, outputs, batch, index):
        trainer.should_stop = trainer.should_stop or trainer.global_step == 6

    result = make_learner(LightningCallback(known.LambdaCallback(on_train_batch_end=stop))).fit(TRAIN, epochs=5)
    real = fit(known.LambdaCallback(on_train_batch_end=stop), val=None, max_epochs=5)
    assert result.steps == real.trainer.global_step == 6
    assert (result.message, result.by) == ("LambdaCallback set trainer.should_stop", "lightning_lambda_callback")


def test_an_error_reaches_on_exception_and_not_the_end():
    seen = []
    callback = known.LambdaCallback(
        on_exception=lambda trainer, module, error: seen.append(error), on_train_end=lambda *_: seen.append("end")
    )
    learner = make_learner(LightningCallback(callback))
    bad = [*TRAIN[:2], (torch.zeros(5, 2), torch.zeros(5, 1))]
    with pytest.raises(RuntimeError) as raised:
        learner.fit(bad, epochs=1)
    assert seen == [raised.value]


@pytest.fixture
def interruptible():
    """A shell's background jobs ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
@pytest.mark.usefixtures("interruptible")
def test_a_signal_reaches_on_exception(number, raised):
    seen = []
    callback = known.LambdaCallback(
        on_train_batch_end=lambda *_: os.kill(os.getpid(), number),
        on_exception=lambda trainer, module, error: seen.append(type(error)),
        on_train_end=lambda *_: seen.append("end"),
    )
    result = make_learner(LightningCallback(callback)).fit(TRAIN, epochs=1, on_interrupt="return")
    assert (result.reason, result.steps, seen) == ("signal", 1, [raised])


def test_a_fit_after_one_that_failed_counts_epochs_from_its_own():
    epochs = []
    callback = known.LambdaCallback(on_train_epoch_start=lambda trainer, _: epochs.append(trainer.current_epoch))
    callback.on_train_epoch_end = lambda *_: None
    learner = make_learner(LightningCallback(callback))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        learner.fit(TRAIN, [(torch.zeros(5, 2), torch.zeros(5, 1))], epochs=1)
    learner.fit(TRAIN, VAL, epochs=2)
    assert epochs == [0, 1, 2]


def test_the_end_of_an_epoch_is_told_once_if_the_run_is_killed_before_its_validation():
    def make(lines):
        callback = known.LambdaCallback(
            on_train_epoch_end=lambda trainer, _: lines.append(("train", trainer.current_epoch)),
            on_validation_end=lambda trainer, _: lines.append(("validation", trainer.current_epoch)),
        )
        return make_learner(LightningCallback(callback))

    def loaders():
        x, y = (torch.cat(parts) for parts in zip(*TRAIN, strict=True))
        return data.TensorLoader(x, y, batch_size=5), data.TensorLoader(*VAL[0], batch_size=5)

    whole, before, after = [], [], []
    make(whole).fit(*loaders(), epochs=3)
    learner, saved = make(before), []

    class Save:
        @hookimpl(reads=("*",))
        def phase_end(self, learner, phase):
            if phase.training and learner.progress.epochs == 2:
                saved.append(learner.state_dict())
                raise KeyboardInterrupt

    learner.add(Save())
    with pytest.raises(KeyboardInterrupt):
        learner.fit(*loaders(), epochs=3)
    resumed = make(after)
    resumed.load_state_dict(saved[0], allow=("save",))
    resumed.fit(*loaders(), epochs=3)
    assert before + after == whole
    assert whole == [(what, epoch) for epoch in range(3) for what in ("validation", "train")]


# What is missing and what is refused


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda trainer, module: trainer.datamodule, "trainer.datamodule"),
        (lambda trainer, module: trainer.save_checkpoint("x"), "trainer.save_checkpoint"),
        (lambda trainer, module: trainer.strategy.barrier(), "trainer.strategy.barrier"),
        (lambda trainer, module: trainer.logger.experiment, "trainer.logger.experiment"),
        (lambda trainer, module: module.hparams, "pl_module.hparams"),
        (lambda trainer, module: setattr(trainer, "limit_val_batches", 1), "trainer.limit_val_batches = ..."),
        (lambda trainer, module: module.log("x", 1.0, on_epoch=True), "on_epoch=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_attribute_is_an_error_that_names_it(use, named):
    learner = make_learner(LightningCallback(known.LambdaCallback(on_train_epoch_start=use)))
    with pytest.raises(PluginError) as raised:
        learner.fit(TRAIN, epochs=1)
    assert str(raised.value).startswith("LambdaCallback uses ")
    assert named in str(raised.value)


REFUSED = {
    "ModelCheckpoint": lambda: known.ModelCheckpoint(),
    "GradientAccumulationScheduler": lambda: known.GradientAccumulationScheduler({0: 2}),
    "StochasticWeightAveraging": lambda: known.StochasticWeightAveraging(swa_lrs=0.1),
    "BackboneFinetuning": lambda: known.BackboneFinetuning(),
    "LearningRateFinder": lambda: known.LearningRateFinder(),
    "BatchSizeFinder": lambda: known.BatchSizeFinder(),
    "TQDMProgressBar": lambda: known.TQDMProgressBar(),
    "ModelSummary": lambda: known.ModelSummary(),
}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"monitor": "val/loss", "patiance": 3},
            "has no option 'patiance' (did you mean 'patience'?); it takes monitor, ",
        ),
        ({"monitor": "val/loss", "metric": {}}, "has no option 'metric' (did you mean 'metrics'?)"),
        ({"patience": 3}, "missing a required argument: 'monitor'; it takes monitor, "),
    ],
)
def test_an_option_of_a_callback_made_by_name_is_checked(options, said):
    with pytest.raises(PluginError) as raised:
        LightningCallback("EarlyStopping", **options)
    assert str(raised.value).startswith("LightningCallback('EarlyStopping')")
    assert said in str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_writes_pickles_or_owns_the_loop_is_refused_with_the_reason(name):
    from loopkit_callbacks.callback import REFUSED as REASONS

    with pytest.raises(PluginError) as raised:
        LightningCallback(REFUSED[name]())
    assert str(raised.value) == f"LightningCallback: {name} cannot run here: {REASONS[name]}"


def test_every_callback_of_lightning_is_supported_or_refused_with_a_reason():
    from loopkit_callbacks import callback

    assert set(known.__all__) == {*callback.SUPPORTED, *callback.REFUSED, "Callback"}


class Own(known.Callback):
    """One that a user wrote."""

    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def test_a_callback_of_your_own_runs_and_its_state_is_saved():
    ours = Own()
    learner = make_learner(LightningCallback(ours))
    learner.fit(TRAIN, epochs=2)
    fresh = Own()
    make_learner(LightningCallback(fresh)).load_state_dict(learner.state_dict())
    assert fresh.epochs == ours.epochs == 2


def test_a_state_that_cannot_be_saved_is_refused():
    ours = Own()
    learner = make_learner(LightningCallback(ours))
    ours.epochs = {1, 2}
    with pytest.raises(PluginError, match=r"state of Own holds \{1, 2\}, state\['epochs'\]"):
        learner.state_dict()


class Changed(known.EarlyStopping):
    def on_train_end(self, trainer, pl_module):
        pass


class Saves(known.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LightningCallback(Changed("val/loss")), "Changed changes EarlyStopping"),
        (lambda: LightningCallback(Saves()), "Saves has on_save_checkpoint, which never comes here"),
        (lambda: LightningCallback(known.EarlyStopping), "EarlyStopping is a class; give an instance"),
        (lambda: LightningCallback(object()), "is no callback of Lightning"),
        (lambda: LightningCallback("EarlyStoping", monitor="val/loss"), "did you mean 'EarlyStopping'"),
        (lambda: LightningCallback("ModelCheckpoint"), "it writes pickles"),
        (
            lambda: LightningCallback(known.Timer(), duration=1),
            "'duration' is an option for a callback that is given by",
        ),
        (lambda: LightningCallback(known.Timer(), reads=("loss",)), "are known: leave out reads"),
        (lambda: LightningCallback("LearningRateMonitor", log_every_n_steps=-1), "log_every_n_steps is -1"),
        (lambda: LightningCallback("LearningRateMonitor", log_every_n_steps=2.5), "log_every_n_steps is 2.5"),
        (lambda: LightningCallback("EarlyStopping", monitor=None), "EarlyStopping monitors None"),
        (lambda: LightningCallback(known.EarlyStopping("x"), metrics="val/loss"), "metrics is 'val/loss'"),
        (
            lambda: LightningCallback(known.EarlyStopping("val_loss"), metrics={"val_los": "val/loss"}),
            "a name for 'val_los', which EarlyStopping does not look at",
        ),
        (lambda: LightningCallback("Timer", metrics={"a": "val/a"}), "a name for 'a', which Timer does not look at"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(PluginError, match=message):
        make()


def test_the_other_package_of_lightning_works_too():
    other = pytest.importorskip("pytorch_lightning.callbacks")
    ours, theirs = (
        other.EarlyStopping("val/loss", mode="max", patience=2),
        known.EarlyStopping("val/loss", 0.0, 2, mode="max"),
    )
    one, two = make_learner(LightningCallback(ours)), make_learner(LightningCallback(theirs))
    assert one.fit(TRAIN, VAL, epochs=9).epochs == two.fit(TRAIN, VAL, epochs=9).epochs < 9
    assert ours.stopped_epoch == theirs.stopped_epoch


def test_an_adapted_early_stopping_takes_the_place_of_what_provides_the_same():
    learner = make_learner(EarlyStopping("val/loss"))
    learner.replace("early_stopping", LightningCallback(known.EarlyStopping("val/loss")))
    assert "lightning_early_stopping" in learner.plugins
    assert "early_stopping" not in learner.plugins


def test_only_the_hooks_that_a_callback_has_are_called():
    plugin = LightningCallback(known.EarlyStopping("val/loss"))
    assert implemented(plugin) == ["cycle_end", "fit_begin", "fit_end", "phase_end"]


def test_a_step_of_the_trainer_is_the_one_of_sgd():
    """The two problems are the same: without any callback that acts, the parameters are."""
    real = fit(known.LambdaCallback(), make_optimizers=sgd, max_epochs=2)
    learner = make_learner()
    learner.fit(TRAIN, VAL, epochs=2)
    assert equal(learner.model, real.model)
