"""Round: the round of a loop of the user's that is under way, saved so that its own code can be run again.

The code between two runs is no part of a state. After a resume it is run again, and must do the same: each stretch of
it begins with the random generators, metrics and counters that it began with at first. `Moment` holds these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.base import generators
from loopkit.base.digest import digest
from loopkit.base.kinds import ANY, COUNT, LIST, MAPPING, NUMBERS, Kind, wrong
from loopkit.base.notes import warn
from loopkit.base.words import half_a_state
from loopkit.engine.kept.data.data_parts import OF_DATA
from loopkit.engine.kept.values import nbytes, pack, unpack
from loopkit.engine.kept.witness.functions import held_in_code
from loopkit.engine.kept.witness.looks import is_shut
from loopkit.engine.kept.witness.walk import Found, walk
from loopkit.errors import PhaseError
from loopkit.progress import Progress

LARGE = 1 << 20
"""Bytes from which a value of `once` is named by its digest, so that it is written once and not in each checkpoint."""
PLAIN_MODULES = ("builtins", "collections", "functools")
"""Modules of Python whose objects, such as lists, functions and partials, hold what the user's code gave them."""
STATE_METHODS = ("state_dict", "load_state_dict")
MOMENT: dict[str, Kind] = {"generators": MAPPING, "own": MAPPING, "metrics": NUMBERS, "progress": MAPPING}
VALUE: dict[str, Kind] = {
    "round": COUNT,
    "value": ANY,
    "after": MAPPING,
    "digest": ("a digest", lambda v: v is None or type(v) is str),
}


@dataclass
class Moment:
    """A moment of the user's code: all that decides how it runs on, beside its own variables and the weights."""

    generators: dict[str, Any]
    """States of the global random generators; missing ones stay as they are."""
    own: dict[str, Any]
    """States of the loop's own objects and of generators that phases hold, by name; likewise."""
    metrics: dict[str, float]
    progress: dict[str, int]


@dataclass
class Value:
    """A value of `rounds.once`."""

    round: int
    packed: Any
    after: Moment
    """As of when it had been made."""
    digest: str | None = None
    """The digest of a large value."""

    def saved(self) -> dict[str, Any]:
        """Return what a state holds of it."""
        return {"round": self.round, "value": self.packed, "after": vars(self.after), "digest": self.digest}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Value:
        """Return what `saved` was made of."""
        return cls(saved["round"], saved["value"], Moment(**saved["after"]), saved["digest"])


@dataclass
class Replay:
    """A round of a saved state that is being run again, up to where it was saved."""

    saved: Mapping[str, Any]
    now: Moment
    """The loaded moment, restored when the loop reaches the saved round."""
    put_back: Callable[[], None]
    """Undo what the user's code changes meanwhile in models, optimizers, phases and plugins."""
    opened: bool
    """Whether an epoch was open."""
    values: set[str] = field(default_factory=set)
    """The values of `once` that were asked for so far."""


@dataclass
class Begun:
    """The round that is under way."""

    number: int
    begin: Moment | None
    """None if it was resumed from a state that did not hold it."""
    turns: list[Moment] = field(default_factory=list)
    """As of the end of each of its epochs; generators and objects of the loop only where that epoch moved them."""
    turn: Moment | None = None
    """As of the begin of the epoch that is open."""
    ending: bool = False
    """The last of `turns` is of an epoch whose ``phase_end`` runs."""


class Round:
    """The round that is under way; the part ``"round"`` of a state.

    Args:
        progress: The learner's counters.
        metrics: The learner's latest metrics.
    """

    name = "round"
    version = 1

    def __init__(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._progress = progress
        self._metrics = metrics
        self._own: dict[str, Any] = {}
        self._begun: Begun | None = None
        self._replay: Replay | None = None
        self._values: dict[str, Value] = {}
        self._left: dict[str, Any] = {}
        """The states of a loaded round, of generators that are found when `once` is called."""

    # What it keeps beside the global generators

    @staticmethod
    def check(objects: Mapping[str, Any]) -> None:
        """Refuse objects that have no state.

        Raises:
            PhaseError: One is neither.
        """
        if not isinstance(objects, Mapping):
            raise PhaseError(f'rounds(state={type(objects).__name__}): give a mapping of names, state={{"env": env}}')
        for name, each in objects.items():
            if generators.is_generator(each):
                continue
            methods = [word for word in STATE_METHODS if callable(getattr(each, word, None))]
            if len(methods) < 2:
                lacks = half_a_state(methods) if methods else "is no random generator and has no state_dict"
                raise PhaseError(f"rounds(state=...): {name!r} ({type(each).__name__}) {lacks}")

    def declare(self, objects: Mapping[str, Any]) -> None:
        """Keep these objects of the user's loop: generators, and what has ``state_dict`` and ``load_state_dict``."""
        self._own = dict(objects)

    def find(self, roots: Mapping[str, Any]) -> None:
        """Keep the random generators that these objects hold."""
        known = {id(each) for each in self._own.values()}
        for root, owner in roots.items():
            for found in walk(owner):
                value = found.value
                if generators.is_generator(value) and id(value) not in known:
                    known.add(id(value))
                    self._own[f"{root}.{found.path}"] = value

    def _find_in(self, name: str, make: Callable[..., Any]) -> None:
        """Keep the random generators that the function of a value closes over or names, from where they were saved."""
        known = {id(each) for each in self._own.values()}

        def enter(found: Found) -> bool:
            return id(found.value) not in known and _is_open(found)

        for found in walk(make, enter=enter, held_by=held_in_code):
            value = found.value
            if not generators.is_generator(value) or generators.is_global(value):
                continue
            if id(value) in known:
                continue
            path = f"once.{name}.{found.path}"
            self._own[path] = value
            if path in self._left:
                _load(value, self._left.pop(path))

    def kept(self) -> list[Any]:
        """Return the generators and objects that it keeps, and the learner's metrics and counts."""
        return [*self._own.values(), self._metrics, self._progress]

    def _look(self, since: Moment | None = None) -> Moment:
        """Return the moment; of generators and objects only those that have moved since another one."""
        moment = Moment(
            generators=generators.save(),
            own=self._own_states(),
            metrics=dict(self._metrics),
            progress=asdict(self._progress),
        )
        if since is not None:
            moment.generators = _moved(since.generators, moment.generators)
            moment.own = _moved(since.own, moment.own)
        return moment

    def _own_states(self) -> dict[str, Any]:
        return {name: _state_of(each) for name, each in self._own.items()}

    def _put(self, moment: Moment) -> None:
        if moment.generators:
            now = generators.save()
            generators.restore({**now, **moment.generators})
        self._put_own(moment.own)
        self._put_numbers(moment)

    def _put_own(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            if name in self._own:
                _load(self._own[name], state)

    def _put_numbers(self, moment: Moment) -> None:
        self._metrics.clear()
        self._metrics.update(moment.metrics)
        for counter, value in moment.progress.items():
            setattr(self._progress, counter, value)

    # Its life

    def begin(self, saved: Any | None) -> None:
        """Start with the values of `once` that a state holds; the round itself is begun by `begin_round`."""
        self._forget()
        if saved is not None:
            self._values = {name: Value.of(each) for name, each in saved["values"].items()}
            self._left = dict(saved["now"])

    def end(self, error: BaseException | None) -> None:
        """End with the fit."""
        self._forget()
        self._own = {}

    def _forget(self) -> None:
        self._begun = None
        self._replay = None
        self._values = {}
        self._left = {}

    def put_now(self, saved: Mapping[str, Any]) -> None:
        """Put the loop's own objects and generators where they were at a save between two rounds."""
        self._put_own(saved["now"])

    def begin_round(self, number: int, whole: bool = True) -> None:
        """A round begins; `whole`: from its first line."""
        begin = self._look() if whole else None
        self._begun = Begun(number, begin)

    def replay(self, saved: Mapping[str, Any], number: int, opened: bool, put_back: Callable[[], None]) -> None:
        """The round of a state is run again, with all as it was when the round began."""
        turns = [Moment(**each) for each in saved["turns"]]
        begin = Moment(**saved["begin"])
        self._begun = Begun(number, begin, turns)
        self._replay = Replay(saved, self._look(), put_back, opened)
        self._put(begin)

    def pass_over(self, turn: int) -> None:
        """The user's loop has come to the end of an epoch that was over at the save."""
        assert self._begun is not None
        if self._replay is not None:
            self._put(self._begun.turns[turn - 1])

    @property
    def replaying(self) -> bool:
        """Whether the user's code has not come yet to where the state was saved."""
        return self._replay is not None

    def arrive(self) -> None:
        """The user's loop has come to where the state was saved."""
        replay = self._replay
        self._replay = None
        if replay is None:
            return
        replay.put_back()
        self._put_numbers(replay.now)
        if replay.opened:  # else the loop's own objects are as its code has just left them
            self.put_now(replay.saved)

    def begin_turn(self, resumed: bool) -> None:
        """An epoch of the round begins; `resumed`: it was open at the save."""
        if self._begun is not None:
            self._begun.turn = None if resumed else self._look()

    def end_turn(self, over: bool) -> None:
        """An epoch of the round has ended; `over`: so has its ``phase_end``."""
        begun = self._begun
        if begun is None:
            return
        if begun.ending:
            begun.turns.pop()
        begun.turns.append(self._look(begun.turn))
        begun.ending = not over

    def end_round(self) -> None:
        """The round is complete; values of earlier rounds are forgotten."""
        if self._begun is not None:
            number = self._begun.number
            self._values = {name: each for name, each in self._values.items() if each.round == number}
        self._begun = None

    def once(self, name: str, make: Callable[..., Any]) -> Any:
        """Return what `make` returns, the first time in the round; afterwards that value again.

        Raises:
            PhaseError: No round is under way.
            StateError: No checkpoint can hold the value.
        """
        if self._begun is None:
            raise PhaseError(
                f"rounds.once({name!r}, ...) outside of a round: call it in the loop, for _ in rounds: ..."
            )
        if not isinstance(name, str) or "." in name:
            raise PhaseError(f"rounds.once({name!r}, ...): the name is a string without dots")
        self._find_in(name, make)
        held = self._values.get(name)
        if held is None or held.round != self._begun.number:
            held = self._values[name] = self._made(name, make, held)
        elif self._replay is not None and name not in self._replay.values:
            self._replay.values.add(name)
            self._put(held.after)
        return unpack(held.packed)

    def _made(self, name: str, make: Callable[..., Any], before: Value | None) -> Value:
        assert self._begun is not None
        begin = self._look()
        if _takes_one(make):
            made = make(None if before is None else unpack(before.packed))
        else:
            made = make()
        packed = pack(made, f"what rounds.once({name!r}) made")
        named = digest(packed) if nbytes(packed) >= LARGE else None
        return Value(self._begun.number, packed, self._look(begin), named)

    # What is saved

    def saved(self) -> Any:
        """Return what a state holds of it; None if it has nothing to hold."""
        if self._replay is not None:
            return self._replay.saved
        values = {name: each.saved() for name, each in self._values.items()}
        now = self._own_states()
        begun = self._begun
        if begun is None or begun.begin is None:
            if not values and not now:
                return None
            return {"begin": None, "turns": [], "values": values, "now": now}
        turns = begun.turns
        if begun.ending:
            turns = [*turns[:-1], self._look(begun.turn)]
        return {
            "begin": vars(begun.begin),
            "turns": [vars(each) for each in turns],
            "values": values,
            "now": now,
        }

    @classmethod
    def problems(cls, saved: Any) -> list[str]:
        """Return what in a saved form is not as `saved` makes it."""
        found = wrong(cls.name, saved, {"turns": LIST, "values": MAPPING, "now": MAPPING})
        if found:
            return found
        begin = saved.get("begin")
        moments = [] if begin is None else [begin, *saved["turns"]]
        for moment in moments:
            found += wrong(f"{cls.name} of a moment", moment, MOMENT, more=False)
        for name, value in saved["values"].items():
            where = f"{cls.name}.values.{name}"
            of_value = wrong(where, value, VALUE)
            if not of_value:
                of_value = wrong(f"{where}.after", value["after"], MOMENT, more=False)
            found += of_value
        return found

    @staticmethod
    def share(saved: list[Any], rank: int, size: int) -> Any:
        """Return the share of a process: its own; with more processes than saved, another one's without generators."""
        before = len(saved)
        taken = rank % before
        own = saved[taken]
        if before != size and own["values"]:
            warn(
                f"the round was saved by {before} processes, and there are {size} now: process {rank} takes the "
                f"values of rounds.once that process {taken} had"
            )
        if rank < before or own["begin"] is None:
            return own
        values = {name: {**each, "after": _for_another(each["after"])} for name, each in own["values"].items()}
        return {
            **own,
            "begin": _for_another(own["begin"]),
            "turns": [_for_another(each) for each in own["turns"]],
            "values": values,
            "now": {},
        }


def _for_another(moment: Mapping[str, Any]) -> dict[str, Any]:
    """A saved moment for another process than the one that saved it: generators stay as they are there."""
    return {**moment, "generators": {}, "own": {}}


def _is_open(found: Found) -> bool:
    """Whether an object can hold generators of the function: data, models and learners have generators of their own."""
    kind = type(found.value)
    if issubclass(kind, (*OF_DATA, nn.Module)):
        return False
    return kind.__module__ in PLAIN_MODULES or not is_shut(kind)


def _state_of(value: Any) -> Any:
    """Return a copy of the state of a generator, or of an object that has one."""
    if generators.is_generator(value):
        return generators.state_of(value)
    return pack(value.state_dict(), f"the state_dict of a {type(value).__name__}")


def _load(value: Any, state: Any) -> None:
    if generators.is_generator(value):
        generators.put_state(value, state)
    else:
        value.load_state_dict(unpack(state))


def _moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that are new or others than before."""

    def has_moved(name: str) -> bool:
        return name not in before or not alike(before[name], now[name])

    return {name: state for name, state in now.items() if has_moved(name)}


def alike(one: Any, other: Any) -> bool:
    """Whether two states are equal: numbers, strings, containers, and tensors by type and bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or _equal(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(each, other[key]) for key, each in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.layout is torch.strided and torch.equal(one, other):
        return True
    name = digest(one)  # by bits: nan is equal to itself
    return name is not None and name == digest(other)


def _takes_one(make: Callable[..., Any]) -> bool:
    """Whether a function has one argument without a default: the value of the round before."""
    from inspect import Parameter, signature

    try:
        taken = signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    for each in taken:
        if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            return each.default is Parameter.empty
    return False
