"""A run in a TOML file: read, checked as a whole, and made."""

from __future__ import annotations

import datetime
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from loopkit import author, seed_everything
from loopkit.author import Every, locate, nearest, standard_set
from loopkit.errors import PluginError
from loopkit.learner import Learner
from loopkit.result import FitResult
from loopkit_files import overrides as override
from loopkit_files.calls import Caller, Report, article, dotted
from loopkit_files.errors import ConfigError
from loopkit_files.lines import Place, line_numbers
from loopkit_files.record import SaveConfig
from loopkit_files.schema import TABLES, check_structure
from loopkit_files.variables import filled

__all__ = ["Built", "Config", "dump", "load", "plain"]

Scalars = (bool, int, float, str, datetime.datetime, datetime.date, datetime.time)
DEEPEST = 60
"""How many keys can lead to a value."""
LONGEST = 200
"""How many characters of a text are shown in a message."""
AT_LINE = re.compile(r" \(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True)
class Built:
    """A run that was made from a configuration, ready to train."""

    learner: Learner
    train: Any
    val: Any
    """None if there is no ``[data.val]``."""
    fit: dict[str, Any]
    """The other arguments of ``learner.fit``."""

    def run(self) -> FitResult:
        """Train."""
        return self.learner.fit(self.train, self.val, **self.fit)


class Config:
    """A supervised run in plain values, as in its TOML file.

    Args:
        values: The tables, by name: ``model``, ``optimizer``, ``data`` and ``fit``, and perhaps ``loss``, ``learner``
            and ``plugins``. They are copied. ``run`` is the folder of the run, which other values name as ``${run}``.
        path: The file that they come from, for messages.
        lines: The lines of that file, by place.
        overrides: Values set over the file, by place, as they were written.

    Raises:
        ConfigError: A value is none that TOML has.

    Example::

        config = Config(
            {
                "model": {"call": "torch.nn:Linear", "in_features": 3, "out_features": 1},
                "loss": {"call": "torch.nn:MSELoss"},
                "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
                "data": {"train": {"call": "my_package.data:train_loader"}},
                "fit": {"epochs": 3},
            }
        )
        result = config.build().run()
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        path: str | os.PathLike[str] | None = None,
        lines: Mapping[Place, int] | None = None,
        overrides: Mapping[Place, str] | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._lines = dict(lines or {})
        self._overrides = dict(overrides or {})
        if not isinstance(values, Mapping):
            raise ConfigError(f"the values of a configuration are {values!r:.60}: give its tables, by name")
        problems: list[str] = []

        def report(place: Place, text: str) -> None:
            problems.append(f"{self.where(place)}: {text}")

        self.values: dict[str, Any] = filled(plain(values, report), report)
        if problems:
            raise _error(self.path, problems)

    @classmethod
    def of(
        cls,
        learner: Learner,
        train: Any = None,
        val: Any = None,
        *,
        fit: Mapping[str, Any],
        seed: int | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> Config:
        """The configuration of a learner, before its first fit.

        The call of a part is known if `make` or a configuration made it; for functions and classes of modules;
        for optimizers and losses of torch, and plugins of loopkit that keep their options as they are given. Any
        other part, or one that was changed since it was made, must be given.

        Args:
            learner: It trains one model with one optimizer in the standard phases.
            train: The data, as for ``learner.fit``.
            val: Likewise.
            fit: The other arguments of ``learner.fit``.
            seed: The seed set before anything is made.
            given: Tables for the parts whose call is unknown, as ``{"model": {"call": "my_package:net"}}``.

        Raises:
            ConfigError: Parts cannot be written; lists each with a fix.
        """
        from loopkit_files.written import tables_of

        return cls(tables_of(learner, train, val, fit, seed, given or {}))

    def where(self, place: Place) -> str:
        """Where a value was written, for messages: ``"run.toml:12"``.

        Args:
            place: The keys that lead to it, such as ``("data", "train", "call")``.
        """
        for key, text in self._overrides.items():
            if place[: len(key)] == key or (place not in self._lines and place == key[: len(place)] != ()):
                return f"--set {text if len(text) <= LONGEST else text[:LONGEST] + '...'}"
        if self.path is None:
            return dotted(place) or "the configuration"
        line = self._line(place)
        return f"{self.path}:{line}" if line else str(self.path)

    def _given(self, place: Place) -> list[str]:
        """The values of a table that the command line gave."""
        inside = [key for key in self._overrides if len(key) > len(place) and key[: len(place)] == place]
        return [self.where(key) for key in reversed(inside)]

    def _line(self, place: Place) -> int:
        return next((self._lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in self._lines), 0)

    def check(self) -> None:
        """Look for everything that is wrong: tables, keys, values, names, and options that callables do not take.

        Names are imported, without any call.

        Raises:
            ConfigError: Lists every problem, with its line.
        """
        self._checked()

    def build(self) -> Built:
        """Make everything: seed, data, model, loss, plugins, learner with the optimizer; in this order.

        An error in a callable passes through, with a note that names the line.

        Raises:
            ConfigError: As for `check`, before anything is made.
        """
        caller = self._checked()
        self._seed()
        data = self.values["data"]
        train, val = (caller.made(("data", part), data[part]) if part in data else None for part in ("train", "val"))
        fit = dict(self.values["fit"])
        if "validate" in fit:
            fit["validate"] = Every(**fit["validate"])
        return Built(self._learner(caller), train, val, fit)

    def learner(self) -> Learner:
        """Make only the learner, and no data: for looking at its plan."""
        caller = self._checked()
        self._seed()
        return self._learner(caller)

    def _seed(self) -> None:
        learner = self.values.get("learner", {})
        if "seed" in learner:
            seed_everything(learner["seed"], learner.get("deterministic", False))

    def _learner(self, caller: Caller) -> Learner:
        values = self.values
        model = caller.made(("model",), values["model"])
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{self.where(('model', 'call'))}: {values['model']['call']} returned {article(model)}: it must return "
                f"one torch.nn.Module"
            )
        loss_fn = caller.made(("loss",), values["loss"]) if "loss" in values else None
        if loss_fn is not None and not callable(loss_fn):
            raise ConfigError(
                f"{self.where(('loss',))}: the loss is {article(loss_fn)}, which cannot be called with outputs and "
                f"targets"
            )
        plugins = [caller.made(("plugins", name), table) for name, table in sorted(values.get("plugins", {}).items())]
        if directories := [plugin.directory for plugin in plugins if _saves(plugin)]:
            plugins.append(SaveConfig(self, directories))
        taken = ("accumulate", "standard", "order", "optimizer_modes")
        options = {k: v for k, v in values.get("learner", {}).items() if k in taken}
        try:
            learner = Learner(
                model,
                loss_fn,
                lambda params: caller.made(("optimizer",), values["optimizer"], params),
                plugins=plugins,
                **options,
            )
            learner.remove(*values.get("learner", {}).get("without", ()))
        except Exception as error:
            locate(error, f"{self.where(())}: this came while the learner was made")
            raise
        learner.options.config = dump(self)
        return learner

    def _checked(self, before: Iterable[str] = ()) -> Caller:
        """A caller for all tables that name something, if all are valid."""
        found: list[tuple[Place, str]] = []

        def report(place: Place, text: str) -> None:
            found.append((place, text))

        check_structure(self.values, report)
        caller = Caller(self.where, self._factories(report), self._given)
        for name in ("model", "loss", "optimizer", "data", "plugins"):
            caller.check((name,), self.values.get(name), report, given=int(name == "optimizer"))
        failure = caller.failure
        if failure is not None and found:
            text = f"{type(failure).__name__}: {failure}"
            found.append(((), f"and what it names cannot be imported, {text.splitlines()[0]}"))
        found.sort(key=lambda problem: self._line(problem[0]))
        problems = [*before, *(f"{self.where(place)}: {text}" for place, text in found)]
        if problems:
            raise _error(self.path, problems) from failure
        if failure is not None:
            raise failure
        return caller

    def _factories(self, report: Report) -> dict[Place, Any]:
        """The classes of the plugins that are given by name; a name that may not be used is not imported."""
        plugins, learner = self.values.get("plugins"), self.values.get("learner")
        factories: dict[Place, Any] = {}
        without = learner.get("without") if isinstance(learner, dict) else None
        known = [plugin.name for plugin in standard_set([])]
        for name in without if isinstance(without, list) else []:
            if name not in known:
                there = ", ".join(known)
                text = f"without: no standard plugin is called {name!r}{nearest(name, known)}; there are {there}"
                report(("learner", "without"), text)
        for name, table in (plugins if isinstance(plugins, dict) else {}).items():
            if not isinstance(table, dict) or "call" in table or "use" in table:
                continue
            try:
                author.find(name)
                factories["plugins", name] = author.load_plugin(name)
            except PluginError as error:
                report(("plugins", name), str(error))
        return factories


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read and check a configuration.

    Args:
        path: The file.
        overrides: Values over those of the file, as ``"fit.epochs=3"``; text that is not TOML is a string.

    Raises:
        ConfigError: Lists every problem, one per line: ``run.toml:12: ...``.

    Example::

        learner = loopkit_files.load("run.toml").build().learner
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides is {overrides!r:.60}: give a list of such texts")
    path = Path(path)
    text = _read(path)
    values = _parse(path, text)
    lines = line_numbers(text)
    problems: list[str] = []
    placed: dict[Place, str] = {}
    for given in overrides:
        try:
            keys, value = override.parse(given)
            place = override.apply(values, keys, value)
        except override.OverrideError as error:
            problems.append(f"--set {given:.{LONGEST}}: {error}")
        else:
            placed = {place: given, **{key: text for key, text in placed.items() if key != place}}
    config = Config(values, path=path, lines=lines, overrides=placed)
    config._checked(problems)
    return config


def dump(config: Config) -> str:
    """A configuration as TOML, which `load` reads; tables in a fixed order.

    >>> print(dump(Config({"fit": {"epochs": 3}, "model": {"call": "my_package:net"}})), end="")
    [model]
    call = "my_package:net"
    <BLANKLINE>
    [fit]
    epochs = 3
    """
    import tomli_w

    order = {name: i for i, name in enumerate(TABLES)}
    return tomli_w.dumps(dict(sorted(config.values.items(), key=lambda item: order.get(item[0], len(order)))))


def plain(value: Any, report: Report, place: Place = (), outside: tuple[int, ...] = ()) -> Any:
    """A copy of a value in the types of TOML: dicts, lists, texts, numbers, booleans, dates and times."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, (Mapping, list, tuple)):
        if id(value) in outside or len(place) > DEEPEST:
            what = "holds itself: TOML has no such values" if id(value) in outside else "is nested too deeply"
            report(place[:DEEPEST], f"{dotted(place):.60} {what}")
            return None
        outside = (*outside, id(value))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                report(place, f"{dotted(place) or 'it'} has the key {key!r:.60}: keys are texts")
        return {k: plain(v, report, (*place, k), outside) for k, v in value.items() if isinstance(k, str)}
    if isinstance(value, (list, tuple)):
        return [plain(item, report, (*place, i), outside) for i, item in enumerate(value)]
    if value is None:
        report(place, f"{dotted(place)} is None, which TOML does not have: leave it out to have the default")
    elif not isinstance(value, Scalars):
        report(
            place, f"{dotted(place)} is {article(value)}, which TOML does not have: name what makes it, {{call = ...}}"
        )
    elif isinstance(value, str):
        value = str(value)
        if not value.isascii() and value.encode(errors="ignore").decode() != value:
            report(place, f"{dotted(place)} is {value!r:.60}, which is no valid Unicode")
    else:
        value = next((kind(value) for kind in (bool, int, float) if isinstance(value, kind)), value)
    return value


def _saves(plugin: Any) -> bool:
    """Whether a plugin keeps checkpoints in a directory."""
    return getattr(plugin, "provides", "") == "checkpoint" and isinstance(
        getattr(plugin, "directory", None), (str, os.PathLike)
    )


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        names = os.listdir(path.parent) if path.parent.is_dir() else []
        raise ConfigError(f"{path}: there is no such file{nearest(path.name, names)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: it is a directory: give the file of a configuration") from None
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}: it is not UTF-8, as TOML is: {error.reason}") from None
    if not text.strip():
        raise ConfigError(f"{path}: it is empty: it needs the tables [model], [optimizer], [data.train] and [fit]")
    return text


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        match = AT_LINE.search(str(error))
        line, column = (int(match[1]), f", at column {match[2]}") if match else (1 + text.rstrip().count("\n"), "")
        what = str(error)[: match.start() if match else None].replace(" (at end of document)", " at the end")
        raise ConfigError(f"{path}:{line}: it is no TOML: {what[:1].lower()}{what[1:]}{column}") from None
    except ValueError:  # of int, where there are more digits than Python takes
        most = sys.get_int_max_str_digits()
        number = re.search(rf"[\d_]{{{most + 1},}}", text)
        line = 1 + text.count("\n", 0, number.start() if number else len(text))
        raise ConfigError(f"{path}:{line}: an integer of more than {most:,} digits, where TOML has 64 bits") from None


def _error(path: Path | None, problems: list[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{len(problems)} problems in {path or 'the configuration'}:", tuple(problems))
