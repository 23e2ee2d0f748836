"""The structure of a module, without its values: for a hash, and to list differences from a saved one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from loopkit.base.sharded import class_of, is_sharded
from loopkit.base.words import nearest
from loopkit.checkpoint import strict_json
from loopkit.errors import StateError

SHOWN = 5
"""How many names of one kind a message lists."""

CANDIDATES = 1000
LONGEST = 200
"""How many names are searched for a near spelling, and their length: beyond that it takes seconds."""


@dataclass(frozen=True)
class Entry:
    """A parameter or a buffer of a module: all but its values.

    Attributes:
        name: Its path in the module, such as ``"encoder.conv.weight"``.
        shape: Its shape; None if it is lazy, not made yet.
        dtype: The name of its dtype without ``torch.``, such as ``"float32"``.
        kind: ``"parameter"`` or ``"buffer"``.
        persistent: Whether it is among the weights that are saved; parameters always are.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str
    kind: str
    persistent: bool

    def as_json(self) -> list[Any]:
        """The attributes in a plain list."""
        shape = None if self.shape is None else list(self.shape)
        return [self.name, shape, self.dtype, self.kind, self.persistent]


@dataclass(frozen=True)
class Structure:
    """The structure of a module: its entries, ties and classes.

    Attributes:
        entries: Parameters and then buffers, each in the order of the module, a tied one under each of its names.
        ties: The names that share one memory, a group of two or more each.
        modules: The name of each module's class by its path; ``""`` is the module itself.
    """

    entries: tuple[Entry, ...]
    ties: tuple[tuple[str, ...], ...]
    modules: Mapping[str, str]

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the structure, in hex: equal for equal structures, in every process and version of Python.

        The order of the parameters counts, as the state of an optimizer goes by it; the order of the modules does not.
        """
        return sha256(strict_json.render(self.as_json(), sort=True)).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The structure as plain lists, dicts, strings and numbers; `from_json` reads it."""
        return {
            "entries": [entry.as_json() for entry in self.entries],
            "ties": [list(names) for names in self.ties],
            "modules": dict(self.modules),
        }

    @classmethod
    def from_json(cls, value: Any) -> Structure:
        """Read what `as_json` gave.

        Raises:
            StateError: It is something else.
        """
        try:
            entries = tuple(_entry(*each) for each in value["entries"])
            ties = tuple(tuple(_checked(name, str) for name in names) for names in value["ties"])
            modules = {_checked(path, str): _checked(name, str) for path, name in value["modules"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the saved structure of a model is malformed ({type(error).__name__}: {error}); "
                f"the checkpoint was not written by loopkit, or was changed since"
            ) from error
        return cls(entries, ties, modules)


def _entry(name: Any, shape: Any, dtype: Any, kind: Any, persistent: Any) -> Entry:
    sizes = None if shape is None else tuple(_checked(size, int) for size in shape)
    if kind not in ("parameter", "buffer"):
        raise ValueError(f"kind {kind!r}")
    return Entry(_checked(name, str), sizes, _checked(dtype, str), kind, _checked(persistent, bool))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def structure(model: nn.Module) -> Structure:
    """Describe the parts of a module: names, shapes, dtypes and classes, without its values.

    >>> from torch import nn
    >>> one, other = structure(nn.Linear(4, 3)), structure(nn.Linear(4, 5))
    >>> one.hash == structure(nn.Linear(4, 3)).hash, one.hash == other.hash
    (True, False)
    >>> differences(one, other)[0]
    'weight: shape (3, 4) in the checkpoint, (5, 4) here'
    """
    entries: list[Entry] = []
    groups: dict[object, list[str]] = {}
    for name, tensor, persistent in named_tensors(model):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        shape = None if is_lazy(tensor) else tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, shape, dtype, kind, persistent))
        groups.setdefault(tie_of(tensor), []).append(name)
    tied = [tuple(sorted(names)) for names in groups.values() if len(names) > 1]
    ties = tuple(sorted(tied))
    modules = {path: class_of(module) for path, module in model.named_modules(remove_duplicate=False)}
    return Structure(tuple(entries), ties, modules)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every parameter and buffer: its name, itself, and whether it is saved; a tied one under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            persistent = name not in module._non_persistent_buffers_set
            yield f"{prefix}{name}", buffer, persistent


def tie_of(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors that are the same memory, seen in the same way."""
    if is_sharded(tensor) or is_lazy(tensor):
        return id(tensor)
    if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def differences(one: Structure, other: Structure) -> list[str]:
    """Return the differences between two structures, a line each; empty if they are equal.

    Args:
        one: The saved one, ``in the checkpoint``.
        other: The one of the model, ``here``.
    """
    saved = {entry.name: entry for entry in one.entries}
    here = {entry.name: entry for entry in other.entries}
    lines = [
        *_one_sided(saved, here),
        *_changed(saved, here),
        *_tied_otherwise(one, other),
        *class_differences(one.modules, other.modules),
        *_ordered_otherwise(one, other),
    ]
    if not lines and one.hash != other.hash:
        lines.append("the buffers come in another order, or the modules are nested otherwise")
    return lines


def _one_sided(saved: Mapping[str, Entry], here: Mapping[str, Entry]) -> Iterator[str]:
    """The entries that one side has, each with the nearest name that the other side has for itself."""
    gone = [entry for name, entry in saved.items() if name not in here]
    new = [entry for name, entry in here.items() if name not in saved]
    yield from _listed(gone, "missing here", new)
    yield from _listed(new, "not in the checkpoint", gone)


def _changed(saved: Mapping[str, Entry], here: Mapping[str, Entry]) -> Iterator[str]:
    """The entries of both sides that differ, by the kind of difference."""
    both = [(saved[name], here[name]) for name in saved if name in here]
    for what in ("shape", "dtype", "kind", "persistent"):
        lines = []
        for a, b in both:
            old = getattr(a, what)
            new = getattr(b, what)
            if old != new:
                lines.append(f"{a.name}: {what} {_made(old)} in the checkpoint, {_made(new)} here")
        yield from _capped(lines)


def _made(value: object) -> str:
    """A value of an entry; the shape of a lazy one is None."""
    return "not made yet" if value is None else str(value)


def _tied_otherwise(one: Structure, other: Structure) -> Iterator[str]:
    """The ties of one side between names that both sides have."""
    known = {entry.name for entry in one.entries}
    known &= {entry.name for entry in other.entries}
    saved = {tie for tie in one.ties if known.issuperset(tie)}
    here = {tie for tie in other.ties if known.issuperset(tie)}
    gone = [f"{', '.join(tie)}: tied in the checkpoint, not here" for tie in sorted(saved - here)]
    new = [f"{', '.join(tie)}: tied here, not in the checkpoint" for tie in sorted(here - saved)]
    yield from _capped(gone)
    yield from _capped(new)


def _ordered_otherwise(one: Structure, other: Structure) -> Iterator[str]:
    """The first place where equal parameters come in another order."""
    saved = [entry.name for entry in one.entries if entry.kind == "parameter"]
    here = [entry.name for entry in other.entries if entry.kind == "parameter"]
    if saved == here or sorted(saved) != sorted(here):
        return
    for old, new in zip(saved, here, strict=True):
        if old != new:
            yield f"the parameters come in another order: where the checkpoint has {old}, here is {new}"
            return


def plain(name: str, longest: int = 100) -> str:
    """A name on one line: unprintable characters are escaped, the middle of a long one left out.

    >>> plain("a\\nb"), plain("x" * 20, longest=9)
    ('a\\\\nb', 'xxx...xxx')
    """
    if len(name) > longest:
        half = (longest - 3) // 2
        name = f"{name[:half]}...{name[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def near(name: str, names: Iterable[str]) -> str:
    """`loopkit.engine.compile.order.nearest` among names that come from a file: of sane length and number."""
    if len(name) > LONGEST:
        return ""
    candidates = [each for each in names if len(each) <= LONGEST]
    return nearest(name, candidates[:CANDIDATES])


def shown(items: Sequence[str], show: Callable[[str], str] = plain) -> str:
    """The first few of a list, and how many more there are.

    >>> shown([*"abcdefg"])
    'a, b, c, d, e and 2 more'
    """
    text = ", ".join(show(item) for item in items[:SHOWN])
    if len(items) <= SHOWN:
        return text
    return f"{text} and {len(items) - SHOWN:,} more"


def _listed(entries: list[Entry], what: str, others: list[Entry]) -> Iterator[str]:
    """``"2 parameters missing here: a, b"``, a line for parameters and one for buffers."""
    by_name = {entry.name: entry for entry in entries}
    for kind in ("parameter", "buffer"):
        names = [entry.name for entry in entries if entry.kind == kind]
        if names:
            plural = "s" if len(names) > 1 else ""
            listed = shown(names, lambda name: _respelt(by_name[name], others))
            yield f"{len(names):,} {kind}{plural} {what}: {listed}"


def _respelt(entry: Entry, others: Iterable[Entry]) -> str:
    """A name, with the nearest one of the same shape and dtype on the other side."""
    alike = [each.name for each in others if (each.shape, each.dtype) == (entry.shape, entry.dtype)]
    return plain(entry.name) + near(entry.name, alike)


def class_differences(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """The modules of another class, gathered by old and new class, and modules on one side only."""
    changed: dict[tuple[str, str], list[str]] = {}
    for path in sorted(saved.keys() & here.keys()):
        old = saved[path]
        new = here[path]
        if old != new:
            changed.setdefault((old, new), []).append(path or "the model")
    lines = [f"class {old} became {new}: {shown(paths)}" for (old, new), paths in changed.items()]
    lines += _only_modules(saved, here, "missing here")
    lines += _only_modules(here, saved, "not in the checkpoint")
    return lines


def _only_modules(one: Mapping[str, str], other: Mapping[str, str], what: str) -> list[str]:
    """A line about the modules that one side has and the other side does not, with the count of each class."""
    only = [path for path in one if path not in other]
    if not only:
        return []
    kinds = Counter(one[path] for path in only)
    counts = [f"{count:,} {name}" for name, count in sorted(kinds.items())]
    return [f"modules {what}: {shown(sorted(only))} ({', '.join(counts[:SHOWN])})"]


def _capped(lines: list[str]) -> list[str]:
    """The first few lines, and one that counts the rest."""
    if len(lines) <= SHOWN:
        return lines
    return [*lines[:SHOWN], f"and {len(lines) - SHOWN:,} more such differences"]
