"""The engine that a handler of Ignite is attached to; imported when a handler is adapted, since it needs Ignite."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

from ignite.engine import Engine, Events
from ignite.engine.events import State

from loopkit_callbacks.common import lacks

if TYPE_CHECKING:
    from loopkit.learner import Learner

__all__ = ["FIRED", "Groups", "PhaseEngine"]

FIRED = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.TERMINATE,
    Events.COMPLETED,
)
"""The events that come."""
LOOP = "the loop is loopkit's"


class PhaseState(State):
    """``engine.state``: counters, metrics and the output; attributes of an Ignite loop raise an error."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who
        for name in ("batch", "dataloader", "seed", "times", "max_iters"):
            vars(self).pop(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise lacks(self._who, f"engine.state.{name}")


class Refused:
    """An attribute that an engine of Ignite has, and this one has not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, engine: PhaseEngine, owner: type) -> NoReturn:
        raise lacks(engine.who, f"engine.{self.name}", LOOP)


class PhaseEngine(Engine):
    """Holds handlers and filters of events as any engine of Ignite does, without running itself.

    Args:
        who: The handler, for messages.
    """

    run = Refused()
    interrupt = Refused()
    terminate_epoch = Refused()
    set_data = Refused()
    state_dict = Refused()
    load_state_dict = Refused()

    def __init__(self, who: str) -> None:
        self.who = who
        super().__init__(lambda engine, batch: None)
        self.state = PhaseState(who)

    def terminate(self, skip_completed: bool = False) -> None:
        """Ask for the end of the fit."""
        self.should_terminate = True

    @property
    def attached(self) -> set[Any]:
        """The events that handlers are attached to."""
        return {event for event, handlers in self._event_handlers.items() if handlers}


class Groups:
    """In the place of an optimizer, for a scheduler that is made before the learner: its parameter groups.

    Args:
        pattern: Which of the learner's optimizers, by name.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.learner: Learner | None = None

    @property
    def param_groups(self) -> Sequence[dict[str, Any]]:
        """The groups of all of them, none before there is a learner."""
        optimizers = {} if self.learner is None else self.learner.optimizers
        chosen = [each for name, each in optimizers.items() if fnmatchcase(name, self._pattern)]
        return [group for optimizer in chosen for group in optimizer.param_groups]
