"""The backend for `LogTo`: logs go into a spool, and from there to the server."""

from __future__ import annotations

import errno
import getpass
import hashlib
import json
import math
import os
import shutil
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopkit.author import checks, masking
from loopkit.errors import CheckpointError, LogError, PluginError
from loopkit.logs import (
    Audio,
    Backend,
    Figure,
    File,
    Graph,
    Histogram,
    Hyperparameters,
    Image,
    Record,
    Run,
    Table,
    Text,
    Value,
)
from loopkit.plugins import Checkpoint, LogTo
from loopkit.result import FitResult
from loopkit_mlflow.checkpoints import due_checkpoints, stage_checkpoint, staged_in
from loopkit_mlflow.client import check_uri
from loopkit_mlflow.names import artifact_name, clean, name_for
from loopkit_mlflow.sender import MOST, Sender, SenderThread
from loopkit_mlflow.spool import Header, Spool, SpoolError
from loopkit_mlflow.store import connect

__all__ = ["MLflow", "mlflow"]

LONGEST_VALUE = 6000
"""Characters of a parameter's value, as MLflow limits them."""
LONGEST_TAG = 8000
LONGEST_NAME = 500
"""Characters of an experiment's name."""
TOGETHER = 50
"""Parameters of a request."""
STATUS = {"error": "FAILED", "signal": "KILLED"}


class MLflow(Backend):
    """Log to an MLflow tracking server: parameters, metrics, artifacts and checkpoints.

    Logs are first written to a spool, a directory below ``spool``; a thread sends them from there.
    The server may be slow, go away and come back, or never answer: training continues, with one warning, and the
    rest stays in the spool. ``loopkit mlflow send SPOOL`` sends it later, and so does a run that
    resumes from a checkpoint. The server gets everything in order, and once (README: details).

    Scalars become metrics (the step is the number of training steps), `Hyperparameters` parameters, and `Text`,
    `Image`, `Figure`, `Table`, `Histogram`, `Audio`, `File` and `Graph` artifacts. ``loss`` in the
    phase ``train`` is logged as ``train/loss``.

    Args:
        tracking_uri: The server's address, such as ``"http://127.0.0.1:5000"``, or a database of this machine without a
            server, ``"sqlite:///mlflow.db"``, which needs mlflow; by default that in ``MLFLOW_TRACKING_URI``.
        experiment: The experiment's name; it is made if there is none.
        run_name: The run's name; by default the server finds one.
        parent: The id of the run that this one is nested in (`create_run` makes one).
        checkpoints: Which checkpoints of the run's `Checkpoint` go along, below ``checkpoints/``: ``"last"`` or
            ``"best"`` at the end of the fit, ``"all"`` as they are made, None for none.
        tags: Tags of the run.
        spool: Where the spools are.
        wait: Seconds that the end of the fit waits at most for what is left to be sent.
        timeout: Seconds to wait for an answer of the server.

    Raises:
        PluginError: An option is out of range.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo(MLflow("http://127.0.0.1:5000", "digits"))])
    """

    name = "mlflow"
    kinds = (Value, Hyperparameters, Text, Image, Figure, Table, Histogram, Audio, File, Graph)
    any_names = True

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        parent: str | None = None,
        checkpoints: str | None = None,
        tags: Mapping[str, str] | None = None,
        spool: str | Path = "runs/mlflow",
        wait: float = 10.0,
        timeout: float = 10.0,
    ) -> None:
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not given:
            raise PluginError(
                "MLflow: there is no tracking_uri, and MLFLOW_TRACKING_URI is not set: give the server's address, such "
                "as MLflow('http://127.0.0.1:5000')"
            )
        checks.one_of("MLflow", ("last", "best", "all", None), checkpoints=checkpoints)
        for option, value, least in (("wait", wait, 0.0), ("timeout", timeout, 0.1)):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < float("inf"):
                raise PluginError(f"MLflow: {option} is {value!r}: it is a number of seconds, at least {least:g}")
        if not isinstance(experiment, str) or not 0 < len(experiment) <= LONGEST_NAME:
            raise PluginError(
                f"MLflow: experiment is {experiment!r:.100}: it is a name of at most {LONGEST_NAME} characters"
            )
        for option, text in (("run_name", run_name), ("parent", parent)):
            if text is not None and not isinstance(text, str):
                raise PluginError(f"MLflow: {option} is {text!r:.100}: it is a string")
        if tags is not None and not (isinstance(tags, Mapping) and all(isinstance(key, str) for key in tags)):
            raise PluginError(f"MLflow: tags is {tags!r:.100}: it maps names to texts, {{'team': 'vision'}}")
        self.tracking_uri = check_uri(given)
        self.experiment = clean(experiment)
        self.run_name = None if run_name is None else clean(run_name)[:LONGEST_NAME]
        self.parent = parent
        self.checkpoints = checkpoints
        self.tags = dict(tags or {})
        self.wait, self.timeout = wait, timeout
        self._parent_directory = Path(spool).absolute()
        self._state: dict[str, Any] = {}
        """The run to resume, if there is one."""
        self._learner: weakref.ref[Any] | None = None
        self._spool: Spool | None = None
        self._thread: SenderThread | None = None
        self._source: Checkpoint | None = None
        self._ahead: Counter[Any] = Counter()
        """The items in the spool from steps after the resumed checkpoint: they are not logged again."""
        self._paths: dict[str, tuple[int, int]] = {}
        """The last step in which an artifact had this path, and how many there were."""
        self._staged: set[str] = set()
        """The checkpoints that are in the spool, or were."""
        self._warned: set[str] = set()

    @property
    def spool(self) -> Path | None:
        """The directory of this run's spool, once a fit has begun."""
        return None if self._spool is None else self._spool.directory

    @property
    def run_id(self) -> str | None:
        """The run's id on the server, once it is known."""
        return None if self._thread is None else self._thread.sender.run_id

    def open(self, run: Run) -> None:
        """Begin a spool, or take the resumed run's, and start sending."""
        if not run.resumed and (self._learner is None or self._learner() is not run.learner):
            self._state = {}  # what a fit of another learner has left
            self._paths.clear()
        self._warned.clear()
        self._ahead.clear()
        self._staged = set(self._state.get("checkpoints", ()))
        self._learner = weakref.ref(run.learner)
        self._spool = spool = self._take_spool()
        self._thread = SenderThread(Sender(spool, connect(self.tracking_uri, self.timeout)))
        found = [plugin for plugin in run.learner.plugins.values() if isinstance(plugin, Checkpoint)]
        self._source = found[0] if found else None
        if self._state:
            self._append(status={"status": "RUNNING"})
        self._write_parameters(run.hyperparameters)
        if run.config:
            self._write_file("config.toml", run.config.encode())
        self._thread.start()

    def write(self, records: Sequence[Record]) -> None:
        """Put records into the spool."""
        metrics: list[dict[str, Any]] = []
        for record in records:
            if isinstance(record.value, (int, float)):
                metrics.append(
                    {
                        "key": self._name(_full_name(record)),
                        "value": _number(float(record.value)),
                        "timestamp": _milliseconds(record.time),
                        "step": record.step,
                    }
                )
            else:
                self._write_metrics(metrics)
                metrics = []
                try:
                    self._write_kind(record)
                except OSError:  # of the spool
                    raise
                except Exception as error:  # the other records are worth more than this one
                    warnings.warn(
                        f"backend {self.name!r} leaves out {record.name!r:.100}, which cannot be written, "
                        f"{type(error).__name__}: {error}",
                        stacklevel=2,
                    )
        self._write_metrics(metrics)
        if self.checkpoints == "all":
            self._write_checkpoints()
        self._say()

    def flush(self) -> None:
        """Make the spool durable."""
        if self._spool is not None:
            if self.checkpoints == "all":  # before the one that is about to be saved pushes another out
                self._write_checkpoints()
            self._spool.sync()

    def state_dict(self) -> dict[str, Any]:
        """Which run it is, and how far its spool was written."""
        if self._spool is None:
            return dict(self._state)
        spool = self._spool
        return {
            "source": spool.header.source,
            "run_id": self.run_id,
            "log": spool.header.log,
            "seq": spool.seq,
            "offset": spool.end,
            "checkpoints": sorted(self._staged),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the run of the state."""
        self._state = dict(state)

    def close(self, result: FitResult | None) -> None:
        """Wait for the rest to be sent, at most ``wait`` seconds; warn if some is left then."""
        if self._spool is None or self._thread is None:
            return
        spool, thread = self._spool, self._thread
        status = "FAILED" if result is None else STATUS.get(result.reason, "FINISHED")
        try:
            self._write_checkpoints()
            self._append(status={"status": status, "end_time": _milliseconds(time.time())})
            spool.sync()
        finally:
            thread.finish(self.wait)
            self._state = self.state_dict()
            spool.close()
        if left := spool.left:
            print(
                f"loopkit: backend {self.name!r}: batches that are not sent yet: {left}. "
                f"Send by: loopkit mlflow send {spool.directory}",
                file=sys.stderr,
            )
        self._say()

    # The spool

    def _take_spool(self) -> Spool:
        """The spool to resume; a new one, for the same run, if it is gone, damaged, or being written."""
        state = self._state
        for directory in sorted(self._parent_directory.glob(f"*-{state['source'][:8]}")) if state else ():
            try:
                spool = Spool(directory)
                if spool.header.log == state["log"] and spool.size >= state["offset"]:
                    spool.open_for_writing(state["seq"], state["offset"])
                    self._look_ahead(spool, state["offset"])
                    return spool
            except (SpoolError, CheckpointError) as error:
                self._warn("spool", f"{error}. This run continues with a new spool, for the same run of MLflow")
        same = {"source": state["source"], "run_id": state["run_id"]} if state else {}
        self._staged.clear()
        try:
            spool = Spool.create(self._parent_directory, self._header(**same))
            spool.open_for_writing()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise  # it may pass: the fit goes on without this log
            raise LogError(
                f"MLflow: no spool can be written in {self._parent_directory}: {error.strerror}; give another "
                f"directory, MLflow(..., spool=...)"
            ) from error
        return spool

    def _header(self, **more: Any) -> Header:
        tags = {
            "mlflow.user": _user(),
            "mlflow.source.name": sys.argv[0] or "python",
            "mlflow.source.type": "LOCAL",
            **({} if self.parent is None else {"mlflow.parentRunId": self.parent}),
            **{
                name_for(key): clean(str(value))[:LONGEST_TAG]
                for key, value in masking.masked_values(self.tags).items()
            },
        }
        now = _milliseconds(time.time())
        return Header(self.tracking_uri, self.experiment, self.run_name, tags, now, **more)

    def _look_ahead(self, spool: Spool, offset: int) -> None:
        for batch, _ in spool.batches(offset):
            self._ahead.update(map(_identity, batch.get("metrics", ())))
            self._ahead.update(map(_identity, batch.get("artifacts", ())))
            self._staged |= staged_in(batch)

    def _is_ahead(self, item: dict[str, Any]) -> bool:
        """Whether a run that was killed has logged this already."""
        identity = _identity(item)
        if not self._ahead[identity]:
            return False
        self._ahead[identity] -= 1
        return True

    def _append(self, **batch: Any) -> None:
        assert self._spool is not None
        assert self._thread is not None
        self._spool.append(**batch)
        self._thread.wake()

    # What is written

    def _write_metrics(self, metrics: list[dict[str, Any]]) -> None:
        if self._ahead:
            metrics = [each for each in metrics if not self._is_ahead(each)]
        for begin in range(0, len(metrics), MOST):
            self._append(metrics=metrics[begin : begin + MOST])

    def _write_parameters(self, values: Mapping[str, Any]) -> None:
        params = []
        for key, value in values.items():
            text, name = clean(str(value)), self._name(key)
            if len(text) > LONGEST_VALUE:
                self._write_file(f"params/{artifact_name(key)}.txt", text.encode())
                text = f"{text[: LONGEST_VALUE - 3]}..."
            params.append({"key": name, "value": text})
        for begin in range(0, len(params), TOGETHER):
            self._append(params=params[begin : begin + TOGETHER])

    def _write_kind(self, record: Record) -> None:
        value = record.value
        if isinstance(value, Hyperparameters):
            self._write_parameters(value.values)
        elif isinstance(value, Text):
            self._write_file(self._path("text", record, ".txt"), clean(value.text).encode())
        elif isinstance(value, (Image, Figure)):
            kind = "images" if isinstance(value, Image) else "figures"
            self._write_file(self._path(kind, record, ".png"), value.png())
        elif isinstance(value, Audio):
            self._write_file(self._path("audio", record, ".wav"), value.wav())
        elif isinstance(value, Table):
            rows = [[_cell(cell) for cell in row] for row in value.rows]
            self._write_json("tables", record, {"columns": list(value.columns), "data": rows})
        elif isinstance(value, Histogram):
            self._write_json("histograms", record, {"counts": value.counts, "edges": value.edges})
        elif isinstance(value, Graph):
            self._write_json("graphs", record, {"modules": value.modules()})
        elif isinstance(value, File):
            path = Path(value.path)
            self._write_file(self._path("files", record, path.suffix), path)

    def _write_json(self, kind: str, record: Record, content: dict[str, Any]) -> None:
        self._write_file(self._path(kind, record, ".json"), json.dumps(content, allow_nan=False).encode())

    def _path(self, kind: str, record: Record, suffix: str) -> str:
        """Such as ``images/samples/step-000000012.png``; a second one of the same step gets a number."""
        path = f"{kind}/{artifact_name(_full_name(record))}/step-{record.step:09d}"
        step, count = self._paths.get(path.rpartition("/")[0], (-1, 0))
        count = count + 1 if step == record.step else 1
        self._paths[path.rpartition("/")[0]] = record.step, count
        return f"{path}{f'-{count}' if count > 1 else ''}{artifact_name(suffix) if suffix else ''}"

    def _write_file(self, path: str, content: bytes | Path) -> None:
        """Keep a file in the spool, and have it sent."""
        assert self._spool is not None
        file = self._spool.place_for(path.rpartition("/")[2])
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            shutil.copyfile(content, file)
        with file.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        artifact = {"file": str(file.relative_to(self._spool.directory)), "path": path, "sha256": digest}
        if self._is_ahead(artifact):
            self._spool.drop_files([artifact])
        else:
            self._append(artifacts=[artifact])

    def _name(self, name: str) -> str:
        """The name for MLflow; one that it does not take is kept in a tag."""
        mapped = name_for(name)
        if mapped != name and mapped not in self._warned:
            self._warned.add(mapped)
            tag = {"key": name_for(f"loopkit.name.{mapped}"), "value": clean(name)[:LONGEST_TAG]}
            self._append(tags=[tag])
        return mapped

    # Checkpoints

    def _write_checkpoints(self) -> None:
        """Have those sent that are due: all that are new, or at the end the last or the best."""
        if self.checkpoints is None or self._source is None:
            return
        try:
            due = due_checkpoints(self._source.directory, self.checkpoints)
        except CheckpointError as error:
            self._warn("best", f"{error}; no checkpoint is sent")
            return
        assert self._spool is not None
        for manifest in due:
            if manifest.path.name not in self._staged:
                self._staged.add(manifest.path.name)
                self._append(**stage_checkpoint(self._spool, manifest, self.checkpoints))

    # Troubles

    def _say(self) -> None:
        """Warn once of the sender's problem; here, since the sender's thread is not the user's."""
        assert self._thread is not None
        if problem := self._thread.problem:
            self._warn("problem", f"{problem}. Training continues, and logs wait in {self.spool}")
        if refusal := self._thread.sender.refusal:
            self._warn("refusal", f"{refusal}. Rejected items are kept in {self.spool}, refused.jsonl")

    def _warn(self, about: str, text: str) -> None:
        if f"/{about}" not in self._warned:
            self._warned.add(f"/{about}")  # a slash: no mapped name begins so
            warnings.warn(f"backend {self.name!r}: {text}", stacklevel=2)


def mlflow(
    tracking_uri: str | None = None,
    experiment: str = "Default",
    *,
    run_name: str | None = None,
    parent: str | None = None,
    checkpoints: str | None = None,
    tags: Mapping[str, str] | None = None,
    spool: str | Path = "runs/mlflow",
    wait: float = 10.0,
    timeout: float = 10.0,
    every: int | None = None,
    name: str = "mlflow",
) -> LogTo:
    """A `LogTo` that writes to `MLflow`, with the arguments of both.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[{"mlflow": {"tracking_uri": "http://127.0.0.1:5000"}}])
    """
    backend = MLflow(
        tracking_uri,
        experiment,
        run_name=run_name,
        parent=parent,
        checkpoints=checkpoints,
        tags=tags,
        spool=spool,
        wait=wait,
        timeout=timeout,
    )
    return LogTo(backend, every=every, name=name)


def _identity(item: dict[str, Any]) -> tuple[Any, ...]:
    """The identity of a metric or an artifact, the same as before a restart."""
    if "path" in item:
        return item["path"], item.get("sha256")
    return item["key"], item["step"], item["value"]


def _number(value: float) -> float | str:
    """A number as MLflow's JSON has it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _cell(value: Any) -> Any:
    """A cell of a table as JSON has it: numbers that are not finite become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _full_name(record: Record) -> str:
    """The name after its phase, which it may begin with already."""
    name, phase = record.name, record.phase
    return name if not phase or name.startswith(f"{phase}/") else f"{phase}/{name}"


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no name for this number, as in a container
        return "unknown"
