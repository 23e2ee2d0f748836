"""The argument ``SCRIPT.py:FUNCTION`` of commands: a function that makes a learner, and may give its fit."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from loopkit.base.words import nearest
from loopkit.errors import LoopkitError
from loopkit.learner import Learner


class ScriptError(LoopkitError):
    """The script or its function is not what it must be."""


def split(target: str) -> tuple[str, str]:
    """The file and the name in ``"path/to/script.py:function"``.

    Raises:
        ScriptError: It is written in another way, or there is no such file.
    """
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise ScriptError(f"{target!r} names no function: write path/to/script.py:make_learner")
    if not os.path.isfile(file):
        folder = os.path.dirname(file) or "."
        scripts = [each for each in os.listdir(folder) if each.endswith(".py")] if os.path.isdir(folder) else []
        raise ScriptError(f"{file} is no file{nearest(os.path.basename(file), scripts)}")
    return file, name


def load_function(target: str) -> Callable[[], Any]:
    """The function that ``"path/to/script.py:function"`` names; runs the script.

    It runs as by ``python script.py``: the script's folder comes first in ``sys.path``, ``sys.argv`` holds only
    the script. But its ``__name__`` is a module's, so that code under ``if __name__ == "__main__"`` does not run.

    Raises:
        ScriptError: There is no such file or function.
    """
    file, name = split(target)
    folder = os.path.dirname(os.path.realpath(file))
    stem = Path(file).stem
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    sys.argv = [file]
    module_name = f"loopkit_script_{stem}" if stem in sys.modules else stem
    loader = importlib.machinery.SourceFileLoader(module_name, os.path.abspath(file))
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # workers of loaders import it by its name
    exec(loader.source_to_code(loader.get_data(loader.path), loader.path), vars(module))  # writes no __pycache__
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = "no function" if function is None else f"no function, but {type(function).__name__},"
        raise ScriptError(f"{file} has {what} {name!r}{nearest(name, functions)}: define it, without arguments")
    return function  # type: ignore[no-any-return]


def made(target: str) -> tuple[Learner, dict[str, Any] | None]:
    """Call the function that ``target`` names: a learner, and the arguments of its fit if it returns them, too.

    Raises:
        ScriptError: There is no such file or function, or it returns something else.
    """
    value = load_function(target)()
    if isinstance(value, Learner):
        return value, None
    if isinstance(value, partial) and isinstance(learner := getattr(value.func, "__self__", None), Learner):
        return learner, inspect.signature(learner.fit).bind(*value.args, **value.keywords).arguments
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Learner) and isinstance(value[1], Mapping):
        return value[0], dict(value[1])
    items = f" of {', '.join(type(item).__name__ for item in value)}" if isinstance(value, tuple) else ""
    raise ScriptError(
        f"{target} returned {type(value).__name__}{items}: it must return partial(learner.fit, train, val, epochs=3), "
        f"or a Learner and the arguments of its fit, (learner, {{'train': train, 'val': val, 'epochs': 3}})"
    )
