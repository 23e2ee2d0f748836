"""The witness: what moves in a run, and is in no state, is named once at the first save."""

import enum
import functools
import io
import itertools
import random
import threading
import time
from collections import Counter, deque
from fractions import Fraction
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from engine.kept.witnessed import named_in, said
from engine.life.runs import train
from loopkit import Learner, TrainingPhase, every, hookimpl
from loopkit.plugins import Checkpoint, Schedule
from loopkit.schedules import cosine


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2


class Tally:
    count = 0

    def add(self):
        self.count += 1


def phase_that(change, **held):
    """A phase that holds something, and changes it in each step."""

    class Own(TrainingPhase):
        def step(self, learner, step):
            change(self)
            super().step(learner, step)

    phase = Own()
    vars(phase).update(held)
    return phase


def setting(name, value):
    """Sets an attribute to a value made anew each time."""
    return lambda owner: setattr(owner, name, value(getattr(owner, name, None)))


COUNTS = {
    "number": ({"n": 0}, setting("n", lambda n: n + 1)),
    "text": ({"n": "a"}, setting("n", lambda n: n + "b")),
    "enum": ({"n": Mode.SLOW}, setting("n", lambda _: Mode.FAST)),
    "fraction": ({"n": Fraction(1, 2)}, setting("n", lambda n: n / 2)),
    "number of numpy": ({"n": numpy.float32(0)}, setting("n", lambda n: n + numpy.float32(1))),
    "private number": ({"_n": 0}, setting("_n", lambda n: n + 1)),
    "none that became a number": ({"n": None}, setting("n", lambda _: 3)),
    "number that became none": ({"n": 3}, setting("n", lambda _: None)),
    "new number": ({}, setting("n", lambda _: 3)),
    "tensor in place": ({"n": torch.zeros(2)}, lambda phase: phase.n.add_(1)),
    "other tensor": ({"n": torch.zeros(2)}, setting("n", lambda n: n + 1)),
    "new tensor": ({}, setting("n", lambda _: torch.ones(2))),
    "array": ({"n": numpy.zeros(3)}, setting("n", lambda n: n.__iadd__(1))),
    "large array": ({"n": numpy.zeros(100_000)}, setting("n", lambda n: n.__iadd__(1))),
    "generator of torch": ({"n": torch.Generator()}, lambda phase: torch.rand(1, generator=phase.n)),
    "generator of python": ({"n": random.Random(0)}, lambda phase: phase.n.random()),
    "generator of numpy": ({"n": numpy.random.default_rng(0)}, lambda phase: phase.n.random()),
    "generator in an object": (
        {"n": SimpleNamespace(parts=[random.Random(0)])},
        lambda phase: phase.n.parts[0].random(),
    ),
    "list of numbers": ({"n": []}, lambda phase: phase.n.append(0.5)),
    "private list of numbers": ({"_n": []}, lambda phase: phase._n.append(0.5)),
    "list of tensors": ({"n": []}, lambda phase: phase.n.append(torch.zeros(1))),
    "tensors of a dict": ({"n": {"a": torch.zeros(1)}}, lambda phase: phase.n["a"].add_(1)),
    "private tensors of a dict": ({"_n": {"a": torch.zeros(1)}}, lambda phase: phase._n["a"].add_(1)),
    "deque": ({"n": deque([1, 2], maxlen=2)}, lambda phase: phase.n.append(phase.n[0] + 2)),
    "counter": ({"n": Counter()}, lambda phase: phase.n.update("a")),
    "long list": ({"n": list(range(20_000))}, lambda phase: phase.n.append(1)),
    "attribute of an object": (
        {"n": SimpleNamespace(count=0)},
        lambda phase: setting("count", lambda n: n + 1)(phase.n),
    ),
    "itertools.count": ({"n": itertools.count()}, lambda phase: next(phase.n)),
    "object of a bound method": ({"n": Tally().add}, lambda phase: phase.n()),
    "object of a partial": ({"n": functools.partial(Tally.add, Tally())}, lambda phase: phase.n()),
    "optimizer": (
        {"n": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)},
        lambda phase: phase.n.param_groups[0].update(lr=0.2),
    ),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_what_moves_in_a_phase_is_named_once_at_the_first_save(kind, tmp_path):
    held, change = COUNTS[kind]
    phase = phase_that(change, **held)
    [message] = named_in(tmp_path, phases=[phase])
    name = "_n" if "_n" in vars(phase) else "n"
    assert message.startswith("phase 'train' (Own) has changed its ")
    assert name in message.partition("since")[0]
    assert f"saved = ('{name}',), or state_dict and load_state_dict; for a cache, volatile = ('{name}',)" in message


class Cached:
    """A cache by its name, by ``cached_property``, and by what its class declares."""

    volatile = ("seen", "last_*")

    @functools.cached_property
    def table(self):
        return 3


def fill(cached):
    cached.seen = cached.last_loss = cached.table
    cached.text_cache = [cached.table]


def quiet():
    """What moves without being lost."""
    return {
        "nothing": ({"n": 1, "t": torch.zeros(1), "g": torch.Generator(), "l": [1], "f": len}, lambda phase: None),
        "equal values": ({"n": [1.0], "text": "a"}, lambda phase: vars(phase).update(n=[1.0], text="".join("a"))),
        "not a number": ({"n": float("nan")}, setting("n", lambda _: float("nan"))),
        "text in memory": ({"n": io.StringIO()}, lambda phase: phase.n.write("a")),
        "lock": ({"n": threading.Lock()}, lambda phase: phase.n.acquire(blocking=False)),
        "thread": ({"n": threading.Thread(target=len)}, lambda phase: setattr(phase.n, "name", "b")),
        "private cache": ({"_n": {}}, lambda phase: phase._n.setdefault(len(phase._n), "text")),
        "private cache of tensors": ({"_n": []}, lambda phase: phase._n.append(torch.zeros(1))),
        "caches": ({"n": Cached()}, lambda phase: fill(phase.n)),
        "clock": ({"n": 0.0, "m": None}, lambda phase: vars(phase).update(n=time.time(), m=time.perf_counter())),
        "function": ({"n": len}, setting("n", lambda _: lambda: 1)),
        "object that was made": ({"n": None}, setting("n", lambda n: n or SimpleNamespace(count=3))),
        "object of a new attribute": ({}, setting("n", lambda n: n or SimpleNamespace(count=3))),
        "class": ({"n": Cached}, setting("n", lambda _: Mode)),
    }


@pytest.mark.parametrize("kind", quiet())
def test_what_is_not_lost_is_not_named(kind, tmp_path):
    held, change = quiet()[kind]
    assert named_in(tmp_path, phases=[phase_that(change, **held)]) == []


def test_parameters_that_a_phase_or_a_plugin_also_holds_are_not_named(tmp_path):
    class Holds:
        @hookimpl
        def fit_begin(self, learner):
            self.learner, self.params = learner, list(learner.model.parameters())
            self.view = learner.model[0].weight.detach()

    assert named_in(tmp_path, plugins=[Holds()]) == []


def test_plugin_that_counts_steps_is_named_with_the_way_out(tmp_path):
    class Counts:
        name = "counts"

        def __init__(self):
            self.steps = 0

        @hookimpl(phase="training")
        def step_end(self, learner):
            self.steps += 1

    [message] = named_in(tmp_path, plugins=[Counts()])
    assert message.startswith("plugin 'counts' (Counts) has changed its 'steps' since the fit began")
    assert "Give the class state_dict and load_state_dict" in message


class Saves:
    name = "saves"

    def __init__(self):
        self.steps = 0

    @hookimpl(phase="training")
    def step_end(self, learner):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_plugin_with_a_state_is_not_looked_into(tmp_path):
    assert named_in(tmp_path, plugins=[Saves()]) == []


def test_what_a_phase_does_not_save_is_named_beside_what_it_does(tmp_path):
    phase = phase_that(lambda phase: vars(phase).update(a=phase.a + 1, b=phase.b + 1), a=0, b=0)
    type(phase).saved = ("a",)
    [message] = named_in(tmp_path, phases=[phase])
    assert "has changed its 'b' since" in message


def add_to_class(phase):
    type(phase).count += 1


def put_item(phase):
    phase.table["count"] += 1


def add_item(phase):
    phase.items.append(1.0)


def add_in_place(phase):
    phase.mean.add_(1)


def draw_number(phase):
    phase.rng.random()


IN_CLASSES = {
    "count": (add_to_class, {"count": 0}),
    "table": (put_item, {"table": {"count": 0}}),
    "items": (add_item, {"items": []}),
    "mean": (add_in_place, {"mean": torch.zeros(1)}),
    "rng": (draw_number, {"rng": random.Random(0)}),
}


def phase_of_class(change, values):
    class Own(TrainingPhase):
        def step(self, learner, step):
            change(self)
            super().step(learner, step)

    return type("Held", (Own,), {**values, "limits": (1, 2)})()


@pytest.mark.parametrize("name", IN_CLASSES)
def test_value_of_a_class_that_moves_is_named(name, tmp_path):
    change, values = IN_CLASSES[name]
    [message] = named_in(tmp_path, phases=[phase_of_class(change, values)])
    assert f"has changed its '{name}" in message


@pytest.mark.parametrize("name", ["saved", "volatile"])
def test_value_of_a_class_that_is_declared_is_not_named(name, tmp_path):
    change, _ = IN_CLASSES["table"]
    assert named_in(tmp_path, phases=[phase_of_class(change, {"table": {"count": 0}, name: ("table",)})]) == []


def test_plugin_that_counts_in_its_class_is_named(tmp_path):
    class Counts:
        name = "counts"
        steps = 0

        @hookimpl
        def step_end(self):
            type(self).steps += 1

    [message] = named_in(tmp_path, plugins=[Counts()])
    assert "has changed its 'steps' since" in message


class Counting(nn.Module):
    """Counts in ``forward``, in an attribute that no state dict holds."""

    def __init__(self, change, **held):
        super().__init__()
        self.change, self.layer = change, nn.Linear(3, 1)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, inputs):
        self.change(self)
        return self.layer(inputs)


class SavesExtra(Counting):
    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def count(module):
    module.calls += 1


MODULES = {
    "tensor where there was none": (
        lambda: Counting(lambda module: setattr(module, "hidden", torch.ones(1)), hidden=None),
        "hidden",
    ),
    "number": (lambda: Counting(count, calls=0), "calls"),
    "tensor": (lambda: Counting(lambda module: module.mean.add_(1), mean=torch.zeros(1)), "mean"),
    "list": (lambda: Counting(lambda module: module.norms.append(1.0), norms=[]), "norms"),
    "generator": (lambda: Counting(lambda module: module.rng.random(), rng=random.Random(0)), "rng"),
    "part": (lambda: nn.Sequential(nn.Sequential(Counting(count, calls=0))), "0.0.calls"),
    "attribute of a module of torch": (
        lambda: Counting(lambda module: setattr(module.layer, "calls", getattr(module.layer, "calls", 0) + 1)),
        "layer.calls",
    ),
    "option of a module of torch": (
        lambda: Counting(lambda module: setattr(module.drop, "p", module.drop.p / 2), drop=nn.Dropout(0.5)),
        "drop.p",
    ),
}


def with_model(model, directory):
    learner = Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.01),
        plugins=[Checkpoint(directory, save=every(updates=1))],
        standard=False,
    )
    return said(lambda: learner.fit(train(), epochs=2))


@pytest.mark.parametrize("kind", MODULES)
def test_attribute_that_a_model_moves_is_named(kind, tmp_path):
    make_model, path = MODULES[kind]
    [message] = with_model(make_model(), tmp_path)
    assert message.startswith("model 'model' (")
    assert f"has changed its '{path}' since the fit began" in message
    assert "register_buffer" in message


@pytest.mark.parametrize("kind", ["buffers", "extra state", "volatile", "recurrent"])
def test_models_that_lose_nothing_are_not_named(kind, tmp_path):
    volatile = type("Volatile", (Counting,), {"volatile": ("calls",)})
    models = {
        "buffers": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1)),
        "extra state": lambda: SavesExtra(count, calls=0),
        "volatile": lambda: volatile(count, calls=0),
        "recurrent": lambda: nn.Sequential(Last(), nn.Linear(4, 1)),
    }
    assert with_model(models[kind](), tmp_path) == []


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 4)

    def forward(self, inputs):
        return self.gru(inputs)[0]


class Keeps:
    """A plugin that keeps something of its learner."""

    name = "keeps"

    def __init__(self, keep):
        self._keep = keep

    @hookimpl
    def fit_begin(self, learner):
        self.kept = self._keep(learner)


class KeepsWithState(Keeps):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class KeepsMoments(Keeps):
    @hookimpl
    def update_end(self, learner):
        self.moments = learner.optimizer.state[next(learner.model.parameters())]["momentum_buffer"]


OF_THE_LEARNER = {
    "metrics": lambda learner: learner.metrics,
    "metrics in a partial": lambda learner: functools.partial(print, learner.metrics),
    "metrics in a list": lambda learner: [learner.metrics],
    "progress": lambda learner: learner.progress,
    "state of the optimizer": lambda learner: learner.optimizer.state,
    "groups of the optimizer": lambda learner: learner.optimizer.param_groups,
    "a group of the optimizer": lambda learner: learner.optimizer.param_groups[0],
    "rows of the history": lambda learner: learner.history.rows,
    "result": lambda learner: learner.result,
}


@pytest.mark.parametrize("plugin", [Keeps, KeepsWithState, KeepsMoments])
@pytest.mark.parametrize("kind", OF_THE_LEARNER)
def test_what_a_plugin_keeps_of_its_learner_is_saved_by_that(kind, plugin, tmp_path):
    assert named_in(tmp_path, plugins=[plugin(OF_THE_LEARNER[kind]), Schedule(cosine())]) == []


def test_container_of_an_own_plugin_is_named_as_before(tmp_path):
    class Own:
        name = "own"

        def __init__(self):
            self.items = []

        @hookimpl
        def step_end(self):
            self.items.append(1)

        def state_dict(self):
            return {"other": 1}

        def load_state_dict(self, state):
            pass

    [message] = named_in(tmp_path, plugins=[Own()])
    assert "has changed its 'items'" in message
