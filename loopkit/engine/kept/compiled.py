"""compiled: modules that ``torch.compile`` has wrapped, taken out of their wrappers, so that names stay plain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

from torch import nn

WRAPPER = "_orig_mod"
"""Torch's name of the module in a wrapper, the first part of the names of its tensors."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_wrapper(module: Any) -> bool:
    """Whether a module is the result of ``torch.compile(module)``."""
    dynamo = sys.modules.get("torch._dynamo")  # it takes a second to import, and where it is not, none is one
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a wrapper of ``torch.compile``, else itself."""
    return getattr(module, WRAPPER) if is_wrapper(module) else module


def compiled_in_place(module: nn.Module) -> nn.Module:
    """Take a module and its parts out of their wrappers; their own calls are compiled then, as by ``Module.compile``.

    A wrapper with hooks of its own stays.
    """
    if "torch._dynamo" not in sys.modules:
        return module
    taken = _taken_out(module)
    for parent in list(taken.modules()):
        for name, child in parent._modules.items():
            if child is not None and is_wrapper(child):
                parent._modules[name] = _taken_out(child)
    return taken


def _taken_out(module: nn.Module) -> nn.Module:
    if not is_wrapper(module) or any(getattr(module, name) for name in HOOKS):
        return module
    inner = unwrapped(module)
    if inner._compiled_call_impl is None:
        inner._compiled_call_impl = module.dynamo_ctx(_caller(inner))  # type: ignore[operator]
    return inner


def _caller(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module; torch does not compile the ``_call_impl`` of its own modules."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    own_code = run.__code__.replace()  # what is compiled is kept by code object, up to a limit
    return FunctionType(own_code, run.__globals__, run.__name__, None, run.__closure__)


def plain_names(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tensors by model and name, without the wrappers in their names, as checkpoints before this had them."""
    return {
        model: {name if WRAPPER not in name else _plain(name.split(".")): value for name, value in tensors.items()}
        for model, tensors in saved.items()
    }


def _plain(parts: Iterable[str]) -> str:
    return ".".join(part for part in parts if part != WRAPPER)
