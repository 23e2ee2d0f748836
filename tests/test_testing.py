from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from loopkit import Event, Phase, TrainingPhase, hookimpl
from loopkit.errors import LoopkitError, PluginError
from loopkit.testing import CHECKS, ContractError, EventLog, Problem, check_plugin, tiny_problem


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
    """Accumulates on the device, is read once per pass, and is saved."""

    name = "mean_loss"

    def __init__(self):
        self.total = torch.zeros(())
        self.history = []

    @hookimpl
    def epoch_begin(self):
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


class Anomalies:
    @hookimpl
    def step_context(self):
        return torch.autograd.set_detect_anomaly(True, check_nan=False)


class Best:
    """Needs a companion that makes the metric."""

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

    @contextmanager
    def _signs(self, learner):
        params = [p for model in learner.models.values() for p in model.parameters()]
        kept = [p.data for p in params]
        for p in params:
            p.data = p.data.sign()
        yield
        for p, data in zip(params, kept, strict=True):
            p.data = data


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
    "context": Anomalies,
    "companion": lambda: (Best(), MeanLoss()),
    "schedule": Schedule,
    "shadow": Shadow,
    "own_step": OwnStep,
    "event_log": EventLog,
}


@pytest.mark.parametrize("name", GOOD)
def test_check_plugin_passes_good_plugins(name):
    check_plugin(GOOD[name])


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


def test_fit_twice_reports_threads_that_pile_up():
    (message,) = broken(Spawns, "fit_twice")
    assert message == "fit_twice: after the second fit a thread is left running: 'spawned'; end it in fit_end"


def test_fit_twice_reports_a_second_fit_end():
    (message,) = broken(Returns, "fit_twice")
    assert message == "fit_twice: after the first fit its fit_end was called 2 times, not 1"


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
    (message,) = broken(GradModeByHand, "cancelled_step")
    assert "by another plugin, autocast on the CPU is True; it was False before the fit" in message
    assert not torch.is_autocast_enabled("cpu")


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
    assert f"the handler of {signal.SIGUSR1!s} is <function" in message
    assert signal.getsignal(signal.SIGUSR1) == before


def test_error_elsewhere_reports_a_next_fit_that_fails():
    (message,) = broken(StaysOpen, "error_elsewhere")
    assert "the next fit raised AssertionError: still open" in message


def test_error_elsewhere_reports_a_fit_end_that_fails():
    (message,) = broken(FailsAtTheEnd, "error_elsewhere")
    assert "the fit raised ExceptionGroup: the fit failed, then fit_end" in message
    assert "RuntimeError: an epoch has not ended (in fit_end of plugin 'fails_at_the_end')" in message


def test_error_elsewhere_reports_a_thread():
    (message,) = broken(ThreadPerEpoch, "error_elsewhere")
    assert "of another plugin, a thread is left running: 'per epoch'; end it in fit_end" in message


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
        "state_round_trip: it has state_dict alone: state_dict and load_state_dict go together"
    ]


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
    assert "going on from saved state gives other parameters than an uninterrupted run: weights['model.0." in message


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


def test_state_round_trip_leaves_out_volatile_keys():
    check_plugin(Timed, checks=["state_round_trip"])
    (message,) = broken(Timed, "state_round_trip", volatile=())
    assert "state_dict()['seconds'] differs" in message


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
    import gc

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
        (lambda loss: float(loss), "(__float__)"),
        (lambda loss: bool(loss > 1), "(__bool__)"),
        (lambda loss: f"{loss:.3f}", "(__format__)"),
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


# unknown_phases


def test_unknown_phases_reports_each_phase_that_breaks_it():
    def read_outputs(self, step):
        assert step.outputs is not None

    messages = broken(plugin("backward_begin", read_outputs, reads=("outputs",)), "unknown_phases")
    assert len(messages) == 2
    assert "under a phase with two models and optimizers" in messages[0]
    assert "raised StepStateError: step.outputs is not set" in messages[0]
    assert "limit the hook with @hookimpl(phase=...)" in messages[0]
    assert "under a phase that puts nothing on its steps" in messages[1]


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
        check_plugin(plugin("backward_begin", sloppy))
    checks = [message.partition(":")[0] for message in caught.value.broken]
    assert checks == ["declared_access", "no_graph_kept", "no_device_sync", "unknown_phases", "unknown_phases"]
    assert str(caught.value).startswith("plugin 'offender' breaks 5 promises:\n  1. declared_access: ")


def test_check_plugin_skips_checks():
    check_plugin(plugin("backward_begin", read_loss), skip=["declared_access", "unknown_phases"])


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
    check_plugin(Counting)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Surveyor:
    def __init__(self):
        self.surveys = 0

    @hookimpl
    def survey_begin(self):
        self.surveys += 1


def test_check_plugin_runs_phases_of_your_own():
    check_plugin(Surveyor, phases=[SurveyPhase()])


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

    check_plugin(Counting, phases=[Distance()], problem=problem)


def test_checks_are_documented():
    assert all(check.__doc__ and name == check.__name__ for name, check in CHECKS.items())


def test_testing_does_not_import_pytest():
    code = "import sys, loopkit.testing; sys.exit('pytest' in sys.modules)"
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
        "val loss_begin",
        "val step_context leave",
        "val step_end",
        "val epoch_end",
        "val epoch_context leave",
        "val phase_end",
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
