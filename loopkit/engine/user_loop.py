"""UserLoop: a fit whose loop is the user's own; Rounds: what ``learner.rounds`` lends to that loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loopkit.engine.epoch import Epoch, StopEpoch
from loopkit.engine.fit import Fit, Limits
from loopkit.engine.sources import Source
from loopkit.errors import CancelFit, ReentrancyError
from loopkit.result import FitResult, Planned

if TYPE_CHECKING:
    from loopkit.engine.core import Core
    from loopkit.phases import Phase


class UserLoop(Fit):
    """A fit whose rounds, and the epochs in them, the user's loop runs. Its arguments are those of `Fit`."""

    def __init__(self, core: Core, limits: Limits, planned: Planned, on_interrupt: str | None) -> None:
        super().__init__(core, limits, planned, on_interrupt)
        self.managed = False
        """Whether a ``with`` block of the user's ends it."""
        self._counts = False
        """Whether the user's loop asks for rounds."""
        self._turn = 0
        """Epochs of this round that were run, or passed over."""

    def manage(self) -> None:
        """A ``with`` block of the user's ends it."""
        self.managed = True

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
        """The next epoch of the user's loop, or one that runs inside of another or of a hook."""
        core = self._core
        if self.position.by_fit or core.open_epochs or core.hooks:
            return super().turn(phase, source, length)
        self._ran[phase.name] = phase
        return Turn(self, core, phase, source, length)

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


class Turn(Epoch):
    """An epoch of a fit whose loop is the user's own; one that was over before the run went on does nothing."""

    def __init__(self, fit: UserLoop, core: Core, phase: Phase, source: Source | None, length: int | None) -> None:
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

    def run_all(
        self, timeout: float | None, first: bool, run: Callable[[Epoch, Iterable[Any]], bool] | None = None
    ) -> None:
        """Run a step for each of its batches, unless it is passed over."""
        if not self.passed_over:
            super().run_all(timeout, first, run)

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

    def __init__(self, fit: UserLoop) -> None:
        self._fit = fit
        self._begun = False

    @property
    def result(self) -> FitResult:
        """What the fit comes to; complete when it is over."""
        return self._fit.result

    def __iter__(self) -> Iterator[int]:
        if self._begun and not self._fit.managed:
            raise ReentrancyError("these rounds were run already: call learner.rounds() again for another fit")
        begins = not self._begun
        self._begun = True
        try:
            if begins:
                self._fit.begin()
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
