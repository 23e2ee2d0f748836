"""Ctrl-C pressed several times, at any line of a fit: nothing is left behind, and the next fit of the process runs."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from helpers import batches, make_learner, on

import loopkit
from loopkit import ValidationPhase, every, hookimpl
from loopkit.checkpoint import disk, storage
from loopkit.logs import read_log
from loopkit.plugins import ClipGradNorm, LogMetrics, LogTo, SaveOptions, WeightAverage
from loopkit.plugins.checkpoint import Checkpoint

OWN = str(Path(loopkit.__file__).parent)
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def same_handlers():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before


def press():
    os.kill(os.getpid(), signal.SIGINT)


def make(directory, background=False, resume="auto"):
    saves = Checkpoint(
        directory / "saved", save=every(updates=2), resume=resume, options=SaveOptions(background=background)
    )
    return make_learner(saves, LogTo(directory / "log.jsonl"), LogMetrics(), WeightAverage(0.9), ClipGradNorm(1.0))


def by_fit(learner):
    learner.fit(batches(3), batches(1), epochs=1)


def by_rounds(learner):
    for _ in learner.rounds(epochs=1):
        learner.run("train", batches(3))
        learner.run("val", batches(1))


def running(seconds=2):
    """The other threads; one that was told to end has a moment for it."""
    end = time.monotonic() + seconds
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.001)
    return [each.name for each in threading.enumerate() if each is not threading.main_thread()]


def left(learner):
    """What a fit has left in this process."""
    return {
        "fit": learner.current,
        "epochs": len(learner._engine.running.epochs),
        "hooks": learner._engine.running.hooks,
        "threads": running(),
        "handlers": [signal.getsignal(number) for number in NUMBERS],
        "grad": torch.is_grad_enabled(),
    }


class Presses:
    """Press at two lines of loopkit, of which the second raises, and so many times more soon after, by a thread."""

    def __init__(self, rng, first, gap, more):
        self.due = [first, first + gap]
        self.delays = [rng.uniform(0, 0.004) for _ in range(more)]
        self.lines = 0
        self.go = threading.Event()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.press_more, daemon=True)

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        self.lines += 1
        if self.due and self.lines >= self.due[0]:
            del self.due[0]
            if not self.due:
                self.go.set()
            press()
        return self.trace

    def press_more(self):
        self.go.wait()
        for delay in self.delays if not self.due else ():
            time.sleep(delay)
            press()
        self.done.set()


def lines_of(run, directory):
    """How many lines of loopkit a run goes through."""
    counting = Presses(random.Random(0), 10**9, 0, 0)
    directory.mkdir()
    learner = make(directory)
    sys.settrace(counting.trace)
    try:
        run(learner)
    finally:
        sys.settrace(None)
    return counting.lines


def guarded(run, presses, levels=6):
    """Run; returns how often a press came through. Each takes one level away at most, and there are five presses."""
    caught = 0
    try:
        caught += run() or 0 if not levels else guarded(run, presses, levels - 1)
        presses.go.set()
        presses.done.wait()  # Thread.join takes a thread for ended after an interrupt
    except KeyboardInterrupt:
        caught += 1
    return caught


def trial(rng, run, lines, directory, background):
    """One run that is interrupted; returns whether it was."""
    directory.mkdir()
    learner = make(directory, background)
    before = left(learner)
    presses = Presses(rng, rng.randrange(lines), rng.randrange(60), rng.randint(0, 3))

    presses.thread.start()

    def traced():
        sys.settrace(presses.trace)
        run(learner)

    caught = guarded(traced, presses)
    sys.settrace(None)
    presses.thread.join()
    assert left(learner) == before
    learner.forget()
    learner.fit(batches(3), epochs=1)
    again = make_learner(LogTo(directory / "log.jsonl"), Checkpoint(directory / "saved", resume=None, overwrite=True))
    assert again.fit(batches(2), epochs=1).reason == "epochs"
    return caught > 0


def mash(tmp_path, run, background, trials, seed):
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an unraisable interrupt in a finalizer
        lines = lines_of(run, tmp_path / "whole")
        done = [trial(rng, run, lines, tmp_path / str(i), background) for i in range(trials)]
    assert any(done)


OTHERS = [(by_fit, False), (by_rounds, False), (by_rounds, True)]


@pytest.mark.parametrize(
    ("run", "background"), [(by_fit, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_presses_at_any_line_leave_nothing_behind(tmp_path, run, background):
    mash(tmp_path, run, background, 4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("run", [by_fit, by_rounds])
def test_presses_at_many_lines_leave_nothing_behind(tmp_path, run, background):
    mash(tmp_path, run, background, 200, seed=2)


# The end of a fit


@pytest.mark.parametrize("presses", [1, 2])
def test_two_presses_in_fit_end_are_counted(presses):
    ends = []

    def end(**given):
        for _ in range(presses):
            press()
        ends.append("whole")

    learner = make_learner(on("fit_end", end, "a"), on("fit_end", lambda **_: ends.append("b"), "b"), order=["b", "a"])
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(2), epochs=1)
    assert ends == ["whole", "b"]
    assert learner.result.reason == "epochs"


def test_third_press_in_fit_end_raises_there_and_the_others_end():
    ends = []

    def end(**given):
        for _ in range(3):
            press()
        ends.append("whole")

    learner = make_learner(on("fit_end", end, "a"), on("fit_end", lambda **_: ends.append("b"), "b"), order=["b", "a"])
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(2), epochs=1)
    assert ends == ["b"]
    assert left(learner)["fit"] is None


def test_interrupts_in_several_fit_ends_are_one_interrupt():
    def end(**given):
        for _ in range(3):
            press()

    learner = make_learner(*(on("fit_end", end, name) for name in "abc"))
    with pytest.raises(KeyboardInterrupt) as caught:
        learner.fit(batches(2), epochs=1)
    assert len([note for note in caught.value.__notes__ if "fit_end failed too" in note]) == 2


@pytest.mark.parametrize("k", [0, 1, 2])
def test_presses_in_a_fit_begin_reach_the_fit_end_of_those_that_were_entered(k):
    calls = []

    def begin(name):
        def act(**given):
            calls.append(f"begin {name}")
            if name == "abc"[k]:
                press()
                press()

        return act

    class Paired:
        def __init__(self, name):
            self.name = name

        @hookimpl
        def fit_begin(self):
            begin(self.name)()

        @hookimpl
        def fit_end(self):
            calls.append(f"end {self.name}")

    learner = make_learner(*map(Paired, "abc"))
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(2), epochs=1)
    entered = "abc"[: k + 1]
    assert calls == [f"begin {name}" for name in entered] + [f"end {name}" for name in reversed(entered)]
    assert left(learner)["fit"] is None


@pytest.mark.parametrize("times", [1, 2, 3])
def test_log_that_is_interrupted_while_it_is_closed_is_let_go(tmp_path, monkeypatch, times):
    from loopkit.logs.log_file import LogFile

    real = LogFile.close
    learner = make_learner(LogTo(tmp_path / "log.jsonl"))
    left = [True] * times

    def close(self):
        if left and self._file is not None:
            del left[0]
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(LogFile, "close", close)
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(2), epochs=1)
    monkeypatch.setattr(LogFile, "close", real)
    assert learner.fit(batches(2), epochs=1).reason == "epochs"
    assert read_log(tmp_path / "log.jsonl")


def test_press_while_a_checkpoint_gets_its_name_leaves_it_whole_or_not_there(tmp_path):
    class Pressing(disk.System):
        def rename(self, source, target):
            super().rename(source, target)
            if target.name == "000002-step-4":
                press()
                press()

    learner = make_learner(Checkpoint(tmp_path, save=every(updates=2)))
    before, disk.system = disk.system, Pressing()
    try:
        with pytest.raises(KeyboardInterrupt):
            learner.fit(batches(4), epochs=2)
    finally:
        disk.system = before
    found = storage.listing(tmp_path)
    assert found.problems == {}
    assert [storage.verify(each.path).path.name for each in found] == ["000001-step-2"]
    assert learner.fit(batches(4), epochs=1).reason == "epochs"  # it knows its own checkpoints


# What raises while a fit begins or ends


class Idle:
    """A plugin that never fires where there is no validation."""

    name = "idle"

    @hookimpl(phase=ValidationPhase)
    def step_end(self):
        pass


def check_free(learner, before):
    assert left(learner) == before


def train_alone(learner):
    for _ in learner.rounds(epochs=1):
        learner.run("train", batches(3))


def test_warning_that_is_an_error_ends_rounds_and_the_last_checkpoint_is_written(tmp_path):
    learner = make_learner(Idle(), Checkpoint(tmp_path, save=every(epochs=5)))
    before = left(learner)
    with pytest.raises(UserWarning, match="'idle' is never called"):
        train_alone(learner)
    check_free(learner, before)
    assert [each.about["reason"] for each in storage.listing(tmp_path)] == ["end"]
    learner.remove("idle")
    assert learner.fit(batches(2), epochs=1).reason == "epochs"


def fails(*given, **options):
    raise RuntimeError("oh")


@pytest.mark.parametrize(
    "where",
    [
        "loopkit.engine.life.signals.Signals.install",
        "loopkit.engine.compile.registry.Registry.check_fit",
        "loopkit.engine.kept.resume.Resume.begin",
        "loopkit.engine.kept.witness.witness.Witness.begin",
        "loopkit.checkpoint.lock.Lock.acquire",
        "loopkit.engine.compile.registry.Registry.never_made",
    ],
)
def test_whatever_raises_in_a_begin_or_end_leaves_no_fit_running(tmp_path, monkeypatch, where):
    learner = make_learner(Checkpoint(tmp_path), on("step_end", lambda **_: None))
    before = left(learner)
    with monkeypatch.context() as patched:
        patched.setattr(where, fails)
        with pytest.raises(RuntimeError, match="oh"):
            learner.fit(batches(2), epochs=1)
    check_free(learner, before)
    assert learner.fit(batches(2), epochs=1).reason == "epochs"


def test_plugin_that_cannot_answer_for_a_stop_leaves_no_fit_running():
    class Holding:
        name = "holding"

        def hold_stop(self, learner, reason, by):
            raise RuntimeError("oh")

        @hookimpl
        def phase_end(self, learner):
            learner.stop("enough")

    learner = make_learner(Holding())
    before = left(learner)
    with pytest.raises(RuntimeError, match="oh"):
        learner.fit(batches(2), epochs=1)
    check_free(learner, before)


# A second fit with a limit that is behind


@pytest.mark.parametrize(
    "limit", [{"epochs": 2}, {"max_steps": 5}, {"max_updates": 5}], ids=lambda limit: next(iter(limit))
)
def test_limit_that_is_behind_begins_a_new_fit_of_that_many(limit, capsys):
    def act(learner, **given):
        if learner.progress.steps == 10:
            press()

    learner = make_learner(on("step_end", act))
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(4), epochs=9)
    capsys.readouterr()
    result = learner.fit(batches(4), **limit)
    name, many = next(iter(limit.items()))
    assert getattr(result, {"epochs": "epochs", "max_steps": "steps", "max_updates": "updates"}[name]) == many
    said = capsys.readouterr().err
    assert "its open epoch is dropped" in said
    assert f"{name}={many}" in said
    assert "resumes where" not in said


def test_limit_that_is_ahead_goes_on_with_the_interrupted_fit():
    learner = make_learner(on("step_end", lambda learner, **_: learner.progress.steps == 10 and press()))
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(4), epochs=9)
    assert learner.fit(batches(4), epochs=3).steps == 12


def test_same_limit_goes_on_with_the_validation_that_was_interrupted():
    learner = make_learner(on("step_end", lambda learner, phase, **_: phase.name == "val" and press()))
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(4), batches(3), epochs=1)
    learner.remove("acting")
    assert learner.fit(batches(4), batches(3), epochs=1).steps == 4
