"""optuna: pruned trials of a study in a database, which is resumed, with the plugin of loopkit-optuna."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import optuna
from checks import Differs, Program, main, seed
from loopkit_optuna import OptunaPruning

NEEDS = ["optuna==5.0.0"]
optuna.logging.set_verbosity(optuna.logging.ERROR)


class Study(Program):
    """A sweep of the rate."""

    own_checks = True
    rates = (0.01, 1e-5, 0.02, 1e-6, 0.005)

    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)
        optimizer.param_groups[0]["lr"] = self.lr
        return optimizer

    def here_in(self, trial: Any) -> float:
        """A trial with loopkit."""
        self.lr = trial.suggest_categorical("lr", self.rates)
        return self.here(OptunaPruning(trial, "val/loss")).losses[-1]

    def hand_in(self, trial: Any) -> float:
        """A trial by hand."""
        self.lr = trial.suggest_categorical("lr", self.rates)
        losses = self.hand().losses
        for epoch, loss in enumerate(losses, 1):
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return losses[-1]

    def study(self, objective: Any, *counts: int) -> list[Any]:
        """The states and reported values of a study that is loaded again for each of the counts of trials."""
        with tempfile.TemporaryDirectory() as folder:
            for count in counts:
                storage = f"sqlite:///{folder}/study.db"
                sampler = optuna.samplers.GridSampler({"lr": self.rates}, seed=0)
                pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
                options = {"storage": storage, "study_name": "rates", "load_if_exists": True}
                study = optuna.create_study(sampler=sampler, pruner=pruner, **options)
                study.optimize(objective, n_trials=count)
            return [(each.state, each.value, each.params, each.intermediate_values) for each in study.trials]

    def check_pruned_trials(self) -> float:
        """States, values and reports of all trials, in one go and resumed after two."""
        seed()
        hand, here, resumed = self.study(self.hand_in, 5), self.study(self.here_in, 5), self.study(self.here_in, 2, 3)
        if not hand == here == resumed:
            raise Differs(f"{hand} by hand, {here} here, {resumed} resumed")
        return 0.0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(NEEDS, [Study()])
