"""A run of wandb's, and what of ours it can hold. Importing this module imports wandb, which takes a second or two."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline"}
"""Variables while wandb is imported and started: without any reports."""
FLUSH = 0.05
"""Seconds after which wandb's own process writes what it was given."""


@contextmanager
def as_it_was() -> Iterator[None]:
    """Take back what wandb changes in the process: variables, and what is called when the process ends."""
    kept, hooks = _variables(), (sys.exit, sys.excepthook)
    os.environ.update(QUIET)
    try:
        yield
    finally:
        for name in _variables():
            del os.environ[name]
        os.environ.update(kept)
        sys.exit, sys.excepthook = hooks


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}


with as_it_was():
    import wandb

from PIL import Image as Pillow  # noqa: E402 - wandb comes first, in its quiet

from loopkit.logs import Audio, Figure, File, Histogram, Hyperparameters, Image, Table, Text  # noqa: E402


class Session:
    """One run, which writes into its own folder.

    Args:
        directory: Where the folder ``wandb`` is, for all runs.
        run_id: The run's id; several folders can be of one.
        config: The run's configuration.
        mode: Whether the rows are sent while they are written.
        resumed: Whether the run can be on the server already.
        options: More of ``wandb.init``.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        config: Mapping[str, Any],
        *,
        mode: Literal["offline", "online"] = "offline",
        resumed: bool = False,
        **options: Any,
    ) -> None:
        if mode == "online" and resumed:
            options["resume"] = "allow"
        with as_it_was():
            settings = wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH,
            )
            self._run = wandb.init(
                dir=directory, id=run_id, mode=mode, reinit="create_new", settings=settings, **options
            )
        self.folder = Path(self._run.dir).parent
        self._files = 0
        self.first = int(self._run.starting_step)
        """The number of the first row that the server does not have."""
        self._run.config.update(dict(config), allow_val_change=True)
        self._run.define_metric("loopkit/step")
        self._run.define_metric("*", step_metric="loopkit/step")

    @property
    def log_file(self) -> Path:
        """Where everything but media is."""
        return self.folder / f"run-{self._run.id}.wandb"

    def add_row(self, number: int, values: Mapping[str, Any], time: float) -> None:
        """Append a row to the history."""
        self._run.log({**values, "_timestamp": time}, step=number, commit=True)

    def taken(self, name: str, value: Any, scratch: Path) -> dict[str, Any]:
        """The part of a value that belongs into a row; hyperparameters and files have their own places.

        Args:
            name: Its name.
            value: A float or a kind.
            scratch: A directory for files that are needed until the row is added.
        """
        if isinstance(value, float):
            return {name: value}
        if isinstance(value, Hyperparameters):
            self._run.config.update(dict(value.values), allow_val_change=True)
        elif isinstance(value, File):
            self._copy(name, value)
        else:
            return {name: _media(value, scratch)}
        return {}

    def _copy(self, name: str, file: File) -> None:
        self._files += 1
        folder = Path(self._run.dir) / "logged" / f"{self._files}-{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:100]}"
        folder.mkdir(parents=True)
        shutil.copyfile(file.path, copied := folder / Path(file.path).name)
        self._run.save(str(copied), base_path=self._run.dir, policy="end")

    def finish(self, reason: str, failed: bool) -> None:
        """Write how the run ended, and wait until all is written."""
        self._run.summary["loopkit/reason"] = reason
        with as_it_was():
            self._run.finish(exit_code=int(failed))


def _media(value: Any, scratch: Path) -> Any:
    """Convert a kind to wandb's media."""
    if isinstance(value, Text):
        return value.text
    if isinstance(value, Image):
        return wandb.Image(Pillow.open(BytesIO(value.png())), caption=value.caption or None)
    if isinstance(value, Figure):
        return wandb.Image(Pillow.open(BytesIO(value.png())))
    if isinstance(value, Histogram):
        return wandb.Histogram(np_histogram=_bins(value.counts, value.edges))
    if isinstance(value, Table):
        rows = [list(row) for row in value.rows]
        return wandb.Table(columns=list(value.columns), data=rows, allow_mixed_types=True)
    assert isinstance(value, Audio)
    path = scratch / f"{len(list(scratch.iterdir()))}.wav"
    path.write_bytes(value.wav())
    return wandb.Audio(str(path))


def _bins(counts: Sequence[float], edges: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most as many bins as wandb takes: neighbours are added up."""
    each = -(-len(counts) // wandb.Histogram.MAX_LENGTH)
    added = [sum(counts[at : at + each]) for at in range(0, len(counts), each)]
    return added, [*edges[:-1:each], edges[-1]]
