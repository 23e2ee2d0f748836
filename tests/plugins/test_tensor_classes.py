"""Batches of another tensor class, as those of torchvision and MONAI are: what is saved are torch's own tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopkit import Learner, TrainingPhase, every
from loopkit.base.raw import plain
from loopkit.metrics import Accuracy
from loopkit.plugins import Checkpoint, Metrics


class Image(Tensor):
    """A tensor with more functions, and its data where torch has them."""


class Weighted(TrainingPhase):
    def loss(self, learner, outputs, targets):
        learner.current.epoch.current.weight = targets.eq(0).sum() + 1
        return super().loss(learner, outputs, targets)


def gap(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) - targets).abs()


class Listing:
    """A metric with a state of its own, which has tensors in lists."""

    name = "listing"

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append(outputs.detach().mean())

    def compute(self) -> Tensor:
        return torch.stack(self.seen).mean()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Stop(Exception):
    pass


def data(stop_at: int | None = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    for index in range(5):
        if index == stop_at:
            raise Stop
        targets = torch.randint(2, (4,), generator=generator).as_subclass(Image)
        yield torch.randn(4, 3, generator=generator).as_subclass(Image), targets


@pytest.mark.parametrize("metric", [None, gap, Accuracy, Listing], ids=["loss", "function", "accuracy", "own"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_run_over_batches_of_another_class_resumes_in_mid_epoch(metric, accumulate, tmp_path):
    def run(stop_at=None, save=True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        made = [] if metric is None else [metric() if isinstance(metric, type) else metric]
        plugins = [Metrics(*made)]
        if save:
            plugins.append(Checkpoint(tmp_path, save=every(updates=1), resume="auto"))
        learner = Learner(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            plugins=plugins,
            phases=[Weighted()],
            accumulate=accumulate,
            standard=False,
        )
        learner.fit(lambda: data(stop_at), epochs=1)
        return model.state_dict(), dict(learner.metrics)

    with pytest.raises(Stop):
        run(stop_at=4)
    whole, parts = run(save=False), run()
    assert all(torch.equal(value, parts[0][key]) for key, value in whole[0].items())
    assert whole[1] == parts[1]


class Handling(Tensor):
    """One whose data can be anywhere."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_plain_tensor_has_the_memory_of_the_other_class():
    image = torch.ones(2).as_subclass(Image)
    assert type(plain(image)) is Tensor
    assert plain(image).data_ptr() == image.data_ptr()
    kept = [torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Handling), 3]
    assert all(plain(each) is each for each in kept)
