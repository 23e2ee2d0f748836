"""Nested batches: their parts, tensors and sizes, whatever they mean."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from loopkit.base import devices

IMAGE = 3
"""Dimensions of an image: channels, height, width."""
SHOWN = 6
"""Parts of a batch that a description shows."""


def parts(batch: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of a mapping, dataclass, tuple or list; none for other types."""
    if isinstance(batch, Mapping):
        yield from ((str(key), value) for key, value in batch.items())
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from ((field.name, getattr(batch, field.name)) for field in fields(batch))
    elif isinstance(batch, (tuple, list)):
        yield from ((str(i), value) for i, value in enumerate(batch))


def count_samples(batch: Any) -> int:
    """Return the samples of a batch: the length of its first tensor or array that is not empty; 1 without one.

    Graphs are counted by ``num_graphs``, packed sequences by their first step, and images of several sizes in a tuple
    or list one by one.
    """
    if type(batch) in (tuple, list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim and len(batch[0]):
        return len(batch[0])
    found = known_samples(batch)
    return 1 if found is None else found


def odd_lengths(batch: Any) -> tuple[int, int] | None:
    """Find two parts of a batch that begin with lengths of which neither is a multiple of the other.

    Returns:
        The lengths, the one that `count_samples` takes first if it is one of them; None if there are no such parts.
    """
    lengths = [count_samples(batch)]
    lengths += [part.shape[0] for _, part in parts(batch) if isinstance(part, Tensor) and part.ndim]
    for i, one in enumerate(lengths):
        for other in lengths[i + 1 :]:
            if one and other and one % other and other % one:
                return one, other
    return None


def known_samples(value: Any) -> int | None:
    """Return the samples of a batch, looked for in order and depth first.

    Returns:
        0 if all its tensors are empty; None without any.
    """
    graphs = getattr(value, "num_graphs", None)
    if type(graphs) is int:
        return graphs
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return int(shape[0])
    if shape is not None and not isinstance(value, Mapping):
        return None
    return _leading_of_parts(value)


def _leading_of_parts(value: Any) -> int | None:
    """Return the samples of a value without a shape."""
    if type(value) in (tuple, list) and value and _are_samples(value[0], value[1:]):
        return len(value[0])
    found = None
    for _, part in parts(value):
        held = known_samples(part)
        if held:
            return held
        found = held if found is None else found
    return found


def _are_samples(value: Any, others: Any) -> bool:
    """Whether a sequence of tensors has one for each sample, such as images of several sizes, beside other parts."""
    if type(value) not in (tuple, list) or not value:
        return False
    if not all(isinstance(each, Tensor) for each in value):
        return False
    for other in others:
        found = _has_one_each(other, value)
        if found is not None:
            return found
    shapes = {tuple(each.shape) for each in value}
    return len(shapes) > 1 and all(each.ndim == IMAGE for each in value)


def _has_one_each(other: Any, tensors: Any) -> bool | None:
    """Whether another part of a batch has an item for each tensor, and not for each row of them; None if unknown."""
    lengths = {each.shape[0] if each.ndim else 0 for each in tensors}
    if isinstance(other, Tensor) and other.ndim:
        return other.shape[0] == len(tensors) and lengths != {len(tensors)}
    if type(other) not in (tuple, list) or len(other) != len(tensors):
        return None
    if all(isinstance(each, Mapping) for each in other):
        return True
    return {known_samples(each) for each in other} != lengths


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a nested batch, in order and depth first."""
    inner = list(parts(value))
    if not inner:
        yield value
    for _, part in inner:
        yield from leaves(part)


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in a value, looked for in order and depth first; None without one."""
    return next((leaf for leaf in leaves(value) if isinstance(leaf, Tensor)), None)


def describe(value: Any, depth: int = 2) -> str:
    """A short description with types, shapes, dtypes and devices.

    >>> import torch
    >>> describe((torch.zeros(2, 3), 1))
    'tuple(Tensor[2, 3] float32 cpu, int)'
    """
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        return f"{kind}{list(shape)} {getattr(value, 'dtype', '')}".rstrip()
    inner = list(parts(value)) if depth else []
    if not inner:
        return kind
    named = not isinstance(value, (tuple, list))
    shown = []
    for key, part in inner[:SHOWN]:
        text = describe(part, depth - 1)
        shown.append(f"{key}: {text}" if named else text)
    if len(inner) > SHOWN:
        shown.append("...")
    return f"{kind}({', '.join(shown)})"


def move(value: Any, device: torch.device) -> Any:
    """A copy of a nested batch with all its movable parts on the device; parts there already are not copied."""
    if isinstance(value, Tensor):
        return devices.to_device(value, device)
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    return map_parts(value, lambda part: move(part, device))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a nested batch with ``function`` applied to its tensors; unchanged parts are not copied."""
    if isinstance(value, Tensor):
        return function(value)
    return map_parts(value, lambda part: map_tensors(part, function))


def map_parts(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a mapping, tuple, list or dataclass with ``function`` applied to its parts; others as they are."""
    if isinstance(value, Mapping):
        return _map_values(value, function)
    if isinstance(value, (tuple, list)):
        return _map_items(value, function)
    if is_dataclass(value) and not isinstance(value, type):
        return _map_fields(value, function)
    return value


def _map_values(value: Mapping[Any, Any], function: Callable[[Any], Any]) -> Any:
    parts = {key: function(part) for key, part in value.items()}
    if all(parts[key] is part for key, part in value.items()):
        return value
    if not isinstance(value, MutableMapping):
        return type(value)(parts)  # type: ignore[call-arg]
    moved = copy.copy(value)
    moved.update(parts)
    return moved


def _map_items(value: tuple[Any, ...] | list[Any], function: Callable[[Any], Any]) -> Any:
    items = [function(part) for part in value]
    if all(item is part for item, part in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    return type(value)(items)


def _map_fields(value: Any, function: Callable[[Any], Any]) -> Any:
    found = {f.name: function(getattr(value, f.name)) for f in fields(value)}
    if all(getattr(value, name) is part for name, part in found.items()):
        return value
    changed = copy.copy(value)
    for name, part in found.items():
        object.__setattr__(changed, name, part)  # a frozen one too
    return changed


WRAPPED = ("source", "iterable")
"""The attributes in which loaders around another one, such as ``tqdm(loader)``, have it."""


DEEPEST = 8
"""How many loaders around one another are looked through: an object may answer any name with a new object."""


def wrapped(data: Any, follow: Callable[[Any], bool] = lambda each: True) -> list[Any]:
    """The data, and the data inside, from the outermost on, that those wrap for which ``follow`` is true."""
    found: list[Any] = []
    while data is not None and len(found) < DEEPEST:
        if any(data is each for each in found):
            break
        found.append(data)
        if not follow(data):
            break
        data = _inside(data)
    return found


def _inside(data: Any) -> Any:
    for name in WRAPPED:
        inner = getattr(data, name, None)
        if inner is not None:
            return inner
    return None


def hands_on(data: Any) -> bool:
    """Whether its batches come unchanged from the data that it wraps, as through a bar of tqdm."""
    bar = any(cls.__module__.partition(".")[0] == "tqdm" for cls in type(data).__mro__)
    return bar or getattr(type(data), "hands_on", False) is True


def length_of(data: Any) -> int | None:
    """``len(data)``; None where there is none, or where it says that it does not know."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
