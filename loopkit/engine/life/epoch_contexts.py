"""EpochContexts: the surroundings of an epoch: the models' own weights, in its mode, and the contexts of plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from loopkit.base.notes import locate
from loopkit.engine.kept.modes import TRAIN
from loopkit.errors import CancelEpoch, CancelFit

if TYPE_CHECKING:
    from torch import nn

    from loopkit.engine.compile.plan import Where
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.life.models import Models
    from loopkit.phases import Phase


class EpochContexts:
    """The contexts of an epoch: the models' modes and the plugins' contexts, entered in order and left in reverse.

    Args:
        phase: The phase.
        models: Get its mode.
        registry: Names the plugin whose context raises.
        where: Returns phase and epoch in words.
    """

    def __init__(self, phase: Phase, models: Models, registry: Registry, where: Where) -> None:
        self._phase = phase
        self._models = models
        self._registry = registry
        self._where = where
        self._stack = ExitStack()
        self._form = ExitStack()
        """The evaluation form of modules with their own ``train``."""
        self._exact = False
        """Whether leaving puts the weights back bit for bit; else ``train()`` makes them, as in a loop by hand."""
        self._modes: list[tuple[nn.Module, bool]] = []

    def enter(self, makers: Iterable[Callable[[], Any]], exact: bool) -> None:
        """Put the models in the phase's mode, and enter the contexts of plugins.

        Args:
            makers: Each makes the context of a plugin; None for none.
            exact: Leaving puts the weights back bit for bit; else ``train()`` makes them again.
        """
        weights = self._models.weights
        try:
            self._exact = exact
            if self._phase.training:
                self._enter_modes()
                if weights.stack and weights.by:
                    self._stack.enter_context(weights.own())
            if self._models.modes.optimizers:
                self._switch()
            if not self._phase.training:
                self._enter_modes()
            for make in makers:
                if (context := make()) is not None:
                    self._stack.enter_context(context)
            self._enter_form()
        except (CancelEpoch, CancelFit):
            raise
        except BaseException as error:
            self._locate(error)
            raise

    def _switch(self) -> None:
        """Put optimizers that have modes in the phase's mode."""
        models = self._models
        if not models.modes.serves:
            return
        if self._phase.training:
            models.modes.switch(TRAIN)
        elif not models.modes.evaluated:
            self._stack.enter_context(models.modes.in_place(models.weights.replaced, stays=not self._exact))

    def _enter_modes(self) -> None:
        """Put the modules in the phase's mode until the contexts are left."""
        self._modes = self._models.set_module_modes(self._phase.training)
        self._stack.callback(lambda: self._models.restore_module_modes(self._modes))

    def _enter_form(self) -> None:
        """Put modules with their own ``train`` in eval mode, after the weights in place."""
        if self._phase.training:
            return
        self._stack.callback(self._form.close)
        self._form.enter_context(self._models.evaluated(lambda: self._exact))

    def set_modes(self) -> None:
        """Put the modules in the phase's mode, remembering the one that each was in."""
        self._modes = self._models.set_module_modes(self._phase.training)
        self._enter_form()

    def restore_modes(self) -> None:
        """Put the modules back in the modes in which `set_modes` found them."""
        self._form.close()
        self._models.restore_module_modes(self._modes)

    def leave(self, error: BaseException | None) -> None:
        """Leave them, be it because of an error, which none of them may swallow."""
        self._exact = self._exact or error is not None
        try:
            self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except BaseException as raised:
            if raised is not error:
                self._locate(raised)
            raise

    def _locate(self, error: BaseException) -> None:
        plan = self._registry.plan(self._phase)
        locate(error, plan.of_context("epoch_context", self._where(self._phase, None)))
