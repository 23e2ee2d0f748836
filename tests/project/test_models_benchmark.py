"""benchmarks/models.py: its sides train alike, and its tables are made of what was measured."""

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def models(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("models")


def trained(problem, side):
    model, epoch = problem.side(side)
    for _ in range(2):
        epoch()
    return model.state_dict()


@pytest.mark.parametrize("name", ["convnet", "gru_seq"])
def test_the_strong_loop_and_loopkit_fused_are_bitwise_equal(models, name):
    problem = models.Problem(models.TASKS[name], "cpu", "cpu", 3)
    ours, theirs = trained(problem, "fused"), trained(problem, "strong")
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    begun = problem.model().state_dict()
    assert not any(torch.equal(ours[key], begun[key]) for key in begun)


def test_the_idiomatic_loop_and_loopkit_by_default_are_bitwise_equal(models):
    problem = models.Problem(models.TASKS["mlp"], "cpu", "cpu", 3)
    ours, theirs = trained(problem, "default"), trained(problem, "idiomatic")
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def test_each_model_has_a_finite_loss_above_the_bar_when_new(models):
    for name, task in models.TASKS.items():
        problem = models.Problem(task, "cpu", "cpu", 1)
        assert problem.bar < problem.loss(problem.model()) < 10, name


def test_the_tables_are_medians_of_ratios_within_a_round_and_their_mean(models):
    figures = {
        "a": {"seconds": {"strong": [1.0, 2.0, 4.0], "fused": [2.0, 4.0, 4.0]}},
        "b": {"seconds": {"strong": [1.0, 1.0, 1.0], "fused": [0.5, 0.5, 9.0]}},
    }
    about = {"date": "2026-11-23", "about": "x", "clock": "perf_counter", "load": [1, 2]}
    said = {**about, "size": "cpu", "device": "cpu", "epochs": {"1": figures}, "quality": {}}
    rows = models.markdown(said).splitlines()
    assert rows[-5:] == [
        "| against strong | fused |",
        "| --- | --- |",
        "| a | 2.00 |",
        "| b | 0.50 |",
        "| geometric mean | 1.00 |",
    ]


def test_a_trainer_that_is_not_installed_is_skipped_with_a_line(models, monkeypatch, capsys):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert models.available(None) == ["idiomatic", "strong", "default", "fused"]
    assert "lightning is not installed: skipped" in capsys.readouterr().out
