"""class_values: the values that the class of an object holds, and that its methods may change."""

from __future__ import annotations

import types
from typing import Any

from loopkit.engine.kept.witness.libraries import is_library
from loopkit.engine.kept.witness.walk import has_attributes

CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, classmethod, staticmethod, property)


def class_values(value: Any) -> dict[str, Any]:
    """Return the attributes of an object's class, and of its bases, by name: values only, and no library's.

    An attribute that the object has itself is left out.
    """
    own = vars(value) if has_attributes(value) else {}
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        if is_library(base.__module__):
            continue
        for name, each in vars(base).items():
            if not (name.startswith("__") or name in own or isinstance(each, CODE)):
                found.setdefault(name, each)
    return found
