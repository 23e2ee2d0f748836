"""values: the values of `rounds.once`, in a form that a state can hold, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from loopkit.errors import StateError

LONG = 1000
"""Items from which a list of numbers of one type becomes a tensor, and bytes from which a text does."""
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
NUMBERS = {int: torch.int64, float: torch.float64}
TAGS = (".array", ".scalar", ".numbers", ".bytes", ".text", ".device")
"""Keys that mark a packed value; a dict of the user's that has one as its only key raises."""


def pack(value: Any, path: str) -> Any:
    """Return a copy of a value in a form that a state can hold; it shares no memory with the value.

    Args:
        value: Numbers, strings, bytes, None, lists, tuples, dicts with str or int keys, tensors, and NumPy's arrays and
            numbers.
        path: The name of the value in an error.

    Raises:
        StateError: Something else is in it.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return _packed_tensor(value, path)
    if (packed := _packed_array(value, path)) is not None:
        return packed
    if kind is bytes or (kind is str and len(value) >= LONG):
        return _packed_text(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return _packed_dict(value, path)
    if kind is list and len(value) >= LONG and (numbers := _packed_numbers(value)) is not None:
        return numbers
    if kind in (list, tuple, torch.Size):
        items = [pack(each, f"{path}[{index}]") for index, each in enumerate(value)]
        return items if kind is list else tuple(items)
    raise StateError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint holds: return numbers, strings, "
        f"bytes, lists, tuples, dicts with str or int keys, tensors or NumPy arrays"
    )


def unpack(value: Any) -> Any:
    """Return a new copy of a value that `pack` packed."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        if len(value) <= 2 and (tag := next(iter(value), None)) in TAGS:
            return UNPACK[tag](value)
        return {key: unpack(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(unpack(each) for each in value)
    return value


def nbytes(value: Any) -> int:
    """How many bytes the tensors of a packed value have."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _packed_tensor(value: Tensor, path: str) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise StateError(f"{path} is a tensor of layout {value.layout}, which no checkpoint holds: make it dense")
    copied = value.detach().clone()
    return copied if copied.device.type == "cpu" else {".device": str(copied.device), "value": copied}


def _packed_array(value: Any, path: str) -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.asarray(value)
    try:
        held = torch.from_numpy(numpy.array(array, order="C", copy=True))
    except TypeError as error:
        raise StateError(
            f"{path} is an array of dtype {array.dtype}, which no checkpoint holds: give it a dtype of numbers, or "
            f"return a list"
        ) from error
    return {".array" if isinstance(value, numpy.ndarray) else ".scalar": held}


def _packed_text(value: str | bytes) -> dict[str, Tensor]:
    raw = bytearray(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
    held = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8)
    return {".text" if isinstance(value, str) else ".bytes": held}


def _packed_numbers(value: list[Any]) -> dict[str, Tensor] | None:
    kinds = set(map(type, value))
    dtype = NUMBERS.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None:
        return None
    try:
        return {".numbers": torch.tensor(value, dtype=dtype)}
    except (OverflowError, RuntimeError, ValueError):  # an integer of more than 64 bits
        return None


def _packed_dict(value: Mapping[Any, Any], path: str) -> dict[Any, Any]:
    if wrong := [key for key in value if type(key) not in (str, int)]:
        raise StateError(f"{path} has the key {wrong[0]!r:.80}: keys are str or int")
    if next(iter(value), None) in TAGS:
        raise StateError(f"{path} begins with the key {next(iter(value))!r}, which marks a packed value: rename it")
    return {key: pack(each, f"{path}[{key!r}]") for key, each in value.items()}


def _raw(held: Tensor) -> bytes:
    return held.numpy().tobytes()


def _on_device(value: Mapping[str, Any]) -> Tensor:
    return value["value"].to(value[".device"], copy=True)  # type: ignore[no-any-return]


UNPACK: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    ".array": lambda value: value[".array"].numpy().copy(),
    ".scalar": lambda value: value[".scalar"].numpy()[()],
    ".numbers": lambda value: value[".numbers"].tolist(),
    ".bytes": lambda value: _raw(value[".bytes"]),
    ".text": lambda value: _raw(value[".text"]).decode("utf-8", "surrogatepass"),
    ".device": _on_device,
}
"""How each packed value is made again, by its mark."""
