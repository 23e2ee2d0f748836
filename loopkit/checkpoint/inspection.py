"""Inspect a checkpoint or a weights file without loading it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopkit.checkpoint import storage
from loopkit.checkpoint.bundle import STRUCTURE, read_structures, weights_file
from loopkit.checkpoint.manifest import MANIFEST, in_bytes
from loopkit.checkpoint.streams import open_plain
from loopkit.checkpoint.structure import plain
from loopkit.checkpoint.tensors import Header, TensorInfo, read_header
from loopkit.checkpoint.weights import SUFFIX, Path_, dtype_name, located, models_in, nothing_in, opened

ROWS = 200
"""How many tensors a printed inspection lists."""


@dataclass(frozen=True)
class FileContent:
    """One file of an inspection."""

    size: int
    """Bytes."""
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    """By name: shape, dtype, bytes; empty for files of another format."""
    metadata: dict[str, str] = field(default_factory=dict)
    """The text in the file's header."""


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`, to be printed."""

    path: Path
    """The file, or the directory of the checkpoint."""
    files: dict[str, FileContent]
    """By name; a single file by its own."""
    parameters: int
    """Numbers in the parameters of all models, tied ones once; of a file, or if that is not known, buffers included."""
    about: dict[str, Any] = field(default_factory=dict)
    """The manifest: progress, metrics, versions, plugins, the hash of the structure; empty for a file."""
    number: int | None = None
    """The checkpoint's number; None for a file."""
    format: int | None = None
    """The version of the checkpoint's format; None for a file."""

    def __str__(self) -> str:
        lines = [plain(str(self.path), 200)]
        if self.number is not None:
            lines.append(f"checkpoint {self.number}, format {self.format}")
        lines.append(f"{self.parameters:,} parameters")
        for key, value in self.about.items():
            if isinstance(value, Mapping) and value:
                lines.append(f"{plain(str(key))}:")
                lines += [f"  {plain(str(k))}: {plain(json.dumps(v, sort_keys=True), 200)}" for k, v in value.items()]
            else:
                lines.append(f"{plain(str(key))}: {plain(json.dumps(value, sort_keys=True), 500)}")
        for name, content in self.files.items():
            lines += ["", f"{plain(name)}  {in_bytes(content.size)}"]
            lines += [f"  {plain(key)}: {plain(text, 200)}" for key, text in list(content.metadata.items())[:ROWS]]
            lines += _table(content.tensors)
        return "\n".join(lines)


def _table(tensors: Mapping[str, TensorInfo]) -> list[str]:
    rows = [
        (
            plain(name, 60),
            plain(f"= {info.alias_of}" if info.alias_of else str(list(info.shape)), 40),
            dtype_name(info.dtype),
            in_bytes(info.nbytes),
        )
        for name, info in list(tensors.items())[:ROWS]
    ]
    wide = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = [f"  {n:<{wide[0]}}  {s:<{wide[1]}}  {d:<{wide[2]}}  {b:>{wide[3]}}" for n, s, d, b in rows]
    return lines + ([f"  and {len(tensors) - ROWS:,} more tensors"] if len(tensors) > ROWS else [])


def inspect(path: Path_) -> Inspection:
    """Describe a checkpoint, in the newest one of a run, or in a ``.safetensors`` file. No tensor is read.

    The manifest and the sizes of files are verified; the contents of files are not (`verify` does).

    Raises:
        CheckpointError: There is no such file at ``path``, or it is corrupt.

    Example::

        print(inspect("runs/first"))
    """
    at = Path(path)
    if not at.is_dir():
        with opened(at) as reader, located(reader, os.fspath(path)) as watched:
            header = read_header(watched)
        return Inspection(at, {at.name: FileContent(reader.size, header.tensors, header.metadata)}, _numbers([header]))
    if os.path.lexists(at / MANIFEST):
        manifest = storage.read_manifest(at)
    else:
        manifests = storage.listing(at)
        if not manifests:
            raise nothing_in(at, manifests.problems)
        manifest = manifests[0]
    files: dict[str, FileContent] = {}
    headers: dict[str, Header] = {}
    for name, info in sorted(manifest.files.items()):
        files[name] = FileContent(info.size)
        if name.endswith(SUFFIX):
            at = manifest.path / name
            with open_plain(at) as reader, located(reader, f"{at}") as watched:
                headers[name] = header = read_header(watched)
            files[name] = FileContent(info.size, header.tensors, header.metadata)
    models = models_in(manifest)
    weights = [weights_file(name, len(models)) for name in models]
    if STRUCTURE in manifest.files:
        parameters = sum(
            math.prod(entry.shape)
            for found in read_structures(manifest).values()
            for entry in found.entries
            if entry.kind == "parameter" and entry.shape is not None
            if not any(entry.name in tie[1:] for tie in found.ties)
        )
    else:
        parameters = _numbers(header for name, header in headers.items() if name in weights)
    return Inspection(manifest.path, files, parameters, manifest.about, manifest.number, manifest.format)


def _numbers(headers: Iterable[Header]) -> int:
    return sum(math.prod(i.shape) for header in headers for i in header.tensors.values() if i.alias_of is None)
