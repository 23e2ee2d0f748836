"""The options that an object was made with, and its repr."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import PurePath
from reprlib import Repr
from typing import Any, TypeVar

from loopkit.base.words import takes
from loopkit.errors import PluginError

T = TypeVar("T")


def options_of(plugin: Any) -> dict[str, Any]:
    """The options that a plugin was made with, by the names of its ``__init__``.

    They are the return value of its ``options()``, if it has that method. Otherwise an option is the attribute with
    the same name, or with that name after an underscore. Options that were passed as ``**options`` have their own
    names. Options without an attribute are left out.

    Example::

        >>> options_of(ClipGradNorm(1.0))
        {'max_norm': 1.0, 'norm_type': 2.0, 'name': 'clip_grad_norm'}
    """
    if inspect.isroutine(inspect.getattr_static(plugin, "options", None)):
        return dict(plugin.options())
    try:
        parameters = inspect.signature(type(plugin)).parameters.values()
    except (TypeError, ValueError):
        return {}
    options: dict[str, Any] = {}
    for parameter in parameters:
        held = [word for word in (parameter.name, f"_{parameter.name}") if _holds(plugin, word)]
        if held:
            value = getattr(plugin, held[0])
            if parameter.kind is not parameter.VAR_KEYWORD:
                options[parameter.name] = value
            elif isinstance(value, Mapping):
                options.update(value)
    return options


def _holds(plugin: Any, word: str) -> bool:
    """Whether an attribute is a value of the plugin's own, or a property, and not one of its methods."""
    missing = object()
    held = inspect.getattr_static(plugin, word, missing)
    return held is not missing and (word in getattr(plugin, "__dict__", ()) or not inspect.isroutine(held))


def fresh(plugin: T) -> T:
    """Return a new plugin with the options of another one, in the state that it has when it is made.

    For the learners of a sweep: a plugin with a state belongs to one learner. Options that have a state themselves,
    such as criteria, metrics and backends, are new, too; functions, data and plain values are the same.

    Args:
        plugin: A plugin, or one of the things that plugins are made with.

    Raises:
        PluginError: Some options are not known, or cannot be made anew; names them.

    Example::

        stop = EarlyStopping("val/loss", patience=3)
        plugins = [fresh(stop), fresh(average)]
    """
    cls = type(plugin)
    known = options_of(plugin)
    parameters = inspect.signature(cls).parameters.values()
    several = [each.name for each in parameters if each.kind is each.VAR_POSITIONAL]
    lacking = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name not in known]
    if lacking:
        raise PluginError(
            f"fresh: {cls.__name__} does not keep its {', '.join(map(repr, lacking))}: make a new one by hand, or give "
            f"the class options(self), which returns a dict of its options"
        )
    options = {name: _anew(value, f"{cls.__name__}({name}=...)") for name, value in known.items()}
    positional: list[Any] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += options.pop(parameter.name)
        elif parameter.kind is parameter.POSITIONAL_ONLY or (several and parameter.kind is not parameter.KEYWORD_ONLY):
            if parameter.name in options:
                positional.append(options.pop(parameter.name))
    return cls(*positional, **options)


def _anew(value: Any, where: str) -> Any:
    """An option for a new plugin: itself, or new if it has a state."""
    if type(value) in (list, tuple, set):
        return type(value)(_anew(each, where) for each in value)
    if type(value) is dict:
        return {key: _anew(each, where) for key, each in value.items()}
    if inspect.isroutine(value) or isinstance(value, type):
        return value
    if _is_metric(value):
        made = copy.deepcopy(value)
        made.reset()
        return made
    if _knows_its_options(value):
        return fresh(value)
    is_data = hasattr(value, "__iter__") and not _has(value, "parameters")
    if is_data or not _has(value, "state_dict"):
        return value
    raise PluginError(
        f"fresh: {where} is a {type(value).__name__}, which has a state, and cannot be made again from here: make "
        f"the new plugin by hand, with its own {type(value).__name__}, or with a function that makes one"
    )


def _has(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None))


def _is_metric(value: Any) -> bool:
    """Whether it has the methods of a metric, of any library."""
    return all(_has(value, name) for name in ("update", "compute", "reset"))


def _knows_its_options(value: Any) -> bool:
    if isinstance(value, Shown):
        return True
    return any(hasattr(each, "loopkit_options") for base in type(value).__mro__ for each in vars(base).values())


class Shown:
    """Base of objects whose repr shows the options that they were made with, except defaults."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let errors for its arguments give the right ones, as `takes` does."""
        super().__init_subclass__(**options)
        make = vars(cls).get("__init__")
        if inspect.isfunction(make) and not hasattr(make, "loopkit_takes"):
            cls.__init__ = takes()(make)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Such as ``ClipGradNorm(max_norm=1.0)``."""
        cls = type(self)
        parameters = inspect.signature(cls).parameters.values()
        defaults = {each.name: each.default for each in parameters}
        several = {each.name for each in parameters if each.kind is each.VAR_POSITIONAL}
        parts: list[str] = []
        for name, value in options_of(self).items():
            if name in several:
                parts += map(SHORT.repr, value)
            elif not _same(value, defaults.get(name, inspect.Parameter.empty)):
                parts.append(f"{name}={SHORT.repr(value)}")
        return f"{cls.__name__}({', '.join(parts)})"


class _Short(Repr):
    """Values in a line: long ones are cut, tensors and modules named."""

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, PurePath):
            return repr(str(x))
        if inspect.isroutine(x) or isinstance(x, type):
            return str(x.__qualname__)
        if (shape := getattr(x, "shape", None)) is not None:
            return f"{type(x).__name__}{tuple(shape)}"
        text = repr(x)
        return f"{type(x).__name__}(...)" if text.startswith("<") or "\n" in text else text


SHORT = _Short()
SHORT.maxstring = SHORT.maxother = 60


def _same(one: Any, other: Any) -> bool:
    """Whether an option is as its default."""
    plain = (bool, int, float, str, tuple)
    return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)
