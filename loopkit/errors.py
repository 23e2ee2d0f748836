"""The exceptions of loopkit: errors, and the signals that cancel a step, an epoch or a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ArgumentError",
    "CallError",
    "Cancel",
    "CancelEpoch",
    "CancelFit",
    "CancelStep",
    "CheckpointError",
    "CorruptCheckpointError",
    "EmptyDataError",
    "EventError",
    "ExhaustedIteratorError",
    "FormatVersionError",
    "LogError",
    "LoopkitError",
    "LossError",
    "NonFiniteError",
    "OrderError",
    "PeerError",
    "PhaseError",
    "PhaseInputError",
    "PluginConflict",
    "PluginError",
    "ReentrancyError",
    "StateError",
    "StepResultError",
    "StepStateError",
    "UnknownNameError",
    "WorldError",
]
__dir__ = __all__.copy


class LoopkitError(Exception):
    """Base of every error that loopkit raises itself."""


class ArgumentError(LoopkitError, ValueError):
    """An argument has a value that it cannot have, such as ``epochs=-1``."""


class CallError(LoopkitError, TypeError):
    """A call has an unknown argument, too many of them, or lacks one, such as ``fit(train, updates=100)``."""


class UnknownNameError(LoopkitError, KeyError):
    """No model, optimizer, phase, plugin or metric has this name, as in ``learner.models["gen"]``."""

    __str__ = Exception.__str__
    """The message as it is; a ``KeyError`` would show it in quotes."""


class EventError(LoopkitError, ValueError):
    """An event is badly named, defined twice, or emitted by a phase that does not declare it."""


class PluginError(LoopkitError, ValueError):
    """A plugin cannot be registered as it is: its name, a hook, an argument or a declaration is wrong."""


class PluginConflict(PluginError):
    """Two plugins own the same thing or implement the same replacement."""


class OrderError(PluginError):
    """The order of two or more plugins is ambiguous or contradictory."""


class PhaseError(LoopkitError, ValueError):
    """A phase is misused: an unknown name, a call in the wrong place."""


class PhaseInputError(PhaseError):
    """A batch is not what the phase can take."""


class StepResultError(PhaseError):
    """A phase's ``step`` returned something, or never did what its phase is for."""


class StepStateError(LoopkitError, AttributeError):
    """A step's attribute is read before the phase has set it."""


class LossError(LoopkitError, ValueError):
    """The loss cannot be differentiated: no tensor, no scalar, or no gradient."""


class NonFiniteError(LoopkitError, ArithmeticError):
    """A loss or a gradient is infinite or not a number."""


class EmptyDataError(LoopkitError, ValueError):
    """The data holds no batch."""


class ExhaustedIteratorError(EmptyDataError):
    """An iterator that can be passed over only once was used for a second epoch."""


class ReentrancyError(LoopkitError, RuntimeError):
    """``fit`` was called while a fit was running, or a training phase inside an open window."""


class StateError(LoopkitError, ValueError):
    """A part of the state cannot be saved, or a saved one does not fit here."""


class CheckpointError(LoopkitError, OSError):
    """A checkpoint cannot be written, found or used."""

    def __reduce__(self) -> tuple[Any, ...]:
        made = (*super().__reduce__(), None)
        return made[0], made[1], {**vars(self), "errno": self.errno}  # else another process would not know it


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, cut, changed or malformed."""


class FormatVersionError(CheckpointError):
    """A checkpoint was written by a newer loopkit."""


class LogError(LoopkitError, ValueError):
    """Something cannot be logged, or a log not be written or read as it was asked for."""


class WorldError(LoopkitError, RuntimeError):
    """Processes that train together cannot meet, differ in their settings, or cannot do a requested operation."""


class PeerError(WorldError):
    """Another process died, hung, raised, or came to its end before this one."""


class Cancel(Exception):
    """Base of the signals; raise one of its subclasses, with the reason as its argument."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.by = ""
        """The plugin or phase that raised it, filled in by the engine."""


class CancelStep(Cancel):
    """End this step: ``step_cancelled`` fires, then the next step runs."""


class CancelEpoch(Cancel):
    """End this epoch: ``step_cancelled``, ``epoch_end``, ``phase_end``, then the next phase runs."""


class CancelFit(Cancel):
    """End the fit: ``step_cancelled``, ``epoch_end``, ``phase_end``, ``fit_end``; no error."""


def rank(error: BaseException) -> int:
    """The rank of an error where two meet; the higher is raised: interrupts and exits, errors, then cancels."""
    kinds = (CancelStep, CancelEpoch, CancelFit, Exception, BaseException)
    return next(rank for rank, kind in enumerate(kinds) if isinstance(error, kind))


def strongest(cancels: Sequence[Cancel]) -> Cancel:
    """The cancel that ends the most; the first of its kind."""
    for kind in (CancelFit, CancelEpoch):
        for cancel in cancels:
            if isinstance(cancel, kind):
                return cancel
    return cancels[0]
