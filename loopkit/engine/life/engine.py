"""Engine: the parts of a learner, put together; each is given only the parts that it works with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from loopkit.base.named import Named
from loopkit.base.notices import Notices
from loopkit.engine.compile.registry import Registry
from loopkit.engine.kept.data.data_places import DataPlaces
from loopkit.engine.kept.flags import Flags
from loopkit.engine.kept.left_open import LeftOpen
from loopkit.engine.kept.left_out import LeftOut
from loopkit.engine.kept.loading import Loading
from loopkit.engine.kept.parts import Parts
from loopkit.engine.kept.phase_states import PhaseStates
from loopkit.engine.kept.repeated import Repeated
from loopkit.engine.kept.resume import Resume
from loopkit.engine.kept.rounds import Round
from loopkit.engine.kept.saving import Saving
from loopkit.engine.kept.witness.witness import Witness
from loopkit.engine.life.answers import Answers
from loopkit.engine.life.epoch import Stage
from loopkit.engine.life.epoch_data import EpochData
from loopkit.engine.life.epoch_stages import (
    Data,
    EpochLife,
    Hooked,
    Known,
    Metrics,
    Modules,
    Opened,
    Pending,
    Saved,
    Seen,
    Steps,
    Together,
)
from loopkit.engine.life.epochs import Epochs
from loopkit.engine.life.fit import Fit, FitParts
from loopkit.engine.life.fit_loop import FitLoop
from loopkit.engine.life.forwards import Forwards
from loopkit.engine.life.holders import Holders
from loopkit.engine.life.logbook import Logbook
from loopkit.engine.life.loop_code import LoopCode
from loopkit.engine.life.preparation import Preparation
from loopkit.engine.life.requests import Requests
from loopkit.engine.life.running import Running
from loopkit.engine.life.user_loop import UserLoop
from loopkit.engine.step.loops import Loops
from loopkit.engine.step.phase_watch import OwnUpdates, ShownPhases
from loopkit.progress import Progress

if TYPE_CHECKING:
    from loopkit.engine.compile.phase_table import PhaseTable
    from loopkit.engine.life.limits import Terms
    from loopkit.engine.life.models import Models
    from loopkit.engine.life.sources import Source
    from loopkit.engine.life.validations import Validation
    from loopkit.learner import Learner


class Engine:
    """The parts of a learner. Only the learner holds them all.

    Args:
        learner: The argument ``learner`` of hooks. The engine itself reads only its loss function.
        models: Modules and optimizers.
        phases: Its phases.
        order: The argument ``order`` of `Learner`.
    """

    def __init__(self, learner: Learner, models: Models, phases: PhaseTable, order: Sequence[Any]) -> None:
        self._learner = learner
        self.models = models
        self.phases = phases
        self.progress = Progress()
        self.metrics: dict[str, float] = Named("metric")
        self.running = Running(self.progress)
        self.logbook = Logbook(self.progress)
        self.requests = Requests(self.holds)
        self.notices = Notices(lambda: self.requests.world.rank == 0)
        self.registry = Registry(learner, phases, order, self.logbook, self.running.where)
        self.round = Round(self.progress, self.metrics)
        """The round of a loop of the user's."""
        self.left_open = LeftOpen()
        self.places = DataPlaces(self.left_open)
        self.resume = Resume(self.left_open, self.places, self.running, self.round)
        self.answers = Answers(self.requests, self.running, self.registry, self.resume.hold)
        self.phase_states = PhaseStates(phases)
        loss_fn = partial(getattr, learner, "loss_fn")
        self.holders = Holders(models, self.phase_states, self.registry, loss_fn, self.round)
        self._loop_code = LoopCode(models, phases, self.registry, self.logbook, loss_fn)
        self.witness = Witness(self.holders.roots)
        self.flags = Flags(models, partial(self.registry.declared, "owns"), self.requests.change)
        self.left_out = LeftOut(models, partial(self.registry.declared, "leaves_out"))
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
        self._connect(phases)

    def _connect(self, phases: PhaseTable) -> None:
        models = self.models
        self.saving = Saving(
            self.parts, models.weights, self.left_out, self.witness, self.resume, self.running, self.requests
        )
        self.loading = Loading(self.parts, self.left_out, self.witness, self.resume, self.running)
        shown = ShownPhases()
        own_updates = OwnUpdates(self.registry, phases, self.flags, shown, self.notices)
        say_once = self.notices.say_once
        preparation = Preparation(
            self.holders, models.module_modes, self.flags, self.registry, own_updates, self.witness, say_once
        )

        data = EpochData(self.places, self.left_open, self.running, self.notices)
        repeated = Repeated(self.parts, self.holders.tensors, models.named_parameters, self.notices.say_once)
        life = EpochLife(
            self._stages(data), data, self.running, self.logbook, self.requests, repeated, self.saving.mark
        )
        loops = Loops(
            learner=self._learner,
            models=models,
            registry=self.registry,
            running=self.running,
            logbook=self.logbook,
            flags=self.flags,
            requests=self.requests,
            answer=self.answers.answer,
            shown=shown,
            own_updates=own_updates,
            notices=self.notices,
        )
        self.epochs = Epochs(life, self.running, loops, models, self.registry)
        self.forwards = Forwards(models, self.registry, self.running, self.epochs, self.requests)
        self._fit_parts = FitParts(
            running=self.running,
            requests=self.requests,
            registry=self.registry,
            epochs=self.epochs,
            answers=self.answers,
            resume=self.resume,
            left_open=self.left_open,
            preparation=preparation,
            repeated=repeated,
            metrics=self.metrics,
        )

    @property
    def fit(self) -> Fit | None:
        """The fit that is running."""
        fit = self.running.fit
        assert fit is None or isinstance(fit, Fit)
        return fit

    def fit_loop(self, terms: Terms, train: Source, validations: Sequence[Validation]) -> FitLoop:
        """Make a fit whose loop is the engine's own."""
        return FitLoop(self._fit_parts, terms, train, validations, self.places, self.flags)

    def user_loop(self, terms: Terms, kept: Mapping[str, Any]) -> UserLoop:
        """Make a fit whose loop is the user's; its generators and objects with a state are kept by name."""
        return UserLoop(self._fit_parts, terms, self.round, self._loop_code, kept)

    def _stages(self, data: EpochData) -> list[Stage]:
        return [
            Pending(self.requests, self.answers, self.running),
            Saved(self.left_open, self.running),
            Data(data),
            Known(self.registry, self.phase_states, self.holders),
            Seen(self.witness, self.registry),
            Steps(self.requests, self.running),
            Opened(self.running, self.logbook),
            Modules(self.models.module_modes, self.flags, self.notices),
            Metrics(self.metrics),
            Hooked(),
            Together(self.requests, self.running),
        ]

    def holds(self, reason: str, by: str) -> bool:
        """Whether a plugin puts off a stop; all are asked."""
        holds = [plugin.hold_stop for plugin in self.registry.plugins.values() if hasattr(plugin, "hold_stop")]
        held = [hold(self._learner, reason, by) for hold in holds]
        return any(held)
