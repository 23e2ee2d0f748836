"""Fit: one running fit, from ``fit_begin`` to ``fit_end``; Rounds: the same, lent to a loop of the user's."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from loopkit.engine.brackets import Brackets
from loopkit.engine.epoch import Epoch, StopEpoch
from loopkit.engine.loop import Until
from loopkit.engine.requests import Ending, Interrupted, Stop
from loopkit.engine.resume import Position
from loopkit.engine.signals import Signals
from loopkit.engine.sources import Source
from loopkit.errors import Cancel, CancelFit, PhaseError, ReentrancyError
from loopkit.every import Every
from loopkit.logs.record import Packed
from loopkit.notes import say, warn
from loopkit.result import FitResult, Planned
from loopkit.words import is_count

if TYPE_CHECKING:
    from loopkit.engine.core import Core
    from loopkit.phases import Phase

INTERRUPTS = ("raise", "return", None)
PAUSED = 75
"""The exit code of a process that was paused (EX_TEMPFAIL): start it again."""


@dataclass(frozen=True)
class Limits:
    """What ends a fit.

    Raises:
        ValueError: One is not a count from 1.
    """

    epochs: int | float | None = None
    max_steps: int | None = None
    max_updates: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_count(name, value, endless=name == "epochs")

    def saved(self) -> dict[str, int | None]:
        """What a state holds of them; an endless number of epochs is no limit."""
        return {name: None if value == math.inf else value for name, value in vars(self).items()}

    def raised_from(self, before: dict[str, int | None]) -> bool:
        """Whether any is higher than it was, or gone."""
        now = self.saved()
        return any(limit is not None and (now[name] or math.inf) > limit for name, limit in before.items())

    def planned(self, length: int | None, accumulate: int, optimizers: int = 1) -> Planned:
        """How far a fit over so many batches an epoch goes, in which each window updates so many optimizers."""
        finite = int(self.epochs) if self.epochs is not None and self.epochs != math.inf else None
        steps, most = self.max_steps, self.max_updates
        most = updates = None if most is None else math.ceil(most / max(optimizers, 1))
        if finite is not None and length is not None:
            steps = min(finite * length, steps or finite * length)
        if steps is not None and length is not None:
            full, rest = divmod(steps, length)
            updates = full * math.ceil(length / accumulate) + math.ceil(rest / accumulate)
            updates = min(updates, most or updates)
        return Planned(finite, steps, updates)


@dataclass(frozen=True)
class Validation:
    """What a fit validates on, and when."""

    source: Source
    every: Every

    @property
    def phase(self) -> str:
        """The name of its phase."""
        return self.source.phase.name


class Fit:
    """One fit that is running; `Learner.current` is it.

    Args:
        core: The learner's.
        limits: What ends it.
        planned: How far it is meant to go, for displays and schedules.
        on_interrupt: What comes after ``fit_end`` when a signal or a pause ended it; None: signals are not caught.
        timeout: Seconds that the workers of a ``DataLoader`` may take for a batch.
    """

    def __init__(
        self,
        core: Core,
        limits: Limits,
        planned: Planned,
        on_interrupt: str | None,
        timeout: float | None = None,
    ) -> None:
        if on_interrupt not in INTERRUPTS:
            raise ValueError(f"on_interrupt is {on_interrupt!r}: it is 'raise', 'return' or None")
        self.limits = limits
        self.result = FitResult(seed=torch.initial_seed(), planned=planned)
        """What it comes to; complete in ``fit_end``."""
        self.failure: BaseException | None = None
        """What it failed with, during ``fit_end``."""
        self.beginning = self.ending = False
        """Whether its ``fit_begin``, its ``fit_end`` is running."""
        self.resumed = False
        """Whether it goes on with a fit that was saved, or interrupted in this process."""
        self.depth = len(core.epochs)
        """How many epochs were open around it when it began."""
        self.cancelled: CancelFit | None = None
        """What ends it before its next epoch."""
        self.position = Position(replace(core.progress))
        """Where it is."""
        self.managed = False
        """Whether a ``with`` block of the user's ends it."""
        self.timeout = timeout
        self.over = False
        """Whether its ``fit_end`` has come."""
        self._core = core
        self.raises = on_interrupt != "return"
        """Whether a signal or a pause ends the process, by what it raises after its ``fit_end``."""
        self._signals = Signals(core.requests.change, lambda: not core.can_save) if on_interrupt else None
        self._started = time.monotonic()
        self.validations: dict[str, Validation] = {}
        """By phase, in the order in which they are run."""
        self.brackets = Brackets(core.registry)
        """The plugins whose ``fit_begin`` and ``fit_end`` it calls."""
        self._counts = False
        """Whether the user's loop asks for rounds."""
        self._turn = 0
        """In a loop of the user's: epochs of this round that were run, or passed over."""
        self._ran: dict[str, Phase] = {}
        """In a loop of the user's: the phases that were run."""
        self._barren = 0
        """Training epochs in a row without a step that was completed."""

    def manage(self) -> None:
        """A ``with`` block of the user's ends it."""
        self.managed = True

    # What plugins look at

    @property
    def open_epochs(self) -> list[Epoch]:
        """The epochs of it that are open, the outermost first."""
        return self._core.open_epochs

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that is open, the innermost one if a phase runs inside another."""
        epochs = self._core.open_epochs
        return epochs[-1] if epochs else None

    @property
    def can_save(self) -> bool:
        """Whether the state can be saved now: no step is under way, nor an epoch that a hook has begun."""
        return self._core.can_save

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that was caught, during ``signal_begin``."""
        return self._core.requests.signal

    @property
    def resuming(self) -> str:
        """The phase whose epoch was open in a state that was loaded, until it goes on; else an empty string."""
        waiting = self._core.resume.waiting
        return waiting[0] if waiting else ""

    @property
    def missing_states(self) -> dict[str, str]:
        """By phase: what of it has changed since the fit began and is in no state, in words."""
        return self._core.phase_states.missing()

    def request_save(self) -> None:
        """Ask that the state is saved between two steps, as SIGUSR1 does: ``signal_begin`` fires there."""
        self._core.requests.save()

    def pack_log(self, plugin: Any, packed: list[Packed] | None) -> None:
        """Let what is logged be appended to a list, which is the cheapest way to keep it.

        Args:
            plugin: One of the plugins; its ``log_value`` is not called any more.
            packed: The list, which the plugin has to empty in time, of what each call has logged (`Packed`); None: the
                plugin is called again.
        """
        self._core.registry.pack(plugin, packed)

    @property
    def seconds(self) -> float:
        """How long it has run, before it was saved and since."""
        return self.position.seconds + time.monotonic() - self._started

    @property
    def stopped(self) -> bool:
        """Whether a stop is in force."""
        return self._core.requests.stopped is not None

    def saved(self) -> dict[str, Any]:
        """What a state holds of it."""
        stop, reason = self._core.requests.stopped, self.result.reason
        over = reason in ("epochs", "max_steps", "max_updates", "stop")
        keeps = stop if over or reason == "running" else None
        return replace(self.position, ended=reason if over else "").saved(self.seconds, keeps)

    # Its begin

    def begin(self, runs: Sequence[Phase] = (), validations: Sequence[Validation] = ()) -> None:
        """Fire ``fit_begin``.

        Args:
            runs: The phases that it runs by itself; none in a loop of the user's own.
            validations: What it validates on.

        Raises:
            ReentrancyError: Another fit is running.
            PluginError: A plugin is never called, or reads a metric that is never made.
        """
        core = self._core
        if core.fit is not None:
            raise ReentrancyError("a fit is running: call run, evaluate or predict from a hook, not fit")
        core.requests.begin(self._signals)
        core.enter(self)
        self.position, goes_on = core.resume.begin(replace(core.progress))
        if self.position.start == core.progress and not self.position.epochs:
            core.metrics.clear()
        self._go_on()
        if goes_on:
            say(
                f"the fit goes on where it was interrupted, after {core.progress.epochs} complete epochs and "
                f"{core.progress.steps:,} steps (learner.forget() would begin a new one)"
            )
        if (left := core.resume.unfinished) and not self.resumed:
            say(f"{left}; this is a new fit, which begins that epoch anew")
        if left:
            core.resume.leave_unfinished("")
        if self._signals is not None:
            self._signals.__enter__()
        self.beginning, self.validations = True, {each.phase: each for each in validations}
        try:
            if runs:
                core.registry.check_fit(runs)
            with core.hook():
                self.cancelled = self.brackets.begin()
                if core.world.size > 1:
                    self._agree_to_begin()
                core.phase_states.begin()
        except BaseException as error:
            self.beginning = False
            self.end(error)
            raise
        self.beginning = False

    def go_on(self) -> None:
        """Go on from the position that was loaded, with the limits of this fit."""
        position = self._core.resume.take_position()
        if position is not None:
            self.position = position
            self._go_on()

    def _go_on(self) -> None:
        at = self.position
        self.resumed = at.epochs > 0 or at.start != self._core.progress
        reopened = bool(at.limits) and self.limits.raised_from(at.limits)
        stop = None if at.stop is None or reopened else Stop(*at.stop)
        if stop is not None:
            self._core.requests.resume(stop)
        ended = "" if reopened else at.ended
        self.position = replace(at, stop=None, ended=ended, limits=self.limits.saved())

    def begin_plugins(self, names: Collection[str]) -> None:
        """Fire the ``fit_begin`` of these plugins."""
        cancel = self.brackets.begin(names)
        self.cancelled = self.cancelled or cancel

    def _agree_to_begin(self) -> None:
        """What one process asked for in ``fit_begin`` holds for all."""
        core = self._core
        agreed, _ = core.requests.agree(core.world.rank, core.progress.updates, self.cancelled, ())
        if isinstance(agreed, CancelFit):
            self.cancelled = agreed

    # Its rounds, where the loop is its own

    def run(self, train: Source) -> None:
        """Train, and validate, until it is over."""
        core, at = self._core, self.position
        at.run_by_fit()
        for each in self.validations.values():
            core.resume.expect(each.source)
        core.resume.expect(train)
        if at.due:
            at.want([phase for phase in at.due if phase in self.validations], at.mid_epoch)
        while True:
            core.requests.answer(core)
            if self.cancelled is not None:
                raise self.cancelled
            waiting = core.resume.waits
            if self.validations and not waiting:
                self._want("round")
            if at.due and core.resume.waiting[:1] != [train.phase.name]:
                self._validate(at.due[0])
            elif not waiting and (reason := self.reason_to_end()):
                self.result.reason = reason  # type: ignore[assignment]
                return
            else:
                self._train(train)

    def reason_to_end(self) -> str:
        """Why it is over, as `FitResult.reason`; an empty string if it is not."""
        limits, at, progress = self.limits, self.position, self._core.progress
        if self._core.requests.stopped is not None:
            return "stop"
        if at.ended:
            return at.ended
        if limits.max_steps is not None and progress.steps - at.start.steps >= limits.max_steps:
            return "max_steps"
        if limits.max_updates is not None and progress.updates - at.start.updates >= limits.max_updates:
            return "max_updates"
        return "epochs" if limits.epochs is not None and at.epochs >= limits.epochs else ""

    def _want(self, when: str) -> None:
        """Note the validations that are due, beside those that are already.

        Args:
            when: ``"round"``: between two epochs; ``"epoch"``: a training epoch has just ended; ``"step"``: between
                two steps of one.
        """
        at = self.position
        due = [name for name, each in self.validations.items() if name in at.due or self._is_due(each, when)]
        at.want(due, mid_epoch=when == "step")

    def _is_due(self, validation: Validation, when: str) -> bool:
        """Whether it is time for a validation: the one rule about it."""
        at, every, updates = self.position, validation.every, self._core.progress.updates
        begun = at.validated.get(validation.phase)
        since = updates - (at.start.updates if begun is None else begun)
        if when == "epoch" and every.epochs is not None and at.epochs % every.epochs == 0:
            return True
        if when != "step" and self.reason_to_end():
            return since > 0 and not at.ended  # the last weights, once
        if every.first and begun is None and updates == at.start.updates:
            return True
        if every.updates is not None:
            return when == "step" and since >= every.updates
        return every.minutes is not None and self._is_late(validation)

    def _is_late(self, validation: Validation) -> bool:
        """Whether its minutes are over. Rank 0's clock decides; the others hear of it when they next agree."""
        requests, phase = self._core.requests, validation.phase
        late = self._core.world.rank == 0 and time.monotonic() >= self._time_of(validation)
        if not requests.together:
            return late
        if late and phase not in requests.validations:
            requests.validate(phase)
        return phase in requests.validations

    def _time_of(self, validation: Validation) -> float:
        """When its minutes are over, by ``time.monotonic``."""
        at = self.position
        return self._started - at.seconds + at.clock.get(validation.phase, 0.0) + validation.every.seconds

    def _train(self, source: Source) -> None:
        core, at = self._core, self.position
        before = core.progress.steps
        epoch = Epoch(core, source.phase, source)
        cancel = self._run(epoch, first=at.epochs == 0)
        at.count_epoch()
        if self.validations:
            self._want("epoch")
        self._check_progress(source.phase, before)
        epoch.finish(cancel)

    def _validate(self, phase: str) -> None:
        core, at, source = self._core, self.position, self.validations[phase].source
        epoch = Epoch(core, source.phase, source)
        first = phase not in at.validated
        if not core.resume.waits:
            at.begin_validation(phase, core.progress.updates)
        core.requests.begin_validation(phase)
        cancel = self._run(epoch, first)
        at.end_validation(phase, self.seconds)
        epoch.finish(cancel)

    def _run(self, epoch: Epoch, first: bool) -> Cancel | None:
        """Run an epoch up to its end, but for ``phase_end``; returns the cancel that ended it, if one did."""
        epoch.__enter__()
        try:
            with epoch.feeding(self.timeout) as batches:
                if epoch.trains and self._stops_between():
                    complete = self._run_in_parts(epoch, batches)
                elif epoch.stopped:
                    epoch.leave_data()
                    complete = False
                else:
                    complete = epoch.run(batches)
                if complete:
                    epoch.check_count(first)
        except GeneratorExit as error:  # it ends the epoch normally, and then what is around it
            epoch.finish(epoch.end(error))
            raise
        except BaseException as error:
            return epoch.end(error)
        return epoch.end(None)

    def _stops_between(self) -> bool:
        """Whether a training epoch is looked at between its steps."""
        limits = self.limits
        if limits.max_steps or limits.max_updates or self.position.due:
            return True
        return bool(self.validations) and any(each.every.epochs is None for each in self.validations.values())

    def _run_in_parts(self, epoch: Epoch, batches: Iterable[Any]) -> bool:
        """Run its steps up to a limit, with the validations that are due between them."""
        if epoch.resumed:  # what comes after the step at which the state was saved, which may be the end
            if (self._core.resume.waits or not epoch.stopped) and self._between(epoch):
                epoch.leave_data()
                return False
        if epoch.stopped:
            epoch.leave_data()
            return False
        batches = iter(batches)
        while True:
            if epoch.run(batches, self._until()):
                return True
            if epoch.stopped or self._between(epoch):
                return False

    def _until(self) -> Until:
        at, limits = self.position, self.limits
        steps = math.inf if limits.max_steps is None else at.start.steps + limits.max_steps
        updates = math.inf if limits.max_updates is None else at.start.updates + limits.max_updates
        late = math.inf
        for phase, each in self.validations.items():
            if each.every.updates is not None:
                updates = min(updates, at.validated.get(phase, at.start.updates) + each.every.updates)
            elif self._core.world.rank == 0:
                late = min(late, self._time_of(each))
        return Until(steps, updates, late)

    def _between(self, epoch: Epoch) -> bool:
        """Between two steps: run the validations that are due; returns whether a limit is reached."""
        at = self.position
        with epoch.resting():
            self._want("step")
            while at.due:
                self._validate(at.due[0])
        return self.reason_to_end() in ("max_steps", "max_updates") or epoch.stopped

    def _check_progress(self, phase: Phase, before: int) -> None:
        """Refuse to go on for ever without a step that is completed, where only steps or updates end the fit."""
        self._barren = 0 if self._core.progress.steps > before else self._barren + 1
        endless = self.limits.epochs is None or self.limits.epochs == math.inf
        if self._barren >= 2 and endless and not self.stopped:
            raise PhaseError(
                f"phase {phase.name!r} completed no step in two epochs in a row (each was cancelled), and the fit ends "
                f"by {', '.join(name for name, limit in self.limits.saved().items() if limit)} alone: it would never "
                f"end. Give epochs=, or look at what cancels the steps"
            )

    # Its rounds, where the loop is the user's

    def begin_round(self) -> bool:
        """Whether there is another round."""
        if self.over:
            return False
        self._counts = True
        self._core.requests.answer(self._core)
        if self.cancelled is not None:
            raise self.cancelled
        if reason := self.reason_to_end():
            self.result.reason = reason  # type: ignore[assignment]
        return not reason

    def end_round(self) -> None:
        """A round is complete."""
        self.position.end_round()
        self._turn = 0

    def turn(self, phase: Phase, source: Source | None, length: int | None) -> Epoch:
        """The next epoch of the user's loop."""
        self._ran[phase.name] = phase
        return Turn(self, self._core, phase, source, length)

    def passes_over(self, phase: Phase) -> bool:
        """Whether an epoch of the user's loop is not to be run: it is done, or the fit is over."""
        if self.over or self.cancelled is not None or (self.stopped and phase.training):
            return True
        if not self._counts:  # no rounds are asked for, so there is only the name to go by
            waiting = self._core.resume.waiting
            return bool(waiting) and waiting[0] != phase.name
        self._turn += 1
        return self._turn <= self.position.done

    def count_turn(self) -> None:
        """An epoch of the user's loop is over."""
        self.position.end_turn(self._turn)

    def cancel(self, cancel: CancelFit) -> None:
        """End it before its next epoch."""
        self.cancelled = cancel

    # Its end

    def end(self, error: BaseException | None) -> None:
        """Fire ``fit_end``, then raise what there is to raise."""
        if self.over:
            return
        core, result, signals = self._core, self.result, self._signals
        ending: Ending | None = None
        failure: BaseException | None = None
        if isinstance(error, CancelFit):
            result.reason, result.message, result.by = "cancel", error.reason, error.by
        elif isinstance(error, Interrupted):
            ending = error.ending
            result.reason = "signal" if ending.signal else "pause"
            result.message, result.by = ending.reason, ending.by
        elif error is not None:
            result.reason, failure = "error", error
            self.failure = error
            core.resume.leave_unfinished(f"the last fit failed in epoch {core.progress.epochs + 1}")
        elif result.reason == "running":
            result.reason = "end"
        stop = core.requests.stopped
        if stop is not None and result.reason not in ("signal", "pause", "error"):
            result.reason, (result.message, result.by) = "stop", stop
        result.epochs, result.steps, result.updates, result.samples = (
            now - then for now, then in zip(astuple(core.progress), astuple(self.position.start), strict=True)
        )
        result.metrics = dict(core.metrics)
        result.seconds = self.seconds
        if failure is None and core.world.rank == 0:
            problems = core.registry.idle(self._ran.values()) if self._ran else []
            if result.reason == "epochs":
                problems += core.registry.never_made(core.metrics)
            for problem in problems:
                warn(problem)
        self.ending = True
        try:
            with core.hook():
                self.brackets.end(result, failure)
        finally:
            self.ending, self.over = False, True
            self.failure, self.cancelled = None, None
            core.enter(None)
            core.requests.end()
            if signals is not None:
                signals.__exit__(None, None, None)
        if ending is None and signals is not None and signals.ending is not None:
            ending = Ending(signals.ending)  # it came too late to be acted upon
        if ending is not None and self.raises:
            raise _interruption(ending)


class Turn(Epoch):
    """An epoch of a fit whose loop is the user's own; one that was over before the run went on does nothing."""

    def __init__(self, fit: Fit, core: Core, phase: Phase, source: Source | None, length: int | None) -> None:
        super().__init__(core, phase, source, length)
        self._fit = fit
        self.passed_over = False

    def __enter__(self) -> Epoch:
        try:
            self.passed_over = self._fit.passes_over(self.phase)
            return self if self.passed_over else super().__enter__()
        except BaseException as error:
            self._end_fit(error)
            self.passed_over = True
            return self

    def batches(self) -> Iterable[Any]:
        """Its batches; none if it is passed over."""
        return () if self.passed_over else super().batches()

    def step(self, batch: Any) -> Any:
        """Run one step, unless it is passed over."""
        if self.passed_over:
            raise StopEpoch
        return super().step(batch)

    def run_all(self, timeout: float | None, first: bool) -> None:
        """Run a step for each of its batches, unless it is passed over."""
        if not self.passed_over:
            super().run_all(timeout, first)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.passed_over:
            return isinstance(error, StopEpoch)
        try:
            cancel = self.end(error)
            self._fit.count_turn()
            self.finish(cancel)
        except CancelFit as cancel:
            self._fit.cancel(cancel)
        except BaseException as raised:
            self._end_fit(raised)
        return not isinstance(error, GeneratorExit)

    def _end_fit(self, error: BaseException) -> None:
        """End the fit, if no ``with`` block does; raises what there is to raise."""
        if self._fit.managed:
            raise error
        self._fit.end(error)


class Rounds:
    """A fit whose loop is the user's own; made by ``learner.rounds`` and iterated over, round by round."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._begun = False

    @property
    def result(self) -> FitResult:
        """What the fit comes to; complete when it is over."""
        return self._fit.result

    def __iter__(self) -> Iterator[int]:
        if self._begun and not self._fit.managed:
            raise ReentrancyError("these rounds were run already: call learner.rounds() again for another fit")
        if not self._begun:
            self._begun = True
            self._fit.begin()
        try:
            while self._fit.begin_round():
                yield self._fit.position.epochs
                if not self._fit.over:
                    self._fit.end_round()
        except GeneratorExit:  # the user's loop was left
            if not self._fit.managed:
                self._fit.end(None)
            raise
        except BaseException as error:
            if self._fit.managed:
                raise
            self._fit.end(error)
        else:
            if not self._fit.managed:
                self._fit.end(None)

    def __enter__(self) -> Rounds:
        self._begun = True
        self._fit.manage()
        self._fit.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._fit.end(error)
        return True


def check_count(name: str, value: Any, endless: bool = False) -> None:
    """Refuse what is no count from 1.

    Raises:
        ValueError: It is not.
    """
    if value is not None and not is_count(value) and not (endless and value == math.inf):
        raise ValueError(f"{name} is {value!r}: it counts from 1" + (", or is math.inf" if endless else ""))


def _interruption(ending: Ending) -> BaseException:
    """What a process that was interrupted ends by."""
    if ending.signal == signal.SIGINT:
        return KeyboardInterrupt()
    return SystemExit(128 + ending.signal if ending.signal else PAUSED)
