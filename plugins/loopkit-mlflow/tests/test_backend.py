"""Runs that are logged to a real server."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from mlflow.models import Model
from support import At, LogLoss, Server, serving

from loopkit import every, hookimpl
from loopkit.errors import LogError, PluginError
from loopkit.logs import Audio, File, Graph, Histogram, Hyperparameters, Image, Table, Text
from loopkit.plugins import Checkpoint, LogTo
from loopkit_mlflow import MLflow, create_run
from loopkit_mlflow.command import main
from loopkit_mlflow.names import clean, name_for
from loopkit_mlflow.spool import Spool, find

NOWHERE = "http://127.0.0.1:9"  # nobody listens at the port "discard"


class Score:
    """Makes the metric ``val/score``: 1, 3, 2."""

    name = "score"

    def __init__(self):
        self.passes = 0

    @hookimpl(writes=("metrics.val/score",))
    def epoch_end(self, learner, phase):
        if phase.name == "val":
            self.passes += 1
            learner.metrics["val/score"] = float((0, 1, 3, 2)[self.passes])

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


@pytest.fixture
def backend(server, experiment, spools):
    def make(uri=server, **options):
        return MLflow(uri, experiment, **{"spool": spools, "wait": 60.0, "timeout": 60.0, **options})

    return make


def losses(learner_of, batches, steps):
    """What a run without a log has for a loss in each step."""
    found = []

    class Keep:
        name = "keep"

        @hookimpl(reads=("loss",))
        def step_end(self, learner, step):
            found.append((learner.progress.steps, step.loss.item()))

    learner_of(Keep()).fit(batches, max_steps=steps)
    return found


# ------------------------------------------------------------------------------------------------------ what arrives


def test_a_run_arrives(make_learner, batches, backend, mlflow_server, experiment, server):
    log = backend(run_name="first", tags={"team": "vision", "password": "hidden"})
    learner = make_learner(LogLoss(), LogTo(log))
    learner.fit(batches, epochs=2)
    assert mlflow_server.history(experiment, "train/loss") == losses(make_learner, batches, 8)
    run = mlflow_server.run(experiment)["info"]
    assert (run["run_name"], run["status"], run["run_id"]) == ("first", "FINISHED", log.run_id)
    assert run["end_time"] >= run["start_time"]
    params = mlflow_server.params(experiment)
    assert (params["optimizer"], params["optimizer.lr"], params["model.parameters"]) == ("SGD", "0.1", "4")
    tags = mlflow_server.tags(experiment)
    assert (tags["team"], tags["password"]) == ("vision", "***")
    assert tags["mlflow.user"]
    assert Spool(log.spool).left == 0
    read = MlflowClient(server).get_metric_history(log.run_id, "train/loss")
    assert abs(read[0].timestamp / 1000 - time.time()) < 120


def test_each_kind_arrives(make_learner, batches, backend, mlflow_server, experiment, tmp_path):
    from matplotlib.figure import Figure as MatplotlibFigure

    from loopkit.logs import Figure

    figure = MatplotlibFigure(figsize=(1, 1))
    picture = Image(torch.zeros(2, 2))
    (tmp_path / "notes.txt").write_text("notes")
    values = {
        "hello": Text("hello"),
        "sample": picture,
        "curve": Figure(figure),
        "rows": Table(["a", "b"], [[1, "x"], [float("nan"), None]]),
        "weights": Histogram(torch.arange(4.0), bins=2),
        "tone": Audio(torch.zeros(4), 8000),
        "notes": File(tmp_path / "notes.txt"),
        "model": Graph(torch.nn.Linear(1, 1)),
        "options": Hyperparameters({"depth": 3, "name": None, "long": "x" * 7000}),
        "nan": float("nan"),
        "odd name@": 1.0,
    }

    def log(learner):
        for name, value in values.items():
            learner.log(name, value)
        learner.log("sample", picture)

    make_learner(At(2, log), LogTo(backend())).fit(batches, max_steps=2)
    step = "step-000000002"
    assert mlflow_server.artifacts(experiment) == [
        f"audio/train/tone/{step}.wav",
        f"figures/train/curve/{step}.png",
        f"files/train/notes/{step}.txt",
        f"graphs/train/model/{step}.json",
        f"histograms/train/weights/{step}.json",
        f"images/train/sample/{step}-2.png",
        f"images/train/sample/{step}.png",
        "params/long.txt",
        f"tables/train/rows/{step}.json",
        f"text/train/hello/{step}.txt",
    ]
    read = {path: mlflow_server.artifact(experiment, path) for path in mlflow_server.artifacts(experiment)}
    assert read[f"text/train/hello/{step}.txt"] == b"hello"
    assert read[f"images/train/sample/{step}.png"] == picture.png()
    assert read[f"figures/train/curve/{step}.png"] == values["curve"].png()
    assert read[f"audio/train/tone/{step}.wav"] == values["tone"].wav()
    assert read[f"files/train/notes/{step}.txt"] == b"notes"
    table = {"columns": ["a", "b"], "data": [[1, "x"], ["nan", None]]}
    assert json.loads(read[f"tables/train/rows/{step}.json"]) == table
    histogram = {"counts": [2.0, 2.0], "edges": [0.0, 1.5, 3.0]}
    assert json.loads(read[f"histograms/train/weights/{step}.json"]) == histogram
    assert json.loads(read[f"graphs/train/model/{step}.json"]) == {"modules": values["model"].modules()}
    assert read["params/long.txt"] == b"x" * 7000
    params = mlflow_server.params(experiment)
    assert (params["depth"], params["name"], len(params["long"])) == ("3", "None", 6000)
    assert mlflow_server.history(experiment, "train/nan") == [(2, "NaN")]
    (odd,) = [key for key in mlflow_server.tags(experiment) if key.startswith("loopkit.name.")]
    assert mlflow_server.tags(experiment)[odd] == "train/odd name@"
    assert mlflow_server.history(experiment, odd.removeprefix("loopkit.name.")) == [(2, 1.0)]


def test_a_run_can_be_nested(make_learner, batches, backend, mlflow_server, experiment, server):
    parent = create_run(server, experiment, "parent")
    for fold in range(2):
        make_learner(LogLoss(), LogTo(backend(run_name=f"fold {fold}", parent=parent))).fit(batches, max_steps=1)
    found = MlflowClient(server).search_runs(
        [mlflow_server.runs(experiment)[0]["info"]["experiment_id"]], f"tags.mlflow.parentRunId = '{parent}'"
    )
    assert sorted(run.info.run_name for run in found) == ["fold 0", "fold 1"]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("last", ["000003-step-12"]),
        ("best", ["000002-step-8"]),
        ("all", ["000001-step-4", "000002-step-8", "000003-step-12"]),
        (None, []),
    ],
)
def test_checkpoints_arrive(make_learner, batches, backend, mlflow_server, experiment, tmp_path, which, expected):
    save = Checkpoint(tmp_path / "a", best="val/score", keep=2, mode="max")
    log = backend(checkpoints=which)
    learner = make_learner(Score(), save, LogTo(log))
    learner.fit(batches, batches[:1], epochs=3)
    found = mlflow_server.artifacts(experiment, "checkpoints")
    assert sorted({path.split("/")[1] for path in found}) == expected
    assert not list((log.spool / "files").glob("*"))
    if which is not None:
        assert mlflow_server.tags(experiment)[f"loopkit.checkpoint.{which}"] == f"checkpoints/{expected[-1]}"
        for path in found:
            file = tmp_path / "a" / path.removeprefix("checkpoints/").replace("/checkpoint/", "/")
            if file.exists():  # those that the run has not removed
                assert mlflow_server.artifact(experiment, path) == file.read_bytes()


def test_a_checkpoint_is_a_model_for_mlflow(make_learner, batches, backend, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    log = backend(checkpoints="last")
    learner = make_learner(Checkpoint(tmp_path / "a"), LogTo(log))
    learner.fit(batches, epochs=1)
    fetched = MlflowClient(server).download_artifacts(log.run_id, "checkpoints/000001-step-4", str(tmp_path))
    checkpoint = Path(fetched, Model.load(fetched).flavors["loopkit"]["data"])
    resumed = make_learner(Checkpoint(tmp_path / "b", resume=checkpoint), LogTo(log))
    resumed.fit(batches, epochs=1)
    assert resumed.progress.steps == 4
    assert torch.equal(resumed.model.weight, learner.model.weight)


def test_without_a_best_checkpoint_there_is_a_warning(make_learner, batches, backend, tmp_path):
    learner = make_learner(Checkpoint(tmp_path / "a"), LogTo(backend(checkpoints="best")))
    with pytest.warns(UserWarning, match="no checkpoint that was saved with a value of a monitored metric"):
        learner.fit(batches, epochs=1)


def test_a_run_that_a_signal_ends_says_so(make_learner, batches, backend, mlflow_server, experiment):
    stop = At(3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    result = make_learner(LogLoss(), stop, LogTo(backend())).fit(batches, epochs=1, on_interrupt="return")
    assert result.reason == "signal"
    assert mlflow_server.run(experiment)["info"]["status"] == "KILLED"


@pytest.mark.parametrize("name", ["a/b <c> \U0001f600\nd\ud800", "x" * 10_000])
def test_names_of_all_kinds_arrive(make_learner, batches, backend, mlflow_server, experiment, name):
    def log(learner):
        learner.log(name, 1.0)
        learner.log("text", Text(name))
        learner.log("options", Hyperparameters({name: name}))

    log_to = LogTo(backend(run_name=name, tags={name: name}))
    make_learner(At(2, log), log_to).fit(batches, max_steps=2)
    key = name_for(f"train/{name}")
    assert mlflow_server.history(experiment, key) == [(2, 1.0)]
    tags = mlflow_server.tags(experiment)
    assert (
        tags[f"loopkit.name.{key}"[:241] if len(name) < 200 else name_for(f"loopkit.name.{key}")]
        == (clean(f"train/{name}")[:8000])
    )
    assert tags[name_for(name)] == clean(name)[:8000]
    assert mlflow_server.params(experiment)[name_for(name)][:5997] == clean(name)[:5997]
    assert mlflow_server.run(experiment)["info"]["run_name"] == clean(name)[:500]
    assert mlflow_server.artifact(experiment, "text/train/text/step-000000002.txt") == clean(name).encode()


@pytest.mark.parametrize(("raised", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "FAILED")])
def test_a_run_that_fails_says_so(make_learner, batches, backend, mlflow_server, experiment, raised, status):
    def fail(learner):
        raise raised("no more")

    with pytest.raises(raised):
        make_learner(LogLoss(), At(3, fail), LogTo(backend())).fit(batches, epochs=1)
    assert mlflow_server.run(experiment)["info"]["status"] == status
    assert len(mlflow_server.history(experiment, "train/loss")) == 3


def test_another_fit_of_the_learner_goes_on_with_the_run(make_learner, batches, backend, mlflow_server, experiment):
    learner = make_learner(LogLoss(), LogTo(backend()))
    learner.fit(batches, epochs=1)
    learner.fit(batches, epochs=1)
    assert [step for step, _ in mlflow_server.history(experiment, "train/loss")] == list(range(1, 9))
    assert mlflow_server.run(experiment)["info"]["status"] == "FINISHED"


def test_another_learner_begins_another_run(make_learner, batches, backend, mlflow_server, experiment):
    log = backend()
    for _ in range(2):
        make_learner(LogLoss(), LogTo(log)).fit(batches, epochs=1)
    assert len(mlflow_server.runs(experiment)) == 2


def test_a_store_that_the_server_does_not_serve_is_written_by_mlflow(
    make_learner, batches, backend, mlflow_server, experiment, tmp_path
):
    body = {"name": experiment, "artifact_location": f"file://{tmp_path}/store"}
    mlflow_server.ask("experiments/create", body)
    log = backend()
    make_learner(At(2, lambda learner: learner.log("hello", Text("hi"))), LogTo(log)).fit(batches, max_steps=2)
    path = f"store/{log.run_id}/artifacts/text/train/hello/step-000000002.txt"
    assert (tmp_path / path).read_text() == "hi"


# ------------------------------------------------------------------------------------------- when the server is away


def test_training_does_not_depend_on_the_server(make_learner, batches, backend, capsys, wait_until):
    plain = make_learner(LogLoss())
    plain.fit(batches, epochs=2)
    log = backend(NOWHERE, wait=0.0)
    learner = make_learner(LogLoss(), LogTo(log), At(2, lambda _: wait_until(lambda: log._thread.problem)))
    with pytest.warns(UserWarning, match=r"backend 'mlflow': GET .* failed.*refused.* logs wait in .*spools") as warned:
        learner.fit(batches, epochs=2)
    assert len(warned) == 1
    assert torch.equal(learner.model.weight, plain.model.weight)
    assert f"loopkit mlflow send {log.spool}" in capsys.readouterr().err
    assert log.run_id is None


def test_a_server_that_goes_away_and_comes_back_gets_the_rest(
    make_learner, batches, backend, mlflow_server, experiment, network, wait_until
):
    log = backend(network.uri)
    sent = lambda learner: wait_until(lambda: Spool(log.spool).left == 0)  # noqa: E731

    def go_away(learner):
        sent(learner)
        network.mode = "away"

    def come_back(learner):
        wait_until(lambda: log._thread.problem)
        network.mode = "good"

    stack = [LogLoss(), LogTo(log, every=1), At(4, go_away), At(9, come_back)]
    with pytest.warns(UserWarning, match="Training continues") as warned:
        make_learner(*stack).fit(batches, epochs=3)
    assert len(warned) == 1
    assert mlflow_server.history(experiment, "train/loss") == losses(make_learner, batches, 12)


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_gets_the_rest(
    make_learner, batches, experiment, spools, tmp_path, wait_until
):
    with serving(tmp_path) as uri:
        log = MLflow(uri, experiment, spool=spools, wait=0.0)
        notice = At(6, lambda _: wait_until(lambda: log._thread.problem))
        learner = make_learner(LogLoss(), LogTo(log, every=1), notice)
        learner.fit(batches, epochs=1)
        log._thread.join(60)
    with pytest.warns(UserWarning, match="Training continues") as warned:
        learner.fit(batches, epochs=2)
    assert len(warned) == 1
    log._thread.join(60)
    with serving(tmp_path, int(uri.rpartition(":")[2])) as uri:
        assert main(["send", str(spools)]) == 0
        assert Server(uri).history(experiment, "train/loss") == losses(make_learner, batches, 12)


@pytest.mark.parametrize("mode", ["away", "broken", "slow"])
def test_the_end_of_the_fit_waits_no_longer_than_it_may(
    make_learner, batches, backend, network, mode, capsys, wait_until
):
    network.mode, network.delay = mode, 600.0
    log = backend(network.uri, wait=0.5, timeout=600.0)
    notice = At(2, lambda _: wait_until(lambda: network.requests if mode == "slow" else log._thread.problem))
    learner = make_learner(LogLoss(), LogTo(log), notice)
    if mode == "slow":  # nothing is wrong yet
        learner.fit(batches, epochs=1)
    else:
        with pytest.warns(UserWarning, match="Training continues"):
            learner.fit(batches, epochs=1)
    assert "loopkit mlflow send" in capsys.readouterr().err


def test_what_is_left_is_sent_by_the_command(
    make_learner, batches, backend, mlflow_server, experiment, network, capsys, wait_until
):
    network.mode = "away"
    log = backend(network.uri, wait=0.0)
    with pytest.warns(UserWarning, match="Training continues"):
        make_learner(LogLoss(), LogTo(log), At(2, lambda _: wait_until(lambda: log._thread.problem))).fit(
            batches, epochs=1
        )
    log._thread.join(60)
    spool = str(log.spool)
    assert main(["show", spool]) == 1
    assert re.search(r"run not made yet: \d+ to send, 0 rejected", capsys.readouterr().out)
    assert main(["send", spool, "--patience", "0"]) == 1
    assert "get-by-name failed" in capsys.readouterr().err
    network.mode = "good"
    assert main(["send", str(Path(spool).parent)]) == 0
    assert re.search(r"sent \d+ to run \w+ on .*, 0 left", capsys.readouterr().out)
    assert mlflow_server.history(experiment, "train/loss") == losses(make_learner, batches, 4)
    assert mlflow_server.run(experiment)["info"]["status"] == "FINISHED"
    assert main(["send", spool]) == 0
    assert main(["show", spool]) == 0
    assert len(mlflow_server.runs(experiment)) == 1


def test_a_damaged_spool_does_not_hold_up_the_others(make_learner, batches, backend, spools, network, capsys):
    network.mode = "away"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = backend(network.uri, wait=0.0)
        make_learner(LogLoss(), LogTo(log)).fit(batches, epochs=1)
    log._thread.join(60)
    network.mode = "good"
    for name in ("0", "9"):
        (spools / name).mkdir()
        (spools / name / "log.jsonl").write_text("{}\n")
    capsys.readouterr()
    assert main(["show", str(spools)]) == 2
    assert main(["send", str(spools)]) == 2
    said = capsys.readouterr()
    assert said.err.count("does not begin with a run") == 4
    assert re.search(r"sent \d+ to run \w+ on .*, 0 left", said.out)


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main(["send", str(tmp_path / "nothing")]) == 2
    assert "holds no spool" in capsys.readouterr().err
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert main(["show", str(tmp_path)]) == 2
    assert "does not begin with a run" in capsys.readouterr().err


def test_what_the_server_refuses_is_said_once(make_learner, batches, backend, monkeypatch):
    monkeypatch.setattr("loopkit_mlflow.backend.name_for", lambda name: name)  # as a stricter server would see it

    def log(learner):
        learner.log("a@", 1.0)
        learner.log("b@", 1.0)

    learner = make_learner(LogLoss(), At(2, log), LogTo(backend()))
    with pytest.warns(UserWarning, match=r"Names may only contain.* kept in .*refused\.jsonl") as warned:
        learner.fit(batches, epochs=1)
    assert len(warned) == 1


# ------------------------------------------------------------------------------------------------- kill and resume

KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from loopkit import Learner, every
from loopkit.plugins import Checkpoint, LogTo
from loopkit_mlflow import MLflow
from loopkit_mlflow.spool import Spool
from support import At, LogLoss

def kill(learner):
    while {sent} and Spool(log.spool).left:
        pass
    os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
log = MLflow({uri!r}, {experiment!r}, spool={spools!r})
torch.manual_seed(0)
model = nn.Linear(3, 1)
stack = [LogLoss(), LogTo(log, every=1), At(6, kill), Checkpoint({checkpoints!r}, save=every(updates=3))]
Learner(
    model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), plugins=stack, standard=False
).fit(batches, epochs=3)
"""


@pytest.mark.parametrize("sent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_goes_on_with_neither_gap_nor_duplicate(
    make_learner, batches, backend, mlflow_server, experiment, server, spools, tmp_path, sent
):
    places = {"tests": str(Path(__file__).parent), "spools": str(spools), "checkpoints": str(tmp_path / "a")}
    program = KILLED.format(uri=server if sent else NOWHERE, experiment=experiment, sent=sent, **places)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    save = Checkpoint(tmp_path / "a", save=every(updates=3), resume="auto")
    resumed = make_learner(LogLoss(), LogTo(backend(), every=1), At(6, lambda _: None), save)
    resumed.fit(batches, epochs=3)
    assert mlflow_server.history(experiment, "train/loss") == losses(make_learner, batches, 12)
    assert mlflow_server.run(experiment)["info"]["status"] == "FINISHED"


def test_a_run_goes_on_without_its_spool(make_learner, batches, backend, mlflow_server, experiment, tmp_path):
    def stack(spool):
        return LogLoss(), LogTo(backend(spool=tmp_path / spool)), Checkpoint(tmp_path / "a", resume="auto")

    make_learner(*stack("one")).fit(batches, epochs=1)
    make_learner(*stack("two")).fit(batches, epochs=2)
    assert mlflow_server.history(experiment, "train/loss") == losses(make_learner, batches, 8)


def test_a_damaged_spool_does_not_stop_a_resume(make_learner, batches, backend, mlflow_server, experiment, tmp_path):
    def stack(log):
        return LogLoss(), LogTo(log, every=1), Checkpoint(tmp_path / "a", resume="auto")

    first = backend()
    make_learner(*stack(first)).fit(batches, epochs=1)
    with (first.spool / "log.jsonl").open("ab") as file:
        file.write(b"\0\0\0\n")  # as a machine that lost its power leaves it
    with pytest.warns(UserWarning, match=r"is damaged .* continues with a new spool") as warned:
        make_learner(*stack(backend())).fit(batches, epochs=2)
    assert len(warned) == 1
    assert mlflow_server.history(experiment, "train/loss") == losses(make_learner, batches, 8)


def test_two_runs_from_one_checkpoint_do_not_write_one_spool(
    make_learner, batches, backend, mlflow_server, experiment, tmp_path
):
    make_learner(LogLoss(), LogTo(backend()), Checkpoint(tmp_path / "a")).fit(batches, epochs=1)
    found = []

    def branch(name, *more):
        log = backend()
        found.append(log)
        return make_learner(
            LogLoss(), LogTo(log, every=1), Checkpoint(tmp_path / name, resume=tmp_path / "a" / "000001-step-4"), *more
        )

    def begin_another(learner):
        with pytest.warns(UserWarning, match=r"is locked by this process.* continues with a new spool"):
            branch("c").fit(batches, epochs=2)

    branch("b", At(6, begin_another)).fit(batches, epochs=2)
    assert found[0].spool != found[1].spool
    assert [spool.left for spool in map(Spool, find(tmp_path / "spools"))] == [0, 0]
    once = losses(make_learner, batches, 8)
    assert sorted(mlflow_server.history(experiment, "train/loss")) == sorted([*once, *once[4:]])  # both have logged


def test_a_resumed_run_sends_no_checkpoint_again(make_learner, batches, backend, network, tmp_path):
    for epochs in (2, 3):
        network.requests.clear()
        save = Checkpoint(tmp_path / "a", keep=3, resume="auto")
        make_learner(save, LogTo(backend(network.uri, checkpoints="all"))).fit(batches, epochs=epochs)
        sent = {part for each in network.requests for part in re.findall(r"PUT .*/checkpoints/([^/]+)", each)}
        assert sent == ({"000001-step-4", "000002-step-8"} if epochs == 2 else {"000003-step-12"})


def test_a_full_disk_under_the_spool_stops_the_log_and_nothing_else(
    make_learner, batches, backend, mlflow_server, experiment, spools, wait_until
):
    log, before = backend(), resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(learner):
        wait_until(lambda: Spool(log.spool).left == 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((log.spool / "log.jsonl").stat().st_size + 50, before[1]))

    plain = make_learner(LogLoss())
    plain.fit(batches, epochs=2)
    empty = At(6, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, before))
    learner = make_learner(LogLoss(), LogTo(log, every=1), At(3, fill), empty)
    try:
        with pytest.warns(UserWarning, match="log 'mlflow' is disabled for the rest of the fit: its write") as warned:
            learner.fit(batches, epochs=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(warned) == 1
    assert torch.equal(learner.model.weight, plain.model.weight)
    assert main(["send", str(spools)]) == 0
    written = mlflow_server.history(experiment, "train/loss")
    assert written == losses(make_learner, batches, 8)[: len(written)]
    assert len(written) in (2, 3)  # the third is written before or after the disk is full


def test_a_spool_that_cannot_be_written_is_said_before_the_first_step(make_learner, batches, backend, tmp_path):
    (tmp_path / "file").touch()
    learner = make_learner(LogTo(backend(spool=tmp_path / "file" / "spools")))
    with pytest.raises(LogError, match=r"no spool can be written in .*: Not a directory; give another"):
        learner.fit(batches, epochs=1)
    assert learner.progress.steps == 0


# ------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tracking_uri": "mysql://db/mlflow"}, "'mysql://db/mlflow', which is no address of a server"),
        ({"tracking_uri": "sqlite://me:secret@db"}, r"'sqlite://me:\*\*\*@db', which is no address"),
        ({"tracking_uri": "http://me:secret@host"}, "holds a name or password for host.*MLFLOW_TRACKING_USERNAME"),
        ({"tracking_uri": NOWHERE, "checkpoints": "worst"}, "checkpoints is 'worst'"),
        ({"tracking_uri": NOWHERE, "wait": -1}, "wait is -1"),
        ({"tracking_uri": NOWHERE, "timeout": 0}, "timeout is 0"),
        ({"tracking_uri": NOWHERE, "experiment": ""}, "experiment is ''"),
        ({"tracking_uri": NOWHERE, "experiment": "x" * 501}, "a name of at most 500 characters"),
        ({"tracking_uri": NOWHERE, "run_name": 3}, "run_name is 3"),
        ({"tracking_uri": NOWHERE, "parent": 3}, "parent is 3"),
        ({"tracking_uri": NOWHERE, "tags": {1: "a"}}, "tags is {1: 'a'}"),
        ({"tracking_uri": NOWHERE, "tags": ["a"]}, r"tags is \['a'\]"),
        ({"tracking_uri": "http://host:http"}, "'http://host:http', which is no address"),
        ({"tracking_uri": "http://[::1"}, "which is no address"),
        ({"tracking_uri": 3}, "tracking_uri is 3"),
        ({}, "MLFLOW_TRACKING_URI is not set"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(PluginError, match=message) as refused:
        MLflow(**arguments)
    assert "secret" not in str(refused.value)


def test_the_address_may_be_in_the_environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000/")
    assert MLflow().tracking_uri == "http://127.0.0.1:5000"


def test_a_token_and_a_password_go_along(network, monkeypatch):
    from loopkit_mlflow.client import Client

    for name, value, expected in [
        ("MLFLOW_TRACKING_TOKEN", "abc", "Bearer abc"),
        ("MLFLOW_TRACKING_USERNAME", "me", "Bearer abc"),
        ("MLFLOW_TRACKING_PASSWORD", "secret", "Basic bWU6c2VjcmV0"),
    ]:
        monkeypatch.setenv(name, value)
        client = Client(network.uri)
        client.post("experiments/search", max_results=1)
        client.close()
        assert network.heads[-1]["authorization"] == expected


def test_the_plugin_is_found_by_name(make_learner, batches, experiment, spools, server, mlflow_server):
    options = {"tracking_uri": server, "experiment": experiment, "spool": str(spools), "every": 2}
    make_learner({"mlflow": options}, LogLoss()).fit(batches, epochs=1)
    assert len(mlflow_server.history(experiment, "train/loss")) == 4


def test_the_command_is_found(capsys):
    done = subprocess.run(
        [sys.executable, "-m", "loopkit", "mlflow", "send", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert "usage: loopkit mlflow send" in done.stdout
