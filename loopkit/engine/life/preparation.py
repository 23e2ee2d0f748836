"""Preparation: the checks when a fit begins, before and after the ``fit_begin`` of plugins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.kept.flags import Flags
    from loopkit.engine.kept.witness.witness import Witness
    from loopkit.engine.life.holders import Holders
    from loopkit.engine.life.module_modes import ModuleModes
    from loopkit.engine.step.phase_watch import OwnUpdates
    from loopkit.phases import Phase


class Preparation:
    """Looks at the models, phases and plugins of a learner when a fit begins.

    Args:
        holders: Where modules and parameters are looked for.
        modes: The modes of modules, which are woken.
        flags: The flags of parameters, whose values are noted.
        registry: The plugins.
        own_updates: The check of phases that update in their own way.
        witness: Looks for changes that no state holds.
        say_once: Prints a line on standard error, unless it was printed before.
    """

    def __init__(
        self,
        holders: Holders,
        modes: ModuleModes,
        flags: Flags,
        registry: Registry,
        own_updates: OwnUpdates,
        witness: Witness,
        say_once: Callable[[str], None],
    ) -> None:
        self._holders = holders
        self._modes = modes
        self._flags = flags
        self._registry = registry
        self._own_updates = own_updates
        self._witness = witness
        self.say_once = say_once

    @property
    def noted(self) -> bool:
        """Whether the flags of parameters are noted."""
        return self._flags.noted

    def forget(self) -> None:
        """Forget the flags of parameters."""
        self._flags.forget()

    def begin(self) -> None:
        """Find the modules, wake those that are trained, and note the flags of parameters."""
        self._holders.find_extras()
        self._modes.wake(self.say_once)
        self._flags.note()

    def check(self, runs: Sequence[Phase]) -> None:
        """Check the plugins, and the phases that the fit runs by itself.

        Raises:
            PhaseError: A phase does not fit.
            PluginError: A plugin is another learner's, is never called, or reads a metric that is never made.
        """
        registry = self._registry
        registry.owners.begin(registry.plugins)
        for phase in runs:
            self._own_updates.check(phase)
        if registry.implemented and runs:
            registry.check_fit(runs)

    def watch(self) -> None:
        """Count changes from here on."""
        self._witness.begin()
        self._witness.look()

    def missing(self) -> dict[str, str]:
        """By phase and optimizer: the changes since the fit began that are in no state, in words."""
        return self._witness.missing()
