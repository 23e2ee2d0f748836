"""Log what a run was made with, and what came of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from loopkit.base.batches import count_samples, describe
from loopkit.base.options import Shown, options_of
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.logs.kinds import Hyperparameters
from loopkit.logs.masking import SECRET
from loopkit.losses import is_sum

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

Simple = bool | int | float | str | None
SIMPLE = (bool, int, float, str, type(None))


class LogHyperparameters(Shown):
    """Log the hyperparameters of a fit, and its last metrics when it ends.

    The hyperparameters are logged when it begins, as ``"hyperparameters"``. Logged are the values that are given, and
    what the learner knows: the seed, accumulation, the number of processes, the batch size where the data has it; of
    each model the class and the numbers of parameters; the loss; of each optimizer the class and its options, by
    parameter group if there are several; the names of the plugins and their options, as
    ``"plugins.clip_grad_norm.max_norm"``, where they are plain values. Options that are called like a password, a token
    or a key (``api_key``) are left out, and given values of such names are logged as ``***``. The metrics of the end
    are scalars, as ``"final/val/loss"``; a fit that an error or a signal ends has none.

    A fit that resumes from a checkpoint does not log its hyperparameters again.

    Args:
        values: Booleans, numbers, strings and None, by name; they replace what is known under the same name.
        more: The same, as keyword arguments.

    Raises:
        PluginError: A value is of another type.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a"), LogHyperparameters(width=256, data="digits")])
    """

    name = "log_hyperparameters"

    def __init__(self, values: Mapping[str, Simple] | None = None, **more: Simple) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise PluginError(f"LogHyperparameters: values is {describe(values)}: give a dict, {{'width': 256}}")
        self.values: dict[str, Simple] = {**(values or {}), **more}
        for name, value in self.values.items():
            if not isinstance(name, str) or type(value) not in SIMPLE:
                raise PluginError(
                    f"LogHyperparameters: {name!r} is {describe(value)}: names are strings, and values None, booleans, "
                    f"numbers and strings; str(...) makes one"
                )
        self._batch_size: int | None = None
        self._learner: weakref.ref[Learner] | None = None
        """The learner of the running or last fit."""
        self._ended: int | None = None
        """At how many steps the end of the fit was logged."""
        self._loaded: dict[str, Any] | None = None

    @hookimpl
    def setup_data(self, phase: Phase, data: Any) -> Any:
        """Note the batch size of the data for training."""
        if phase.training:
            self._batch_size = _batch_size(data)
        return data

    @hookimpl(
        after=("checkpoint", "log"), before=("schedule",)
    )  # resumed; turned round, the end comes before the log's
    def fit_begin(self, learner: Learner) -> None:
        """Log the hyperparameters, unless the fit is resumed."""
        self._learner = weakref.ref(learner)
        loaded = self._loaded
        self._loaded = None
        fit = learner.current
        again = loaded is not None and fit is not None and loaded["fit"] == fit.position.number
        self._ended = loaded["ended"] if loaded is not None and again else None
        if not again:
            learner.log("hyperparameters", Hyperparameters({**self._known(learner), **self.values}))

    @hookimpl(reads=("metrics",))
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Log the last metrics, unless the fit had ended before, and it was not resumed."""
        if result.reason not in ("error", "signal") and learner.progress.steps != self._ended:
            self._ended = learner.progress.steps
            for name, value in learner.metrics.items():
                learner.log(f"final/{name}", value)

    def _known(self, learner: Learner) -> dict[str, Simple]:
        plugins = {name: plugin for name, plugin in learner.plugins.items() if name.isidentifier()}  # others are tools
        found = {**made_with(learner), "plugins": ", ".join(plugins)}
        if loss := _name_of(learner.loss_fn):
            found["loss"] = loss
        if self._batch_size is not None:
            found["batch_size"] = self._batch_size
        for name, plugin in plugins.items():
            if plugin is not self:
                found.update({f"plugins.{name}.{key}": value for key, value in _simple(options_of(plugin))})
        return found

    def state_dict(self) -> dict[str, Any]:
        """Which fit is running, and whether its end was logged."""
        if self._loaded is not None:
            return dict(self._loaded)
        learner = None if self._learner is None else self._learner()
        at = None if learner is None or learner.current is None else learner.current.position
        return {"fit": None if at is None else at.number, "ended": None if at is None else self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._loaded = dict(state)


def made_with(learner: Learner) -> dict[str, Simple]:
    """The options of a learner, its models and its optimizers, as far as they are plain values."""
    found: dict[str, Simple] = {
        "seed": None if learner.result is None else learner.result.seed,
        "accumulate": learner.accumulate,
        "loss_is_sum": is_sum(learner.loss_fn),
        "world_size": learner.world.size,
    }
    for name, model in learner.models.items():
        found[name] = type(model).__name__
        if not any(map(is_lazy, model.parameters())):  # else nobody knows yet
            found[f"{name}.parameters"] = sum(p.numel() for p in model.parameters())
            found[f"{name}.trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for name, optimizer in learner.optimizers.items():
        found[name] = type(optimizer).__name__
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            prefix = name if len(groups) == 1 else f"{name}.{group.get('name', number)}"
            options = {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group
            found.update({f"{prefix}.{key}": value for key, value in _simple(options)})
    return found


def _simple(options: Mapping[str, Any]) -> Iterator[tuple[str, Simple]]:
    """The options that are plain values, and pairs or lists of numbers, such as Adam's betas, one by one."""
    for name, value in options.items():
        if SECRET.search(name) or name in ("name", "initial_lr"):
            continue
        if type(value) in SIMPLE:
            yield name, value
        elif name != "params" and type(value) in (tuple, list) and all(type(each) in (int, float) for each in value):
            yield from ((f"{name}.{i}", each) for i, each in enumerate(value))


def _name_of(loss_fn: Any) -> str:
    """The name of a function or a class; empty without one, such as for a learner without a loss."""
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    name = str(getattr(loss_fn, "__name__", type(loss_fn).__name__))
    return name if name.isidentifier() and not name.startswith("_") else ""


def _batch_size(data: Any) -> int | None:
    """Samples in a batch, if the loader has it, or the first batch lies ready."""
    for loader in (data, getattr(data, "batch_sampler", None)):
        size = getattr(loader, "batch_size", None)
        if type(size) is int:
            return size
    return count_samples(data[0]) if isinstance(data, Sequence) and len(data) else None
