"""Brackets: the ``fit_begin`` of plugins, and the ``fit_end`` of all that have begun."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from loopkit.base.notes import add_note, locate, shown
from loopkit.base.shield import Shield
from loopkit.errors import Cancel, CancelFit

if TYPE_CHECKING:
    from loopkit.engine.compile.plan import Implementation
    from loopkit.engine.compile.registry import Registry
    from loopkit.result import FitResult


class Brackets:
    """Which plugins have begun a fit, and have to end it.

    Args:
        registry: The plugins.
        around: Makes a context for the ``fit_begin`` of a plugin, of this name.
    """

    def __init__(self, registry: Registry, around: Callable[[Any, str], AbstractContextManager[None]]) -> None:
        self._registry = registry
        self._around = around
        self._ends: list[Implementation] = []
        self._waiting: set[str] = set()
        """The plugins whose ``fit_begin`` has not come yet."""
        self._broken: set[str] = set()
        """The plugins whose ``fit_begin`` was entered and not completed."""

    def begin(self, names: Collection[str] | None = None) -> CancelFit | None:
        """Fire the ``fit_begin`` of these plugins, or of all; returns the first cancel, which is to end the fit."""
        registry = self._registry
        cancelled = None
        joins = names is not None and not self._broken
        brackets = [each for each in registry.brackets if names is None or each[0] in names]
        for name, begin, end in brackets:
            if begin is not None:
                self._waiting.add(name)
            if end is not None:
                self._ends.append(end)
        for name, begin, _ in brackets:
            if begin is not None:
                self._broken.add(name)
                self._waiting.discard(name)
                try:
                    with nullcontext() if joins else self._around(begin.plugin, name):
                        registry.call(begin)
                except CancelFit as cancel:
                    cancel.by = cancel.by or name
                    cancelled = cancelled or cancel
                except BaseException as error:
                    locate(error, f"in fit_begin of plugin {name!r}")
                    raise
                self._broken.discard(name)
        return cancelled

    def forget(self, plugins: dict[str, Any], result: FitResult, error: BaseException) -> None:
        """Take plugins whose begin failed out again; one whose ``fit_begin`` was entered gets its ``fit_end`` now."""
        failed = [plugins[name] for name in plugins if name in self._waiting or name in self._broken]
        ends = [impl for impl in self._ends if any(impl.plugin is each for each in failed)]
        self._ends = [impl for impl in self._ends if impl not in ends]
        self._note(error, self._call(ends, result, error))
        self._waiting -= set(plugins)
        self._broken -= set(plugins)

    def end(self, result: FitResult, failure: BaseException | None) -> None:
        """Call every ``fit_end`` whose ``fit_begin`` was entered, then raise what there is to raise.

        What the ``fit_end`` of a plugin raises whose ``fit_begin`` has failed is noted on that failure.
        """
        errors = self._call(self._ends, result, failure)
        if failure is None:
            self._raise_late(errors)
        elif errors and isinstance(failure, Exception):
            raise BaseExceptionGroup("the fit failed, then fit_end", [failure, *errors])
        else:
            self._note(failure, errors)
            raise failure

    def _raise_late(self, errors: list[BaseException]) -> None:
        """Raise errors of ``fit_end`` after a fit without one: several as a group, unless all are interrupts."""
        if len(errors) > 1 and any(isinstance(error, Exception) for error in errors):
            raise BaseExceptionGroup("fit_end failed", errors)
        if errors:
            self._note(errors[0], errors[1:])
            raise errors[0]

    def _call(
        self, ends: Sequence[Implementation], result: FitResult, failure: BaseException | None
    ) -> list[BaseException]:
        """Call these in reverse; returns what they raise, unless that is the failure itself, or noted on it."""
        errors: list[BaseException] = []
        for impl in reversed(ends):
            name = impl.entry.plugin
            if name in self._waiting:
                continue
            try:
                with Shield():  # two interrupts are counted, the third one is raised here
                    self._registry.call(impl, result=result)
            except Cancel:
                pass  # the fit has ended already
            except BaseException as error:
                locate(error, f"in fit_end of plugin {name!r}")
                if error is failure:
                    continue
                if failure is not None and name in self._broken and isinstance(error, Exception):
                    self._note(failure, [error])
                else:
                    errors.append(error)
        return errors

    @staticmethod
    def _note(failure: BaseException, errors: Sequence[BaseException]) -> None:
        """Note on an error the others that were raised."""
        for late in errors:
            add_note(failure, f"loopkit: fit_end failed too: {shown(late)}")
