"""From a learner to its configuration, for parts whose call is known."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from loopkit import author
from loopkit.author import Every, describe, nearest, no_loss_fn, options_of
from loopkit.learner import Learner
from loopkit.phases import Phase, PredictionPhase, TrainingPhase, ValidationPhase
from loopkit_files.calls import dotted, is_changed, parameters_of, public_name, remembered
from loopkit_files.errors import ConfigError
from loopkit_files.lines import Place
from loopkit_files.record import SaveConfig
from loopkit_files.schema import LIMITS, PARTS, TABLES, check_structure

__all__ = ["tables_of"]

TELLING = ("loopkit.", "torch.nn.modules.loss")
"""Modules whose objects keep what they were made with (`loopkit.base.options.options_of`)."""
STANDARD = (TrainingPhase, ValidationPhase, PredictionPhase)


def tables_of(
    learner: Learner, train: Any, val: Any, fit: Mapping[str, Any], seed: int | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of `Config.of`.

    Raises:
        ConfigError: Parts cannot be written; lists each with a fix.
    """
    writer = _Writer(given)
    if learner.progress.steps:
        raise ConfigError(
            f"the learner has trained {learner.progress.steps} steps: a run from a file begins at the first; write it "
            f"before the fit"
        )
    for name, problem in {
        "phases": any(map(_is_own, learner.phases.values())) and "your own phases",
        "model": isinstance(learner.model, Mapping) and "several models",
        "optimizer": isinstance(learner.optimizer, Mapping) and "several optimizers",
    }.items():
        if problem:
            writer.problems.append(f"{name}: a configuration has no place for {problem}: keep the script")
    writer.check_given(learner)
    if writer.problems:
        raise _error(writer.problems)
    tables: dict[str, Any] = {"model": writer.model(learner)}
    if learner.loss_fn is not no_loss_fn:
        tables["loss"] = writer.part(("loss",), learner.loss_fn)
    tables["optimizer"] = writer.optimizer(learner)
    tables["data"] = {
        name: writer.part(("data", name), part)
        for name, part in (("train", train), ("val", val))
        if part is not None or writer.knows(("data", name))
    }
    tables["learner"] = {**_settings(learner, seed), **given.get("learner", {})}
    chosen = {key: value for key, value in fit.items() if value is not None or key not in LIMITS}
    tables["fit"] = {key: value.options() if isinstance(value, Every) else value for key, value in chosen.items()}
    tables["plugins"] = {
        name: writer.plugin(name, plugin)
        for name, plugin in learner.plugins.items()
        if not isinstance(plugin, SaveConfig) and not any(plugin is each for each in learner.options.standard)
    }
    found = {name: table for name, table in tables.items() if table or name == "fit"}
    if not writer.problems:
        check_structure(found, lambda place, text: writer.problems.append(text))
    if writer.problems:
        raise _error(writer.problems)
    return found


def _error(problems: list[str]) -> ConfigError:
    return ConfigError("this learner cannot be written as it is:", tuple(problems))


def _is_own(phase: Phase) -> bool:
    """Whether a phase is another one than a learner has by itself."""
    return type(phase) not in STANDARD or vars(phase) != vars(type(phase)())


def _settings(learner: Learner, seed: int | None) -> dict[str, Any]:
    left_out = [plugin.name for plugin in learner.options.standard if plugin.name not in learner.plugins]
    settings: dict[str, tuple[Any, Any]] = {
        "seed": (None, seed),
        "deterministic": (False, seed is not None and torch.are_deterministic_algorithms_enabled()),
        "accumulate": (1, learner.accumulate),
        "standard": (True, bool(learner.options.standard)),
        "without": ([], sorted(left_out)),
        "optimizer_modes": (True, learner.models.modes.wanted),
        "order": ([], learner.options.order[0] if len(learner.options.order) == 1 else learner.options.order),
    }
    return {name: value for name, (default, value) in settings.items() if value != default}


class _Writer:
    """Turns objects into tables; parts in ``given`` are taken from there."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.problems: list[str] = []

    def knows(self, place: Place) -> bool:
        """Whether the user gave the table of a place."""
        inside: Any = self.given
        for key in place:
            if not isinstance(inside, Mapping) or key not in inside:
                return False
            inside = inside[key]
        return True

    def check_given(self, learner: Learner) -> None:
        """Note tables that the user gave for missing parts."""
        known = [name for name in TABLES if name != "fit"]
        for name in self.given:
            if name not in known:
                self.problems.append(f"given: there is no table {name!r}{nearest(name, known)}; there are {known}")
        for table, names in (("data", PARTS), ("plugins", learner.plugins)):
            for name in self.given.get(table, {}):
                if name not in names:
                    self.problems.append(f"given: [{table}] has no {name!r} here{nearest(name, names)}")

    def model(self, learner: Learner) -> Any:
        """The model's table, if the model is still as it was made."""
        model, place = learner.model, ("model",)
        frozen = any(getattr(plugin, "provides", "") == "freeze" for plugin in learner.plugins.values())
        if not self.knows(place) and remembered(model) is not None and is_changed(learner.models["model"], frozen):
            return self.by_hand(place, model, "was changed since it was made")
        return self.part(place, model)

    def part(self, place: Place, value: Any) -> Any:
        """The written form that the user gave, or else the object's own."""
        if not self.knows(place):
            return self.written(place, value)
        inside: Any = self.given
        for key in place:
            inside = inside[key]
        return inside

    def plugin(self, name: str, plugin: Any) -> Any:
        """A plugin's table, without ``call`` if discovery knows it by the name it has."""
        table = self.part(("plugins", name), plugin)
        found = [each.entry_point for each in author.plugins()[0] if each.entry_point.name == name]
        if isinstance(table, dict) and "call" in table and len(found) == 1:
            own = public_name(type(plugin))
            if own and own == table["call"] and public_name(found[0].load()) == own:
                return {key: value for key, value in table.items() if key != "call" and (key, value) != ("name", name)}
        return table

    def optimizer(self, learner: Learner) -> Any:
        """A torch optimizer over all parameters of the model, by its defaults."""
        optimizer, place = learner.optimizer, ("optimizer",)
        if self.knows(place):
            return self.part(place, optimizer)
        if optimizer is None:
            self.problems.append("optimizer: the learner has none: give it one")
            return None
        groups = optimizer.param_groups
        options = dict(optimizer.defaults)
        if not any("initial_lr" in group for group in groups):  # a scheduler of torch has changed them already
            options |= {key: value for key, value in groups[0].items() if key in options}
        changed = [key for key, value in options.items() if not _same(value, optimizer.defaults[key])]
        if remembered(optimizer) is not None:
            if changed:
                return self.by_hand(place, optimizer, f"was given another {', '.join(changed)} since it was made")
            return self.part(place, optimizer)
        ours = [p for model in learner.models.values() for p in model.parameters()]
        if len(groups) != 1 or [id(p) for p in groups[0]["params"]] != [id(p) for p in ours]:
            return self.by_hand(
                place, optimizer, "was made by hand, and its groups are not simply all parameters of the model"
            )
        name = public_name(type(optimizer))
        parameters = {p.name: p.default for p in parameters_of(type(optimizer)) or ()}
        if not name or not optimizer.defaults.keys() & parameters.keys():
            return self.by_hand(place, optimizer)
        options = {k: v for k, v in options.items() if k in parameters and not _same(v, parameters[k])}
        return {"call": name, **{key: self.written((*place, key), value) for key, value in options.items()}}

    def written(self, place: Place, value: Any) -> Any:
        """A value as TOML; any other value is noted among the problems."""
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, (list, tuple)):
            return [self.written((*place, i), item) for i, item in enumerate(value)]
        if isinstance(value, Mapping):
            return {str(key): self.written((*place, str(key)), item) for key, item in value.items()}
        if isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.device):
            return str(value)
        table = remembered(value)
        if table is not None:
            return {key: item if key == "call" else self.written((*place, key), item) for key, item in table.items()}
        if inspect.isroutine(value) or inspect.isclass(value):
            return self.named(place, value)
        options = _options(value)
        if options is None:
            return self.by_hand(place, value)
        before = len(self.problems)
        table = {key: self.written((*place, key), item) for key, item in options.items()}
        if len(self.problems) > before:  # what it holds is not what it was made with
            del self.problems[before:]
            return self.by_hand(place, value)
        return {"call": public_name(type(value)), **table}

    def named(self, place: Place, value: Any) -> Any:
        """A function or class, by its name."""
        name = public_name(value)
        if name and not name.startswith("__main__:"):
            return {"use": name}
        what = "a lambda" if getattr(value, "__name__", "") == "<lambda>" else f"{getattr(value, '__name__', value)!r}"
        where = "in the script that is running" if name else "which no module has by name"
        self.problems.append(f"{dotted(place)}: {what}, {where}: define it by def in a module that can be imported")
        return None

    def by_hand(self, place: Place, value: Any, why: str = "was made by hand, and its options are unknown") -> None:
        """Note that an object cannot be written."""
        name = public_name(type(value))
        name = "package.module:name" if not name or name.startswith("__main__:") or ":_" in name else name
        inside = "".join(f'{{"{key}": ' for key in place) + '{"call": ...}' + "}" * len(place)
        self.problems.append(
            f"{dotted(place)}: {describe(value, 0)} {why}: make it by "
            f'loopkit_files.make("{name}", ...), or give Config.of(..., given={inside})'
        )


def _options(value: Any) -> dict[str, Any] | None:
    """The options that an object was made with, but for the defaults; None if some are unknown."""
    cls = type(value)
    if not public_name(cls) or not cls.__module__.startswith(TELLING):
        return None
    kept, defaults = options_of(value), {p.name: p.default for p in parameters_of(cls) or ()}
    silent = [name for name, default in defaults.items() if name not in kept and default is not None]
    if silent and not hasattr(value, "options"):  # which leaves out what is None, or as the class has it
        return None
    return {name: kept[name] for name, default in defaults.items() if name in kept and not _same(kept[name], default)}


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of one type."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (
        type(one) is type(other) and (repr(one) == repr(other) if type(one) is float else one == other)
    )
