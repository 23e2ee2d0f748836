"""Helpers of both adapters: the error for an attribute that a facade lacks, plain states, late imports."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor

from loopkit.author import nearest
from loopkit.errors import PluginError

__all__ = ["LIMITS", "Metrics", "UnsupportedError", "is_needed", "lacks", "load", "made", "plain"]

LIMITS = ("epochs", "max_steps", "max_updates", "minutes")
"""Why a fit ends that has come to its own end."""
PLAIN = (bool, int, float, str)


def is_needed(hook: str) -> Callable[[Any], bool]:
    """Return the ``when`` of a hook of an adapter: whether what it adapts needs the hook."""
    return lambda plugin: hook in plugin.needed


class UnsupportedError(PluginError, AttributeError):
    """An adapted object asks for something that its facade does not have."""


class MetricError(PluginError, KeyError):
    """An adapted object asks for a metric that there is not."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class Metrics(dict[str, Any]):
    """Metrics by the names that an adapted object uses; one that is missing is an error that names it and the object.

    Args:
        who: The object.
    """

    def __init__(self, who: str, metrics: Mapping[str, Any]) -> None:
        super().__init__(metrics)
        self._who = who

    def __missing__(self, name: str) -> Any:
        raise MetricError(
            f"{self._who} uses the metric {name!r}, which is not there{nearest(str(name), self)}; there are: "
            f"{', '.join(self) or 'none'}"
        )


def lacks(who: str, what: str, instead: str = "") -> UnsupportedError:
    """The error of an attribute that a facade does not have: who asked for what, such as ``"trainer.datamodule"``."""
    return UnsupportedError(
        f"{who} uses {what}, which this adapter does not have: {instead or 'write a plugin of loopkit for it'}"
    )


def load(module: str, package: str, extra: str, why: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Its full name.
        package: The package to install, as people call it.
        extra: The extra of this distribution that installs it.
        why: The part that needs it, for the message.

    Raises:
        PluginError: The package is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it needs is not
        raise PluginError(
            f"{why} needs {package}, which is not installed: pip install 'loopkit-callbacks[{extra}]'"
        ) from error


def made(adapter: type, cls: type, options: Mapping[str, Any], **given: Any) -> Any:
    """Make an adapter's object by name.

        Args:
            adapter: It takes its own options, by name.
    cls: The class of the object.
    options: The user's options.
    given: The adapter's options.

        Raises:
            PluginError: An option is unknown or missing; lists the known ones.
    """
    who = f"{adapter.__name__}({cls.__name__!r})"
    signature, own = inspect.signature(cls), inspect.signature(adapter)
    parameters = _parameters(cls)
    takes = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [*takes, *(p.name for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY)]
        for option in options:
            if option not in takes:
                raise PluginError(
                    f"{who} has no option {option!r}{nearest(option, known)}; it takes {', '.join(takes) or 'none'}"
                )
    options = {**given, **options}
    try:
        signature.bind(**options)
    except TypeError as error:
        raise PluginError(f"{who}: {error}; it takes {', '.join(takes)}") from error
    return cls(**options)


def _parameters(cls: type) -> list[inspect.Parameter]:
    """The parameters of a class, with its base's if it hands on all others (``*args, **kwargs``)."""
    found = list(inspect.signature(cls).parameters.values())
    rest = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [*rest, *_parameters(cls.__mro__[1])] if len(found) - len(rest) == 2 else found


def plain(value: Any, who: str, path: str = "state") -> Any:
    """A copy of a state, in types that the state of a plugin can hold.

    Raises:
        PluginError: It holds another type; names the place.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: plain(part, who, f"{path}[{key!r}]") for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(part, who, f"{path}[{i}]") for i, part in enumerate(value))
    if value is None or type(value) in PLAIN:
        return value
    what = f"a {type(value).__name__} under keys of other kinds" if isinstance(value, Mapping) else repr(value)
    raise PluginError(
        f"the state of {who} holds {what}, {path}, which cannot be saved: a state is made of None, booleans, numbers, "
        f"strings, lists, tuples, dicts with string or int keys, and tensors; convert it where it is made"
    )
