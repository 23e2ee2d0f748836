"""The keys and values that the tables of a configuration may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loopkit.author import Every, nearest
from loopkit_files.calls import Report, article
from loopkit_files.lines import Place

__all__ = ["FIT", "LEARNER", "TABLES", "check_structure"]

Check = Callable[[Any], str]
"""Returns the problem of a value; an empty string if it is valid."""


def _count(value: Any) -> str:
    return "" if _is_whole(value) and value >= 1 else "it counts from 1"


def _count_or_inf(value: Any) -> str:
    return "" if value == math.inf else _count(value) and "it counts from 1, or is inf"


def _one_of(*words: str) -> Check:
    return lambda value: "" if value in words else f"it is {' or '.join(f'{word!r}' for word in words)}"


def _boolean(value: Any) -> str:
    return "" if isinstance(value, bool) else "it is true or false"


def _seed(value: Any) -> str:
    return "" if _is_whole(value) and 0 <= value < 2**32 else "it is from 0 to 2**32 - 1"


def _seconds(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "" if number and value > 0 else "it is a number of seconds above 0, or inf"


def _minutes(value: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "" if number and 0 < value < math.inf else "it is a number of minutes above 0"


def _every(value: Any) -> str:
    if not isinstance(value, dict):
        return "it is a table, such as {epochs = 1}, {updates = 100} or {minutes = 10, first = true}"
    try:
        Every(**value)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _names(value: Any) -> str:
    return "" if _are_names(value) else 'it is an array of names of plugins, ["a", "b"]'


def _chains(value: Any) -> str:
    chains = isinstance(value, list) and (_are_names(value) or all(map(_are_names, value)))
    return "" if chains else 'it is an array of names of plugins, ["a", "b"], or of several such arrays'


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


FIT: dict[str, Check] = {
    "epochs": _count_or_inf,
    "max_steps": _count,
    "max_updates": _count,
    "minutes": _minutes,
    "validate": _every,
    "on_interrupt": _one_of("raise", "return"),
    "loader_timeout": _seconds,
}
"""The keys of ``[fit]``: the arguments of ``Learner.fit``."""
LIMITS = ("epochs", "max_steps", "max_updates", "minutes")
LEARNER: dict[str, Check] = {
    "seed": _seed,
    "deterministic": _boolean,
    "accumulate": _count,
    "standard": _boolean,
    "without": _names,
    "order": _chains,
    "optimizer_modes": _boolean,
}
"""The keys of ``[learner]``: arguments of ``Learner``, ``deterministic`` of ``seed_everything``, and ``without``, the
standard plugins to remove."""
TABLES = ("model", "loss", "optimizer", "data", "learner", "fit", "plugins")
"""The tables, in the order in which they are written."""
NEEDED: dict[Place, str] = {
    ("model",): 'call = "package.module:make_model"',
    ("optimizer",): 'call = "torch.optim:SGD"',
    ("data", "train"): 'call = "package.module:make_loader"',
    ("fit",): "epochs = 3",
}
PARTS = ("train", "val")
CALLS: tuple[Place, ...] = (("model",), ("loss",), ("optimizer",), ("data", "train"), ("data", "val"))


def check_structure(values: Mapping[str, Any], report: Report) -> None:
    """Report tables and keys that are unknown, missing or of another type, without any import."""
    _known((), values, TABLES, "table", report)
    tables: dict[Place, Any] = {(name,): values[name] for name in TABLES if name in values}
    data = values.get("data", {})
    if isinstance(data, dict):
        _known(("data",), data, PARTS, "table", report)
        tables |= {("data", part): data[part] for part in PARTS if part in data}
    plugins = values.get("plugins", {})
    if isinstance(plugins, dict):
        tables |= {("plugins", name): plugin for name, plugin in plugins.items()}
    for place, table in tables.items():
        if not isinstance(table, dict):
            name = ".".join(map(str, place))
            report(place, f"{name} is {article(table)}, {table!r:.60}: it is a table, [{name}]")
    for place, line in NEEDED.items():
        if place not in tables and not (place[0] == "data" and not isinstance(data, dict)):
            report((), f"there is no table [{'.'.join(map(str, place))}]: add it, for example with {line}")
    for place in CALLS:
        if isinstance(table := tables.get(place), dict):
            _call(place, table, report)
    for name, checks in (("learner", LEARNER), ("fit", FIT)):
        if isinstance(table := values.get(name), dict):
            _known((name,), table, checks, "key", report)
            for key, value in table.items():
                if key in checks and (problem := checks[key](value)):
                    report((name, key), f"{key} is {value!r}: {problem}")
    if isinstance(fit := values.get("fit"), dict) and not any(limit in fit for limit in LIMITS):
        limits = "epochs, max_steps or max_updates (epochs = inf if you mean it), or minutes"
        report(("fit",), f"fit has no end: give {limits}")
    learner = values.get("learner")
    if isinstance(learner, dict) and learner.get("deterministic") is True and "seed" not in learner:
        report(("learner", "deterministic"), "deterministic = true needs a seed")


def _known(place: Place, table: Mapping[str, Any], known: Iterable[str], what: str, report: Report) -> None:
    for key in table:
        if key not in known:
            where = f"[{'.'.join(map(str, place))}] has no {what}" if place else f"there is no {what}"
            near = nearest(key, known) if place else _near_table(key, table)
            report((*place, key), f"{where} {key!r}{near}; there are {', '.join(known)}")


def _near_table(key: str, tables: Mapping[str, Any]) -> str:
    """The hint for a table that does not exist: ``data.train`` for ``train``, ``optimizer.lr`` for ``lr``."""
    if key in PARTS:
        return f" (did you mean [data.{key}]?)"
    inside = [name for name, table in tables.items() if isinstance(table, Mapping) and name != key and key in table]
    return f" (did you mean {inside[0]}.{key}?)" if inside else nearest(key, TABLES)


def _call(place: Place, table: dict[str, Any], report: Report) -> None:
    if "call" in table or (place == ("loss",) and "use" in table):
        return
    name = ".".join(map(str, place))
    if place[0] in ("model", "optimizer") and table and all(isinstance(value, dict) for value in table.values()):
        names = ", ".join(table)
        report(
            place,
            f"[{name}] has subtables, {names}: a configuration trains one supervised model with one optimizer. "
            f"For several, write a script with your own phase",
        )
        return
    near = nearest("call", [key for key in table if isinstance(table[key], str)])
    report(place, f'[{name}] names no callable: add call = "package.module:name"{near}')
