"""Progress: bars on a terminal, lines elsewhere, and silence where nothing can be written."""

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest
import torch
from helpers import batches, make_learner, on

from loopkit import Phase, every, hookimpl
from loopkit.errors import PluginError
from loopkit.plugins import Checkpoint, EarlyStopping, History, Metrics, Progress, live_chart
from loopkit.plugins.progress import duration, number


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Replaces ``time.monotonic``; each step takes some seconds of it."""

    def __init__(self, monkeypatch, seconds=1.0):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.plugin = on("step_begin", lambda **_: setattr(self, "now", self.now + seconds), name="tick")


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def ones(outputs, targets):
    return torch.ones(len(outputs))


def bars(text):
    """What a terminal was shown, drawing by drawing, without blanks."""
    return [part for part in (part.strip() for part in re.split(r"[\r\n]|\x1b\[A", text)) if part]


# Plain lines


def test_lines_of_a_fit(clock):
    file = io.StringIO()
    make_learner(Progress(file=file), Metrics(ones=ones, loss=ones), clock.plugin).fit(batches(3), batches(2), epochs=3)
    assert file.getvalue() == (
        "epoch 1/3  train/loss 1.0000  train/ones 1.0000  val/loss 1.0000  val/ones 1.0000  time 5.0 s  left 10 s\n"
        "epoch 2/3  train/loss 1.0000  train/ones 1.0000  val/loss 1.0000  val/ones 1.0000  time 5.0 s  left 5.0 s\n"
        "epoch 3/3  train/loss 1.0000  train/ones 1.0000  val/loss 1.0000  val/ones 1.0000  time 5.0 s  left 0.0 s\n"
    )


def test_lines_without_metrics(clock):
    file = io.StringIO()
    make_learner(Progress(file=file), clock.plugin).fit(batches(3), epochs=2)
    assert file.getvalue() == "epoch 1/2  time 3.0 s  left 3.0 s\nepoch 2/2  time 3.0 s  left 0.0 s\n"


def test_lines_of_a_fit_without_a_planned_number_of_epochs(clock):
    file = io.StringIO()
    make_learner(Progress(file=file), clock.plugin).fit(batches(3), max_steps=4)
    assert file.getvalue() == "epoch 1  time 3.0 s\nepoch 2  time 1.0 s\n"


def test_lines_of_a_second_fit_count_from_one(clock):
    file = io.StringIO()
    learner = make_learner(Progress(file=file), clock.plugin)
    learner.fit(batches(3), epochs=1)
    clock.now += 100.0
    learner.fit(batches(3), epochs=1)
    assert file.getvalue() == "epoch 1/1  time 3.0 s  left 0.0 s\n" * 2


def test_lines_with_a_validation_every_other_epoch(clock):
    file = io.StringIO()
    learner = make_learner(Progress(file=file), Metrics(loss=ones), clock.plugin)
    learner.fit(batches(1), batches(1), epochs=2, validate=every(epochs=2))
    assert file.getvalue() == (
        "epoch 1/2  train/loss 1.0000  time 1.0 s  left 1.0 s\n"
        "epoch 2/2  train/loss 1.0000  val/loss 1.0000  time 2.0 s  left 0.0 s\n"
    )


def test_lines_with_validations_inside_the_epoch(clock):
    file = io.StringIO()
    learner = make_learner(Progress(file=file), Metrics(loss=ones), clock.plugin)
    learner.fit(batches(2), batches(1), epochs=2, validate=every(updates=1))
    assert file.getvalue() == (
        "epoch 1/2, update 1  val/loss 1.0000  time 2.0 s\n"
        "epoch 1/2, update 2  val/loss 1.0000  time 4.0 s\n"
        "epoch 1/2  train/loss 1.0000  val/loss 1.0000  time 4.0 s  left 4.0 s\n"
        "epoch 2/2, update 3  val/loss 1.0000  time 2.0 s\n"
        "epoch 2/2, update 4  val/loss 1.0000  time 4.0 s\n"
        "epoch 2/2  train/loss 1.0000  val/loss 1.0000  time 4.0 s  left 0.0 s\n"
    )


@pytest.mark.parametrize("given", [2, every(updates=2)])
def test_lines_come_after_so_many_updates(clock, given):
    file = io.StringIO()
    learner = make_learner(Progress(file=file, every=given), Metrics(loss=ones), clock.plugin)
    learner.fit(batches(5), epochs=1)
    assert file.getvalue() == (
        "epoch 1/1, update 2  train/loss 1.0000  time 2.0 s\n"
        "epoch 1/1, update 4  train/loss 1.0000  time 4.0 s\n"
        "epoch 1/1  train/loss 1.0000  time 5.0 s  left 0.0 s\n"
    )


@pytest.mark.parametrize("given", [0, -1, 2.5, True, every(epochs=1)])
def test_number_of_updates_between_lines_is_checked(given):
    with pytest.raises(PluginError, match=r"every is .*give a number of updates"):
        Progress(every=given)


@pytest.mark.parametrize(
    ("no_color", "term", "has"), [(None, "xterm", True), ("1", "xterm", False), (None, "dumb", False)]
)
def test_best_epoch_is_marked_on_a_terminal_and_has_a_color_there(monkeypatch, clock, no_color, term, has):
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    values = iter((3.0, 1.0, 2.0))
    metric = Metrics(x=lambda outputs, targets: torch.full((len(outputs),), next(values)), phase="val")
    file = Terminal()
    stop = EarlyStopping("val/x", patience=9, mode="min")
    make_learner(Progress(bar=True, file=file), metric, stop, clock.plugin).fit(batches(1), batches(1), epochs=3)
    rows = re.findall(r"^(?:\x1b\[[0-9;]*[mK])? +(\*?)\d/3 ", file.getvalue().replace("\r", "\n"), re.MULTILINE)
    assert rows == ["", "*", ""]
    assert ("\x1b[1;32m" in file.getvalue()) == has


@pytest.mark.parametrize("pause_after", [1, 2])
def test_best_epoch_of_a_resumed_fit_is_that_of_the_whole_one(tmp_path, pause_after):
    def marks(epochs, pause):
        values = iter((3.0, 1.0, 0.5, 2.0)[epochs:])
        metric = Metrics(x=lambda outputs, targets: torch.full((len(outputs),), next(values)), phase="val")
        file = Terminal()
        stop = EarlyStopping("val/x", patience=9, mode="min")

        def end(learner, phase, **_):
            if pause and phase.training and learner.progress.epochs == pause:
                learner.pause()

        save = Checkpoint(tmp_path, resume="auto")
        learner = make_learner(Progress(True, file), History(), metric, stop, save, on("step_begin", end))
        with suppress(SystemExit):  # of the pause
            learner.fit(batches(1), batches(1), epochs=4)
        text = file.getvalue().replace("\r", "\n")
        return re.findall(r"^(?:\x1b\[[0-9;]*[mK])? +(\*?)\d/4 ", text, re.MULTILINE)

    marks(0, pause_after)
    resumed = marks(pause_after, None)
    assert resumed[-2:] == ["*", ""]


def failing(hook="step_begin", epoch=0):
    """Fails in step 1 of a training epoch, once."""
    raised = []

    def fail(learner, phase, step):
        if not raised and phase.training and step.index == 1 and learner.progress.epochs == epoch:
            raised.append(1)
            raise RuntimeError("deliberate")

    return on(hook, fail, name="failing")


def test_lines_of_a_fit_that_fails_are_those_of_its_complete_epochs(clock):
    file = io.StringIO()
    learner = make_learner(Progress(file=file), Metrics(loss=ones), clock.plugin, failing(epoch=1))
    with pytest.raises(RuntimeError, match="deliberate"):
        learner.fit(batches(2), batches(1), epochs=3, validate=every(updates=1))
    lines = [line for line in file.getvalue().splitlines() if ", update" not in line]
    assert lines == ["epoch 1/3  train/loss 1.0000  val/loss 1.0000  time 4.0 s  left 8.0 s"]


def test_lines_are_not_written_for_passes_outside_a_fit():
    file = io.StringIO()
    learner = make_learner(Progress(file=file), Metrics())
    learner.evaluate(batches(2))
    learner.predict(batches(2))
    assert file.getvalue() == ""


def test_lines_go_to_standard_output_by_default(capsys, clock):
    make_learner(Progress(), clock.plugin).fit(batches(1), epochs=1)
    assert capsys.readouterr() == ("epoch 1/1  time 1.0 s  left 0.0 s\n", "")


def test_lines_are_chosen_on_a_terminal_by_bar_false(clock):
    file = Terminal()
    make_learner(Progress(bar=False, file=file), clock.plugin).fit(batches(1), epochs=1)
    assert file.getvalue() == "epoch 1/1  time 1.0 s  left 0.0 s\n"


def test_time_left_is_not_negative_when_the_wall_clock_jumps(monkeypatch):
    jumps = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    file, terminal = io.StringIO(), Terminal()
    make_learner(Progress(file=file)).fit(batches(2), epochs=2)
    make_learner(Progress(file=terminal)).fit(batches(2), epochs=2)
    assert "-" not in file.getvalue()
    assert "0%" in terminal.getvalue()
    assert "-" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (3599.6, "1:00:00"),
        (7385, "2:03:05"),
    ],
)
def test_duration_text(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.12345, "0.1235"),
        (-2.5, "-2.5000"),
        (0.001, "0.0010"),
        (0.00012345, "1.23e-04"),
        (99999.0, "99999.0000"),
        (123456.0, "1.23e+05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_number_text(value, text):
    assert number(value) == text


# Bars


def test_bar_shows_phase_epoch_and_steps(clock):
    file = Terminal()
    make_learner(Progress(file=file), clock.plugin).fit(batches(3), batches(2), epochs=2)
    drawn = bars(file.getvalue())
    for title, steps in {"epoch 1/2 train": 3, "epoch 1/2 val": 2, "epoch 2/2 train": 3, "epoch 2/2 val": 2}.items():
        shown = [re.search(r"(\d+)/(\d+) \[", text).groups() for text in drawn if text.startswith(title)]
        assert shown == [(str(n), str(steps)) for n in range(steps + 1)]


@pytest.mark.parametrize(("hook", "phase"), [("step_end", "train"), ("step_end", "val"), ("phase_end", "train")])
def test_epoch_has_the_same_number_in_the_bar_and_in_the_note_on_an_error(clock, hook, phase):
    def fail(learner, **at):
        if at["phase"].name == phase and learner.progress.steps >= 4:
            raise ZeroDivisionError

    file = Terminal()
    learner = make_learner(Progress(file=file), clock.plugin, on(hook, fail, "fails"))
    with pytest.raises(ZeroDivisionError) as caught:
        learner.fit(batches(2), batches(1), epochs=3)
    assert [text for text in bars(file.getvalue()) if text.startswith("epoch")][-1].startswith(f"epoch 2/3 {phase}")
    assert caught.value.__notes__[0].startswith(f"loopkit: in {hook} of plugin 'fails', phase '{phase}', epoch 2")


def test_bar_shows_values_late(clock):
    file = Terminal()
    make_learner(Progress(file=file), Metrics(loss=ones), clock.plugin).fit(batches(3), epochs=1)
    drawn = [text for text in bars(file.getvalue()) if text.startswith("epoch 1/1 train")]
    assert ["loss 1" in text for text in drawn] == [False, False, True, True]


def test_bar_shows_the_time_of_the_monotonic_clock(clock):
    file = Terminal()
    make_learner(Progress(file=file), clock.plugin).evaluate(batches(4))
    assert [re.search(r"\[(\S+)<", text)[1] for text in bars(file.getvalue())] == [
        "00:00",
        "00:01",
        "00:02",
        "00:03",
        "00:04",
    ]


def test_bar_is_redrawn_ten_times_a_second_at_most(monkeypatch):
    clock, file = Clock(monkeypatch, seconds=0.03), Terminal()
    make_learner(Progress(file=file), clock.plugin).evaluate(batches(9))
    assert [re.search(r"(\d+)/9", text)[1] for text in bars(file.getvalue())] == ["0", "4", "8"]


def test_bars_of_short_epochs_begin_ten_times_a_second_at_most(monkeypatch):
    clock, file = Clock(monkeypatch, seconds=0.03), Terminal()
    learner = make_learner(Progress(file=file), clock.plugin)
    for length in (1, 1, 1, 1, 1, 6):
        learner.evaluate(batches(length))
    drawn = [re.search(r"\d+/\d+", text)[0] for text in bars(file.getvalue())]
    assert drawn == ["0/1", "0/1", "1/1", "0/6", "3/6"]  # of the first, the fourth and the sixth


def test_bar_of_data_without_a_length(clock):
    file = Terminal()
    make_learner(Progress(file=file), clock.plugin).evaluate(lambda: iter(batches(2)))
    assert [text.split(" [")[0] for text in bars(file.getvalue())] == ["val: 0step", "val: 1step", "val: 2step"]


def test_bars_outside_a_fit_show_the_phase_alone(clock):
    file = Terminal()
    learner = make_learner(Progress(file=file), clock.plugin)
    learner.fit(batches(1), epochs=1)
    file.truncate(file.seek(0))
    learner.evaluate(batches(1))
    learner.predict(batches(1))
    assert {text.split(":")[0] for text in bars(file.getvalue())} == {"val", "predict"}


def test_bar_of_a_validation_inside_training_belongs_to_its_epoch(clock):
    file = Terminal()
    learner = make_learner(Progress(file=file), Metrics(), clock.plugin)
    learner.fit(batches(2), batches(1), epochs=1, validate=every(updates=1))
    titles = list(dict.fromkeys(text.split(":")[0] for text in bars(file.getvalue()) if ":" in text))
    assert titles == ["epoch 1/1 train", "epoch 1/1 val"]


def test_bar_of_training_goes_on_after_a_validation_inside(clock):
    file = Terminal()
    make_learner(Progress(file=file), clock.plugin).fit(batches(2), batches(1), epochs=1, validate=every(updates=1))
    drawn = [text for text in bars(file.getvalue()) if text.startswith("epoch 1/1 train")]
    assert [re.search(r"(\d+)/2", text)[1] for text in drawn if "/2" in text][-1] == "2"


def test_rows_on_a_terminal_have_one_header(clock):
    file = Terminal()
    learner = make_learner(Progress(file=file), Metrics(loss=ones), clock.plugin)
    learner.fit(batches(1), batches(1), epochs=2)
    rows = [text for text in bars(file.getvalue()) if "%" not in text]
    assert rows == [
        "epoch  train/loss  val/loss      time      left",
        "1/2      1.0000    1.0000     2.0 s     2.0 s",
        "2/2      1.0000    1.0000     2.0 s     0.0 s",
    ]


def on_terminal(columns, *plugins):
    """What a fit shows on a terminal of so many columns, line by line."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, columns, 0, 0))
    with open(theirs, "w") as stream:
        learner = make_learner(Progress(file=stream), Metrics(ones=ones, loss=ones), *plugins)
        learner.fit(batches(1), batches(1), epochs=2)
    text = b""
    with open(ours, "rb", buffering=0) as shown, suppress(OSError):  # at the end, as the other side is closed
        while part := shown.read(4096):
            text += part
    return [part.rstrip() for part in re.split(r"[\r\n]|\x1b\[A", text.decode()) if part.strip()]


def test_rows_on_a_narrow_terminal_fit_and_say_what_is_left_out(clock):
    shown = on_terminal(40, clock.plugin)
    assert max(map(len, shown)) <= 40
    assert [text for text in shown if "%" not in text and "0/1" not in text] == [
        "too narrow for train/ones, time, left",
        "   epoch  train/loss  val/loss  val/ones",
        "     1/2      1.0000    1.0000    1.0000",
        "     2/2      1.0000    1.0000    1.0000",
    ]


def test_rows_on_a_wide_terminal_show_all(clock):
    rows = [text for text in on_terminal(120, clock.plugin) if "%" not in text]
    assert rows[0].split() == ["epoch", "train/loss", "train/ones", "val/loss", "val/ones", "time", "left"]
    assert len(rows) == 3


def test_rows_on_a_terminal_without_a_size_show_all(clock):
    assert not any("too narrow" in text for text in on_terminal(0, clock.plugin))


def test_rows_on_a_terminal_have_a_new_header_for_other_columns(clock):
    file = Terminal()
    learner = make_learner(Progress(file=file), Metrics(loss=ones), clock.plugin)
    learner.fit(batches(1), batches(1), epochs=2, validate=every(epochs=2))
    assert len([text for text in bars(file.getvalue()) if text.startswith("epoch  train")]) == 2


def test_bars_are_chosen_elsewhere_by_bar_true(clock):
    file = io.StringIO()
    make_learner(Progress(bar=True, file=file), clock.plugin).evaluate(batches(1))
    assert "1/1" in file.getvalue()


def test_bars_are_drawn_in_a_notebook(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    make_learner(Progress()).evaluate(batches(1))
    assert "0/1" in capsys.readouterr().out


class Output:
    """A cell's output: what `display` shows, and how often it was drawn again."""

    def __init__(self):
        self.shown = []

    def display(self, content, display_id):
        assert display_id is True
        self.shown.append([content.data])
        return self

    def update(self, content):
        self.shown[-1].append(content.data)


@pytest.fixture
def cell(monkeypatch):
    display = pytest.importorskip("IPython.display", reason="the extra `docs` has it")
    output = Output()
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(display, "display", output.display)
    monkeypatch.setattr(live_chart, "REDRAW_SECONDS", 0.0)
    return output


def fit_with_a_chart(**options):
    progress = Progress(file=io.StringIO(), chart=True)
    learner = make_learner(progress, History(), Metrics())
    for _ in range(2):
        learner.fit(batches(2), batches(1), epochs=3, **options)


@pytest.mark.parametrize("options", [{}, {"validate": every(updates=1)}])
def test_chart_grows_in_a_notebook(cell, options):
    fit_with_a_chart(**options)
    assert len(cell.shown) == 2  # one a fit
    first, *_ = cell.shown
    points = [drawn.count(",") for drawn in first]
    assert points == sorted(points)
    assert len(set(points)) >= 3
    assert first[-1].count("<svg") == 1
    assert first[-1].count("<polyline") == 2


def test_chart_is_drawn_in_notebooks_only(cell, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel")
    fit_with_a_chart()
    assert cell.shown == []


class Rows:
    """Keeps a history in a form of its own."""

    name = "own"
    provides = "history"

    def __init__(self, **attributes):
        vars(self).update(attributes)

    @hookimpl
    def fit_begin(self):
        """It has to have a hook."""


def closed(*_given, **_options):
    raise BrokenPipeError("the kernel is gone")


BROKEN = {
    "display": (lambda output: setattr(output, "display", closed), r"BrokenPipeError\('the kernel is gone'\)"),
    "update": (lambda output: setattr(output, "update", closed), r"BrokenPipeError\('the kernel is gone'\)"),
    "rows": (lambda output: Rows(rows=[{"val/loss": 0.5}]), r"KeyError\('updates'\)"),
    "values": (lambda output: Rows(rows=[{"updates": 1, "val/loss": "low"}]), "TypeError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_chart_that_cannot_be_drawn_is_switched_off_with_one_warning(cell, kind, monkeypatch):
    spoil, message = BROKEN[kind]
    history = spoil(cell) or History()
    monkeypatch.setattr(sys.modules["IPython.display"], "display", cell.display)
    learner = make_learner(Progress(file=io.StringIO(), chart=True), history, Metrics())
    with pytest.warns(UserWarning, match=f"{message}.*so it is switched off for this fit") as warned:
        learner.fit(batches(2), batches(1), epochs=3)
    assert len(warned) == 1
    assert learner.progress.epochs == 3


@pytest.mark.parametrize("attributes", [{}, {"rows": None}, {"rows": ["text"]}])
def test_history_in_another_form_has_no_chart(cell, attributes):
    learner = make_learner(Progress(file=io.StringIO(), chart=True), Rows(**attributes), Metrics())
    learner.fit(batches(2), batches(1), epochs=2)
    assert cell.shown == []


def test_bars_go_to_a_file_in_a_notebook_only_if_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    file = io.StringIO()
    make_learner(Progress(file=file)).evaluate(batches(1))
    assert file.getvalue() == ""


@pytest.mark.parametrize("fit", [True, False], ids=["fit", "run"])
def test_bar_is_taken_away_after_an_error(clock, fit):
    from tqdm.auto import tqdm

    file = Terminal()
    learner = make_learner(Progress(file=file), clock.plugin, failing())
    with pytest.raises(RuntimeError, match="deliberate"):
        learner.fit(batches(3), epochs=1) if fit else learner.run("train", batches(3))
    assert [bar for bar in tqdm._instances if bar.fp is not None and not bar.disable] == []
    assert bars(file.getvalue().rpartition("\r")[2]) == []
    file.truncate(file.seek(0))
    learner.run("train", batches(3))
    assert "\n" not in file.getvalue()  # the bar stands in the first line again
    assert [re.search(r"(\d+)/3", text)[1] for text in bars(file.getvalue())] == ["0", "1", "2", "3"]


def test_bars_of_nested_passes_are_taken_away_after_an_error(clock):
    def fail(phase, **_):
        if phase.name == "val":
            raise RuntimeError("deliberate")

    file = Terminal()
    learner = make_learner(Progress(file=file), clock.plugin, on("step_begin", fail))
    with pytest.raises(RuntimeError, match="deliberate"):
        learner.fit(batches(2), batches(1), epochs=1, validate=every(updates=1))
    file.truncate(file.seek(0))
    learner.run("train", batches(1))
    assert "\n" not in file.getvalue()


def test_progress_added_in_mid_epoch(clock):
    def add(learner, step, **_):
        if step.index == 0 and "progress" not in learner.plugins:
            learner.add(Progress(file=file))

    file = Terminal()
    make_learner(clock.plugin, on("step_end", add)).fit(batches(2), epochs=2)
    assert "epoch 2/2 train" in file.getvalue()


def test_bar_starts_no_thread(clock):
    import threading

    before = threading.active_count()
    seen = []
    count = on("step_end", lambda **_: seen.append(threading.active_count()))
    make_learner(Progress(file=Terminal()), count).evaluate(batches(2))
    assert seen == [before, before]


# Outputs that cannot be written to


class Closed(Terminal):
    """A pipe whose reader goes away after some writes."""

    def __init__(self, left, error):
        super().__init__()
        self.left, self.error = left, error

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


ERRORS = [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), ValueError("I/O on closed file")]


@pytest.mark.parametrize("left", [0, 1, 2, 5])
@pytest.mark.parametrize("error", ERRORS, ids=["pipe", "io", "closed"])
@pytest.mark.parametrize("bar", [True, False], ids=["bar", "lines"])
def test_broken_output_ends_the_display_and_not_the_training(clock, bar, error, left):
    file = Closed(left, error)
    one, other = make_learner(Progress(bar, file), Metrics(), clock.plugin), make_learner(clock.plugin)
    for learner in (one, other):
        learner.fit(batches(3), batches(1), epochs=6)
    assert file.left == -1
    assert torch.equal(one.model.weight, other.model.weight)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break in another way there")
def test_pipe_whose_reader_is_gone_is_left_alone():
    code = (
        "import torch\n"
        "make = lambda params: torch.optim.SGD(params, 0.1)\n"
        "from loopkit import Learner\n"
        "from loopkit.plugins import Progress\n"
        "epochs = 0\n"
        "for bar in (True, False):\n"
        "    learner = Learner(torch.nn.Linear(1, 1), torch.nn.MSELoss(), make, plugins=[Progress(bar)])\n"
        "    epochs += learner.fit([(torch.ones(2, 1), torch.ones(2, 1))], epochs=3).epochs\n"
        "raise SystemExit(epochs)"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    ) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 6


@pytest.mark.parametrize("bar", [True, None], ids=["bar", "default"])
def test_closed_output_is_left_alone(bar):
    file = Terminal()
    file.close()
    learner = make_learner(Progress(bar, file))
    assert learner.fit(batches(3), epochs=1).reason == "epochs"


@pytest.mark.parametrize("bar", [True, None], ids=["bar", "default"])
def test_no_standard_output(monkeypatch, bar):
    monkeypatch.setattr(sys, "stdout", None)
    assert make_learner(Progress(bar)).fit(batches(3), epochs=1).reason == "epochs"


def test_another_standard_output_is_written_to_after_a_broken_one(monkeypatch, clock):
    learner = make_learner(Progress(), clock.plugin)
    monkeypatch.setattr(sys, "stdout", Closed(0, ERRORS[0]))
    learner.fit(batches(1), epochs=1)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    learner.fit(batches(1), epochs=1)
    assert sys.stdout.getvalue() == "epoch 1/1  time 1.0 s  left 0.0 s\n"


class Named(Phase):
    """Adds a number under a name that is not ASCII."""

    def step(self, learner, step):
        step.outputs = step.targets = step.batch[0]


def ascii_stream(terminal):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    stream.isatty = lambda: terminal
    return stream


def test_lines_on_an_ascii_output_replace_other_characters(clock):
    stream = ascii_stream(False)
    learner = make_learner(Progress(file=stream), Metrics(**{"précision": ones, "loss": ones}), clock.plugin)
    learner.fit(batches(1), epochs=1)
    assert stream.buffer.getvalue() == (
        b"epoch 1/1  train/loss 1.0000  train/pr?cision 1.0000  time 1.0 s  left 0.0 s\n"
    )


def test_bars_on_an_ascii_output_replace_other_characters(clock):
    stream = ascii_stream(True)
    learner = make_learner(Progress(file=stream), Metrics(**{"précision": ones}), clock.plugin)
    learner.run(Named("épreuve"), batches(3))
    text = stream.buffer.getvalue().decode("ascii")
    assert "?preuve: 100%|##########| 3/3" in text
    assert "pr?cision 1" in text


# What is imported and when


def test_import_brings_one_small_library_and_tqdm_bars_are_imported_when_the_first_is_drawn():
    parts = ("import loopkit, loopkit.plugins", "loopkit.Learner(torch.nn.Identity()).predict([torch.zeros(1)])")
    code = "import sys, torch\nbefore = set(sys.modules)" + "".join(
        f"\n{part}\nprint(*sorted(set(sys.modules) - before))" for part in parts
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, predicted = (set(line.split()) for line in found.stdout.splitlines())
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == {"loopkit", "pluggy"}
    assert not {name for name in predicted if name.startswith("tqdm.auto")}


def test_progress_leaves_training_bitwise_alone(clock):
    one, other = make_learner(Progress(file=Terminal()), Metrics(), clock.plugin), make_learner()
    for learner in (one, other):
        learner.fit(batches(3), batches(1), epochs=2)
    assert torch.equal(one.model.weight, other.model.weight)
