"""A run that is saved at any edge, dropped and resumed ends bit for bit as one that was never interrupted."""

from __future__ import annotations

import copy
import io
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from helpers import Gap, differences
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from loopkit import Learner, Phase, Step, TrainingPhase, criteria, every, hookimpl
from loopkit.data import ResumableSampler, TensorLoader, from_function
from loopkit.metrics import F1, Accuracy
from loopkit.plugins import (
    ClipGradNorm,
    EarlyStopping,
    EvalMode,
    Freeze,
    GradNoise,
    GradNorm,
    History,
    Metrics,
    MixedPrecision,
    Plateau,
    Progress,
    Schedule,
    StopOnNonFinite,
    TorchSchedule,
    WeightAverage,
    throttle,
)
from loopkit.plugins.skip_spikes import SkipSpikes
from loopkit.schedules import cosine, warmup

SAMPLES, BATCH = 20, 6  # 4 batches: with windows of 3 the second one is short, and its last batch holds 2 samples
FIT = {"epochs": 2}
State = dict[str, Any]


def tensors(count=SAMPLES, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


class Net(nn.Module):
    """Layers with buffers and random numbers, tied weights, a buffer that is not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.mix = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(8, 3)
        self.register_buffer("drift", torch.zeros(8), persistent=False)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.encoder(inputs)))
        if self.training:
            self.calls += 1
            self.drift.lerp_(hidden.detach().float().mean(0), 0.1)
        hidden = self.again(torch.tanh(self.mix(self.dropout(hidden))))
        return self.head(hidden + self.drift + 1e-3 * self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


# Loaders


def noisy(inputs, targets, generator):
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator), targets


def dataset():
    return TensorDataset(*tensors())


def made_of_numbers(index, generator):
    return torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)


def batch_list():
    return [(x, y) for x, y in zip(*(t.split(BATCH) for t in tensors()), strict=True)]


class Factory:
    """Returns a generator for each epoch, which draws from torch's, NumPy's and Python's generators."""

    def __call__(self):
        for inputs, targets in batch_list():
            yield (
                inputs + 0.1 * torch.randn(inputs.shape) + 0.01 * numpy.random.rand() + 0.01 * random.random(),
                targets,
            )


LOADERS: dict[str, Callable[[], Any]] = {
    "tensor_loader": lambda: TensorLoader(*tensors(), batch_size=BATCH, shuffle=True, seed=3),
    "mapped": lambda: TensorLoader(*tensors(), batch_size=BATCH, shuffle=True).map(
        lambda batch, generator: noisy(*batch, generator), seed=1
    ),
    "from_function": lambda: from_function(4, made_of_numbers, seed=2),
    "random_sampler": lambda: DataLoader(dataset(), batch_size=BATCH, shuffle=True),
    "own_generator": lambda: DataLoader(
        dataset(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
    "sampler_generator": lambda: DataLoader(
        dataset(), BATCH, sampler=RandomSampler(dataset(), generator=torch.Generator().manual_seed(7))
    ),
    "resumable_sampler": lambda: DataLoader(dataset(), BATCH, sampler=ResumableSampler(dataset(), seed=4)),
    "stateful": lambda: StatefulDataLoader(dataset(), batch_size=BATCH, shuffle=True),
    "list": batch_list,
    "factory": Factory,
}

# Optimizers


def two_groups(make):
    """The biases in a group of their own, with another learning rate."""

    def factory(params):
        params = list(params)
        wide, narrow = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        optimizer = make([{"params": wide}, {"params": narrow}])
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] / 2
        return optimizer

    return factory


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": two_groups(partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "amsgrad": two_groups(partial(torch.optim.AdamW, lr=0.01, amsgrad=True)),
    "asgd": partial(torch.optim.ASGD, lr=0.05, t0=3),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=4),
}


class WithClosure(TrainingPhase):
    """What LBFGS needs."""

    def step(self, learner, step):
        step.inputs, step.targets = step.batch

        def evaluate():
            step.outputs = learner.model(step.inputs)
            step.loss = learner.loss_fn(step.outputs, step.targets)
            step.backward(step.loss)
            return step.loss

        step.update(closure=evaluate)


# Plugins


class Counts(nn.Module):
    """A metric of another library's kind."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def update(self, outputs, targets):
        self.seen += (outputs.argmax(1) == targets).sum()

    def compute(self):
        return self.seen

    def reset(self):
        self.seen.zero_()


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).float()


class OutputNorm:
    """The mean norm of the outputs of the steps in which it is called."""

    name = "output_norm"

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        if not learner.current.epoch.resumed:
            self.sums[phase.name] = [0.0, 0]

    @hookimpl(reads=("outputs",))
    def step_end(self, phase: Phase, step: Step) -> None:
        total, count = self.sums[phase.name]
        self.sums[phase.name] = [total + step.outputs.norm().item(), count + 1]

    @hookimpl(writes=("metrics.*/output_norm",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        total, count = self.sums.pop(phase.name)
        learner.metrics[f"{phase.name}/output_norm"] = total / count

    def state_dict(self) -> State:
        return {"sums": self.sums}

    def load_state_dict(self, state: State) -> None:
        self.sums = {phase: list(sums) for phase, sums in state["sums"].items()}


PLUGINS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "average": lambda: [WeightAverage(0.8, warmup=True, use_buffers=True)],
    "mean_weights": lambda: [WeightAverage(None, every="epoch", start_update=1)],
    "late_average": lambda: [WeightAverage(0.5, start_epoch=1, every=2)],
    "clip": lambda: [ClipGradNorm(0.5), GradNorm()],
    "noise": lambda: [GradNoise(0.05, seed=1)],
    "early_stopping": lambda: [EarlyStopping(patience=1, min_delta=9.0, restore_best=True)],
    "criterion": lambda: [EarlyStopping(criterion=criteria.Patience(2) | criteria.Threshold(0.0))],
    "training_series": lambda: [EarlyStopping(criterion=Gap(1e9))],
    "freeze": lambda: [Freeze("norm", {"encoder": 1})],
    "eval_mode": lambda: [EvalMode("dropout")],
    "history": lambda: [History(steps=True)],
    "metrics": lambda: [Metrics(Accuracy(), F1("macro"), hits)],
    "module_metric": lambda: [Metrics(counts=Counts())],
    "float16": lambda: [MixedPrecision("float16", init_scale=2.0**18, growth_interval=2)],
    "bfloat16": lambda: [MixedPrecision("bfloat16")],
    "plateau": lambda: [Plateau(patience=0, threshold=9.0)],
    "schedule": lambda: [Schedule(warmup(3, then=cosine())), Schedule(cosine(), attribute="dropout.p")],
    "epoch_schedule": lambda: [Schedule(cosine(), every="epoch")],
    "step_lr": lambda: [TorchSchedule(partial(StepLR, step_size=2, gamma=0.5))],
    "multi_step": lambda: [TorchSchedule(partial(MultiStepLR, milestones=[1, 3]))],
    "one_cycle": lambda: [TorchSchedule(partial(OneCycleLR, max_lr=0.1, total_steps=20))],
    "late_check": lambda: [StopOnNonFinite(late=True, gradients=True)],
    "throttled": lambda: [throttle(OutputNorm(), every=2)],
    "spikes": lambda: [SkipSpikes(0.5, window=3, warmup=2, max_skips=99)],
}


@dataclass(frozen=True)
class Stack:
    """One combination."""

    plugins: str = "none"
    optimizer: str = "momentum"
    accumulate: int = 1
    train: str = "tensor_loader"
    val: str = "list"
    every_updates: int | None = None
    again: bool = False
    """Whether there was a fit before the one that is interrupted."""

    def __str__(self) -> str:
        nested = f"-nested{self.every_updates}" if self.every_updates else ""
        return f"{self.plugins}-{self.optimizer}-k{self.accumulate}-{self.train}-{self.val}{nested}"

    @property
    def fit_options(self) -> dict[str, Any]:
        return {**FIT, "validate": None if self.every_updates is None else every(updates=self.every_updates)}

    def learner(self, seed: int = 1) -> Learner:
        """A learner; another seed gives other weights and other generators."""
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        plugins = [plugin for name in self.plugins.split("+") for plugin in PLUGINS[name]()]
        plugins.append(Progress(file=io.StringIO()))
        phases = [WithClosure()] if self.optimizer == "lbfgs" else []
        order = ["clip_grad_norm", "grad_noise"] if "clip" in self.plugins and "noise" in self.plugins else ()
        return Learner(
            Net(),
            cross_entropy,
            OPTIMIZERS[self.optimizer],
            plugins=plugins,
            phases=phases,
            accumulate=self.accumulate,
            order=order,
        )

    def fit(self, learner: Learner, state: State | None = None) -> State:
        """Run the fit, or the rest of it from a saved state; returns all that there is at its end."""
        train, val = LOADERS[self.train](), LOADERS[self.val]()
        if state is not None:
            learner.load_state_dict(state)
        elif self.again:
            learner.fit(batch_list(), batch_list(), epochs=2)
        result = learner.fit(train, val, **self.fit_options)
        ended = {name: getattr(result, name) for name in ("reason", "epochs", "steps", "updates", "samples", "history")}
        return {**copy.deepcopy(learner.state_dict()), "result": {**ended, "message": result.message}}


class Edges:
    """Keeps the state at every edge of the first fit, or of the second one."""

    name = "edges"
    volatile = ("states",)

    def __init__(self, again: bool) -> None:
        self.again = again
        self.states: dict[str, State] = {}

    @hookimpl(reads=("*",))
    def step_end(self, learner, phase, step):
        self.keep(learner, f"{phase.name} {learner.progress.steps} {step.index}")

    @hookimpl(reads=("*",))
    def phase_end(self, learner, phase):
        self.keep(learner, f"{phase.name} {learner.progress.steps} end")

    def keep(self, learner, edge):
        if learner.current.can_save and (learner.current.position.start.steps > 0) == self.again:
            for plugin in learner.plugins.values():
                if hasattr(plugin, "settle"):
                    plugin.settle(learner)
            assert edge not in self.states
            self.states[edge] = copy.deepcopy(learner.state_dict())


def edges(stack: Stack) -> tuple[State, dict[str, State]]:
    """The end of an uninterrupted run, and the states at all edges of another one."""
    uninterrupted = stack.fit(stack.learner())
    learner, seen = stack.learner(), Edges(stack.again)
    learner.add(seen)
    found = list(differences(uninterrupted, stack.fit(learner)))
    assert not found, f"saving changes the run: {found[:5]}"
    return uninterrupted, seen.states


def resume(stack: Stack, state: State) -> State:
    """The end of a run that goes on from a state, in a learner with other weights and other generators."""
    return stack.fit(stack.learner(seed=99), state)


def check(stack: Stack, every: int = 1) -> None:
    """Resume from every edge, or from every so many, the first and the last included."""
    uninterrupted, states = edges(stack)
    chosen = list(states)[::every] + list(states)[-1:]
    assert states
    for edge in chosen:
        found = list(differences(uninterrupted, resume(stack, states[edge])))
        assert not found, f"resumed after {edge}: {len(found)} differences: {found[:5]}"


ALL = "average+clip+noise+early_stopping+freeze+eval_mode+history+metrics+float16+schedule+late_check"
STACKS = [
    *(Stack(plugins, accumulate=k) for plugins in PLUGINS for k in (1, 3)),
    *(Stack(plugins, every_updates=3) for plugins in PLUGINS),
    *(Stack(optimizer=optimizer, accumulate=k) for optimizer in OPTIMIZERS for k in (1, 3) if optimizer != "lbfgs"),
    Stack(optimizer="lbfgs"),
    *(Stack(train=loader, val=loader) for loader in LOADERS),
    *(Stack(train=loader, val=loader, accumulate=2, every_updates=2) for loader in LOADERS),
    *(
        Stack(ALL.replace("+schedule", "") if loader == "factory" else ALL, optimizer, 3, loader, loader)
        for optimizer, loader in zip(OPTIMIZERS, LOADERS, strict=False)
    ),
]
# One of every kind: each loader, plugins together, an optimizer with state of another dtype, and what once went wrong
SAMPLE = [
    (Stack(ALL, "asgd", 3, "random_sampler", "factory"), 3),
    (Stack(ALL.replace("float16", "bfloat16"), "amsgrad", 1, "mapped", "from_function", every_updates=3), 5),
    (Stack("schedule", every_updates=4), 3),
    (Stack("early_stopping", every_updates=3), 1),
    (Stack("throttled+training_series+plateau", "adafactor", 3, "stateful", "stateful"), 4),
    (Stack("spikes+late_average", "lbfgs", 1, "own_generator", "resumable_sampler"), 4),
    (Stack("criterion+step_lr", "rprop", 3, "sampler_generator", "tensor_loader", every_updates=1), 5),
    (Stack("one_cycle+module_metric", "adam", 3, "factory", "random_sampler", every_updates=1), 5),
]

quiet = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's use of torch


@quiet
@pytest.mark.parametrize(("stack", "every"), SAMPLE, ids=str)
def test_run_resumed_at_sampled_edges_equals_one_that_was_never_interrupted(stack, every):
    check(stack, every)


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_run_resumed_at_any_edge_equals_one_that_was_never_interrupted(stack):
    check(stack)


def test_resumed_run_writes_the_rows_of_progress_that_were_left():
    def lines(state: State | None = None) -> list[list[str]]:
        learner, file = stack.learner(), io.StringIO()
        learner.replace("progress", Progress(file=file))
        stack.fit(learner, state)
        rows = re.sub(r"  (time|left) [\d.:]+ s", "", file.getvalue()).splitlines()
        return [sorted(row.split("  ")) for row in rows]

    stack = Stack()
    first, second = lines()
    assert first[0] == "epoch 1/2"
    for edge, state in edges(stack)[1].items():
        left = {"train 4 end": 2, "val 4 end": 1, "train 8 end": 1, "val 8 end": 0}.get(edge)
        if left is not None:
            assert lines(state) == [first, second][2 - left :], edge


# Nothing that is saved could be left out

WALKED = Stack(
    "average+clip+noise+early_stopping+freeze+history+metrics+float16+schedule+late_check+throttled",
    "amsgrad",
    3,
    "random_sampler",
    "mapped",
    every_updates=2,
    again=True,
)
# What makes no difference here, and why that is right
INFORMATIONAL = {
    r"fit\.(epochs|validate|stop)": "as at the begin of a fit; runs with a validation of its own, or a stop, need them",
    r"fit\.counted": "whether rounds of a loop of the user's were counted: this is a fit",
    r"plugins\.early_stopping\.passes": "for a warning at the end of a fit without any validation",
    r"plugins\.freeze\.thawed\.\d": "what an epoch thaws is thawed again; what a person thawed is needed",
    r".*\.seconds": "a duration",
    r".*\.facts\.\w+": "tells what changed, if something did",
    r"optimizers\.optimizer\.param_groups\.\d\.lr": "the schedule sets it",
    r"optimizers\.optimizer\.param_groups\.\d\.\w+": "torch's default, or what the fresh optimizer is given",
    r"models\.model\.mix\.weight": "tied: it is saved under both names",
    r".*\.bases\.dropout\.p": "the module of a fresh model has it",
    r"(passes\.\d\.data|data\.\w+)\.workers_running": "there are no workers",
    r".*\.numpy\.(has_gauss|gauss)": "nobody drew a normal number",
    r".*\.numpy\.bit_generator": "NumPy has one kind of global generator",
}
GONE = object()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all that is in a state; an empty container, and a long list of numbers, is one item."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    parts = list(inner)
    found = [leaf for key, part in parts for leaf in leaves(part, (*path, key))] if len(parts) < 30 else []
    return found or [path]


def item(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return GONE
    return value


def without(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a state in which one item is another one, or is gone."""
    if not path:
        return new
    made = dict(value) if isinstance(value, dict) else list(value)
    changed = without(value[path[0]], path[1:], new)
    if changed is GONE:
        del made[path[0]]
    else:
        made[path[0]] = changed
    return tuple(made) if isinstance(value, tuple) else made


def is_noticed(uninterrupted: State, state: State) -> bool:
    """Whether a run that goes on from a changed state is refused, or ends otherwise."""
    try:
        return any(differences(uninterrupted, resume(WALKED, state)))
    except Exception:
        return True


def unnoticed(choose: Callable[[list[str]], list[str]], every: int) -> set[str]:
    """The items of states that can be left out, or be as in a new learner, and nothing is different in the end."""
    uninterrupted, states = edges(WALKED)
    initial = copy.deepcopy(replace(WALKED, again=False).learner().state_dict())
    found: dict[str, list[bool]] = {}
    for edge in choose(list(states)):
        for path in leaves(states[edge]):
            name = ".".join(map(str, path))
            if zlib.crc32(name.encode()) % every:  # the same items at each edge
                continue
            if any(found.get(name, ())):  # once is enough
                continue
            now, new = item(states[edge], path), item(initial, path)
            if new is GONE or any(differences(new, now, leave_out=())):
                changed = without(states[edge], path, new)
                found.setdefault(name, []).append(is_noticed(uninterrupted, changed))
    assert len(found) > 15
    return {name for name, noticed in found.items() if not any(noticed)}


def explained(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in INFORMATIONAL)


@pytest.mark.filterwarnings("error")
def test_sampled_item_that_is_left_out_is_noticed():
    assert {
        name for name in unnoticed(lambda names: [names[2], names[6], names[-2]], 11) if not explained(name)
    } == set()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_item_that_is_left_out_is_noticed():
    assert {name for name in unnoticed(lambda names: names[1::3], 1) if not explained(name)} == set()
