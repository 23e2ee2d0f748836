"""Log some predictions of each validation, with the correct targets."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from loopkit.author import CHANNELS, Shown, checks, describe, first_tensor, nearest
from loopkit.errors import PluginError
from loopkit.hooks import hookimpl
from loopkit.logs import Image, Table

if TYPE_CHECKING:
    from loopkit import Epoch, Step
    from loopkit.learner import Learner
    from loopkit.phases import Phase

__all__ = ["LogPredictions"]

FEW = 16
"""Numbers that a cell of a table can show."""
LOSSES = ("torch.nn.functional", "torch.nn.modules.loss", "loopkit.losses")
"""Modules of losses that can be asked for one number a sample, by their ``reduction``."""
INPUTS = ("image", "table")
Columns = dict[str, Tensor]
"""The columns of some samples, by name, each ``(samples, ...)``."""


class LogPredictions(Shown):
    """Log the predictions for some samples of each epoch that does not train.

    They are a table, ``"val/predictions"``, with a row for each sample: its position in the epoch, what is predicted,
    what is true, and the loss. Classes (outputs ``(batch, classes)``, targets whole numbers or none) are shown by
    their label or number, with the probability of the predicted one: outputs are taken as logits, or as probabilities
    where they are probabilities in a whole batch. Other outputs and targets are shown as numbers, if there are up to 16
    a sample. Inputs that are images are logged one by one, ``"val/predictions/0"`` and so on, with this as their
    caption; of other inputs the table shows the numbers, up to 16.

    No more than ``count`` samples are kept, on the device, and read when the epoch ends: no step waits for them. Of
    several processes the first one logs its part of the data. Outside of a fit it keeps no samples.

    Args:
        inputs: ``"image"``, ``"table"``, or a function that makes of the inputs of some samples, a tensor
            ``(samples, ...)`` in main memory, something to show for each: tensors or arrays are images, all else is
            text. By default inputs of the shape ``(batch, 1|3|4, H, W)`` are images. Images of floats that leave [0, 1]
            are stretched to it. Where inputs have several parts, the first tensor among them is taken.
        every: Log every so many epochs of a phase, the first one included.
        count: How many samples.
        labels: Names of the classes, from class 0.
        worst: The samples with the highest loss; where there are no targets, and with False, the first ones of the
            epoch.
        loss: ``loss(outputs, targets)``, one number for each sample, for ``worst`` and the table. By default that is
            the learner's loss if it is one of torch or loopkit; else cross entropy for classes, and the mean squared
            error where targets are as outputs.
        name: The plugin's name.

    Raises:
        PluginError: An option is out of range; in a step, the loss of a sample cannot be computed.
        LogError: When an epoch ends, inputs that should be images are none.

    Example::

        Learner(model, loss_fn, optimizer, plugins=[LogTo("runs/a"), LogPredictions(labels=["cat", "dog"])])
    """

    provides = "observer"

    def __init__(
        self,
        inputs: str | Callable[[Tensor], Sequence[Any]] | None = None,
        every: int = 1,
        count: int = 16,
        labels: Sequence[str] | None = None,
        worst: bool = True,
        loss: Callable[[Any, Any], Tensor] | None = None,
        name: str = "log_predictions",
    ) -> None:
        checks.whole("LogPredictions", every=every, count=count)
        if isinstance(inputs, str) and inputs not in INPUTS:
            raise PluginError(
                f"LogPredictions(inputs={inputs!r}): it is 'image', 'table' or a function{nearest(inputs, INPUTS)}"
            )
        if inputs is not None and not isinstance(inputs, str) and not callable(inputs):
            raise PluginError(f"LogPredictions(inputs={inputs!r:.80}): it is 'image', 'table' or a function")
        if labels is not None and (isinstance(labels, str) or not all(isinstance(each, str) for each in labels)):
            raise PluginError(f"LogPredictions(labels={labels!r:.80}): give a list of strings, one for each class")
        if loss is not None and not callable(loss):
            raise PluginError(f"LogPredictions(loss={loss!r:.80}): give a function of outputs and targets")
        self.name = name
        self.inputs, self.every, self.count, self.worst = inputs, every, count, worst
        self.labels = None if labels is None else list(labels)
        self.loss = loss
        self._done: dict[str, int] = {}
        """Epochs by phase."""
        self._warned = False

    @hookimpl
    def epoch_begin(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Start empty, unless a saved epoch is resumed."""
        if phase.training or learner.current is None or learner.world.rank > 0:
            return
        store = epoch.store(self)
        if "kept" in store or self._done.get(phase.name, 0) % self.every == 0:
            kept = _Kept.of(store["kept"]) if "kept" in store else _Kept()
            store["kept"] = epoch.keep(self)["kept"] = kept

    @hookimpl(reads=("inputs", "outputs", "targets"))
    def step_end(self, learner: Learner, phase: Phase, step: Step) -> None:
        """Keep the samples of a step that will be shown."""
        if phase.training or (kept := step.epoch.keep(self).get("kept")) is None:
            return
        outputs = getattr(step, "outputs", None)
        if isinstance(outputs, Tensor) and outputs.ndim:
            with torch.no_grad():
                kept.add(self._columns(learner, kept.seen, step, outputs.detach()), self)
        elif outputs is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"plugin {self.name!r}: the outputs of phase {phase.name!r} are {describe(outputs)}, and predictions "
                f"are logged of a tensor (batch, ...): none are",
                stacklevel=2,
            )

    @hookimpl
    def epoch_end(self, learner: Learner, phase: Phase, epoch: Epoch) -> None:
        """Count the epoch, and log what was kept of it."""
        if not phase.training and learner.current is not None:
            self._done[phase.name] = self._done.get(phase.name, 0) + 1
            if (kept := epoch.keep(self).get("kept")) is not None:
                self._log(learner, phase.name, kept)

    def _columns(self, learner: Learner, seen: int, step: Step, outputs: Tensor) -> Columns:
        """The columns of a step's samples."""
        size = len(outputs)
        columns: Columns = {"sample": torch.arange(seen, seen + size, device=outputs.device)}
        targets = given = getattr(step, "targets", None)
        if not isinstance(given, Tensor) or not given.ndim or len(given) != size:
            targets = None
        if (
            outputs.ndim == 2
            and outputs.shape[1] > 1
            and (targets is None or (_are_whole(targets) and targets.ndim == 1))
        ):
            scores = outputs.float()
            are = (scores >= 0).all() & ((scores.sum(1) - 1).abs() < 1e-3).all()
            columns["probability"], columns["predicted"] = torch.where(are, scores, scores.softmax(1)).max(1)
            if targets is not None:
                columns["true"] = targets.detach()
        else:
            for name, values in {"predicted": outputs, "true": targets}.items():
                if isinstance(values, Tensor) and values[0].numel() <= FEW:
                    columns[name] = values.detach().reshape(size, -1)
        if self.loss is not None and given is not None:
            columns["loss"] = self._losses(self.loss, outputs, given)
        elif self.worst and targets is not None:
            columns["loss"] = self._losses(
                _loss_of_each(learner.loss_fn, outputs, targets, self.name), outputs, targets
            )
        found = first_tensor(getattr(step, "inputs", None))
        if found is not None and found.ndim and len(found) == size and self._shows(found):
            columns["inputs"] = found.detach()
        return columns

    def _shows(self, inputs: Tensor) -> bool:
        """Whether something of the inputs is shown."""
        few = inputs[0].numel() <= FEW
        if self.inputs is None:
            return few or _are_images(inputs)
        return few or self.inputs != "table"

    def _losses(self, loss: Callable[[Any, Any], Tensor], outputs: Tensor, targets: Any) -> Tensor:
        """The loss of each sample, ``(batch,)``."""
        losses = loss(outputs, targets)
        if not isinstance(losses, Tensor) or not losses.ndim or len(losses) != len(outputs):
            raise PluginError(
                f"plugin {self.name!r}: the losses of {len(outputs)} samples are {describe(losses)}: give "
                f"LogPredictions(loss=...), which returns one number for each, or worst=False"
            )
        return losses.detach().float().reshape(len(losses), -1).mean(1)

    def _log(self, learner: Learner, phase: str, kept: _Kept) -> None:
        """Read what was kept, and log it."""
        columns = {name: values.cpu() for name, values in kept.columns.items()}  # the epoch is over: this may wait
        if not columns:
            return
        inputs = columns.pop("inputs", None)
        cells = {name: self._cells(name, values) for name, values in columns.items()}
        pictures, texts = self._shown(inputs)
        if texts:
            cells["inputs"] = texts
        order = [name for name in ("sample", "inputs", "predicted", "true", "probability", "loss") if name in cells]
        rows = list(zip(*(cells[name] for name in order), strict=True))
        learner.log(f"{phase}/predictions", Table(order, rows))
        for number, picture in enumerate(pictures):
            row = dict(zip(order, rows[number], strict=True))
            learner.log(f"{phase}/predictions/{number}", Image(picture, _caption(row)))

    def _cells(self, name: str, values: Tensor) -> list[Any]:
        """A column of the table."""
        if values.ndim == 1 and not values.is_floating_point() and name in ("predicted", "true"):
            return [self._label(int(each)) for each in values]
        return _numbers(values)

    def _label(self, number: int) -> str | int:
        if self.labels is not None and 0 <= number < len(self.labels):
            return self.labels[number]
        return number

    def _shown(self, inputs: Tensor | None) -> tuple[list[Any], list[Any]]:
        """The inputs as images, or as cells of the table."""
        if inputs is None:
            return [], []
        if callable(self.inputs):
            made = list(self.inputs(inputs))
            if len(made) != len(inputs):
                raise PluginError(
                    f"plugin {self.name!r}: inputs= returned {len(made)} things for {len(inputs)} samples: one for each"
                )
            if made and hasattr(made[0], "shape"):
                return [_stretched(torch.as_tensor(each)) for each in made], []
            return [], [each if type(each) in (bool, int, float) else str(each) for each in made]
        if self.inputs == "image" or (self.inputs is None and _are_images(inputs)):
            return [_stretched(each) for each in inputs], []
        return [], _numbers(inputs.reshape(len(inputs), -1)) if inputs[0].numel() <= FEW else []

    def state_dict(self) -> dict[str, Any]:
        """How many epochs there were."""
        return {"done": dict(self._done)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the return value of `state_dict`."""
        self._done = dict(state["done"])


@dataclass(eq=False)
class _Kept:
    """The samples that are kept of one epoch."""

    columns: Columns = field(default_factory=dict)
    seen: int = 0

    def add(self, new: Columns, plugin: LogPredictions) -> None:
        """Take in the samples of a step, and drop samples that will not be shown."""
        size, kept = len(new["sample"]), len(self.columns.get("sample", ()))
        by_loss = plugin.worst and "loss" in new
        self.seen += size
        if not by_loss:
            if kept >= plugin.count:
                return
            new = {name: values[: plugin.count - kept] for name, values in new.items()}
        both = new if not kept else {n: _joined(self.columns[n], new[n]) for n in self.columns.keys() & new.keys()}
        if by_loss:
            order = both["loss"].sort(descending=True, stable=True).indices[: plugin.count]
            both = {name: values.index_select(0, order.to(values.device)) for name, values in both.items()}
        self.columns = {name: values.clone() for name, values in both.items()}

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"columns": {name: values.clone() for name, values in self.columns.items()}, "seen": self.seen}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Kept:
        """Restore the return value of `state_dict`."""
        return cls({name: values.clone() for name, values in state["columns"].items()}, state["seen"])


def _loss_of_each(loss_fn: Any, outputs: Tensor, targets: Tensor, plugin: str) -> Callable[[Any, Any], Tensor]:
    """A function for the losses of samples; one that others wrote is not called, since it may keep something."""
    function = loss_fn
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, nn.Module) and type(function).__module__ in LOSSES and hasattr(function, "reduction"):
        single: Any = copy.copy(function)
        single.reduction = "none"
        if len(inspect.signature(single.forward).parameters) == 2:
            return single.forward  # type: ignore[no-any-return]  # without hooks
    if getattr(function, "__module__", "") in LOSSES and "reduction" in inspect.signature(function).parameters:
        return partial(loss_fn, reduction="none")
    if _are_whole(targets) and outputs.ndim == targets.ndim + 1:
        return partial(cross_entropy, reduction="none")
    if outputs.shape == targets.shape:
        return lambda outputs, targets: (outputs.float() - targets.float()).square()
    raise PluginError(
        f"plugin {plugin!r}: the loss of a single sample is not known, for outputs {describe(outputs)} and targets "
        f"{describe(targets)}: give LogPredictions(loss=...), which returns one number for each, or worst=False"
    )


def _are_whole(targets: Tensor) -> bool:
    return not targets.is_floating_point() and not targets.is_complex() and targets.dtype is not torch.bool


def _are_images(inputs: Tensor) -> bool:
    """Whether inputs look like images, ``(batch, C, H, W)``."""
    shown = inputs.is_floating_point() or inputs.dtype is torch.uint8
    return shown and inputs.ndim == 4 and inputs.shape[1] in CHANNELS and min(inputs.shape[2:]) > 1


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Samples of two batches together; where their shapes differ, such as texts of other lengths, zeros are added."""
    if one.shape[1:] != other.shape[1:] and one.ndim == other.ndim:
        most = [max(sizes) for sizes in zip(one.shape[1:], other.shape[1:], strict=True)]
        one, other = (pad(t, _missing(t, most)) for t in (one, other))
    return torch.cat([one.to(other.device), other])


def _missing(tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """The padding of every dimension but the first, as ``torch.nn.functional.pad`` takes it: the last first."""
    return [n for size, own in zip(sizes[::-1], tensor.shape[:0:-1], strict=True) for n in (0, size - own)]


def _stretched(pixels: Tensor) -> Tensor:
    """The pixels of an image; floats that leave [0, 1] go from 0 to 1."""
    if pixels.dtype is torch.uint8:
        return pixels
    pixels = pixels.float()
    low, high = pixels.min(), pixels.max()
    return pixels if low >= 0 and high <= 1 else (pixels - low) / (high - low).clamp(min=1e-12)


def _numbers(values: Tensor) -> list[Any]:
    """A cell for each sample: a number, or several as text."""
    if values.ndim == 1 or values.shape[1] == 1:
        return list(values.flatten().tolist())
    return [", ".join(f"{each:.4g}" for each in row) for row in values.tolist()]


def _caption(row: Mapping[str, Any]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if name != "sample")
