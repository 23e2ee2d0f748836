"""Save the whole run as it goes, and go on from where it was."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parameter import is_lazy

from loopkit.base import devices, sharded
from loopkit.base.notes import say, warn
from loopkit.base.options import Shown
from loopkit.base.words import nearest, takes
from loopkit.checkpoint import disk, storage
from loopkit.checkpoint.background import Snapshot, Writer
from loopkit.checkpoint.bundle import LEFT_OUT, ONCE, Contents, describe, monitored, number, read_state, restore
from loopkit.checkpoint.failures import Failures
from loopkit.checkpoint.made import OPTIMIZER, Record, changes, made
from loopkit.checkpoint.manifest import Listing, Manifest
from loopkit.checkpoint.place import Place
from loopkit.checkpoint.save_options import SaveOptions, check_count
from loopkit.criteria import Mode, checked_mode, direction
from loopkit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NonFiniteError,
    PluginError,
    StateError,
)
from loopkit.events import SignalBegin
from loopkit.every import Every, every
from loopkit.hooks import hookimpl, implemented
from loopkit.logs.kinds import Text
from loopkit.plugin import hook_states, provided, unwrapped

if TYPE_CHECKING:
    from loopkit import Epoch
    from loopkit.engine.kept.resume import EpochStart
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

LOGGED = re.compile(r"\.lock|media|log(-\d+)?\.(jsonl|csv)|events\.out\.tfevents\..*")
"""Other files of a run beside its checkpoints: the lock and logs."""
Chosen = tuple[Manifest, dict[str, Any]]
"""A checkpoint, and the state in it."""
WORDS = ("stop", "warn")
"""The reactions of a resume to other data."""
EVERY_EPOCH, SAVE_OPTIONS = every(epochs=1), SaveOptions()
"""The defaults."""
ELSEWHERE = {"save_weights_only": "give weights_only=True", "monitor": "give best='val/loss'"}
"""Arguments of other libraries, each with the argument here."""


class Checkpoint(Shown):
    """Save the whole run: it can be killed at any time and resumes exactly.

    Each checkpoint is a directory of its own below ``directory``, written whole or not at all: weights as
    ``model.safetensors``, all else as JSON and safetensors, and a manifest with the digest of every file. A save is due
    at the end of an epoch (after its validation, if there is one) or between two steps; what a signal, or an error
    between two steps, interrupts is saved where it is. After an error inside a validation, the state as of the
    validation's begin is saved (of one process alone). An error inside a training step leaves nothing that could go on
    exactly: the checkpoint before it stands.

    Args:
        directory: Where the checkpoints of this fit are, and of no other. Links and a relative path are resolved now.
        save: When to save, as ``every(epochs=1)``, ``every(updates=100)`` or ``every(minutes=10)``; a list of them
            saves whenever one of them says so.
        keep: How many of the newest to keep; never fewer than two are. One that was saved at the end of an epoch, or of
            the fit, takes the place of one at the same step and update.
        best: The metric that decides which checkpoint is the best, such as ``"val/loss"``. A checkpoint is saved
            whenever it is the best so far, and the best one is kept. Nan is never best.
        mode: ``"min"`` or ``"max"``; by default the metric's direction, else the fit raises.
        resume: ``"auto"``: resume from the newest valid checkpoint, or begin if there is none; True: there must be one;
            a path: from that checkpoint. By default the directory must not hold any.
        overwrite: Remove the checkpoints that are in the directory when the fit begins, and say which: for a cell or a
            script that is run again. Refused if anything but checkpoints and logs is there, and with ``resume``. Logs
            stay: `LogTo` renames an earlier one.
        weights_only: Save the models' weights alone, and those with the averages of plugins in files beside them, such
            as ``model.weight_average.safetensors``. When, where and how many is the same; no run can go on from them.
        data: ``"stop"``: a resumed run raises `StateError` before its first step if the batch before it is not the one
            of the saved run. ``"warn"``, or ``LOOPKIT_DATA=warn`` in the environment: it only warns.
        options: What is rarely needed.
        name: The plugin's name; a second one, with a directory of its own, needs another.

    Raises:
        PluginError: An option is out of range.
        CheckpointError: The directory cannot be used, or a checkpoint not be written or read.
        StateError: Something cannot be saved (found before the first step), or a saved state does not fit.
        NonFiniteError: A parameter is not finite, so nothing was saved.

    Example::

        Checkpoint("runs/a", save=every(updates=100), best="val/loss", resume="auto")
    """

    provides = "checkpoint"
    shared = False  # its directory is that of one run
    per_process = ("directory",)
    optional = ("step_end",)
    syncs = ("step_end", "phase_end")
    """Saving reads the parameters."""
    everywhere = False
    """Whether each process saves a part of its own: all of them `write`, and sharded tensors are not gathered."""
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
        _intervals(save)
        check_count("Checkpoint: keep", keep)
        if not isinstance(options, SaveOptions):
            raise PluginError(f"Checkpoint: options is {options!r}: give options=SaveOptions(background=True)")
        _check_best(best, mode, options)
        _check_data(data)
        self.data: Literal["stop", "warn"] = data
        self.resume = _resolved(resume)
        if overwrite and resume is not None:
            raise PluginError(f"Checkpoint: overwrite=True removes what resume={resume!r} needs: give one of them")
        if weights_only and (resume is not None or self.everywhere):
            by = type(self).__name__ if resume is None else f"resume={resume!r}"
            raise PluginError(
                f"Checkpoint: weights_only=True saves nothing that {by} could go on from: give one of them; two "
                f"Checkpoints with a directory and a name each do both"
            )
        self.name = name
        self.place = Place(directory, options.lock_after)
        """The directory, with its lock."""
        self.save, self._keep, self._options = save, keep, options
        self.mode = checked_mode("Checkpoint", mode)
        self._direction: Mode = self.mode or "min"
        self._overwrite, self.weights_only = overwrite, weights_only
        self.monitor = best
        self._snapshot = Snapshot() if options.background else None
        self._writer = Writer()
        self._failures = Failures(options.retries)
        self._remover = storage.Remover()
        self._begun = False
        """A fit has begun with this plugin: the checkpoints that are there are its own."""
        self._tried = 0
        """Dry runs that were made in this fit: one before the first step, and one after it."""
        self._next_updates, self._next_time = math.inf, math.inf
        """When the next save is due."""
        self._saved_at: tuple[Any, ...] | None = None
        self._versions = 0
        """The sum of the versions of the models' tensors at the last save."""
        self._stands_in = ""
        """The plugin whose weights stood in the place of the models' own when the metric was measured last."""
        self._measured = False
        """The monitored phase has run, and its value was not looked at yet."""
        self._source: Path | None = None
        """The checkpoint that ``resume`` named."""
        self._damaged: set[Path] = set()
        """Checkpoints that were found damaged: they neither count nor are they removed."""
        self._failure: BaseException | None = None
        """The error that was seen last."""
        self._made: Record = {}
        """The parts that the run is made of."""
        self._changed = ""
        """The differences from the saved run, in words, until they are logged."""

    def owns(self) -> tuple[str, ...]:
        """The directory, and the right to load a state."""
        return (f"checkpoints in {self.directory}", *(() if self.resume is None else ("checkpoint.resume",)))

    def options(self) -> dict[str, Any]:
        """Return the options that it was made with."""
        kept = {"directory": self.directory, "resume": self.resume, "name": self.name, "mode": self.mode}
        rules = {"save": self.save, "keep": self._keep, "best": self.monitor, "options": self._options}
        return {**kept, **rules, "overwrite": self._overwrite, "weights_only": self.weights_only, "data": self.data}

    @property
    def _every(self) -> tuple[Every, ...]:
        """The intervals at which a save is due."""
        return _intervals(self.save)

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self.place.directory

    @property
    def memory(self) -> int:
        """Bytes of main memory that background writing holds during a fit: one copy of the state."""
        return 0 if self._snapshot is None else self._snapshot.nbytes

    @hookimpl(writes=("*",))  # and so, turned round, last in fit_end
    def fit_begin(self, learner: Learner) -> None:
        """Take the directory, see that it can be written, and resume."""
        self._writer.join()  # an interrupt may have kept an earlier fit from this
        self.place.release()
        if self.monitor is not None:
            self._direction = direction(self, learner.plugins.values())
        try:
            self._start(learner)
        except BaseException:
            self.place.release()
            raise
        self._begun, self._tried, self._failure = True, 0, None
        self._saved_at = self._here(learner)
        self._versions = _versions(learner)
        self._plan_next(learner)

    @hookimpl(reads=("*",))
    def epoch_context(self, learner: Learner, epoch: Epoch) -> Any:
        """Save what an error between two steps, or in a validation, interrupts."""
        return self._guard(learner, epoch)

    @hookimpl(reads=("*",))
    def epoch_begin(self, learner: Learner, epoch: Epoch) -> None:
        """Before the first step, see that everything can be saved; in a loop of the user's own, save the last epoch."""
        fit = learner.current
        if fit is None or not fit.can_save:
            return
        at = fit.position
        if epoch.resumed:
            self._tried = self._tried or 1  # its loader is not where it was yet
        elif not self._tried and not _is_lazy(learner):
            self._try(learner)
        elif not at.by_fit and at.epochs and not at.done and len(fit.open_epochs) == 1:
            if learner.world.share(self._is_epoch_due(learner)):
                self._save(learner, "epoch")  # only now is it known that the round of an own loop is complete

    @hookimpl(reads=("*",))
    def step_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Save if it is due."""
        fit, together = learner.current, learner.world.size > 1
        can_save = phase.training and fit is not None and fit.can_save
        waits = together and epoch.window_open  # a window is not saved where others train, too
        if self._changed:  # in fit_begin the logs take it for what they hold already
            learner.log("changed", Text(self._changed))
            self._changed = ""
        if self._tried == 1 and can_save and not waits:
            self._try(learner)  # what optimizers hold is made in the first update
        if not self.everywhere:  # else all processes raise what went wrong at their next save
            self._check_writer()
        if fit is None or not can_save:
            return
        due = learner.progress.updates >= self._next_updates
        late = time.monotonic() >= self._next_time
        if together:
            if due and learner.world.in_step and not waits:
                self._save(learner, "interval")
            elif (late or (due and not learner.world.in_step)) and learner.world.rank == 0:
                self._next_time = math.inf
                fit.request_save()  # all save when they next agree
        elif (due or late) and not self._writer.busy:
            self._save(learner, "interval")
        elif due or late:
            self._look_at_pace(learner)

    @hookimpl(reads=("*",))
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Take what stands in the weights' place while the metric is measured."""
        if self._is_monitored(phase) and learner.current is not None and not (self.everywhere and _is_sharded(learner)):
            if _may_stand_in(learner):
                learner.models.take_measured(phase.name)
                self._stands_in = learner.models.weights.by

    def _is_monitored(self, phase: Phase) -> bool:
        return self.monitor is not None and phase.name == self.monitor.partition("/")[0]

    def _settle_measured(self, learner: Learner, phase: Phase) -> None:
        """Drop what was measured, if it is no other thing than the models' own weights."""
        measured = learner.models.measured
        if measured.holds(phase.name):
            differs = learner.world.highest(float(measured.differs(phase.name)))[0]
            if not differs:
                measured.drop(phase.name)

    @hookimpl(reads=lambda plugin: ("*",) if plugin.monitor is None else ("*", f"metrics.{plugin.monitor}"))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Save if an epoch is complete, or the metric is among the best."""
        if (fit := learner.current) is None:
            return
        if self._is_monitored(phase):
            self._measured = True
            self._settle_measured(learner, phase)
        if not fit.can_save:  # the epoch of a hook: what it measured counts when that hook is over
            return
        if not self.everywhere:
            self._check_writer()
        value, self._measured = self._value(learner) if self._measured else None, False
        complete = not fit.open_epochs and fit.position.by_fit and not fit.position.validate
        due = complete and self._is_epoch_due(learner)
        due, best = learner.world.share((due, not due and self._is_best(value)))
        if due or best:
            self._save(learner, "epoch" if due else "best", value)
        if self._is_monitored(phase):
            learner.models.measured.drop(phase.name)

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
            if self._snapshot is not None:
                stack.callback(self._snapshot.clear)
            stack.callback(self._rotate, self._remover.close)
            self._writer.join()
            if self._options.at_end and result.reason not in ("error", "signal"):
                logged = any(getattr(plugin, "unsaved", False) for plugin in learner.plugins.values())
                moved = self._versions != _versions(learner)  # such as by the best weights, which were put back
                if learner.world.share(logged or moved or self._saved_at != self._here(learner)):
                    self._save(learner, "end", now=True)
            self._writer.wait()
        if result.reason in ("pause", "signal") and not any(map(_saves_run, learner.plugins.values())):
            warn("no run goes on from Checkpoint(weights_only=True): add one with resume='auto' and another directory")

    def contents(self, learner: Learner, state: dict[str, Any]) -> Contents:
        """A state as files; all processes call it."""
        return Contents.of(learner, state)

    def write(self, contents: Contents, about: dict[str, Any], label: str) -> Manifest | None:
        """Write a checkpoint, in a thread of its own if ``background``; None in a process that does not know of it."""
        self.place.keep()
        return storage.write(self.directory, contents.files(), about, label=label, there=self.place.note, kept=(ONCE,))

    def read(self, learner: Learner, manifest: Manifest) -> dict[str, Any]:
        """Read and verify a state, or this process's part of it."""
        return read_state(manifest)

    @contextmanager
    def _guard(self, learner: Learner, epoch: Epoch) -> Iterator[None]:
        fit, alone = learner.current, learner.world.size == 1  # else the others had to take part
        saves = self._options.on_error and fit is not None and alone
        mark = epoch.mark() if saves and self._tried else None
        try:
            yield
        except Exception as error:
            new, self._failure = error is not self._failure, error
            here = new and fit is not None and fit.can_save and (epoch.steps > 0 or mark is None)
            if saves and self._tried and (here or mark is not None) and self._saved_at != self._here(learner):
                try:
                    self._save(learner, "error", now=True, at=None if here else mark)
                except Exception as second:
                    error.add_note(f"plugin {self.name!r}: nothing was saved at this error: {second}")
            raise

    def _start(self, learner: Learner) -> None:
        """Take the directory; go on from a checkpoint if that was asked for, in all processes from the same one."""
        self._made = made(learner)
        held = False
        while True:
            chosen = refusal = None
            if learner.world.rank == 0:
                try:
                    if not held:
                        self.place.take()
                        held = True
                    if self._begun:
                        self.place.refuse_taken()
                    else:
                        chosen = self._choose(learner)
                except Exception as error:
                    refusal = error
            about = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
            path, why = learner.world.share((None if chosen is None else str(chosen[0].path), about))
            if refusal is not None:
                raise refusal
            if why is not None:
                raise CheckpointError(f"rank 0 could not begin: {why}")
            if path is None:
                return
            own = self.resume if isinstance(self.resume, Path) else Path(path)  # each may have a disk of its own
            if self.everywhere:
                chosen = self._read_together(learner, own, chosen)
            else:
                chosen = chosen or self._read(learner, own)
            if chosen is not None:
                break
        manifest, state = chosen
        self._load(learner, manifest, state)
        if learner.world.rank == 0:
            self.place.claim()

    def _read_together(self, learner: Learner, path: Path, read: Chosen | None) -> Chosen | None:
        """Return each process's part of a checkpoint; None if one of them found its part damaged."""
        problem = None
        try:
            read = read or self._read(learner, path)
        except CheckpointError as error:
            problem = str(error), isinstance(error, CorruptCheckpointError)
        if (problem := next(filter(None, learner.world.gather(problem)), None)) is None:
            return read
        text, damaged = problem
        if isinstance(self.resume, Path) or not damaged:
            raise (CorruptCheckpointError if damaged else CheckpointError)(text)
        self._damaged.add(path)
        if learner.world.rank == 0:
            warn(f"{text} ({path} is passed over)")
        return None

    def _choose(self, learner: Learner) -> Chosen | None:
        found = storage.listing(self.directory)
        if self.resume is None:
            if self._overwrite and (found or found.problems):
                self._make_room(found)
            else:
                self.place.refuse_others(found)
            return None
        if isinstance(self.resume, Path):
            if self.resume.parent != self.directory:
                self.place.refuse_others(found)
            chosen = self._read(learner, self.resume)
            self._source = chosen[0].path
            return chosen
        if (newest := self._newest(learner, found)) is not None:
            manifest, state = newest
            fit, number = state.get("fit"), 1 if learner.current is None else learner.current.position.number
            if isinstance(fit, dict) and fit.get("number", number) != number:
                raise StateError(
                    f"{manifest.path} was saved in fit {fit['number']!r:.20} of its learner, and this is fit {number}: "
                    f"give each fit of a script a Checkpoint with a directory of its own (learner.replace); to go on "
                    f"with that fit alone, resume='{manifest.path}'"
                )
        elif self.resume is True:
            raise CheckpointError(f"{self.directory} holds no checkpoint: give resume='auto' to begin a run there")
        else:
            say(f"no checkpoint in {self.directory}: starting a new run")
        return newest

    def _read(self, learner: Learner, path: Path) -> Chosen:
        manifest = storage.read_manifest(path)
        return manifest, self.read(learner, manifest)

    def _make_room(self, found: Listing) -> None:
        """Remove the checkpoints of an earlier run, if nothing else is there."""
        known = {manifest.path.name for manifest in found}
        names = sorted(set(disk.names(self.directory)) - known)
        if others := [name for name in names if not LOGGED.fullmatch(name)]:
            raise CheckpointError(
                f"Checkpoint: overwrite=True, and {self.directory} holds more than checkpoints and logs: "
                f"{', '.join(map(repr, others))[:300]}. Nothing was removed: remove it, or give another directory"
            )
        storage.remove(manifest.path for manifest in found)
        count = "a checkpoint" if len(known) == 1 else f"{len(known)} checkpoints"
        say(f"removed {count} of an earlier run in {self.directory}: {', '.join(sorted(known))}")

    def _newest(self, learner: Learner, found: Listing) -> Chosen | None:
        """The newest checkpoint that can be read, with a warning about damaged newer ones."""
        for path, error in found.problems.items():
            if isinstance(error, FormatVersionError):
                raise error
            warn(f"{error} ({path} is passed over)")
        for manifest in found:
            if manifest.path in self._damaged:
                continue
            try:
                return manifest, self.read(learner, manifest)
            except CorruptCheckpointError as error:
                self._damaged.add(manifest.path)
                warn(f"{error} ({manifest.path} is passed over)")
        if found or found.problems:
            raise CorruptCheckpointError(f"{self.directory} holds no checkpoint that can be read: see the warnings")
        return None

    def _load(self, learner: Learner, manifest: Manifest, state: dict[str, Any]) -> None:
        options = self._options
        restore(learner, manifest, state, allow=options.allow, replay=options.replay, data=self.data)
        versions = manifest.about.get("versions")
        saved = versions.get("torch") if isinstance(versions, dict) else None, manifest.about.get("threads")
        here = torch.__version__, torch.get_num_threads()
        changed = [
            f"{what}: {a} then, {b} now" for what, a, b in zip(("torch", "threads"), saved, here, strict=True) if a != b
        ]
        doubt = f"; it may differ in the last bits ({', '.join(changed)})" if changed else ""
        counts = learner.progress
        if learner.world.rank == 0:
            epochs = f"{counts.epochs} epoch{'s' * (counts.epochs != 1)}"
            say(f"resumed {manifest.path} after {epochs} and {counts.steps:,} steps{doubt}")
        saved = state.get("made", self._made)
        left = [name for name in state["plugins"] if "made" in state and name not in learner.plugins]
        if found := changes(saved, self._made, left):
            self._changed = f"changed since step {counts.steps}: {found}"
            if learner.world.rank == 0:
                say(self._changed)
        self._made.update({what: then for what, then in saved.items() if what.startswith(OPTIMIZER)})  # it was loaded

    def _is_epoch_due(self, learner: Learner) -> bool:
        due = any(each.epochs is not None and learner.progress.epochs % each.epochs == 0 for each in self._every)
        return due and self._saved_at != self._here(learner)

    def _plan_next(self, learner: Learner) -> None:
        done, counts = learner.progress.updates, [each.updates for each in self._every if each.updates is not None]
        self._next_updates = min(((done // count + 1) * count for count in counts), default=math.inf)
        self._next_time = time.monotonic() + min(each.seconds for each in self._every)

    @staticmethod
    def _here(learner: Learner) -> tuple[Any, ...]:
        fit, counts = learner.current, learner.progress
        return counts.epochs, counts.steps, counts.updates, fit is not None and fit.position.validate

    def _try(self, learner: Learner) -> None:
        self._taken(learner, learner.state_dict(whole=not self.everywhere)).files()
        self._tried += 1

    def _taken(self, learner: Learner, state: dict[str, Any]) -> Contents:
        if not self.weights_only:
            return self.contents(learner, state)
        measured = None if self._stands_in in _averages(learner) else state.get("weights")
        return Contents.weights(learner, state["models"], measured, state.get(LEFT_OUT, {}))

    def _where_measured(self, learner: Learner, state: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest's entry for the weights of the measured metric, if they are not the models' own."""
        if not state.get("weights"):
            return {}
        word = f"weights.{next(iter(state['weights']))}"
        if self.weights_only and self._stands_in in _averages(learner):
            word = self._stands_in
        return {"measured": {"file": word, "by": self._stands_in}}

    def _save(
        self, learner: Learner, reason: str, value: float | None = None, now: bool = False, at: EpochStart | None = None
    ) -> None:
        if _is_lazy(learner):
            return
        self._writer.join()
        if not now:
            self._check_writer()
        _settle(learner)
        _check_finite(learner)
        self._versions = _versions(learner)
        state = {**learner.state_dict(at, whole=not self.everywhere), "made": self._made}
        contents = self._taken(learner, state)
        measured = self._where_measured(learner, state)
        if learner.world.rank > 0 and not self.everywhere:
            self._saved_at = self._here(learner)
            self._plan_next(learner)
            return
        about = describe(learner, contents, reason, state["metrics"], monitored=self._monitored(value), **measured)
        write = partial(self._write, contents, about, self._here(learner))
        if self._snapshot is None or now:
            self._write_here(write, now)
            if (earlier := self._writer.forgive()) is not None:
                warn(f"an earlier write failed, and this one did not: {earlier}")
        else:
            self._snapshot.take(contents)
            self._writer.start(write)
        self._plan_next(learner)

    def _write_here(self, write: Callable[[], None], now: bool) -> None:
        """Write in this thread; a write that fails is made again at once if there may be no next save."""
        while True:
            try:
                return write()
            except Exception as error:
                self._bear(error)
                if not now:
                    return None

    def _check_writer(self) -> None:
        """Look at what a write in the background came to."""
        if (error := self._writer.forgive()) is not None:
            self._bear(error)

    def _bear(self, error: BaseException) -> None:
        """Warn of a write that has failed, or raise its error."""
        if self.everywhere:  # the others could not know
            raise error
        self._failures.bear(error)

    def _look_at_pace(self, learner: Learner) -> None:
        """Warn if a save has been due for a whole interval, and the one before is still being written."""
        counts = [each.updates for each in self._every if each.updates is not None]
        behind = bool(counts) and learner.progress.updates >= self._next_updates + min(counts)
        if behind or time.monotonic() >= self._next_time + min(each.seconds for each in self._every):
            self._writer.warn_of_pace(f"{self.save!r} in {self.directory}")

    def _write(self, contents: Contents, about: dict[str, Any], here: tuple[Any, ...]) -> None:
        """Write and rotate; in a thread of its own if ``background``."""
        if self._snapshot is not None:
            self._snapshot.wait()
        written = self.write(contents, about, f"step-{about['progress']['steps']}")
        self._saved_at = here
        self._failures.forget()
        if written is not None:
            self._rotate(partial(self._remover.remove, self._surplus(self._found())))

    def _surplus(self, found: Listing) -> list[Path]:
        """Which checkpoints go; only this decides what is kept: the newest, the best, and the one that was resumed."""
        best = [manifest.path for _, manifest in self._ranked(found)[: self._options.keep_best]]
        return storage.keep(found, self._keep, {*best, *filter(None, [self._source])})

    def _found(self) -> Listing:
        """The checkpoints that are there, without the damaged ones."""
        found = storage.listing(self.directory)
        return Listing([manifest for manifest in found if manifest.path not in self._damaged], found.problems)

    @staticmethod
    def _rotate(act: Callable[[], None]) -> None:
        """An old checkpoint that cannot be removed is no reason to end the run; the next save tries again."""
        try:
            act()
        except CheckpointError as error:
            warn(str(error))

    def _monitored(self, value: float | None) -> dict[str, float | str] | None:
        if self.monitor is None or value is None:
            return None
        return {"metric": self.monitor, "mode": self._direction, "value": number(value)}

    def _value(self, learner: Learner) -> float:
        assert self.monitor is not None
        if (value := learner.metrics.get(self.monitor)) is None:
            known = list(learner.metrics)
            raise PluginError(
                f"plugin {self.name!r}: there is no metric {self.monitor!r}{nearest(self.monitor, known)}; there are: "
                f"{', '.join(known) or 'none'}"
            )
        return float(value)

    def _is_best(self, value: float | None) -> bool:
        if value is None or math.isnan(value):
            return False
        ranked, count = self._ranked(self._found()), self._options.keep_best
        return len(ranked) < count or self._key(value) < ranked[count - 1][0]

    def _ranked(self, found: Listing) -> list[tuple[float, Manifest]]:
        """Return the checkpoints with a value of the metric, best first, the older first among equals."""
        values = [(manifest, monitored(manifest)) for manifest in reversed(found)]
        ranked = [(self._key(value[2]), manifest) for manifest, value in values if value and value[0] == self.monitor]
        return sorted((item for item in ranked if not math.isnan(item[0])), key=lambda item: item[0])

    def _key(self, value: float) -> float:
        return value if self._direction == "min" else -value


def _check_best(best: Any, mode: Mode | None, options: SaveOptions) -> None:
    """Raise for a metric that is none, and for options that need one."""
    if best is not None and not (isinstance(best, str) and all(best.partition("/"))):
        raise PluginError(f"Checkpoint: best is {best!r}: it is '<phase>/<metric>', such as 'val/loss'")
    if best is None and (mode is not None or options.keep_best > 1):
        given = f"mode is {mode!r}" if mode is not None else f"options.keep_best is {options.keep_best}"
        raise PluginError(
            f"Checkpoint: {given}, and no metric says which checkpoints are the best, so it would have no effect: "
            f"give best='val/loss', or leave it out"
        )


def _check_data(data: Any) -> None:
    """Raise for a word that is not known."""
    if data not in WORDS:
        raise PluginError(f"Checkpoint: data is {data!r}: it is 'stop' or 'warn'{nearest(str(data), WORDS)}")


def _resolved(resume: str | Path | bool | None) -> str | Path | bool | None:
    """Return a path as an absolute one, and another value as it is."""
    if isinstance(resume, str) and resume.lower() == "auto" and resume != "auto":
        raise PluginError(f"Checkpoint: resume is {resume!r}: did you mean 'auto'?")
    if not isinstance(resume, (str, Path)) or resume == "auto":
        return resume
    path = Path(resume).absolute()
    return disk.resolved(path.parent) / path.name  # a link to a checkpoint is not followed


def _intervals(save: Any) -> tuple[Every, ...]:
    """Return the intervals between saves."""
    given = (save,) if isinstance(save, Every) else tuple(save) if isinstance(save, (list, tuple)) else ()
    if not given or not all(isinstance(each, Every) for each in given):
        raise PluginError(f"Checkpoint: save is {save!r}: give every(epochs=1), every(updates=100), or a list of such")
    if early := [each for each in given if each.first]:
        raise PluginError(
            f"Checkpoint: save is {early[0]!r}: before the first update nothing is trained; leave out first"
        )
    return given


def _averages(learner: Learner) -> list[str]:
    """The plugins of which `Contents.weights` writes a file."""
    return [name for name, plugin in learner.plugins.items() if provided(plugin) == "average"]


def _is_sharded(learner: Learner) -> bool:
    return any(sharded.is_sharded(p) for model in learner.models.with_extras().values() for p in model.parameters())


def _is_lazy(learner: Learner) -> bool:
    """Whether a model has parameters without a shape: no batch went through it, so that there is nothing to save."""
    return any(is_lazy(p) for model in learner.models.with_extras().values() for p in model.parameters())


def _may_stand_in(learner: Learner) -> bool:
    """Whether other values than the models' own may be in their parameters now, in an epoch that does not train."""
    if learner.models.weights.by:
        return True
    if any(
        callable(getattr(o, "eval", None)) and callable(getattr(o, "train", None)) for o in learner.optimizers.values()
    ):
        return True
    return any(_puts_params(unwrapped(plugin)) for plugin in learner.plugins.values())


def _puts_params(plugin: Any) -> bool:
    """Whether a plugin changes parameters for the time of an epoch, by what it declares."""
    if "epoch_context" not in implemented(plugin):
        return False
    return bool(hook_states(plugin, "epoch_context", "updates", "writes") & {"params", "weights"})


def _versions(learner: Learner) -> int:
    """A number that changes with any change in place of parameters and buffers."""
    tensors = (t for model in learner.models.with_extras().values() for t in (*model.parameters(), *model.buffers()))
    return sum(tensor._version for tensor in tensors if not is_lazy(tensor) and not tensor.is_inference())


def _settle(learner: Learner) -> None:
    """Let plugins look at the numbers that they have not read yet."""
    for plugin in learner.plugins.values():
        if (settle := getattr(plugin, "settle", None)) is not None:
            settle(learner)


def _check_finite(learner: Learner) -> None:
    """Refuse to save parameters that are not finite; of sharded ones, in all processes or in none."""
    bad = _not_finite(learner)
    if _is_sharded(learner):
        bad = next(filter(None, learner.world.gather(bad)), "")
    if bad:
        raise NonFiniteError(
            f"parameter {bad} is not finite at step {learner.progress.steps}: nothing was saved, the checkpoints "
            f"before it stand. StopOnNonFinite(gradients=True) finds the first cause"
        )


def _not_finite(learner: Learner) -> str:
    """The first parameter here that is not finite."""
    for model, module in learner.models.with_extras().items():
        held = [(name, sharded.part(p)) for name, p in module.named_parameters()]
        named = [(name, p) for name, p in held if p.is_floating_point() and p.numel()]
        for device in {p.device for _, p in named}:
            here = [(name, p) for name, p in named if p.device == device]
            norms = torch.stack(
                [n.to(devices.exact(device)) for n in torch._foreach_norm([p.detach() for _, p in here], math.inf)]
            )
            finite = torch.isfinite(norms).tolist()  # host sync: a save is one anyway
            if not all(finite):
                owner = f"model {model!r}" if model in learner.models else f"the {model}"
                return f"{here[finite.index(False)][0]!r} of {owner}"
    return ""


def _saves_run(plugin: Any) -> bool:
    """Whether a plugin saves, after a signal, what a run can go on from."""
    return hasattr(plugin, SignalBegin.hook) and not (isinstance(plugin, Checkpoint) and plugin.weights_only)
