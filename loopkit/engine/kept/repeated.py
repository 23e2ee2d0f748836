"""Repeated: the hooks of an epoch's begin run again when it resumes, and what they change of the state is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from loopkit.base.notes import warn
from loopkit.base.words import some
from loopkit.engine.kept.cells import Change, by_version, is_same, of_tensors, of_value
from loopkit.engine.kept.open_epoch import OpenEpoch
from loopkit.engine.kept.parts import Parts
from loopkit.engine.kept.witness.libraries import is_shipped

Kept = list[tuple[str, Change]]
"""Parts of the state that a hook may change, each with its name."""


class ResumedFit(Protocol):
    """A fit, which may be resumed."""

    times_asked: int

    @property
    def resumed(self) -> bool:
        """Whether it resumes a saved or interrupted one."""


class Repeated:
    """Lets hooks of ``epoch_begin`` run a second time, without a second change of the state that was loaded.

    Args:
        parts: The entries of a state.
        tensors: Returns the tensors of modules that are saved.
        parameters: Returns the parameters by name.
        say: Prints a line once.
    """

    def __init__(
        self,
        parts: Parts,
        tensors: Callable[[], Iterable[Tensor]],
        parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        say: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._tensors = tensors
        self._parameters = parameters
        self._say = say
        self._kept: Kept | None = None
        """The state as it is after a hook that has left it as it was, for the next hook of the same begin."""

    @contextmanager
    def of(self, epoch: OpenEpoch, plugin: Any, name: str) -> Iterator[None]:
        """Inside, a hook of a plugin runs at the begin of an epoch, which may be resumed."""
        kept = self._kept
        self._kept = None
        if not epoch.resumed or is_shipped(plugin) or self._is_new(name):
            yield
            return
        kept = kept or [*self._of_learner(of_tensors), *self._of_epoch(epoch)]
        begun = bool(epoch.saved and epoch.saved["steps"])
        asked = epoch.times_asked
        yield
        if epoch.times_asked != asked:
            return
        changed = [what for what, has_changed in kept if has_changed(begun)]
        self._kept = None if changed else kept
        if changed and not begun:
            self._say(
                f"plugin {name!r}: epoch_begin runs in an epoch that was saved before its first step, and changed "
                f"{_listed(changed)}, which the loaded state may hold as changed already: the change stays. If "
                f"the state is saved after a step, the hook changes it once"
            )
        elif changed:
            self._say(
                f"plugin {name!r}: epoch_begin runs again when an epoch resumes, and changed {_listed(changed)}, which "
                f"the loaded state holds as changed already: it was put back. If epoch_begin reads "
                f"epoch.resumed, its changes are kept"
            )

    def forget(self) -> None:
        """The begin of an epoch is over."""
        self._kept = None

    @contextmanager
    def of_fit(self, fit: ResumedFit, plugin: Any, name: str) -> Iterator[None]:
        """Inside, the ``fit_begin`` of a plugin runs, which may come again in a resumed fit."""
        if not fit.resumed or is_shipped(plugin) or self._is_new(name):
            yield
            return
        kept = self._of_learner(by_version)
        asked = fit.times_asked
        yield
        changed = [what for what, has_changed in kept if has_changed(False)]
        if changed and fit.times_asked == asked:
            warn(
                f"plugin {name!r}: fit_begin runs again when a fit resumes, and changed {_listed(changed)}, which the "
                f"loaded state may hold as changed already. If it is to do so only once, let it check "
                f"learner.current.resumed"
            )

    def _is_new(self, name: str) -> bool:
        """Whether the loaded state lacks a plugin that has a state, whose hooks then run for the first time."""
        return name in self._parts.plugins.lacking

    def _of_learner(self, tensors: Callable[[Iterable[Tensor]], Change]) -> Kept:
        """Keep all that a hook may change of the learner, the tensors by this function."""
        parts = self._parts
        kept: Kept = [("the weights", tensors(self._tensors()))]
        for name, optimizer in parts.optimizers.items():
            looks = [partial(_options, optimizer, index) for index in range(len(_groups(optimizer)))]
            looks.append(partial(getattr, optimizer, "state", None))
            kept += [(f"optimizer {name!r}", of_value(look, tensors)) for look in looks]
        kept.append(("which parameters are trained", self._flags()))
        for name, plugin in parts.plugins.stateful().items():
            if not is_shipped(plugin):
                kept.append((f"plugin {name!r}", _of_state(plugin.state_dict, plugin.load_state_dict)))
        kept.append(("the phases", _of_state(parts.phases.saved, parts.phases.load)))
        kept.append(("the counters", _of_state(parts.counts.saved, parts.counts.load)))
        return kept

    def _of_epoch(self, epoch: OpenEpoch) -> Kept:
        stores = [of_value(partial(_itself, store)) for store in epoch.stores()]
        gradients = [_of_gradient(p) for window in epoch.windows if window.count for p in window.params]
        return [*(("epoch.store", each) for each in stores), *(("gradients", each) for each in gradients)]

    def _flags(self) -> Change:
        flags = self._parts.flags
        steps = flags.accumulate
        trained = [(p, p.requires_grad) for _, p in self._parameters()]

        def has_changed(undo: bool) -> bool:
            changed = [(p, flag) for p, flag in trained if p.requires_grad is not flag]
            for p, flag in changed if undo else ():
                p.requires_grad = flag
            if undo and flags.accumulate != steps:
                flags.set_accumulate(steps)
                return True
            return bool(changed) or flags.accumulate != steps

        return has_changed


def _listed(changed: list[str]) -> str:
    return some([*dict.fromkeys(changed)])


def _itself(value: Any) -> Any:
    return value


def _groups(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", [])
    return groups if isinstance(groups, list) else []


def _options(optimizer: Any, index: int) -> Any:
    """The options of a group, which may be another dict than before; None if there is no such group."""
    groups = _groups(optimizer)
    return groups[index] if index < len(groups) else None


def _of_state(save: Callable[[], Any], load: Callable[[Any], Any]) -> Change:
    try:
        before = deepcopy(save())
    except Exception:  # it has none yet
        return lambda undo: False

    def has_changed(undo: bool) -> bool:
        if is_same(save(), before):
            return False
        if undo:
            load(before)
        return True

    return has_changed


def _of_gradient(param: Tensor) -> Change:
    grad = param.grad
    if grad is None:
        return lambda undo: False
    values = of_tensors([grad])

    def has_changed(undo: bool) -> bool:
        changed = values(undo) or param.grad is not grad
        if undo:
            param.grad = grad
        return changed

    return has_changed
