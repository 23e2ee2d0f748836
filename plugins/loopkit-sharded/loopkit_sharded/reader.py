"""One process reads its part of a checkpoint that any number of processes has written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from loopkit.author import bundle, raw, sharded, storage, tensors
from loopkit.checkpoint import Manifest
from loopkit.errors import CorruptCheckpointError
from loopkit_sharded.parts import Sharded, put_back, read_index

__all__ = ["PartsReader", "read", "read_parts"]


class PartsReader(StorageReader):
    """Reads rectangles of tensors; each file that holds one of them is read whole, and compared with its digest."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.found = read_index(manifest)
        """The tensors of which each process had a part."""
        self._files = {
            MetadataIndex(name, chunk.offsets): chunk.file for name, each in self.found.items() for chunk in each.chunks
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: it is not made from a path."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do not reset: it reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the tensors to read."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=each.dtype),
                    torch.Size(each.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in each.chunks],
                )
                for name, each in self.found.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do not set up: the index is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Copy what was asked for to where it belongs.

        Raises:
            CorruptCheckpointError: A file is not what was written.
        """
        wanted: dict[str, dict[str, list[ReadItem]]] = {}
        for item in plan.items:
            at = item.storage_index
            wanted.setdefault(self._files[at], {}).setdefault(at.fqn, []).append(item)
        for file, items in sorted(wanted.items()):
            self._read_file(file, items, planner)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read_file(self, file: str, wanted: Mapping[str, list[ReadItem]], planner: LoadPlanner) -> None:
        with storage.open_file(self._manifest, file) as source:
            try:
                header = tensors.read_header(source)
                missing = wanted.keys() - header.tensors.keys()
                if missing:
                    raise CorruptCheckpointError(f"it holds no {min(missing)!r}")
                others: dict[str, list[str]] = {}
                for name, info in header.tensors.items():
                    if info.alias_of is not None:
                        others.setdefault(info.alias_of, []).append(name)
                for name, info in header.tensors.items():
                    if info.alias_of is None:
                        part = torch.empty(info.shape, dtype=info.dtype)  # row by row, whatever strides it had
                        if info.nbytes:
                            source.readinto(raw(part).numpy().data)
                        for alias in (name, *others.get(name, ())):
                            for item in wanted.get(alias, ()):
                                _copy(part, item, planner)
                        del part
            except CorruptCheckpointError as error:
                storage.verify(self._manifest.path)  # if it has changed since, that is what to say
                raise CorruptCheckpointError(f"{self._manifest.path / file}: {error}") from error
            source.finish()


def _copy(part: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copy a rectangle of a part to where it belongs."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if offset + length > part.shape[dim]:
            raise CorruptCheckpointError(f"{item.storage_index.fqn!r} has the shape {tuple(part.shape)}")
        part = part.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def read_parts(reader: PartsReader, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors by name, or this process's part of them, without communication.

    Raises:
        CorruptCheckpointError: A file is not what was written.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), reader.read_metadata(), is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def read(learner: Any, manifest: Manifest) -> dict[str, Any]:
    """Read and verify a learner's state, of sharded tensors this process's part.

    It does not communicate. Tensors that are whole here are read whole, from any number of writing processes.

    Raises:
        CorruptCheckpointError: A file is not what was written.
    """
    state = bundle.read_state(manifest, parts=True)
    if bundle.PARTS not in manifest.files:
        return state
    reader = PartsReader(manifest)
    here = {("models", name, key): p for name, model in learner.models.items() for key, p in model.state_dict().items()}
    targets = {name: _target(reader.found, each, here) for name, each in reader.found.items()}
    read_parts(reader, targets)
    made: dict[str, Any] = put_back(state, reader.found, targets)
    return made


def _target(found: Mapping[str, Sharded], each: Sharded, here: Mapping[Any, Any]) -> Tensor:
    """Room for a tensor: sharded as the weight here that it is like."""
    like = here.get(found[each.like].paths[0]) if each.like is not None else None
    if like is not None and sharded.is_sharded(like) and tuple(like.shape) == each.shape:
        return torch.empty_like(like, dtype=each.dtype, requires_grad=False)
    return torch.empty(each.shape, dtype=each.dtype)
