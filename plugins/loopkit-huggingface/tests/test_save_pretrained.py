"""Folders that from_pretrained loads: which weights, when, and what stays if a save is broken off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loopkit_testing import plugin_contract
from small import VOCABULARY, bert, classes, gpt2, learner, phases, problem, same, sgd, texts, weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from loopkit import Learner, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import Checkpoint, EarlyStopping, Metrics, WeightAverage
from loopkit_huggingface import SavePretrained


def library_tokenizer():
    return Tokenizer(WordLevel({"[PAD]": 0, **{f"w{n}": n for n in range(1, VOCABULARY)}}, "[PAD]"))


def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=library_tokenizer(), pad_token="[PAD]")


def loaded(path):
    return GPT2LMHeadModel.from_pretrained(path)


class At:
    """Calls something at the phase_end of an epoch's validation, before others look at the metrics."""

    before = ("save_pretrained", "early_stopping")
    volatile = ("*",)

    def __init__(self, act):
        self.act, self.epoch = act, 0

    @hookimpl(updates=("metrics",))
    def phase_end(self, learner, phase):
        if phase.name == "val":
            self.act(learner, self.epoch)
            self.epoch += 1


class Scores:
    """Gives the validation passes these losses, and keeps the parameters that they were measured with."""

    before = ("save_pretrained", "early_stopping", "checkpoint")
    volatile = ("*",)

    def __init__(self, values):
        self.values, self.kept = list(values), []

    @hookimpl(updates=("metrics",), reads=("params",))
    def epoch_end(self, learner, phase):
        if phase.name == "val":
            learner.metrics["val/loss"] = self.values[len(self.kept)]
            self.kept.append(weights(learner.model))


def run(model, *plugins, epochs=3, **options):
    used = learner(model, Metrics(), *plugins, seed=0, **options)
    return used.fit(texts(), texts(2, seed=1), epochs=epochs)


def test_the_last_weights_and_the_tokenizer_are_loaded_by_others(tmp_path):
    model = gpt2()
    run(model, SavePretrained(tmp_path, tokenizer()), epochs=1)
    assert os.listdir(tmp_path) == ["last"]
    assert (tmp_path / "last" / "model.safetensors").is_file()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    assert same(weights(again), weights(model))
    assert again.lm_head.weight is again.transformer.wte.weight
    words = AutoTokenizer.from_pretrained(tmp_path / "last")
    assert len(words) == VOCABULARY


def test_the_best_is_saved_when_it_was_measured(tmp_path):
    model, scores = gpt2(), Scores([3.0, 1.0, float("nan"), 2.0])
    run(model, SavePretrained(tmp_path, None, monitor="val/loss"), scores, epochs=4)
    assert same(weights(loaded(tmp_path / "best")), scores.kept[1])
    assert same(weights(loaded(tmp_path / "last")), weights(model))
    assert sorted(os.listdir(tmp_path)) == ["best", "last"]


def test_more_can_be_better(tmp_path):
    scores = Scores([1.0, 3.0, 2.0])
    run(gpt2(), SavePretrained(tmp_path, None, monitor="val/loss", mode="max", last=False), scores)
    assert same(weights(loaded(tmp_path / "best")), scores.kept[1])
    assert os.listdir(tmp_path) == ["best"]


def test_saving_changes_no_bit_of_the_run(tmp_path):
    model, other = gpt2(), gpt2()
    run(model, SavePretrained(tmp_path, tokenizer(), monitor="val/loss"))
    run(other)
    assert same(weights(model), weights(other))


def test_the_average_is_saved_where_there_is_one(tmp_path):
    average, scores = WeightAverage(0.5), Scores([2.0, 1.0, 3.0])
    used = [SavePretrained(tmp_path, None, monitor="val/loss"), average, scores]
    model = gpt2()
    run(model, *used)
    assert same(weights(loaded(tmp_path / "best")), scores.kept[1])
    final = weights(loaded(tmp_path / "last"))
    assert not same(final, weights(model))
    assert same(final, scores.kept[2])


def test_the_trained_weights_are_saved_if_asked_for(tmp_path):
    model = gpt2()
    run(model, SavePretrained(tmp_path, None, averaged=False), WeightAverage(0.5))
    assert same(weights(loaded(tmp_path / "last")), weights(model))


@pytest.mark.parametrize("average", [[], [WeightAverage(0.5)]], ids=["trained", "averaged"])
def test_the_last_is_what_early_stopping_put_back(tmp_path, average):
    model, scores = gpt2(), Scores([1.0, 2.0, 3.0])
    stopping = EarlyStopping("val/loss", patience=2, restore_best=True)
    run(model, SavePretrained(tmp_path, None, monitor="val/loss"), stopping, scores, *average, epochs=9)
    assert same(weights(loaded(tmp_path / "last")), scores.kept[0])
    assert same(weights(loaded(tmp_path / "best")), scores.kept[0])


class Killed(Exception):
    """Ends a fit."""


def kill(learner, epoch):
    if epoch == 2:
        raise Killed


def test_an_error_leaves_the_last_of_before_and_a_resumed_run_ends_as_a_whole_one(tmp_path):
    def plugins(place):
        return SavePretrained(place / "out", None, monitor="val/loss"), Checkpoint(place, resume="auto")

    scores = [2.0, 1.0, 3.0, 4.0]
    run(gpt2(), *plugins(tmp_path / "a"), Scores(scores), epochs=4)
    with pytest.raises(Killed):
        run(gpt2(), *plugins(tmp_path / "b"), At(kill), Scores(scores), epochs=4)
    assert os.listdir(tmp_path / "b" / "out") == ["best"]
    run(gpt2(), *plugins(tmp_path / "b"), Scores(scores[2:]), epochs=4)
    for label in ("best", "last"):
        one, other = (loaded(tmp_path / run / "out" / label) for run in "ab")
        assert same(weights(one), weights(other))


def test_a_validation_in_which_a_stop_comes_is_whole_and_counts(tmp_path):
    class Stop:
        @hookimpl
        def step_end(self, learner, phase):
            if phase.name == "val":
                learner.stop("enough", by="stop")

    run(gpt2(), SavePretrained(tmp_path, None, monitor="val/loss"), Stop())
    assert sorted(os.listdir(tmp_path)) == ["best", "last"]


def test_a_fit_without_the_monitored_phase_is_warned_of(tmp_path):
    used = learner(gpt2(), Metrics(), SavePretrained(tmp_path, None, monitor="val/loss"))
    with pytest.warns(UserWarning, match="reads the metric 'val/loss', but phase 'val' did not run in this fit"):
        used.fit(texts(1), epochs=1)


def test_evaluate_outside_of_a_fit_saves_nothing(tmp_path):
    learner(gpt2(), Metrics(), SavePretrained(tmp_path / "a", None, monitor="val/loss")).evaluate(texts(1))
    assert not (tmp_path / "a").exists()


class Failing(PreTrainedTokenizerFast):
    """A tokenizer for which the disk is full the second time."""

    saves = 0

    def save_pretrained(self, *arguments, **options):
        Failing.saves += 1
        if Failing.saves > 1:
            raise OSError("no space left on device")
        return super().save_pretrained(*arguments, **options)


def test_a_save_that_fails_leaves_the_one_before(tmp_path):
    Failing.saves = 0
    scores = Scores([2.0, 1.0])
    words = Failing(tokenizer_object=library_tokenizer(), pad_token="[PAD]")
    with pytest.raises(OSError, match="no space left") as caught:
        run(gpt2(), SavePretrained(tmp_path, words, monitor="val/loss"), scores)
    assert f"plugin 'save_pretrained' was saving {tmp_path / 'best'}; the folder is unchanged" in (
        caught.value.__notes__
    )
    assert os.listdir(tmp_path) == ["best"]
    assert same(weights(loaded(tmp_path / "best")), scores.kept[0])


def test_a_kill_between_the_two_renames_is_put_right(tmp_path):
    run(gpt2(), SavePretrained(tmp_path, None), epochs=1)
    before = weights(loaded(tmp_path / "last"))
    (tmp_path / "last").rename(tmp_path / ".last.old")
    (tmp_path / ".last.new").mkdir()
    plugin = SavePretrained(tmp_path, None)
    plugin.fit_begin(learner(gpt2()))
    assert os.listdir(tmp_path) == ["last"]
    assert same(weights(loaded(tmp_path / "last")), before)


def test_a_kill_at_any_moment_leaves_a_whole_folder(tmp_path):
    script = Path(__file__).parent / "kill_points.py"
    done = subprocess.run([sys.executable, script, tmp_path / "out"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_a_folder_of_an_earlier_run_is_replaced(tmp_path):
    for epochs in (1, 2):
        model = gpt2()
        run(model, SavePretrained(tmp_path, None), epochs=epochs)
        assert same(weights(loaded(tmp_path / "last")), weights(model))
    assert os.listdir(tmp_path) == ["last"]


def test_a_model_for_classification_is_saved(tmp_path):
    from transformers import BertForSequenceClassification

    model = bert()
    learner(model, SavePretrained(tmp_path, tokenizer())).fit(classes(), epochs=1)
    assert same(weights(BertForSequenceClassification.from_pretrained(tmp_path / "last")), weights(model))


def test_one_of_several_models_is_named(tmp_path):
    models = {"teacher": gpt2(), "student": gpt2()}

    def fit(**options):
        plugin = SavePretrained(tmp_path, None, **options)
        used = Learner(models, None, dict.fromkeys(models, sgd), plugins=[plugin], standard=False)
        with used.rounds():
            pass

    with pytest.raises(PluginError, match=r"choose the model to save, model=\.\.\.: teacher, student"):
        fit()
    with pytest.raises(PluginError, match=r"no model is called 'studnt' \(did you mean 'student'\?\)"):
        fit(model="studnt")
    fit(model="student")
    assert os.listdir(tmp_path) == ["last"]


def test_two_savers_of_one_directory_are_refused(tmp_path):
    with pytest.raises(PluginError, match="both own"):
        learner(gpt2(), SavePretrained(tmp_path, None), SavePretrained(tmp_path, None, name="other"))


def test_a_checkpoint_in_the_same_directory_is_not_disturbed(tmp_path):
    run(gpt2(), SavePretrained(tmp_path, None), Checkpoint(tmp_path), epochs=1)
    model = gpt2()
    run(model, SavePretrained(tmp_path, None), Checkpoint(tmp_path, resume=True), epochs=2)
    assert same(weights(loaded(tmp_path / "last")), weights(model))


def test_a_model_of_another_kind_is_refused_before_anything_runs(tmp_path):
    used = Learner(nn.Linear(1, 1), nn.MSELoss(), sgd, plugins=[SavePretrained(tmp_path, None)])
    with pytest.raises(PluginError, match="the model, Linear, has no save_pretrained"):
        used.fit([(torch.zeros(1, 1), torch.zeros(1, 1))], epochs=1)


def test_a_metric_that_nobody_makes_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(PluginError, match="val/los"):
        run(gpt2(), SavePretrained(tmp_path, None, monitor="val/los"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no tokenizer"),
        ({"tokenizer": library_tokenizer()}, r"PreTrainedTokenizerFast\(tokenizer_object=tokenizer\)"),
        ({"tokenizer": None, "monitor": "loss"}, "monitor is 'loss'"),
        ({"tokenizer": None, "mode": "least"}, "mode is 'least'"),
        ({"tokenizer": None, "last": False}, "would never save: give a monitor"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, options, message):
    with pytest.raises(PluginError, match=message):
        SavePretrained(tmp_path, **options)


@pytest.fixture(scope="module")
def _directory(tmp_path_factory):
    here = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("models"))
    yield
    os.chdir(here)


pytestmark = pytest.mark.usefixtures("_directory")  # the contract's factory takes no fixture

test_contract = plugin_contract(
    lambda: (SavePretrained("models", None, monitor="val/loss"), Metrics()),
    name="save_pretrained",
    problem=problem,
    phases=phases(),
    skip={"unknown_phases": "their models have no save_pretrained"},
)
