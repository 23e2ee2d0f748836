"""The standard plugins, one concern a module. They use only the public API.

An import here is all that makes a class a plugin that ships: its name is the class's in snake case. A module is
imported at the first use of its names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loopkit.base.lazy import homes, lazily
from loopkit.plugin import plugin_name, provided
from loopkit.plugins.call_on import call_on as call_on  # its module has its name, which would stand in its place
from loopkit.plugins.throttle import throttle as throttle

if TYPE_CHECKING:
    from loopkit.checkpoint.save_options import SaveOptions as SaveOptions
    from loopkit.plugins.channels_last import ChannelsLast as ChannelsLast
    from loopkit.plugins.checkpoint import Checkpoint as Checkpoint
    from loopkit.plugins.compile import Compile as Compile
    from loopkit.plugins.ddp import DDP as DDP
    from loopkit.plugins.early_stopping import EarlyStopping as EarlyStopping
    from loopkit.plugins.freeze import EvalMode as EvalMode
    from loopkit.plugins.freeze import Freeze as Freeze
    from loopkit.plugins.gradients import ClipGradNorm as ClipGradNorm
    from loopkit.plugins.gradients import ClipGradValue as ClipGradValue
    from loopkit.plugins.gradients import GradNoise as GradNoise
    from loopkit.plugins.gradients import GradNorm as GradNorm
    from loopkit.plugins.history import History as History
    from loopkit.plugins.log_hyperparameters import LogHyperparameters as LogHyperparameters
    from loopkit.plugins.log_metrics import LogMetrics as LogMetrics
    from loopkit.plugins.log_to import LogTo as LogTo
    from loopkit.plugins.metrics import Metrics as Metrics
    from loopkit.plugins.mixed_precision import MixedPrecision as MixedPrecision
    from loopkit.plugins.progress import Progress as Progress
    from loopkit.plugins.sanity_check import SanityCheck as SanityCheck
    from loopkit.plugins.schedule import Plateau as Plateau
    from loopkit.plugins.schedule import Schedule as Schedule
    from loopkit.plugins.schedule import TorchSchedule as TorchSchedule
    from loopkit.plugins.skip_spikes import SkipSpikes as SkipSpikes
    from loopkit.plugins.stop_on_non_finite import StopOnNonFinite as StopOnNonFinite
    from loopkit.plugins.to_device import ToDevice as ToDevice
    from loopkit.plugins.weight_average import WeightAverage as WeightAverage

__getattr__ = lazily(__name__)
__all__ = list(homes(__name__))
__all__ += ["call_on", "throttle"]
__dir__ = __all__.copy


def standard_set(given: Iterable[Any]) -> list[Any]:
    """The standard plugins whose name, and what they provide, ``given`` does not hold."""
    words = {word for plugin in given for word in (plugin_name(plugin), provided(plugin))}
    from loopkit.plugins import History, Metrics, Progress, SanityCheck, StopOnNonFinite

    made: list[Any] = [Metrics(), History(), Progress(), SanityCheck(), StopOnNonFinite()]
    return [plugin for plugin in made if plugin.name not in words and plugin.provides not in words]
