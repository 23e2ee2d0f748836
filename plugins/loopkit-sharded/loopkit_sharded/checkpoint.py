"""Checkpoint, with each process writing and reading its part of sharded tensors."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from loopkit.author import Place, RunFiles, bundle, disk, storage
from loopkit.checkpoint import Manifest
from loopkit.errors import CheckpointError
from loopkit.plugins import Checkpoint
from loopkit_sharded import reader
from loopkit_sharded.writer import PartContents, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loopkit import Learner
    from loopkit.author import storage

__all__ = ["ShardedCheckpoint", "load", "save"]

SLOWEST = 1800.0
"""Seconds by which one process may write longer than another; one that dies is noticed at once."""


class PartFiles(RunFiles):
    """The state of a run as the files of a checkpoint to which each process adds its part."""

    everywhere = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._group: dist.ProcessGroup | None = None
        self._processes = 1

    def contents(self, learner: Learner, state: dict[str, Any], stands_in: str) -> bundle.Contents:
        """Return this process's part of a state as files."""
        made = PartContents.taken(learner, state)
        if made.found and self._group is None:
            _check_shared(learner, self.place.directory)
            self._group = _own_group(learner)
            self._processes = learner.world.size
        return made

    def write(self, contents: bundle.Contents, about: dict[str, Any], label: str) -> Manifest | None:
        """Write a checkpoint together with the other processes."""
        assert isinstance(contents, PartContents)
        if not contents.found:
            return super().write(contents, about, label) if contents.rank == 0 else None
        return write(contents, self._draft(about, label), self._group, self._processes)

    @contextmanager
    def _draft(self, about: dict[str, Any], label: str) -> Iterator[storage.Draft]:
        self.place.keep()
        with storage.drafted(self.place.directory, about, label=label, there=self.place.note) as draft:
            yield draft

    def read(self, learner: Learner, manifest: Manifest) -> dict[str, Any]:
        """Read and verify this process's part of a state."""
        return reader.read(learner, manifest)


class ShardedCheckpoint(Checkpoint):
    """`loopkit.plugins.Checkpoint`, with which no process gathers what is sharded.

    Each process writes its part of the parameters, moments and averages, and reads its part again; any number of
    processes can resume, also one. Rank 0 writes all else. All processes must see the directory. Where nothing is
    sharded, the checkpoints are in the format of `Checkpoint`, and either reads the other's of a model in one piece.

    Processes agree on a save in a separate group, so that it can run beside steps
    (``options=SaveOptions(background=True)``), from copies in main memory.

    Args: As for `Checkpoint`.

    Example::

        Learner(model, loss_fn, torch.optim.AdamW, plugins=[FSDP(), ShardedCheckpoint("runs/a", resume="auto")])
    """

    files = PartFiles


def _own_group(learner: Learner) -> dist.ProcessGroup | None:
    if learner.world.size == 1:
        return None
    limit = timedelta(seconds=max(learner.world.timeout, SLOWEST))
    made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=limit)
    return made


def _check_shared(learner: Learner, directory: Path) -> None:
    """Raise for a directory that another process does not see."""
    path = learner.world.share(str(directory))
    seen = learner.world.gather(os.path.isdir(path))
    if not all(seen):
        raise CheckpointError(
            f"rank {seen.index(False)} does not see {path}, where rank 0 is to save: give a directory of a file system "
            f"that all processes share"
        )


def save(learner: Learner, directory: str | Path, reason: str = "asked for") -> Manifest | None:
    """Save a learner as a new checkpoint below a directory; all processes call it. Only rank 0 has the manifest.

    Raises:
        CheckpointError: It cannot be written.
        StateError: Something cannot be saved, or a step is under way.
    """
    contents = PartContents.taken(learner, state := learner.state_dict(whole=False))
    path, label = disk.resolved(directory), f"step-{learner.progress.steps}"
    about = bundle.describe(learner, contents, reason, state["metrics"])
    if not contents.found:
        return storage.write(path, contents.files(), about, label=label) if contents.rank == 0 else None
    group = _own_group(learner)
    try:
        return write(contents, storage.drafted(path, about, label=label), group, learner.world.size)
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def load(learner: Learner, path: str | Path, *, allow: Collection[str] = (), replay: bool = True) -> Manifest:
    """Load a checkpoint into a learner, each process its part; see `loopkit.checkpoint.load`.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
        StateError: It does not fit; the learner is unchanged.
    """
    manifest = bundle.find(Path(path).absolute())
    bundle.restore(learner, manifest, reader.read(learner, manifest), allow=allow, replay=replay)
    return manifest
