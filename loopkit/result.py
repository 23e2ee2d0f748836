"""FitResult: how a fit ended and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Planned:
    """The planned length of a fit, where it is known: limits, and limits times the length of the data."""

    epochs: int | None = None
    steps: int | None = None
    updates: int | None = None
    """The updates of each optimizer, if each is updated once per window; ``max_updates`` counts all of them."""


@dataclass
class StopRequest:
    """A stop that was asked for."""

    reason: str
    by: str
    put_off: bool = False
    """Whether a plugin has put it off; known once it was answered, between two steps."""

    def answer(self, put_off: bool) -> bool:
        """Whether it was put off is known now."""
        self.put_off = put_off
        return put_off


@dataclass(repr=False)
class FitResult:
    """The result of ``fit``. An early stop returns one as well; it is not an error."""

    reason: Literal[
        "running", "end", "epochs", "max_steps", "max_updates", "minutes", "stop", "pause", "cancel", "signal", "error"
    ] = "running"
    """Why the fit ended: a limit, ``learner.stop``, `CancelFit`, the end of the user's own loop, a signal, or (seen in
    ``fit_end`` only) an error."""
    message: str = ""
    """The text given to ``learner.stop`` or `CancelFit`; a signal's name."""
    by: str = ""
    """The plugin or phase that asked for the end, if one did."""
    epochs: int = 0
    steps: int = 0
    updates: int = 0
    samples: int = 0
    """Counts of this fit, in training phases, including its part before a resume."""
    seconds: float = 0.0
    seed: int = 0
    """The last seed of torch's generator when the fit began."""
    planned: Planned = field(default_factory=Planned)
    """How far the fit was meant to go."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of every metric, as ``"val/loss"``."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One row per epoch of a phase, made by the history plugin."""

    def __repr__(self) -> str:
        return f"FitResult({self})"

    def _repr_html_(self) -> str:
        from loopkit.base.tabular import html, paragraph  # for notebooks alone

        phases = list(dict.fromkeys(name.partition("/")[0] for name in self.metrics))
        metrics = dict.fromkeys(name.partition("/")[2] for name in self.metrics)
        rows = [(metric, *(self.metrics.get(f"{phase}/{metric}") for phase in phases)) for metric in metrics]
        return paragraph(self._ended()) + (html(("", *phases), rows) if rows else "")

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return self._ended() + (f"; {values}" if values else "")

    def _ended(self) -> str:
        """Describe why it ended and how much it did."""
        ends = {
            "stop": "stopped",
            "pause": "paused",
            "cancel": "cancelled",
            "signal": "interrupted",
            "error": "failed",
            "end": "ended",
        }
        epochs = f"{self.epochs} epoch{'s' * (self.epochs != 1)}"
        done = f"{epochs}, {self.updates:,} updates, {self.samples:,} samples in {self.seconds:.1f} s"
        if self.reason == "epochs":
            return f"finished: {done}"
        if self.reason not in ends:  # another limit
            return f"finished ({self.reason}): {done}"
        who = f" by {self.by}" if self.by else ""
        why = f": {self.message}" if self.message else ""
        return f"{ends[self.reason]}{who}{why} after {done}"
