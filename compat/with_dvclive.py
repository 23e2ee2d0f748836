"""DVCLive: a tracker that makes a file of train/loss, and a folder of train/loss/step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import dvclive
from checks import Dies, Differs, Program, main, seed, stop, stopped

from loopkit import every
from loopkit.logs import Backend, Records
from loopkit.plugins import Checkpoint, LogMetrics, LogTo

NEEDS = ["dvclive==3.49.1"]


class Live(Backend):
    """A backend as an author writes it from the page on logging."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = -1

    def open(self, run: Any) -> None:
        options = {"save_dvc_exp": False, "dvcyaml": None, "resume": run.resumed}
        self.live = dvclive.Live(str(self.folder), **options)

    def write(self, records: Any) -> None:
        for group in Records.of(records).groups:
            self.live.step = group.place[2]
            for name, value in group.values.items():
                self.live.log_metric(name.replace("/", "."), value)

    def close(self, result: Any) -> None:
        self.live.end()

    def state_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Tracked(Program):
    """A log of each step and each epoch."""

    own_checks = True

    def logged(self, folder: Path, *plugins: Any) -> dict[str, list[str]]:
        """The rows of each file of a run's log, without their times."""
        seed()
        model = self.model()
        stack = [LogTo(Live(folder)), LogMetrics(every=2), *plugins]
        self.learner(model, self.optimizer(model), *stack).fit(self.train(), self.val(), epochs=3)
        files = sorted((folder / "plots" / "metrics").rglob("*.tsv"))
        cut = lambda row: "\t".join(row.split("\t")[-2:])  # noqa: E731
        return {file.stem: [cut(row) for row in file.read_text().splitlines()] for file in files}

    def check_rows(self) -> float:
        """Each value is in the file of its name."""
        with tempfile.TemporaryDirectory() as folder:
            found = {name: len(rows) - 1 for name, rows in self.logged(Path(folder)).items()}
        if {found.get("train.loss"), found.get("val.loss")} != {3} or len(found) < 3:
            raise Differs(f"rows: {found}")
        return 0.0

    def check_rows_after_a_resume(self) -> float:
        """A run that was stopped in its second epoch, and resumed, has the values of the whole run."""
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            whole = self.logged(Path(one))
            saving = lambda: Checkpoint(Path(other) / "saved", save=every(updates=1), resume="auto")  # noqa: E731
            stopped(lambda: self.logged(Path(other) / "log", saving(), Dies(9, stop)))
            parts = self.logged(Path(other) / "log", saving())
        if whole != parts:
            raise Differs(f"{whole} by hand, {parts} here"[:300])
        return 0.0


if __name__ == "__main__":
    main(NEEDS, [Tracked()])
