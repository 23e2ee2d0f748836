"""From a checkpoint in parts to one in one piece, and back; by one process."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopkit.author import bundle, storage, tensors
from loopkit.checkpoint import Manifest
from loopkit.errors import CheckpointError
from loopkit_sharded.parts import Chunk, Sharded, file_of, put_back, take_out, written_index
from loopkit_sharded.reader import PartsReader, read_parts

__all__ = ["join", "split"]


def join(manifest: Manifest, directory: Path) -> Manifest:
    """Write a checkpoint in parts anew below a directory, in one piece, as `loopkit.plugins.Checkpoint` does.

    Tensors are put together in files that are mapped into memory, so they need not fit into it; the directory needs
    room for the state twice.

    Raises:
        CheckpointError: It is in one piece, or damaged, or the directory cannot be written.
    """
    if bundle.PARTS not in manifest.files:
        raise CheckpointError(f"{manifest.path} is in one piece: it can be copied as it is")
    reader = PartsReader(manifest)
    storage.probe(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".join-") as room:
        targets = {name: _mapped(Path(room) / str(at), each) for at, (name, each) in enumerate(reader.found.items())}
        read_parts(reader, targets)
        state = put_back(bundle.read_state(manifest, parts=True), reader.found, targets)
        contents = bundle.Contents.made(state, bundle.read_structures(manifest))
        return storage.write(directory, contents.files(), manifest.about, label=_label(manifest))


def _mapped(path: Path, each: Sharded) -> Tensor:
    """A tensor whose memory is a new file."""
    count = math.prod(each.shape) * each.dtype.itemsize
    return torch.from_file(str(path), shared=True, size=count, dtype=torch.uint8).view(each.dtype).view(each.shape)


def split(manifest: Manifest, directory: Path, parts: int) -> Manifest:
    """Write a checkpoint in one piece anew below a directory, in the parts of so many processes.

    Weights, and what has the shape of one, such as moments, are cut along the first dimension, as `FSDP` does. The
    state has to fit into memory.

    Raises:
        CheckpointError: It is in parts, or damaged, or the directory cannot be written.
    """
    if bundle.PARTS in manifest.files:
        raise CheckpointError(f"{manifest.path} is in parts: join them first, by loopkit sharded export")
    if parts < 2:
        raise CheckpointError(f"{parts} parts: give at least 2")
    state = bundle.read_state(manifest)
    shapes = {tuple(tensor.shape) for model in state["models"].values() for tensor in _tensors(model)}
    rest, found, whole = take_out(state, lambda value: tuple(value.shape) in shapes and value.ndim > 0)
    contents = bundle.Contents.made(rest, bundle.read_structures(manifest))
    cut: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(parts)]
    for name, each in found.items():
        start = 0
        for rank, piece in enumerate(whole[name].chunk(parts)):
            cut[rank].setdefault(file_of(rank, each), {})[name] = piece
            offsets = (start, *(0 for _ in each.shape[1:]))
            each.chunks.append(Chunk(file_of(rank, each), offsets, tuple(piece.shape)))
            start += len(piece)
    files = {file: tensors.pack(named) for each in cut for file, named in each.items()}
    every = {**contents.files(), **files, bundle.PARTS: [written_index(found, parts)]}
    return storage.write(directory, every, manifest.about, label=_label(manifest))


def _tensors(values: dict[str, Any]) -> list[Tensor]:
    return [value for value in values.values() if isinstance(value, Tensor)]


def _label(manifest: Manifest) -> str:
    return manifest.path.name.partition("-")[2]
