"""loopkit: a training-loop engine for PyTorch, with everything but the loop in plugins."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loopkit import interrupts as _interrupts  # noqa: F401  # before torch is imported
from loopkit.engine.epoch import Epoch
from loopkit.engine.step import Step
from loopkit.errors import CancelEpoch, CancelFit, CancelStep, LoopkitError
from loopkit.events import Event
from loopkit.every import every
from loopkit.generators import seed_everything
from loopkit.hooks import hookimpl
from loopkit.lazy import lazily
from loopkit.learner import Learner, standard_by
from loopkit.options import fresh
from loopkit.phases import Phase, PredictionPhase, TrainingPhase, ValidationPhase
from loopkit.progress import Progress
from loopkit.result import FitResult, Planned
from loopkit.version import __version__ as __version__

if TYPE_CHECKING:
    from loopkit.discovery import load_plugin
    from loopkit.distributed.launch import launch

__getattr__ = lazily(__name__, "criteria", "discovery", "distributed", "groups", "metrics", "plugins", "schedules")
__all__ = [
    "CancelEpoch",
    "CancelFit",
    "CancelStep",
    "Epoch",
    "Event",
    "FitResult",
    "Learner",
    "LoopkitError",
    "Phase",
    "Planned",
    "PredictionPhase",
    "Progress",
    "Step",
    "TrainingPhase",
    "ValidationPhase",
    "every",
    "fresh",
    "hookimpl",
    "launch",
    "load_plugin",
    "seed_everything",
]


def _standard_set(given: Iterable[Any]) -> list[Any]:
    from loopkit.plugins import standard_set  # not before it is asked for

    return standard_set(given)


standard_by(_standard_set)
__dir__ = __all__.copy
