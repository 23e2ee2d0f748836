"""The state that a fit must put back: it is compared, named, and put back."""

from __future__ import annotations

import atexit
import builtins
import gc
import locale
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.author import Target, plugin_name
from loopkit.hooks import hookimpl
from loopkit.learner import Learner

BLOCKS = 1.0
"""How many seconds a ``fit_end`` may take for a problem as small as the one here."""


class Calls:
    """Counts the fits that one plugin has begun and ended."""

    name = "~calls"
    volatile = ("*",)

    def __init__(self, plugin: Any) -> None:
        self.plugin, self._watched = plugin, plugin_name(plugin)
        self.begun = self.ended = 0
        self.seconds = 0.0
        """How long the last ``fit_end`` took."""

    @hookimpl
    def instrument_call(self, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        """Count the call, if it is the plugin's."""
        if target.plugin != self._watched:
            return call

        def counted(*values: Any) -> Any:
            self.ended += target.hook == "fit_end"
            begun = time.monotonic()
            result = call(*values)
            self.begun += target.hook == "fit_begin"
            if target.hook == "fit_end":
                self.seconds = time.monotonic() - begun
            return result

        return counted

    def unbalanced(self) -> list[str]:
        """A message if the last fit had not one ``fit_end``, or none where no ``fit_begin`` was completed."""
        due = 1 if self.begun or not hasattr(self.plugin, "fit_begin") else 0
        ended, self.begun, self.ended = self.ended, 0, 0
        if ended != due and hasattr(self.plugin, "fit_end"):
            return [f"its fit_end was called {ended} times, not {due}"]
        return []

    def blocking(self) -> list[str]:
        """A message if the last ``fit_end`` kept everybody waiting."""
        if self.seconds <= BLOCKS:
            return []
        return [
            f"its fit_end took {self.seconds:.1f} seconds, which Ctrl-C and a time limit wait for: give threads and "
            f"connections at most a second to end"
        ]


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


def _handlers() -> dict[str, list[logging.Handler]]:
    """The handlers of each logger that has some, by its name; the root logger is ``root``. torch makes some late."""
    known = {"root": logging.getLogger(), **logging.root.manager.loggerDict}
    found = ((name, logger) for name, logger in known.items() if isinstance(logger, logging.Logger))
    return {name: list(logger.handlers) for name, logger in found if logger.handlers and not name.startswith("torch.")}


def _set_handlers(handlers: dict[str, list[logging.Handler]]) -> None:
    for name in {**_handlers(), **handlers}:
        logging.getLogger(None if name == "root" else name).handlers[:] = handlers.get(name, [])


def _set_collector(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


def _set_variables(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # says that they change: what was decided by the others is forgotten
    warnings.filters[:] = filters  # type: ignore[index]


def _set_path(path: list[str]) -> None:
    sys.path[:] = path


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
    "the handlers of loggers": (_handlers, _set_handlers),
    "the number of atexit functions": (atexit._ncallbacks, lambda count: None),
    "the root logger's level": (lambda: logging.getLogger().level, lambda level: logging.getLogger().setLevel(level)),
    "the garbage collector": (gc.isenabled, _set_collector),
    "the working directory": (os.getcwd, os.chdir),
    "os.environ": (lambda: dict(os.environ), _set_variables),
    "sys.path": (lambda: list(sys.path), _set_path),
    "warnings.filters": (lambda: list(warnings.filters), _set_filters),
    "warnings.showwarning": _attribute(warnings, "showwarning"),
    "the locale": (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
}
"""Settings of the process: how to read each and how to put it back."""

OWNERS: dict[str, tuple[Any, list[str]]] = {
    prefix: (
        owner,
        [
            name
            for name in dir(owner)
            if callable(value := getattr(owner, name)) and not isinstance(value, type) and not name.startswith("__")
        ],
    )
    for owner, prefix in (
        (builtins, ""),
        (torch, "torch."),
        (nn.functional, "torch.nn.functional."),
        (Tensor, "Tensor."),
        (nn.Module, "Module."),
        (torch.optim.Optimizer, "Optimizer."),
    )
}
FUNCTIONS = {
    f"the function {prefix}{name}": (owner, name) for prefix, (owner, names) in OWNERS.items() for name in names
}
"""Functions that a plugin might replace."""

SIGNALS = {f"the handler of {getattr(number, 'name', number)}": number for number in signal.valid_signals()}


def settings() -> dict[str, Any]:
    """The settings of the process now, by name."""
    found = {name: read() for name, (read, _) in SETTINGS.items()}
    values = chain.from_iterable(map(vars(owner).get, names) for owner, names in OWNERS.values())
    found.update(zip(FUNCTIONS, values, strict=True))
    found.update(zip(SIGNALS, map(signal.getsignal, SIGNALS.values()), strict=True))
    return found


def put_back(before: dict[str, Any]) -> dict[str, Any]:
    """Put back the settings that are not as they were; returns what they were until now, by name."""
    after = settings()
    if after == before:  # thousands of functions, which this compares fast
        return {}
    changed = {name: value for name, value in after.items() if _changed(before[name], value)}
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
            signal.signal(SIGNALS[name], before[name])
    return changed


def _changed(before: Any, after: Any) -> bool:
    return after is not before and after != before


# Settings, and what belongs to a learner


@dataclass(frozen=True)
class Environment:
    """The surroundings that a fit must leave unchanged."""

    process: dict[str, Any]
    learner: dict[tuple[str, str], Any]
    """Values by kind, and by the name of the module, parameter or optimizer that has them, if any."""


def environment(learner: Learner) -> Environment:
    """The settings of the process, and what belongs to the learner, now."""
    return Environment(settings(), _of(learner))


def _of(learner: Learner) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {("inference mode", ""): torch.is_inference_mode_enabled()}
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
    """Count the hooks of a module or an optimizer, of every kind."""
    return sum(len(hooks) for kind, hooks in vars(owner).items() if kind.endswith("_hooks"))


def left_behind(before: Environment, learner: Learner, running: Running | None = None) -> list[str]:
    """One message for each kind of change; changes of the process are undone."""
    after = _of(learner)
    broken = [_told(name, before.process[name], now) for name, now in put_back(before.process).items()]
    found: dict[str, list[str]] = {}
    for (what, of), value in before.learner.items():
        now = after.get((what, of))
        if _changed(value, now):
            found.setdefault(what, []).append(_told(f"{what} {of!r}" if of else what, value, now))
    broken += [first + (f" (and so of {len(more)} more)" if more else "") for first, *more in found.values()]
    return broken if running is None else broken + running.more()


def _told(what: str, before: Any, now: Any) -> str:
    """The difference; of long collections only the changed entries, and of a dict only their names."""
    if isinstance(before, (dict, list)):
        differing = {
            "added": [each for each in now if each not in before],
            "removed": [each for each in before if each not in now],
            "changed": [key for key in before if key in now and now[key] != before[key]]
            if isinstance(before, dict)
            else [],
        }
        if told := [f"{', '.join(map(repr, each))} {how}" for how, each in differing.items() if each]:
            return f"{what} is not as it was before the fit: {'; '.join(told)}"
    return f"{what} is {now!r}; it was {before!r} before the fit"


# What runs beside the fit

SECONDS = 5.0
"""How long it may take to end."""


class _Patience:
    """How long it may still be waited in a check of one plugin; it is not limited outside of one."""

    left = float("inf")
    slowest = 0.0
    """How long it took, at most, until all had ended."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Wait for so long in all for slow ends; the rest is not reported."""
    kept = _Patience.left, _Patience.slowest
    _Patience.left, _Patience.slowest = seconds, 0.0
    try:
        yield
    finally:
        _Patience.left, _Patience.slowest = kept


@contextmanager
def impatient() -> Iterator[None]:
    """Do not wait for ends: it is known already that something does not end."""
    global SECONDS
    kept, SECONDS = SECONDS, 0.0
    try:
        yield
    finally:
        SECONDS = kept


class Running:
    """The threads and the child processes that there are now."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.children = set(_children())

    def more(self) -> list[str]:
        """A message for each that is there now and was not before, and does not end soon; processes are killed."""
        begun, allowed = time.monotonic(), min(SECONDS, _Patience.left)
        until = begun + allowed
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(max(until - time.monotonic(), 0))
        while _children().keys() - self.children and time.monotonic() < until:
            time.sleep(0.01)
        enough = min(SECONDS, max(1.0, 2 * _Patience.slowest))
        waited = time.monotonic() - begun
        _Patience.left = max(_Patience.left - waited, 0.0)
        threads = {thread.name for thread in set(threading.enumerate()) - self.threads}
        children = {pid: name for pid, name in _children().items() if pid not in self.children}
        if not threads and not children:
            _Patience.slowest = max(_Patience.slowest, waited)
        elif allowed < enough:
            return []
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [
            f"{what} is left running: {name!r}; end it in fit_end"
            for what, names in (("a thread", threads), ("a process", set(children.values())))
            for name in sorted(names)
        ]


def _children() -> dict[int, str]:
    """Return the names of the running child processes, by number.

    Where the system does not tell, these are only the processes of ``multiprocessing``.
    """
    found, numbers = {}, []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            numbers += task.read_text().split()
    for number in numbers:
        with suppress(OSError):  # the process has ended
            process = Path("/proc", number)
            if process.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z":
                command = process.joinpath("cmdline").read_text(errors="replace")
                found[int(number)] = command.replace("\0", " ").strip()[:100]
    return found | {child.pid: child.name for child in multiprocessing.active_children() if child.pid is not None}


def open_files() -> dict[int, str]:
    """Return the open paths, pipes and sockets of this process, by descriptor; empty where the system lacks a list."""
    found = {}
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the one that reads the folder is gone by now
                found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found
