"""Deadlines: a run pauses between two steps, and goes on with the same bits."""

import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
from helpers import on
from loopkit_testing import check_plugin
from pages import run_page
from training import bits, data, made

from loopkit.author import options_of
from loopkit.errors import PluginError
from loopkit_control import Deadline


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def until(at, clock=lambda: 0.0):
    """Lets the time come in a step."""
    return on("step_end", lambda learner: learner.progress.steps == at and clock(), "clock", before=("deadline",))


@pytest.mark.parametrize("how", ["minutes", "at", "text", "slurm"])
def test_run_pauses_when_the_time_has_come_and_goes_on_exactly(how, monkeypatch):
    def moved():
        monkeypatch.setattr(time, "time", lambda: began + 3600)

    began, end = time.time(), datetime.now() + timedelta(minutes=30)
    given = {"minutes": {"minutes": 30}, "at": {"at": end}, "text": {"at": end.isoformat()}, "slurm": {}}[how]
    if how == "slurm":
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(end.timestamp())))
    first = made(Deadline(**given), until(7, moved))
    result = first.fit(data(), epochs=2, on_interrupt="return")
    assert (result.reason, first.progress.steps) == ("pause", 7)
    first.remove("clock", "deadline")
    again, whole = made(), made()
    again.load_state_dict(first.state_dict())
    again.fit(data(), epochs=2)
    whole.fit(data(), epochs=2)
    assert bits(whole) == bits(again)


@pytest.mark.parametrize("how", ["minutes", "at", "slurm"])
@pytest.mark.parametrize("off", [-1, 1])
def test_margin_is_left_before_every_end(how, off, monkeypatch):
    now = 1_900_000_000.0
    end = now + 600
    monkeypatch.setattr(time, "time", lambda: now)
    given = {"minutes": {"minutes": 10}, "at": {"at": datetime.fromtimestamp(end)}, "slurm": {}}[how]
    if how == "slurm":
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(end)))

    def moved():
        monkeypatch.setattr(time, "time", lambda: end - 90 + off)

    learner = made(Deadline(**given, margin=90), until(3, moved))
    result = learner.fit(data(), epochs=1, on_interrupt="return")
    assert (result.reason, learner.progress.steps) == (("pause", 3) if off > 0 else ("epochs", 22))


def test_processes_may_differ_in_when_it_ends_alone():
    assert set(Deadline.per_process) == {"minutes", "at"}
    assert set(Deadline.per_process) < set(options_of(Deadline()))


def test_run_without_a_deadline_goes_on():
    assert made(Deadline()).fit(data(), epochs=1).reason == "epochs"


def test_deadline_leaves_an_evaluation_alone():
    assert "val/loss" in made(Deadline(minutes=0)).evaluate(data())


@pytest.mark.parametrize("given", [{"minutes": -1}, {"minutes": True}, {"at": "soon"}, {"at": 5}, {"margin": "1"}])
def test_deadline_refuses(given):
    with pytest.raises(PluginError, match=f"Deadline: {next(iter(given))} is"):
        Deadline(**given)
    with pytest.raises(PluginError, match="not both"):
        Deadline(1, "2030-01-01")


def test_plugin_keeps_the_contract():
    check_plugin(lambda: Deadline(minutes=1000))


def test_readme_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        run_page(Path(__file__).parent.parent / "README.md")
