from __future__ import annotations

import gc
import itertools
import locale
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from distributed.processes import run
from torch import nn

from loopkit import Event, Phase, TrainingPhase, hookimpl
from loopkit.errors import LoopkitError, PluginError
from loopkit.plugins import DDP, ClipGradNorm, History, Metrics, WeightAverage
from loopkit_testing import (
    CHECKS,
    PROMISES,
    Case,
    ContractError,
    EventLog,
    Problem,
    check_plugin,
    overhead,
    plugin_contract,
    tiny_problem,
)
from loopkit_testing.declaration import declaration
from loopkit_testing.leftovers import SETTINGS
from loopkit_testing.processes import compared, train_together


class SurveyBegin(Event):
    """An event of a phase of one's own."""


class SurveyPhase(TrainingPhase):
    emits = (*TrainingPhase.emits, SurveyBegin)

    def step(self, learner, step):
        step.emit(SurveyBegin)
        super().step(learner, step)


def broken(factory, check, **options):
    """The messages of one check."""
    with pytest.raises(ContractError) as caught:
        check_plugin(factory, checks=[check], **options)
    return list(caught.value.broken)


def plugin(hook, function, name="offender", **declared):
    """A factory of plugins that implement one hook."""

    def make():
        made = type("Offender", (), {hook: hookimpl(**declared)(function)})()
        made.name = name
        return made

    return make


# Good plugins


class Counting:
    volatile = ("steps",)

    def __init__(self):
        self.steps = 0

    @hookimpl
    def step_end(self):
        self.steps += 1


class Clip:
    provides = "clip"

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        torch.nn.utils.clip_grad_norm_(step.params, 0.1)


class MeanLoss:
    """Accumulates on the device, is read once an epoch, and is saved."""

    name = "mean_loss"
    shared = True  # a companion of many trials

    def __init__(self):
        self.total = torch.zeros(())
        self.history = []

    @hookimpl
    def epoch_begin(self, epoch):
        if not epoch.resumed:
            self.total = torch.zeros(())

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        if (loss := getattr(step, "loss", None)) is not None:
            self.total += loss.detach()

    @hookimpl(writes=("metrics.*/mean_loss",))
    def epoch_end(self, learner, phase):
        learner.metrics[f"{phase.name}/mean_loss"] = self.total.item()
        self.history.append(self.total.item())

    def state_dict(self):
        return {"total": self.total.clone(), "history": list(self.history)}

    def load_state_dict(self, state):
        self.total = state["total"].clone()
        self.history = list(state["history"])


class Tuned:
    @hookimpl
    def step_context(self):
        return torch.backends.cudnn.flags(enabled=True, benchmark=True)


class Best:
    """Needs a companion that makes the metric."""

    volatile = ("best",)

    def __init__(self):
        self.best = float("inf")

    @hookimpl(reads=("metrics.val/mean_loss",))
    def phase_end(self, learner, phase):
        if phase.name == "val":
            self.best = min(self.best, learner.metrics["val/mean_loss"])


class Schedule:
    owns = ("optimizer.lr",)

    @hookimpl(updates=("optimizer.lr",))
    def step_begin(self, learner, phase):
        if phase.training:
            for optimizer in learner.optimizers.values():
                optimizer.param_groups[0]["lr"] *= 0.9


class Shadow:
    """Validates with the sign of the weights, and puts them back."""

    @hookimpl(updates=("params",))
    def epoch_context(self, learner, phase):
        return None if phase.training else self._signs(learner)

    def _signs(self, learner):
        kept = {p: p.data for model in learner.models.values() for p in model.parameters()}

        def put():
            for p in kept:
                p.data = p.data.sign()

        def away():
            for p, data in kept.items():
                p.data = data

        return self._swapped(learner, put, away)

    def _swapped(self, learner, put, away):
        return learner.models.weights.replaced(put, away, by="shadow")


class Hidden(Shadow):
    """Does so without saying it to the learner."""

    name = "shadow"

    @contextmanager
    def _swapped(self, learner, put, away):
        put()
        try:
            yield
        finally:
            away()


class OwnStep:
    """Implements the verb, and reads the gradients where it says so."""

    syncs = ("optimizer_step",)

    @hookimpl(reads=("grads",))
    def optimizer_step(self, step, default):
        if all(bool(p.grad.isfinite().all()) for p in step.params if p.grad is not None):
            default()
        else:
            step.skip_update("the gradients are not finite")


GOOD = {
    "counting": Counting,
    "clip": Clip,
    "mean_loss": MeanLoss,
    "context": Tuned,
    "companion": lambda: (Best(), MeanLoss()),
    "schedule": Schedule,
    "shadow": Shadow,
    "own_step": OwnStep,
    "event_log": EventLog,
}


LIKE_SHIPPED = {"counting", "clip", "mean_loss", "schedule", "event_log"}
"""Plugins such as these pass it in plugins/."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_SHIPPED else ()) for name in GOOD]
)
def test_check_plugin_passes_good_plugins(name):
    check_plugin(GOOD[name])


class Recurrent(TrainingPhase):
    """Its loss depends on the steps before, also on those of an earlier fit."""

    saved = ("scale",)
    scale = 1.0

    def loss(self, learner, outputs, targets):
        self.scale *= 0.9
        return super().loss(learner, outputs, targets) * self.scale


def test_plugin_is_not_accused_of_what_a_phase_keeps():
    phase = Recurrent()
    checks = ["metrics_reset", "any_list_order", "state_round_trip", "exact_resume"]
    check_plugin(WeightAverage, phases=[phase], checks=checks[1:])
    check_plugin(Metrics, phases=[phase], checks=checks[:2])
    assert phase.scale == 1.0


# any_list_order


class Numbered:
    count = itertools.count()

    def __init__(self):
        self.name = f"numbered_{next(self.count)}"

    @hookimpl
    def step_end(self):
        pass


def test_any_list_order_names_what_differs():
    (message,) = broken(Numbered, "any_list_order")
    assert message.startswith("any_list_order: lists of the same plugins in another order give another plan ('")
    assert "became '" in message


def test_any_list_order_reports_a_clash_with_the_standard_plugins():
    offender = plugin("epoch_end", lambda self: None, writes=("metrics.train/loss",))
    (message,) = broken(offender, "any_list_order")
    assert "raised OrderError: epoch_end: plugins 'metrics' and 'offender' both write" in message


# declared_access: (hook, implementation, message, declaration that mends it)


def read_loss(self, step):
    return step.loss


def ask_for_outputs(self, step):
    return getattr(step, "outputs", None)


def look_into_vars(self, step):
    return "inputs" in vars(step)


def set_attribute(self, step):
    step.mine = 1


def read_attribute(self, step):
    return getattr(step, "entropy", None)


def change_outputs(self, step):
    step.outputs.mul_(2)


def change_batch_through_inputs(self, step):
    step.batch[0].add_(1)


def set_weight(self, step):
    step.weight = 2.0


def read_metric(self, learner):
    return learner.metrics.get("train/loss")


def write_metric(self, learner):
    learner.metrics["val/mine"] = 1.0


def change_param(self, learner):
    with torch.no_grad():
        learner.model[0].weight.mul_(1.5)


def change_param_behind_autograd(self, learner):
    learner.model[0].weight.data.mul_(1.5)


def change_buffer(self, learner):
    learner.model[1].running_mean.zero_()


def change_grads(self, learner):
    for p in learner.model.parameters():
        p.grad.mul_(0.5)


def replace_grads(self, step):
    for p in step.params:
        p.grad = None


def change_lr(self, learner):
    learner.optimizer.param_groups[0]["lr"] *= 0.5


def forget_momentum(self, learner):
    learner.optimizer.state.clear()


def change_mode(self, learner):
    learner.model[3].eval()


def draw(self):
    torch.rand(1)


def draw_in_python(self):
    random.random()


def change_counters(self, learner):
    learner.progress.samples += 1


ACCESS = {
    "reads_attribute": ("step_end", read_loss, "reads 'loss'", {"reads": ("loss",)}),
    "asks_for_attribute": ("step_end", ask_for_outputs, "reads 'outputs'", {"reads": ("outputs",)}),
    "looks_into_vars": ("loss_begin", look_into_vars, "reads 'inputs'", {"reads": ("*",)}),
    "sets_attribute": ("step_begin", set_attribute, "changes 'step.mine'", {"writes": ("step.mine",)}),
    "reads_other": ("step_end", read_attribute, "reads 'step.entropy'", {"reads": ("step",)}),
    "outputs": ("loss_begin", change_outputs, "changes 'outputs'", {"updates": ("outputs",)}),
    "batch": (
        "step_begin",
        change_batch_through_inputs,
        "changes 'batch'",
        {"updates": ("batch",)},
    ),
    "weight": ("step_begin", set_weight, "changes 'step.weight'", {"writes": ("step.weight",)}),
    "metric": ("step_end", read_metric, "reads 'metrics.train/loss'", {"reads": ("metrics",)}),
    "new_metric": ("epoch_end", write_metric, "changes 'metrics.val/mine'", {"writes": ("metrics.*/mine",)}),
    "param": ("update_end", change_param, "changes 'params'", {"updates": ("params",)}),
    "param_data": ("update_end", change_param_behind_autograd, "changes 'params'", {"updates": ("params",)}),
    "buffer": ("step_end", change_buffer, "changes 'buffers'", {"writes": ("buffers",)}),
    "grads": ("backward_end", change_grads, "changes 'grads'", {"updates": ("grads",)}),
    "new_grads": ("update_begin", replace_grads, "changes 'grads'", {"writes": ("grads",)}),
    "lr": ("step_end", change_lr, "changes 'optimizer.lr'", {"updates": ("optimizer.lr",)}),
    "momentum": ("epoch_end", forget_momentum, "changes 'optimizer.state'", {"updates": ("optimizer",)}),
    "mode": ("step_begin", change_mode, "changes 'model'", {"updates": ("model",)}),
    "rng": ("step_end", draw, "changes 'rng'", {"updates": ("rng",)}),
    "python_rng": ("step_end", draw_in_python, "changes 'rng'", {"updates": ("rng",)}),
    "counters": ("step_end", change_counters, "changes 'progress'", {"updates": ("progress",)}),
}


@pytest.mark.parametrize("name", ACCESS)
def test_declared_access_names_plugin_hook_state_and_declaration(name):
    hook, function, what, _ = ACCESS[name]
    messages = broken(plugin(hook, function), "declared_access")
    assert any(
        m.startswith(f"declared_access: {hook} of plugin 'offender' {what}, which it does not declare: add ")
        for m in messages
    )


@pytest.mark.parametrize("name", ACCESS)
def test_declared_access_accepts_what_is_declared(name):
    hook, function, _, declared = ACCESS[name]
    extra = {"reads": ("*",)} if "reads" not in declared else {}
    factory = plugin(hook, function, **declared, **extra)
    check_plugin(lambda: (factory(), MetricMaker()), checks=["declared_access"])


class MetricMaker:
    name = "a_maker"

    @hookimpl(writes=("metrics.*/loss",))
    def epoch_end(self, learner, phase):
        learner.metrics[f"{phase.name}/loss"] = 1.0


def test_declared_access_says_what_to_add():
    (message,) = broken(plugin("step_end", read_loss), "declared_access")
    assert message == (
        "declared_access: step_end of plugin 'offender' reads 'loss', which it does not declare: add reads=(\"loss\",)"
    )


def test_declared_access_takes_a_read_of_what_is_updated():
    def double(self, step):
        step.batch = tuple(step.batch)

    check_plugin(plugin("step_begin", double, updates=("batch",)), checks=["declared_access"])


def test_declared_access_does_not_take_a_read_for_a_change():
    (message,) = broken(
        plugin("step_begin", lambda self, step: set_weight(self, step), reads=("*",)), "declared_access"
    )
    assert "changes 'step.weight'" in message


@pytest.mark.parametrize(
    "free",
    [
        lambda self, step: step.skip_update("no"),
        lambda self, step: (step.index, step.samples, step.weight, step.last, step.params, step.optimizer_name),
        lambda self, learner: learner.stop("enough"),
        lambda self, learner: learner.progress.updates,
    ],
)
def test_declared_access_leaves_votes_requests_and_counters_free(free):
    check_plugin(plugin("update_begin", free), checks=["declared_access"])


def test_declared_access_leaves_the_seed_free():
    def scale(self, step):
        step.seed = step.seed * 2

    check_plugin(plugin("backward_begin", scale), checks=["declared_access"])


def test_declared_access_watches_a_learner_that_was_kept():
    class Keeps:
        @hookimpl
        def fit_begin(self, learner):
            self.learner = learner

        @hookimpl
        def step_end(self):
            self.learner.metrics["train/mine"] = 1.0

    (message,) = broken(Keeps, "declared_access")
    assert "step_end of plugin 'keeps' changes 'metrics.train/mine'" in message


def test_declared_access_refuses_attributes_set_on_the_learner():
    def mark(self, learner):
        learner.mark = 1

    (message,) = broken(plugin("fit_begin", mark), "declared_access")
    assert "fit_begin of plugin 'offender' changes 'learner.mark'" in message
    assert "an attribute of the plugin itself" in message


@pytest.mark.parametrize("hook", ["epoch_context", "step_context"])
def test_declared_access_watches_both_ends_of_a_context(hook):
    @contextmanager
    def at_the_end(learner):
        yield
        change_lr(None, learner)

    (message,) = broken(plugin(hook, lambda self, learner: at_the_end(learner)), "declared_access")
    assert f"{hook} of plugin 'offender' changes 'optimizer.lr'" in message


def test_declared_access_watches_a_changed_batch():
    (message,) = broken(plugin("move_batch", lambda self, batch: list(batch)), "declared_access")
    assert "move_batch of plugin 'offender' changes 'batch'" in message


def test_declared_access_watches_a_wrapped_model():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = (inner,)

        def forward(self, x):
            return self.inner[0](x)

    wrap = lambda self, model: Wrapper(model)  # noqa: E731
    (message,) = broken(plugin("setup_model", wrap), "declared_access")
    assert "setup_model of plugin 'offender' changes 'model'" in message
    check_plugin(plugin("setup_model", wrap, updates=("model",)), checks=["declared_access"])


def test_declared_access_watches_hooks_that_come_rarely():
    reads_skipped = plugin("update_skipped", read_loss)
    reads_cancelled = plugin("step_cancelled", lambda self, step: getattr(step, "loss", None))
    assert "update_skipped" in broken(reads_skipped, "declared_access")[0]
    assert "step_cancelled" in broken(reads_cancelled, "declared_access")[0]


def test_declared_access_charges_the_verb_with_gradients():
    def step_and_clear(self, optimizer, default):
        default()
        optimizer.zero_grad()

    (message,) = broken(plugin("optimizer_step", step_and_clear), "declared_access")
    assert "optimizer_step of plugin 'offender' changes 'grads'" in message


def test_declared_access_says_of_what_is_read_and_changed_only_that_it_is_changed():
    (message,) = broken(plugin("step_begin", change_batch_through_inputs), "declared_access")
    assert "step_begin of plugin 'offender' changes 'batch'" in message


@pytest.mark.parametrize("how", ["data", "numpy", "move_batch"])
def test_declared_access_watches_batches_that_are_changed_in_place(how):
    def step_begin(self, step):
        inputs = step.batch[0]
        (inputs.data if how == "data" else inputs.numpy())[:1] += 1

    def move_batch(self, batch):
        batch[0].add_(1)
        return batch

    offender = plugin(*(("move_batch", move_batch) if how == "move_batch" else ("step_begin", step_begin)))
    (message,) = broken(offender, "declared_access")
    assert "of plugin 'offender' changes 'batch', which it does not declare" in message


# fit_twice


class Once:
    def __init__(self):
        self.used = False

    @hookimpl
    def fit_begin(self):
        if self.used:
            raise RuntimeError("already used")
        self.used = True


class Switches:
    @hookimpl
    def fit_begin(self):
        torch.set_default_dtype(torch.float64)


class Spawns:
    def __init__(self):
        self.end = threading.Event()

    @hookimpl
    def fit_begin(self):
        thread = threading.Thread(target=self.end.wait, args=(20,), name="spawned", daemon=True)
        thread.start()

    def __del__(self):
        self.end.set()


STARTED = []
"""Processes that plugins of a test have started."""


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr("loopkit_testing.leftovers.SECONDS", 0.1)
    yield STARTED
    while STARTED:
        process = STARTED.pop()
        process.kill()
        finish(process)


def finish(process):
    return process.wait(60) if isinstance(process, subprocess.Popen) else process.join(60)


class Starts:
    """Starts a process in each fit, and ends it if it is told to."""

    ends = False

    @hookimpl
    def fit_begin(self):
        STARTED.append(self.start())

    @hookimpl
    def fit_end(self):
        if self.ends:
            STARTED[-1].kill()  # it takes a moment

    def start(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


class Forks(Starts):
    def start(self):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name="forked")
        process.start()
        return process


class Returns:
    """Takes itself out and comes back, and so gets two ends."""

    name = "returns"

    def __init__(self):
        self.done = False

    @hookimpl
    def fit_begin(self, learner):
        if not self.done:
            self.done = True
            learner.remove("returns")
            learner.add(self)

    @hookimpl
    def fit_end(self):
        pass


def test_fit_twice_reports_an_error_of_the_second_fit():
    assert broken(Once, "fit_twice") == [
        "fit_twice: the second fit raised RuntimeError: already used (in fit_begin of plugin 'once')"
    ]


def test_fit_twice_reports_what_is_left_behind_and_puts_it_back():
    (message,) = broken(Switches, "fit_twice")
    assert "after the first fit the default dtype is torch.float64; it was torch.float32 before the fit" in message
    assert torch.get_default_dtype() is torch.float32


def test_fit_twice_reports_threads_that_pile_up(monkeypatch):
    monkeypatch.setattr("loopkit_testing.leftovers.SECONDS", 0.1)
    (message,) = broken(Spawns, "fit_twice")
    assert message == "fit_twice: after the second fit a thread is left running: 'spawned'; end it in fit_end"


class EndsLate:
    """A thread that outlives each fit by a while."""

    @hookimpl
    def fit_end(self):
        threading.Thread(target=time.sleep, args=(0.8,), name="late").start()


def test_what_ends_late_is_waited_for_once(monkeypatch):
    monkeypatch.setattr("loopkit_testing.leftovers.SECONDS", 1.0)
    waited = []
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, t=None: waited.append(t or 0) or join(self, t))
    check_plugin(EndsLate, checks=["fit_twice", "cancelled_step", "error_elsewhere"])
    assert sum(waited) < 2.5  # two checks of some thirty fits, each of which could have waited for a second


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not say which processes there are")
def test_fit_twice_reports_a_process_that_is_left_and_kills_it(started):
    (message,) = broken(Starts, "fit_twice")
    command = f"{sys.executable} -c import time; time.sleep(60)"[:100]
    assert message == f"fit_twice: after the second fit a process is left running: {command!r}; end it in fit_end"
    assert finish(started[-1]) == -signal.SIGKILL


def test_error_elsewhere_reports_a_process_of_multiprocessing(started):
    (message,) = broken(Forks, "error_elsewhere")
    assert "of another plugin, a process is left running: 'forked'; end it in fit_end" in message


@pytest.mark.parametrize(("kind", "check"), [(Starts, "fit_twice"), (Forks, "cancelled_step")])
def test_processes_that_are_ended_in_fit_end_are_accepted(kind, check, started, monkeypatch):
    monkeypatch.setattr("loopkit_testing.leftovers.SECONDS", 60.0)
    check_plugin(type("Ends", (kind,), {"ends": True}), checks=[check])
    assert len(started) > 2


def test_fit_twice_reports_a_second_fit_end():
    (message,) = broken(Returns, "fit_twice")
    assert message == "fit_twice: after the first fit its fit_end was called 2 times, not 1"


HOOKS_LEFT = {
    "module": lambda learner: learner.model[0].register_forward_hook(print),
    "module ": lambda learner: learner.model[0].register_state_dict_pre_hook(print),
    "parameter": lambda learner: learner.model[0].weight.register_hook(print),
    "parameter ": lambda learner: learner.model[0].weight.register_post_accumulate_grad_hook(print),
    "optimizer": lambda learner: learner.optimizer.register_step_post_hook(print),
}


@pytest.mark.parametrize("name", HOOKS_LEFT)
def test_fit_twice_reports_hooks_that_stay(name):
    (message,) = broken(plugin("fit_end", lambda self, learner: HOOKS_LEFT[name](learner) and None), "fit_twice")
    where = {"module": "'model.0'", "parameter": "'model.0.weight'", "optimizer": "'optimizer'"}[name.strip()]
    assert message == (
        f"fit_twice: after the first fit the number of hooks on {name.strip()} {where} is 1; it was 0 before the fit"
    )


def test_fit_twice_reports_a_forward_that_is_set_on_a_module():
    def patch(self, learner):
        forward = learner.model.forward
        learner.model.forward = lambda inputs: forward(inputs)

    (message,) = broken(plugin("fit_begin", patch), "fit_twice")
    assert message.startswith("fit_twice: after the first fit the forward set on module 'model' is <function ")


def test_fit_twice_says_once_what_many_modules_have_in_common():
    (message,) = broken(plugin("fit_end", lambda self, learner: learner.model.eval() and None), "fit_twice")
    assert message.endswith("module 'model' is False; it was True before the fit (and so of 5 more)")


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [(nn.functional, "cross_entropy", "torch.nn.functional.cross_entropy"), (torch.Tensor, "item", "Tensor.item")],
)
def test_fit_twice_names_a_function_that_is_replaced_and_puts_it_back(owner, attribute, name):
    original = getattr(owner, attribute)

    def replace(self):
        setattr(owner, attribute, lambda *given, **options: original(*given, **options))

    (message,) = broken(plugin("fit_end", replace), "fit_twice")
    assert message.startswith(f"fit_twice: after the first fit the function {name} is <function ")
    assert getattr(owner, attribute) is original


class Opens:
    """Opens a file in each fit, and closes it if it is told to, or when the next one begins."""

    closes = False

    @hookimpl
    def fit_begin(self):
        self.file = open(os.devnull)  # noqa: SIM115

    @hookimpl
    def fit_end(self):
        if self.closes:
            self.file.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not say which files are open")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_fit_twice_reports_a_file_that_stays_open():
    (message,) = broken(Opens, "fit_twice")
    assert message == f"fit_twice: after the second fit a file is left open: {os.devnull!r}; close it in fit_end"
    check_plugin(type("Opens", (Opens,), {"closes": True}), checks=["fit_twice"])


KEPT_OPEN = []


def test_fit_twice_accepts_a_file_that_serves_all_fits():
    def once(self):
        if not KEPT_OPEN:
            KEPT_OPEN.append(open(os.devnull))  # noqa: SIM115

    check_plugin(plugin("fit_begin", once), checks=["fit_twice"])
    KEPT_OPEN.pop().close()


# cancelled_step


class NeedsStepEnd:
    """Believes that each step_begin is followed by a step_end."""

    def __init__(self):
        self.open = False

    @hookimpl
    def step_begin(self):
        assert not self.open, "the last step has not ended"
        self.open = True

    @hookimpl
    def step_end(self):
        self.open = False


class GradModeByHand:
    """Enters in one event what it leaves in another."""

    @hookimpl
    def loss_begin(self, phase):
        self.mode = torch.set_grad_enabled(torch.is_grad_enabled())
        self.autocast = torch.autocast("cpu", torch.bfloat16)
        self.autocast.__enter__()

    @hookimpl
    def step_end(self):
        self.autocast.__exit__(None, None, None)


def test_cancelled_step_reports_a_plugin_that_misses_step_end():
    (message,) = broken(NeedsStepEnd, "cancelled_step")
    assert message.startswith(
        "cancelled_step: with CancelStep raised in step_begin by another plugin, the fit raised AssertionError: "
        "the last step has not ended"
    )


def test_cancelled_step_reports_a_mode_that_stays_on_and_puts_it_back():
    message, depth = broken(GradModeByHand, "cancelled_step")
    assert "by another plugin, autocast on the CPU is True; it was False before the fit" in message
    assert "the depth of autocast contexts is 1; it was 0 before the fit" in depth
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


# error_elsewhere


class HandlesSignals:
    @hookimpl
    def epoch_begin(self):
        self.before = signal.signal(signal.SIGUSR1, lambda *_: None)

    @hookimpl
    def epoch_end(self):
        signal.signal(signal.SIGUSR1, self.before)


class StaysOpen:
    @hookimpl
    def epoch_begin(self):
        assert not getattr(self, "open", False), "still open"
        self.open = True

    @hookimpl
    def epoch_end(self):
        self.open = False


class FailsAtTheEnd:
    def __init__(self):
        self.open = False

    @hookimpl
    def epoch_begin(self):
        self.open = True

    @hookimpl
    def epoch_end(self):
        self.open = False

    @hookimpl
    def fit_end(self):
        if self.open:
            raise RuntimeError("an epoch has not ended")


class ThreadPerEpoch:
    @hookimpl
    def epoch_begin(self):
        self.end = threading.Event()
        self.thread = threading.Thread(target=self.end.wait, args=(20,), name="per epoch", daemon=True)
        self.thread.start()

    @hookimpl
    def epoch_end(self):
        self.end.set()
        self.thread.join()

    def __del__(self):
        if hasattr(self, "end"):
            self.end.set()


def test_error_elsewhere_reports_a_signal_handler_and_puts_it_back():
    before = signal.getsignal(signal.SIGUSR1)
    (message,) = broken(HandlesSignals, "error_elsewhere")
    assert message.startswith("error_elsewhere: after an error in ")
    assert "the handler of SIGUSR1 is <function" in message
    assert signal.getsignal(signal.SIGUSR1) == before


def test_error_elsewhere_reports_a_next_fit_that_fails():
    (message,) = broken(StaysOpen, "error_elsewhere")
    assert "the next fit raised AssertionError: still open" in message


def test_error_elsewhere_reports_a_fit_end_that_fails():
    (message,) = broken(FailsAtTheEnd, "error_elsewhere")
    assert "the fit raised ExceptionGroup: the fit failed, then fit_end" in message
    assert "RuntimeError: an epoch has not ended (in fit_end of plugin 'fails_at_the_end')" in message


class EndsAlone:
    @hookimpl
    def fit_end(self):
        pass


def test_error_elsewhere_expects_no_fit_end_of_a_fit_that_has_not_begun():
    check_plugin(EndsAlone, checks=["error_elsewhere"])


def test_error_elsewhere_reports_a_thread(monkeypatch):
    monkeypatch.setattr("loopkit_testing.leftovers.SECONDS", 0.1)
    (message,) = broken(ThreadPerEpoch, "error_elsewhere")
    assert "of another plugin, a thread is left running: 'per epoch'; end it in fit_end" in message


@pytest.mark.parametrize("careful", [True, False])
def test_error_elsewhere_compares_the_weights_after_a_failed_validation(careful):
    @contextmanager
    def signs(learner):
        kept = [p.data for p in learner.model.parameters()]

        def put_back():
            for p, data in zip(learner.model.parameters(), kept, strict=True):
                p.data = data

        for p in learner.model.parameters():
            p.data = p.data.sign()
        try:
            yield
        except Exception:
            if careful:
                put_back()
            raise
        put_back()

    swaps = plugin(
        "epoch_context", lambda self, learner, phase: None if phase.training else signs(learner), updates=("params",)
    )
    if careful:
        check_plugin(swaps, checks=["error_elsewhere"])
    else:
        (message,) = broken(swaps, "error_elsewhere")
        assert "after an error in a step_end of a validation the weights are not those before it: weights['" in message


class Fails:
    """Cannot end what it has not begun."""

    hook = "step_context"

    def __init__(self):
        self.open = 0

    @hookimpl
    def move_batch(self, batch):
        self.open += 1
        return batch

    @hookimpl
    def step_end(self):
        self.open -= 1

    @hookimpl
    def step_cancelled(self):
        self.open -= 1

    @hookimpl
    def fit_begin(self):
        assert self.open == 0, "a step of the last fit is open"


def test_error_elsewhere_raises_in_every_hook():
    (message,) = broken(Fails, "error_elsewhere")
    assert "after an error in step_begin of another plugin, the next fit raised AssertionError: a step of" in message


class Catches:
    """Lets go after an error, but not when the process is told to end."""

    @hookimpl
    @contextmanager
    def epoch_context(self):
        before = torch.is_grad_enabled()
        try:
            yield
        except Exception:
            torch.set_grad_enabled(before)
            raise
        except BaseException:
            torch.set_default_dtype(torch.float64)
            raise


def test_error_elsewhere_raises_what_is_no_exception():
    (message,) = broken(Catches, "error_elsewhere")
    assert message.startswith("error_elsewhere: after an exit in step_end, the default dtype is torch.float64; it was")


# What is left behind is put back


LEFTOVERS = {
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast on the CPU": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "autocast's dtype on the CPU": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast's cache": (lambda: torch.set_autocast_cache_enabled(False), torch.is_autocast_cache_enabled),
    "the depth of autocast contexts": (
        torch.autocast_increment_nesting,
        lambda: (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
    ),
    "the default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "the default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "the number of threads of torch": (lambda: torch.set_num_threads(2), torch.get_num_threads),
    "torch.use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "anomaly detection": (lambda: torch.autograd.set_detect_anomaly(True, False), torch.is_anomaly_enabled),
    "torch.backends.cudnn.benchmark": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.backends.cudnn.deterministic,
    ),
    "the precision of float32 products": (
        lambda: torch.set_float32_matmul_precision("high"),
        torch.get_float32_matmul_precision,
    ),
    "the global hooks of modules": (
        lambda: nn.modules.module.register_module_forward_hook(lambda *given: None),
        lambda: list(nn.modules.module._global_forward_hooks),
    ),
    "sys.excepthook": (lambda: setattr(sys, "excepthook", print), lambda: sys.excepthook),
    "threading.excepthook": (lambda: setattr(threading, "excepthook", print), lambda: threading.excepthook),
    "the handlers of loggers": (
        lambda: logging.getLogger().addHandler(logging.NullHandler()),
        lambda: list(logging.getLogger().handlers),
    ),
    "the root logger's level": (
        lambda: logging.getLogger().setLevel(logging.DEBUG),
        lambda: logging.getLogger().level,
    ),
    "the garbage collector": (gc.disable, gc.isenabled),
    "the working directory": (lambda: os.chdir("/"), os.getcwd),
    "os.environ": (lambda: os.environ.update(LEFT_BEHIND="1"), lambda: dict(os.environ)),
    "sys.path": (lambda: sys.path.append("/left_behind"), lambda: list(sys.path)),
    "warnings.filters": (lambda: warnings.simplefilter("once", UserWarning), lambda: list(warnings.filters)),
    "warnings.showwarning": (lambda: setattr(warnings, "showwarning", print), lambda: warnings.showwarning),
    "the locale": (lambda: locale.setlocale(locale.LC_CTYPE, "C"), lambda: locale.setlocale(locale.LC_ALL)),
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_fit_twice_names_what_is_left_behind_and_puts_it_back(name):
    leave, read = LEFTOVERS[name]
    before = read()
    messages = broken(plugin("fit_end", lambda self: leave() and None), "fit_twice")
    assert any(message.startswith(f"fit_twice: after the first fit {name} is ") for message in messages)
    assert read() == before


def test_check_plugin_says_once_what_is_left_in_the_process():
    names = ["sys.excepthook", "os.environ", "sys.path", "warnings.filters", "warnings.showwarning", "the locale"]

    def leave(self):
        for name in names:
            LEFTOVERS[name][0]()

    with pytest.raises(ContractError) as caught:
        check_plugin(plugin("fit_end", leave))
    for name, message in zip(names, caught.value.broken, strict=True):
        assert message.startswith(f"fit_twice: after the first fit {name} is ")


def change_variables():
    os.environ.update(LEFT_BEHIND="1", CHANGED="after")
    del os.environ["REMOVED"]


@pytest.mark.parametrize(
    ("leave", "told"),
    [
        (change_variables, "os.environ is {}'LEFT_BEHIND' added; 'REMOVED' removed; 'CHANGED' changed"),
        (lambda: sys.path.append("/left_behind"), "sys.path is {}'/left_behind' added"),
        (lambda: sys.path.remove("/found"), "sys.path is {}'/found' removed"),
        (
            LEFTOVERS["warnings.filters"][0],
            "warnings.filters is {}('once', None, <class 'UserWarning'>, None, 0) added",
        ),
    ],
    ids=["environment", "more paths", "fewer paths", "filters"],
)
def test_fit_twice_says_of_what_has_many_entries_which_differ(leave, told, monkeypatch):
    monkeypatch.setenv("CHANGED", "before")
    monkeypatch.setenv("REMOVED", "1")
    monkeypatch.setattr(sys, "path", [*sys.path, "/found"])
    before = dict(os.environ), list(sys.path), list(warnings.filters)
    (message,) = broken(plugin("fit_end", lambda self: leave()), "fit_twice")
    assert message == f"fit_twice: after the first fit {told.format('not as it was before the fit: ')}"
    assert (dict(os.environ), sys.path, warnings.filters) == before


def test_warnings_are_decided_by_the_filters_that_are_put_back():
    def ignore(self):
        warnings.simplefilter("ignore")
        warnings.warn("a warning of a test", stacklevel=1)

    broken(plugin("fit_end", ignore), "fit_twice")
    with pytest.raises(UserWarning, match="a warning of a test"):
        warnings.warn("a warning of a test", stacklevel=1)


def test_what_an_import_does_is_not_taken_for_what_the_plugin_does(tmp_path, monkeypatch):
    (tmp_path / "sets_a_variable.py").write_text("import os\nos.environ['SET_BY_AN_IMPORT'] = '1'\n")
    monkeypatch.syspath_prepend(tmp_path)

    def fit_begin(self):
        import_module("sets_a_variable")

    check_plugin(plugin("fit_begin", fit_begin), checks=["fit_twice"])
    assert sys.modules.pop("sets_a_variable")


def test_checks_put_back_what_an_error_leaves_behind():
    def fails(self):
        torch.set_grad_enabled(False)
        raise ValueError

    for check in ("declared_access", "exact_resume", "bounded_memory", "unknown_phases"):
        assert broken(plugin("step_begin", fails), check)[0].startswith(f"{check}: ")
        assert torch.is_grad_enabled()


def test_every_setting_has_a_test():
    assert {*LEFTOVERS, "sys.stdout", "sys.stderr", "the number of atexit functions"} == set(SETTINGS)


# state_round_trip


class Stateful(MeanLoss):
    """A plugin whose parts can be broken one by one."""

    kind = "good"

    def state_dict(self):
        state = super().state_dict()
        if self.kind == "object":
            state["shape"] = self.total.shape
        elif self.kind == "key":
            state["by"] = {(1, 2): 3}
        elif self.kind == "graph":
            state["total"] = self.total.requires_grad_() * 1
        elif self.kind == "alias":
            state["history"] = self.history
        return state

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.kind == "forgets":
            self.history = []
        elif self.kind == "takes":
            self.history = state["history"]


def stateful(kind):
    return type("Stateful", (Stateful,), {"kind": kind})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("object", "state_dict()['shape'] is torch.Size: state is made of None, bool, int"),
        ("key", "state_dict()['by'] has the key (1, 2): keys are strings or ints"),
        ("graph", "state_dict()['total'] is a tensor with a graph"),
        ("alias", "what it returned was changed by later training, at the length of state_dict()['history']"),
        ("takes", "what load_state_dict was given was changed by later training, at the length of state['history']"),
        ("forgets", "has loaded the state does not return it again: the length of state_dict()['history'] differs"),
    ],
)
def test_state_round_trip_names_what_is_wrong(kind, text):
    (message,) = broken(stateful(kind), "state_round_trip")
    assert text in message


def test_state_round_trip_refuses_one_method_without_the_other():
    class Half(Counting):
        def state_dict(self):
            return {}

    assert broken(Half, "state_round_trip") == [
        "state_round_trip: it has only state_dict: state_dict and load_state_dict go together"
    ]


def test_state_round_trip_reports_a_state_dict_that_changes_something():
    class Empties(MeanLoss):
        def state_dict(self):
            state, self.history = super().state_dict(), []
            return state

    (message,) = broken(Empties, "state_round_trip")
    assert "called twice in a row it returns something else: the length of state_dict()['history'] differs" in message


class Warmup:
    """The lr rises from step to step; whether the count is saved is up to the subclass."""

    saves = True

    def __init__(self):
        self.steps = 0

    @hookimpl(updates=("optimizer.lr",))
    def update_begin(self, step):
        self.steps += 1
        step.optimizer.param_groups[0]["lr"] = 0.01 * self.steps

    def state_dict(self):
        return {"steps": self.steps} if self.saves else {}

    def load_state_dict(self, state):
        self.steps = state.get("steps", 0)


def test_state_round_trip_compares_the_parameters():
    check_plugin(Warmup, checks=["state_round_trip"])
    forgetful = type("Warmup", (Warmup,), {"saves": False})
    (message,) = broken(forgetful, "state_round_trip")
    assert "resuming from saved state gives other parameters than an uninterrupted run: weights['model.0." in message


def test_state_round_trip_compares_the_state():
    class Resets(Warmup):
        def __init__(self):
            super().__init__()
            self.fits = 0

        @hookimpl
        def fit_begin(self):
            self.fits += 1

        def state_dict(self):
            return {"steps": self.steps, "odd": self.fits % 2 if self.fits > 1 else 1}

    (message,) = broken(Resets, "state_round_trip")
    assert "gives another state than an uninterrupted run: state_dict()['odd'] differs" in message


class Timed(Counting):
    made = itertools.count()

    def __init__(self):
        super().__init__()
        self.seconds = next(self.made)

    def state_dict(self):
        return {"steps": self.steps, "seconds": self.seconds}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize("check", ["state_round_trip", "exact_resume"])
def test_checks_of_state_leave_out_volatile_keys(check):
    check_plugin(Timed, checks=[check], volatile=["seconds"])
    check_plugin(type("Timed", (Timed,), {"volatile": ("seconds",)}), checks=[check])
    (message,) = broken(Timed, check)
    assert "seconds" in message


class SamplesByTheClock:
    """Logs a number now and then, so that another run has another number of them."""

    provides = "observer"
    calls = itertools.count()

    def __init__(self, name="resources/ms"):
        self.logged = name

    @hookimpl
    def step_end(self, learner):
        if next(self.calls) % 5 == 0:
            learner.log(self.logged, 1.0)


@pytest.mark.parametrize("key", ["resources/ms", "ms", "resources/*"])
def test_volatile_covers_how_many_rows_there_are(key):
    check_plugin(SamplesByTheClock, checks=["exact_resume"], volatile=[key])


def test_rows_that_are_not_volatile_are_compared():
    (message,) = broken(SamplesByTheClock, "exact_resume")
    assert "logs something else" in message


# exact_resume


class KeepsCount:
    """Its lr depends on what it has seen; subclasses lose that in some way."""

    name = "keeps_count"

    def __init__(self):
        self.steps = 0

    @hookimpl(updates=("optimizer.lr",))
    def update_begin(self, learner, step):
        self.steps += 1
        step.optimizer.param_groups[0]["lr"] = 0.01 * self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Stateless:
    """What it keeps from step to step is not saved at all."""

    name = "keeps_count"

    def __init__(self):
        self.steps = 0

    @hookimpl(updates=("optimizer.lr",))
    def update_begin(self, step):
        self.steps += 1
        step.optimizer.param_groups[0]["lr"] = 0.01 * self.steps


class ResetByFit(KeepsCount):
    """Forgets at ``fit_begin``, which comes again in a resumed run."""

    @hookimpl
    def fit_begin(self):
        self.steps = 0


class RefusesState(KeepsCount):
    def load_state_dict(self, state):
        if state["steps"]:
            raise ValueError("made for another run")


class LogsSince(KeepsCount):
    """Logs how long it has been there."""

    def __init__(self):
        super().__init__()
        self.since = 0

    @hookimpl
    def step_end(self, learner):
        self.since += 1
        learner.log("since", self.since)


def test_exact_resume_passes_a_plugin_that_saves_what_it_keeps():
    check_plugin(KeepsCount, checks=["exact_resume"])


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (Stateless, "the run ends with other bits than one that went through: models.model.0.weight: "),
        (ResetByFit, "come again in a resumed run; learner.current.resumed and epoch.resumed are True there"),
        (RefusesState, "it could not resume: raised StateError: "),
        (LogsSince, "the run logs something else than one that went through: logged["),
    ],
)
def test_exact_resume_names_the_edge_and_what_differs(factory, text):
    message = broken(factory, "exact_resume")[0]
    assert re.match(r"exact_resume: killed after (step \d of )?phase '\w+' in epoch \d", message)
    assert text in message


class WindowCount:
    """Counts the backwards of an accumulation window; whether the count is saved is up to the subclass."""

    def __init__(self):
        self.count = 0

    @hookimpl
    def backward_end(self):
        self.count += 1

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        for p in step.params:
            p.grad.mul_(self.count)
        self.count = 0


class SavedWindowCount(WindowCount):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_exact_resume_kills_within_a_window_of_accumulation():
    check_plugin(SavedWindowCount, checks=["exact_resume"])
    (message,) = broken(WindowCount, "exact_resume")
    assert re.match(r"exact_resume: killed after step \d of phase 'train' in epoch \d with accumulate=2, ", message)


def test_exact_resume_reports_weights_that_are_swapped_while_it_is_saved():
    messages = broken(Hidden, "exact_resume")
    assert any("other bits than one that went through: models.model." in message for message in messages)


def test_exact_resume_is_the_same_each_time():
    assert broken(ResetByFit, "exact_resume") == broken(ResetByFit, "exact_resume")


# options_kept


class Decays:
    def __init__(self, scale=1.0, steps=(1, 2)):
        self.scale = scale
        self.steps = list(steps)

    @hookimpl
    def epoch_begin(self):
        self.scale *= 0.5
        self.steps.pop()


def test_options_kept_names_the_options_that_a_fit_has_changed():
    messages = broken(Decays, "options_kept", problem=lambda: one_pass(tiny_problem()))
    assert messages == [
        "options_kept: the option 'scale' was 1.0 before a fit and is 0.25 after it: keep what changes under another "
        "name",
        "options_kept: the option 'steps' was (1, 2) before a fit and is () after it: keep what changes under another "
        "name",
    ]


def one_pass(problem):
    problem.val = None
    return problem


# bounded_memory


class KeepsLosses:
    """Of each step, until the pass ends or for ever."""

    ever = False

    def __init__(self):
        self.losses = []

    @hookimpl
    def epoch_begin(self):
        if not self.ever:
            self.losses = []

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        self.losses.append(step.loss.detach())


class KeepsPasses(KeepsLosses):
    @hookimpl(reads=("loss",))
    def step_end(self, step):
        if step.last:
            self.losses.append(step.loss.detach())

    ever = True


class KeepsTen(KeepsLosses):
    @hookimpl(reads=("loss",))
    def step_end(self, step):
        self.losses = [*self.losses[-9:], step.loss.detach()]


@pytest.mark.parametrize("ever", [False, True])
def test_bounded_memory_reports_what_grows_with_the_steps(ever):
    (message,) = broken(type("Keeps", (KeepsLosses,), {"ever": ever}), "bounded_memory")
    assert message.startswith("bounded_memory: within an epoch it keeps about 1 tensors more with each step: keep sums")


def test_bounded_memory_reports_what_grows_with_the_passes():
    (message,) = broken(KeepsPasses, "bounded_memory")
    assert message.startswith("bounded_memory: with each epoch it keeps about 2 tensors more: let those go in")


def test_bounded_memory_accepts_a_bounded_number():
    frozen = gc.get_freeze_count()
    check_plugin(KeepsTen, checks=["bounded_memory"])
    assert gc.get_freeze_count() == frozen


class KeepsHundred(KeepsLosses):
    ever = True

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        self.losses = [*self.losses[-99:], step.loss.detach()]


class KeepsBytes:
    def __init__(self):
        self.rows = []

    @hookimpl
    def step_end(self):
        self.rows.append(bytes(2000))


class KeepsNumbers(KeepsBytes):
    @hookimpl
    def step_end(self, step):
        self.rows.append(step.index / 7)


def test_bounded_memory_accepts_what_is_full_after_a_hundred_steps_and_a_number_of_each_step():
    check_plugin(KeepsHundred, checks=["bounded_memory"])
    check_plugin(KeepsNumbers, checks=["bounded_memory"])


def test_bounded_memory_reports_objects_that_are_no_tensors():
    (message,) = broken(KeepsBytes, "bounded_memory")
    assert re.match(r"bounded_memory: within an epoch it keeps about 2\d\d\d bytes more with each step: ", message)


class KeepsMegabyte(KeepsBytes):
    """At every 25th step."""

    steps = 0

    @hookimpl
    def step_end(self):
        self.steps += 1
        if self.steps % 25 == 0:
            self.rows.append(bytes(1_000_000))


def test_bounded_memory_reports_what_is_kept_at_few_steps():
    (message,) = broken(KeepsMegabyte, "bounded_memory")
    assert re.match(r"bounded_memory: within an epoch it keeps about \d{5} bytes more with each step: ", message)


class KeepsTensorAtFew(KeepsMegabyte):
    @hookimpl
    def step_end(self):
        self.steps += 1
        if self.steps % 40 == 0:
            self.rows.append(torch.zeros(1))


def test_bounded_memory_reports_a_tensor_at_few_steps():
    (message,) = broken(KeepsTensorAtFew, "bounded_memory")
    assert message.startswith("bounded_memory: with each epoch it keeps about 3")


class KeepsBytesOfPasses(KeepsBytes):
    @hookimpl
    def step_end(self):
        pass

    @hookimpl
    def phase_end(self, phase):
        if phase.training:
            self.rows.append(bytes(1_000_000))


def test_bounded_memory_reports_bytes_that_grow_with_the_passes():
    (message,) = broken(KeepsBytesOfPasses, "bounded_memory")
    assert re.match(r"bounded_memory: with each epoch it keeps about 100\d{4} bytes more: let those go in", message)


class KeepsLast:
    def __init__(self, count, cleared=False):
        self.losses = deque(maxlen=count)
        self.cleared = cleared

    @hookimpl
    def epoch_begin(self):
        if self.cleared:
            self.losses.clear()

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        self.losses.append(step.loss.detach().clone())


@pytest.mark.parametrize(
    ("count", "cleared"), [pytest.param(200, False, marks=pytest.mark.slow), (300, False), (50, True)]
)
def test_bounded_memory_accepts_the_last_losses(count, cleared):
    check_plugin(lambda: KeepsLast(count, cleared), checks=["bounded_memory"])


class KeepsUntilFull(KeepsLosses):
    """As a buffer that is written and emptied."""

    ever = True

    def __init__(self, size):
        super().__init__()
        self.size = size

    @hookimpl(reads=("loss",))
    def step_end(self, step):
        self.losses = [] if len(self.losses) + 1 == self.size else [*self.losses, step.loss.detach()]


# fuller at each count, or at the end of each pass
@pytest.mark.parametrize("size", [14, 128, *(pytest.param(size, marks=pytest.mark.slow) for size in (55, 115))])
def test_bounded_memory_accepts_a_buffer_that_is_emptied(size):
    check_plugin(lambda: KeepsUntilFull(size), checks=["bounded_memory"])


def test_bounded_memory_reports_one_tensor_that_gets_longer():
    class Lengthens:
        def __init__(self):
            self.rows = torch.zeros(0)

        @hookimpl
        def step_end(self):
            self.rows = torch.cat([self.rows, torch.zeros(500)])

    (message,) = broken(Lengthens, "bounded_memory")
    assert re.match(r"bounded_memory: within an epoch it keeps about 2\d\d\d bytes more with each step: ", message)


# learner_freed


KEPT_ALIVE = []


class KeepsLearner:
    @hookimpl
    def fit_begin(self, learner):
        self.learner = learner


def test_learner_freed_reports_a_plugin_that_holds_it():
    (message,) = broken(KeepsLearner, "learner_freed")
    assert message.startswith("learner_freed: it holds the learner, and so the model, after the fit")


def test_learner_freed_reports_what_outlives_the_plugin():
    (message,) = broken(plugin("fit_begin", lambda self, learner: KEPT_ALIVE.append(learner)), "learner_freed")
    KEPT_ALIVE.clear()
    assert message.startswith("learner_freed: something that outlives it holds the learner")


def test_learner_freed_accepts_a_plugin_that_lets_go_of_it():
    class LetsGo(KeepsLearner):
        @hookimpl
        def fit_end(self):
            self.learner = None

    check_plugin(LetsGo, checks=["learner_freed"])


# no_graph_kept


def keep(attribute, detach=False):
    def step_end(self, step):
        value = getattr(step, attribute) if attribute else step
        self.kept = value.detach() if detach else value

    return plugin("step_end", step_end, reads=("*",))


@pytest.mark.parametrize("attribute", ["loss", "outputs", ""])
def test_no_graph_kept_reports_a_kept_step_loss_or_outputs(attribute):
    (message,) = broken(keep(attribute), "no_graph_kept")
    assert "it keeps the graph of step 0 alive while step 1 runs" in message


@pytest.mark.parametrize("attribute", ["loss", "outputs"])
def test_no_graph_kept_accepts_what_is_detached(attribute):
    check_plugin(keep(attribute, detach=True), checks=["no_graph_kept"])


def test_no_graph_kept_switches_the_garbage_collector_on_again():
    check_plugin(Counting, checks=["no_graph_kept"])
    assert gc.isenabled()


# no_device_sync


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda loss: loss.item(), "item() on a tensor"),
        (lambda loss: loss.tolist(), "tolist() on a tensor"),
        (lambda loss: loss.cpu(), "cpu() on a tensor"),
        (lambda loss: loss.to("cpu"), "to() on a tensor"),
        (lambda loss: float(loss), "float() on a tensor"),
        (lambda loss: bool(loss > 1), "bool() on a tensor"),
        (lambda loss: f"{loss:.3f}", "format() on a tensor"),
        (lambda loss: loss.reshape(1)[loss.reshape(1) > 0], "tensor[mask]"),
        (lambda loss: torch.where(loss.reshape(1) > 0), "where() on a tensor"),
    ],
)
def test_no_device_sync_names_hook_and_call(read, text):
    def hook(self, step):
        read(step.loss.detach())

    (message,) = broken(plugin("backward_begin", hook), "no_device_sync")
    assert message.startswith("no_device_sync: backward_begin calls ")
    assert text in message
    assert 'syncs = ("backward_begin",)' in message


@pytest.mark.parametrize("syncs", [("backward_begin",), True])
def test_no_device_sync_accepts_declared_hooks(syncs):
    factory = plugin("backward_begin", lambda self, step: step.loss.item())

    def make():
        made = factory()
        made.syncs = syncs
        return made

    check_plugin(make, checks=["no_device_sync"])


def test_no_device_sync_accepts_reading_at_the_end_of_the_epoch():
    check_plugin(MeanLoss, checks=["no_device_sync"])


def test_no_device_sync_watches_contexts():
    @contextmanager
    def context(step):
        yield
        step.outputs.sum().item()

    (message,) = broken(plugin("step_context", lambda self, step: context(step)), "no_device_sync")
    assert "step_context calls item() on a tensor" in message


def test_no_device_sync_does_not_count_the_default_step():
    def adam():
        problem = tiny_problem()
        problem.optimizer = lambda params: torch.optim.Adam(params, foreach=False)  # reads its step counter
        return problem

    run_default = plugin("optimizer_step", lambda self, default: default())
    check_plugin(run_default, problem=adam, checks=["no_device_sync"])


def test_no_device_sync_does_not_count_values_that_are_read_late():
    from loopkit.plugins.late import LateValues, read

    def late(self, step):
        values = LateValues()
        values.send({"loss": step.loss})
        values.arrived()

    check_plugin(plugin("step_end", late, phase=TrainingPhase), checks=["no_device_sync"])
    now = plugin("step_end", lambda self, step: read({"loss": step.loss}) and None, phase=TrainingPhase)
    assert broken(now, "no_device_sync")[0].startswith("no_device_sync: step_end calls ")


def test_no_device_sync_watches_reads_that_come_rarely():
    class Fiftieth:
        def __init__(self):
            self.steps = 0

        @hookimpl(phase=TrainingPhase)
        def step_end(self, step):
            self.steps += 1
            if self.steps % 50 == 0:
                step.loss.item()

    (message,) = broken(Fiftieth, "no_device_sync")
    assert "step_end calls item() on a tensor" in message


# unknown_phases


def test_unknown_phases_reports_each_phase_that_breaks_it():
    def read_outputs(self, step):
        assert step.outputs is not None

    messages = broken(plugin("backward_begin", read_outputs, reads=("outputs",)), "unknown_phases")
    assert len(messages) == 2
    assert "under a phase with two models and optimizers" in messages[0]
    assert "raised StepStateError: step.outputs is not set" in messages[0]
    assert "limit the hook with @hookimpl(phase=...)" in messages[0]
    assert "under a phase that sets no attribute of its steps" in messages[1]


def test_unknown_phases_reports_a_plugin_that_waits_for_a_backward():
    class Expects:
        @hookimpl
        def step_begin(self):
            self.seen = 0

        @hookimpl
        def backward_end(self):
            self.seen += 1

        @hookimpl
        def step_end(self, phase):
            assert not phase.training or self.seen == 1, f"{self.seen} backwards"

    messages = broken(Expects, "unknown_phases")
    assert ["0 backwards" in messages[0], "2 backwards" in messages[1], "2 backwards" in messages[2]] == [True] * 3


def test_unknown_phases_reports_a_plugin_that_does_not_bear_accumulation():
    class EveryStep:
        @hookimpl
        def step_begin(self):
            self.updated = False

        @hookimpl
        def update_end(self):
            self.updated = True

        @hookimpl(phase=TrainingPhase)
        def step_end(self):
            assert self.updated, "no update"

    (message,) = broken(EveryStep, "unknown_phases")
    assert "with accumulate=3, the fit raised AssertionError: no update" in message


def test_unknown_phases_accepts_hooks_limited_to_a_phase():
    check_plugin(plugin("step_end", read_loss, phase=TrainingPhase, reads=("loss",)), checks=["unknown_phases"])


def test_unknown_phases_validates_outside_of_a_fit():
    class Prepared:
        @hookimpl
        def fit_begin(self):
            self.steps = 0

        @hookimpl
        def step_end(self):
            self.steps += 1

    (message,) = broken(Prepared, "unknown_phases")
    assert "outside of a fit, where fit_begin does not come, a validation raised AttributeError: " in message


# no_undeclared_effect


@pytest.mark.parametrize(
    ("hook", "function"),
    [("step_begin", draw), ("backward_end", change_grads), ("backward_begin", lambda self, step: scale_seed(step))],
)
def test_no_undeclared_effect_compares_with_a_fit_without_it(hook, function):
    (message,) = broken(plugin(hook, function), "no_undeclared_effect")
    assert "it declares no change, yet a fit with it gives other parameters than one without it: weights['" in message


def scale_seed(step):
    step.seed = step.seed * 0.5


@pytest.mark.parametrize(
    "factory",
    [
        plugin("step_begin", draw, updates=("rng",)),
        plugin("update_begin", lambda self, learner: learner.stop("enough")),
        plugin("update_begin", lambda self, step: step.skip_update("no") if step.index else None),
    ],
    ids=["declared", "stops", "skips"],
)
def test_no_undeclared_effect_accepts_declared_changes_stops_and_votes(factory):
    check_plugin(factory, checks=["no_undeclared_effect"])


# check_plugin


def test_check_plugin_reports_all_broken_promises_together():
    def sloppy(self, step):
        self.kept = step.outputs
        step.outputs.tolist()

    with pytest.raises(ContractError) as caught:
        check_plugin(
            plugin("backward_begin", sloppy), skip=["bounded_memory", "paused_in_process", "evaluated_between"]
        )
    checks = [message.partition(":")[0] for message in caught.value.broken]
    assert checks == ["declared_access", "no_graph_kept", "no_device_sync", "unknown_phases", "unknown_phases"]
    assert str(caught.value).startswith("plugin 'offender' breaks 5 promises:\n  1. declared_access: ")


def test_check_plugin_says_once_that_no_fit_succeeds():
    with pytest.raises(ContractError) as caught:
        check_plugin(plugin("step_end", lambda self: 1 / 0))
    (message,) = caught.value.broken
    assert message.startswith(
        "declared_access, and all others: the fit raised ZeroDivisionError: division by zero (in "
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("factory", "check"),
    [
        (plugin("fit_end", lambda self: torch.set_grad_enabled(False) and None), "fit_twice"),
        (stateful("forgets"), "state_round_trip"),
        (plugin("step_begin", draw), "declared_access"),
    ],
)
def test_check_plugin_says_once_what_several_checks_find(factory, check):
    with pytest.raises(ContractError) as caught:
        check_plugin(factory, skip=["bounded_memory"])  # which takes the longest, and has a word of its own
    assert [message.partition(":")[0] for message in caught.value.broken] == [check]


def test_check_plugin_skips_checks():
    check_plugin(plugin("backward_begin", read_loss), skip=["declared_access", "unknown_phases", "bounded_memory"])


def test_contract_error_is_a_loopkit_and_an_assertion_error():
    assert issubclass(ContractError, LoopkitError)
    assert issubclass(ContractError, AssertionError)


def test_check_plugin_keeps_the_cause_of_an_error():
    with pytest.raises(ContractError) as caught:
        check_plugin(plugin("step_end", lambda self: 1 / 0), checks=["declared_access"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "declared_access: raised ZeroDivisionError: division by zero (in step_end of plugin 'offender'" in str(
        caught.value
    )


def test_check_plugin_refuses_unknown_checks():
    with pytest.raises(PluginError, match=r"no check is called 'fit_twise' \(did you mean 'fit_twice'\?\)"):
        check_plugin(Counting, checks=["fit_twise"])


def test_check_plugin_refuses_a_factory_that_is_none():
    one = Counting()
    with pytest.raises(PluginError, match="it must make a fresh plugin at each call"):
        check_plugin(lambda: one)


def test_check_plugin_leaves_the_generators_alone():
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    check_plugin(Counting, checks=["any_list_order", "no_graph_kept", "exact_resume"])  # which draw or seed
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Surveyor:
    volatile = ("surveys",)

    def __init__(self):
        self.surveys = 0

    @hookimpl
    def survey_begin(self):
        self.surveys += 1


def test_check_plugin_runs_phases_of_your_own():
    check_plugin(Surveyor, phases=[SurveyPhase()], skip=["bounded_memory"])


def test_check_plugin_watches_events_of_your_own():
    offender = plugin("survey_begin", lambda self, step: step.batch)
    (message,) = broken(offender, "declared_access", phases=[SurveyPhase()])
    assert "survey_begin of plugin 'offender' reads 'batch'" in message


def test_check_plugin_takes_a_problem_of_your_own():
    class Distance(Phase):
        name = "distance"
        training = True
        emits = TrainingPhase.emits

        def step(self, learner, step):
            step.loss = learner.model["net"](step.batch).square().mean()
            step.backward(step.loss, "net")
            step.update("net")

    def problem():
        net = nn.Linear(2, 1)
        sgd = {"net": lambda params: torch.optim.SGD(params, lr=0.1)}
        return Problem({"net": net}, None, sgd, [torch.ones(3, 2)] * 3)

    check_plugin(Counting, phases=[Distance()], problem=problem, skip=["bounded_memory"])


# overhead


class Sleeps:
    """Takes known times."""

    microseconds = 0

    def _sleep(self, microseconds):
        Sleeps.microseconds += microseconds

    @hookimpl
    def step_begin(self):
        self._sleep(20)

    @hookimpl
    def loss_begin(self):
        self._sleep(10)

    @hookimpl
    def step_end(self):
        pass

    @hookimpl
    @contextmanager
    def step_context(self):
        self._sleep(1)
        yield
        self._sleep(2)


def test_overhead_measures_each_hook_and_both_ends_of_a_context(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 1000 * Sleeps.microseconds)
    assert overhead(Sleeps) == {"loss_begin": 10, "step_begin": 20, "step_context": 3, "step_end": 0}


def test_overhead_goes_by_the_clock_of_the_host():
    assert overhead(plugin("step_end", lambda self: time.sleep(0.001)))["step_end"] >= 1000


def test_overhead_leaves_companions_out():
    assert set(overhead(lambda: (Counting(), Sleeps()))) == {"step_end"}


# two_processes: what the started processes do, in forked ones


class OwnSteps:
    """Changes parameters by what one process alone knows."""

    @hookimpl(updates=("params",))
    def update_end(self, learner, step):
        with torch.no_grad():
            for p in step.params:
                p.add_(learner.world.rank)


class OwnCount(Counting):
    """Its state is another one in each process."""

    volatile = ()

    @hookimpl
    def fit_end(self, learner):
        self.steps += learner.world.rank

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def together(factory):
    return compared(run(lambda rank: train_together(Case(factory)), 2, timeout=60))


@pytest.mark.parametrize(
    "factory", [lambda: ClipGradNorm(0.5), History, lambda: DDP(timeout=30)], ids=["clip", "history", "ddp"]
)
def test_two_processes_passes(factory):
    assert together(factory) == []


def test_two_processes_reports_other_parameters():
    (message,) = together(OwnSteps)
    assert message.startswith("two processes that train together: the fit raised WorldError: the processes have parted")


def test_two_processes_reports_other_states():
    (message,) = together(OwnCount)
    assert message.startswith("two processes that train together have other states each: state_dict()['steps'] differs")


class KeepsARelativeFolder:
    def __init__(self):
        self.folder = Path("runs")

    @hookimpl(reads=("progress",))
    def phase_end(self, learner):
        self.folder.mkdir(exist_ok=True)
        (self.folder / "epochs").write_text(str(learner.progress.epochs))


def test_files_within_takes_a_folder_for_moments_that_is_a_link(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "link"))
    check_plugin(KeepsARelativeFolder, checks=["files_within"])


# plugin_contract

SUITE = """
from loopkit import hookimpl
from loopkit.plugins import ClipGradNorm
from loopkit_testing import plugin_contract


class Clips(ClipGradNorm):
    name = "clips"


class Fails:
    @hookimpl
    def step_end(self, step):
        step.mine = 1


class Divides:
    @hookimpl
    def step_end(self):
        return 1 / 0


test_clips = plugin_contract(lambda: Clips(1.0), skip={"any_list_order": "it is too long"})
test_fails = plugin_contract(Fails)
test_divides = plugin_contract(Divides)
"""


def suite(directory, *words, marker=True):
    (directory / "test_suite.py").write_text(SUITE)
    marks = 'markers = ["two_processes: starts two"]' if marker else ""
    (directory / "pyproject.toml").write_text(
        f'[tool.pytest.ini_options]\naddopts = "--strict-markers"\nfilterwarnings = ["error"]\n{marks}\n'
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=300).stdout


def test_plugin_contract_is_one_readable_test_for_each_promise(tmp_path):
    chosen = "any_list_order or declared_access or overhead or (divides and fit_twice)"
    said = suite(tmp_path, "-rAs", "-k", chosen, "-m", "not two_processes")
    assert "PASSED test_suite.py::test_clips[declared_access]" in said
    assert "it is too long" in said
    assert "FAILED test_suite.py::test_fails[declared_access] - " in said
    assert "1. declared_access: step_end of plugin 'fails' changes 'step.mine', which it does not declare" in said
    assert "def check_plugin" not in said
    assert ">       return 1 / 0" in said
    assert re.search(r"^update_begin +\d+\.\d us$", said, re.MULTILINE)


@pytest.mark.slow
def test_plugin_contract_starts_two_processes(tmp_path):
    said = suite(tmp_path, "-rA", "-k", "two_processes", marker=False)
    assert "PASSED test_suite.py::test_clips[two_processes]" in said
    assert "FAILED test_suite.py::test_divides[two_processes]" in said
    assert "ZeroDivisionError: division by zero" in said


def test_plugin_contract_has_a_test_for_each_promise():
    def ids(**options):
        (mark,) = plugin_contract(Counting, **options).pytestmark
        return [param.id for param in mark.args[1]]

    assert ids() == [name for name in PROMISES if name != "declaration"]
    assert ids(name="counting") == list(PROMISES)


def test_plugin_contract_refuses_to_skip_what_is_unknown_or_has_no_reason():
    with pytest.raises(PluginError, match=r"no check is called 'overheads' \(did you mean 'overhead'\?\)"):
        plugin_contract(Counting, skip={"overheads": "slow"})
    with pytest.raises(PluginError, match="'overhead' has no reason; give one"):
        plugin_contract(Counting, skip={"overhead": ""})


# declaration


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretends that a distribution with these entry points is installed."""

    def install(plugins):
        folder = tmp_path / "kit_offender-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kit-offender\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[loopkit.plugins]\n{plugins}\n")
        (tmp_path / "kit_offender.py").write_text(
            "from loopkit import hookimpl\n\n\nclass Kit:\n    provides = 'noise'\n\n"
            "    @hookimpl\n    def step_end(self):\n        pass\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "kit_offender", raising=False)
        import kit_offender

        return kit_offender.Kit

    return install


def declared_wrong(factory, name):
    return declaration(Case(factory, name=name))


def test_declaration_accepts_what_is_so(installed):
    kit = installed("kit = kit_offender:Kit")
    assert declared_wrong(kit, "kit") == []
    assert declared_wrong(lambda: ClipGradNorm(1.0), "clip_grad_norm") == []


def test_declaration_reports_a_plugin_that_is_not_installed():
    (message,) = declared_wrong(Counting, "counts_nothing")
    assert message.startswith("no plugin called 'counts_nothing' is installed: add counts_nothing = ")


def test_declaration_reports_another_class(installed):
    installed("kit = kit_offender:Kit")
    messages = declared_wrong(Counting, "kit")
    assert messages[0] == "'kit' of kit-offender 1.0 is Kit, and the factory makes a Counting"


def test_checks_are_documented():
    assert all(check.__doc__ and name == check.__name__ for name, check in CHECKS.items())


def test_testing_does_not_import_pytest():
    code = "import sys, loopkit_testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# tiny_problem


def test_tiny_problem_is_the_same_for_the_same_seed():
    one, other, third = tiny_problem(1), tiny_problem(1), tiny_problem(2)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert all(
        torch.equal(a, b) for x, y in zip(one.train, other.train, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert not torch.equal(one.train[0][0], third.train[0][0])


def test_tiny_problem_has_an_uneven_last_batch():
    assert [len(targets) for _, targets in tiny_problem().train] == [6, 6, 6, 2]


def test_tiny_problem_leaves_the_generator_alone():
    before = torch.get_rng_state()
    tiny_problem()
    assert torch.equal(torch.get_rng_state(), before)


def test_tiny_problem_can_be_learned():
    problem = tiny_problem()
    learner = problem.learner(standard=False, seed=0)
    loss = lambda: problem.loss_fn(problem.model(problem.train[0][0]), problem.train[0][1]).item()  # noqa: E731
    before = loss()
    learner.fit(problem.train, problem.val, epochs=20)
    assert loss() < before


# EventLog


def test_event_log_records_events_and_contexts_in_order():
    problem, log = tiny_problem(), EventLog()
    problem.learner(plugins=[log], standard=False).fit(problem.train[:1], problem.val[:1], epochs=1)
    assert log.lines == [
        "fit_begin",
        "train epoch_context enter",
        "train epoch_begin",
        "train step_begin",
        "train step_context enter",
        "train forward_begin",
        "train loss_begin",
        "train backward_begin",
        "train backward_end",
        "train update_begin",
        "train update_end",
        "train step_context leave",
        "train step_end",
        "train epoch_end",
        "train epoch_context leave",
        "train phase_end",
        "val epoch_context enter",
        "val epoch_begin",
        "val step_begin",
        "val step_context enter",
        "val forward_begin",
        "val loss_begin",
        "val step_context leave",
        "val step_end",
        "val epoch_end",
        "val epoch_context leave",
        "val phase_end",
        "cycle_end",
        "fit_end",
    ]


def test_event_log_records_events_of_your_own():
    problem, log = tiny_problem(), EventLog()
    problem.learner(plugins=[log], phases=[SurveyPhase()], standard=False).fit(problem.train, epochs=1)
    assert log.lines.count("train survey_begin") == 4


def test_event_log_records_contexts_that_are_left_by_an_error():
    problem, log = tiny_problem(), EventLog()
    problem.loss_fn = lambda outputs, targets: 1 / 0
    with pytest.raises(ZeroDivisionError):
        problem.learner(plugins=[log], standard=False).fit(problem.train, epochs=1)
    assert log.lines[-3:] == ["train step_context leave", "train epoch_context leave", "fit_end"]


def test_instance_is_no_factory():
    with pytest.raises(PluginError, match="give the class or a function that makes the plugin"):
        check_plugin(History())


def test_what_the_engine_reads_for_a_plugin_is_not_the_plugins():
    class Saves:
        @hookimpl
        def phase_end(self, learner):
            learner.state_dict()

    check_plugin(Saves, checks=["declared_access"])
