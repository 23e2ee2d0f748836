"""Log how parameters and gradients are distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.author import Shown, checks, covers, named_parameters, nothing_matches, sharded
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.logs import Histogram

if TYPE_CHECKING:
    from torch import nn

    from loopkit import Step
    from loopkit.learner import Learner

__all__ = ["LogHistograms"]


class LogHistograms(Shown):
    """Log histograms of the parameters after every so many updates.

    Their names are such as ``"parameters/encoder.weight"``. They are counted on the device when they are due, so that
    no copy of the parameters is kept, and read when the log is written: no step waits for them. Infinite and undefined
    numbers are not counted.

    Args:
        every: Updates of an optimizer between two histograms of its parameters; skipped ones do not count.
        parameters: A pattern of parameter names, as in `loopkit.groups`: ``"encoder.*|*.bias"``.
        gradients: Also histograms of the gradients that the optimizer got, as ``"gradients/encoder.weight"``.
        bins: How many bins a histogram has, equally wide, between the least and the largest number.
        name: The plugin's name.

    A shared parameter is logged under its first name. Where parameters are sharded, each process counts its own part.

    Raises:
        PluginError: ``every`` or ``bins`` is no number above 0, ``parameters`` no string; when the learner is built, it
            has no match.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a"), LogHistograms(every=500, gradients=True)])
    """

    provides = "observer"

    def __init__(
        self,
        every: int = 100,
        parameters: str = "*",
        gradients: bool = False,
        bins: int = 64,
        name: str = "log_histograms",
    ) -> None:
        checks.whole("LogHistograms", every=every, bins=bins)
        if not isinstance(parameters, str) or not parameters:
            raise PluginError(f"LogHistograms(parameters={parameters!r}): it is a pattern, such as 'encoder.*|*.bias'")
        self.name = name
        self.every, self.parameters, self.gradients, self.bins = every, parameters, gradients, bins
        self._counts: dict[str, int] = {}
        """Updates by optimizer."""
        self._found: dict[str, tuple[Any, dict[str, Tensor]]] = {}
        """By optimizer: its parameters, and the logged ones by name."""
        self._of_gradients: dict[str, Histogram] = {}
        """The histograms of the current update."""

    @hookimpl(reads=("model",))
    def setup_model(self, learner: Learner, model: nn.Module) -> nn.Module:
        """Check that the pattern matches something."""
        names = [name for name, _ in named_parameters(learner.models)]
        if names and not any(covers(self.parameters, name) for name in names):
            raise PluginError(f"plugin {self.name!r}: parameters={nothing_matches(self.parameters, names)}")
        return model

    @hookimpl(when=lambda plugin: plugin.gradients, reads=("grads",))
    def update_begin(self, learner: Learner, step: Step) -> None:
        """Count the gradients, if it is due."""
        self._of_gradients = {}
        if (self._counts.get(step.optimizer_name, 0) + 1) % self.every == 0:
            for name, parameter in self._chosen(learner, step).items():
                if parameter.grad is not None:
                    self._of_gradients[name] = self._histogram(parameter.grad)

    @hookimpl(reads=("params",))
    def update_end(self, learner: Learner, step: Step) -> None:
        """Count the parameters, and log all, if it is due."""
        count = self._counts[step.optimizer_name] = self._counts.get(step.optimizer_name, 0) + 1
        if count % self.every:
            return
        for name, parameter in self._chosen(learner, step).items():
            learner.log(f"parameters/{name}", self._histogram(parameter))
        for name, histogram in self._of_gradients.items():
            learner.log(f"gradients/{name}", histogram)
        self._of_gradients = {}

    def _histogram(self, tensor: Tensor) -> Histogram:
        return Histogram.counted(sharded.part(tensor), self.bins)

    def _chosen(self, learner: Learner, step: Step) -> dict[str, Tensor]:
        """The optimizer's parameters that the pattern covers, by name, looked for once."""
        params, chosen = self._found.get(step.optimizer_name, (None, {}))
        if params is not step.params:
            own = set(step.params)
            chosen = {}
            for name, parameter in named_parameters(learner.models):
                if parameter in own and covers(self.parameters, name):
                    own.remove(parameter)
                    chosen[name] = parameter
            self._found[step.optimizer_name] = step.params, chosen
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """How many updates there were."""
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._counts = dict(state["counts"])
