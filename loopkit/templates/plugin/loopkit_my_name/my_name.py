"""MyName: the largest loss of each pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from loopkit import Learner, Phase, Step, hookimpl
from loopkit.errors import PluginError
from torch import Tensor

__all__ = ["MyName"]


class MyName:
    """Put the largest loss of each pass into the metrics, as ``"train/largest_loss"``.

    It stays on the device until the pass ends, so no step waits for it. Of several processes it is that of all.

    Args:
        metric: The metric's name, after the phase's.

    Raises:
        PluginError: The name is empty, or holds a slash or a dot.

    Example::

        learner = Learner(model, loss_fn, optimizer, plugins=[MyName()])
        learner.fit(train, epochs=1).metrics["train/largest_loss"]
    """

    name = "my_name"

    def __init__(self, metric: str = "largest_loss") -> None:
        if not metric or set(metric) & set("/."):
            raise PluginError(
                f"MyName(metric={metric!r}): it follows the phase's name and a slash, so it is "
                f"a name without slash and dot, such as 'largest_loss'"
            )
        self.metric = metric
        self._largest: dict[str, Tensor] = {}
        """By phase, since a phase can run inside another."""

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Begin anew with each pass, unless what was loaded is of this one."""
        if learner.running is None or not learner.running.resumed:
            self._largest.pop(phase.name, None)

    @hookimpl(reads=("loss",))
    def step_end(self, phase: Phase, step: Step) -> None:
        """Compare on the device; phases without a loss are left alone."""
        if hasattr(step, "loss"):
            loss = step.loss.detach()
            largest = self._largest.get(phase.name)
            self._largest[phase.name] = loss if largest is None else torch.maximum(largest, loss)

    @hookimpl(writes=lambda plugin: (f"metrics.*/{plugin.metric}",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Read it, once."""
        if phase.name in self._largest:
            value = self._largest.pop(phase.name).item()
            learner.metrics[f"{phase.name}/{self.metric}"] = learner.world.highest(value)[0]

    def state_dict(self) -> dict[str, Any]:
        """What a pass has seen so far."""
        return {phase: largest.clone() for phase, largest in self._largest.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._largest = {phase: largest.clone() for phase, largest in state.items()}

    def reshard(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """What a process goes on from, made of what all have saved."""
        merged: dict[str, Any] = {}
        for state in states:
            for phase, largest in state.items():
                merged[phase] = torch.maximum(merged[phase], largest) if phase in merged else largest
        return merged
