"""LoopCode: the surroundings of a user's loop, when a round of it is run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from loopkit.engine.kept.restorer import restorer

if TYPE_CHECKING:
    from loopkit.engine.compile.phase_table import PhaseTable
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.life.logbook import Logbook
    from loopkit.engine.life.models import Models


class LoopCode:
    """The objects of a learner that the code of the user's loop may change, and the log that it writes to.

    Args:
        models: The models and their optimizers.
        phases: The phases.
        registry: The plugins.
        logbook: Where things are logged.
        loss_fn: Returns the loss function.
    """

    def __init__(
        self,
        models: Models,
        phases: PhaseTable,
        registry: Registry,
        logbook: Logbook,
        loss_fn: Callable[[], Callable[..., Any]],
    ) -> None:
        self._models = models
        self._phases = phases
        self._registry = registry
        self._logbook = logbook
        self._loss_fn = loss_fn

    def owners(self) -> dict[str, Any]:
        """The objects whose random generators the code may draw from, by name."""
        return {"loss_fn": self._loss_fn(), **_named("phase", self._phases), **_named("model", self._models)}

    def begin_replay(self) -> Callable[[], None]:
        """Log nothing from here on; returns a function that undoes the changes of the code, and logs again."""
        models = self._models
        logbook = self._logbook
        phases = [phase for phase in self._phases.values() if phase.has_state]
        owners = [*self._registry.plugins.values(), *phases]
        put_back = restorer(models.with_extras().values(), models.optimizers.values(), owners)
        listeners = logbook.packed
        logbook.listen(None)

        def undo() -> None:
            with models.weights.own():
                put_back()
            if logbook.packed is None:
                logbook.listen(listeners)

        return undo

    def end_replay(self) -> None:
        """Log at the counters as they are now."""
        self._logbook.move_to(self._logbook.epoch)


def _named(what: str, objects: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{what} {name!r}": each for name, each in objects.items()}
