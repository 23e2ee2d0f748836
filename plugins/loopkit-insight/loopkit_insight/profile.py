"""Where the time of some steps goes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from loopkit.author import Shown
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.author import Target
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

__all__ = ["Profile"]

STEPS = range(10, 20)
PLANNED = ("epochs", "max_steps", "max_updates", "minutes")


class Profile(Shown):
    """Run ``torch.profiler`` over some training steps: a trace and a table.

    Steps have the range ``"<phase> step"`` and epochs that begin meanwhile the range ``"<phase> epoch"``.

    Args:
        steps: Training steps of the fit, from 0, one after the other. Outside of a fit they are counted from the last
            one on.
        path: Where the trace is written, for ``chrome://tracing`` or Perfetto; with ``.gz`` it is compressed. A file
            of this name is replaced. None: no trace.
        show: Print the table.
        sort_by: The column of the table to sort by, as in torch's ``key_averages().table``; by default the device's own
            time if there is an accelerator, else the CPU's.
        rows: Of the table.
        hooks: Give each call of another plugin's hook a range, too: ``"<plugin>.<hook>"``.
        options: For ``torch.profiler.profile``, such as ``record_shapes=True``, ``profile_memory=True``,
            ``with_stack=True``.

    The steps that are profiled are slower. If the fit ends before the last of them, the recorded steps are written at
    its end, unless by an error. The profiler is stopped in any case. If another profiler is running there is one
    warning, and no recording. Of several processes only the first is profiled.

    Raises:
        PluginError: The steps are not one after the other, or the path is a directory.

    Example::

        learner = Learner(..., plugins=[Profile(range(100, 105), "step.json", hooks=True)])
    """

    provides = "observer"
    name = "profile"
    syncs = True
    """The profiler waits for the device when it stops."""
    volatile = ("_*", "steps", "table")

    def __init__(
        self,
        steps: Sequence[int] = STEPS,
        path: str | os.PathLike[str] | None = "trace.json",
        *,
        show: bool = True,
        sort_by: str | None = None,
        rows: int = 20,
        hooks: bool = False,
        **options: Any,
    ) -> None:
        steps = list(steps)
        if {*map(type, steps)} != {int} or steps[0] < 0 or steps != list(range(steps[0], steps[0] + len(steps))):
            raise PluginError(f"Profile: steps is {steps!r:.60}: they follow one another, as in range(10, 20)")
        if path is not None and Path(path).is_dir():
            raise PluginError(f"Profile: path is {str(path)!r}, a directory: give the name of a file")
        self.steps = range(steps[0], steps[-1] + 1)
        self.path = None if path is None else Path(path)
        self.show = show
        self.sort_by = sort_by
        self.rows = rows
        self.hooks = hooks
        self.options = options
        self.table = ""
        """The table of the last profile, as text."""
        self._profiler: profile | None = None
        self._step = -1
        self._done = False

    @property
    def running(self) -> bool:
        """Whether the profiler is running."""
        return self._profiler is not None

    @hookimpl
    def instrument_call(self, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        """A range for the call, if that was asked for."""
        if not self.hooks:
            return call

        def named(*values: Any) -> Any:
            with record_function(f"{target.plugin}.{target.hook}"):
                return call(*values)

        return named

    @hookimpl
    def fit_begin(self) -> None:
        """Count from 0."""
        self._step, self._done = -1, False

    @hookimpl
    @contextmanager
    def epoch_context(self, learner: Learner, phase: Phase, epoch: Epoch) -> Iterator[None]:
        """A range for the epoch; after an error, stop."""
        try:
            with record_function(f"{phase.name} epoch"):
                yield
        except BaseException:
            self._stop()
            raise
        if learner.current is None and epoch.depth == 0:
            self._finish()

    @hookimpl
    def step_begin(self, learner: Learner, phase: Phase) -> None:
        """Start, if this is the first of the steps."""
        if phase.training:
            self._step += 1
            if self._step == self.steps.start and learner.world.rank == 0:
                self._start()

    @hookimpl
    def step_context(self, phase: Phase) -> AbstractContextManager[Any] | None:
        """A range for the step."""
        return record_function(f"{phase.name} step") if self.running else None

    @hookimpl
    def step_end(self, phase: Phase) -> None:
        """Stop, if this was the last of the steps."""
        if phase.training and self._step == self.steps[-1]:
            self._finish()

    @hookimpl
    def step_cancelled(self, phase: Phase) -> None:
        """Stop, if this was the last of the steps."""
        if phase.training and self._step == self.steps[-1]:
            self._finish()

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Stop, if the fit has ended before the last of the steps."""
        if result.reason == "error":
            self._stop()
        self._finish()
        if not self._done and learner.world.rank == 0 and result.reason in PLANNED:
            warnings.warn(
                f"plugin {self.name!r}: the fit had {self._step + 1} training steps and ended before step "
                f"{self.steps.start}, so no step was profiled; give earlier steps",
                stacklevel=2,
            )

    def _start(self) -> None:
        self._done = True
        if torch._C._autograd._profiler_enabled():  # two at once end in a crash of the process
            warnings.warn(
                f"plugin {self.name!r}: another profiler is running, so this one does not record", stacklevel=2
            )
            return
        self._profiler = profile(**self.options)
        self._profiler.start()

    def _stop(self) -> profile | None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def _finish(self) -> None:
        """Stop, and write what was recorded."""
        profiler = self._stop()
        if profiler is None:
            return
        sort_by = self.sort_by
        if sort_by is None:
            on_device = set(profiler.activities) - {ProfilerActivity.CPU}
            sort_by = "self_device_time_total" if on_device else "self_cpu_time_total"
        self.table = profiler.key_averages().table(sort_by=sort_by, row_limit=self.rows)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))
        if self.show:
            print(self.table)
