"""Metrics: numbers accumulated over an epoch, on the device, and read once.

A metric is any object with ``update(outputs, targets)``, ``compute()`` and ``reset()``; torchmetrics objects are. Where
several processes train together, each takes in a part of the batches, and your own metric also needs
``state_dict()`` and ``merge(states)``; see `Metric.merge`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from loopkit.base import checks, devices
from loopkit.base.batches import count_samples, describe, leaves
from loopkit.base.options import Shown
from loopkit.base.words import takes
from loopkit.errors import PluginError

__all__ = [
    "F1",
    "Accuracy",
    "BinaryAccuracy",
    "ClassCounts",
    "FBeta",
    "FunctionMetric",
    "Loss",
    "Mean",
    "Metric",
    "Precision",
    "Recall",
]
__dir__ = __all__.copy


@runtime_checkable
class MetricLike(Protocol):
    """A metric that ``loopkit.plugins.Metrics`` accepts."""

    def update(self, outputs: Any, targets: Any, /) -> Any:
        """Take in one batch."""

    def compute(self) -> Any:
        """The value over all batches since `reset`: a number, a scalar tensor, or a mapping of them."""

    def reset(self) -> Any:
        """Forget everything."""


def wide(value: Tensor) -> Tensor:
    """The value in float64, so that sums over an epoch keep their digits; in float32 where a device has no float64."""
    return value.detach().to(devices.exact(value.device))


def added(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum, key by key and in this order, of states that hold counts and sums; None counts as 0.

    >>> added([{"correct": 3, "count": 4}, {"correct": None, "count": 0}, {"correct": 1, "count": 2}])
    {'correct': 4, 'count': 6}
    """
    values = {key: [state[key] for state in states if state[key] is not None] for key in states[0]}
    return {key: reduce(operator.add, found) if found else None for key, found in values.items()}


class Metric(Shown):
    """Base of loopkit's own metrics: the attributes that `reset` sets are its state."""

    name = "metric"
    labels: Sequence[str] | None = None
    """The names of the numbers, where it is several; None: they are counted, from 0."""
    several = False
    """Whether it may be several numbers."""
    higher_is_better: bool | None = None
    """Whether higher values are better; None if it is unknown."""

    def __init__(self) -> None:
        options = set(vars(self))
        self.reset()
        self._set_by_reset = tuple(key for key in vars(self) if key not in options)

    @property
    def _state(self) -> tuple[str, ...]:
        """The attributes that `reset` sets.

        Raises:
            PluginError: The class's ``__init__`` does not call `Metric`'s, which finds them.
        """
        found: tuple[str, ...] | None = vars(self).get("_set_by_reset")
        if found is None:
            made = type(self).__name__
            raise PluginError(
                f"metric {made}: {made}.__init__ does not call super().__init__(), which finds the attributes that "
                f"reset() sets, the metric's state: call it at the end of __init__, in the place of self.reset()"
            )
        return found

    def reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    def compute(self) -> Tensor | float:
        """The value so far, without waiting for the device; nan before the first batch."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """Whether no batch was taken in since `reset`."""
        raise NotImplementedError

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor] | None:
        """The state as tensors, by the keys of `state_dict`; from now on its numbers and None become tensors.

        A plugin that records steps resumes from them, and changes them in place. A class has it if its ``update`` only
        makes tensors of tensors. None: ``update`` has to be called.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """A copy of the accumulated state."""
        values = {key: getattr(self, key) for key in self._state}
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        for key in self._state:
            value = state[key]
            setattr(self, key, value.clone() if isinstance(value, Tensor) else value)

    def merge(self, states: Sequence[dict[str, Any]]) -> None:
        """Resume from the states of several of this metric, each from other batches, as if one had seen them all.

        A class whose ``reset`` sets another state needs its own ``merge``; for counts and sums, it is
        ``self.load_state_dict(added(states))``.

        Args:
            states: Their ``state_dict``, by rank, also empty ones. Tensors are in the host's
                memory.
        """
        raise NotImplementedError

    def to(self, device: torch.device) -> None:
        """Move what has been accumulated, such as a state that was loaded."""
        for key in self._state:
            value = getattr(self, key)
            if isinstance(value, Tensor):
                setattr(self, key, value.to(device))


def as_tensor(value: Tensor | float | None, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A number as a tensor, 0 for None; a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.full((), value or 0, dtype=dtype, device=device)


def _tensor(value: Any) -> Any:
    """A number that stands for a tensor as that tensor."""
    return torch.full((), value, dtype=torch.float64, device="cpu") if isinstance(value, float) else value


WHOLE = 1 << 29
"""A whole number below it, times a number of float32, is exact in float64."""


class Mean(Metric):
    """Mean over an epoch of a number that the phase puts on its steps, weighted by ``step.weight``.

    Args:
        attribute: The step's attribute: a scalar tensor or a number, such as ``"critic_loss"``.
    """

    def __init__(self, attribute: str) -> None:
        self.attribute = self.name = attribute
        self.sums = False
        """Whether the values are sums, which are not multiplied by the weights again."""
        super().__init__()

    def reset(self) -> None:  # noqa: D102
        self.total: Tensor | float | None = None
        """A number while all values were float32 on the host and their weights whole: it has the bits of a tensor."""
        self.weight: Tensor | float = 0.0
        self.only: Tensor | float | None = None
        """The value, while there is only one: the mean has its very bits."""

    def add(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add one value.

        Raises:
            ValueError: It is a tensor of several elements.
        """
        if (
            value.__class__ is Tensor
            and weight.__class__ is int
            and (total := self.total).__class__ is not Tensor
            and value.dtype is torch.float32
            and value.is_cpu
            and not value.ndim
            and weight < WHOLE
        ):
            number = value.item()
            self.only = number if total is None and not self.sums else None
            self.total = (total or 0.0) + (number if self.sums else number * weight)
            self.weight += weight
            return
        self._add_wide(self._scalar(value), weight)

    def _scalar(self, value: Tensor | float) -> Tensor:
        """The value as a tensor without dimensions and without a graph."""
        if not isinstance(value, Tensor):
            return torch.tensor(float(value), dtype=torch.float64)
        if value.ndim and value.numel() != 1:
            raise ValueError(f"{self.name} has shape {tuple(value.shape)}: its mean takes one number for each step")
        value = value.reshape(()) if value.ndim else value
        return value.detach() if value.requires_grad else value

    def _add_wide(self, value: Tensor, weight: Tensor | float) -> None:
        """Add a value on its device, in the wider dtype of the two."""
        total = _tensor(self.total)
        self.only = None
        if total is None:
            first = wide(value)
            total = torch.zeros_like(first)
            self.only = None if self.sums or isinstance(weight, Tensor) else first
        weight = wide(weight) if isinstance(weight, Tensor) else weight
        if self.sums:
            self.total = total + value
        elif isinstance(weight, Tensor):
            self.total = total + value * weight
        else:
            self.total = torch.add(total, value, alpha=weight)
        self.weight = self.weight + weight

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:  # noqa: D102
        dtype = devices.exact(torch.device(device))
        total = as_tensor(self.total, dtype, device)
        weight = as_tensor(self.weight, dtype, device)
        self.total = total
        self.weight = weight
        self.only = None
        return {"total": total, "weight": weight}

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        state = super().state_dict()
        state |= {"total": _tensor(state["total"]), "only": _tensor(state["only"])}
        return {key: value for key, value in state.items() if key != "only" or value is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        super().load_state_dict({"only": None, **state})

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        full = [state for state in states if state["total"] is not None]
        only = full[0].get("only") if len(full) == 1 else None
        sums = added([{key: state[key] for key in ("total", "weight")} for state in states])
        self.load_state_dict({**sums, "only": only})

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return self.total is None

    def compute(self) -> Tensor | float:  # noqa: D102
        if self.total is None:
            return math.nan
        mean: Tensor = _tensor(self.total) / self.weight if self.only is None else _tensor(self.only)
        return mean


class Loss(Mean):
    """Mean loss over an epoch, weighted by ``step.weight``: right for an uneven last batch.

    Of a loss that is a sum (see `loopkit.losses.summed`), the sums are added, and divided by the weights.
    """

    def __init__(self) -> None:
        super().__init__("loss")


class FunctionMetric(Metric):
    """Mean over an epoch of ``function(outputs, targets)``.

    A scalar counts with the weight of its step, the number of its samples by default. A tensor has one value for each
    sample, or for each element of the targets, such as a token; these count one by one.

    Args:
        function: Its name is the metric's.
        name: Another name.
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        super().__init__()

    def reset(self) -> None:  # noqa: D102
        self.mean = Mean(self.name)

    def update(self, outputs: Any, targets: Any, weight: Tensor | float | None = None) -> None:
        """Call the function on one batch.

        Raises:
            PluginError: It returned something else than a number, or a tensor of one value for each sample or target.
        """
        value = self.function(outputs, targets)
        if isinstance(value, Tensor) and value.ndim:
            self._check_size(value, outputs, targets)
            self.mean.add(wide(value).mean(), value.numel())
            return
        try:
            number = value if isinstance(value, Tensor) else math.ldexp(value, 0)  # float(value), but of no text
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"it returned {describe(value)}: the function of a metric returns one number, or a tensor with one for "
                f"each sample. Give several numbers as several functions, or an object with update, compute and reset"
            ) from error
        self.mean.add(number, count_samples(outputs) if weight is None else weight)

    def _check_size(self, value: Tensor, outputs: Any, targets: Any) -> None:
        """Raise for several values for each sample, such as one for each class: their mean is meaningless."""
        samples = count_samples(outputs)
        many = value.numel()
        if many in (1, samples) or any(isinstance(each, Tensor) and each.numel() == many for each in leaves(targets)):
            return
        raise PluginError(
            f"metric {self.name!r} returned {describe(value)} for a batch of {samples}: the function of a metric "
            f"returns one number, or a tensor with one for each sample. Take the mean over the other dimensions, such "
            f"as value.mean(1), or give several numbers as several functions"
        )

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return self.mean.is_empty

    def compute(self) -> Tensor | float:  # noqa: D102
        return self.mean.compute()

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:  # noqa: D102
        return self.mean.tensors(device)

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return self.mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.mean.load_state_dict(state)

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.mean.merge(states)

    def to(self, device: torch.device) -> None:  # noqa: D102
        self.mean.to(device)


def _fits(axis: int | None, dimensions: int, last: bool, second: bool) -> bool:
    """Whether the classes can be on this axis, where the shapes allow the last one or the second."""
    if axis is None:
        return last or second
    return (last and axis in (-1, dimensions - 1)) or (second and axis == 1)


def classes_axis(
    outputs: Tensor, targets: Tensor, axis: int | None = None, binary: str = "BinaryAccuracy(from_logits=True)"
) -> int:
    """The axis of ``outputs`` that holds the classes: the last, or the second as in ``cross_entropy``.

    Raises:
        ValueError: The shapes are neither ``(..., classes)`` and ``(...)`` nor ``(n, classes, ...)`` and ``(n, ...)``,
            or are both, without ``axis``; or there is one class only.
        PluginError: Either is no tensor, such as a pair made by a custom phase.
    """
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        raise PluginError(
            f"outputs are {describe(outputs)} and targets {describe(targets)}: a metric of classes compares two "
            f"tensors; let the phase put these on step.outputs and step.targets, or give Metrics(..., phase='val')"
        )
    if outputs.ndim == 2 and targets.ndim == 1 and axis in (None, 1, -1):  # by far the most frequent
        samples, classes = outputs.shape
        if classes > 1 and samples == targets.shape[0]:
            return 1
    found = _fitting_axis(outputs, targets, axis, binary)
    if outputs.shape[found] == 1:
        raise ValueError(
            f"{_shapes(outputs, targets)}, so there is one class, and each prediction is right; for one logit a "
            f"sample: {binary}"
        )
    return found


def _shapes(outputs: Tensor, targets: Tensor) -> str:
    return f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}"


def _fitting_axis(outputs: Tensor, targets: Tensor, axis: int | None, binary: str) -> int:
    """The axis given, if it fits the shapes, or the only one that does."""
    last = outputs.shape[:-1] == targets.shape
    second = outputs.ndim > 2 and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    if axis is None and last and second:
        raise ValueError(
            f"{_shapes(outputs, targets)}: the classes could be the last axis or the second; choose axis=-1 or axis=1"
        )
    if not _fits(axis, outputs.ndim, last, second):
        hint = f"; for one logit a sample: {binary}" if outputs.shape == targets.shape else ""
        raise ValueError(
            f"{_shapes(outputs, targets)}; class indices are compared with outputs of shape (..., classes), or "
            f"(batch, classes, ...){hint}"
        )
    if axis is not None:
        return axis
    return -1 if last else 1


def more(counted: Tensor | int | None, true: Tensor) -> Tensor | int:
    """A count and how many of these are true, on the host as a number; a sum of them takes twice as long there."""
    found = true.count_nonzero()
    number: Any = found.item() if found.__class__ is Tensor and found.is_cpu else found
    return number if counted is None else counted + number  # type: ignore[no-any-return]


class _Share(Metric):
    """The base of metrics that count the correct ones of all targets."""

    name = "accuracy"
    higher_is_better = True

    def reset(self) -> None:
        self.correct: Tensor | int | None = None
        self.count: Tensor | int = 0

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        self.correct, self.count = (as_tensor(each, torch.long, device) for each in (self.correct, self.count))
        return {"correct": self.correct, "count": self.count}

    def merge(self, states: Sequence[dict[str, Any]]) -> None:
        self.load_state_dict(added(states))

    @property
    def is_empty(self) -> bool:
        return self.correct is None

    def compute(self) -> Tensor | float:
        return math.nan if self.correct is None else wide(as_tensor(self.correct, torch.long, "cpu")) / self.count


class Accuracy(_Share):
    """Share of targets that are the class with the highest output.

    Args:
        ignore_index: Targets of this value do not count.
        axis: The axis of the classes, -1 or 1; needed only where the shapes leave it open.

    Shapes: outputs ``(..., classes)`` or ``(batch, classes, ...)``, targets class indices without that axis.
    """

    def __init__(self, *, ignore_index: int | None = None, axis: int | None = None) -> None:
        self.ignore_index = ignore_index
        self.axis = axis
        super().__init__()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count one batch."""
        correct = outputs.argmax(classes_axis(outputs, targets, self.axis)).eq(targets)
        if self.ignore_index is None:
            self.count = self.count + targets.numel()
        else:
            counted = targets.ne(self.ignore_index)
            correct = correct & counted
            self.count = more(self.count, counted)
        self.correct = more(self.correct, correct)


def limit_of(threshold: float, from_logits: bool) -> float:
    """The output above which a label is predicted.

    Args:
        threshold: A probability, between 0 and 1.
        from_logits: Whether outputs are logits; else they are probabilities.

    Raises:
        ValueError: The threshold is not between 0 and 1.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"threshold is {threshold}: it is a probability between 0 and 1")
    return math.log(threshold / (1 - threshold)) if from_logits else threshold


def like_labels(outputs: Tensor, targets: Tensor, instead: str) -> Tensor:
    """Outputs in the shape of their targets, which differs from it at most by axes of length 1.

    Raises:
        ValueError: The shapes differ otherwise; the message ends with ``instead``.
    """
    if [n for n in outputs.shape if n != 1] != [n for n in targets.shape if n != 1]:
        raise ValueError(
            f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}; for class indices and "
            f"outputs with an axis of classes {instead}"
        )
    return outputs.reshape(targets.shape)


class BinaryAccuracy(_Share):
    """Share of targets (0 or 1) on whose side of the threshold the output lies.

    Args:
        from_logits: True for raw outputs, False for probabilities. There is no default: comparing logits with
            0.5 is a common and silent mistake.
        threshold: A probability, between 0 and 1.

    Shapes: outputs and targets of the same shape, but for axes of length 1.
    """

    def __init__(self, *, from_logits: bool, threshold: float = 0.5) -> None:
        self.limit = limit_of(threshold, from_logits)
        super().__init__()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count one batch."""
        outputs = like_labels(outputs, targets, "take Accuracy")
        self.correct = more(self.correct, outputs.gt(self.limit).eq(targets.bool()))
        self.count = self.count + targets.numel()


def count(indices: Tensor, counted: Tensor, length: int) -> Tensor:
    """How often each index occurs among those counted; unlike ``bincount`` it never waits for the device."""
    return torch.zeros(length, dtype=torch.long, device=indices.device).scatter_add_(0, indices, counted.long())


Average = Literal["macro", "micro", "weighted"] | None
UNASKED = "the outputs give the number of classes, leave it out"


class ClassCounts(Metric):
    """True positives, predictions and targets per class or label, and a score made of them.

    Args:
        average: ``"macro"``: mean of the classes' scores, classes that never occur included (with score 0);
            ``"micro"``: the score of the pooled counts; ``"weighted"``: mean weighted by each class's targets;
            None: each class's score, as ``"val/f1/3"``.
        ignore_index: Targets of this value do not count.
        axis: The axis of the classes, -1 or 1; needed only where the shapes leave it open.
        labels: The classes' names, for ``average=None``: ``"val/f1/cat"``.
        from_logits: For one output a sample, or one for each of several labels: True for logits, False for
            probabilities. None: outputs are of classes that exclude each other.
        threshold: The probability above which a label is predicted, between 0 and 1.

    Shapes: outputs ``(..., classes)`` or ``(batch, classes, ...)``, targets class indices without that axis. With
    ``from_logits`` both ``(batch)``, ``(batch, 1)`` or ``(batch, labels)``, targets of 0 and 1; of one label,
    ``"macro"`` is the score of the label.

    Source: ``precision_score``, ``recall_score`` and ``fbeta_score`` of scikit-learn with ``zero_division=0``.

    Raises:
        ValueError: An option is out of range, or labels are given without ``average=None``.
    """

    higher_is_better = True

    @takes(classes=UNASKED, num_classes=UNASKED)
    def __init__(
        self,
        average: Average = "macro",
        ignore_index: int | None = None,
        axis: int | None = None,
        labels: Sequence[str] | None = None,
        *,
        from_logits: bool | None = None,
        threshold: float = 0.5,
    ) -> None:
        if isinstance(average, int):
            raise PluginError(f"{type(self).__name__}({average}): it finds the number of classes itself; leave it out")
        checks.one_of(type(self).__name__, ("macro", "micro", "weighted", None), average=average)
        if labels is not None and average is not None:
            raise ValueError(f"labels name scores of classes, and average={average!r} makes one: give average=None")
        self.average = average
        self.labels = labels
        self.several = average is None
        self.ignore_index = ignore_index
        self.axis = axis
        self.from_logits = from_logits
        self.threshold = threshold
        self.limit = limit_of(threshold, from_logits is not False)
        super().__init__()

    def reset(self) -> None:  # noqa: D102
        self.hits: Tensor | None = None
        self.predicted: Tensor | None = None
        self.actual: Tensor | None = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count one batch."""
        if self.from_logits is None:
            hits, made, actual = self._count_classes(outputs, targets)
        else:
            hits, made, actual = self._count_labels(outputs, targets)
        if self.hits is None or self.predicted is None or self.actual is None:
            self.hits = hits
            self.predicted = made
            self.actual = actual
        else:
            self.hits = self.hits + hits
            self.predicted = self.predicted + made
            self.actual = self.actual + actual

    def _counted(self, targets: Tensor) -> Tensor:
        if self.ignore_index is None:
            return torch.ones_like(targets, dtype=torch.bool)
        return targets.ne(self.ignore_index)

    def _count_classes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        axis = classes_axis(outputs, targets, self.axis, f"{type(self).__name__}(from_logits=True)")
        classes = outputs.shape[axis]
        predicted = outputs.argmax(axis).flatten()
        targets = targets.flatten()
        counted = self._counted(targets)
        known = counted & targets.ge(0) & targets.lt(classes)
        hits = count(predicted, counted & predicted.eq(targets), classes)
        made = count(predicted, counted, classes)
        actual = count(targets.clamp(0, classes - 1).long(), known, classes)
        return hits, made, actual

    def _count_labels(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = like_labels(outputs, targets, "leave from_logits out")
        counted = self._counted(targets)
        predicted = outputs.gt(self.limit) & counted
        actual = targets.eq(1) & counted
        hits = predicted & actual
        return _of_each_label(hits), _of_each_label(predicted), _of_each_label(actual)

    def score(self, hits: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
        """The score of counts, 0 where its denominator is 0."""
        raise NotImplementedError

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.load_state_dict(added(states))

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return self.hits is None

    def compute(self) -> Tensor | float:  # noqa: D102
        if self.hits is None or self.predicted is None or self.actual is None:
            return math.nan
        counts = wide(self.hits), wide(self.predicted), wide(self.actual)
        if self.average == "micro":
            return self.score(*(count.sum() for count in counts))
        scores = self.score(*counts)
        if self.average is None:
            return scores
        if self.average == "macro":
            return scores.mean()
        return (scores * counts[2]).sum() / counts[2].sum().clamp(min=1)


def _of_each_label(flags: Tensor) -> Tensor:
    """How many flags ``(batch, labels, ...)`` are set for each label; ``(batch)`` is of one label."""
    if flags.ndim < 2:
        return flags.sum().reshape(1)
    return flags.movedim(1, -1).reshape(-1, flags.shape[1]).sum(0)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return above / below.clamp(min=1)


class Precision(ClassCounts):
    """Hits / predictions, per class and averaged."""

    name = "precision"

    def score(self, hits: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:  # noqa: D102
        return _ratio(hits, predicted)


class Recall(ClassCounts):
    """Hits / targets, per class and averaged."""

    name = "recall"

    def score(self, hits: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:  # noqa: D102
        return _ratio(hits, actual)


class F1(ClassCounts):
    """2 hits / (predictions + targets), per class and averaged."""

    name = "f1"

    def score(self, hits: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:  # noqa: D102
        return _ratio(2 * hits, predicted + actual)


class FBeta(ClassCounts):
    """F-beta per class and averaged: recall counts ``beta`` times as much as precision, as ``"fbeta"``.

    ``(1 + beta^2) hits / (predictions + beta^2 targets)``.

    Args:
        beta: Above 0; 1 is `F1`.
        options: As for `F1`.

    Source: ``sklearn.metrics.fbeta_score``.

    Example::

        Metrics(FBeta(2, from_logits=True))
    """

    name = "fbeta"

    def __init__(self, beta: float, average: Average = "macro", **options: Any) -> None:
        checks.positive("FBeta", beta=beta)
        self.beta = beta
        super().__init__(average, **options)

    def score(self, hits: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:  # noqa: D102
        square = self.beta**2
        below = predicted + square * actual
        return torch.where(below > 0, (1 + square) * hits / below, 0.0)
