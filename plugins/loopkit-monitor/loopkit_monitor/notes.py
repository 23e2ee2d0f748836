"""Notes that people write about runs: a name, a note, tags, and whether a run is archived.

They are in the monitor's own file beside the log, ``monitor.json``; the log itself is never touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from loopkit_monitor.folder import Folder

__all__ = ["Notes", "NotesError", "read", "write"]

LONGEST = {"name": 200, "note": 20_000}
"""Characters."""
MOST_TAGS, LONGEST_TAG = 50, 60
MOST_BYTES = 256 << 10


class NotesError(ValueError):
    """A note that cannot be saved."""


@dataclass(frozen=True)
class Notes:
    """The notes about one run."""

    name: str = ""
    """The name under which it is shown; by default its folder's."""
    note: str = ""
    """Markdown."""
    tags: tuple[str, ...] = ()
    archived: bool = False

    def changed(self, changes: Mapping[str, Any]) -> Notes:
        """These notes with some of them changed.

        Raises:
            NotesError: A change is none of the fields, or of another type, or too long.
        """
        given: dict[str, Any] = {}
        for key, value in changes.items():
            if key in LONGEST and isinstance(value, str) and len(value) <= LONGEST[key]:
                given[key] = value.strip()
            elif key == "archived" and isinstance(value, bool):
                given[key] = value
            elif key == "tags" and _are_tags(value):
                given[key] = tuple(dict.fromkeys(tag.strip() for tag in value if tag.strip()))
            else:
                fields = "name and note are texts, tags are short texts, archived is true or false"
                raise NotesError(f"{key} is {value!r:.100}: {fields}")
        return replace(self, **given)


def path_of(log: str) -> str:
    """The file beside a log: ``a/monitor.json`` for ``a/log.jsonl``, ``a/log-1.monitor.json`` for ``a/log-1.jsonl``."""
    folder, slash, file = log.rpartition("/")
    stem = file.removesuffix(".jsonl")
    return f"{folder}{slash}{'' if stem == 'log' else f'{stem}.'}monitor.json"


def read(folder: Folder, log: str) -> Notes:
    """The notes beside a log; none if there is no such file, or it is no such file."""
    try:
        with os.fdopen(folder.open(path_of(log)), "rb") as file:
            said = json.loads(file.read(MOST_BYTES))
        return Notes().changed({key: said[key] for key in asdict(Notes()) if key in said})
    except (OSError, ValueError, TypeError, RecursionError):
        return Notes()


def write(folder: Folder, log: str, notes: Notes) -> None:
    """Write the notes beside a log, at once or not at all.

    Raises:
        OSError: They cannot be written there.
    """
    text = json.dumps({**asdict(notes), "tags": list(notes.tags)}, indent=1)
    folder.replace(path_of(log), f"{text}\n".encode())


def _are_tags(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MOST_TAGS
        and all(isinstance(tag, str) and len(tag) <= LONGEST_TAG for tag in value)
    )
