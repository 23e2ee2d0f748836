"""Resume: what is saved of a run that is under way, and what a loaded state left open until it begins again."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from loopkit.base import generators, sharded
from loopkit.base.notes import warn
from loopkit.base.sparse import unpacked
from loopkit.engine.kept.content import content
from loopkit.engine.kept.data_check import STOP, DataCheck
from loopkit.engine.kept.data_parts import DataParts
from loopkit.engine.kept.loader_positions import (
    batches_of,
    begin,
    epoch_length,
    facts,
    keeps_place,
    load_position,
    resume,
    save_position,
    start_over,
)
from loopkit.engine.kept.self_seeded import self_seeded
from loopkit.engine.kept.torchdata_loaders import buffer_lost
from loopkit.engine.kept.worker_draws import lost, lost_when_it_begins
from loopkit.engine.life.requests import Stop
from loopkit.errors import StateError
from loopkit.progress import Progress

if TYPE_CHECKING:
    from loopkit.engine.life.core import Core
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.sources import Source
    from loopkit.phases import Phase


@dataclass
class Position:
    """Where a fit is: what it has done, and which epoch comes next or is under way."""

    start: Progress
    """The counters when the fit began."""
    number: int = 1
    """Which of the learner's fits it is, from 1."""
    by_fit: bool = False
    """Whether ``fit`` runs the loop, so that it is known which epoch comes next."""
    epochs: int = 0
    """Rounds that are complete but for a validation: training epochs, in a loop of ``fit``."""
    done: int = 0
    """In a loop of the user's own: epochs of this round that are over."""
    due: list[str] = field(default_factory=list)
    """The phases whose validations are due, in their order; the first may be under way."""
    mid_epoch: bool = False
    """They come in the middle of a training epoch."""
    validated: dict[str, int] = field(default_factory=dict)
    """By phase: updates when its last validation began."""
    clock: dict[str, float] = field(default_factory=dict)
    """By phase: for how many seconds the fit had run when its last validation was over."""
    seconds: float = 0.0
    """How long the fit had run when it was saved; those since then are not in it."""
    stop: tuple[str, str] | None = None
    """The request for an end that was there when it was saved: its reason, and by whom."""
    ended: str = ""
    """Why the run is over, as `FitResult.reason`; empty if it is not."""
    limits: dict[str, float | None] = field(default_factory=dict)
    """``epochs``, ``max_steps``, ``max_updates`` and ``minutes`` of the fit that was saved."""
    counted: bool = True
    """Whether its rounds were counted; the first form of a loop of the user's did not."""

    @property
    def validate(self) -> bool:
        """Whether a validation that follows a training epoch is due or under way."""
        return bool(self.due) and not self.mid_epoch

    def count_epoch(self) -> None:
        """A training epoch is over."""
        self.epochs += 1

    def want(self, phases: list[str], mid_epoch: bool) -> None:
        """These validations are due: before the next training epoch, or now, in the middle of one."""
        self.due = phases
        self.mid_epoch = mid_epoch

    def begin_validation(self, phase: str, updates: int) -> None:
        """A validation begins, after these updates."""
        self.validated[phase] = updates

    def end_validation(self, phase: str, seconds: float) -> None:
        """A validation is over, after these seconds of the fit."""
        self.due = [name for name in self.due if name != phase]
        self.clock[phase] = seconds

    def end_round(self) -> None:
        """A round of the user's loop is complete."""
        self.epochs += 1
        self.done = 0

    def end_turn(self, turn: int) -> None:
        """So many epochs of a round of the user's loop are over."""
        self.done = turn

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Position:
        """The position that `saved` was made of; what it lacks has its default."""
        known = {each.name for each in fields(cls)}
        given = {name: copy.copy(value) for name, value in saved.items() if name in known}
        return cls(**{**given, "start": Progress(**saved["start"])})

    def saved(self, seconds: float, stop: Stop | None) -> dict[str, Any]:
        """The saved form of the position."""
        return {**asdict(self), "seconds": seconds, "stop": None if stop is None else tuple(stop)}


@dataclass(frozen=True)
class EpochStart:
    """A record of the begin of an epoch that does not train, to make a state as of then later."""

    epoch: Epoch
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


class Resume:
    """Open epochs, loaders and generators, of a state that was loaded and of the run that is under way."""

    def __init__(self) -> None:
        self.position: Position | None = None
        """The position of the fit that the next one resumes."""
        self.fits = 0
        """How many fits the learner has begun."""
        self.waiting: list[str] = []
        """The phases whose epoch was open in a loaded state and has not begun again yet, the outermost first."""
        self.left = False
        """Whether there is any, or random generators that are to be put back when there is none any more."""
        self._epochs: list[dict[str, Any]] = []
        """The saved states of the epochs in `waiting`."""
        self._data: dict[str, Any] = {}
        """Positions of loaders without an open epoch, by phase."""
        self._nested: dict[str, Any] = {}
        """Positions of loaders of epochs that hooks run, by where they run."""
        self._generators: Any = None
        self._round: Any = None
        """The saved round of the user's loop."""
        self._replay = True
        self._other_data = STOP
        """The reaction to other data in an open epoch."""
        self.unproved: dict[str, str] = {}
        """By phase: why the last state has no digest of its data, in words."""
        self._loaders: dict[str, Any] = {}
        """The data of each phase's last epoch in this fit; the function, if one makes them."""
        self._met: dict[int, weakref.ref[Any]] = {}
        """The data that this learner has gone over, by ``id``."""
        self._named: set[str] = set()
        """The losses that were named."""
        self._earlier: dict[str, list[weakref.ref[Any]]] = {}
        self._half: set[str] = set()
        """The phases whose last epoch was resumed, and had no other length than the one before it."""
        self._whole: dict[str, int] = {}
        """Steps of the last whole epoch of each phase."""
        self._alternating: set[str] = set()
        """The phases that have several loaders in turn."""
        self._inner: dict[str, weakref.ref[Any]] = {}
        """The loaders of epochs that hooks run, where they have a position of their own."""
        self._placed: list[weakref.ref[Any]] = []
        """The inner loaders that were put where a state says."""
        self._unclear: set[str] = set()
        """Where hooks run epochs over another loader each time."""
        self.unfinished = ""
        """A text about the epoch that the last fit left unfinished when it failed."""
        self._held: dict[str, Any] | None = None
        """The open parts of an interrupted fit of this process."""
        self._lost = ""
        """Why nothing of it can be resumed."""

    # What was open

    def load(self, state: Mapping[str, Any], position: Position | None, replay: bool, data: str = STOP) -> None:
        """Take over what a state left open."""
        self._other_data = data
        self._epochs = list(state["epochs"])
        self._data = dict(state["data"])
        self._nested = dict(state["nested"])
        self._generators = state["generators"]
        self._replay = replay
        self._round = state.get("round")
        self.waiting = [saved["phase"] for saved in self._epochs]
        self.left = bool(self._epochs) or self._generators is not None
        self.position = position
        self._held = None
        self._lost = ""
        self._placed.clear()

    def forget(self) -> None:
        """Forget what was left open."""
        self._epochs = []
        self._data = {}
        self._nested = {}
        self._generators = None
        self.position = None
        self._held = None
        self._lost = ""
        self.unfinished = ""
        self.waiting = []
        self.left = False
        self._round = None

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
        """Where the fit that begins now resumes, None if it is new, and whether it was interrupted in this process.

        Its loaders are not known yet.
        """
        self._named.clear()
        for memory in (
            self._earlier,
            self._alternating,
            self._loaders,
            self._inner,
            self._unclear,
            self._whole,
            self._half,
        ):
            memory.clear()
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

    def check_given(self, epoch: Epoch) -> None:
        """Raise for an open epoch of the user's loop that is given other data than before the save.

        Raises:
            StateError: It is.
        """
        if self.waiting[:1] != [epoch.phase.name]:
            return
        saved = self._epochs[0]
        before = saved.get("content")
        now = content(epoch.data, saved["steps"])
        if before is not None and now is not None and before != now:
            raise StateError(
                f"the epoch of phase {epoch.phase.name!r} was open when the state was saved, after {saved['steps']} "
                f"steps, and it is given other data now ({type(epoch.data).__name__}): the code between two runs is "
                f"run again after a resume, and made something else. Keep what it makes with "
                f"rounds.once('data', lambda: ...), which is saved"
            )

    def take(self, phase: Phase) -> dict[str, Any] | None:
        """Return the loaded record of the epoch that begins now, or None if it was not open at the save."""
        if not self.waiting:
            self.restore_generators()
        elif self.waiting[0] == phase.name:
            del self.waiting[0]
            return self._epochs.pop(0)
        elif phase.training:
            raise StateError(
                f"the state that was loaded was saved in an epoch of phase {self.waiting[0]!r}, and this is one of "
                f"{phase.name!r}: run the same phases in the same order as when it was saved"
            )
        return None

    def restore_generators(self) -> None:
        """Put the random generators where they were, when what was open is open again."""
        if not self.waiting:
            if self._generators is not None:
                generators.restore(self._generators)
            self._generators = None
            self.left = False

    def leave_generators(self) -> None:
        """Leave the random generators as they are, if nothing is open any more: they have come to their place."""
        if not self.waiting:
            self._generators = None
            self.left = False

    def leave_unfinished(self, what: str) -> None:
        """A fit has failed, and left an epoch unfinished; an empty string: that was said."""
        self.unfinished = what

    # Loaders

    def expect(self, sources: Iterable[Source]) -> None:
        """Put the loaders of phases where they were; they may be saved before their first epoch."""
        for source in sources:
            data = source.given if source.made else source.epoch()[0]
            self.meet(data)
            self._loaders[source.phase.name] = data
            if source.phase.name not in self.waiting:
                self._place(source.phase.name, data)

    def meet(self, data: Any) -> None:
        """Let loaders that this learner has not gone over before begin with their epoch 0, whoever used them."""
        known = self._met.get(id(data))
        if known is not None and known() is data:
            return
        with suppress(TypeError):  # lists have no weak references, and no epochs
            self._met[id(data)] = weakref.ref(data)
            start_over(data)
            self._name(lost_when_it_begins(data) or buffer_lost(data))

    def _name(self, text: str) -> None:
        """Warn of something that no checkpoint holds, once."""
        if text and text not in self._named:
            self._named.add(text)
            warn(text)

    def _place(self, phase: str, data: Any) -> None:
        """Put data without an open epoch where it was; or the function that makes it."""
        if phase in self._data:
            load_position(data, self._data.pop(phase), replay=self._replay)

    def make(self, epoch: Epoch, source: Source) -> tuple[Any, int | None, dict[str, Any] | None]:
        """Let a function make the data of an epoch, with the generators as they were when that epoch began.

        Returns:
            The data, how many batches they are, and what it takes to make them again.
        """
        if epoch.alone:
            return (*source.epoch(), None)
        saved = None if epoch.saved is None else epoch.saved["data"].get("made")
        if epoch.saved is None:
            self._place(epoch.phase.name, source.given)
        self._loaders[epoch.phase.name] = source.given
        parts = DataParts([], source.given)
        if saved is None:
            made = {"generators": generators.save(), "parts": parts.saved()}
            return (*source.epoch(), made)
        now = generators.save()
        parts.load(saved["parts"])
        generators.restore(saved["generators"])
        data, length = source.epoch()
        generators.restore(now)
        return data, length, saved

    def batches(self, epoch: Epoch) -> tuple[Iterable[Any], Any, int | None]:
        """Put the data of an epoch that is about to begin where it was.

        Returns:
            What to iterate over; what a replay of it will need, if that is how it resumes after a resume; and how many
            steps there will be, those before the save included.
        """
        data = epoch.data
        length = epoch.length
        function = epoch.function
        if epoch.saved is None and not epoch.alone and not epoch.made:
            self._place(epoch.phase.name, data)
        saved = None if epoch.saved is None else epoch.saved["data"]
        if saved is None:
            begun = begin(data, function)
            batches = batches_of(data, begun)
        else:
            passed = load_position(data, saved, replay=self._replay, function=function)
            begun = saved.get("begun")
            if not epoch.steps:
                self.restore_generators()
                begun = begin(data, function)
            elif begun is not None:
                generators.restore(begun["generators"])
            length = epoch_length(data, saved)
            proof = DataCheck.of(epoch.saved or {}, facts(data), epoch.first_process)
            shared = self._shared(epoch.phase.name)
            batches = resume(data, saved, passed, function=function, shared=shared, proof=proof)
            proof.judge(epoch.agree_on(proof.problem(epoch.phase.name, data, epoch.steps)), self._other_data)
        if not epoch.alone and not epoch.made:  # else it is of this epoch alone
            self._remember(epoch.phase.name, data)
        return batches, begun, length

    def _shared(self, phase: str) -> set[int]:
        """The generators, by ``id``, that the data of other phases draw from."""
        others = [DataParts(data, states=False) for name, data in self._loaders.items() if name != phase]
        return {id(generator) for parts in others for generator in parts.generators.values()}

    def whole(self, epoch: Epoch) -> int | None:
        """Return the steps of the last whole epoch of the same phase, if its data give as many each time."""
        if epoch.made or epoch.alone or epoch.length is not None:
            return None
        before = None if epoch.saved is None else epoch.saved.get("whole")
        return self._whole.get(epoch.phase.name, before)

    def count(self, epoch: Epoch) -> None:
        """Note the steps of a whole epoch; warn if it, or the one before it, was resumed, and the two differ."""
        name = epoch.phase.name
        before = self.whole(epoch)
        resumed = epoch.resumed
        steps = epoch.steps
        differs = (resumed or name in self._half) and before is not None and before != steps
        if differs:
            which = "that was resumed" if resumed else "after the one that was resumed"
            warn(
                f"the epoch of phase {name!r} {which} ended after {steps} steps, and the one before it had {before}: "
                f"{type(epoch.data).__name__} did not resume where it was, or gives another number of batches each time"
            )
        self._whole[name] = steps
        self._half.discard(name)
        if resumed and not differs:
            self._half.add(name)

    def _remember(self, phase: str, data: Any) -> None:
        """Note what the epochs of a phase go over; with several loaders there is no saying which comes next."""
        before = self._loaders.get(phase)
        self._loaders[phase] = data
        if before is not None and before is not data and keeps_place(before):
            self._earlier.setdefault(phase, []).append(weakref.ref(before))
        if phase in self._earlier and any(ref() is data for ref in self._earlier[phase]):
            self._alternating.add(phase)

    def inner(self, key: str, data: Any) -> None:
        """Put the data of an epoch that a hook runs where it was, if it has a position of its own, and remember it."""
        if not keeps_place(data) or any(data is loader for loader in self._loaders.values()):
            return  # of the fit's own loaders the position is known
        saved = self._nested.pop(key, None)
        if saved is not None and all(ref() is not data for ref in self._placed):
            load_position(data, saved, replay=False)
            self._placed.append(weakref.ref(data))
        before = self._inner.get(key)
        if before is not None and before() is not data and key not in self._unclear:
            self._unclear.add(key)  # a fresh one each time begins where it likes
        self._inner[key] = weakref.ref(data)

    # What is saved

    def parts(self, core: Core, mark: EpochStart | None = None) -> dict[str, Any]:
        """Collect the saved form of open epochs, loaders, generators and the fit."""
        if self._held is not None and core.running.fit is None:
            return copy.deepcopy(self._held)
        if self._lost and core.running.fit is None:
            raise StateError(f"{self._lost}. learner.forget() drops the epoch that was open")
        if self._alternating:
            raise StateError(
                f"phase {min(self._alternating)!r} runs over several loaders in turn, and one position is kept for a "
                f"phase: give each loader a phase of its own, TrainingPhase(name=...)"
            )
        for epoch in core.running.open_epochs:
            self._name(lost(epoch.data, running=epoch.steps > 0) or self_seeded(epoch.data))
        for loader in self._loaders.values():
            self._name(lost(loader, running=False) or self_seeded(loader))
        epochs = [epoch for epoch in core.running.open_epochs if mark is None or epoch is not mark.epoch]
        records = [*(_record(core, epoch) for epoch in epochs), *self._epochs]
        if (fit := core.running.fit) is not None:
            at: dict[str, Any] | None = fit.saved()
        else:
            at = None if self.position is None else self.position.saved(self.position.seconds, self._stop())
        round = self._saved_round(core, mark)
        return {
            **({} if round is None else {"round": round}),
            "epochs": records,
            "data": self.positions({record["phase"] for record in records}) if mark is None else mark.data,
            "nested": self.inner_positions() if mark is None else mark.nested,
            "fit": at,
            "generators": self.random_state() if mark is None else mark.generators,
        }

    def _saved_round(self, core: Core, mark: EpochStart | None) -> Any:
        """Return the saved form of the round of the user's loop; None without one."""
        if mark is not None:
            return mark.round
        if core.running.fit is not None and core.running.fit.position.by_fit:
            return None
        return core.round.saved() if self._round is None else self._round

    def positions(self, opened: Collection[str]) -> dict[str, Any]:
        """Where the loaders are of the phases that have no open epoch."""
        data = dict(self._data)
        for phase, loader in self._loaders.items():
            if phase not in opened and phase not in data:  # else not restored yet
                data[phase] = save_position(loader, 0, running=False)
        return data

    def random_state(self) -> Any:
        """Where the random generators are, or will be when what was open is open again."""
        return generators.save() if self._generators is None else self._generators

    def _stop(self) -> Stop | None:
        return None if self.position is None or self.position.stop is None else Stop(*self.position.stop)

    def inner_positions(self) -> dict[str, Any]:
        """Where the loaders are of epochs that hooks run."""
        positions = dict(self._nested)
        for key, ref in self._inner.items():
            loader = ref()
            if loader is not None and key not in self._unclear:
                positions[key] = save_position(loader, 0, running=False)
        return positions

    def hold(self, core: Core) -> None:
        """Keep what is open for the next fit of this process, which resumes from here."""
        try:
            self._held = copy.deepcopy(self.parts(core))
        except StateError as error:
            self._held = None
            self._lost = str(error)
            self.leave_unfinished(f"the epoch that was open cannot be resumed: {error}")


def _record(core: Core, epoch: Epoch) -> dict[str, Any]:
    """The saved form of an open epoch."""
    if epoch.data is None:
        raise StateError(
            f"the epoch of phase {epoch.phase.name!r} has data that the learner does not know, so it could not go on "
            f"from here: give learner.epoch({epoch.phase.name!r}, data=loader), and take epoch.batches()"
        )
    position = None if core.running.fit is None else core.running.fit.position
    by_fit = position is None or position.by_fit
    earlier = 0 if position is None or epoch.made else position.epochs - position.validate
    return {
        "phase": epoch.phase.name,
        "steps": epoch.steps,
        "data": {
            **save_position(
                epoch.data,
                epoch.steps,
                running=True,
                begun=epoch.begun,
                earlier_epochs=earlier,
                function=epoch.function,
            ),
            "made": epoch.made_with,
        },
        "windows": {window.name: window.state_dict() for window in epoch.windows if window.count},
        "stores": epoch.saved_stores(),
        **_proof_of(epoch, core.resume.unproved),
        **({} if not by_fit or (whole := core.resume.whole(epoch)) is None else {"whole": whole}),
        **({} if by_fit or (made := content(epoch.data, epoch.steps)) is None else {"content": made}),
    }


def _proof_of(epoch: Epoch, unproved: dict[str, str]) -> dict[str, Any]:
    """Return what a state holds to compare the data of an open epoch; note the reason by phase if it holds nothing."""
    name = epoch.phase.name
    if not epoch.steps:
        return {}
    if epoch.loop.seen_data.batch is None:  # no step since it was resumed
        held = None if epoch.saved is None else epoch.saved.get("proof")
        return {} if held is None else {"proof": held}
    found, why = epoch.loop.seen_data.digest()
    if found is None:
        unproved[name] = f"data of phase {name!r}: unproved at a resume, as {why}"
        return {}
    unproved.pop(name, None)
    return {"proof": {"digest": found, "repeats": not self_seeded(epoch.data)}}


def restore_windows(epoch: Epoch, saved: Mapping[str, Any]) -> None:
    """Reopen the accumulation windows of an epoch."""
    for name, values in saved.items():
        window = epoch.window(name)
        grads = [_like(unpacked(grad), p) for grad, p in zip(values["grads"], window.params, strict=True)]
        window.reopen(epoch.loop.last_step(), {**values, "grads": grads})


def _like(grad: Tensor | None, param: Tensor) -> Tensor | None:
    """A gradient as this process holds it; a sparse one is whole in each."""
    return grad if grad is None or grad.is_sparse else sharded.like(grad, param)
