"""PluginStates: the entries of a state for plugins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from loopkit.base import sharded
from loopkit.base.notes import locate
from loopkit.engine.kept.differences import names
from loopkit.engine.kept.part import Part
from loopkit.engine.kept.undo import Undos, all_of, undo_of, undone_by

PHASE = ".phase"
"""The owner of the values that a phase keeps for an epoch; no plugin can be called so."""


class PluginStates(Part):
    """The states of the plugins that have one.

    Args:
        plugins: Returns the learner's, by name.
    """

    name = "plugins"
    what = "the plugins"

    def __init__(self, plugins: Callable[[], Mapping[str, Any]]) -> None:
        self.now = plugins
        self.lacking: frozenset[str] = frozenset()
        """The plugins that have a state, and none in the state that was loaded last."""

    def stateful(self) -> dict[str, Any]:
        """Return the plugins that have a state, by name."""
        return {name: each for name, each in self.now().items() if callable(getattr(each, "state_dict", None))}

    def saved(self, whole: bool = True, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the states by name.

        Args:
            whole: As of `Part.saved`.
            without: Plugins that are left out.
        """
        states: dict[str, Any] = {}
        for name, plugin in self.stateful().items():
            if name in without:
                continue
            try:
                states[name] = plugin.state_dict()
            except Exception as error:
                locate(error, f"in state_dict of plugin {name!r}")
                raise
        return sharded.whole(states) if whole else states

    def problems(self, saved: Mapping[str, Any], allow: Collection[str] = ()) -> list[str]:
        """List plugins that only the state has, or only the learner."""
        there = [name for name in saved if name not in allow]
        own = [name for name in self.stateful() if name not in allow]
        problems = names("plugins", there, own)
        if not problems:
            return []
        listed = ", ".join(repr(name) for name in sorted({*there} ^ {*own}))
        hint = (
            f"to load without, give Checkpoint(options=SaveOptions(allow=({listed},))), or load_state_dict(allow=...): "
            f"parts that the state lacks start new"
        )
        return [*problems, hint]

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Let each plugin take its state; return the undo."""
        before = self.lacking
        undos: Undos = [("the plugins without a state", lambda: setattr(self, "lacking", before))]
        self.lacking = frozenset(self.stateful().keys() - saved.keys())
        with undone_by(undos):
            for name, plugin in self.stateful().items():
                if name not in saved:
                    continue
                undos.append((f"plugin {name!r}", undo_of(plugin)))
                try:
                    plugin.load_state_dict(saved[name])
                except Exception as error:
                    locate(error, f"in load_state_dict of plugin {name!r}, whose saved state may be of another version")
                    raise
        return all_of(undos)

    def apart(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of plugins that divide theirs among processes."""
        plugins = self.now()
        return {name: state for name, state in saved.items() if hasattr(plugins.get(name), "reshard")}

    def share(self, whole: Any, saved: list[Any], rank: int, size: int) -> dict[str, Any]:
        """Return this process's own, or its share if the number of processes has changed."""
        own = {**whole, **saved[min(rank, len(saved) - 1)]}
        for name in saved[0]:
            reshard = getattr(self.now().get(name), "reshard", None)
            if reshard is not None and len(saved) != size:
                own[name] = reshard([each[name] for each in saved], rank, size)
        return own

    def stores_apart(self, stores: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values kept for an epoch that differ from process to process, by owner."""
        plugins = self.now()
        return {
            owner: store
            for owner, store in stores.items()
            if owner == PHASE or hasattr(plugins.get(owner), "reshard_store")
        }

    def share_stores(self, saved: list[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Return this process's share of the values that each process has kept for an epoch."""
        plugins = self.now()
        own = saved[min(rank, len(saved) - 1)]
        owners = dict.fromkeys(owner for each in saved for owner in each)
        made: dict[str, Any] = {}
        for owner in owners:
            reshard = getattr(plugins.get(owner), "reshard_store", None)
            if reshard is None or len(saved) == size:
                made[owner] = own.get(owner, {})
            else:
                stores = [each.get(owner, {}) for each in saved]
                made[owner] = reshard(stores, rank, size)
        return made
