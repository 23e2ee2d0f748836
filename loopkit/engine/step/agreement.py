"""Agreement: how an epoch acts on what is asked for, and how several processes agree on what ends it."""

from __future__ import annotations

from collections.abc import Callable

from loopkit.base.world import World
from loopkit.engine.life.requests import Requests, Stop
from loopkit.errors import Cancel, CancelFit
from loopkit.progress import Progress


class Agreement:
    """The stop and the cancels of one epoch.

    Args:
        requests: The mailbox.
        answer: Acts on what is asked for.
        progress: The learner's counters, in which processes that train in step agree.
    """

    def __init__(self, requests: Requests, answer: Callable[[], None], progress: Progress) -> None:
        self.requests = requests
        self._answer = answer
        self._progress = progress
        self._stop_before: Stop | None = None
        self._wanted: Cancel | None = None
        """The signal by which this process would end the epoch or the fit, where all processes must agree."""
        self._agreed: Cancel | None = None

    @property
    def world(self) -> World:
        """The processes that train together."""
        return self.requests.world

    def count_stops_from(self, stop: Stop | None) -> None:
        """The stop that was there before the epoch, which does not end it."""
        self._stop_before = stop

    @property
    def stopped(self) -> bool:
        """Whether a stop came since the epoch began."""
        return self.requests.stopped is not self._stop_before

    @property
    def asks(self) -> bool:
        """Whether this process asks for something that the processes have not agreed on yet."""
        return self._wanted is not None or self.requests.asks

    def answer(self) -> None:
        """Act on what is asked for."""
        self._answer()

    def want(self, cancel: Cancel) -> None:
        """End the epoch or the fit by this, once all processes agree."""
        self._wanted = self._wanted or cancel

    def agree(self, *numbers: float) -> list[float]:
        """Let all processes act on what any of them asks for; returns the highest of each number."""
        wanted = self._wanted
        self._wanted = None
        agreed, highest = self.requests.agree(self._progress.updates, wanted, numbers)
        self._agreed = agreed or self._agreed
        return highest

    def take(self) -> Cancel | None:
        """Hand over the cancel that was agreed on."""
        agreed = self._agreed
        self._agreed = None
        return agreed

    def settle(self, cancel: Cancel | None) -> Cancel | None:
        """Agree with all processes on how the epoch, or the fit, ends, if this one wants to end it with ``cancel``."""
        self._wanted = stronger(cancel, self._wanted)
        self.agree()
        return self.take()


def stronger(one: Cancel | None, other: Cancel | None) -> Cancel | None:
    """The one that ends more; the first, if they end the same."""
    return other if one is None or (isinstance(other, CancelFit) and not isinstance(one, CancelFit)) else one
