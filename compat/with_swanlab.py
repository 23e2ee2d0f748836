"""swanlab: offline runs, a folder for each process; what is sent later has the first value of each name and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import swanlab
from checks import main
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader
from trackers import Rows, Tracked

from loopkit.logs import Backend, Records

NEEDS = ["swanlab==0.10.3"]


class SwanLab(Backend):
    """A backend as an author writes it."""

    any_names = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, run: Any) -> None:
        begin(self.folder)

    def write(self, records: Any) -> None:
        for group in Records.of(records).groups:
            swanlab.log(dict(group.values), step=group.place[2])

    def close(self, result: Any) -> None:
        swanlab.finish()


class Offline(Tracked):
    """Folders that are sent later."""

    def write(self, folder: Path, rows: Any) -> None:
        begin(folder)
        for step, values in rows:
            swanlab.log(values, step=step)
        swanlab.finish()

    def backend(self, folder: Path) -> Any:
        return SwanLab(folder)

    def read(self, folder: Path) -> Rows:
        """The rows of all folders; as when they are sent, the first value of a name and step stays."""
        found: dict[str, dict[int, float]] = {}
        for path in sorted(folder.glob("run-*/*.swanlab"), key=lambda path: path.stat().st_mtime_ns):
            for record in records_of(path):
                if record.HasField("scalar"):
                    scalar = record.scalar
                    found.setdefault(scalar.key, {}).setdefault(scalar.step, scalar.value.number)
        return {name: list(values.items()) for name, values in found.items()}


def begin(folder: Path) -> None:
    """Begin a run that is written into a folder."""
    swanlab.init(project="p", mode="offline", logdir=str(folder))


def records_of(path: Path) -> list[Any]:
    """What a file has."""
    reader = DataStoreReader()
    reader.open(path)
    found = [Record.FromString(data) for data in reader]
    reader.close()
    return found


if __name__ == "__main__":
    main(NEEDS, [Offline()])
