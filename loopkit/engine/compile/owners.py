"""Owners: which learner a plugin with a state belongs to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from loopkit.errors import PluginConflict
from loopkit.plugin import unwrapped

NOTE = "_loopkit_belongs"
"""The attribute of a plugin that names its learner; a copy of the plugin has it as well."""
UNKNOWN = object()


class Owner:
    """A learner, as plugins remember it, without keeping it alive."""


@dataclass
class Ownership:
    """Which learners use a plugin; kept as an attribute of the plugin."""

    plugin_id: int
    """The ``id()`` of that plugin: a copy has the attribute, too, and another id."""
    first_state: Any
    """The state that it had when it first came to a learner."""
    owner: Owner | None = None
    """The first learner that used it."""
    in_fits_of: list[Owner] = field(default_factory=list)
    """The learners that use it in a fit now."""


class Owners:
    """The ownership of one learner's plugins: a plugin with state belongs to one learner."""

    def __init__(self) -> None:
        self._me = Owner()
        self._in_fit: list[Ownership] = []

    def meet(self, plugin: Any) -> None:
        """Note the state of a plugin that comes to a learner for the first time."""
        if _is_shared(plugin) or not _has_state(plugin):
            return
        own = unwrapped(plugin)
        if not hasattr(own, "__dict__"):
            return
        found: Ownership | None = vars(own).get(NOTE)
        if found is None:
            vars(own)[NOTE] = Ownership(id(own), _state(own))
        elif found.plugin_id != id(own):
            vars(own)[NOTE] = Ownership(id(own), found.first_state, found.owner)

    def use(self, plugins: Mapping[str, Any]) -> None:
        """Note that the learner uses these plugins, outside of a fit."""
        for plugin in plugins.values():
            ownership = _ownership_of(plugin)
            if ownership is not None and ownership.owner is None:
                ownership.owner = self._me

    def begin(self, plugins: Mapping[str, Any]) -> None:
        """Let a fit use these plugins.

        Raises:
            PluginConflict: One of them has the state of another learner's training.
        """
        for name, plugin in plugins.items():
            ownership = _ownership_of(plugin)
            if ownership is not None:
                self._check(name, plugin, ownership)
        self.use(plugins)
        for plugin in plugins.values():
            ownership = _ownership_of(plugin)
            if ownership is not None:
                ownership.in_fits_of.append(self._me)
                self._in_fit.append(ownership)

    def _check(self, name: str, plugin: Any, ownership: Ownership) -> None:
        made = type(unwrapped(plugin)).__name__
        if any(owner is not self._me for owner in ownership.in_fits_of):
            why = "another learner uses it in a fit that is running"
        elif ownership.owner not in (None, self._me) and not _alike(_state(unwrapped(plugin)), ownership.first_state):
            why = "it was used by another learner, and its state is of that one's training"
        else:
            return
        raise PluginConflict(
            f"plugin {name!r} ({made}) belongs to one learner: {why}. Give each learner its own: a new {made}(...), or "
            f"plugins=[fresh(plugin)], of `from loopkit import fresh`; learner.remove({name!r}) frees it; a class that "
            f"is meant for several learners has shared = True"
        )

    def end(self) -> None:
        """End the use in a fit."""
        for ownership in self._in_fit:
            ownership.in_fits_of[:] = [owner for owner in ownership.in_fits_of if owner is not self._me]
        self._in_fit = []

    @staticmethod
    def free(plugin: Any) -> None:
        """Forget the learner of a plugin that was removed from it."""
        getattr(unwrapped(plugin), "__dict__", {}).pop(NOTE, None)


def _ownership_of(plugin: Any) -> Ownership | None:
    if _is_shared(plugin):
        return None
    found: Ownership | None = getattr(unwrapped(plugin), "__dict__", {}).get(NOTE)
    return found


def _is_shared(plugin: Any) -> bool:
    return bool(getattr(unwrapped(plugin), "shared", False))


def _has_state(plugin: Any) -> bool:
    """Whether it is a plugin with a state, or is for one learner (``shared = False``)."""
    own = unwrapped(plugin)
    return callable(getattr(own, "state_dict", None)) or hasattr(own, "shared")


def _state(own: Any) -> Any:
    """A copy of a plugin's state; `UNKNOWN`, which is like no other one, where it has none now."""
    if not callable(getattr(own, "state_dict", None)):
        return UNKNOWN
    try:
        return copy.deepcopy(own.state_dict())
    except Exception:  # some have none before they have seen a learner
        return UNKNOWN


def _alike(one: Any, other: Any) -> bool:
    """Whether two states are the same."""
    if one is UNKNOWN or other is UNKNOWN or type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return same and bool((one == other).all())  # host sync: before a fit
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
