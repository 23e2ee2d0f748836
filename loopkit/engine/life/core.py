"""Core: what the parts of the engine share, of one learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loopkit.base.notes import add_note, say, shown
from loopkit.base.world import World
from loopkit.engine.compile.registry import Registry
from loopkit.engine.kept.data_roots import is_looked_at, name_of_data
from loopkit.engine.kept.extras import LOSS, Owner
from loopkit.engine.kept.flags import Flags
from loopkit.engine.kept.functions import held_in_code
from loopkit.engine.kept.left_out import LeftOut
from loopkit.engine.kept.parts import Parts
from loopkit.engine.kept.phase_states import PhaseStates
from loopkit.engine.kept.resume import Resume
from loopkit.engine.kept.roots import RootsOfLearner, has_state
from loopkit.engine.kept.rounds import Round
from loopkit.engine.kept.unsaved import check_saved
from loopkit.engine.kept.witness import Witness
from loopkit.engine.life.logbook import Logbook
from loopkit.engine.life.requests import Requests
from loopkit.phases import is_standard
from loopkit.plugin import declared, unwrapped
from loopkit.progress import Progress

if TYPE_CHECKING:
    from loopkit.engine.compile.phase_table import PhaseTable
    from loopkit.engine.life.epoch import Epoch
    from loopkit.engine.life.fit import Fit
    from loopkit.engine.life.models import Models
    from loopkit.engine.step.step import Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase
    from loopkit.result import FitResult


class Core:
    """The parts of a learner, shared by the learner and the engine, with the fit and the epochs that are running.

    Args:
        learner: The argument ``learner`` of hooks. The engine itself reads only its loss function.
        models: Modules and optimizers.
        phases: Its phases.
        order: The argument ``order`` of `Learner`.
    """

    def __init__(self, learner: Learner, models: Models, phases: PhaseTable, order: Sequence[Any]) -> None:
        self.learner = learner
        self.models = models
        self.phases = phases
        self.accumulate = 1
        self.progress = Progress()
        self.metrics: dict[str, float] = {}
        self.world = World()
        self.logbook = Logbook(self.progress)
        self.requests = Requests(self.holds)
        self.registry = Registry(learner, phases, order, self.logbook, self.where)
        self.resume = Resume()
        self.round = Round(self.progress, self.metrics)
        """The round of a loop of the user's."""
        self.phase_states = PhaseStates(phases)
        self.witness = Witness(self._roots)
        self.flags = Flags(models, lambda: self.accumulate, self.set_accumulate, self._owned_flags)
        self.left_out = LeftOut(models, self._left_out)
        self.parts = Parts(
            models,
            models,
            models.module_modes.in_training_form,
            lambda: self.registry.plugins,
            self.phase_states,
            self.flags,
            self.progress,
            self.metrics,
        )
        self.epochs: list[Epoch] = []
        """The epochs that are open, the outermost first."""
        self.fit: Fit | None = None
        self.result: FitResult | None = None
        """The result of the running or last fit."""
        self.hooks = 0
        """How many hooks run that belong to no open epoch; an epoch that begins then is one of theirs."""
        self.proven: list[Phase] = []
        """The phases that have shown that they train."""
        self.complete: list[Phase] = []
        """The phases that have had a whole epoch, if plugins wait for events that they list."""
        self._said: set[str] = set()

    def where(self, phase: Phase, step: Step | None) -> str:
        """Phase, epoch and step, for messages."""
        return f"phase {phase.name!r}, epoch {self.number}" + ("" if step is None else f", step {step.index}")

    @property
    def number(self) -> int:
        """The training epoch that runs, or after which something else does, as people count: from 1.

        Logs and states count the epochs that are complete, `Progress.epochs`.
        """
        return self.progress.epochs + any(epoch.trains for epoch in self.open_epochs)

    def say_once(self, text: str) -> None:
        """Print a line for people on standard error, unless it was printed before; in the first process only."""
        if text not in self._said and self.world.rank == 0:
            self._said.add(text)
            say(text)

    def look_at_data(self, phase: str, data: Any) -> None:
        """Let the witness look at the data of a phase, or at the function that makes it."""
        if not self.witness.knows(name_of_data(phase), data) and is_looked_at(data):
            self.witness.add(self._roots().of_data(phase, data))

    def _roots(self) -> RootsOfLearner:
        models = self.models
        plugins = {name: unwrapped(plugin) for name, plugin in self.registry.plugins.items()}
        known = self.phase_states.known
        extras = models.extras.modules
        kept = self.round.kept()
        switched = models.modes.attributes
        return RootsOfLearner(models, models.optimizers, plugins, self.learner.loss_fn, extras, known, kept, switched)

    def find_extras(self) -> None:
        """Look for modules and parameters of the loss function, of phases and of plugins."""
        self.models.find_extras(self._owners())

    def check_saved(self) -> None:
        """Check that something saves each parameter that an optimizer trains.

        Raises:
            PhaseError: Nothing does.
        """
        check_saved(self.models.optimizers, self.models, self.models.extras.modules, self._owners())

    def _owners(self) -> list[Owner]:
        owners = [Owner(LOSS, self.learner.loss_fn, (), held_by=held_in_code)]
        phases = [phase for phase in self.phase_states.known if not is_standard(phase)]
        owners += [
            Owner(f"phase {each.name}", each, each.saved if each.saves_names else None, held_by=held_in_code)
            for each in phases
        ]
        for name, plugin in self.registry.plugins.items():
            own = unwrapped(plugin)
            stateful = has_state(own)
            home = type(own).__module__.partition(".")[0]
            if home != "loopkit":
                saves = None if stateful else ()
                owners.append(Owner(f"plugin {name}", own, saves, trained=stateful or home.startswith("loopkit_")))
        return owners

    def set_accumulate(self, steps: int) -> None:
        """Set the steps of an update, from the next window on."""
        self.accumulate = steps
        self.requests.change()

    def _owned_flags(self) -> list[str]:
        """The patterns of the parameters whose training a plugin owns."""
        plugins = [unwrapped(plugin) for plugin in self.registry.plugins.values()]
        owned = [name for each in plugins for name in declared(each, "owns", getattr(each, "owns", ()))]
        return [name.removeprefix("trainable.") for name in owned if name.startswith("trainable.")]

    def _left_out(self) -> list[str]:
        """The patterns of the parameters that plugins leave out of checkpoints."""
        plugins = [unwrapped(plugin) for plugin in self.registry.plugins.values()]
        return [name for each in plugins for name in declared(each, "leaves_out", getattr(each, "leaves_out", ()))]

    def join(self, world: World) -> None:
        """Train together with these processes."""
        self.world = world
        self.requests.join(world)

    def holds(self, reason: str, by: str) -> bool:
        """Whether a plugin puts off a stop; all are asked."""
        holds = [plugin.hold_stop for plugin in self.registry.plugins.values() if hasattr(plugin, "hold_stop")]
        held = [hold(self.learner, reason, by) for hold in holds]
        return any(held)

    def enter(self, fit: Fit) -> None:
        """A fit begins."""
        self.fit = fit
        self.result = fit.result

    def close_epochs(self, error: BaseException) -> None:
        """Leave the epochs of the fit that are open although it ends: an interrupt came while they were left."""
        for epoch in reversed(self.open_epochs):
            try:
                epoch.abandon(error)
            except BaseException as late:
                if late is not error:
                    add_note(error, f"loopkit: leaving {epoch!r} failed too: {shown(late)}")

    def leave(self, hooks: int) -> None:
        """The fit is over, with so many hooks running around it."""
        self.fit = None
        self.hooks = hooks

    def forget_metrics(self, prefix: str) -> None:
        """Forget the values of the metrics whose names begin so."""
        for name in list(self.metrics):
            if name.startswith(prefix):
                del self.metrics[name]

    @contextmanager
    def hook(self) -> Iterator[None]:
        """Inside, hooks run that belong to no open epoch: ``fit_begin``, ``phase_end`` or ``fit_end``."""
        self.hooks += 1
        try:
            yield
        finally:
            self.hooks -= 1

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, epochs are none of the fit's, as if a hook of a hook ran them: nothing is saved there."""
        with self.hook(), self.hook():
            yield

    @property
    def open_epochs(self) -> list[Epoch]:
        """The epochs that are open, the outermost first, without those that were open when the fit began."""
        return self.epochs if self.fit is None else self.epochs[self.fit.depth :]

    @property
    def can_save(self) -> bool:
        """Whether the state can be saved now: no step is under way, nor an epoch that a hook has begun."""
        epochs = self.open_epochs
        if self.hooks:
            return self.hooks == 1 and all(epoch.loop.between for epoch in epochs)
        return all(epoch.loop.between for epoch in epochs[:-1]) and all(epoch.loop.at_edge for epoch in epochs[-1:])
