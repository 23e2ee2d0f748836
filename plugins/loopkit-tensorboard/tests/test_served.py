"""A TensorBoard that serves the files while they are written."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import LogLoss, LogOnce
from torch import nn

from loopkit import TrainingPhase, every, hookimpl
from loopkit.logs import Audio, Graph, Histogram, Hyperparameters, Image, Table, Text
from loopkit.plugins import Checkpoint, LogMetrics, LogTo, Metrics
from loopkit_tensorboard import TensorBoard

LIMIT = 60
"""Seconds that an answer may take to come."""


class Board:
    """A TensorBoard and its JSON API."""

    def __init__(self, address):
        self.address = address

    def get(self, path, **query):
        ask = f"?{urllib.parse.urlencode(query)}" if query else ""
        with urllib.request.urlopen(f"{self.address}/{path}{ask}", timeout=LIMIT) as answer:
            return answer.read()

    def post(self, path, content):
        request = urllib.request.Request(
            f"{self.address}/{path}", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            return json.load(answer)

    def wait(self, question, expected):
        """Ask until the answer is as expected."""
        end = time.monotonic() + LIMIT
        while True:
            try:
                answer = question()
            except (urllib.error.URLError, KeyError, IndexError) as error:
                answer = error
            if answer == expected or time.monotonic() > end:
                assert answer == expected
                return
            time.sleep(0.2)

    def steps(self, run, tag):
        return [step for _, step, _ in json.loads(self.get("data/plugin/scalars/scalars", run=run, tag=tag))]


@contextmanager
def serve(directory, *options):
    """A TensorBoard on a port of its own; ended in any case."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(directory),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    log = (directory.parent / "tensorboard.txt").open("w+")
    process = subprocess.Popen([*command, "--reload_interval", "1", *options], stdout=log, stderr=log, cwd=directory)
    try:
        end = time.monotonic() + LIMIT
        address = None
        while address is None:
            log.seek(0)
            said = log.read()
            assert process.poll() is None, said
            assert time.monotonic() < end, said
            address = next((word for word in said.split() if word.startswith("http://127.0.0.1:")), None)
            time.sleep(0.1)
        yield Board(address.rstrip("/"))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        log.close()


LOADERS = [
    pytest.param((), id="fast"),
    pytest.param(("--load_fast", "false"), id="not_fast", marks=pytest.mark.slow),
]
"""TensorBoard has two ways to read files."""


@pytest.mark.parametrize("options", LOADERS)
def test_a_running_tensorboard_shows_what_was_logged(make_learner, batches, tmp_path, options):
    values = {
        "hist": Histogram(np.linspace(0, 1, 10)),
        "image": Image(np.zeros((2, 5, 3), np.uint8)),
        "text": Text("some *text*"),
        "table": Table(["a", "b"], [[1, "<b>"]]),
        "sound": Audio(np.zeros(80), 8000),
        "graph": Graph(nn.Linear(3, 1), batches[0][0]),
        "given": Hyperparameters({"rate": 0.5}),
    }
    (tmp_path / "runs").mkdir()
    with serve(tmp_path / "runs", *options) as board:
        learner = make_learner(
            LogLoss(), LogOnce(**values), Metrics(), LogMetrics(), LogTo(TensorBoard(tmp_path / "runs/a"))
        )
        learner.fit(batches, batches, epochs=2)
        board.wait(lambda: json.loads(board.get("data/runs")), ["a"])
        board.wait(lambda: board.steps("a", "train/loss"), [*range(1, 11)])
        board.wait(lambda: board.steps("a", "val/loss"), [5, 10])

        def plugin(name, **query):
            return json.loads(board.get(f"data/plugin/{name}", run="a", **query))

        ((_, step, bins),) = plugin("histograms/histograms", tag="train/hist")
        assert (step, bins[0], bins[-1][1:]) == (1, [0, 1 / 64, 1], [1, 1])
        (image,) = plugin("images/images", tag="train/image", sample=0)
        assert image["step"] == 1
        assert board.get("data/plugin/images/individualImage?" + image["query"]).startswith(b"\x89PNG")
        (sound,) = plugin("audio/audio", tag="train/sound", sample=0)
        assert sound["contentType"] == "audio/wav"
        assert board.get("data/plugin/audio/individualAudio?" + sound["query"]).startswith(b"RIFF")
        assert plugin("text/text", tag="train/text")[0]["text"] == "<p>some <em>text</em></p>"
        assert "<th>a</th>" in plugin("text/text", tag="train/table")[0]["text"]
        assert "&lt;b&gt;" in plugin("text/text", tag="train/table")[0]["text"]
        assert 'op: "linear"' in board.get("data/plugin/graphs/graph", run="a").decode()
        experiment = board.post("data/plugin/hparams/experiment", {"experimentName": ""})
        assert {"rate", "optimizer.lr", "seed"} <= {info["name"] for info in experiment["hparamInfos"]}
        columns = [{"metric": info["name"]} for info in experiment["metricInfos"]]

        def groups():
            return board.post(
                "data/plugin/hparams/session_groups",
                {
                    "experimentName": "",
                    "colParams": columns,
                    "startIndex": 0,
                    "sliceSize": 9,
                    "allowedStatuses": ["STATUS_SUCCESS"],
                },
            )["sessionGroups"]

        board.wait(lambda: len(groups()), 1)
        (group,) = groups()
        assert group["hparams"]["rate"] == 0.5
        shown = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
        assert shown["val/loss"] == float(np.float32(learner.metrics["val/loss"]))


@pytest.mark.parametrize("options", LOADERS)
def test_a_running_tensorboard_forgets_what_a_resumed_run_has_cut_off(make_learner, batches, tmp_path, options):
    class Pause:
        """Lets TensorBoard read up to step 7, then ends the fit without a save."""

        @hookimpl(phase=TrainingPhase, after=("log",))
        def step_end(self, learner):
            if learner.progress.steps == 8:
                board.wait(lambda: board.steps("a", "train/loss"), [*range(1, 9)])
                raise KeyboardInterrupt

    def fit(*plugins):
        run = Checkpoint(tmp_path / "checkpoints", save=every(updates=5), resume="auto")
        learner = make_learner(LogLoss(), run, LogTo(TensorBoard(tmp_path / "runs/a"), every=1), *plugins)
        learner.fit(batches, epochs=3, on_interrupt=None)

    (tmp_path / "runs").mkdir()
    with serve(tmp_path / "runs", *options) as board:
        with pytest.raises(KeyboardInterrupt):
            fit(Pause())
        fit()
        board.wait(lambda: board.steps("a", "train/loss"), [*range(1, 16)])
