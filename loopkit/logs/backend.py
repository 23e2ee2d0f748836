"""Backend: the base of log writers, and the description of a run that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from loopkit.base.options import Shown
from loopkit.logs.kinds import Value

if TYPE_CHECKING:
    from loopkit.learner import Learner
    from loopkit.logs.record import Record
    from loopkit.result import FitResult


def _undeclared(metric: str) -> str | None:
    """The direction of any metric where no plugin is asked."""
    return None


@dataclass(frozen=True)
class Run:
    """The fit that is about to be logged."""

    learner: Learner
    resumed: bool
    """Whether the state of this backend was loaded: the log resumes from there."""
    hyperparameters: Mapping[str, bool | int | float | str | None]
    """The known hyperparameters of the run."""
    config: str | None
    """The text of the file that the run was made from, if there is one, without passwords and tokens."""
    direction: Callable[[str], str | None] = _undeclared
    """Which way a metric is better, ``"min"`` or ``"max"``, as a plugin declares; None for what none declares."""


class Backend(Shown):
    """Where a log goes. It is no plugin: ``LogTo`` calls it, in the first process only, and never in a step.

    A subclass has at least ``write``. Whatever it raises disables it with one warning, and the fit continues; but a
    `LoopkitError` of ``open`` (a path that cannot be written, a log that another run writes) ends the fit before its
    first step. After a ``write`` that failed it is flushed, asked for its state, so that a resumed run keeps what
    was written before, and closed.

    Example::

        class Print(Backend):
            def write(self, records):
                for record in records:
                    print(record.step, record.name, record.value)

        Learner(model, loss_fn, optimizer, plugins=[LogTo(Print())])
    """

    name: str = ""
    """The name in messages; by default its class in snake case."""
    kinds: ClassVar[tuple[type, ...]] = (Value,)
    """The kinds that it can write. Other kinds are left out with one warning."""

    any_names: ClassVar[bool] = False
    """Whether it takes any names together. By default, a name beside names below it, such as ``train/loss`` and
    ``train/loss/step``, is first written by itself. If that raises, it is written as ``train/loss.step``."""

    def open(self, run: Run) -> None:
        """A fit begins; whatever was to be loaded has been."""

    def write(self, records: Sequence[Record]) -> None:
        """Write what was logged since the last time, in its order; scalars are floats.

        Args:
            records: At least one; all of ``kinds``. ``Records.of`` has them in groups, which is faster to read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write(records)")

    def flush(self) -> None:
        """Make durable what was written. It comes before each checkpoint and at the end."""

    def close(self, result: FitResult | None) -> None:
        """The fit is over. ``result`` is None if it could not begin."""

    def state_dict(self) -> dict[str, Any]:
        """Where the log stands after a flush, for a checkpoint; empty if that is not known."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``open`` resume from there: later records are no longer part of the log."""
