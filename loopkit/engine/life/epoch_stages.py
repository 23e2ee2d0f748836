"""The stages of an epoch: they begin in this order, and are undone in reverse when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loopkit.base.notices import Notices
from loopkit.base.world import World
from loopkit.engine.compile.registry import Registry
from loopkit.engine.kept.epoch_record import restore_windows
from loopkit.engine.kept.flags import Flags
from loopkit.engine.kept.left_open import LeftOpen
from loopkit.engine.kept.phase_states import PhaseStates
from loopkit.engine.kept.repeated import Repeated
from loopkit.engine.kept.resume import EpochStart
from loopkit.engine.kept.witness.witness import Witness
from loopkit.engine.life.answers import Answers
from loopkit.engine.life.epoch import Epoch, Stage
from loopkit.engine.life.epoch_data import EpochData
from loopkit.engine.life.holders import Holders
from loopkit.engine.life.logbook import Logbook
from loopkit.engine.life.module_modes import ModuleModes
from loopkit.engine.life.requests import Requests
from loopkit.engine.life.running import Running
from loopkit.errors import CancelFit, ReentrancyError, WorldError

if TYPE_CHECKING:
    from loopkit.engine.step.step import Step
    from loopkit.phases import Phase


class Pending(Stage):
    """Acts on what was asked for before the epoch; a stop from outside of a fit is forgotten."""

    name = "requests"

    def __init__(self, requests: Requests, answers: Answers, running: Running) -> None:
        self._requests = requests
        self._answers = answers
        self._running = running

    def begin(self, epoch: Epoch) -> None:
        """Act on what was asked for."""
        running = self._running
        if self._requests.waits:
            self._answers.answer()
        if not running.epochs and running.fit is None and not running.hooks:
            self._requests.forget_stop()


class Saved(Stage):
    """Finds whether the epoch belongs to the run, and what a loaded state holds of it."""

    name = "saved state"

    def __init__(self, left_open: LeftOpen, running: Running) -> None:
        self._open = left_open
        self._running = running

    def begin(self, epoch: Epoch) -> None:
        """Take the saved form of the epoch."""
        running = self._running
        phase = epoch.phase
        inside = bool(running.epochs) and not all(outer.loop.between for outer in running.open_epochs)
        epoch.alone = running.hooks > 0 or inside or not (phase.training or running.fit is not None)
        if self._open.left and not epoch.alone:
            epoch.saved = self._open.take(phase.name, phase.training)


class Data(Stage):
    """Makes the data, where a function makes them for each epoch."""

    name = "data"

    def __init__(self, data: EpochData) -> None:
        self._data = data

    def begin(self, epoch: Epoch) -> None:
        """Make the data."""
        self._data.prepare(epoch)


class Known(Stage):
    """Looks at a phase that is run for the first time, and at its plugins."""

    name = "phase"

    def __init__(self, registry: Registry, phases: PhaseStates, holders: Holders) -> None:
        self._registry = registry
        self._phases = phases
        self._holders = holders

    def begin(self, epoch: Epoch) -> None:
        """Look at the phase."""
        if self._registry.implemented:
            self._registry.check_phase(epoch.phase)
        if self._phases.use(epoch.phase):
            self._holders.find_extras()


class Seen(Stage):
    """Lets the witness look at what the epoch may change."""

    name = "witness"

    def __init__(self, witness: Witness, registry: Registry) -> None:
        self._witness = witness
        self._registry = registry

    def begin(self, epoch: Epoch) -> None:
        """Look at the learner, and at the data."""
        self._witness.look((id(epoch.phase), self._registry.version))
        if epoch.source is not None and not epoch.alone:
            self._witness.look_at_data(epoch.name, epoch.data if epoch.function is None else epoch.function)


class Steps(Stage):
    """Opens the loop of the steps, with the windows and stores that a saved state holds."""

    name = "steps"

    def __init__(self, requests: Requests, running: Running) -> None:
        self._requests = requests
        self._running = running

    def begin(self, epoch: Epoch) -> None:
        """Open the loop.

        Raises:
            ReentrancyError: An epoch around it has an open window, whose gradients it would change.
        """
        running = self._running
        loop = epoch.loop
        saved = epoch.saved
        if epoch.trains and running.epochs and any(outer.window_open for outer in running.epochs):
            raise ReentrancyError(f"phase {epoch.name!r} trains inside an open accumulation window")
        if saved is None:
            loop.open(None, running.hooks > 0, self._requests.stopped)
        else:
            loop.open(saved["steps"], running.hooks > 0, None)
            restore_windows(epoch, saved["windows"])
            epoch.load_stores(saved.get("stores", {}))
        loop.replan()
        if loop.plan.awaited and saved is None:
            loop.await_events()

    def leave(self, epoch: Epoch, error: BaseException | None) -> None:
        """Let go of the last step."""
        epoch.loop.close()


class Opened(Stage):
    """Enters the epoch into the list of open ones."""

    name = "open"

    def __init__(self, running: Running, logbook: Logbook) -> None:
        self._running = running
        self._logbook = logbook

    def begin(self, epoch: Epoch) -> None:
        """Open it: from here on things are logged in it."""
        epoch.nest(self._logbook.epoch, len(self._running.epochs))
        self._running.epochs.append(epoch)
        self._logbook.move_to(epoch)

    def leave(self, epoch: Epoch, error: BaseException | None) -> None:
        """Close it, unless an interrupt came before it was open."""
        if epoch in self._running.epochs:
            self._running.epochs.remove(epoch)
            self._logbook.move_to(epoch.outer)


class Modules(Stage):
    """Wakes modules that are trained, and names what may not be meant."""

    name = "modules"

    def __init__(self, modes: ModuleModes, flags: Flags, notices: Notices) -> None:
        self._modes = modes
        self._flags = flags
        self._notices = notices

    def begin(self, epoch: Epoch) -> None:
        """Wake modules."""
        if not epoch.trains:
            return
        say = self._notices.say_once
        self._modes.wake(say)
        self._modes.say_kept(say)
        steps = self._flags.accumulate
        if epoch.length is not None and epoch.length < steps:
            many = "1 batch" if epoch.length == 1 else f"{epoch.length} batches"
            say(
                f"accumulate is {steps}, but an epoch of phase {epoch.name!r} has {many}, and its end closes the "
                f"window: each update is of {many}"
            )


class Metrics(Stage):
    """Forgets the metrics of the last epoch of the phase."""

    name = "metrics"

    def __init__(self, metrics: dict[str, float]) -> None:
        self._metrics = metrics

    def begin(self, epoch: Epoch) -> None:
        """Forget them."""
        prefix = f"{epoch.name}/"
        for name in list(self._metrics):
            if name.startswith(prefix):
                del self._metrics[name]


class Hooked(Stage):
    """Enters the contexts of the epoch, and fires ``epoch_begin``."""

    name = "contexts and epoch_begin"

    def begin(self, epoch: Epoch) -> None:
        """Enter the contexts, then fire the event."""
        epoch.enter_contexts()

    def leave(self, epoch: Epoch, error: BaseException | None) -> None:
        """Leave the contexts."""
        epoch.contexts.leave(error)


class Together(Stage):
    """Compares the epoch among processes that train together."""

    name = "processes"

    def __init__(self, requests: Requests, running: Running) -> None:
        self._requests = requests
        self._running = running

    def begin(self, epoch: Epoch) -> None:
        """Compare the epoch.

        Raises:
            WorldError: The processes begin different epochs.
        """
        world = self._requests.world
        if world.size == 1:
            return
        _compare(world, epoch)
        agreement = epoch.loop.agreement
        epoch.pending = agreement.settle(epoch.pending)
        if not epoch.resumed and len(self._running.open_epochs) > 1:  # what was asked for around it is not for this one
            agreement.count_stops_from(self._requests.stopped)


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


class EpochLife:
    """The stages of epochs, and what comes after them.

    Args:
        stages: Begun in this order, and left in reverse.
        data: Gives epochs their data.
        running: The fit and the epochs that run now.
        logbook: Where things are logged.
        requests: The mailbox.
        repeated: Lets hooks of an epoch's begin run again.
        mark: Returns the state as of the begin of an epoch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        data: EpochData,
        running: Running,
        logbook: Logbook,
        requests: Requests,
        repeated: Repeated,
        mark: Callable[[Epoch], EpochStart | None],
    ) -> None:
        self.stages = stages
        self.repeated = repeated
        self.mark = mark
        self._data = data
        self._running = running
        self._logbook = logbook
        self._requests = requests

    @property
    def number(self) -> int:
        """The training epoch that runs, or after which something else does, from 1."""
        return self._running.number

    def where(self, phase: Phase, step: Step | None) -> str:
        """Phase, epoch and step, for messages."""
        return self._running.where(phase, step)

    def batches(self, epoch: Epoch) -> Iterable[Any]:
        """The batches of an epoch, from where a saved state was."""
        return self._data.batches(epoch)

    def restore_generators(self, epoch: Epoch) -> None:
        """Put the random generators where a loaded state has them."""
        self._data.restore_generators(epoch)

    def end_steps(self, epoch: Epoch, complete: bool, first: bool) -> None:
        """The steps of an epoch are over."""
        self._data.end(epoch, complete, first)

    @contextmanager
    def ending(self, epoch: Epoch) -> Iterator[None]:
        """Inside, the ``phase_end`` of an epoch runs."""
        self._logbook.move_to(epoch)
        try:
            with self._running.hook():
                yield
        finally:
            self._logbook.move_to(epoch.outer)

    def end_by(self, cancel: CancelFit) -> None:
        """End what is around an epoch by a cancel that came in it.

        Raises:
            CancelFit: A fit or another epoch is around it.
        """
        if self._running.fit is not None or self._running.epochs:
            raise cancel
        self._requests.stop(cancel.reason, cancel.by)
