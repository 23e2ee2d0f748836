"""A real tracking server, a real, unreliable network in front of it, and plugins for runs that log."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

from loopkit import hookimpl

START = 90  # seconds that a server may take to start on a busy machine


def free_port():
    """A port that nobody uses, from below those that the system gives to outgoing connections."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def serving(directory, port=0, *options):
    """An MLflow server of this machine alone, with its data in a directory; stopped at the end, in any case."""
    if not port:
        port = free_port()
    uri = f"http://127.0.0.1:{port}"
    words = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", *options]
    stores = [f"--backend-store-uri=sqlite:///{directory}/mlflow.db", f"--artifacts-destination={directory}/artifacts"]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
    with (directory / "server.txt").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *words, *stores],
            env={**os.environ, **quiet},
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that its workers are stopped with it
        )
    try:
        until = time.monotonic() + START
        while True:
            with suppress(requests.RequestException):
                if requests.get(f"{uri}/health", timeout=1).ok:
                    break
            said = (directory / "server.txt").read_text()
            assert server.poll() is None, said
            assert time.monotonic() < until, said
            time.sleep(0.1)
        yield uri
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


class Network:
    """Passes connections on to a server, or does to them what networks and servers do.

    ``mode``: ``"good"``; ``"away"``: connections are closed at once; ``"slow"``: answers take ``delay`` seconds;
    ``"broken"``: each request is answered with 500; ``"lost"``: requests arrive, answers do not.
    ``matching``: only requests whose first line holds this are treated so.
    """

    def __init__(self, uri):
        self.target = int(uri.rpartition(":")[2])
        self.mode, self.matching, self.delay = "good", b"", 0.0
        self.requests, self.heads = [], []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()
        for each in list(self._open):
            each.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
            while head := self._head(stream):
                length = next((int(line[15:]) for line in head if line.lower().startswith(b"content-length:")), 0)
                body = stream.read(length)
                self.requests.append(head[0].decode())
                fields = (line.decode().partition(":") for line in head[1:])
                self.heads.append({name.lower(): value.strip() for name, _, value in fields})
                mode = self.mode if self.matching in head[0] else "good"
                if mode == "away":
                    return
                if mode == "broken":
                    connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nhelp")
                    continue
                answer = self._ask(head, body)
                if mode == "lost":
                    return
                if mode == "slow":
                    time.sleep(self.delay)
                connection.sendall(answer)
        self._open.discard(connection)

    @staticmethod
    def _head(stream):
        lines = []
        while (line := stream.readline()) not in (b"\r\n", b""):
            lines.append(line.rstrip(b"\r\n"))
        return lines

    def _ask(self, head, body):
        kept = [line for line in head if not line.lower().startswith(b"connection:")]
        with socket.create_connection(("127.0.0.1", self.target), timeout=60) as server:
            server.sendall(b"\r\n".join([*kept, b"Connection: close", b"", body]))
            with server.makefile("rb") as stream:
                answer = stream.read()
        first, _, rest = answer.partition(b"\r\n\r\n")
        lines = [line for line in first.split(b"\r\n") if not line.lower().startswith((b"connection:", b"content-len"))]
        return b"\r\n".join([*lines, b"Content-Length: %d" % len(rest), b"", rest])


@contextmanager
def answering(body):
    """The address of a server that answers every request with this JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *values):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Server:
    """What the server says, asked without our own client."""

    def __init__(self, uri):
        self.uri = uri

    def ask(self, call, body=None, **params):
        url = f"{self.uri}/api/2.0/mlflow/{call}"
        method = "GET" if body is None else "POST"
        answer = requests.request(method, url, params=params, json=body, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def runs(self, experiment):
        found = self.ask("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        return self.ask("runs/search", {"experiment_ids": [found]}).get("runs", [])

    def run(self, experiment):
        (run,) = self.runs(experiment)
        return run

    def tags(self, experiment):
        return {tag["key"]: tag["value"] for tag in self.run(experiment)["data"]["tags"]}

    def params(self, experiment):
        return {param["key"]: param["value"] for param in self.run(experiment)["data"].get("params", ())}

    def history(self, experiment, metric):
        run = self.run(experiment)["info"]["run_id"]
        found = self.ask("metrics/get-history", run_id=run, metric_key=metric).get("metrics", [])
        return [(each["step"], each["value"]) for each in found]

    def artifacts(self, experiment, path=""):
        run = self.run(experiment)["info"]["run_id"]
        found = self.ask("artifacts/list", run_id=run, **({"path": path} if path else {})).get("files", [])
        return sorted(
            name
            for each in found
            for name in (self.artifacts(experiment, each["path"]) if each["is_dir"] else [each["path"]])
        )

    def artifact(self, experiment, path):
        place = self.run(experiment)["info"]["artifact_uri"].removeprefix("mlflow-artifacts:/")
        answer = requests.get(f"{self.uri}/api/2.0/mlflow-artifacts/artifacts/{place}/{path}", timeout=60)
        answer.raise_for_status()
        return answer.content


def eventually(check, seconds=60.0):
    """Wait until something is true."""
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it has not come true"
        time.sleep(0.02)


class LogLoss:
    """Logs the loss of each training step."""

    name = "log_loss"

    @hookimpl(reads=("loss",))
    def step_end(self, learner, phase, step):
        if phase.training:
            learner.log("loss", step.loss)


class At:
    """Calls a function at the end of a training step."""

    def __init__(self, step, function):
        self.name = f"at_{step}"
        self.step, self.function = step, function

    @hookimpl(after=("log_loss",))
    def step_end(self, learner):
        if learner.progress.steps == self.step:
            self.function(learner)
