"""The weights after a step that made no update, compared with those before it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor

from loopkit import Step
from loopkit.author import plugin_name
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.phases import Phase
from loopkit_testing.bits import difference, largest_move, weights
from loopkit_testing.case import Case, changed_by
from loopkit_testing.troubles import Trouble

FIRST, LAST = "!!before", "~~after"
UNTOUCHED = ("move_batch", "step_begin", "step_context")
"""The hooks of a step that come before the model runs, which changes buffers by itself."""
MOVED = "weights are left moved"
ROUNDING = 1e-4
"""The largest move, for weights of size 1, that rounding leaves where what was added is subtracted again."""
BEYOND = 16
"""How much larger than the rounding of whole steps a move is that was left."""


class Guard:
    """Compares, bit by bit, the weights after a step that made no update with those before it."""

    def __init__(self, plugins: list[Any], trouble: Trouble | None = None) -> None:
        self._trouble = trouble
        self.plugins = [_Before(self), _After(self)]
        self.order = [pair for p in plugins for pair in ([FIRST, plugin_name(p)], [plugin_name(p), LAST])]
        self.whole = 0.0
        """The largest move, relative to the weights, after an uncancelled step without an update."""
        self._rounding = 0.0
        self._moved = ""
        self._off = False
        self._untouched = False
        self._before: dict[str, Tensor] = {}
        self._updates = 0
        self._at_work = False
        """Whether an optimizer that evaluates a closure has been at the weights in this step."""

    def arm(self, hook: str) -> None:
        """The next step that makes no update ends in this hook."""
        self._before, self._moved, self._untouched = {}, "", hook in UNTOUCHED

    def tolerate(self, whole: float) -> None:
        """Whole steps leave moves of this size: rounding is allowed for, and beyond it the comparison stops."""
        self._off = whole > ROUNDING
        self._rounding = whole * BEYOND

    def begin(self, learner: Learner) -> None:
        """A step begins. It is not compared where other weights stand in the place of the models' own."""
        self._at_work = False
        over = self._trouble is not None and not self._trouble.armed
        found = {} if self._off or over or learner.models.weights.by else weights(learner)
        self._before = {name: tensor.clone() for name, tensor in found.items()}
        self._updates = learner.progress.updates

    def evaluated(self) -> None:
        """An optimizer has evaluated its closure, and may move the weights to evaluate it again."""
        self._at_work = True

    def end(self, learner: Learner) -> tuple[str, float]:
        """End a step; returns the path of the moved tensor, and how far, if no update was made or tried."""
        before, self._before = self._before, {}
        if not before or self._at_work or learner.progress.updates != self._updates:
            return "", 0.0
        now, kept = weights(learner), _own(learner, self.order[0][1], self._untouched)
        was, are = {k: before[k] for k in kept}, {k: now[k] for k in kept}
        path = difference(was, are, "params", ())
        return path, largest_move(was, are) if path else 0.0

    def compare(self, learner: Learner) -> None:
        """The step was cancelled, or has failed; not compared if a plugin has cancelled it by itself."""
        moved, far = self.end(learner)
        if far <= self._rounding:
            return
        if self._trouble is None or not self._trouble.armed:
            self._moved = self._moved or moved

    def told(self) -> str:
        """A message, if weights were left moved."""
        if not self._moved:
            return ""
        return (
            f"{MOVED}: the step made no update, and {self._moved} is not what it was before it. Put them back in "
            f"backward_end, and with finally in a step_context, which is left after a cancel and an error too: "
            f"backward_end comes after neither, and step_cancelled after no error"
        )


def _own(learner: Learner, plugin: str, untouched: bool) -> list[str]:
    """The names of the parameters, and of the buffers if no code that may change them has run."""
    changed = {state.split(".")[0] for state in changed_by(learner, plugin)}
    params = [f"{top}.{name}" for top, model in learner.models.items() for name, _ in model.named_parameters()]
    now = weights(learner)
    buffers = untouched and not changed & {"buffers", "model", "weights"}
    return [name for name in now if buffers or name in params]


class _Before:
    name = FIRST
    optional = ("update_begin",)
    volatile = ("*",)

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    @hookimpl
    def step_begin(self, learner: Learner, phase: Phase) -> None:
        if phase.training:
            self.guard.begin(learner)

    @hookimpl
    def update_begin(self, step: Step) -> None:
        if step.closure is not None:
            self.guard.evaluated()


class _After:
    name = LAST
    volatile = ("*",)

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    @hookimpl
    def step_cancelled(self, learner: Learner) -> None:
        self.guard.compare(learner)

    @hookimpl
    def step_end(self, learner: Learner) -> None:
        self.guard.whole = max(self.guard.whole, self.guard.end(learner)[1])


def guarded(case: Case, plugins: list[Any], trouble: Trouble) -> Guard:
    """A guard for these plugins, which is off if they move weights in whole steps without an update.

    Moves as small as rounding are no such moves: the guard then looks for larger ones.
    """
    guard = Guard(plugins, trouble)
    again = case.plugins()
    trial = Guard(again)
    with suppress(Exception):  # another check reports it
        case.bench([*again, *trial.plugins], order=trial.order, accumulate=2).train(epochs=1, short=True)
    guard.tolerate(trial.whole)
    return guard
