"""A range test: train a copy at rising learning rates, and see where the loss falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.author import checks, line_chart, nearest, paragraph
from loopkit.errors import NonFiniteError, PhaseError, PhaseInputError, PluginError, ReentrancyError, WorldError
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit_insight.trial import KEPT, as_before, copied, own_position

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from loopkit import Step
    from loopkit.phases import Phase


@dataclass(frozen=True, repr=False)
class LRFinderResult:
    """The result of a range test, one entry per update."""

    rates: list[float]
    """The learning rates of the first parameter group, rising."""
    losses: list[float]
    """The losses that the updates at these rates were made from (with accumulation, the mean of the window's)."""
    smoothed: list[float]
    """The exponential mean of the losses, corrected for its begin."""
    suggestion: float | None
    """The rate at which the smoothed loss fell most steeply over the logarithm of the rate, up to its minimum; None if
    it did not fall. The slope at an update is measured over a twentieth of the test on either side, and the first
    tenth, which has little to average, is left out."""
    diverged: bool
    """Whether the loss ended the test, by ``stop_factor`` or by being infinite or undefined."""

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the losses over the rates, with the suggestion as a vertical line, and return the axes.

        Args:
            ax: Axes to draw in; None for new ones.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from error
        if ax is None:
            _, ax = plt.subplots()
        ax.plot(self.rates, self.losses, alpha=0.3, label="loss")
        ax.plot(self.rates, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            ax.axvline(self.suggestion, linestyle="--", color="gray", label=f"suggestion {self.suggestion:.2e}")
        ax.set_xscale("log")
        ax.set_xlabel("lr")
        ax.set_ylabel("loss")
        ax.legend()
        return ax

    def _repr_html_(self) -> str:
        """The suggestion, and the picture of `plot`, in notebooks."""
        found = "no learning rate: the loss did not fall" if self.suggestion is None else f"lr {self.suggestion:.2e}"
        curves = {
            "loss": list(zip(self.rates, self.losses, strict=True)),
            "smoothed": list(zip(self.rates, self.smoothed, strict=True)),
        }
        marks = {} if self.suggestion is None else {f"suggestion {self.suggestion:.2e}": self.suggestion}
        return paragraph(f"suggestion: {found}") + line_chart(curves, "loss", "lr", log=True, marks=marks)

    def __repr__(self) -> str:
        suggestion = "none" if self.suggestion is None else f"{self.suggestion:.2e}"
        ended = ", diverged" if self.diverged else ""
        return f"LRFinderResult(suggestion {suggestion}, {len(self.rates)} updates{ended})"


class LRFinder:
    """Raise the learning rate from update to update on a copy of the learner, and suggest one.

    Update k of n runs at ``start * (end / start) ** (k / (n - 1))``; several parameter groups keep their
    ratios to the rate of the first. The test ends early when the smoothed loss rises above ``stop_factor`` times its
    best, or is not finite (that one is left out).

    The learner is left as it was, to the bit and after an error too: models, optimizers, gradients, counters, metrics,
    history, plugins; so are the random generators of Python, NumPy and torch, the position of the loader and the
    generators of its samplers. Models, optimizers, loss function and phases are deep copies, which need as much memory
    again; the closure of a function cannot be copied.

    It is for a single process: several would find the rate for the batches of one of them.

    Args:
        start: The first rate, above 0.
        end: The last one, above ``start``.
        updates: How many, from 2. The data is passed over as often as it takes.
        smoothing: Weight of the past in the exponential mean, from 0 to below 1.
        stop_factor: Above 1; ``math.inf`` to continue until the loss is not finite.
        attribute: The step's attribute that holds the loss.
        optimizer: The optimizer whose rate rises, if there are several and not all are meant.
        plugins: Names of plugins, or what they provide, that the copy trains with, too, besides those for clipping,
            device, eval mode, freezing, memory format, mixed precision and noise. They are deep copies as well.

    Raises:
        ValueError: An argument is out of range.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3.

    Example::

        result = LRFinder().run(learner, train)
        print(result.suggestion)
        result.plot().figure.savefig("lr.png")
    """

    def __init__(
        self,
        start: float = 1e-7,
        end: float = 10.0,
        updates: int = 100,
        *,
        smoothing: float = 0.8,
        stop_factor: float = 4.0,
        attribute: str = "loss",
        optimizer: str | None = None,
        plugins: Sequence[str] = (),
    ) -> None:
        if not 0 < start < end < math.inf:
            raise ValueError(f"LRFinder(start={start}, end={end}): the rates are above 0, and the last is the larger")
        checks.whole("LRFinder", 2, updates=updates)
        if not 0 <= smoothing < 1:
            raise ValueError(f"LRFinder(smoothing={smoothing}): it is from 0 to below 1")
        if not stop_factor > 1:
            raise ValueError(f"LRFinder(stop_factor={stop_factor}): it is above 1")
        self.rates = [start * (end / start) ** (k / (updates - 1)) for k in range(updates)]
        """The rates of the whole test."""
        self.smoothing = smoothing
        self.stop_factor = stop_factor
        self.attribute = attribute
        self.optimizer = optimizer
        self.plugins = tuple(plugins)

    def run(self, learner: Learner, data: Any, phase: str | Phase | None = None) -> LRFinderResult:
        """Make the test.

        Args:
            learner: The learner to copy; it must not be running.
            data: Training data as for ``fit``, which can be passed over more than once.
            phase: The training phase; by default ``fit``'s.

        Raises:
            ReentrancyError: The learner is running.
            WorldError: The learner trains with other processes.
            PhaseError: It has no optimizer, or the phase makes no update.
            PhaseInputError: The data is an iterator, which would be used up.
            NonFiniteError: The first loss is infinite or undefined.
        """
        if learner.current is not None:
            raise ReentrancyError("LRFinder.run: the learner is running; make the test before or after")
        if learner.world.size > 1:
            raise WorldError(
                f"LRFinder.run: the learner is one of {learner.world.size} processes, with batches that are parts: "
                f"make the test in one process, with {learner.world.size} times the batch_size, and "
                f"give all of them the rate that it finds"
            )
        if not learner.optimizers:
            raise PhaseError("LRFinder.run: the learner has no optimizer; give Learner(optimizer=...)")
        if self.optimizer is not None and self.optimizer not in learner.optimizers:
            hint = nearest(self.optimizer, learner.optimizers)
            names = ", ".join(learner.optimizers)
            raise PhaseError(f"LRFinder: no optimizer is called {self.optimizer!r}{hint}; there are: {names}")
        if hasattr(data, "__next__"):
            raise PhaseInputError(
                f"LRFinder.run: the data is a {type(data).__name__}, which the test would use up: "
                f"give something that can be iterated again, or a function that returns a new iterator"
            )
        sweep = _Sweep(self)
        with as_before(learner, data):
            trial, name = self._copy(learner, phase, sweep)
            own = own_position(data)
            trial.fit(own if name is None else {name: own}, epochs=math.inf)
        return sweep.result()

    def _copy(self, learner: Learner, phase: str | Phase | None, sweep: _Sweep) -> tuple[Learner, str | None]:
        """A learner of copies, and the name of the phase that it trains with; None for ``fit``'s."""
        known = {*learner.plugins, *(getattr(plugin, "provides", "") for plugin in learner.plugins.values())}
        for word in self.plugins:
            if word not in known:
                raise PhaseError(f"LRFinder: no plugin is called {word!r}{nearest(word, learner.plugins)}")
        return copied(learner, {*KEPT, *self.plugins}, phase, [sweep])


class _Sweep:
    """Sets the rates, and gathers the losses."""

    name = "lr_finder"
    volatile = ("*",)

    def __init__(self, finder: LRFinder) -> None:
        self.finder = finder
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self.diverged = False
        self._mean = 0.0
        self._window: list[float] = []
        self._updated = False
        self._ratios: dict[str, list[float]] = {}

    @hookimpl(writes=("optimizer.lr",))
    def epoch_begin(self, learner: Learner) -> None:
        if not self._ratios:
            for name in [self.finder.optimizer] if self.finder.optimizer else learner.optimizers:
                own = _rates(name, learner.optimizers[name])
                self._ratios[name] = (
                    [lr / own[0] if lr != own[0] else 1.0 for lr in own] if own[0] else [1.0] * len(own)
                )
            self._set(learner)

    @hookimpl
    def update_end(self, step: Step) -> None:
        self._note(step)

    @hookimpl
    def update_skipped(self, step: Step) -> None:
        self._note(step)

    def _note(self, step: Step) -> None:
        if step.optimizer_name == next(iter(self._ratios)):
            self._updated = True

    @hookimpl(reads=("loss", "step"), writes=("optimizer.lr",))
    def step_end(self, learner: Learner, step: Step) -> None:
        loss = getattr(step, self.finder.attribute)
        self._window.append(float(loss.detach()))  # host sync: it decides whether to go on
        if self._updated:
            self._close(learner)

    @hookimpl(writes=("optimizer.lr",))
    def epoch_end(self, learner: Learner, phase: Phase) -> None:
        if self._updated and self._window:  # an update after the last step, of a window that was open
            self._close(learner)
        if not self.losses and not self.diverged:
            raise PhaseError(f"LRFinder: phase {phase.name!r} made no update in an epoch over the data")

    def _close(self, learner: Learner) -> None:
        finder = self.finder
        loss = sum(self._window) / len(self._window)
        self._window, self._updated = [], False
        if not math.isfinite(loss):
            if not self.losses:
                raise NonFiniteError(f"LRFinder: the first loss is {loss}, at lr {finder.rates[0]}")
            self.diverged = True
        else:
            self.losses.append(loss)
            self._mean = finder.smoothing * self._mean + (1 - finder.smoothing) * loss
            self.smoothed.append(self._mean / (1 - finder.smoothing ** len(self.losses)))
            best = min(self.smoothed)
            self.diverged = self.smoothed[-1] > best + (finder.stop_factor - 1) * abs(best)
        if self.diverged or len(self.losses) == len(finder.rates):
            learner.stop("the range test is over", by=self.name)
        else:
            self._set(learner)

    def _set(self, learner: Learner) -> None:
        rate = self.finder.rates[len(self.losses)]
        for name, ratios in self._ratios.items():
            for group, ratio in zip(learner.optimizers[name].param_groups, ratios, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * ratio)
                else:
                    group["lr"] = rate * ratio

    def result(self) -> LRFinderResult:
        """The result of the sweep."""
        rates = self.finder.rates[: len(self.losses)]
        steepest = _steepest(self.smoothed, len(self.finder.rates))
        suggestion = None if steepest is None else rates[steepest]
        return LRFinderResult(rates, self.losses, self.smoothed, suggestion, self.diverged)


def _steepest(values: Sequence[float], updates: int) -> int | None:
    """Where the values of a test of so many updates fall most, up to their minimum."""
    side, first = max(1, updates // 20), updates // 10
    lowest = min(range(len(values)), key=values.__getitem__)
    candidates = range(max(side, first), min(lowest + 1, len(values) - side))
    falls = {k: values[k - side] - values[k + side] for k in candidates}
    steepest = max(falls, key=falls.__getitem__, default=None)
    return steepest if steepest is not None and falls[steepest] > 0 else None


def _rates(name: str, optimizer: Any) -> list[float]:
    rates = [group.get("lr") for group in optimizer.param_groups]
    if None in rates:
        raise PluginError(
            f"LRFinder: parameter group {rates.index(None)} of optimizer {name!r} ({type(optimizer).__name__}) has no "
            f"learning rate to search for: give it one, lr=0.01, or choose another with optimizer=..."
        )
    return [float(rate) for rate in rates]
