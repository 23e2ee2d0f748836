"""A metric reported to an Optuna trial, and the trial pruned."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.storages import RetryHeartbeatStaleTrialCallback

from loopkit import FitResult, Learner, Phase, hookimpl
from loopkit.author import Shown, checks
from loopkit.errors import PluginError, StateError

__all__ = ["OptunaPruning"]

UNFINISHED = ("error", "pause", "signal")
"""Why a fit ends in the middle of a round that a resumed one continues."""


class OptunaPruning(Shown):
    """Report a metric to a trial of Optuna, and end the fit if Optuna prunes it.

    A report is made after each training epoch and the validations due after it, with the last value, unless
    ``steps="updates"``: then one is made after each validation, as also in a loop of your own without rounds. A value
    that was measured before any training is step 0. The fit ends in the usual way: the other plugins see every event to
    the last ``fit_end``. Then ``fit`` raises ``optuna.TrialPruned``, and ``study.optimize`` counts the trial as pruned.
    If you leave a loop of rounds by a ``break``, the last value is reported, and nothing is pruned.

    A state of another trial raises, unless this trial retries that one (by Optuna's
    ``RetryHeartbeatStaleTrialCallback``). A trial that resumes from its own state reports no step twice.

    Args:
        trial: The trial that ``study.optimize`` gives to the objective. Of several processes rank 0 reports, and all of
            them end; the others may give None.
        monitor: The metric, as ``"val/loss"``. Whether less is better is the study's affair.
        steps: The step for Optuna: ``"epochs"``, or ``"updates"``, for validations in mid-epoch.
        name: The plugin's name.

    Raises:
        PluginError: An argument is wrong; the study has several objectives; or two reports of one fit would have the
            same step.
        StateError: The state that is loaded is of another trial.

    Example::

        def objective(trial):
            lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
            optimizer = partial(torch.optim.SGD, lr=lr)
            learner = Learner(make_model(), loss_fn, optimizer, plugins=[OptunaPruning(trial)])
            return learner.fit(train, val, epochs=10).metrics["val/loss"]


        study = optuna.create_study(pruner=optuna.pruners.MedianPruner())
        study.optimize(objective, n_trials=20)
    """

    provides = "optuna_pruning"

    def __init__(
        self,
        trial: optuna.trial.BaseTrial | None,
        monitor: str = "val/loss",
        *,
        steps: str = "epochs",
        name: str = "optuna_pruning",
    ) -> None:
        if trial is not None and not isinstance(trial, optuna.trial.BaseTrial):
            raise PluginError(f"trial is {trial!r}: give the trial that study.optimize gives to the objective")
        if isinstance(trial, optuna.Trial) and len(trial.study.directions) > 1:
            raise PluginError(
                f"trial {trial.number} is of a study with {len(trial.study.directions)} objectives, and Optuna prunes "
                f"only studies with one: leave the plugin out"
            )
        checks.metric_name(type(self).__name__, monitor=monitor)
        checks.one_of(type(self).__name__, ("epochs", "updates"), steps=steps)
        self.name = name
        self.trial = trial
        self.monitor = monitor
        self.steps = steps
        self._phase = monitor.partition("/")[0]
        self._reported = -1
        """The step that was reported last."""
        self._due: int | None = None
        """The step of a value that is reported with ``cycle_end``; None if there is none."""

    def reads(self) -> tuple[str, ...]:
        """The metric."""
        return (f"metrics.{self.monitor}", "progress")

    @hookimpl
    def phase_end(self, learner: Learner, phase: Phase) -> None:
        """Report the metric, or note it for `cycle_end`, if epochs count."""
        fit = learner.current
        if fit is None or not fit.can_save or phase.name != self._phase:
            return  # such as in an epoch that a hook runs
        if self.steps == "updates" or not fit.has_cycles:
            self._report_new(learner, learner.progress.epochs if self.steps == "epochs" else learner.progress.updates)
            return
        trains = any(each.trains for each in fit.open_epochs)
        step = learner.progress.epochs + trains
        if not fit.position.by_fit:
            self._check_new(step)
            self._due = step
        elif trains or fit.position.cycle:
            self._due = step
        elif step > self._reported:  # else the fit before has reported it
            self._report(learner, step)

    @hookimpl
    def cycle_end(self, learner: Learner) -> None:
        """Report the last value of the metric in this epoch and its validations."""
        if self._due is not None:
            self._report(learner, self._step_due(learner, self._due))

    def _step_due(self, learner: Learner, step: int) -> int:
        """Return the step to report; an epoch that was left does not count."""
        return min(step, learner.progress.epochs)

    def _report_new(self, learner: Learner, step: int) -> None:
        """Report the metric, whose step must be new."""
        self._check_new(step)
        self._report(learner, step)

    def _check_new(self, step: int) -> None:
        """Check that a step was not reported.

        Raises:
            PluginError: It was.
        """
        if step <= self._reported:
            raise PluginError(
                f"plugin {self.name!r}: phase {self._phase!r} has ended twice at {step} {self.steps}, and Optuna takes "
                f"one value a step: validate less often, or give OptunaPruning(steps='updates')"
            )

    def _report(self, learner: Learner, step: int) -> None:
        """Report the metric, and ask for the end if the trial is to be pruned."""
        self._tell(learner, step)
        if self.trial is not None and learner.world.rank == 0 and self.trial.should_prune():
            unit = self.steps.removesuffix("s") if step == 1 else self.steps
            learner.stop(f"pruned after {step} {unit}", by=self.name)

    def _tell(self, learner: Learner, step: int) -> None:
        """Report the metric."""
        self._reported, self._due = step, None
        if self.trial is not None and learner.world.rank == 0:
            self.trial.report(learner.metrics[self.monitor], step)

    @hookimpl
    def fit_end(self, learner: Learner, result: FitResult) -> None:
        """Report a value of a round that was left; raise for the study if the trial was pruned."""
        if self._due is not None and result.reason not in UNFINISHED:
            self._tell(learner, self._step_due(learner, self._due))
        if result.reason == "stop" and result.by == self.name:
            raise optuna.TrialPruned(result.message)

    def state_dict(self) -> dict[str, Any]:
        """The study and trial, and the step that was reported last."""
        return {
            "study": self._study,
            "trial": self._number,
            "reported": self._reported,
            "due": self._due,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the trial."""
        mine, saved = (self._study, self._number), (state["study"], state["trial"])
        if self.trial is not None and saved != mine and not (saved[0] == mine[0] and saved[1] in self._retried):
            raise StateError(
                f"plugin {self.name!r}: the state is of trial {saved[1]} of study {saved[0]!r}, and this is trial "
                f"{mine[1]} of {mine[0]!r}, a new one: give each trial its own directory, such as "
                f"Checkpoint(f'runs/trial-{{trial.number}}')"
            )
        same = saved == mine or self.trial is None
        self._reported = state["reported"] if same else -1
        due = state.get("due", state.get("within", (False,))[0]) if same else None
        self._due = due if type(due) is not bool else sys.maxsize if due else None  # older states do not say the step

    def reshard(self, states: Sequence[Mapping[str, Any]], rank: int, size: int) -> Mapping[str, Any]:
        """The state for another number of processes: from rank 0, which has the trial."""
        return states[0]

    @property
    def _study(self) -> str | None:
        return self.trial.study.study_name if isinstance(self.trial, optuna.Trial) else None

    @property
    def _number(self) -> int | None:
        return None if self.trial is None else int(self.trial.number)

    @property
    def _retried(self) -> list[int]:
        """The trials that this one retries."""
        if not isinstance(self.trial, optuna.Trial):
            return []
        frozen = self.trial.study.get_trials(deepcopy=False)[self.trial.number]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return RetryHeartbeatStaleTrialCallback.retry_history(frozen)
