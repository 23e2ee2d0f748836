"""torch_hooks: the hooks that hang on modules, parameters and optimizers, which torch keeps and no state dict holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.optim import Optimizer
from torch.optim import optimizer as of_optimizers

from loopkit.engine.kept.witness.module_looks import modules_in, paths_of

OF_MODULES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
OF_OPTIMIZERS = {"_optimizer_step_pre_hooks": "step pre-hook", "_optimizer_step_post_hooks": "step post-hook"}
OF_TENSORS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "gradient hook"}
OF_ALL = {
    "_global_forward_hooks": "forward hook",
    "_global_forward_pre_hooks": "forward pre-hook",
    "_global_backward_hooks": "backward hook",
    "_global_backward_pre_hooks": "backward pre-hook",
}
OF_ALL_OPTIMIZERS = {"_global_optimizer_pre_hooks": "step pre-hook", "_global_optimizer_post_hooks": "step post-hook"}


class Hook(NamedTuple):
    """A hook that hangs on something."""

    name: str
    """Such as ``forward hook 1 of 'encoder.0'``."""
    function: Any


def hooks_of_module(module: nn.Module) -> Iterator[Hook]:
    """Yield the hooks of a module, its parts and their parameters."""
    found: list[tuple[nn.Module, str, Any, dict[str, str]]] = []
    for part in modules_in(module):
        held = vars(part)
        if held["_forward_hooks"] or held["_forward_pre_hooks"] or held["_backward_hooks"] or _has_pre_hooks(held):
            found.append((part, "", held, OF_MODULES))
        for name, parameter in held["_parameters"].items():
            if type(parameter) in (Tensor, nn.Parameter) and _has_hooks(parameter):
                found.append((part, name, _hooks_of(parameter), OF_TENSORS))
    paths = paths_of(module) if found else {}
    for part, name, held, kinds in found:
        yield from _hooks(f"{paths[part]}{name}".removesuffix("."), held, kinds)


def hooks_of_optimizer(optimizer: Optimizer) -> Iterator[Hook]:
    """Yield the hooks of an optimizer's steps."""
    yield from _hooks("", vars(optimizer), OF_OPTIMIZERS)


def hooks_of_all() -> Iterator[Hook]:
    """Yield the hooks that hang on all modules, and on all optimizers."""
    for name, function in _hooks("", vars(of_modules), OF_ALL):
        yield Hook(f"{name} of all modules", function)
    for name, function in _hooks("", vars(of_optimizers), OF_ALL_OPTIMIZERS):
        yield Hook(f"{name} of all optimizers", function)


def _hooks(path: str, held: Mapping[str, Any], kinds: Mapping[str, str]) -> Iterator[Hook]:
    owner = f" of {path!r}" if path else ""
    for attribute, kind in kinds.items():
        functions = held.get(attribute) or {}
        for number, function in enumerate(functions.values(), start=1):
            yield Hook(f"{kind} {number}{owner}", function)


def _has_pre_hooks(held: Mapping[str, Any]) -> bool:
    return bool(held.get("_backward_pre_hooks"))  # a module of an old pickle has none


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _hooks_of(tensor: Tensor) -> dict[str, Any]:
    return {name: getattr(tensor, name) for name in OF_TENSORS}
