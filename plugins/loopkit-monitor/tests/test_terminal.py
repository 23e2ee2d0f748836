"""What ``loopkit watch`` writes."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import SECONDS, Writer, eventually
from training import On, batches, make_learner

from loopkit import every
from loopkit.plugins import LogMetrics, LogTo, Metrics
from loopkit_monitor import Monitor, terminal
from loopkit_monitor.overview import Overview
from loopkit_monitor.store import Store
from loopkit_monitor.terminal import main, printable, sparkline

COMMAND = [sys.executable, "-P", "-m", "loopkit_monitor.terminal"]
TIMES = re.compile(r"(time|left) (\d+\.\d s|\d+ s|\d+:\d+|\?)")


def written(*words):
    """The exit code and the lines, with times as T."""
    out = io.StringIO()
    code = main([str(word) for word in words], out)
    return code, [TIMES.sub(r"\1 T", line) for line in out.getvalue().splitlines()]


def trained(writer, epochs, steps=4):
    """Epochs of some steps."""
    for epoch in range(epochs):
        for _ in range(steps):
            writer.step += 1
            writer.time += 10
            writer.value("train/loss/step", 1 / writer.step)
        for name in ("train/loss", "val/loss"):
            writer.value(name, 1 / writer.step, phase=name.partition("/")[0], epoch=epoch + 1)


def test_each_epoch_has_a_line(tmp_path):
    writer = Writer(tmp_path / "a" / "log.jsonl")
    writer.begin(planned={"epochs": 4, "steps": 16}, epoch=0, step=0, loopkit="0.1", torch="2.13")
    trained(writer, 3)
    writer.end(reason="stop", by="early_stopping", message="no better")
    code, lines = written(tmp_path / "a")
    assert code == 0
    assert lines == [
        f"a: finished, process {os.getpid()} on {os.uname().nodename}, loopkit 0.1, torch 2.13",
        "epoch 1/4  train/loss 0.2500  val/loss 0.2500  time T  █▃▂▁",
        "epoch 2/4  train/loss 0.1250  val/loss 0.1250  time T  █▄▃▂▂▁▁▁",
        "epoch 3/4  train/loss 0.0833  val/loss 0.0833  time T  █▄▃▂▂▂▁▁▁▁▁▁",
        "finished: stop by early_stopping: no better",
    ]


def test_time_and_time_left_are_those_of_the_log(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.line(kind="run", time=writer.time, planned={"epochs": 4, "steps": 16}, epoch=0, step=0)
    trained(writer, 2)
    out = io.StringIO()
    assert main([str(tmp_path), "--once"], out) == 0
    first, second = out.getvalue().splitlines()[1:3]
    assert "time 40 s  left 2:00" in first
    assert "time 40 s  left 1:20" in second


def test_resources_are_those_of_the_time(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0)
    for name, value in (("process_cpu", 90.4), ("process_memory", 1.5e9), ("gpu0", 7.0), ("gpu0_memory", 2e10)):
        writer.value(f"resources/{name}", value)
    trained(writer, 1)
    writer.time += 1
    writer.value("resources/process_cpu", 20.0, epoch=1)
    writer.end()
    lines = written(tmp_path)[1]
    assert lines[1].endswith("cpu 90%  mem 1.40 GiB  gpu0 7%  gpu0 mem 18.63 GiB")


def test_a_run_of_a_learner_is_watched(tmp_path):
    make_learner(Monitor(tmp_path, every=2), Metrics(), LogTo(tmp_path)).fit(batches(6), batches(2), epochs=3)
    code, lines = written(tmp_path)
    assert code == 0
    assert [line.split("  ")[0] for line in lines[1:]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3", "finished: epochs"]
    assert all(
        re.search(r"  train/loss \d\.\d{4}  val/loss \d\.\d{4}  time T  left T  \S+$", line) for line in lines[1:4]
    )


@pytest.mark.parametrize("plugins", [(), (Monitor(every=10),)])
def test_without_metrics_the_end_has_epochs_and_steps(tmp_path, plugins):
    log = On("epoch_begin", lambda learner: learner.log("note", 1.0))
    learner = make_learner(LogTo(tmp_path), *plugins, log)
    if plugins:
        learner.remove("log_metrics")
    learner.fit(batches(6), epochs=2)
    code, lines = written(tmp_path)
    assert (code, lines[1:]) == (0, ["epoch 2/2  step 12/12", "finished: epochs"])


def test_a_second_fit_goes_on_counting(tmp_path):
    learner = make_learner(LogTo(tmp_path), LogMetrics(), Metrics())
    learner.fit(batches(2), epochs=2)
    learner.fit(batches(2), epochs=2)
    assert [line.split("  ")[0] for line in written(tmp_path)[1][1:5]] == [
        f"epoch {number}/4" for number in (1, 2, 3, 4)
    ]


def test_validation_within_an_epoch_has_a_line(tmp_path):
    plugins = LogTo(tmp_path), LogMetrics(), Metrics()
    make_learner(*plugins).fit(batches(4), batches(1), epochs=2, validate=every(updates=3))
    shown = [re.sub(r" \d\.\d+", "", line.partition("  time")[0]) for line in written(tmp_path)[1][1:-1]]
    assert shown == [
        "epoch 1/2  val/loss",
        "epoch 1/2  train/loss",
        "epoch 2/2  val/loss",
        "epoch 2/2  train/loss  val/loss",  # the last weights
    ]


def test_what_is_logged_in_each_step_is_no_line(tmp_path):
    log = On("step_end", lambda learner: learner.log("train/temperature", 1.0))
    make_learner(LogTo(tmp_path), LogMetrics(), Metrics(), log).fit(batches(9), epochs=2)
    assert len(written(tmp_path)[1]) == 4


def test_an_error_is_told_with_its_place(tmp_path):
    def fail(learner):
        raise ValueError("too\nbad")

    with pytest.raises(ValueError, match="too"):
        make_learner(LogTo(tmp_path), LogMetrics(every=1), On("phase_end", fail, "wrong")).fit(batches(2), epochs=1)
    code, lines = written(tmp_path)
    assert code == 1
    assert lines[-4:] == [
        "crashed: error",
        "  ValueError: too",
        "  bad",
        "  loopkit: in phase_end of plugin 'wrong', phase 'train', epoch 1",
    ]


def test_a_killed_run_is_told(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    process = subprocess.Popen(["sleep", "60"])
    writer.line(kind="run", host=os.uname().nodename, pid=process.pid, time=0)
    trained(writer, 1)
    process.kill()
    process.wait(SECONDS)
    code, lines = written(tmp_path)
    assert code == 1
    assert lines[-1] == "crashed: the process is gone, without a record of its end"


def test_once_shows_what_goes_on(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(planned={"epochs": 2, "steps": 8}, epoch=0, step=0)
    trained(writer, 1, steps=2)
    writer.value("run/time_left", 75.0, epoch=1)
    writer.value("run/throughput/steps_per_second", 12.5, epoch=1)
    code, lines = written(tmp_path, "--once")
    assert code == 0
    assert lines[-1] == "live  step 2/8  train/loss/step 0.5000  █▁  12.5 steps/s  left T"


def test_it_follows_until_the_run_ends(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0, step=0)
    with subprocess.Popen([*COMMAND, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        assert ": live, " in process.stdout.readline()
        trained(writer, 2)
        assert process.stdout.readline().startswith("epoch 1  ")
        trained_before = process.poll()
        writer.end()
        assert process.stdout.readline().startswith("epoch 2  ")
        assert process.stdout.read() == "finished: epochs\n"
        timer.cancel()
    assert (trained_before, process.returncode) == (None, 0)


def test_a_log_that_is_cut_back_goes_on(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0, step=0)
    trained(writer, 1)
    size = writer.size
    trained(writer, 2)
    store, out = Store(tmp_path), io.StringIO()
    watch = terminal.Watch(store, terminal.choose(store), out)
    watch.write()
    writer.cut(size)
    writer.step, writer.time = 4, writer.time + 1
    writer.begin(resumed=True, epoch=1, step=4)
    writer.step = 4
    for step in (5, 6):
        writer.step = step
        writer.value("train/loss/step", 1.0, epoch=1)
    watch.write()
    writer.step = 8
    writer.value("train/loss", 0.125, epoch=2)
    writer.end()
    watch.write()
    lines = [line.partition("  ")[0] for line in out.getvalue().splitlines()[1:]]
    assert lines == ["epoch 1", "epoch 2", "resumed from step 6", "epoch 2", "finished: epochs"]


def test_a_terminal_gets_a_line_that_moves(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0, step=0)
    trained(writer, 1)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "30", "PYTHONUTF8": "1"}
    process = subprocess.Popen([*COMMAND, str(tmp_path)], stdout=theirs, env=environment)
    os.close(theirs)
    try:
        said = b""
        while b"live  step 4" not in said:
            said += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:
            pass  # the end of a terminal
    finally:
        process.kill()
        process.wait(SECONDS)
        os.close(ours)
    moving = said.decode().split("\r\x1b[K")[1:]
    assert moving
    assert all(len(line.strip()) <= 29 for line in moving)
    assert said.endswith(b"\r\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (130, "epoch 1  train/loss 0.2500  train/f1 0.5000  val/loss 0.2500  val/f1 2,048  time T  █▃▂▁  cpu 90%"),
        (96, "epoch 1  train/loss 0.2500  train/f1 0.5000  val/loss 0.2500  val/f1 2,048  time T  █▃▂▁"),
        (78, "epoch 1  train/loss 0.2500  train/f1 0.5000  val/loss 0.2500  time T"),
        (60, "epoch 1  train/loss 0.2500  val/loss 0.2500  time T"),
        (20, "epoch 1  train/loss 0.2500  val/loss 0.2500"),
    ],
)
def test_an_epoch_fits_the_width_of_a_terminal(tmp_path, monkeypatch, columns, line):
    monkeypatch.setenv("COLUMNS", str(columns))
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0)
    trained(writer, 1)
    writer.value("train/f1", 0.5, epoch=1)
    writer.value("val/f1", 2048.0, phase="val", epoch=1)
    writer.value("resources/process_cpu", 90.0, epoch=1)
    writer.end()
    out = Terminal()
    assert main([str(tmp_path)], out) == 0
    assert TIMES.sub(r"\1 T", out.getvalue().splitlines()[1]) == line


@pytest.mark.parametrize("losses", [(12.5, 0.5, 1e-5), (1e9, 3.0, 2.0), (0.5, 0.25, 0.0)])
def test_figures_of_epochs_are_below_each_other(tmp_path, monkeypatch, losses):
    monkeypatch.setenv("COLUMNS", "80")
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(planned={"epochs": 12, "steps": 48}, epoch=0, step=0)
    for epoch, loss in enumerate(losses * 4, 1):
        writer.step += 4
        writer.value("train/loss", loss, epoch=epoch)
        writer.value("val/loss", 0.5, phase="val", epoch=epoch)
    writer.end()
    out = Terminal()
    assert main([str(tmp_path)], out) == 0
    lines = [line for line in out.getvalue().splitlines() if line.startswith("epoch")]
    assert len(lines) == 12
    assert len({(line.index("train/loss"), line.index("val/loss"), line.index("time")) for line in lines}) == 1
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("out", [Terminal, io.StringIO])
def test_figures_of_many_epochs_are_measured_once(tmp_path, monkeypatch, out):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0, step=0)
    trained(writer, 100, steps=1)
    writer.end()
    calls, metric = [], terminal._metric
    monkeypatch.setattr(terminal, "_metric", lambda *words: calls.append(words) or metric(*words))
    assert main([str(tmp_path)], out()) == 0
    assert len(calls) == 2 * 2 * 100  # two metrics, measured and written


def test_validations_within_epochs_are_below_the_epochs_and_have_their_step(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plugins = LogTo(tmp_path), LogMetrics(), Metrics()
    make_learner(*plugins).fit(batches(6), batches(1), epochs=2, validate=every(updates=2))
    out = Terminal()
    assert main([str(tmp_path)], out) == 0
    lines = [line for line in out.getvalue().splitlines() if line.startswith("epoch")]
    assert len({line.index("val/loss") for line in lines}) == 1
    assert len({line.index("time") for line in lines}) == 1
    assert [re.findall(r"step (\d+)", line) for line in lines] == [["2"], ["4"], [], ["8"], ["10"], []]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-m", "loopkit", "watch"]])
def test_a_closed_output_is_no_error(tmp_path, command):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0)
    writer.end()
    words = ["sh", "-c", 'exec "$@" >&-', "sh", *command, str(tmp_path)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_cannot_command_a_terminal(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    evil = "\x1b]0;owned\x07\r\x9b2J\u202e"
    writer.begin(epoch=0, loopkit=evil)
    trained(writer, 1)
    writer.value(f"val/{evil}", 1.0, epoch=1)
    writer.end(reason=evil, message=evil, by=evil, error=evil, notes=[evil])
    out = io.StringIO()
    main([str(tmp_path)], out)
    assert all(each.isprintable() or each == "\n" for each in out.getvalue())
    assert printable("a\x1b[2J") == "a\\x1b[2J"


def test_an_output_without_blocks_gets_plain_characters(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0)
    trained(writer, 2)
    writer.end()
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, "ascii")
    main([str(tmp_path)], out)
    assert raw.getvalue().decode("ascii").splitlines()[1].endswith("  #-._")


def test_the_latest_of_several_runs_is_watched(tmp_path):
    for name, time in (("a", 2e9), ("b", 1e9)):
        writer = Writer(tmp_path / name / "log.jsonl")
        writer.time = time
        writer.begin(epoch=0)
        trained(writer, 1)
        writer.end()
    assert written(tmp_path)[1][0].startswith("a: finished")


def some_runs(root):
    for name, epochs in (("a", 3), ("a-run-with-a-name-that-is-far-too-long-for-a-line", 12), ("c", 1), ("old", 2)):
        writer = Writer(root / name / "log.jsonl")
        writer.begin(planned={"epochs": 12, "steps": 48}, epoch=0, step=0)
        trained(writer, epochs)
        writer.value("val/f1", 0.5, phase="val", epoch=epochs)
        writer.end(reason="error" if name == "c" else "epochs")
    (root / "old" / "monitor.json").write_text('{"archived": true}')


@pytest.mark.parametrize("columns", [200, 80, 60])
def test_all_runs_have_a_line_each_with_their_figures_below_each_other(tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    some_runs(tmp_path)
    out = Terminal()
    assert main([str(tmp_path), "--all"], out) == 1
    head, *lines = out.getvalue().splitlines()
    assert sorted(line.split()[1] for line in lines) == ["crashed", "finished", "finished"]
    assert any("...name-that-is-far-too-long-for-a-line"[10:] in line for line in lines)
    assert max(map(len, [head, *lines])) < columns
    end = head.index("step") + 4
    assert sorted(line[:end].split()[-2:] for line in lines) == [["1/12", "4"], ["12/12", "48"], ["3/12", "12"]]
    assert ("val/loss" in head, "train/loss" in head) == (columns >= 80, columns >= 200)


def test_table_of_all_runs_moves_in_a_terminal_and_is_written_once_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    writer = Writer(tmp_path / "a" / "log.jsonl")
    writer.begin(epoch=0, step=0)
    trained(writer, 1)
    terminal, file = Terminal(), io.StringIO()
    tables = [Overview(Store(tmp_path), out) for out in (terminal, file)]
    assert [each.write() for each in tables] == ["live", "live"]
    assert file.getvalue() == ""
    trained(writer, 1)
    writer.end()
    assert [each.write() for each in tables] == ["finished", "finished"]
    assert terminal.getvalue().count("\x1b[2F\x1b[J") == 1
    assert len(file.getvalue().splitlines()) == 2


@pytest.mark.parametrize("rows", [5, 10, 24])
def test_more_runs_than_lines_of_a_terminal_are_counted(tmp_path, monkeypatch, rows):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", str(rows))
    for number in range(30):
        writer = Writer(tmp_path / f"{number}" / "log.jsonl")
        writer.begin(epoch=0)
        writer.end()
    out = Terminal()
    assert main([str(tmp_path), "--all", "--once"], out) == 0
    lines = out.getvalue().splitlines()
    assert len(lines) < rows
    assert lines[-1] == f"and {30 - rows + 3} more"


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_no_log_is_an_error(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert written(tmp_path / name) == (2, [])
    assert "loopkit watch: error: " in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(tmp_path):
    writer = Writer(tmp_path / "log.jsonl")
    writer.begin(epoch=0)
    process = subprocess.Popen([*COMMAND, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        process.stdout.readline()
        process.stdout.close()
        trained(writer, 2)
        assert eventually(lambda: process.poll() is not None)
        assert (process.returncode, process.stderr.read()) == (0, "")


def test_sparkline_is_of_means():
    assert sparkline(np.arange(8.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([0.0, 2.0, 7.0, 7.0]), 2) == "▁█"
    assert sparkline(np.array([1.0, np.nan, 1.0])) == "▁▁"
    assert sparkline(np.array([np.inf, 1.0])) == ""
