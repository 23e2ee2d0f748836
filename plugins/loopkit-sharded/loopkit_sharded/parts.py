"""Sharded tensors taken out of a state, and put back: which there are, and in which files their parts lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from loopkit.author import bundle, encoding, storage
from loopkit.checkpoint import Manifest
from loopkit.errors import CorruptCheckpointError, FormatVersionError, StateError

__all__ = ["Chunk", "Path", "Sharded", "file_of", "is_part", "put_back", "read_index", "take_out", "written_index"]

FORMAT = 1
MODELS = "models"
"""The part of a state that holds the weights."""
Path = tuple[str | int, ...]
"""Keys and indices that lead to a value in a state."""


@dataclass(frozen=True)
class Chunk:
    """Where a rectangle of a tensor lies."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class Sharded:
    """A tensor of a state of which each process holds a part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    paths: list[Path]
    """Where it is in the state; tied parameters are in several places."""
    like: str | None = None
    """The weight that is sharded in the same way, such as a moment's; itself for a weight."""
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def weight(self) -> bool:
        """Whether it belongs to a model, not to an optimizer or a plugin."""
        return self.paths[0][0] == MODELS


def is_part(value: Tensor) -> bool:
    """Whether this process holds only a part of a tensor."""
    return isinstance(value, DTensor)


def take_out(
    state: Any, wanted: Callable[[Tensor], bool] = is_part
) -> tuple[Any, dict[str, Sharded], dict[str, Tensor]]:
    """A state with empty tensors in the place of sharded ones; their descriptions, and the sharded ones, by name.

    Raises:
        StateError: One is a sum over processes that was not made.
    """
    found: dict[str, Sharded] = {}
    tensors: dict[str, Tensor] = {}
    seen: dict[int, tuple[Tensor, str]] = {}

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(item, (*path, index)) for index, item in enumerate(value))
        return taken(value, path) if isinstance(value, Tensor) and wanted(value) else value

    def taken(value: Tensor, path: Path) -> Tensor:
        if not value.numel():
            return torch.empty(value.shape, dtype=value.dtype)
        if id(value) in seen:
            empty, name = seen[id(value)]
            found[name].paths.append(path)
            return empty
        name = ".".join(map(str, path))
        while name in found:  # as {"a.b": ..., "a": {"b": ...}} would have it
            name += "~"
        if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
            raise StateError(f"{name} is a sum over processes that was not made: redistribute() it")
        seen[id(value)] = torch.empty(0, dtype=value.dtype), name
        found[name] = Sharded(value.dtype, tuple(value.shape), [path])
        tensors[name] = value.detach()
        return seen[id(value)][0]

    rest = walk(state, ())
    _find_likes(found, tensors)
    return rest, found, tensors


def _find_likes(found: dict[str, Sharded], tensors: Mapping[str, Tensor]) -> None:
    """Name, for each tensor, a weight that is sharded in the same way."""
    weights: dict[Any, str] = {}
    for name, each in found.items():
        tensor = tensors[name]
        how = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
        kind = each.shape, how
        if each.weight:
            weights.setdefault(kind, name)
            each.like = name
        else:
            each.like = weights.get(kind)


def put_back(state: Any, found: Mapping[str, Sharded], tensors: Mapping[str, Tensor]) -> Any:
    """A state that was read with empty tensors in the places of sharded ones, with these in it.

    Raises:
        CorruptCheckpointError: It has no such places.
    """
    places = {path: tensors[name] for name, each in found.items() for path in each.paths}

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(item, (*path, index)) for index, item in enumerate(value))
        return places.pop(path, value) if isinstance(value, Tensor) else value

    made = walk(state, ())
    if places:
        raise CorruptCheckpointError(
            f"{bundle.PARTS} names {'.'.join(map(str, next(iter(places))))}, which the state does not hold: the two "
            f"were not written together. Use an older checkpoint"
        )
    return made


def file_of(rank: int, each: Sharded) -> str:
    """The file of one process that holds its part of a tensor."""
    return f"{bundle.PART}{rank:04d}-{'weights' if each.weight else 'state'}.safetensors"


def written_index(found: Mapping[str, Sharded], processes: int) -> bytes:
    """The index of all parts, as a file."""
    tensors = {
        name: {
            "paths": [list(path) for path in each.paths],
            "dtype": str(each.dtype).removeprefix("torch."),
            "shape": list(each.shape),
            "like": each.like,
            "chunks": [[chunk.file, list(chunk.offsets), list(chunk.sizes)] for chunk in each.chunks],
        }
        for name, each in found.items()
    }
    return encoding.dumps({"format": FORMAT, "processes": processes, "tensors": tensors})


def read_index(manifest: Manifest) -> dict[str, Sharded]:
    """The index of all parts; empty for a checkpoint that is in one piece.

    Raises:
        CorruptCheckpointError: It is not what was written.
        FormatVersionError: A newer loopkit-sharded wrote it.
    """
    if bundle.PARTS not in manifest.files:
        return {}
    path = manifest.path / bundle.PARTS
    try:
        said = encoding.loads(storage.read_file(manifest, bundle.PARTS))
        if said["format"] > FORMAT:
            raise FormatVersionError(
                f"{path} has format {said['format']}, this loopkit-sharded reads up to {FORMAT}: install a newer one"
            )
        found = {name: _sharded(each) for name, each in said["tensors"].items()}
        for name, each in found.items():
            if each.like is not None and not found[each.like].weight:
                raise ValueError(f"{name} is like {each.like}, which is no weight")
            for chunk in each.chunks:
                if chunk.file not in manifest.files:
                    raise ValueError(f"a part of {name} is in {chunk.file!r}, which is not there")
    except (StateError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is malformed: {error}. Use an older checkpoint") from error
    return found


def _sharded(said: Mapping[str, Any]) -> Sharded:
    paths = [tuple(path) for path in said["paths"]]
    shape = tuple(said["shape"])
    chunks = [Chunk(file, tuple(offsets), tuple(sizes)) for file, offsets, sizes in said["chunks"]]
    keys = [key for path in paths for key in path]
    counts = [*shape, *(count for chunk in chunks for count in (*chunk.offsets, *chunk.sizes))]
    if not paths or not all(paths) or not all(type(key) in (str, int) for key in keys):
        raise ValueError("it has no place in the state")
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("a shape is no row of counts")
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise ValueError("a part has another number of dimensions")
        if any(offset + size > whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError("a part is larger than its tensor")
    return Sharded(encoding.TORCH_DTYPES[said["dtype"]], shape, paths, said["like"], chunks)
