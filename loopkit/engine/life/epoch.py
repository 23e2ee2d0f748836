"""Epoch: one run of a phase over its data, with its events, contexts, modes, and what plugins keep for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loopkit.base.notes import locate
from loopkit.base.shield import Shield
from loopkit.engine.compile.plan import Plan
from loopkit.engine.kept.epoch_record import restore_windows
from loopkit.engine.kept.loader_positions import indices_of, leave, set_epoch
from loopkit.engine.kept.plugin_states import PHASE
from loopkit.engine.kept.resume import EpochStart
from loopkit.engine.life.epoch_contexts import EpochContexts
from loopkit.engine.life.logbook import CurrentEpoch
from loopkit.engine.life.sources import Source, named_if_endless
from loopkit.engine.life.timeout import bounded_wait
from loopkit.engine.step.loop import Loop, stronger
from loopkit.engine.step.step import Step
from loopkit.engine.step.window import Window
from loopkit.errors import Cancel, CancelEpoch, CancelFit, PhaseError, ReentrancyError, WorldError
from loopkit.events import EpochBegin, EpochEnd, PhaseEnd
from loopkit.phases import Phase

if TYPE_CHECKING:
    from torch import Tensor

    from loopkit.base.world import World
    from loopkit.engine.life.core import Core


class StopEpoch(Exception):
    """Leaves a user's loop at the first step after ``learner.stop``, as a normal end of the epoch."""


class Epoch:
    """One run of a phase over its data; made by ``learner.epoch(phase)`` and used as a context manager.

    Example::

        with learner.epoch("train", length=len(batches)) as epoch:
            for batch in batches:
                step = epoch.step(batch)
    """

    def __init__(self, core: Core, phase: Phase, source: Source | None = None, length: int | None = None) -> None:
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
        """Its ``epoch_begin`` is over and its data are where they were: what comes now is new, be it resumed."""
        self.turns: dict[str, int] = {}
        """How many epochs of each phase its hooks have run."""
        self._core = core
        self._outer: CurrentEpoch | None = None
        self.length = length
        """How many steps there will be, if that is known."""
        self.loop = Loop(core, self, phase, length)
        """Its steps, for the engine only."""
        self.contexts = EpochContexts(phase, core.models, core.registry, core.running.where)
        """The contexts of the epoch, for the engine only."""
        self._stores: dict[str, dict[str, Any]] = {}
        self._kept: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._source = source

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
        return self.loop.asks or self._core.requests.asks

    @property
    def number(self) -> int:
        """Which training epoch it is, or comes after, or is run in: from 1, over all fits, for people to read."""
        return self._core.running.number

    def where(self, step: Step | None = None) -> str:
        """Phase, epoch and step, for messages."""
        return self._core.running.where(self.phase, step)

    # What plugins keep

    def store(self, owner: Any) -> dict[str, Any]:
        """The saved store of a plugin for this epoch: empty at first, or restored after a resume.

        It can hold every type that a state can hold, and objects with a ``state_dict``, which is saved for them.

        Args:
            owner: The plugin; a phase finds its own at ``step.store``.
        """
        name = PHASE if isinstance(owner, Phase) else self._core.registry.name_of(owner)
        return self._stores.setdefault(name, {})

    def keep(self, owner: Any) -> dict[str, Any]:
        """The unsaved store of a plugin for this epoch, empty at first. Quick enough for each step."""
        try:
            return self._kept[id(owner)][1]
        except KeyError:
            kept: dict[str, Any] = {}
            self._kept[id(owner)] = owner, kept  # with the owner, so that its id stays its own
            return kept

    def saved_stores(self) -> dict[str, Any]:
        """The saved form of the stores that are not empty, by plugin."""
        return {name: _plain(store) for name, store in self._stores.items() if store}

    # Its begin

    def __enter__(self) -> Epoch:
        core = self._core
        running = core.running
        phase = self.phase
        loop = self.loop
        if core.requests.waits:
            core.answers.answer()
        fitting = running.fit is not None
        in_hook = running.hooks > 0
        if not running.epochs and not fitting and not in_hook:
            core.requests.forget_stop()
        nested = in_hook or (bool(running.epochs) and not all(epoch.loop.between for epoch in running.open_epochs))
        self.alone = nested or not (phase.training or fitting)
        if core.left_open.left and not self.alone:
            self.saved = core.left_open.take(phase.name, phase.training)
        self._prepare()
        if core.registry.implemented:
            core.registry.check_phase(phase)
        if core.phase_states.use(phase):
            core.holders.find_extras()
        core.witness.look((id(phase), core.registry.version))
        if self._source is not None and not self.alone:
            core.witness.look_at_data(phase.name, self.data if self.function is None else self.function)
        if phase.training and running.epochs and any(outer.window_open for outer in running.epochs):
            raise ReentrancyError(f"phase {phase.name!r} trains inside an open accumulation window")
        if self.saved is None:
            loop.open(None, in_hook, core.requests.stopped)
        else:
            loop.open(self.saved["steps"], in_hook, None)
            restore_windows(self, self.saved["windows"])
            self._stores = {name: dict(store) for name, store in self.saved.get("stores", {}).items()}
        loop.replan()
        if loop.plan.awaited and self.saved is None:
            loop.await_events()
        self._begin(core)
        return self

    def _prepare(self) -> None:
        """Let a function make its data, and tell them which epoch it is."""
        source = self._source
        places = self._core.places
        if source is None:
            return
        if source.made:
            self.data, length, self.made_with = places.make(self, source)
            if self.length is None:
                self.length = length
                self.loop.go_on_to(length)
        places.meet(self.data)
        if self.trains:
            set_epoch(self.data, self._core.progress.epochs)

    def _begin(self, core: Core) -> None:
        """Enter the contexts and fire ``EpochBegin``."""
        if (outer := core.logbook.epoch) is not None:
            under_way = outer.trains and outer.current is not None and not outer.current.ended
            self._outer = outer
            self.around = outer.around + under_way
        self.depth = len(core.running.epochs)
        core.running.epochs.append(self)
        core.logbook.move_to(self)
        try:
            try:
                if self.trains:
                    core.models.module_modes.wake(core.notices.say_once)
                    core.models.module_modes.say_kept(core.notices.say_once)
                    _say_short(core, self)
                if core.metrics:
                    core.forget_metrics(f"{self.name}/")
                with Shield():
                    self.contexts.enter(self, self.loop.plan.epoch_contexts)
                if (fire := self.loop.plan.fire[EpochBegin]) is not None:
                    fire(self)
            except (CancelEpoch, CancelFit) as cancel:
                self.pending = cancel
            if core.requests.world.size > 1:
                _compare(core.requests.world, self)
                self.pending = self.loop.settle_cancel(self.pending)
                if (
                    not self.resumed and len(core.running.open_epochs) > 1
                ):  # what was asked for around it is not for this one
                    self.loop.count_stops_from(core.requests.stopped)
        except BaseException as error:
            self._leave(error)
            raise
        self.goes_on = self.data is None

    def batches(self) -> Iterable[Any]:
        """The batches of the data that the epoch was given, from where a saved state was."""
        if self.data is None:
            raise PhaseError(f"phase {self.name!r}: learner.epoch was given no data=..., so it has no batches")
        core = self._core
        if self.alone and core.running.fit is not None and core.running.epochs[-1] is self:
            core.places.inner(self._key(), self.data)
        batches, self.begun, length = core.places.batches(self)
        if length != self.length:
            self.length = length
            self.loop.go_on_to(length)
        if core.left_open.left and not self.alone:
            core.left_open.restore_generators()
        self.goes_on = True
        if length is None and not self.trains:
            return named_if_endless(batches, self.name, core.progress, core.notices.say_once)
        return batches

    def indices(self, step: int) -> Tensor | None:
        """Which samples the batch of a step, the last one, holds; None if the data does not know."""
        return indices_of(self.data, step)

    def _key(self) -> str:
        """Where in a fit it is run by a hook: in which epoch, of which phase, for the how-manieth time."""
        if self._outer is None:
            return f"fit/{self.name}/0"
        turn = self._outer.turns.get(self.name, 0)
        self._outer.turns[self.name] = turn + 1
        return f"{self._outer.name}/{self.name}/{turn}"

    def mark(self) -> EpochStart | None:
        """Record the state as of the epoch's begin, for ``learner.state_dict(at=...)`` when a step fails later.

        Call it in ``epoch_context``, when the epoch begins. Returns None if there is no such state to make: the epoch
        trains, a hook runs it, or it was resumed from a saved state, which still holds.
        """
        if self.alone or self.trains or self.resumed or self.data is None:
            return None
        return self._core.saving.mark(self)

    def compare_casts(self) -> None:
        """Raise if weights change through ``.data`` between two forwards of its first step, under autocast.

        Versions do not show such a change, so it is looked at by value, which waits for the device.
        """
        self._core.models.casts.compare_values(True)

    def go_on_at(self, steps: int) -> None:
        """Count on from so many steps."""
        self.loop.go_on_at(steps)

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
        if self._core.left_open.left and not self.alone:
            self._core.left_open.restore_generators()
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
            run: What runs the steps, and says whether they were all taken; by default the plain loop of the steps.
        """
        with bounded_wait(self.data, timeout, lambda: self.steps):
            if self._core.requests.waits and self._source is not None and self._source.made:
                self._core.answers.answer()  # what came while a function made the data
            batches = self.batches()
            if self.pending is not None:
                raise self.pending
            if run is not None:
                complete = run(self, batches)
            elif complete := self.loop.seen == self._core.requests.version or not self.loop.stopped:
                complete = self.loop.run(batches)
            if complete:
                self.check_count(first)
                self._core.places.counts.count(self)
            elif self.saved is not None and self.saved["steps"] == self.steps:  # without another batch
                self._core.left_open.restore_generators()
                leave(self.data)

    @property
    def first_process(self) -> bool:
        """Whether it runs in the process of rank 0, whose data a state knows."""
        return self._core.requests.world.rank == 0

    def agree_on(self, problem: str) -> str:
        """Return the problem of the first process that has one, if the epoch was resumed."""
        world = self._core.requests.world
        return problem if world.size == 1 else next(filter(None, world.gather(problem)), "")

    def check_count(self, first: bool) -> None:
        """After all batches: look at how many they were."""
        assert self._source is not None
        self._source.check_count(self.data, self.steps, self.length, first)

    def agree(self, *numbers: float) -> list[float]:
        """Let every process act, after this step, on what any of them asks for: stops, cancels, saves and signals.

        For plugins that sync processes; all call it at the same step. One collective.

        Args:
            numbers: Sent along.

        Returns:
            The highest of each number over the processes.
        """
        return self.loop.agree(*numbers)

    # Its end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.finish(self.end(error))
        return not isinstance(error, GeneratorExit)

    def end(self, error: BaseException | None) -> Cancel | None:
        """Close the windows, fire ``EpochEnd`` and leave the contexts; returns the cancel that ended it, if one did.

        Raises:
            BaseException: What was raised in it, unless that ends an epoch normally.
        """
        core = self._core
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
            locate(raised, core.running.where(self.phase, None))
            try:
                self._leave(raised)  # a saver's context may want the windows as they are
            finally:
                loop.drop_windows()
            raise
        self._leave(None)
        if loop.awaited is not None and cancel is None and error is None:
            loop.say_missed(loop.awaited)
        if self.trains:
            core.progress.epochs += 1
        return cancel

    def finish(self, cancel: Cancel | None) -> None:
        """Fire ``PhaseEnd``, and raise what ends more than the epoch.

        Raises:
            CancelFit: The fit, or what is around the epoch, ends by it.
        """
        core = self._core
        loop = self.loop
        if (fire := loop.plan.fire[PhaseEnd]) is not None:
            core.logbook.move_to(self)
            try:
                with core.running.hook():
                    cancel = stronger(cancel, _caught(partial(fire, self)))
            finally:
                core.logbook.move_to(self._outer)
        if core.requests.world.size > 1:
            cancel = loop.settle_cancel(cancel)
        if isinstance(cancel, CancelFit):
            if core.running.fit is not None or core.running.epochs:
                raise cancel
            core.requests.stop(cancel.reason, cancel.by)

    def _leave(self, error: BaseException | None) -> None:
        """Leave the contexts, be it because of an error; from here on it is not open."""
        with Shield():
            try:
                self.contexts.leave(error)
            finally:
                self._core.running.epochs.remove(self)
                self.loop.close()
                self._core.logbook.move_to(self._outer)

    def abandon(self, error: BaseException) -> None:
        """Leave it without its events, after an interrupt that came while it was left."""
        self.loop.drop_windows()
        self._leave(error)


def _say_short(core: Core, epoch: Epoch) -> None:
    """Say once if windows stay short, which may not be meant."""
    if epoch.length is None or epoch.length >= core.flags.accumulate:
        return
    many = "1 batch" if epoch.length == 1 else f"{epoch.length} batches"
    core.notices.say_once(
        f"accumulate is {core.flags.accumulate}, but an epoch of phase {epoch.name!r} has {many}, and its end closes "
        f"the window: each update is of {many}"
    )


def _compare(world: World, epoch: Epoch) -> None:
    """Raise for an epoch that is not the same in all processes."""
    said = world.gather((epoch.name, epoch.length, epoch.steps))
    if any(each != said[0] for each in said):
        each = "; ".join(f"rank {rank}: {_described(*what)}" for rank, what in enumerate(said))
        raise WorldError(
            f"the processes begin different epochs ({each}): give all of them the same phases in the same order, and "
            f"data with the same number of batches; loopkit's own loaders are shared out so"
        )


def _described(phase: str, length: int | None, steps: int) -> str:
    many = "batches of a number that is not known" if length is None else f"{length} batches"
    return f"phase {phase!r} over {many}" + (f" from step {steps} on" if steps else "")


def _caught(act: Callable[[], None]) -> Cancel | None:
    try:
        act()
    except (CancelEpoch, CancelFit) as cancel:
        return cancel
    return None


def _plain(value: Any) -> Any:
    """The saved form of a value in a store."""
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if type(value) is dict:
        return {key: _plain(part) for key, part in value.items()}
    return type(value)(_plain(part) for part in value) if type(value) in (list, tuple) else value
