"""A learner's state: what it holds, what it refuses, and that a run goes on from it bit for bit."""

import copy
import inspect
import os
import random
import signal
from functools import partial

import numpy
import pytest
import torch
from faults.forked import forked
from helpers import batches, differences, make_learner, on
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import CancelEpoch, CancelStep, Learner, Phase, TrainingPhase, every, hookimpl
from loopkit.checkpoint import load, storage
from loopkit.data import ResumableSampler, TensorLoader, same
from loopkit.errors import PluginError, ReentrancyError, StateError
from loopkit.plugins import (
    Checkpoint,
    ClipGradNorm,
    EarlyStopping,
    History,
    Metrics,
    Plateau,
    Schedule,
    WeightAverage,
)
from loopkit.schedules import cosine


class Saver:
    """Keeps a copy of the state at every edge, under what was the last step of each open pass."""

    name = "saver"
    volatile = ("states",)

    def __init__(self):
        self.states = {}

    @hookimpl(reads=("*",))
    def step_end(self, learner, phase, step):
        self.keep(learner, f"{phase.name} {learner.progress.steps} step {step.index}")

    @hookimpl(reads=("*",))
    def phase_end(self, learner, phase):
        self.keep(learner, f"{phase.name} {learner.progress.steps} end")

    def keep(self, learner, edge):
        if learner.current is None or learner.current.can_save:
            self.states[edge] = copy.deepcopy(learner.state_dict())


def assert_goes_on(make, run):
    """Whatever edge a learner is dropped at, a new one ends as the first would have: ``run(learner, load)``."""

    def end(learner, load=lambda learner: None):
        run(learner, load)
        return copy.deepcopy(learner.state_dict())

    straight = end(make())
    saved, saver = make(), Saver()
    saved.add(saver)
    assert not list(differences(straight, end(saved)))
    assert len(saver.states) > 1
    for edge, state in saver.states.items():
        learner = make()
        with torch.no_grad():
            for p in (p for model in learner.models.values() for p in model.parameters()):
                p.add_(1.0)
        torch.manual_seed(77)
        random.seed(77)
        numpy.random.seed(77)
        found = list(differences(straight, end(learner, lambda learner, state=state: learner.load_state_dict(state))))
        assert not found, f"after {edge}: {found[:5]}"
    return saver.states


def fitting(*data, **options):
    """What `assert_goes_on` runs."""

    def run(learner, load):
        load(learner)
        learner.fit(*data, **options)

    return run


# What it holds


def test_state_names_everything_that_decides_how_training_goes_on():
    learner = make_learner(History(), ClipGradNorm(1.0))
    learner.fit(batches(3), epochs=1)
    state = learner.state_dict()
    assert set(state) == {
        "versions",
        "models",
        "buffers",
        "optimizers",
        "progress",
        "metrics",
        "plugins",
        "flags",
        "phases",
        "epochs",
        "data",
        "nested",
        "fit",
        "generators",
    }
    assert list(state["plugins"]) == ["history"]
    assert state["optimizers"]["optimizer"]["class"] == "SGD"
    assert state["progress"] == {"epochs": 1, "steps": 3, "updates": 3, "samples": 12}
    assert (state["epochs"], state["fit"]) == ([], None)


def test_tensors_of_a_state_are_those_in_use():
    learner = make_learner()
    state = learner.state_dict()
    assert state["models"]["model"]["weight"].data_ptr() == learner.model.weight.data_ptr()


def test_loading_keeps_no_tensor_of_the_state_and_changes_none():
    learner = make_learner(WeightAverage(0.5), lr=0.1)
    learner.fit(batches(3), epochs=1)
    state = copy.deepcopy(learner.state_dict())
    before = copy.deepcopy(state)
    other = make_learner(WeightAverage(0.5), lr=0.1)
    other.load_state_dict(state)
    other.fit(batches(3), epochs=2)
    assert not list(differences(before, state))


def test_state_holds_the_own_weights_while_averaged_ones_are_in_place():
    average, seen = WeightAverage(0.5), []

    def look(learner, phase, **given):
        if phase.name == "val":
            assert average.in_place
            seen.append((copy.deepcopy(learner.state_dict()["models"]["model"]), learner.model.weight.detach().clone()))

    learner = make_learner(average, on("step_end", look, reads=("*",)))
    learner.fit(batches(3), batches(1), epochs=1)
    (saved, in_place), raw = seen[0], learner.model.weight
    assert torch.equal(saved["weight"], raw)
    assert not torch.equal(in_place, raw)


def test_state_puts_the_averaged_weights_back_in_place():
    average, outputs = WeightAverage(0.5), []

    def look(learner, phase, **given):
        if phase.name == "val":
            before = learner.model.weight.detach().clone()
            learner.state_dict()
            outputs.append(torch.equal(before, learner.model.weight))

    make_learner(average, on("step_end", look, reads=("*",))).fit(batches(3), batches(2), epochs=1)
    assert outputs == [True, True]


class Odd(nn.Module):
    """A buffer that is not saved, tied weights, extra state, and a buffer that is None."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.out = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("nothing", None)
        self.note = "new"

    def forward(self, x):
        self.count += 1
        self.note = f"seen {int(self.count)}"
        return self.out(self.two(self.one(x))) + 0.01 * self.count

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def test_buffers_that_the_model_does_not_save_ties_and_extra_state_go_on():
    def make():
        torch.manual_seed(0)
        return make_learner(model=Odd())

    states = assert_goes_on(make, fitting(batches(3), batches(2), epochs=2))
    state = states["train 3 end"]
    assert state["buffers"]["model"]["count"] == 3
    learner = make_learner(model=Odd())
    learner.load_state_dict(state)
    assert learner.model.one.weight is learner.model.two.weight
    assert learner.model.note == "seen 3"


def test_state_of_a_loaded_learner_is_the_one_that_was_loaded():
    saver = Saver()
    make = partial(make_learner, WeightAverage(0.5), accumulate=3)
    make(saver).fit(batches(4), batches(2), epochs=2)
    for edge, state in saver.states.items():
        learner = make_learner(WeightAverage(0.5), accumulate=3)
        learner.load_state_dict(state)
        assert not list(differences(state, learner.state_dict(), leave_out=())), edge


# Generators


def test_global_generators_go_on_where_they_were():
    draws = []

    def draw(**given):
        draws.append((torch.rand(1).item(), random.random(), numpy.random.rand()))

    def run(learner, load):
        load(learner)
        draws.clear()
        learner.fit(batches(3), epochs=2)

    saver = Saver()
    learner = make_learner(on("step_begin", draw), saver)
    run(learner, lambda learner: None)
    expected = list(draws)
    for done, edge in ((1, "train 1 step 0"), (3, "train 3 end"), (5, "train 5 step 1")):
        again = make_learner(on("step_begin", draw))
        run(again, lambda learner, edge=edge: learner.load_state_dict(saver.states[edge]))
        assert draws == expected[done:]


# Accumulation windows


class Weighted(TrainingPhase):
    """Uneven weights, as numbers or tensors."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def step(self, learner, step):
        step.weight = self.make(1 + step.index % 3)
        super().step(learner, step)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "weigh", [float, lambda n: torch.tensor(n, dtype=torch.int64), lambda n: 2.0], ids=["float", "tensor", "constant"]
)
def test_open_windows_go_on(weigh, reduction):
    def make():
        learner = make_learner(phases=[Weighted(weigh)], accumulate=3, lr=0.001)
        learner.loss_fn = nn.MSELoss(reduction=reduction)
        return learner

    states = assert_goes_on(make, fitting(batches(5), epochs=2))
    counts = [
        state["epochs"][0]["windows"].get("optimizer", {}).get("count", 0)
        for state in states.values()
        if state["epochs"]
    ]
    assert counts == [1, 2, 0, 1, 0] * 2


class Rivals(Phase):
    """Two models whose windows are filled at different paces."""

    name = "train"
    training = True

    def step(self, learner, step):
        inputs, targets = step.batch
        for name in ("one", "two"):
            if name == "one" or step.index % 2 == 0:
                loss = learner.loss_fn(learner.model[name](inputs), targets)
                step.backward(loss, name)
                step.update(name)


def make_rivals(*plugins):
    torch.manual_seed(0)
    return Learner(
        {"one": nn.Linear(3, 1), "two": nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Linear(2, 1))},
        nn.MSELoss(),
        {"one": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "two": partial(torch.optim.Adam, lr=0.1)},
        phases=[Rivals()],
        accumulate=3,
        standard=False,
        plugins=plugins,
    )


def test_windows_of_several_optimizers_go_on():
    states = assert_goes_on(make_rivals, fitting(batches(7), epochs=2))
    windows = states["train 5 step 4"]["epochs"][0]["windows"]
    assert {name: window["count"] for name, window in windows.items()} == {"one": 2}
    windows = states["train 4 step 3"]["epochs"][0]["windows"]
    assert {name: window["count"] for name, window in windows.items()} == {"one": 1, "two": 2}


def test_open_window_of_another_size_is_refused():
    saver = Saver()
    make_learner(saver, accumulate=3).fit(batches(3), epochs=1)
    learner = make_learner(accumulate=2)
    learner.load_state_dict(saver.states["train 2 step 1"])
    with pytest.raises(StateError, match=r"after 2 of the 3 steps of an update.*takes 2: give Learner\(accumulate=3\)"):
        learner.fit(batches(3), epochs=1)


# Optimizers whose state has another dtype than the parameters


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        (torch.float64, partial(torch.optim.ASGD, lr=0.1, t0=2)),
        (torch.bfloat16, partial(torch.optim.ASGD, lr=0.1, t0=2)),
        (torch.bfloat16, partial(torch.optim.Adam, lr=0.1)),
        (torch.bfloat16, partial(torch.optim.NAdam, lr=0.1)),
        (torch.float64, partial(torch.optim.RAdam, lr=0.1)),
        (torch.bfloat16, partial(torch.optim.Adafactor, lr=0.1)),
    ],
    ids=lambda value: str(getattr(value, "func", value)).rpartition(".")[2].strip("'>"),
)
def test_state_of_optimizers_is_exact_in_any_dtype(dtype, optimizer):
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(3)]

    def make():
        torch.manual_seed(0)
        return Learner(nn.Linear(3, 1).to(dtype), nn.MSELoss(), optimizer, standard=False)

    assert_goes_on(make, fitting(data, epochs=2))


def test_optimizer_state_of_another_dtype_is_not_cast():
    """What torch's own load_state_dict would do."""
    learner = make_learner()
    state = copy.deepcopy(learner.state_dict())
    exact = torch.tensor([[1 / 3, 2 / 3, 1.0]], dtype=torch.float64)
    state["optimizers"]["optimizer"]["state"] = {0: {"momentum_buffer": exact}}
    learner.load_state_dict(state)
    kept = learner.optimizer.state[learner.model.weight]["momentum_buffer"]
    assert kept.dtype == torch.float64
    assert torch.equal(kept, exact)


class Closure(TrainingPhase):
    def step(self, learner, step):
        inputs, targets = step.batch

        def evaluate():
            step.loss = learner.loss_fn(learner.model(inputs), targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=evaluate)


@pytest.mark.parametrize(
    "options",
    [{"lr": numpy.logspace(-3, -1, 3)[1]}, {"lr": numpy.float32(0.01)}, {"betas": tuple(numpy.array([0.8, 0.9]))}],
    ids=["float64", "float32", "betas"],
)
def test_options_of_optimizers_that_are_scalars_of_numpy_resume(options, tmp_path):
    def fit(epochs):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        checkpoint = Checkpoint(tmp_path, resume="auto")
        return Learner(model, nn.MSELoss(), optimizer, plugins=[checkpoint], standard=False).fit(
            batches(2), epochs=epochs
        )

    fit(1)
    assert fit(2).epochs == 2


def test_lbfgs_goes_on():
    def make():
        torch.manual_seed(0)
        optimizer = partial(torch.optim.LBFGS, lr=0.3, max_iter=3, history_size=3, line_search_fn="strong_wolfe")
        return Learner(nn.Linear(3, 1), nn.MSELoss(), optimizer, phases=[Closure()], standard=False)

    assert_goes_on(make, fitting(batches(3), epochs=2))


# What it refuses


def test_state_in_the_middle_of_a_step_is_refused():
    learner = make_learner(on("loss_begin", lambda learner, **given: learner.state_dict()))
    with pytest.raises(StateError, match=r"state_dict in the middle of a step.*can_save"):
        learner.fit(batches(2), epochs=1)


@pytest.mark.parametrize(
    "hook",
    ["step_begin", "forward_begin", "loss_begin", "backward_begin", "backward_end", "update_begin", "update_end"],
)
def test_no_edge_inside_of_a_step(hook):
    edges = []
    learner = make_learner(on(hook, lambda learner, **given: edges.append(learner.current.can_save)))
    learner.fit(batches(2), epochs=1)
    assert edges == [False, False]


@pytest.mark.parametrize("hook", ["step_end", "phase_end"])
def test_no_edge_inside_of_a_pass_that_a_hook_runs(hook):
    edges = []

    def nested(learner, phase, **given):
        if phase.name == "train":
            learner.run("val", batches(1))

    def look(learner, phase, **given):
        edges.append((phase.name, learner.current.can_save))
        if not learner.current.can_save:
            with pytest.raises(StateError, match="an epoch that a hook runs"):
                learner.state_dict()

    learner = make_learner(on(hook, nested, "a", before=("z",)), on("step_end", look, "z"))
    learner.fit(batches(1), epochs=1)
    expected = [("val", False), ("train", True)] if hook == "step_end" else [("train", True), ("val", False)]
    assert edges == expected


def test_load_during_a_pass_is_refused():
    state = make_learner().state_dict()
    learner = make_learner(on("step_end", lambda learner, **given: learner.load_state_dict(state)))
    with pytest.raises(ReentrancyError, match="load_state_dict: an epoch is running"):
        learner.fit(batches(1), epochs=1)


def wide(width, kind=torch.optim.SGD, *plugins, layers=1):
    torch.manual_seed(width)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 1))
    return Learner(model, nn.MSELoss(), partial(kind, lr=0.1), plugins=plugins, standard=False)


def assert_refused(learner, state, match, **options):
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(StateError, match=match) as caught:
        learner.load_state_dict(state, **options)
    assert not list(differences(before, learner.state_dict()))
    return str(caught.value)


def test_state_of_other_shapes_is_refused_with_the_first_five():
    text = assert_refused(wide(3, layers=4), wide(4, layers=4).state_dict(), "nothing was loaded")
    assert "9 tensors of model 'model' that differ: 0.weight: torch.float32 (4, 4) in the state" in text
    assert "torch.float32 (3, 3) here, 0.bias:" in text
    assert "2.weight" in text
    assert "2.bias" not in text
    assert "and 4 more" in text


def test_state_of_another_dtype_is_refused():
    other = wide(3)
    other.model.double()
    assert_refused(wide(3), other.state_dict(), r"0.weight: torch.float64 \(3, 3\) in the state, torch.float32")


def test_state_of_a_deeper_model_is_refused():
    text = assert_refused(wide(3), wide(3, layers=2).state_dict(), "nothing was loaded")
    assert "2 tensors of model 'model' in the state that are not here: '2.weight' (did you mean" in text
    assert "'2.bias'" in text


def test_state_of_another_optimizer_is_refused():
    text = assert_refused(wide(3), wide(3, torch.optim.Adam).state_dict(), "nothing was loaded")
    assert "optimizer 'optimizer': Adam in the state, SGD here" in text


def test_state_of_other_parameter_groups_is_refused():
    learner = wide(3)
    extra = nn.Parameter(torch.zeros(1))
    learner.optimizer.add_param_group({"params": [extra]})
    assert_refused(wide(3), learner.state_dict(), r"parameters per group \[4, 1\] in the state, \[4\] here")


def test_plugins_that_are_missing_or_new_are_listed_and_can_be_allowed():
    state = copy.deepcopy(wide(3, torch.optim.SGD, History(), WeightAverage(0.5, name="avrage")).state_dict())
    learner = wide(3, torch.optim.SGD, WeightAverage(0.5, name="average"), Schedule(cosine()))
    text = assert_refused(learner, state, "nothing was loaded")
    assert "2 plugins in the state that are not here: 'avrage' (did you mean 'average'?), 'history'" in text
    assert "2 plugins here that are not in the state: 'average', 'schedule'; " in text
    assert "allow=('average', 'avrage', 'history', 'schedule'" in text
    assert_refused(learner, state, "'schedule'", allow=["history", "avrage", "average"])
    learner.load_state_dict(state, allow=["history", "avrage", "average", "schedule"])


def test_allowed_plugin_begins_anew():
    first = wide(3, torch.optim.SGD, History())
    first.fit([(torch.ones(2, 3), torch.ones(2, 1))], epochs=2)
    average = WeightAverage(0.5)
    second = wide(3, torch.optim.SGD, average)
    second.load_state_dict(first.state_dict(), allow=["history", "weight_average"])
    assert second.progress.updates == 2
    assert average.state_dict() == {}


def test_failing_load_of_a_plugin_says_which():
    class Picky:
        name = "picky"

        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise KeyError("b")

        @hookimpl
        def fit_end(self):
            pass

    state = make_learner(Picky()).state_dict()
    with pytest.raises(KeyError) as caught:
        make_learner(Picky()).load_state_dict(state)
    assert (
        "in load_state_dict of plugin 'picky', whose saved state may be of another version" in caught.value.__notes__[0]
    )


def loader(samples=24, size=4, sampler=True):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))
    return DataLoader(data, size, sampler=ResumableSampler(data, seed=1)) if sampler else DataLoader(data, size)


def test_changed_dataset_in_mid_epoch_is_refused_and_between_epochs_warned_of():
    saver = Saver()
    make_learner(saver).fit(loader(), epochs=2)
    learner = make_learner()
    learner.load_state_dict(saver.states["train 2 step 1"])
    with pytest.raises(StateError, match="samples: 24 before, 20 now"):
        learner.fit(loader(20), epochs=2)
    learner = make_learner()
    learner.load_state_dict(saver.states["train 6 end"])
    with pytest.warns(
        UserWarning, match=r"changed since its position was saved, between epochs:.*samples: 24 before, 20"
    ):
        learner.fit(loader(20), epochs=2)


def test_changed_batch_size_in_mid_epoch_goes_on_behind_the_samples_that_were_used():
    saver, seen = Saver(), []
    make_learner(saver).fit(loader(), epochs=1)
    learner = make_learner(on("step_begin", lambda step, **given: seen.append(step.samples)))
    learner.load_state_dict(saver.states["train 2 step 1"])
    with pytest.warns(UserWarning, match="batch size: 4 before, 8 now"):
        learner.fit(loader(size=8), epochs=1)
    assert seen == [8, 8]


def test_replay_can_be_refused():
    saver = Saver()
    make_learner(saver).fit(loader(sampler=False), epochs=1)
    learner = make_learner()
    learner.load_state_dict(saver.states["train 2 step 1"], replay=False)
    with pytest.raises(StateError, match="has no position, and 2 batches of the epoch were used"):
        learner.fit(loader(sampler=False), epochs=1)


def test_one_shot_generator_goes_on_in_its_only_epoch():
    assert_goes_on(make_learner, lambda learner, load: (load(learner), learner.fit(iter(batches(4)), epochs=1)))


def test_pass_of_another_phase_than_the_saved_one_is_refused():
    saver = Saver()
    make_learner(saver, phases=[TrainingPhase(name="fine")]).fit({"fine": batches(2)}, epochs=1)
    learner = make_learner()
    learner.load_state_dict(saver.states["fine 1 step 0"])
    with pytest.raises(StateError, match="saved in an epoch of phase 'fine', and this is one of 'train'"):
        learner.fit(batches(2), epochs=1)


# Fits


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 3, "validate": every(epochs=2)},
        {"epochs": 2, "validate": every(updates=2)},
        {"max_steps": 7},
        {"max_updates": 5},
        {"max_steps": 5, "validate": every(updates=2)},
        {"max_updates": 4, "epochs": 9, "validate": every(epochs=3)},
    ],
    ids=str,
)
def test_fit_with_its_limits_goes_on(options):
    results = []

    def run(learner, load):
        load(learner)
        result = learner.fit(batches(4), batches(2), **options)
        results.append((result.reason, result.epochs, result.steps, result.updates, result.samples))

    assert_goes_on(lambda: make_learner(History()), run)
    assert set(results) == {results[0]}


def test_fit_on_the_same_batches_in_every_epoch_goes_on():
    def run(learner, load):
        load(learner)
        learner.fit(same(TensorLoader(torch.arange(24.0).view(8, 3), torch.ones(8, 1), batch_size=2), 3), epochs=2)

    assert_goes_on(lambda: make_learner(History()), run)


@pytest.mark.parametrize(
    ("short", "long"),
    [({"epochs": 1}, {"epochs": 3}), ({"max_steps": 5}, {"max_steps": 9}), ({"max_updates": 2}, {"epochs": 2})],
)
def test_limit_can_be_extended_when_the_fit_goes_on(short, long):
    """From any edge that both have in common, which leaves out what comes after the shorter limit."""
    loaders = partial(TensorLoader, torch.randn(16, 3), torch.randn(16, 1), batch_size=4, shuffle=True)
    straight, saver, again = make_learner(), Saver(), make_learner()
    straight.fit(loaders(), epochs=long.get("epochs"), max_steps=long.get("max_steps"))
    make_learner(saver).fit(loaders(), **short)
    edges = [edge for edge in saver.states if edge.startswith("train") and "end" not in edge]
    again.load_state_dict(saver.states[edges[-1]])
    result = again.fit(loaders(), **long)
    assert not list(differences(straight.state_dict(), again.state_dict()))
    assert result.steps == straight.result.steps


def test_fit_after_fit_goes_on():
    def run(learner, load):
        load(learner)
        done = learner._engine.resume.position
        first = done is None or done.start.steps == 0
        data = TensorLoader(torch.ones(8, 3), torch.zeros(8, 1), batch_size=4, shuffle=True)
        if first:
            learner.fit(data, epochs=1)
        learner.fit(data, epochs=2)

    states = {}
    learner, saver = make_learner(History()), Saver()
    learner.add(saver)
    run(learner, lambda learner: None)
    states, final = saver.states, copy.deepcopy(learner.state_dict())
    for edge, state in states.items():
        again = make_learner(History())
        run(again, lambda learner, state=state: learner.load_state_dict(state))
        found = [d for d in differences(final, again.state_dict()) if not d.startswith("data")]
        assert not found, f"after {edge}: {found[:3]}"


@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_stops_with_the_same_counts(patience):
    scores = [3.0, 2.0, 2.0, 2.0, 2.0]
    results = []

    def score(learner, **given):
        learner.metrics["val/score"] = scores[learner.progress.epochs - 1]

    def make():
        measure = on(
            "epoch_end", lambda learner, phase: phase.name == "val" and score(learner), writes=("metrics.val/score",)
        )
        return make_learner(EarlyStopping("val/score", patience, mode="min"), measure)

    def run(learner, load):
        load(learner)
        result = learner.fit(batches(2), batches(1), epochs=5)
        results.append((result.reason, result.message, result.epochs))

    states = assert_goes_on(make, run)
    assert len(states) == (2 + patience) * 5
    assert {(reason, epochs) for reason, _, epochs in results} == {("stop", 2 + patience)}
    assert "2 was not improved in" in results[0][1]
    assert len(set(results)) == 1


@pytest.mark.parametrize("hook", ["step_end", "update_end", "phase_end"])
def test_request_for_a_stop_survives(hook):
    """One that came before the state was saved, and was not obeyed by then."""

    def stop(learner, **given):
        if learner.progress.steps >= 1:
            learner.stop("enough", by="acting")

    results = []

    def run(learner, load):
        load(learner)
        asked = learner._engine.resume.position is not None and learner._engine.resume.position.stop is not None
        if asked:
            learner.remove("acting")
        result = learner.fit(batches(4), batches(2), epochs=3)
        results.append((result.reason, result.message, result.by, result.steps))

    def make():
        return make_learner(on(hook, stop))

    assert_goes_on(make, run)
    assert len(set(results)) == 1
    assert results[0][:3] == ("stop", "enough", "acting")


def test_fit_that_was_paused_goes_on():
    """The end of a job's time pauses a fit, and the next job goes on."""
    final = {}

    def stop(learner, **given):
        if learner.progress.steps == 2:
            learner.pause("time is up")

    def save(learner, **given):
        final.update(copy.deepcopy(learner.state_dict()))

    first = make_learner(on("step_end", stop), on("signal_begin", save, "saver", reads=("*",)))
    assert first.fit(batches(4), epochs=2, on_interrupt="return").reason == "pause"
    second = make_learner()
    second.load_state_dict(final)
    assert second.fit(batches(4), epochs=2).reason == "epochs"


@pytest.mark.parametrize("cancel", [CancelStep, CancelEpoch])
def test_run_with_cancels_goes_on(cancel):
    def spoil(step, phase, **given):
        if step.index == 1 and phase.training:
            raise cancel("once an epoch")

    assert_goes_on(
        lambda: make_learner(on("backward_end", spoil), History(), accumulate=2),
        fitting(batches(4), batches(1), epochs=3),
    )


# Loops of one's own


def test_loop_of_runs_goes_on():
    tensors = torch.ones(12, 3), torch.randn(12, 1, generator=torch.Generator().manual_seed(0))
    data = partial(TensorLoader, *tensors, batch_size=4, shuffle=True)

    def run(learner, load):
        train = data()
        load(learner)
        with learner.rounds():
            while learner.progress.epochs < 3:
                learner.run("train", train)

    assert_goes_on(lambda: make_learner(History()), run)


def test_loop_over_steps_goes_on():
    data = batches(5)

    def run(learner, load):
        load(learner)
        with learner.rounds():
            while learner.progress.epochs < 2:
                with learner.epoch("train", data=data) as epoch:
                    for batch in epoch.batches():
                        epoch.step(batch)

    assert_goes_on(lambda: make_learner(History(), accumulate=2), run)


@pytest.mark.parametrize("saving", [False, True])
def test_loop_over_steps_of_unknown_data_is_refused_before_the_first_step(saving, tmp_path):
    plugin = (
        Checkpoint(tmp_path, save=every(updates=2))
        if saving
        else on("epoch_begin", lambda learner, **_: learner.state_dict())
    )
    learner = make_learner(plugin)

    def loop():
        with learner.rounds(), learner.epoch("train", length=4) as epoch:
            for batch in batches(4):
                epoch.step(batch)

    with pytest.raises(StateError, match=r"phase 'train' has data that the learner does not know.*data=loader"):
        loop()
    assert learner.progress.steps == 0


def test_loop_over_steps_killed_in_mid_pass_goes_on(tmp_path):
    def run(directory, at=None):
        loader = TensorLoader(*tensors(32), batch_size=4, shuffle=True)
        learner = dropping(
            directory, *dying("step_begin", lambda learner, **_: learner.progress.steps == at), save=every(updates=3)
        )
        for _ in learner.rounds(epochs=2):
            with learner.epoch("train", data=loader) as epoch:
                for batch in epoch.batches():
                    epoch.step(batch)
        return learner

    straight = run(tmp_path / "straight")
    for at in (5, 12):
        assert forked(lambda at=at: run(tmp_path / str(at), at)).code == 9
        assert not list(differences(straight.state_dict(), run(tmp_path / str(at)).state_dict())), at


def tensors(count):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator)


def dying(hook, when, **options):
    """A plugin, in a list, that ends the process at once, with code 9."""

    taken = inspect.signature(when).parameters
    everything = any(each.kind is each.VAR_KEYWORD for each in taken.values())

    def die(**given):
        if when(**{name: value for name, value in given.items() if everything or name in taken}):
            os._exit(9)

    return [on(hook, die, "dying", **options)]


EVERY_EPOCH = every(epochs=1)


def dropping(directory, *plugins, save=EVERY_EPOCH):
    """A learner with dropout, that saves and resumes."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    saver = Checkpoint(directory, save=save, resume="auto")
    return make_learner(saver, Metrics(), History(steps=True), *plugins, model=model, lr=0.05)


def train_and_validate(directory, *plugins):
    train = TensorLoader(*tensors(24), batch_size=8, shuffle=True)
    val = TensorLoader(*tensors(24), batch_size=8)
    learner = dropping(directory, Plateau("val/loss", patience=1, threshold=1.0), *plugins)
    for _ in learner.rounds(epochs=6):
        learner.run("train", train)
        learner.run("val", val)
    return learner


@pytest.fixture(scope="module")
def straight_loop(tmp_path_factory):
    """The state after an own loop that nothing interrupted."""
    learner = train_and_validate(tmp_path_factory.mktemp("straight"))
    assert learner.optimizer.param_groups[0]["lr"] < 0.05  # else Plateau would not matter
    return learner.state_dict()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("epoch", range(1, 6))
def test_own_loop_killed_at_the_begin_of_an_epoch_goes_on(epoch, order, straight_loop, tmp_path):
    at = lambda learner, phase: phase.training and learner.progress.epochs == epoch  # noqa: E731
    outcome = forked(lambda: train_and_validate(tmp_path, *dying("epoch_begin", at, **{order: ("checkpoint",)})))
    assert outcome.code == 9
    saved = [m.about["progress"]["epochs"] for m in storage.listing(tmp_path)]
    assert saved[:1] == [epoch]  # the round before has ended
    assert not list(differences(straight_loop, train_and_validate(tmp_path).state_dict()))


@pytest.mark.parametrize("hook", ["epoch_begin", "step_end", "phase_end"])
@pytest.mark.parametrize("epoch", [1, 3, 6])
def test_own_loop_killed_in_validation_goes_on(epoch, hook, straight_loop, tmp_path):
    def at(learner, phase, step=None):
        return phase.name == "val" and learner.progress.epochs == epoch and (step is None or step.index == 1)

    assert forked(lambda: train_and_validate(tmp_path, *dying(hook, at))).code == 9
    assert not list(differences(straight_loop, train_and_validate(tmp_path).state_dict()))


@pytest.mark.parametrize("epoch", range(1, 7))
def test_own_loop_ended_by_sigterm_in_validation_goes_on(epoch, straight_loop, tmp_path):
    def at(learner, phase, step):
        if phase.name == "val" and learner.progress.epochs == epoch and step.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        train_and_validate(tmp_path, on("step_end", at))
    seen = []
    look = on("fit_begin", lambda learner, **_: seen.append(learner.current.resuming), "look", after=("checkpoint",))
    again = train_and_validate(tmp_path, look, on("epoch_begin", lambda phase, **_: seen.append(phase.name)))
    assert seen[:2] == ["val", "val"]
    assert not list(differences(straight_loop, again.state_dict()))


def sharing():
    """Two loaders, one generator."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*tensors(32))
    return DataLoader(data, 8, shuffle=True, generator=generator), DataLoader(data, 8, generator=generator)


def twice():
    """One loader, as both."""
    return [TensorLoader(*tensors(32), batch_size=8, shuffle=True)] * 2


@pytest.mark.parametrize("make", [sharing, twice])
@pytest.mark.parametrize("epoch", [1, 2])
def test_loaders_that_share_a_position_go_on(make, epoch, tmp_path):
    def run(directory, *plugins):
        learner = dropping(directory, *plugins)
        learner.fit(*make(), epochs=4)
        return learner.state_dict()

    at = lambda learner, phase: phase.training and learner.progress.epochs == epoch  # noqa: E731
    assert forked(lambda: run(tmp_path / "killed", *dying("epoch_begin", at))).code == 9
    assert not list(differences(run(tmp_path / "straight"), run(tmp_path / "killed")))


def test_loaders_that_take_turns_in_one_phase_are_refused(tmp_path):
    one, two = (TensorLoader(*tensors(8), batch_size=4, shuffle=True, seed=seed) for seed in (0, 1))
    saved = []
    learner = make_learner(on("step_end", lambda learner, **_: saved.append(learner.state_dict())))

    def loop(learner, loaders):
        with learner.rounds():
            for loader in loaders:
                learner.run("train", loader)

    with pytest.raises(StateError, match="phase 'train' runs over several loaders in turn"):
        loop(learner, [one, two, one])
    assert len(saved) == 4  # all was well until the first came again
    with pytest.raises(StateError, match="phase 'train' runs over several loaders in turn"):
        loop(make_learner(Checkpoint(tmp_path)), [one, two, one])
    loop(make_learner(), [one, two, one])


def test_fresh_loader_in_every_epoch_is_saved(tmp_path):
    learner = make_learner(Checkpoint(tmp_path, keep=9), on("step_end", lambda learner, **_: learner.state_dict()))
    for seed in learner.rounds(epochs=4):
        learner.run("train", TensorLoader(*tensors(8), batch_size=4, shuffle=True, seed=seed))
    assert [m.about["progress"]["epochs"] for m in storage.listing(tmp_path)] == [4, 3, 2, 1]


def fit_and_validate(*plugins, directory, **options):
    learner = dropping(directory, *plugins, **options)
    train = TensorLoader(*tensors(24), batch_size=8, shuffle=True)
    learner.fit(train, TensorLoader(*tensors(24), batch_size=8), epochs=3)
    return learner


def test_state_of_mid_validation_can_be_evaluated_and_then_goes_on(tmp_path):
    def at(learner, phase, step):
        if phase.name == "val" and learner.progress.epochs == 2 and step.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    straight = fit_and_validate(directory=tmp_path / "straight").state_dict()
    with pytest.raises(SystemExit):
        fit_and_validate(on("step_end", at), directory=tmp_path / "saved")
    inputs, targets = tensors(40)
    steps = []
    count = on("step_end", lambda phase, step, **_: steps.append((phase.name, step.index)), "count")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    learner = make_learner(Metrics(), History(steps=True), count, model=model, lr=0.05)
    load(learner, tmp_path / "saved")
    history = learner.plugins["history"]
    rows, step_rows = len(history.rows), len(history.step_rows)
    for _ in range(2):
        steps.clear()
        got = learner.evaluate(TensorLoader(2 * inputs, targets, batch_size=8))
        assert steps == [("val", index) for index in range(5)]
        plain = make_learner(Metrics(), model=copy.deepcopy(learner.model))
        assert got == plain.evaluate(TensorLoader(2 * inputs, targets, batch_size=8))
    assert len(history.rows) == rows + 2
    assert [row["step"] for row in history.step_rows[step_rows:]] == [*range(5), *range(5)]
    del history.rows[rows:], history.step_rows[step_rows:]
    steps.clear()
    learner.fit(
        TensorLoader(*tensors(24), batch_size=8, shuffle=True), TensorLoader(*tensors(24), batch_size=8), epochs=3
    )
    assert steps[:2] == [("val", 2), ("train", 0)]
    assert not list(differences(straight, learner.state_dict()))


class Adversaries(Phase):
    name = "train"
    training = True

    def step(self, learner, step):
        real = step.batch[0]
        fake = learner.model["generator"](torch.randn(real.shape[0], 2))
        critic = learner.model["critic"]
        step.backward(critic(fake.detach()).mean() - critic(real).mean(), "critic")
        step.update("critic")
        step.backward(-critic(fake).mean(), "generator")
        step.update("generator")


def test_gan_in_a_loop_of_its_own_goes_on():
    def make():
        torch.manual_seed(0)
        return Learner(
            {"generator": nn.Linear(2, 3), "critic": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))},
            None,
            {"critic": partial(torch.optim.RMSprop, lr=0.01), "generator": partial(torch.optim.Adam, lr=0.01)},
            phases=[Adversaries()],
            standard=False,
        )

    def run(learner, load):
        load(learner)
        for _ in learner.rounds(epochs=2):
            learner.run("train", batches(3))

    assert_goes_on(make, run)


@pytest.mark.parametrize("has", ["state_dict", "load_state_dict"])
def test_plugin_with_half_a_state_is_refused_when_the_learner_is_built(has):
    plugin, (lacks,) = on("step_end", lambda: None), {"state_dict", "load_state_dict"} - {has}
    setattr(plugin, has, dict)
    with pytest.raises(PluginError, match=rf"'acting' \(On\) has {has}, but no {lacks}: .* Add {lacks}, or remove"):
        make_learner(plugin)
    learner = make_learner()
    with pytest.raises(PluginError, match=f"no {lacks}"):
        learner.add(plugin)
    assert learner.plugins == {}


@pytest.mark.parametrize("kind", ["own load_state_dict", "own both", "plain"])
def test_model_whose_load_state_dict_takes_only_the_state_is_loaded(kind):
    class Own(nn.Linear):
        def load_state_dict(self, state_dict):
            return super().load_state_dict(state_dict)

    class Both(Own):
        def state_dict(self, *args, **options):
            return super().state_dict(*args, **options)

    made = {"own load_state_dict": Own, "own both": Both, "plain": nn.Linear}[kind]

    def learner():
        return Learner(made(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, 0.1), standard=False)

    first, again = learner(), learner()
    again.load_state_dict(first.state_dict())
    assert torch.equal(first.model.weight, again.model.weight)
