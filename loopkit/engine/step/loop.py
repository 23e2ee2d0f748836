"""Loop: the steps of one epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from loopkit.base.batches import describe
from loopkit.base.notes import locate, shown
from loopkit.engine.kept.data.data_check import Seen
from loopkit.engine.step.agreement import Agreement, stronger
from loopkit.engine.step.autocast_cache import autocast_off
from loopkit.engine.step.phase_step import PhaseStep, bad_result, locate_step_error
from loopkit.engine.step.phase_watch import PhaseWatch
from loopkit.engine.step.samples import Samples
from loopkit.engine.step.step import Step, StepContext
from loopkit.engine.step.window import Window
from loopkit.errors import Cancel, CancelStep, PhaseError, PhaseInputError
from loopkit.events import BackwardEnd, StepBegin, StepCancelled, StepEnd, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.losses import is_sum

if TYPE_CHECKING:
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.kept.flags import Flags
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.logbook import Logbook
    from loopkit.engine.life.models import Models
    from loopkit.engine.life.requests import Stop
    from loopkit.engine.life.running import Running

PAIRS = (tuple, list)
LOOK_AGAIN = -1
"""In place of the number of the last request. No request has this number: the loop looks again after each step, until
no request waits and no window is open."""
GRAD_MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": nullcontext,
}


class WithLoss(Protocol):
    """The argument ``learner`` of hooks; the loop itself reads only its loss function."""

    loss_fn: Any


class StepLimits(NamedTuple):
    """How far steps go: to the first of these."""

    steps: float
    updates: float
    time: float
    """By ``time.monotonic``."""

    def reached(self, steps: int, updates: int) -> bool:
        """Whether one of them is there."""
        return steps >= self.steps or updates >= self.updates or time.monotonic() >= self.time


class Loop(StepContext):
    """Runs the steps of an epoch, between their events and in their contexts."""

    failure: BaseException | None = None
    """The error of a step."""
    closing = False
    """The last update, or the end, is under way, after the last step."""
    between = False
    """Whether it is between two steps, with no hook running."""
    in_hook = False
    """Whether the epoch is run by a hook that belongs to no epoch."""
    idle = False
    """Whether a step was marked by `Step.skip`."""
    _resumed = False
    """Whether it was resumed, with requests that may be older than it."""

    def __init__(
        self,
        epoch: Epoch,
        length: int | None,
        learner: WithLoss,
        models: Models,
        registry: Registry,
        running: Running,
        logbook: Logbook,
        flags: Flags,
        agreement: Agreement,
        watch: PhaseWatch,
        samples: Samples,
    ) -> None:
        phase = epoch.phase
        self.epoch = epoch
        self.phase = phase
        self.progress = running.progress
        self.logbook = logbook
        self.casts = models.casts
        self.windows: tuple[Window, ...] = ()
        self.optimizers = models.optimizers
        self._learner = learner
        self._models = models
        self._registry = registry
        self._running = running
        self._flags = flags
        self.agreement = agreement
        """How processes agree on what ends it."""
        self.watch = watch
        """The checks of the phase's first epoch."""
        self.last_index = -1 if length is None else length - 1
        self.current: Step | None = None
        """The last step that was begun, while the epoch runs."""
        self._taken = 0
        self._seen_version = LOOK_AGAIN
        """The number of the last request that it has looked at."""
        self._phase_step: PhaseStep | None = None
        """The phase's step, where plugins have a part in how it is run."""
        self._samples = samples
        """How many samples a batch has."""
        self._run_step: Callable[[Any, Step], Any] = phase.step
        """The phase's own step, or with a plugin in its place."""
        if phase.grad_mode not in GRAD_MODES:
            raise PhaseError(f"{phase!r}: grad_mode is {phase.grad_mode!r}; it is one of {', '.join(GRAD_MODES)}")
        self._grad_mode = GRAD_MODES[phase.grad_mode]

    def open(self, taken: int | None, in_hook: bool, stop: Stop | None) -> None:
        """The epoch begins, or resumes after so many steps of it; a stop from before does not end it."""
        self._taken = taken or 0
        self._resumed = taken is not None
        self.in_hook = in_hook
        self.agreement.count_stops_from(stop)
        if self.phase.training and not self.phase.own_updates:
            size = self._flags.accumulate
            mean = not is_sum(self._learner.loss_fn)
            optimizers = self._models.optimizers.items()
            self.windows = tuple([Window(name, optimizer, size, mean) for name, optimizer in optimizers])
            self.watch.see_training(self.windows)
        if self.phase.training:
            self._grad_mode = nullcontext if torch.is_grad_enabled() else torch.enable_grad

    def set_length(self, length: int | None) -> None:
        """Its data were put where they were: there will be so many steps in all."""
        self.last_index = -1 if length is None else length - 1

    def count_from(self, steps: int) -> None:
        """Count on from so many steps."""
        self._taken = steps

    def close(self) -> None:
        """Let go of the last step, whose graph would live on in the cycle of epoch and step."""
        self._taken = self.steps
        self.current = None
        self.seen_data.batch = None
        if self._phase_step is not None:
            self._phase_step.end()
        self.watch.end()

    def note_idle(self) -> None:
        """A step trains nothing by intent."""
        self.idle = True

    @property
    def steps(self) -> int:
        """Steps begun so far, cancelled ones included."""
        return self._taken if self.current is None else self.current.index + 1

    @property
    def seen_data(self) -> Seen:
        """The last batch, as the loader gave it."""
        return self._samples.seen

    @property
    def at_edge(self) -> bool:
        """Whether no step is under way."""
        return not self.closing and (self.current is None or self.current.ended)

    @property
    def stopped(self) -> bool:
        """Whether a stop came during this epoch, which trains."""
        return self.phase.training and self.agreement.stopped

    @property
    def agrees(self) -> bool:
        """Whether several processes agree, between two of its steps, on what ends it."""
        world = self.agreement.world
        return world.size > 1 and (self.phase.training or (world.in_step and self.last_index >= 0))

    def replan(self) -> None:
        """Take over the plan of the plugins as they are now, and the size of windows that are closed."""
        requests = self.agreement.requests
        version = requests.version  # read first: a handler may run between any two lines
        older = self._resumed and self.current is None
        self._seen_version = LOOK_AGAIN if requests.waits or older else version
        for window in [each for each in self.windows if each.size != self._flags.accumulate]:
            if window.count:
                self._seen_version = LOOK_AGAIN  # until it is closed
            else:
                window.refresh(self._flags.accumulate)
        self.watch.check_updates()
        plan = self.plan = self._registry.plan(self.phase)
        self._samples.read_options(self._registry.plugins.values(), self.epoch.data)
        self.fire, self.optimizer_step = plan.fire, plan.optimizer_step
        if self.watch.awaited is not None:
            self.fire = self.watch.awaited.watch(plan.fire)
        only = self.windows[0] if len(self.windows) == 1 and self.windows[0].is_plain else None
        self.plain_backward = None if BackwardEnd in plan.heard else only
        self.plain_update = only
        self.quiet = plan.heard.isdisjoint((UpdateBegin, UpdateEnd, UpdateSkipped)) and plan.optimizer_step is None
        self._run_step = self.phase.step
        if plan.step_contexts or plan.take_step is not None:
            self._phase_step = self._phase_step or self._new_phase_step()
            self._run_step = self._phase_step.call(plan)

    def leave_steps(self) -> None:
        """Leave the rest of the epoch's steps to the phase: for a plugin that takes steps, until the plugins change."""
        if self._phase_step is not None:
            self._phase_step.leave(self.plan)
            self._seen_version = LOOK_AGAIN

    def await_events(self) -> None:
        """Check that the events come that the phase lists, unless an epoch of it was checked."""
        if self.watch.await_events(self.plan) and self.watch.awaited is not None:
            self.fire = self.watch.awaited.watch(self.plan.fire)

    def end_events(self) -> None:
        """At the end of the epoch: warn of the events that did not come."""
        if self.steps and not self.stopped:
            self.watch.end_events(self.agreement.world.rank == 0)

    def _new_phase_step(self) -> PhaseStep:
        return PhaseStep(self._learner, self.phase, self._models, self._running.where)

    def last_step(self) -> Step:
        """The step before the first one of an epoch that resumes, as far as it is known."""
        step = Step(self, self.steps - 1, None, 0)
        step.ended = step.had_backward = True
        return step

    @property
    def may_start(self) -> bool:
        """Whether the first step may run: no request came since `replan`, or the epoch is not stopped."""
        return self._seen_version == self.agreement.requests.version or not self.stopped

    def refresh(self) -> None:
        """Take over the plan if it has changed."""
        if self._seen_version != self.agreement.requests.version:
            self.replan()

    def run(self, batches: Iterable[Any], until: StepLimits | None = None) -> bool:
        """Run a step for each batch; returns False if it stopped before the last one, and a later call resumes there.

        Args:
            batches: The batches of the steps.
            until: Return at a limit, and after any request. Without it, only a stop ends it, in an epoch that trains.
        """
        try:
            if self._grad_mode is not torch.inference_mode:
                with self._grad_mode():
                    return self._run(batches, until)
            for batch in batches:  # made outside: a loader may keep it, and training could not use it
                with self._grad_mode():
                    complete = self._run((batch,), until)
                if not complete:
                    return False
        except Cancel:
            raise
        except Exception as error:  # `locate` adds no second note to the errors of steps and hooks
            if error is self._samples.failure:
                raise
            if self.at_edge:
                with self.resting():
                    self.agreement.answer()  # a signal that also ended the loader's workers
            lambdas = "; workers that are spawned need functions that can be pickled: def them in a module, no lambda"
            pickling = lambdas if "pickle" in shown(error).lower() else ""
            where = self._running.where(self.phase, None)
            locate(error, f"the loader raised this while making batch {self.steps}, {where}{pickling}")
            raise
        return True

    def _run(self, batches: Iterable[Any], until: StepLimits | None) -> bool:
        """The loop itself; it is fast because all that a step needs is in local variables."""
        phase, learner, logbook, counters = self.phase, self._learner, self.logbook, self.progress
        requests, proof = self.agreement.requests, self.watch.proof
        slot = requests.world.slot
        progress = counters if phase.training else None
        tensor, count = self._samples.how_to_count()
        last_batch, index = self.seen_data, self.steps
        version: int | None = None
        for batch in batches:
            if version != self._seen_version:  # `replan` ran since the last step
                version, plan = self._seen_version, self.plan
                begin, end = plan.fire[StepBegin], plan.fire[StepEnd]
                contexts, move, run_step = plan.step_contexts, plan.move_batch, self._run_step
                self._samples.look_at_first_batch(batch)
            last_batch.batch = batch
            if move is not None and batch is not None:
                batch = move(batch, index)
            first = batch[0] if batch.__class__ in PAIRS and batch else batch
            samples = first.shape[0] if first.__class__ is tensor and first.ndim else count(batch)
            step = self.current = Step(self, index, batch, samples)
            index += 1
            logbook.place, slot[0] = None, index
            try:
                if not samples or (batch is None and not phase.batchless):
                    if (samples := self._check_empty(step, count)) is None:
                        continue
                if begin is not None:
                    begin(step)
                if contexts and self._phase_step is not None:
                    self._phase_step.in_contexts(run_step, step, plan)
                elif (result := run_step(learner, step)) is not None:
                    raise bad_result(phase, result)
                if proof is not None and proof.check_step(step, step.update_overdue):
                    self.watch.end_proof(proof)
                    proof = None
            except Cancel as cancel:
                self._cancel_step(step, cancel)
            except BaseException as error:
                self.failure = locate_step_error(error, step, phase, self._models, self._running.where)
                raise
            else:
                step.ended = True
                if progress is not None:
                    progress.steps += 1
                    progress.samples += samples
                if end is not None:
                    try:
                        end(step)
                    except Cancel as cancel:
                        self._leave_by(cancel)
                    except BaseException:
                        step.ended = False  # not all plugins have seen its end
                        raise
            if requests.version != version:  # always so while it is to look again
                self._look_again()
                if self.stopped or until is not None:
                    return False
            if until is not None and until.reached(counters.steps, counters.updates):
                return False
        return True

    def _check_empty(self, step: Step, count: Callable[[Any], int]) -> Any:
        """Count a batch that is None or begins with an empty part; returns None if the loop leaves it out.

        Raises:
            PhaseInputError: It is None or holds no sample, and nobody said what to do with it.
        """
        step.samples = step.weight = samples = count(step.batch)
        if step.batch is not None and (samples or self._samples.takes_empty):
            return samples
        if step.batch is not None or not self.phase.skip_none or self.agrees:
            raise PhaseInputError(f"batch {step.index} is {describe(step.batch)}: {NONE if samples else EMPTY}")
        step.ended = True
        return None

    def _look_again(self) -> None:
        """The plan or the size of windows has changed, or something was asked for: take it over, and do that."""
        self.replan()
        with self.resting():
            self.agreement.answer()
        if (agreed := self.agreement.take()) is not None:
            raise agreed

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, the epoch is between two steps, and no hook runs."""
        self.between = not self.in_hook
        try:
            yield
        finally:
            self.between = False

    def _cancel_step(self, step: Step, cancel: Cancel) -> None:
        step.ended = True
        self.watch.forget_events()
        self.logbook.place = None
        cancel.by = cancel.by or f"phase {self.phase.name}"
        for window in self.windows:
            if window.count and window.last is step:
                window.drop()
        try:
            if (fire := self.plan.fire[StepCancelled]) is not None:
                fire(step)
        except Cancel as again:
            cancel = again if isinstance(cancel, CancelStep) else stronger(cancel, again) or cancel
        self._leave_by(cancel)

    def _leave_by(self, cancel: Cancel) -> None:
        """End the epoch, unless only the step ends; where processes train together, not before all of them do."""
        if isinstance(cancel, CancelStep):
            return  # the step has ended already
        if not self.agrees:
            raise cancel
        self.agreement.want(cancel)

    def reason_to_skip(self, window: Window) -> str | None:
        """Why the update of a window is skipped from the outset: it has no weight.

        Where processes share their gradients, the syncing plugin decides, for all alike.
        """
        if self._samples.takes_empty or not window.is_void():
            return None
        plugins = self._registry.plugins.values()
        shared = self.agreement.world.size > 1 and all(getattr(each, "agrees_in_steps", True) for each in plugins)
        return None if shared else "the weights of its steps sum to 0"

    def count_skip(self, reason: str) -> None:
        """An update was skipped.

        Raises:
            PhaseError: So were all of the last ones, and only a number of updates ends the fit.
        """
        fit = self._running.fit
        if fit is not None:
            fit.count_skip(reason)

    def close_windows(self) -> None:
        """Give each window that is still open the update that the phase asked for, after the last step.

        Raises:
            StepResultError: It never asked for one.
        """
        for window in self.windows:
            if window.last is not None and not window.asked:
                self.watch.refuse_unasked(window)
            elif window.last is not None:
                try:
                    with autocast_off():
                        window.last.apply(window, skip=self.reason_to_skip(window))
                except CancelStep:
                    window.drop()  # the step has ended already; its update does not happen
                finally:
                    self.casts.clear()

    def drop_windows(self) -> None:
        """Drop what is still in a window."""
        for window in self.windows:
            if window.count:
                window.drop()


EMPTY = (
    "it has no samples; drop empty batches in the loader, or, if they are meant, as in Poisson sampling, let the phase "
    "or a plugin take them: takes_empty = True"
)
NONE = "drop such batches in the loader, or let the phase pass over them with skip_none=True (with one process)"
