"""Nested state as plain JSON and named tensors, and back: exact, readable, without ever importing or running code.

``None``, booleans, integers, finite floats, strings, lists and dicts with string keys stand for themselves. All else is
an object with one key that begins with ``$``:

========================================  =============================================================
``{"$tensor": "model.weight"}``           a tensor, by its name
``{"$tuple": [1, 2]}``                    a tuple
``{"$dict": [[0, "a"], ["b", 1]]}``       a dict with other keys than strings, or with keys that look like a tag
``{"$set": [1, 2]}``                      a set, its members sorted by how they are written
``{"$frozenset": [1, 2]}``                the same, frozen
``{"$array": {"$tensor": "a"}}``          an array of NumPy, as a tensor
``{"$deque": [[1, 2], 5]}``               a deque, with its greatest length or ``null``
``{"$int": "0x10000000000000000"}``       an integer outside 64 bits
``{"$float": "nan"}``                     ``nan``, ``inf`` or ``-inf``
``{"$str": "eda0bd"}``                    a string that JSON would change, as the hex digits of its bytes
``{"$bytes": "AAEC"}``                    bytes, in base64
``{"$dtype": "float32"}``                 a ``torch.dtype``
``{"$device": "cuda:0"}``                 a ``torch.device``
``{"$memory_format": "channels_last"}``   a ``torch.memory_format``
========================================  =============================================================
"""

from __future__ import annotations

import base64
import inspect
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from loopkit.base.devices import SAVED
from loopkit.base.words import nearest
from loopkit.checkpoint import strict_json
from loopkit.checkpoint.tensors import DTYPES, METADATA, PAIRS, refusal
from loopkit.errors import StateError

DEEPEST = 100
"""Levels of containers; a level of the state is at most three of JSON."""
DEEPEST_JSON = 3 * DEEPEST + 5
LARGEST_JSON = 2**30
"""Bytes."""
SMALLEST_INT = -(2**63)
LARGEST_INT = 2**63 - 1

TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES.values(), *PAIRS)}
INTS = "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"
FLOATS = "float16", "float32", "float64", "complex64", "complex128"
ARRAYS = {numpy.dtype(name): getattr(torch, name) for name in ("bool", *INTS, *FLOATS)}
"""The dtypes of saved arrays, and the dtypes of their tensors."""
MEMORY_FORMATS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
DEVICE = re.compile(rf"({'|'.join(SAVED)})(:(0|[1-9][0-9]{{0,3}}))?")
SPLIT_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""Two halves that JSON would read as one character."""
HEX_INT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
IDENTIFIER = re.compile(r"[^\W\d]\w*")

KEY_TAGS = ("$int", "$float", "$str", "$bytes", "$tuple")
"""Types of dict keys and set members beside plain values."""

Path = tuple[str | int, ...]


def encode(state: Any, where: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split ``state`` into a value that JSON can hold and tensors.

    What comes back from :func:`decode` is equal and of the same types, but for what has a plain form: subclasses of
    numbers, strings, lists and dicts become the plain type, ``torch.Size`` a tuple, numpy scalars Python ones, a
    parameter its tensor. A tensor that is found twice is kept once.

    Args:
        state: Made of ``None``, bool, int, float, str, bytes, lists, tuples, dicts with str or int keys, tensors,
            ``torch.dtype``, ``torch.device`` and ``torch.memory_format``, at most 100 levels deep.
        where: The name of ``state``; tensors and errors are named by their path below it. May be empty.

    Returns:
        The value, and the tensors by name, unchanged but detached: they share their memory with ``state``.

    Raises:
        StateError: Something else is found, a cycle, or a tensor that cannot be saved; the message names its path.

    >>> value, tensors = encode({"betas": (0.9, 0.99), "average": {"weight": torch.ones(2)}}, where="ema")
    >>> value
    {'betas': {'$tuple': [0.9, 0.99]}, 'average': {'weight': {'$tensor': 'ema.average.weight'}}}
    >>> tensors
    {'ema.average.weight': tensor([1., 1.])}
    """
    encoder = _Encoder(where)
    return encoder.value(state, ()), encoder.tensors


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo :func:`encode`.

    Args:
        value: The plain value.
        tensors: By name; tensors that ``value`` does not name are ignored.

    Raises:
        StateError: ``value`` is no result of :func:`encode`, or names a tensor that is missing.
    """
    return _Decoder(tensors).value(value, ())


def dumps(value: Any) -> bytes:
    """The bytes of a plain value, as :func:`encode` gives it: ASCII, no spaces, the order of keys is kept.

    Raises:
        StateError: ``value`` is not plain: :func:`encode` it first.

    >>> dumps({"b": 1.0, "a": [None, True]})
    b'{"b":1.0,"a":[null,true]}'
    """
    try:
        return strict_json.render(value)
    except ValueError as error:
        raise StateError(f"not a plain value: {error}. encode() it before dumps()") from error


def loads(data: bytes) -> Any:
    """The plain value of exactly the bytes that :func:`dumps` gives for it.

    Raises:
        StateError: ``data`` are not such bytes: malformed, spaced, with a key twice, nested too deep, too large.
    """
    if len(data) > LARGEST_JSON:
        raise StateError(f"JSON of {len(data)} bytes: at most {LARGEST_JSON} are read. Large data belong in tensors")
    try:
        value = strict_json.parse(bytes(data).decode("ascii"), DEEPEST_JSON)
        canonical = strict_json.render(value) == data
    except ValueError as error:
        raise StateError(f"not the JSON that dumps() writes: {_short(str(error))}. Take another copy") from error
    if not canonical:
        raise StateError("not the JSON that dumps() writes: spaces, escapes or numbers differ. Take another copy")
    return value


class _Encoder:
    """One call of ``encode``: the tensors found, and the containers that are open."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._found: list[Tensor] = []
        """The tensors as they were found: alive, so that no other gets the same id."""
        self._open: dict[int, Path] = {}

    def value(self, value: Any, path: Path) -> Any:
        if value is None or type(value) is bool:
            return value
        if isinstance(value, int):
            return self._int(int(value))
        if isinstance(value, str):
            return _text(str.__str__(value))
        if isinstance(value, float):
            return self._float(float(value))
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path)}
        if isinstance(value, (list, tuple, dict)) or type(value) in (set, frozenset, deque):
            return self._container(value, path)
        if isinstance(value, (numpy.number, numpy.bool_)) and not isinstance(plain := value.item(), numpy.generic):
            return self.value(plain, path)
        if (tagged := self._tagged(value, path)) is not None:
            return tagged
        raise self._error(path, f"{_describe(value)} cannot be saved: {_fix(value)}{_way_out(path)}")

    def _tagged(self, value: Any, path: Path) -> dict[str, Any] | None:
        """An array, bytes, or a constant of torch, under its tag; None if it is none of them."""
        kind = type(value)
        if kind is numpy.ndarray and value.dtype in ARRAYS:
            return {"$array": self.value(torch.from_numpy(numpy.array(value, order="C")), path)}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if kind is torch.dtype and _plain_name(value) in TORCH_DTYPES:
            return {"$dtype": _plain_name(value)}
        if kind is torch.device and DEVICE.fullmatch(str(value)):
            return {"$device": str(value)}
        if kind is torch.memory_format:
            return {"$memory_format": _plain_name(value)}
        return None

    def _int(self, value: int) -> Any:
        return value if SMALLEST_INT <= value <= LARGEST_INT else {"$int": hex(value)}

    def _float(self, value: float) -> Any:
        return value if math.isfinite(value) else {"$float": repr(value)}

    def _container(self, value: Any, path: Path) -> Any:
        if len(path) >= DEEPEST:
            raise self._error(path[:5], f"holds containers nested more than {DEEPEST} deep. Make the state flatter")
        if id(value) in self._open:
            raise self._error(
                path,
                f"is {self._name(self._open[id(value)]) or 'the state'} again, around itself: a cycle has no end that "
                "could be saved. Save an index or a name in its place",
            )
        self._open[id(value)] = path
        try:
            if isinstance(value, dict):
                return self._dict(value, path)
            if isinstance(value, (set, frozenset)):
                return {f"${type(value).__name__}": self._members(value, path)}
            if isinstance(value, tuple) and type(value) not in (tuple, torch.Size):
                raise self._error(path, f"{_describe(value)} cannot be saved: {_fix(value)}")
            items = [self.value(item, (*path, index)) for index, item in enumerate(value)]
            if isinstance(value, list):
                return items
            if isinstance(value, deque):
                return {"$deque": [items, value.maxlen]}
            return {"$tuple": items}
        finally:
            del self._open[id(value)]

    def _members(self, value: set[Any] | frozenset[Any], path: Path) -> list[Any]:
        """The members of a set, in an order that does not depend on hashes."""
        return sorted((self._key(member, path, "the member") for member in value), key=dumps)

    def _dict(self, value: dict[Any, Any], path: Path) -> Any:
        pairs = []
        for key, item in value.items():
            name = self._key(key, path, "the key")
            pairs.append([name, self.value(item, (*path, _step(key)))])
        names = [name for name, _ in pairs]
        if all(type(name) is str and not name.startswith("$") for name in names) and len(set(names)) == len(names):
            return dict(pairs)
        if len(pairs) != len({dumps(name) for name in names}):
            raise self._error(path, "has keys that are the same once they are plain. Rename one")
        return {"$dict": pairs}

    def _key(self, key: Any, path: Path, what: str) -> Any:
        """A key of a dict or a member of a set, encoded."""
        if key is None or isinstance(key, (bool, int, float, str, bytes, numpy.number, numpy.bool_)):
            return self.value(key, path)
        if type(key) is tuple:
            return {"$tuple": [self._key(part, path, what) for part in key]}
        shown = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.nn.Parameter) else f"{key!r:.80}"
        raise self._error(
            path,
            f"has {what} {shown} of type {type(key).__qualname__}, which cannot be saved: use a string, a number, "
            f"bytes, None or a tuple of them in its place{_way_out(path)}",
        )

    def _tensor(self, tensor: Tensor, path: Path) -> str:
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        if why := refusal(tensor):
            raise self._error(path, f"is {why}{_way_out(path)}")
        parts = [str(part).encode("utf-8", "backslashreplace").decode() for part in path]
        base = ".".join([self.where, *parts] if self.where else parts) or "tensor"
        name = base
        count = 1
        while name in self.tensors or name == METADATA:  # as {"a.b": ..., "a": {"b": ...}} would have it
            count += 1
            name = f"{base}~{count}"
        self._found.append(tensor)
        self._names[id(tensor)] = name
        self.tensors[name] = tensor.detach()
        return name

    def _name(self, path: Path) -> str:
        """The path as one writes it: ``plugins.ema.state['fn']``."""
        text = self.where
        for index, part in enumerate(path):
            if index < len(path) - 1 and isinstance(part, str) and IDENTIFIER.fullmatch(part):
                text += f".{part}" if text else part
            else:
                text += f"[{part!r:.200}]"
        return text

    def _error(self, path: Path, what: str) -> StateError:
        return StateError(f"{self._name(path) or 'the state'}: {what}")


def _way_out(path: Path) -> str:
    """The end of a message about an optimizer's state: only the weights can be saved."""
    return ", or only the weights, Checkpoint(weights_only=True)" if path[:1] == ("optimizers",) else ""


class _Decoder:
    """One call of ``decode``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.tags: dict[str, Callable[[Any, Path], Any]] = {
            "$tensor": self._tensor,
            "$tuple": self._tuple,
            "$dict": self._dict,
            "$set": self._set,
            "$frozenset": self._frozenset,
            "$deque": self._deque,
            "$array": self._array,
            "$int": self._int,
            "$float": self._float,
            "$str": self._str,
            "$bytes": self._bytes,
            "$dtype": self._dtype,
            "$device": self._device,
            "$memory_format": self._memory_format,
        }

    def value(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is str:
            return value
        if kind is float:
            return _finite(value, path)
        if len(path) > DEEPEST:
            raise _malformed(path[:5], f"more than {DEEPEST} levels")
        if kind is list:
            return [self.value(item, (*path, index)) for index, item in enumerate(value)]
        if kind is not dict:
            raise _malformed(path, f"a {kind.__qualname__}")
        tag = next((key for key in value if type(key) is not str or key.startswith("$")), None)
        if tag is None:
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        return self._untagged(tag, value, path)

    def _untagged(self, tag: Any, value: dict[Any, Any], path: Path) -> Any:
        if tag not in self.tags:
            raise _malformed(path, f"the unknown tag {tag!r:.80}{nearest(str(tag)[:80], list(self.tags))}")
        if len(value) > 1:
            raise _malformed(path, f"the tag {tag!r} with {len(value) - 1} more keys beside it")
        return self.tags[tag](value[tag], path)

    def _tensor(self, name: Any, path: Path) -> Tensor:
        if type(name) is not str:
            raise _malformed(path, f"a tensor named {name!r:.80}")
        if name not in self.tensors:
            raise StateError(
                f"{_path(path)}: the tensor {name!r:.200} is missing among the {len(self.tensors)} of the file. "
                "The two were not written together; take another copy"
            )
        return self.tensors[name]

    def _tuple(self, items: Any, path: Path) -> tuple[Any, ...]:
        if type(items) is not list:
            raise _malformed(path, f"a tuple of {items!r:.80}")
        return tuple(self.value(item, (*path, index)) for index, item in enumerate(items))

    def _dict(self, pairs: Any, path: Path) -> dict[Any, Any]:
        if type(pairs) is not list:
            raise _malformed(path, f"a dict of {pairs!r:.80}")
        result: dict[Any, Any] = {}
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise _malformed(path, f"{pair!r:.80}, which is no key with a value")
            key = self._key(pair[0], path)
            if key in result:
                raise _malformed(path, f"the key {key!r:.80} twice")
            result[key] = self.value(pair[1], (*path, _step(key)))
        return result

    def _key(self, key: Any, path: Path) -> Any:
        """A key of a dict or a member of a set."""
        if type(key) is dict and not (len(key) == 1 and next(iter(key)) in KEY_TAGS):
            raise _malformed(path, f"the key {key!r:.80}")
        if type(key) is list:
            raise _malformed(path, f"the key {key!r:.80}")
        if type(key) is dict and "$tuple" in key:
            parts = key["$tuple"]
            if type(parts) is not list:
                raise _malformed(path, f"the key {key!r:.80}")
            return tuple(self._key(part, path) for part in parts)
        return self.value(key, path)

    def _set(self, members: Any, path: Path) -> set[Any]:
        if type(members) is not list:
            raise _malformed(path, f"a set of {members!r:.80}")
        found = {self._key(member, path) for member in members}
        if len(found) != len(members) or sorted(members, key=dumps) != members:
            raise _malformed(path, f"the set {members!r:.80}, whose members are not sorted or come twice")
        return found

    def _frozenset(self, members: Any, path: Path) -> frozenset[Any]:
        return frozenset(self._set(members, path))

    def _array(self, tensor: Any, path: Path) -> numpy.ndarray[Any, Any]:
        value = self.value(tensor, path)
        if not isinstance(value, Tensor) or value.dtype not in ARRAYS.values():
            raise _malformed(path, f"an array of {tensor!r:.80}")
        return numpy.array(value.cpu().numpy())

    def _deque(self, parts: Any, path: Path) -> deque[Any]:
        if type(parts) is not list or len(parts) != 2 or type(parts[0]) is not list:
            raise _malformed(path, f"a deque of {parts!r:.80}")
        items, most = parts
        if most is not None and (type(most) is not int or most < len(items)):
            raise _malformed(path, f"a deque of {len(items)} items with the greatest length {most!r:.80}")
        return deque([self.value(item, (*path, index)) for index, item in enumerate(items)], most)

    def _int(self, text: Any, path: Path) -> int:
        number = int(text, 16) if type(text) is str and HEX_INT.fullmatch(text) else 0
        if SMALLEST_INT <= number <= LARGEST_INT:
            raise _malformed(path, f"the large integer {text!r:.80}")
        return number

    def _float(self, text: Any, path: Path) -> float:
        if text not in ("nan", "inf", "-inf"):
            raise _malformed(path, f"the float {text!r:.80}")
        return float(text)

    def _str(self, text: Any, path: Path) -> str:
        try:
            result = bytes.fromhex(text).decode("utf-8", "surrogatepass")
        except (TypeError, ValueError):
            result = ""
        if not SPLIT_PAIR.search(result) or _text(result) != {"$str": text}:
            raise _malformed(path, f"the string {text!r:.80}")
        return result

    def _bytes(self, text: Any, path: Path) -> bytes:
        try:
            result = base64.b64decode(text, validate=True)
        except (TypeError, ValueError):
            result = None
        if type(text) is not str or result is None or base64.b64encode(result).decode("ascii") != text:
            raise _malformed(path, f"the bytes {text!r:.80}")
        return result

    def _dtype(self, name: Any, path: Path) -> torch.dtype:
        if type(name) is not str or name not in TORCH_DTYPES:
            raise _malformed(path, f"the dtype {name!r:.80}")
        return TORCH_DTYPES[name]

    def _device(self, name: Any, path: Path) -> torch.device:
        if type(name) is not str or not DEVICE.fullmatch(name):
            raise _malformed(path, f"the device {name!r:.80}")
        return torch.device(name)

    def _memory_format(self, name: Any, path: Path) -> torch.memory_format:
        if type(name) is not str or name not in MEMORY_FORMATS:
            raise _malformed(path, f"the memory format {name!r:.80}")
        return MEMORY_FORMATS[name]


def _text(text: str) -> Any:
    """A string, tagged if JSON would read it as another one."""
    return {"$str": text.encode("utf-8", "surrogatepass").hex()} if SPLIT_PAIR.search(text) else text


def _step(key: Any) -> str | int:
    """A key as a part of a path, in names of tensors and in messages."""
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, (int, numpy.integer)) and not isinstance(key, bool):
        return int(key)
    return repr(key)


def _plain_name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "..."


def _path(path: Path) -> str:
    return "state" + "".join(f"[{part!r:.80}]" for part in path)


def _finite(value: float, path: Path) -> float:
    if not math.isfinite(value):
        raise _malformed(path, f"{value!r} outside of a tag")
    return value


def _malformed(path: Path, what: str) -> StateError:
    return StateError(f"{_path(path)}: {what}; this was not written by encode(), or was changed. Take another copy")


def _describe(value: object) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ in ("builtins", "loopkit") else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, numpy.ndarray):
        return f"{name} of {value.dtype}"
    named = inspect.isroutine(value) or isinstance(value, type)
    return f"{name} {getattr(value, '__qualname__', ''):.80}" if named else name


def _fix(value: object) -> str:
    """Suggest a value to save in place of ``value``."""
    if isinstance(value, numpy.ndarray):
        return "save a list, array.tolist()"
    if isinstance(value, (bytearray, memoryview)):
        return "save bytes(value)"
    if isinstance(value, tuple):
        return "a named tuple would come back without its names; save dict(zip(value._fields, value))"
    if isinstance(value, Mapping):
        return "save dict(value)"
    if callable(value):
        return "code is not state; save the name or the arguments that choose it, and make it again from them"
    return "save the plain values it is made of (numbers, strings, lists, tuples, dicts, tensors)"
