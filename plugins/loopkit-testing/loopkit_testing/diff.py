"""Where two saved states differ, down to the bit."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from loopkit.author import structure, tensors
from loopkit.errors import StateError

Path = tuple[str | int, ...]

PLAIN_KEY = re.compile(r"[\w./-]+")
NAMED = ("models", "buffers", "optimizers", "plugins", "data", "generators")
"""Parts of a learner's state that hold one part per name."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per element."""


@dataclass(frozen=True)
class Difference:
    """One item that differs; print it."""

    path: Path
    """The keys and indices that lead to it."""
    what: str
    """The first value and the second, such as ``12 / 14``."""

    @property
    def part(self) -> str:
        """The part of a learner's state that it belongs to, such as ``plugins.ema``."""
        return part(self.path)

    def __str__(self) -> str:
        return f"{written(self.path)}: {self.what}"


def differences(one: Any, other: Any, *, ignore: Collection[str] = ()) -> list[Difference]:
    """Every item in which two states differ, in the order of the first one.

    Equal means: the same keys and lengths, types, dtypes, shapes and bits. So 1 is neither ``True`` nor ``1.0``, and
    0.0 is not -0.0; but every nan equals every nan. The order of a dict's keys, devices, and how a tensor lies in
    memory (strides) make no difference. Values that a checkpoint saves alike are the same: a dict and its subclasses, a
    number of NumPy and Python's own, a ``torch.Size`` and a tuple.

    Args:
        one: For example what ``learner.state_dict()`` returned, or a checkpoint holds.
        other: The same of another run.
        ignore: Keys, at any depth, whose values may differ, such as ``"seconds"`` for measured times.

    Raises:
        StateError: A tensor is of a kind that no state can hold, such as a sparse one.

    >>> for difference in differences({"steps": 12, "lr": [0.1, 0.0]}, {"steps": 14, "lr": [0.1, -0.0]}):
    ...     print(difference)
    steps: 12 / 14
    lr[1]: 0.0 / -0.0
    """
    return list(_compare(one, other, (), frozenset(ignore)))


def count(found: Iterable[Difference]) -> dict[str, int]:
    """How many differences there are in each part of a learner's state."""
    return dict(Counter(difference.part for difference in found))


def part(path: Path) -> str:
    """The part of a learner's state that a path leads into.

    >>> part(("plugins", "ema", "steps")), part(("progress", "steps"))
    ('plugins.ema', 'progress')
    """
    return written(path[: 2 if path and path[0] in NAMED else 1])


def written(path: Path) -> str:
    """A path as one reads it.

    >>> written(("plugins", "ema", "tensors", "0.weight", 3, "a b"))
    "plugins.ema.tensors.0.weight[3]['a b']"
    """
    text = ""
    for key in path:
        if isinstance(key, str) and PLAIN_KEY.fullmatch(key):
            text += f".{structure.plain(key)}" if text else structure.plain(key)
        else:
            text += f"[{structure.plain(repr(key))}]"
    return text or "the state"


def _compare(one: Any, other: Any, path: Path, ignore: frozenset[str]) -> Iterator[Difference]:
    one, other = _plain(one), _plain(other)
    kinds = _kind(one), _kind(other)
    if kinds[0] != kinds[1]:
        yield Difference(path, " / ".join(map(_with_kind, (one, other))))
    elif isinstance(one, Tensor):
        if what := _tensors(one, other, path):
            yield Difference(path, what)
    elif isinstance(one, Mapping):
        yield from _mappings(one, other, path, ignore)
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield Difference(path, f"{len(one)} items / {len(other)} items")
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from _compare(mine, theirs, (*path, index), ignore)
    elif not _same(one, other):
        yield Difference(path, f"{_show(one)} / {_show(other)}")


def _mappings(
    one: Mapping[Any, Any], other: Mapping[Any, Any], path: Path, ignore: frozenset[str]
) -> Iterator[Difference]:
    mine, theirs = _by_key(one), _by_key(other)
    for tag, key in mine.items():
        if key in ignore:
            continue
        elif tag in theirs:
            yield from _compare(one[key], other[theirs[tag]], (*path, key), ignore)
        else:
            yield Difference((*path, key), f"{_with_kind(one[key])} / not there")
    for tag, key in theirs.items():
        if tag not in mine and key not in ignore:
            yield Difference((*path, key), f"not there / {_with_kind(other[key])}")


def _by_key(mapping: Mapping[Any, Any]) -> dict[tuple[str, Any], Any]:
    """The keys by kind and value, as 1, True and 1.0 are one key to Python."""
    return {(_kind(key), key): key for key in mapping}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (numpy.number, numpy.bool_)) else value


def _kind(value: Any) -> str:
    """The kind of value that a checkpoint makes of it."""
    for kind in (bool, int, float, str, bytes, list, tuple):
        if isinstance(value, kind):
            return kind.__name__
    if isinstance(value, Tensor):
        return "tensor"
    return "dict" if isinstance(value, Mapping) else type(value).__name__


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def _with_kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return _look(value)
    return _show(value) if value is None else f"{_kind(value)} {_show(value)}"


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple, Mapping)):
        return f"of {len(value)} items"
    return structure.plain(repr(value[:200] if isinstance(value, (str, bytes)) else value), 80)


def _look(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensors(one: Tensor, other: Tensor, path: Path) -> str:
    for tensor in (one, other):
        if why := tensors.refusal(tensor):
            raise StateError(f"{written(path)} is {why}")
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{_look(one)} / {_look(other)}"
    if one.numel() == 0:
        return ""
    one, other = _resolved(one), _resolved(other)
    if torch.equal(_bits(one), _bits(other)):
        return ""
    differ = (_bits(one) != _bits(other)) & ~(_is_nan(one) & _is_nan(other))
    if one.is_complex():
        differ = differ.any(-1)
    places = differ.nonzero()  # (values that differ, dimensions)
    if not len(places):
        return ""
    at = tuple(places[0].tolist())
    pair = " / ".join(_element(tensor, at) for tensor in (one, other))
    first = f", first at {list(at)}: {pair}" if at else f": {pair}"
    return f"{len(places):,} of {differ.numel():,} values differ{first}"


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bits(tensor: Tensor) -> Tensor:
    """The same numbers as integers; the two parts of a complex one along a last dimension more."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor if tensor.dtype == torch.bool else tensor.view(INTEGERS[tensor.element_size()])


def _is_nan(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not tensor.is_floating_point() or tensor.dtype == tensors.PACKED:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return (tensor.float() if tensor.element_size() == 1 else tensor).isnan()


def _element(tensor: Tensor, at: tuple[int, ...]) -> str:
    if tensor.dtype == tensors.PACKED:
        return hex(int(_bits(tensor)[at]))
    value = tensor[at]
    if not (value.is_floating_point() or value.is_complex()):
        return repr(value.item())
    number = value.item()
    if isinstance(number, complex) or value.dtype == torch.float64:
        return repr(number)
    short = f"{number:.9g}"  # digits enough for any two float32 to look different
    shorter = f"{number:.4g}"
    return shorter if torch.equal(torch.tensor(float(shorter)).to(value.dtype).float(), value.float()) else short
