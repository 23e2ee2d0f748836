"""Two workers of a real, local Ray: what is reported arrives, and a run whose worker dies ends with the same bits."""

import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.train_fn_utils import set_train_fn_utils
from sklearn.datasets import load_digits

from loopkit import Learner, data, hookimpl
from loopkit.checkpoint import load_weights
from loopkit.metrics import Accuracy
from loopkit.plugins import DDP, Checkpoint, Metrics
from loopkit_ray import RayReport, resume_from

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # half a minute, if nobody else wants the machine
EPOCHS, STEPS = 4, 22


class DieOnce:
    """Kills the process of a rank in the middle of the third epoch, if the run was not resumed."""

    def __init__(self, rank, resumed):
        self.rank, self.resumed = rank, resumed

    @hookimpl
    def step_end(self, learner, phase, step):
        here = phase.training and learner.world.rank == self.rank
        if here and learner.progress.steps == 2 * self.steps(learner) + 3 and not self.resumed:
            os.kill(os.getpid(), signal.SIGKILL)

    def steps(self, learner):
        return 2 * STEPS // learner.world.size


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 10))


def fit(*plugins):
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    x, y = images.float() / 16, labels
    train = data.TensorLoader(x[:1400], y[:1400], batch_size=32, shuffle=True)
    val = data.TensorLoader(x[1400:], y[1400:], batch_size=100)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[DDP(), Metrics(Accuracy()), *plugins])
    learner.fit(train, val, epochs=EPOCHS)
    return learner


def python_blocks():
    page = Path(__file__).parent.parent / "README.md"
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def train(config):
    """Train, die, go on; then the same from beginning to end, for comparison. Rank 0 writes down what came of it."""
    with resume_from() as latest, tempfile.TemporaryDirectory() as directory:
        resumed = latest is not None
        learner = fit(Checkpoint(directory, resume=latest), RayReport(), DieOnce(config["victim"], resumed))
    plain = digest(fit().model)
    if learner.world.rank == 0:
        facts = {"resumed": resumed, "workers": learner.world.size, "run": digest(learner.model), "plain": plain}
        Path(config["facts"]).write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this machine alone, with a token of its own."""
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets must be short
    before = dict(os.environ)
    os.environ.update(
        OMP_NUM_THREADS="1",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",  # a process less
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5",
        RAY_USAGE_STATS_ENABLED="0",
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        ray.init(
            num_cpus=2,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=directory,
        )
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(directory, ignore_errors=True)


def trained(directory, workers, victim):
    """What Ray says of a run, and what rank 0 wrote down."""
    run = RunConfig(
        name="digits",
        storage_path=str(directory / "storage"),
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(checkpoint_score_attribute="val/accuracy"),
    )
    given = {"facts": str(directory / "facts.json"), "victim": victim}
    scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5})
    result = TorchTrainer(train, train_loop_config=given, scaling_config=scaling, run_config=run).fit()
    return result, json.loads((directory / "facts.json").read_text())


@pytest.fixture(scope="module")
def both(cluster, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("digits"), workers=2, victim=1)


@pytest.fixture(scope="module")
def result(both):
    return both[0]


@pytest.fixture(scope="module")
def facts(both):
    return both[1]


def test_metrics_arrive(result):
    assert (result.metrics["epochs"], result.metrics["steps"]) == (EPOCHS, EPOCHS * STEPS)
    assert result.metrics["val/accuracy"] > 0.8
    assert {"train/loss", "train/accuracy", "val/loss"} <= set(result.metrics)


def test_every_epoch_arrives_once(result):
    assert sorted(metrics["epochs"] for _, metrics in result.best_checkpoints) == [1, 2, 3, 4]


def test_the_run_goes_on_after_a_worker_has_died(result, facts):
    assert result.error is None
    assert facts["resumed"]
    assert facts["workers"] == 2


def test_the_run_that_was_resumed_ends_with_the_same_bits(facts):
    assert facts["run"] == facts["plain"]


@pytest.mark.parametrize(("workers", "victim"), [(2, 0), (1, 0)])
def test_the_run_that_lost_rank_0_ends_with_the_same_bits(cluster, tmp_path, workers, victim):
    result, facts = trained(tmp_path, workers, victim)
    assert result.error is None
    assert facts == {"resumed": True, "workers": workers, "run": facts["plain"], "plain": facts["plain"]}


def test_the_last_checkpoint_arrives(result, facts):
    model = make_model()
    with result.checkpoint.as_directory() as directory:
        load_weights(model, Path(directory))
    assert digest(model) == facts["run"]


@pytest.mark.slow
def test_the_script_of_the_readme_runs(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec("\n".join(python_blocks()), {"__name__": "__main__"})
    assert re.fullmatch(r"5 epochs, val/accuracy 0\.9\d\d", capsys.readouterr().out.strip())
    assert (tmp_path / "runs" / "digits").is_dir()


def test_the_script_of_the_readme_runs_in_local_mode(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = python_blocks()[0].replace("num_workers=2", "num_workers=0")
    assert "num_workers=0" in script
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        exec(script, {"__name__": "__main__"})
    finally:
        set_train_fn_utils(None)
        torch.set_num_threads(threads)
    assert re.search(r"^5 epochs, val/accuracy 0\.9\d\d$", capsys.readouterr().out, re.MULTILINE)
