"""Flags: which parameters are trained, and how many steps make an update, where a run has changed them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from loopkit.base.kinds import COUNT, FLAG, LIST, MAPPING, wrong
from loopkit.base.notes import say, warn
from loopkit.base.words import some
from loopkit.engine.kept.part import Part
from loopkit.groups import covers

OWNED = "trainable."
"""The begin of the name of the state that parameters are trained, as plugins own it."""
SAVED = {"frozen": LIST, "changed": MAPPING, "accumulate": LIST}


class Models(Protocol):
    """The parameters and optimizers of a learner."""

    optimizers: dict[str, torch.optim.Optimizer]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter with its name."""


class Flags(Part):
    """The ``requires_grad`` of parameters and ``learner.accumulate``, of which a state holds what a run has changed.

    Parameters whose training a plugin owns, such as the frozen ones of `Freeze`, are left to the plugin.

    Args:
        models: The parameters.
        owned: Returns the names of the states that plugins own.
        notice: Called when the steps of an update have changed.
    """

    name = "flags"
    what = "which parameters are trained"
    optional = True

    def __init__(
        self, models: Models, owned: Callable[[], Collection[str]], notice: Callable[[], None] = lambda: None
    ) -> None:
        self.accumulate = 1
        """Steps per update."""
        self._models = models
        self._owned = owned
        self._notice = notice
        self._began: dict[str, bool] | None = None
        """Whether each parameter was trained when the learner's first fit began."""
        self._steps = 0
        """The steps of an update then."""
        self._groups: dict[str, int] = {}
        """How many groups each optimizer had when the fit began."""

    def set_accumulate(self, steps: int) -> None:
        """Set the steps of an update, from the next window on."""
        self.accumulate = steps
        self._notice()

    @property
    def noted(self) -> bool:
        """Whether a fit has begun, so that a state has them."""
        return self._began is not None

    def forget(self) -> None:
        """The learner's first fit could not begin."""
        self._began = None

    def note(self) -> None:
        """A fit begins."""
        self._groups = self._counts()
        if self._began is None:
            self._began = self._now()
            self._steps = self.accumulate

    def _counts(self) -> dict[str, int]:
        return {name: len(optimizer.param_groups) for name, optimizer in self._models.optimizers.items()}

    def _now(self) -> dict[str, bool]:
        patterns = [name.removeprefix(OWNED) for name in self._owned() if name.startswith(OWNED)]
        flags = {}
        for name, parameter in self._models.named_parameters():
            is_owned = any(covers(pattern, name) for pattern in patterns)
            if not is_owned:
                flags[name] = parameter.requires_grad
        return flags

    def warn(self) -> None:
        """Warn of parameter groups that were added since the fit began: a resume needs them before it loads."""
        for name, count in self._counts().items():
            before = self._groups.get(name, count)
            if count != before:
                self._groups[name] = count
                warn(
                    f"optimizer {name!r} has {count} parameter groups, and had {before} when the fit began: a script "
                    f"that resumes must make them before it loads, or the checkpoint does not fit. Give the optimizer "
                    f"all its groups when it is made, those that are not trained yet with requires_grad=False"
                )

    def saved(self, whole: bool = True) -> dict[str, Any] | None:
        """Return its saved form; None before the first fit."""
        self.warn()
        began = self._began
        if began is None:
            return None
        changed = {name: flag for name, flag in self._now().items() if began.get(name, flag) is not flag}
        return {
            "frozen": [name for name, flag in began.items() if not flag],
            "changed": changed,
            "accumulate": [self._steps, self.accumulate],
        }

    def malformed(self, saved: Any) -> list[str]:
        """List what in a saved form no run could have saved."""
        problems = wrong("flags", saved, SAVED)
        if problems:
            return problems
        steps = saved["accumulate"]
        are_counts = len(steps) == 2 and all(map(COUNT[1], steps))
        are_flags = all(map(FLAG[1], saved["changed"].values()))
        return [] if are_counts and are_flags else ["flags are no flags and counts"]

    def load(self, saved: Mapping[str, Any]) -> Callable[[], None]:
        """Put back what the run has changed, and print where the script begins with another value; return the undo."""
        params = dict(self._models.named_parameters())
        before = {name: p.requires_grad for name, p in params.items()}
        steps = self.accumulate
        began = self._began

        def undo() -> None:
            _set(params, before)
            self.set_accumulate(steps)
            self._began = began

        if not saved:
            return undo
        if self._began is None:
            self._began = self._now()
            self._steps = steps
        changed = {name: flag for name, flag in saved["changed"].items() if name in self._began}
        frozen = set(saved["frozen"])
        other = [name for name, flag in self._began.items() if flag is (name in frozen)]
        for by_run in (False, True):
            differing = [repr(name) for name in other if (name in changed) is by_run]
            if differing:
                _say(f"requires_grad of {some(differing)}", by_run)
        _set(params, changed)
        then, last = saved["accumulate"]
        if then != self._steps:
            _say(f"accumulate ({self._steps} here, {then} there)", last != then)
        if last != then:
            self.set_accumulate(last)
        return undo


def _set(params: Mapping[str, nn.Parameter], flags: Mapping[str, bool]) -> None:
    for name, flag in flags.items():
        if name in params and params[name].requires_grad is not flag:
            params[name].requires_grad = flag


def _say(what: str, changed: bool) -> None:
    why = "has changed it since: the run's holds" if changed else "never changed it: the script's holds"
    say(f"{what} begins otherwise in this script than in the saved run, which {why}")
