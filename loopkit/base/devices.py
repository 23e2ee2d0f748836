"""Devices: which one is this process's, and what runs there beside the host.

Streams, events, pinned memory and waits are made here, and no other module of loopkit names a type of device, but for
what only CUDA has. The host is the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from loopkit.base.words import nearest
from loopkit.errors import PluginError

Event = torch.Event
NAMES = ("cpu", "cuda", "mps", "xpu")
"""Types that people give."""
SAVED = (*NAMES, "xla", "hpu", "mtia", "meta")
"""Types of which a state may hold a device."""
ALIASES = {"gpu": "cuda"}
"""Other names of devices."""
LATE = {"cuda"}
"""Types whose events show that a copy to the host has arrived; for others the host waits."""
NARROW = {"mps"}
"""Types without float64."""
HOST = torch.device("cpu")


def parse(
    owner: str,
    value: Any,
    words: Sequence[str] = (),
    *,
    option: str = "device",
    error: type[Exception] = PluginError,
) -> torch.device:
    """Return the torch device that an option names.

    Args:
        owner: The class or function that has the option, for the message.
        value: Its value.
        words: Further values that the option takes, for the message.
        option: Its name.
        error: The class of the error.

    Raises:
        PluginError: It names none; or ``error``. The message has the nearest name.
    """
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as caught:
        word = str(value).lower().partition(":")[0]
        hint = nearest(ALIASES.get(word, word), (*words, *NAMES))
        others = "".join(f", or {each!r}" for each in words)
        raise error(
            f"{owner}: {option} is {value!r:.80}: it is a torch device, such as 'cuda:0'{others}{hint}"
        ) from caught


def accelerator() -> torch.device | None:
    """The accelerator of this machine, without an index; None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def count() -> int:
    """How many devices of the accelerator this process sees."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def types() -> list[str]:
    """The types of devices that torch was built for, first the host."""
    found = torch.accelerator.current_accelerator()
    return [HOST.type] if found is None else [HOST.type, found.type]


def local_device() -> torch.device:
    """The device of this process: the visible one with the number of its launcher's ``LOCAL_RANK``.

    If it sees fewer, the processes share them in turn. Without ``LOCAL_RANK`` it is the accelerator without an index,
    which stands for the current device; without an accelerator, the host.
    """
    found = accelerator()
    rank = os.environ.get("LOCAL_RANK", "")
    if found is None:
        return HOST
    return torch.device(found.type, int(rank) % count()) if rank.isdecimal() else found


def use(device: torch.device) -> None:
    """Let a device be the current one of its type."""
    if device.type != HOST.type and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def indexed(device: torch.device) -> torch.device:
    """The device itself, or this process's if only its type is given."""
    own = local_device()
    return own if device == torch.device(own.type) else device


def own_backend() -> str:
    """The backend of ``torch.distributed`` that sends from device to device; none if it is not built."""
    found = accelerator()
    own = "" if found is None else torch.distributed.get_default_backend_for_device(found)
    return own if own not in ("", "gloo") and torch.distributed.is_backend_available(own) else ""


def backends() -> str:
    """The default backends of ``torch.distributed``: the device's own if each local process can have a device."""
    own = own_backend()
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not own or (here.isdecimal() and count() < int(here)):
        return "gloo"
    return f"cpu:gloo,{local_device().type}:{own}"


def lacking(backend: str) -> str:
    """The type of device that a backend of ``torch.distributed`` needs and this machine lacks, or an empty string."""
    needs = {kind for kind, own in torch.distributed.Backend.default_device_backend_map.items() if own == backend}
    found = accelerator()
    return "" if not needs or needs & {HOST.type, "" if found is None else found.type} else min(needs)


def exact(device: torch.device) -> torch.dtype:
    """The dtype with the most digits there."""
    return torch.float32 if device.type in NARROW else torch.float64


def computes_bfloat16(kind: str) -> bool:
    """Whether a type of device reports bfloat16 in hardware."""
    return kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def reads_late(device: torch.device) -> bool:
    """Whether a copy to the host can be read when it has arrived, so that no step waits for it."""
    return device.type in LATE


def to_host(tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
    """A copy in main memory; wait for it with `Arrival`.

    Args:
        tensor: It may be on the host already.
        buffer: The result of an earlier call, to use its memory again.
    """
    late = reads_late(tensor.device)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty_like(tensor.resolve_conj().resolve_neg(), device=HOST, pin_memory=late)
    return buffer.copy_(tensor, non_blocking=late)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, ready for work queued from now on; without waiting where that is safe.

    It is where a copy from memory that is not pinned has left that memory when the call returns.
    """
    return tensor.to(device, non_blocking=reads_late(device))


def scalar(value: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number as a tensor on a device, without waiting, unlike ``torch.as_tensor``."""
    if isinstance(value, Tensor):
        return to_device(value.to(dtype), device)
    return torch.full((), value, dtype=dtype, device=device)


def scale(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place, each by a factor on its own device."""
    if not isinstance(factor, Tensor):
        torch._foreach_mul_(list(tensors), factor)
        return
    for device in {tensor.device for tensor in tensors}:
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], to_device(factor, device))


def mark(device: torch.device, *, timing: bool = False, event: Event | None = None) -> torch.Event:
    """An event after what is queued on a device's current stream; with ``timing``, ``elapsed_time`` works.

    Args:
        device: The device.
        timing: Whether it takes the time.
        event: The result of an earlier call, to use it again.
    """
    event = Event(device, enable_timing=timing) if event is None else event
    event.record(torch.accelerator.current_stream(device))
    return event


class Arrival:
    """The arrival of copies to the host that were made so far, by `to_host`.

    Args:
        sources: The devices that they come from.
    """

    def __init__(self, sources: Iterable[torch.device]) -> None:
        self._events = [mark(device) for device in dict.fromkeys(sources) if reads_late(device)]

    @property
    def here(self) -> bool:
        """Whether all have arrived."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """Wait for them."""
        for event in self._events:
            event.synchronize()


class Lane:
    """A side stream, for what a device does while it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.Stream(device)
        """A stream: work that is queued ``with`` it takes the lane."""

    def follow(self) -> None:
        """Let what takes the lane from now on wait for what is queued on the current stream now."""
        self.stream.wait_stream(torch.accelerator.current_stream(self._device))

    def wait(self) -> None:
        """Wait for what has taken the lane."""
        self.stream.synchronize()

    def mark(self) -> Event:
        """An event after what was copied so far."""
        event = Event(self._device)
        event.record(self.stream)
        return event

    def receive(self, event: Event, copies: Iterable[Tensor]) -> None:
        """Let the current stream wait for an event, and use what was copied before it."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(event)
        for tensor in copies:
            tensor.record_stream(current)


def fits(size: int, device: torch.device) -> bool:
    """Whether so many bytes take at most half of the memory that is free on a device."""
    return 2 * size <= torch.accelerator.get_memory_info(device)[0]


def take_peak(device: torch.device) -> int:
    """The most bytes that were allocated there at once since the last call; -1 where torch does not count them."""
    if device.type == HOST.type:
        return -1
    try:
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
    except RuntimeError:  # no count, as of MPS
        return -1
    return peak


def pinned(tensor: Tensor) -> Tensor:
    """A tensor of the host in pinned memory; one of a device as it is."""
    return tensor.pin_memory() if tensor.device.type == HOST.type else tensor


def synchronize(used: Iterable[torch.device]) -> None:
    """Wait for all that is queued on some devices."""
    for device in dict.fromkeys(used):
        if device.type != HOST.type:
            torch.accelerator.synchronize(device)


def generator_states() -> dict[str, list[Tensor]]:
    """The states of the accelerator's generators by its type, one for each device; empty if it is not in use."""
    if (found := torch.accelerator.current_accelerator()) is None:
        return {}
    module: Any = torch.get_device_module(found)
    used = getattr(module, "is_initialized", module.is_available)  # torch.mps has neither
    every = getattr(module, "get_rng_state_all", lambda: [module.get_rng_state()])
    return {found.type: every()} if used() else {}


def is_default_generator(value: Any) -> bool:
    """Whether it is a generator that an accelerator draws from where none is given."""
    if (found := torch.accelerator.current_accelerator()) is None:
        return False
    return any(value is each for each in getattr(torch.get_device_module(found), "default_generators", ()))


def set_generator_states(states: Mapping[str, list[Tensor]]) -> list[str]:
    """Put the generators into states from `generator_states`; returns what could not be, in words."""
    lost = []
    for kind, saved in states.items():
        here = count() if kind in types() else 0
        for index, state in enumerate(saved[:here]):
            torch.get_device_module(kind).set_rng_state(state, torch.device(kind, index))
        if len(saved) != here and saved:
            lost.append(f"{len(saved)} {kind.upper()} devices were saved, {here} are here")
    return lost
