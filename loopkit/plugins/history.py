"""A record of every metric, per pass and, if wanted, per step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.hooks import hookimpl
from loopkit.plugins.late import read
from loopkit.words import nearest

if TYPE_CHECKING:
    from loopkit.engine.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult

__all__ = ["History"]


@dataclass
class _Pass:
    """A pass that has begun: when, and the losses of its steps, unread."""

    phase: str
    started: float
    steps: list[int] = field(default_factory=list)
    losses: list[Tensor | float] = field(default_factory=list)

    def read(self) -> list[float]:
        return list(read({str(i): loss for i, loss in enumerate(self.losses)}).values())


class History:
    """Keep every metric of every pass; ``FitResult.history`` holds the rows of its fit.

    Args:
        steps: Also keep the loss of every step, in `step_rows`. The values stay on the device until the pass ends. Of
            several processes each keeps those of its own batches, also when it goes on from a checkpoint; those of
            processes that are no more go to the ones that are left.

    A row of a pass is ``{"phase", "epoch", "steps", "updates", "samples", "seconds", "<phase>/<metric>", ...}``: the
    learner's counters after the pass, the pass's duration and its metrics. ``epoch`` is the number of epochs that
    were complete by then. A row of a step is ``{"phase", "epoch", "step", "<phase>/loss"}``, with the same ``epoch``
    and the step's position in the pass, from 0.

    Example::

        history = History(steps=True)
        learner = Learner(model, loss_fn, optimizer, plugins=[history])
        learner.fit(train, val, epochs=3)
        history.values("val/loss")  # three numbers
    """

    name = "history"
    provides = "history"
    volatile = ("seconds",)

    def __init__(self, steps: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.step_rows: list[dict[str, Any]] = []
        self._steps = steps
        self._passes: list[_Pass] = []
        """The passes that have begun, the innermost last."""
        self._resumed: dict[str, _Pass] = {}
        self._first = self._outside = 0
        """The rows, and the passes, that were there when the fit began."""
        if steps:
            self.reshard = self._reshard  # the rest is the same in every process, and need not be collected

    @hookimpl
    def fit_begin(self, learner: Learner) -> None:
        """Remember where this fit's rows begin; those that came before it was saved and resumed are among them."""
        now, at = learner.progress.steps, learner.position
        start = now if at is None else at.start.steps
        earlier = sum(row["steps"] <= start for row in self.rows)
        self._first, self._outside = len(self.rows) if start == now else earlier, len(self._passes)

    @hookimpl
    def fit_end(self, result: FitResult) -> None:
        """Hand over this fit's rows."""
        result.history = self.rows[self._first :]
        del self._passes[self._outside :]

    @hookimpl
    @contextmanager
    def epoch_context(self, learner: Learner, phase: Phase) -> Iterator[None]:
        """Start the clock; after an error, for which there is no ``phase_end``, forget the pass."""
        another = bool(learner.resuming) and not (learner.running is not None and learner.running.resumed)
        loaded = None if another else self._resumed.pop(phase.name, None)
        begun = loaded or _Pass(phase.name, time.monotonic())
        self._passes.append(begun)
        try:
            yield
        except BaseException:
            self._passes.remove(begun)
            raise

    @hookimpl(reads=("loss",))
    def step_end(self, phase: Phase, step: Step) -> None:
        """Keep the loss, unread."""
        if self._steps:
            loss = getattr(step, "loss", None)
            if isinstance(loss, Tensor):
                now = self._innermost(phase)
                now.steps.append(step.index)
                now.losses.append(loss.detach().mean())

    @hookimpl(reads=("metrics", "progress"))
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Make the row."""
        done = self._innermost(phase)
        self._passes.remove(done)
        counts = learner.progress
        prefix = f"{phase.name}/"
        self.rows.append(
            {
                "phase": phase.name,
                "epoch": counts.epochs,
                "steps": counts.steps,
                "updates": counts.updates,
                "samples": counts.samples,
                "seconds": time.monotonic() - done.started,
                **{name: value for name, value in learner.metrics.items() if name.startswith(prefix)},
            }
        )
        self.step_rows += [
            {"phase": phase.name, "epoch": counts.epochs, "step": step, f"{phase.name}/loss": value}
            for step, value in zip(done.steps, done.read(), strict=True)
        ]

    def _innermost(self, phase: Phase) -> _Pass:
        """The pass that is running; a new one if the plugin was added in mid-pass."""
        if not self._passes or self._passes[-1].phase != phase.name:
            self._passes.append(_Pass(phase.name, time.monotonic()))
        return self._passes[-1]

    def values(self, name: str) -> list[float]:
        """All values of one metric, such as ``"val/loss"``, in the order in which they were made."""
        return [row[name] for row in self.rows if name in row]

    def plot(self, *names: str) -> Any:
        """Draw metrics over epochs with matplotlib (``pip install loopkit[plot]``); all of them by default.

        Over steps instead, if a phase ran several times in an epoch.

        Returns:
            The ``matplotlib`` figure, one panel per metric, the phases in one panel.

        Raises:
            ImportError: There is no matplotlib.
            ValueError: No row has such a metric.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("History.plot needs matplotlib: pip install 'loopkit[plot]'") from error
        known = list(dict.fromkeys(name for row in self.rows for name in row if "/" in name))
        for name in names:
            if name not in known:
                raise ValueError(f"no metric is called {name!r}{nearest(name, known)}; there are: {', '.join(known)}")
        panels: dict[str, list[str]] = {}
        for name in names or known:
            panels.setdefault(name.partition("/")[2], []).append(name)
        passes = [(row["phase"], row["epoch"]) for row in self.rows]
        over, label = ("epoch", "epochs") if len(set(passes)) == len(passes) else ("steps", "steps")
        figure, axes = plt.subplots(1, max(len(panels), 1), figsize=(4 * max(len(panels), 1), 3), squeeze=False)
        for axis, (metric, members) in zip(axes[0], panels.items(), strict=False):
            for name in members:
                points = [(row[over], row[name]) for row in self.rows if name in row]
                axis.plot(*zip(*points, strict=True), marker=".", label=name.partition("/")[0])
            axis.set(xlabel=label, title=metric)
            axis.legend()
        figure.tight_layout()
        return figure

    def state_dict(self) -> dict[str, Any]:
        """The rows, and of passes that are running the seconds and losses so far."""
        now = time.monotonic()
        running = [
            {"phase": p.phase, "seconds": now - p.started, "steps": list(p.steps), "losses": p.read()}
            for p in (*self._passes, *self._resumed.values())
        ]
        return {
            "rows": [dict(row) for row in self.rows],
            "step_rows": [dict(row) for row in self.step_rows],
            "running": running,
        }

    def _reshard(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The state of one of ``size`` processes: its own steps, and those of processes that are no more."""
        own, first = states[rank::size], states[0]

        def steps_of(i: int, key: str) -> list[Any]:
            return [each for state in own if i < len(state["running"]) for each in state["running"][i][key]]

        return {
            "rows": first["rows"],
            "step_rows": [row for state in own for row in state["step_rows"]],
            "running": [
                {**each, "steps": steps_of(i, "steps"), "losses": steps_of(i, "losses")}
                for i, each in enumerate(first["running"])
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these rows."""
        self.rows = [dict(row) for row in state["rows"]]
        self.step_rows = [dict(row) for row in state["step_rows"]]
        self._first = len(self.rows)
        now = time.monotonic()
        self._resumed = {
            p["phase"]: _Pass(p["phase"], now - p["seconds"], list(p["steps"]), list(p["losses"]))
            for p in state["running"]
        }
