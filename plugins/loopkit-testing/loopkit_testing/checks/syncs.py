"""The check that no step waits for the device."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from loopkit_insight.syncs import TensorReads, is_torch, tensors
from torch import Tensor

from loopkit import Step
from loopkit.author import Target, hooks, plugin_name
from loopkit.hooks import hookimpl
from loopkit.learner import Learner
from loopkit.phases import Phase
from loopkit_testing.bits import tensors_in
from loopkit_testing.case import Case
from loopkit_testing.ends import watched_ends
from loopkit_testing.troubles import Disturbance

REPLACEMENTS = {name for name, hook in hooks().items() if hook.kind == "replacement"}
TIMES = 13
"""How often an epoch goes over the data."""


def no_device_sync(case: Case) -> list[str]:
    """No hook of a step waits for the device, except the ones that the plugin declares.

    Observed in hooks that take a step, in their contexts and in ``move_batch``: calls that read a tensor on the host
    (``TensorReads``). On the CPU these are free, so a plugin that reads only there, or must read, has a
    class attribute: ``syncs = ("backward_begin",)`` names the hooks in which it may, ``syncs = True`` is all of them.
    Not counted: the ``default`` of replacements, `loopkit.plugins.late.LateValues`, which does not wait on an
    accelerator, and what a hook has made on the host itself, such as a sample of a distribution. It is observed over a
    hundred steps, for reads that do not come in each.
    """
    plugins = case.plugins()
    watch = _SyncWatch(plugins[0])
    case.bench([*plugins, Disturbance(), watch]).train(times=TIMES)
    return [
        f"{hook} calls {call} at {place}, which waits for the device within a step. Keep the tensor and read it in "
        f'epoch_end; or, if it must be, set syncs = ("{hook}",) in the class'
        for hook, call, place in watch.found
    ]


class _SyncWatch(TensorReads):
    """Notes what one plugin reads on the host in hooks that belong to a step."""

    name = "~sync_watch"
    volatile = ("*",)

    def __init__(self, plugin: Any) -> None:
        super().__init__()
        self.plugin = plugin_name(plugin)
        syncs = getattr(plugin, "syncs", ())
        known = hooks()
        self._watched = {
            name
            for name, hook in known.items()
            if ("step" in hook.arguments or name == "move_batch") and syncs is not True and name not in syncs
        }
        self._hook = ""
        self.found: dict[tuple[str, str, str], None] = {}
        """Hook, call, and file and line."""
        self._origin = Origin()

    @hookimpl
    def instrument_call(self, learner: Learner, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        hook = target.hook
        if target.plugin != self.plugin or hook not in self._watched:
            return call

        def watched(*values: Any) -> Any:
            self._see(learner, values)
            given = [self._unwatched(value) for value in values] if hook in REPLACEMENTS else values
            with self._during(hook):
                result = call(*given)
            return (
                watched_ends(result, lambda: self._during(hook))
                if hook == "step_context" and result is not None
                else result
            )

        return watched

    def _see(self, learner: Learner, values: Iterable[Any]) -> None:
        """Note the tensors on the device: of the learner, and of the step or batch."""
        with torch._C.DisableTorchFunction():
            for model in learner.models.values():
                for tensor in (*model.parameters(), *model.buffers()):
                    self._origin.root([tensor] if tensor.grad is None else [tensor, tensor.grad])
            for value in values:
                self._origin.root(vars(value).values() if isinstance(value, Step) else [value])

    @contextmanager
    def _during(self, hook: str) -> Iterator[None]:
        outer, self._hook = self._hook, hook
        try:
            with self:
                yield
        finally:
            self._hook = outer

    def _unwatched(self, value: Any) -> Any:
        """The default step and the closure, which are not the plugin's doing."""
        if not callable(value) or isinstance(value, (Learner, Phase, Step, torch.optim.Optimizer)):
            return value

        def run(*args: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return value(*args)

        return run

    def made(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._origin.note(args, kwargs, result)

    def noticed(self, what: str, args: tuple[Any, ...], frame: FrameType) -> None:
        deep = is_torch(sys._getframe(2).f_code.co_filename)
        if not self._origin.on_host(args, unless_known=deep):
            self.found[self._hook, what, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] = None


class Origin:
    """Where tensors come from: from the learner's own ones, or made on the host within a hook."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], bool]] = {}

    def root(self, values: Iterable[Any]) -> None:
        """These lie on the device."""
        self._put(tensors_in(tuple(values)), device=True)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note the results of a function: they lie with its arguments, and on the host without arguments."""
        made = list(tensors_in(result))
        if not made:
            return
        given = [self._device(tensor) for tensor in tensors((*args, *kwargs.values()))]
        if None not in given or True in given:
            self._put(made, device=True in given or kwargs.get("device") is not None)

    def on_host(self, args: tuple[Any, ...], unless_known: bool) -> bool:
        """Whether all tensors here lie on the host; tensors of unknown origin count as such if ``unless_known``."""
        given = [self._device(tensor) for tensor in tensors(args)]
        return bool(given) and all(device is False or (device is None and unless_known) for device in given)

    def _device(self, tensor: Tensor) -> bool | None:
        ref, device = self._known.get(id(tensor), (None, None))
        return device if ref is not None and ref() is tensor else None

    def _put(self, made: Iterable[Tensor], device: bool) -> None:
        for tensor in made:
            self._known[id(tensor)] = (weakref.ref(tensor), device)
