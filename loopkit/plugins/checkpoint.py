"""Save the whole run during training, and resume from where it was."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loopkit.base import checks
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import takes
from loopkit.checkpoint import savable
from loopkit.checkpoint.bundle import Contents, describe
from loopkit.checkpoint.measured_weights import MeasuredWeights
from loopkit.checkpoint.place import Place
from loopkit.checkpoint.resumption import Resumption, resolved
from loopkit.checkpoint.retention import Retention
from loopkit.checkpoint.run_files import RunFiles, WeightFiles
from loopkit.checkpoint.save_options import SaveOptions
from loopkit.checkpoint.timing import Moment, Timing, moment
from loopkit.checkpoint.writing import Writing
from loopkit.criteria import Mode
from loopkit.criteria.directions import checked_mode, direction
from loopkit.errors import PluginError
from loopkit.events import SignalBegin
from loopkit.every import Every, every
from loopkit.hooks import hookimpl
from loopkit.logs.kinds import Text

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.engine.kept.resume import EpochStart
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

WORDS = ("stop", "warn")
"""The reactions of a resume to other data."""
EVERY_EPOCH, SAVE_OPTIONS = every(epochs=1), SaveOptions()
"""The defaults."""
ELSEWHERE = {"save_weights_only": "give weights_only=True", "monitor": "give best='val/loss'"}
"""Arguments of other libraries, each with the argument here."""


class Checkpoint(Shown):
    """Save the whole run: it can be killed at any time and resumes exactly.

    Each checkpoint has its own directory below ``directory``, written whole or not at all: weights as
    ``model.safetensors``, all else as JSON and safetensors, and a manifest with the digest of every file. A save is due
    at the end of an epoch (after its validation, if there is one) or between two steps; a run that a signal, or an
    error between two steps, interrupts is saved where it is. After an error inside a validation, the state as of the
    validation's begin is saved (only of a single process). After an error inside a training step an exact resume is
    impossible: the checkpoint before it stays.

    Args:
        directory: Where the checkpoints of this fit are, and of no other. Links and a relative path are resolved now.
        save: When to save, as ``every(epochs=1)``, ``every(epochs=0.25)``, ``every(updates=100)`` or
            ``every(minutes=10)``; a list of them saves whenever one of them is due.
        keep: How many of the newest to keep; never fewer than two are. One that was saved at the end of an epoch, or of
            the fit, takes the place of one at the same step and update.
        best: The metric that decides which checkpoint is the best, such as ``"val/loss"``. A checkpoint is saved
            whenever it is the best so far, and the best one is kept. Nan is never best.
        mode: ``"min"`` or ``"max"``; by default the metric's direction, else the fit raises.
        resume: ``"auto"``: resume from the newest valid checkpoint, or begin if there is none; True: there must be one;
            a path: from that checkpoint. By default the directory must not hold any.
        overwrite: Remove the checkpoints that are in the directory when the fit begins, and list them: for a cell or a
            script that is run again. It raises if other files are there, and with ``resume``. Logs
            stay: `LogTo` renames an earlier one.
        weights_only: Save only the models' weights, and the averages of plugins in files beside them, such
            as ``model.weight_average.safetensors``. When, where and how many is the same; no run can resume from them.
        data: ``"stop"``: a resumed run raises `StateError` before its first step if the batch before it is not the one
            of the saved run. ``"warn"``, or ``LOOPKIT_DATA=warn`` in the environment: it only warns.
        options: Rarely needed options.
        name: The plugin's name; a second one, with its own directory, needs another.

    Raises:
        PluginError: An option is out of range.
        CheckpointError: The directory cannot be used, or a checkpoint not be written or read.
        StateError: Something cannot be saved (found before the first step), or a saved state does not fit.
        NonFiniteError: A parameter is not finite, so no checkpoint was saved.

    Example::

        Checkpoint("runs/a", save=every(updates=100), best="val/loss", resume="auto")
    """

    provides = "checkpoint"
    shared = False  # its directory is that of one run
    per_process = ("directory",)
    optional = ("step_end",)
    syncs = ("step_end", "phase_end")
    """Saving reads the parameters."""
    files: type[RunFiles] = RunFiles
    """The form of a saved run."""
    volatile = ("_*", "directory", "place")

    @takes(**ELSEWHERE)
    def __init__(
        self,
        directory: str | Path,
        *,
        save: Every | Sequence[Every] = EVERY_EPOCH,
        keep: int = 2,
        best: str | None = None,
        mode: Mode | None = None,
        resume: str | Path | bool | None = None,
        overwrite: bool = False,
        weights_only: bool = False,
        data: Literal["stop", "warn"] = "stop",
        options: SaveOptions = SAVE_OPTIONS,
        name: str = "checkpoint",
    ) -> None:
        timing = Timing(save)
        checks.whole("Checkpoint", keep=keep)
        if not isinstance(options, SaveOptions):
            raise PluginError(f"Checkpoint: options is {options!r}: give options=SaveOptions(background=True)")
        _check_best(best, mode, options)
        checks.one_of("Checkpoint", WORDS, data=data)
        self.data: Literal["stop", "warn"] = data
        self.resume = resolved(resume)
        if overwrite and resume is not None:
            raise PluginError(f"Checkpoint: overwrite=True removes what resume={resume!r} needs: give one of them")
        if weights_only and (resume is not None or self.files.everywhere):
            by = type(self).__name__ if resume is None else f"resume={resume!r}"
            raise PluginError(
                f"Checkpoint: {by} cannot resume from weights_only=True: give one of them; two "
                f"Checkpoints with a directory and a name each do both"
            )
        self.name = name
        self.save = save
        self.mode = checked_mode("Checkpoint", mode)
        self.weights_only = weights_only
        self.monitor = best
        self._keep = keep
        self._overwrite = overwrite
        self._options = options
        self.place = Place(directory, options.lock_after)
        """The directory, with its lock."""
        self._timing = timing
        """When the run is saved."""
        self._files = (WeightFiles if weights_only else self.files)(self.place)
        """How it saves."""
        self._retention = Retention(keep, options.keep_best, best)
        """Which checkpoints stay."""
        self._resumption = Resumption(
            self.place,
            self._files,
            self._retention,
            resume=self.resume,
            overwrite=overwrite,
            data=data,
            options=options,
        )
        """Where the run resumes from."""
        self._writer = Writing(options.background, options.retries)
        self._measured = MeasuredWeights(best)
        self._tried = 0
        """Dry runs that were made in this fit: one before the first step, and one after it."""
        self._failure: BaseException | None = None
        """The error that was seen last."""

    def owns(self) -> tuple[str, ...]:
        """The directory, and the right to load a state."""
        return (f"checkpoints in {self.directory}", *(() if self.resume is None else ("checkpoint.resume",)))

    def options(self) -> dict[str, Any]:
        """Return the options that it was made with."""
        kept = {"directory": self.directory, "resume": self.resume, "name": self.name, "mode": self.mode}
        rules = {"save": self.save, "keep": self._keep, "best": self.monitor, "options": self._options}
        return {**kept, **rules, "overwrite": self._overwrite, "weights_only": self.weights_only, "data": self.data}

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self.place.directory

    @property
    def memory(self) -> int:
        """Bytes of main memory that background writing holds during a fit: one copy of the state."""
        return self._writer.memory

    @hookimpl(writes=("*",))  # and so, turned round, last in fit_end
    def fit_begin(self, learner: Learner) -> None:
        """Take the directory, see that it can be written, and resume."""
        self._writer.join()  # an interrupt may have kept an earlier fit from this
        self.place.release()
        if self.monitor is not None:
            self._retention.mode = direction(self, learner.plugins.values())
        try:
            self._resumption.begin(learner)
        except BaseException:
            self.place.release()
            raise
        self._resumption.begun = True
        self._tried = 0
        self._failure = None
        self._timing.begin(learner)

    @hookimpl(reads=("*",))
    def epoch_context(self, learner: Learner, epoch: Epoch) -> Any:
        """Save what an error between two steps, or in a validation, interrupts."""
        return self._guard(learner, epoch)

    @hookimpl(reads=("*",))
    def epoch_begin(self, learner: Learner, epoch: Epoch) -> None:
        """Before the first step, see that everything can be saved."""
        fit = learner.current
        if fit is None or not fit.can_save:
            return
        self._timing.plan_part(learner)
        if epoch.resumed:
            self._tried = self._tried or 1  # its loader is not where it was yet
        elif not self._tried and not savable.has_lazy(learner):
            self._try(learner)

    @hookimpl(reads=("*",))
    def step_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Save if it is due."""
        fit, timing = learner.current, self._timing
        if self._resumption.changed:  # in fit_begin the logs take it for what they hold already
            learner.log("changed", Text(self._resumption.take_changes()))
        can_save = phase.training and fit is not None and fit.can_save
        if self._tried == 1 and can_save and not _waits(learner, epoch):
            self._try(learner)  # what optimizers hold is made in the first update
        if not self._files.everywhere:  # else all processes raise what went wrong at their next save
            self._writer.check()
        if not can_save:
            return
        due = timing.is_due(learner, epoch.steps)
        late = time.monotonic() >= timing.next_time
        if not due and not late:
            return
        if learner.world.size > 1:
            self._save_together(learner, epoch, due, late)
        elif not self._writer.busy:
            self._save(learner, "interval")
        elif timing.is_behind(learner):
            self._writer.warn_of_pace(f"{self.save!r} in {self.directory}")

    def _save_together(self, learner: Learner, epoch: Epoch, due: bool, late: bool) -> None:
        """Save in all processes, now if all know of it, else when they next agree."""
        in_step = learner.world.in_step
        if due and in_step and not _waits(learner, epoch):
            self._save(learner, "interval")
        elif (late or not in_step) and learner.world.rank == 0 and learner.current is not None:
            self._timing.next_time = math.inf
            learner.current.request_save()

    @hookimpl(reads=("*",))
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Take what stands in the weights' place while the metric is measured."""
        if not self._measured.concerns(phase) or learner.current is None:
            return
        if not (self._files.everywhere and savable.is_sharded(learner)):
            self._measured.take(learner, phase)

    @hookimpl(reads=lambda plugin: ("*",) if plugin.monitor is None else ("*", f"metrics.{plugin.monitor}"))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Save if the metric is among the best, unless `cycle_end` comes next."""
        fit = learner.current
        if fit is None:
            return
        if self._measured.concerns(phase):
            self._measured.settle(learner, phase)
        if fit.can_save and not fit.ends_cycle:  # what the epoch of a hook measured counts when that hook is over
            self._save_measured(learner, due=False)

    @hookimpl(reads=("*",))
    def cycle_end(self, learner: Learner) -> None:
        """Save if that is due after this epoch, or the metric is among the best."""
        self._save_measured(learner, due=self._timing.is_epoch_due(learner))

    def _save_measured(self, learner: Learner, due: bool) -> None:
        """Save if it is due, or the metric is new and among the best."""
        if not self._files.everywhere:
            self._writer.check()
        value = self._retention.value(learner, self.name) if self._measured.take_news() else None
        due, best = learner.world.share((due, not due and self._retention.is_best(self.directory, value)))
        if due or best:
            self._save(learner, "epoch" if due else "best", value)
        self._measured.drop(learner)

    @hookimpl(reads=("*",))
    def signal_begin(self, learner: Learner) -> None:
        """Save where the signal came."""
        caught = None if learner.current is None else learner.current.signal
        self._save(learner, "asked for" if caught is None else caught.name, now=True)

    @hookimpl(writes=("*",))
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Save what was trained since the last save, wait for what is being written, and let the directory go."""
        with ExitStack() as stack:  # each of these, whatever the others raise
            stack.callback(self.place.release)
            stack.callback(self._writer.clear)
            stack.callback(self._retention.close)
            self._writer.join()
            if self._options.at_end and result.reason not in ("error", "signal"):
                if learner.world.share(self._has_unsaved(learner)):
                    self._save(learner, "end", now=True)
            self._writer.wait()
        if result.reason in ("pause", "signal") and not any(map(_saves_run, learner.plugins.values())):
            warn("no run resumes from Checkpoint(weights_only=True): add one with resume='auto' and another directory")

    def _has_unsaved(self, learner: Learner) -> bool:
        """Whether anything has changed since the last save, such as by the best weights, which were put back."""
        logged = any(getattr(plugin, "unsaved", False) for plugin in learner.plugins.values())
        return logged or self._timing.has_changed(learner) or self._timing.has_moved(learner)

    @contextmanager
    def _guard(self, learner: Learner, epoch: Epoch) -> Iterator[None]:
        """Save at an error inside; of several processes the others would have to take part."""
        saves = self._options.on_error and learner.current is not None and learner.world.size == 1
        mark = epoch.mark() if saves and self._tried else None
        try:
            yield
        except Exception as error:
            new = error is not self._failure
            self._failure = error
            if saves and self._tried and self._timing.has_moved(learner):
                self._save_at_error(learner, epoch, error, new, mark)
            raise

    def _save_at_error(
        self, learner: Learner, epoch: Epoch, error: Exception, new: bool, mark: EpochStart | None
    ) -> None:
        """Save where the run is, if the error came between two steps, else as of the begin of the validation."""
        fit = learner.current
        here = new and fit is not None and fit.can_save and (epoch.steps > 0 or mark is None)
        if not here and mark is None:
            return
        try:
            self._save(learner, "error", now=True, at=None if here else mark)
        except Exception as second:
            error.add_note(f"plugin {self.name!r}: no checkpoint was saved at this error: {second}")

    def _try(self, learner: Learner) -> None:
        """Make a dry run of a save."""
        state = learner.state_dict(whole=not self._files.everywhere)
        self._files.contents(learner, state, self._measured.by).files()
        self._tried += 1

    def _save(
        self, learner: Learner, reason: str, value: float | None = None, now: bool = False, at: EpochStart | None = None
    ) -> None:
        if savable.has_lazy(learner):
            return
        files, stands_in = self._files, self._measured.by
        self._writer.join()
        if not now:
            self._writer.check()
        savable.settle(learner)
        savable.check_finite(learner)
        self._timing.note_values(learner)
        state = {**learner.state_dict(at, whole=not files.everywhere), "made": self._resumption.made}
        contents = files.contents(learner, state, stands_in)
        here = moment(learner)
        if learner.world.rank == 0 or files.everywhere:
            more: dict[str, Any] = {"monitored": self._retention.noted(value)}
            if state.get("weights"):
                word = files.measured_file(learner, next(iter(state["weights"])), stands_in)
                more["measured"] = {"file": word, "by": stands_in}
            about = describe(learner, contents, reason, state["metrics"], **more)
            self._writer.write(contents, partial(self._write, contents, about, here), now)
        else:
            self._timing.saved_at = here
        self._timing.plan(learner)

    def _write(self, contents: Contents, about: dict[str, Any], here: Moment) -> None:
        """Write and rotate; in its own thread if ``background``."""
        written = self._files.write(contents, about, f"step-{about['progress']['steps']}")
        self._timing.saved_at = here
        self._writer.forget()
        if written is not None:
            self._retention.rotate(self.directory)


def _waits(learner: Learner, epoch: Epoch) -> bool:
    """Whether a save has to wait: a window is not saved where others train, too."""
    return learner.world.size > 1 and epoch.window_open


def _check_best(best: Any, mode: Mode | None, options: SaveOptions) -> None:
    """Raise for a metric that is none, and for options that need one."""
    if best is not None:
        checks.metric_name("Checkpoint", best=best)
    if best is None and (mode is not None or options.keep_best > 1):
        given = f"mode is {mode!r}" if mode is not None else f"options.keep_best is {options.keep_best}"
        raise PluginError(
            f"Checkpoint: {given}, and no metric defines the best checkpoints, so it would have no effect: "
            f"give best='val/loss', or leave it out"
        )


def _saves_run(plugin: Any) -> bool:
    """Whether a plugin saves, after a signal, a state that a run can resume from."""
    return hasattr(plugin, SignalBegin.hook) and not (isinstance(plugin, Checkpoint) and plugin.weights_only)
