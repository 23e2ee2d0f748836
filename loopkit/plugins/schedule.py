"""Hyperparameters as functions of the progress."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from loopkit import schedules
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.order import nearest
from loopkit.schedules import OfLength, resolve

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.step import Step

__all__ = ["Plateau", "Schedule", "TorchSchedule"]

Every = Literal["update", "epoch"]
Setter = Callable[[float], None]


class Schedule:
    """Multiply a hyperparameter of each parameter group's own value by a schedule.

    Update k (from 0) runs with ``base * schedule(k)``, where ``base`` is what the group held when the plugin first saw
    it: the ratios between groups survive. Skipped updates do not count.

    Args:
        schedule: A function ``k -> factor``, such as those of `loopkit.schedules`. One without a length, such as
            ``cosine()``, spans the whole fit, which then needs a length: ``epochs`` and data with ``len()``, or
            ``max_updates``.
        key: The hyperparameter in ``optimizer.param_groups``, such as ``"lr"``, ``"momentum"``, ``"weight_decay"``;
            ``"betas[0]"`` is the first of a tuple.
        attribute: Instead of a key, an attribute of modules, as a pattern: ``"*.dropout.p"``.
        optimizer: A pattern for the optimizers' names.
        groups: A pattern for the groups: their ``"name"`` if they have one, else their number.
        every: Advance k per applied ``"update"`` (with several optimizers: of the first that matches), or per
            ``"epoch"`` of a training phase.
        absolute: The schedule's values are the hyperparameter itself, not factors.
        start: The first k.
        name: The plugin's name; by default ``"schedule"``, with the key for another one than ``"lr"``.

    Raises:
        PluginError: An option is out of range, or (before the first step) a pattern matches nothing.
        ValueError: The schedule spans the whole fit, whose length cannot be known.

    Example::

        Schedule(warmup(100, then=cosine()))
    """

    provides = "schedule"

    def __init__(
        self,
        schedule: schedules.Schedule,
        key: str = "lr",
        *,
        attribute: str | None = None,
        optimizer: str = "*",
        groups: str = "*",
        every: Every = "update",
        absolute: bool = False,
        start: int = 0,
        name: str | None = None,
    ) -> None:
        if isinstance(schedule, LRScheduler) or not callable(schedule):
            hint = "; TorchSchedule takes torch's schedulers" if isinstance(schedule, LRScheduler) else ""
            raise PluginError(f"Schedule: {schedule!r} is no function update -> value{hint}")
        if every not in ("update", "epoch"):
            raise PluginError(f"Schedule(every={every!r}): it is 'update' or 'epoch'")
        if start < 0:
            raise PluginError(f"Schedule(start={start}): it counts from 0")
        if attribute is not None and "." not in attribute:
            raise PluginError(f"Schedule(attribute={attribute!r}): write the module's path, too, as in '*.dropout.p'")
        self.schedule = schedule
        self.key = key if attribute is None else attribute
        word = re.sub(r"\W+", "_", self.key).strip("_")
        self.name = name or ("schedule" if self.key == "lr" else f"schedule_{word}")
        self._of_modules = attribute is not None
        self._optimizer, self._groups = optimizer, groups
        self._every, self._absolute = every, absolute
        self.count = start
        """How far the schedule is: the k in force."""
        self._bases: dict[str, float] = {}
        self._whole_fit: tuple[int, int] | None = None
        """Where a schedule over the whole fit began, and its length."""
        self._restored = False
        self._call: schedules.Schedule = schedule

    def owns(self) -> tuple[str, ...]:
        """The hyperparameter, of these optimizers and groups."""
        if self._of_modules:
            return ()
        return (f"optimizer.{self.key.partition('[')[0]}.{self._optimizer}.{self._groups.replace('.', '_')}",)

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Give a schedule over the whole fit its length."""
        if isinstance(self.schedule, OfLength):
            if self._whole_fit is None or not self._restored:
                self._whole_fit = (self.count, self._planned(learner))
            self._restored = False
            origin, total = self._whole_fit
            made = resolve(self.schedule, total)
            self._call = lambda k: made(k - origin)

    def _planned(self, learner: Learner) -> int:
        planned = learner.result.planned if learner.result is not None else None
        total = None if planned is None else planned.updates if self._every == "update" else planned.epochs
        if total is None:
            raise ValueError(
                f"plugin {self.name!r}: {self.schedule!r} spans the whole fit, whose number of {self._every}s cannot be "
                f"known: give it updates=, or give fit epochs= and data with len(), or max_updates="
            )
        return total

    @hookimpl(writes=lambda plugin: plugin.states())
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Put the value in force."""
        if phase.training:
            self._set(learner)

    @hookimpl(writes=lambda plugin: plugin.states())
    def update_end(self, learner: Learner, step: Step) -> None:
        """Advance to the next update."""
        if self._every == "update" and step.optimizer_name == self._leader(learner):
            self.count += 1
            self._set(learner)

    @hookimpl(writes=lambda plugin: plugin.states())
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Advance to the next epoch."""
        if self._every == "epoch" and phase.training:
            self.count += 1
            self._set(learner)

    def states(self) -> tuple[str, ...]:
        """What it writes, as declared to the engine."""
        return ("model",) if self._of_modules else self.owns()

    def _leader(self, learner: Learner) -> str:
        """The optimizer whose updates count."""
        return next((n for n in learner.optimizers if self._of_modules or fnmatchcase(n, self._optimizer)), "")

    def _set(self, learner: Learner) -> None:
        value = self._call(self.count)
        found = False
        for place, now, write in self._places(learner):
            found = True
            base = self._bases.setdefault(place, now)
            write(value if self._absolute else base * value)
        if not found:
            raise self._nothing(learner)

    def _places(self, learner: Learner) -> Iterator[tuple[str, float, Setter]]:
        """Where the value goes: a name for each place, the number there now, and a function that replaces it."""
        if self._of_modules:
            pattern, _, attribute = self.key.rpartition(".")
            for name, module in named_modules(learner):
                if fnmatchcase(name, pattern) and hasattr(module, attribute):
                    yield f"{name}.{attribute}", getattr(module, attribute), _attribute_setter(module, attribute)
            return
        key, _, index = self.key.partition("[")
        for name, optimizer in learner.optimizers.items():
            if fnmatchcase(name, self._optimizer):
                for number, group in enumerate(optimizer.param_groups):
                    label = str(group.get("name", number))
                    if fnmatchcase(label, self._groups) and key in group:
                        place = f"{name}.{label}.{self.key}"
                        if index:
                            at = int(index.rstrip("]"))
                            yield place, group[key][at], _item_setter(group, key, at)
                        else:
                            yield place, group[key], _group_setter(group, key)

    def _nothing(self, learner: Learner) -> PluginError:
        if self._of_modules:
            attribute = self.key.rpartition(".")[2]
            known = [f"{name}.{attribute}" for name, module in named_modules(learner) if hasattr(module, attribute)]
        else:
            known = sorted({k for o in learner.optimizers.values() for g in o.param_groups for k in g if k != "params"})
        what = f"key {self.key!r} of optimizers {self._optimizer!r}, groups {self._groups!r}"
        what = f"attribute {self.key!r}" if self._of_modules else what
        return PluginError(
            f"plugin {self.name!r}: {what} matches nothing{nearest(self.key, known)}; "
            f"there are: {', '.join(known) or 'none'}"
        )

    def state_dict(self) -> dict[str, Any]:
        """How far it is, and each place's own value."""
        return {"count": self.count, "bases": dict(self._bases), "whole_fit": self._whole_fit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.count, self._bases = state["count"], dict(state["bases"])
        self._whole_fit = None if state["whole_fit"] is None else tuple(state["whole_fit"])
        self._restored = True


def _group_setter(group: dict[str, Any], key: str) -> Setter:
    def write(value: float) -> None:
        if hasattr(group[key], "fill_"):  # a tensor, as capturable optimizers hold
            group[key].fill_(value)
        else:
            group[key] = value

    return write


def _item_setter(group: dict[str, Any], key: str, index: int) -> Setter:
    def write(value: float) -> None:
        items = list(group[key])
        items[index] = value
        group[key] = tuple(items)

    return write


def _attribute_setter(module: Any, attribute: str) -> Setter:
    return lambda value: setattr(module, attribute, value)


def named_modules(learner: Learner) -> Iterator[tuple[str, Any]]:
    """Every module with its path; with several models the path begins with the model's name."""
    for model_name, model in learner.models.items():
        prefix = f"{model_name}." if len(learner.models) > 1 else ""
        for name, module in model.named_modules():
            yield prefix + name, module


class TorchSchedule:
    """Step a scheduler of ``torch.optim.lr_scheduler`` after every update or epoch, bitwise as by hand.

    Args:
        scheduler: A scheduler, or a function ``optimizer -> scheduler``.
        optimizer: The optimizer's name, if there are several.
        every: Step it per applied ``"update"``, or per ``"epoch"`` of a training phase.
        name: The plugin's name.

    Raises:
        PluginError: The scheduler belongs to another optimizer, or is ``ReduceLROnPlateau`` (use `Plateau`).

    Somebody else who steps the scheduler, too, gets a warning with the line, once.
    """

    provides = "schedule"

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler],
        *,
        optimizer: str | None = None,
        every: Every = "update",
        name: str = "torch_schedule",
    ) -> None:
        if every not in ("update", "epoch"):
            raise PluginError(f"TorchSchedule(every={every!r}): it is 'update' or 'epoch'")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise PluginError("TorchSchedule: ReduceLROnPlateau needs a metric; use Plateau(monitor=...)")
        if not isinstance(scheduler, LRScheduler) and not callable(scheduler):
            raise PluginError(
                f"TorchSchedule: {scheduler!r} is neither a scheduler nor a function optimizer -> scheduler"
            )
        self.name = name
        self.scheduler = scheduler if isinstance(scheduler, LRScheduler) else None
        self._given = scheduler
        self._optimizer, self._every = optimizer, every
        self._state: dict[str, Any] | None = None
        self._stepping = self._bound = False

    def owns(self) -> tuple[str, ...]:
        """The learning rate of its optimizer."""
        return (f"optimizer.lr.{self._optimizer or '*'}",)

    @hookimpl(writes=("optimizer",))
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Make the scheduler, or check whose it is."""
        if not phase.training or self._bound:
            return
        name = self._name(learner)
        if name not in learner.optimizers:
            hint = nearest(name, learner.optimizers)
            raise PluginError(f"plugin {self.name!r}: no optimizer is called {name!r}{hint}")
        optimizer = learner.optimizers[name]
        if self.scheduler is None:
            self.scheduler = self._given(optimizer)  # type: ignore[operator]
        if self.scheduler.optimizer is not optimizer:
            raise PluginError(
                f"plugin {self.name!r}: the scheduler was made for another optimizer than the learner's {name!r}; "
                f"give a function: TorchSchedule(lambda optimizer: {type(self.scheduler).__name__}(optimizer, ...))"
            )
        if self._state is not None:
            self.scheduler.load_state_dict(self._state)
        self._watch(self.scheduler)
        self._bound = True

    def _name(self, learner: Learner) -> str:
        if self._optimizer is None and len(learner.optimizers) > 1:
            raise PluginError(f"plugin {self.name!r}: say which, optimizer=... ({', '.join(learner.optimizers)})")
        return self._optimizer or next(iter(learner.optimizers), "")

    def _watch(self, scheduler: LRScheduler) -> None:
        """Warn of the first step that is not this plugin's."""
        step = scheduler.step

        def watched(*args: Any) -> None:
            if not self._stepping:
                caller = sys._getframe(1)
                warnings.warn(
                    f"{type(scheduler).__name__} is stepped twice: by plugin {self.name!r} after every {self._every}, and "
                    f"in {caller.f_code.co_filename}, line {caller.f_lineno}: remove one",
                    stacklevel=2,
                )
                scheduler.step = step  # type: ignore[method-assign]
            step(*args)

        scheduler.step = watched  # type: ignore[method-assign, assignment]

    @hookimpl(writes=("optimizer.lr",))
    def update_end(self, learner: Learner, step: Step) -> None:
        """Step it."""
        if self._every == "update" and step.optimizer_name == self._name(learner):
            self._step()

    @hookimpl(writes=("optimizer.lr",))
    def epoch_end(self, phase: Phase) -> None:
        """Step it."""
        if self._every == "epoch" and phase.training:
            self._step()

    def _step(self) -> None:
        assert self.scheduler is not None
        self._stepping = True
        try:
            self.scheduler.step()
        finally:
            self._stepping = False

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        if self.scheduler is None:
            return self._state or {}
        return {key: value for key, value in self.scheduler.state_dict().items() if key != "step"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._state = dict(state)
        if self._bound and self.scheduler is not None:
            self.scheduler.load_state_dict(self._state)


class Plateau:
    """Lower the learning rate when a metric no longer improves: torch's ``ReduceLROnPlateau``.

    Args:
        monitor: The metric, such as ``"val/loss"``; looked at whenever its phase has ended.
        optimizer: A pattern for the optimizers' names.
        name: The plugin's name.
        options: Those of ``torch.optim.lr_scheduler.ReduceLROnPlateau``: ``mode``, ``factor``, ``patience``,
            ``threshold``, ``threshold_mode``, ``cooldown``, ``min_lr``, ``eps``.

    Raises:
        PluginError: ``monitor`` names no phase, or its metric is not there when the phase ends.
    """

    provides = "schedule"

    def __init__(
        self, monitor: str = "val/loss", *, optimizer: str = "*", name: str = "plateau", **options: Any
    ) -> None:
        if "/" not in monitor:
            raise PluginError(f"Plateau(monitor={monitor!r}): write phase and metric, as in 'val/loss'")
        self.name = name
        self.monitor = monitor
        self._optimizer = optimizer
        self._options = options
        self._schedulers: dict[str, ReduceLROnPlateau] = {}
        self._states: dict[str, dict[str, Any]] = {}

    def owns(self) -> tuple[str, ...]:
        """The learning rate of its optimizers."""
        return (f"optimizer.lr.{self._optimizer}",)

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Make the schedulers, so that wrong options are refused before the first step."""
        self._make(learner)

    @hookimpl(reads=lambda plugin: (f"metrics.{plugin.monitor}",), writes=("optimizer.lr",))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Look at the metric."""
        if phase.name == self.monitor.partition("/")[0]:
            if self.monitor not in learner.metrics:
                names = ", ".join(learner.metrics)
                hint = nearest(self.monitor, learner.metrics)
                raise PluginError(
                    f"plugin {self.name!r}: there is no metric {self.monitor!r}{hint}; there are: {names}"
                )
            self._make(learner)
            for scheduler in self._schedulers.values():
                scheduler.step(learner.metrics[self.monitor])

    def _make(self, learner: Learner) -> None:
        for name, optimizer in learner.optimizers.items():
            if fnmatchcase(name, self._optimizer) and name not in self._schedulers:
                self._schedulers[name] = ReduceLROnPlateau(optimizer, **self._options)
                if name in self._states:
                    self._schedulers[name].load_state_dict(self._states[name])
        if not self._schedulers:
            hint = nearest(self._optimizer, learner.optimizers)
            raise PluginError(f"plugin {self.name!r}: no optimizer matches {self._optimizer!r}{hint}")

    def state_dict(self) -> dict[str, Any]:
        """The schedulers' own states."""
        return {name: scheduler.state_dict() for name, scheduler in self._schedulers.items()} or dict(self._states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._states = {name: dict(values) for name, values in state.items()}
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(self._states[name])
