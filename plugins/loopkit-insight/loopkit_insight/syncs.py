"""Calls that make the host wait for the device, since they read tensors; observed as they are made."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__complex__",
    "__index__",
    "__contains__",
    "__format__",
    "__repr__",
    "is_nonzero",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "equal",
    "allclose",
    "bincount",
)
"""The functions of torch that read values on the host."""
TORCH = os.path.join(os.path.dirname(torch.__file__), "")
OPTIMIZERS = os.path.join(TORCH, "optim", "")
ON_HOST = {("loopkit.logs.kinds", name) for name in ("loggable", "all_loggable", "_scalar")}
ON_HOST |= {("loopkit.metrics", "add"), ("loopkit.metrics", "more"), ("loopkit.plugins.gradients", "clip")}


class TensorReads(TorchFunctionMode, ABC):
    """While it is entered, `noticed` is called for each call that reads a tensor on the host.

    On the CPU these cost nothing; on an accelerator the host waits. Counted are `READS`, transfers to the CPU, and
    calls whose result's size depends on values. Not counted: optimizers of torch, whose counters lie on the host;
    ``learner.log``, means, counts and `ClipGradNorm`, which read at once only what lies there; and
    `loopkit.plugins.late.LateValues`, which does not wait on an accelerator.
    """

    @abstractmethod
    def noticed(self, what: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """A tensor is about to be read.

        Args:
            what: The call, in words, such as ``"item() on a tensor"``.
            args: Of the call.
            frame: Of the code that reads, which is none of torch's.
        """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        what = _reads(getattr(func, "__name__", ""), args, kwargs)
        if what:
            frame = caller(sys._getframe(1))
            if frame is not None and not _is_late(frame):
                self.noticed(what, args, frame)
            del frame
        result = func(*args, **kwargs)
        self.made(args, kwargs, result)
        return result

    def made(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call of torch has returned."""


def caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outward, that is not torch's; None within one of torch's optimizers."""
    while frame is not None and is_torch(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(OPTIMIZERS):
            return None
        frame = frame.f_back
    return frame


def is_torch(path: str) -> bool:
    """Whether a file is torch's own."""
    return path.startswith(TORCH)


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe a call that reads a tensor on the host; an empty string for another one."""
    if name == "to":
        given = (*args[1:2], kwargs.get("device"))
        moved = (
            torch.device("cpu") in given and args[0].device.type != "cpu"
        )  # code that is for any device names its own
        return "to() on a tensor" if moved or "cpu" in [v for v in given if isinstance(v, str)] else ""
    if name in ("__getitem__", "__setitem__"):
        return _indexed(args[1], args[2:])
    if name == "where":
        found = len(args) == 1
    elif name in ("tensor", "as_tensor"):  # a list of tensors is read, a tensor is copied where it lies
        found = bool(args) and not isinstance(args[0], Tensor) and next(tensors(args[:1]), None) is not None
    elif name == "one_hot":
        found = len(args) < 2 and "num_classes" not in kwargs
    elif name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        found = isinstance(repeats, Tensor) and kwargs.get("output_size") is None
    else:
        found = name in READS
    return f"{name.strip('_')}() on a tensor" if found else ""


def _indexed(index: Any, value: tuple[Any, ...]) -> str:
    """Describe the read that an index needs; ``value`` holds the value that is written there, if there is one."""
    for tensor in tensors([index]):
        if tensor.dtype is torch.bool and tensor.ndim:
            if not value or (isinstance(value[0], Tensor) and value[0].numel() != 1):  # one value fills the mask
                return "tensor[mask]"
        elif not tensor.ndim and tensor.dtype is not torch.uint8:
            return "tensor[tensor]"
    return ""


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, in lists, tuples and slices, too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, slice):
            yield from tensors((value.start, value.stop, value.step))
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


def _is_late(frame: FrameType | None) -> bool:
    """Whether the call comes from values that are read when they have arrived."""
    if frame is not None and _named(frame) in ON_HOST:
        return True  # it reads at once what lies on the host, and nothing else
    names: set[str] = set()
    while frame is not None:
        module, name = _named(frame)
        if module == "loopkit.plugins.late":
            names.add(name)
        frame = frame.f_back
    return bool(names) and not names & {"wait", "read"}


def _named(frame: FrameType) -> tuple[str, str]:
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name
