"""TrainingCheck: the check that a training phase trains, and through the engine."""

from __future__ import annotations

import linecache
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from loopkit.base.notes import OWN, line_with
from loopkit.errors import PhaseError, StepResultError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from loopkit.engine.step.step import Step
    from loopkit.engine.step.window import Window
    from loopkit.phases import Phase

STEP = "loopkit.engine.step.step"
PLAN = "loopkit.engine.compile.plan"
CALLERS = ("loopkit.engine.step.loop", "loopkit.engine.step.phase_step")
"""The modules that call a phase's step."""
DIFFERENTIATES = ("backward", "_backward", "_run", "_differentiate")
"""The functions of a step that run a backward, whose hooks are the user's."""
OWN_WAY = "A phase that updates in its own way declares own_updates = True, and reports each update by step.updated()"


class TrainingCheck:
    """Watches the first steps of a phase, until it has shown that it trains, and through the engine.

    An optimizer is watched until the engine has made a step of it, or the epoch ends; the parameters are watched until
    the first windows are closed.

    Args:
        phase: A phase that trains through the engine.
        windows: The windows of the learner's optimizers.
    """

    def __init__(self, phase: Phase, windows: Sequence[Window]) -> None:
        self._phase = phase
        self._windows = windows
        self._thread = threading.get_ident()
        self._stray = ""
        """The line of a backward that the engine did not run."""
        self._stepped: set[str] = set()
        """The optimizers of which the engine has made a step."""
        self._closed: set[str] = set()
        """The optimizers whose window was closed, also if the phase never opened it."""
        self._handles: dict[str, list[RemovableHandle]] = {}
        self._params: list[RemovableHandle] = []
        for window in windows:
            see = partial(self._see_step, window.name)
            self._handles[window.name] = [each.register_step_pre_hook(see) for each in _watchable(window.optimizer)]
            watched = [p for p in window.params if p.requires_grad and p.is_leaf and not is_lazy(p)]
            for p in watched:
                self._params.append(p.register_post_accumulate_grad_hook(self._see_gradient))  # type: ignore[no-untyped-call]

    def check_step(self, step: Step, overdue: bool) -> bool:
        """Check a step that has ended; returns whether the phase has shown by now that it trains.

        Raises:
            StepResultError: It called no ``step.backward``, or no ``step.update`` after the last step of a window.
            PhaseError: It has run a backward of the models by itself.
        """
        cls = type(self._phase).__name__
        if not step.had_backward and not step.idle:
            stray = self._stray or line_with(self._phase, ".backward(", unless="step.backward(")
            instead = f"write step.backward(loss) in the place of {stray}" if stray else "end it with both calls"
            raise StepResultError(
                f"{cls}.step called no step.backward(loss), so nothing is learned, or no plugin takes part in it. A "
                f"training step has step.backward(loss) and step.update(): {instead}. A step that trains nothing by "
                f"intent calls step.skip(), or raises CancelStep, which leaves it out of the counts, too. {OWN_WAY}"
            )
        if self._stray:
            raise PhaseError(
                f"{cls}.step runs a backward that the engine does not know of, {self._stray}: its gradients are lost, "
                f"or added to an update that no plugin knows of. Add the losses and call step.backward(total), or "
                f"call step.backward for each; torch.autograd.grad(loss, inputs) computes gradients of inputs. "
                f"{OWN_WAY}"
            )
        if overdue:
            raise StepResultError(no_update(self._phase))
        self._closed.update(window.name for window in self._windows if not window.count)
        return step.had_backward and len(self._closed) == len(self._windows)

    def stop_watching_params(self) -> None:
        """Stop watching the parameters, and the optimizers of which the engine has made a step."""
        _remove(self._params)
        for name in self._stepped:
            _remove(self._handles[name])

    def end(self) -> None:
        """Stop watching."""
        _remove(self._params)
        for handles in self._handles.values():
            _remove(handles)

    def _see_step(self, name: str, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise for a step of an optimizer that the engine does not make."""
        frame = sys._getframe(1)
        backward = False
        while frame is not None:
            module = frame.f_globals.get("__name__")
            if module == PLAN or (module == STEP and frame.f_code.co_name not in DIFFERENTIATES):
                self._stepped.add(name)
                return
            if module in CALLERS:
                break
            backward = backward or module == STEP
            frame = frame.f_back  # type: ignore[assignment]
        cls = type(self._phase).__name__
        where = f"a hook on a gradient, in a backward of {cls}.step," if backward else f"{cls}.step"
        if frame is None:
            where = f"{_line(sys._getframe(1))}, between two steps of phase {self._phase.name!r},"
        raise PhaseError(
            f"{where} calls optimizer.step(), past the plugins and the count of updates: write step.update() in its "
            f"place, which updates when an update is due. {OWN_WAY}"
        )

    def _see_gradient(self, param: Tensor) -> None:
        """Note a backward that the phase runs by itself; on a device, hooks run in another thread."""
        if self._stray:
            return
        # On a device, torch calls this in its own thread: only the stack of the phase's thread shows who began it.
        frame = sys._current_frames().get(self._thread)
        if frame is sys._getframe():  # a frame that holds itself would keep the step and its graph
            frame = frame.f_back
        first = frame
        while frame is not None:
            module = frame.f_globals.get("__name__")
            if module in (STEP, PLAN):
                return
            if module in CALLERS:
                self._stray = _line(first)
                return
            frame = frame.f_back


def no_update(phase: Phase) -> str:
    """The message for a phase that never asks for an update."""
    return (
        f"{type(phase).__name__}.step called step.backward(loss) but not step.update(), so no parameter changes: call "
        f"it after backward, in every step; it updates when an update is due"
    )


def _watchable(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, or those inside of it, if it is a wrapper that takes no hooks."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return [optimizer]
    inside = getattr(optimizer, "__dict__", {}).values()
    return [each for each in inside if hasattr(each, "_optimizer_step_pre_hooks")]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _line(frame: FrameType | None) -> str:
    """The line of the user's that a frame was called from, for messages."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OWN) and not frame.f_globals.get("__name__", "").startswith("torch."):
            code = linecache.getline(file, frame.f_lineno, frame.f_globals).split("#")[0].strip()
            return f"line {frame.f_lineno} of {file}" + (f", {code!r}" if code else "")
        frame = frame.f_back
    return "a line of another thread"
