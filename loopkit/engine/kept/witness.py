"""Witness: what a run consists of, looked at when a fit begins and when it is saved: whatever moves is saved or named.

It reads attributes and built-in containers, and runs no code of the user's (`loopkit.engine.kept.walk`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from loopkit.base.notes import warn
from loopkit.base.words import some
from loopkit.engine.kept.data_roots import is_looked_at, name_of_data
from loopkit.engine.kept.looks import Clocks, look, moved
from loopkit.engine.kept.module_looks import ModuleLooks
from loopkit.engine.kept.root import Root

NAMED = 5
"""How many attributes a message names at most."""


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
        """With what of the learner it has looked at all roots."""
        self._named: set[tuple[str, str]] = set()
        """The roots and attributes that were named in this fit."""

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
        if at not in self._seen:
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
        found = {name: paths for name, paths in self._moved().items() if paths}
        return {name: _message(self._records[name].root, paths) for name, paths in found.items()}

    def warn(self) -> None:
        """Warn of what has moved and is in no state, once of each attribute."""
        for name, paths in self._moved().items():
            new = [path for path in paths if (name, path) not in self._named]
            if new:
                self._named.update((name, path) for path in new)
                warn(_message(self._records[name].root, new))

    def _moved(self) -> dict[str, list[str]]:
        is_saved = _Saved(lambda: self._roots().saved())
        return {name: record.moved(is_saved) for name, record in self._records.items()}


class _Record:
    """How a root looked when it was first seen."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._since = Clocks.read()
        self._module = ModuleLooks(root.object, root.leave) if isinstance(root.object, nn.Module) else None
        self._looks = {} if self._module is not None else look(root.object, root.leave, root.scope)

    def moved(self, is_saved: Callable[[Tensor], bool]) -> list[str]:
        if self._module is not None:
            paths = self._module.moved(self._since, is_saved)
            return [path for path in paths if path.rpartition(".")[2] not in self.root.written]
        root = self.root
        return moved(self._looks, look(root.object, root.leave, root.scope), self._since, is_saved, root.scope)


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


def _message(root: Root, paths: list[str]) -> str:
    listed = some([repr(path or "order") for path in paths], NAMED)
    attributes = dict.fromkeys(_attribute(path, last=root.scope.lazy) for path in paths)
    names = "".join(f"{name!r}, " for name in list(attributes)[:NAMED]).removesuffix(" ")
    return (
        f"{root.name} ({type(root.object).__name__}) has changed its {listed} since the fit began, and no "
        f"checkpoint holds that: a resumed run starts without it. {root.cure.format(names)}"
    )


def _attribute(path: str, last: bool) -> str:
    """The name of the first attribute in a path, or the last."""
    names = [each.partition("[")[0].partition("{")[0] for each in path.split(".")]
    return names[-1 if last else 0]
