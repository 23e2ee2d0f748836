"""The checkpoint that a run resumes from, if there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from loopkit.base.notes import say, warn
from loopkit.checkpoint import disk, storage
from loopkit.checkpoint.bundle import restore
from loopkit.checkpoint.made import OPTIMIZER, Record, changes, made
from loopkit.checkpoint.manifest import Listing, Manifest
from loopkit.checkpoint.place import Place
from loopkit.checkpoint.retention import Retention
from loopkit.checkpoint.run_files import RunFiles
from loopkit.checkpoint.save_options import SaveOptions
from loopkit.errors import CheckpointError, CorruptCheckpointError, FormatVersionError, PluginError, StateError

if TYPE_CHECKING:
    from loopkit.learner import Learner

LOGGED = re.compile(r"\.lock|media|log(-\d+)?\.(jsonl|csv)|events\.out\.tfevents\..*")
"""Other files of a run beside its checkpoints: the lock and logs."""
Chosen = tuple[Manifest, dict[str, Any]]
"""A checkpoint, and the state in it."""
Data = Literal["stop", "warn"]
"""The reactions of a resume to other data."""


class Resumption:
    """Takes the directory of a run when a fit begins, and loads the checkpoint to resume from.

    Args:
        place: The directory.
        files: Reads checkpoints.
        retention: Notes damaged checkpoints, and the one that ``resume`` names.
        resume: As in `Checkpoint`.
        overwrite: Likewise.
        data: Likewise.
        options: The plugins that may be missing, and whether data may be replayed.
    """

    def __init__(
        self,
        place: Place,
        files: RunFiles,
        retention: Retention,
        *,
        resume: str | Path | bool | None,
        overwrite: bool,
        data: Data,
        options: SaveOptions,
    ) -> None:
        self._place = place
        self._files = files
        self._retention = retention
        self._resume = resume
        self._overwrite = overwrite
        self._data = data
        self._options = options
        self.begun = False
        """Whether a fit has begun here before: the checkpoints that are there are its own."""
        self.made: Record = {}
        """The parts that the run is made of."""
        self.changed = ""
        """The differences from the saved run, in words, until they are logged."""

    def begin(self, learner: Learner) -> None:
        """Take the directory, and load a checkpoint if that was asked for; all processes load the same one."""
        self.made = made(learner)
        held = False
        while True:
            found, held = self._agree(learner, held)
            if found is None:
                return
            path, read = found
            chosen = self._take(learner, path, read)
            if chosen is not None:
                break
        self._load(learner, *chosen)
        if learner.world.rank == 0:
            self._place.claim()

    def take_changes(self) -> str:
        """Return the differences from the saved run, once."""
        changed = self.changed
        self.changed = ""
        return changed

    def _agree(self, learner: Learner, held: bool) -> tuple[tuple[Path, Chosen | None] | None, bool]:
        """Let rank 0 choose -> a path, with its state if it was read here; and whether the directory is locked."""
        chosen = refusal = None
        if learner.world.rank == 0:
            try:
                if not held:
                    self._place.take()
                    held = True
                if self.begun:
                    self._place.refuse_taken()
                else:
                    chosen = self._choose(learner)
            except Exception as error:
                refusal = error
        about = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        path, why = learner.world.share((None if chosen is None else str(chosen[0].path), about))
        if refusal is not None:
            raise refusal
        if why is not None:
            raise CheckpointError(f"rank 0 could not begin: {why}")
        return (None if path is None else (Path(path), chosen)), held

    def _take(self, learner: Learner, path: Path, read: Chosen | None) -> Chosen | None:
        """Return the checkpoint that rank 0 chose, read here; None if another one must be chosen."""
        own = self._resume if isinstance(self._resume, Path) else path  # each may have a disk of its own
        if self._files.everywhere:
            return self._read_together(learner, own, read)
        return read or self._read(learner, own)

    def _read_together(self, learner: Learner, path: Path, read: Chosen | None) -> Chosen | None:
        """Return each process's part of a checkpoint; None if one of them found its part damaged."""
        problem = None
        try:
            read = read or self._read(learner, path)
        except CheckpointError as error:
            problem = str(error), isinstance(error, CorruptCheckpointError)
        problem = next(filter(None, learner.world.gather(problem)), None)
        if problem is None:
            return read
        text, damaged = problem
        if isinstance(self._resume, Path) or not damaged:
            raise (CorruptCheckpointError if damaged else CheckpointError)(text)
        self._retention.damaged.add(path)
        if learner.world.rank == 0:
            warn(f"{text} ({path} is passed over)")
        return None

    def _choose(self, learner: Learner) -> Chosen | None:
        """Choose a checkpoint in rank 0; None to start a new run."""
        found = storage.listing(self._place.directory)
        if self._resume is None:
            self._start_new(found)
            return None
        if isinstance(self._resume, Path):
            return self._choose_named(learner, self._resume, found)
        newest = self._newest(learner, found)
        if newest is not None:
            _check_fit(learner, *newest)
        elif self._resume is True:
            raise CheckpointError(
                f"{self._place.directory} holds no checkpoint: give resume='auto' to begin a run there"
            )
        else:
            say(f"no checkpoint in {self._place.directory}: starting a new run")
        return newest

    def _start_new(self, found: Listing) -> None:
        """Raise for checkpoints of another run, or remove them."""
        if self._overwrite and (found or found.problems):
            self._make_room(found)
        else:
            self._place.refuse_others(found)

    def _choose_named(self, learner: Learner, path: Path, found: Listing) -> Chosen:
        """Read the checkpoint that ``resume`` names."""
        if path.parent != self._place.directory:
            self._place.refuse_others(found)
        chosen = self._read(learner, path)
        self._retention.source = chosen[0].path
        return chosen

    def _read(self, learner: Learner, path: Path) -> Chosen:
        manifest = storage.read_manifest(path)
        return manifest, self._files.read(learner, manifest)

    def _make_room(self, found: Listing) -> None:
        """Remove the checkpoints of an earlier run, if there are no other files."""
        directory = self._place.directory
        known = {manifest.path.name for manifest in found}
        names = sorted(set(disk.names(directory)) - known)
        others = [name for name in names if not LOGGED.fullmatch(name)]
        if others:
            raise CheckpointError(
                f"Checkpoint: overwrite=True, and {directory} holds more than checkpoints and logs: "
                f"{', '.join(map(repr, others))[:300]}. It removed no files: remove them, or give another directory"
            )
        storage.remove(manifest.path for manifest in found)
        count = "a checkpoint" if len(known) == 1 else f"{len(known)} checkpoints"
        say(f"removed {count} of an earlier run in {directory}: {', '.join(sorted(known))}")

    def _newest(self, learner: Learner, found: Listing) -> Chosen | None:
        """Return the newest checkpoint that can be read, with a warning about damaged newer ones."""
        for path, error in found.problems.items():
            if isinstance(error, FormatVersionError):
                raise error
            warn(f"{error} ({path} is passed over)")
        for manifest in found:
            if manifest.path in self._retention.damaged:
                continue
            try:
                return manifest, self._files.read(learner, manifest)
            except CorruptCheckpointError as error:
                self._retention.damaged.add(manifest.path)
                warn(f"{error} ({manifest.path} is passed over)")
        if found or found.problems:
            raise CorruptCheckpointError(
                f"{self._place.directory} holds no checkpoint that can be read: see the warnings"
            )
        return None

    def _load(self, learner: Learner, manifest: Manifest, state: dict[str, Any]) -> None:
        options = self._options
        restore(learner, manifest, state, allow=options.allow, replay=options.replay, data=self._data)
        counts = learner.progress
        if learner.world.rank == 0:
            epochs = f"{counts.epochs} epoch{'s' * (counts.epochs != 1)}"
            say(f"resumed {manifest.path} at step {counts.steps:,}, after {epochs}{_doubt(manifest)}")
        saved = state.get("made", self.made)
        left = [name for name in state["plugins"] if "made" in state and name not in learner.plugins]
        found = changes(saved, self.made, left)
        if found:
            self.changed = f"changed since step {counts.steps}: {found}"
            if learner.world.rank == 0:
                say(self.changed)
        self.made.update({what: then for what, then in saved.items() if what.startswith(OPTIMIZER)})  # it was loaded


def _check_fit(learner: Learner, manifest: Manifest, state: dict[str, Any]) -> None:
    """Raise for a checkpoint of another fit of the learner."""
    fit = state.get("fit")
    number = 1 if learner.current is None else learner.current.position.number
    if isinstance(fit, dict) and fit.get("number", number) != number:
        raise StateError(
            f"{manifest.path} was saved in fit {fit['number']!r:.20} of its learner, and this is fit {number}: "
            f"give each fit of a script its own Checkpoint directory (learner.replace); to resume "
            f"only that fit, resume='{manifest.path}'"
        )


def _doubt(manifest: Manifest) -> str:
    """Return the differences of this process from the saved one that change the last bits, in words."""
    versions = manifest.about.get("versions")
    saved = {
        "torch": versions.get("torch") if isinstance(versions, dict) else None,
        "threads": manifest.about.get("threads"),
    }
    here = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    changed = [f"{what}: {then} then, {here[what]} now" for what, then in saved.items() if then != here[what]]
    return f"; it may differ in the last bits ({', '.join(changed)})" if changed else ""


def resolved(resume: str | Path | bool | None) -> str | Path | bool | None:
    """Return a path as an absolute one, and another value as it is."""
    if isinstance(resume, str) and resume.lower() == "auto" and resume != "auto":
        raise PluginError(f"Checkpoint: resume is {resume!r}: did you mean 'auto'?")
    if not isinstance(resume, (str, Path)) or resume == "auto":
        return resume
    path = Path(resume).absolute()
    return disk.resolved(path.parent) / path.name  # a link to a checkpoint is not followed
