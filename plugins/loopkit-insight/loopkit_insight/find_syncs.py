"""Find what makes the host wait for the device inside a step."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from loopkit import hookimpl
from loopkit.author import Shown, aligned, hooks
from loopkit.logs import Table
from loopkit_insight.calls import around, with_default
from loopkit_insight.syncs import TensorReads, caller, tensors

if TYPE_CHECKING:
    from loopkit.author import Target
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["FindSyncs", "Sync"]

COLUMNS = ("phase", "hook", "plugin", "line", "from", "call", "times", "deliberate")
DELIBERATE = "# host sync"
CUDA_SYNC = "called a synchronizing CUDA operation"
Call = Callable[..., Any]


@dataclass(frozen=True)
class Sync:
    """A place that makes the host wait for the device."""

    phase: str
    hook: str
    """The hook in which it happens; ``"step"`` for the phase's own step."""
    plugin: str
    """The plugin of the hook; empty for the phase's own step."""
    line: str
    """``"file:line"`` of the code that reads."""
    origin: str
    """``"file:line"`` in the plugin's or the phase's file from which that was called; empty if it is the same file."""
    call: str
    """The call that waits, such as ``"item() on a tensor"``."""
    deliberate: bool
    """Whether either line has a comment that begins with ``# host sync``."""


class FindSyncs(Shown):
    """Name the lines that make the host wait for the device inside a step: of plugins, phases, models and losses.

    With a model on CUDA, torch's sync debug mode reports each real wait. Elsewhere calls that read a
    tensor on the host are observed (`syncs.TensorReads`), which would wait on an accelerator. So a slow call
    is found on a CPU before, unless it is inside compiled code. It is for a few steps: a step takes longer.

    Watched are the phases' steps and the hooks that belong to a step, their contexts and ``move_batch``; not
    ``epoch_end``, where values may be read. Lines with the comment ``# host sync: why`` are reported as deliberate.

    Args:
        show: Print the table when a fit ends.
        name: The plugin's name.

    The table is logged as ``"run/syncs"`` at the end of an epoch in which there was something new. Afterwards
    ``learner.explain()`` shows it beside the hooks.

    Example::

        find = FindSyncs(show=False)
        Learner(..., plugins=[find]).fit(train, max_steps=10)
        for sync in find.found:
            print(sync.plugin, sync.line)
    """

    provides = "observer"
    volatile = ("_*", "run/syncs")

    def __init__(self, *, show: bool = True, name: str = "find_syncs") -> None:
        self.show = show
        self.name = name
        self._found: dict[Sync, int] = {}
        self._logged = 0
        self._owner: _Owner | None = None
        self._watch: AbstractContextManager[Any] | None = None

    @property
    def found(self) -> tuple[Sync, ...]:
        """The syncs that were found, in their order."""
        return tuple(self._found)

    def table(self) -> Table:
        """The syncs that were found, and how often: ``phase hook plugin line from call times deliberate``."""
        rows = [(s.phase, s.hook, s.plugin, s.line, s.origin, s.call, n, s.deliberate) for s, n in self._found.items()]
        return Table(COLUMNS, rows)

    def __str__(self) -> str:
        if not self._found:
            return "no call inside a step was seen to wait for the device"
        columns = ("phase", "plugin", "hook", "call", "times", "line")
        rows = []
        for s, times in self._found.items():
            where = s.line + (f", from {s.origin}" if s.origin else "") + (" (deliberate)" if s.deliberate else "")
            rows.append((s.phase, s.plugin or "-", s.hook, s.call, times, where))
        return aligned(columns, rows, width=200)

    def remark(self, phase: Phase, hook: str, plugin: str) -> str:
        """The note that `Learner.explain` shows beside a hook."""
        mine = [s for s in self._found if (s.phase, s.hook, s.plugin) == (phase.name, hook, plugin)]
        lines = [s.line + (" (deliberate)" if s.deliberate else "") for s in mine]
        return f"waits for the device: {', '.join(dict.fromkeys(lines))}" if lines else ""

    @hookimpl
    def instrument_call(self, target: Target, call: Call) -> Call:
        """Watch the call, if it belongs to a step."""
        hook = hooks()[target.hook]
        if "step" not in hook.arguments and target.hook != "move_batch":
            return call
        owner = _Owner(target.phase, target.hook, target.plugin, _file(target.function))

        call = with_default(target, call, partial(self._of, _Owner(target.phase, "step", "", "")))

        def watched(*values: Any) -> Any:
            with self._watching(owner):
                made = call(*values)
            return around(made, partial(self._of, owner)) if hook.kind == "context" else made

        return watched

    @hookimpl
    def epoch_context(self, learner: Learner) -> None:
        """Look which device it is."""
        if self._owner is None:
            types = {p.device.type for model in learner.models.values() for p in model.parameters()}
            self._watch = _CudaSyncs(self._noticed) if "cuda" in types else _Reads(self._noticed, types <= {"cpu"})

    @hookimpl
    def step_context(self, phase: Phase) -> AbstractContextManager[None]:
        """Watch the phase's step."""
        return self._watching(_Owner(phase.name, "step", "", _file_of(type(phase))))

    @hookimpl
    def phase_end(self, learner: Learner) -> None:
        """Log the table, if there is something new."""
        if len(self._found) > self._logged:
            self._logged = len(self._found)
            learner.log("run/syncs", self.table())

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Print the table."""
        if self.show and learner.world.rank == 0:
            print(self)

    @contextmanager
    def _watching(self, owner: _Owner) -> Iterator[None]:
        outer, self._owner = self._owner, owner
        try:
            if outer is not None or self._watch is None:
                yield
            else:
                with self._watch:
                    yield
        finally:
            self._owner = outer

    def _of(self, owner: _Owner, call: Call) -> Call:
        """The call, as this owner's doing."""

        def watched(*values: Any) -> Any:
            with self._watching(owner):
                return call(*values)

        return watched

    def _noticed(self, call: str, frame: FrameType) -> None:
        owner = self._owner
        if owner is None:
            return
        inside: FrameType | None = frame
        while inside is not None and inside.f_code.co_filename != owner.file:
            inside = inside.f_back
        at = [_line(frame)] if inside is None or inside is frame else [_line(frame), _line(inside)]
        deliberate = any(DELIBERATE in text for _, text in at)
        origin = at[1][0] if len(at) > 1 else ""
        sync = Sync(owner.phase, owner.hook, owner.plugin, at[0][0], origin, call, deliberate)
        self._found[sync] = self._found.get(sync, 0) + 1


@dataclass(frozen=True)
class _Owner:
    """The hook or phase whose code runs."""

    phase: str
    hook: str
    plugin: str
    file: str


class _Reads(TensorReads):
    """Report calls that read tensors; with an accelerator, only its tensors."""

    def __init__(self, tell: Callable[[str, FrameType], None], anywhere: bool) -> None:
        super().__init__()
        self._tell, self._anywhere = tell, anywhere

    def noticed(self, what: str, args: tuple[Any, ...], frame: FrameType) -> None:
        if self._anywhere or any(tensor.device.type != "cpu" for tensor in tensors(args)):
            self._tell(what, frame)


class _CudaSyncs:
    """Report the warnings of torch's sync debug mode."""

    def __init__(self, tell: Callable[[str, FrameType], None]) -> None:
        self._tell = tell
        self._caught: warnings.catch_warnings[None] | None = None
        self._mode = 0

    def __enter__(self) -> None:
        self._mode = torch.cuda.get_sync_debug_mode()
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.filterwarnings("always", message=CUDA_SYNC)
        show = warnings.showwarning

        def told(message: Any, *given: Any, **options: Any) -> None:
            if CUDA_SYNC not in str(message):
                show(message, *given, **options)
                return
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") == "warnings":
                frame = frame.f_back
            if (frame := caller(frame)) is not None:
                self._tell("waits", frame)

        warnings.showwarning = told
        torch.cuda.set_sync_debug_mode("warn")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.set_sync_debug_mode(self._mode)
        caught, self._caught = self._caught, None
        assert caught is not None
        caught.__exit__(kind, error, trace)


def _file(function: Any) -> str:
    """The file of a function's code, an empty string where there is none."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else code.co_filename


def _file_of(cls: type) -> str:
    """The file of a class's module, an empty string where there is none."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or ""


def _line(frame: FrameType) -> tuple[str, str]:
    """``"file:line"`` of the statement that a frame is at, and its text."""
    path = frame.f_code.co_filename
    first, last = frame.f_lineno, frame.f_lineno
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None, None, None, None))
    if position[0] is not None and position[1] is not None:
        first, last = position[0], position[1]
    text = "".join(linecache.getline(path, number, frame.f_globals) for number in range(first, last + 1))
    shown = os.path.relpath(path) if os.path.isabs(path) and path.startswith(os.getcwd() + os.sep) else path
    return f"{shown}:{frame.f_lineno}", text
