"""trackio: a database of its own, which rows can only be added to."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

STORE = tempfile.TemporaryDirectory()
os.environ["TRACKIO_DIR"] = STORE.name  # read at the import

import trackio
from checks import main
from trackers import Rows, Tracked
from trackio.sqlite_storage import SQLiteStorage

from loopkit.logs import Backend, Records

NEEDS = ["trackio==0.43.0"]
OPTIONS = {"name": "run", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


class Trackio(Backend):
    """A backend as an author writes it: rows that the store has already are not added again after a resume."""

    any_names = True

    def __init__(self, project: str) -> None:
        self.project = project
        self.rows = 0
        self.ahead = 0

    def open(self, run: Any) -> None:
        if not run.resumed:
            self.rows = 0
        self.run = trackio.init(project=self.project, resume="allow" if run.resumed else "never", **OPTIONS)
        self.ahead = SQLiteStorage.get_log_count(self.project, "run") - self.rows if run.resumed else 0

    def write(self, records: Any) -> None:
        for group in Records.of(records).groups:
            self.rows += 1
            if self.ahead > 0:
                self.ahead -= 1
            else:
                self.run.log(dict(group.values), step=group.place[2])

    def flush(self) -> None:
        while SQLiteStorage.get_log_count(self.project, "run") < self.rows:  # a thread writes, and has no flush
            time.sleep(0.02)

    def close(self, result: Any) -> None:
        trackio.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: Any) -> None:
        self.rows = state["rows"]


class Local(Tracked):
    """A project on this machine."""

    def write(self, folder: Path, rows: Any) -> None:
        trackio.init(project=name_of(folder), **OPTIONS)
        for step, values in rows:
            trackio.log(values, step=step)
        trackio.finish()

    def backend(self, folder: Path) -> Any:
        return Trackio(name_of(folder))

    def read(self, folder: Path) -> Rows:
        found: Rows = {}
        for row in SQLiteStorage.get_logs(name_of(folder), "run"):
            step = row.pop("step")
            row.pop("timestamp")
            for name, value in row.items():
                found.setdefault(name, []).append((step, value))
        return found


def name_of(folder: Path) -> str:
    """A project of its own for each folder."""
    return "-".join(folder.parts[-2:]).strip("/")


if __name__ == "__main__":
    main(NEEDS, [Local()])
