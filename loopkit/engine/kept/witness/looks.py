"""looks: how the values look that an object holds, so that a later look shows which of them have moved."""

from __future__ import annotations

import functools
import itertools
import sys
import time
import types
import weakref
from array import array
from collections.abc import Callable, Mapping
from dataclasses import astuple
from decimal import Decimal
from enum import Enum
from fnmatch import fnmatchcase
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from loopkit.base.generators import comparable_state, is_generator
from loopkit.engine.kept.witness.class_values import class_values
from loopkit.engine.kept.witness.iterators import is_iterator, place_of
from loopkit.engine.kept.witness.tensor_content import content_of
from loopkit.engine.kept.witness.walk import HOLDERS, MAPPINGS, PLAIN, SEQUENCES, SETS, Found, HeldBy, slots, walk

NUMBERS = (bool, int, float, complex)
VALUES = (*PLAIN, Enum, Decimal, Fraction)
CLOCKS = (time.time, time.monotonic, time.perf_counter)
SMALL = 64 * 2**10
"""Bytes of an array up to which all of it is compared; of a larger one it is this many elements."""
SAMPLE = 1024
LONGEST = 100_000
"""Items of a sequence of objects up to which their order is compared."""
FEW = 100
"""Tensors of a container up to which their content is compared."""
MOST = 10_000
"""Plain values of a container up to which all of them are compared."""
SHUT = (
    "aim",
    "comet_ml",
    "IPython",
    "ipywidgets",
    "matplotlib",
    "mlflow",
    "neptune",
    "PIL",
    "rich",
    "tqdm",
    "transformers",
    "wandb",
)
"""Packages whose objects are not looked into: displays and trackers, which count for people, and configurations of
models, which change as a model is saved. Modules of theirs are looked at."""
SHUT_PARTS = (
    "torch._",
    "torch.autograd",
    "torch.cuda",
    "torch.distributed",
    "torch.fx",
    "torch.jit",
    "torch.profiler",
    "torch.utils.tensorboard",
    "loopkit.distributed",
    "loopkit.engine",
    "loopkit.learner",
    "loopkit.logs",
    "loopkit.progress",
    "loopkit.result",
    "loopkit.base.world",
)
"""Modules whose objects are not looked into: files, devices, threads, and what a learner runs with."""
OF_PYTHON = ("threading", "_io", "io", "logging")
"""Modules of Python whose classes, and those derived from them, are not looked into."""
OPEN = ("collections", "types")
"""Modules of Python's library whose objects hold values of the user's."""


class Look(NamedTuple):
    """How a value looks."""

    kind: str
    """``"value"``, ``"tensor"``, ``"array"``, ``"generator"``, ``"values"`` for a container of plain ones, ``"holder"``
    for another container, ``"optimizer"``, ``"learner"``, ``"iterator"``, ``"module"`` or ``"object"``."""
    state: Any
    """The state that two looks compare."""
    length: int = 0
    """How many items a container has."""
    parent: str = ""
    """The path of the object that holds it."""
    owner: int = 0
    """The id of that object."""

    @property
    def empty(self) -> bool:
        """Whether nothing is there yet: None, a container without items, or an object, which is looked into."""
        if self.kind == "value":
            return self.state is None
        return self.kind == "object" or (self.kind in CONTAINERS and not self.length)


CONTAINERS = ("values", "holder")
CLOSED_LOOKS = ("values", "optimizer", "learner", "iterator", "module")
"""Kinds of looks that say all of a value: it is not looked into."""
Looks = dict[str, Look]
"""By path."""
Leave = Callable[[Found], bool]


class Scope(NamedTuple):
    """How far a look goes, and what counts in it."""

    deep: int = 4
    """Attributes and items between the root and the last values."""
    long: int | None = None
    """Items of a container up to which they are looked into; None: of any."""
    held_by: HeldBy | None = None
    """Yields what functions hold; without it, functions and modules are not looked into."""
    methods_of: Callable[[Any], Mapping[str, types.FunctionType]] | None = None
    """Returns the functions in an object's class that may hold something."""
    lazy: bool = False
    """Whether what is made where there was nothing, but for numbers, counts from then on."""


ATTRIBUTES = Scope()


def look(root: Any, leave: Leave, scope: Scope = ATTRIBUTES) -> Looks:
    """Look at an object and all that it holds.

    Args:
        root: The object.
        leave: Whether a value does not count, nor what it holds: it is saved, or looked at elsewhere.
        scope: How far to look.
    """
    left: set[int] = set()
    """The objects that are not looked into."""
    looks: Looks = {}
    paths: dict[int, str] = {}

    def enter(found: Found) -> bool:
        value = found.value
        if scope.long is not None and _is_container(value) and len(value) > scope.long:
            return False
        return id(value) not in left

    held = SimpleNamespace(**_class_values(root, leave, scope))
    inside = walk(root, deep=scope.deep, enter=enter, held_by=scope.held_by)
    of_class = walk(held, deep=scope.deep, enter=enter, held_by=scope.held_by)
    for found in itertools.chain(inside, of_class):
        value = found.value
        if value is held:
            continue
        if found.owner is not None and (is_left(found.owner, found.key) or leave(found)):
            left.add(id(value))
            continue
        is_root = found.owner is None and type(value) is not list
        seen = Look("object", type(value)) if is_root else _look_in(found, scope)
        if seen is None or seen.kind in CLOSED_LOOKS:
            left.add(id(value))
        if seen is not None:
            looks[found.path] = Look(
                seen.kind, seen.state, seen.length, paths.get(id(found.owner), ""), id(found.owner)
            )
            paths[id(value)] = found.path
    return looks


def _class_values(root: Any, leave: Leave, scope: Scope) -> dict[str, Any]:
    """The values and functions of the root's class that count, as attributes do; none in data."""
    if scope.lazy:
        return {}
    values = dict(class_values(root))
    if scope.methods_of is not None:
        values.update(scope.methods_of(root))

    def counts(name: str) -> bool:
        if "cache" in name.lower() or is_volatile(root, name):
            return False
        return not leave(Found(name, root, name, values[name]))

    return {name: value for name, value in values.items() if counts(name)}


def _is_container(value: Any) -> bool:
    kind = type(value)
    return kind in MAPPINGS or kind in SEQUENCES or kind in SETS


def _look_in(found: Found, scope: Scope) -> Look | None:
    """Look at one value, in a scope that may have functions, modules and iterators in it."""
    value = found.value
    if isinstance(value, Tensor):
        return _look_at_tensor(value, not _is_item_of_many(found))
    if scope.methods_of is not None and isinstance(value, nn.Module):
        tensors = itertools.chain(value.parameters(), value.buffers())
        return Look("module", tuple((id(each), changes_of(each)) for each in tensors))
    if scope.held_by is not None and isinstance(value, (types.FunctionType, nn.Module)):
        return Look("object", type(value))
    if scope.methods_of is not None and is_iterator(value):
        return Look("iterator", place_of(value))
    return look_at(value)


def _is_item_of_many(found: Found) -> bool:
    """Whether a value is in a container of more than ``FEW`` items."""
    return _is_container(found.owner) and len(found.owner) > FEW


def _look_at_tensor(value: Tensor, content: bool) -> Look:
    some = content_of(value, SAMPLE) if content else None
    return Look("tensor", (weakref.ref(value), changes_of(value), some))


def moved(
    before: Looks, now: Looks, since: Clocks, is_saved: Callable[[Tensor], bool], scope: Scope = ATTRIBUTES
) -> list[str]:
    """Return the paths of the attributes that have moved between two looks.

    Args:
        before: The earlier look; the attributes of newer objects are added to it.
        now: The later one.
        since: When the earlier one was taken.
        is_saved: Whether a tensor is one that is saved elsewhere, such as a parameter of a model.
        scope: How far they looked.
    """
    found: list[str] = []
    passed: set[str] = set()
    """Containers whose items are not compared: they have grown or shrunk, or are caches."""
    fresh: set[str] = set()
    """Objects that were made since the earlier look, and what they hold: they count from here on."""
    for path, each in now.items():
        known = before.get(path)
        if each.parent in passed:
            passed.add(path)
        elif each.parent in fresh or _is_new(known, each, before, scope):
            fresh.add(path)
        elif _has_grown(known, each):
            passed.add(path)
            if _is_held_by_function(each, now):
                continue
            if not _is_cache(path, each) and _differ(known, each, since):
                found.append(path)
        elif _is_made(known, each):
            fresh.add(path)
        elif _differ(known, each, since) and not _is_of_saved(each, is_saved):
            found.append(path)
        if path in fresh or (known is None and path not in passed):
            before[path] = each
    return found


class Clocks(NamedTuple):
    """The clocks of Python, read at one time."""

    readings: tuple[float, ...]

    @classmethod
    def read(cls) -> Clocks:
        """Read them now."""
        return cls(tuple(clock() for clock in CLOCKS))

    def has_shown(self, value: Any) -> bool:
        """Whether a value is a reading of one of them since then."""
        if type(value) is not float:
            return False
        now = Clocks.read().readings
        return any(then <= value <= end for then, end in zip(self.readings, now, strict=True))


def static(owner: Any, name: str) -> Any:
    """An attribute of an object or its class, without running properties and ``__getattr__``; None without it."""
    own = _attributes(owner)
    if name in own:
        return own[name]
    for base in type(owner).__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


def is_volatile(owner: Any, name: str) -> bool:
    """Whether the owner of an attribute declares that it needs no saving."""
    patterns = static(owner, "volatile")
    if not isinstance(patterns, (tuple, list)):
        return False
    return any(fnmatchcase(name, str(pattern)) for pattern in patterns)


def _attributes(owner: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def is_left(owner: Any, name: Any) -> bool:
    """Whether an attribute is a cache, by its name, by ``cached_property``, or as its owner declares."""
    if not isinstance(name, str) or type(owner) in MAPPINGS or not (name in _attributes(owner) or name in slots(owner)):
        return False
    if "cache" in name.lower() or is_volatile(owner, name):
        return True
    return any(isinstance(vars(base).get(name), functools.cached_property) for base in type(owner).__mro__)


def look_at(value: Any) -> Look | None:
    """Look at one value; None if it does not count: code, and objects that are not looked into."""
    kind = type(value)
    if isinstance(value, VALUES) or _is_number_of_numpy(value):
        return Look("value", value)
    if isinstance(value, Tensor):
        return _look_at_tensor(value, content=True)
    if is_generator(value):
        return Look("generator", comparable_state(value))
    if _is_container(value):
        return _look_at_items(value)
    if isinstance(value, Optimizer):
        return Look("optimizer", optimizer_state(value))
    if kind is itertools.count:
        return Look("value", repr(value))
    content = _array_state(value)
    if content is not None:
        return Look("array", content)
    if is_learner(value):
        return Look("learner", astuple(value.progress))
    if kind in HOLDERS or _is_open(value):
        return Look("object", kind)
    return None


def is_learner(value: Any) -> bool:
    """Whether a value is a `Learner`, which trains models of its own."""
    return any(base.__module__ == "loopkit.learner" and base.__name__ == "Learner" for base in type(value).__mro__)


def is_learner_of(value: Any, models: Any) -> bool:
    """Whether a value is the `Learner` of these models."""
    return is_learner(value) and value.models is models


def _is_open(value: Any) -> bool:
    """Whether an object is looked into: it is no module, no code, and of no class that is shut."""
    if isinstance(value, nn.Module) or (callable(value) and not _attributes(value)):
        return False
    return not is_shut(type(value))


def _look_at_items(value: Any) -> Look:
    kind = type(value)
    length = len(value)
    items = value.values() if kind in MAPPINGS else value
    kinds = {type(each) for each in itertools.islice(items, MOST)}
    if not kinds <= _PLAIN:
        return Look("holder", _order(value), length)
    if length > MOST:
        every = length // SAMPLE
        few = items[::every] if kind in (list, tuple) else itertools.islice(items, 0, None, every)
        return Look("values", tuple(few), length)
    if kind in SETS:
        return Look("values", frozenset(value), length)
    if kind in MAPPINGS:
        return Look("values", tuple(value.items()), length)
    return Look("values", tuple(value), length)


def _order(value: Any) -> tuple[int, ...] | None:
    """The identities of the items of a sequence in their order; None of a long one, and of other containers."""
    if type(value) not in SEQUENCES or len(value) > LONGEST:
        return None
    return tuple(map(id, value))


def _is_reordered(before: Any, now: Any) -> bool:
    """Whether a sequence has the same items in another order."""
    if before is None or now is None or before == now:
        return False
    return sorted(before) == sorted(now)


_PLAIN = frozenset(PLAIN)


def _is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def changes_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; of a subclass, whose own code would answer, always 0."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_inference():
        return 0
    return tensor._version


def _array_state(value: Any) -> Any:
    """The content of an array of NumPy or Python, of a large one a sample; None for any other object."""
    if type(value) in (bytearray, array):
        return bytes(value)
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return None
    if value.dtype.hasobject:
        return value.shape
    few = value
    if value.nbytes > SMALL:
        every = max(1, value.size // SAMPLE)
        few = value.reshape(-1)[::every]
    return value.shape, str(value.dtype), few.tobytes()


def optimizer_state(optimizer: Optimizer) -> tuple[Any, ...]:
    """The state and the options of an optimizer, in a form that can be compared."""
    values: list[Any] = []
    for entries in optimizer.state.values():
        if type(entries) is dict:
            values += entries.values()
    for group in optimizer.param_groups:
        values += [value for key, value in group.items() if key != "params"]
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((id(value), changes_of(value)))
        elif isinstance(value, (*PLAIN, tuple)):
            found.append(value)
    return tuple(found)


def is_shut(kind: type) -> bool:
    """Whether objects of a class are not looked into: those of Python's library, of displays, and of the engine."""
    home = getattr(kind, "__module__", "")
    if not isinstance(home, str):
        return False
    top = home.partition(".")[0]
    if top in SHUT:
        return True
    if top in sys.stdlib_module_names and top not in OPEN:
        return True
    homes = [getattr(base, "__module__", "") for base in kind.__mro__]
    return any(each.startswith(SHUT_PARTS) or each in OF_PYTHON for each in homes)


def _differ(before: Look | None, now: Look, since: Clocks) -> bool:
    """Whether something is lost with the later look."""
    if since.has_shown(now.state):
        return False
    if before is None or (before.empty and before.kind != now.kind):
        return not now.empty
    if before.kind != now.kind:
        return now.kind != "object"
    if now.kind == "tensor":
        return before.state[0] is not now.state[0] or before.state[1:] != now.state[1:]
    if now.kind == "holder":
        return before.length != now.length or _is_reordered(before.state, now.state)
    return before.length != now.length or not _same(before.state, now.state)


def _is_of_saved(look: Look, is_saved: Callable[[Tensor], bool]) -> bool:
    tensor = look.state[0]() if look.kind == "tensor" else None
    return tensor is not None and is_saved(tensor)


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    return bool(before == now) or bool(before != before and now != now)  # nan is equal to itself


def _is_made(before: Look | None, now: Look) -> bool:
    """Whether an object stands where there was none."""
    if now.kind not in ("object", "learner", "iterator"):
        return False
    return before is None or before.kind != now.kind


def _is_new(known: Look | None, now: Look, before: Looks, scope: Scope) -> bool:
    """Whether a value counts from now on: its holder was made since, or in a lazy scope the value was."""
    if known is None and now.parent not in before:
        return True
    return scope.lazy and _is_made_late(known, now)


def _is_made_late(before: Look | None, now: Look) -> bool:
    """Whether anything but a number stands where there was none."""
    if before is not None and not (before.kind == "value" and before.state is None):
        return False
    return now.kind != "value" or isinstance(now.state, (str, bytes))


def is_in_function(path: str, looks: Looks) -> bool:
    """Whether a value is held by a function, or by something that a function holds."""
    while path in looks:
        parent = looks[path].parent
        if parent == path:
            return False
        path = parent
        if path in looks and looks[path].state is types.FunctionType:
            return True
    return False


def _is_held_by_function(look: Look, looks: Looks) -> bool:
    """Whether a function closes over a value."""
    holder = looks.get(look.parent)
    return holder is not None and holder.state is types.FunctionType


def _has_grown(before: Look | None, now: Look) -> bool:
    """Whether a container has more items than before, or fewer."""
    if now.kind not in CONTAINERS:
        return False
    return before is None or before.kind not in CONTAINERS or before.length != now.length


def _is_cache(path: str, look: Look) -> bool:
    """Whether a container that has grown is a private one, and holds anything but numbers."""
    if not (path.startswith("_") or "._" in path):
        return False
    if look.kind != "values" or not look.state:
        return True
    items = [each[1] if type(each) is tuple else each for each in look.state]  # a mapping has pairs
    return not all(isinstance(each, NUMBERS) for each in items)
