"""MLflow: its store without a server, a database, with the backend of loopkit-mlflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
from checks import main
from loopkit_mlflow import MLflow
from mlflow import MlflowClient
from trackers import Rows, Tracked

NEEDS = ["mlflow==3.17.2"]


class Database(Tracked):
    """A file of SQLite, the default store since MLflow 3.7."""

    def write(self, folder: Path, rows: Any) -> None:
        mlflow.set_tracking_uri(uri(folder))
        with mlflow.start_run():
            for step, values in rows:
                mlflow.log_metrics(values, step=step)

    def backend(self, folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        return MLflow(uri(folder), spool=folder / "spool", wait=60)

    def read(self, folder: Path) -> Rows:
        client = MlflowClient(uri(folder))
        (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
        found: Rows = {}
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            found[name] = [(each.step, each.value) for each in history]
        return found


def uri(folder: Path) -> str:
    """The address of the store."""
    return f"sqlite:///{folder}/mlflow.db"


if __name__ == "__main__":
    main(NEEDS, [Database()])
