"""Resume: where the next fit of a learner resumes, and what a state holds of the run that is under way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loopkit.engine.kept.data.data_check import STOP
from loopkit.engine.kept.data.data_places import DataPlaces
from loopkit.engine.kept.data.loader_positions import save_position
from loopkit.engine.kept.epoch_record import record
from loopkit.engine.kept.left_open import LeftOpen
from loopkit.engine.kept.open_epoch import OpenEpoch
from loopkit.engine.kept.position import Position
from loopkit.engine.kept.rounds import Round
from loopkit.errors import StateError
from loopkit.progress import Progress


@dataclass(frozen=True)
class EpochStart:
    """A record of the begin of an epoch that does not train, to make a state as of then later."""

    epoch: OpenEpoch
    data: dict[str, Any]
    """Positions of loaders, by phase."""
    nested: dict[str, Any]
    generators: Any
    progress: Progress
    metrics: dict[str, float]
    plugins: dict[str, Any]
    """The states of the plugins that the epoch calls."""
    phases: dict[str, Any]
    """The state of its phase, if it has one."""
    round: Any = None
    """The round of the user's loop in which it runs."""


class RunningFit(Protocol):
    """The fit that is running."""

    position: Position

    def saved(self) -> dict[str, Any]:
        """Return its saved form."""

    def go_on(self) -> None:
        """Resume from the position that was loaded."""


class Run(Protocol):
    """The fit that is running, and the epochs that are open."""

    progress: Progress

    @property
    def fit(self) -> RunningFit | None:
        """The fit; None if none is running."""

    @property
    def open_epochs(self) -> Sequence[OpenEpoch]:
        """The epochs of the fit that are open, the outermost first."""

    @property
    def can_save(self) -> bool:
        """Whether the state can be saved now."""


class Resume:
    """The position of the fit that the next one resumes, from a loaded state or after an interrupt in this process.

    Args:
        left_open: The epochs that a loaded state left open.
        places: The data of phases.
        running: The fit and the epochs that run now.
        round: The round of the user's loop.
    """

    def __init__(self, left_open: LeftOpen, places: DataPlaces, running: Run, round: Round) -> None:
        self._open = left_open
        self._places = places
        self._running = running
        self._live_round = round
        self.position: Position | None = None
        """The position of the fit that the next one resumes."""
        self.fits = 0
        """How many fits the learner has begun."""
        self._round: Any = None
        """The saved round of the user's loop."""
        self.unfinished = ""
        """A text about the epoch that the last fit left unfinished when it failed."""
        self._held: dict[str, Any] | None = None
        """The open parts of an interrupted fit of this process."""
        self._lost = ""
        """Why nothing of it can be resumed."""

    def load(self, state: Mapping[str, Any], position: Position | None, replay: bool, data: str = STOP) -> None:
        """Take over what a state left open."""
        self._open.load(state)
        self._places.load(state, replay, data)
        self._round = state.get("round")
        self.position = position
        self._held = None
        self._lost = ""

    def forget(self) -> None:
        """Forget what was left open."""
        self._open.forget()
        self._places.forget()
        self._round = None
        self.position = None
        self._held = None
        self._lost = ""
        self.unfinished = ""

    def drop_held(self, is_behind: Callable[[Position], bool]) -> Position | None:
        """Forget the fit that an interrupt left open if the next one does not resume it; returns where it was.

        Args:
            is_behind: Whether the next fit's limits are behind a position already.
        """
        if self._held is None or self.position is not None:
            return None
        at = Position.of(self._held["fit"])
        if not is_behind(at):
            return None
        self.forget()
        return at

    def begin(self) -> tuple[Position | None, bool]:
        """Where the fit that begins now resumes, None if it is new, and whether it was interrupted in this process."""
        self._places.begin()
        held = self._held
        self._held = None
        self._lost = ""
        if held is not None and self.position is None:
            self.load(held, Position.of(held["fit"]), True)
        if self.position is None:
            self.fits += 1
            return None, False
        return self.take_position(), held is not None

    def take_position(self) -> Position | None:
        """The position that was loaded, which then belongs to a fit."""
        position = self.position
        self.position = None
        if position is not None:
            self.fits = position.number
        return position

    def take_round(self) -> Any:
        """Hand over the round of the user's loop that a loaded state holds, once; None if it holds none."""
        saved = self._round
        self._round = None
        return saved

    def leave_unfinished(self, what: str) -> None:
        """A fit has failed, and left an epoch unfinished; an empty string: that was said."""
        self.unfinished = what

    def saved(self, mark: EpochStart | None = None) -> dict[str, Any]:
        """Collect the saved form of open epochs, loaders, generators and the fit."""
        fit = self._running.fit
        if self._held is not None and fit is None:
            return copy.deepcopy(self._held)
        if self._lost and fit is None:
            raise StateError(f"{self._lost}. learner.forget() drops the epoch that was open")
        self._places.check(self._running.open_epochs)
        records = self._records(mark)
        round = self._saved_round(mark)
        return {
            **({} if round is None else {"round": round}),
            "epochs": records,
            "data": self._places.positions({saved["phase"] for saved in records}) if mark is None else mark.data,
            "nested": self._places.hooks.positions() if mark is None else mark.nested,
            "fit": self._saved_position() if fit is None else fit.saved(),
            "generators": self._open.random_state() if mark is None else mark.generators,
        }

    def _records(self, mark: EpochStart | None) -> list[dict[str, Any]]:
        """The saved forms of the epochs that are open or wait to be opened again."""
        fit = self._running.fit
        position = None if fit is None else fit.position
        epochs = [epoch for epoch in self._running.open_epochs if mark is None or epoch is not mark.epoch]
        return [*(record(epoch, position, self._places) for epoch in epochs), *self._open.epochs]

    def _saved_position(self) -> dict[str, Any] | None:
        """The saved form of the position that the next fit resumes."""
        position = self.position
        return None if position is None else position.saved(position.seconds, position.stop)

    def _saved_round(self, mark: EpochStart | None) -> Any:
        """Return the saved form of the round of the user's loop; None without one."""
        fit = self._running.fit
        if mark is not None:
            return mark.round
        if fit is not None and fit.position.by_fit:
            return None
        return self._live_round.saved() if self._round is None else self._round

    def mark(self, epoch: OpenEpoch) -> dict[str, Any] | None:
        """Return the place of the run at the begin of an epoch that does not train; None if there is none."""
        phase = epoch.phase.name
        made = epoch.made_with
        if phase in self._open.waiting:
            return None
        try:
            data = self._places.positions(
                {other.phase.name for other in self._running.open_epochs if other is not epoch}
            )
            if phase not in data and made is not None:
                data[phase] = {**save_position(epoch.function, 0, running=False), "parts": made["parts"]}
            elif phase not in data:
                data[phase] = save_position(epoch.data, 0, running=False)
            nested = self._places.hooks.positions()
        except StateError:
            return None  # such data have no position
        random = self._open.random_state() if made is None else made["generators"]
        return {"data": data, "nested": nested, "generators": random, "round": self._live_round.saved()}

    def hold(self) -> None:
        """Keep what is open for the next fit of this process, which resumes from here."""
        try:
            self._held = copy.deepcopy(self.saved())
        except StateError as error:
            self._held = None
            self._lost = str(error)
            self.leave_unfinished(f"the epoch that was open cannot be resumed: {error}")
