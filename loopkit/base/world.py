"""World: the processes that train together, and their messages beside gradients and parameters."""

from __future__ import annotations

import atexit
import io
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from loopkit.base import devices
from loopkit.errors import WorldError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_current: World | None = None


class World:
    """The processes that train together, as one of them sees them; without arguments, only this process.

    Messages go through the host's memory, in a separate group, without waiting for a device. All processes
    must make the same calls in the same order. It lasts as long as the process.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        timeout: float = 300.0,
        group: dist.ProcessGroup | None = None,
        store: Store | None = None,
    ) -> None:
        self.rank = rank
        """Which of the processes this is, from 0."""
        self.size = size
        """How many there are."""
        self.timeout = timeout
        """Seconds that a process waits for the others."""
        self.store = store
        """The store that all processes write and read, also while they wait; None for a single process."""
        self.broken = False
        """Whether a process is gone: all messages stop."""
        self.in_step = False
        """Whether all processes make the same steps, and agree between them."""
        self.blame: Callable[[BaseException], BaseException | None] | None = None
        """Names the process that caused an error of a collective; None if no process did."""
        self.slot: list[int] | memoryview[int] = [0]
        """Its first item counts the steps of the epoch that runs; the engine writes it."""
        self.places: mmap.mmap | bytearray | None = None
        """Memory that the processes of a machine share, for `loopkit.distributed.places`."""
        self._group = group
        self._watches = 0
        self._vouched: tuple[float, Callable[[], str]] | None = None

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size})"

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank, in each process; two collectives. Values are pickled, only between these."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._sending():
            dist.all_gather_object(values, _packed(value), group=self._group)
        return [_unpacked(each) for each in values]

    def collect(self, value: Any) -> list[Any]:
        """Every process's value, by rank, only in rank 0; none elsewhere; two collectives."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._sending():
            dist.gather_object(_packed(value), values, dst=0, group=self._group)
        return [_unpacked(each) for each in values or ()]

    def odd(self, value: Any) -> tuple[int, Any, Any] | None:
        """The first process whose value is not rank 0's: its rank, its value, and rank 0's; None if all are equal."""
        first, *others = self.gather(value)
        return next(((rank, theirs, first) for rank, theirs in enumerate(others, 1) if theirs != first), None)

    def share(self, value: Any) -> Any:
        """The value of rank 0, in each process; two collectives."""
        if self.size == 1:
            return value
        values = [_packed(value) if self.rank == 0 else None]
        with self._sending():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return _unpacked(values[0])

    def highest(self, *numbers: float) -> list[float]:
        """The highest of each number over the processes; one collective."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over the processes, in double precision; one collective."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def vouch(self, number: float, differs: Callable[[], str]) -> None:
        """Let the next agreement compare a number, which is to be the same in all processes.

        Args:
            number: From 0 to 2**53.
            differs: Returns the difference, if there is one. All processes call it.
        """
        self._vouched = number, differs

    def agree(self, *numbers: float) -> list[float]:
        """`highest`, and `WorldError` if what the processes vouch for is not the same; one collective.

        Raises:
            WorldError: It is not.
        """
        vouched = self._vouched
        self._vouched = None
        own = (-math.inf, -math.inf) if vouched is None else (vouched[0], -vouched[0])
        most, least, *highest = self.highest(*own, *numbers)
        if vouched is not None and most != -least:
            raise WorldError(vouched[1]())
        return highest

    def _reduced(self, numbers: tuple[float, ...], op: Any) -> list[float]:
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        with self._sending():
            dist.all_reduce(values, op=op, group=self._group)
        return list(values.tolist())

    @contextmanager
    def _sending(self) -> Iterator[None]:
        self._check()
        try:
            yield
        except Exception as error:
            if self.blame is None or (blamed := self.blame(error)) is None:
                raise
            raise blamed from error

    def next_watch(self) -> int:
        """A number for a watch, equal in all processes."""
        self._watches += 1
        return self._watches

    @property
    def open(self) -> bool:
        """Whether its process group is still there."""
        if self.size == 1:
            return True
        try:
            return dist.is_initialized() and dist.get_rank(self._group) == self.rank
        except ValueError:  # the group belongs to an earlier default group
            return False

    def _check(self) -> None:
        if self.broken:
            raise WorldError(
                f"rank {self.rank}: one of the other processes is gone, so they can no longer be reached: start "
                f"all of them again"
            )
        if not self.open:
            raise WorldError(
                f"rank {self.rank}: the process group was destroyed, and the processes cannot hear each other: call "
                f"torch.distributed.destroy_process_group() at the end of the script, or not at all"
            )


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)  # plain pickle writes some dtypes that it cannot read
    return buffer.getvalue()


def _unpacked(value: Any) -> Any:
    return torch.load(io.BytesIO(value), weights_only=False)  # it comes from this run's own processes


def join(backend: str | None = None, *, timeout: float = 300.0) -> World:
    """The world of this process, joined at the first call, by a launcher's environment.

    It is the environment of torchrun, `loopkit.launch`, or any launcher that sets ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT``; without it, there is one process. A default process group that exists already
    is used as it is. Each run of torchrun, and each of its restarts, meets under its own name, so that no process
    finds one that is dead.

    Args:
        backend: Of ``torch.distributed``; by default NCCL for tensors on CUDA, if each process has its own device,
            and Gloo for all else.
        timeout: Seconds to wait for the others, now and in every collective.

    Raises:
        WorldError: The environment is incomplete or wrong, the backend is not there, the address is taken, or the
            others did not come in time.
    """
    global _current
    if not timeout > 0:
        raise WorldError(f"join(timeout={timeout!r}): it counts seconds, above 0")
    if _current is not None:
        if _current.open or not dist.is_initialized():
            _current._check()
            return _current
        _current = None  # the script has made another process group since
    world = _join(backend, timeout)
    if world.size > 1:  # a process that is alone may join others later
        _current = world
    return world


def _join(backend: str | None, timeout: float) -> World:
    limit = timedelta(seconds=timeout)
    if not (dist.is_available() and dist.is_initialized()):
        if (place := _place()) is None:
            return World(timeout=timeout)
        if not dist.is_available():
            raise WorldError(f"{place}: this build of torch has no torch.distributed: install one that has it")
        chosen = _backend(backend)
        try:
            _meet(place, chosen, limit)
        except dist.DistError as error:
            _give_up(place, error)
    rank = dist.get_rank()
    size = dist.get_world_size()
    if size == 1:
        return World(timeout=timeout)
    devices.use(dist.distributed_c10d._get_default_group().bound_device_id or devices.local_device())
    try:
        group = dist.new_group(backend="gloo", timeout=limit)
    except dist.DistError as error:
        raise WorldError(f"rank {rank} of {size}: not all processes came within {timeout:g} s: {error}") from error
    store = dist.PrefixStore("loopkit", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    return World(rank, size, timeout=timeout, group=group, store=store)


@dataclass(frozen=True)
class _Place:
    """The place of this process, as the environment variables give it."""

    rank: int
    size: int
    address: str
    port: int
    kept: bool
    """Whether the launcher keeps the store."""
    run: str
    """A name that differs between runs and restarts."""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, {self.address}:{self.port}"


def _place() -> _Place | None:
    """Read the place from the environment; None for a single process."""
    given = [name for name in VARIABLES if name in os.environ]
    if not given or os.environ.get("WORLD_SIZE") == "1":
        return None
    if missing := [name for name in VARIABLES if name not in os.environ]:
        raise WorldError(
            f"the environment sets {', '.join(given)}, but not {', '.join(missing)}: start the script by torchrun or "
            f"loopkit.launch, which set all of them, or unset them for a single process"
        )
    rank = _number("RANK", 0)
    size = _number("WORLD_SIZE", 1)
    port = _number("MASTER_PORT", 1, 65535)
    if rank >= size:
        raise WorldError(f"the environment has RANK={rank} and WORLD_SIZE={size}: ranks are 0 to {size - 1}")
    get = os.environ.get
    run = f"{get('TORCHELASTIC_RUN_ID', '')}/restart-{get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return _Place(rank, size, os.environ["MASTER_ADDR"], port, get("TORCHELASTIC_USE_AGENT_STORE") == "True", run)


def _number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ[name]
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise WorldError(
            f"the environment has {name}={text!r}, which is no number {bounds}: start the script by torchrun or "
            f"loopkit.launch"
        )
    return number


def _meet(place: _Place, backend: str, limit: timedelta) -> None:
    """Make the default process group."""
    rank = place.rank
    size = place.size
    hosts = rank == 0 and not place.kept
    tcp = dist.TCPStore(place.address, place.port, size, hosts, limit)  # type: ignore[attr-defined]
    store = dist.PrefixStore(place.run, tcp)  # type: ignore[attr-defined]
    if not place.kept and store.add(f"loopkit/rank-{rank}", 1) > 1:
        raise WorldError(
            f"{place}: another process with this rank is there already: the script was started twice with one port, "
            f"or two processes have the same RANK; give each run its own MASTER_PORT"
        )
    device = devices.local_device()
    devices.use(device)
    named = [part.rpartition(":")[2].lower() for part in backend.split(",")]
    own = device if devices.own_backend() in named and device.index is not None else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=own)
    atexit.register(_leave)


def _give_up(place: _Place, error: dist.DistError) -> NoReturn:
    """Raise with the reason why the processes did not meet."""
    text = str(error).strip().rstrip(".")
    if "EADDRINUSE" in text:
        raise WorldError(
            f"{place}: the port is taken, by another run or another program: give this one another MASTER_PORT "
            f"(torchrun --master-port, or --standalone, which finds a free one)"
        ) from error
    if isinstance(error, dist.DistNetworkError) and place.rank != 0:
        whose = "the launcher" if place.kept else "rank 0"
        raise WorldError(
            f"{place}: no answer from there ({text}). Did {whose} start, and can its host be reached from this one?"
        ) from error
    raise WorldError(
        f"{place}: the others did not come, or left again ({text}). Look at the output of the other processes; if they "
        f"start slowly, give a longer timeout="
    ) from error


def _backend(given: str | None) -> str:
    if given is None:
        return devices.backends()
    for name in [part.rpartition(":")[2].lower() for part in given.split(",")]:
        if not dist.is_backend_available(name):
            raise WorldError(f"the backend {name!r} is not in this build of torch: 'gloo' is, leave backend= out")
        if lacking := devices.lacking(name):
            raise WorldError(
                f"the backend {name!r} needs {lacking.upper()}, and there is none here: leave backend= out, or give "
                f"'gloo'"
            )
    return given


def _leave() -> None:
    """Close the process group that was opened here, unless that would mean waiting for a dead process."""
    global _current
    world = _current
    _current = None
    if dist.is_initialized() and not (world is not None and world.broken):
        dist.destroy_process_group()


class Trains(Protocol):
    """A learner, with the processes that train together."""

    @property
    def world(self) -> World:
        """The processes."""

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins by name."""


def must_agree(learner: Trains) -> bool:
    """Whether processes make the same steps from the same parameters, so that a step is cancelled in all or none.

    Not for a single process, nor where each trains by itself between two averages.
    """
    return learner.world.size > 1 and all(getattr(each, "agrees_in_steps", True) for each in learner.plugins.values())
