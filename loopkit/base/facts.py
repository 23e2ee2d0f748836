"""Facts: in plain words, how a thing was made, so that two of them can be compared."""

from __future__ import annotations

import enum
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.base.options import options_of
from loopkit.base.raw import raw_bytes

DEEPEST = 4
"""How far into options of options it looks."""
PLAIN = (bool, int, float, str, bytes, type(None), range, enum.Enum, Path, torch.dtype, torch.device)


def fact(value: Any, depth: int = 0) -> str:
    """Describe a value in a string that is the same for equal values, in every process and every run.

    Functions are described by name and compiled code, which differs between versions of Python, modules and other
    objects by class and options, tensors by a hash of their values.

    Example::

        >>> fact({"betas": (0.9, 0.999), "loss": nn.MSELoss()})
        "{'betas': (0.9, 0.999), 'loss': MSELoss(reduction='mean')}"
    """
    if depth > DEEPEST:
        return "..."
    if isinstance(value, (torch.dtype, torch.device, Path, enum.Enum)):
        return str(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return _container(value, depth + 1)
    if isinstance(value, Tensor):
        return _tensor(value, depth)
    if isinstance(value, partial):
        arguments = {str(number): part for number, part in enumerate(value.args)}
        arguments.update(value.keywords)
        facts = [fact(value.func, depth + 1), *_named(arguments, depth)]
        return f"partial({', '.join(facts)})"
    if inspect.ismethod(value):
        return f"{fact(value.__self__, depth + 1)}.{value.__name__}"
    if inspect.isroutine(value) or isinstance(value, type):
        return _function(value, depth)
    return f"{type(value).__qualname__}({', '.join(_named(_options(value), depth))})"


def parts(value: Any, without: Iterable[str] = ()) -> dict[str, str]:
    """An object's class, under ``""``, and what it was made with, without some of it; of a function its one fact.

    Example::

        >>> parts(nn.MSELoss())
        {'': 'MSELoss', 'reduction': "'mean'"}
    """
    if inspect.isroutine(value) or isinstance(value, (type, partial)):
        return {"": fact(value)}
    options = {name: fact(part, 1) for name, part in _options(value).items() if name not in without}
    return {"": type(value).__qualname__, **options}


def _container(value: Any, depth: int) -> str:
    if isinstance(value, Mapping):
        items = [f"{key!r}: {fact(part, depth)}" for key, part in value.items()]
        return f"{{{', '.join(items)}}}"
    parts = [fact(part, depth) for part in value]
    if isinstance(value, (set, frozenset)):
        parts.sort()
    return f"({', '.join(parts)})"


def _tensor(value: Tensor, depth: int) -> str:
    if value.layout is not torch.strided:
        entries = value.detach().to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        held = fact((entries.indices(), entries.values()), depth)
        return f"sparse {tuple(value.shape)} {held}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(value.shape)} {hashed(raw_bytes(value))}"


def _options(value: Any) -> dict[str, Any]:
    """The options of an object; for a module also its plain attributes, buffers and children."""
    options = options_of(value)
    if isinstance(value, nn.Module):
        options |= {name: part for name, part in vars(value).items() if isinstance(part, PLAIN) and name[0] != "_"}
        options |= {**dict(value.named_buffers(recurse=False)), **dict(value.named_children())}
        options.pop("training", None)
    return options


def _named(options: Mapping[str, Any], depth: int) -> Iterable[str]:
    return (f"{name}={fact(part, depth + 1)}" for name, part in options.items())


def _function(value: Any, depth: int) -> str:
    name = str(getattr(value, "__qualname__", value.__name__))
    code = getattr(value, "__code__", None)
    if code is None:
        return name
    held = [*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ())]
    held += (value.__kwdefaults__ or {}).values()
    kept = [fact(part, depth + 1) for part in held]
    return f"{name} {hashed((_said(code, value.__doc__), kept))}"


def _said(code: CodeType, doc: str | None) -> tuple[Any, ...]:
    """The code of a function without its place and docstring."""
    constants = [part for part in code.co_consts if part is not None and part != doc]
    parts = [_said(part, None) if isinstance(part, CodeType) else fact(part) for part in constants]
    return code.co_code, code.co_names, parts


def hashed(value: Any) -> str:
    """A short digest of a value's text: equal for equal ones."""
    return hashlib.sha256(str(value).encode()).hexdigest()[:12]
