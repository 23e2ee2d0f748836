"""FitLoop: a fit whose loop is the engine's own: `Learner.fit`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from loopkit.engine.life.epoch import Epoch
from loopkit.engine.life.fit import SKIPS, Fit, FitParts
from loopkit.engine.life.sources import Source
from loopkit.engine.life.validations import Validation
from loopkit.engine.step.loop import StepLimits
from loopkit.errors import ArgumentError, Cancel, CancelFit, PhaseError
from loopkit.every import Every

if TYPE_CHECKING:
    from loopkit.engine.kept.data.data_places import DataPlaces
    from loopkit.engine.kept.flags import Flags
    from loopkit.engine.life.limits import Terms
    from loopkit.phases import Phase


class FitLoop(Fit):
    """A fit that trains on some data, and validates when that is due.

    Args:
        parts: As for `Fit`.
        terms: As for `Fit`.
        train: The training data, with their phase.
        validations: The validations, in the order in which they are run.
        places: The data of phases, and their positions.
        flags: Hold how many steps make an update.
    """

    def __init__(
        self,
        parts: FitParts,
        terms: Terms,
        train: Source,
        validations: Sequence[Validation],
        places: DataPlaces,
        flags: Flags,
    ) -> None:
        super().__init__(parts, terms, [train.phase, *[each.source.phase for each in validations]])
        self._source = train
        self._places = places
        self._flags = flags
        self.validations = {each.phase: each for each in validations}
        self._stops_between = terms.limits.between_steps or not all(each.by_epochs for each in validations)
        """Whether every training epoch is looked at between its steps."""
        if not train.made and any(each.every.in_parts for each in validations):
            _check_length(train.length)
        self._open: Epoch | None = None
        """The training epoch that is under way."""
        self._barren = 0
        """Training epochs in a row without a step that was completed."""
        self._fruitless = 0
        """Steps of training epochs in a row without an update."""

    def complete(self) -> None:
        """Begin, run and end it."""
        error: BaseException | None = None
        try:
            try:
                self.begin()
                self.run()
            except BaseException as raised:
                error = raised
        except BaseException as interrupt:  # a signal's, which came between these lines
            error = interrupt
        self.end(error)

    def run(self) -> None:
        """Train, and validate, until it is over."""
        try:
            self._run_epochs()
        except CancelFit:
            self._end_cycle()
            raise

    def _run_epochs(self) -> None:
        parts = self._parts
        at = self.position
        train = self._source
        self._places.expect([*[each.source for each in self.validations.values()], train])
        if at.due:
            at.want([phase for phase in at.due if phase in self.validations], at.mid_epoch)
        while True:
            self._end_cycle()
            if parts.requests.waits:
                parts.answers.answer()
            if self.cancelled is not None:
                raise self.cancelled
            waiting = parts.left_open.waiting
            if self.validations and not waiting:
                self._want("round")
            if at.due and waiting[:1] != [train.phase.name]:
                self._validate(at.due[0])
            elif not waiting and (reason := self.reason_to_end()):
                self.result.reason = reason  # type: ignore[assignment]
                return
            else:
                self._train(train)

    def _end_cycle(self) -> None:
        """Fire ``cycle_end``, if a training epoch and all validations due after it are over."""
        at = self.position
        if not at.cycle or self._parts.left_open.waiting:
            return
        if self.validations:
            self._want("round")  # a stop in a ``phase_end`` may have made one due
        if not at.due:
            at.end_cycle()
            self.fire_cycle_end()

    def _want(self, when: str) -> None:
        """Note the validations that are due, beside earlier ones.

        Args:
            when: ``"round"``: between two epochs; ``"epoch"``: a training epoch has just ended; ``"step"``: between
                two steps of one.
        """
        at = self.position
        due = [name for name, each in self.validations.items() if name in at.due or self._is_due(each, when)]
        at.want(due, mid_epoch=when == "step")

    def _is_due(self, validation: Validation, when: str) -> bool:
        """Whether it is time for a validation: the one rule about it."""
        at = self.position
        every = validation.every
        if when == "epoch" and every.is_end(at.epochs):
            return True
        begun = at.validated.get(validation.phase)
        since = self._progress.updates - (at.start.updates if begun is None else begun)
        if when != "step" and self.reason_to_end():
            return since > 0 and not at.ended  # the last weights, once
        if every.first and begun is None and since == 0:
            return True
        if every.updates is not None:
            return when == "step" and since >= every.updates
        if every.in_parts:
            return when == "step" and self._is_part_over(validation)
        return every.minutes is not None and self.is_time(validation.phase, self._time_of(validation))

    def _is_part_over(self, validation: Validation) -> bool:
        """Whether a further part of the epoch is over, with steps left."""
        if self._open is None or self._open.steps == self._open.length:
            return False
        return self._parts_done(validation.every) > self.position.parts.get(validation.phase, 0)

    def _time_of(self, validation: Validation) -> float:
        """For how many seconds the fit has run when its minutes are over."""
        return self.position.clock.get(validation.phase, 0.0) + validation.every.seconds

    def _parts_done(self, every: Every) -> int:
        """How many parts of epochs are over, where a validation is due after parts; else 0."""
        if not every.in_parts:
            return 0
        if self._open is None:
            return every.parts_done(self.position.epochs)
        return every.parts_done(self.position.epochs, self._open.steps, _check_length(self._open.length))

    def _train(self, source: Source) -> None:
        parts = self._parts
        at = self.position
        steps = self._progress.steps
        updates = self._progress.updates
        epoch = self._open = parts.epochs.make(source.phase, source)
        cancel = self._run(epoch, first=at.epochs == 0)
        self._open = None
        at.count_epoch()
        if self.validations:
            self._want("epoch")
        self._check_progress(source.phase, steps)
        self._check_updates(source.phase, steps, updates, epoch.loop.idle)
        epoch.finish(cancel)

    def _validate(self, phase: str) -> None:
        parts = self._parts
        at = self.position
        source = self.validations[phase].source
        epoch = parts.epochs.make(source.phase, source)
        first = phase not in at.validated
        if not parts.left_open.waiting:
            at.begin_validation(phase, self._progress.updates, self._parts_done(self.validations[phase].every))
        parts.requests.begin_validation(phase)
        cancel = self._run(epoch, first)
        at.end_validation(phase, self.seconds)
        epoch.finish(cancel)

    def _run(self, epoch: Epoch, first: bool) -> Cancel | None:
        """Run an epoch up to its end, but for ``phase_end``; returns the cancel that ended it, if one did."""
        epoch.__enter__()
        try:
            in_parts = epoch.trains and (self._stops_between or self.position.due)
            epoch.run_all(self.timeout, first, self._run_in_parts if in_parts else None)
        except GeneratorExit as error:  # it ends the epoch normally, and then what is around it
            epoch.finish(epoch.end(error))
            raise
        except BaseException as error:
            return epoch.end(error)
        return epoch.end(None)

    def _run_in_parts(self, epoch: Epoch, batches: Iterable[Any]) -> bool:
        """Run its steps up to a limit, with the validations that are due between them."""
        if epoch.resumed:  # what comes after the step at which the state was saved, which may be the end
            if (self._parts.left_open.waiting or not epoch.stopped) and self._between(epoch):
                return False
        if epoch.stopped:
            return False
        batches = iter(batches)
        while True:
            if epoch.loop.run(batches, self._until(epoch)):
                return True
            if epoch.stopped or self._between(epoch):
                return False

    def _until(self, epoch: Epoch) -> StepLimits:
        at = self.position
        limits = self.limits
        steps = math.inf if limits.max_steps is None else at.start.steps + limits.max_steps
        updates = math.inf if limits.max_updates is None else at.start.updates + limits.max_updates
        late = limits.seconds
        for phase, each in self.validations.items():
            if each.every.updates is not None:
                updates = min(updates, at.validated.get(phase, at.start.updates) + each.every.updates)
            elif each.every.in_parts:
                steps = min(steps, self._progress.steps + _steps_to_part(epoch, each.every, at.epochs))
            else:
                late = min(late, self._time_of(each))
        if self._parts.requests.world.rank != 0:
            late = math.inf
        return StepLimits(steps, updates, self._started - at.seconds + late)

    def _between(self, epoch: Epoch) -> bool:
        """Between two steps: run the validations that are due; returns whether a limit is reached."""
        at = self.position
        with epoch.loop.resting():
            self._want("step")
            while at.due:
                self._validate(at.due[0])
        return self.reason_to_end() in ("max_steps", "max_updates", "minutes") or epoch.stopped

    def _check_progress(self, phase: Phase, steps: int) -> None:
        """Raise where no step is completed in an epoch, and only steps or updates end the fit."""
        self._barren = 0 if self._progress.steps > steps else self._barren + 1
        limits = self.limits
        endless = limits.minutes is None and (limits.epochs is None or limits.epochs == math.inf)
        if self._barren >= 2 and endless and not self.stopped:
            raise PhaseError(
                f"phase {phase.name!r} completed no step in two epochs in a row (each was cancelled), and the fit ends "
                f"by {', '.join(name for name, limit in limits.saved().items() if limit)} alone: it would never "
                f"end. Give epochs=, or look at what cancels the steps"
            )

    def _check_updates(self, phase: Phase, steps: int, updates: int, idle: bool) -> None:
        """Raise where no step updates, and only updates end the fit."""
        progress = self._progress
        updated = idle or progress.updates != updates
        self._fruitless = 0 if updated else self._fruitless + progress.steps - steps
        if self._fruitless >= SKIPS * self._flags.accumulate and self.ends_by_updates and not self.stopped:
            raise PhaseError(
                f"phase {phase.name!r} made no update in {self._fruitless:,} steps, and the fit ends by max_updates "
                f"only: it would never end. Give epochs= or max_steps=; a phase with own_updates = True reports its "
                f"updates by step.updated(), and step.skip() marks steps that train nothing"
            )


def _check_length(length: int | None) -> int:
    """Return the steps of a training epoch.

    Raises:
        ArgumentError: They are unknown.
    """
    if length is None:
        raise ArgumentError(
            "validate is every(epochs=) with a part of an epoch, and the training data have no len(): give "
            "every(updates=100), or data with a length"
        )
    return length


def _steps_to_part(epoch: Epoch, every: Every, epochs: int) -> float:
    """How many steps are left until a part of the epoch is over; infinite in its last part, which ends with it."""
    length = _check_length(epoch.length)
    due = every.next_part(epochs, epoch.steps, length)
    return due - epoch.steps if due < length else math.inf
