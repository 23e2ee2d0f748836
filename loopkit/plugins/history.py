"""A record of every metric, per epoch and, if wanted, per step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopkit.base.options import Shown
from loopkit.base.words import nearest
from loopkit.hooks import hookimpl
from loopkit.plugins.late import read

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult


PACK = 1000
"""Rows that are packed together for a state, once: a save costs the rows since, not all."""


class _Running:
    """An epoch that has begun: when, and the losses of its steps, unread."""

    def __init__(self, started: float, steps: list[int], losses: list[Tensor | float]) -> None:
        self.started = started
        self.steps = steps
        self.losses = losses

    def read(self) -> list[float]:
        return list(read({str(i): loss for i, loss in enumerate(self.losses)}).values())

    def state_dict(self) -> dict[str, Any]:
        """How long it has run, and the losses so far."""
        return {"seconds": time.monotonic() - self.started, "steps": list(self.steps), "losses": self.read()}


class History(Shown):
    """Keep every metric of every epoch; ``FitResult.history`` holds the rows of its fit.

    Args:
        steps: Also keep the loss of every step, in `step_rows`. The values stay on the device until the epoch ends. Of
            several processes each keeps the losses of its own batches, also when it resumes from a checkpoint; with
            fewer processes the others take over the rest.

    A row of an epoch is ``{"phase", "epoch", "steps", "updates", "samples", "seconds", "<phase>/<metric>", ...}``: the
    learner's counters after it, its duration and its metrics. ``"epoch"`` is the number, from 1, of the training epoch
    that is running or was the last to run. A row may be taken out, but not changed: a state may hold it already. A row
    of a step is ``{"phase", "epoch", "step", "<phase>/loss"}``, with the same ``"epoch"`` and the step's position,
    from 0.

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
        self._packs: dict[str, list[_Pack]] = {"rows": [], "step_rows": []}
        self._first = 0
        """The rows that were there when the fit began."""
        if steps:  # the rest is the same in every process, and need not be collected
            self.reshard = self._reshard
            self.reshard_store = self._reshard_store

    @hookimpl(after=("checkpoint",))  # which may load the state of a fit that goes on
    def fit_begin(self, learner: Learner) -> None:
        """Remember where this fit's rows begin."""
        if learner.current is None or not learner.current.resumed:
            self._first = len(self.rows)

    @hookimpl
    def fit_end(self, result: FitResult) -> None:
        """Hand over this fit's rows."""
        result.history = self.rows[self._first :]

    @hookimpl
    def epoch_begin(self, epoch: Epoch) -> None:
        """Start the clock."""
        self._running(epoch)

    def _running(self, epoch: Epoch) -> _Running:
        keep = epoch.keep(self)
        if "now" not in keep:
            store = epoch.store(self)
            now = time.monotonic()
            saved = store.get("running")
            if not isinstance(saved, dict):  # it begins, or another history was in this one's place
                saved = {"seconds": 0.0, "steps": [], "losses": []}
            started = now - saved["seconds"]
            keep["now"] = store["running"] = _Running(started, [*saved["steps"]], [*saved["losses"]])
        return keep["now"]  # type: ignore[no-any-return]

    def _keeps_steps(self) -> bool:
        return self._steps

    @hookimpl(when=_keeps_steps, reads=("loss",))
    def step_end(self, step: Step) -> None:
        """Keep the loss, unread."""
        loss = getattr(step, "loss", None)
        if isinstance(loss, Tensor):
            now = self._running(step.epoch)
            now.steps.append(step.index)
            now.losses.append(loss.detach().mean())

    @hookimpl(reads=("metrics", "progress"))
    def phase_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Make the row."""
        done = self._running(epoch)
        counts = learner.progress
        prefix = f"{phase.name}/"
        row = {
            "phase": phase.name,
            "epoch": epoch.number,
            "steps": counts.steps,
            "updates": counts.updates,
            "samples": counts.samples,
            "seconds": time.monotonic() - done.started,
        }
        row.update({name: value for name, value in learner.metrics.items() if name.startswith(prefix)})
        self.rows.append(row)
        self.step_rows += [
            {"phase": phase.name, "epoch": epoch.number, "step": step, f"{prefix}loss": loss}
            for step, loss in zip(done.steps, done.read(), strict=True)
        ]

    def values(self, name: str) -> list[float]:
        """All values of one metric, such as ``"val/loss"``, in the order in which they were made."""
        return [row[name] for row in self.rows if name in row]

    def frame(self, phase: str | None = None) -> Any:
        """The rows as a table of pandas, if that is installed: a row an epoch and phase, metrics without the phase.

        Args:
            phase: Only rows of this phase, with its own metrics. In a table of several phases, a metric that one of
                them does not have, such as one of only the validation, is nan there.

        Raises:
            ImportError: There is no pandas.
            ValueError: No epoch of this phase has run.
        """
        from loopkit.logs.reading import frame  # not before somebody asks

        return frame(self.rows, phase)

    def _axis(self) -> str:
        """The number to draw metrics over: epochs, or steps if a phase ran several times in one."""
        runs = [(row["phase"], row["epoch"]) for row in self.rows]
        return "epoch" if len(set(runs)) == len(runs) else "steps"

    def _repr_html_(self) -> str:
        """A chart of each metric, in notebooks."""
        from loopkit.base.drawing import charts  # not before somebody looks
        from loopkit.base.tabular import paragraph

        if not self.rows:
            return paragraph("History: no epoch has run")
        return charts(self.rows, self._axis())

    def plot(self, *names: str) -> Any:
        """Draw metrics over epochs with matplotlib (``pip install matplotlib``); all of them by default.

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
            raise ImportError("History.plot needs matplotlib: pip install matplotlib") from error
        panels = self._panels(names)
        over = self._axis()
        label = "epochs" if over == "epoch" else over
        count = max(len(panels), 1)
        figure, axes = plt.subplots(1, count, figsize=(4 * count, 3), squeeze=False)
        for axis, (metric, members) in zip(axes[0], panels.items(), strict=False):
            for name in members:
                points = [(row[over], row[name]) for row in self.rows if name in row]
                axis.plot(*zip(*points, strict=True), marker=".", label=name.partition("/")[0])
            axis.set(xlabel=label, title=metric)
            axis.legend()
        if not panels:
            title = "no metric in the rows" if self.rows else "no epoch has run"
            axes[0][0].set(xlabel=label, title=title)
        figure.tight_layout()
        return figure

    def _panels(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The metrics to draw, all if none are named, by the part of their name that the phases share.

        Raises:
            ValueError: No row has such a metric.
        """
        columns = dict.fromkeys(name for row in self.rows for name in row)
        known = [name for name in columns if "/" in name]
        for name in names:
            if not self.rows:
                raise ValueError(f"no epoch has run, so there is no metric {name!r} to plot: call fit first")
            if name not in known:
                raise ValueError(f"no metric is called {name!r}{nearest(name, known)}; there are: {', '.join(known)}")
        panels: dict[str, list[str]] = {}
        for name in names or known:
            metric = name.partition("/")[2]
            panels.setdefault(metric, []).append(name)
        return panels

    def state_dict(self) -> dict[str, Any]:
        """The rows, most of them packed, and how many were there when the fit began."""
        packed: dict[str, list[dict[str, Tensor]]] = {}
        state: dict[str, Any] = {}
        for name, packs in self._packs.items():
            rows = getattr(self, name)
            packed[name] = _packed(rows, packs)
            state[name] = [dict(row) for row in rows[PACK * len(packs) :]]
        state["first"] = self._first
        if any(packed.values()):
            state["packed"] = packed
        return state

    def _reshard(self, states: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The state of one of ``size`` processes: its own steps, and the steps of processes that are gone."""
        own = dict(states[0])
        own["step_rows"] = []
        for state in states[rank::size]:
            own["step_rows"] += _rows(state, "step_rows", [])
        if "packed" in own:
            own["packed"] = {**own["packed"], "step_rows": []}
        return own

    def _reshard_store(self, stores: Sequence[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """The store of one of ``size`` processes for an epoch, as `_reshard`."""
        if not stores[0]:
            return {}
        joined: dict[str, list[Any]] = {"steps": [], "losses": []}
        for store in stores[rank::size]:
            if store:
                joined["steps"] += store["running"]["steps"]
                joined["losses"] += store["running"]["losses"]
        return {"running": {**stores[0]["running"], **joined}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from these rows."""
        packs: dict[str, list[_Pack]] = {"rows": [], "step_rows": []}
        rows = _rows(state, "rows", packs["rows"])
        step_rows = _rows(state, "step_rows", packs["step_rows"])
        self.rows = rows
        self.step_rows = step_rows
        self._packs = packs
        self._first = state.get("first", len(rows))


class _Pack:
    """Rows, and what a state holds of them."""

    def __init__(self, rows: list[dict[str, Any]], held: dict[str, Tensor]) -> None:
        self.rows = rows
        self.held = held

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> _Pack:
        """The rows as text, but for the seconds, which no other run repeats; each name is there once."""
        from loopkit.checkpoint.encoding import dumps, encode  # not before it is saved

        layouts: dict[tuple[str, ...], int] = {}
        plain = []
        for row in rows:
            layout = layouts.setdefault(tuple(row), len(layouts))
            without_seconds = {**row, "seconds": 0.0} if "seconds" in row else row
            plain.append([layout, *without_seconds.values()])
        value, _ = encode([list(map(list, layouts)), plain], "history")
        text = torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)
        seconds = torch.tensor([row.get("seconds", 0.0) for row in rows], dtype=torch.float64)
        return cls(rows, {"text": text, "seconds": seconds})

    @classmethod
    def from_state(cls, held: Mapping[str, Tensor]) -> _Pack:
        """The rows again."""
        from loopkit.checkpoint.encoding import decode, loads

        layouts, plain = decode(loads(held["text"].numpy().tobytes()), {})
        rows = [dict(zip(layouts[number], values, strict=True)) for number, *values in plain]
        for row, seconds in zip(rows, held["seconds"].tolist(), strict=True):
            if "seconds" in row:
                row["seconds"] = seconds
        return cls(rows, dict(held))


def _packed(rows: list[dict[str, Any]], packs: list[_Pack]) -> list[dict[str, Tensor]]:
    """The saved form of the first rows, by the thousand; unchanged ones are not packed again."""
    whole = len(rows) // PACK
    for number in range(whole):
        part = rows[number * PACK : (number + 1) * PACK]
        if number >= len(packs) or not all(map(is_, part, packs[number].rows)):
            packs[number:] = [_Pack.of(part)]
    del packs[whole:]
    return [pack.held for pack in packs]


def _rows(state: Mapping[str, Any], name: str, packs: list[_Pack]) -> list[dict[str, Any]]:
    """The rows in a state; their packs are added to a list."""
    saved = state.get("packed", {})
    packs += [_Pack.from_state(held) for held in saved.get(name, ())]
    rows: list[dict[str, Any]] = []
    for pack in packs:
        rows += pack.rows
    rows += [dict(row) for row in state[name]]
    return rows
