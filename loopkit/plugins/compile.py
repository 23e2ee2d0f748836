"""Models compiled by torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from loopkit.base.batches import map_tensors
from loopkit.base.notes import warn
from loopkit.base.options import Shown
from loopkit.base.words import nearest
from loopkit.hooks import hookimpl

GRAPHED = ("reduce-overhead", "max-autotune")
"""Modes in which torch replays CUDA graphs."""


class Compile(Shown):
    """Compile the models, in place: their class, names of parameters and saved state stay as they are.

    Where the backend is missing or fails, there is one warning, and the models run as they are. Compilation happens at
    the first call with new shapes, and may change rounding; inductor draws other random numbers for dropout. A backend
    that fails while it compiles the backward is an error.

    Args:
        dynamic: Whether to compile for changing shapes; by default torch decides when it has seen some.
        mode: As in ``torch.compile``; by default ``"default"``. With ``"reduce-overhead"`` or ``"max-autotune"``, whose
            graphs write to the same memory in each step, outputs are copies: kept ones do not change.
        backend: A name of ``torch.compiler.list_backends()``, or a function.
        fullgraph: Raise for a model that cannot be compiled in one piece, instead of a warning.

    Forward hooks that are put on modules later, as some plugins do for an epoch, lead to another compilation.

    A model with a buffer of float64 without dimensions on the CPU is not compiled, with one warning: torch 2.13 loses
    what its forward writes there.
    """

    name = "compile"
    provides = "compile"
    before = ("sync",)
    after = ("device", "memory_format", "freeze")
    volatile = ("failed",)

    def __init__(
        self,
        dynamic: bool | None = None,
        mode: str | None = None,
        backend: str | Callable[..., Any] = "inductor",
        fullgraph: bool = False,
    ) -> None:
        self.dynamic = dynamic
        self.mode = mode
        self.backend = backend
        self.fullgraph = fullgraph
        self.failed = False
        """Whether the backend has failed, so that the models run as they are."""

    @hookimpl(updates=("model",))
    def setup_model(self, name: str, model: nn.Module) -> nn.Module:
        """Compile the module's calls."""
        from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend

        def run(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        if self.failed:
            return model
        if self.backend != "eager" and (lost := _lost_buffers(model)):
            warn(
                f"plugin {self.name!r}: model {name!r} is not compiled, since torch loses what is written to a float64 "
                f"buffer without dimensions on the CPU, as {lost[0]!r} is: make it float32, or of shape (1,)"
            )
            return model
        own_code = run.__code__.replace()  # what is compiled is kept by code object, up to a limit
        run = FunctionType(own_code, run.__globals__, run.__name__, None, run.__closure__)
        try:
            compiled = torch.compile(
                run, dynamic=self.dynamic, mode=self.mode, backend=self.backend, fullgraph=self.fullgraph
            )
        except InvalidBackend as error:
            self._fail(name, error)
            return model

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.failed:
                try:
                    outputs = compiled(*args, **kwargs)
                    return map_tensors(outputs, Tensor.clone) if self.mode in GRAPHED else outputs
                except BackendCompilerFailed as error:
                    self._fail(name, error)
            return run(*args, **kwargs)

        model._compiled_call_impl = call  # what Module.compile sets; that would skip modules of torch itself
        return model

    def _fail(self, model: str, error: Exception) -> None:
        self.failed = True
        hint = ""
        if isinstance(self.backend, str):
            hint = nearest(self.backend, [*torch.compiler.list_backends(), "eager", "aot_eager"])
        what = str(error).strip().splitlines()
        warn(
            f"plugin {self.name!r}: backend {self.backend!r} could not compile model {model!r}{hint}, so the models "
            f"run as they are: {' '.join(what[:2])}"
        )


def _lost_buffers(model: nn.Module) -> list[str]:
    """Buffers whose changes get lost in torch 2.13: it takes them for Python's numbers, and writes to a copy."""
    kinds = ((name, buffer.ndim, buffer.dtype, buffer.device.type) for name, buffer in model.named_buffers())
    return [name for name, *kind in kinds if kind == [0, torch.float64, "cpu"]]
