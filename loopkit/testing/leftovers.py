"""What a fit must put back: compared, named, and put back for it."""

from __future__ import annotations

import builtins
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.dispatch import plugin_name
from loopkit.learner import Learner

__all__ = ["Calls", "environment", "left_behind", "open_files", "put_back", "settings", "threads_left"]


class Calls:
    """An instrument that counts the fits that one plugin has begun and ended."""

    def __init__(self, plugin: Any) -> None:
        self.plugin, self.name = plugin, plugin_name(plugin)
        self.begun = self.ended = 0

    def __call__(self, hook: str, plugin: str, call: partial[Any]) -> Any:
        """Make the call, and count."""
        mine = plugin == self.name
        self.ended += mine and hook == "fit_end"
        result = call()
        self.begun += mine and hook == "fit_begin"
        return result

    def unbalanced(self) -> list[str]:
        """A message if the last fit had not one ``fit_end``, or none where no ``fit_begin`` was completed."""
        due = 1 if self.begun or not hasattr(self.plugin, "fit_begin") else 0
        ended, self.begun, self.ended = self.ended, 0, 0
        if ended != due and hasattr(self.plugin, "fit_end"):
            return [f"its fit_end was called {ended} times, not {due}"]
        return []


# Settings of the process


def _nesting() -> int:
    """How many autocast contexts are entered in this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(depth: int) -> None:
    while _nesting() < depth:
        torch.autocast_increment_nesting()
    while _nesting() > depth:
        torch.autocast_decrement_nesting()
    if depth == 0:
        torch.clear_autocast_cache()  # what leaving the outermost context does


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_deterministic(enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_anomaly(enabled: bool) -> None:
    torch.autograd.set_detect_anomaly(enabled)


GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


def _global_hooks() -> dict[str, dict[int, Any]]:
    return {name: dict(getattr(nn.modules.module, name)) for name in GLOBAL_HOOKS}


def _set_global_hooks(hooks: dict[str, dict[int, Any]]) -> None:
    for name, kept in hooks.items():
        held = getattr(nn.modules.module, name)
        held.clear()
        held.update(kept)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _set_handlers(handlers: list[logging.Handler]) -> None:
    logging.getLogger().handlers[:] = handlers


def _set_collector(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast on the CPU": (
        partial(torch.is_autocast_enabled, "cpu"),
        partial(torch.set_autocast_enabled, "cpu"),
    ),
    "autocast's dtype on the CPU": (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    "autocast's cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "the depth of autocast contexts": (_nesting, _set_nesting),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, _set_default_device),
    "the number of threads of torch": (torch.get_num_threads, torch.set_num_threads),
    "torch.use_deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, _set_deterministic),
    "anomaly detection": (torch.is_anomaly_enabled, _set_anomaly),
    "torch.backends.cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the global hooks of modules": (_global_hooks, _set_global_hooks),
    "sys.stdout": _attribute(sys, "stdout"),
    "sys.stderr": _attribute(sys, "stderr"),
    "sys.excepthook": _attribute(sys, "excepthook"),
    "threading.excepthook": _attribute(threading, "excepthook"),
    "the root logger's handlers": (lambda: list(logging.getLogger().handlers), _set_handlers),
    "the root logger's level": (lambda: logging.getLogger().level, lambda level: logging.getLogger().setLevel(level)),
    "the garbage collector": (gc.isenabled, _set_collector),
    "the working directory": (os.getcwd, os.chdir),
}
"""What belongs to the process: how it is read, and how it is put back."""

FUNCTIONS: dict[str, tuple[Any, str]] = {
    f"the function {prefix}{name}": (owner, name)
    for owner, prefix in (
        (builtins, ""),
        (torch, "torch."),
        (nn.functional, "torch.nn.functional."),
        (Tensor, "Tensor."),
        (nn.Module, "Module."),
        (torch.optim.Optimizer, "Optimizer."),
    )
    for name in dir(owner)
    if callable(value := getattr(owner, name)) and not isinstance(value, type) and not name.startswith("__")
}
"""What a plugin might put a function of its own in place of."""


def settings() -> dict[str, Any]:
    """The settings of the process now, by name."""
    handlers = {f"the handler of {number!s}": signal.getsignal(number) for number in signal.valid_signals()}
    functions = {name: vars(owner).get(attribute) for name, (owner, attribute) in FUNCTIONS.items()}
    return {**{name: read() for name, (read, _) in SETTINGS.items()}, **functions, **handlers}


def put_back(before: dict[str, Any]) -> list[str]:
    """Put back what is not as it was; returns its names."""
    after = settings()
    changed = [name for name in after if _changed(before.get(name), after[name])]
    for name in changed:
        if name in SETTINGS:
            SETTINGS[name][1](before[name])
        elif name in FUNCTIONS:
            owner, attribute = FUNCTIONS[name]
            if before[name] is None:  # it was inherited
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before[name])
        elif before[name] is not None:  # a handler that was not set by Python cannot be
            number = next(n for n in signal.valid_signals() if name == f"the handler of {n!s}")
            signal.signal(number, before[name])
    return changed


def _changed(before: Any, after: Any) -> bool:
    return after is not before and after != before


# Settings, and what belongs to a learner


Environment = dict[tuple[str, str], Any]
"""Values by what they are, and by the name of the module, parameter or optimizer that has them, if it is one's."""


def environment(learner: Learner) -> Environment:
    """What a fit must leave as it found it."""
    found: Environment = {(name, ""): value for name, value in settings().items()}
    found["inference mode", ""] = torch.is_inference_mode_enabled()
    for top, model in learner.models.items():
        for name, module in model.named_modules(prefix=top):
            found["the mode (training) of module", name] = module.training
            found["the number of hooks on module", name] = _count_hooks(module)
            found["the forward set on module", name] = vars(module).get("forward")
        for name, p in model.named_parameters(prefix=top):
            found["requires_grad of parameter", name] = p.requires_grad
            hooks = (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
            found["the number of hooks on parameter", name] = sum(len(each or ()) for each in hooks)
    for name, optimizer in learner.optimizers.items():
        found["the number of hooks on optimizer", name] = _count_hooks(optimizer)
    return found


def _count_hooks(owner: Any) -> int:
    """Of a module or an optimizer, of every kind."""
    return sum(len(hooks) for kind, hooks in vars(owner).items() if kind.endswith("_hooks"))


def left_behind(before: Environment, learner: Learner, threads: set[threading.Thread] | None) -> list[str]:
    """One message for each kind of thing that is not as before; what belongs to the process is put back."""
    after = environment(learner)
    put_back({what: value for (what, of), value in before.items() if not of})
    found: dict[str, list[str]] = {}
    for (what, of), value in before.items():
        now = after.get((what, of))
        if _changed(value, now):
            whose = f" {of!r}" if of else ""
            found.setdefault(what, []).append(f"{what}{whose} is {now!r}; it was {value!r} before the fit")
    broken = [first + (f" (and so of {len(more)} more)" if more else "") for first, *more in found.values()]
    return broken if threads is None else broken + threads_left(threads)


THREAD_SECONDS = 5.0


def threads_left(before: set[threading.Thread]) -> list[str]:
    """A message for each thread that is there now and was not before, and does not end soon."""
    until = time.monotonic() + THREAD_SECONDS
    for thread in set(threading.enumerate()) - before:
        thread.join(max(until - time.monotonic(), 0))
    left = {thread.name for thread in set(threading.enumerate()) - before}
    return [f"a thread is left running: {name!r}; end it in fit_end" for name in sorted(left)]


def open_files() -> dict[int, str]:
    """What this process holds open, by descriptor: paths, pipes, sockets; nothing where the system does not tell."""
    found = {}
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the one that reads the folder is gone by now
                found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found
