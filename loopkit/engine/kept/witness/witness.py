"""Witness: the parts of a run, looked at when a fit begins and when it is saved: whatever moves is saved or named.

It reads attributes and built-in containers, and runs no code of the user's (`loopkit.engine.kept.witness.walk`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from loopkit.base.notes import warn
from loopkit.base.words import some
from loopkit.engine.kept.witness.data_roots import is_looked_at, name_of_data
from loopkit.engine.kept.witness.forgotten import Contents
from loopkit.engine.kept.witness.looks import Clocks, Looks, is_in_function, look, moved
from loopkit.engine.kept.witness.module_looks import ModuleLooks
from loopkit.engine.kept.witness.root import Root
from loopkit.engine.kept.witness.walk import HOLDERS

NAMED = 5
"""How many attributes a message names at most."""
IN_CODE = "Keep it in an attribute of an object with a state, such as a plugin with state_dict and load_state_dict"
"""How to save what a function closes over, or has as a default."""


class Roots(Protocol):
    """The current parts of a learner."""

    def __iter__(self) -> Iterator[Root]: ...

    def of_data(self, phase: str, data: Any) -> Root:
        """Return the root of the data of a phase."""

    def saved(self) -> Iterable[Tensor]:
        """Return the tensors that are saved, which something else may hold as well."""


class Witness:
    """Names what moves in a run and is in no state.

    Args:
        roots: Returns what the learner consists of now.
    """

    def __init__(self, roots: Callable[[], Roots]) -> None:
        self._roots = roots
        self._records: dict[str, _Record] = {}
        self._seen: set[Any] = set()
        """The parts of the learner with which it has looked at all roots."""
        self._named: set[tuple[str, str]] = set()
        """The roots and attributes that were named in this fit, and their owners."""

    def begin(self) -> None:
        """A fit begins, or a state was loaded: changes count from the next look on."""
        self._records.clear()
        self._named.clear()
        self._seen.clear()

    def look(self, at: Any = None) -> None:
        """Look at what the learner consists of, unless it has since the fit began.

        Args:
            at: Another value where the learner may consist of something else.
        """
        if at in self._seen:
            return
        self._seen.add(at)
        for root in self._roots():
            self.add(root)

    def knows(self, name: str, value: Any) -> bool:
        """Whether it has looked at a root of this name, which is this object, since the fit began."""
        known = self._records.get(name)
        return known is not None and known.root.object is value

    def add(self, root: Root) -> None:
        """Look at one more root, unless it has since the fit began."""
        if not self.knows(root.name, root.object):
            self._records[root.name] = _Record(root)

    def look_at_data(self, phase: str, data: Any) -> None:
        """Look at the data of a phase, or at the function that makes it."""
        if not self.knows(name_of_data(phase), data) and is_looked_at(data):
            self.add(self._roots().of_data(phase, data))

    def missing(self) -> dict[str, str]:
        """Return descriptions of unsaved values that changed since the fit began, by the name of their root."""
        messages = {}
        for name, paths in self._moved().items():
            if paths:
                messages[name] = self._records[name].message(paths)
        return messages

    def warn(self) -> None:
        """Warn of each attribute that has moved and is in no state, once."""
        for name, paths in self._moved().items():
            record = self._records[name]
            new = [path for path in paths if self._named.isdisjoint(record.names_of(path))]
            for path in paths:
                self._named.update(record.names_of(path))
            if new:
                warn(record.message(new))

    def warn_of_forgotten(self, state: Mapping[str, Any]) -> None:
        """Warn of each attribute that has moved and is not in the state that its owner has saved.

        Args:
            state: The state of the learner.
        """
        is_saved = _Saved(lambda: self._roots().saved())
        for name, record in self._records.items():
            if record.root.state is None:
                continue
            forgotten = record.forgotten(state, is_saved)
            new = [path for path in forgotten if (name, path) not in self._named]
            if new:
                self._named.update((name, path) for path in new)
                warn(record.message(new))

    def _moved(self) -> dict[str, list[str]]:
        is_saved = _Saved(lambda: self._roots().saved())
        moved = {}
        for name, record in self._records.items():
            if record.root.state is None:
                moved[name] = record.moved(is_saved)
        return moved


class _Record:
    """How a root looked when it was first seen."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.in_code: set[str] = set()
        """The paths that lead through a function."""
        self._since = Clocks.read()
        self._module: ModuleLooks | None = None
        self._looks: Looks = {}
        if isinstance(root.object, nn.Module):
            self._module = ModuleLooks(root.object, root.leave)
        else:
            self._looks = self._look()

    def _look(self) -> Looks:
        root = self.root
        return look(root.object, root.leave, root.scope)

    def _attributes(self, paths: list[str]) -> list[str]:
        """Return the names of the attributes in which these paths begin, or end, without those in functions."""
        names: dict[str, None] = {}
        for path in paths:
            if path in self.in_code:
                continue
            below = _past_callables(path, self.root.object)
            if below or not path:
                names[_attribute(below, self.root.scope.lazy)] = None
        return list(names)

    def message(self, paths: list[str]) -> str:
        root = self.root
        listed = some([repr(path or "order") for path in paths], NAMED)
        cure = IN_CODE
        attributes = self._attributes(paths)
        if attributes:
            names = "".join(f"{name!r}, " for name in attributes[:NAMED])
            cure = root.cure.format(names.removesuffix(" "))
        holder = "no checkpoint holds" if root.state is None else "its state_dict leaves out"
        return (
            f"{root.name} ({type(root.object).__name__}) has changed its {listed} since the fit began, and {holder} "
            f"that: a resumed run starts without it. {cure}"
        )

    def names_of(self, path: str) -> list[tuple[str, str]]:
        """Names of a value: one in this root, and one that it has in every root that holds its owner."""
        names = [(self.root.name, path)]
        found = self._looks.get(path)
        if found is not None and found.owner:
            last = path.rpartition(".")[2]
            names.append((str(found.owner), last))
        return names

    def forgotten(self, state: Mapping[str, Any], is_saved: Callable[[Tensor], bool]) -> list[str]:
        """Return the paths of attributes that have moved, and are not in their part of a state."""
        root = self.root
        assert root.state is not None
        part, name = root.state
        own = (state.get(part) or {}).get(name)
        now = self._look()
        paths = moved(self._looks, now, self._since, is_saved, root.scope)
        if not paths or own is None:
            return []
        contents = Contents(own)
        return [path for path in paths if not contents.hold(path, now[path])]

    def moved(self, is_saved: Callable[[Tensor], bool]) -> list[str]:
        if self._module is not None:
            paths = self._module.moved(self._since, is_saved)
            return [path for path in paths if path.rpartition(".")[2] not in self.root.written]
        scope = self.root.scope
        now = self._look()
        paths = moved(self._looks, now, self._since, is_saved, scope)
        if scope.methods_of is not None:
            self.in_code.update(path for path in paths if is_in_function(path, now))
        return paths


class _Saved:
    """Whether a tensor shares its memory with one that is saved; it asks for these when the first one has moved."""

    def __init__(self, saved: Callable[[], Iterable[Tensor]]) -> None:
        self._saved = saved
        self._known: set[int] | None = None

    def __call__(self, tensor: Tensor) -> bool:
        if self._known is None:
            self._known = {_memory(each) for each in self._saved()} - {0}
        return _memory(tensor) in self._known


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none that can be told."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):  # a sparse, meta, wrapped or lazy one
        return 0


CALLABLES = re.compile(r"(?:(?:func|__self__|args\[\d+\]|keywords\['[^']*'\])(?:\.|$))+")
"""The begin of a path through bound methods and ``functools.partial``."""


def _past_callables(path: str, root: Any) -> str:
    """The path below the object that a bound method or a partial calls, or is given; empty for that object itself."""
    if type(root) in HOLDERS and CALLABLES.match(path):
        return CALLABLES.sub("", path, count=1)
    return path


def _attribute(path: str, last: bool) -> str:
    """The name of the first attribute in a path, or the last."""
    names = [each.partition("[")[0].partition("{")[0] for each in path.split(".")]
    return names[-1 if last else 0]
