"""Time and memory of each module of the model, at chosen steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from loopkit import hookimpl
from loopkit.author import Shown, aligned, checks, count_of_bytes, devices
from loopkit.errors import PluginError
from loopkit.logs import Table

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["ModuleProfile"]

COLUMNS = (
    "module",
    "type",
    "calls",
    "parameters",
    "forward seconds",
    "forward own seconds",
    "backward seconds",
    "backward own seconds",
    "activation bytes",
    "memory bytes",
)
FORWARD, BACKWARD = "forward", "backward"
Node = torch.autograd.graph.Node


class ModuleProfile(Shown):
    """Measure each module's time, activations and memory, at chosen steps.

    Hooks are on the modules and the graph only during those steps. They change no bit, and other steps have no cost.

    - *forward* and *backward seconds* hold what the modules inside take; *own seconds* do not. Backward is measured
      node by node of the graph: each belongs to the module that made it, so in-place operations, views and residual
      connections are no matter. Adding gradients up in ``p.grad`` is not in it. With CUDA the times are the device's.
    - *activation bytes* are the bytes of the returned tensors; *memory bytes* the bytes that the module and its
      submodules keep for backward beside parameters and buffers, each storage once.
    - A module that is reached by several names stands under the first; calls are counted, and what the calls take is
      added up. Under ``torch.utils.checkpoint`` the forward that backward repeats counts as forward, too.
    - There is no looking into a compiled or scripted module: it has one row, marked by its type, with the time of its
      calls and the nodes of its graph.

    Args:
        at: Steps to measure, from 0: training steps of the fit; of another phase, its steps of the fit.
        every: Measure every so many steps instead, beginning with the first. By default, step 10 is measured.
        phase: The name of the phase; by default any that trains.
        show: Print the table when a fit ends.
        name: The plugin's name.

    Each table is logged as ``"run/module_profile"``. At the end of a step that is measured the host waits for the
    device, if that is CUDA.

    Raises:
        PluginError: Steps that are no numbers from 0, or both ``at`` and ``every``.

    Example::

        profile = ModuleProfile(at=(10, 20), show=False)
        Learner(..., plugins=[profile]).fit(train, epochs=1)
        print(profile)
    """

    provides = "observer"
    syncs = ("step_end",)
    volatile = ("_*", "measured", "run/module_profile")

    def __init__(
        self,
        at: Iterable[int] = (),
        every: int | None = None,
        *,
        phase: str | None = None,
        show: bool = True,
        name: str = "module_profile",
    ) -> None:
        steps = tuple(at) if isinstance(at, Iterable) else (at,)
        for step in steps:
            checks.whole("ModuleProfile", 0, at=step)
        if every is not None:
            checks.whole("ModuleProfile", every=every)
        if steps and every is not None:
            raise PluginError(f"ModuleProfile: at={steps} and every={every}: give one of them")
        self.at = steps or (() if every is not None else (10,))
        self.every = every
        self.phase = phase
        self.show = show
        self.name = name
        self.measured: list[int] = []
        """The steps that were measured, of the last fit."""
        self._rows: dict[str, _Row] = {}
        self._taken = 0
        self._watch: _Watch | None = None

    def table(self) -> Table:
        """A row for each module, as the modules are nested: means of the steps that were measured."""
        return _table(self._rows.values(), max(len(self.measured), 1))

    def __str__(self) -> str:
        if not self.measured:
            return "no step was measured"
        names = ("module", "type", "calls", "params", "fwd ms", "own", "bwd ms", "own", "activ.", "memory")
        rows = []
        for name, kind, calls, parameters, *seconds, activations, memory in self.table().rows:
            depth = name.count(".") if name else 0
            shown = [f"{each * 1e3:.3f}" for each in seconds]
            sizes = count_of_bytes(int(activations)), count_of_bytes(int(memory))
            rows.append((" " * depth + (name or "(all)"), kind, f"{calls:g}", parameters, *shown, *sizes))
        return aligned(names, rows)

    @hookimpl
    def fit_begin(self) -> None:
        """Count from 0."""
        self.measured, self._rows, self._taken = [], {}, 0

    @hookimpl
    def step_context(self, learner: Learner, phase: Phase) -> AbstractContextManager[None] | None:
        """Measure the step, if it is one of those."""
        if phase.name != self.phase if self.phase is not None else not phase.training:
            return None
        step, self._taken = self._taken, self._taken + 1
        if phase.training:
            start = learner.current.position.start.steps if learner.current is not None else 0
            step = learner.progress.steps - start
        if step not in self.at if self.every is None else step % self.every:
            return None
        return self._measure(learner, step)

    @contextmanager
    def _measure(self, learner: Learner, step: int) -> Iterator[None]:
        watch = _Watch(learner, step)
        with watch:
            yield
        self._watch = watch

    @hookimpl
    def step_end(self, learner: Learner) -> None:
        """Read what was measured, and log it."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self.measured.append(watch.step)
        rows = watch.read()
        for row in rows.values():
            self._rows.setdefault(row.name, _Row(row.name, row.kind, row.parameters)).add(row)
        learner.log("run/module_profile", _table(rows.values(), 1))

    @hookimpl
    def step_cancelled(self) -> None:
        """A step that was cancelled counts as not measured."""
        self._watch = None

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Print the table."""
        self._watch = None
        if self.show and self.measured and learner.world.rank == 0:
            print(self)


@dataclass
class _Row:
    """Sums over calls of one module."""

    name: str
    kind: str
    parameters: int
    calls: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {FORWARD: 0.0, BACKWARD: 0.0})
    own: dict[str, float] = field(default_factory=lambda: {FORWARD: 0.0, BACKWARD: 0.0})
    activations: int = 0
    memory: int = 0

    def add(self, other: _Row) -> None:
        self.calls += other.calls
        self.parameters, self.kind = other.parameters, other.kind
        self.activations += other.activations
        self.memory += other.memory
        for what in (FORWARD, BACKWARD):
            self.seconds[what] += other.seconds[what]
            self.own[what] += other.own[what]


@dataclass
class _Span:
    """One call of a module's forward, or of a node of its graph."""

    name: str
    what: str
    begun: Any
    """Nanoseconds, or an event of a device."""
    outer: _Span | None
    ended: Any = None


class _Watch:
    """The hooks on the modules, and on the graph that they make, while it is entered."""

    def __init__(self, learner: Learner, step: int) -> None:
        self.step = step
        self._models = models = learner.models
        self._modules: dict[str, nn.Module] = {}
        self._opaque: dict[str, str] = {}
        for key, model in models.items():
            prefix = "" if len(models) == 1 else key
            for name, module in _modules(model, prefix):
                self._modules[name] = module
                if made := _opaque(module):
                    self._opaque[name] = made
        used = [p.device for model in models.values() for p in model.parameters()]
        self._device = next(filter(devices.reads_late, used), None)
        self._kept = {_storage(t) for m in models.values() for t in (*m.parameters(), *m.buffers()) if _is_made(t)}
        self._stack = ExitStack()
        self._spans: list[_Span] = []
        self._open: _Span | None = None
        self._paused = 0
        """Nanoseconds that went into looking at the graph, and belong to no module."""
        self._owners: dict[Node, str] = {}
        self._calls: dict[str, int] = {}
        self._activations: dict[str, int] = {}
        self._saved: dict[str, dict[int, int]] = {}
        """The bytes that each module's own nodes keep, by storage."""

    def __enter__(self) -> None:
        try:
            for name, module in self._modules.items():
                self._hook(name, module)
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._owners.clear()
        self._open = None

    def read(self) -> dict[str, _Row]:
        """The figures, by the modules' names."""
        if self._device is not None:
            devices.synchronize([self._device])  # host sync: the step is over, and its times are wanted
        rows = {name: self._row(name, module) for name, module in self._modules.items()}
        for span in self._spans:
            seconds = _seconds(span)
            rows[span.name].own[span.what] += seconds
            if span.outer is not None:
                rows[span.outer.name].own[span.outer.what] -= seconds
            if span.what == FORWARD and span.name not in _around(span):  # a module that calls itself counts once
                rows[span.name].seconds[FORWARD] += seconds
        saved = {name: dict(self._saved.get(name, {})) for name in rows}
        for name in reversed(rows):  # what is inside comes first
            rows[name].seconds[BACKWARD] += rows[name].own[BACKWARD]
            rows[name].memory = sum(saved[name].values())
            if (parent := self._parent(name)) is not None:
                rows[parent].seconds[BACKWARD] += rows[name].seconds[BACKWARD]
                saved[parent].update(saved[name])
        return rows

    def _row(self, name: str, module: nn.Module) -> _Row:
        inner = getattr(module, "_orig_mod", module)
        kind = f"{type(inner).__name__} ({self._opaque[name]})" if name in self._opaque else type(inner).__name__
        row = _Row(name, kind, sum(p.numel() for p in module.parameters() if _is_made(p)))
        row.calls, row.activations = self._calls.get(name, 0), self._activations.get(name, 0)
        return row

    def _parent(self, name: str) -> str | None:
        """The module around a module, by name."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._modules:
                return name
        return None

    def _hook(self, name: str, module: nn.Module) -> None:
        compiled = module._compiled_call_impl
        if compiled is not None:  # a hook would be compiled, too

            def call(*args: Any, **kwargs: Any) -> Any:
                self._begin(name)
                output = None
                try:
                    output = compiled(*args, **kwargs)
                finally:
                    self._end(name, (args, kwargs), output)
                return output

            module._compiled_call_impl = call
            self._stack.callback(setattr, module, "_compiled_call_impl", compiled)
            return

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begin(name)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._end(name, (args, kwargs), output)

        self._remove(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._remove(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _remove(self, handle: RemovableHandle) -> None:
        self._stack.callback(handle.remove)

    def _begin(self, name: str) -> None:
        if self._models.aside:
            return
        self._open = _Span(name, FORWARD, self._now(), self._open)

    def _end(self, name: str, inputs: Any, output: Any) -> None:
        if self._models.aside:
            return
        span = self._open
        while span is not None and span.name != name:  # what an error has left open
            span = span.outer
        if span is None:
            return
        span.ended, paused = self._now(), time.perf_counter_ns()
        self._spans.append(span)
        self._open = span.outer
        self._calls[name] = self._calls.get(name, 0) + 1
        tensors = list(_tensors(output))
        self._activations[name] = self._activations.get(name, 0) + sum(t.numel() * t.element_size() for t in tensors)
        self._claim(name, tensors, {t.grad_fn for t in _tensors(inputs) if t.grad_fn is not None})
        self._paused += time.perf_counter_ns() - paused

    def _claim(self, name: str, outputs: Iterable[Tensor], ends: set[Node]) -> None:
        """The nodes between a module's outputs and its inputs are its own, except nodes made by modules inside."""
        waiting: list[Node | None] = [t.grad_fn for t in outputs]
        while waiting:
            node = waiting.pop()
            if node is None or node in ends or node in self._owners or type(node).__name__ == "AccumulateGrad":
                continue
            self._owners[node] = name
            self._keep(name, node)
            self._time(name, node)
            waiting += [other for other, _ in node.next_functions]

    def _keep(self, name: str, node: Node) -> None:
        """Note what a node keeps for backward, as it was packed: unpacking could compute it again."""
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                try:
                    saved = getattr(node, attribute)
                except RuntimeError:  # a backward inside the forward has freed it
                    continue
                for each in saved if isinstance(saved, (tuple, list)) else [saved]:
                    tensor = getattr(each, "data", None)
                    if isinstance(tensor, Tensor) and (storage := _storage(tensor)) not in self._kept:
                        kept = self._saved.setdefault(name, {})
                        size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
                        kept[storage] = max(size, kept.get(storage, 0))

    def _time(self, name: str, node: Node) -> None:
        def before(gradients: Any) -> None:
            self._open = _Span(name, BACKWARD, self._now(), self._open)

        def after(inputs: Any, outputs: Any) -> None:
            span = self._open
            if span is not None and (span.name, span.what) == (name, BACKWARD):
                span.ended = self._now()
                self._spans.append(span)
                self._open = span.outer

        self._remove(node.register_prehook(before))
        self._remove(node.register_hook(after))

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter_ns() - self._paused
        return devices.mark(self._device, timing=True)


def _modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules with their names, without the inside of compiled and scripted ones."""
    closed: list[str] = []
    for name, module in model.named_modules(prefix=prefix):
        if any(name.startswith(f"{each}.") or not each for each in closed):
            continue
        if _opaque(module):
            closed.append(name)
        yield name, module


def _opaque(module: nn.Module) -> str:
    """Why there is no looking into a module, or an empty string."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return "compiled"
    return "scripted" if isinstance(module, torch.jit.ScriptModule) else ""


def _is_made(tensor: Tensor) -> bool:
    return not is_lazy(tensor)


def _storage(tensor: Tensor) -> int:
    """The identity of a tensor's memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or a subclass without memory of its own
        return id(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dataclass_fields__"):
        for each in vars(value).values():
            yield from _tensors(each)


def _seconds(span: _Span) -> float:
    if isinstance(span.begun, int):
        return float(span.ended - span.begun) / 1e9
    return float(span.begun.elapsed_time(span.ended)) / 1e3


def _around(span: _Span) -> list[str]:
    """The modules whose forward is around a span."""
    names = []
    outer = span.outer
    while outer is not None:
        if outer.what == FORWARD:
            names.append(outer.name)
        outer = outer.outer
    return names


def _table(rows: Iterable[_Row], steps: int) -> Table:
    return Table(
        COLUMNS,
        [
            (
                row.name,
                row.kind,
                row.calls / steps,
                row.parameters,
                *(each[what] / steps for what in (FORWARD, BACKWARD) for each in (row.seconds, row.own)),
                row.activations / steps,
                row.memory / steps,
            )
            for row in rows
        ],
    )
