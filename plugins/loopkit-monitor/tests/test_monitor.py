"""What the plugin Monitor logs, and the server that it starts."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import SECONDS, eventually
from torch import nn
from training import On, batches, make_learner

from loopkit import LoopkitError, every
from loopkit.logs import read_log
from loopkit.plugins import (
    Checkpoint,
    ClipGradNorm,
    GradNorm,
    LogHyperparameters,
    LogMetrics,
    LogTo,
    Metrics,
    MixedPrecision,
    SaveOptions,
)
from loopkit_monitor import Monitor, views
from loopkit_monitor.store import Store


def names(directory):
    return set(read_log(directory).names())


def end_process(pid):
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


# What it adds


def test_a_log_and_metrics_are_added_where_the_list_has_none(tmp_path):
    learner = make_learner(Monitor(tmp_path / "a"), Metrics())
    assert sorted(learner.plugins) == ["log_metrics", "log_to", "metrics", "monitor"]
    learner.fit(batches(20), batches(2), epochs=1)
    assert names(tmp_path / "a") >= {"train/loss", "val/loss", "train/loss/step", "lr", "run/plan", "run/model"}


def test_by_default_the_log_of_the_list_is_used(tmp_path):
    learner = make_learner(Monitor(), LogTo(tmp_path / "b"), LogMetrics())
    assert sorted(learner.plugins) == ["log_metrics", "log_to", "monitor"]
    learner.fit(batches(10), epochs=1)
    assert names(tmp_path / "b") == {
        "run/plan",
        "run/model",
        "run/throughput/steps_per_second",
        "run/throughput/samples_per_second",
        "run/time_left",
        "run/lr",
        "lr",
    }


def test_a_log_in_another_directory_is_added_to_that_of_the_list(tmp_path):
    make_learner(Monitor(tmp_path / "a"), LogTo(tmp_path / "b")).fit(batches(10), epochs=1)
    assert names(tmp_path / "a") == names(tmp_path / "b")


def test_a_log_in_the_same_directory_is_not_added(tmp_path):
    assert "monitor_log" not in make_learner(Monitor(tmp_path), LogTo(tmp_path, name="mine")).plugins


def test_a_directory_may_have_a_dot_in_its_name(tmp_path):
    make_learner(Monitor(tmp_path / "v1.5")).fit(batches(1), epochs=1)
    assert "run/plan" in names(tmp_path / "v1.5")


def test_what_it_adds_can_be_removed(tmp_path):
    learner = make_learner(Monitor(tmp_path))
    learner.remove("log_to", "log_metrics")
    assert list(learner.plugins) == ["monitor"]
    learner.fit(batches(10), epochs=1)


def test_it_can_be_added_during_a_fit(tmp_path):
    learner = make_learner(On("epoch_begin", lambda learner: "monitor" in learner.plugins or learner.add(monitor)))
    monitor = Monitor(tmp_path)
    learner.fit(batches(10), epochs=2)
    assert names(tmp_path) >= {"run/plan", "train/loss/step"}


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "1"])
def test_every_counts_from_one(every):
    with pytest.raises(LoopkitError, match="it is a whole number, from 1"):
        Monitor(every=every)


@pytest.mark.parametrize("port", [-1, 65536, 1.5, True, "80"])
def test_port_is_in_range(port):
    with pytest.raises(LoopkitError, match="it is from 0 to 65535"):
        Monitor(port=port)


# What it logs


def test_training_is_bitwise_the_same(tmp_path):
    def weights(*plugins):
        learner = make_learner(*plugins, seed=3)
        learner.fit(batches(12), batches(2), epochs=2)
        return [*learner.model.parameters(), torch.get_rng_state()]

    pairs = zip(weights(), weights(Monitor(tmp_path, every=1)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_plan_is_that_of_explain(tmp_path):
    learner = make_learner(Monitor(tmp_path), ClipGradNorm(1.0), GradNorm())
    learner.fit(batches(1), epochs=1)
    (plan,) = read_log(tmp_path).values("run/plan")
    assert plan["columns"] == ["phase", "hook", "position", "plugin", "access", "reasons", "note"]
    assert [row[:5] for row in plan["rows"]] == [
        [row.phase, row.hook, row.position, row.plugin, row.access] for row in learner.explain().rows
    ]
    (row,) = [row for row in plan["rows"] if row[:2] == ["train", "update_begin"] and row[3] == "clip_grad_norm"]
    assert row[4:] == ["updates grads", "'grad_norm' says before 'clip_grad_norm'", ""]


def test_a_plan_that_changes_is_logged_again(tmp_path):
    def change(learner):
        if learner.progress.epochs == 1 and "clip_grad_norm" not in learner.plugins:
            learner.add(ClipGradNorm(1.0))

    make_learner(Monitor(tmp_path), On("epoch_begin", change)).fit(batches(3), epochs=3)
    first, second = read_log(tmp_path).of("run/plan")
    assert (first.step, second.step) == (0, 6)
    assert [any("clip_grad_norm" in row for row in plan.value["rows"]) for plan in (first, second)] == [False, True]


def test_what_others_find_out_is_in_the_plan_at_the_end(tmp_path):
    class Finds:
        name = "finds"

        def __init__(self):
            self.found = ""

        def explain(self, phase, hook):
            return self.found

        def phase_end(self):
            self.found = "waits for the device"

    from loopkit import hookimpl

    Finds.phase_end = hookimpl(Finds.phase_end)
    make_learner(Monitor(tmp_path), Finds()).fit(batches(1), epochs=1)
    notes = [[row[6] for row in plan["rows"] if row[3] == "finds"] for plan in read_log(tmp_path).values("run/plan")]
    assert [set(each) for each in notes] == [{""}, {"waits for the device"}]


def test_the_model_is_logged_once_all_shapes_are_known(tmp_path):
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of lazy modules
        make_learner(Monitor(tmp_path), model=model, optimizer=optimizer).fit(batches(2), epochs=1)
    (graph,) = read_log(tmp_path).of("run/model")
    assert graph.step == 2
    assert graph.value["modules"][1] == {"name": "0", "type": "Linear", "parameters": {"weight": [4, 3], "bias": [4]}}


def test_several_models_are_one_tree(tmp_path):
    from loopkit import Learner, TrainingPhase

    class Both(TrainingPhase):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            outputs = learner.models["b.c"](learner.models["a"](step.inputs))
            step.loss = learner.loss_fn(outputs, step.targets)
            step.backward(step.loss)
            step.update()

    models = {"a": nn.Linear(3, 2), "b.c": nn.Linear(2, 1)}
    learner = Learner(
        models,
        nn.MSELoss(),
        torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1),
        plugins=[Monitor(tmp_path)],
        phases=[Both()],
        standard=False,
    )
    learner.fit(batches(2), epochs=1)
    (graph,) = read_log(tmp_path).values("run/model")
    assert [(module["name"], module["type"]) for module in graph["modules"]] == [
        ("", "Module"),
        ("a", "Linear"),
        ("b_c", "Linear"),
    ]


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of `Monitor`; only ``sleep`` takes time."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr("loopkit_monitor.plugin.time.monotonic", clock.monotonic)
    return clock


def test_throughput_is_steps_and_samples_by_time(tmp_path, clock):
    slow = On("step_begin", lambda learner: clock.sleep(0.25))
    make_learner(Monitor(tmp_path, every=5), slow).fit(batches(10), epochs=2)
    log = read_log(tmp_path)
    steps, samples = (log.of(f"run/throughput/{what}_per_second") for what in ("steps", "samples"))
    assert [record.step for record in steps] == [5, 10, 15, 20]
    assert [each.value for each in steps] == [4.0] * 4
    assert [each.value for each in samples] == [16.0] * 4
    assert log.values("run/time_left") == [3.75, 2.5, 1.25, 0.0]


def test_throughput_leaves_out_validation(tmp_path, clock):
    def validate(learner):
        if learner.current.epoch.phase.name == "val":
            clock.sleep(100)

    slow = On("step_begin", lambda learner: learner.current.epoch.phase.training and clock.sleep(0.25))
    make_learner(Monitor(tmp_path, every=3), On("epoch_begin", validate, "validate"), slow).fit(
        batches(6), batches(1), epochs=2, validate=every(updates=2)
    )
    assert set(read_log(tmp_path).values("run/throughput/steps_per_second")) == {4.0}


def test_there_is_no_time_left_where_the_end_is_not_known(tmp_path):
    make_learner(Monitor(tmp_path)).fit(iter(batches(10)), epochs=1)
    assert "run/time_left" not in names(tmp_path)


def test_learning_rates_of_groups_are_logged_where_no_other_plugin_does(tmp_path):
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    make_learner(Monitor(tmp_path), LogMetrics(), model=model, optimizer=optimizer).fit(batches(10), epochs=1)
    log = read_log(tmp_path)
    assert (log.values("run/lr/0"), log.values("run/lr/1")) == ([0.5], [0.25])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("tensor", [False, True])
def test_the_learning_rate_is_that_of_the_update(tmp_path, every, tensor):
    used = []

    def note(learner):
        used.append(float(learner.optimizer.param_groups[0]["lr"]))

    def halve(learner):
        learner.optimizer.param_groups[0]["lr"] /= 2  # in place, if it is a tensor

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5) if tensor else 0.5)
    change = On("update_end", halve, "halve", updates=("optimizer.lr",))
    plugins = Monitor(tmp_path, every=every), LogMetrics(), On("update_begin", note, reads=("optimizer.lr",)), change
    make_learner(*plugins, model=model, optimizer=optimizer).fit(batches(4), epochs=1)
    assert used == [0.5, 0.25, 0.125, 0.0625]
    assert read_log(tmp_path).values("run/lr") == used[every - 1 :: every]


@pytest.mark.parametrize("plugin", [GradNorm(), ClipGradNorm(100.0)])
def test_the_norm_that_a_plugin_has_is_logged(tmp_path, plugin):
    norms = []

    def note(learner):
        grads = [p.grad for p in learner.model.parameters()]
        norms.append(nn.utils.get_total_norm(grads).item())

    make_learner(Monitor(tmp_path, every=1), plugin, On("update_end", note)).fit(batches(3), epochs=1)
    assert read_log(tmp_path).values("run/grad_norm") == norms


def test_a_norm_is_logged_only_at_the_step_where_it_was_measured(tmp_path):
    measured = {}

    def note(learner):
        measured[learner.progress.steps + 1] = clip.norm.item()

    clip = ClipGradNorm(100.0)
    learner = make_learner(Monitor(tmp_path, every=1), clip, On("update_end", note), accumulate=2)
    for _ in range(2):
        learner.fit(iter(batches(5)), epochs=1)  # nobody knows which step is the last: its update comes after it
    logged = {record.step: record.value for record in read_log(tmp_path).of("run/grad_norm")}
    assert list(logged) == [2, 4, 7, 9]
    assert logged == {step: measured[step] for step in logged}


def test_of_several_optimizers_the_norms_of_those_that_made_an_update_are_logged(tmp_path):
    from loopkit import Learner, TrainingPhase

    class InTurn(TrainingPhase):
        def step(self, learner, step):
            step.inputs, step.targets = step.batch
            step.loss = learner.loss_fn(learner.model(step.inputs), step.targets)
            step.backward(step.loss)
            step.update("a" if learner.progress.steps % 2 else "b")

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in zip("ab", model, strict=True)}
    plugins = [Monitor(tmp_path, every=1), GradNorm()]
    learner = Learner(model, nn.MSELoss(), optimizers, plugins=plugins, phases=[InTurn()], standard=False)
    learner.fit(batches(4), epochs=1)
    log = read_log(tmp_path)
    assert [record.step for record in log.of("run/grad_norm/a")] == [2, 4]
    assert [record.step for record in log.of("run/grad_norm/b")] == [1, 3]


def test_skipped_updates_are_counted(tmp_path):
    def skip(learner):
        if learner.progress.steps in (1, 2):
            learner.current.epoch.current.skip_update("no")

    make_learner(Monitor(tmp_path, every=2), On("update_begin", skip)).fit(batches(6), epochs=1)
    assert [(each.step, each.value) for each in read_log(tmp_path).of("run/skipped_updates")] == [(2, 1.0), (4, 2.0)]


def test_the_loss_scale_is_logged(tmp_path):
    plugins = Monitor(tmp_path), MixedPrecision("float16", init_scale=1024.0)
    make_learner(*plugins).fit(batches(3), epochs=2)
    assert read_log(tmp_path).values("run/loss_scale") == [1024.0, 1024.0]


def test_warnings_are_logged_and_shown(tmp_path):
    def warn(learner):
        warnings.warn(f"strange </script> at {learner.progress.steps}", stacklevel=1)

    with pytest.warns(UserWarning, match="strange </script> at") as shown:
        make_learner(Monitor(tmp_path, every=2), On("step_end", warn)).fit(batches(4), epochs=1)
    assert len(shown) == 4
    said = [record.value["text"] for record in read_log(tmp_path).of("run/warning")]
    assert [text.partition(" (")[0] for text in said] == [
        f"UserWarning: strange </script> at {step}" for step in (1, 2, 3, 4)
    ]
    assert __file__ in said[0]


def test_no_password_is_logged(tmp_path, monkeypatch):
    def warn(learner):
        warnings.warn("no answer from ftp://me:hidden@host", stacklevel=1)

    monkeypatch.setattr("sys.argv", ["train.py", "--pwd=hidden", "-p", "hidden"])
    with pytest.warns(UserWarning, match="hidden"):
        make_learner(Monitor(tmp_path), LogHyperparameters(password="hidden"), On("step_end", warn)).fit(
            batches(1), epochs=1
        )
    (log,) = tmp_path.glob("*.jsonl")
    assert "hidden" not in log.read_text()
    said = views.run(Store(tmp_path), ".")
    assert said["header"]["argv"] == ["train.py", "--pwd=***", "-p", "***"]
    assert said["hyperparameters"]["password"] == "***"
    assert "ftp://me:***@host" in said["warnings"][0]["text"]


def test_a_flood_of_warnings_is_bounded(tmp_path):
    def warn(learner):
        for _ in range(300):
            warnings.warn("x" * 20_000, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        make_learner(Monitor(tmp_path), On("step_end", warn)).fit(batches(3), epochs=1)
    assert len(shown) == 900
    said = [record.value["text"] for record in read_log(tmp_path).of("run/warning")]
    assert [len(text) for text in said] == [10_000] * 500


def test_warnings_are_shown_as_before_when_the_fit_is_over(tmp_path):
    before = warnings.showwarning

    def fail(learner):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        make_learner(Monitor(tmp_path), On("step_end", fail)).fit(batches(1), epochs=1)
    assert warnings.showwarning is before


def test_checkpoints_are_logged(tmp_path):
    save = Checkpoint(tmp_path / "checkpoints", save=every(updates=3), keep=10)
    make_learner(Monitor(tmp_path, every=1), save).fit(batches(7), batches(1), epochs=1)
    rows = [record.value["rows"][0] for record in read_log(tmp_path).of("run/checkpoint")]
    assert [row[1:] for row in rows] == [
        ["interval", None, None, None, 0, 3],
        ["interval", None, None, None, 0, 6],
        ["end", None, None, None, 1, 7],
    ]
    assert [Path(row[0]).name for row in rows] == ["000001-step-3", "000002-step-6", "000003-step-7"]


def test_the_helper_is_no_hyperparameter(tmp_path):
    plugins = Monitor(tmp_path), Checkpoint(tmp_path / "checkpoints"), LogHyperparameters()
    learner = make_learner(*plugins)
    learner.fit(batches(4), epochs=1)
    assert "~monitor" in learner.plugins
    assert "monitor" in str(learner.explain())
    assert "~" not in str(learner.explain())
    said = views.run(Store(tmp_path), ".")
    assert "plugins" in said["hyperparameters"]
    assert "~monitor" not in str([said[part] for part in ("hyperparameters", "plan")])


def test_checkpoints_that_are_removed_are_told(tmp_path):
    save = Checkpoint(tmp_path / "checkpoints", save=every(updates=2), keep=1)
    make_learner(Monitor(tmp_path, every=1), save).fit(batches(4), epochs=1)
    rows = [record.value["rows"][0] for record in read_log(tmp_path).of("run/checkpoint")]
    gone = [Path(row[0]) for row in rows if row[1] == "removed"]
    assert [path.name for path in gone] == ["000001-step-2"]
    assert {Path(row[0]) for row in rows} - set(gone) == set((tmp_path / "checkpoints").iterdir())


def test_the_log_goes_on_after_the_checkpoint_of_the_end(tmp_path):
    learner = make_learner(Monitor(tmp_path), Checkpoint(tmp_path / "checkpoints", keep=10))
    learner.fit(batches(4), epochs=1)
    learner.fit(batches(4), epochs=1)
    (log,) = tmp_path.glob("*.jsonl")
    kinds = [said.get("kind") or said["name"] for said in map(json.loads, log.read_text().splitlines())]
    assert kinds.count("run") == kinds.count("end") == 2
    rows = [record.value["rows"][0] for record in read_log(tmp_path).of("run/checkpoint")]
    saved, gone = ([Path(row[0]) for row in rows if (row[1] == "removed") is removed] for removed in (False, True))
    assert [path for path in saved if path not in gone] == sorted((tmp_path / "checkpoints").iterdir())


def test_a_warning_of_the_last_save_is_logged(tmp_path):
    from loopkit import hookimpl

    class Save:
        provides = "checkpoint"

        @hookimpl(writes=("*",))
        def fit_end(self):
            warnings.warn("the disk is nearly full", stacklevel=1)

    with pytest.warns(UserWarning, match="nearly full"):
        make_learner(Monitor(tmp_path), Save()).fit(batches(4), epochs=1)
    (text,) = read_log(tmp_path).values("run/warning")
    assert "nearly full" in text["text"]


def test_the_metric_of_a_checkpoint_is_logged(tmp_path):
    save = Checkpoint(tmp_path / "checkpoints", best="val/loss")
    result = make_learner(Monitor(tmp_path), save, Metrics()).fit(batches(4), batches(1), epochs=1)
    record, last = read_log(tmp_path).of("run/checkpoint")
    assert record.value["rows"][0][1:] == ["epoch", "val/loss", "min", result.metrics["val/loss"], 1, 4]
    assert last.value["rows"][0][1:] == ["end", None, None, None, 1, 4]


class Killed(BaseException):
    pass


def test_a_run_that_goes_on_logs_everything_once(tmp_path):
    def learn(folder, at=None):
        def kill(learner):
            if learner.progress.steps == at:
                raise Killed

        save = Checkpoint(folder / "checkpoints", save=every(updates=3), keep=10, resume="auto")
        make_learner(Monitor(folder, every=1), save, On("step_end", kill), Metrics()).fit(batches(5), epochs=2)

    learn(tmp_path / "whole")
    for at in (5, 8, None):
        with contextlib.suppress(Killed):
            learn(tmp_path / "killed", at)
    whole, killed = (
        [
            (each.name, each.step, each.value["rows"][0][2:] if each.name == "run/checkpoint" else None)
            for each in read_log(tmp_path / which).records
        ]
        for which in ("whole", "killed")
    )
    assert [each for each in whole if each[0] == "run/checkpoint"] != []
    assert sorted(whole, key=str) == sorted(killed, key=str)


def test_a_run_that_goes_on_with_other_plugins_logs_its_plan_again(tmp_path):
    def learn(*plugins, max_steps):
        save = Checkpoint(tmp_path / "checkpoints", resume="auto", options=SaveOptions(allow=["clip_grad_norm"]))
        make_learner(Monitor(tmp_path), save, *plugins).fit(batches(4), epochs=4, max_steps=max_steps)

    learn(max_steps=6)
    learn(ClipGradNorm(1.0), max_steps=12)
    first, second = read_log(tmp_path).values("run/plan")
    assert [any("clip_grad_norm" in row for row in plan["rows"]) for plan in (first, second)] == [False, True]


def test_the_error_of_a_run_is_at_its_end(tmp_path):
    def fail(learner):
        raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        make_learner(Monitor(tmp_path), On("step_end", fail, "wrong")).fit(batches(1), epochs=1)
    (end,) = read_log(tmp_path).ends
    assert end["error"] == "ValueError: too bad"
    assert "loopkit: in step_end of plugin 'wrong', phase 'train', epoch 1, step 0" in end["notes"]


def test_it_is_imported_without_the_server_and_the_server_without_it():
    code = "import sys, loopkit_monitor.{}; print({!r} in sys.modules)"
    for module, other in (("server", "torch"), ("terminal", "torch"), ("plugin", "starlette")):
        command = [sys.executable, "-P", "-c", code.format(module, other)]
        assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "False\n"


# The server


def started(said):
    """Address and process of the server that a line is of."""
    words = said.split()
    assert words[:2] == ["loopkit", "monitor:"]
    return words[2], int(words[4])


def test_the_server_is_started_and_outlives_the_run(tmp_path, capsys):
    learner = make_learner(Monitor(tmp_path / "runs" / "a", serve=True))
    learner.fit(batches(2), epochs=1)
    address, pid = started(capsys.readouterr().out)
    try:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address, timeout=SECONDS) as page:
            assert page.status == 200

        def status():
            with opener.open(f"{address.partition('?')[0]}api/runs", timeout=SECONDS) as answer:
                return [(run["id"], run["status"]) for run in json.load(answer)["runs"]]

        eventually(lambda: status() == [("a", "finished")])  # an answer may be of an eighth of a second ago
        learner.fit(batches(2), epochs=1)
        assert capsys.readouterr().out == ""  # it is the same one
    finally:
        end_process(pid)


def test_all_learners_of_a_process_share_the_server_of_a_folder(tmp_path, capsys):
    def learn(directory, **options):
        make_learner(Monitor(tmp_path / directory, serve=True, **options)).fit(batches(2), epochs=1)
        return [started(line)[1] for line in capsys.readouterr().out.splitlines()]

    pids = learn("runs/a")
    try:
        assert len(pids) == 1
        assert learn("runs/b") == learn("runs/c") == []
        pids += learn("others/a")
        assert len(pids) == 2
        end_process(pids[0])
        pids[:1] = learn("runs/a")  # it is gone: there is a new one
        assert len(pids) == 2
    finally:
        for pid in pids:
            end_process(pid)


def test_a_folder_can_be_named_for_the_server(tmp_path, capsys):
    make_learner(Monitor(tmp_path / "runs" / "a", serve=tmp_path)).fit(batches(2), epochs=1)
    _, pid = started(capsys.readouterr().out)
    try:
        assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[4] == os.fsencode(tmp_path)
    finally:
        end_process(pid)


def test_a_port_that_is_taken_is_a_warning(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monitor = Monitor(tmp_path, serve=True, port=taken.getsockname()[1])
        with pytest.warns(UserWarning, match=r"was not started: .* cannot be listened on: Address already in use"):
            result = make_learner(monitor).fit(batches(2), epochs=1)
    assert result.steps == 2


def test_a_warning_that_is_an_error_leaves_nothing_behind(tmp_path):
    before = warnings.showwarning
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monitor = Monitor(tmp_path, serve=True, port=taken.getsockname()[1])
        with pytest.raises(UserWarning, match="was not started"):
            make_learner(monitor).fit(batches(2), epochs=1)
    assert warnings.showwarning is before


def test_a_server_that_says_no_text_is_a_warning(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '\\377' >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.warns(UserWarning, match="was not started: the server of the page ended with 3: \ufffd"):
        result = make_learner(Monitor(tmp_path / "a", serve=True)).fit(batches(2), epochs=1)
    assert result.steps == 2


def test_a_server_that_dies_is_a_warning(tmp_path, capsys):
    def kill(learner):
        if learner.progress.epochs == 0:
            said.append(capsys.readouterr().out)
            pid = started(said[0])[1]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))  # its threads, too

    said = []
    with pytest.warns(UserWarning, match="the server of the page ended with -9; the fit continues"):
        result = make_learner(Monitor(tmp_path, serve=True), On("epoch_begin", kill)).fit(batches(2), epochs=3)
    assert result.steps == 6
