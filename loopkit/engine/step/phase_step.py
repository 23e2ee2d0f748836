"""PhaseStep: how a phase's step is run: in the contexts of plugins, or by a plugin in its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from loopkit.base.batches import describe
from loopkit.base.notes import locate
from loopkit.engine.step.autocast_cache import autocast_is_on
from loopkit.engine.step.hints import hint
from loopkit.errors import Cancel, StepResultError

if TYPE_CHECKING:
    from loopkit.engine.compile.plan import Plan, Where
    from loopkit.engine.life.models import Models
    from loopkit.engine.step.step import Step
    from loopkit.phases import Phase


class PhaseStep:
    """The step of a phase in one epoch, and what autocast caches meanwhile.

    Args:
        learner: The argument of the phase's step.
        phase: The phase.
        models: Hold the weights that autocast casts.
        where: Returns phase, epoch and step in words.
    """

    def __init__(self, learner: object, phase: Phase, models: Models, where: Where) -> None:
        self._learner = learner
        self._phase = phase
        self._models = models
        self._where = where
        self._casting = False
        """Whether a step of this epoch has run under autocast."""
        self._left: Plan | None = None
        """The plan whose plugin leaves the rest of the epoch's steps to the phase."""

    def call(self, plan: Plan) -> Callable[[Any, Step], Any]:
        """The function that runs a step: the phase's own, or a plugin's in its place."""
        if plan.take_step is None or plan is self._left:
            return self._phase.step
        return partial(self._taken, plan.take_step)

    def leave(self, plan: Plan) -> None:
        """Run the phase's own steps in this epoch, until the plugins change."""
        self._left = plan

    def _taken(self, take: Callable[[object, Callable[[], None]], Any], learner: object, step: Step) -> None:
        take(step, partial(self._own, learner, step))

    def _own(self, learner: object, step: Step) -> None:
        """The phase's own step, for a plugin in its place; its errors are the phase's."""
        phase_step: Callable[..., Any] = self._phase.step
        try:
            if (result := phase_step(learner, step)) is not None:
                raise bad_result(self._phase, result)
        except Cancel as cancel:
            cancel.by = cancel.by or f"phase {self._phase.name}"
            raise
        except BaseException as error:
            locate_step_error(error, step, self._phase, self._models, self._where)
            raise

    def in_contexts(self, call: Callable[[Any, Step], Any], step: Step, plan: Plan) -> None:
        """Call the step in the contexts of plugins; errors of entering or leaving one are located here."""
        raised: BaseException | None = None
        first_under_autocast = False
        try:
            with ExitStack() as contexts:
                for make in plan.step_contexts:
                    if (context := make(step)) is not None:
                        contexts.enter_context(context)
                if first_under_autocast := not self._casting and autocast_is_on():
                    self._watch_casts()
                try:
                    if (result := call(self._learner, step)) is not None:
                        raise bad_result(self._phase, result)
                except BaseException as error:
                    raised = error
                    raise
        except BaseException as error:
            if error is not raised and not isinstance(error, Cancel):
                locate(error, plan.of_context("step_context", self._where(self._phase, step)))
            raise
        finally:
            if first_under_autocast:
                self._models.casts.compare_values(False)
            del raised  # else a cycle with the traceback would keep the step and its graph

    def _watch_casts(self) -> None:
        """Look after what autocast caches of the models, and of the modules that the phase itself holds."""
        self._casting = True
        own = {name: value for name, value in vars(self._phase).items() if isinstance(value, nn.Module)}
        self._models.casts.begin({**own, **self._models})

    def end(self) -> None:
        """The epoch is over."""
        if self._casting:
            self._models.casts.end()


def bad_result(phase: Phase, result: Any) -> StepResultError:
    """The error for a step that returned a value."""
    name = type(phase).__name__
    return StepResultError(
        f"{name}.step returned {describe(result)}: a step returns nothing. Put results on the step "
        f"(step.loss = loss) and call step.backward(loss) and step.update()"
    )


def locate_step_error(error: BaseException, step: Step, phase: Phase, models: Models, where: Where) -> BaseException:
    """The error of a step, with notes on its place and its batch."""
    place = f"in {type(phase).__name__}.step, {where(phase, step)}"
    cure = hint(error, step, models.parameters())
    locate(error, f"{place}; batch: {describe(step.batch)}; model on {models.device()}{cure}")
    return error
