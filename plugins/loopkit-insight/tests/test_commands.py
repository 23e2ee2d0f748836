"""The command ``loopkit replay``."""

from __future__ import annotations

import os
import pdb
import sys

import helpers
import pytest
import torch
from helpers import batches, make_learner, on

from loopkit import checkpoint
from loopkit.commands import cli
from loopkit.plugins import Checkpoint
from loopkit_insight import ReplayBundle


def run(capsys, *words):
    """The exit code, and the lines of standard output and of standard error."""
    code = cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def newest(directory):
    return checkpoint.listing(directory)[0].path


REPLAY = """
import sys
sys.path.insert(0, {tests!r})
from helpers import make_learner, on


def act(step, **_):
    if step.index == 2 and MESSAGE:
        raise ArithmeticError(MESSAGE)


MESSAGE = {message!r}


def learner():
    return make_learner(on("loss_begin", act))


def pair():
    return learner(), {{}}


def other():
    return make_learner(model=__import__("torch").nn.Linear(4, 1))
"""


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """A bundle of a step that failed, and a function that writes a script that makes such a learner."""

    def act(step, **_):
        if step.index == 2:
            raise ArithmeticError("too much")

    learner = make_learner(on("loss_begin", act), ReplayBundle(tmp_path / "bundles"))
    with pytest.raises(ArithmeticError):
        learner.fit(batches(4), epochs=1)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))

    def script(message):
        path = tmp_path / "replayed.py"
        path.write_text(REPLAY.format(message=message, tests=os.path.dirname(helpers.__file__)))
        return f"{path}:"

    yield newest(tmp_path / "bundles"), script
    for name in ("replayed", "loopkit_script_replayed"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("function", ["learner", "pair"])
def test_replay_shows_the_failure_again(function, bundle, capsys):
    path, script = bundle
    code, out, err = run(capsys, "replay", path, script("too much") + function, "--no-anomaly")
    assert (code, out) == (1, ["the step fails again as recorded"]), err
    assert err[0] == "Traceback (most recent call last):"
    assert "ArithmeticError: too much" in err


def test_replay_says_when_it_fails_in_another_way_or_not(bundle, capsys):
    path, script = bundle
    code, out, err = run(capsys, "replay", path, script("too little") + "learner", "--no-anomaly")
    assert (code, out) == (1, ["the step fails, but not as recorded: ArithmeticError: too much"])
    assert "ArithmeticError: too little" in err
    code, out, err = run(capsys, "replay", path, script("") + "learner", "--no-anomaly")
    assert (code, out, err) == (0, ["the step does not fail; recorded was: ArithmeticError: too much"], [])


def test_replay_starts_the_debugger_where_it_failed(bundle, capsys, monkeypatch):
    path, script = bundle
    seen = []
    monkeypatch.setattr(pdb, "post_mortem", seen.append)
    assert run(capsys, "replay", path, script("too much") + "learner", "--no-anomaly", "--debugger")[0] == 1
    (trace,) = seen
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_code.co_name == "act"


def test_replay_that_cannot_be_run_exits_with_2(bundle, tmp_path, capsys):
    path, script = bundle
    make_learner(Checkpoint(tmp_path / "run")).fit(batches(4), epochs=1)
    for words in (
        (path, script("too much") + "other"),
        (newest(tmp_path / "run"), script("") + "learner"),
        (path, script("") + "lerner"),
    ):
        code, out, err = run(capsys, "replay", *words, "--no-anomaly")
        assert (code, out, len(err)) == (2, [], 1)
        assert err[0].startswith("loopkit: error: ")
    assert "did you mean 'learner'?" in err[0]


def test_replay_runs_with_anomaly_detection_unless_told(bundle, capsys, monkeypatch):
    path, script = bundle
    seen = []
    original = torch.autograd.set_detect_anomaly
    monkeypatch.setattr(
        torch.autograd, "set_detect_anomaly", lambda mode, *rest: seen.append(mode) or original(False, *rest)
    )
    run(capsys, "replay", path, script("") + "learner")
    run(capsys, "replay", path, script("") + "learner", "--no-anomaly")
    assert seen == [True, False]
