"""Steps of one form in a row, in a phase that does not train."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from loopkit_whole_step.shapes import nothing

if TYPE_CHECKING:
    from loopkit import Epoch, Learner, Step
    from loopkit.metrics import Metric
    from loopkit_whole_step.record import Recording
    from loopkit_whole_step.shapes import Shape

LOOKED_AT = 8
"""So many steps of an epoch are looked at, if all that came before stay eager."""


class Replay:
    """Replays a graph while nothing but the batch changes from step to step.

    A small model's forward takes some 20 microseconds, so each look counts. The first replay of an epoch is made by
    `WholeStep`, and so is each one after a change.

    Args:
        shape: Counts the steps.
        recording: The recorded step, of a phase that does not train.
    """

    def __init__(self, shape: Shape, recording: Recording) -> None:
        self._shape = shape
        self._recording = recording
        self._loss_fn, self._samples = recording.given.sealed.loss_fn, recording.given.samples
        self._hooks = recording.given.cells.hooks
        slots = [slots[0] for slots in recording.given.cells.slots]
        self._slots = slots
        self._requires_grad = recording.constants.values[len(recording.given.cells.scalars) :]
        self._scalars = list(_by_holder(recording.given.cells.scalars, recording.constants.values))
        self._outputs = [(name, at.only) for name, at in recording.result.values.items() if at.kind == "output"]
        self._given = [(name, at.only) for name, at in recording.result.values.items() if at.kind == "batch"]
        self._made = [(name, at) for name, at in recording.result.values.items() if not at.kind]
        self._constants = {name: at.only for name, at in recording.result.values.items() if at.kind == "constant"}
        recording.result.mark(self._constants)
        self._sets = bool(recording.result.sets.get(""))
        self._epoch: Callable[[], Epoch | None] = nothing
        self._plan: Any = None
        self._index = -1
        self._form: Form = Form(())
        self._sums: list[tuple[dict[str, Any], str]] = []
        """Where the tensors of the metrics are."""
        self._tensors: list[Tensor] = []
        """The inputs of the graph, without the batch."""
        self._pointers: list[int] = []

    def is_of(self, recording: Recording) -> bool:
        """Whether it replays this recording."""
        return self._recording is recording

    @staticmethod
    def suits(recording: Recording, batch: Any) -> bool:
        """Whether a recording's steps can be replayed in a row."""
        return Form.suits(batch) and not recording.given.phase.training and not recording.votes

    def begin(self, epoch: Epoch, step: Step, inputs: Sequence[Tensor]) -> bool:
        """Continue after a step that was replayed with these inputs; returns whether that can be done."""
        batch: Any = step.batch
        sums = [_slot_of(metric, each) for metric, each in self._recording.inputs.tensors_of_metrics()]
        fixed = list(inputs[: len(inputs) - len(batch)])
        known = [slot for slot in sums if slot is not None]
        if len(known) < len(sums) or len(fixed) != len(self._slots) + len(sums):
            return False
        self._epoch, self._plan, self._index = ref(epoch), ref(step.frame.plan), step.index
        self._form = Form(batch)
        self._sums, self._tensors = known, fixed
        self._pointers = [each.data_ptr() for each in fixed]
        return True

    def takes(self, learner: Learner, step: Step, default: Callable[[], None]) -> bool:
        """Replay a step; returns whether that was done, or nothing was, since something has changed."""
        frame, batch = step.frame, step.batch
        if step.index != self._index + 1 or frame.epoch is not self._epoch() or frame.plan is not self._plan():
            return False
        if not self._form.fits(batch) or step.samples != self._samples or learner.loss_fn is not self._loss_fn:
            return False
        tensors = self._tensors
        if any(self._hooks) or torch.is_grad_enabled() or self._recording.graph.is_cast() or not self._stands(tensors):
            return False
        if [each.data_ptr() for each in tensors] != self._pointers:
            return False
        outputs = self._recording.graph.call(*tensors, *batch)
        self._index += 1
        self._shape.since += 1
        made = vars(step)
        for name, at in self._outputs:
            made[name] = outputs[at]
        for name, at in self._given:
            made[name] = batch[at]
        made.update(self._constants)
        for name, place in self._made:
            made[name] = place.made(outputs, batch)
        if self._sets:
            self._recording.result.give(outputs, batch)
        return True

    def _stands(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all that the graph holds for constant is so, and its inputs are where they were."""
        try:
            for get, holder, values in self._scalars:
                if get(holder) != values:
                    return False
            now = [holder[key] for holder, key in self._slots]
            requires_grad = [each.requires_grad for each in now]
            now += [holder[key] for holder, key in self._sums]
        except (KeyError, AttributeError):
            return False
        return requires_grad == self._requires_grad and all(map(operator.is_, now, tensors))


class Form:
    """The form of a batch that is a tuple or list of tensors.

    Args:
        batch: The batch.
    """

    def __init__(self, batch: Sequence[Tensor]) -> None:
        self._kind = batch.__class__
        self._leaves = [(each.shape, each.dtype, each.stride()) for each in batch]

    @staticmethod
    def suits(batch: Any) -> bool:
        """Whether a batch is a tuple or list of tensors."""
        return batch.__class__ in (tuple, list) and {*map(type, batch)} == {Tensor}

    def fits(self, batch: Any) -> bool:
        """Whether a batch has this form."""
        if batch.__class__ is not self._kind or len(batch) != len(self._leaves):
            return False
        for leaf, (shape, dtype, stride) in zip(batch, self._leaves, strict=True):
            if leaf.__class__ is not Tensor or leaf.shape != shape or leaf.dtype is not dtype:
                return False
            if leaf.stride() != stride:
                return False
        return True


class Same:
    """Eager steps whose batches have one form.

    Args:
        epoch: Their epoch.
        step: The first one.
        last: Whether no step of the phase is compiled, so that the phase can run the rest of the epoch by itself.
    """

    def __init__(self, epoch: Epoch, step: Step, last: bool) -> None:
        self._last = last
        self._epoch, self._cast = ref(epoch), torch.is_autocast_enabled("cpu")
        self._form = Form(step.batch) if Form.suits(step.batch) else None

    def takes(self, learner: Learner, step: Step, default: Callable[[], None]) -> bool:
        """Run a step of the same form; returns whether it was one."""
        if self._form is None or step.frame.epoch is not self._epoch() or not self._form.fits(step.batch):
            return False
        if torch.is_autocast_enabled("cpu") is not self._cast:
            return False
        default()
        if step.index >= LOOKED_AT and self._last:
            step.frame.leave_steps()
        return True


def in_a_row(
    replays: dict[str, Replay | Same], shape: Shape, epoch: Epoch, step: Step, inputs: Sequence[Tensor]
) -> None:
    """Let the steps after a replayed one be replayed with fewer looks, if they are like it.

    Args:
        replays: By phase, the steps like the last one.
        shape: The step's shape.
        epoch: Its epoch.
        step: The replayed step.
        inputs: The inputs of its graph.
    """
    recording = shape.recording
    if recording is None or not Replay.suits(recording, step.batch):
        return
    if shape.replay is None or not shape.replay.is_of(recording):
        shape.replay = Replay(shape, recording)
    if shape.replay.begin(epoch, step, inputs):
        replays[epoch.phase.name] = shape.replay


def _by_holder(slots: Sequence[tuple[Any, Any]], values: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """For each dict: what gets its constants, the dict, and the constants."""
    pairs = zip(slots, values, strict=False)
    for _, group in groupby(pairs, lambda pair: id(pair[0][0])):
        of_one = list(group)
        keys, constants = [key for (_, key), _ in of_one], tuple(value for _, value in of_one)
        yield operator.itemgetter(*keys), of_one[0][0][0], constants if len(keys) > 1 else constants[0]


def _slot_of(metric: Metric, value: Tensor) -> tuple[dict[str, Any], str] | None:
    """The place of a metric's tensor, in the metric or in one that it is made of."""
    for values in (vars(metric), *(vars(each) for each in vars(metric).values() if hasattr(each, "__dict__"))):
        for key, each in values.items():
            if each is value:
                return values, key
    return None
