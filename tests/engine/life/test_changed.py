"""A run that goes on says in one line what its script has changed since the save, and what holds."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.processes import run
from fixtures.scenarios import SCENARIOS, STATES
from torch import nn

from engine.life.runs import STEPS, at, kill, killed, tensors
from loopkit import Learner, TrainingPhase, every, hookimpl
from loopkit.base.options import Shown
from loopkit.checkpoint.made import changes, made
from loopkit.data import TensorLoader
from loopkit.errors import StateError
from loopkit.plugins import (
    DDP,
    Checkpoint,
    ClipGradNorm,
    EarlyStopping,
    Freeze,
    History,
    LogTo,
    Schedule,
    WeightAverage,
)
from loopkit.schedules import cosine


@dataclass
class Script:
    """A script that saves and resumes; each field is what a person may change in it."""

    activation: nn.Module = field(default_factory=nn.ReLU)
    dropout: float = 0.1
    loss: Any = nn.functional.mse_loss
    phase: TrainingPhase = field(default_factory=TrainingPhase)
    sgd: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    decay: float = 0.5
    plugins: tuple[Any, ...] = ()
    accumulate: int = 1
    validate: Any = field(default_factory=lambda: every(epochs=1))
    data: int = 0
    frozen: bool = False

    def learner(self, *plugins: Any) -> Learner:
        torch.manual_seed(0)
        first = nn.Linear(3, 6).requires_grad_(not self.frozen)
        return Learner(
            nn.Sequential(first, self.activation, nn.Dropout(self.dropout), nn.Linear(6, 1)),
            self.loss,
            lambda params: torch.optim.SGD(params, **self.sgd),
            phases=[self.phase],
            plugins=[Schedule(cosine(end=self.decay)), *self.plugins, *plugins],
            accumulate=self.accumulate,
        )

    def run(self, directory: Path, *plugins: Any, epochs: int = 3) -> Learner:
        learner = self.learner(Checkpoint(directory / "saved", resume="auto"), *plugins)
        train = TensorLoader(*tensors(18, self.data), batch_size=5, shuffle=True)
        learner.fit(train, TensorLoader(*tensors(11, 7), batch_size=4), epochs=epochs, validate=self.validate)
        return learner


class Narrow(TrainingPhase):
    """Another class of phase."""


def lines(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "changed since" in line]


def interrupt(directory: Path, script: Script, *plugins: Any) -> None:
    with killed():
        script.run(directory, at(kill, epochs=1, index=2), *plugins)


CHANGES = {
    "class of a module": ({"activation": nn.Tanh()}, "module '1' is Tanh, was ReLU"),
    "dropout": ({"dropout": 0.3}, "p of module '2' is 0.3, was 0.1"),
    "frozen": ({"frozen": True}, "choice of trained parameters is all but 0.weight, 0.bias, was all"),
    "loss": ({"loss": nn.L1Loss()}, "loss is L1Loss, was mse_loss "),
    "phase": ({"phase": Narrow()}, "phase 'train' is Narrow, was TrainingPhase"),
    "schedule": ({"decay": 0.1}, "schedule of plugin 'schedule' is "),
    "a clipper more": ({"plugins": (ClipGradNorm(1.0),)}, "plugin 'clip_grad_norm' is ClipGradNorm, was none"),
    "accumulate": ({"accumulate": 2}, "accumulate is 2, was 1"),
    "validate": ({"validate": every(epochs=2)}, "validate of phase 'val' is every(epochs=2), was every(epochs=1)"),
    "lr": ({"sgd": {"lr": 0.5}}, "lr 0.5 here, saved 0.01 holds"),
    "weight decay": ({"sgd": {"lr": 0.01, "weight_decay": 0.1}}, "weight_decay 0.1 here, saved 0 holds"),
}


@pytest.mark.filterwarnings("ignore:plugin 'schedule'.* and there are more")
@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_change_of_the_script_is_said_in_one_line(change, said, tmp_path, capsys):
    interrupt(tmp_path, Script())
    assert lines(capsys) == []
    Script(**change).run(tmp_path)
    (line,) = lines(capsys)
    assert f"changed since step {STEPS}: " in line
    assert said in line


def test_several_changes_stand_in_one_line_and_in_the_log(tmp_path, capsys):
    interrupt(tmp_path, Script(), LogTo(tmp_path / "log.jsonl"))
    capsys.readouterr()
    Script(activation=nn.Tanh(), sgd={"lr": 0.5}).run(tmp_path, LogTo(tmp_path / "log.jsonl"))
    said = f"changed since step {STEPS}: module '1' is Tanh, was ReLU; lr 0.5 here, saved 0.01 holds"
    assert lines(capsys) == [f"loopkit: {said}"]
    assert said in [row.get("text") for row in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())]


def test_change_of_what_is_loaded_is_said_at_each_resume_and_that_of_the_rest_once(tmp_path, capsys):
    interrupt(tmp_path, Script())
    changed = {"activation": nn.Tanh(), "sgd": {"lr": 0.5}}
    Script(**changed).run(tmp_path, epochs=2)
    capsys.readouterr()
    Script(**changed).run(tmp_path)
    assert lines(capsys) == [f"loopkit: changed since step {2 * STEPS}: lr 0.5 here, saved 0.01 holds"]


def test_plugin_that_only_looked_on_may_be_taken_out(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    interrupt(tmp_path, Script(), LogTo(log))
    capsys.readouterr()
    Script().run(tmp_path)
    said = f"changed since step {STEPS}: plugin 'log_to' is none, its saved state is left out"
    assert lines(capsys) == [f"loopkit: {said}"]


def test_plugin_that_may_change_training_is_not_taken_out_in_silence(tmp_path):
    interrupt(tmp_path, Script(plugins=(WeightAverage(),)))
    with pytest.raises(StateError, match="'weight_average'"):
        Script().run(tmp_path)


def test_many_changes_are_counted(tmp_path, capsys):
    interrupt(tmp_path, Script(activation=nn.Sequential(*[nn.ReLU() for _ in range(14)])))
    capsys.readouterr()
    Script(activation=nn.Sequential(*[nn.Tanh() for _ in range(14)])).run(tmp_path)
    (line,) = lines(capsys)
    assert line.count("is Tanh, was ReLU") == 10
    assert line.endswith("and 4 more")


class Doubles(Shown):
    """Changes gradients; where it writes may differ."""

    per_process = ("path",)

    def __init__(self, factor=2.0, path="a"):
        self.factor, self.path = factor, path

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        """Does nothing here."""


def record(layer=None, plugins=(), rates=(0.1,), models=("model",)):
    """What a learner is made of, with an optimizer for each model and a group for each rate."""
    made_of = {name: nn.Sequential(nn.Linear(2, 2), layer or nn.Identity()) for name in models}
    optimizers = {
        name: torch.optim.SGD([{"params": [p], "lr": r} for p, r in zip(m.parameters(), rates, strict=False)], lr=1.0)
        for name, m in made_of.items()
    }
    if len(models) == 1:
        (made_of,), (optimizers,) = made_of.values(), optimizers.values()
    return made(Learner(made_of, nn.MSELoss(), optimizers, plugins=plugins, standard=False))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"layer": nn.Dropout(0.1)}, {"layer": nn.Dropout1d(0.2)}, "module '1' is Dropout1d, was Dropout"),
        (
            {"layer": nn.Sequential(nn.ReLU(), nn.Tanh())},
            {"layer": nn.Sequential(nn.ReLU())},
            "module '1.1' is none, was Tanh",
        ),
        (
            {"models": ("a", "b"), "layer": nn.ReLU()},
            {"models": ("a", "b"), "layer": nn.Tanh()},
            "module 'a.1' is Tanh, was ReLU; module 'b.1' is Tanh, was ReLU",
        ),
        ({"rates": (0.1, 0.2)}, {"rates": (0.1, 0.3)}, "lr of group 1 0.3 here, saved 0.2 holds"),
        (
            {"models": ("a", "b")},
            {"models": ("a", "b"), "rates": (0.5,)},
            "lr of optimizer 'a' 0.5 here, saved 0.1 holds; lr of optimizer 'b' 0.5 here, saved 0.1 holds",
        ),
        ({"plugins": [Doubles()]}, {"plugins": [Doubles(path="b")]}, ""),
        ({"plugins": [Doubles()]}, {"plugins": [Doubles(3.0)]}, "factor of plugin 'doubles' is 3.0, was 2.0"),
        ({"plugins": [Checkpoint("a")]}, {"plugins": [Checkpoint("a", keep=7)]}, ""),
    ],
)
def test_changes_are_said_once_and_in_words(then, now, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert changes(record(**then), record(**now)) == said


def test_plugin_that_is_gone_is_said_once_though_its_state_has_no_taker():
    said = "plugin 'doubles' is none, was Doubles"
    assert changes(record(plugins=[Doubles()]), record(), ["doubles"]) == said


def test_option_that_one_version_of_a_class_knows_alone_is_no_change():
    now = record(nn.Dropout(0.1))
    then = {**now, "module '1'": {**now["module '1'"], "older": "1"}}
    assert changes(then, now) == changes(now, then) == ""


def test_data_of_other_content_are_warned_of(tmp_path):
    interrupt(tmp_path, Script())
    with pytest.warns(UserWarning, match=r"the data of TensorLoader changed .*: content: .* before, .* now"):
        Script(data=1).run(tmp_path)


@pytest.mark.filterwarnings("ignore:.*was saved with other versions of plugins")
def test_state_of_older_code_says_nothing(tmp_path, capsys):
    scenario = SCENARIOS["mid_epoch"]
    learner = scenario.learner(Checkpoint(tmp_path, resume=STATES / "mid_epoch" / "checkpoint"))
    learner.model.append(nn.ReLU())
    scenario.fit(learner)
    assert "resumed" in (said := capsys.readouterr().err)
    assert "changed since" not in said


def stack(rank: int, directory: Path, *plugins: Any, epochs: int = 3) -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    learner = Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        plugins=[
            Checkpoint(directory, resume="auto"),
            Schedule(cosine()),
            WeightAverage(),
            EarlyStopping(patience=5),
            Freeze({"0.*": 1}),
            ClipGradNorm(1.0),
            History(),
            *plugins,
        ],
    )
    learner.fit(TensorLoader(*tensors(18), batch_size=4), TensorLoader(*tensors(8), batch_size=4), epochs=epochs)


def test_unchanged_script_that_runs_again_says_nothing(tmp_path, capsys):
    with killed():
        stack(0, tmp_path, at(kill, epochs=2, index=2))
    stack(0, tmp_path)
    stack(0, tmp_path)
    assert lines(capsys) == []


def stack_of_two(rank: int, directory: Path, epochs: int) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        stack(rank, directory, DDP(timeout=60), epochs=epochs)
    return said.getvalue()


def test_unchanged_script_of_two_processes_says_nothing(tmp_path):
    run(stack_of_two, 2, tmp_path, 2)
    first, _ = run(stack_of_two, 2, tmp_path, 3)
    assert "resumed" in first
    assert "changed since" not in first


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_model_with_a_scripted_part_is_saved_and_goes_on(tmp_path):
    def fit():
        torch.manual_seed(0)
        model = nn.Sequential(torch.jit.script(nn.Linear(3, 4)), nn.Linear(4, 1))
        data = [(torch.ones(4, 3), torch.ones(4, 1))] * 2
        plugins = [Checkpoint(tmp_path, resume="auto")]
        return Learner(model, nn.MSELoss(), torch.optim.SGD, plugins=plugins).fit(data, epochs=1)

    assert (fit().steps, fit().steps) == (2, 2)
