"""DataParts: the generators and the objects with a state that data holds, saved and put back."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from loopkit.base import generators
from loopkit.base.notes import locate, warn
from loopkit.data import Loader, LoaderError, ResumableBatchSampler, ResumableSampler
from loopkit.engine.kept.witness.functions import held, held_by_methods
from loopkit.engine.kept.witness.walk import MAPPINGS, SEQUENCES, SETS, Found, walk
from loopkit.errors import StateError

DEEP = 8
"""Attributes or items between data and what is found in it: a loader, its wrappers, its data set, a transform."""
MOST = 10_000
LONG = 1_000
"""Containers of more items hold samples, and are not looked into."""
COUNTS_ITSELF = (Loader, ResumableSampler, ResumableBatchSampler)
"""Kinds that count their epochs, and have a position in them."""
OF_DATA = (Loader, DataLoader, Dataset, Sampler, BatchSampler)
"""Kinds that are looked at where a function closes over one, or names one."""
OF_ITERATIONS = ("torchdata.", "datasets.")
"""Packages whose objects have a state of one iteration, which belongs in no other."""


class DataParts:
    """The random generators that data holds, and the objects in it with ``state_dict`` and ``load_state_dict``.

    Each is found once, under its first path, such as ``sampler.rng``. It looks into attributes and built-in containers,
    and at the generators and loaders that a function closes over or names.

    Args:
        data: The data of an epoch. It is not asked for a state itself.
        function: The function that made the data, if one did; its parts are found under ``function``.
        states: Whether to look for objects with a state.
        without: An object whose position is kept elsewhere.
    """

    name = "parts"
    version = 1

    def __init__(self, data: Any, function: Any = None, *, states: bool = True, without: Any = None) -> None:
        self.generators: dict[str, Any] = {}
        """The random generators by path, without the global ones."""
        self.states: dict[str, Any] = {}
        """The objects with a state by path."""
        self.counting: list[Any] = []
        """The objects with ``set_epoch`` that do not count their epochs themselves."""
        self._seen = {id(data), id(without)}
        self._roots: set[int] = set()
        self._classes: set[type] = set()
        if type(data) not in (list, tuple):  # which holds batches
            self._look("", data, "any" if states else "none")
        if function is not None:
            self._look("function", function, "data")

    def _look(self, root: str, value: Any, states: str) -> None:
        """Find the parts of an object.

        Args:
            root: The path to it.
            value: The object.
            states: Which objects with a state count: ``"any"``, ``"none"``, or those of ``"data"`` and the object.
        """
        self._roots.add(id(value))
        below = []
        for found in walk(value, deep=DEEP, most=MOST, enter=_is_open):
            path = _joined(root, found.path)
            named: Iterable[tuple[str, Any]] = ()
            if isinstance(found.value, types.FunctionType):
                named = named_by(found.value)
            elif generators.is_generator(found.value):
                self._add(self.generators, path, found.value)
            else:
                is_data = not found.path or isinstance(found.value, OF_DATA)
                counts = states == "any" or (states == "data" and is_data)
                self._sort(path, found.value, counts)
                named = self._named_by_methods(found.value)
            below += [(_joined(path, name), each) for name, each in named]
        deeper = "none" if states == "none" else "data"
        for path, each in below:
            if id(each) not in self._roots:
                self._look(path, each, deeper)

    def _named_by_methods(self, value: Any) -> Iterable[tuple[str, Any]]:
        """The generators and data that the methods of an object's class close over or name, once for each class."""
        kind = type(value)
        if kind in self._classes:
            return ()
        self._classes.add(kind)
        return held_by_methods(kind, _is_of_data)

    def _sort(self, path: str, value: Any, states: bool) -> None:
        if is_told_epochs(value) and not any(each is value for each in self.counting):
            self.counting.append(value)
        if states and _has_state(value):
            self._add(self.states, path, value)

    def _add(self, parts: dict[str, Any], path: str, value: Any) -> None:
        if id(value) in self._seen or path in parts:  # items of sets share a path
            return
        self._seen.add(id(value))
        if not generators.is_global(value):
            parts[path] = value

    # As of a part

    def begin(self, saved: Any | None) -> None:
        """Start with an epoch, from its saved form."""
        if saved is not None:
            self.load(saved)

    def end(self, error: BaseException | None) -> None:
        """End with the epoch."""

    def saved(self) -> dict[str, Any]:
        """Return the states of the generators and of the objects, by path."""
        states = {path: _saved_state(path, value) for path, value in self.states.items()}
        drawn = {path: generators.state_of(value) for path, value in self.generators.items()}
        return {
            "generators": drawn,
            "states": {path: state for path, state in states.items() if state is not None},
        }

    def problems(self, saved: Any) -> list[str]:
        """List the parts that the saved form has and the data lacks, and the reverse."""
        problems = []
        for kind, own in (("generators", self.generators), ("states", self.states)):
            then = set(saved[kind])
            now = set(own)
            if then != now:
                problems.append(f"{kind} in it: {_listed(then)} before, {_listed(now)} now")
        return problems

    def load(self, saved: Any) -> Callable[[], None]:
        """Put generators and objects into their saved states; return the undo."""
        before = self.saved()
        for path, state in saved["states"].items():
            if path in self.states:
                _load_state(path, self.states[path], state)
        self.load_generators(saved)
        return lambda: self._undo(before)

    def load_generators(self, saved: Any) -> None:
        """Put only the generators into their saved states."""
        for path, state in saved["generators"].items():
            if path in self.generators:
                generators.put_state(self.generators[path], state)

    def _undo(self, before: Any) -> None:
        self.load(before)

    def share(self, saved: list[Any], rank: int, size: int) -> Any:
        """Return the parts of this process, or those of the last process where it was not there."""
        return saved[min(rank, len(saved) - 1)]

    def moved(self, saved: Any) -> list[str]:
        """List the paths of the generators that are not where the saved form has them."""
        moved = []
        for path, state in saved["generators"].items():
            own = self.generators.get(path)
            if own is not None and not same(generators.state_of(own), state):
                moved.append(path)
        return moved

    # Epochs

    def start_over(self) -> None:
        """Let loaders and samplers that count their epochs begin with the first, unless they were told another."""
        for value in self.states.values():
            if isinstance(value, COUNTS_ITSELF):
                value.start_over()

    def set_epoch(self, epoch: int, told: Callable[[Any], bool] | None = None) -> None:
        """Call ``set_epoch`` of everything that has it and does not count its epochs itself.

        Args:
            epoch: The epoch.
            told: Which objects are told; None: all.
        """
        for value in self.counting if told is None else filter(told, self.counting):
            try:
                value.set_epoch(epoch)
            except Exception as error:
                locate(error, f"in set_epoch({epoch}) of {type(value).__name__}, as an epoch began")
                raise


def same(one: Any, other: Any) -> bool:
    """Whether two saved forms are equal, in every bit of their tensors."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def plain(value: Any, path: str) -> Any:
    """Return a deep copy of a state, which holds only values that can be saved.

    Raises:
        StateError: It holds another.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(plain(part, f"{path}[{index}]") for index, part in enumerate(value))
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: plain(part, f"{path}[{key!r}]") for key, part in value.items()}
    what = type(value).__name__
    if isinstance(value, Mapping):
        what = f"dict with the keys {list(value)[:3]}"
    raise StateError(
        f"{path} is {what}, which cannot be saved: a state holds None, numbers, strings, lists, tuples, dicts with "
        f"string or int keys, and tensors. Let state_dict() return such (torch.Generator: get_state())"
    )


def _joined(root: str, path: str) -> str:
    if not root or not path:
        return root or path
    if path.startswith("["):
        return f"{root}{path}"
    return f"{root}.{path}"


def _is_open(found: Found) -> bool:
    """Whether to look inside a value."""
    value = found.value
    kind = type(value)
    if kind in MAPPINGS or kind in SEQUENCES or kind in SETS:
        return len(value) <= LONG
    if isinstance(found.owner, DataLoader) and found.key in ("_iterator", "multiprocessing_context"):
        return False
    return kind.__module__.startswith("loopkit.data") or not kind.__module__.startswith("loopkit.")


def named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function closes over or has as defaults, and the data that it looks up by name."""
    yield from held(function, _is_of_data)


def _is_of_data(value: Any) -> bool:
    if type(value) in (list, tuple, dict) and len(value) <= LONG:
        items: Iterable[Any] = value.values() if type(value) is dict else value
        return any(isinstance(each, OF_DATA) or generators.is_generator(each) for each in items)
    if isinstance(value, types.FunctionType):
        return True
    return isinstance(value, OF_DATA) or generators.is_generator(value)


def _has_state(value: Any) -> bool:
    """Whether an object has a state that belongs to a run, and not to a single iteration."""
    kind = type(value)
    if isinstance(value, (Loader, ResumableSampler)):
        return True
    if isinstance(value, (nn.Module, torch.optim.Optimizer, IterableDataset)):
        return False
    if kind.__module__.startswith((*OF_ITERATIONS, "loopkit.")):
        return False
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def is_told_epochs(value: Any) -> bool:
    """Whether an object has ``set_epoch`` and does not count its epochs itself."""
    return callable(getattr(type(value), "set_epoch", None)) and not isinstance(value, COUNTS_ITSELF)


def has_own_state(value: Any) -> bool:
    """Whether a class of the user's has ``state_dict``, and so saves what moves in it."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return False
    for base in type(value).__mro__:
        if "state_dict" in vars(base):
            return not base.__module__.startswith(("torch.", "torchdata.", "loopkit."))
    return False


def _saved_state(path: str, value: Any) -> Any:
    """Return the state of an object; None, with a warning, if it cannot be saved."""
    if isinstance(value, (Loader, ResumableSampler)):
        return value.state_dict(next_epoch=True)
    name = type(value).__name__
    try:
        return plain(value.state_dict(), f"{name}.state_dict()")
    except StateError as error:
        warn(f"{path} ({name}) of the data is not saved: {error}")
        return None


def _load_state(path: str, value: Any, state: Any) -> None:
    name = type(value).__name__
    if isinstance(value, (Loader, ResumableSampler)):
        try:
            value.load_state_dict(state)
        except LoaderError as error:
            value.set_epoch(state["epoch"])
            warn(f"{path} ({name}) of the data has changed since it was saved: {error}")
        return
    before = value.state_dict()
    try:
        value.load_state_dict(plain(state, path))
    except Exception as error:
        locate(error, f"in load_state_dict of {path} ({name}) of the data, as a run was resumed")
        raise
    if not same(plain(value.state_dict(), path), state):
        value.load_state_dict(before)
        warn(
            f"the state of {path} ({name}) of the data is not restored: after load_state_dict(state), state_dict() is "
            f"another one, so it counts as the place in one iteration. Let it return what was loaded, until an "
            f"iteration begins"
        )


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(sorted(paths)) or "none"
