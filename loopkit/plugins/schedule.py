"""Hyperparameters as functions of the progress."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, ReduceLROnPlateau

from loopkit import schedules
from loopkit.base import checks
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import nearest, takes
from loopkit.criteria import Mode
from loopkit.criteria.directions import checked_mode, direction
from loopkit.errors import PluginError
from loopkit.groups import matches, named_modules, nothing_matches
from loopkit.hooks import hookimpl
from loopkit.plugins.kept_values import KeptValues, Place, group_places, setter
from loopkit.schedules import OfLength, resolve

if TYPE_CHECKING:
    from loopkit import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

Every = Literal["update", "epoch"]
Setter = Callable[[float], Any]
KEY = re.compile(r"\w+(\[\d+\])?")


class Schedule(Shown):
    """Multiply each parameter group's own rate, or another value, by a schedule.

    Update k (from 0) runs with ``base * schedule(k)``, where ``base`` is the group's own value from when the
    plugin first saw it, so that the ratios between groups survive. A new optimizer has its own; if you change the value
    between two fits, the new one is the base, and in a fit that is resumed the base changes by the same ratio. If the
    plugin is removed or replaced, the base is put back. Skipped updates do not count. A group added during a fit joins
    at the next update.

    Args:
        schedule: A function ``k -> factor``, such as the ones in `loopkit.schedules`. One without a length, such as
            ``cosine()``, spans the whole fit (each fit anew), which then needs a length: ``epochs`` and data with
            ``len()``, or ``max_updates``. The length is counted for phases that update each optimizer once per window;
            with more updates there is a warning.
        key: The hyperparameter in ``optimizer.param_groups``, such as ``"lr"``, ``"momentum"``, ``"weight_decay"``;
            ``"betas[0]"`` is the first of a tuple. Groups that do not have it stay as they are.
        attribute: Instead of a key, an attribute of modules, as a pattern: ``"*.dropout.p"``.
        optimizer: A pattern for the optimizers' names.
        groups: A pattern for the groups: their ``"name"`` if they have one, else their number.
        every: Advance k per applied ``"update"`` (with several optimizers: of the first that matches; for the others at
            the end of that step), or per ``"epoch"`` of a training phase.
        absolute: The schedule's values are the hyperparameter itself, not factors.
        start: The first k. A schedule over the whole fit is longer by it, so that it ends with the fit all the same.
        name: The plugin's name; by default ``"schedule"``, with the key for another one than ``"lr"``.

    Raises:
        PluginError: An option is out of range, or (before the first step) a pattern has no match.
        ValueError: The schedule spans the whole fit, whose length cannot be known.

    Example::

        Schedule(warmup(100, then=cosine()))
    """

    provides = "schedule"

    def __init__(
        self,
        schedule: schedules.ScheduleFn,
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
        _check_schedule(schedule)
        checks.one_of("Schedule", ("update", "epoch"), every=every)
        checks.whole("Schedule", 0, start=start)
        _check_place(attribute, key)
        self.schedule = schedule
        self.key = key if attribute is None else attribute
        self.name = name or _default_name(self.key)
        self.of_modules = attribute is not None
        """Whether it sets an attribute of modules, whose pattern is then ``key``."""
        self.optimizer = optimizer
        self.groups = groups
        self.every = every
        self.absolute = absolute
        self.start = self.count = start
        """How far the schedule is: the k in force."""
        self._kept = KeptValues()
        """The bases, by place."""
        self._loaded = False
        """Whether a state was loaded since the last fit began."""
        self._places: list[Place] = []
        """Where it writes."""
        self._whole_fit: tuple[int, int] | None = None
        """The k at which a schedule over the whole fit has its 0, and its length."""
        self._call: schedules.ScheduleFn | None = None if isinstance(schedule, OfLength) else schedule
        self._leader = ""
        self._writers: list[tuple[float, Setter]] = []
        self._leads = 0
        """How many of the writers, the first ones, are the first optimizer's."""
        self._others_follow = False
        self._seen: list[tuple[Optimizer, list[Any], int]] = []
        """The lists of groups that the writers were made for, and their lengths."""

    def owns(self) -> tuple[str, ...]:
        """The hyperparameter of these optimizers and groups, or the attribute of these modules."""
        if self.of_modules:
            pattern, _, attribute = self.key.rpartition(".")
            return (f"model.{attribute}.{pattern.replace('.', '/')}",)
        key, _, index = self.key.partition("[")
        state = f"optimizer.{key}.{self.optimizer}.{self.groups.replace('.', '_')}"
        if index:
            state += f".{index.rstrip(']')}"
        return (state,)

    @hookimpl(reads=lambda plugin: plugin.owns(), after=("checkpoint",))  # which may load the state of a fit
    def fit_begin(self, learner: Learner) -> None:
        """Take over what the user changed since the last fit; give a schedule over the whole fit its length."""
        fit = learner.current
        found = self._found(learner, self._chosen(learner))
        if not (self.of_modules and self._loaded):  # no state holds an attribute: it is the script's, not the user's
            self._kept.look(found, new=fit is None or not fit.resumed)
        self._loaded = False
        self._writers = []
        if isinstance(self.schedule, OfLength):
            resumed = fit is not None and fit.resumed
            self._span(self._planned(learner), resumed)
            self._resolve()

    def _span(self, planned: int, resumed: bool) -> None:
        """Note where the schedule over the whole fit begins, and its length."""
        if resumed and self._whole_fit is not None:
            origin = self._whole_fit[0]
            length = planned  # which may be another one than before
            if origin == 0:
                length += self.start
        elif self.count == self.start:
            origin = 0
            length = planned + self.start
        else:
            origin = self.count
            length = planned
        self._whole_fit = (origin, length)

    def _planned(self, learner: Learner) -> int:
        planned = None if learner.current is None else learner.current.result.planned
        total = None
        if planned is not None:
            total = planned.updates if self.every == "update" else planned.epochs
        if total is None:
            give = "epochs= and data with len(), or max_updates=" if self.every == "update" else "epochs="
            raise ValueError(
                f"plugin {self.name!r}: {self.schedule!r} spans the whole fit, whose number of {self.every}s cannot "
                f"be known: give the schedule updates=, or give fit {give} (of learner.rounds: "
                f"planned=Planned({self.every}s=...))"
            )
        return total

    def _resolve(self) -> None:
        assert self._whole_fit is not None
        origin, total = self._whole_fit
        made = resolve(self.schedule, total)
        self._call = made if origin == 0 else lambda k: made(k - origin)

    @hookimpl(writes=lambda plugin: plugin.owns())
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Put the value in force."""
        if phase.training:
            if self._call is None:
                self._planned(learner)  # says what is missing: there was no fit_begin
            self._find(learner)
            self._set(learner)
            self._kept.left = {}

    @hookimpl(writes=lambda plugin: plugin.owns())
    def update_end(self, learner: Learner, step: Step) -> None:
        """Advance to the next update; other optimizers, whose updates of this step may come later, at its end."""
        if self.every == "update" and step.optimizer_name == self._leader:
            self.count += 1
            if self._whole_fit is not None and self.count == sum(self._whole_fit) + 1:
                warn(
                    f"plugin {self.name!r}: {self.schedule!r} was to span the whole fit, {self._whole_fit[1]} updates, "
                    f"and there are more: phase {step.epoch.name!r} updates an optimizer several times a window, or "
                    f"not all of them, or accumulate was changed; give the schedule updates="
                )
            self._set(learner, first=True)
            self._others_follow = len(self._seen) > 1

    @hookimpl(phase="training", writes=lambda plugin: plugin.owns())
    def step_end(self, learner: Learner) -> None:
        """Let the other optimizers follow the first one."""
        if self._others_follow:
            self._others_follow = False
            self._set(learner)

    @hookimpl(phase="training", writes=lambda plugin: plugin.owns())
    def step_cancelled(self, learner: Learner) -> None:
        """The same."""
        self.step_end(learner)

    @hookimpl(writes=lambda plugin: plugin.owns())
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        """Advance to the next epoch."""
        if phase.training:
            self.step_end(learner)  # the last window may have been updated after its step
            if self.every == "epoch":
                self.count += 1
                self._set(learner)
            self._kept.note(self._places)

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Note the values that an epoch without an end has left."""
        if not self._kept.left:
            self._kept.note(self._places)

    def leave(self, learner: Learner) -> None:
        """Put the own values back."""
        self._kept.put_back(self._found(learner, self._chosen(learner)))

    def _set(self, learner: Learner, first: bool = False) -> None:
        for optimizer, groups, length in self._seen:
            if optimizer.param_groups is not groups or len(groups) != length:  # a restored state, a new group
                self._writers = []
        if not self._writers:
            self._find(learner)
        assert self._call is not None
        value = self._call(self.count)
        for base, write in self._writers[: self._leads if first else None]:
            write(value if self.absolute else base * value)

    def _find(self, learner: Learner) -> None:
        """Find the places of the value, and their own values."""
        chosen = self._chosen(learner)
        self._places = self._found(learner, chosen)
        self._leader = next(iter(chosen), "")
        self._seen = []
        if not self.of_modules:
            self._seen = [(each, each.param_groups, len(each.param_groups)) for each in chosen.values()]
        self._writers = [(self._kept.find(place), place.write) for place in self._places]
        if not self._writers:
            raise self._nothing(learner)
        first = {self._leader: chosen[self._leader]} if chosen else {}
        self._leads = len(list(self._look(learner, first)))

    def _chosen(self, learner: Learner) -> dict[str, Optimizer]:
        """The optimizers whose groups it looks at."""
        if self.of_modules:
            return dict(learner.optimizers)
        return self._matching(learner)

    def _matching(self, learner: Learner) -> dict[str, Optimizer]:
        """The optimizers whose name matches the pattern."""
        named = learner.optimizers.items()
        return {name: optimizer for name, optimizer in named if fnmatchcase(name, self.optimizer)}

    def _found(self, learner: Learner, chosen: Mapping[str, Optimizer]) -> list[Place]:
        """Where the value goes; of an optimizer that was not there before, the own values are looked up anew.

        Raises:
            PluginError: There is no number.
        """
        known = [optimizer for optimizer, _, _ in self._seen]
        for name, optimizer in chosen.items():
            if known and all(optimizer is not each for each in known):
                self._kept.forget(self._look(learner, {name: optimizer}))
        places = list(self._look(learner, chosen))
        for place in places:
            self._check_number(place)
        return places

    def _check_number(self, place: Place) -> None:
        now = place.read()
        if isinstance(now, (int, float, Tensor)) and not isinstance(now, bool):
            return
        hint = ""
        if isinstance(now, (tuple, list)):
            hint = f"; write '{self.key}[0]' for its first number"
        raise PluginError(f"plugin {self.name!r}: {place.name} is {now!r}, which is no number{hint}")

    def _look(self, learner: Learner, optimizers: Mapping[str, Optimizer]) -> Iterator[Place]:
        if self.of_modules:
            pattern, _, attribute = self.key.rpartition(".")
            for name, module in named_modules(learner.models):
                if matches(pattern, name) and hasattr(module, attribute):
                    read = partial(getattr, module, attribute)
                    write = partial(setattr, module, attribute)
                    yield Place(f"{name}.{attribute}", read, write)
            return
        for name, optimizer in optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                label = str(group.get("name", number))
                if fnmatchcase(label, self.groups) and self.key.partition("[")[0] in group:
                    yield self._place(f"{name}.{number}.{self.key}", group)

    def _place(self, name: str, group: dict[str, Any]) -> Place:
        """The place of the value in a group that has the key."""
        key, _, index = self.key.partition("[")
        if not index:
            return Place(name, partial(group.__getitem__, key), setter(group, key))
        at = int(index.rstrip("]"))
        value = group[key]
        if not isinstance(value, (tuple, list)) or at >= len(value):
            raise PluginError(f"plugin {self.name!r}: {key} is {value!r}: it has no item {at}")
        return Place(name, partial(_item, group, key, at), _item_setter(group, key, at))

    def _attributes(self, learner: Learner) -> list[str]:
        """The attributes of that name in the models, or the modules if none has one."""
        attribute = self.key.rpartition(".")[2]
        modules = named_modules(learner.models)
        having = [f"{name}.{attribute}" for name, module in modules if hasattr(module, attribute)]
        if having:
            return having
        return [name for name, _ in named_modules(learner.models) if name]

    def _nothing(self, learner: Learner) -> PluginError:
        """The error that names the pattern without a match."""
        if self.of_modules:
            lacks = f"attribute {nothing_matches(self.key, self._attributes(learner))}"
            return PluginError(f"plugin {self.name!r}: {lacks}")
        optimizers = self._matching(learner)
        keys: set[str] = set()
        labels: list[str] = []
        for optimizer in optimizers.values():
            for number, group in enumerate(optimizer.param_groups):
                keys.update(group)
                labels.append(str(group.get("name", number)))
        keys.discard("params")
        if not optimizers:
            lacks = f"optimizer pattern {nothing_matches(self.optimizer, learner.optimizers)}"
        elif self.key.partition("[")[0] not in keys:
            lacks = f"hyperparameter {nothing_matches(self.key, sorted(keys))}"
        else:
            lacks = f"group pattern {nothing_matches(self.groups, labels)} (with {self.key!r})"
        return PluginError(f"plugin {self.name!r}: {lacks}")

    def options(self) -> dict[str, Any]:
        """The options it was made with."""
        return {
            "schedule": self.schedule,
            "key": "lr" if self.of_modules else self.key,
            "attribute": self.key if self.of_modules else None,
            "optimizer": self.optimizer,
            "groups": self.groups,
            "every": self.every,
            "absolute": self.absolute,
            "start": self.start,
            "name": self.name,
        }

    def state_dict(self) -> dict[str, Any]:
        """How far it is, each place's own value, and what is there."""
        left = self._kept.left or self._kept.read(self._places)
        return {
            "count": self.count,
            "bases": dict(self._kept.own),
            "left": dict(left),
            "whole_fit": self._whole_fit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._loaded = True
        self.count = state["count"]
        self._kept.own = dict(state["bases"])
        self._kept.left = dict(state.get("left", {}))  # which older states lack
        self._whole_fit = None if state["whole_fit"] is None else tuple(state["whole_fit"])
        if isinstance(self.schedule, OfLength) and self._whole_fit is not None:
            self._resolve()
        self._writers = []
        self._places = []
        self._seen = []


def _item(group: dict[str, Any], key: str, index: int) -> Any:
    return group[key][index]


def _item_setter(group: dict[str, Any], key: str, index: int) -> Setter:
    def write(value: float) -> None:
        items = list(group[key])
        if isinstance(items[index], Tensor):
            items[index].fill_(value)
        else:
            items[index] = value
            group[key] = tuple(items)

    return write


NOTES = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Keys that torch's schedulers keep in an optimizer's groups."""
KEYS = ("lr", "momentum")
"""The numbers that they set."""
OF_TORCH = "step_size", "gamma", "T_max", "eta_min", "max_lr", "total_steps", "milestones", "lr_lambda", "T_0"
"""Arguments of torch's schedulers that people give to the plugin."""
OPEN = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
"""Parameters that need no argument."""
KEPT = "loopkit"
"""The key of loopkit's own part in the state of a `TorchSchedule`."""


def _scale_base(
    scheduler: LRScheduler, number: int, group: dict[str, Any], changed: tuple[float, float], resumed: bool
) -> None:
    """Let a scheduler go by a rate that the user has changed: its base is that rate, or changes by the same ratio."""
    left, now = changed
    bases = getattr(scheduler, "base_lrs", [])
    if number >= len(bases):
        return
    if resumed and left != 0:
        bases[number] = bases[number] * (now / left)
    else:
        bases[number] = now
    if "initial_lr" in group:
        group["initial_lr"] = bases[number]


def _check_schedule(schedule: Any) -> None:
    torchs = isinstance(schedule, (type, LRScheduler))
    if torchs or not callable(schedule):
        hint = "; TorchSchedule takes torch's schedulers" if torchs else "; schedules.cosine() is one"
        raise PluginError(f"Schedule: {schedule!r} is no function update -> value{hint}")
    word = getattr(schedule, "__name__", "")
    if word in schedules.__all__ and getattr(schedules, word) is schedule:
        raise PluginError(f"Schedule: {word} is the function that makes a schedule: call it, {word}(...)")


def _default_name(key: str) -> str:
    if key == "lr":
        return "schedule"
    word = re.sub(r"\W+", "_", key).strip("_")
    return f"schedule_{word}"


def _check_place(attribute: str | None, key: str) -> None:
    if attribute is not None and "." not in attribute:
        raise PluginError(f"Schedule(attribute={attribute!r}): write the module's path, too, as in '*.dropout.p'")
    if attribute is None and not KEY.fullmatch(key):
        raise PluginError(f"Schedule(key={key!r}): it is a name, or a name with an index, as in 'betas[0]'")


def _check_maker(scheduler: Any) -> None:
    """Check that a function can make a scheduler from the optimizer only, before the first epoch calls it."""
    if isinstance(scheduler, LRScheduler):
        return
    word = getattr(scheduler, "__name__", "the function")
    if isinstance(scheduler, type) and issubclass(scheduler, ReduceLROnPlateau):
        raise PluginError("TorchSchedule: ReduceLROnPlateau needs a metric; use Plateau(monitor=...)")
    try:
        parameters = inspect.signature(scheduler).parameters.values()
    except (TypeError, ValueError):  # a class or function of C has none
        return
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in OPEN]
    if not required:
        if any(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in parameters):
            return
        raise PluginError(f"TorchSchedule: {word} takes no optimizer: give a function optimizer -> scheduler")
    if len(required) > 1:
        options = ", ".join(f"{name}=..." for name in required[1:])
        raise PluginError(
            f"TorchSchedule: {word} needs {', '.join(required[1:])}, too: give a function that sets it, "
            f"TorchSchedule(lambda optimizer: {word}(optimizer, {options}))"
        )


class TorchSchedule(Shown):
    """Step a scheduler of ``torch.optim.lr_scheduler``, bitwise as by hand.

    It is stepped after every update or epoch.

    Args:
        scheduler: A function ``optimizer -> scheduler``, or a scheduler (made for the optimizer that the learner is
            given).
        optimizer: The optimizer's name, if there are several.
        every: Step it per applied ``"update"``, or per ``"epoch"`` of a training phase.
        name: The plugin's name.

    Raises:
        PluginError: The scheduler belongs to another optimizer, or is ``ReduceLROnPlateau`` (use `Plateau`).

    If other code also steps the scheduler, there is a warning with its line, once. Functions that a scheduler was given
    (as ``LambdaLR``) are not saved; objects with ``__call__`` are saved by their attributes.

    Example::

        TorchSchedule(lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000))
    """

    provides = "schedule"

    @takes(**dict.fromkeys(OF_TORCH, "give a function, TorchSchedule(lambda optimizer: StepLR(optimizer, 30))"))
    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler],
        *,
        optimizer: str | None = None,
        every: Every = "update",
        name: str = "torch_schedule",
    ) -> None:
        checks.one_of("TorchSchedule", ("update", "epoch"), every=every)
        if not isinstance(scheduler, LRScheduler) and not callable(scheduler):
            raise PluginError(
                f"TorchSchedule: {scheduler!r} is neither a scheduler nor a function optimizer -> scheduler"
            )
        self.name = name
        self.scheduler = scheduler if isinstance(scheduler, LRScheduler) else None
        self._check(self.scheduler)
        _check_maker(scheduler)
        self.given = scheduler
        """The scheduler, or the function that makes one."""
        self.optimizer = optimizer
        self.every = every
        self._state: dict[str, Any] | None = None
        self._stepping = self._bound = False
        self._leader = ""
        self._kept = KeptValues()
        """The optimizer's own values of the hyperparameters that the scheduler sets."""

    def _check(self, scheduler: Any) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise PluginError("TorchSchedule: ReduceLROnPlateau needs a metric; use Plateau(monitor=...)")

    def owns(self) -> tuple[str, ...]:
        """The learning rate of its optimizer; with a scheduler that cycles the momentum, that too."""
        if getattr(self.scheduler, "cycle_momentum", False):
            return self._states(("lr", "momentum", "betas"))
        return self._states(("lr",))

    def own_keys(self) -> tuple[str, ...]:
        """The keys that it reads before a scheduler is made: all that a scheduler may set."""
        return self._states(KEYS)

    def makes(self) -> tuple[str, ...]:
        """The keys that a scheduler sets when it is made, with its own notes in the groups."""
        return self.owns() + self._states(NOTES)

    def _states(self, keys: Iterable[str]) -> tuple[str, ...]:
        """The names of these keys of its optimizer in declarations."""
        optimizer = self.optimizer or "*"
        return tuple(f"optimizer.{key}.{optimizer}" for key in keys)

    @hookimpl(reads=lambda plugin: plugin.owns(), after=("checkpoint",))  # which may load the state of a fit
    def fit_begin(self, learner: Learner) -> None:
        """Take over rates that the user changed since the last fit."""
        if not self._bound or self.scheduler is None or self._leader not in learner.optimizers:
            return
        resumed = learner.current is not None and learner.current.resumed
        changed = self._kept.look(self._places(), new=not resumed)
        for number, group in enumerate(self.scheduler.optimizer.param_groups):
            place = f"{self._leader}.{number}.lr"
            if place in changed:
                _scale_base(self.scheduler, number, group, changed[place], resumed)

    @hookimpl(reads=lambda plugin: plugin.own_keys(), writes=lambda plugin: plugin.makes())
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Make the scheduler, or check whose it is."""
        if not phase.training:
            return
        self._kept.left = {}
        if self._bound and self.scheduler is not None:
            if learner.optimizers.get(self._leader) is self.scheduler.optimizer:
                return
            self._unbind()
        name = self._name(learner)
        if name not in learner.optimizers:
            raise PluginError(f"plugin {self.name!r}: optimizer {nothing_matches(name, learner.optimizers)}")
        optimizer = learner.optimizers[name]
        self._leader = name
        if self.scheduler is None:
            for place in self._of(optimizer, KEYS):
                self._kept.find(place)
            self.scheduler = self._make(optimizer)
        if self.scheduler.optimizer is not optimizer:
            raise PluginError(
                f"plugin {self.name!r}: the scheduler was made for another optimizer than the learner's {name!r}; "
                f"give a function: TorchSchedule(lambda optimizer: {type(self.scheduler).__name__}(optimizer, ...))"
            )
        if self._state is not None:
            self._load(self.scheduler, self._state)
        self._watch(self.scheduler)
        self._bound = True

    def _unbind(self) -> None:
        """The learner has a new optimizer: make the scheduler anew for it, if that can be."""
        if self.scheduler is not self.given:
            self.scheduler = None
            self._state = None
        self._kept = KeptValues()
        self._bound = False

    def _of(self, optimizer: Optimizer, keys: Sequence[str]) -> list[Place]:
        """Where it writes, or may write, numbers."""
        places: list[Place] = []
        for key in keys:
            places += group_places(self._leader, optimizer, key)
        return places

    def _places(self) -> list[Place]:
        """Where its scheduler writes."""
        if not self._bound or self.scheduler is None:
            return []
        cycles_momentum = getattr(self.scheduler, "cycle_momentum", False)
        return self._of(self.scheduler.optimizer, KEYS if cycles_momentum else ("lr",))

    def leave(self, learner: Learner) -> None:
        """Put the optimizer's own values back, and take out what the scheduler noted in its groups."""
        if self.scheduler is None or learner.optimizers.get(self._leader) is not self.scheduler.optimizer:
            return
        for number, group in enumerate(self.scheduler.optimizer.param_groups):
            initial = group.get("initial_lr")
            if initial is not None:
                self._kept.own.setdefault(f"{self._leader}.{number}.lr", float(initial))
        self._kept.put_back(self._places())
        for group in self.scheduler.optimizer.param_groups:
            for key in NOTES:
                group.pop(key, None)

    def _make(self, optimizer: Optimizer) -> LRScheduler:
        """Call the function; it must not reset what the optimizer holds where a state is restored."""
        groups = optimizer.param_groups
        kept = [{key: deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]
        if self._state is None:
            self._name_earlier(groups)
        made = self.given(optimizer)  # type: ignore[operator]
        self._check(made)
        if not isinstance(made, LRScheduler):
            raise PluginError(f"plugin {self.name!r}: its function returned {made!r}: it must return a scheduler")
        if self._state is not None:
            for group, values in zip(optimizer.param_groups, kept, strict=True):
                group.update(values)
        return made

    def _name_earlier(self, groups: Sequence[dict[str, Any]]) -> None:
        """Warn where a scheduler outside of the learner has left a note that a new one starts from."""
        for number, group in enumerate(groups):
            rate = group.get("lr")
            noted = group.get("initial_lr")
            if rate is not None and noted is not None and float(rate) != float(noted):
                where = f"group {number} of optimizer {self._leader!r}"
                warn(
                    f"plugin {self.name!r}: {where} has lr={rate:g}, and initial_lr={noted:g} of an earlier scheduler: "
                    f"many of torch's schedulers start from initial_lr. To start from lr, delete that entry: "
                    f'del optimizer.param_groups[{number}]["initial_lr"]'
                )

    def _name(self, learner: Learner) -> str:
        if self.optimizer is None and len(learner.optimizers) > 1:
            raise PluginError(f"plugin {self.name!r}: choose one with optimizer=... ({', '.join(learner.optimizers)})")
        return self.optimizer or next(iter(learner.optimizers), "optimizer")

    def _watch(self, scheduler: LRScheduler) -> None:
        """Warn of the first step that is not this plugin's."""
        step = scheduler.step

        def watched(*args: Any, **options: Any) -> None:
            if not self._stepping:
                caller = sys._getframe(1)
                warn(
                    f"{type(scheduler).__name__} is stepped twice: by plugin {self.name!r} after every {self.every}, "
                    f"and in {caller.f_code.co_filename}, line {caller.f_lineno}: remove one"
                )
                scheduler.step = step  # type: ignore[method-assign]
            step(*args, **options)

        scheduler.step = watched  # type: ignore[method-assign]

    @hookimpl(writes=lambda plugin: plugin.owns())
    def update_end(self, step: Step) -> None:
        """Step it."""
        if self.every == "update" and step.optimizer_name == self._leader:
            self._step()

    @hookimpl(writes=lambda plugin: plugin.owns())
    def epoch_end(self, phase: Phase) -> None:
        """Step it."""
        if self.every == "epoch" and phase.training:
            self._step()
        if phase.training:
            self._kept.note(self._places())

    @hookimpl
    def fit_end(self) -> None:
        """Note the values that an epoch without an end has left."""
        if not self._kept.left:
            self._kept.note(self._places())

    def _step(self) -> None:
        assert self.scheduler is not None
        self._stepping = True
        try:
            self.scheduler.step()
        finally:
            self._stepping = False

    def options(self) -> dict[str, Any]:
        """The options it was made with."""
        return {"scheduler": self.given, "optimizer": self.optimizer, "every": self.every, "name": self.name}

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state.

        Raises:
            PluginError: It holds something that no plugin's state can hold.
        """
        if not self._bound or self.scheduler is None:
            if self._state is None:
                return {}
            kept = {"own": dict(self._kept.own), "left": dict(self._kept.left)}
            return {**deepcopy(self._state), KEPT: kept}
        state = {key: value for key, value in self.scheduler.state_dict().items() if key != "step"}
        made: dict[str, Any] = self._plain(state, type(self.scheduler).__name__)
        left = self._kept.left or self._kept.read(self._places())
        return {**made, KEPT: {"own": dict(self._kept.own), "left": dict(left)}}

    def _plain(self, value: Any, path: str) -> Any:
        """A copy in types that a state can hold."""
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
            return {key: self._plain(part, f"{path}.{key}") for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._plain(part, f"{path}[{i}]") for i, part in enumerate(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise PluginError(
            f"plugin {self.name!r}: the scheduler's state holds a {type(value).__name__}, {path}, which cannot be "
            f"saved: give its class a state_dict() and load_state_dict() of numbers, or use Schedule with a function"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._state = {key: deepcopy(value) for key, value in state.items() if key != KEPT} or None
        kept = state.get(KEPT, {"own": {}, "left": {}})  # which older states lack
        self._kept.own = dict(kept["own"])
        self._kept.left = dict(kept["left"])
        if self._bound and self.scheduler is not None and self._state is not None:
            self._load(self.scheduler, self._state)

    def _load(self, scheduler: LRScheduler, state: dict[str, Any]) -> None:
        """Put the state back, and name the arguments of the script that it replaces."""
        every = (scheduler, *getattr(scheduler, "_schedulers", ()))
        given = [_arguments(each) for each in every]
        scheduler.load_state_dict(deepcopy(state))
        for each, here in zip(every, given, strict=True):
            if isinstance(each, MultiStepLR):
                each.milestones = Counter(each.milestones)  # the state holds it as a dict
            for name, value in _arguments(each).items():
                if name in here and here[name] != value:
                    warn(
                        f"plugin {self.name!r}: {type(each).__name__} has {name}={value!r} in the checkpoint, and "
                        f"{name}={here[name]!r} here. Its load_state_dict restores the checkpoint's, so {value!r} "
                        f"holds. Schedule(...) of loopkit follows the length of the fit"
                    )


def _arguments(scheduler: LRScheduler) -> dict[str, Any]:
    """The arguments of a scheduler that it keeps as plain attributes, which its state holds."""
    names = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch"}
    kept = {name: value for name, value in vars(scheduler).items() if name in names}
    return {name: value for name, value in kept.items() if isinstance(value, int | float | str | list | tuple | dict)}


class _ReduceOnPlateau(ReduceLROnPlateau):
    """torch's scheduler, whose relative threshold is a share of the best value's size."""

    def _is_better(self, a: float, best: float) -> bool:
        if self.threshold_mode != "rel" or best >= 0:
            return bool(super()._is_better(a, best))  # type: ignore[no-untyped-call]
        # torch multiplies the value itself: below zero, a worse value would be a new best one
        share = float(self.threshold)
        if self.mode == "min":
            return a < best * (1 + share)
        return a > best * (1 - share)


def _check_plateau(options: Mapping[str, Any]) -> None:
    """Check those options of torch's scheduler that are numbers; unknown ones raise when it is made."""
    numbers = {name: options[name] for name in ("factor", "threshold", "eps") if name in options}
    checks.not_negative("Plateau", **numbers)
    counts = {name: options[name] for name in ("patience", "cooldown") if name in options}
    checks.whole("Plateau", 0, **counts)
    if "threshold_mode" in options:
        checks.one_of("Plateau", ("rel", "abs"), threshold_mode=options["threshold_mode"])


class Plateau(Shown):
    """Lower the learning rate when a metric no longer improves: torch's ``ReduceLROnPlateau``.

    A relative ``threshold`` is a share of the best value's size, so it also fits metrics below zero. The plugin looks
    at the metric whenever its phase has ended and something was trained since it last did, so that an
    ``evaluate`` after the fit has no effect. A metric that is not a number is never the best; 0.0 can be.

    Args:
        monitor: The metric, such as ``"val/loss"``.
        optimizer: A pattern for the optimizers' names.
        name: The plugin's name.
        mode: ``"min"`` or ``"max"``; by default the metric's direction, else the fit raises.
        options: Options of ``torch.optim.lr_scheduler.ReduceLROnPlateau``: ``factor``, ``patience``, ``threshold``,
            ``threshold_mode``, ``cooldown``, ``min_lr``, ``eps``.

    Raises:
        PluginError: ``monitor`` names no phase, or its metric is not there when the phase ends.

    A fit that ends without the phase of the metric is warned about.

    Example::

        Plateau("val/accuracy", patience=3)
    """

    provides = "schedule"

    def __init__(
        self,
        monitor: str = "val/loss",
        *,
        mode: Mode | None = None,
        optimizer: str = "*",
        name: str = "plateau",
        **options: Any,
    ) -> None:
        checks.metric_name("Plateau", monitor=monitor)
        _check_plateau(options)
        self.name = name
        self.monitor = monitor
        self.mode = checked_mode("Plateau", mode)
        self.optimizer = optimizer
        self._options = options
        self._schedulers: dict[str, ReduceLROnPlateau] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._seen = 0
        """The updates that there had been when it last looked."""
        self._kept = KeptValues()
        """The optimizers' own rates."""

    def owns(self) -> tuple[str, ...]:
        """The learning rate of its optimizers."""
        return (f"optimizer.lr.{self.optimizer}",)

    @hookimpl(reads=lambda plugin: plugin.owns(), after=("checkpoint",))  # which may load the state of a fit
    def fit_begin(self, learner: Learner) -> None:
        """Make the schedulers, so that wrong options raise before the first step."""
        self._make(learner)
        fit = learner.current
        self._kept.look(self._places(learner), new=fit is None or not fit.resumed)
        self._kept.note(self._places(learner))

    @hookimpl(reads=lambda plugin: (f"metrics.{plugin.monitor}",), writes=lambda plugin: plugin.owns())
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Look at the metric."""
        if phase.name != self.monitor.partition("/")[0] or learner.progress.updates == self._seen:
            return
        if self.monitor not in learner.metrics:
            known = ", ".join(learner.metrics) or "none"
            hint = nearest(self.monitor, learner.metrics)
            raise PluginError(f"plugin {self.name!r}: there is no metric {self.monitor!r}{hint}; there are: {known}")
        self._seen = learner.progress.updates
        self._make(learner)
        value = learner.world.share(float(learner.metrics[self.monitor]))
        for scheduler in self._schedulers.values():
            scheduler.step(value)
        self._kept.note(self._places(learner))

    def leave(self, learner: Learner) -> None:
        """Put the optimizers' own rates back."""
        self._kept.put_back(self._places(learner))

    def _places(self, learner: Learner) -> list[Place]:
        places: list[Place] = []
        for name, scheduler in self._schedulers.items():
            if learner.optimizers.get(name) is scheduler.optimizer:
                places += group_places(name, scheduler.optimizer)
        return places

    def _make(self, learner: Learner) -> None:
        mode = direction(self, learner.plugins.values())
        for name, optimizer in learner.optimizers.items():
            if not fnmatchcase(name, self.optimizer):
                continue
            known = self._schedulers.get(name)
            if known is not None and known.optimizer is not optimizer:  # the learner has a new one
                self._kept.forget(group_places(name, optimizer))
                self._states.pop(name, None)
                known = None
            if known is None:
                for place in group_places(name, optimizer):
                    self._kept.find(place)
                self._schedulers[name] = _ReduceOnPlateau(optimizer, mode, **self._options)
                if name in self._states:
                    self._schedulers[name].load_state_dict(deepcopy(self._states[name]))
        if not self._schedulers:
            where = f"plugin {self.name!r}: optimizer pattern"
            raise PluginError(f"{where} {nothing_matches(self.optimizer, learner.optimizers)}")

    def state_dict(self) -> dict[str, Any]:
        """The schedulers' own states."""
        states = {name: scheduler.state_dict() for name, scheduler in self._schedulers.items()} or self._states
        kept = {"own": dict(self._kept.own), "left": dict(self._kept.left)}
        return {"schedulers": deepcopy(states), "seen": self._seen, "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._seen = state["seen"]
        kept = state.get("kept", {"own": {}, "left": {}})  # which older states lack
        self._kept.own = dict(kept["own"])
        self._kept.left = dict(kept["left"])
        self._states = {name: dict(values) for name, values in state["schedulers"].items()}
        for name, scheduler in self._schedulers.items():
            if name in self._states:
                scheduler.load_state_dict(deepcopy(self._states[name]))
