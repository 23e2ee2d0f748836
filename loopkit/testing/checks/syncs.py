"""The check that no step waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from loopkit.engine.step import Step
from loopkit.hooks import Target, hookimpl, hooks
from loopkit.learner import Learner
from loopkit.phases import Phase
from loopkit.plugin import plugin_name
from loopkit.syncs import TensorReads
from loopkit.testing.case import Case
from loopkit.testing.troubles import Disturbance

TIMES = 13
"""How often an epoch goes over the data."""


def no_device_sync(case: Case) -> list[str]:
    """Nothing that belongs to a step waits for the device, but what the plugin declares.

    Observed in hooks that take a step, in their contexts and in ``move_batch``: calls that read a tensor on the host
    (`loopkit.syncs.TensorReads`). On the CPU these cost nothing, so a plugin that reads there alone, or must read, says
    so with a class attribute: ``syncs = ("backward_begin",)`` names the hooks in which it may, ``syncs = True`` is all
    of them. Not counted: the ``default`` of ``optimizer_step``, and `loopkit.plugins.late.LateValues`, which does not
    wait on an accelerator. It is observed over a hundred steps, for reads that do not come in each.
    """
    plugins = case.plugins()
    watch = _SyncWatch(plugins[0])
    case.bench([*plugins, Disturbance(), watch]).train(times=TIMES)
    return [
        f"{hook} calls {call}, which waits for the device within a step. Keep the tensor and read it in epoch_end; or, "
        f'if it must be, say syncs = ("{hook}",) in the class'
        for hook, call in watch.found
    ]


class _SyncWatch(TensorReads):
    """Notes what one plugin reads on the host in hooks that belong to a step."""

    name = "~sync_watch"

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
        self.found: dict[tuple[str, str], None] = {}

    @hookimpl
    def instrument_call(self, target: Target, call: Callable[..., Any]) -> Callable[..., Any]:
        hook = target.hook
        if target.plugin != self.plugin or hook not in self._watched:
            return call

        def watched(*values: Any) -> Any:
            given = [self._unwatched(value) for value in values] if hook == "optimizer_step" else values
            with self._during(hook):
                result = call(*given)
            return self._context(hook, result) if hook == "step_context" and result is not None else result

        return watched

    @contextmanager
    def _during(self, hook: str) -> Iterator[None]:
        outer, self._hook = self._hook, hook
        try:
            with self:
                yield
        finally:
            self._hook = outer

    @contextmanager
    def _context(self, hook: str, context: Any) -> Iterator[None]:
        with self._during(hook):
            context.__enter__()
        try:
            yield
        except BaseException as error:
            with self._during(hook):
                context.__exit__(type(error), error, error.__traceback__)
            raise
        with self._during(hook):
            context.__exit__(None, None, None)

    def _unwatched(self, value: Any) -> Any:
        """The default step and the closure, which are not the plugin's doing."""
        if not callable(value) or isinstance(value, (Learner, Phase, Step, torch.optim.Optimizer)):
            return value

        def run(*args: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return value(*args)

        return run

    def noticed(self, what: str, args: tuple[Any, ...], frame: FrameType) -> None:
        self.found[self._hook, what] = None
