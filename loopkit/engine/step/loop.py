"""Loop: the steps of one epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from loopkit.base.batches import describe
from loopkit.base.notes import locate, shown, warn
from loopkit.engine.compile.expected_events import ExpectedEvents
from loopkit.engine.compile.plan import Plan
from loopkit.engine.kept.data_check import Seen
from loopkit.engine.step.autocast_cache import autocast_off
from loopkit.engine.step.phase_step import PhaseStep, bad_result, explained
from loopkit.engine.step.samples import Samples
from loopkit.engine.step.step import Step, StepContext
from loopkit.engine.step.training_check import TrainingCheck, no_update
from loopkit.engine.step.window import Window
from loopkit.errors import Cancel, CancelFit, CancelStep, PhaseError, PhaseInputError, StepResultError
from loopkit.events import BackwardEnd, StepBegin, StepCancelled, StepEnd, UpdateBegin, UpdateEnd, UpdateSkipped
from loopkit.losses import is_sum

if TYPE_CHECKING:
    from loopkit.engine.life.core import Core
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.requests import Stop
    from loopkit.learner import Learner
    from loopkit.phases import Phase

PAIRS = (tuple, list)
LOOK_AGAIN = -1
"""In the place of the number of the last request: look again after the next step: one waits, or a window is open."""
GRAD_MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": nullcontext,
}


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

    def __init__(self, core: Core, epoch: Epoch, phase: Phase, length: int | None) -> None:
        self.epoch, self.phase = epoch, phase
        self.progress, self.logbook, self.casts = core.progress, core.logbook, core.models.casts
        self.windows: tuple[Window, ...] = ()
        self.optimizers = core.models.optimizers
        self.last_index = -1 if length is None else length - 1
        self.current: Step | None = None
        """The last step that was begun, while the epoch runs."""
        self.failure: BaseException | None = None
        """The error of a step."""
        self.closing = False
        """The last update, or the end, is under way, after the last step."""
        self.between = False
        """Whether it is between two steps, with no hook running."""
        self.in_hook = False
        """Whether the epoch is run by a hook that belongs to no epoch."""
        self.plan: Plan
        self._core = core
        self._taken = 0
        self.idle = False
        """Whether a step was marked by `Step.skip`."""
        self._goes_on = False
        """Whether it was resumed, with requests that may be older than it."""
        self.seen = LOOK_AGAIN
        """The number of the last request that it has looked at."""
        self._stop_before: Stop | None = None
        self._wanted: Cancel | None = None
        """The signal by which this process would end the epoch or the fit, where all processes must agree."""
        self._agreed: Cancel | None = None
        self._proof: TrainingCheck | None = None
        """The check that the phase trains; None once it is known, or if the phase does not train."""
        self._watch: TrainingCheck | None = None
        """The same, while it watches optimizers of which the engine has not made a step."""
        self.awaited: ExpectedEvents | None = None
        """Watches, in the phase's first epoch, whether the events come that it lists; None if nobody waits for any."""
        self._around: PhaseStep | None = None
        """The phase's step, where plugins have a part in how it is run."""
        self._samples = Samples(phase, core.notices.say_once)
        """How many samples a batch has."""
        self._phase_step: Callable[[Learner, Step], Any] = phase.step
        """The phase's own step, or with a plugin in its place."""
        if phase.grad_mode not in GRAD_MODES:
            raise PhaseError(f"{phase!r}: grad_mode is {phase.grad_mode!r}; it is one of {', '.join(GRAD_MODES)}")
        self._grad_mode = GRAD_MODES[phase.grad_mode]

    def open(self, taken: int | None, in_hook: bool, stop: Stop | None) -> None:
        """The epoch begins, or resumes after so many steps of it; a stop from before does not end it."""
        self._taken, self._goes_on, self.in_hook, self._stop_before = taken or 0, taken is not None, in_hook, stop
        if self.phase.training and not self.phase.own_updates:
            size, mean = self._core.flags.accumulate, not is_sum(self._core.learner.loss_fn)
            optimizers = self._core.models.optimizers.items()
            self.windows = tuple([Window(name, optimizer, size, mean) for name, optimizer in optimizers])
            if self.windows and self.phase not in self._core.shown.training:
                self._proof = self._watch = TrainingCheck(self.phase, self.windows)
        if self.phase.training:
            self._grad_mode = nullcontext if torch.is_grad_enabled() else torch.enable_grad

    def count_stops_from(self, stop: Stop | None) -> None:
        """The stop that was there before the epoch, which does not end it."""
        self._stop_before = stop

    def go_on_to(self, length: int | None) -> None:
        """Its data were put where they were: there will be so many steps in all."""
        self.last_index = -1 if length is None else length - 1

    def go_on_at(self, steps: int) -> None:
        """Count on from so many steps."""
        self._taken = steps

    def close(self) -> None:
        """Let go of the last step, whose graph would live on in the cycle of epoch and step."""
        self._taken, self.current = self.steps, None
        self.seen_data.batch = None
        if self._around is not None:
            self._around.end()
        if self._watch is not None:
            self._watch.end()

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
        return self.phase.training and self._core.requests.stopped is not self._stop_before

    @property
    def agrees(self) -> bool:
        """Whether several processes agree, between two of its steps, on what ends it."""
        world = self._core.requests.world
        return world.size > 1 and (self.phase.training or (world.in_step and self.last_index >= 0))

    def replan(self) -> None:
        """Take over the plan of the plugins as they are now, and the size of windows that are closed."""
        requests = self._core.requests
        version = requests.version  # read first: a handler may run between any two lines
        older = self._goes_on and self.current is None
        self.seen = LOOK_AGAIN if requests.waits or older else version
        for window in [each for each in self.windows if each.size != self._core.flags.accumulate]:
            if window.count:
                self.seen = LOOK_AGAIN  # until it is closed
            else:
                window.refresh(self._core.flags.accumulate)
        self._core.own_updates.check(self.phase)
        plan = self.plan = self._core.registry.plan(self.phase)
        self._samples.consider(self._core.registry.plugins.values(), self.epoch.data)
        self.fire, self.optimizer_step = plan.fire, plan.optimizer_step
        if self.awaited is not None:
            self.fire = self.awaited.watch(plan.fire)
        only = self.windows[0] if len(self.windows) == 1 and self.windows[0].is_plain else None
        self.plain_backward = None if BackwardEnd in plan.heard else only
        self.plain_update = only
        self.quiet = plan.heard.isdisjoint((UpdateBegin, UpdateEnd, UpdateSkipped)) and plan.optimizer_step is None
        self._phase_step = self.phase.step
        if plan.step_contexts or plan.take_step is not None:
            self._around = self._around or PhaseStep(
                self._core.learner, self.phase, self._core.models, self._core.running.where
            )
            self._phase_step = self._around.call(plan)

    def await_events(self) -> None:
        """See whether the events come that the phase lists, unless an epoch of it has told."""
        if self.phase not in self._core.shown.complete:
            self.awaited = ExpectedEvents(self.phase, self.plan)
            self.fire = self.awaited.watch(self.plan.fire)

    def say_missed(self, awaited: ExpectedEvents) -> None:
        """At the end of the epoch: warn of the events that did not come."""
        if self.steps and not self.stopped:
            self._core.shown.complete.append(self.phase)
            for text in awaited.missed() if self._core.requests.world.rank == 0 else ():
                warn(text)

    def last_step(self) -> Step:
        """The step before the first one of an epoch that resumes, as far as it is known."""
        step = Step(self, self.steps - 1, None, 0)
        step.ended = step.had_backward = True
        return step

    def refresh(self) -> None:
        """Take over the plan if it has changed."""
        if self.seen != self._core.requests.version:
            self.replan()

    def run(self, batches: Iterable[Any], until: StepLimits | None = None) -> bool:
        """Run a step for each batch; returns whether they were all taken, else it resumes where it was left.

        Args:
            batches: What the steps process.
            until: Where to return; what was asked for returns, too. Without it, a stop does, in an epoch that trains.
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
        except Exception as error:  # what a step or a hook raised has its note by now
            if error is self._samples.failure:
                raise
            if self.at_edge:
                with self.resting():
                    self._core.answers.answer()  # a signal that also ended the loader's workers
            lambdas = "; workers that are spawned need functions that can be pickled: def them in a module, no lambda"
            pickling = lambdas if "pickle" in shown(error).lower() else ""
            where = self._core.running.where(self.phase, None)
            locate(error, f"the loader raised this while making batch {self.steps}, {where}{pickling}")
            raise
        return True

    def _run(self, batches: Iterable[Any], until: StepLimits | None) -> bool:
        """The loop itself; what it needs in every step is in local variables, which is what makes it fast."""
        core, phase = self._core, self.phase
        learner, logbook, requests, slot = core.learner, core.logbook, core.requests, core.requests.world.slot
        progress, proof = core.progress if phase.training else None, self._proof
        tensor, count = self._samples.ways()
        seen = self.seen_data
        index = self.steps
        version: int | None = None
        for batch in batches:
            if version != self.seen:
                version, plan = self.seen, self.plan
                begin, end = plan.fire[StepBegin], plan.fire[StepEnd]
                contexts, move, phase_step = plan.step_contexts, plan.move_batch, self._phase_step
                self._samples.look(batch)
            seen.batch = batch
            if move is not None and batch is not None:
                batch = move(batch, index)
            first = batch[0] if batch.__class__ in PAIRS and batch else batch
            samples = first.shape[0] if first.__class__ is tensor and first.ndim else count(batch)
            step = self.current = Step(self, index, batch, samples)
            index += 1
            logbook.place, slot[0] = None, index
            try:
                if not samples or (batch is None and not phase.batchless):
                    if (samples := self._count_again(step, count)) is None:
                        continue
                if begin is not None:
                    begin(step)
                if contexts and self._around is not None:
                    self._around.in_contexts(phase_step, step, plan)
                elif (result := phase_step(learner, step)) is not None:
                    raise bad_result(phase, result)
                if proof is not None and proof.look(step, step.update_overdue):
                    self._end_proof(proof)
                    proof = None
            except Cancel as cancel:
                self._cancel_step(step, cancel)
            except BaseException as error:
                self.failure = explained(error, step, phase, core.models, core.running.where)
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
                    except BaseException as error:
                        step.ended = isinstance(error, Cancel)  # not all plugins have seen its end after an error
                        raise
            if requests.version != version:
                self._look_again()
                if self.stopped or until is not None:
                    return False
            if until is not None and until.reached(core.progress.steps, core.progress.updates):
                return False
        return True

    def _count_again(self, step: Step, count: Callable[[Any], int]) -> Any:
        """The samples of a batch that is None or begins with an empty part; None to pass over it.

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
            self._core.answers.answer()
        if self._agreed is not None:
            agreed, self._agreed = self._agreed, None
            raise agreed

    def _end_proof(self, proof: TrainingCheck) -> None:
        """The phase has shown that it trains."""
        proof.rest()
        self._core.shown.training.append(self.phase)
        self._proof = None

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, the epoch is between two steps, and no hook runs."""
        self.between = not self.in_hook
        try:
            yield
        finally:
            self.between = False

    def agree(self, *numbers: float) -> list[float]:
        """Let all processes act on what any of them asks for; returns the highest of each number."""
        wanted, self._wanted = self._wanted, None
        agreed, highest = self._core.requests.agree(self._core.progress.updates, wanted, numbers)
        self._agreed = agreed or self._agreed
        return highest

    def settle_cancel(self, cancel: Cancel | None) -> Cancel | None:
        """Agree with all processes on how the epoch, or the fit, ends, if this one wants to end it with ``cancel``."""
        self._wanted = stronger(cancel, self._wanted)
        self.agree()
        agreed, self._agreed = self._agreed, None
        return agreed

    def _cancel_step(self, step: Step, cancel: Cancel) -> None:
        step.ended = True
        self.awaited = None  # a later epoch tells
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
        self._wanted = self._wanted or cancel

    @property
    def asks(self) -> bool:
        """Whether this process wants to end the epoch, and the others do not know yet."""
        return self._wanted is not None

    def reason_to_skip(self, window: Window) -> str | None:
        """Why the update of a window is skipped from the outset: nothing in it counts.

        Where processes share their gradients, what syncs them decides, for all alike.
        """
        if self._samples.takes_empty or not window.is_void():
            return None
        plugins = self._core.registry.plugins.values()
        shared = self._core.requests.world.size > 1 and all(getattr(each, "agrees_in_steps", True) for each in plugins)
        return None if shared else "the weights of its steps sum to 0"

    def count_skip(self, reason: str) -> None:
        """An update was skipped.

        Raises:
            PhaseError: So were all of the last ones, and only a number of updates ends the fit.
        """
        fit = self._core.running.fit
        if fit is not None:
            fit.count_skip(reason)

    def close_windows(self) -> None:
        """Give each window that is still open the update that the phase asked for, after the last step.

        Raises:
            StepResultError: It never asked for one.
        """
        for window in self.windows:
            if window.last is not None and not window.asked:
                self._refuse_unasked(window)
            elif window.last is not None:
                try:
                    with autocast_off():
                        window.last.apply(window, skip=self.reason_to_skip(window))
                except CancelStep:
                    window.drop()  # the step has ended already; its update does not happen
                finally:
                    self.casts.clear()

    def _refuse_unasked(self, window: Window) -> None:
        """Raise for gradients for which no update was asked, or name them, if the phase has asked before."""
        if self._proof is not None and window.asked_in < 0:
            raise StepResultError(no_update(self.phase))
        steps = "1 step" if window.count == 1 else f"{window.count} steps"
        self._core.notices.say_once(
            f"phase {self.phase.name!r}: an epoch ended with gradients of {steps} for which step.update was not "
            f"called; they are dropped"
        )

    def drop_windows(self) -> None:
        """Drop what is still in a window."""
        for window in self.windows:
            if window.count:
                window.drop()


def stronger(one: Cancel | None, other: Cancel | None) -> Cancel | None:
    """The one that ends more; the first, if they end the same."""
    return other if one is None or (isinstance(other, CancelFit) and not isinstance(one, CancelFit)) else one


EMPTY = (
    "it has no samples; drop empty batches in the loader, or, if they are meant, as in Poisson sampling, let the phase "
    "or a plugin take them: takes_empty = True"
)
NONE = "drop such batches in the loader, or let the phase pass over them with skip_none=True (in one process alone)"
