"""A record of every metric, per pass and, if wanted, per step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.hooks import hookimpl
from loopkit.plugins.late import read

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult
    from loopkit.step import Step

__all__ = ["History"]


class History:
    """Keep every metric of every pass; ``FitResult.history`` holds the rows of its fit.

    Args:
        steps: Also keep the loss of every step, in `step_rows`. The values stay on the device until the pass ends.

    A row of a pass is ``{"phase", "epoch", "steps", "updates", "samples", "seconds", "<phase>/<metric>", ...}``: the
    learner's counters after the pass, the pass's duration and its metrics. ``epoch`` is the number of epochs that
    were complete by then.
    """

    name = "history"
    provides = "history"

    def __init__(self, steps: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.step_rows: list[dict[str, Any]] = []
        self._steps = steps
        self._losses: dict[str, list[tuple[int, Tensor]]] = {}
        self._started: dict[str, float] = {}
        self._first = 0

    @hookimpl
    def fit_begin(self) -> None:
        """Remember where this fit's rows begin."""
        self._first = len(self.rows)

    @hookimpl
    def fit_end(self, result: FitResult) -> None:
        """Hand over this fit's rows."""
        result.history = self.rows[self._first :]

    @hookimpl
    def epoch_begin(self, phase: Phase) -> None:
        """Start the clock."""
        self._started[phase.name] = time.monotonic()
        self._losses[phase.name] = []

    @hookimpl(reads=("loss",))
    def step_end(self, phase: Phase, step: Step) -> None:
        """Keep the loss, unread."""
        if self._steps:
            loss = getattr(step, "loss", None)
            if isinstance(loss, Tensor):
                self._losses[phase.name].append((step.index, loss.detach().mean()))

    @hookimpl(reads=("metrics", "progress"))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Make the row."""
        counts = learner.progress
        prefix = f"{phase.name}/"
        self.rows.append(
            {
                "phase": phase.name,
                "epoch": counts.epochs,
                "steps": counts.steps,
                "updates": counts.updates,
                "samples": counts.samples,
                "seconds": time.monotonic() - self._started[phase.name],
                **{name: value for name, value in learner.metrics.items() if name.startswith(prefix)},
            }
        )
        losses = self._losses.pop(phase.name)
        values = read({str(index): loss for index, loss in losses})
        self.step_rows += [
            {"phase": phase.name, "epoch": counts.epochs, "step": int(index), f"{phase.name}/loss": value}
            for index, value in values.items()
        ]

    def values(self, name: str) -> list[float]:
        """All values of one metric, such as ``"val/loss"``, in the order in which they were made."""
        return [row[name] for row in self.rows if name in row]

    def plot(self, *names: str) -> Any:
        """Draw metrics over epochs with matplotlib (``pip install loopkit[plot]``); all of them by default.

        Returns:
            The ``matplotlib`` figure, one panel per metric, the phases in one panel.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("History.plot needs matplotlib: pip install 'loopkit[plot]'") from error
        names = names or tuple(dict.fromkeys(name for row in self.rows for name in row if "/" in name))
        panels: dict[str, list[str]] = {}
        for name in names:
            panels.setdefault(name.partition("/")[2], []).append(name)
        figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(4 * max(len(panels), 1), 3), squeeze=False)
        for axis, (metric, members) in zip(axes[0], panels.items(), strict=False):
            for name in members:
                points = [(row["epoch"], row[name]) for row in self.rows if name in row]
                axis.plot(*zip(*points, strict=True), marker=".", label=name.partition("/")[0])
            axis.set(xlabel="epoch", title=metric)
            axis.legend()
        figure.tight_layout()
        return figure

    def state_dict(self) -> dict[str, Any]:
        """The rows."""
        return {"rows": [dict(row) for row in self.rows], "step_rows": [dict(row) for row in self.step_rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these rows."""
        self.rows = [dict(row) for row in state["rows"]]
        self.step_rows = [dict(row) for row in state["step_rows"]]
