"""From a spool to the server: in order, once each as far as can be, in a thread or at a command."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from loopkit.author import Lock
from loopkit.errors import CheckpointError
from loopkit_mlflow.client import Client, Denied, Refused, ServerError, Unavailable
from loopkit_mlflow.spool import Spool, SpoolError
from loopkit_mlflow.store import connect

__all__ = ["Sender", "SenderThread", "create_run"]

SOURCE_TAG, SENT_TAG, CHANGED_TAG = "loopkit.source", "loopkit.sent", "loopkit.param."
MOST, MOST_OTHERS, LARGEST = 800, 90, 500_000
"""Metrics of a request, parameters and tags of one, and bytes; MLflow takes 1,000 items, 100 of the others, 1 MB."""
TRIES = 3
"""How often to send a file that the server, which answers otherwise, does not take."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between attempts: doubled after each that fails."""
KINDS = ("metrics", "params", "tags")

Item = tuple[str, dict[str, Any]]


class Sender:
    """Sends what a spool holds. It may be used by one thread at a time, and waits for the server at most as `Client`.

    The run is found by its tag ``loopkit.source``, or made: if the answer to the call that made it was lost, it is
    found. Each request carries the tag ``loopkit.sent``, the number of its last batch. If the result of a call is
    unknown, that tag shows it; batches that arrived are not sent again.
    """

    def __init__(self, spool: Spool, client: Client) -> None:
        self.spool = spool
        self.client = client
        self._sent = spool.sent
        self._known = False
        """The server was asked how much it has."""
        self._failures: dict[str, int] = {}
        """How often a file could not be sent, by its path."""
        self.refusal = ""
        """Why the first thing was set aside, if one was."""

    @property
    def run_id(self) -> str | None:
        """The run's id, once it is known."""
        return self._sent.run_id

    def send(self) -> int:
        """Send one request's worth of batches; returns how many they were, 0 if there are none.

        Raises:
            ServerError: They were not sent, as far as is known.
            OSError: The spool cannot be read.
        """
        if not self._known:
            self._connect()
        batches = list(self._next())
        if not batches:
            return 0
        try:
            self._send(batches)
            self._note(seq=batches[-1][0]["seq"], offset=batches[-1][1])
        except (ServerError, OSError):
            self._known = False
            raise
        self.spool.drop_files(batches[-1][0].get("artifacts", ()))
        return len(batches)

    def send_refused(self) -> tuple[int, int]:
        """Send rejected items again; returns how many there were, and how many the server rejected again.

        Raises:
            ServerError: The server cannot be reached; all items are kept.
        """
        if not self._known:
            self._connect()
        found = self.spool.refused
        self.spool.forget_refused()
        for number, each in enumerate(found):
            try:
                if each["kind"] == "artifacts":
                    self._upload(each["item"], tries=1)
                else:
                    self._log([(each["kind"], each["item"])])
            except ServerError:
                for rest in found[number:]:
                    self.spool.set_aside(**rest)
                raise
        self.spool.drop_files(each["item"] for each in found if each["kind"] == "artifacts")
        return len(found), len(self.spool.refused)

    def _note(self, **changes: Any) -> None:
        self.spool.sent = self._sent = replace(self._sent, **changes)

    def _connect(self) -> None:
        """Find the run or make it, and see how far it got."""
        if self._sent.run_id is None:
            experiment = experiment_id(self.client, self.spool.header.experiment)
            run = self._active(self._find(experiment) or self._make(experiment))
        else:
            run = self._active_run()
        self._note(run_id=run["info"]["run_id"], artifact_uri=run["info"]["artifact_uri"])
        tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", ())}
        log, _, seq = tags.get(SENT_TAG, "").partition(":")
        if log == self.spool.header.log and seq.isdecimal() and int(seq) > self._sent.seq:
            self._pass_over(int(seq))
        self._known = True

    def _pass_over(self, seq: int) -> None:
        """Resume after the batch of this number, which the server has."""
        for batch, end in self.spool.batches(self._sent.offset):
            if batch["seq"] > seq:
                break
            self._note(seq=batch["seq"], offset=end)
            self.spool.drop_files(batch.get("artifacts", ()))

    def _active_run(self) -> dict[str, Any]:
        return self._active(self.client.get("runs/get", run_id=str(self._sent.run_id))["run"])

    def _active(self, run: dict[str, Any]) -> dict[str, Any]:
        if run["info"]["lifecycle_stage"] != "active":
            raise Denied(f"run {run['info']['run_id']} on {self.client.uri} was deleted: restore it to continue")
        return run

    def _find(self, experiment: str) -> dict[str, Any] | None:
        found = self.client.post(
            "runs/search",
            experiment_ids=[experiment],
            filter=f"tags.`{SOURCE_TAG}` = '{self.spool.header.source}'",
            run_view_type="ALL",
        ).get("runs", [])
        return min(found, key=lambda run: str(run["info"]["run_id"]), default=None)

    def _make(self, experiment: str) -> dict[str, Any]:
        header = self.spool.header
        tags = {**header.tags, SOURCE_TAG: header.source}
        return make_run(self.client, experiment, header.run_name, tags, header.start_time)

    def _next(self) -> Iterator[tuple[dict[str, Any], int]]:
        """The batches of the next request: one, or several that hold neither artifacts nor a status."""
        first, counts = True, Counter[str]()
        for batch, end in self.spool.batches(self._sent.offset):
            counts.update({kind: len(batch.get(kind, ())) for kind in KINDS})
            fits = (
                set(batch) <= {"seq", *KINDS}
                and counts["metrics"] <= MOST
                and max(counts["params"], counts["tags"]) <= MOST_OTHERS
                and end - self._sent.offset <= LARGEST
            )
            if first or fits:
                yield batch, end
            if not fits:
                return
            first = False

    def _send(self, batches: list[tuple[dict[str, Any], int]]) -> None:
        last = batches[-1][0]
        for artifact in last.get("artifacts", ()):
            self._upload(artifact, TRIES)
        if status := last.get("status"):
            self.client.post("runs/update", run_id=self.run_id, **status)
        items = [(kind, item) for batch, _ in batches for kind in KINDS for item in batch.get(kind, ())]
        self._log([*items, ("tags", {"key": SENT_TAG, "value": f"{self.spool.header.log}:{last['seq']}"})])

    def _log(self, items: list[Item]) -> None:
        """Send items of a run; rejected ones are set aside, one by one."""
        body: dict[str, Any] = {kind: [item for each, item in items if each == kind] for kind in KINDS}
        try:
            self.client.post(
                "runs/log-batch", run_id=self.run_id, **{key: value for key, value in body.items() if value}
            )
        except Refused as error:
            self._active_run()  # else nothing of it would be taken
            if len(items) > 1:
                middle = len(items) // 2
                self._log(items[:middle])
                self._log(items[middle:])
                return
            kind, item = items[0]
            self._set_aside(kind, item, error)
            if kind == "params":  # it has another value from an earlier start, say
                self._log([("tags", {"key": f"{CHANGED_TAG}{item['key']}"[:250], "value": item["value"]})])

    def _upload(self, artifact: dict[str, Any], tries: int) -> None:
        path = artifact["path"]
        try:
            self.client.upload(self.spool.directory / artifact["file"], self._sent.artifact_uri, path)
            self._failures.pop(path, None)
        except (ServerError, OSError) as error:
            failures = self._failures[path] = self._failures.get(path, 0) + 1
            if isinstance(error, Unavailable):
                self._active_run()  # if this fails, too, it is not about the file
                if failures < tries:
                    raise
            self._set_aside("artifacts", artifact, error)

    def _set_aside(self, kind: str, item: dict[str, Any], error: Exception) -> None:
        self.refusal = self.refusal or str(error)
        self.spool.set_aside(kind, item, str(error))


class SenderThread(threading.Thread):
    """Send the content of a spool during the run.

    It ends with the process, whatever it is waiting for. `problem` is its present problem, or empty.
    """

    def __init__(self, sender: Sender) -> None:
        super().__init__(name="loopkit-mlflow", daemon=True)
        self.sender = sender
        self.problem = ""
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._until = float("inf")

    def wake(self) -> None:
        """There is something to send."""
        self._wake.set()

    def finish(self, seconds: float) -> None:
        """Send what is left, and wait for it at most so long."""
        self._until = time.monotonic() + seconds
        self._ending.set()
        self._wake.set()
        if self.ident is not None:  # it was started
            self.join(seconds)

    def run(self) -> None:
        """Send, and try again after a while where that fails; the pause grows, and is short again at the end."""
        lock = Lock(self.sender.spool.directory)
        held, pause = False, FIRST_PAUSE
        try:
            while True:
                self._wake.clear()  # before looking, so that nothing that comes meanwhile is overlooked
                ending = self._ending.is_set()
                try:
                    if not held:
                        lock.acquire()
                        held = True
                    while self.sender.send():
                        self.problem, pause = "", FIRST_PAUSE
                        if time.monotonic() > self._until:
                            return
                    self.problem = ""
                    if ending:
                        return
                    self._wake.wait()
                except (ServerError, CheckpointError, SpoolError, OSError) as error:
                    self.problem = str(error)
                    if time.monotonic() + FIRST_PAUSE > self._until:
                        return
                    self._pause(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            if held:
                with suppress(CheckpointError):
                    lock.release()
            self.sender.client.close()

    def _pause(self, seconds: float) -> None:
        """Wait; at the end of the run, attempts follow each other quickly."""
        if self._ending.wait(seconds):
            time.sleep(FIRST_PAUSE)


def experiment_id(client: Client, name: str) -> str:
    """The id of an experiment, which is made if there is none of this name.

    Raises:
        ServerError: The server does not answer, or the experiment was deleted.
    """
    for attempt in range(2):
        try:
            found = client.get("experiments/get-by-name", experiment_name=name)["experiment"]
        except Denied:
            try:
                return str(client.post("experiments/create", name=name)["experiment_id"])
            except Refused:
                if attempt:
                    raise
                continue  # somebody else has just made it
        if found["lifecycle_stage"] != "active":
            raise Denied(f"experiment {name!r} on {client.uri} was deleted: restore it, or choose another name")
        return str(found["experiment_id"])
    raise AssertionError("unreachable")


def make_run(client: Client, experiment: str, name: str | None, tags: dict[str, str], start: int) -> dict[str, Any]:
    """Make a run, and return the server's description."""
    given = {} if name is None else {"run_name": name}
    listed = [{"key": key, "value": value} for key, value in tags.items()]
    run: dict[str, Any] = client.post("runs/create", experiment_id=experiment, start_time=start, tags=listed, **given)[
        "run"
    ]
    return run


def create_run(tracking_uri: str, experiment: str, run_name: str | None = None) -> str:
    """Make a run and return its id: one to be the ``parent`` of others.

    Raises:
        ServerError: The server did not answer within seconds, or answered with an error.

    Example::

        parent = create_run("http://127.0.0.1:5000", "digits", "five folds")
        for fold in range(5):
            backend = MLflow("http://127.0.0.1:5000", "digits", run_name=f"fold {fold}", parent=parent)
    """
    client = connect(tracking_uri)
    try:
        run = make_run(client, experiment_id(client, experiment), run_name, {}, int(time.time() * 1000))
        return str(run["info"]["run_id"])
    finally:
        client.close()
