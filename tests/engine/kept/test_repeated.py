"""Hooks of ``epoch_begin`` that run again when an epoch resumes, and change the state relative to itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.kept.resumed import X, Y
from loopkit import Learner, TrainingPhase, hookimpl, seed_everything
from loopkit.checkpoint.encoding import decode, encode
from loopkit.data import TensorLoader
from loopkit.engine.kept import cells
from loopkit.plugins.throttle import throttle


class Enough(Exception):
    """Ends a run."""


class Ends:
    """Saves the state after a step, and ends the run."""

    name = "ends"
    volatile = ("state",)

    def __init__(self, step: int | None) -> None:
        self.state: Any = None
        self._step = step

    @hookimpl(phase="training")
    def step_end(self, learner: Learner) -> None:
        if learner.progress.steps == self._step:
            self.state = decode(*encode(learner.state_dict()))
            raise Enough


class Changes:
    """Changes something at the begin of each epoch."""

    name = "changes"

    def __init__(self, change: Callable[..., None]) -> None:
        self.count = 0
        self.tensor = torch.zeros(2)
        self._change = change

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.tensor = state["count"], state["tensor"]

    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any, phase: Any, epoch: Any) -> None:
        self._change(self, learner, phase, epoch)


class Scaled(TrainingPhase):
    """A phase with a state."""

    saved = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def loss(self, learner: Any, outputs: Any, targets: Any) -> Tensor:
        return super().loss(learner, outputs, targets) * self.scale


class Gate(nn.Module):
    """Multiplies by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.alpha + self.shift


def group(learner: Any) -> Any:
    return learner.optimizer.param_groups[0]


def lower_rate(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    group(learner)["lr"] *= 0.9


def raise_decay(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    group(learner)["weight_decay"] += 0.1


def forget_momentum(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    learner.optimizer.state.clear()


def halve_momentum(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    for state in learner.optimizer.state.values():
        state["momentum_buffer"] *= 0.5


def grow_parameter(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    learner.model[1].alpha.data.mul_(1.1)


def grow_buffer(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    learner.model[1].shift += 0.1


def toggle(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    bias = learner.model[2].bias
    bias.requires_grad_(not bias.requires_grad)


def count(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    plugin.count += 1
    plugin.tensor = plugin.tensor + 1


def scale(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    phase.scale *= 0.5


def forget_gradients(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    learner.optimizer.zero_grad()


def reset_store(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    epoch.store(plugin)["steps"] = 0


def grow_store(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    store = epoch.store(plugin)
    store["steps"] = len(store)


def nested_store(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    inner = epoch.store(plugin).setdefault("inner", [{"sum": torch.zeros(1)}])
    inner[0]["sum"] += 1
    epoch.store(plugin)["steps"] = inner[0]["sum"].item()


def add_moment(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    for state in learner.optimizer.state.values():
        state[f"moment {len(state)}"] = torch.zeros(1)
        state["momentum_buffer"] /= len(state)


def replace_group(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    learner.optimizer.param_groups[0] = {**group(learner), "lr": group(learner)["lr"] * 0.9}


def load_group(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    state = learner.optimizer.state_dict()
    state["param_groups"][0]["lr"] *= 0.9
    learner.optimizer.load_state_dict(state)


CHANGES = [
    lower_rate,
    raise_decay,
    forget_momentum,
    halve_momentum,
    grow_parameter,
    grow_buffer,
    toggle,
    count,
    scale,
    forget_gradients,
    reset_store,
    grow_store,
    nested_store,
    add_moment,
    replace_group,
    load_group,
]


class CountsInStore:
    """Scales the loss by what it counts in the epoch."""

    name = "counts_in_store"

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    @hookimpl(phase="training", updates=("loss",))
    def backward_begin(self, step: Any) -> None:
        store = step.epoch.store(self._changes)
        store["steps"] = store.get("steps", 0) + 1
        step.loss = step.loss / store["steps"] * (1 + self._changes.count)


def run(change: Any, at: int | None = None, state: Any = None) -> tuple[Any, list[Tensor], Learner]:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(3, 4), Gate(), nn.Linear(4, 1))
    ends, changes = Ends(at), Changes(change)
    plugins = [
        ends,
        changes,
        *([CountsInStore(changes)] if change in (count, reset_store, grow_store, nested_store) else []),
    ]
    learner = Learner(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        phases=[Scaled()],
        plugins=plugins,
        accumulate=2,
        standard=False,
    )
    if state is not None:
        learner.load_state_dict(state)
    with suppress(Enough):
        learner.fit(TensorLoader(X, Y, batch_size=4), epochs=3)
    return ends.state, [each.detach().clone() for each in (*model.parameters(), *model.buffers())], learner


@pytest.mark.parametrize("step", [9, 10], ids=["in a window", "after an update"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_relative_change_is_not_made_twice(change, step, capsys):
    _, whole, _ = run(change)
    state, *_ = run(change, at=step)
    capsys.readouterr()
    _, found, _ = run(change, state=state)
    assert all(map(torch.equal, found, whole))
    said = capsys.readouterr().err
    assert ("changes': epoch_begin runs again when an epoch resumes" in said) is not (
        change is forget_gradients and step == 10
    )


def keep(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    if epoch.resumed:
        plugin.count += 10


def test_change_of_a_hook_that_asks_whether_the_epoch_is_resumed_is_kept(capsys):
    state, *_ = run(keep, at=9)
    capsys.readouterr()
    *_, learner = run(keep, state=state)
    assert learner.plugins["changes"].count == 10
    assert "runs again" not in capsys.readouterr().err


def absolute(plugin: Any, learner: Any, phase: Any, epoch: Any) -> None:
    group(learner)["lr"] = 0.05 * 0.9**learner.progress.epochs
    learner.model[1].shift.fill_(learner.progress.epochs)
    plugin.tensor = torch.full((2,), float(learner.progress.epochs))
    plugin.tensor[0] = float("nan")


def test_change_that_depends_on_the_counters_is_not_named(capsys):
    _, whole, _ = run(absolute)
    state, *_ = run(absolute, at=9)
    capsys.readouterr()
    _, found, _ = run(absolute, state=state)
    assert all(map(torch.equal, found, whole))
    assert "runs again" not in capsys.readouterr().err


class Begins:
    """Changes something when a fit begins."""

    name = "begins"

    def __init__(self, change: Callable[..., None]) -> None:
        self._change = change

    @hookimpl
    def fit_begin(self, learner: Any) -> None:
        self._change(learner)


def halve_rate(learner: Any) -> None:
    group(learner)["lr"] *= 0.5


def make_anew(learner: Any) -> None:
    learner.model[0].reset_parameters()


def freeze_other(learner: Any) -> None:
    bias = learner.model[1].bias
    bias.requires_grad_(not bias.requires_grad)


def once(learner: Any) -> None:
    if not learner.current.resumed:
        group(learner)["lr"] *= 0.5


def set_rate(learner: Any) -> None:
    group(learner)["lr"] = 0.05
    group(learner).setdefault("initial_lr", 0.05)


def begin(change: Any, at: int | None = None, state: Any = None) -> Any:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    ends = Ends(at)
    learner = Learner(
        model,
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        plugins=[ends, Begins(change)],
        standard=False,
    )
    if state is not None:
        learner.load_state_dict(state)
    with suppress(Enough):
        learner.fit(TensorLoader(X, Y, batch_size=4), epochs=2)
    return ends.state


@pytest.mark.parametrize("change", [halve_rate, make_anew, freeze_other], ids=lambda change: change.__name__)
def test_change_at_the_begin_of_a_resumed_fit_is_named(change):
    state = begin(change, at=9)
    with pytest.warns(UserWarning, match="'begins': fit_begin runs again when a fit resumes, and changed"):
        begin(change, state=state)


@pytest.mark.parametrize("change", [once, set_rate], ids=lambda change: change.__name__)
def test_change_that_is_made_once_or_is_none_is_not_named(change):
    begin(change, state=begin(change, at=9))


class SavesAtBegin:
    """Saves the state inside ``epoch_begin``, before the other hook, and ends the run."""

    name = "a_saver"
    volatile = ("state",)

    def __init__(self, epoch: int | None) -> None:
        self.state: Any = None
        self._epoch = epoch

    @hookimpl(phase="training", before=("changes",))
    def epoch_begin(self, learner: Learner) -> None:
        if learner.progress.epochs == self._epoch:
            self.state = decode(*encode(learner.state_dict()))
            raise Enough


class Plain:
    """Changes something at the begin of each epoch, and has no state."""

    name = "changes"

    def __init__(self, change: Callable[..., None]) -> None:
        self._change = change

    @hookimpl(phase="training")
    def epoch_begin(self, learner: Any, phase: Any, epoch: Any) -> None:
        self._change(self, learner, phase, epoch)


def train(*plugins: Any, state: Any = None, allow: Any = ()) -> Learner:
    seed_everything(0)
    model = nn.Sequential(nn.Linear(3, 4), Gate(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False)
    if state is not None:
        learner.load_state_dict(state, allow=allow)
    with suppress(Enough):
        learner.fit(TensorLoader(X, Y, batch_size=4), epochs=3)
    return learner


@pytest.mark.parametrize("change", [lower_rate, raise_decay, grow_parameter], ids=lambda change: change.__name__)
def test_change_in_an_epoch_that_was_saved_before_its_first_step_stays_and_is_named(change, capsys):
    whole = train(SavesAtBegin(None), Plain(change))
    saver = SavesAtBegin(1)
    train(saver, Plain(change))
    capsys.readouterr()
    found = train(SavesAtBegin(None), Plain(change), state=saver.state)
    assert all(map(torch.equal, found.model.parameters(), whole.model.parameters()))
    assert "may hold as changed already: the change stays" in capsys.readouterr().err


class Listed(Plain):
    """Has a list or a tuple as its state."""

    def __init__(self, kind: Any) -> None:
        super().__init__(Listed.add)
        self.values: Any = []
        self._kind = kind

    def add(self, *_: Any) -> None:
        self.values.append(len(self.values))

    def state_dict(self) -> Any:
        return self._kind(self.values)

    def load_state_dict(self, state: Any) -> None:
        self.values = list(state)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.filterwarnings("ignore:plugin 'changes'.*and its state_dict leaves out that")
def test_list_or_tuple_as_the_state_of_a_plugin_is_put_back(kind):
    ends = Ends(9)
    train(ends, Listed(kind))
    learner = train(Ends(None), Listed(kind), state=ends.state)
    assert learner.plugins["changes"].values == [0, 1, 2]


@pytest.mark.parametrize("wrap", [lambda plugin: throttle(plugin, every=1), lambda plugin: plugin])
@pytest.mark.parametrize("home", ["loopkit_of_a_third_party", "script"])
def test_plugins_of_others_are_not_taken_for_shipped_ones(wrap, home, monkeypatch):
    monkeypatch.setattr(Plain, "__module__", home)
    whole = train(Ends(None), wrap(Plain(lower_rate)))
    ends = Ends(9)
    train(ends, wrap(Plain(lower_rate)))
    learner = train(Ends(None), wrap(Plain(lower_rate)), state=ends.state)
    assert group(learner)["lr"] == group(whole)["lr"]


def test_first_run_of_a_plugin_that_the_loaded_state_lacks_is_kept(capsys):
    ends = Ends(9)
    train(ends)
    capsys.readouterr()
    learner = train(Ends(None), Changes(lower_rate), state=ends.state, allow=["changes"])
    assert group(learner)["lr"] == 0.05 * 0.9 * 0.9
    assert "runs again" not in capsys.readouterr().err


class AddsAnother:
    """Adds a plugin at the end of an epoch."""

    name = "adds_another"

    @hookimpl(phase="training")
    def epoch_end(self, learner: Any) -> None:
        if "begins" not in learner.plugins:
            learner.add(Begins(halve_rate))


def test_begin_of_a_plugin_that_joins_a_resumed_fit_is_not_named():
    ends = Ends(3)
    train(ends, AddsAnother())
    learner = train(Ends(None), AddsAnother(), state=ends.state)
    assert group(learner)["lr"] == 0.025


def test_weights_are_copied_again_only_after_a_change(monkeypatch):
    copies = []
    copied = cells._copied
    monkeypatch.setattr(cells, "_copied", lambda tensor: copies.append(tensor) or copied(tensor))
    ends = Ends(9)
    train(ends)
    numbers = []
    for count in (1, 3):
        plugins = [Plain(lambda *_: None) for _ in range(count)]
        for number, plugin in enumerate(plugins):
            plugin.name = f"plain_{number}"
        copies.clear()
        train(Ends(None), *plugins, state=ends.state)
        numbers.append(len(copies))
    assert numbers[0] == numbers[1] > 0
