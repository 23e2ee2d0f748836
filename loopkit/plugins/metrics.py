"""Metrics of each pass, accumulated on the device and read once, at the end of the pass."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.metrics import FunctionMetric, Loss, Mean, Metric, MetricLike
from loopkit.plugins.late import read

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.step import Step

__all__ = ["Metrics"]


class Metrics:
    """Accumulate metrics over each pass of each phase; at its end put them into ``learner.metrics``.

    Args:
        metrics: Functions ``(outputs, targets) -> scalar or (batch, ...)``, or objects with
            ``update(outputs, targets)``, ``compute()`` and ``reset()``, torchmetrics objects included. Each phase
            has its own copy. The mean loss is always there as ``"loss"``.
        named: The same, under a name of your own.

    A phase that does not put ``outputs`` and ``targets`` (or ``loss``) on its steps is left without the metrics that
    need them.

    Example::

        Metrics(Accuracy(), F1(average="macro"), mae=lambda outputs, targets: (outputs - targets).abs())
    """

    provides = "metrics"

    def __init__(self, *metrics: Any, **named: Any) -> None:
        self.name = "metrics"
        loss = Loss()
        self._prototypes: dict[str, Any] = {"loss": loss}
        for metric in metrics:
            self._include(getattr(metric, "name", None), metric)
        for name, metric in named.items():
            self._include(name, metric)
        self._phases: dict[str, dict[str, Any]] = {}

    def _include(self, name: str | None, metric: Any) -> None:
        if isinstance(metric, type):
            raise PluginError(f"Metrics: {metric.__name__} is a class; give an instance, {metric.__name__}()")
        if not isinstance(metric, (Mean, MetricLike)):
            if not callable(metric):
                raise PluginError(f"Metrics: {metric!r} is neither a function nor has it update, compute and reset")
            metric = FunctionMetric(metric, name)
            name = metric.name
        name = name if isinstance(name, str) else type(metric).__name__.lower()
        if name in self._prototypes and name != "loss":
            raise PluginError(f"Metrics: two metrics are called {name!r}; name one: Metrics(other_{name}=...)")
        self._prototypes[name] = metric

    def names(self) -> tuple[str, ...]:
        """The names that it puts into ``learner.metrics``, with ``*`` for the phase."""
        found: list[str] = []
        for name, metric in self._prototypes.items():
            found += metric.keys() if isinstance(metric, Mapping) or hasattr(metric, "keys") else [name]
        return tuple(f"metrics.*/{name}" for name in found)

    @hookimpl
    def epoch_begin(self, phase: Phase) -> None:
        """Start from nothing."""
        if phase.name not in self._phases:
            self._phases[phase.name] = {name: copy.deepcopy(metric) for name, metric in self._prototypes.items()}
        for metric in self._phases[phase.name].values():
            metric.reset()

    @hookimpl(reads=("loss", "outputs", "targets", "step"))
    def step_end(self, phase: Phase, step: Step) -> None:
        """Take in one step."""
        outputs = getattr(step, "outputs", None)
        targets = getattr(step, "targets", None)
        for metric in self._phases[phase.name].values():
            if isinstance(metric, Mean):
                value = getattr(step, metric.attribute, None)
                if value is not None:
                    metric.add(value, step.weight)
            elif outputs is not None and targets is not None:
                if isinstance(metric, Metric) and not isinstance(metric, FunctionMetric):
                    metric.update(outputs, targets)  # type: ignore[attr-defined]
                else:
                    _update_foreign(metric, outputs, targets)

    @hookimpl(writes=lambda plugin: plugin.names())
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Read the values of this pass."""
        values: dict[str, Any] = {}
        for name, metric in self._phases[phase.name].items():
            if not _is_empty(metric):
                value = metric.compute()
                values.update(value if isinstance(value, Mapping) else {name: value})
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise PluginError(f"metric {name!r} is a tensor of shape {tuple(value.shape)}: a metric is one number")
        learner.metrics.update({f"{phase.name}/{name}": value for name, value in read(values).items()})

    def peek(self, phase: str) -> dict[str, Tensor | float]:
        """The values so far of loopkit's own metrics, unread (they may still be on their way)."""
        metrics = self._phases.get(phase, {})
        return {n: m.compute() for n, m in metrics.items() if isinstance(m, Metric) and not _is_empty(m)}

    def state_dict(self) -> dict[str, Any]:
        """What has been accumulated, by phase and metric; metrics without ``state_dict`` are left out."""
        return {
            phase: {name: metric.state_dict() for name, metric in metrics.items() if hasattr(metric, "state_dict")}
            for phase, metrics in self._phases.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for phase, metrics in state.items():
            own = self._phases.setdefault(phase, {n: copy.deepcopy(m) for n, m in self._prototypes.items()})
            for name, values in metrics.items():
                own[name].load_state_dict(values)


@torch.no_grad()
def _update_foreign(metric: Any, outputs: Any, targets: Any) -> None:
    """Update a metric that is not ours, on the outputs' device and without a graph."""
    if isinstance(outputs, Tensor) and callable(getattr(metric, "to", None)):
        metric.to(outputs.device)
    metric.update(outputs.detach() if isinstance(outputs, Tensor) else outputs, targets)


def _is_empty(metric: Any) -> bool:
    """Whether nothing was taken in, so that there is no value (torchmetrics calls it ``update_called``)."""
    return metric.is_empty if isinstance(metric, Metric) else not getattr(metric, "update_called", True)
