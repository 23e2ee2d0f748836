"""MyName: the largest loss of each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from loopkit import Epoch, Learner, Phase, Step, hookimpl
from loopkit.errors import PluginError

__all__ = ["MyName"]


class MyName:
    """Put the largest loss of each epoch into the metrics, as ``"train/largest_loss"``.

    It stays on the device until the epoch ends, so no step waits for it. It covers all processes.

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

    @hookimpl(reads=("loss",))
    def step_end(self, epoch: Epoch, step: Step) -> None:
        """Compare on the device, in phases with a loss."""
        if hasattr(step, "loss"):
            store, loss = epoch.store(self), step.loss.detach()  # empty when an epoch begins, and saved with it
            store["largest"] = torch.maximum(store["largest"], loss) if store else loss

    @hookimpl(writes=lambda plugin: (f"metrics.*/{plugin.metric}",))
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Read it, once."""
        if store := epoch.store(self):
            value = store["largest"].item()
            learner.metrics[f"{phase.name}/{self.metric}"] = learner.world.highest(value)[0]

    def reshard_store(self, stores: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Return the state that a process resumes from, made of the states of all processes."""
        saved = [store["largest"] for store in stores if store]
        return {"largest": torch.stack(saved).amax()} if saved else {}
