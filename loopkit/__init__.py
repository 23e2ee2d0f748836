"""loopkit: a training-loop engine for PyTorch, with everything but the loop in plugins."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loopkit.base import interrupts as _interrupts  # noqa: F401  # before torch is imported
from loopkit.base.generators import seed_everything
from loopkit.base.lazy import lazily
from loopkit.base.options import fresh
from loopkit.base.version import __version__ as __version__
from loopkit.engine.life.epoch import Epoch
from loopkit.engine.step.step import Step
from loopkit.errors import CancelEpoch, CancelFit, CancelStep, LoopkitError
from loopkit.events import Event
from loopkit.every import every
from loopkit.hooks import hookimpl
from loopkit.learner import Learner, standard_by
from loopkit.phases import Phase, PredictionPhase, TrainingPhase, ValidationPhase
from loopkit.progress import Progress
from loopkit.result import FitResult, Planned

if TYPE_CHECKING:
    from loopkit.distributed.launch import launch
    from loopkit.found.discovery import load_plugin

__getattr__ = lazily(__name__, "criteria", "distributed", "groups", "metrics", "plugins", "schedules")
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
