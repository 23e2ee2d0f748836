"""Offline runs, read back with wandb's own reader."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from loopkit import every, hookimpl
from loopkit.errors import LogError
from loopkit.logs import Audio, Figure, File, Graph, Histogram, Hyperparameters, Image, JsonLines, Table, Text, read_log
from loopkit.plugins import Checkpoint, LogMetrics, LogTo, Metrics
from loopkit_wandb import Wandb, wandb
from loopkit_wandb.log_file import LogFile


def folders(directory):
    return sorted(Path(directory, "wandb").glob("offline-run-*"))


class LogLoss:
    @hookimpl(reads=("loss",))
    def step_end(self, learner, step):
        learner.log("loss", step.loss)


def test_each_group_of_values_is_a_row(tmp_path, make_learner, batches, records, rows):
    backend = Wandb("digits", tmp_path, run_name="first", tags=["a"])
    learner = make_learner(LogTo(backend, JsonLines(tmp_path / "log.jsonl")), LogMetrics(), LogLoss(), Metrics())
    result = learner.fit(batches, batches[:2], epochs=2)
    (folder,) = folders(tmp_path)
    assert backend.folder == folder
    expected = []
    log = read_log(tmp_path / "log.jsonl")
    for record in log.records:
        name = record.name if "/" in record.name else f"{record.phase}/{record.name}"
        if record.name == "lr":  # logged together with the loss of its epoch
            expected[-1][name] = record.value
            continue
        row = {name: record.value, "_step": len(expected), "loopkit/epoch": record.epoch, "loopkit/step": record.step}
        expected.append(row)
    assert rows(folder) == expected
    assert [row["train/loss"] for row in expected if "train/loss" in row][-1] == result.metrics["train/loss"]
    found = records(folder)
    (run,) = [each["run"] for each in found if each["type"] == "run"]
    assert (run["project"], run["display_name"], run["run_id"]) == ("digits", "first", backend.run_id)
    assert found[-1]["type"] == "exit"
    assert found[-1]["exit"]["exit_code"] == 0
    config = {}
    for each in found:
        config |= each.get("config", {}).get("update", {})
    assert config["optimizer.lr"] == 0.1


class Killed(BaseException):
    pass


class KillAt:
    def __init__(self, step):
        self.step = step

    @hookimpl
    def step_end(self, learner):
        if learner.progress.steps == self.step:
            raise Killed


def test_a_run_that_was_killed_twice_has_the_rows_of_one_that_was_not(tmp_path, make_learner, batches, rows):
    ids = set()

    def fit(directory, *more):
        backend = Wandb(directory=directory)
        save = Checkpoint(directory / "checkpoints", save=every(updates=3), resume="auto")
        learner = make_learner(LogTo(backend, every=1), LogLoss(), LogMetrics(), Metrics(), save, *more)
        try:
            learner.fit(batches, batches[:1], epochs=4)
        finally:
            ids.add(backend.run_id)

    fit(tmp_path / "whole")
    ids.clear()
    for step in (5, 11):
        with pytest.raises(Killed):
            fit(tmp_path / "parts", KillAt(step))
    fit(tmp_path / "parts")
    parts = folders(tmp_path / "parts")
    assert (len(parts), len(ids)) == (3, 1)
    assert {part.name.split("-")[3] for part in parts} == ids
    assert rows(*parts) == rows(*folders(tmp_path / "whole"))


def test_an_earlier_checkpoint_sets_later_folders_aside(tmp_path, make_learner, batches, rows):
    def fit(epochs, resume):
        backend = Wandb(directory=tmp_path)
        save = Checkpoint(tmp_path / "checkpoints", save=every(epochs=1), keep=10, resume=resume)
        make_learner(LogTo(backend), LogLoss(), save).fit(batches, epochs=epochs)

    fit(1, None)
    first = sorted((tmp_path / "checkpoints").glob("0*"))[0]
    fit(2, "auto")
    fit(3, str(first))
    assert [row["_step"] for row in rows(*folders(tmp_path))] == list(range(12))
    assert len(list((tmp_path / "wandb").glob("replaced-*"))) == 1


def test_a_log_that_is_gone_is_a_warning(tmp_path, make_learner, batches):
    def fit(epochs):
        save = Checkpoint(tmp_path / "checkpoints", resume="auto")
        make_learner(LogTo(Wandb(directory=tmp_path)), LogLoss(), save).fit(batches, epochs=epochs)

    fit(1)
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    os.truncate(log, 100)
    with pytest.warns(UserWarning, match="ends at byte 100, before byte"):
        fit(2)


def test_kinds_are_what_wandb_shows(tmp_path, make_learner, batches, rows, records):
    from matplotlib.figure import Figure as Drawn

    (tmp_path / "notes.txt").write_text("notes")

    class LogKinds:
        @hookimpl
        def epoch_end(self, learner):
            learner.log("note", Text("a word"))
            learner.log("picture", Image(torch.zeros(3, 4, 5), caption="black"))
            learner.log("figure", Figure(Drawn(figsize=(1, 1))))
            learner.log("weights", Histogram(torch.arange(1000.0), bins=600))
            learner.log("table", Table(["a", "b"], [[1, "x"], [None, 2.5]]))
            learner.log("sound", Audio(torch.zeros(80), 8000))
            learner.log("file", File(tmp_path / "notes.txt"))
            learner.log("more", Hyperparameters({"depth": 3}))
            learner.log("graph", Graph(learner.model))

    with pytest.warns(UserWarning, match="graph") as seen:
        make_learner(LogTo(Wandb(directory=tmp_path)), LogKinds()).fit(batches, epochs=1)
    assert len(seen) == 1
    (folder,) = folders(tmp_path)
    row = {name: value for each in rows(folder) for name, value in each.items() if name.startswith("train/")}
    assert row.pop("train/note") == "a word"
    types = {name[6:-6]: value for name, value in row.items() if name.endswith("._type")}
    assert types == {
        "picture": "image-file",
        "figure": "image-file",
        "weights": "histogram",
        "table": "table-file",
        "sound": "audio-file",
    }
    assert row["train/picture.caption"] == "black"
    assert sum(row["train/weights.values"]) == 1000
    for name in ("picture", "figure", "table", "sound"):
        assert (folder / "files" / row[f"train/{name}.path"]).stat().st_size > 0
    (copied,) = folder.glob("files/logged/*/notes.txt")
    assert copied.read_text() == "notes"
    configs = [each["config"]["update"] for each in records(folder) if each["type"] == "config"]
    assert {"depth": 3} in configs


def test_what_wandb_does_not_take_is_left_out(tmp_path, make_learner, batches, rows):
    lost = tmp_path / "lost.txt"
    lost.write_text("x")

    class LogLost:
        @hookimpl
        def step_end(self, learner):
            learner.log("lost", File(lost))
            learner.log("kept", 1.0)

        @hookimpl
        def epoch_end(self):
            lost.unlink()

    with pytest.warns(UserWarning, match="leaves out 'train/lost'"):
        make_learner(LogTo(Wandb(directory=tmp_path)), LogLost()).fit(batches[:1], epochs=1)
    assert [row["train/kept"] for row in rows(*folders(tmp_path))] == [1.0]


def core_processes():
    """The processes of wandb's that this one has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            line = (path / "cmdline").read_text()
        except (OSError, ValueError):  # it has ended
            continue
        if parent == os.getpid() and "wandb-core" in line:
            found.append(int(path.name))
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="it looks for wandb's process in /proc")
def test_a_fit_goes_on_when_the_process_of_wandb_is_gone(tmp_path):
    # in a process of its own, since wandb does not start another service in this one
    program = f"""
import os, signal, sys, warnings
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from loopkit import Learner, hookimpl
from loopkit.plugins import LogTo
from loopkit_wandb import Wandb, backend
from test_backend import LogLoss, core_processes
backend.PATIENCE = 1.0

class Kill:
    @hookimpl
    def epoch_begin(self, learner):
        if learner.progress.epochs == 1:
            (core,) = core_processes()
            os.kill(core, signal.SIGKILL)

model = torch.nn.Linear(3, 1)
data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
plugins = [LogTo(Wandb(directory={str(tmp_path)!r})), LogLoss(), Kill()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
learner = Learner(model, torch.nn.MSELoss(), optimizer, plugins=plugins, standard=False)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    result = learner.fit(data, epochs=4)
print(result.reason, result.steps, len([each for each in seen if "'wandb' is disabled" in str(each.message)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["epochs 16 1"], done.stderr[-2000:]


def test_a_directory_that_cannot_be_written_is_refused_before_the_first_step(tmp_path, make_learner, batches):
    (tmp_path / "file").write_text("")
    learner = make_learner(LogTo(Wandb(directory=tmp_path / "file")))
    with pytest.raises(LogError, match=r"cannot be written: .*; give Wandb\(directory=\.\.\.\)"):
        learner.fit(batches, epochs=1)
    assert learner.progress.steps == 0


def test_the_process_stays_as_it_was(tmp_path, make_learner, batches):
    def state():
        return dict(os.environ), sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT), os.getcwd()

    make_learner(LogTo(Wandb(directory=tmp_path / "first"))).fit(batches, epochs=1)
    before = state()
    make_learner(LogTo(Wandb(directory=tmp_path / "second"))).fit(batches, epochs=1)
    assert state() == before
    assert not {"WANDB_MODE", "WANDB_SERVICE", "WANDB_ERROR_REPORTING"} & before[0].keys()


def test_wandb_is_imported_by_a_fit_and_not_before():
    program = "import sys, loopkit_wandb; loopkit_wandb.wandb(); print('wandb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"


def test_a_log_of_many_blocks_is_followed_from_where_it_was(tmp_path, make_learner, batches, rows):
    class LogLong:
        @hookimpl
        def step_end(self, learner, step):
            learner.log("long", Text("x" * (10_000 * step.index + 30_000)))

    backend = Wandb(directory=tmp_path)
    make_learner(LogTo(backend, every=1), LogLong()).fit(batches, epochs=1)
    (folder,) = folders(tmp_path)
    whole = next(folder.glob("*.wandb")).read_bytes()
    part, ends = LogFile(tmp_path / "part.wandb"), []
    for size in range(0, len(whole) + 5000, 5000):
        part.path.write_bytes(whole[:size])
        part.read()
        ends.append(part.rows)
    assert ends == sorted(ends)
    assert (ends[-1], part.end) == (len(rows(folder)), len(whole)) == (4, len(whole))


def test_the_plugin_goes_by_name(tmp_path, make_learner, batches, rows):
    learner = make_learner({"wandb": {"directory": str(tmp_path), "project": "p"}}, LogLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.fit(batches, epochs=1)
    assert len(rows(*folders(tmp_path))) == 4
    assert isinstance(wandb(), LogTo)
