"""Brackets: the ``fit_begin`` of plugins, and the ``fit_end`` of those that have begun."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from loopkit.errors import Cancel, CancelFit
from loopkit.notes import add_note, locate, shown

if TYPE_CHECKING:
    from loopkit.engine.plan import Implementation
    from loopkit.engine.registry import Registry
    from loopkit.result import FitResult


class Brackets:
    """Which plugins have begun a fit, and have to end it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._ends: list[Implementation] = []
        self._not_begun: set[str] = set()

    def begin(self, names: Collection[str] | None = None) -> CancelFit | None:
        """Fire the ``fit_begin`` of these plugins, or of all; returns the first cancel, which is to end the fit."""
        registry, cancelled = self._registry, None
        brackets = [each for each in registry.brackets if names is None or each[0] in names]
        for name, begin, end in brackets:
            if end is not None:
                self._ends.append(end)
            if begin is not None:
                self._not_begun.add(name)
        for name, begin, _ in brackets:
            if begin is not None:
                try:
                    registry.call(begin)
                except CancelFit as cancel:
                    cancel.by = cancel.by or name
                    cancelled = cancelled or cancel
                except BaseException as error:
                    locate(error, f"in fit_begin of plugin {name!r}")
                    raise
                self._not_begun.discard(name)
        return cancelled

    def forget(self, plugins: dict[str, Any]) -> None:
        """Take plugins whose begin failed out again."""
        failed = [plugins[name] for name in plugins if name in self._not_begun]
        self._ends = [impl for impl in self._ends if not any(impl.plugin is each for each in failed)]
        self._not_begun -= set(plugins)

    def end(self, result: FitResult, failure: BaseException | None) -> None:
        """Call every ``fit_end`` whose ``fit_begin`` was completed, then raise what there is to raise."""
        errors: list[BaseException] = []
        for impl in reversed(self._ends):
            if impl.entry.plugin not in self._not_begun:
                try:
                    self._registry.call(impl, result=result)
                except Cancel:
                    pass  # the fit has ended already
                except BaseException as error:
                    locate(error, f"in fit_end of plugin {impl.entry.plugin!r}")
                    if error is not failure:
                        errors.append(error)
        if failure is None and len(errors) == 1:
            raise errors[0]
        if errors and (failure is None or isinstance(failure, Exception)):
            causes = errors if failure is None else [failure, *errors]
            raise BaseExceptionGroup("fit_end failed" if failure is None else "the fit failed, then fit_end", causes)
        if failure is not None:
            for late in errors:
                add_note(failure, f"loopkit: fit_end failed too: {shown(late)}")
            raise failure
