"""Metrics and checkpoints, reported to Ray Train."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from loopkit import Learner, Phase, hookimpl
from loopkit.author import Shown, nearest
from loopkit.checkpoint import listing
from loopkit.errors import PluginError
from loopkit.plugins import Checkpoint
from loopkit.result import FitResult
from loopkit_ray.resume import in_worker

__all__ = ["RayReport"]


class RayReport(Shown):
    """Report metrics, and the newest checkpoint of `Checkpoint`, to Ray Train.

    A report is made after every epoch of ``fit`` and its validations, or after every round of `Learner.rounds`, and
    once more at the end of the fit if there is something new by then. It holds the new ``learner.metrics`` since the
    last one, and the counts ``epochs``, ``steps``, ``updates`` and ``samples``. All workers report together, and wait
    for each other; Ray keeps the report of rank 0. Outside Ray Train it does nothing.

    The newest checkpoint goes along, once. It is of the same moment as the metrics if it is saved when they are made,
    as it is by default; one that is still being written in the background goes along with the next report. Ray keeps
    metrics only with checkpoints: without `Checkpoint`, ``Result.metrics`` is None.

    Args:
        phase: Report after every epoch of this phase instead, such as validations in mid-epoch.
        checkpoint: The name of the `Checkpoint`, if there are several.
        name: The plugin's name.

    Raises:
        PluginError: There are several `Checkpoint` plugins, or none of that name; or no phase was given, and the loop
            is your own and does not iterate over rounds.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[DDP(), Checkpoint(directory), RayReport()])
    """

    provides = "log"
    volatile = ("_*",)

    def __init__(self, phase: str | None = None, *, checkpoint: str | None = None, name: str = "ray_report") -> None:
        self.name = name
        self.phase = phase
        self.checkpoint = checkpoint
        self._reporting = False
        self._first = False
        """This is the worker of rank 0, whose checkpoints count."""
        self._due = False
        """An epoch has ended since the last report."""
        self._old: set[str] = set()
        """The phases that had no epoch since the last report."""
        self._reported: Path | None = None
        """The checkpoint that was reported last."""

    @hookimpl(before=("checkpoint",))  # and so, turned round, after it in fit_end
    def fit_begin(self, learner: Learner) -> None:
        """See who takes part."""
        self._reporting, self._due, self._old = in_worker(), False, set()
        if not self._reporting:
            return
        context = ray.train.get_context()
        self._first = context.get_world_rank() == 0
        self._source(learner)
        workers = context.get_world_size()
        if workers > learner.world.size and not any(_provides(each) == "sync" for each in learner.plugins.values()):
            warnings.warn(
                f"plugin {self.name!r}: Ray runs {workers} workers, and no plugin syncs them: each trains its own "
                f"model, and only rank 0 counts. Add DDP()",
                stacklevel=2,
            )

    @hookimpl(reads=lambda plugin: plugin.states(), after=("checkpoint",))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Note what the epoch has made; report, if it is of the phase to report after."""
        if not (self._reporting and learner.current is not None and learner.current.can_save):
            return
        self._due = True
        self._old.discard(phase.name)
        if phase.name == self.phase:
            self._report(learner, self._newest(learner))
        elif self.phase is None and not learner.current.has_cycles:
            raise PluginError(
                f"plugin {self.name!r}: your own loop does not iterate over learner.rounds(), so that no round "
                f"ends: give the phase to report after, such as RayReport({phase.name!r})"
            )

    @hookimpl(reads=lambda plugin: plugin.states(), after=("checkpoint",))
    def cycle_end(self, learner: Learner) -> None:
        """Report after a training epoch and its validations, unless a phase was given."""
        if self._reporting and self.phase is None:
            self._report(learner, self._newest(learner))

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Report new metrics since the last report, unless after an error, when the others may be elsewhere."""
        if self._reporting and result.reason not in ("error", "signal"):
            newest = self._newest(learner)
            if broadcast_from_rank_zero(self._due or newest is not None):  # only rank 0 knows of checkpoints
                self._report(learner, newest)

    def states(self) -> tuple[str, ...]:
        """The states that it reads at the end of an epoch."""
        return ("metrics", "progress", *(() if self.phase is None else (f"metrics.{self.phase}/*",)))

    def _report(self, learner: Learner, newest: Path | None) -> None:
        old = self._old if self._due else ()
        metrics = {name: _plain(value) for name, value in learner.metrics.items() if _phase(name) not in old}
        checkpoint = None if newest is None else ray.train.Checkpoint.from_directory(newest)
        ray.train.report({**asdict(learner.progress), **metrics}, checkpoint=checkpoint)
        self._reported = newest or self._reported
        self._due, self._old = False, {_phase(name) for name in learner.metrics}

    def _newest(self, learner: Learner) -> Path | None:
        """The newest checkpoint, if Ray has not got it yet; on rank 0."""
        source = self._source(learner)
        if source is None or not self._first:
            return None
        found = listing(source.directory)
        return found[0].path if found and found[0].path != self._reported else None

    def _source(self, learner: Learner) -> Checkpoint | None:
        """The plugin that saves."""
        found = {name: plugin for name, plugin in learner.plugins.items() if isinstance(plugin, Checkpoint)}
        if self.checkpoint is not None:
            if self.checkpoint not in found:
                raise PluginError(
                    f"plugin {self.name!r}: no Checkpoint is called {self.checkpoint!r}"
                    f"{nearest(self.checkpoint, found)}; there are: {', '.join(found) or 'none'}"
                )
            return found[self.checkpoint]
        if len(found) > 1:
            raise PluginError(
                f"plugin {self.name!r}: there are several Checkpoint plugins ({', '.join(found)}), and Ray takes one "
                f"checkpoint in a report: give RayReport(checkpoint={next(iter(found))!r})"
            )
        return next(iter(found.values()), None)


def _provides(plugin: Any) -> Any:
    return getattr(plugin, "provides", None)


def _phase(metric: str) -> str:
    return metric.partition("/")[0]


def _plain(value: Any) -> Any:
    """Numbers and lists for tensors and arrays, which Ray does not take."""
    return value.tolist() if hasattr(value, "tolist") else value
