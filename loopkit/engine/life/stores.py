"""Stores: the values that plugins keep for one epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Stores:
    """The saved store and the unsaved store of each plugin in one epoch.

    Args:
        name_of: Returns the name of a plugin; phases share one.
    """

    def __init__(self, name_of: Callable[[Any], str]) -> None:
        self._name_of = name_of
        self._stores: dict[str, dict[str, Any]] = {}
        self._kept: dict[int, tuple[Any, dict[str, Any]]] = {}

    def load_stores(self, saved: Mapping[str, Any]) -> None:
        """Take over the stores of a saved state."""
        self._stores = {name: dict(store) for name, store in saved.items()}

    def store(self, owner: Any) -> dict[str, Any]:
        """The saved store of a plugin for this epoch: empty at first, or restored after a resume.

        It can hold every type that a state can hold, and objects with a ``state_dict``, which is saved for them.

        Args:
            owner: The plugin; a phase finds its own at ``step.store``.
        """
        return self._stores.setdefault(self._name_of(owner), {})

    def stores(self) -> list[dict[str, Any]]:
        """The saved stores of all plugins."""
        return list(self._stores.values())

    def keep(self, owner: Any) -> dict[str, Any]:
        """The unsaved store of a plugin for this epoch, empty at first. Quick enough for each step."""
        try:
            return self._kept[id(owner)][1]
        except KeyError:
            kept: dict[str, Any] = {}
            self._kept[id(owner)] = owner, kept  # with the owner, so that its id stays its own
            return kept

    def saved_stores(self) -> dict[str, Any]:
        """The saved form of the stores that are not empty, by plugin."""
        return {name: _plain(store) for name, store in self._stores.items() if store}


def _plain(value: Any) -> Any:
    """The saved form of a value in a store."""
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if type(value) is dict:
        return {key: _plain(part) for key, part in value.items()}
    return type(value)(_plain(part) for part in value) if type(value) in (list, tuple) else value
