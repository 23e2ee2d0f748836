"""Modes: optimizers with a training and an evaluation form of the weights, such as schedule-free ones, switched."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from loopkit.base import sharded
from loopkit.base.kinds import NAMED
from loopkit.engine.kept.part import Part
from loopkit.engine.kept.swapped import MISSING, Swapped

TRAIN, EVAL = "train", "eval"
BY = "optimizer.eval"
"""The name of the evaluation form in `Weights.by`; no plugin can be called so."""
PLAIN = (type(None), bool, int, float, str, Tensor)
"""Types of attributes and options that a switch may change."""
Replaced = Callable[[Callable[[], None], Callable[[], None], str], AbstractContextManager[None]]


class Modes(Part):
    """The optimizers of which ``train()`` and ``eval()`` are called around training and validation, and their modes.

    In an epoch that does not train, the evaluation form stands in the place of the weights, as an average does. The
    values that a switch changes are kept, so that a save needs no switch: it holds the training form as it is.

    Args:
        optimizers: The learner's, by name.
        wanted: Whether they are switched; False leaves it to the user.
        owner: Returns the plugin that owns the weights with an average, to which the switches are left; empty without.
    """

    name = "modes"
    what = "the modes of optimizers"
    kind = NAMED
    optional = True

    def __init__(
        self, optimizers: Mapping[str, Any], wanted: bool = True, owner: Callable[[], str] = lambda: ""
    ) -> None:
        self.wanted = wanted
        self.owner = owner
        self.optimizers = {name: each for name, each in optimizers.items() if has_modes(each)}
        """The optimizers that have modes, by name."""
        self._now: dict[str, str] = {}
        self._attributes: dict[str, set[str]] = {name: set() for name in self.optimizers}
        """The attributes of each that its switches change, which may be in none of its states."""
        self._still: dict[str, set[str]] = {name: set() for name in self.optimizers}
        """The tensors of its state that its switches leave alone, by name."""

    @property
    def serves(self) -> bool:
        """Whether these are switched, beside the plugins that there are now."""
        return self.wanted and bool(self.optimizers) and not self.owner()

    @property
    def evaluated(self) -> bool:
        """Whether all are in evaluation mode, by the last call."""
        return all(self._now.get(name) == EVAL for name in self.optimizers)

    def switch(self, mode: str) -> None:
        """Switch the ones in the other mode, for good."""
        for name, optimizer in self.optimizers.items():
            if self._now.get(name) == mode:
                continue
            with torch.no_grad():
                before = _plain(vars(optimizer))
                getattr(optimizer, mode)()
            self._attributes[name] |= _changed(before, vars(optimizer))
            self._now[name] = mode

    @contextmanager
    def in_place(self, replaced: Replaced, stays: bool) -> Iterator[None]:
        """Inside, the evaluation form stands in the weights' place.

        Args:
            replaced: `Weights.replaced` of the models.
            stays: ``train()`` is called at the end, as in a loop by hand. Else all is then as it was, bit for bit.
        """
        forms = []
        for name, optimizer in self.optimizers.items():
            if self._now.get(name) != EVAL:
                forms.append(_Form(optimizer, self._still[name], lend=not stays))
        modes = dict(self._now)
        evaluated = dict.fromkeys(self.optimizers, EVAL)
        first = [True]

        def put() -> None:
            if first:
                first.clear()
                self._evaluate(forms, modes)
            else:
                self._exchange(forms, evaluated)

        with replaced(put, lambda: self._exchange(forms, modes), BY):
            yield
        if stays:
            self._exchange(forms, evaluated)
            self.switch(TRAIN)

    def _evaluate(self, forms: list[_Form], modes: Mapping[str, str]) -> None:
        try:
            self.switch(EVAL)
        except BaseException:
            for form in forms:
                form.compare()
            self._exchange(forms, modes)
            raise
        for form in forms:
            form.compare()

    def _exchange(self, forms: list[_Form], modes: Mapping[str, str]) -> None:
        for form in forms:
            form.exchange()
        self._now = dict(modes)

    def receive(self) -> None:
        """Switch to evaluation, before weights are put in place for good that a phase has measured."""
        if self.serves:
            self.switch(EVAL)

    def explained(self) -> list[str]:
        """Say in words what is called; a line for each optimizer with modes."""
        lines = []
        owner = self.owner()
        for name, optimizer in self.optimizers.items():
            said = "train() before training, eval() around each phase that does not train, whose weights are measured"
            if not self.wanted:
                said = "its train() and eval() are left to you: Learner(optimizer_modes=False)"
            elif owner:
                said = f"its train() and eval() are left to plugin {owner!r}, which owns the weights"
            lines.append(f"optimizer {name!r} ({type(optimizer).__name__}): {said}")
        return lines

    def attributes(self, name: str) -> Collection[str]:
        """Return the attributes of an optimizer that its switches change; a state holds them."""
        return self._attributes.get(name, ())

    # What is saved

    def saved(self, whole: bool = True) -> dict[str, Any] | None:
        """Return the mode of each that was switched, with the attributes that a switch changes."""
        if not self.optimizers:
            return None
        saved = {}
        for name, optimizer in self.optimizers.items():
            mode = self._now.get(name)
            if mode is not None:
                changed = sorted(self._attributes[name])
                attributes = {key: vars(optimizer).get(key) for key in changed}
                saved[name] = {"mode": mode, "attributes": attributes}
        return saved

    def problems(self, saved: Any, allow: Collection[str] = ()) -> list[str]:
        """List what is not as `saved` makes it."""
        problems = []
        for name, each in saved.items():
            is_mode = each.get("mode") in (TRAIN, EVAL)
            if not is_mode or not isinstance(each.get("attributes"), Mapping):
                problems.append(f"{self.name}.{name} is no mode of an optimizer")
        return problems

    def load(self, saved: Any) -> Callable[[], None]:
        """Take over in which form the weights of a state are; return the undo."""
        before = dict(self._now)
        attributes = {name: dict(vars(each)) for name, each in self.optimizers.items()}
        self._now = {}
        for name, each in saved.items():
            if name in self.optimizers:
                self._now[name] = each["mode"]
                self._attributes[name] |= set(each["attributes"])
                vars(self.optimizers[name]).update(each["attributes"])

        def undo() -> None:
            self._now = before
            for name, optimizer in self.optimizers.items():
                vars(optimizer).update(attributes[name])

        return undo


class _Form(Swapped):
    """The tensors that an optimizer's switch to evaluation changed, and those before: `exchange` swaps them.

    Args:
        optimizer: The optimizer, before the switch.
        still: Names of tensors in its state that no switch changes; `compare` adds to them.
        lend: Let the switch work on copies, so that the tensors of before come back themselves.
    """

    def __init__(self, optimizer: Any, still: set[str], lend: bool) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._still = still
        params = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.pairs = [(p, p.detach().clone()) for p in params.values()]
        self._versions: dict[int, int] = {}
        self._lent: list[tuple[dict[Any, Any], Any]] = []
        self._places = _places(optimizer)
        self._before = [(holder, self._kept(holder, lend)) for holder in _holders(optimizer)]
        if lend:
            sharded.exchange(self.pairs)

    def _kept(self, holder: dict[Any, Any], lend: bool) -> dict[Any, Any]:
        """Return what a mapping holds, with copies of tensors that a switch may change in place."""
        kept = _plain(holder)
        for key, value in kept.items():
            if not isinstance(value, Tensor) or key in self._still:
                continue
            copied = value.detach().clone()
            if lend:
                holder[key] = copied
                self._lent.append((holder, key))
            else:
                kept[key] = copied
            self._versions[id(holder[key])] = holder[key]._version
        return kept

    def compare(self) -> None:
        """After the switch: find what it has changed."""
        moved: set[Any] = set()
        seen: set[Any] = set()
        for holder, before in self._before:
            changed = _changed(before, holder, self._versions)
            lent = {key for lender, key in self._lent if lender is holder}
            for key in changed | lent:
                self.cells.append((holder, key, before.get(key, MISSING)))
            moved |= changed
            seen |= {key for key, value in before.items() if isinstance(value, Tensor)}
        self._still |= seen - moved
        new = _places(self._optimizer)[len(self._places) :]
        for place in new:
            self.cells.append((self._optimizer.state, place, MISSING))
        self._before.clear()


def has_modes(optimizer: Any) -> bool:
    """Whether the class of an optimizer defines ``train`` and ``eval``, which can be called without arguments."""
    return all(_is_callable(optimizer, name) for name in (TRAIN, EVAL))


def _is_callable(optimizer: Any, name: str) -> bool:
    method = inspect.getattr_static(type(optimizer), name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(getattr(optimizer, name)).bind()
    except (TypeError, ValueError):
        return False
    return True


def _holders(optimizer: Any) -> Iterator[dict[Any, Any]]:
    """Yield the mappings in which an optimizer keeps what a switch may change."""
    yield vars(optimizer)
    yield from optimizer.param_groups
    for place in _places(optimizer):
        if isinstance(optimizer.state[place], dict):
            yield optimizer.state[place]


def _places(optimizer: Any) -> list[Any]:
    """Return the keys of its state, in order."""
    state = getattr(optimizer, "state", None)
    return list(state) if isinstance(state, dict) else []


def _plain(holder: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the plain values of a mapping; of options and states, copies of lists of such, too."""
    kept: dict[Any, Any] = {key: value for key, value in holder.items() if isinstance(value, PLAIN)}
    if "param_groups" in holder:  # the attributes of an optimizer
        return kept
    for key, value in holder.items():
        if key == "params" or not isinstance(value, (list, tuple)):
            continue
        if all(isinstance(each, PLAIN) for each in value):
            kept[key] = copy.deepcopy(value)
    return kept


def _changed(
    before: Mapping[Any, Any], holder: Mapping[Any, Any], versions: Mapping[int, int] = MappingProxyType({})
) -> set[Any]:
    """Return the keys of a mapping whose plain values are others than before."""
    now = _plain(holder)
    changed = set()
    for key in {**before, **now}:
        if not _same(before.get(key, MISSING), now.get(key, MISSING), versions):
            changed.add(key)
    return changed


def _same(before: Any, now: Any, versions: Mapping[int, int]) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return _same_tensor(before, now, versions)
    if type(before) is not type(now):
        return False
    if isinstance(before, (list, tuple)):
        if len(before) != len(now):
            return False
        return all(_same(*each, versions) for each in zip(before, now, strict=True))
    return before is now or bool(before == now)


def _same_tensor(before: Tensor, now: Tensor, versions: Mapping[int, int]) -> bool:
    known = versions.get(id(now), now._version)
    if known != now._version or before.shape != now.shape:
        return False
    return torch.equal(sharded.part(before), sharded.part(now))  # host sync: once, to know what a switch changes
