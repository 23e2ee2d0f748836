"""Extras: modules and parameters beside the models: those of the loss function, of phases and of plugins."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from loopkit.base import sharded
from loopkit.base.kinds import MAPPING, NAMED, wrong
from loopkit.base.notes import locate, warn
from loopkit.base.words import nearest
from loopkit.engine.kept.buffers import put_buffers, strange_buffers, unsaved_buffers
from loopkit.engine.kept.compiled import unwrapped
from loopkit.engine.kept.differences import first, names
from loopkit.engine.kept.part import Part
from loopkit.engine.kept.witness.looks import is_left, is_shut
from loopkit.engine.kept.witness.walk import HOLDERS, MAPPINGS, SEQUENCES, Found, HeldBy, walk
from loopkit.errors import StateError

SAVED = {"tensors": MAPPING, "buffers": MAPPING}
LOSS = "loss function"
CONTAINERS = (*MAPPINGS, *SEQUENCES, *HOLDERS)
"""Kinds that are looked into, as attributes are; not sets, whose items have no names."""
OF_METRICS = ("update", "compute", "reset")
"""Methods of modules that are metrics, which measure an epoch and begin anew."""


class Owner(NamedTuple):
    """An object that may hold modules beside the models."""

    name: str
    """``"loss function"``, ``"phase <name>"`` or ``"plugin <name>"``."""
    object: Any
    saves: Collection[str] | None
    """The attributes that it saves itself; None: it has a state of its own, so all of them."""
    trained: bool = False
    """Whether only those count that an optimizer trains."""
    held_by: HeldBy | None = None
    """Yields what its functions hold; without it, functions are not looked into."""


class Extras(Part):
    """The modules that the loss function, phases and plugins hold, by their owners: saved as the models are.

    A module that belongs to a model is not one of them. Parameters that stand in an attribute are taken, too, and other
    tensors that need a gradient.

    Args:
        models: The models.
    """

    name = "extras"
    what = "the modules of the loss function, phases and plugins"
    optional = True

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = models
        self.modules: dict[str, nn.Module] = {}
        """All of them, by owner; each owner's stand in one module."""
        self._made: dict[str, tuple[list[int], nn.Module]] = {}
        """The modules made of the parts of an owner, while the parts stay the same."""
        self._kept: dict[str, nn.Module] = {}
        """The modules that no owner saves itself."""
        self._found: list[tuple[Owner, dict[str, Any]]] = []
        """Each owner with the parts of it that it does not save itself, by path."""
        self._late: set[str] = set()
        """Modules that were named, since they were made too late to be saved."""
        self._waiting: dict[str, Any] = {}
        """The loaded states of phases that have not run yet."""

    def find(self, owners: Iterable[Owner], trained: Collection[int]) -> None:
        """Look for them anew; a phase whose part of a loaded state waits for it gets that now.

        Args:
            owners: The objects that may hold some.
            trained: The ids of the tensors that optimizers train.
        """
        self.modules = {}
        self._kept = {}
        self._found = []
        for owner, own, kept in self._search(owners, trained):
            self._found.append((owner, kept))
            whole = self._together(owner, {**own, **kept})
            if whole is not None:
                self.modules[owner.name] = whole
            saved = self._together(owner, kept, " ") if own else whole
            if saved is not None and not _is_empty(saved):
                self._kept[owner.name] = saved
        for name in self._waiting.keys() & self._kept.keys():
            self._put(name, self._waiting.pop(name))

    def _search(
        self, owners: Iterable[Owner], trained: Collection[int] | None
    ) -> Iterator[tuple[Owner, dict[str, Any], dict[str, Any]]]:
        """Yield each owner with the parts that it saves itself and the others; a part belongs to its first owner."""
        known = {id(each) for model in self._models.values() for each in _all(model)}
        for owner in owners:
            own, kept = _parts(owner, known)
            if owner.trained and trained is not None:
                own = _trained(own, trained)
                kept = _trained(kept, trained)
            known |= {id(part) for part in (*own.values(), *kept.values())}
            yield owner, own, kept

    def _renew(self) -> None:
        """Take the modules that stand now where others stood; name those that were made where there was none."""
        owners = [owner for owner, _ in self._found]
        before = {owner.name: kept for owner, kept in self._found}
        for owner, _, now in self._search(owners, None):
            known = before[owner.name]
            if not owner.trained:
                late = {path: part for path, part in now.items() if path not in known}
                self._name_late(owner, late)
            replaced = {path: now[path] for path, part in known.items() if now.get(path, part) is not part}
            if replaced and owner.name in self._kept:
                known.update(replaced)
                whole = self._together(owner, known, " ")
                if whole is not None:
                    self._kept[owner.name] = whole

    def _name_late(self, owner: Owner, parts: Mapping[str, Any]) -> None:
        for path, part in parts.items():
            name = f"{owner.name}.{path}"
            if name in self._late or not isinstance(part, nn.Module) or _is_empty(part):
                continue
            self._late.add(name)
            kind = type(owner.object).__name__
            warn(
                f"{in_words(owner.name)} ({kind}) has made its {path!r} since the fit began, "
                f"and no checkpoint holds that: a resumed run starts without it. Make the module in __init__; for a "
                f"cache, volatile = ({_attribute(path)!r},)"
            )

    def _together(self, owner: Owner, parts: Mapping[str, Any], mark: str = "") -> nn.Module | None:
        """One module of an owner's parts, the same one as before if they are the same."""
        key = owner.name + mark
        ids = [id(part) for part in parts.values()]
        before, made = self._made.get(key, ([], None))
        if made is None or before != ids:
            made = _together(owner.object, parts)
        if made is not None:
            self._made[key] = ids, made
        return made

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules themselves, each with the beginning of the names in it."""
        for owner, module in self.modules.items():
            if not isinstance(module, _Together):
                yield f"{owner}.", module
                continue
            for name, part in module.named_children():
                yield f"{owner}.{name}.", part

    def saved(self, whole: bool = True) -> dict[str, Any] | None:
        """Return their tensors by owner."""
        self._renew()
        gather = sharded.whole if whole else dict
        found = dict(self._waiting)
        for name, module in self._kept.items():
            tensors = sharded.weights(module, gather)
            buffers = unsaved_buffers(module)
            found[name] = {
                "tensors": {key: _plain(value) for key, value in tensors.items()},
                "buffers": {key: buffer.detach() for key, buffer in buffers.items()},
            }
        return found or None

    def malformed(self, saved: Any) -> list[str]:
        """List what in a saved form no learner could have saved."""
        problems = wrong("", {"extras": saved}, {"extras": NAMED})
        if problems:
            return problems
        for name, each in saved.items():
            problems += wrong(f"extras.{name}", each, SAVED, more=False)
        return problems

    def problems(self, saved: Mapping[str, Any], allow: Collection[str] = ()) -> list[str]:
        """Compare a saved form with the one here.

        Args:
            saved: The form.
            allow: Plugins whose part may be missing here.
        """
        self._renew()
        allowed = {f"plugin {name}" for name in allow}
        gone = []
        for name in saved:
            may_come_later = name.startswith("phase ")
            if name not in self._kept and name not in allowed and not may_come_later:
                gone.append(f"{name!r}{nearest(name, self._kept)}")
        problems = first("owners of modules in the state that hold none here", gone)
        for name, module in self._kept.items():
            if name in saved:
                problems += _problems(name, module, saved[name])
        return problems

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Put a saved form back into the tensors that are there; return the undo.

        A state that lacks some of them is of an earlier loopkit or program: these stay as they are, and are named.
        """
        before = {name: _copies(module) for name, module in self._kept.items()}

        def undo() -> None:
            for name, copies in before.items():
                _put_copies(self._kept[name], copies)

        self._waiting = {name: each for name, each in saved.items() if name not in self._kept}
        try:
            for name in self._kept:
                if name in saved:
                    self._put(name, saved[name])
                else:
                    warn(f"the state holds no parameters of {in_words(name)}: they begin as this program made them")
        except BaseException:
            undo()
            raise
        return undo

    def _put(self, name: str, saved: Mapping[str, Any]) -> None:
        module = self._kept[name]
        problems = _problems(name, module, saved)
        if problems:
            raise StateError("the state does not fit: " + "; ".join(problems))
        own = module.state_dict()
        try:
            with torch.no_grad():
                tensors = {key: sharded.like(value, own[key]) for key, value in saved["tensors"].items()}
                module.load_state_dict(tensors)
                put_buffers(module, saved["buffers"])
        except Exception as error:
            locate(error, f"in load_state_dict of {in_words(name)}")
            raise


def _parts(owner: Owner, known: Collection[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The modules and tensors of an owner by path: those that it saves itself, and the others."""
    own: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    left = set(known)

    def enter(found: Found) -> bool:
        return id(found.value) not in left and not isinstance(found.value, nn.Module)

    for found in walk(owner.object, enter=enter, held_by=owner.held_by):
        value = found.value
        if found.owner is not None and _is_shut(found):
            left.add(id(value))
            continue
        if id(value) in left or not (_is_extra(value, known) or _may_be_trained(value)):
            continue
        left.add(id(value))
        part = unwrapped(value) if isinstance(value, nn.Module) else value
        if owner.saves is None or _attribute(found.path) in owner.saves:
            own[found.path] = part
        else:
            kept[found.path] = part
    return own, kept


def _attribute(path: str) -> str:
    """The attribute of an owner in which a path begins: ``"heads"`` of ``"heads[0].weight"``."""
    return path.partition(".")[0].partition("[")[0]


def _all(module: nn.Module) -> Iterator[Any]:
    """A module with its parts, parameters and buffers."""
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()


def _is_extra(value: Any, known: Collection[int]) -> bool:
    """Whether a value is a module that adds something: no metric, and nothing around modules that are known."""
    if not isinstance(value, nn.Module):
        return False
    is_metric = all(callable(getattr(type(value), name, None)) for name in OF_METRICS)
    if is_metric:
        return False
    tensors = [*value.parameters(), *value.buffers()]
    return not tensors or any(id(each) not in known for each in tensors)


def _trained(parts: Mapping[str, Any], trained: Collection[int]) -> dict[str, Any]:
    """Return the parts of an owner that an optimizer trains."""
    found = {}
    for path, part in parts.items():
        tensors: Iterable[Tensor] = part.parameters() if isinstance(part, nn.Module) else [part]
        if any(id(each) in trained for each in tensors):
            found[path] = part
    return found


def _is_shut(found: Found) -> bool:
    value = found.value
    if is_left(found.owner, found.key):
        return True
    if isinstance(value, (nn.Module, Tensor, types.FunctionType)) or type(value) in CONTAINERS:
        return False
    return is_shut(type(value)) or isinstance(value, Optimizer)


def _may_be_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf and (value.requires_grad or isinstance(value, nn.Parameter))


def _together(root: Any, parts: Mapping[str, Any]) -> nn.Module | None:
    """One module that holds modules and tensors by path; the owner itself, if it is a module."""
    if isinstance(root, nn.Module):
        return parts.get("")
    if not parts:
        return None
    made = _Together()
    for path, part in parts.items():
        name = path.replace(".", "/")
        if hasattr(made, name):
            name = f"{name}/"
        if isinstance(part, nn.Module):
            made.add_module(name, part)
        else:
            made._parameters[name] = part  # also a tensor that is none: it is trained as one, and stays the same object
    return made


class _Together(nn.Module):
    """Modules and tensors of an owner. A tensor that is moved stays the same object: the owner holds it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Together:
        for module in self.children():
            module._apply(fn)  # type: ignore[no-untyped-call]
        for tensor in self._parameters.values():
            if tensor is not None:
                tensor.data = fn(tensor.data)
        return self


def _is_empty(module: nn.Module) -> bool:
    """Whether there is nothing of a module to save."""
    return not module.state_dict() and not dict(module.named_buffers())


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _problems(name: str, module: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    own = module.state_dict()
    there = saved["tensors"]
    owner = in_words(name)
    strange = strange_buffers(module, saved["buffers"])
    problems = names(f"tensors of {owner}", there, own)
    problems += first(f"buffers of {owner} that are not here", list(map(repr, strange)))
    different = []
    for key, value in own.items():
        if key not in there or not isinstance(value, Tensor):
            continue
        before = _looks(there[key])
        now = _looks(value)
        if before != now:
            different.append(f"{key}: {before} in the state, {now} here")
    return problems + first(f"tensors of {owner} that differ", different)


def _looks(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)}"


def in_words(name: str) -> str:
    """An owner, in words."""
    if name == LOSS:
        return f"the {LOSS}"
    kind, _, own = name.partition(" ")
    return f"{kind} {own!r}"


def _copies(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Copies of the tensors of a module, and of the buffers that its ``state_dict`` leaves out."""
    state = {}
    for key, value in module.state_dict().items():
        if not is_lazy(value):
            state[key] = value.detach().clone() if isinstance(value, Tensor) else value
    buffers = {key: buffer.clone() for key, buffer in unsaved_buffers(module).items()}
    return state, buffers


def _put_copies(module: nn.Module, copies: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    state, buffers = copies
    module.load_state_dict(state, strict=False)
    put_buffers(module, buffers)
