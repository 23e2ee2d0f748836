"""ModuleLooks: how the plain attributes of a module and of its parts look, which no state dict holds."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from loopkit.engine.kept.looks import Clocks, Leave, Look, Looks, is_left, look, moved
from loopkit.engine.kept.walk import PLAIN

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


class Seen(NamedTuple):
    """A module, and what it held."""

    kind: type
    held: dict[str, Any]
    """Its attributes."""
    looks: Looks
    """The attributes that are not plain values."""
    size: int
    """How many attributes it had; -1 if they do not count, since its class saves more than parameters and buffers."""


class ModuleLooks:
    """The looks of a module and of its parts.

    Args:
        module: The outermost.
        leave: As for `look`.
    """

    def __init__(self, module: nn.Module, leave: Leave) -> None:
        self._module = module
        self._leave = leave
        self._seen = {each: _see(each, leave) for each in modules_in(module)}

    def moved(self, since: Clocks, is_saved: Callable[[Tensor], bool]) -> list[str]:
        """Return the paths of the attributes that have moved; see `loopkit.engine.kept.looks.moved`."""
        found: dict[nn.Module, list[str]] = {}
        for module in modules_in(self._module):
            seen = self._seen.get(module)
            if seen is None or seen.kind is not type(module):  # it is new, or a lazy one that knows its sizes now
                self._seen[module] = _see(module, self._leave)
            elif _may_have_moved(seen, vars(module)):
                found[module] = self._compare(module, seen, since, is_saved)
        paths = _paths(self._module) if any(found.values()) else {}
        return [f"{paths[module]}{name}" for module, names in found.items() for name in names]

    def _compare(self, module: nn.Module, seen: Seen, since: Clocks, is_saved: Callable[[Tensor], bool]) -> list[str]:
        held = seen.held or dict(list(vars(module).items())[: seen.size])  # new attributes are the last ones
        before = {**_plain(module, held), **seen.looks}
        now = _see(module, self._leave)
        after = {**_plain(module, vars(module)), **now.looks}
        after[""] = before[""]  # what stands for the module itself
        names = moved(before, after, since, is_saved)
        seen.looks.update({path: each for path, each in before.items() if path in now.looks})
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


def _paths(module: nn.Module) -> dict[nn.Module, str]:
    """The names of a module and its parts, each with a dot at its end."""
    paths = {module: ""}
    for each in modules_in(module):
        for name, part in vars(each)[PARTS].items():
            if part is not None:
                paths.setdefault(part, f"{paths[each]}{name}.")
    return paths


def _see(module: nn.Module, leave: Leave) -> Seen:
    kind = type(module)
    held = vars(module)
    if kind in FIXED:
        return Seen(kind, {}, {}, len(held))
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in SAVES):
        return Seen(kind, {}, {}, -1)
    if kind.__module__.startswith("torch."):
        return Seen(kind, held.copy(), {}, len(held))
    names = held.keys() - OF_TORCH
    rest = {name: held[name] for name in names if type(held[name]) not in KINDS and not is_left(module, name)}
    return Seen(kind, held.copy(), look(SimpleNamespace(**rest), leave) if rest else {}, len(held))


def _may_have_moved(seen: Seen, now: dict[str, Any]) -> bool:
    if seen.size != len(now) or seen.looks:
        return seen.size != -1
    return not all(map(is_, seen.held.values(), now.values()))


def _plain(module: nn.Module, held: dict[str, Any]) -> Looks:
    """The looks of its attributes that are plain values."""
    names = [name for name, value in held.items() if type(value) in KINDS and name not in OF_TORCH]
    return {
        "": Look("object", None),
        **{name: Look("value", held[name]) for name in names if not is_left(module, name)},
    }
