"""OwnUpdates: the check of phases that update in their own way, where some plugins have no effect."""

from __future__ import annotations

from typing import Any

from loopkit.base.notices import Notices
from loopkit.engine.compile.phase_table import PhaseTable
from loopkit.engine.compile.registry import Registry
from loopkit.engine.kept.flags import Flags
from loopkit.engine.step.training_check import ShownPhases
from loopkit.errors import PhaseError, PluginError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin
from loopkit.hooks import concerns
from loopkit.phases import Phase
from loopkit.plugin import unwrapped

BEFORE_UPDATES = (*[event.hook for event in (BackwardBegin, BackwardEnd, UpdateBegin)], "optimizer_step", "take_step")
"""The hooks that do not come where a phase updates in its own way."""


class OwnUpdates:
    """Looks at phases with ``own_updates``.

    Args:
        registry: The plugins.
        phases: The learner's phases.
        flags: Hold how many steps make an update.
        shown: The phases that have trained.
        notices: Print what has no effect.
    """

    def __init__(
        self, registry: Registry, phases: PhaseTable, flags: Flags, shown: ShownPhases, notices: Notices
    ) -> None:
        self._registry = registry
        self._phases = phases
        self._flags = flags
        self._shown = shown
        self._notices = notices

    def check(self, phase: Phase) -> None:
        """Raise for plugins without effect in a phase with ``own_updates``, and list those with another one.

        If another phase of the learner trains through the engine, a line names the plugins that act there only.

        Raises:
            PhaseError: The phase does not train, or updates are to be made of several steps.
            PluginError: A plugin has to act before an update.
        """
        if not phase.own_updates:
            return
        cls = type(phase).__name__
        if not phase.training:
            raise PhaseError(f"{cls}.own_updates is True, and {cls}.training is not: only a phase that trains updates")
        trained = (*self._phases.own, *self._shown.training)
        elsewhere = any(each.training and not each.own_updates for each in trained)
        if self._flags.accumulate > 1 and not elsewhere:
            self._refuse_windows(phase)
        acting = [each for each in self._registry.implemented if each.hook.name in BEFORE_UPDATES]
        for impl in acting:
            if concerns(impl.phase, phase) and impl.hook.name not in getattr(impl.plugin, "optional", ()):
                self._check_acts(phase, impl.entry.plugin, impl.hook.name, unwrapped(impl.plugin), elsewhere)

    def _refuse_windows(self, phase: Phase) -> None:
        """Raise, since the phase has no windows that several steps could fill."""
        cls = type(phase).__name__
        steps = self._flags.accumulate
        raise PhaseError(
            f"accumulate is {steps}, which has no effect in phase {phase.name!r}: {cls}.own_updates is True. "
            f"Leave accumulate out, and let {cls}.step update in each {steps}th step; or leave own_updates "
            f"out, and call step.backward(loss) and step.update()"
        )

    def _check_acts(self, phase: Phase, name: str, hook: str, plugin: Any, elsewhere: bool) -> None:
        acts = getattr(plugin, "own_updates", False)
        if isinstance(acts, str) and acts:
            self._notices.say_once(f"phase {phase.name!r} updates in its own way: {acts}")
        if acts:
            return
        cls = type(phase).__name__
        if elsewhere:
            self._notices.say_once(
                f"plugin {name!r}: {hook} does not come in phase {phase.name!r}, where own_updates is True"
            )
            return
        raise PluginError(
            f"plugin {name!r} acts by {hook}, which does not come in phase {phase.name!r}: {cls}.own_updates is True. "
            f"Take the plugin out, and do its part in {cls}.step before each update; or leave own_updates out, and "
            f"call step.backward(loss) and step.update(), where all plugins act"
        )
