"""Forwards beside the steps of a fit: predictions, and forwards of a hook's own, which leave the run as it was."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from loopkit.base import devices, generators
from loopkit.base.batches import move
from loopkit.engine.life.epoch import Epoch
from loopkit.engine.life.sources import Source
from loopkit.engine.step.step import Step
from loopkit.errors import EmptyDataError, PhaseError

if TYPE_CHECKING:
    from loopkit.engine.compile.plan import Implementation
    from loopkit.engine.compile.registry import Registry
    from loopkit.engine.life.epochs import Epochs
    from loopkit.engine.life.models import Models
    from loopkit.engine.life.requests import Requests
    from loopkit.engine.life.running import Running
    from loopkit.phases import Phase

PLACE = ("params", "buffers", "weights")
"""States that a plugin updates for an epoch by putting other weights in place."""

Outputs = Generator[Any, None, int | None]
"""Outputs of batches, and at the end how many batches came; None if the epoch was left before its last one."""


class Forwards:
    """Runs phases for their outputs, and lets hooks run models of the learner.

    Args:
        models: The models.
        registry: The plugins.
        running: The fit and the epochs that run now.
        epochs: Makes epochs.
        requests: Hold the processes that share the data.
    """

    def __init__(
        self, models: Models, registry: Registry, running: Running, epochs: Epochs, requests: Requests
    ) -> None:
        self._models = models
        self._registry = registry
        self._running = running
        self._epochs = epochs
        self._requests = requests

    def predict(self, phase: Phase, data: Any, place: torch.device | None, everywhere: bool) -> Any:
        """Run the phase over the data and return its outputs; see `Learner.predict`."""
        if isinstance(data, Mapping) and data and not any(isinstance(each, Tensor) for each in data.values()):
            return {name: self.predict(phase, each, place, everywhere) for name, each in data.items()}
        source = Source(self._registry, phase, [data] if isinstance(data, Tensor) else data)
        if source.made:
            source = Source(self._registry, phase, source.given())
        outputs: list[Any] = []
        with self._aside(), self._epochs.next(phase, source) as epoch:
            epoch.loop.run(_collecting(epoch, outputs, place))
            epoch.check_count(True)
        if self._requests.world.size > 1 and source.epoch()[0] is not source.given:
            from loopkit.data.shards import gather

            outputs = gather(self._requests.world, source.given, outputs, everywhere)
            if self._requests.world.rank > 0 and not everywhere:
                return None
        return _concatenate(outputs)

    def predict_batches(self, phase: Phase, data: Any, indices: bool = False) -> Outputs:
        """Run the phase over the data and yield its outputs by batch; see `Learner.predict_batches`."""
        return self._batches_of(Source(self._registry, phase, data), indices)

    def _batches_of(self, source: Source, indices: bool) -> Outputs:
        """Yield the outputs; return how many batches came, None if the epoch was left before its last one."""
        came = 0
        with self._aside(), self._epochs.next(source.phase, source) as epoch:
            for batch in epoch.batches():
                came += 1
                step = epoch.step(batch)
                if "outputs" in vars(step):
                    epoch.contexts.restore_modes()
                    yield (step.indices, step.outputs) if indices else step.outputs
                    epoch.contexts.set_modes()
            epoch.check_count(True)
            return came
        return None

    def _aside(self) -> AbstractContextManager[None]:
        """In a loop of the user's, a prediction is no epoch of a round, which a resume would skip: it is made again."""
        in_rounds = self._running.fit is not None and not self._running.fit.position.by_fit
        return self._running.aside() if in_rounds else nullcontext()

    @contextmanager
    def inference(self, phase: Phase) -> Iterator[None]:
        """Inside, the models are as in the steps of a phase that does not train; afterwards all is as it was."""
        models = self._models
        with ExitStack() as stack:
            stack.enter_context(models.casts.unobserved())
            epoch = self._epochs.make(phase)
            epoch.depth = len(self._running.epochs)
            epoch.loop.replan()
            if not models.weights.by and all(each.phase is not phase for each in self._running.epochs):
                self._put_weights(phase, epoch, stack)
            stack.callback(models.restore_module_modes, models.set_module_modes(False))
            stack.enter_context(models.evaluated(lambda: True))
            stack.enter_context(torch.no_grad())
            self._enter_step(phase, epoch, stack)
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, a forward is none of the run's: its draws, counts and casts are undone."""
        models = self._models
        with ExitStack() as stack:
            stack.enter_context(models.casts.unobserved())
            stack.enter_context(self._running.aside())
            stack.callback(setattr, models, "aside", models.aside)
            models.aside = True
            for plugin in self._registry.plugins.values():
                if hasattr(plugin, "unsynced"):
                    stack.enter_context(plugin.unsynced())
            modules = self._modules()
            stack.callback(models.restore_module_modes, [(module, module.training) for module in modules])
            _keep_generators(modules, stack)
            _lend_buffers(modules, stack)
            _cast_apart(stack)
            yield

    def _put_weights(self, phase: Phase, epoch: Epoch, stack: ExitStack) -> None:
        """Put the weights in place that stand there in epochs of the phase."""
        registry = self._registry
        modes = self._models.modes
        if modes.serves and not modes.evaluated:
            stack.enter_context(modes.in_place(self._models.weights.replaced, stays=False))
        found = {impl.entry.plugin: impl for impl in registry.implementations("epoch_context", phase)}
        for placed in registry.plan(phase).order["epoch_context"]:
            impl = found[placed.entry.plugin]
            if _puts_weights(impl) and (context := registry.call(impl, phase=phase, epoch=epoch)) is not None:
                stack.enter_context(context)

    def _enter_step(self, phase: Phase, epoch: Epoch, stack: ExitStack) -> None:
        """Enter the contexts of a step, such as autocast, without plugins that only look on."""
        step = Step(epoch.loop, 0, None, 1)
        plan = self._registry.plan(phase)
        for make, placed in zip(plan.step_contexts, plan.order["step_context"], strict=True):
            looks_on = placed.entry.provides == "observer"
            if not looks_on and (context := make(step)) is not None:
                stack.enter_context(context)

    def _modules(self) -> list[nn.Module]:
        """Every module of the models, the loss function, phases and plugins, once."""
        tops = self._models.with_extras().values()
        return list(dict.fromkeys(module for top in tops for module in top.modules()))


def _collecting(epoch: Epoch, outputs: list[Any], place: torch.device | None) -> Iterator[Any]:
    """The batches of an epoch; when the next one is asked for, the outputs of the last step are kept, at ``place``."""
    loop = epoch.loop
    on_cpu = place == torch.device("cpu")
    for batch in epoch.batches():
        yield batch
        if (made := vars(loop.current).get("outputs", outputs)) is not outputs:
            stays = on_cpu and made.__class__ is Tensor and made.is_cpu
            outputs.append(made if place is None or stays else move(made, place))  # host sync: wanted there


def _concatenate(outputs: list[Any]) -> Any:
    """Join outputs of batches: tensors along the first dimension, tuples and mappings part by part."""
    if not outputs:
        raise EmptyDataError("predict: the phase set no step.outputs")
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.ndim else torch.stack(outputs)
    if isinstance(first, Mapping):
        return {key: _concatenate([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        joined = [_concatenate(list(part)) for part in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    raise PhaseError(f"predict cannot concatenate outputs of type {type(first).__name__}: use predict_batches")


def _puts_weights(impl: Implementation) -> bool:
    return any(state.partition(".")[0] in PLACE for state in impl.entry.updates)


def _keep_generators(modules: list[nn.Module], stack: ExitStack) -> None:
    """Restore the global generators and the modules' generators in the end."""
    stack.callback(generators.restore, generators.save())
    own = {id(each): each for module in modules for each in vars(module).values() if generators.is_generator(each)}
    for generator in own.values():
        stack.callback(generators.put_state, generator, generators.state_of(generator))


def _lend_buffers(modules: list[nn.Module], stack: ExitStack) -> None:
    """Let forwards change copies of the buffers, so that the buffers do not move, nor their versions."""
    copies: dict[int, Tensor] = {}
    for module in modules:
        if not module._buffers:
            continue
        stack.callback(module._buffers.update, dict(module._buffers))
        stack.callback(module._buffers.clear)  # a buffer that the forward has made goes, too
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                module._buffers[name] = copies[id(buffer)]


def _cast_apart(stack: ExitStack) -> None:
    """Let autocast, where it is on, cast weights anew, and keep the casts of the step around for that step."""
    for device in devices.types():
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
