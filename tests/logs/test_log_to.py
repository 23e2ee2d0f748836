"""``LogTo``: when it writes, what backends get, and what it does when they fail."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import batches, make_learner, on, raising
from torch import nn

import loopkit.plugins.log_to
from loopkit import Learner, every, hookimpl
from loopkit.errors import LogError, PluginError
from loopkit.logs import (
    Backend,
    Csv,
    Graph,
    Histogram,
    Hyperparameters,
    Image,
    JsonLines,
    Record,
    Run,
    Table,
    Text,
    Value,
    read_log,
)
from loopkit.plugins import Checkpoint, LogHyperparameters, LogMetrics, LogTo, Metrics, SaveOptions


class Memory(Backend):
    """Keeps what it is given, call by call."""

    kinds = (Value, Text)
    any_names = True

    def __init__(self, fails: str = "", name: str = "") -> None:
        self.calls: list[str] = []
        self.writes: list[list[Record]] = []
        self.runs: list[Run] = []
        self.result: Any = None
        self._fails = fails
        if name:
            self.name = name

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what == self._fails:
            raise OSError(f"{what} is broken")

    def open(self, run: Run) -> None:
        self.runs.append(run)
        self._call("open")

    def write(self, records: Sequence[Record]) -> None:
        self.writes.append(list(records))
        self._call("write")

    def flush(self) -> None:
        self._call("flush")

    def close(self, result: Any) -> None:
        self.result = result
        self._call("close")

    def state_dict(self) -> dict[str, Any]:
        self._call("state_dict")
        return {"writes": len(self.writes)}

    def load_state_dict(self, state: Any) -> None:
        self.calls.append("load_state_dict")


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds on the clock of ``LogTo``, which stands still."""
    seconds = [0.0]
    monkeypatch.setattr("loopkit.plugins.log_to.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def log_index(name: str = "index", hook: str = "step_end") -> Any:
    return on(hook, lambda learner, step, **given: learner.log(name, step.index), f"logs_{name}")


def values(memory: Memory) -> list[list[Any]]:
    return [[record.value for record in records] for records in memory.writes]


# When


def test_log_to_writes_at_the_end_of_each_pass() -> None:
    memory = Memory()
    make_learner(LogTo(memory), log_index()).fit(batches(3), batches(2), epochs=1)
    assert values(memory) == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert memory.calls == ["open", "write", "write", "flush", "state_dict", "close", "state_dict"]


def test_log_to_writes_every_so_many_training_steps() -> None:
    memory = Memory()
    make_learner(LogTo(memory, every=2), log_index()).fit(batches(5), batches(3), epochs=1)
    assert values(memory) == [[0.0, 1.0], [2.0, 3.0], [4.0], [0.0, 1.0, 2.0]]


def test_log_to_writes_after_some_seconds(now: list[float]) -> None:
    memory = Memory()
    slow = on("step_begin", lambda step, **given: now.append(now.pop() + (6.0 if step.index == 2 else 1.0)), "slow")
    make_learner(LogTo(memory, seconds=7.0), log_index(), slow).fit(batches(5), epochs=1)
    assert values(memory) == [[0.0, 1.0, 2.0], [3.0, 4.0]]


def test_log_to_keeps_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopkit.plugins.log_to, "MOST", 4)
    memory = Memory()
    make_learner(LogTo(memory), log_index()).fit(batches(9), epochs=1)
    assert [len(records) for records in memory.writes] == [4, 4, 1]


def test_log_to_never_writes_in_a_step() -> None:
    memory, busy = Memory(), []
    learner = make_learner(LogTo(memory, every=1), log_index(), log_index("first", "step_begin"))
    memory._call = lambda what: busy.append(learner.current.epoch is not None and not learner.current.epoch.at_edge)  # type: ignore[method-assign]
    learner.fit(batches(3), epochs=1)
    assert len(busy) == 8
    assert not any(busy)


def test_log_to_comes_after_all_that_log_at_the_end() -> None:
    memory = Memory()
    late = [
        on(hook, lambda learner, **given: learner.log("late", 1.0), f"z_{hook}") for hook in ("phase_end", "fit_end")
    ]
    make_learner(LogTo(memory), *late).fit(batches(1), epochs=1)
    assert values(memory) == [[1.0], [1.0]]
    assert memory.calls[-4:] == ["flush", "state_dict", "close", "state_dict"]


def test_log_to_takes_what_is_logged_when_the_fit_begins() -> None:
    for name in ("a", "z"):
        memory = Memory()
        first = on("fit_begin", lambda learner, **given: learner.log("first", 1.0), name)
        make_learner(LogTo(memory), first).fit(batches(1), epochs=1)
        assert values(memory) == [[1.0]]


def test_log_to_takes_nothing_outside_of_a_fit() -> None:
    memory = Memory()
    learner = make_learner(LogTo(memory), log_index())
    learner.log("x", 1.0)
    learner.evaluate(batches(2))
    learner.fit(batches(1), epochs=1)
    learner.evaluate(batches(2))
    learner.log("x", 1.0)
    assert values(memory) == [[0.0]]


def test_what_comes_after_the_end_is_said_once() -> None:
    memory = Memory()
    log = on("fit_end", lambda learner, **given: [learner.log("late", i) for i in range(3)], "late", after=("log_to",))
    learner = make_learner(LogTo(memory), log, order=["late", "log_to"])
    with pytest.warns(UserWarning, match="'late' came after the logs were closed") as seen:
        learner.fit(batches(1), epochs=1)
    assert len(seen) == 1


def test_what_a_fit_logged_that_could_not_begin_is_not_of_the_next() -> None:
    memory, fits = Memory(), []

    def begin(learner: Learner, **given: Any) -> None:
        fits.append(1)
        learner.log("fit", len(fits))
        if len(fits) == 1:
            raise ValueError("no")

    learner = make_learner(LogTo(memory), on("fit_begin", begin, "begin"), order=["begin", "log_to"])
    with pytest.raises(ValueError, match="no"):
        learner.fit(batches(1), epochs=1)
    learner.fit(batches(1), epochs=1)
    assert values(memory) == [[2.0]]


def test_what_another_thread_logs_is_not_lost() -> None:
    memory, stop, logged, threads = Memory(), threading.Event(), [], []

    def work(learner: Learner) -> None:
        while not stop.is_set() and len(logged) < 50_000:  # else it can log faster than that is written
            learner.log("number", len(logged))
            logged.append(float(len(logged)))

    def begin(learner: Learner, **given: Any) -> None:
        threads.append(threading.Thread(target=work, args=(learner,)))
        threads[0].start()

    def end(**given: Any) -> None:
        stop.set()
        threads[0].join(60)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        make_learner(LogTo(memory, every=1), on("fit_begin", begin, "begin"), on("epoch_end", end, "end")).fit(
            batches(300), epochs=1
        )
    finally:
        stop.set()
        sys.setswitchinterval(interval)
    assert list(chain(*values(memory))) == logged


def test_two_fits_are_two_runs() -> None:
    memory = Memory()
    learner = make_learner(LogTo(memory), log_index())
    for _ in range(2):
        learner.fit(batches(1), epochs=1)
    assert memory.calls.count("open") == memory.calls.count("close") == 2
    assert [run.resumed for run in memory.runs] == [False, False]


def test_log_to_added_in_a_fit_writes_from_then_on() -> None:
    memory = Memory()

    def act(learner: Learner, step: Any, **given: Any) -> None:
        if step.index == 1:
            learner.add(LogTo(memory))

    make_learner(on("step_begin", act), log_index()).fit(batches(4), epochs=1)
    assert values(memory) == [[1.0, 2.0, 3.0]]


def test_log_to_removed_in_a_fit_writes_what_it_has() -> None:
    memory = Memory()

    def act(learner: Learner, step: Any, **given: Any) -> None:
        if step.index == 2:
            learner.remove("log_to")

    make_learner(LogTo(memory), on("step_begin", act), log_index()).fit(batches(4), epochs=1)
    assert values(memory) == [[0.0, 1.0]]
    assert memory.calls[-2:] == ["close", "state_dict"]


def test_run_tells_what_it_was_made_with() -> None:
    memory = Memory()
    make_learner(LogTo(memory), accumulate=2).fit(batches(2), epochs=1)
    known = memory.runs[0].hyperparameters
    assert {name: known[name] for name in ("accumulate", "model", "optimizer", "optimizer.lr", "world_size")} == {
        "accumulate": 2,
        "model": "Linear",
        "optimizer": "SGD",
        "optimizer.lr": 0.1,
        "world_size": 1,
    }


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:log 'memory' cannot write Hyperparameters")
def test_model_whose_shapes_are_not_known_yet_is_logged() -> None:
    memory = Memory()
    model = nn.LazyLinear(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugins = [LogTo(memory), LogHyperparameters(), log_index()]
    Learner(model, nn.MSELoss(), optimizer, plugins=plugins, standard=False).fit(batches(1), epochs=1)
    known = memory.runs[0].hyperparameters
    assert (known["model"], "model.parameters" in known) == ("LazyLinear", False)
    assert values(memory) == [[0.0]]


def test_backend_is_told_how_the_fit_ended() -> None:
    memory = Memory()
    with pytest.raises(ValueError, match="no"):
        make_learner(LogTo(memory), log_index(), raising("step_end", ValueError("no"), at=1)).fit(batches(3), epochs=1)
    assert memory.result.reason == "error"
    assert values(memory) == [[0.0]]


# Backends that fail, or cannot


@pytest.mark.parametrize("fails", ["open", "write", "flush", "state_dict", "close"])
def test_backend_that_fails_is_disabled_with_one_warning(fails: str, tmp_path: Path) -> None:
    broken, whole = Memory(fails), Memory(name="whole")
    learner = make_learner(LogTo(broken, whole), log_index(), Checkpoint(tmp_path))
    message = rf"log 'memory' is disabled for the rest of the fit: its {fails} failed, OSError: {fails} is broken"
    with pytest.warns(UserWarning, match=message) as seen:
        learner.fit(batches(2), epochs=2)
    assert len(seen) == 1
    assert list(chain(*values(whole))) == [0.0, 1.0] * 2
    assert broken.calls.count(fails) == 1


def test_backend_that_failed_is_tried_again_in_the_next_fit() -> None:
    broken = Memory("write")
    learner = make_learner(LogTo(broken), log_index())
    for _ in range(2):
        with pytest.warns(UserWarning, match="disabled"):
            learner.fit(batches(1), epochs=1)
    assert broken.calls.count("open") == 2


def test_what_was_written_before_a_failure_is_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    class Full(JsonLines):
        name = "json_lines"

        def write(self, records: Sequence[Record]) -> None:
            if records[0].step == 4:
                raise OSError("no space left")
            super().write(records)

    def run(log: Backend, epochs: int) -> None:
        save = Checkpoint(tmp_path / "checkpoints", save=every(updates=2), resume="auto")
        make_learner(LogTo(log, every=1), log_index(), save).fit(batches(6), epochs=epochs)

    with pytest.warns(UserWarning, match="disabled for the rest of the fit: its write failed"):
        run(Full(tmp_path / "log.jsonl"), 1)
    run(JsonLines(tmp_path / "log.jsonl"), 2)
    assert [record.step for record in read_log(tmp_path).of("index")] == [1, 2, 3, 7, 8, 9, 10, 11, 12]


def test_error_of_a_path_ends_the_fit_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    learner = make_learner(LogTo(Memory(), tmp_path / "file" / "log.jsonl"))
    with pytest.raises(LogError, match="a part of the path is a file: choose another path"):
        learner.fit(batches(1), epochs=1)
    assert learner.progress.steps == 0
    assert learner.plugins["log_to"]._sinks["memory"].backend.calls == [
        "open",
        "flush",
        "state_dict",
        "close",
        "state_dict",
    ]


def test_kind_that_a_backend_cannot_write_is_said_once() -> None:
    memory = Memory()

    def act(learner: Learner, **given: Any) -> None:
        learner.log("table", Table(["a"], [[1]]))
        learner.log("text", Text("b"))

    with pytest.warns(UserWarning, match=r"log 'memory' cannot write Table \('table'\)") as seen:
        make_learner(LogTo(memory), on("step_end", act)).fit(batches(3), epochs=2)
    assert len(seen) == 1
    assert [record.name for record in memory.writes[0]] == ["text"] * 3


# Arguments


def test_paths_are_backends_by_their_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sinks = LogTo("a.jsonl", tmp_path / "b.csv", "c", "d")._sinks
    assert {name: type(sink.backend) for name, sink in sinks.items()} == {
        "json_lines": JsonLines,
        "csv": Csv,
        "json_lines_2": JsonLines,
        "json_lines_3": JsonLines,
    }
    paths = [sink.backend.path.relative_to(tmp_path).as_posix() for sink in sinks.values()]  # type: ignore[attr-defined]
    assert paths == ["a.jsonl", "b.csv", "c/log.jsonl", "d/log.jsonl"]
    assert LogTo()._sinks["json_lines"].backend.path == tmp_path / "runs/run/log.jsonl"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("log.json", r"ends in '.json' \(did you mean '.jsonl'\?\)"),
        ("log.txt", r"known are .jsonl, .csv"),
        (JsonLines, r"JsonLines is a class; give an instance"),
        (5, r"is no backend: give a path"),
        ("", r"is no backend"),
        ("a\0b", r"is no backend"),
    ],
)
def test_log_to_refuses(given: Any, fix: str) -> None:
    with pytest.raises(PluginError, match=fix):
        LogTo(given)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_counts_from_one(every: Any) -> None:
    with pytest.raises(PluginError, match="it is a whole number, from 1"):
        LogTo(every=every)
    with pytest.raises(PluginError, match="it is a whole number, from 1"):
        LogMetrics(every=every)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "1"])
def test_seconds_are_above_0(seconds: Any) -> None:
    with pytest.raises(PluginError, match="it is a number of seconds above 0"):
        LogTo(seconds=seconds)


def test_backends_are_those_that_were_given(tmp_path: Path) -> None:
    memory = Memory()
    first, second = LogTo(memory, tmp_path / "log.csv").backends
    assert (first, second.path) == (memory, tmp_path / "log.csv")


# Training is the same


def weights(*plugins: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    learner = make_learner(*plugins, model=model, seed=3)
    learner.fit(batches(6), batches(2), epochs=2)
    return [p.detach().clone() for p in learner.model.parameters()] + [torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:log 'csv' cannot write")
def test_training_with_logs_is_bitwise_the_same(tmp_path: Path) -> None:
    def act(learner: Learner, step: Any, **given: Any) -> None:
        learner.log("loss", step.loss)
        learner.log("number", 1)
        learner.log("text", Text("a"))
        learner.log("outputs", Histogram(step.outputs))
        learner.log("inputs", Image(step.inputs.abs() / step.inputs.abs().max()))
        learner.log("table", Table(["x"], [[1.5]]))
        learner.log("options", Hyperparameters({"lr": 0.1}))
        learner.log("model", Graph(learner.model))

    logs = LogTo(tmp_path, tmp_path / "log.csv", every=2)
    with_logs = weights(logs, on("step_end", act), LogMetrics(every=1), Metrics())
    without = weights(Metrics())
    assert all(torch.equal(one, other) for one, other in zip(with_logs, without, strict=True))
    assert len(read_log(tmp_path).of("outputs")) == 16


# LogMetrics


def test_log_metrics_logs_those_of_each_pass() -> None:
    memory = Memory()
    learner = make_learner(LogTo(memory), LogMetrics(), Metrics(half=lambda outputs, targets: torch.tensor(0.5)))
    learner.fit(batches(2), batches(1), epochs=1)
    logged = {(record.name, record.phase): record.value for records in memory.writes for record in records}
    metrics = {(name, name.split("/")[0]): value for name, value in learner.metrics.items()}
    assert logged == {**metrics, ("lr", "train"): 0.1}
    assert len(logged) == 5


def test_log_metrics_logs_running_values() -> None:
    memory = Memory()
    losses: list[float] = []
    note = on("step_end", lambda step, **given: losses.append(float(step.loss.detach())), "note")
    make_learner(LogTo(memory), LogMetrics(every=2), Metrics(), note).fit(batches(5), epochs=1)
    found: dict[str, list[Any]] = {}
    for record in memory.writes[0]:
        found.setdefault(record.name, []).append((record.step, record.value))
    assert found["train/loss/step"] == [(2, losses[1]), (4, losses[3])]
    assert [step for step, _ in found["train/loss/running"]] == [2, 4]
    assert found["lr"] == [(2, 0.1), (4, 0.1)]
    assert [step for step, _ in found["train/loss"]] == [5]


@pytest.mark.gpu
def test_no_step_waits_for_the_device() -> None:
    """Values of a device are cloned there and read between steps."""
    memory = Memory()

    def act(learner: Learner, step: Any, **given: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        total.add_(1)
        learner.log("total", total)
        learner.log("loss", step.loss)
        torch.cuda.set_sync_debug_mode("default")

    total = torch.zeros((), device="cuda")
    model = nn.Linear(3, 1).cuda()
    data = [(inputs.cuda(), targets.cuda()) for inputs, targets in batches(7)]
    make_learner(LogTo(memory, every=2), on("step_end", act), model=model).fit(data, epochs=2)
    logged = [record for records in memory.writes for record in records]
    assert [record.value for record in logged if record.name == "total"] == [float(i) for i in range(1, 15)]
    assert all(type(record.value) is float for record in logged)


class LogsBatches:
    """Logs what a data pipeline might, before the step."""

    name = "logs_batches"

    @hookimpl
    def move_batch(self, learner: Learner, batch: Any) -> Any:
        learner.log("logged", 1.0)
        return batch


class LogsLate:
    """Logs among the readers of everything, and its name comes after that of the checkpoint."""

    name = "logs_late"

    @hookimpl(reads=("*",))
    def step_end(self, learner: Learner) -> None:
        learner.log("logged", 1.0)


@pytest.mark.parametrize("logs", [LogsBatches, LogsLate])
def test_resumed_log_has_no_gap(tmp_path: Path, logs: type) -> None:
    def fit(directory: Path, *more: Any) -> list[int]:
        saver = Checkpoint(
            directory / "checkpoints", save=every(updates=3), resume="auto", options=SaveOptions(on_error=False)
        )
        make_learner(LogTo(directory), saver, logs(), *more).fit(batches(8), epochs=1)
        return [record.step for record in read_log(directory).of("logged")]

    whole = fit(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "stopped", raising("step_begin", ZeroDivisionError(), at=7, name="stops"))
    assert fit(tmp_path / "stopped") == whole
    assert len(whole) == 8


def test_backend_that_has_let_go_keeps_the_state_of_its_last_flush() -> None:
    class Lets(Memory):
        closed = False

        def close(self, result: Any) -> None:
            self.closed = True

        def state_dict(self) -> dict[str, Any]:
            if self.closed:
                raise ValueError("I/O operation on closed file")
            return {"written": sum(map(len, values(self)))}

    log = LogTo(Lets())
    make_learner(log, log_index()).fit(batches(3), epochs=1)
    assert log.state_dict()["backends"]["lets"] == {"written": 3}
