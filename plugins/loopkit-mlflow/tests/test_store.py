"""Runs that are logged to a database without a server, read back by mlflow's own client."""

import pytest
import torch
from mlflow import MlflowClient
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.data import TensorLoader
from loopkit.logs import Text
from loopkit.plugins import LogHyperparameters, LogMetrics, LogTo
from loopkit_mlflow import MLflow, create_run
from loopkit_mlflow.client import Denied
from loopkit_mlflow.store import Store, connect

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # mlflow's own, about SQLAlchemy
    pytest.mark.slow,  # it makes the tables of a new database
]


class Note:
    """Logs a text, and keeps the metrics of each epoch."""

    name = "note"

    def __init__(self, kept):
        self.kept = kept

    @hookimpl(reads=("metrics",))
    def phase_end(self, learner):
        self.kept.append(dict(learner.metrics))
        learner.log("note", Text("a text"))


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder / "mlflow.db"


def test_run_is_read_back_by_the_client_of_mlflow(database, tmp_path):
    uri = f"sqlite:///{database}"
    parent = create_run(uri, "digits", "parent")
    backend = MLflow(uri, "digits", run_name="one", parent=parent, tags={"team": "a"}, spool=tmp_path, wait=60.0)
    torch.manual_seed(0)
    data, logged = TensorLoader(torch.randn(16, 3), torch.randn(16, 1), batch_size=4), []
    plugins = [LogTo(backend), LogMetrics(), LogHyperparameters(), Note(logged)]
    learner = Learner(nn.Linear(3, 1), nn.functional.mse_loss, torch.optim.SGD, plugins=plugins, accumulate=2)
    learner.remove("progress")
    learner.fit(data, data, epochs=2)
    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    run = next(run for run in runs if run.info.run_name == "one")
    assert run.info.status == "FINISHED"
    assert run.data.tags["team"] == "a"
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert run.data.params["accumulate"] == "2"
    for name in ("train/loss", "val/loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(each.step, each.value) for each in history] == [
            (4 * epoch, logged[2 * epoch - 1][name]) for epoch in (1, 2)
        ]
    found = [
        path for path in (database.parent / "mlruns").rglob("*") if path.is_file() and run.info.run_id in str(path)
    ]
    assert "a text" in [path.read_text() for path in found]


def test_store_refuses_as_a_server_does(database):
    store = connect(f"sqlite:///{database}")
    assert isinstance(store, Store)
    with pytest.raises(Denied, match=r"did not take runs/get: .*nobody"):
        store.get("runs/get", run_id="nobody")
    with pytest.raises(Denied, match="has no experiment 'nothing'"):
        store.get("experiments/get-by-name", experiment_name="nothing")
