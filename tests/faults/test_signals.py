"""Signals during a fit: it ends between two steps with everything saved, or saves and goes on; handlers come and go.

The long form: ``python tests/faults/campaign.py signals --trials 200 --signal SIGTERM``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from helpers import EventLog, batches, make_learner, on, raising
from torch import nn

from faults.campaign import SMALL, events, signals
from faults.runs import RUNS
from loopkit import Learner, TrainingPhase, every
from loopkit.checkpoint import disk, storage
from loopkit.engine.life.signals import Signals
from loopkit.plugins import History
from loopkit.plugins.checkpoint import Checkpoint

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def sending(hook, number=signal.SIGTERM, at=0, phase=None, name="sending"):
    """A plugin that sends this process a signal at the ``at``-th call of a hook (of a phase)."""
    seen = []

    def act(**given):
        if phase is None or given["phase"].name == phase:
            seen.append(hook)
            if len(seen) == at + 1:
                os.kill(os.getpid(), number)

    return on(hook, act, name)


@contextmanager
def handlers(function):
    """All three signals go to ``function``."""
    before = {number: signal.signal(number, function) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def same_handlers():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_sigterm_ends_the_fit_after_the_step_with_code_143():
    log = EventLog()
    learner = make_learner(sending("update_end", at=1), log, History())
    with pytest.raises(SystemExit) as caught:
        learner.fit(batches(4), batches(2), epochs=2)
    assert caught.value.code == 143
    assert (learner.result.reason, learner.result.message) == ("signal", "SIGTERM")
    assert (learner.result.steps, learner.result.epochs, learner.result.history) == (2, 0, [])
    assert log.count("step_end") == 2
    assert log.count("epoch_end") == log.count("phase_end") == 0
    assert log.lines[-1].split()[-1] == "fit_end"


def test_sigint_ends_the_fit_after_the_step_with_keyboard_interrupt():
    learner = make_learner(sending("step_begin", signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(4), epochs=2)
    assert learner.progress.steps == 1
    assert learner.result.message == "SIGINT"


def test_second_sigint_ends_at_once():
    log = EventLog()
    learner = make_learner(sending("step_begin", signal.SIGINT), sending("loss_begin", signal.SIGINT, name="b"), log)
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(4), epochs=2)
    assert learner.progress.steps == log.count("step_end") == 0
    assert log.count("fit_end") == 1
    assert learner.result.reason == "error"


def test_sigint_after_sigterm_ends_at_once():
    learner = make_learner(sending("step_begin", signal.SIGTERM), sending("loss_begin", signal.SIGINT, name="b"))
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches(4), epochs=2)
    assert learner.progress.steps == 0


def test_sigterm_that_comes_twice_at_once_is_one():
    learner = make_learner(sending("step_begin"), sending("loss_begin", name="b"))
    with pytest.raises(SystemExit) as caught:
        learner.fit(batches(4), epochs=2)
    assert caught.value.code == 143
    assert learner.progress.steps == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_interrupt_return_gives_the_result(number):
    learner = make_learner(sending("step_end", number, at=1))
    result = learner.fit(batches(4), epochs=2, on_interrupt="return")
    assert (result.reason, result.message, result.steps) == ("signal", number.name, 2)


def test_on_interrupt_none_leaves_signals_alone():
    got = []
    with handlers(lambda number, frame: got.append(number)):
        learner = make_learner(sending("step_end", at=1))
        assert learner.fit(batches(4), epochs=2, on_interrupt=None).reason == "epochs"
    assert got == [signal.SIGTERM]


def test_on_interrupt_of_another_word_is_refused():
    with pytest.raises(ValueError, match="on_interrupt is 'stop'"):
        make_learner().fit(batches(2), epochs=1, on_interrupt="stop")


def test_sigusr1_saves_and_goes_on_with_equal_bits(tmp_path):
    whole = make_learner()
    whole.fit(batches(4), epochs=2)
    saver = Checkpoint(tmp_path, save=every(updates=100), keep=9)
    learner = make_learner(sending("step_begin", signal.SIGUSR1, at=1), saver)
    assert learner.fit(batches(4), epochs=2).reason == "epochs"
    assert [(m.about["reason"], m.about["progress"]["steps"]) for m in storage.listing(tmp_path)][1:] == [
        ("SIGUSR1", 2)
    ]
    assert torch.equal(learner.model.weight, whole.model.weight)


@pytest.mark.parametrize("number", NUMBERS)
def test_handler_that_was_there_is_called_and_restored(number):
    got = []
    with handlers(lambda number, frame: got.append((number, frame is not None))):
        there = signal.getsignal(number)
        learner = make_learner(sending("step_end", number))
        learner.fit(batches(4), epochs=1, on_interrupt="return")
        assert signal.getsignal(number) is there
    assert got == [(number, True)]


def test_handlers_are_restored_after_an_error_and_after_cancelled_begin():
    for hook in ("fit_begin", "step_end", "fit_end"):
        learner = make_learner(raising(hook, ValueError("oh")))
        with pytest.raises(ValueError, match="oh"):
            learner.fit(batches(4), epochs=1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert make_learner(sending("step_end")).fit(batches(4), epochs=1).steps == 4
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_handler_is_installed_off_the_main_thread_and_a_line_names_that(capsys):
    found = []
    learner = make_learner(on("step_end", lambda **_: found.append(signal.getsignal(signal.SIGTERM))))
    thread = threading.Thread(target=lambda: learner.fit(batches(2), epochs=1))
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL] * 2
    assert learner.result.reason == "epochs"
    assert capsys.readouterr().err.count("off the main thread") == 1


def test_no_handler_is_left_by_imports_and_fits(trials):
    assert trials.server.call("faults.runs:handlers") == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]


@pytest.mark.parametrize(
    ("hook", "steps"), [("fit_begin", 0), ("epoch_begin", 1), ("epoch_end", 4), ("phase_end", 4), ("fit_end", 8)]
)
def test_signal_outside_of_steps_is_answered_between_the_next_two(hook, steps):
    log = EventLog()
    learner = make_learner(sending(hook), log)
    with pytest.raises(SystemExit):
        learner.fit(batches(4), epochs=2)
    assert learner.progress.steps == steps
    assert log.count("fit_end") == 1


def test_signal_in_validation_is_answered_there(tmp_path):
    learner = make_learner(sending("step_begin", at=1, phase="val"), Checkpoint(tmp_path))
    with pytest.raises(SystemExit):
        learner.fit(batches(4), batches(3), epochs=2)
    assert learner.progress.epochs == 1
    log = EventLog()
    again = make_learner(log, Checkpoint(tmp_path, resume=True))
    again.fit(batches(4), batches(3), epochs=2)
    assert log.lines[1] == "val: epoch_begin"
    assert log.lines[2].startswith("val 2: step_begin")


def test_signal_in_a_pass_that_a_hook_runs_is_answered_after_the_step(tmp_path):
    inner = []

    def evaluate(learner, phase, step):
        if phase.name == "train" and step.index == 1:
            learner.evaluate(batches(3))
            inner.append(learner.progress.steps)

    learner = make_learner(on("step_end", evaluate), sending("loss_begin", at=1, phase="val"), Checkpoint(tmp_path))
    with pytest.raises(SystemExit):
        learner.fit(batches(4), epochs=1)
    assert inner == [2]
    assert storage.listing(tmp_path)[0].about["progress"]["steps"] == 2


def test_signal_in_a_loop_of_ones_own_leaves_fitting(tmp_path):
    reached = []
    learner = make_learner(sending("step_end", at=5), Checkpoint(tmp_path, save=every(updates=100)))

    def loop():
        with learner.rounds():
            for epoch in range(3):
                learner.run("train", batches(4))
                reached.append(epoch)

    with pytest.raises(SystemExit) as caught:
        loop()
    assert (caught.value.code, learner.result.reason, reached) == (143, "signal", [0])
    assert storage.listing(tmp_path)[0].about["progress"]["steps"] == 6


def test_signal_between_two_passes_of_ones_own_is_answered_before_the_next(tmp_path):
    learner = make_learner(Checkpoint(tmp_path))

    def loop():
        with learner.rounds():
            for _ in range(3):
                learner.run("train", batches(4))
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        loop()
    assert (learner.progress.steps, learner.result.reason) == (4, "signal")
    assert storage.listing(tmp_path)[0].about["progress"]["steps"] == 4


class Interrupting:
    """Batches; while the one at ``at`` is made, a signal comes."""

    def __init__(self, count, at):
        self.batches, self.at = batches(count), at

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for index, batch in enumerate(self.batches):
            if index == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch


@pytest.mark.parametrize("at", [0, 2])
def test_signal_while_a_loop_over_steps_fetches_a_batch_is_answered_after_its_step(tmp_path, at):
    learner = make_learner(Checkpoint(tmp_path))

    def loop():
        with learner.rounds():
            for _ in range(2):
                with learner.epoch("train", data=Interrupting(5, at)) as epoch:
                    for batch in epoch.batches():
                        epoch.step(batch)

    with pytest.raises(SystemExit):
        loop()
    assert (learner.progress.steps, learner.progress.epochs) == (at + 1, 0)
    assert storage.listing(tmp_path)[0].about["progress"]["steps"] == at + 1


@pytest.mark.parametrize("at", [0, 1])
def test_signal_while_a_function_makes_the_data_is_answered_before_its_first_step(at):
    calls = []

    def data():
        calls.append(1)
        if len(calls) == at + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batches(4)

    learner = make_learner()
    with pytest.raises(SystemExit):
        learner.fit(data, epochs=3)
    assert learner.progress.steps == 4 * at


@pytest.mark.parametrize("at", [0, 1])
def test_run_that_a_signal_ends_while_a_function_makes_the_data_resumes_exactly(tmp_path, at):
    def trained(folder, kill=None):
        calls = []

        def data():
            calls.append(1)
            order = torch.randperm(4)
            if len(calls) - 1 == kill:
                os.kill(os.getpid(), signal.SIGTERM)
            return [batches(4)[index] for index in order]

        torch.manual_seed(0)
        learner = make_learner(Checkpoint(folder, resume="auto"))
        with suppress(SystemExit):
            learner.fit(data, epochs=3)
        return learner

    whole = trained(tmp_path / "whole")
    trained(tmp_path / "ended", kill=at)
    resumed = trained(tmp_path / "ended")
    assert torch.equal(resumed.model.weight, whole.model.weight)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_forked_in_a_fit_dies_by_sigterm():
    ends = []

    def sleep(started):
        started.set()
        time.sleep(60)

    def fork(step, **given):
        context = multiprocessing.get_context("fork")
        started = context.Event()
        child = context.Process(target=sleep, args=(started,))
        child.start()
        assert started.wait(60)  # Python drops what comes while it is still forking
        child.terminate()
        child.join(60)
        ends.append(child.exitcode)
        child.kill()
        child.join()

    learner = make_learner(on("step_end", fork))
    assert learner.fit(batches(1), epochs=1).reason == "epochs"
    assert ends == [-signal.SIGTERM]


@pytest.mark.parametrize("how", ["raise", "return", None])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_a_fit_that_a_hook_runs_is_the_outer_ones(tmp_path, number, how):
    log = EventLog()
    inner = make_learner(sending("step_begin", number, at=1))
    outer = make_learner(
        on("step_end", lambda step, **_: inner.fit(batches(4), epochs=1, on_interrupt=how)), log, Checkpoint(tmp_path)
    )
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
        outer.fit(batches(3), epochs=1)
    assert (inner.progress.steps, inner.result.reason) == (4, "epochs")
    assert (outer.progress.steps, outer.result.reason) == (1, "signal")
    assert (log.count("epoch_end"), log.count("fit_end")) == (0, 1)
    assert [m.about["progress"]["steps"] for m in storage.listing(tmp_path)] == [1]


def test_second_sigint_ends_a_fit_that_a_hook_runs_and_the_outer_one():
    inner = make_learner(sending("step_begin", signal.SIGINT), sending("loss_begin", signal.SIGINT, name="b"))
    outer = make_learner(on("step_end", lambda step, **_: inner.fit(batches(4), epochs=1)))
    with pytest.raises(KeyboardInterrupt):
        outer.fit(batches(3), epochs=1)
    assert (inner.current, outer.current) == (None, None)


@pytest.mark.parametrize("number", NUMBERS)
def test_handler_that_was_there_is_called_after_the_save(tmp_path, number):
    saved = []

    def look(number, frame):
        saved.append([m.about["progress"]["steps"] for m in storage.listing(tmp_path)])

    with handlers(look):
        learner = make_learner(sending("step_begin", number, at=1), Checkpoint(tmp_path, save=every(updates=100)))
        learner.fit(batches(4), epochs=1, on_interrupt="return")
    assert saved == [[2]]


@pytest.mark.parametrize("how", ["raise", "return"])
def test_handler_that_exits_ends_the_process_after_the_save(tmp_path, how):
    def leave(number, frame):
        raise SystemExit(7)

    with handlers(leave):
        learner = make_learner(sending("step_begin", at=1), Checkpoint(tmp_path))
        with pytest.raises(SystemExit) as caught:
            learner.fit(batches(4), epochs=2, on_interrupt=how)
        assert signal.getsignal(signal.SIGTERM) is leave
    assert caught.value.code == 7
    assert learner.current is None
    assert [m.about["progress"]["steps"] for m in storage.listing(tmp_path)] == [2]


def test_second_sigterm_ends_a_loader_that_hangs(tmp_path):
    def hang():
        yield from batches(3)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.25)
        time.sleep(60)

    learner = make_learner(Checkpoint(tmp_path, save=every(updates=1)))
    begun = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        learner.fit(hang(), epochs=1)
    assert time.monotonic() - begun < 30
    assert caught.value.code == 143
    assert learner.current is None
    assert storage.verify(storage.listing(tmp_path)[0].path).about["progress"]["steps"] == 3


def test_sigterm_saves_an_open_window_and_stop_closes_it(tmp_path):
    whole = make_learner(accumulate=3)
    whole.fit(batches(6), epochs=1)
    learner = make_learner(sending("step_end", at=3), Checkpoint(tmp_path), accumulate=3)
    with pytest.raises(SystemExit):
        learner.fit(batches(6), epochs=1)
    assert (learner.progress.steps, learner.progress.updates) == (4, 1)
    again = make_learner(Checkpoint(tmp_path, resume=True), accumulate=3)
    assert again.fit(batches(6), epochs=1).updates == 2
    assert torch.equal(again.model.weight, whole.model.weight)

    def stop(learner, step, **_):
        if step.index == 3:
            learner.stop("enough")

    stopped = make_learner(on("step_end", stop), accumulate=3)
    stopped.fit(batches(6), epochs=1)
    assert (stopped.progress.steps, stopped.progress.updates) == (4, 2)


class Two(TrainingPhase):
    """Two models with an optimizer each, of which the second is updated in every other step."""

    def step(self, learner, step):
        step.inputs, step.targets = step.batch
        for name in ("a", "b")[: 1 + step.index % 2]:
            step.backward(learner.loss_fn(learner.model[name](step.inputs), step.targets), name)
            step.update(name)


def two(*plugins):
    torch.manual_seed(0)
    models = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
    optimizers = {name: (lambda params: torch.optim.Adam(params, lr=0.1)) for name in models}
    return Learner(models, nn.MSELoss(), optimizers, plugins=plugins, phases=[Two()], accumulate=2, standard=False)


@pytest.mark.parametrize("at", range(7))
def test_sigterm_with_several_optimizers_and_windows_goes_on_exactly(tmp_path, at):
    whole = two()
    whole.fit(batches(7), epochs=1)
    with pytest.raises(SystemExit):
        two(sending("step_end", at=at), Checkpoint(tmp_path)).fit(batches(7), epochs=1)
    again = two(Checkpoint(tmp_path, resume=True))
    again.fit(batches(7), epochs=1)
    for name, model in whole.models.items():
        assert torch.equal(model.weight, again.models[name].weight)
    assert again.progress == whole.progress


def test_signal_during_a_save_is_answered_after_it(tmp_path):
    class Sending(disk.System):
        sent = False

        def fsync(self, file):
            super().fsync(file)
            if not self.sent and os.path.exists(tmp_path / ".lock") and learner.progress.steps == 2:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)

    learner = make_learner(Checkpoint(tmp_path, save=every(updates=2), keep=9))
    before, disk.system = disk.system, Sending()
    try:
        with pytest.raises(SystemExit):
            learner.fit(batches(4), epochs=2)
    finally:
        disk.system = before
    assert [m.about["progress"]["steps"] for m in storage.listing(tmp_path)][-1] == 2
    assert learner.progress.steps == 2


def test_error_in_step_end_leaves_no_checkpoint_of_a_half_ended_step(tmp_path):
    learner = make_learner(raising("step_end", ValueError("oh"), at=2), Checkpoint(tmp_path, save=every(updates=2)))
    with pytest.raises(ValueError, match="oh"):
        learner.fit(batches(4), epochs=2)
    assert [m.about["progress"]["steps"] for m in storage.listing(tmp_path)] == [2]


@pytest.mark.parametrize("hook", ["epoch_end", "update_end"])
def test_error_at_the_end_of_a_pass_leaves_no_checkpoint_of_a_half_ended_one(tmp_path, hook):
    error = raising(hook, ValueError("oh")) if hook == "epoch_end" else _raising_at_update(2)
    learner = make_learner(error, Checkpoint(tmp_path, save=every(updates=1)), accumulate=3)
    with pytest.raises(ValueError, match="oh"):
        learner.fit(iter(batches(4)), epochs=1)
    assert [m.about["progress"]["updates"] for m in storage.listing(tmp_path)] == [1]


def _raising_at_update(count):
    def act(learner, **_):
        if learner.progress.updates == count:
            raise ValueError("oh")

    return on("update_end", act)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_between_resuming_and_the_first_step_loses_no_open_pass(tmp_path, number):
    whole = make_learner(History(steps=True))
    whole.fit(batches(4), epochs=2)
    with pytest.raises(SystemExit):
        make_learner(sending("step_end", at=5), History(steps=True), Checkpoint(tmp_path)).fit(batches(4), epochs=2)
    for _ in range(2):
        learner = make_learner(sending("fit_begin", number), History(steps=True), Checkpoint(tmp_path, resume=True))
        learner.fit(batches(4), epochs=2, on_interrupt="return")
    learner = make_learner(History(steps=True), Checkpoint(tmp_path, resume=True))
    learner.fit(batches(4), epochs=2)
    assert torch.equal(learner.model.weight, whole.model.weight)
    assert learner.plugins["history"].step_rows == whole.plugins["history"].step_rows


@pytest.mark.slow
def test_runs_end_and_go_on_exactly_by_sigterm_at_random_times(trials):
    quick = tuple(replace(run, epochs=2) for run in RUNS if run.data != "loader2")
    signals(trials, 12, seed=0, runs=quick[::2], most=2)
    assert trials.counts["answered"] >= 3  # how many depends on how fast the machine starts


def test_run_goes_on_exactly_after_a_signal_at_any_event(trials):
    events(trials, SMALL, signal.SIGINT, step=31)
    events(trials, SMALL, signal.SIGUSR1, step=67)
    events(trials, replace(SMALL, accumulate=3, background=True), signal.SIGTERM, step=31)
    assert trials.counts["answered"] > 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", NUMBERS)
def test_runs_end_and_go_on_exactly_by_200_signals(trials, number):
    signals(trials, 200, seed=1, number=number)
    assert trials.counts["answered"] > 100


def test_signal_while_handlers_are_removed_leaves_none_behind(monkeypatch):
    ours, look = lambda number, frame: None, signal.getsignal
    before = {number: signal.signal(number, ours) for number in (signal.SIGTERM, signal.SIGCHLD)}
    try:
        caught = Signals(lambda: None, lambda: False)
        caught.install()
        sent = []

        def late(number):
            if not sent:
                sent.append(number)
                signal.raise_signal(signal.SIGTERM)
            return look(number)

        monkeypatch.setattr(signal, "getsignal", late)
        caught.remove()
        assert caught.ending == signal.SIGTERM
        assert [look(signal.SIGTERM), look(signal.SIGCHLD)] == [ours, ours]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
