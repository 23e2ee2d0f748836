"""The few calls of MLflow's REST API that are needed, each with limits on its time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import requests

from loopkit.author import masking
from loopkit.errors import LoopkitError, PluginError

__all__ = ["Client", "Denied", "Refused", "ServerError", "Unavailable", "check_uri"]

CONNECT, READ, UPLOAD = 3.05, 10.0, 60.0
"""Seconds until there is a connection, until an answer comes, and until the one to an upload does."""

REFUSES, LATER = (400, 413, 422), (408, 425, 429)
"""Answers that reject the request, and answers that ask for another try."""


class ServerError(LoopkitError):
    """A call did not do what it was to do."""


class Unavailable(ServerError):
    """No answer, or an answer that the server failed: it may succeed later, or have succeeded."""


class Refused(ServerError):
    """The server does not take what was sent."""


class Denied(ServerError):
    """Sending fails until rights, the experiment, the run or the address are changed."""


def check_uri(uri: str) -> str:
    """The address without a slash at its end.

    Raises:
        PluginError: It is not a server's address, or holds a password, which would be written into the spool.
    """
    if isinstance(uri, str) and uri.startswith("sqlite:///") and len(uri) > len("sqlite:///"):
        return uri
    try:
        parts = urlsplit(uri)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, TypeError, AttributeError):  # such as a port that is no number
        fits = False
    if not fits:
        raise PluginError(
            f"MLflow: tracking_uri is {masking.masked_text(repr(uri))}, which is no address of a server: give one "
            f"such as 'http://127.0.0.1:5000', where this runs: mlflow server --backend-store-uri sqlite:///mlflow.db; "
            f"or that database itself, 'sqlite:///mlflow.db'"
        )
    if parts.username is not None or parts.password is not None:
        raise PluginError(
            f"MLflow: tracking_uri holds a name or password for {parts.hostname}, and would be written into the spool: "
            f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead"
        )
    return uri.rstrip("/")


class Answer(dict[str, Any]):
    """An object of an answer; without a key of MLflow's answers it is from another server."""

    def __missing__(self, key: str) -> Any:
        raise Denied(f"the server answered without {key!r}, with {str(dict(self))[:60]}: it is no MLflow server")


class Client:
    """A tracking server.

    Args:
        uri: Its address. Name and password, or token, are read from ``MLFLOW_TRACKING_USERNAME`` and
            ``MLFLOW_TRACKING_PASSWORD``, or ``MLFLOW_TRACKING_TOKEN``.
        timeout: Seconds to wait for an answer.

    Raises:
        PluginError: It is no address of a server.
    """

    def __init__(self, uri: str, timeout: float = READ) -> None:
        self.uri = check_uri(uri)
        self.timeout = timeout
        self._session = requests.Session()
        self._session.auth = _authorization()

    def get(self, call: str, **params: str) -> dict[str, Any]:
        """GET a call such as ``runs/get``."""
        return self._json("GET", call, params=params)

    def post(self, call: str, **body: Any) -> dict[str, Any]:
        """POST a call such as ``runs/log-batch``."""
        return self._json("POST", call, json=body)

    def upload(self, file: Path, artifact_uri: str, path: str) -> None:
        """Put a file among a run's artifacts, in the place of one of the same path.

        Raises:
            OSError: The file cannot be read.
            ServerError: It was not taken.
        """
        parts = urlsplit(artifact_uri)
        if parts.scheme != "mlflow-artifacts" or parts.netloc:
            store_artifact(file, artifact_uri, path)
            return
        url = f"{self.uri}/api/2.0/mlflow-artifacts/artifacts/{quote(parts.path.strip('/'))}/{quote(path)}"
        with file.open("rb") as content:
            self._call("PUT", url, UPLOAD, data=content if file.stat().st_size else b"")

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _json(self, method: str, call: str, **options: Any) -> dict[str, Any]:
        response = self._call(method, f"{self.uri}/api/2.0/mlflow/{call}", self.timeout, **options)
        try:
            answer = response.json(object_hook=Answer)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Denied(f"{self.uri} answered {call} with {response.text[:60]!r}: it is no MLflow server")
        return answer

    def _call(self, method: str, url: str, timeout: float, **options: Any) -> requests.Response:
        shown = f"{method} {url.partition('?')[0]}"
        try:
            response = self._session.request(method, url, timeout=(CONNECT, timeout), allow_redirects=False, **options)
        except requests.Timeout as error:
            raise Unavailable(f"no answer to {shown} within {timeout:g} s") from error
        except requests.RequestException as error:
            raise Unavailable(f"{shown} failed: {_reason(error)}") from error
        if response.ok and not response.is_redirect:
            return response
        raise kind_of(response.status_code)(f"{shown} was answered with {response.status_code}: {_message(response)}")


def kind_of(status: int) -> type[ServerError]:
    """The error for an answer with this status."""
    kinds: dict[int, type[ServerError]] = {**dict.fromkeys(REFUSES, Refused), **dict.fromkeys(LATER, Unavailable)}
    return Unavailable if status >= 500 else kinds.get(status, Denied)


def _authorization() -> Any:
    """The authorization of a request: a password or a token; None leaves it to requests."""
    name, password = (os.environ.get(f"MLFLOW_TRACKING_{word}") for word in ("USERNAME", "PASSWORD"))
    if name and password:
        return name, password
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if not token:
        return None

    def add(request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    return add


def store_artifact(file: Path, artifact_uri: str, path: str) -> None:
    """Write to a store that the server does not stand in front of, by mlflow's own code."""
    try:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    except ImportError as error:
        raise Denied(
            f"the run keeps its artifacts in {artifact_uri}, which needs mlflow: pip install mlflow, or let the server "
            f"take artifacts (mlflow server --serve-artifacts)"
        ) from error
    try:
        get_artifact_repository(artifact_uri).log_artifact(str(file), path.rpartition("/")[0] or None)
    except Exception as error:
        raise Unavailable(f"{artifact_uri} did not take {path}: {type(error).__name__}: {error}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause, which has the best message."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"


def _message(response: requests.Response) -> str:
    try:
        return str(response.json()["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or response.reason
