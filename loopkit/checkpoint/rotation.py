"""Rotation: which checkpoints stay, and how the others go."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from loopkit.checkpoint import disk
from loopkit.checkpoint.manifest import Listing, Manifest
from loopkit.errors import CheckpointError


def keep(manifests: Listing, last: int, protected: Collection[Path] = ()) -> list[Path]:
    """Which checkpoints of a listing to remove, so that the ``last`` newest and the protected ones stay.

    Those between which nothing was trained, such as the last update and the end of the fit, count as one: the newest
    stays, and the newest with a monitored value.

    At least two stay, whatever ``last`` says: the one to go on from, and one to fall back to. Those that do not verify
    neither count nor are removed: look at them, then remove them yourself.
    """
    if last < 1:
        raise CheckpointError(f"keeping the last {last} checkpoints would remove the one just written. Keep at least 1")
    alike: dict[Any, dict[bool, Path]] = {}
    for manifest in manifests:
        group, monitored = alike.setdefault(_trained(manifest), {}), manifest.about.get("monitored") is not None
        if not group or (monitored and True not in group):
            group[monitored] = manifest.path
    kept = {path for group in [*alike.values()][:last] for path in group.values()}
    kept |= {manifest.path for manifest in manifests if manifest.path in protected}
    for manifest in manifests:
        if len(kept) < 2:
            kept.add(manifest.path)
    return [manifest.path for manifest in manifests if manifest.path not in kept]


def _trained(manifest: Manifest) -> Any:
    """How much training a checkpoint has seen; if it does not say, something of its own."""
    progress = manifest.about.get("progress")
    if not isinstance(progress, Mapping) or not {"steps", "updates"} <= set(progress):
        return manifest.path
    return str(progress["steps"]), str(progress["updates"])


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints; each first gets a hidden name, so that a half removed one is never listed.

    Raises:
        CheckpointError: the operating system refused.
    """
    for path in paths:
        with disk.hidden(path.parent, "old") as old:
            try:
                try:
                    disk.system.rename(path, old)
                except FileNotFoundError:
                    continue
                # Else its files may be gone after a loss of power, and its name still there.
                disk.sync_directory(path.parent)
                disk.delete(old)
            except OSError as error:
                raise disk.refused("remove", path, error) from error


class Remover:
    """Removes checkpoints in a thread of its own; ``close`` waits for it, and raises what went wrong."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[list[Path] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove ``paths`` soon; raise what went wrong with earlier ones."""
        wanted = list(paths)
        if wanted:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="loopkit-remover", daemon=True)
                self._thread.start()
            self._paths.put(wanted)
        self._raise()

    def close(self) -> None:
        """Wait until everything is removed; raise what went wrong. The remover can be used again."""
        if self._thread is not None:
            self._paths.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors.pop(0)

    def _work(self) -> None:
        while (paths := self._paths.get()) is not None:
            for path in paths:
                try:
                    remove([path])
                except Exception as error:
                    self._errors.append(error)
