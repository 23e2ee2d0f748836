"""Steps in parts, where a whole batch does not fit on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from loopkit.author import Shown, checks, describe, generators, is_sum, map_tensors, say, sharded, warn
from loopkit.errors import PhaseError, PluginError
from loopkit.events import ForwardBegin, LossBegin
from loopkit.hooks import hookimpl
from loopkit.phases import TrainingPhase

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase


class MicroBatch(Shown):
    """Take each training step in parts of at most so many samples; the update is the same as for the whole batch.

    The gradients of the parts are added up, each with its share of the samples, for a loss that is a mean over the
    samples, or a sum. ``forward_begin`` to ``backward_end`` come once for each part. From then on ``step.outputs`` and
    ``step.loss`` belong to the whole batch, without their graph.

    Args:
        size: Samples of a part. ``"auto"``: as many as fit. After an out-of-memory error in forward or backward the
            size is halved and the step is taken again, until it fits. The state keeps what has fitted.
        name: The plugin's name.

    A repeated step begins with the gradients, buffers and generators of the first attempt, so it is bitwise the step of
    ``MicroBatch(n)`` for the size that fits. Values that a model keeps elsewhere are not restored. Batch norm and
    dropout see a part at a time, which is not the same step as with the whole batch: a warning says so, once.

    Each process takes parts of the same size: with ``"auto"`` and `DDP` the processes compare, once in each step,
    whether it has fitted. `DDP` averages at ``update_begin`` then.

    Raises:
        PluginError: The size is no count; a training phase defines its own ``step``; where parameters are sharded; or
            ``"auto"`` of several processes whose batch norms are synced.
        PhaseError: A batch cannot be split, outputs cannot be joined, or the phase sets ``step.weight``.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[ToDevice(), MicroBatch("auto")])
    """

    provides = "micro_batch"
    reads = ("batch", "buffers", "params")

    def __init__(self, size: int | str = "auto", name: str = "micro_batch") -> None:
        if size != "auto":
            checks.whole("MicroBatch", also="'auto'", size=size)
        self.size = size
        self.name = name
        self._fits = size if isinstance(size, int) else None
        """Samples of a part; None: all."""
        self._share = 1.0
        """The share of the part in its step."""
        self._warned = False

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase) -> None:
        """Raise for a phase whose steps have no parts."""
        if phase.training and type(phase).step is not TrainingPhase.step:
            raise PluginError(
                f"plugin {self.name!r} takes the steps of TrainingPhase in parts, and {type(phase).__name__} has "
                f"its own step: give smaller batches and Learner(accumulate=...)"
            )
        if any(sharded.is_sharded(p) for model in learner.models.values() for p in model.parameters()):
            raise PluginError(
                f"plugin {self.name!r}: the parameters are sharded, and where memory runs out in one process, the "
                f"others would wait for it in a forward: give Learner(accumulate=...)"
            )
        if self.size == "auto" and phase.training and learner.world.size > 1:
            self._refuse_synced(learner, phase)

    @hookimpl(phase=TrainingPhase, updates=("inputs", "targets", "outputs", "loss"))
    def take_step(self, learner: Learner, phase: TrainingPhase, epoch: Epoch, step: Step) -> None:
        """The step of the phase, in parts."""
        if self.size == "auto":
            self._fit(learner, phase, epoch, step)
        else:
            self._take(learner, phase, step)
        step.update()

    @hookimpl(phase=TrainingPhase)
    def backward_begin(self, step: Step) -> None:
        """Let the part count by its samples."""
        if self._share != 1.0:
            step.seed = step.seed * self._share

    def _refuse_synced(self, learner: Learner, phase: Phase) -> None:
        """Raise for layers in whose forward the processes wait for each other."""
        for name, model in learner.models.items():
            for path, module in model.named_modules():
                if isinstance(module, nn.SyncBatchNorm) and module.training:
                    raise PluginError(
                        f"plugin {self.name!r}, phase {phase.name!r}: layer {path!r} of model {name!r} is a "
                        f"SyncBatchNorm. Where memory runs out in one process, the others would wait for it in that "
                        f"layer: give MicroBatch(n) instead of MicroBatch('auto'), with an n that fits"
                    )

    def _fit(self, learner: Learner, phase: TrainingPhase, epoch: Epoch, step: Step) -> None:
        """Take the parts, and again in smaller ones until they fit in each process."""
        start = _Start(learner, step)
        together = learner.world.in_step and epoch.agrees
        while True:
            size = min(self._fits or step.samples, step.samples)
            fitted = self._try(learner, phase, step, size)
            if together:
                failed, size = (int(number) for number in learner.world.highest(not fitted, size))
                fitted = not failed
            if fitted:
                return
            self._fits = max(size // 2, 1)
            start.restore(step)
            if learner.world.rank == 0:
                say(f"a part of {size} samples does not fit in memory: from now on they are of {self._fits}")

    def _try(self, learner: Learner, phase: TrainingPhase, step: Step, size: int) -> bool:
        try:
            self._take(learner, phase, step)
        except torch.OutOfMemoryError:
            if size <= 1:
                raise
            return False
        return True

    def _take(self, learner: Learner, phase: TrainingPhase, step: Step) -> None:
        """Forward and backward of each part; afterwards the step has what the whole batch would have."""
        size = self._fits or step.samples
        if step.samples > size:
            self._warn(learner, size)
        summed, weight = is_sum(learner.loss_fn), step.weight
        taken: dict[str, list[Any]] = {"inputs": [], "targets": [], "outputs": []}
        losses: list[Tensor] = []
        try:
            for part, samples in _parts(step.batch, step.samples, size):
                self._share = 1.0 if summed else samples / step.samples
                step.inputs, step.targets = phase.unpack(part)
                step.emit(ForwardBegin)
                step.outputs = phase.forward(learner, step.inputs)
                step.emit(LossBegin)
                step.loss = phase.loss(learner, step.outputs, step.targets)
                if step.weight is not weight:
                    raise PhaseError(
                        f"phase {phase.name!r} sets step.weight, and plugin {self.name!r} weighs by samples: give "
                        f"smaller batches and Learner(accumulate=...)"
                    )
                step.backward(step.loss)
                if samples < step.samples:
                    losses.append(step.loss.detach() * self._share)
                    for name, values in taken.items():
                        values.append(map_tensors(getattr(step, name), Tensor.detach))
        finally:
            self._share = 1.0
        if losses:
            step.loss = torch.stack(losses).sum()
            for name, values in taken.items():
                setattr(step, name, _joined(values, name))

    def _warn(self, learner: Learner, size: int) -> None:
        if self._warned:
            return
        self._warned = True
        found = {
            type(module).__name__
            for model in learner.models.values()
            for module in model.modules()
            if module.training and (isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p))
        }
        if found and learner.world.rank == 0:
            warn(
                f"plugin {self.name!r} takes batches in parts of {size}, and the model has "
                f"{' and '.join(sorted(found))}: it is not the same step as with the whole batch"
            )

    def state_dict(self) -> dict[str, Any]:
        """The size of a part that has fitted into memory."""
        return {"fits": self._fits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the size that has fitted."""
        if self.size == "auto":
            self._fits = state["fits"]


class _Start:
    """A copy, from the begin of a step, of all that it changes before its update."""

    def __init__(self, learner: Learner, step: Step) -> None:
        opened = [state.name for state in step.window_state if state.steps]
        models = learner.models.with_extras().values()
        self._params = [p for model in models for p in model.parameters()]
        self._grads = [None if p.grad is None or not opened else p.grad.clone() for p in self._params]
        self._buffers = [(b, b.clone()) for model in models for b in model.buffers()]
        self._generators = generators.save()

    def restore(self, step: Step) -> None:
        """Put it back, and clear the values that the attempt left on the step."""
        for name in ("inputs", "targets", "outputs", "loss", "total_loss"):
            vars(step).pop(name, None)
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        torch.clear_autocast_cache()
        generators.restore(self._generators)


def _parts(batch: Any, samples: int, size: int) -> Iterator[tuple[Any, int]]:
    """The parts of a batch, and how many samples each has."""
    if samples <= size:
        yield batch, samples
        return

    def checked(tensor: Tensor) -> Tensor:
        if not tensor.ndim or len(tensor) != samples:
            raise PhaseError(f"a batch of {samples} samples cannot be split: it holds {describe(tensor)}")
        return tensor

    map_tensors(batch, checked)
    for first in range(0, samples, size):
        end = min(first + size, samples)
        yield map_tensors(batch, lambda tensor, part=slice(first, end): tensor[part]), end - first  # type: ignore[misc]


def _joined(values: Sequence[Any], what: str) -> Any:
    """Join the values of the parts into the value of the whole batch."""
    one = values[0]
    if isinstance(one, Tensor) and one.ndim:
        return torch.cat(list(values))
    if one is None:
        return None
    if isinstance(one, Mapping):
        return {key: _joined([value[key] for value in values], what) for key in one}
    if isinstance(one, (tuple, list)):
        items = [_joined(list(item), what) for item in zip(*values, strict=True)]
        return type(one)(*items) if hasattr(one, "_fields") else type(one)(items)
    raise PhaseError(
        f"step.{what} is {describe(one)}, and MicroBatch cannot join it over the parts of a batch: it joins tensors "
        f"with samples, in tuples, lists and mappings"
    )
