"""Log the metrics of each epoch, and the running values of training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.base import checks
from loopkit.base.options import Shown
from loopkit.hooks import hookimpl
from loopkit.plugin import provided

if TYPE_CHECKING:
    from loopkit import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class LogMetrics(Shown):
    """Log ``learner.metrics`` and learning rates at the end of each epoch.

    The rates are called ``"lr"``; of several parameter groups ``"lr/0"``, ``"lr/1"``; of several optimizers
    ``"lr/<name>"``. They are logged with each training epoch, as they are after its last step, before a schedule by
    epochs moves them; with ``every``, after steps.

    Args:
        every: Also log, after every so many training steps, the values so far: the loss of the step
            (``"train/loss/step"``), the metrics of the epoch so far (``"train/accuracy/running"``), and the learning
            rates that the step's update was made with, or is going to be, if it has none.
        name: The plugin's name.

    It needs a plugin that writes, such as ``LogTo``. No step waits for the device.

    Raises:
        PluginError: ``every`` is no number above 0.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a"), LogMetrics(every=50)])
    """

    optional = ("step_begin", "step_end")
    volatile = ("_*",)

    def __init__(self, every: int | None = None, name: str = "log_metrics") -> None:
        if every is not None:
            checks.whole("LogMetrics", every=every)
        self.name = name
        self.every = every
        self._rates: dict[str, Any] = {}
        """The learning rates of the step's updates, if the step will be logged."""

    @hookimpl(when=lambda plugin: plugin.every is not None, phase="training", reads=("optimizer.lr", "progress"))
    def step_begin(self, learner: Learner) -> None:
        """Keep the learning rates, which a schedule changes as soon as an update is made."""
        if self.every is not None and (learner.progress.steps + 1) % self.every == 0:
            for name in learner.optimizers:
                self._rates |= learning_rates(learner, name)

    @hookimpl(
        when=lambda plugin: plugin.every is not None,
        phase="training",
        reads=("loss", "optimizer.lr", "progress"),
        after=("metrics",),
    )
    def step_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Log what there is by now, if it is due."""
        if self.every is None or learner.progress.steps % self.every:
            return
        rates = self._rates
        self._rates = {}
        loss = getattr(step, "loss", None)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            learner.log(f"{phase.name}/loss/step", loss)
        for plugin in learner.plugins.values():
            if provided(plugin) == "metrics" and hasattr(plugin, "peek"):
                running = plugin.peek(phase.name)
                learner.log({f"{phase.name}/{name}/running": value for name, value in running.items()})
        for name in learner.optimizers:
            now = learning_rates(learner, name)
            learner.log({path: rates.get(path, rate) for path, rate in now.items()})

    @hookimpl(phase="training", reads=("optimizer.lr",), before=("schedule",))
    def epoch_end(self, learner: Learner) -> None:
        """Keep the learning rates of the epoch, which a schedule changes as it ends."""
        self._rates = {}  # of an update after the last step
        if self.every is None:
            for name in learner.optimizers:
                self._rates |= learning_rates(learner, name)

    @hookimpl(reads=("metrics",))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Log the metrics of the epoch, and its learning rates."""
        rates: dict[str, Any] = {}
        if phase.training:
            rates, self._rates = self._rates, rates
        prefix = f"{phase.name}/"
        metrics = {name: value for name, value in learner.metrics.items() if name.startswith(prefix)}
        learner.log({**metrics, **rates})


def learning_rates(learner: Learner, name: str, root: str = "lr") -> dict[str, Any]:
    """The current learning rates of an optimizer's parameter groups, by the names under which they are logged.

    Args:
        name: The optimizer's name.
        root: The first part of the names.
    """
    path = root if len(learner.optimizers) == 1 else f"{root}/{name}"
    groups = [group["lr"] for group in learner.optimizers[name].param_groups if group.get("lr") is not None]
    rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in groups]  # changed in place
    return {path if len(rates) == 1 else f"{path}/{i}": rate for i, rate in enumerate(rates)}
