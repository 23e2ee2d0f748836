"""DataPlaces: where the data of each phase are, and where a loaded state says that they were."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from loopkit.base import generators
from loopkit.base.notes import warn
from loopkit.engine.kept.data.data_check import STOP, DataCheck
from loopkit.engine.kept.data.data_parts import DataParts
from loopkit.engine.kept.data.loader_positions import (
    batches_of,
    begin,
    draws_order_at_once,
    epoch_length,
    facts,
    keeps_place,
    load_position,
    resume,
    save_position,
    start_over,
)
from loopkit.engine.kept.data.self_seeded import self_seeded
from loopkit.engine.kept.data.torchdata_loaders import buffer_lost
from loopkit.engine.kept.data.worker_draws import lost, lost_when_it_begins
from loopkit.engine.kept.left_open import LeftOpen
from loopkit.engine.kept.open_epoch import GivenData, OpenEpoch
from loopkit.errors import StateError


class DataPlaces:
    """The data of a learner's phases and their positions, of the run that is under way and of a loaded state.

    Args:
        left_open: The epochs that a loaded state left open.
    """

    def __init__(self, left_open: LeftOpen) -> None:
        self._open = left_open
        self._data: dict[str, Any] = {}
        """Loaded positions of loaders without an open epoch, by phase."""
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
        self._alternating: set[str] = set()
        """The phases that have several loaders in turn."""
        self.hooks = HookPlaces()
        """The places of data that hooks run over."""
        self.counts = WholeCounts()
        """The steps of whole epochs."""

    def load(self, state: Mapping[str, Any], replay: bool, data: str) -> None:
        """Take over the positions of a state."""
        self._other_data = data
        self._data = dict(state["data"])
        self.hooks.load(state["nested"])
        self._replay = replay

    def forget(self) -> None:
        """Forget the loaded positions."""
        self._data = {}
        self.hooks.load({})

    def begin(self) -> None:
        """A fit begins, whose loaders are not known yet."""
        self._named.clear()
        self._earlier.clear()
        self._alternating.clear()
        self._loaders.clear()
        self.hooks.begin()
        self.counts.begin()

    def expect(self, sources: Iterable[GivenData]) -> None:
        """Put the loaders of phases where they were; they may be saved before their first epoch."""
        for source in sources:
            data = source.given if source.made else source.epoch()[0]
            self.meet(data)
            self._loaders[source.phase.name] = data
            if source.phase.name not in self._open.waiting:
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

    def make(self, epoch: OpenEpoch, source: GivenData) -> tuple[Any, int | None, dict[str, Any] | None]:
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

    def batches(self, epoch: OpenEpoch) -> tuple[Iterable[Any], Any, int | None]:
        """Put the data of an epoch that is about to begin where it was.

        Returns:
            The iterable; the notes for a replay of it, if it resumes by one later; and how many steps there
            will be, the ones before the save included.
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
                self._open.restore_generators()
                begun = begin(data, function)
            elif begun is not None:
                generators.restore(begun["generators"])
            length = epoch_length(data, saved)
            proof = DataCheck.of(epoch.saved or {}, facts(data), epoch.first_process)
            shared = self._shared(epoch.phase.name)
            batches = resume(data, saved, passed, function=function, shared=shared, proof=proof)
            if proof.drew_otherwise(self._open.random_state()) and not draws_order_at_once(data):
                self._name(
                    f"the data of phase {epoch.phase.name!r} ({type(data).__name__}) draw from the global random "
                    f"generators in mid-epoch, as training does. The {epoch.steps} batches before the position were "
                    f"made again with other numbers, so those that come may have another order. Give the data a "
                    f"generator of their own, as in DataLoader(generator=torch.Generator())"
                )
            proof.judge(epoch.agree_on(proof.problem(epoch.phase.name, data, epoch.steps)), self._other_data)
        if not epoch.alone and not epoch.made:  # else it is of this epoch alone
            self._remember(epoch.phase.name, data)
        return batches, begun, length

    def _shared(self, phase: str) -> set[int]:
        """The generators, by ``id``, that the data of other phases draw from."""
        others = [DataParts(data, states=False) for name, data in self._loaders.items() if name != phase]
        return {id(generator) for parts in others for generator in parts.generators.values()}

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
        if keeps_place(data) and all(data is not loader for loader in self._loaders.values()):
            self.hooks.put(key, data)  # of the fit's own loaders the position is known

    def check(self, epochs: Iterable[OpenEpoch]) -> None:
        """Name what no state can hold of the data of these open epochs, and of the other loaders.

        Raises:
            StateError: A phase has several loaders in turn, for which there is no position.
        """
        if self._alternating:
            raise StateError(
                f"phase {min(self._alternating)!r} runs over several loaders in turn, and one position is kept for a "
                f"phase: give each loader its own phase, TrainingPhase(name=...)"
            )
        for epoch in epochs:
            self._name(lost(epoch.data, running=epoch.steps > 0) or self_seeded(epoch.data))
        for loader in self._loaders.values():
            self._name(lost(loader, running=False) or self_seeded(loader))

    def positions(self, opened: Collection[str]) -> dict[str, Any]:
        """Where the loaders are of the phases that have no open epoch."""
        data = dict(self._data)
        for phase, loader in self._loaders.items():
            if phase not in opened and phase not in data:  # else not restored yet
                data[phase] = save_position(loader, 0, running=False)
        return data


class WholeCounts:
    """The steps of the last whole epoch of each phase."""

    def __init__(self) -> None:
        self._whole: dict[str, int] = {}
        self._half: set[str] = set()
        """The phases whose last epoch was resumed, and had no other length than the one before it."""

    def begin(self) -> None:
        """A fit begins."""
        self._whole.clear()
        self._half.clear()

    def whole(self, epoch: OpenEpoch) -> int | None:
        """Return the steps of the last whole epoch of the same phase, if its data give as many each time."""
        if epoch.made or epoch.alone or epoch.length is not None:
            return None
        before = None if epoch.saved is None else epoch.saved.get("whole")
        return self._whole.get(epoch.phase.name, before)

    def count(self, epoch: OpenEpoch) -> None:
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


class HookPlaces:
    """The places of data over which hooks run epochs, by where they run."""

    def __init__(self) -> None:
        self._saved: dict[str, Any] = {}
        """Loaded positions."""
        self._inner: dict[str, weakref.ref[Any]] = {}
        """The loaders that have a position of their own."""
        self._placed: list[weakref.ref[Any]] = []
        """The loaders that were put where a state says."""
        self._unclear: set[str] = set()
        """Where hooks run epochs over another loader each time."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over the positions of a state."""
        self._saved = dict(saved)
        self._placed.clear()

    def begin(self) -> None:
        """A fit begins."""
        self._inner.clear()
        self._unclear.clear()

    def put(self, key: str, data: Any) -> None:
        """Put data where it was, and remember it."""
        saved = self._saved.pop(key, None)
        if saved is not None and all(ref() is not data for ref in self._placed):
            load_position(data, saved, replay=False)
            self._placed.append(weakref.ref(data))
        before = self._inner.get(key)
        if before is not None and before() is not data and key not in self._unclear:
            self._unclear.add(key)  # a fresh one each time begins where it likes
        self._inner[key] = weakref.ref(data)

    def positions(self) -> dict[str, Any]:
        """Where the loaders are."""
        positions = dict(self._saved)
        for key, ref in self._inner.items():
            loader = ref()
            if loader is not None and key not in self._unclear:
                positions[key] = save_position(loader, 0, running=False)
        return positions
