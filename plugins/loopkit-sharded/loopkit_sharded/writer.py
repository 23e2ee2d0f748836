"""Several processes write one checkpoint, as torch.distributed.checkpoint lets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from loopkit.author import FileInfo, JointError, bundle, is_passing, sharded, storage, streams
from loopkit.checkpoint import Manifest
from loopkit.errors import CheckpointError, LoopkitError, StateError
from loopkit_sharded.parts import Chunk, Sharded, file_of, take_out, written_index

__all__ = ["PartContents", "PartsWriter", "write"]


@dataclass
class PartContents(bundle.Contents):
    """The share of a checkpoint that one process writes: its parts, and in rank 0 all that is not sharded."""

    rank: int
    found: dict[str, Sharded]
    """The sharded tensors of all processes."""
    plan: SavePlan
    """The rectangles of this process."""

    @classmethod
    def taken(cls, learner: Any, state: Mapping[str, Any]) -> PartContents:
        """Take a learner's state apart; its tensors are not copied.

        Raises:
            StateError: Something cannot be saved; names it.
        """
        rest, found, tensors = take_out(state)
        rank = learner.world.rank
        contents = bundle.Contents.of(learner, rest)
        plan = create_default_local_save_plan(dict(tensors), is_coordinator=False)
        plan = SavePlan([item for item in plan.items if 0 not in _chunk(item).sizes])
        parts = {} if rank else dict(contents.tensors)
        for item in plan.items:
            name = item.index.fqn
            part = sharded.part(tensors[name])
            if part.shape != _chunk(item).sizes:
                raise StateError(
                    f"{name}: this process holds {tuple(part.shape)} of it, but torch expects "
                    f"{tuple(_chunk(item).sizes)}"
                )
            parts.setdefault(file_of(rank, found[name]), {})[name] = part
        return cls(contents.value, parts, contents.structures, rank, found, plan, left_out=contents.left_out)

    @property
    def together(self) -> bool:
        """Whether something is sharded; else rank 0 writes alone."""
        return bool(self.found)

    def part(self, name: str) -> Tensor:
        """This process's part of a tensor."""
        return self.tensors[file_of(self.rank, self.found[name])][name]


def _chunk(item: WriteItem) -> Any:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


class _Planner(SavePlanner):
    """Plans what was found before; rectangles that several processes hold are written by one of them."""

    def __init__(self, contents: PartContents) -> None:
        self.contents = contents
        self._torch = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._torch.set_up_planner({}, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self.contents.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self._torch.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.contents.part(write_item.index.fqn)


class PartsWriter(StorageWriter):
    """Writes safetensors files, one or two for each process, an index and a manifest, which comes last.

    Rank 0 makes the checkpoint's hidden directory, and gives it its name when all files are there.
    """

    def __init__(self, contents: PartContents, draft: AbstractContextManager[storage.Draft], processes: int) -> None:
        self._contents = contents
        self._making = draft
        self._processes = processes
        self._made = ExitStack()
        """Inside of the draft, in rank 0."""
        self._draft: storage.Draft | None = None

    @contextmanager
    def open(self) -> Iterator[PartsWriter]:
        """Inside, it can write; unfinished files are removed at the end."""
        with self._made:
            yield self
            if self._draft is not None:
                raise CheckpointError("the checkpoint was not finished")

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the checkpoint that was written last; only in rank 0."""
        return self._manifest

    _manifest: Manifest | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: it is not made from a path."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do not reset: it writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin, in rank 0."""
        if is_coordinator:
            self._draft = self._made.enter_context(self._making)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Plan where each process writes."""
        assert self._draft is not None
        return [replace(plan, storage_data=str(self._draft.path)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write what this process is to write, and flush it to the disk."""
        contents, wanted = self._contents, {item.index.fqn for item in plan.items}
        for file in [file for file in contents.tensors if file.startswith(bundle.PART)]:
            kept = {name: tensor for name, tensor in contents.tensors[file].items() if name in wanted}
            contents.tensors[file] = kept
            if not kept:
                del contents.tensors[file]
        infos: dict[str, FileInfo] = {}
        for file, chunks in contents.files().items():
            if file.startswith(bundle.PART):
                infos[file] = streams.write_file(Path(plan.storage_data) / file, chunks)
            elif self._draft is not None:
                self._draft.write(file, chunks)
        results = []
        for item in plan.items:
            file = file_of(contents.rank, contents.found[item.index.fqn])
            results.append(WriteResult(item.index, infos[file].size, (file, infos[file].size, infos[file].sha256)))
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the manifest, and give the directory its name; only rank 0 does it."""
        assert self._draft is not None
        draft, files = self._draft, {}
        for result in (result for each in results for result in each):
            file, size, digest = result.storage_data
            files[result.index.fqn, result.index.offset] = file
            draft.add(file, FileInfo(size, digest))
        found = {name: replace(each) for name, each in self._contents.found.items()}
        for name, each in found.items():
            each.chunks = [
                Chunk(files[name, chunk.offsets], tuple(chunk.offsets), tuple(chunk.sizes))
                for chunk in metadata.state_dict_metadata[name].chunks  # type: ignore[union-attr]
            ]
        draft.write(bundle.PARTS, [written_index(found, self._processes)])
        self._draft = None
        self._made.close()
        self._manifest = draft.manifest


def write(
    contents: PartContents,
    draft: AbstractContextManager[storage.Draft],
    group: dist.ProcessGroup | None,
    processes: int,
) -> Manifest | None:
    """Write a checkpoint together with the other processes; its manifest in rank 0, None elsewhere.

    Raises:
        CheckpointError: One of them could not, in all of them; there is no new checkpoint.
    """
    writer = PartsWriter(contents, draft, processes)
    try:
        with writer.open():
            save({}, storage_writer=writer, planner=_Planner(contents), process_group=group)
    except CheckpointException as error:
        raise _joint(error) from error
    return writer.manifest


def _joint(error: CheckpointException) -> LoopkitError:
    """Return what all processes raise: the first failure that does not pass by itself, else the first one."""
    failures = sorted(((rank, cause) for rank, (cause, _) in error.failures.items()), key=lambda each: each[0])
    rank, cause = next(((rank, each) for rank, each in failures if not is_passing(each)), failures[0])
    if isinstance(cause, LoopkitError) and type(cause) is not CheckpointError:
        return type(cause)(f"rank {rank}: {cause}")
    text = str(cause) if isinstance(cause, LoopkitError) else f"{type(cause).__name__}: {cause}"
    joint = JointError(f"rank {rank}: {text}")
    joint.errno = getattr(cause, "errno", None)
    return joint
