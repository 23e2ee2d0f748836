"""PhaseWatch: the checks in the first epoch of a phase: that it trains, and that its events come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopkit.base.notes import warn
from loopkit.base.notices import Notices
from loopkit.engine.compile.expected_events import ExpectedEvents
from loopkit.engine.compile.phase_table import PhaseTable
from loopkit.engine.compile.plan import Plan
from loopkit.engine.compile.registry import Registry
from loopkit.engine.kept.flags import Flags
from loopkit.engine.step.training_check import TrainingCheck, no_update
from loopkit.engine.step.window import Window
from loopkit.errors import PhaseError, PluginError, StepResultError
from loopkit.events import BackwardBegin, BackwardEnd, UpdateBegin
from loopkit.hooks import concerns
from loopkit.phases import Phase
from loopkit.plugin import unwrapped

BEFORE_UPDATES = (*[event.hook for event in (BackwardBegin, BackwardEnd, UpdateBegin)], "optimizer_step", "take_step")
"""The hooks that do not come where a phase updates in its own way."""


class ShownPhases:
    """The phases of a learner that have shown by their steps that they do what they declare."""

    def __init__(self) -> None:
        self.training: list[Phase] = []
        """The phases that have shown that they train."""
        self.complete: list[Phase] = []
        """The phases that have had a whole epoch, if plugins wait for events that they list."""


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


class PhaseWatch:
    """Watches a phase in one epoch, unless an earlier one has shown what there is to show.

    Args:
        phase: The phase.
        shown: The phases that have shown it.
        own_updates: The check of phases that update in their own way.
        notices: Print what may not be meant.
    """

    def __init__(self, phase: Phase, shown: ShownPhases, own_updates: OwnUpdates, notices: Notices) -> None:
        self._phase = phase
        self._shown = shown
        self._own_updates = own_updates
        self._notices = notices
        self.proof: TrainingCheck | None = None
        """The check that the phase trains; None once it is known, or if the phase does not train."""
        self._optimizers: TrainingCheck | None = None
        """The same, while it watches optimizers of which the engine has not made a step."""
        self.awaited: ExpectedEvents | None = None
        """Watches, in the phase's first epoch, whether the events come that it lists; None if nobody waits for any."""

    def check_updates(self) -> None:
        """Raise for plugins without effect in a phase that updates in its own way."""
        self._own_updates.check(self._phase)

    def see_training(self, windows: Sequence[Window]) -> None:
        """See whether the phase trains, and through the engine."""
        if windows and self._phase not in self._shown.training:
            self.proof = self._optimizers = TrainingCheck(self._phase, windows)

    def end_proof(self, proof: TrainingCheck) -> None:
        """The phase has shown that it trains."""
        proof.stop_watching_params()
        self._shown.training.append(self._phase)
        self.proof = None

    def await_events(self, plan: Plan) -> bool:
        """See whether the events come that the phase lists, unless an epoch of it has told; returns whether it does."""
        if self._phase in self._shown.complete:
            return False
        self.awaited = ExpectedEvents(self._phase, plan)
        return True

    def forget_events(self) -> None:
        """A step was cancelled: a later epoch tells."""
        self.awaited = None

    def end_events(self, first: bool) -> None:
        """At the end of a whole epoch: warn of the events that did not come, in the first process."""
        if self.awaited is not None:
            self._shown.complete.append(self._phase)
            for text in self.awaited.missed() if first else ():
                warn(text)

    def refuse_unasked(self, window: Window) -> None:
        """Raise for gradients for which no update was asked, or name them, if the phase has asked before.

        Raises:
            StepResultError: It never asked for one.
        """
        if self.proof is not None and window.asked_in < 0:
            raise StepResultError(no_update(self._phase))
        steps = "1 step" if window.count == 1 else f"{window.count} steps"
        self._notices.say_once(
            f"phase {self._phase.name!r}: an epoch ended with gradients of {steps} for which step.update was not "
            f"called; they are dropped"
        )

    def end(self) -> None:
        """The epoch is over."""
        if self._optimizers is not None:
            self._optimizers.end()
