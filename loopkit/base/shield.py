"""Shield: code that an interrupt must not leave half done, such as taking a lock or leaving a context.

During a fit, a second Ctrl-C raises `KeyboardInterrupt` wherever the program is. Inside of a shield it is counted
instead, and raised when the shield is left. A firm shield drops it; whoever opens one looks at the signals afterwards.
"""

from __future__ import annotations

import threading
from types import TracebackType

PATIENCE = 3
"""Which interrupt inside of a shield raises there, in case the program hangs."""


class _Interrupts:
    """The open shields of this process, and the interrupts that came."""

    def __init__(self) -> None:
        self.firm: list[bool] = []
        """Whether each shield that is open is firm, the outermost first."""
        self.count = 0
        """Interrupts since the outermost shield was opened, or one was raised."""
        self.owed: BaseException | None = None
        """The interrupt to raise when the outermost shield is left."""
        self.raised = False
        """Whether one was raised in this fit; from then on only every third one is."""


_state = _Interrupts()


class Shield:
    """A block that an interrupt does not leave half done; in the main thread, where interrupts are raised.

    Args:
        firm: No interrupt is raised inside, but in shields within. For code of the engine that never waits.
    """

    def __init__(self, *, firm: bool = False) -> None:
        self._firm = firm
        self._depth: int | None = None

    def __enter__(self) -> Shield:
        if threading.get_ident() == threading.main_thread().ident:
            depth = len(_state.firm)
            if not depth:
                _state.count = 0
            self._depth = depth
            _state.firm.append(self._firm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth is None:
            return
        del _state.firm[self._depth :]  # with those within that an interrupt has kept from being left
        if self._depth == 0:
            owed = _state.owed
            _state.owed = None
            if owed is not None and error is None and not self._firm:
                _state.raised = True
                raise owed


def begin() -> None:
    """Forget what was shielded: a fit begins that no other one is around."""
    _state.firm.clear()
    _state.owed = None
    _state.raised = False
    _state.count = 0


def raises(error: BaseException, first: bool) -> bool:
    """Whether a signal that has come raises where the program is; for handlers.

    Args:
        error: The error that it would raise.
        first: It is the first one, which only asks for the end.
    """
    if not _state.firm and first:
        return False
    if not _state.firm and not _state.raised:
        _state.raised = True
        return True
    _state.count += 1
    gives_way = not _state.firm or not _state.firm[-1]
    if gives_way and _state.count >= PATIENCE:
        _state.count = 0
        _state.raised = True
        return True
    if not first:
        _state.owed = error
    return False
