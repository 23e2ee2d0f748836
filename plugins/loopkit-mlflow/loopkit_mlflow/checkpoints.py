"""Checkpoints that go along with a run: kept in the spool as artifacts that MLflow takes for a model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopkit.checkpoint import Manifest, best, listing
from loopkit_mlflow.spool import Spool

__all__ = ["due_checkpoints", "stage_checkpoint", "staged_in"]

TAG = "loopkit.checkpoint."
"""The tag that names the checkpoint that was sent last, before ``best``, ``last`` or ``all``."""


def due_checkpoints(directory: Path, which: str) -> list[Manifest]:
    """The checkpoints to send, oldest first.

    Args:
        directory: Where the run's checkpoints are.
        which: ``"all"``, ``"last"`` or ``"best"``.

    Raises:
        CheckpointError: There is no best one.
    """
    if which == "all":
        return list(reversed(listing(directory)))
    if which == "last":
        return listing(directory)[:1]
    return [best(directory)]


def stage_checkpoint(spool: Spool, manifest: Manifest, which: str) -> dict[str, Any]:
    """Keep a checkpoint by hard links, so that it may be removed before it is sent; returns its batch."""
    name = manifest.path.name
    files = []
    for file in sorted(manifest.path.iterdir()):
        place = spool.place_for(file.name)
        try:
            os.link(file, place)
        except OSError:  # another file system: it must be there when it is sent
            shutil.rmtree(place.parent)
            files.append((str(file), f"checkpoint/{file.name}"))
        else:
            files.append((str(place.relative_to(spool.directory)), f"checkpoint/{file.name}"))
    model = spool.place_for("MLmodel")
    model.write_text(json.dumps(_mlmodel(manifest), indent=1))  # MLflow reads YAML, which JSON is
    files.append((str(model.relative_to(spool.directory)), model.name))
    artifacts = [{"file": file, "path": f"checkpoints/{name}/{end}"} for file, end in files]
    return {"artifacts": artifacts, "tags": [{"key": f"{TAG}{which}", "value": f"checkpoints/{name}"}]}


def staged_in(batch: Mapping[str, Any]) -> set[str]:
    """The names of the checkpoints that a batch of a spool brings along."""
    return {Path(tag["value"]).name for tag in batch.get("tags", ()) if tag["key"].startswith(TAG)}


def _mlmodel(manifest: Manifest) -> dict[str, Any]:
    """The file that makes a directory of artifacts a model for MLflow."""
    return {
        "artifact_path": f"checkpoints/{manifest.path.name}",
        "flavors": {"loopkit": {"data": "checkpoint", **manifest.about["versions"]}},
        "metadata": {"progress": manifest.about["progress"], "metrics": manifest.about["metrics"]},
        "utc_time_created": manifest.about["time"],
    }
