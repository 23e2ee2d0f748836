"""Manifest: the list of a checkpoint's files with sizes and SHA-256, and the writer's notes, under a digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loopkit.base.tabular import aligned, html, paragraph
from loopkit.checkpoint import strict_json
from loopkit.checkpoint.structure import plain
from loopkit.errors import CheckpointError, CorruptCheckpointError, FormatVersionError, StateError

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 20  # bytes; a manifest is a few kilobytes, and a hostile one is slow to parse
MANIFEST_DEPTH = 100  # how deep its JSON may be nested
LINE = 500  # characters; of a printed manifest, whose metrics can be many
CHECKPOINT_NAME = re.compile(r"([0-9]{6,})(?:-[A-Za-z0-9._=+-]+)?")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
SHA256 = re.compile(r"[0-9a-f]{64}")
OPENING = b'{"sha256":"'  # of a manifest; then its digest, then CLOSING, then what the digest is of
CLOSING = b'",'
HEADINGS = ("number", "name", "epoch", "step", "reason", "time", "size", "metrics")
"""The headings of `Manifest.row`."""
METRICS = 3
"""How many metrics a row shows."""


@dataclass(frozen=True)
class FileInfo:
    """A file in a manifest: its size in bytes and the SHA-256 of its content, in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The verified manifest of a checkpoint: its files and the writer's notes."""

    path: Path
    """Its directory."""
    number: int
    """Its place among the checkpoints of its directory; later ones have higher numbers."""
    about: dict[str, Any]
    """The writer's notes: progress, metrics, versions, plugins."""
    files: dict[str, FileInfo]
    """Its files by name, without the manifest."""
    format: int
    """The version of the format in which it was written."""

    @property
    def size(self) -> int:
        """Bytes in its files."""
        return sum(info.size for info in self.files.values())

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the run when it was saved: numbers, or texts for what JSON has no number for."""
        return dict(self._mapping("metrics"))

    def row(self) -> tuple[str, ...]:
        """The cells of its line in a list; see `HEADINGS`."""
        counts = self._mapping("progress")
        cells = [
            self.number,
            self.path.name,
            counts.get("epochs", "-"),
            counts.get("steps", "-"),
            self.about.get("reason", "-"),
            self.about.get("time", "-"),
            in_bytes(self.size),
            self._few_metrics(),
        ]
        return tuple(plain(str(cell), 80) for cell in cells)

    def _mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping that the writer noted; empty if there is none."""
        noted = self.about.get(key)
        return noted if isinstance(noted, Mapping) else {}

    def _few_metrics(self) -> str:
        """The first metrics: the monitored one, then the validation's."""
        monitored = self._mapping("monitored").get("metric")
        names = sorted(self.metrics, key=lambda name: (name != monitored, not name.startswith("val/")))
        shown = [f"{name} {_short(self.metrics[name], 4)}" for name in names[:METRICS]]
        if len(names) > METRICS:
            shown.append("...")
        return " ".join(shown) or "-"

    def __repr__(self) -> str:
        """A summary for people; ``about`` and ``files`` have the rest."""
        progress = self._mapping("progress")
        counters = [f"{progress[word]} {word}" for word in ("epochs", "steps") if word in progress]
        when = [str(self.about[key]) for key in ("reason", "time") if key in self.about]
        values = [f"{name} {_short(value)}" for name, value in self.metrics.items()]
        size = f"{len(self.files)} file{'s' * (len(self.files) != 1)}, {in_bytes(self.size)}"
        lines = [f"checkpoint {self.path}", ", ".join([*counters, *when]), ", ".join(values), size]
        return "\n  ".join(plain(line, LINE) for line in lines if line)


def _short(value: Any, digits: int = 6) -> str:
    """A metric, which may be saved as text, in few digits."""
    try:
        return f"{float(value):.{digits}g}"
    except (TypeError, ValueError):
        return plain(str(value), 20)


def in_bytes(count: int) -> str:
    """A number of bytes, for people.

    >>> in_bytes(1023), in_bytes(1536)
    ('1023 B', '1.5 KiB')
    """
    size = float(count)
    units = ["KiB", "MiB", "GiB", "TiB"]
    if count < 1024:
        return f"{count} B"
    while size >= 1024 and units:
        size /= 1024
        unit = units.pop(0)
    return f"{size:.1f} {unit}"


class Listing(list[Manifest]):
    """The checkpoints of a directory whose manifests verify, newest first."""

    problems: dict[Path, CheckpointError]
    """Checkpoints that do not verify, newest first, each with its error."""

    def __init__(self, manifests: Iterable[Manifest] = (), problems: Mapping[Path, CheckpointError] | None = None):
        super().__init__(manifests)
        self.problems = dict(problems or {})

    def __repr__(self) -> str:
        return "\n".join(
            [aligned(HEADINGS, [each.row() for each in self]) if self else "no checkpoints", *self._damaged()]
        )

    def _repr_html_(self) -> str:
        return "".join([html(HEADINGS, [each.row() for each in self]), *map(paragraph, self._damaged())])

    def _damaged(self) -> list[str]:
        return [f"damaged: {plain(path.name)}: {plain(str(error), 1000)}" for path, error in self.problems.items()]


def number_of(name: str) -> int | None:
    """The number of a checkpoint's directory; None for other names."""
    match = CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) or None if match and match[1] == f"{int(match[1]):06d}" else None


def check_about(about: Mapping[str, Any]) -> None:
    """Raise for values that a manifest cannot hold.

    Raises:
        StateError: it is no plain JSON, or too much.
    """
    try:
        data = strict_json.render(dict(about), sort=True)
        same = strict_json.parse(data.decode(), MANIFEST_DEPTH - 1) == about  # the manifest is one level around it
    except ValueError as error:
        raise StateError(f"the description of a checkpoint is no plain JSON: {error}. Encode it first") from error
    if not same:
        raise StateError(
            "the description of a checkpoint changes as JSON (tuples? keys that are no strings?). Encode it first"
        )
    if len(data) > MANIFEST_LIMIT // 2:
        raise StateError(
            f"the description of a checkpoint takes more than {MANIFEST_LIMIT // 2} bytes as JSON. Put it into a file"
        )


def encode(manifest: Manifest) -> bytes:
    """The only bytes that this manifest may have."""
    files = {name: asdict(info) for name, info in manifest.files.items()}
    said = {"about": manifest.about, "files": files, "format": manifest.format, "number": manifest.number}
    rest = strict_json.render(said, sort=True)[1:]
    return OPENING + hashlib.sha256(rest).hexdigest().encode() + CLOSING + rest


def decode_manifest(path: Path, data: bytes) -> Manifest:
    """The manifest of the checkpoint ``path`` from the bytes of its file; its other files are not looked at.

    Raises:
        CorruptCheckpointError: they differ from the written ones.
        FormatVersionError: a newer loopkit wrote them.
    """
    file = path / MANIFEST
    start = len(OPENING) + 64
    said = data[len(OPENING) : start]
    rest = data[start + len(CLOSING) :]
    digest = hashlib.sha256(rest).hexdigest()
    if data[: len(OPENING)] != OPENING or data[start : start + len(CLOSING)] != CLOSING or said != digest.encode():
        raise CorruptCheckpointError(
            f"{file} has changed since it was written: its SHA-256 is {digest}, its text has "
            f"{said.decode('ascii', 'backslashreplace')!r}. Use an older checkpoint"
        )
    try:
        manifest = _interpret(path, strict_json.parse("{" + rest.decode("ascii"), MANIFEST_DEPTH))
        if encode(manifest) != data:
            raise ValueError("it is not in the canonical form")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{file} is no manifest, although its SHA-256 {digest} is right: {error}. It was not written by loopkit; "
            f"use another checkpoint"
        ) from error
    return manifest


def _interpret(path: Path, said: dict[str, Any]) -> Manifest:
    version = said["format"]
    if type(version) is not int or version < 1:
        raise ValueError(f"the format is {version!r}")
    if version > FORMAT:
        raise FormatVersionError(
            f"{path} has format {version}, this loopkit reads up to format {FORMAT}: it was written by a newer one. "
            f"Install that one to read it"
        )
    if type(said["number"]) is not int or said["number"] < 1:
        raise ValueError(f"the number is {said['number']!r}")
    if type(said["about"]) is not dict:
        raise ValueError("'about' is no mapping")
    files = {}
    for name, info in said["files"].items():
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{name[:300]!r} is no name of a file in a checkpoint")
        if type(info["size"]) is not int or info["size"] < 0 or not SHA256.fullmatch(info["sha256"]):
            raise ValueError(f"the size or the SHA-256 of {name!r} is malformed")
        files[name] = FileInfo(info["size"], info["sha256"])
    return Manifest(path, said["number"], said["about"], files, version)
