"""Training: what a phase that trains must not do itself."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from loopkit.errors import PhaseError

if TYPE_CHECKING:
    from loopkit.engine.step import Step
    from loopkit.engine.window import Window
    from loopkit.phases import Phase

__all__ = ["lost_gradients"]


def lost_gradients(phase: Phase, step: Step, window: Window) -> PhaseError:
    """What to say where the gradients of a window's earlier steps are gone."""
    steps = "step" if window.count == 1 else "steps"
    return PhaseError(
        f"phase {phase.name!r}, step {step.index}: the gradients of the {window.count} {steps} before it are gone, of an "
        f"update that takes {window.size}. A zero_grad() in a phase throws them away: delete "
        f"{_line(phase, 'zero_grad(') or 'it'}; the engine clears gradients when an update has been made"
    )


def _line(phase: Phase, text: str, unless: str = "") -> str:
    """The first line of the phase's class that holds a text; empty without one."""
    try:
        lines, first = inspect.getsourcelines(type(phase))
        file = inspect.getsourcefile(type(phase))
    except (OSError, TypeError):  # it was typed in, or made by exec
        return ""
    for number, line in enumerate(lines, first):
        code = line.split("#")[0]
        if text in code and not (unless and unless in code):
            return f"line {number} of {file}, {code.strip()!r}"
    return ""
