"""Fit: one running fit, from ``fit_begin`` to ``fit_end``; the loop in between is `FitLoop`'s, or `UserLoop`'s."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from loopkit.base.notes import say, warn
from loopkit.base.shield import Shield
from loopkit.engine.kept.position import Position
from loopkit.engine.life.brackets import Brackets
from loopkit.engine.life.limits import Limits, Terms
from loopkit.engine.life.requests import ExitRequest, Interrupted, Requests, Stop
from loopkit.engine.life.signals import Signals, interruption
from loopkit.engine.life.sources import Source
from loopkit.engine.life.surroundings import Surroundings
from loopkit.engine.life.validations import Validation
from loopkit.errors import CancelFit, PhaseError, ReentrancyError
from loopkit.events import CycleEnd
from loopkit.logs.record import Packed
from loopkit.result import FitResult

if TYPE_CHECKING:
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.kept.left_open import LeftOpen
    from loopkit.engine.kept.repeated import Repeated
    from loopkit.engine.kept.resume import Resume
    from loopkit.engine.life.answers import Answers
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.epochs import Epochs
    from loopkit.engine.life.preparation import Preparation
    from loopkit.engine.life.running import Running
    from loopkit.phases import Phase

OUT_OF_TIME = "(out of time)"
"""The name by which rank 0 lets the other processes know that the minutes of the fit are over; no phase has it."""
SKIPS = 1_000
"""Updates in a row that are skipped before a fit that ends by updates only raises."""
PAUSED = 75
"""The exit code of a process that was paused (EX_TEMPFAIL): start it again."""


@dataclass(frozen=True)
class FitParts:
    """The parts of the engine that every fit works with."""

    running: Running
    requests: Requests
    registry: Registry
    epochs: Epochs
    answers: Answers
    resume: Resume
    left_open: LeftOpen
    preparation: Preparation
    repeated: Repeated
    metrics: dict[str, float]


class Fit:
    """One fit that is running, whoever runs its loop; `Learner.current` is it.

    Args:
        parts: The parts of the engine that fits work with.
        terms: Its arguments, beside its data.
        runs: The phases that it runs by itself; none in a loop of the user's.
    """

    def __init__(self, parts: FitParts, terms: Terms, runs: Sequence[Phase] = ()) -> None:
        running = parts.running
        requests = parts.requests
        self.limits = terms.limits
        self.result = FitResult(seed=torch.initial_seed(), planned=terms.planned)
        """The result; complete in ``fit_end``."""
        self.failure: BaseException | None = None
        """The error, during ``fit_end``."""
        self.beginning = self.ending = False
        """Whether its ``fit_begin``, its ``fit_end`` is running."""
        self._resumed = False
        self.times_asked = 0
        """How often `resumed` was read."""
        self.depth = len(running.epochs)
        """How many epochs were open around it when it began."""
        self._around = Surroundings(running.hooks)
        self.cancelled: CancelFit | None = None
        """The signal that ends it before its next epoch."""
        self.position = Position(replace(running.progress))
        """Where it is."""
        self.timeout = terms.timeout
        self.over = False
        """Whether its ``fit_end`` has come."""
        self._parts = parts
        self._progress = running.progress
        self._runs = runs
        self.raises = terms.on_interrupt != "return"
        """Whether a signal or a pause ends the process, by an exception after its ``fit_end``."""
        self._signals = Signals(requests.catch, lambda: not running.can_save) if terms.on_interrupt else None
        self._started = time.monotonic()
        self.validations: dict[str, Validation] = {}
        """By phase, in the order in which they are run; none in a loop of the user's."""
        self.brackets = Brackets(parts.registry, partial(parts.repeated.of_fit, self))
        """The plugins whose ``fit_begin`` and ``fit_end`` it calls."""
        self._skips = 0
        """Updates in a row that were skipped."""
        self._skipped_at = -1
        """How many updates there were at the last of them."""
        self._ran: dict[str, Phase] = {}
        """In a loop of the user's: the phases that were run."""

    def __repr__(self) -> str:
        return f"Fit(epochs={self.limits.epochs}, progress={self._progress})"

    # What plugins look at

    @property
    def resumed(self) -> bool:
        """Whether it resumes a fit that was saved, or interrupted in this process."""
        self.times_asked += 1
        return self._resumed

    @property
    def open_epochs(self) -> list[Epoch]:
        """The epochs of it that are open, the outermost first."""
        return self._parts.running.open_epochs

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that is open, the innermost one if a phase runs inside another."""
        return next(reversed(self._parts.running.open_epochs), None)

    @property
    def has_cycles(self) -> bool:
        """Whether ``cycle_end`` fires: in ``fit``, and in your own loop if it iterates over rounds."""
        return self.position.by_fit

    @property
    def ends_cycle(self) -> bool:
        """Whether ``cycle_end`` comes next: a training epoch of ``fit`` and the validations due after it are over."""
        at = self.position
        return at.cycle and not at.due and not self.open_epochs

    @property
    def can_save(self) -> bool:
        """Whether the state can be saved now: no step is under way, nor an epoch that a hook has begun."""
        return self._parts.running.can_save

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that was caught, during ``signal_begin``."""
        return self._parts.requests.signal

    @property
    def resuming(self) -> str:
        """The phase whose epoch was open in a state that was loaded, until it is resumed; else an empty string."""
        return next(iter(self._parts.left_open.waiting), "")

    @property
    def missing_states(self) -> dict[str, str]:
        """By phase and optimizer: the changes since the fit began that are in no state, in words."""
        return self._parts.preparation.missing()

    def request_save(self) -> None:
        """Ask that the state is saved between two steps, as SIGUSR1 does: ``signal_begin`` fires there."""
        self._parts.requests.save()

    def pack_log(self, plugin: Any, packed: list[Packed] | None) -> None:
        """Let what is logged be appended to a list, which is the cheapest way to keep it.

        Args:
            plugin: One of the plugins; its ``log_value`` is not called any more.
            packed: The list, which the plugin has to empty in time, of the values of each call (`Packed`); None: the
                plugin is called again.
        """
        self._parts.registry.pack(plugin, packed)

    @property
    def seconds(self) -> float:
        """How long it has run, before it was saved and since."""
        return self.position.seconds + time.monotonic() - self._started

    @property
    def stopped(self) -> bool:
        """Whether a stop is in force."""
        return self._parts.requests.stopped is not None

    def saved(self) -> dict[str, Any]:
        """The saved form of the fit."""
        stop = self._parts.requests.stopped
        reason = self.result.reason
        over = reason in ("epochs", "max_steps", "max_updates", "minutes", "stop")
        keeps = stop if over or reason == "running" else None
        at = replace(self.position, ended=reason if over else "", limits=self.limits.saved())
        return at.saved(self.seconds, keeps)

    # Its begin

    def begin(self) -> None:
        """Fire ``fit_begin``; if that fails, the fit is over.

        Raises:
            ReentrancyError: Another fit is running.
            PluginError: A plugin is never called, or reads a metric that is never made.
        """
        if self._parts.running.fit is not None:
            raise ReentrancyError("a fit is running: call run, evaluate or predict from a hook, not fit")
        preparation = self._parts.preparation
        noted = preparation.noted
        try:
            self._parts.running.enter(self)
            self._begin()
        except BaseException as error:
            self.beginning = False
            if not noted:
                preparation.forget()
            self.end(error)
            raise
        self.beginning = False

    def _begin(self) -> None:
        parts = self._parts
        signals = self._signals
        parts.requests.begin(signals)
        if signals is not None:
            signals.install()
            if not signals.reaches:
                parts.preparation.say_once(
                    "this fit runs off the main thread, where Python handles no signals: SIGINT, SIGTERM and SIGUSR1 "
                    "neither end nor save it; call learner.pause() or learner.stop() where they arrive"
                )
        parts.preparation.begin()
        self._find_position()
        self.beginning = True
        parts.preparation.check(self._runs)
        if parts.registry.brackets:
            with parts.running.hook():
                self.begin_plugins()
        if parts.requests.world.size > 1:
            self._agree_to_begin()
        parts.preparation.watch()

    def _find_position(self) -> None:
        """Resume where a saved state or an interrupt left the learner's last fit, or begin a new one."""
        parts = self._parts
        dropped = parts.resume.drop_held(self._is_behind)
        loaded, goes_on = parts.resume.begin()
        if loaded is None:
            self.position = Position(replace(self._progress), parts.resume.fits, bool(self._runs))
        else:
            self._go_on(loaded)
        if not self._resumed:
            parts.metrics.clear()
        if dropped is not None:
            _say_dropped(dropped.epochs, self._progress.steps, self.limits)
        if goes_on:
            say(
                f"the fit resumes where it was interrupted, after {self._progress.epochs} complete epochs and "
                f"{self._progress.steps:,} steps (learner.forget() would begin a new one)"
            )
        if (left := parts.resume.unfinished) and not self._resumed:
            say(f"{left}; this is a new fit, which begins that epoch anew")
        if left:
            parts.resume.leave_unfinished("")

    def _is_behind(self, at: Position) -> bool:
        """Whether the limits differ from the limits of an interrupted fit, and it has reached one of them already."""
        return at.limits != self.limits.saved() and bool(self._limit_reached(at))

    def go_on(self) -> None:
        """Resume from the position that was loaded, with the limits of this fit."""
        if (position := self._parts.resume.take_position()) is not None:
            self._go_on(position)

    def _go_on(self, at: Position) -> None:
        self._resumed = at.epochs > 0 or at.start != self._progress
        reopened = bool(at.limits) and self.limits.raised_from(at.limits)
        stop = None if at.stop is None or reopened else Stop(*at.stop)
        if stop is not None:
            self._parts.requests.resume(stop)
        ended = "" if reopened else at.ended
        by_fit = at.by_fit or bool(self._runs)
        self.position = replace(at, stop=None, ended=ended, by_fit=by_fit)

    def begin_plugins(self, names: Collection[str] | None = None) -> None:
        """Fire the ``fit_begin`` of these plugins, or of all."""
        cancel = self.brackets.begin(names)
        self.cancelled = self.cancelled or cancel

    def _agree_to_begin(self) -> None:
        """Apply a cancel that one process raised in ``fit_begin`` to all processes."""
        parts = self._parts
        agreed, _ = parts.requests.agree(self._progress.updates, self.cancelled, ())
        if isinstance(agreed, CancelFit):
            self.cancelled = agreed

    # Between its begin and its end

    def turn(self, phase: Phase, source: Source | None, length: int | None) -> Epoch:
        """An epoch that does not come from its own loop."""
        return self._parts.epochs.make(phase, source, length)

    def fire_cycle_end(self) -> None:
        """Fire ``cycle_end``, in which a cancel is a stop."""
        parts = self._parts
        for impl in parts.registry.ordered(CycleEnd.hook):
            try:
                with parts.running.hook():
                    parts.registry.call(impl)
            except CancelFit as cancel:
                parts.requests.stop(cancel.reason, cancel.by or impl.entry.plugin)

    def reason_to_end(self) -> str:
        """Why it is over, as `FitResult.reason`; an empty string if it is not."""
        if self._parts.requests.stopped is not None:
            return "stop"
        return self.position.ended or self._limit_reached(self.position)

    def _limit_reached(self, at: Position) -> str:
        """The limit that a fit at this position has reached."""
        limits = self.limits
        progress = self._progress
        if limits.max_steps is not None and progress.steps - at.start.steps >= limits.max_steps:
            return "max_steps"
        if limits.max_updates is not None and progress.updates - at.start.updates >= limits.max_updates:
            return "max_updates"
        if limits.minutes is not None and self.is_time(OUT_OF_TIME, limits.seconds):
            return "minutes"
        return "epochs" if limits.epochs is not None and at.epochs >= limits.epochs else ""

    def is_time(self, word: str, seconds: float) -> bool:
        """Whether it has run for so many seconds. Rank 0's clock decides; the others hear of it when they next agree.

        Args:
            word: The due action, by its word: the phase of a validation, or `OUT_OF_TIME`.
            seconds: Counted as `seconds` is.
        """
        requests = self._parts.requests
        late = self._parts.requests.world.rank == 0 and self.seconds >= seconds
        if not requests.together:
            return late
        if late and word not in requests.validations:
            requests.validate(word)
        return word in requests.validations

    def count_skip(self, reason: str) -> None:
        """Count an update that was skipped.

        Raises:
            PhaseError: So many in a row were, and no other limit ends the fit: it would never end.
        """
        updates = self._progress.updates
        self._skips = self._skips + 1 if updates == self._skipped_at else 1
        self._skipped_at = updates
        if self._skips >= SKIPS and self.ends_by_updates:
            raise PhaseError(
                f"{SKIPS:,} updates in a row were skipped ({reason}), and the fit ends by max_updates only: it would "
                f"never end. Give epochs= or max_steps=, or look at what skips the updates"
            )

    @property
    def ends_by_updates(self) -> bool:
        """Whether a number of updates is all that ends it."""
        limits = self.limits.saved()
        return [name for name, limit in limits.items() if limit] == ["max_updates"]

    # Its end

    def end(self, error: BaseException | None) -> None:
        """Fire ``fit_end``, let go of all that the fit holds, then raise what there is to raise."""
        parts = self._parts
        signals = self._signals
        if self.over or parts.running.fit is not self:
            if error is not None:
                raise error
            return
        with Shield(firm=True):  # what an interrupt would leave half done stays so for the next fit
            try:
                self._end_plugins(error)
            finally:
                self._let_go()
        ending = error.ending if isinstance(error, Interrupted) else None
        if ending is None and signals is not None and signals.ending is not None:
            ending = ExitRequest(signals.ending)  # it came too late to be acted upon
        try:
            self._warn_of_idle()
        finally:
            if ending is not None and self.raises:
                raise _interruption(ending)

    def _end_plugins(self, error: BaseException | None) -> None:
        """Complete the result and fire ``fit_end``; raises what the fit has failed with."""
        parts = self._parts
        failure = None
        self.ending = True
        try:
            failure = self._conclude(error)
        finally:
            if failure is not None and not isinstance(failure, Exception):
                parts.running.close_epochs(failure)  # those that an interrupt has kept from it
                self._around.restore()
            with parts.running.hook():
                self.brackets.end(self.result, failure)

    def _conclude(self, error: BaseException | None) -> BaseException | None:
        """Complete the result; returns what the fit has failed with."""
        parts = self._parts
        result = self.result
        failure: BaseException | None = None
        if isinstance(error, CancelFit):
            result.reason = "cancel"
            result.message = error.reason
            result.by = error.by
        elif isinstance(error, Interrupted):
            result.reason = "signal" if error.ending.signal else "pause"
            result.message = error.ending.reason
            result.by = error.ending.by
        elif error is not None:
            result.reason = "error"
            failure = error
            self.failure = error
            parts.resume.leave_unfinished(f"the last fit failed in epoch {self._progress.epochs + 1}")
        elif result.reason == "running":
            result.reason = "end"
        result.epochs, result.steps, result.updates, result.samples = (
            now - then for now, then in zip(astuple(self._progress), astuple(self.position.start), strict=True)
        )
        result.metrics = dict(parts.metrics)  # plain, since people store it
        result.seconds = self.seconds
        stop = parts.requests.stopped
        if stop is not None and result.reason not in ("signal", "pause", "error"):
            result.reason = "stop"
            result.message, result.by = stop
        return failure

    def _let_go(self) -> None:
        """Let go of all that the fit holds, the signals last."""
        parts = self._parts
        signals = self._signals
        self.ending = False
        self.over = True
        self.failure = None
        self.cancelled = None
        parts.registry.owners.end()
        parts.running.leave(self._around.hooks)
        parts.requests.end()
        if signals is not None:
            signals.remove()
            signals.pass_on()

    def _warn_of_idle(self) -> None:
        """Warn of plugins that were never called, and of metrics that were read and never made."""
        parts = self._parts
        if parts.requests.world.rank > 0:
            return
        problems = parts.registry.idle(self._ran.values()) if self._ran else []
        if self.result.reason == "epochs":
            problems += parts.registry.never_made(parts.metrics)
        for problem in problems:
            warn(problem)


def _interruption(ending: ExitRequest) -> BaseException:
    """Return the exception that an interrupted process ends with."""
    if ending.signal == signal.SIGINT:
        return interruption()
    return SystemExit(128 + ending.signal if ending.signal else PAUSED)


def _say_dropped(epochs: int, steps: int, limits: Limits) -> None:
    """Print that an interrupted fit, which was so far, is dropped."""
    given = ", ".join(f"{name}={limit}" for name, limit in limits.saved().items() if limit)
    say(
        f"the interrupted fit is past these limits, after {epochs} complete epochs and {steps:,} steps: its open epoch "
        f"is dropped, and this is a new fit of {given}"
    )
