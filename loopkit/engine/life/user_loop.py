"""UserLoop: a fit whose loop is the user's own; Rounds: the object of ``learner.rounds`` for that loop.

A *round* is one run of the body of the user's loop, and a *turn* is one epoch in it. After a resume the user's code
runs again from the begin of the saved round: that is the *replay*. Turns that were over at the save are passed over.
At the first other turn, or at the end of the round, the loop has *arrived* where the state was saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loopkit.engine.life.epoch import Epoch, StopEpoch
from loopkit.engine.life.fit import Fit, FitParts
from loopkit.engine.life.sources import Source
from loopkit.errors import CancelFit, ReentrancyError, StateError
from loopkit.result import FitResult

if TYPE_CHECKING:
    from loopkit.engine.kept.rounds import Round
    from loopkit.engine.life.limits import Terms
    from loopkit.engine.life.loop_code import LoopCode
    from loopkit.phases import Phase


class UserLoop(Fit):
    """A fit whose rounds, and the epochs in them, the user's loop runs. It has the arguments of `Fit`.

    Args:
        parts: As for `Fit`.
        terms: As for `Fit`.
        round: The round of the loop.
        code: The objects that the loop's code may change.
        kept: Generators of the user's loop, and objects with a state, by name.
    """

    def __init__(self, parts: FitParts, terms: Terms, round: Round, code: LoopCode, kept: Mapping[str, Any]) -> None:
        super().__init__(parts, terms)
        self._round = round
        self._code = code
        self._round.check(kept)
        self._kept = kept
        self.managed = False
        """Whether a ``with`` block of the user's ends it."""
        self._counts = False
        """Whether the user's loop asks for rounds."""
        self._turn = 0
        """Epochs of this round that were run, or passed over."""

    @property
    def has_cycles(self) -> bool:
        """Whether the loop iterates over rounds, at whose ends ``cycle_end`` fires."""
        return self._counts

    def manage(self) -> None:
        """A ``with`` block of the user's ends it."""
        self.managed = True

    def begin_round(self) -> bool:
        """Whether there is another round."""
        if self.over:
            return False
        self._counts = True
        self._parts.answers.answer()
        if self.cancelled is not None:
            raise self.cancelled
        if reason := self.reason_to_end():
            self.result.reason = reason  # type: ignore[assignment]
            return False
        self._open_round()
        return True

    def begin(self) -> None:
        """Fire ``fit_begin``."""
        parts = self._parts
        if parts.running.fit is None:  # else it raises below
            self._round.begin(None)
            self._round.declare(self._kept)
            self._round.find(self._code.owners())
        super().begin()

    def _open_round(self) -> None:
        """Begin a round, or begin the one anew in which a state was saved."""
        parts = self._parts
        at = self.position
        if not at.counted and self.limits.epochs is not None and self.limits.epochs != math.inf:
            raise StateError(
                f"the state is of a loop that did not count its rounds, as the first form of loopkit 0.1 saved them, "
                f"with {self._progress.epochs} training epochs done: rounds(epochs={self.limits.epochs}) cannot count "
                f"on. Give rounds() without epochs=, and leave the loop by a break"
            )
        saved = parts.resume.take_round()
        if saved is not None:
            self._round.begin(saved)
            if saved["begin"] is not None:
                self._replay(saved)
                return
            self._round.put_now(saved)
        at_first_line = not at.done and not parts.left_open.waiting
        if at_first_line:
            parts.left_open.restore_generators()  # as of the save
        self._round.begin_round(at.epochs, whole=at_first_line)

    def _replay(self, saved: Mapping[str, Any]) -> None:
        """Run a round again up to where it was saved, without logging a second time."""
        opened = bool(self._parts.left_open.waiting)
        self._round.replay(saved, self.position.epochs, opened, self._code.begin_replay())

    def end_round(self) -> None:
        """A round is complete.

        Raises:
            StateError: It was resumed, and the user's code did not run all the epochs that were over or open then.
        """
        waiting = self._parts.left_open.waiting
        done = self.position.done
        if self._round.replaying and (waiting or self._turn < done):
            open_one = f", and one of phase {waiting[0]!r} was open" if waiting else ""
            raise StateError(
                f"round {self.position.epochs} was saved when {done} of its epochs were over{open_one}, and it ended "
                f"now after {self._turn}: the code between two runs is run again after a resume, and decided "
                f"otherwise. Let it go by learner.run's metrics, or by a value of rounds.once"
            )
        self.arrive()
        self._round.end_round()
        self.position.end_round()
        self._turn = 0
        self.fire_cycle_end()

    def arrive(self) -> None:
        """The user's loop has come to where a state was saved, if it was resumed in a round."""
        if self._round.replaying:
            self._round.arrive()
            self._parts.left_open.leave_generators()
            self._code.end_replay()

    def end(self, error: BaseException | None) -> None:
        """Fire ``fit_end``, then raise what there is to raise."""
        if self.over:
            if error is not None:
                raise error
            return
        self.arrive()
        try:
            super().end(error)
        finally:
            self._round.end(error)

    def once(self, name: str, make: Callable[..., Any]) -> Any:
        """A value that is made once in a round, and saved."""
        with self._parts.running.aside():
            return self._round.once(name, make)

    def turn(self, phase: Phase, source: Source | None, length: int | None) -> Epoch:
        """The next epoch of the user's loop, or one that runs inside of another or of a hook."""
        parts = self._parts
        if self.position.by_fit or parts.running.open_epochs or parts.running.hooks:
            return super().turn(phase, source, length)
        self._ran[phase.name] = phase
        return parts.epochs.make(phase, source, length, partial(Turn, self))

    def take_turn(self, phase: Phase) -> tuple[bool, bool]:
        """Count an epoch of the user's loop; returns whether to leave it out, and whether it was over at the save."""
        if self.over or self.cancelled is not None or (self.stopped and phase.training):
            return True, False
        if not self._counts:  # no rounds are asked for, so there is only the name to go by
            waiting = self._parts.left_open.waiting
            return bool(waiting) and waiting[0] != phase.name, False
        self._turn += 1
        done = self._turn <= self.position.done
        return done, done

    def pass_over(self) -> None:
        """The user's loop leaves an epoch that was over at the save."""
        self._round.pass_over(self._turn)

    def begin_turn(self, epoch: Epoch) -> None:
        """An epoch of the user's loop begins, or resumes."""
        self.arrive()
        if not self._counts and (saved := self._parts.resume.take_round()) is not None:
            self._round.put_now(saved)
        resumed = bool(self._parts.left_open.waiting)
        if resumed:
            self._parts.left_open.check_given(epoch.name, epoch.data)
        self._round.begin_turn(resumed)

    def count_turn(self, over: bool = False) -> None:
        """An epoch of the user's loop has ended; `over`: so has its ``phase_end``."""
        self.position.end_turn(self._turn)
        self._round.end_turn(over)

    def cancel(self, cancel: CancelFit) -> None:
        """End it before its next epoch."""
        self.cancelled = cancel


class Turn(Epoch):
    """An epoch of a fit whose loop is the user's own; one that was over when the run was saved is empty."""

    def __init__(self, fit: UserLoop, *given: Any) -> None:
        super().__init__(*given)
        self._fit = fit
        self.passed_over = False
        self._done = False
        """Whether it was over at the save."""

    def __enter__(self) -> Epoch:
        try:
            self.passed_over, self._done = self._fit.take_turn(self.phase)
            if self.passed_over:
                return self
            self._fit.begin_turn(self)
            return super().__enter__()
        except BaseException as error:
            self._end_fit(error)
            self.passed_over = True  # the fit ended without an error, so this epoch has no steps
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
            if self._done:
                self._fit.pass_over()
            return isinstance(error, StopEpoch)
        try:
            cancel = self.end(error)
            self._fit.count_turn()
            self.finish(cancel)
            self._fit.count_turn(over=True)
        except CancelFit as cancel:
            self._fit.cancel(cancel)
        except BaseException as raised:
            self._end_fit(raised)
        return not isinstance(error, GeneratorExit)  # `_end_fit` has raised the errors that leave the loop

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
        """The result of the fit; complete when the fit has ended."""
        return self._fit.result

    def once(self, name: str, make: Callable[..., Any]) -> Any:
        """Make a value in a round, and save it: a round that is run again after a resume gets the saved value.

        Use it for what a round makes with the weights as they are, such as a rollout, labels or a growing data set. A
        value that takes 1 MiB or more is written once, and later checkpoints link to its file.

        Args:
            name: The name of the value; a second call with it in the same round returns the same value.
            make: Called without arguments, the first time in a round. If it takes one, that is the value of the round
                before, None in the first. Epochs that it runs belong to no round.

        Returns:
            A copy of the result of `make`. Tensors have no graph.

        Raises:
            PhaseError: No round is under way.
            StateError: No checkpoint can hold the value: it is made of None, numbers, strings, bytes, lists, tuples,
                dicts with str or int keys, tensors and NumPy arrays.

        Example::

            rounds = learner.rounds(epochs=10)
            for _ in rounds:
                rollout = rounds.once("rollout", lambda: collect(learner.model, env))
                learner.run("train", batches(rollout))
        """
        return self._fit.once(name, make)

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
        return True  # it has raised each error that leaves the block
