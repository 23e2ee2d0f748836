"""Values compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from loopkit.author import parts, raw
from loopkit.learner import Learner


class Bits:
    """The bytes of a tensor, which a ``nan`` does not make unequal."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._bytes = raw(tensor.detach().clone()) if tensor.numel() else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bits) or (self._shape, self._dtype) != (other._shape, other._dtype):
            return False
        return self._bytes is None or torch.equal(self._bytes, other._bytes)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for _, part in parts(value):
            yield from tensors_in(part, depth - 1)


def not_allowed(value: Any, path: str) -> list[str]:
    """A message for each value of a kind that cannot be saved."""
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            return [f"{path} is a tensor with a graph: return it .detach()ed and cloned"]
        return []
    if value is None or type(value) in (bool, int, float, str):
        return []
    if isinstance(value, dict):
        strange = [key for key in value if type(key) not in (str, int)]
        found = [f"{path} has the key {strange[0]!r}: keys are strings or ints"] if strange else []
        return found + [m for key, item in value.items() for m in not_allowed(item, f"{path}[{key!r}]")]
    if type(value) in (list, tuple):
        return [m for i, item in enumerate(value) for m in not_allowed(item, f"{path}[{i}]")]
    kind = type(value)
    return [
        f"{path} is {kind.__module__}.{kind.__qualname__}: state is made of None, bool, int, float, str, list, tuple, "
        f"dict and tensors"
    ]


def difference(one: Any, other: Any, path: str, volatile: Sequence[str]) -> str:
    """Where two states differ first, or an empty string."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return "" if Bits(one) == Bits(other) else path
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *other]:
            if key not in one or key not in other:
                return f"{path}[{key!r}]"
            if key not in volatile and (found := difference(one[key], other[key], f"{path}[{key!r}]", volatile)):
                return found
        return ""
    if type(one) is not type(other):
        return path
    if isinstance(one, (list, tuple)):
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            if found := difference(a, b, f"{path}[{i}]", volatile):
                return found
        return "" if len(one) == len(other) else f"the length of {path}"
    return "" if one == other or (one != one and other != other) else path


def largest_move(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far the values of tensors have moved, at most, relative to the largest of each; inf if that is unknown."""
    return max((_move(tensor.detach(), other[name].detach()) for name, tensor in one.items()), default=0.0)


def _move(before: Tensor, after: Tensor) -> float:
    if not before.numel() or Bits(before) == Bits(after):
        return 0.0
    if before.shape != after.shape or not before.is_floating_point():
        return float("inf")
    far = float((after.double() - before.double()).abs().max())
    size = max(1.0, float(before.double().abs().max()))
    return far / size if far == far else float("inf")


def weights(learner: Learner) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {f"{name}.{k}": v for name, model in learner.models.items() for k, v in model.state_dict().items()}


def plain(value: Any) -> Any:
    """A value as dicts, tuples, tensors, numbers and strings; of other objects, the class."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, {each.name: plain(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    if hasattr(value, "__array__"):
        return torch.as_tensor(value).clone()
    return type(value).__name__
