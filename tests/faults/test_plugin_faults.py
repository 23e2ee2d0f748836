"""Plugins that fail: every hook, kind of error and place in the plan; and errors that are hard to pass on.

The matrix asks the same of each combination: the error comes out as the object that went in, noted once with hook,
plugin and phase; ``fit_end`` comes once for whoever is owed it; the process and the modules are as before; and the same
learner goes on bitwise like a fresh one that is given its weights.
"""

from __future__ import annotations

import copy
import signal
import sys
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch
from helpers import EventLog, batches, make_learner, on
from torch import nn

from loopkit import (
    CancelEpoch,
    CancelFit,
    CancelStep,
    Learner,
    TrainingPhase,
    ValidationPhase,
    hookimpl,
)
from loopkit.errors import PluginError
from loopkit.events import Event
from loopkit.hooks import hooks
from loopkit.plugins import Checkpoint


class Site(NamedTuple):
    """Where a fault is: a hook, what of it (for contexts), and the phase."""

    hook: str
    part: str = "call"
    phase: str = "train"

    def __str__(self):
        return "-".join(word for word in self if word != "call")


OF_EPOCH, OF_STEP = ("epoch_begin", "epoch_end", "phase_end"), ("step_begin", "forward_begin", "loss_begin", "step_end")
OF_TRAINING = ("backward_begin", "backward_end", "update_begin", "update_end", "update_skipped")
REPLACEMENTS = ("optimizer_step", "take_step")
SITES = [
    *(Site(hook, phase="") for hook in ("setup_model", "fit_begin", "cycle_end", "fit_end")),
    *(Site(hook) for hook in (*OF_EPOCH, *OF_STEP, *OF_TRAINING, "step_cancelled", "move_batch", *REPLACEMENTS)),
    *(Site(hook, phase="val") for hook in (*OF_EPOCH, *OF_STEP, "step_cancelled", "move_batch")),
    *(
        Site(hook, part, phase)
        for hook in ("epoch_context", "step_context")
        for part in ("call", "enter", "exit")
        for phase in ("train", "val")
    ),
]
UNCHANGED = {
    "fit_begin",
    "epoch_context",
    "epoch_begin",
    "move_batch",
    "step_begin",
    "step_context",
    "forward_begin",
    "loss_begin",
}
UNCHANGED |= {"backward_begin", "backward_end", "update_begin", "update_skipped", "step_cancelled", *REPLACEMENTS}
"""Hooks of training in whose first call, and before, no parameter moves."""


class Fault(Exception):
    """What a plugin may raise."""


ERRORS = {"error": lambda: Fault("oh", 1), "interrupt": lambda: KeyboardInterrupt("oh"), "exit": lambda: SystemExit(3)}


class Faulty:
    """A plugin that counts its fit_begin and fit_end, and raises an error once where it is told to."""

    def __init__(self, name, site=None, error=None, at=0):
        self.name, self.site, self.error, self.at = name, site, error, at
        self.counts = {"fit_begin": 0, "fit_end": 0}
        self.open = 0
        self.inside = None

    def reached(self, hook, part="call", phase=None, step=None):
        """Raise the error if this is where."""
        if self.error is None or (hook, part) != self.site[:2]:
            return
        if phase is not None and phase.name != self.site.phase:
            return
        if step is not None and phase.training and step.index != self.at:
            return
        error, self.error = self.error, None
        self.inside = torch.get_default_dtype()
        raise error

    @hookimpl
    def fit_begin(self):
        self.counts["fit_begin"] += 1
        self.reached("fit_begin")

    @hookimpl
    def fit_end(self):
        self.counts["fit_end"] += 1
        self.reached("fit_end")

    @hookimpl
    def cycle_end(self):
        self.reached("cycle_end")

    @hookimpl
    def setup_model(self, model):
        self.reached("setup_model")
        return model

    @hookimpl
    def move_batch(self, phase, batch):
        self.reached("move_batch", phase=phase)
        return batch

    @hookimpl
    def epoch_context(self, phase):
        self.reached("epoch_context", phase=phase)
        return self.context("epoch_context", phase)

    @hookimpl
    def step_context(self, phase, step):
        self.reached("step_context", phase=phase, step=step)
        return self.context("step_context", phase, step)

    @contextmanager
    def context(self, *where):
        hook, rest = where[0], where[1:]
        self.reached(hook, "enter", *rest)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
        self.reached(hook, "exit", *rest)


def listener(hook):
    arguments = hooks()[hook].arguments
    if "step" in arguments:
        return hookimpl(lambda self, phase, step: self.reached(hook, "call", phase, step))
    return hookimpl(lambda self, phase: self.reached(hook, "call", phase))


for event in Event.by_hook.values():
    if event.__module__ == "loopkit.events" and "phase" in event.arguments:
        setattr(Faulty, event.hook, listener(event.hook))


class FaultyUpdate(Faulty):
    """The one that replaces the update."""

    @hookimpl
    def optimizer_step(self, phase, step, default):
        self.reached("optimizer_step", "call", phase, step)
        default()


class FaultyStep(Faulty):
    """The one that replaces the phase's step."""

    @hookimpl
    def take_step(self, phase, step, default):
        self.reached("take_step", "call", phase, step)
        default()


class Surround:
    """Contexts that change whatever a context can change in a process."""

    name = "surround"

    @hookimpl
    @contextmanager
    def epoch_context(self, phase):
        anomaly = not phase.training  # in training it would cost more than all the rest
        with torch.autograd.set_detect_anomaly(anomaly), warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            before = torch.get_default_dtype(), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            torch.set_default_dtype(torch.float64)
            done = threading.Event()
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()
                torch.set_default_dtype(before[0])
                signal.signal(signal.SIGUSR1, before[1])

    @hookimpl
    @contextmanager
    def step_context(self):
        with torch.autocast("cpu", torch.bfloat16):
            yield


class Provoke:
    """Makes happen what does not happen by itself: a skipped update, a cancelled step."""

    name = "provoke"

    def __init__(self, site, at):
        self.site, self.at = site, at

    @hookimpl
    def update_begin(self, step):
        if self.site.hook == "update_skipped" and step.index == self.at:
            step.skip_update("provoked")

    @hookimpl
    def loss_begin(self, phase, step):
        if self.site.hook == "step_cancelled" and self.site.phase == phase.name and step.index in (self.at, 0):
            raise CancelStep("provoked")


class InferencePhase(ValidationPhase):
    grad_mode = "inference_mode"


def surroundings(learner):
    """Everything that a fit may change and has to put back."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    model = learner.models["model"]
    return {
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "autocast cache": (torch.is_autocast_cache_enabled(), nesting),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "generators": (torch.get_rng_state().numpy().tobytes(), torch.initial_seed()),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": set(threading.enumerate()),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace()),
        "modes": [module.training for module in model.modules()],
        "gradients": [p.grad for p in model.parameters()],
        "needs gradient": [p.requires_grad for p in model.parameters()],
        "learner": (list(learner._engine.running.epochs), learner.current is not None),
    }


def small(plugins, accumulate=1):
    """A learner with momentum and modules in mixed modes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 1))
    model[2].eval()
    return Learner(
        model,
        nn.MSELoss(),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        plugins=plugins,
        phases=[InferencePhase()],
        accumulate=accumulate,
        standard=False,
        order=["surround", "a", "b", "c"],
    )


def weights(learner):
    return [p.detach().clone() for p in learner.models["model"].parameters()]


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def fit(learner):
    return learner.fit(batches(3), batches(1, seed=1), epochs=1)


def members(site, position, at, error):
    """Three plugins of which one is faulty, one with fit_end alone, and what makes the site come."""
    replacing = {"optimizer_step": FaultyUpdate, "take_step": FaultyStep}.get(site.hook, Faulty)
    kinds = [replacing if i == position else Faulty for i in range(3)]
    three = [
        kind(name, site, error if i == position else None, at)
        for i, (kind, name) in enumerate(zip(kinds, "abc", strict=True))
    ]
    ends = []
    alone = on("fit_end", lambda **_: ends.append(True), "alone")
    return three, ends, [*three, alone, Surround(), Provoke(site, at)]


def check_fault(site, kind, position, accumulate):
    """One combination of the matrix."""
    error = ERRORS[kind]()
    given = error.args
    at = accumulate - 1
    three, ends, plugins = members(site, position, at, error)
    faulty = three[position]
    if site.hook == "setup_model":
        with pytest.raises(type(error)) as caught:
            small(plugins, accumulate)
        learner = small(plugins, accumulate)
        expected = [0, 0, 0]
    else:
        learner = small(plugins, accumulate)
        start, before = weights(learner), surroundings(learner)
        with pytest.raises(type(error)) as caught:
            fit(learner)
        after = surroundings(learner)
        assert [name for name in before if before[name] != after[name]] == []
        expected = [int(site.hook != "fit_begin" or i <= position) for i in range(3)]
        if site.phase == "train" and site.part != "exit" and site.hook in UNCHANGED and accumulate == 1:
            assert same(weights(learner), start)
    # the error
    assert caught.value is error
    assert error.args == given
    assert getattr(error, "code", 3) == 3
    (note,) = error.__notes__
    where = f", phase {site.phase!r}, epoch " if site.phase else ""
    assert note.startswith(f"loopkit: in {site.hook} of plugin {faulty.name!r}{where}")
    # every fit_end that is owed
    assert [each.counts["fit_end"] for each in three] == expected
    assert len(ends) == int(site.hook != "setup_model")
    assert [each.open for each in three] == [0, 0, 0]
    within = site.phase and site.hook != "phase_end"
    assert faulty.inside == (torch.float64 if within else torch.float32)
    # the same learner goes on
    _, _, others = members(site, position, at, None)
    fresh = small(others, accumulate)
    fresh.models["model"].load_state_dict(learner.models["model"].state_dict())
    fresh.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))
    again, reference = fit(learner), fit(fresh)
    assert again.reason == "epochs"
    assert (again.steps, again.updates) == (reference.steps, reference.updates)
    assert same(weights(learner), weights(fresh))
    assert [each.counts["fit_end"] for each in three] == [count + 1 for count in expected]


def sampled(i, j, position, accumulate):
    """Whether a combination is in the default suite: two kinds of each site, in a place that changes."""
    return (
        j != i % 3
        and position == (i // 3 + i + j) % 3
        and accumulate == (1 + i % 2 if SITES[i].phase == "train" else 1)
    )


COMBINATIONS = [
    pytest.param(
        site,
        kind,
        position,
        accumulate,
        id=f"{site}-{kind}-{position}-{accumulate}",
        marks=() if sampled(i, j, position, accumulate) else pytest.mark.slow,
    )
    for i, site in enumerate(SITES)
    for j, kind in enumerate(ERRORS)
    for position in range(3)
    for accumulate in ((1, 2) if site.phase == "train" else (1,))
]
"""The whole matrix."""


@pytest.mark.parametrize(("site", "kind", "position", "accumulate"), COMBINATIONS)
def test_fault_passes_through_and_leaves_nothing_behind(site, kind, position, accumulate):
    check_fault(site, kind, position, accumulate)


def test_fault_matrix_samples_every_site_kind_and_place():
    sample = [each.values for each in COMBINATIONS if not each.marks]
    assert {values[0] for values in sample} == set(SITES)
    assert {values[1:3] for values in sample} == {(kind, position) for kind in ERRORS for position in range(3)}


def test_fault_matrix_holds_every_hook():
    own = {name for name, hook in hooks().items() if hook.kind != "event" or own_event(name)}
    others = {"signal_begin", "setup_data"}  # one comes by a signal alone, the other also before the fit: see below
    others |= {"setup_optimizer"}  # before the fit as well: tests/engine/compile/test_setup_optimizer.py
    others |= {"log_value", "instrument_call"}  # in tests/logs and tests/engine/compile
    assert own - {site.hook for site in SITES} <= others


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("call", [1, 2])
def test_fault_of_setup_data_passes_through(kind, call, made):
    error, calls, ends = ERRORS[kind](), [], []

    class Faulty:
        @hookimpl
        def setup_data(self, data):
            calls.append(1)
            if len(calls) == call:
                raise error
            return data

        @hookimpl
        def fit_end(self, result):
            ends.append(result.reason)

    inputs = torch.ones(2, 3)
    learner = Learner(
        torch.nn.Linear(3, 1), torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), plugins=[Faulty()], standard=False
    )
    data = [(inputs, torch.ones(2, 1))]
    given = (lambda: data) if made else data
    with pytest.raises(type(error)) as caught:
        learner.fit(given, given, epochs=1)
    assert caught.value is error
    assert ends == (["error"] if made else [])  # the lengths of lists are asked for before the fit begins
    assert any("setup_data of plugin 'faulty'" in note for note in error.__notes__)
    assert not learner._engine.running.epochs
    assert learner.current is None
    learner.fit(data, data, epochs=1)


def own_event(name):
    return name not in Event.by_hook or Event.by_hook[name].__module__ == "loopkit.events"


# Errors from elsewhere


ELSEWHERE = {
    "forward": "in Broken.step, phase 'train', epoch 1, step 1",
    "loss_fn": "in TrainingPhase.step, phase 'train', epoch 1, step 1",
    "loader": "the loader raised this while making batch 1, phase 'train', epoch 1",
    "iter": "the loader raised this while making batch 0, phase 'train', epoch 1",
    "factory": "",
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", ELSEWHERE)
def test_fault_outside_plugins_passes_through_and_leaves_nothing_behind(place, kind):
    error = ERRORS[kind]()
    at = 1
    calls = dict.fromkeys(ELSEWHERE, 0)

    def reached(name, limit):
        calls[name] += 1
        if name == place and calls[name] == limit + 1:
            raise error

    class Broken(TrainingPhase):
        def forward(self, learner, inputs):
            reached("forward", at)
            return super().forward(learner, inputs)

    class Data(list):
        def __iter__(self):
            reached("iter", 0)
            for batch in super().__iter__():
                reached("loader", at)
                yield batch

    def data():
        reached("factory", 0)
        return Data(batches(3))

    site = Site("none")
    three, ends, plugins = members(site, 0, 0, None)
    learner = small(plugins)
    if place == "forward":
        learner.phases["train"] = Broken()
    mse = learner.loss_fn
    learner.loss_fn = lambda *given: (reached("loss_fn", at), mse(*given))[1]
    before = surroundings(learner)
    with pytest.raises(type(error)) as caught:
        learner.fit(data, epochs=1)
    assert caught.value is error
    assert surroundings(learner) == before
    assert [each.counts["fit_end"] for each in three] == [1, 1, 1]
    assert len(ends) == 1
    notes = getattr(error, "__notes__", [])
    expected = ELSEWHERE[place] if kind == "error" or place in ("forward", "loss_fn") else ""
    assert len(notes) <= 1
    assert "".join(notes).startswith(f"loopkit: {expected}" if expected else "")
    assert learner.fit(data, epochs=1).steps == 3


def test_fault_of_the_instrument_has_a_note_and_ends_the_fit_for_all():
    error = Fault("meter")

    class Meter:
        @hookimpl
        def instrument_call(self, target, call):
            def fails(*values):
                raise error

            return fails if target.hook == "loss_begin" else call

    three, _, plugins = members(Site("none"), 0, 0, None)
    learner = Learner(
        nn.Linear(3, 1),
        nn.MSELoss(),
        sgd,
        plugins=[*plugins, Meter()],
        standard=False,
        order=["surround", "a", "b", "c"],
    )
    with pytest.raises(Fault) as caught:
        fit(learner)
    assert caught.value is error
    assert error.__notes__ == ["loopkit: in loss_begin of plugin 'a', phase 'train', epoch 1, step 0"]
    assert [each.counts["fit_end"] for each in three] == [1, 1, 1]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


# Errors that are hard to pass on


class Mute(Exception):
    """Neither its text nor its representation can be had."""

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Noteless(Exception):
    """Takes no notes."""

    def add_note(self, note):
        raise ValueError("no notes")


class Sealed(Exception):
    """Has notes that are no list, and refuses others."""

    __slots__ = ()

    @property
    def __notes__(self):
        return None


class OddNotes(Exception):
    """Has notes that are no text."""

    def __init__(self):
        self.__notes__ = [1, Mute()]


def recursion():
    try:
        recursion_forever()
    except RecursionError as error:
        return error


def recursion_forever():
    return recursion_forever()


HARD = {
    "mute": Mute,
    "noteless": Noteless,
    "sealed": Sealed,
    "odd notes": OddNotes,
    "group": lambda: ExceptionGroup("several", [Fault("one"), CancelFit("two")]),
    "group of interrupts": lambda: BaseExceptionGroup("several", [Fault("one"), KeyboardInterrupt()]),
    "recursion": recursion,
    "stop iteration": lambda: StopIteration("value"),
    "stop async iteration": lambda: StopAsyncIteration("value"),
    "generator exit": lambda: GeneratorExit("oh"),
}
HARD_SITES = [
    Site("epoch_begin"),
    Site("step_begin"),
    Site("update_begin"),
    Site("step_end", phase="val"),
    Site("epoch_end"),
    Site("phase_end"),
    Site("optimizer_step"),
    Site("move_batch"),
    *(Site(hook, part) for hook in ("epoch_context", "step_context") for part in ("call", "exit")),
]


@pytest.mark.parametrize(
    ("kind", "site"),
    [
        pytest.param(kind, site, marks=() if (i + j) % 3 == 0 else pytest.mark.slow, id=f"{kind}-{site}")
        for i, kind in enumerate(HARD)
        for j, site in enumerate(HARD_SITES)
    ],
)
def test_hard_error_of_a_plugin_passes_through(kind, site):
    error = HARD[kind]()
    three, ends, plugins = members(site, 1, 0, error)
    learner = small(plugins)
    if kind == "stop iteration" and site.part == "exit":
        three[1].context = lambda *where: Leaving(three[1], *where)  # else Python turns it into a RuntimeError
    before = surroundings(learner)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one it is, is looked at below
        fit(learner)
    assert caught.value is error
    assert surroundings(learner) == before
    assert [each.counts["fit_end"] for each in three] == [1, 1, 1]
    assert len(ends) == 1
    if kind not in ("sealed", "odd notes"):
        (note,) = error.__notes__
        assert note.startswith(f"loopkit: in {site.hook} of plugin 'b', phase {site.phase!r}")
    assert fit(learner).reason == "epochs"


class Leaving:
    """The context of a `Faulty` without a generator."""

    def __init__(self, plugin, hook, *where):
        self.plugin, self.hook, self.where = plugin, hook, where

    def __enter__(self):
        pass

    def __exit__(self, *_):
        self.plugin.reached(self.hook, "exit", *self.where)


@pytest.mark.parametrize("hook", ["fit_begin", "fit_end"])
@pytest.mark.parametrize("kind", HARD)
def test_hard_error_of_fit_begin_or_fit_end_passes_through(kind, hook):
    error = HARD[kind]()
    three, _, plugins = members(Site(hook, phase=""), 1, 0, error)
    learner = small(plugins)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        fit(learner)
    assert caught.value is error
    assert [each.counts["fit_end"] for each in three] == ([1, 1, 0] if hook == "fit_begin" else [1, 1, 1])
    assert fit(learner).reason == "epochs"


@pytest.mark.parametrize("place", ["forward", "loss_fn", "loader"])
@pytest.mark.parametrize("kind", HARD)
def test_hard_error_from_outside_plugins_passes_through(kind, place):
    error = HARD[kind]()

    def fails(*given):
        raise error

    class Broken(TrainingPhase):
        def forward(self, learner, inputs):
            return super().forward(learner, inputs) if place != "forward" else fails()

    class Data:
        def __iter__(self):
            return self

        def __next__(self):
            fails()

    if kind == "stop iteration" and place == "loader":
        pytest.skip("that is how a loader ends")
    three, _, plugins = members(Site("none"), 1, 0, None)
    learner = small(plugins)
    learner.phases["train"] = Broken()
    if place == "loss_fn":
        learner.loss_fn = fails
    before = surroundings(learner)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        learner.fit(Data() if place == "loader" else batches(2), epochs=1)
    assert caught.value is error
    assert surroundings(learner) == before
    assert [each.counts["fit_end"] for each in three] == [1, 1, 1]


def test_generator_exit_of_a_hook_is_an_error_and_fires_no_epoch_end():
    log = EventLog()
    with pytest.raises(GeneratorExit):
        fit(small([log, Faulty("a", Site("loss_begin"), GeneratorExit())]))
    assert log.lines == ["fit_begin", "train: epoch_begin", "train 0: step_begin forward_begin", "fit_end"]


@pytest.mark.parametrize("late", [Mute, Noteless, Sealed, Fault])
@pytest.mark.parametrize("first", [Mute, Noteless, Sealed, KeyboardInterrupt])
def test_hard_errors_of_a_step_and_of_fit_end_are_both_told(first, late):
    error, after = first(), late()
    _, _, plugins = members(Site("step_begin"), 0, 0, error)
    learner = small([*plugins, Faulty("z", Site("fit_end"), after)])
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        fit(learner)
    if first is KeyboardInterrupt:
        assert caught.value is error
        assert any(late.__name__ in note for note in error.__notes__)
    else:
        assert type(caught.value) is ExceptionGroup
        assert caught.value.exceptions == (error, after)


def test_error_raised_again_in_fit_end_is_no_second_error():
    error = Fault("once")
    learner = small([Faulty("a", Site("step_begin"), error), Faulty("b", Site("fit_end"), error)])
    with pytest.raises(Fault) as caught:
        fit(learner)
    assert caught.value is error


@pytest.mark.parametrize("kind", ["interrupt", "exit"])
def test_interrupt_in_fit_end_still_ends_the_fit_for_the_others(kind):
    error, other = ERRORS[kind](), Fault("other")
    three = [Faulty("a"), Faulty("b", Site("fit_end"), error), Faulty("c", Site("fit_end"), other)]
    learner = small(three)
    with pytest.raises(BaseExceptionGroup) as caught:
        fit(learner)
    assert caught.value.exceptions == (other, error)
    assert [each.counts["fit_end"] for each in three] == [1, 1, 1]


def test_recursion_without_end_in_a_plugin_and_in_a_step_passes_through():
    for place in ("plugin", "loss_fn"):
        three, _, plugins = members(Site("none"), 0, 0, None)
        learner = small([*plugins, *([on("loss_begin", lambda **_: recursion_forever())] if place == "plugin" else [])])
        if place == "loss_fn":
            learner.loss_fn = lambda *_: recursion_forever()
        before = surroundings(learner)
        with pytest.raises(RecursionError) as caught:
            fit(learner)
        assert len(caught.value.__notes__) == 1
        assert surroundings(learner) == before
        assert [each.counts["fit_end"] for each in three] == [1, 1, 1]


def test_note_names_the_plugin_although_two_share_a_function():
    error = Fault("shared")
    shared = hookimpl(lambda step: calls.append(step) or (len(calls) == 2 and fail()))
    calls = []

    def fail():
        raise error

    def plugin(name):
        made = type("Shares", (), {})()
        made.name, made.loss_begin = name, shared
        return made

    with pytest.raises(Fault):
        fit(small([plugin("a"), plugin("b"), plugin("c")]))
    assert error.__notes__ == ["loopkit: in loss_begin of plugin 'b', phase 'train', epoch 1, step 0"]


# Contexts that fail while something else is on its way


class Leaves:
    """A context that raises when it is left, or swallows; logs what it was left with."""

    def __init__(self, name, error=None, swallow=False):
        self.name, self.error, self.swallow = name, error, swallow
        self.seen = []

    @hookimpl
    def step_context(self):
        return self

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        self.seen.append(error)
        if self.error is not None:
            raise self.error
        return self.swallow


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [
        (Fault, KeyError, "group"),
        (KeyboardInterrupt, Fault, "first"),
        (SystemExit, Fault, "first"),
        (KeyboardInterrupt, SystemExit, "first"),
        (Fault, KeyboardInterrupt, "second"),
        (Fault, CancelFit, "first"),
        (CancelFit, Fault, "second"),
        (CancelFit, CancelStep, "first"),
        (CancelStep, CancelFit, "second"),
        (CancelEpoch, CancelFit, "second"),
    ],
)
def test_error_on_leaving_a_context_does_not_hide_the_first(first, second, wins):
    one, two = first("one"), second("two")
    outer = Leaves("outer")
    learner = Learner(
        nn.Linear(3, 1),
        nn.MSELoss(),
        sgd,
        standard=False,
        order=["outer", "inner"],
        plugins=[Faulty("a", Site("loss_begin"), one), Leaves("inner", two), outer],
    )
    expected = {"first": one, "second": two}.get(wins)
    if isinstance(expected, CancelFit):
        result = learner.fit(batches(2), epochs=1)
        assert (result.reason, result.message) == ("cancel", expected.reason)
        assert result.by == {"first": "a", "second": "inner"}[wins]
    else:
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            learner.fit(batches(2), epochs=1)
        if wins == "group":
            assert caught.value.exceptions == (one, two)
        else:
            assert caught.value is expected
            other = two if expected is one else one
            assert any(type(other).__name__ in note for note in expected.__notes__)
    assert outer.seen[0] is (expected or caught.value)


def test_context_that_swallows_hides_nothing_from_those_around_it():
    error = Fault("seen")
    outer, inner = Leaves("outer"), Leaves("inner", swallow=True)
    learner = Learner(
        nn.Linear(3, 1),
        nn.MSELoss(),
        sgd,
        standard=False,
        order=["outer", "inner"],
        plugins=[Faulty("a", Site("loss_begin"), error), inner, outer],
    )
    with pytest.raises(Fault):
        learner.fit(batches(1), epochs=1)
    assert inner.seen == outer.seen == [error]


@pytest.mark.parametrize("hook", ["epoch_context", "step_context"])
def test_context_that_is_none_says_what_to_return(hook):
    def forgets(**_):
        yield

    with pytest.raises(PluginError, match=r"'acting': .*_context returned generator.*@contextmanager below @hookimpl"):
        fit(small([on(hook, forgets)]))


# What the caller has opened


@pytest.mark.parametrize(
    "site",
    [
        Site("update_end"),
        Site("step_end"),
        Site("epoch_end"),
    ],
    ids=str,
)
def test_fault_under_an_autocast_of_the_callers_leaves_no_old_weights_in_its_cache(site):
    learner = small([Faulty("a", site, Fault("oh"))])
    model, x = learner.models["model"], batches(1)[0][0]
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(Fault):
            learner.fit(batches(1), epochs=1)
        now = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(now, model(x))


def test_fault_in_a_plugins_state_names_it():
    class Stateful:
        name = "stateful"

        def state_dict(self):
            raise error

        def load_state_dict(self, state):
            pass

        @hookimpl
        def fit_end(self):
            pass

    error = Mute()
    learner = small([Stateful()])
    with pytest.raises(Mute) as caught:
        learner.state_dict()
    assert caught.value is error
    assert error.__notes__ == ["loopkit: in state_dict of plugin 'stateful'"]


# The checkpoint at an error


class Counted:
    """Sets the rate by the events that it has seen, so that one too few or too many shows in the weights."""

    name = "counted"

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    @hookimpl(updates=("lr",))
    def step_begin(self, learner, phase):
        if phase.training:
            for group in learner.optimizers["optimizer"].param_groups:
                group["lr"] = 0.05 + self.seen / 1000


def counts_of(hook):
    def count(self):
        self.seen += 1

    return hookimpl(count)


for event in (*OF_EPOCH, "cycle_end"):
    setattr(Counted, event, counts_of(event))


def saved_run(folder, site, late, *, fails):
    """A run of four epochs with a plugin that raises in the second one."""

    def act(learner, **given):
        if site.phase and "phase" in given and given["phase"].name != site.phase:
            return
        if learner.progress.epochs >= (1 if site.phase == "train" and site.hook != "phase_end" else 2):
            if fails:
                raise Fault("once")

    fault = on(site.hook, act, "fault", before=() if late else ("counted",), after=("counted",) if late else ())
    torch.manual_seed(0)
    learner = make_learner(fault, Counted(), Checkpoint(folder, resume="auto"))
    try:
        learner.fit(batches(3), batches(2), epochs=4)
    except Fault:
        assert fails
    else:
        assert not fails
    return learner


LOST = [Site(hook, phase=phase) for hook in OF_EPOCH for phase in ("train", "val")] + [Site("cycle_end", phase="")]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("site", LOST, ids=str)
def test_run_that_a_hook_has_ended_resumes_with_the_same_bits(tmp_path, site, late):
    whole = saved_run(tmp_path / "whole", site, late, fails=False)
    saved_run(tmp_path / "run", site, late, fails=True)
    again = saved_run(tmp_path / "run", site, late, fails=False)
    assert again.progress == whole.progress
    assert again.plugins["counted"].seen == whole.plugins["counted"].seen
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
