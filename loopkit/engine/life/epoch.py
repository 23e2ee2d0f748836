"""Epoch: one run of a phase over its data, with its events, contexts, modes, and what plugins keep for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from loopkit.base.notes import locate
from loopkit.base.shield import Shield
from loopkit.engine.compile.plan import Plan
from loopkit.engine.kept.data.loader_positions import indices_of
from loopkit.engine.kept.repeated import Repeated
from loopkit.engine.kept.resume import EpochStart
from loopkit.engine.life.epoch_contexts import EpochContexts
from loopkit.engine.life.logbook import CurrentEpoch
from loopkit.engine.life.sources import Source
from loopkit.engine.life.stores import Stores
from loopkit.engine.life.timeout import bounded_wait
from loopkit.engine.step.agreement import stronger
from loopkit.engine.step.loop import Loop
from loopkit.engine.step.step import Step
from loopkit.engine.step.window import Window
from loopkit.errors import Cancel, CancelEpoch, CancelFit
from loopkit.events import EpochBegin, EpochEnd, PhaseEnd
from loopkit.phases import Phase

if TYPE_CHECKING:
    from torch import Tensor


class StopEpoch(Exception):
    """Leaves a user's loop at the first step after ``learner.stop``, as a normal end of the epoch."""


class Stage:
    """One thing that begins with each epoch, and may end with it."""

    name = ""

    def begin(self, epoch: Epoch) -> None:
        """The epoch begins."""

    def leave(self, epoch: Epoch, error: BaseException | None) -> None:
        """The epoch is left, be it because of an error; also if its own `begin` has failed."""


class Life(Protocol):
    """How epochs begin and end, within their surroundings."""

    @property
    def repeated(self) -> Repeated:
        """The hooks of an epoch's begin, which run again when it resumes."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of an epoch, begun in this order and left in reverse."""

    @property
    def number(self) -> int:
        """The training epoch that runs, or after which something else does, from 1."""

    def where(self, phase: Phase, step: Step | None) -> str:
        """Return phase, epoch and step, for messages."""

    def batches(self, epoch: Epoch) -> Iterable[Any]:
        """Return the batches of an epoch, from where a saved state was."""

    def restore_generators(self, epoch: Epoch) -> None:
        """Put the random generators where a loaded state has them."""

    def end_steps(self, epoch: Epoch, complete: bool, first: bool) -> None:
        """The steps of an epoch are over."""

    def mark(self, epoch: Epoch) -> EpochStart | None:
        """Return the state as of the begin of an epoch."""

    def ending(self, epoch: Epoch) -> AbstractContextManager[None]:
        """Inside, the ``phase_end`` of an epoch runs."""

    def end_by(self, cancel: CancelFit) -> None:
        """End the fit or the epoch around an epoch by a cancel that came in it."""


class Epoch(Stores):
    """One run of a phase over its data; made by ``learner.epoch(phase)`` and used as a context manager.

    Example::

        with learner.epoch("train", length=len(batches)) as epoch:
            for batch in batches:
                step = epoch.step(batch)
    """

    def __init__(
        self,
        phase: Phase,
        source: Source | None,
        length: int | None,
        name_of: Callable[[Any], str],
        loop: Callable[[Epoch, int | None], Loop],
        contexts: EpochContexts,
        life: Life,
    ) -> None:
        super().__init__(name_of)
        self.phase = phase
        self.name = phase.name
        self.trains = phase.training
        self.made = source is not None and source.made
        """Whether a function makes the data for this epoch."""
        self.function = source.given if source is not None and source.made else None
        """The function that makes it; None if the data was given."""
        self.data: Any = None
        """The data that the engine iterates over; None in the user's own loop, and before a function has made it."""
        self.made_with: dict[str, Any] | None = None
        """The random generators when a function made its data."""
        if source is not None and not source.made:
            self.data, known = source.epoch()
            length = known if length is None else length
        self.depth = 0
        """How many epochs are open around it."""
        self.around = 0
        """Training steps that are under way around it: it runs in a hook of theirs."""
        self.alone = False
        """Whether it belongs to no run that could be saved: an ``evaluate`` outside of a fit, or run by a hook."""
        self.begun: Any = None
        """The random generators when the epoch began, if a replay of its data will need them."""
        self.saved: dict[str, Any] | None = None
        """The saved state of this epoch, if it was open then."""
        self.pending: Cancel | None = None
        """A cancel raised at ``epoch_begin``; the first step raises it."""
        self.goes_on = False
        """Its ``epoch_begin`` is over and its data are in place: from now on it trains new steps, also when resumed."""
        self.times_asked = 0
        """How often `resumed` was read."""
        self.turns: dict[str, int] = {}
        """How many epochs of each phase its hooks have run."""
        self._life = life
        self.outer: CurrentEpoch | None = None
        """The epoch that runs it in a hook, or between two of its steps."""
        self.length = length
        """How many steps there will be, if that is known."""
        self.source = source
        """The data that were given, for the engine only."""
        self.loop = loop(self, length)
        """Its steps, for the engine only."""
        self.contexts = contexts
        """The contexts of the epoch, for the engine only."""

    # What it is

    def __repr__(self) -> str:
        return f"Epoch({self.name!r}, epoch {self.number}, {self.steps} of {self.length or '?'} steps)"

    @property
    def plan(self) -> Plan:
        """The calls of each event, decided once."""
        return self.loop.plan

    @property
    def windows(self) -> tuple[Window, ...]:
        """The accumulation windows, one for each optimizer; none, if it does not train."""
        return self.loop.windows

    def window(self, name: str) -> Window:
        """The window of an optimizer."""
        return self.loop.window(name)

    @property
    def current(self) -> Step | None:
        """The last step that was begun, while the epoch runs."""
        return self.loop.current

    @property
    def steps(self) -> int:
        """Steps begun so far, cancelled ones included."""
        return self.loop.steps

    @property
    def resumed(self) -> bool:
        """Whether the epoch resumes from a saved state: its ``epoch_begin`` has come once before."""
        self.times_asked += 1
        return self.saved is not None

    @property
    def at_edge(self) -> bool:
        """Whether no step is under way."""
        return self.loop.at_edge

    @property
    def window_open(self) -> bool:
        """Whether any optimizer's accumulation window holds gradients that wait for their update."""
        return any(window.count for window in self.loop.windows)

    @property
    def keeps_aside(self) -> bool:
        """Whether an optimizer keeps gradients of an open window where no state has them."""
        return any(window.count and window.keeps_aside for window in self.loop.windows)

    @property
    def stopped(self) -> bool:
        """Whether ``learner.stop`` was called during this epoch, which trains."""
        return self.loop.stopped

    @property
    def agrees(self) -> bool:
        """Whether several processes agree, between two of its steps, on what ends it."""
        return self.loop.agrees

    @property
    def asks(self) -> bool:
        """Whether this process asks for something that the processes have not agreed on yet."""
        return self.loop.agreement.asks

    @property
    def number(self) -> int:
        """Which training epoch it is, or comes after, or is run in: from 1, over all fits, for people to read."""
        return self._life.number

    def where(self, step: Step | None = None) -> str:
        """Phase, epoch and step, for messages."""
        return self._life.where(self.phase, step)

    # Its begin

    def __enter__(self) -> Epoch:
        begun = 0
        try:
            for stage in self._life.stages:
                begun += 1
                stage.begin(self)
        except BaseException as error:
            self._leave(error, begun)
            raise
        self.goes_on = self.data is None
        return self

    def take_data(self, data: Any, length: int | None, made_with: dict[str, Any] | None) -> None:
        """A function has made its data."""
        self.data = data
        self.made_with = made_with
        if self.length is None:
            self._go_on_to(length)

    def begin_data(self, begun: Any, length: int | None) -> None:
        """Its data are where they were: there will be so many steps in all."""
        self.begun = begun
        if length != self.length:
            self._go_on_to(length)
        self.goes_on = True

    def _go_on_to(self, length: int | None) -> None:
        self.length = length
        self.loop.set_length(length)

    def nest(self, outer: CurrentEpoch | None, depth: int) -> None:
        """It is run inside of another epoch, or of none, with so many open around it."""
        self.outer = outer
        self.depth = depth
        if outer is not None:
            under_way = outer.trains and outer.current is not None and not outer.current.ended
            self.around = outer.around + under_way

    def enter_contexts(self) -> None:
        """Enter the contexts and fire ``EpochBegin``; a cancel is for the first step."""
        plan = self.loop.plan
        try:
            with Shield():
                self.contexts.enter([partial(make, self) for make in plan.epoch_contexts], self.alone)
            if (fire := plan.fire[EpochBegin]) is not None:
                fire(self)
        except (CancelEpoch, CancelFit) as cancel:
            self.pending = cancel
        finally:
            self._life.repeated.forget()

    def repeated(self, plugin: Any, name: str) -> AbstractContextManager[None]:
        """Inside, a hook of a plugin runs at its begin, perhaps once more after a resume."""
        return self._life.repeated.of(self, plugin, name)

    def batches(self) -> Iterable[Any]:
        """The batches of the data that the epoch was given, from where a saved state was."""
        return self._life.batches(self)

    def indices(self, step: Step) -> Tensor | str:
        """Which samples the batch of a step, the last one, holds; where that is not known, the reason."""
        return indices_of(self.data, step.index, step.batch, step.samples)

    def key(self) -> str:
        """Where in a fit it is run by a hook: in which epoch, of which phase, for the how-manieth time."""
        if self.outer is None:
            return f"fit/{self.name}/0"
        turn = self.outer.turns.get(self.name, 0)
        self.outer.turns[self.name] = turn + 1
        return f"{self.outer.name}/{self.name}/{turn}"

    def mark(self) -> EpochStart | None:
        """Record the state as of the epoch's begin, for ``learner.state_dict(at=...)`` when a step fails later.

        Call it in ``epoch_context``, when the epoch begins. Returns None if there is no such state to make: the epoch
        trains, a hook runs it, or it was resumed from a saved state, which still holds.
        """
        if self.alone or self.trains or self.resumed or self.data is None:
            return None
        return self._life.mark(self)

    def compare_casts(self) -> None:
        """Raise if weights change through ``.data`` between two forwards of its first step, under autocast.

        Versions do not show such a change, so it is looked at by value, which waits for the device.
        """
        self.loop.casts.compare_values(True)

    def go_on_at(self, steps: int) -> None:
        """Count on from so many steps."""
        self.loop.count_from(steps)

    # Its steps

    def step(self, batch: Any) -> Step:
        """Run one step of the phase, between its events.

        Raises:
            PhaseInputError: The batch is None or holds no sample.
            StepResultError: The phase's ``step`` returned something.
        """
        if self.pending is not None:
            raise self.pending
        if self.stopped:
            raise StopEpoch
        self._life.restore_generators(self)
        self.loop.refresh()
        self.loop.run((batch,))
        assert self.current is not None
        return self.current

    def run_all(
        self, timeout: float | None, first: bool, run: Callable[[Epoch, Iterable[Any]], bool] | None = None
    ) -> None:
        """Run a step for each of its batches.

        Args:
            timeout: Seconds that the workers of a ``DataLoader`` may take for a batch.
            first: It is the first epoch over these data.
            run: Runs the steps, and returns whether they were all taken; by default the plain loop of the steps.
        """
        with bounded_wait(self.data, timeout, lambda: self.steps):
            if self.source is not None and self.source.made:
                self.loop.agreement.answer()  # what came while a function made the data
            batches = self.batches()
            if self.pending is not None:
                raise self.pending
            if run is not None:
                complete = run(self, batches)
            elif complete := self.loop.may_start:
                complete = self.loop.run(batches)
            self._life.end_steps(self, complete, first)

    @property
    def first_process(self) -> bool:
        """Whether it runs in the process of rank 0, whose data a state knows."""
        return self.loop.agreement.world.rank == 0

    def agree_on(self, problem: str) -> str:
        """Return the problem of the first process that has one, if the epoch was resumed."""
        world = self.loop.agreement.world
        return problem if world.size == 1 else next(filter(None, world.gather(problem)), "")

    def check_count(self, first: bool) -> None:
        """After all batches: look at how many they were."""
        assert self.source is not None
        self.source.check_count(self.data, self.steps, self.length, first)

    def agree(self, *numbers: float) -> list[float]:
        """Let every process act, after this step, on what any of them asks for: stops, cancels, saves and signals.

        For plugins that sync processes; all call it at the same step. One collective.

        Args:
            numbers: Sent along.

        Returns:
            The highest of each number over the processes.
        """
        return self.loop.agreement.agree(*numbers)

    # Its end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.finish(self.end(error))
        return not isinstance(error, GeneratorExit)

    def end(self, error: BaseException | None) -> Cancel | None:
        """Close the windows, fire ``EpochEnd`` and leave the contexts; returns the cancel that ended it, if one did.

        Raises:
            BaseException: The error inside, unless it ends an epoch normally.
        """
        loop = self.loop
        cancel: Cancel | None = self.pending
        loop.refresh()
        try:
            if isinstance(error, (CancelEpoch, CancelFit)):
                cancel = error
            elif error is not None and (error is loop.failure or not isinstance(error, (StopEpoch, GeneratorExit))):
                raise error
            loop.closing = True
            if cancel is None:
                cancel = _caught(loop.close_windows)
            loop.drop_windows()
            if (fire := loop.plan.fire[EpochEnd]) is not None:
                cancel = stronger(cancel, _caught(partial(fire, self)))
        except BaseException as raised:
            locate(raised, self.where())
            try:
                self._leave(raised)  # a saver's context may want the windows as they are
            finally:
                loop.drop_windows()
            raise
        self._leave(None)
        if cancel is None and error is None:
            loop.end_events()
        if self.trains:
            loop.progress.epochs += 1
        return cancel

    def finish(self, cancel: Cancel | None) -> None:
        """Fire ``PhaseEnd``, and raise what ends more than the epoch.

        Raises:
            CancelFit: The fit, or what is around the epoch, ends by it.
        """
        loop = self.loop
        if (fire := loop.plan.fire[PhaseEnd]) is not None:
            with self._life.ending(self):
                cancel = stronger(cancel, _caught(partial(fire, self)))
        if loop.agreement.world.size > 1:
            cancel = loop.agreement.settle(cancel)
        if isinstance(cancel, CancelFit):
            self._life.end_by(cancel)

    def _leave(self, error: BaseException | None, begun: int | None = None) -> None:
        """Leave the stages that have begun, be it because of an error; from here on it is not open."""
        raised = error
        with Shield():
            for stage in reversed(self._life.stages[:begun]):
                try:
                    stage.leave(self, error)
                except BaseException as late:
                    raised = late
        try:
            if raised is not error and raised is not None:
                raise raised
        finally:
            del raised  # else a cycle with the traceback

    def abandon(self, error: BaseException) -> None:
        """Leave it without its events, after an interrupt that came while it was left."""
        self.loop.drop_windows()
        self._leave(error)


def _caught(act: Callable[[], None]) -> Cancel | None:
    try:
        act()
    except (CancelEpoch, CancelFit) as cancel:
        return cancel
    return None
