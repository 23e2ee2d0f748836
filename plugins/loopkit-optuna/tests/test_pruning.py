"""Reports, pruned trials and resumed ones, with real studies."""

import warnings

import optuna
import pytest
import torch
from loopkit_testing import EventLog, check_plugin, plugin_contract, tiny_problem
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.errors import PluginError, StateError
from loopkit.plugins import Checkpoint, Metrics
from loopkit_optuna import OptunaPruning

optuna.logging.set_verbosity(optuna.logging.WARNING)


class PruneAt(optuna.pruners.BasePruner):
    """Prunes at this step."""

    def __init__(self, step):
        self.step = step

    def prune(self, study, trial):
        return trial.last_step == self.step


def fit(trial, *more, epochs=4, standard=True, **options):
    problem = tiny_problem()
    learner = problem.learner(plugins=[OptunaPruning(trial, **options), *more], standard=standard, seed=0)
    return learner.fit(problem.train, problem.val, epochs=epochs)


def a_study(step=99, **options):
    return optuna.create_study(pruner=PruneAt(step), **options)


def test_every_epoch_is_reported_with_its_value():
    study, seen = a_study(), []

    def objective(trial):
        result = fit(trial)
        seen.extend(row["val/loss"] for row in result.history if row["phase"] == "val")
        return result.metrics["val/loss"]

    study.optimize(objective, n_trials=1)
    assert study.trials[0].intermediate_values == dict(enumerate(seen, 1))
    assert study.best_value == seen[-1]


def test_a_pruned_trial_ends_after_that_epoch_and_every_plugin_sees_its_end():
    study, events = a_study(2), EventLog()
    study.optimize(lambda trial: fit(trial, events).metrics["val/loss"], n_trials=1)
    (trial,) = study.trials
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert list(trial.intermediate_values) == [1, 2]
    assert trial.value == trial.intermediate_values[2]
    assert events.lines[-1] == "fit_end"
    assert events.lines.count("train epoch_begin") == 2


def test_the_error_says_where_the_trial_was_pruned():
    with pytest.raises(optuna.TrialPruned, match=r"pruned after 1 epoch\n"):
        fit(a_study(1).ask())


def test_training_is_the_same_with_and_without_it():
    def weights(*used):
        problem = tiny_problem()
        learner = problem.learner(plugins=used, seed=0)
        learner.fit(problem.train, problem.val, epochs=2)
        return learner.model.state_dict()

    one, other = weights(), weights(OptunaPruning(a_study().ask()))
    assert all(torch.equal(value, other[key]) for key, value in one.items())


class Break:
    @hookimpl
    def phase_end(self, phase):
        if not phase.training:
            raise RuntimeError("broken")


def test_an_error_is_not_taken_for_a_pruned_trial():
    with pytest.raises(RuntimeError, match="broken"):
        fit(a_study(1).ask(), Break())


def test_another_stop_is_no_pruning():
    class Stop:
        @hookimpl
        def epoch_end(self, learner):
            learner.stop("enough", by="stop")

    assert fit(a_study(99).ask(), Stop()).message == "enough"


def test_evaluate_outside_of_a_fit_reports_nothing():
    problem, trial = tiny_problem(), a_study().ask()
    problem.learner(plugins=[OptunaPruning(trial)]).evaluate(problem.val)
    assert trial.study.trials[0].intermediate_values == {}


def test_a_validation_that_a_hook_runs_is_not_reported():
    class Inside:
        @hookimpl
        def epoch_end(self, learner, phase):
            if phase.training:
                learner.run("val", tiny_problem().val)

    trial = a_study().ask()
    fit(trial, Inside(), epochs=2)
    assert list(trial.study.trials[0].intermediate_values) == [1, 2]


def test_a_fit_without_the_monitored_phase_is_refused():
    problem = tiny_problem()
    learner = problem.learner(plugins=[OptunaPruning(a_study().ask())])
    with pytest.raises(PluginError, match="reads the metric 'val/loss', but this fit does not run phase 'val'"):
        learner.fit(problem.train, epochs=1)


def test_a_study_with_several_objectives_is_refused():
    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(PluginError, match="trial 0 is of a study with 2 objectives"):
        OptunaPruning(study.ask())


def test_a_study_goes_on_after_a_trial_that_failed(tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"

    def objective(trial):
        return fit(trial, *([Break()] if trial.number == 1 else [])).metrics["val/loss"]

    for trials in (2, 1):
        study = a_study(study_name="goes on", storage=storage, load_if_exists=True)
        study.optimize(objective, n_trials=trials, catch=(RuntimeError,))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert list(study.trials[2].intermediate_values) == [1, 2, 3, 4]


@pytest.mark.parametrize("updates", [1, 2, 3, 4])
def test_validations_in_an_epoch_are_one_report_of_it(updates):
    problem, trial = tiny_problem(), a_study().ask()
    learner = problem.learner(plugins=[OptunaPruning(trial)])
    history = learner.fit(problem.train, problem.val, epochs=2, validate=every(updates=updates)).history
    measured = [row["val/loss"] for row in history if row["phase"] == "val"]
    reported = trial.study.trials[0].intermediate_values
    assert list(reported) == [1, 2]
    assert list(reported.values()) == [measured[4 // updates - 1], measured[-1]]


@pytest.mark.parametrize("epochs", [1, 2])
def test_untrained_model_is_step_0(epochs):
    problem, trial = tiny_problem(), a_study().ask()
    learner = problem.learner(plugins=[OptunaPruning(trial)])
    history = learner.fit(problem.train, problem.val, epochs=4, validate=every(epochs=epochs, first=True)).history
    measured = [row["val/loss"] for row in history if row["phase"] == "val"]
    assert trial.study.trials[0].intermediate_values == dict(zip(range(0, 5, epochs), measured, strict=True))


def test_second_fit_that_validates_first_reports_each_step_once():
    problem, trial = tiny_problem(), a_study().ask()
    learner = problem.learner(plugins=[OptunaPruning(trial)])
    for _ in range(2):
        learner.fit(problem.train, problem.val, epochs=1, validate=every(epochs=1, first=True))
    assert list(trial.study.trials[0].intermediate_values) == [0, 1, 2]


def rounds(trial, *turns, leave=False, plugins=()):
    """A round for each word, in which each letter is a phase; the last one is left if you like."""
    problem = tiny_problem()
    learner, measured = problem.learner(plugins=[OptunaPruning(trial), *plugins]), []
    for turn in learner.rounds(epochs=len(turns)):
        for letter in turns[turn]:
            if letter == "t":
                learner.run("train", problem.train)
            else:
                measured.append(learner.run("val", problem.val)["val/loss"])
        if leave and turn == len(turns) - 1:
            break
    return measured, trial.study.trials[0].intermediate_values


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize(("turns", "steps"), [(("tv", "tv"), (1, 2)), (("vt", "vt"), (0, 1)), (("v", "tv"), (0, 1))])
def test_value_in_a_round_has_the_step_at_which_it_was_measured(turns, steps, leave):
    measured, reported = rounds(a_study().ask(), *turns, leave=leave)
    assert reported == dict(zip(steps, measured, strict=True))


@pytest.mark.parametrize("turns", [("tv", "v"), ("tv", "vt"), ("v", "v")])
def test_round_that_measures_a_reported_step_again_is_refused(turns):
    with pytest.raises(PluginError, match=r"phase 'val' has ended twice at [01] epochs"):
        rounds(a_study().ask(), *turns)


def test_fit_that_failed_in_a_round_does_not_report_its_value():
    trial = a_study().ask()
    with pytest.raises(Stop):
        rounds(trial, "tvt", plugins=[StopAt(1)])
    assert trial.study.trials[0].intermediate_values == {}


@pytest.mark.parametrize("older", [{"within": [True, False]}, {"due": True}])
def test_older_state_with_a_value_to_report_is_read(older):
    problem, trial = tiny_problem(), a_study().ask()
    pruning = OptunaPruning(trial)
    learner = problem.learner()
    saved = {key: value for key, value in pruning.state_dict().items() if key != "due"}
    learner.fit(problem.train, problem.val, epochs=1)
    pruning.load_state_dict({**saved, **older})
    pruning.cycle_end(learner)
    assert pruning.state_dict() == {**saved, "reported": 1, "due": None}


def test_pruning_by_epochs_keeps_the_contract():
    check_plugin(lambda: (OptunaPruning(a_study().ask()), Metrics()), checks=["validated_within"])


def test_updates_are_steps_of_validations_in_an_epoch():
    problem = tiny_problem()
    trial = a_study().ask()
    learner = tiny_problem().learner(plugins=[OptunaPruning(trial, steps="updates")])
    learner.fit(problem.train, problem.val, epochs=2, validate=every(updates=2))
    assert list(trial.study.trials[0].intermediate_values) == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("trial",), {}, "trial is 'trial'"),
        ((None, "loss"), {}, "monitor is 'loss'"),
        ((None,), {"steps": "batches"}, "steps is 'batches'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, message):
    with pytest.raises(PluginError, match=message):
        OptunaPruning(*arguments, **options)


def test_a_metric_that_nobody_makes_is_refused_before_the_first_step():
    problem = tiny_problem()
    learner = problem.learner(plugins=[OptunaPruning(a_study().ask(), "val/f1")])
    with pytest.raises(PluginError, match="val/f1"):
        learner.fit(problem.train, problem.val, epochs=1)


class Stop(Exception):
    """Ends a fit in mid-run."""


class StopAt:
    def __init__(self, epoch):
        self.epoch = epoch

    @hookimpl
    def epoch_begin(self, learner, phase):
        if phase.training and learner.progress.epochs == self.epoch:
            raise Stop


def test_a_trial_that_goes_on_reports_no_step_twice(tmp_path):
    trial = a_study().ask()
    with pytest.raises(Stop):
        fit(trial, Checkpoint(tmp_path, resume="auto"), StopAt(2))
    fit(trial, Checkpoint(tmp_path, resume="auto"))
    whole = a_study().ask()
    fit(whole)
    assert trial.study.trials[0].intermediate_values == whole.study.trials[0].intermediate_values


def test_the_state_of_another_trial_is_refused(tmp_path):
    study = a_study(study_name="digits")
    fit(study.ask(), Checkpoint(tmp_path), epochs=1)
    with pytest.raises(StateError, match="trial 0 of study 'digits', and this is trial 1"):
        fit(study.ask(), Checkpoint(tmp_path, resume="auto"), epochs=2)


def test_a_retried_trial_goes_on_from_the_state_of_the_failed_one(tmp_path):
    study = a_study(storage=f"sqlite:///{tmp_path}/study.db")
    failed = study.ask()
    with pytest.raises(Stop):
        fit(failed, Checkpoint(tmp_path / "run", resume="auto"), StopAt(2))
    study.tell(failed, state=optuna.trial.TrialState.FAIL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls the callback experimental
        retry = optuna.storages.RetryHeartbeatStaleTrialCallback()
    retry(study, study.trials[0])
    again = study.ask()
    fit(again, Checkpoint(tmp_path / "run", resume="auto"))
    assert list(study.trials[1].intermediate_values) == [3, 4]


def test_a_metric_that_is_not_finite_reaches_the_study():
    problem, study = tiny_problem(), a_study()
    trial = study.ask()

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) * (1.0 if torch.is_grad_enabled() else float("inf"))

    learner = Learner(problem.model, loss, problem.optimizer, plugins=[OptunaPruning(trial), Metrics()], standard=False)
    learner.fit(problem.train, problem.val, epochs=1)
    assert study.trials[0].intermediate_values == {1: float("inf")}


WITHIN = {"validated_within": "counted by epochs it raises there, and names steps='updates'"}
test_contract = plugin_contract(
    lambda: (OptunaPruning(a_study(study_name="contract").ask()), Metrics()), name="optuna_pruning", skip=WITHIN
)
test_contract_without_a_trial = plugin_contract(lambda: (OptunaPruning(None), Metrics()), skip=WITHIN)
test_contract_by_updates = plugin_contract(lambda: (OptunaPruning(None, steps="updates"), Metrics()))
