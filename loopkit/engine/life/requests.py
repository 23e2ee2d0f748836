"""Requests: the one mailbox of a run, for stops, pauses, saves and signals.

In one process, a request takes effect at the next place between two steps or epochs. Where several processes train
together, it takes effect in all of them, at the place where they next agree (`Requests.agree`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from loopkit.base.world import World
from loopkit.engine.life.signals import SAVING, Signals
from loopkit.errors import Cancel, CancelEpoch, CancelFit, WorldError
from loopkit.result import StopRequest

CANCELS: dict[str, type[Cancel]] = {cancel.__name__: cancel for cancel in (CancelEpoch, CancelFit)}


class Stop(NamedTuple):
    """Why a run is over, and by whom."""

    reason: str
    by: str


class ExitRequest(NamedTuple):
    """A request to end this process before its run is over: a signal, or `Learner.pause`."""

    signal: int = 0
    """Its number; 0 for a pause."""
    reason: str = ""
    by: str = ""


class Interrupted(BaseException):
    """Leaves a fit between two steps, after a signal or a pause."""

    def __init__(self, ending: ExitRequest) -> None:
        super().__init__(ending)
        self.ending = ending


@dataclass(frozen=True)
class RequestSet:
    """The requests of one process, or the agreed ones of all."""

    stop: Stop | None = None
    save: bool = False
    ending: ExitRequest | None = None
    validations: frozenset[str] = frozenset()
    """The phases that are due by rank 0's clock; also the name that stands for the end of the fit."""

    @property
    def any(self) -> bool:
        """Whether anything is asked for."""
        return self.save or self.stop is not None or self.ending is not None or bool(self.validations)

    def __or__(self, later: RequestSet) -> RequestSet:
        """These, and what later ones add."""
        return RequestSet(
            self.stop or later.stop,
            self.save or later.save,
            self.ending or later.ending,
            self.validations | later.validations,
        )


class Requests:
    """The requests that have not taken effect yet. Any thread and any signal handler may add one.

    Args:
        holds: Whether a plugin puts off a stop of this reason, by this plugin; asked where stops are answered.
    """

    def __init__(self, holds: Callable[[str, str], bool] = lambda reason, by: False) -> None:
        self._holds = holds
        self._unanswered: list[StopRequest] = []
        """Stops of which no plugin has been asked yet whether it puts them off."""
        self.version = 0
        """The one number that the loop looks at after each step: it changes with every request, and every plan."""
        self._stopped: Stop | None = None
        self.signal: signal.Signals | None = None
        """The signal that was caught, during ``signal_begin``."""
        self.waits = False
        """Whether a signal was caught, or a save or pause is due, and still waits."""
        self.validations: frozenset[str] = frozenset()
        """The phases of which all processes know that it is time to validate, by rank 0's clock."""
        self.world = World()
        """The processes that train together; only this one, unless a plugin joins others."""
        self._signals: Signals | None = None
        self._to_agree = RequestSet()
        """The requests of this process to the others."""
        self._ready: RequestSet | None = None
        """The requests to act upon at the next place."""

    @property
    def together(self) -> bool:
        """Whether several processes act as one."""
        return self.world.size > 1

    def join(self, world: World) -> None:
        """From now on act together with these processes."""
        self.world = world

    def begin(self, signals: Signals | None) -> None:
        """Start a fit without requests."""
        self._signals = signals
        self._to_agree = RequestSet()
        self._ready = None
        self._stopped = None
        self.signal = None
        self._unanswered = []
        self.waits = False
        self.validations = frozenset()

    def end(self) -> None:
        """A fit is over; signals are not listened to any more."""
        self._signals = None
        self._ready = None
        self.waits = False

    def resume(self, stopped: Stop | None) -> None:
        """Resume a stop that was asked for before a state was saved."""
        self._stopped = self._stopped or stopped

    def forget_stop(self) -> None:
        """The stop that was in force does not count any more."""
        self._stopped = None

    def change(self) -> None:
        """Let the loop look again: at the plan, and at what is asked for."""
        self.version += 1

    def catch(self) -> None:
        """A signal was caught."""
        self.waits = True
        self.change()

    def stop(self, reason: str, by: str) -> StopRequest:
        """Ask for the end of the run."""
        request = StopRequest(reason, by)
        self._unanswered.append(request)
        self.change()
        return request

    @property
    def stopped(self) -> Stop | None:
        """The stop that is in force, once waiting ones are answered."""
        if self._unanswered:
            self.settle()
        return self._stopped

    def settle(self) -> None:
        """Answer the stops that were asked for: ask who puts them off."""
        while self._unanswered:
            request = self._unanswered.pop(0)
            if not request.answer(self._holds(request.reason, request.by)):
                stop = Stop(request.reason, request.by)
                if self.together:
                    self._to_agree |= RequestSet(stop=stop)
                else:
                    self._stopped = self._stopped or stop

    def pause(self, reason: str, by: str) -> None:
        """Ask for the end of this process, at the next place where the state can be saved."""
        self._request(RequestSet(save=True, ending=ExitRequest(reason=reason, by=by)))

    def save(self) -> None:
        """Ask that the state is saved."""
        self._request(RequestSet(save=True))

    def validate(self, phase: str) -> None:
        """Let the others know, when they next agree, that it is time for a validation, or the end; rank 0 calls it."""
        self._to_agree |= RequestSet(validations=frozenset([phase]))

    def begin_validation(self, phase: str) -> None:
        """A validation that all knew of begins."""
        self.validations -= {phase}

    def _request(self, wishes: RequestSet) -> None:
        """Make these ready, at once in one process, else when all processes have agreed."""
        if self.together:
            self._to_agree |= wishes
        else:
            self._make_ready(wishes)

    def _make_ready(self, wishes: RequestSet) -> None:
        """These are to be acted upon at the next place."""
        self._ready = wishes if self._ready is None else self._ready | wishes
        self.waits = True
        self.change()

    @property
    def asks(self) -> bool:
        """Whether this process asks for something that the processes have not agreed on yet."""
        self.settle()
        return self.waits or self._to_agree.any

    def take(self) -> RequestSet:
        """Hand over what is to be done now, and what a signal asks for."""
        self.waits = False  # first: a signal may come between any two lines
        if self.together and self._signals is not None and self._signals.caught is not None:
            self.waits = True  # until all agree on it
        wishes = self._ready or RequestSet()
        self._ready = None
        self.signal = None
        if wishes.ending is not None and wishes.ending.signal:
            self.signal = signal.Signals(wishes.ending.signal)
        if not self.together and (caught := self._caught()) is not None:
            wishes |= caught[1]
            self.signal = caught[0]
        return wishes

    def pass_on_saves(self) -> None:
        """Let the handlers from before the fit hear of a signal that asked for a save."""
        if self._signals is not None:
            self._signals.pass_on(SAVING)

    def _caught(self) -> tuple[signal.Signals, RequestSet] | None:
        """The signal that was caught and what it asks for, once."""
        signals = self._signals
        if signals is None or (caught := signals.take()) is None:
            return None
        ending = None if signals.ending is None else ExitRequest(signals.ending, signals.ending.name)
        return caught, RequestSet(save=True, ending=ending)

    def agree(
        self, updates: int, cancel: Cancel | None, numbers: tuple[float, ...]
    ) -> tuple[Cancel | None, list[float]]:
        """Let all processes act on what any of them asks for. One collective, and two more if anything is asked for.

        Args:
            updates: That were made; equal in all of them, where they train in step.
            cancel: This process's signal to end the innermost epoch, or the fit.
            numbers: Sent along.

        Returns:
            The cancel that is agreed on, and the highest of each number. The lowest rank's reasons count.

        Raises:
            WorldError: The processes have parted.
        """
        world = self.world
        self.settle()
        self.waits = False  # first: a signal may come between any two lines
        if self._ready is not None:
            self.waits = True
        if (caught := self._caught()) is not None:
            self._to_agree |= caught[1]
        asked = self._to_agree
        self._to_agree = RequestSet()  # what is asked for meanwhile is for the next time
        wanted = float(asked.any or cancel is not None)
        # Each comes back as the highest of all processes, so that of -updates gives the fewest updates.
        wanted, most, minus_fewest, *highest = world.agree(wanted, float(updates), -float(updates), *numbers)
        agreed = None
        if wanted:
            own = cancel and (type(cancel).__name__, cancel.reason, cancel.by)
            said = world.gather((asked.stop, own, asked.save, asked.ending, asked.validations))
            stops, cancels, saves, endings, validations = zip(*said, strict=True)
            ending = _first(endings)
            stop = _first(stops)
            self._stopped = self._stopped or (None if stop is None else Stop(*stop))
            self.validations = self.validations.union(*validations)
            agreed = _strongest([each for each in cancels if each is not None])
            due = RequestSet(save=any(saves), ending=None if ending is None else ExitRequest(*ending))
            if due.any:
                self._make_ready(due)
            self.change()
        fewest = -minus_fewest
        if world.in_step and most != fewest:
            raise WorldError(
                f"the processes have made from {fewest:.0f} to {most:.0f} updates, rank {world.rank} {updates}: a step "
                f"was cancelled, or an update skipped, in only some of them, and their parameters have parted. Decide "
                f"by what all of them know, such as learner.world.highest(value)"
            )
        return agreed, highest


def _strongest(said: list[tuple[str, str, str]]) -> Cancel | None:
    """The cancel of any process that ends the most."""
    if not said:
        return None
    name, reason, by = next((each for each in said if each[0] == CancelFit.__name__), said[0])
    cancel = CANCELS[name](reason)
    cancel.by = by
    return cancel


def _first(values: tuple[Any, ...]) -> Any:
    return next((value for value in values if value is not None), None)
