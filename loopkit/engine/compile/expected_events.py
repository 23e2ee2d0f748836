"""ExpectedEvents: the events that a phase lists and plugins wait for, until each has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopkit.engine.compile.plan import Fire, Plan
    from loopkit.events import Event
    from loopkit.phases import Phase


class ExpectedEvents:
    """The events that a phase lists and plugins wait for, watched in an epoch of it.

    Args:
        phase: The phase.
        plan: Its plan when the epoch begins; plugins that come later may be too late for an event.
    """

    def __init__(self, phase: Phase, plan: Plan) -> None:
        self._phase = phase
        self._order = plan.order
        self._left = set(plan.awaited)

    def watch(self, fire: dict[type[Event], Fire | None]) -> dict[type[Event], Fire | None]:
        """The same calls; each event that is waited for is noted when it first comes, and has no cost after that."""
        watched = dict(fire)

        def noting(event: type[Event], call: Fire) -> Fire:
            def first(at: Any) -> None:
                self._left.discard(event)
                watched[event] = call
                call(at)

            return first

        for event in self._left:
            if (call := fire[event]) is not None:
                watched[event] = noting(event, call)
        return watched

    def missed(self) -> list[str]:
        """Return a line for each event that did not come in the epoch."""
        cls = type(self._phase).__name__
        return [
            f"phase {self._phase.name!r}: {cls}.emits lists {event.__name__}, which {cls}.step did not emit in its "
            f"first epoch, and {self._waiting(event)} for it: add step.emit({event.__name__}) to {cls}.step, or leave "
            f"it out of {cls}.emits"
            for event in sorted(self._left, key=lambda event: event.hook)
        ]

    def _waiting(self, event: type[Event]) -> str:
        names = [repr(placed.entry.plugin) for placed in self._order[event.hook]]
        return f"plugin{'s' * (len(names) > 1)} {', '.join(names)} wait{'s' * (len(names) == 1)}"
