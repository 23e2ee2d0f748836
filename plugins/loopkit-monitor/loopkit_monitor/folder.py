"""Files below a folder, opened without following a link anywhere on the way."""

from __future__ import annotations

import itertools
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

__all__ = ["Folder"]

DEEPEST = 8
"""Folders within folders that are looked into."""
MOST_ENTRIES = 200_000
"""Entries that are looked at in one search."""
PARTS = 20
"""The parts of these entries; a search reads one part of a folder, then the other folders."""
SKIPPED = ("media", "__pycache__")
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Folder:
    """A folder of which files can be read.

    Args:
        root: May itself be, or be behind, a link: the user named it. Entries below may not.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).resolve()
        self.searched = True
        """The last search has looked at all entries."""

    def replace(self, path: str, data: bytes) -> None:
        """Put a file with this content where the path is, at once or not at all, by a way without links.

        Raises:
            OSError: It cannot be written there.
        """
        folder, _, name = path.rpartition("/")
        here = self._enter(folder.split("/") if folder else [], name)
        beside = f".{name}.{os.getpid()}.new"
        try:
            file = os.open(
                beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=here
            )
            try:
                with os.fdopen(file, "wb") as made:
                    made.write(data)
                    made.flush()
                    os.fsync(made.fileno())
                os.rename(beside, name, src_dir_fd=here, dst_dir_fd=here)
            except BaseException:
                os.unlink(beside, dir_fd=here)
                raise
        finally:
            os.close(here)

    def open(self, path: str) -> int:
        """Open a regular file for reading; returns its descriptor, which the caller closes.

        Args:
            path: Relative, with ``/``.

        Raises:
            OSError: It is not there, no regular file, or not below the root by a way without links.
        """
        *folders, name = path.split("/")
        here = self._enter(folders, name)
        try:
            file = os.open(name, FLAGS | os.O_NONBLOCK, dir_fd=here)
        finally:
            os.close(here)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError(f"{path!r:.200} is no regular file")
        return file

    def _enter(self, folders: list[str], name: str) -> int:
        """The descriptor of the folder of a file, which the caller closes."""
        path = "/".join((*folders, name))
        if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in (*folders, name)):
            raise FileNotFoundError(f"{path!r:.200} is no path in the folder")
        here = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            for folder in folders:
                inner = os.open(folder, FLAGS | os.O_DIRECTORY, dir_fd=here)
                os.close(here)
                here = inner
        except BaseException:
            os.close(here)
            raise
        return here

    def logs(self) -> Iterator[str]:
        """The paths of all files that end in ``.jsonl``, in no order; folders that cannot be read are left out.

        Where there are too many entries, large folders are the ones not searched to their end.
        """
        self.searched = True
        left, part = MOST_ENTRIES, max(MOST_ENTRIES // PARTS, 1)
        folders: deque[tuple[str, int, Any]] = deque([("", 0, None)])
        large: deque[tuple[str, int, Any]] = deque()
        """With the iterators of their other entries."""
        with ExitStack() as stack:
            while folders or large:
                if left <= 0:
                    self.searched = False
                    return
                folder, depth, found = (folders or large).popleft()
                try:
                    if found is None:
                        found = os.scandir(self.root / folder)
                    room = min(part, left)
                    entries = list(itertools.islice(found, room))
                    left -= len(entries)
                    if len(entries) == room:
                        stack.enter_context(found)
                        large.append((folder, depth, found))
                    for entry in entries:
                        if not _printable(entry.name) or entry.name.startswith("."):
                            continue
                        path = f"{folder}{entry.name}"
                        if entry.name.endswith(".jsonl"):
                            if entry.is_file(follow_symlinks=False):
                                yield path
                        elif depth < DEEPEST and entry.name not in SKIPPED and entry.is_dir(follow_symlinks=False):
                            folders.append((f"{path}/", depth + 1, None))
                except OSError:
                    continue


def _printable(name: str) -> bool:
    """Whether it is text that can be sent, and no ``\\`` is in it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\\" not in name
