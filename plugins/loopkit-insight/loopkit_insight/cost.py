"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from loopkit import hookimpl
from loopkit.author import Shown, aligned, devices
from loopkit.logs import Table
from loopkit_insight.calls import around, with_default

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.author import Target
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["Cost"]

COLUMNS = ("phase", "hook", "plugin", "calls", "seconds")
DATA, STEP, DEVICE = "data", "step", "device"
"""The entries of the column ``hook`` in rows without a plugin."""
SMALL = 0.001
"""Rows of a smaller share are not printed."""
LARGEST = 5
"""Plugins whose sums are printed."""
Call = Callable[..., Any]
clock = time.perf_counter


class Cost(Shown):
    """Measure where the time goes: each hook of each plugin, the data, the step itself, and the device.

    Times are of the host's clock, and each moment counts once: a hook that runs a whole validation has only what
    it does itself. Beside the hooks there are, for each phase:

    - ``data``: waiting for batches, the begin of the loader's iteration included;
    - ``step``: the phase's own step without the hooks in it; on an accelerator, the time to launch its work;
    - ``device``, with CUDA: from the begin of a step's work on the device to its end, measured there by events, which
      are read when they have arrived.

    Args:
        show: Print the table when a fit ends.
        name: The plugin's name.

    At the end of each epoch of a fit the table is logged as ``"run/cost"``. Figures are of the last fit, and of the
    time between it and the fit before. Not measured are hooks of this plugin, and data and steps of an epoch that was
    running when it was added.

    Example::

        cost = Cost(show=False)
        Learner(..., plugins=[cost]).fit(train, epochs=1)
        print(cost.table())
    """

    provides = "observer"
    volatile = ("_*", "run/cost")

    def __init__(self, *, show: bool = True, name: str = "cost") -> None:
        self.show = show
        self.name = name
        self._cells: dict[tuple[str, str, str], _Cell] = {}
        self._before: dict[tuple[str, str, str], tuple[int, float]] = {}
        """The values of the cells at the end of the last fit."""
        self._all = _Cell()
        """The seconds that are in any cell by now."""
        self._epochs: list[_Epoch] = []
        self._device: _DeviceTimes | None = None
        self._over = False

    def table(self) -> Table:
        """Calls and seconds of each hook of each plugin, by phase and time: ``phase hook plugin calls seconds``.

        Waits for the device if it was measured.
        """
        if self._device is not None:
            self._device.wait()
        return self._table()

    def _table(self) -> Table:
        phases = list(dict.fromkeys(phase for phase, _, _ in self._cells))
        rows = [(*key, cell.calls, cell.seconds) for key, cell in self._cells.items() if cell.calls]
        rows.sort(key=lambda row: (phases.index(row[0]), row[1] == DEVICE, -row[4], row))
        return Table(COLUMNS, rows)

    def __str__(self) -> str:
        rows = self.table().rows
        whole = sum(row[4] for row in rows if row[1] != DEVICE) or 1.0
        shown, small = [], 0.0
        for phase, hook, plugin, calls, seconds in rows:
            if seconds < SMALL * whole:
                small += seconds
                continue
            figures = f"{seconds:.4f}", f"{seconds / calls * 1e6:.1f}", f"{seconds / whole:.1%}"
            shown.append((phase or "-", plugin or "-", hook, calls, *figures))
        text = aligned(("phase", "plugin", "hook", "calls", "seconds", "us a call", "share"), shown)
        hidden = len(rows) - len(shown)
        more = [f"and {hidden} more below {SMALL:.1%} each: {small / whole:.1%}"] if hidden else []
        plugins: dict[str, float] = {}
        for _, _, plugin, _, seconds in rows:
            if plugin:
                plugins[plugin] = plugins.get(plugin, 0.0) + seconds
        largest = sorted(plugins.items(), key=lambda item: -item[1])[:LARGEST]
        sums = ", ".join(f"{plugin} {seconds / whole:.1%}" for plugin, seconds in largest)
        return "\n".join([text, *more, *([f"plugins, all in all: {sums}"] if sums else [])])

    @hookimpl
    def instrument_call(self, target: Target, call: Call) -> Call:
        """Measure the call."""
        cell = self._cell(target.phase, target.hook, target.plugin)
        step = self._cell(target.phase, STEP)
        timed = self._timed(cell, with_default(target, call, lambda default: self._timed(step, default, 0)))
        return self._timed_context(cell, timed) if target.hook.endswith("_context") else timed

    @hookimpl
    def fit_begin(self) -> None:
        """Forget the fit before."""
        if self._over:
            for key, (calls, seconds) in self._before.items():
                self._cells[key].calls -= calls
                self._cells[key].seconds -= seconds
        self._over = False

    @hookimpl
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> AbstractContextManager[None]:
        """Count for this epoch."""
        return self._measured(learner, phase, epoch)

    @contextmanager
    def _measured(self, learner: Learner, phase: Phase, epoch: Epoch) -> Iterator[None]:
        if self._device is None:
            used = (p.device for model in learner.models.values() for p in model.parameters())
            late = next(filter(devices.reads_late, used), None)
            self._device = None if late is None else _DeviceTimes(late)
        data, step, device = (self._cell(phase.name, what) for what in (DATA, STEP, DEVICE))
        updates = phase.training and learner.accumulate > 1 and epoch.length is None
        self._epochs.append(_Epoch(clock(), self._all.seconds, data, step, device, step if updates else data))
        try:
            yield
        finally:
            self._epochs.pop()

    @hookimpl
    def step_begin(self) -> None:
        """Count the time since the last hook as the wait for data."""
        if self._epochs:  # none if it was added in the middle of one
            epoch = self._epochs[-1]
            self._close(epoch, epoch.data)
            if self._device is not None:
                epoch.begun = self._device.mark()

    @hookimpl
    def step_end(self) -> None:
        """Count the time since the last hook as the step."""
        if self._epochs:
            epoch = self._epochs[-1]
            self._close(epoch, epoch.step)
            if self._device is not None:
                self._device.measure(epoch.begun, epoch.device)

    @hookimpl
    def step_cancelled(self) -> None:
        """Count the time since the last hook as a step, which was cancelled."""
        if self._epochs:
            epoch = self._epochs[-1]
            self._close(epoch, epoch.step)

    @hookimpl
    def epoch_end(self) -> None:
        """Count the time since the last hook as the end of the data, or as the last window's update."""
        if self._epochs:
            epoch = self._epochs[-1]
            self._close(epoch, epoch.last, 0)

    @hookimpl
    def phase_end(self, learner: Learner) -> None:
        """Log the table."""
        if learner.current is not None and not self._epochs:
            learner.log("run/cost", self._table())

    @hookimpl
    def fit_end(self, learner: Learner) -> None:
        """Print the table."""
        if self.show and learner.world.rank == 0:
            print(self)
        elif self._device is not None:
            self._device.wait()
        self._before = {key: (cell.calls, cell.seconds) for key, cell in self._cells.items()}
        self._over = True

    def _cell(self, phase: str, hook: str, plugin: str = "") -> _Cell:
        return self._cells.setdefault((phase, hook, plugin), _Cell())

    def _close(self, epoch: _Epoch, cell: _Cell, calls: int = 1) -> None:
        """Give the time since the last such call, but for what is in other cells by now, to a cell."""
        spent, now = self._all, clock()
        whole = now - epoch.since
        cell.calls += calls
        cell.seconds += whole - spent.seconds + epoch.spent
        spent.seconds = epoch.spent = epoch.spent + whole
        epoch.since = now

    def _timed(self, cell: _Cell, call: Call, calls: int = 1) -> Call:
        spent = self._all

        def timed(*values: Any) -> Any:
            before, begun = spent.seconds, clock()
            try:
                return call(*values)
            finally:
                whole = clock() - begun
                cell.calls += calls
                cell.seconds += whole - spent.seconds + before
                spent.seconds = before + whole

        return timed

    def _timed_context(self, cell: _Cell, make: Call) -> Call:
        return lambda *values: around(make(*values), lambda call: self._timed(cell, call, 0))


class _Cell:
    """Calls and seconds; with slots, which is twice as fast as a list."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.calls, self.seconds = 0, 0.0


class _Epoch:
    """One epoch that is running."""

    __slots__ = ("begun", "data", "device", "last", "since", "spent", "step")

    def __init__(self, since: float, spent: float, data: _Cell, step: _Cell, device: _Cell, last: _Cell) -> None:
        self.since, self.spent = since, spent
        self.data, self.step, self.device, self.last = data, step, device, last
        self.begun: Any = None


class _DeviceTimes:
    """Times between pairs of events of a device, read when both have come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: deque[tuple[devices.Event, devices.Event, _Cell]] = deque()
        self._free: list[devices.Event] = []

    def mark(self) -> devices.Event:
        return devices.mark(self._device, timing=True, event=self._free.pop() if self._free else None)

    def measure(self, begun: devices.Event, cell: _Cell) -> None:
        """Add the time from an event to now, on the device, to a cell; read what has come."""
        self._pairs.append((begun, self.mark(), cell))
        while self._pairs and self._pairs[0][1].query():
            self._read()

    def wait(self) -> None:
        """Read all."""
        if self._pairs:
            devices.synchronize([self._device])  # host sync: the figures are wanted now
        while self._pairs:
            self._read()

    def _read(self) -> None:
        begun, ended, cell = self._pairs.popleft()
        cell.calls += 1
        cell.seconds += begun.elapsed_time(ended) / 1e3
        self._free += (begun, ended)
