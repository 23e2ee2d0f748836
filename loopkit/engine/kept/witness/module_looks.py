"""ModuleLooks: how the plain attributes of a module and of its parts look, which no state dict holds."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from loopkit.engine.kept.witness.looks import Clocks, Leave, Look, Looks, is_left, look, moved
from loopkit.engine.kept.witness.walk import PLAIN

OF_TORCH = frozenset({*vars(nn.Module()), "_compiled_call_impl", "_is_full_backward_hook"})
"""Attributes that torch gives each module: parameters, buffers and parts, which are saved; hooks; the mode."""
PARTS = "_modules"
"""Where torch keeps the parts of a module."""
KINDS = frozenset(PLAIN)


SAVES = ("get_extra_state", "state_dict", "_save_to_state_dict")
"""Methods by which a class saves more than its parameters and buffers."""


FIXED = frozenset(
    [
        *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.RMSNorm),
        *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Flatten),
        *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
    ]
)
"""Classes whose options follow from the shapes of their parameters, or that have none: most modules of most models. Of
these only the number of attributes is compared, which takes a fifth of the time."""


Read = Callable[[dict[str, Any]], tuple[Any, ...]]


class Seen(NamedTuple):
    """A module, and what it held."""

    module: nn.Module
    kind: type
    size: int
    """How many attributes it had; -1 if they do not count, since its class saves more than parameters and buffers."""
    read: Read | None
    """Takes its parts and its plain values out of its attributes; None if it holds neither."""
    held: tuple[Any, ...]
    """What that had returned."""
    names: tuple[str, ...]
    """The names of the plain values."""
    parts: tuple[nn.Module | None, ...]
    looks: Looks
    """The attributes that are not plain values."""


class ModuleLooks:
    """The looks of a module and of its parts.

    Args:
        module: The outermost.
        leave: As for `look`.
    """

    def __init__(self, module: nn.Module, leave: Leave) -> None:
        self._module = module
        self._leave = leave
        self._counted: dict[tuple[Any, ...], list[str] | None] = {}
        """By class and attributes: those that count."""
        self._readers: dict[tuple[str, ...], Read] = {(): _parts_in}
        self._seen = {each: self._see(each) for each in modules_in(module)}

    def moved(self, since: Clocks, is_saved: Callable[[Tensor], bool]) -> list[str]:
        """Return the paths of the attributes that have moved; see `loopkit.engine.kept.witness.looks.moved`."""
        changed = [seen for seen in self._seen.values() if _may_have_moved(seen)]
        if not changed:
            return []
        if any(_has_other_parts(seen) for seen in changed):
            self._renew()
        found = {}
        for seen in changed:
            if seen.size != -1:
                found[seen.module] = self._compare(seen, since, is_saved)
        if not any(found.values()):
            return []
        paths = paths_of(self._module)
        moved_paths: list[str] = []
        for module, names in found.items():
            if module in paths:
                moved_paths += [f"{paths[module]}{name}" for name in names]
        return moved_paths

    def _see(self, module: nn.Module) -> Seen:
        kind = type(module)
        held = vars(module)
        parts = tuple(held[PARTS].values())
        read: Read | None = _parts_in if parts else None
        if kind in FIXED:
            return Seen(module, kind, len(held), read, (held[PARTS],), (), parts, {})
        counted = self._names(module, kind, held)
        if counted is None:
            return Seen(module, kind, -1, read, (held[PARTS],), (), parts, {})
        names = tuple([name for name in counted if type(held[name]) in KINDS])
        if names not in self._readers:
            self._readers[names] = itemgetter(PARTS, *names)
        take = self._readers[names]
        looks: Looks = {}
        has_more = len(names) < len(counted)
        if has_more and not kind.__module__.startswith("torch."):
            rest = {name: held[name] for name in counted if type(held[name]) not in KINDS}
            looks = look(SimpleNamespace(**rest), self._leave)
        return Seen(module, kind, len(held), take, take(held), names, parts, looks)

    def _names(self, module: nn.Module, kind: type, held: dict[str, Any]) -> list[str] | None:
        """The attributes of a module that count; None if its class saves more than parameters and buffers."""
        key = (kind, *held)
        if key in self._counted:
            return self._counted[key]
        saves = any(getattr(kind, name) is not getattr(nn.Module, name) for name in SAVES)
        found = None
        if not saves:
            found = [name for name in held if name not in OF_TORCH and not is_left(module, name)]
        if "volatile" not in held:
            self._counted[key] = found
        return found

    def _renew(self) -> None:
        """Take the parts that stand there now, of which new ones count from here on."""
        now = {each: self._seen.get(each) for each in modules_in(self._module)}
        self._seen = {each: seen or self._see(each) for each, seen in now.items()}

    def _compare(self, seen: Seen, since: Clocks, is_saved: Callable[[Tensor], bool]) -> list[str]:
        module = seen.module
        if type(module) is not seen.kind:  # a lazy one that knows its sizes now
            if module in self._seen:
                self._seen[module] = self._see(module)
            return []
        before = _plain(module, _held(seen))
        before.update(seen.looks)
        now = self._see(module)
        after = _plain(module, vars(module))
        after.update(now.looks)
        after[""] = before[""]  # the module itself
        names = moved(before, after, since, is_saved)
        for path, each in before.items():
            if path in now.looks:
                seen.looks[path] = each
        return names


def modules_in(module: nn.Module) -> list[nn.Module]:
    """The module and all its parts, each once; read without code of the user's, and faster than ``modules()``."""
    found = [module]
    seen = {module}
    for each in found:
        for part in vars(each)[PARTS].values():
            if part is not None and part not in seen:
                seen.add(part)
                found.append(part)
    return found


def paths_of(module: nn.Module) -> dict[nn.Module, str]:
    """The names of a module and its parts, each with a dot at its end."""
    paths = {module: ""}
    for each in modules_in(module):
        for name, part in vars(each)[PARTS].items():
            if part is not None:
                paths.setdefault(part, f"{paths[each]}{name}.")
    return paths


def _parts_in(held: dict[str, Any]) -> tuple[Any, ...]:
    return (held[PARTS],)


def _held(seen: Seen) -> dict[str, Any]:
    """The plain values that a module held, by name; of a fixed class all that it had, of which new ones come last."""
    if seen.kind in FIXED:
        now = list(vars(seen.module).items())
        return dict(now[: seen.size])
    return dict(zip(seen.names, seen.held[1:], strict=True))


def _may_have_moved(seen: Seen) -> bool:
    module, kind, size, read, held, _, parts, looks = seen
    now = vars(module)
    if type(module) is not kind or looks:
        return True
    if len(now) != size != -1:
        return True
    if read is None:
        return False
    try:
        values = read(now)
    except KeyError:
        return True
    if not all(map(is_, held, values)):
        return True
    now_parts = values[0]
    return len(parts) != len(now_parts) or not all(map(is_, parts, now_parts.values()))


def _has_other_parts(seen: Seen) -> bool:
    now = vars(seen.module)[PARTS].values()
    return len(seen.parts) != len(now) or not all(map(is_, seen.parts, now))


def _plain(module: nn.Module, held: dict[str, Any]) -> Looks:
    """The looks of its attributes that are plain values."""
    looks: Looks = {"": Look("object", None)}
    for name, value in held.items():
        if type(value) not in KINDS or name in OF_TORCH:
            continue
        if not is_left(module, name):
            looks[name] = Look("value", value)
    return looks
