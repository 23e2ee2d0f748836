"""Programs drawn at random from the parts of runs: paused and resumed, each equals the one that was never stopped."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from loopkit import Learner, Phase, every, hookimpl
from loopkit.data import TensorLoader
from loopkit.plugins import Checkpoint, ClipGradNorm, EarlyStopping, Schedule, WeightAverage
from loopkit.schedules import cosine

SAMPLES, BATCH, EPOCHS = 14, 4, 3
INPUTS = torch.linspace(-1, 1, SAMPLES * 3).reshape(SAMPLES, 3)
TARGETS = INPUTS.sum(1, keepdim=True).sin()
NAMED = re.compile("has changed its .* since the fit began|no checkpoint holds that")


# Data


class Shuffled(Sampler[int]):
    """Draws its order from a generator of Python's that it has."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.sample(range(SAMPLES), SAMPLES)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise of a generator that it has."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index] + 0.1 * torch.randn(3, generator=self.generator), TARGETS[index]


class Rising(Noisy):
    """Counts its samples in a plain attribute, by which it scales them: no state holds that."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.count += 1
        return INPUTS[index] * self.count / 50, TARGETS[index]


def drawn() -> list[tuple[Tensor, Tensor]]:
    """The batches of an epoch in an order of the global generator."""
    order = torch.randperm(SAMPLES)
    return [(INPUTS[some], TARGETS[some]) for some in order.split(BATCH)]


def with_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(INPUTS, TARGETS), BATCH, shuffle=True, generator=generator)


DATA: dict[str, Callable[[], Any]] = {
    "a function": lambda: drawn,
    "a shuffling loader": lambda: DataLoader(TensorDataset(INPUTS, TARGETS), BATCH, shuffle=True),
    "a loader with a generator": with_generator,
    "a sampler with a generator": lambda: DataLoader(TensorDataset(INPUTS, TARGETS), BATCH, sampler=Shuffled()),
    "a data set with a generator": lambda: DataLoader(Noisy(), BATCH),
    "tensors": lambda: TensorLoader(INPUTS, TARGETS, batch_size=BATCH, shuffle=True),
    "a data set that counts": lambda: DataLoader(Rising(), BATCH),
}
UNSAVED = {"a data set that counts"}


# Losses, phases and plugins


class Scaled(nn.Module):
    """A loss with a parameter that the optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean() * self.log_scale.exp() - self.log_scale


class WithHead(Phase):
    """Trains a head of its own beside the model, with noise of the global generator."""

    name = "train"
    training = True

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)

    def step(self, learner: Learner, step: Any) -> None:
        inputs, targets = step.batch
        step.outputs = self.head(learner.model(inputs) + 0.01 * torch.randn(len(inputs), 1))
        step.loss = learner.loss_fn(step.outputs, targets)
        step.backward(step.loss)
        step.update()


class Jitter:
    """Adds noise to gradients from a generator of its own, which is its state."""

    name = "jitter"

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    @hookimpl(updates=("grads",), after=("clip_grad_norm",))
    def update_begin(self, step: Any) -> None:
        for p in step.params:
            if p.grad is not None:
                p.grad.add_(0.01 * torch.randn(p.shape, generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class PauseAt:
    """Pauses after so many updates."""

    name = "pause_at"

    def __init__(self, at: int | None) -> None:
        self.at = at

    @hookimpl
    def step_end(self, learner: Learner) -> None:
        if learner.progress.updates == self.at:
            learner.pause()


PLUGINS: dict[str, Callable[[], Any]] = {
    "average": lambda: WeightAverage(0.8),
    "clip": lambda: ClipGradNorm(0.5),
    "schedule": lambda: Schedule(cosine(12)),
    "jitter": Jitter,
    "stop": lambda: EarlyStopping("val/loss", patience=9, restore_best=True),
}


# Programs


def program(seed: int) -> dict[str, Any]:
    """What a program is made of."""
    rng = random.Random(seed)
    names = list(DATA)
    return {
        "data": names[seed % len(names)],
        "loss": rng.choice([nn.MSELoss, Scaled]),
        "head": rng.random() < 0.4,
        "own loop": rng.random() < 0.4,
        "plugins": rng.sample(list(PLUGINS), rng.randint(0, 4)),
        "accumulate": rng.randint(1, 3),
        "save": rng.randint(1, 3),
        "pause": rng.randint(1, 5),
    }


def trained(made_of: dict[str, Any], folder: Path, pause: int | None = None) -> tuple[list[Tensor], list[str]]:
    """Train a program from its begin, or from where it was paused; returns its parameters and warnings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 1))
    loss_fn = made_of["loss"]()
    phases = [WithHead()] if made_of["head"] else []
    modules = [model, loss_fn, *[phase.head for phase in phases]]
    params = [p for module in modules for p in module.parameters()]
    plugins = [PLUGINS[name]() for name in made_of["plugins"]]
    save = Checkpoint(folder, save=every(updates=made_of["save"]), resume="auto")
    learner = Learner(
        model,
        loss_fn,
        torch.optim.AdamW(params, lr=0.05),
        plugins=[*plugins, save, PauseAt(pause)],
        phases=phases,
        accumulate=made_of["accumulate"],
    )
    data = DATA[made_of["data"]]()
    with warnings.catch_warnings(record=True) as caught, suppress(SystemExit):
        warnings.simplefilter("always")
        if made_of["own loop"]:
            in_rounds(learner, data)
        else:
            learner.fit(data, [(INPUTS, TARGETS)], epochs=EPOCHS)
    return [p.detach() for p in params], [str(each.message) for each in caught]


def in_rounds(learner: Learner, data: Any) -> None:
    """Train in a loop of the program's own, which draws between the epochs."""
    rounds = learner.rounds(epochs=EPOCHS)
    for _ in rounds:
        noise = 0.1 * torch.randn(SAMPLES, 1)
        extra = rounds.once("targets", lambda: TARGETS + 0.1 * torch.randn(SAMPLES, 1))
        learner.run("train", data() if data is drawn else data)
        learner.run("train", [(INPUTS, extra + noise)])
        learner.run("val", [(INPUTS, TARGETS)])


@pytest.mark.parametrize("seed", range(28))
def test_paused_program_equals_the_whole_one_or_is_named(seed: int, tmp_path: Path) -> None:
    made_of = program(seed)
    whole, _ = trained(made_of, tmp_path / "whole")
    stopped, said = trained(made_of, tmp_path / "paused", made_of["pause"])
    assert not all(torch.equal(one, other) for one, other in zip(whole, stopped, strict=True))
    resumed, _ = trained(made_of, tmp_path / "paused")
    if made_of["data"] in UNSAVED:
        assert any(NAMED.search(text) for text in said), made_of
        return
    assert not any(NAMED.search(text) for text in said), said
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True)), made_of
