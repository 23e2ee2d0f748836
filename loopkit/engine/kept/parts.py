"""Parts: all that a state holds of a learner, beside where its run is. A new saved thing is a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from loopkit.engine.kept.counts import Counts, LastMetrics
from loopkit.engine.kept.extras import Extras
from loopkit.engine.kept.flags import Flags
from loopkit.engine.kept.measured import Measured
from loopkit.engine.kept.modes import Modes
from loopkit.engine.kept.optimizer_states import OptimizerStates
from loopkit.engine.kept.part import Part
from loopkit.engine.kept.plugin_states import PluginStates
from loopkit.engine.kept.random_generators import RandomGenerators
from loopkit.engine.kept.weights import Form, LeftOutBuffers, ModelWeights
from loopkit.progress import Progress

POSITIONS = {"epochs": 1, "data": 1, "fit": 2, "left_out": 1, "made": 1, "parts": 1, "round": 1}
"""The forms of a state's entries beside the parts: where the run is, and how it was made."""

FIRST = "models", "buffers", "optimizers", "progress", "metrics"
"""The first parts of states and messages: the first difference explains most."""


class Models(Protocol):
    """The parts that belong to the models."""

    extras: Extras
    modes: Modes
    measured: Measured
    optimizers: dict[str, torch.optim.Optimizer]


class Parts:
    """The parts of a learner, in the order in which a state is loaded.

    Parts that may raise come first, and the weights late: they are written in place.

    Args:
        models: All that belongs to the models.
        modules: The models, by name.
        in_training_form: A context in which they are in the form in which they are trained.
        plugins: Returns the plugins, by name.
        phases: The states of phases.
        flags: Which parameters are trained.
        progress: The counters.
        metrics: The values of metrics.
    """

    def __init__(
        self,
        models: Models,
        modules: Mapping[str, nn.Module],
        in_training_form: Form,
        plugins: Callable[[], Mapping[str, Any]],
        phases: Part,
        flags: Flags,
        progress: Progress,
        metrics: dict[str, float],
    ) -> None:
        self._models = models
        self.plugins = PluginStates(plugins)
        self.phases = phases
        self.flags = flags
        self.weights = ModelWeights(modules, in_training_form)
        self._optimizers = OptimizerStates(lambda: models.optimizers)
        self._buffers = LeftOutBuffers(modules, in_training_form)
        self._generators = RandomGenerators()
        self.counts = Counts(progress)
        self.metrics = LastMetrics(metrics)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The learner's optimizers by name."""
        return self._models.optimizers

    def told(self) -> list[Part]:
        """Return the parts in the order of states and messages."""
        return sorted(self, key=lambda part: FIRST.index(part.name) if part.name in FIRST else len(FIRST))

    def versions(self) -> dict[str, int]:
        """Return the form of each part, and of a state's other entries."""
        return {**{part.name: part.version for part in self}, **POSITIONS}

    def __iter__(self) -> Iterator[Part]:
        models = self._models
        yield self.plugins
        yield self.phases
        yield models.extras
        yield self.flags
        yield self._optimizers
        yield models.modes
        yield self._generators
        yield self.weights
        yield self._buffers
        yield models.measured
        yield self.counts
        yield self.metrics
