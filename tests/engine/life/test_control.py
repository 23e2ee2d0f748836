"""What holds however a run ends: fit_end, notes, results, contexts, modes, nested passes, limits, live plugins."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import astuple
from typing import NamedTuple

import pytest
import torch
from helpers import EventLog, batches, make_learner, on, raising
from torch import nn

from loopkit import (
    CancelEpoch,
    CancelFit,
    CancelStep,
    Learner,
    PredictionPhase,
    TrainingPhase,
    ValidationPhase,
    every,
    hookimpl,
)
from loopkit.base.world import World
from loopkit.engine.life.requests import Requests
from loopkit.errors import EmptyDataError, ExhaustedIteratorError, PhaseError, PluginError, ReentrancyError


class Paired:
    """Logs its fit_begin and fit_end; each can raise."""

    def __init__(self, name, log, begin=None, end=None):
        self.name, self.log, self.begin, self.end = name, log, begin, end

    @hookimpl
    def fit_begin(self):
        self.log.append(f"begin {self.name}")
        if self.begin:
            raise self.begin

    @hookimpl
    def fit_end(self):
        self.log.append(f"end {self.name}")
        if self.end:
            raise self.end


def ending(name, log, **options):
    """A plugin with a fit_end alone."""
    return on("fit_end", lambda **_: log.append(f"end {name}"), name, **options)


def boom():
    return raising("loss_begin", RuntimeError("first"), name="boom")


# fit_begin and fit_end


def test_fit_end_runs_in_reverse_of_fit_begin():
    log = []
    make_learner(*(Paired(name, log) for name in "bca"), order=["c", "a", "b"]).fit(batches(1), epochs=1)
    assert log == ["begin c", "begin a", "begin b", "end b", "end a", "end c"]


@pytest.mark.parametrize("k", [0, 1, 2])
def test_fit_end_runs_for_those_whose_fit_begin_was_entered(k):
    log = []
    error = RuntimeError("broken")
    plugins = [Paired(name, log, begin=error if i == k else None) for i, name in enumerate("abc")]
    with pytest.raises(RuntimeError) as caught:
        make_learner(*plugins).fit(batches(1), epochs=1)
    assert caught.value is error
    assert error.__notes__ == [f"loopkit: in fit_begin of plugin {'abc'[k]!r}"]
    assert log == [f"begin {n}" for n in "abc"[: k + 1]] + [f"end {n}" for n in reversed("abc"[: k + 1])]


def test_fit_end_without_fit_begin_runs_when_a_fit_begin_raised():
    log = []
    with pytest.raises(RuntimeError):
        make_learner(Paired("a", log, begin=RuntimeError()), ending("b", log)).fit(batches(1), epochs=1)
    assert log == ["begin a", "end b", "end a"]


def test_fit_end_error_of_a_plugin_whose_fit_begin_failed_is_noted_there():
    error = RuntimeError("broken")
    with pytest.raises(RuntimeError) as caught:
        make_learner(Paired("a", [], begin=error, end=KeyError("half"))).fit(batches(1), epochs=1)
    assert caught.value is error
    assert error.__notes__[1:] == ["loopkit: fit_end failed too: KeyError('half')"]


def test_fit_end_runs_for_a_plugin_whose_fit_begin_cancelled_the_fit():
    log = []
    result = make_learner(Paired("a", log, begin=CancelFit("no")), Paired("b", log)).fit(batches(1), epochs=1)
    assert log == ["begin a", "begin b", "end b", "end a"]
    assert (result.reason, result.by) == ("cancel", "a")


@pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt, SystemExit, CancelFit, CancelEpoch, CancelStep])
def test_fit_end_runs_once_whatever_was_raised(how):
    log = []
    learner = make_learner(Paired("a", log), ending("b", log), raising("loss_begin", how()))
    try:
        learner.fit(batches(2), epochs=2)
    except (RuntimeError, KeyboardInterrupt, SystemExit) as error:
        assert type(error) is how  # noqa: PT017 - some of them end the fit without an error
    assert log == ["begin a", "end b", "end a"]
    assert learner.current is None


def test_fit_end_error_alone_passes_through_and_the_others_still_run():
    log = []
    error = RuntimeError("late")
    with pytest.raises(RuntimeError) as caught:
        make_learner(*(Paired(n, log, end=error if n == "b" else None) for n in "abc")).fit(batches(1), epochs=1)
    assert caught.value is error
    assert error.__notes__ == ["loopkit: in fit_end of plugin 'b'"]
    assert log[3:] == ["end c", "end b", "end a"]


def test_fit_end_errors_of_several_plugins_come_as_a_group():
    errors = {"a": RuntimeError("a"), "b": KeyError("b")}
    with pytest.raises(ExceptionGroup) as caught:
        make_learner(*(Paired(n, [], end=errors[n]) for n in "ab")).fit(batches(1), epochs=1)
    assert caught.value.exceptions == (errors["b"], errors["a"])


def test_fit_end_error_after_an_error_keeps_the_first_cause():
    late = ValueError("late")
    with pytest.raises(ExceptionGroup) as caught:
        make_learner(boom(), Paired("a", [], end=late)).fit(batches(1), epochs=1)
    first, second = caught.value.exceptions
    assert (type(first), first.args) == (RuntimeError, ("first",))
    assert second is late


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])
def test_fit_end_error_after_an_interrupt_leaves_the_interrupt(how):
    interrupt = how()
    with pytest.raises(how) as caught:
        make_learner(raising("loss_begin", interrupt), Paired("a", [], end=ValueError("late"))).fit(
            batches(1), epochs=1
        )
    assert caught.value is interrupt
    assert any("ValueError('late')" in note for note in interrupt.__notes__)


def test_fit_end_sees_the_final_result():
    seen = []
    learner = make_learner(boom(), on("fit_end", lambda result, **_: seen.append((result.reason, result.steps))))
    with pytest.raises(RuntimeError):
        learner.fit(batches(1), epochs=1)
    assert seen == [("error", 0)]


@pytest.mark.parametrize("hook", ["fit_begin", "phase_end", "cycle_end", "fit_end"])
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_evaluate_in_a_hook_outside_the_passes_works_after_the_end_was_asked_for(hook, how):
    done = []
    log = EventLog()

    def end(learner, phase=None, **_):
        if phase is None or phase.training:
            if how == "cancel":
                raise CancelFit
            learner.stop()

    def evaluate(learner, phase=None, **_):
        if phase is None or phase.name == "train":
            learner.evaluate(batches(2))
            done.append(True)

    first = "fit_begin" if hook == "fit_begin" else "loss_begin"
    plugins = [on(first, end, "a"), on(hook, evaluate, "b")]
    result = make_learner(log, *plugins).fit(batches(1), epochs=3)
    assert done == [True]
    assert log.lines.count("val 1: step_begin forward_begin loss_begin step_end") == 1
    assert result.reason == how


# Errors


@pytest.mark.parametrize(
    "hook", ["step_begin", "forward_begin", "loss_begin", "backward_end", "update_begin", "step_end"]
)
def test_error_in_a_hook_has_one_note_that_says_where(hook):
    error = ZeroDivisionError("oh")
    learner = make_learner(raising(hook, error, at=1, name="fragile"))
    learner.fit(batches(1), epochs=2)
    with pytest.raises(ZeroDivisionError) as caught:
        learner.fit(batches(2), epochs=1)
    assert caught.value is error
    assert error.__notes__ == [f"loopkit: in {hook} of plugin 'fragile', phase 'train', epoch 3, step 1"]


@pytest.mark.parametrize("hook", ["epoch_begin", "epoch_end", "phase_end"])
def test_error_in_a_hook_of_the_epoch_has_one_note_that_says_where(hook):
    error = ZeroDivisionError("oh")
    with pytest.raises(ZeroDivisionError):
        make_learner(raising(hook, error, name="fragile")).fit(batches(2), epochs=1)
    assert error.__notes__ == [f"loopkit: in {hook} of plugin 'fragile', phase 'train', epoch 1"]


@pytest.mark.parametrize("hook", ["step_context", "epoch_context", "move_batch", "optimizer_step"])
def test_error_in_a_hook_that_is_no_event_has_one_note_that_names_the_plugin(hook):
    error = ZeroDivisionError("oh")
    with pytest.raises(ZeroDivisionError):
        make_learner(raising(hook, error, name="fragile")).fit(batches(2), epochs=1)
    (note,) = error.__notes__
    assert note.startswith(f"loopkit: in {hook} of plugin 'fragile', phase 'train', epoch 1")


@pytest.mark.parametrize("when", ["entering", "leaving"])
@pytest.mark.parametrize("hook", ["step_context", "epoch_context"])
def test_error_of_a_context_manager_has_one_note_that_names_the_plugin(hook, when):
    error = ZeroDivisionError("oh")

    @contextmanager
    def context():
        if when == "entering":
            raise error
        yield
        raise error

    learner = make_learner(on(hook, lambda **_: context(), "fragile"))
    with pytest.raises(ZeroDivisionError):
        learner.fit(batches(1), epochs=1)
    (note,) = error.__notes__
    assert note.startswith(f"loopkit: in {hook} of plugin 'fragile', phase 'train', epoch 1")
    assert not learner._engine.running.epochs


def test_error_in_the_phase_has_one_note_that_says_where():
    error = ZeroDivisionError("oh")

    class Broken(TrainingPhase):
        def forward(self, learner, inputs):
            raise error

    with pytest.raises(ZeroDivisionError):
        make_learner(phases=[Broken()]).fit(batches(1), epochs=1)
    (note,) = error.__notes__
    assert note.startswith("loopkit: in Broken.step, phase 'train', epoch 1, step 0")


def test_error_of_the_loader_has_one_note_that_says_which_batch():
    error = OSError("disk")

    def loader():
        yield from batches(2)
        raise error

    with pytest.raises(OSError, match="disk"):
        make_learner().fit(loader, epochs=1)
    assert error.__notes__ == ["loopkit: the loader raised this while making batch 2, phase 'train', epoch 1"]


def test_error_leaves_the_learner_usable():
    learner = make_learner(boom())
    with pytest.raises(RuntimeError):
        learner.fit(batches(2), epochs=1)
    assert not learner._engine.running.epochs
    assert learner.fit(batches(2), epochs=1).steps == 2


@pytest.mark.parametrize("hook", ["fit_begin", "loss_begin", "phase_end", "cycle_end", "fit_end"])
def test_fit_within_a_fit_is_refused(hook):
    learner = make_learner(on(hook, lambda learner, **_: learner.fit(batches(1), epochs=1)))
    with pytest.raises(ReentrancyError, match="call run, evaluate or predict"):
        learner.fit(batches(1), epochs=1)
    assert learner.current is None


def test_training_within_an_open_window_is_refused():
    def train(learner, step, **_):
        learner.run(TrainingPhase("other"), batches(1))

    learner = make_learner(on("backward_end", train), accumulate=2)
    with pytest.raises(ReentrancyError, match="'other' trains inside an open accumulation window"):
        learner.fit(batches(2), epochs=1)


# The result


def test_result_of_a_complete_fit():
    learner = make_learner(accumulate=2)
    result = learner.fit(batches(3), batches(1), epochs=2)
    assert result is learner.result
    assert (result.reason, result.message, result.by) == ("epochs", "", "")
    assert (result.epochs, result.steps, result.updates, result.samples) == (2, 6, 4, 24)
    assert (result.planned.epochs, result.planned.steps, result.planned.updates) == (2, 6, 4)
    assert result.seed == torch.initial_seed()


def test_result_counts_its_own_fit_and_progress_counts_all():
    learner = make_learner()
    learner.fit(batches(3), epochs=2)
    result = learner.fit(batches(3), epochs=1)
    assert (result.epochs, result.steps, result.updates, result.samples) == (1, 3, 3, 12)
    assert astuple(learner.progress)[:4] == (3, 9, 9, 36)


def test_result_of_fitting_is_end():
    learner = make_learner()
    with learner.rounds() as rounds:
        result = rounds.result
        assert result.reason == "running"
        learner.run("train", batches(2))
    assert (result.reason, result.epochs, result.steps) == ("end", 1, 2)


def test_result_does_not_count_cancelled_steps():
    result = make_learner(raising("update_end", CancelStep(), at=1)).fit(batches(3), epochs=1)
    assert (result.steps, result.updates, result.samples) == (2, 3, 8)


def test_result_of_both_limits_names_the_one_that_was_reached():
    assert make_learner().fit(batches(3), epochs=9, max_steps=4, max_updates=5).reason == "max_steps"
    assert make_learner().fit(batches(3), epochs=9, max_steps=5, max_updates=4).reason == "max_updates"
    assert make_learner().fit(batches(3), epochs=1, max_steps=5).reason == "epochs"


def test_stop_keeps_the_first_reason():
    learner = make_learner()

    def stop(learner, **_):
        learner.stop("first", by="a")
        learner.stop("second", by="b")

    learner.add(on("loss_begin", stop))
    result = learner.fit(batches(1), epochs=1)
    assert (result.reason, result.message, result.by) == ("stop", "first", "a")


def test_stop_is_forgotten_by_the_next_fit():
    learner = make_learner(raising("loss_begin", CancelFit("no")))
    assert learner.fit(batches(1), epochs=2).reason == "cancel"
    assert learner.fit(batches(1), epochs=2).reason == "epochs"
    with pytest.raises(PhaseError, match="no fit running"):
        learner.stop("outside a fit")
    assert learner.fit(batches(1), epochs=2).reason == "epochs"


def test_stop_is_heard_while_a_prediction_is_suspended():
    learner = make_learner()
    outputs = learner.predict_batches(batches(2))
    next(outputs)
    learner.add(on("step_end", lambda learner, phase, **_: phase.training and learner.stop()))
    result = learner.fit(batches(1), epochs=3)
    assert (result.reason, result.epochs) == ("stop", 1)
    outputs.close()


def test_stop_in_a_loop_of_your_own_survives_an_evaluation_at_its_end():
    learner = make_learner(on("phase_end", lambda learner, phase: phase.training and learner.evaluate(batches(1))))
    with learner.epoch("train") as epoch:
        epoch.step(batches(1)[0])
        learner.stop()
    assert learner._engine.requests.stopped


# Contexts


class EpochContexts:
    """Contexts that log, and try to swallow what is raised inside."""

    def __init__(self, swallow):
        self.swallow = swallow
        self.open = []
        self.entered = 0

    @contextmanager
    def _context(self, name):
        self.open.append(name)
        self.entered += 1
        try:
            yield
        except BaseException:
            if not self.swallow:
                raise
        finally:
            assert self.open.pop() == name

    @hookimpl
    def epoch_context(self):
        return self._context("epoch")

    @hookimpl
    def step_context(self):
        return self._context("step")


class Nothing:
    """Contexts that are None."""

    @hookimpl
    def epoch_context(self):
        return None

    @hookimpl
    def step_context(self):
        return None


ENDINGS = {
    "complete": None,
    "step": CancelStep("x"),
    "epoch": CancelEpoch("x"),
    "fit": CancelFit("x"),
    "error": RuntimeError("x"),
    "interrupt": KeyboardInterrupt("x"),
}


@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize(
    "hook", ["epoch_begin", "step_begin", "forward_begin", "loss_begin", "update_end", "step_end", "epoch_end"]
)
@pytest.mark.parametrize("how", ["complete", "epoch", "fit", "error", "interrupt"])
def test_contexts_are_left_in_every_ending(how, hook, swallow):
    contexts = EpochContexts(swallow)
    plugins = [] if how == "complete" else [raising(hook, ENDINGS[how])]
    learner = make_learner(contexts, Nothing(), *plugins)
    if how in ("error", "interrupt"):
        with pytest.raises(type(ENDINGS[how])) as caught:
            learner.fit(batches(2), epochs=1)
        assert caught.value is ENDINGS[how]
    else:
        learner.fit(batches(2), epochs=1)
    assert contexts.entered > 0
    assert contexts.open == []


@pytest.mark.parametrize("how", ["step", "epoch", "fit", "error"])
def test_context_cannot_swallow_what_the_phase_raises(how):
    class Broken(TrainingPhase):
        def forward(self, learner, inputs):
            raise ENDINGS[how]

    log = EventLog()
    learner = make_learner(EpochContexts(swallow=True), log, phases=[Broken()])
    if how == "error":
        with pytest.raises(RuntimeError):
            learner.fit(batches(2), epochs=1)
    else:
        learner.fit(batches(2), epochs=1)
    assert log.count("step_end") == 0
    assert log.count("step_cancelled") == {"step": 2, "epoch": 1, "fit": 1, "error": 0}[how]


def test_context_is_left_although_a_later_one_fails_to_enter():
    contexts = EpochContexts(swallow=False)
    late = on("epoch_context", lambda **_: 1 / 0, "late")
    with pytest.raises(ZeroDivisionError):
        make_learner(contexts, late).fit(batches(1), epochs=1)
    assert contexts.entered == 1
    assert contexts.open == []


# Modes and gradients


def mixed():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[2].eval()
    return model


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("phase", ["train", "val", "predict"])
def test_modes_are_those_of_the_phase_within_and_restored_after(phase):
    within = []
    model = mixed().train()
    learner = make_learner(on("step_begin", lambda learner, **_: within.append(modes(learner.model))), model=model)
    model[2].eval()  # after the learner was made: what was so before stays so
    before = modes(model)
    learner.run(phase, batches(1))
    assert within == [[phase == "train"] * 5]
    assert modes(model) == before == [True, True, True, False, True]


@pytest.mark.parametrize("hook", ["epoch_begin", "loss_begin", "epoch_end", "phase_end"])
@pytest.mark.parametrize("phase", ["train", "val"])
def test_modes_are_restored_after_an_error(phase, hook):
    model = mixed()
    before = modes(model)
    with pytest.raises(RuntimeError):
        make_learner(raising(hook, RuntimeError(), phase=phase), model=model).run(phase, batches(1))
    assert modes(model) == before


def test_modes_are_back_at_phase_end():
    seen = []
    model = mixed()
    learner = make_learner(on("phase_end", lambda learner, **_: seen.append(modes(learner.model))), model=model)
    learner.evaluate(batches(1))
    assert seen == [[True, True, True, False, True]]


def test_validation_leaves_parameters_buffers_and_gradients_untouched():
    model = mixed().train()
    learner = make_learner(model=model)
    learner.fit(batches(1), epochs=1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    learner.evaluate(batches(2))
    learner.predict(batches(2))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("mode", "enabled", "inference"),
    [("no_grad", False, False), ("inference_mode", False, True), ("grad", True, False)],
)
def test_grad_mode_of_a_phase_that_does_not_train(mode, enabled, inference):
    class Phase(ValidationPhase):
        grad_mode = mode

    seen = []
    look = on("loss_begin", lambda **_: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))
    make_learner(look, phases=[Phase()]).evaluate(batches(1))
    assert seen == [(enabled, inference)]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("phase", ["val", "predict"])
def test_grad_mode_is_no_grad_by_default(phase):
    seen = []
    look = on("step_end", lambda step, **_: seen.append((step.outputs.requires_grad, step.outputs.is_inference())))
    make_learner(look).run(phase, batches(1))
    assert seen == [(False, False)]


def test_grad_mode_unknown_is_refused():
    class Phase(ValidationPhase):
        grad_mode = "off"

    with pytest.raises(PhaseError, match=r"'off'.*no_grad"):
        make_learner(phases=[Phase()]).evaluate(batches(1))


def test_training_under_no_grad_has_gradients():
    learner = make_learner()
    before = learner.model.weight.clone()
    with torch.no_grad():
        learner.fit(batches(1), epochs=1)
        assert not torch.is_grad_enabled()
    assert not torch.equal(learner.model.weight, before)


def test_backward_in_validation_is_refused():
    class Phase(ValidationPhase):
        grad_mode = "grad"

        def step(self, learner, step):
            super().step(learner, step)
            step.backward(step.loss)

    with pytest.raises(PhaseError, match="only a phase with training = True"):
        make_learner(phases=[Phase()]).evaluate(batches(1))


# Nested passes


@pytest.mark.parametrize(
    "hook", ["step_begin", "forward_begin", "loss_begin", "backward_end", "update_begin", "step_end", "epoch_end"]
)
@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_nested_pass_leaves_everything_as_it_was(hook, verb):
    contexts = EpochContexts(swallow=False)
    model = mixed()

    def state(learner):
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        return (
            astuple(learner.progress),
            modes(model),
            list(contexts.open),
            list(learner._engine.running.epochs),
            torch.is_grad_enabled(),
            [None if g is None else g.tolist() for g in grads],
        )

    checked = []

    def nest(learner, phase, **_):
        if phase.training:
            before = state(learner)
            getattr(learner, verb)(batches(2))
            assert state(learner) == before
            checked.append(True)

    make_learner(contexts, on(hook, nest), model=model, accumulate=2).fit(batches(2), epochs=1)
    assert checked


def test_nested_pass_leaves_its_outer_step_untouched_when_cancelled():
    log = EventLog()
    learner = make_learner(log, raising("loss_begin", CancelEpoch(), phase="val"))
    learner.add(on("loss_begin", lambda learner, phase, **_: phase.training and learner.evaluate(batches(1)), "nest"))
    learner.fit(batches(1), epochs=1)
    assert log.lines[3:-3] == [
        "val: epoch_begin",
        "val 0: step_begin forward_begin loss_begin step_cancelled",
        "val: epoch_end phase_end",
        "train 0: backward_begin backward_end update_begin update_end step_end",
    ]


def test_nested_cancel_fit_ends_the_outer_pass_too():
    log = EventLog()
    learner = make_learner(log, raising("loss_begin", CancelFit("no"), phase="val"))
    result = learner.fit(batches(3), batches(1), epochs=1, validate=every(updates=2))
    assert log.lines[2:] == [
        "train 0: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train 1: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "val: epoch_begin",
        "val 0: step_begin forward_begin loss_begin step_cancelled",
        "val: epoch_end phase_end",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]
    assert (result.reason, result.steps) == ("cancel", 2)


def test_nested_stop_ends_both_passes():
    learner = make_learner()
    learner.add(on("step_end", lambda learner, phase, **_: phase.name == "val" and learner.stop()))
    log = EventLog()
    learner.add(log)
    learner.fit(batches(3), batches(2), epochs=3, validate=every(updates=1))
    assert [line.split(":")[0] for line in log.lines] == [
        "fit_begin", "train", "train 0", "val", "val 0", "val 1", "val", "train", "cycle_end", "fit_end",
    ]  # fmt: skip


# predict, evaluate


class Point(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x, 2 * x),
        lambda x: [x, x[:, :1]],
        lambda x: {"a": x, "b": (x, -x)},
        lambda x: Point(x, x + 1),
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple"],
)
def test_predict_concatenates(make):
    class Phase(PredictionPhase):
        def forward(self, learner, inputs):
            return make(inputs)

    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    whole = make_learner(phases=[Phase()]).predict(list(x.split(3)))

    def same(one, other):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert len(one) == len(other)
            for key in one if isinstance(one, dict) else range(len(one)):
                same(one[key], other[key])

    same(whole, make(x))


def test_predict_stacks_scalars():
    class Phase(PredictionPhase):
        def forward(self, learner, inputs):
            return inputs.sum()

    x = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(make_learner(phases=[Phase()]).predict(list(x.split(1))), torch.tensor([1.0, 5.0, 9.0]))


def test_predict_of_what_cannot_be_joined_says_what_to_use():
    class Phase(PredictionPhase):
        def forward(self, learner, inputs):
            return "text"

    with pytest.raises(PhaseError, match="type str: use predict_batches"):
        make_learner(phases=[Phase()]).predict(batches(1))


def test_predict_batches_is_lazy():
    taken = []

    def data():
        for batch in batches(3):
            taken.append(len(taken))
            yield batch

    log = EventLog()
    learner = make_learner(log)
    outputs = learner.predict_batches(data)
    assert taken == []
    next(outputs)
    assert taken == [0]
    outputs.close()
    assert taken == [0]
    assert log.lines == [
        "predict: epoch_begin",
        "predict 0: step_begin forward_begin step_end",
        "predict: epoch_end phase_end",
    ]
    assert not learner._engine.running.epochs


def test_predict_batches_gives_the_callers_modes_between_batches():
    model = mixed()
    learner = make_learner(model=model)
    between = []
    for _ in learner.predict_batches(batches(2)):
        between.append((modes(model), torch.is_grad_enabled()))
        model[1].eval()
    assert between == [([True, True, True, False, True], True), ([True, True, False, False, True], True)]
    assert modes(model) == [True, True, False, False, True]


def test_predict_of_no_batch_is_refused():
    with pytest.raises(EmptyDataError, match="'predict'"):
        make_learner().predict([])


def test_evaluate_returns_the_metrics_of_its_phase():
    def measure(learner, phase, epoch):
        learner.metrics[f"{phase.name}/seen"] = float(epoch.steps)

    learner = make_learner(on("epoch_end", measure, writes=("metrics",)))
    result = learner.fit(batches(2), batches(1), epochs=1)
    assert result.metrics == {"train/seen": 2.0, "val/seen": 1.0}
    assert learner.evaluate(batches(3)) == {"val/seen": 3.0}
    assert learner.metrics["train/seen"] == 2.0


def test_metrics_of_an_earlier_pass_are_forgotten_when_the_phase_runs_again():
    def measure(learner, phase, epoch):
        if epoch.steps > 1:
            learner.metrics[f"{phase.name}/seen"] = float(epoch.steps)

    learner = make_learner(on("epoch_end", measure, writes=("metrics",)))
    assert learner.evaluate(batches(2)) == {"val/seen": 2.0}
    assert learner.evaluate(batches(1)) == {}


def test_evaluate_takes_the_only_phase_of_your_own_that_fits():
    log = EventLog()
    make_learner(log, phases=[ValidationPhase("dev")]).evaluate(batches(1))
    assert log.lines[0] == "dev: epoch_begin"


def test_evaluate_with_two_phases_that_fit_asks_which():
    learner = make_learner(phases=[ValidationPhase("dev"), ValidationPhase("test")])
    with pytest.raises(PhaseError, match=r"'dev', 'test'.*phase="):
        learner.evaluate(batches(1))


# Limits


@pytest.mark.parametrize("limit", ["epochs", "max_steps", "max_updates"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_limit_that_is_no_count_is_refused(limit, value):
    with pytest.raises(ValueError, match=f"{limit} is {value}"):
        make_learner().fit(batches(1), **{"epochs": 1, limit: value})


def test_fit_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="fit has no end"):
        make_learner().fit(batches(1))


@pytest.mark.parametrize(("k", "steps", "updates"), [(1, 3, 3), (2, 5, 3), (3, 7, 3)])
def test_max_updates_counts_updates_under_accumulation(k, steps, updates):
    result = make_learner(accumulate=k).fit(batches(4), max_updates=3)
    assert (result.reason, result.updates) == ("max_updates", updates)
    assert result.steps == {1: 3, 2: 6, 3: 7}[k]  # k = 3: windows of 3 and 1, then 3


def test_skipped_updates_do_not_count_for_max_updates():
    skip = on("update_begin", lambda step, **_: step.index == 0 and step.skip_update("no"))
    result = make_learner(skip).fit(batches(3), max_updates=3)
    assert (result.steps, result.updates, result.epochs) == (5, 3, 2)


def test_data_that_is_used_up_is_refused_in_its_second_epoch():
    with pytest.raises(ExhaustedIteratorError, match="list_iterator"):
        make_learner().fit(iter(batches(2)), epochs=2)


def test_data_without_batches_is_refused():
    with pytest.raises(EmptyDataError, match="'train'"):
        make_learner().fit([], epochs=1)


def test_data_shorter_than_its_len_is_a_warning():
    class Lying(list):
        def __len__(self):
            return 5

    with pytest.warns(UserWarning, match="is 5, but it gave 2 batches"):
        result = make_learner(accumulate=4).fit(Lying(batches(2)), epochs=1)
    assert (result.steps, result.updates) == (2, 1)


# Plugins that come and go


def test_add_and_remove_between_fits():
    log = EventLog()
    learner = make_learner()
    learner.fit(batches(1), epochs=1)
    learner.add(log)
    learner.fit(batches(1), epochs=1)
    assert log.count("step_end") == 1
    learner.remove("event_log")
    learner.fit(batches(1), epochs=1)
    assert log.count("step_end") == 1
    assert "event_log" not in learner.plugins


def test_add_during_a_fit_takes_part_from_the_next_step_on():
    log = EventLog()
    learner = make_learner()
    learner.add(on("loss_begin", lambda learner, step, **_: step.index == 0 and learner.add(log)))
    learner.fit(batches(2), epochs=1)
    assert log.lines == [
        "fit_begin",
        "train 1: step_begin forward_begin loss_begin backward_begin backward_end update_begin update_end step_end",
        "train: epoch_end phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_remove_during_a_fit_still_ends_the_fit_for_the_plugin():
    log = EventLog()
    learner = make_learner(log)
    learner.add(on("loss_begin", lambda learner, step, **_: step.index == 0 and learner.remove("event_log")))
    learner.fit(batches(3), epochs=1)
    assert log.count("fit_end") == 1
    assert not any(line.startswith("train 1") for line in log.lines)


def test_replace_during_a_fit_begins_the_one_and_ends_both():
    log = []
    learner = make_learner(Paired("a", log))
    new = Paired("a", log)
    learner.add(on("step_end", lambda learner, step, **_: step.index == 0 and learner.replace("a", new)))
    learner.fit(batches(2), epochs=1)
    assert learner.plugins["a"] is new
    assert log == ["begin a", "begin a", "end a", "end a"]


def test_replace_by_one_whose_fit_begin_fails_still_ends_the_first():
    log = []
    learner = make_learner(Paired("a", log))
    new = Paired("a", [], begin=RuntimeError("no"))
    learner.add(on("step_end", lambda learner, **_: learner.replace("a", new)))
    with pytest.raises(RuntimeError, match="no"):
        learner.fit(batches(1), epochs=1)
    assert log == ["begin a", "end a"]
    assert new.log == ["begin a", "end a"]


def test_replace_goes_by_what_a_plugin_provides():
    one, other = Paired("a", []), Paired("b", [])
    one.provides = other.provides = "clip"
    learner = make_learner(one)
    learner.replace("clip", other)
    assert learner.plugins == {"b": other}


def test_remove_of_an_unknown_plugin_offers_the_nearest():
    with pytest.raises(PluginError, match=r"'event_lgo' \(did you mean 'event_log'\?\)"):
        make_learner(EventLog()).remove("event_lgo")


def test_add_of_several_is_all_or_none():
    learner = make_learner(Paired("a", []))
    with pytest.raises(PluginError, match="two plugins are called 'a'"):
        learner.add(Paired("b", []), Paired("a", []))
    assert list(learner.plugins) == ["a"]


def test_add_whose_fit_begin_fails_is_not_kept():
    learner = make_learner()
    bad = Paired("bad", [], begin=RuntimeError("no"))
    learner.add(on("step_end", lambda learner, **_: learner.add(bad)))
    with pytest.raises(RuntimeError, match="no"):
        learner.fit(batches(1), epochs=1)
    assert "bad" not in learner.plugins
    assert bad.log == ["begin bad", "end bad"]


def test_request_that_comes_while_the_processes_agree_is_for_the_next_time():
    requests = Requests()

    class Slow(World):
        """A world of two in which a thread asks for a stop while the others are waited for."""

        def agree(self, *numbers):
            return list(numbers)

        def gather(self, value):
            requests.stop("late", "thread")
            return [value, value]

    requests.join(Slow(size=2))
    requests.save()
    requests.agree(0, None, ())
    assert requests.stopped is None
    requests.agree(0, None, ())
    assert requests.stopped == ("late", "thread")


@pytest.mark.parametrize(("before", "after", "at"), [(2, 1, 0), (3, 2, 0), (3, 2, 1), (2, 3, 2), (1, 2, 0)])
def test_accumulate_set_while_a_window_is_open_takes_effect_once_it_is_closed(before, after, at):
    data = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(9)]
    model = nn.Linear(3, 1)
    by_hand = copy.deepcopy(model)
    updated = []

    def change(learner, step):
        if step.index == at:
            learner.accumulate = after

    learner = Learner(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        accumulate=before,
        plugins=[on("step_end", change, "changing"), on("update_end", lambda step: updated.append(step.index), "seen")],
    )
    learner.remove("progress")
    learner.fit(data, epochs=1)

    expected, size, window = [], before, []
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for index, batch in enumerate(data):
        window.append(batch)
        if len(window) == size or index == 8:
            optimizer.zero_grad()
            for inputs, targets in window:
                (nn.functional.mse_loss(by_hand(inputs), targets) / len(window)).backward()
            optimizer.step()
            expected.append(index)
            window = []
        size = after if index >= at and not window else size
    assert updated == expected
    assert torch.allclose(model.weight, by_hand.weight, rtol=1e-5)  # a short window is rounded otherwise
