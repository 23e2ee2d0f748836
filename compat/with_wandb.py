"""W&B: offline files, read with wandb's own reader, with the backend of loopkit-wandb."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import wandb
from checks import main
from loopkit_wandb import Wandb
from trackers import Rows, Tracked

NEEDS = ["wandb==0.31.0", "pillow==12.3.0"]


class Offline(Tracked):
    """Folders that `wandb sync` sends later."""

    def write(self, folder: Path, rows: Any) -> None:
        run = wandb.init(project="p", mode="offline", dir=str(folder))
        for step, values in rows:
            run.log({**values, "loopkit/step": step})
        run.finish()

    def backend(self, folder: Path) -> Any:
        return Wandb("p", folder)

    def read(self, folder: Path) -> Rows:
        """The rows of all folders of the run."""
        found: Rows = {}
        for path in sorted(folder.glob("wandb/offline-run-*"), key=lambda path: path.name):
            for row in rows_of(path):
                step = row.pop("loopkit/step", None)
                for name, value in row.items():
                    if not name.startswith("_") and name != "loopkit/epoch":
                        found.setdefault(name, []).append((step, value))
        return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder, by wandb's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in said.splitlines()]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


if __name__ == "__main__":
    main(NEEDS, [Offline()])
