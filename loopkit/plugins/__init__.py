"""The standard plugins, one concern a module. They use the public API alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loopkit.engine.refusals import plugin_name
from loopkit.plugins.call_on import call_on
from loopkit.plugins.channels_last import ChannelsLast
from loopkit.plugins.checkpoint import Checkpoint, SaveOptions
from loopkit.plugins.compile import Compile
from loopkit.plugins.cuda_graph import CudaGraph
from loopkit.plugins.ddp import DDP
from loopkit.plugins.early_stopping import EarlyStopping
from loopkit.plugins.freeze import EvalMode, Freeze
from loopkit.plugins.fsdp import FSDP
from loopkit.plugins.gradients import ClipGradNorm, ClipGradValue, GradNoise, GradNorm
from loopkit.plugins.history import History
from loopkit.plugins.log_gradients import LogGradients
from loopkit.plugins.log_histograms import LogHistograms
from loopkit.plugins.log_hyperparameters import LogHyperparameters
from loopkit.plugins.log_metrics import LogMetrics
from loopkit.plugins.log_predictions import LogPredictions
from loopkit.plugins.log_resources import LogResources
from loopkit.plugins.log_to import LogTo
from loopkit.plugins.metrics import Metrics
from loopkit.plugins.mixed_precision import MixedPrecision
from loopkit.plugins.profile import Profile
from loopkit.plugins.progress import Progress
from loopkit.plugins.replay_bundle import ReplayBundle
from loopkit.plugins.sanity_check import SanityCheck
from loopkit.plugins.schedule import Plateau, Schedule, TorchSchedule
from loopkit.plugins.skip_spikes import SkipSpikes
from loopkit.plugins.stop_on_non_finite import StopOnNonFinite
from loopkit.plugins.throttle import throttle
from loopkit.plugins.to_device import ToDevice
from loopkit.plugins.weight_average import WeightAverage

__all__ = [
    "DDP",
    "FSDP",
    "ChannelsLast",
    "Checkpoint",
    "ClipGradNorm",
    "ClipGradValue",
    "Compile",
    "CudaGraph",
    "EarlyStopping",
    "EvalMode",
    "Freeze",
    "GradNoise",
    "GradNorm",
    "History",
    "LogGradients",
    "LogHistograms",
    "LogHyperparameters",
    "LogMetrics",
    "LogPredictions",
    "LogResources",
    "LogTo",
    "Metrics",
    "MixedPrecision",
    "Plateau",
    "Profile",
    "Progress",
    "ReplayBundle",
    "SanityCheck",
    "SaveOptions",
    "Schedule",
    "SkipSpikes",
    "StopOnNonFinite",
    "ToDevice",
    "TorchSchedule",
    "WeightAverage",
    "call_on",
    "throttle",
]


def __dir__() -> list[str]:
    return __all__


def standard_set(given: Iterable[Any]) -> list[Any]:
    """The standard plugins whose name, and what they provide, ``given`` does not hold."""
    words = {word for plugin in given for word in (plugin_name(plugin), getattr(plugin, "provides", ""))}
    made: list[Any] = [Metrics(), History(), Progress(), SanityCheck(), StopOnNonFinite()]
    return [plugin for plugin in made if plugin.name not in words and plugin.provides not in words]
