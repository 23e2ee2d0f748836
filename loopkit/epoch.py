"""Epoch: one pass of a phase over its data, with its events, contexts, modes and control flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from loopkit.batches import count_samples, describe
from loopkit.dispatch import Plan, locate, shown
from loopkit.distributed.agreement import Agreement
from loopkit.errors import (
    Cancel,
    CancelEpoch,
    CancelFit,
    CancelStep,
    PhaseError,
    PhaseInputError,
    ReentrancyError,
    StepResultError,
)
from loopkit.events import (
    BackwardBegin,
    BackwardEnd,
    EpochBegin,
    EpochEnd,
    Event,
    PhaseEnd,
    StepBegin,
    StepCancelled,
    StepEnd,
    UpdateBegin,
    UpdateEnd,
    UpdateSkipped,
)
from loopkit.phases import VERBS
from loopkit.state import restore_windows, resume_data
from loopkit.step import Step, autocast_off
from loopkit.window import Window

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["Epoch"]

PAIRS = (tuple, list)
SIGNALLED = -1
"""In the place of the number of changes: look again after the next step, since a signal waits for an edge."""
T = TypeVar("T")


class StopEpoch(Exception):
    """Leaves a user's loop at the first step after ``learner.stop``, as a normal end of the epoch."""


class Epoch:
    """One pass of a phase; made by ``learner.epoch(phase)`` and used as a context manager.

    Example::

        with learner.epoch("train", length=len(batches)) as epoch:
            for batch in batches:
                step = epoch.step(batch)
    """

    def __init__(self, learner: Learner, phase: Phase, length: int | None) -> None:
        self.learner = learner
        self.phase = phase
        self.name, self.trains = phase.name, phase.training
        self.around = 0
        """Training steps that are under way around it: it runs in a hook of theirs."""
        self._outer_place: Epoch | None = None
        self.set_length(length)
        self.windows: tuple[Window, ...] = ()
        self._taken = 0
        self.current: Step | None = None
        """The last step that was begun, while the pass runs."""
        self.pending: Cancel | None = None
        """A cancel raised at ``epoch_begin``; the first step raises it."""
        self.data: Any = None
        """What the engine iterates over; None in a loop of the user's own."""
        self.alone = False
        """Whether it belongs to no run that could be saved: an ``evaluate`` outside of a fit, or run by a hook."""
        self.made = False
        """Whether a function made the data for this pass."""
        self.begun: Any = None
        """The random generators when the pass began, if a replay of its data will need them."""
        self.between = False
        """Whether it is between two steps, with no hook running."""
        self.saved: dict[str, Any] | None = None
        """What a loaded state holds of this pass, if it was open then."""
        self.outer: tuple[Agreement, Agreement | None] | None = None
        """What this process asks the others for, and what is agreed on, in the pass around this one."""
        self.goes_on = False
        """Its ``epoch_begin`` is over and its data are where they were: what comes now is new, be it resumed."""
        self.ended: Callable[[], None] | None = None
        """Called when the pass has ended, not after an error, before ``phase_end``."""
        self._failure: BaseException | None = None
        """What a step raised."""
        self._closing = False
        """Its last update, or its end, is under way, after the last step."""
        self._contexts = ExitStack()
        grad_modes: dict[str, Callable[[], Any]] = {
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
            "grad": nullcontext,
        }
        if phase.grad_mode not in grad_modes:
            raise PhaseError(f"{phase!r}: grad_mode is {phase.grad_mode!r}; it is one of {', '.join(grad_modes)}")
        self._grad_mode: Callable[[], Any] | None = grad_modes[phase.grad_mode]

    def go_on_at(self, steps: int) -> None:
        """Count on from so many steps."""
        self._taken = steps

    def batches(self) -> Iterable[Any]:
        """The batches of the data that the pass was given, from where a saved state was."""
        if self.data is None:
            raise PhaseError(f"phase {self.phase.name!r}: learner.epoch was given no data=..., so it has no batches")
        batches: Iterable[Any] = resume_data(self, self.learner._pending)
        if not self.alone and not (self.made and hasattr(self.data, "__next__")):  # else it is of this pass alone
            self.learner._remember(self.phase.name, self.data)
        self.goes_on = True
        return batches

    def set_length(self, length: int | None) -> None:
        """Say how many steps there will be, if that is known."""
        self.length = length
        self.last_index = -1 if length is None else length - 1

    @property
    def steps(self) -> int:
        """Steps begun so far, cancelled ones included."""
        return self._taken if self.current is None else self.current.index + 1

    @property
    def resumed(self) -> bool:
        """Whether the pass goes on from a state that was loaded: its ``epoch_begin`` has come once before."""
        return self.saved is not None

    @property
    def at_edge(self) -> bool:
        """Whether no step is under way."""
        return not self._closing and (self.current is None or self.current.ended)

    @property
    def window_open(self) -> bool:
        """Whether any optimizer's accumulation window holds gradients that wait for their update."""
        return any(window.count for window in self.windows)

    def window(self, name: str) -> Window:
        """The window of an optimizer."""
        for window in self.windows:
            if window.name == name:
                return window
        names = ", ".join(repr(window.name) for window in self.windows)
        raise PhaseError(f"no optimizer is called {name!r}; there are: {names or 'none'}")

    def __enter__(self) -> Epoch:
        learner, phase = self.learner, self.phase
        learner._answer_signal()
        if learner._cancelled is not None and not learner._ending:
            raise learner._cancelled
        if not learner._epochs and not learner._fitting and not learner._ending:
            learner._stop = None
        self.in_hook = learner._ending > 0
        nested = self.in_hook or not all(epoch.between for epoch in learner.open_passes)
        self.alone = nested or not (phase.training or learner._fitting)
        if not self.alone:
            self.saved = learner._take_pass(phase)
        if self.saved is None:
            learner._leave_if_stopped()
        self._stop_before = None if self.resumed else learner._stop
        learner._check_phase(phase)
        if phase.training:
            self._grad_mode = None if torch.is_grad_enabled() else torch.enable_grad
            if any(window.count for outer in learner._epochs for window in outer.windows):
                raise ReentrancyError(f"phase {phase.name!r} trains inside an open accumulation window")
            self.windows = learner._make_windows()
        if self.saved is not None:
            self._taken = self.saved["steps"]
            restore_windows(self, self.saved["windows"])
        if learner.world.size > 1 and learner._epochs:  # what the outer pass asks for is not for this one
            self.outer = learner._asked, learner._due
            learner._asked, learner._due = Agreement(), None
        self._replan()
        learner._epochs.append(self)
        if (outer := learner._place) is not None:
            under_way = outer.trains and outer.current is not None and not outer.current.ended
            self._outer_place, self.around = outer, outer.around + under_way
        learner._move_to(self)
        self._contexts.callback(self._forget)
        try:
            self.set_modes()
            self._contexts.callback(self.restore_modes)
            learner._forget_metrics(phase)
            for make in self.plan.epoch_contexts:
                if (context := make()) is not None:
                    self._contexts.enter_context(context)
            self._fire(EpochBegin)
        except (CancelEpoch, CancelFit) as cancel:
            self.pending = cancel
        except BaseException as error:
            locate(error, self._of_context("epoch_context", None))
            self._leave(error)
            raise
        if learner.world.size > 1:
            try:
                learner._meet(self)
            except BaseException as error:
                self._leave(error)
                raise
        self.goes_on = self.data is None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        learner = self.learner
        cancel: Cancel | None = self.pending
        if learner._changes != self._changes:
            self._replan()
        try:
            if isinstance(error, (CancelEpoch, CancelFit)):
                cancel = error
            elif error is not None and (error is self._failure or not isinstance(error, (StopEpoch, GeneratorExit))):
                raise error
            self._closing = True
            if cancel is None:
                cancel = self._catch(self._close_windows)
            self._drop_windows(lambda window: True)
            cancel = self._stronger(cancel, self._catch(lambda: self._fire(EpochEnd)))
        except BaseException as raised:
            locate(raised, learner.where(self.phase, None))
            try:
                self._leave(raised)  # a saver's context may want the windows as they are
            finally:
                self._drop_windows(lambda window: True)
            if raised is error:
                return False
            raise
        self._leave(None)
        if self.phase.training:
            learner.progress.epochs += 1
        if self.ended is not None:
            self.ended()
        learner._ending += 1
        learner._move_to(self)
        try:
            cancel = self._stronger(cancel, self._catch(lambda: self._fire(PhaseEnd)))
        finally:
            learner._ending -= 1
            learner._move_to(self._outer_place)
        learner._end_of_pass(self, cancel)
        return not isinstance(error, GeneratorExit)

    @property
    def stopped(self) -> bool:
        """Whether ``learner.stop`` was called during this pass."""
        return self.learner._stop is not self._stop_before

    def last_step(self) -> Step:
        """The step before the first one of a resumed pass, as far as it is known."""
        step = Step(self, self._taken - 1, None, 0)
        step.ended = step.had_backward = True
        return step

    def _forget(self) -> None:
        """Let go of the last step, whose graph would live on in the cycle of epoch and step."""
        self.learner._epochs.remove(self)
        self._taken, self.current = self.steps, None
        self.learner._move_to(self._outer_place)

    def set_modes(self) -> None:
        """Put the modules in the phase's mode, remembering the one that each was in."""
        self._modes = [(module, module.training) for module in self.learner._modules()]
        for model in self.learner.models.values():
            model.train(self.phase.training)

    def restore_modes(self) -> None:
        """Put the modules back in the modes in which `set_modes` found them."""
        for module, training in self._modes:
            module.training = training

    def _leave(self, error: BaseException | None) -> None:
        """Leave the contexts, be it because of an error, which none of them may swallow."""
        try:
            self._contexts.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except BaseException as raised:
            if raised is not error:
                locate(raised, self._of_context("epoch_context", None))
            raise

    def _of_context(self, hook: str, step: Step | None) -> str:
        """Where an error was raised that came from entering or leaving a context."""
        plugins = " or ".join(repr(placed.entry.plugin) for placed in self.plan.order[hook])
        who = f"in {hook} of plugin {plugins}" if plugins else "at the begin or end of the epoch"
        return f"{who}, {self.learner.where(self.phase, step)}"

    def _fire(self, event: type[Event]) -> None:
        if (fire := self.plan.fire[event]) is not None:
            fire(None)

    def _catch(self, act: Callable[[], None]) -> Cancel | None:
        try:
            act()
        except (CancelEpoch, CancelFit) as cancel:
            return cancel
        return None

    @staticmethod
    def _stronger(one: Cancel | None, other: Cancel | None) -> Cancel | None:
        return other if one is None or (isinstance(other, CancelFit) and not isinstance(one, CancelFit)) else one

    def _replan(self) -> Plan:
        """Take over the plan of the plugins as they are now."""
        changes = self.learner._changes  # read first: a handler may run between any two lines
        self._changes = SIGNALLED if self.learner.signal_waits else changes
        plan = self.plan = self.learner._registry.plan(self.phase)
        self.fire = plan.fire
        only = self.windows[0] if len(self.windows) == 1 and self.windows[0].is_plain else None
        heard = [event for event in VERBS if plan.fire.get(event) is not None]
        self.plain_backward = None if BackwardBegin in heard or BackwardEnd in heard else only
        updates = (UpdateBegin, UpdateEnd, UpdateSkipped)
        self.plain_update = None if plan.optimizer_step or any(event in heard for event in updates) else only
        return plan

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
        if self.learner._changes != self._changes:
            self._replan()
        self.run((batch,))
        assert self.current is not None
        return self.current

    def run(self, batches: Iterable[Any], after_step: Callable[[], bool] | None = None) -> bool:
        """Run a step for each batch, until ``learner.stop``.

        Args:
            batches: What the steps process.
            after_step: Called after each step; the run ends when it returns True.

        Returns:
            Whether the batches were all taken.
        """
        if not self.alone:
            self.learner._restore_generators()
        try:
            if self._grad_mode is None:
                return self._run(batches, after_step)
            for batch in batches:
                with self._grad_mode():
                    complete = self._run((batch,), after_step)
                if not complete:
                    return False
        except Cancel:
            raise
        except Exception as error:  # what a step or a hook raised has its note by now
            if self.at_edge:
                self.call_between(self.learner._answer_signal)  # a signal that also ended the loader's workers
            hint = "; workers that are spawned need functions that can be pickled: def them in a module, no lambda"
            pickling = hint if "pickle" in shown(error).lower() else ""
            where = self.learner.where(self.phase, None)
            locate(error, f"the loader raised this while making batch {self.steps}, {where}{pickling}")
            raise
        return True

    def _run(self, batches: Iterable[Any], after_step: Callable[[], bool] | None) -> bool:
        """The loop itself; what it needs in every step is in local variables, which is what makes it fast."""
        learner, phase = self.learner, self.phase
        phase_step: Callable[..., Any] = phase.step
        progress = learner.progress if phase.training else None
        index = self.steps
        changes: int | None = None
        for batch in batches:
            if changes != self._changes:
                changes, plan = self._changes, self.plan
                begin, end = plan.fire[StepBegin], plan.fire[StepEnd]
                contexts, move = plan.step_contexts, plan.move_batch
            if move is not None and batch is not None:
                batch = move(batch, index)
            first = batch[0] if batch.__class__ in PAIRS and batch else None
            samples = first.shape[0] if first.__class__ is Tensor and first.ndim else count_samples(batch)
            step = self.current = Step(self, index, batch, samples)
            index += 1
            learner._logged_at = None
            try:
                if not samples or batch is None:
                    if batch is None and phase.skip_none and not self.agrees:
                        step.ended = True
                        continue
                    raise PhaseInputError(f"batch {step.index} is {describe(batch)}: {NONE if samples else EMPTY}")
                if begin is not None:
                    begin(step)
                if contexts:
                    self._run_in_contexts(step)
                elif (result := phase_step(learner, step)) is not None:
                    raise self._bad_result(result)
            except Cancel as cancel:
                self._cancelled(step, cancel)
            except BaseException as error:
                self._explain(error, step)
                raise
            else:
                step.ended = True
                if progress is not None:
                    progress.steps += 1
                    progress.samples += samples
                if end is not None:
                    try:
                        end(step)
                    except CancelStep:
                        pass  # the step has ended already
                    except Cancel as cancel:
                        self._leave_by(cancel)
                    except BaseException as error:
                        step.ended = isinstance(error, Cancel)  # not all plugins have seen its end after an error
                        raise
            if learner._changes != changes:
                self._replan()
                self.call_between(learner._answer_signal)
                if learner._stop is not self._stop_before:
                    return False
            if after_step is not None and (self.call_between(after_step) or learner._stop is not self._stop_before):
                return False  # what it ran, such as a validation, may have asked for the stop
        return True

    def call_between(self, act: Callable[[], T]) -> T:
        """Call something between two steps."""
        self.between = not self.in_hook
        try:
            return act()
        finally:
            self.between = False

    def _run_in_contexts(self, step: Step) -> None:
        raised: BaseException | None = None
        try:
            with ExitStack() as contexts:
                for make in self.plan.step_contexts:
                    if (context := make(step)) is not None:
                        contexts.enter_context(context)
                try:
                    phase_step: Callable[..., Any] = self.phase.step
                    if (result := phase_step(self.learner, step)) is not None:
                        raise self._bad_result(result)
                except BaseException as error:
                    raised = error
                    raise
        except BaseException as error:
            if error is not raised and not isinstance(error, Cancel):
                locate(error, self._of_context("step_context", step))
            raise
        finally:
            del raised  # else a cycle with the traceback would keep the step and its graph

    def _cancelled(self, step: Step, cancel: Cancel) -> None:
        step.ended = True
        self.learner._logged_at = None
        cancel.by = cancel.by or f"phase {self.phase.name}"
        self._drop_windows(lambda window: window.step is step)
        try:
            if (fire := self.plan.fire[StepCancelled]) is not None:
                fire(step)
        except Cancel as again:
            cancel = again if isinstance(cancel, CancelStep) else self._stronger(cancel, again) or cancel
        if not isinstance(cancel, CancelStep):
            self._leave_by(cancel)

    @property
    def agrees(self) -> bool:
        """Whether several processes agree, between two of its steps, on what ends it."""
        world = self.learner.world
        return world.size > 1 and (self.phase.training or (world.in_step and self.length is not None))

    def _leave_by(self, cancel: Cancel) -> None:
        """End the pass; where processes train together, not before all of them do."""
        if self.agrees:
            self.learner._asked.cancel = self.learner._asked.cancel or cancel
        else:
            raise cancel

    def _bad_result(self, result: Any) -> StepResultError:
        name = type(self.phase).__name__
        return StepResultError(
            f"{name}.step returned {describe(result)}: a step returns nothing. Put results on the step "
            f"(step.loss = loss) and call step.backward(loss) and step.update()"
        )

    def _explain(self, error: BaseException, step: Step) -> None:
        """Say where an error came from, and what the batch was."""
        where = self.learner.where(self.phase, step)
        device = next(
            (str(p.device) for model in self.learner.models.values() for p in model.parameters()), "no parameters"
        )
        hint = "; this loss was differentiated before: compute it again in each step, or detach what is carried over"
        again = hint if "backward through the graph a second time" in shown(error) else ""
        self._failure = error
        locate(
            error,
            f"in {type(self.phase).__name__}.step, {where}; batch: {describe(step.batch)}; model on {device}{again}",
        )

    def _close_windows(self) -> None:
        """Give each window that is still open its update, after the last step."""
        for window in self.windows:
            if window.step is not None:
                try:
                    with autocast_off():
                        window.step.apply(window)
                except CancelStep:
                    window.drop()  # the step has ended already; its update does not happen
                finally:
                    torch.clear_autocast_cache()

    def _drop_windows(self, when: Callable[[Window], bool]) -> None:
        for window in self.windows:
            if window.count and when(window):
                window.drop()


EMPTY = "it has no samples; drop empty batches in the loader"
NONE = "drop such batches in the loader, or let the phase pass over them with skip_none=True (in one process alone)"
