"""The strategy that lets PyTorch's reducer send gradients in the last backward of an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loopkit.base.words import some
from loopkit.distributed.at_update import AtUpdate
from loopkit.distributed.gradient_sync import GradientSync
from loopkit.errors import PhaseError, WorldError

if TYPE_CHECKING:
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class Reducers(GradientSync):
    """PyTorch's reducer of each model sends gradients in the backward of a step that calls the model once.

    Args:
        at_update: Averages an update without a backward in its last step.
        unused: Whether parameters may get no gradient in a step.
    """

    def __init__(self, at_update: AtUpdate, unused: bool) -> None:
        self._at_update = at_update
        self._unused = unused
        self.active = False
        """Whether the reducers sync in the backward of this step."""
        self._done = False
        """Whether they have."""
        self.params: list[nn.Parameter] = []
        """The parameters of all models."""
        self.models: dict[str, CountedCalls] = {}
        """The models, by name."""
        self._trained = 0
        """The number of trained parameters when the reducers were made."""

    def add(self, name: str, model: nn.Module) -> CountedCalls:
        """Serve a model -> the module to call in its place, which has no reducer yet."""
        self.params += model.parameters()
        self._trained = sum(p.requires_grad for p in self.params)
        self.models[name] = CountedCalls(self, model)
        return self.models[name]

    def reset(self) -> None:
        """Drop what belongs to the last step."""
        self.active = False
        self._done = False
        for model in self.models.values():
            model.calls = 0

    def begin(self, learner: Learner, phase: Phase, step: Step, sends: bool) -> bool:
        """Sync in this step's backward, unless parameters were frozen or thawed since the reducers were made."""
        self.active = sends and sum(p.requires_grad for p in self.params) == self._trained
        return self.active

    def cancel(self, phase: Phase) -> None:
        """Take back what the reducers expect of the backward that does not come."""
        if self.active and not self._done and phase.training:
            if any(model.calls for model in self.models.values()):
                _disarm(self.params)
            self.active = False

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the state of the running step, while a hook runs an epoch."""
        done = self._done
        calls = [model.calls for model in self.models.values()]
        with self.paused():
            try:
                yield
            finally:
                self._done = done
                for model, count in zip(self.models.values(), calls, strict=True):
                    model.calls = count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Call models without their reducers."""
        active = self.active
        self.active = False
        try:
            yield
        finally:
            self.active = active

    def backward_begin(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Give the reducers the gradients of the whole window."""
        if not self.active:
            return
        self._check_calls(phase, step)
        weighting = self._at_update.weighting
        for window in step.epoch.windows:
            weight = window.total + step.weight if window.weighted and window.count else step.weight
            count = window.count + 1 if window.weighted else 1
            share: Any = 1.0
            if weighting.weighs(learner, phase, step, weight, count):
                share = weighting.share(weight, step.loss.device, learner.world.size)
            step.seed = step.seed * window.settle(step, step.weight, share)

    def _check_calls(self, phase: Phase, step: Step) -> None:
        """Raise for a step that PyTorch's reducer cannot serve."""
        calls = {name: model.calls for name, model in self.models.items()}
        if not self._done and all(count == 1 for count in calls.values()):
            return
        self.active = False
        counted = ", ".join(f"model {name!r} was called {count} times" for name, count in calls.items())
        raise PhaseError(
            f"DDP: phase {phase.name!r} cannot be served by PyTorch's reducer, which "
            f"takes one call of each model before one backward in a step: {counted}"
            f"{', and this is a second backward' * self._done} (step {step.index}). Give DDP(overlap=False), "
            f"which averages at update_begin"
        )

    def backward_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Name the parameters that got no gradient, for which the others would wait."""
        if not self.active:
            return
        self._done = True
        if not self._unused and any(p.grad is None and p.requires_grad for p in self.params):
            unused = [path for path, p in learner.models.named_parameters() if p.requires_grad and p.grad is None]
            raise WorldError(
                f"no gradient came for {_listed(unused)} in phase {phase.name!r}, step {step.index}: give "
                f"DDP(find_unused_parameters=True) if that is meant, or DDP(overlap=False) where a backward is for "
                f"only some parameters, or freeze them (requires_grad=False) before the learner is built"
            )

    def update(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Skip an update without weight; the gradients are averages already."""
        if self.active and self._done:
            self._at_update.weighting.skip_void(step)
        else:
            self._at_update.update(learner, phase, step)


class CountedCalls(nn.Module):
    """Calls of a model, through PyTorch's reducer in the steps whose backward syncs."""

    def __init__(self, reducers: Reducers, model: nn.Module) -> None:
        super().__init__()
        self.calls = 0
        """In this step."""
        self._reducers = reducers
        self._inner = (model,)  # in a tuple, so that they are no submodules
        self._reducer: tuple[DistributedDataParallel | None] = (None,)

    def send_by(self, reducer: DistributedDataParallel) -> None:
        """Let PyTorch's reducer send."""
        self._reducer = (reducer,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and count the call if the reducer takes part."""
        (reducer,) = self._reducer
        if not self._reducers.active or not torch.is_grad_enabled() or reducer is None:
            return self._inner[0](*args, **kwargs)
        self.calls += 1
        return reducer(*args, **kwargs)


def _disarm(params: list[nn.Parameter]) -> None:
    """A backward of zeros, for which a reducer waits after its forward; gradients stay as they are."""
    trained = [p for p in params if p.requires_grad]
    grads = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    with torch.enable_grad():
        zero = torch.stack([p.flatten()[:1].sum() * 0 for p in trained if p.numel()]).sum()
    zero.backward()  # type: ignore[no-untyped-call]
    for p, grad in zip(trained, grads, strict=True):
        p.grad = grad


def _listed(names: list[str], most: int = 5) -> str:
    return f"parameter{'s' * (len(names) > 1)} {some(names, most)}"
