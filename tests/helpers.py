"""What several test modules share: small data, a small learner, and plugins that log or act on any hook."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from loopkit_testing import Case, check_plugin, diff
from loopkit_testing.declaration import declaration
from torch import nn

from loopkit import Event, Learner, hookimpl
from loopkit.criteria import Criterion, Mode
from loopkit.hooks import hooks


class Late:
    """A large module, imported at its first use: a run has several processes, most of which need it for no test."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks of its own on all that is in a module
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


EVENTS = tuple(name for name, event in Event.by_hook.items() if event.__module__ == "loopkit.events")


def keeps_contract(factory: Callable[[], Any], name: str | None = None, **options: Any) -> None:
    """Check all promises of a plugin in one test, and what its entry point ``name`` declares.

    `plugin_contract` is for authors: its tests for each plugin here would take as long again. What it does
    beyond this is tested in test_testing.py.
    """
    check_plugin(factory, **options)
    if name is not None:
        assert declaration(Case(factory, name=name)) == []


def on(hook: str, function: Callable[..., Any], name: str = "acting", **options: Any) -> Any:
    """A plugin with one hook, which calls ``function`` with the arguments of the hook that it takes, by name."""
    taken = inspect.signature(function).parameters
    everything = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    arguments = [name for name in hooks()[hook].arguments if everything or name in taken]
    namespace: dict[str, Any] = {"function": function}
    given = ", ".join(f"{argument}={argument}" for argument in arguments)
    exec(f"def {hook}({', '.join(('self', *arguments))}): return function({given})", namespace)
    methods = {hook: hookimpl(**options)(namespace[hook])}
    return type("On", (), {**methods, "name": name})()


def raising(hook: str, error: BaseException, at: int | None = None, phase: str = "train", name: str = "acting") -> Any:
    """A plugin that raises ``error`` the first time that ``hook`` comes (in the step ``at`` of a phase)."""
    raised: list[bool] = []

    def act(**given: Any) -> None:
        if "phase" in given and given["phase"].name != phase:
            return
        if at is not None and given["step"].index != at:
            return
        if not raised:
            raised.append(True)
            raise error

    return on(hook, act, name)


class EventLog:
    """Logs every event as a word; words of one phase and step are gathered in a line.

    Contexts, if wanted, are logged as brackets: ``<`` and ``>`` for the epoch's, ``[`` and ``]`` for the step's.
    """

    volatile = ("*",)

    def __init__(self, *more: str, name: str = "event_log", contexts: bool = False) -> None:
        self.name = name
        self.words: list[tuple[str, str]] = []
        for hook in (*EVENTS, *more):
            setattr(self, hook, self._listener(hook))
        if contexts:
            self.epoch_context = hookimpl(lambda phase: self._bracket(phase.name, "<", ">"))
            self.step_context = hookimpl(lambda phase, step: self._bracket(f"{phase.name} {step.index}", "[", "]"))

    def _listener(self, hook: str) -> Callable[..., None]:
        arguments = hooks()[hook].arguments
        if "step" in arguments:
            return hookimpl(lambda phase, step: self.words.append((f"{phase.name} {step.index}", hook)))
        if "phase" in arguments:
            return hookimpl(lambda phase: self.words.append((phase.name, hook)))
        return hookimpl(lambda: self.words.append(("", hook)))

    @contextmanager
    def _bracket(self, place: str, opening: str, closing: str) -> Iterator[None]:
        self.words.append((place, opening))
        try:
            yield
        finally:
            self.words.append((place, closing))

    @property
    def lines(self) -> list[str]:
        """``"train 0: step_begin forward_begin loss_begin"``, ...; events of the fit stand alone."""
        lines: list[str] = []
        last = "", ""
        for place, word in self.words:
            starts_pass = word == "<" or (word == "epoch_begin" and last[1] != "<")
            if place and place == last[0] and not starts_pass:
                lines[-1] += f" {word}"
            else:
                lines.append(f"{place}: {word}" if place else word)
            last = place, word
        return lines

    def count(self, hook: str) -> int:
        """How often an event came."""
        return [word for _, word in self.words].count(hook)


def batches(count: int, size: int = 4, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of inputs ``(size, 3)`` and targets ``(size, 1)``."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(count)
    ]


def make_learner(*plugins: Any, model: nn.Module | None = None, lr: float = 0.1, **options: Any) -> Learner:
    """A linear regression with SGD, without the standard plugins."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1) if model is None else model
    options.setdefault("standard", False)
    return Learner(model, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=lr), plugins=plugins, **options)


def install(
    directory: Path, name: str, entry_points: str | bytes | None = None, version: str = "1.0", **modules: str
) -> Path:
    """Write the metadata of a distribution and its modules, given as their sources, as pip does; returns the former."""
    folder = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nName: no header\n")
    if entry_points is not None:
        text = entry_points if isinstance(entry_points, bytes) else entry_points.encode()
        (folder / "entry_points.txt").write_bytes(text)
    for module, source in modules.items():
        (directory / f"{module}.py").write_text(source)
    return folder


def differences(one: Any, other: Any, leave_out: Collection[str] = ("seconds",)) -> list[str]:
    """Where two states differ; by default not in measured durations."""
    return list(map(str, diff.differences(one, other, ignore=leave_out)))


def halved(*axes):
    """The product of the axes, every other case of it slow; each value of an axis is in a case that is not."""
    cases = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(*(value for _, value in case), marks=pytest.mark.slow if sum(i for i, _ in case) % 2 else ())
        for case in cases
    ]


class Gap(Criterion):
    """A criterion that needs the training series: the value is that much above the last of it."""

    fields = ("last",)
    needs_training = True

    def __init__(self, by: float) -> None:
        self.by = by
        self.last: float | None = None

    def observe_training(self, value: float) -> None:
        self.last = value

    def update(self, value: float, mode: Mode = "min") -> str:
        return f"{value:g} is above {self.last:g}" if self.last is not None and value - self.last > self.by else ""
