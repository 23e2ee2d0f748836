"""A tracking store without a server: a database, through mlflow's own client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loopkit_mlflow.client import READ, Client, Denied, check_uri, kind_of, store_artifact

__all__ = ["Store", "connect", "is_store"]


def is_store(uri: str) -> bool:
    """Whether it is the address of a database, and not of a server."""
    return uri.startswith("sqlite:///")


def connect(uri: str, timeout: float = READ) -> Client:
    """A client for a server, or for a database."""
    return Store(uri) if is_store(uri) else Client(uri, timeout)


class Store(Client):
    """The calls of a `Client`, answered by mlflow's own client, which is imported at the first one.

    Args:
        uri: ``"sqlite:///mlflow.db"``: below the working directory; ``"sqlite:////data/mlflow.db"``: a whole path.
    """

    def __init__(self, uri: str) -> None:
        self.uri = check_uri(uri)
        self._client: Any = None

    def get(self, call: str, **params: str) -> dict[str, Any]:
        """Answer a call such as ``runs/get``."""
        return self._answer(call, params)

    def post(self, call: str, **body: Any) -> dict[str, Any]:
        """Answer a call such as ``runs/log-batch``."""
        return self._answer(call, body)

    def upload(self, file: Path, artifact_uri: str, path: str) -> None:
        """Put a file among a run's artifacts."""
        store_artifact(file, artifact_uri, path)

    def close(self) -> None:
        """Do not close: mlflow keeps the engine of the database."""

    def _answer(self, call: str, given: dict[str, Any]) -> dict[str, Any]:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise Denied(f"{self.uri} needs mlflow: pip install mlflow, or give the address of a server") from error
        calls: dict[str, Callable[..., dict[str, Any]]] = {
            "experiments/get-by-name": self._experiment,
            "experiments/create": lambda name: {"experiment_id": self._client.create_experiment(name)},
            "runs/create": lambda tags, **given: _run(self._client.create_run(tags=_pairs(tags), **given)),
            "runs/get": lambda run_id: _run(self._client.get_run(run_id)),
            "runs/search": self._search,
            "runs/update": self._update,
            "runs/log-batch": self._log,
        }
        try:
            self._client = self._client or MlflowClient(self.uri)
            return calls[call](**given)
        except MlflowException as error:
            raise kind_of(error.get_http_status_code())(f"{self.uri} did not take {call}: {error.message}") from error

    def _experiment(self, experiment_name: str) -> dict[str, Any]:
        found = self._client.get_experiment_by_name(experiment_name)
        if found is None:
            raise Denied(f"{self.uri} has no experiment {experiment_name!r}")
        return {"experiment": {"experiment_id": found.experiment_id, "lifecycle_stage": found.lifecycle_stage}}

    def _search(self, experiment_ids: list[str], filter: str, run_view_type: str) -> dict[str, Any]:
        from mlflow.entities import ViewType

        found = self._client.search_runs(experiment_ids, filter, ViewType.from_string(run_view_type.lower()))
        return {"runs": [_run(each)["run"] for each in found]}

    def _update(self, run_id: str, status: str, end_time: int | None = None, **_: Any) -> dict[str, Any]:
        self._client.set_terminated(run_id, status, end_time) if end_time else self._client.update_run(run_id, status)
        return {}

    def _log(self, run_id: str, **items: list[dict[str, Any]]) -> dict[str, Any]:
        from mlflow.entities import Metric, Param, RunTag

        made = {"metrics": Metric, "params": Param, "tags": RunTag}
        lists = {kind: [made[kind](**item) for item in each] for kind, each in items.items()}
        self._client.log_batch(run_id, **lists)
        return {}


def _run(run: Any) -> dict[str, Any]:
    """A run in the form of the REST API, with the fields that are read."""
    info = {name: getattr(run.info, name) for name in ("run_id", "artifact_uri", "lifecycle_stage", "status")}
    return {"run": {"info": info, "data": {"tags": [{"key": k, "value": v} for k, v in run.data.tags.items()]}}}


def _pairs(tags: list[dict[str, str]]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in tags}
