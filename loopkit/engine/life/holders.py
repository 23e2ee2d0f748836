"""Holders: the objects of a learner in which modules, parameters and values are looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from loopkit.engine.compile.registry import Registry
from loopkit.engine.kept.extras import LOSS, Owner
from loopkit.engine.kept.phase_states import PhaseStates
from loopkit.engine.kept.rounds import Round
from loopkit.engine.kept.unsaved import check_saved
from loopkit.engine.kept.witness.functions import held_in_code
from loopkit.engine.kept.witness.roots import RootsOfLearner, has_state
from loopkit.engine.life.models import Models
from loopkit.phases import is_standard
from loopkit.plugin import unwrapped

LossFn = Callable[[], Callable[..., Any]]
"""Returns the loss function of a learner, which may be replaced."""


class Holders:
    """The models, the loss function, phases and plugins of a learner, and what they hold.

    Args:
        models: Hold the modules that are found.
        phases: The phases that the learner knows.
        registry: The plugins.
        loss_fn: Returns the loss function.
        round: Keeps objects of the user's loop.
    """

    def __init__(self, models: Models, phases: PhaseStates, registry: Registry, loss_fn: LossFn, round: Round) -> None:
        self._models = models
        self._phases = phases
        self._registry = registry
        self._loss_fn = loss_fn
        self._round = round

    def find_extras(self) -> None:
        """Look for modules and parameters of the loss function, of phases and of plugins."""
        self._models.find_extras(self._owners())

    def tensors(self) -> Iterator[Tensor]:
        """Yield the parameters and buffers of the models, and of modules of the loss function, phases and plugins."""
        for module in (*self._models.values(), *self._models.extras.modules.values()):
            yield from module.parameters()
            yield from module.buffers()

    def check_saved(self) -> None:
        """Look for modules and parameters, and check that something saves each one that an optimizer trains.

        Raises:
            PhaseError: No object does.
        """
        self.find_extras()
        models = self._models
        check_saved(models.optimizers, models, models.extras.modules, self._owners())

    def roots(self) -> RootsOfLearner:
        """Return what the witness looks at now."""
        models = self._models
        plugins = {name: unwrapped(plugin) for name, plugin in self._registry.plugins.items()}
        return RootsOfLearner(
            models,
            models.optimizers,
            plugins,
            self._loss_fn(),
            models.extras.modules,
            self._phases.known,
            self._round.kept(),
            models.modes.attributes,
        )

    def _owners(self) -> list[Owner]:
        owners = [Owner(LOSS, self._loss_fn(), (), held_by=held_in_code)]
        for phase in self._phases.known:
            if not is_standard(phase):
                saves = phase.saved if phase.saves_names else None
                owners.append(Owner(f"phase {phase.name}", phase, saves, held_by=held_in_code))
        for name, plugin in self._registry.plugins.items():
            own = unwrapped(plugin)
            stateful = has_state(own)
            home = type(own).__module__.partition(".")[0]
            if home != "loopkit":
                saves = None if stateful else ()
                owners.append(Owner(f"plugin {name}", own, saves, trained=stateful or home.startswith("loopkit_")))
        return owners
