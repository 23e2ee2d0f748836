"""The inputs of a recorded step's graph, and what the graph holds for constant."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from loopkit_whole_step import private
from loopkit_whole_step.cells import Cells
from loopkit_whole_step.given import Given
from loopkit_whole_step.hooked import Unliftable
from loopkit_whole_step.python_state import PythonState
from loopkit_whole_step.shapes import nothing

if TYPE_CHECKING:
    from loopkit import Epoch, Learner
    from loopkit.metrics import Metric


class Inputs:
    """The tensors that the graph of a step takes.

    Args:
        given: The step.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self._rates = [np.zeros(()) for _ in given.cells.groups]
        self.rates = [torch.from_numpy(each) for each in self._rates]
        """The learning rates, in the memory of arrays, to which writing a number takes a tenth of the time."""
        self.fed: dict[str, list[int]] = {}
        """The metrics of each plugin that a step changes, by their numbers."""
        self.metrics: list[Metric] = []
        """The metrics of the epoch that a step changes."""
        self._epoch: Callable[[], Epoch | None] = nothing
        self._kinds: list[Any] = []
        """The kinds of the inputs, without the batch."""
        self._grads = 0
        """How many of the kinds are gradients."""
        self._order: list[Any] = []
        """The order of the optimizers' state."""
        self._pointers: list[int] = []
        """Where the inputs were that were found to be of their kinds."""

    @property
    def epoch(self) -> Epoch:
        """The epoch whose metrics are among them."""
        epoch = self._epoch()
        assert epoch is not None
        return epoch

    def metrics_of(self, epoch: Epoch) -> dict[str, list[Metric]]:
        """The metrics of an epoch that recorded hooks feed."""
        found = {}
        for hook in self._given.hooks.ends:
            plugin = hook.owner
            if hasattr(plugin, "traced_metrics"):
                metrics = plugin.traced_metrics(self._given.learner, epoch)
                if metrics is None:
                    raise Unliftable(hook.plugin, "one of its metrics has to be called")
                found[hook.plugin] = metrics
        return found

    def feed(self, epoch: Epoch) -> None:
        """Let all metrics of recorded hooks be inputs."""
        self.fed = {name: list(range(len(metrics))) for name, metrics in self.metrics_of(epoch).items()}
        self._order = self._given.cells.order()

    def feed_only(self, changed: Sequence[bool]) -> None:
        """Let only those metrics be inputs that a step has changed."""
        numbers = iter(changed)
        self.fed = {name: [i for i in at if next(numbers)] for name, at in self.fed.items()}
        self._epoch = nothing

    def now(self, epoch: Epoch, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The inputs now: the learner's tensors, rates, states of metrics and windows, and the batch."""
        given = self._given
        if epoch is not self._epoch():
            every = self.metrics_of(epoch)
            self._epoch = weakref.ref(epoch)
            self.metrics = [every[name][i] for name, at in self.fed.items() for i in at]
        for rate, group in zip(self._rates, given.cells.groups, strict=True):
            rate[()] = float(group["lr"])
        sums = [value for _, value in self.tensors_of_metrics()]
        batch = [leaves[i] for i in given.where]
        return [*tensors, *given.cells.state(), *self.rates, *sums, *given.gradients(), *batch]

    def tensors_of_metrics(self) -> list[tuple[Metric, Tensor]]:
        """The tensors of the fed metrics, each with its metric."""
        return [(metric, value) for metric in self.metrics for value in tensors_of(metric).values()]

    def expect(self, inputs: Sequence[Tensor]) -> None:
        """Take the kinds of inputs with which a graph was recorded for its own."""
        given = self._given
        self._epoch, self._pointers = nothing, []
        self._kinds = _kinds(inputs[: len(inputs) - len(given.where)])
        self._grads = len(given.gradients())

    def fit(self, inputs: Sequence[Tensor]) -> bool:
        """Whether they are of the kinds that the graph was compiled for, which it does not look at itself.

        The batch's are in the key. Others are looked at if their memory is another than in the step before.
        """
        given = self._given
        if len(inputs) != len(self._kinds) + len(given.where):
            return False
        grads = len(self._kinds) - self._grads
        pointers = [each.data_ptr() for each in inputs[:grads]]
        if pointers != self._pointers:
            if _kinds(inputs[:grads]) != self._kinds[:grads] or given.cells.order() != self._order:
                return False
            self._pointers = pointers
        return not self._grads or _kinds(inputs[grads : len(self._kinds)]) == self._kinds[grads:]


class Constants:
    """The values that a graph holds for constant, as they are when it is made.

    Args:
        given: The step.
    """

    def __init__(self, given: Given) -> None:
        self._given = given
        self.values = given.cells.constants()
        """The scalars of `Cells`, and whether each tensor requires grad."""
        self._python = PythonState(given.watched)

    def tensors(self, learner: Learner) -> list[Tensor] | None:
        """The learner's tensors; None if something has changed."""
        cells = self._given.cells
        if learner.loss_fn is not self._given.sealed.loss_fn:
            return None
        try:
            tensors = cells.tensors()
            now = [holder[key] for holder, key in cells.scalars]
            now += [each.requires_grad for each in tensors]
        except (KeyError, AttributeError):  # one of them is gone
            return None
        if now != self.values or any(cells.hooks) or private.have_hooks(tensors):
            return None
        return tensors

    def changed(self, cells: Cells) -> str:
        """The name of a part or value that differs in cells that were found now; empty without one."""
        return self._given.cells.replaced_by(cells) or self._given.cells.changed(self.values)

    def changed_outside(self) -> str:
        """The name of a value that functions read from outside and that has changed; empty without one."""
        return next(self._python.changes(outside=True), "")


def tensors_of(metric: Metric) -> dict[str, Tensor]:
    """The tensors of a metric."""
    return metric.tensors() or {}


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    return [(each.dtype, each.shape, each.stride(), each.device) for each in tensors]
