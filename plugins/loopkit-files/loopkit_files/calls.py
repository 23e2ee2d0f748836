"""Tables that name a callable: find it, compare the options with its signature, call it."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loopkit.author import bound, locate, nearest, renamed_options
from loopkit_files.errors import ConfigError
from loopkit_files.lines import Place

__all__ = [
    "Caller",
    "Report",
    "article",
    "dotted",
    "is_call",
    "is_changed",
    "make",
    "parameters_of",
    "public_name",
    "remembered",
]

Report = Callable[[Place, str], None]
"""Called with the place of each problem, and what it is."""
SIMPLE: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    Path: (str,),
    type(None): (),
    None: (),
}
"""The annotations that a value is compared with, and the types it may have."""
OTHER = {"learning_rate": "lr", "wd": "weight_decay", "bs": "batch_size", "n_epochs": "epochs", "max_epochs": "epochs"}
"""Other words for options, for the hint about an unknown one."""
_made: dict[int, tuple[weakref.ref[Any], dict[str, Any], Any]] = {}
"""By identity: each object made from a table, the table with its given options, and the state it then had."""


class _Refused(Exception):
    """A name that leads nowhere; the message is the reason."""


def make(call: str, /, **options: Any) -> Any:
    """Call what ``"package.module:callable"`` names, and remember how, so that `Config.of` can write it.

    Raises:
        ConfigError: The name leads nowhere, or the callable has other options.

    >>> make("torch.nn:Linear", in_features=3, out_features=1)
    Linear(in_features=3, out_features=1, bias=True)
    """
    problems: list[str] = []
    caller = Caller(lambda place: "loopkit_files.make")
    table = {"call": call, **options}
    caller.check((), table, lambda place, text: problems.append(text))
    if problems:
        raise ConfigError("; ".join(problems))
    if caller.failure is not None:
        raise caller.failure
    return caller.made((), table)


def remembered(value: Any) -> dict[str, Any] | None:
    """The table that an object was made from, if it was made by `make` or from a configuration."""
    found = _made.get(id(value))
    return found[1] if found is not None and found[0]() is value else None


def is_changed(model: nn.Module, frozen: bool) -> bool:
    """Whether a model that `remembered` knows has other parameters, or other values in them, than when it was made.

    Args:
        model: The model.
        frozen: Whether a plugin has frozen parameters, which is no change then.
    """
    now, then = _state(model), _made[id(model)][2]
    return then is not None and (now is None or now[:-1] != then[:-1] or (now != then and not frozen))


class Caller:
    """Checks tables, and makes objects of them.

    Args:
        where: ``"run.toml:12"`` for a place, for the notes on errors of the user's code.
        factories: The callables of tables without ``call``, by place: the plugins.
        given: The values of a table that the command line gave, for the same notes: ``["--set optimizer.lr=a"]``.
    """

    def __init__(
        self,
        where: Callable[[Place], str],
        factories: Mapping[Place, Any] | None = None,
        given: Callable[[Place], list[str]] = lambda place: [],
    ) -> None:
        self.where = where
        self.factories = dict(factories or {})
        self.given = given
        self.failure: Exception | None = None
        """The first error that a module raised while it was imported."""

    def check(self, place: Place, value: Any, report: Report, given: int = 0) -> None:
        """Report the problems of a value and its tables, without any call.

        Args:
            place: Where it stands.
            value: A table with ``call`` or ``use``, or one of `factories`, or any other value.
            report: Gets the problems.
            given: How many positional arguments the callable gets.
        """
        if isinstance(value, list):
            for i, item in enumerate(value):
                self.check((*place, i), item, report)
        if not isinstance(value, dict):
            return
        for key, item in value.items():
            self.check((*place, key), item, report)
        if not is_call(value) and place not in self.factories:
            return
        try:
            self._check_table(place, value, report, given)
        except _Refused as refused:
            report((*place, "call" if "call" in value else "use"), str(refused))
        except Exception as error:
            locate(
                error, f"{self.where(place)}: importing {value.get('call', value.get('use', place[-1]))!r} raised this"
            )
            self.failure = self.failure or error

    def _check_table(self, place: Place, table: dict[str, Any], report: Report, given: int) -> None:
        if "use" in table:
            if len(table) > 1:
                report(place, "a table with 'use' has no other key: it is the object itself; 'call' calls it")
            if inspect.isclass(_resolve(table["use"])) and (place == ("loss",) or place[:-1] == ("plugins",)):
                report((*place, "use"), f'{table["use"]} is a class: write call = "{table["use"]}" to make one of it')
            return
        name, function = self._function(place, table)
        if not callable(function):
            raise _Refused(f"{name} is {article(function)}, which cannot be called")
        _check_options(place, name, function, _options(table), report, given)

    def _function(self, place: Place, table: dict[str, Any]) -> tuple[str, Any]:
        if "call" in table:
            return table["call"], _resolve(table["call"])
        factory = self.factories[place]
        return getattr(factory, "__name__", str(place[-1])), factory

    def made(self, place: Place, value: Any, *positional: Any) -> Any:
        """Make a value: the table's object, with all tables in it made, or the value itself.

        An error of the callable passes through with a note that names the line.
        """
        if isinstance(value, list):
            return [self.made((*place, i), item) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if "use" in value:
            return _resolve(value["use"])
        options = {key: self.made((*place, key), item) for key, item in _options(value).items()}
        if "call" not in value and place not in self.factories:
            return options
        name, function = self._function(place, value)
        try:
            made = bound(function, options, *positional)()
        except Exception as error:
            table = f"[{dotted(place)}], " if place else ""
            where = self.where(place)
            given = "".join(f", with {text}" for text in self.given(place) if text != where)
            locate(error, f"{where}: {table}{name} raised this{given}")
            raise
        _remember(made, {"call": value.get("call") or public_name(function), **options})
        return made


def is_call(value: Any) -> bool:
    """Whether a table stands for an object."""
    return isinstance(value, dict) and ("call" in value or "use" in value)


def dotted(place: Place) -> str:
    """A place as TOML writes it.

    >>> dotted(("plugins", "metrics", "metrics", 0, "a b"))
    'plugins.metrics.metrics.0."a b"'
    """
    bare = re.compile(r"[A-Za-z0-9_-]+")
    return ".".join(str(part) if bare.fullmatch(str(part)) else json.dumps(part) for part in place)


def _options(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "call"}


def public_name(value: Any) -> str:
    """``"package.module:name"`` of a class or function, by the shortest module that has it; empty if none has.

    >>> public_name(torch.nn.Linear)
    'torch.nn:Linear'
    """
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    words = module.split(".")
    for count in range(1, len(words) + 1):
        found: Any = sys.modules.get(".".join(words[:count]))
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if found is value:
            return f"{'.'.join(words[:count])}:{name}"
    return ""


def _remember(made: Any, table: dict[str, Any]) -> None:
    key = id(made)
    try:
        reference = weakref.ref(made, lambda _: _made.pop(key, None))
    except TypeError:  # such as a number
        return
    new_names = renamed_options(type(made))
    _made[key] = reference, {new_names.get(word, word): value for word, value in table.items()}, _state(made)


def _state(made: Any) -> Any:
    """The state of a module: tensors, versions of parameters, which are trained; None for lazy ones and others."""
    if not isinstance(made, nn.Module) or any(map(is_lazy, made.parameters())):
        return None
    parameters = dict(made.named_parameters())
    tensors = {**parameters, **dict(made.named_buffers())}
    return (
        [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()],
        [
            None if p.is_inference() else p._version for p in parameters.values()
        ],  # moving a model keeps them, and makes new buffers
        [p.requires_grad for p in parameters.values()],
    )


def _resolve(name: Any) -> Any:
    """Import the object that ``"package.module:name"`` names; errors of the module itself pass through."""
    if not isinstance(name, str):
        raise _Refused(f'{name!r} is {article(name)}: write "package.module:name"')
    module_name, colon, attributes = name.partition(":")
    if not colon or not all(word.isidentifier() for word in (*module_name.split("."), *attributes.split("."))):
        module_name, dot, attribute = name.rpartition(".")
        guess = f" (did you mean '{module_name}:{attribute}'?)" if dot and not colon else ""
        raise _Refused(f'{name!r} is not the name of an importable object: write "package.module:name"{guess}')
    found = _import(module_name)
    path = module_name
    for attribute in attributes.split("."):
        known = dir(found)
        try:
            found = getattr(found, attribute)
        except AttributeError:
            what = "module" if path == module_name else "class"
            raise _Refused(f"{what} {path} has no {attribute!r}{nearest(attribute, known)}") from None
        path += f".{attribute}"
    return found


def _import(name: str) -> types.ModuleType:
    importlib.invalidate_caches()  # a folder that was listed in the same second hides a file that is new
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise _Refused(
            f"importing {name} ends Python ({error!r}): put what a script does under if __name__ == '__main__'"
        ) from error
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise  # the module is there, and imports one that is not
    parent, _, last = missing.rpartition(".")
    if parent:
        known = [module.name for module in pkgutil.iter_modules(getattr(sys.modules.get(parent), "__path__", []))]
    else:
        known = [*sys.stdlib_module_names, *(module.name for module in pkgutil.iter_modules())]
    guess = nearest(last, known)
    near = guess.replace(f"'{last}'", repr(last)) if not parent else guess.replace("mean '", f"mean '{parent}.")
    raise _Refused(
        f"there is no module {missing!r}{near}; modules are found in {os.getcwd()} and among what is installed"
    )


def _check_options(
    place: Place, name: str, function: Callable[..., Any], options: dict[str, Any], report: Report, given: int
) -> None:
    parameters = parameters_of(function)
    if parameters is None:
        return
    parameters = parameters[given:]
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    spread = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    known = [*by_name, *([spread] if spread else [])]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    old_names = renamed_options(function)
    given_as = {old_names.get(word, word): word for word in options}
    for key, written in given_as.items():
        value = options[written]
        if key == spread:
            if not isinstance(value, list):
                report((*place, written), f"{key!r} of {name} is {article(value)}: it takes an array, {key} = [...]")
        elif key not in by_name:
            if not open_ended:
                takes = ", ".join(known) or "no options"
                report(
                    (*place, written),
                    f"{name} has no option {key!r}{nearest(OTHER.get(key, key), known)}; it takes {takes}",
                )
        elif not _fits(value, annotation := by_name[key].annotation):
            report((*place, written), f"{key!r} of {name} is {value!r}: it takes {_shown(annotation)}")
    misspelt = "".join(nearest(key, known) for key in given_as if key not in known)
    missing: list[str] = []
    for p in parameters:
        if p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.kind is p.POSITIONAL_ONLY:
            report(place, f"{name} takes {p.name!r} only by position: write a function that takes it by name")
        elif p.name not in given_as and repr(p.name) not in misspelt:
            missing.append(repr(p.name))
    if missing and place == ("loss",) and not inspect.isclass(function):
        needs = f"the option{'s' * (len(missing) > 1)} {' and '.join(missing)}"
        report(place, f'{name} needs {needs}; if it is the loss function itself, write use = "{name}"')
    else:
        for word in missing:
            report(place, f"{name} needs the option {word}")


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters with their annotations; None if Python does not know them, as for some built-in functions."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    except Exception:  # a name that exists for the type checker alone, or not in this version of Python
        hints = {}
    return [p.replace(annotation=hints.get(p.name, Any)) for p in signature.parameters.values()]


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value can be of an annotation's type; True if the annotation is none of the simple ones."""
    if is_call(value):
        return True
    if typing.get_origin(annotation) is Literal:
        return value in typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(annotation))
    if annotation is Tensor:
        return not isinstance(value, str)  # such as a rate, which may be a float or a tensor
    types_ = SIMPLE.get(annotation) if isinstance(annotation, type) or annotation is None else None
    return types_ is None or (isinstance(value, types_) and (not isinstance(value, bool) or annotation is bool))


def _shown(annotation: Any) -> str:
    shown = inspect.formatannotation(annotation)
    for word, plain in {"typing.": "", "pathlib.Path": "a path", " | None": "", "torch.Tensor": "a tensor"}.items():
        shown = shown.replace(word, plain)
    return shown


def article(value: Any) -> str:
    """Describe a value, for messages."""
    if isinstance(value, types.ModuleType):
        return f"the module {value.__name__}"
    words = {dict: "a table", list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return words.get(type(value), f"of type {type(value).__name__}")
