"""The three plugins: they replace inputs and targets before the forward, and give the targets back after the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta

from loopkit import hookimpl
from loopkit.author import Shown, checks
from loopkit.errors import PluginError

__all__ = ["CutMix", "LabelSmoothing", "Mixup"]


class _SoftTargets(Shown):
    """The base of the three: targets as probabilities of classes, until the loss is computed."""

    provides = "augment"

    def __init__(self, classes: int) -> None:
        checks.whole(type(self).__name__, 2, classes=classes)
        self.classes = classes

    @hookimpl(phase="training", reads=("step.own_targets",), updates=("targets",))
    def backward_begin(self, step: Any) -> None:
        """The loss is computed: metrics compare with the targets that the batch has."""
        if hasattr(step, "own_targets"):
            step.targets = step.own_targets

    def _probabilities(self, step: Any) -> Tensor:
        """The targets as ``(batch, classes)``; the step keeps the batch's own targets."""
        targets = step.targets
        if not isinstance(targets, Tensor) or targets.ndim != (2 if targets.is_floating_point() else 1):
            what = f"{targets.dtype} of shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else repr(targets)
            raise PluginError(
                f"{type(self).__name__}: targets are {what:.80}: they are labels (batch,), or probabilities "
                f"(batch, {self.classes})"
            )
        if not hasattr(step, "own_targets"):
            step.own_targets = targets
        if targets.is_floating_point():
            return targets
        return nn.functional.one_hot(targets.long(), self.classes).to(torch.get_default_dtype())

    def _inputs(self, step: Any, dimensions: int, shape: str) -> Tensor:
        inputs = step.inputs
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim < dimensions:
            what = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
            raise PluginError(f"{type(self).__name__}: inputs are {what}: they are floats of shape {shape}")
        return inputs


class Mixup(_SoftTargets):
    """Mix each sample of a training batch, and its target, with another one.

    Inputs become ``a x + (1 - a) x'`` and targets the same of their probabilities. The share ``a`` is one for the
    batch, of ``Beta(alpha, alpha)`` and at least a half. The loss must take probabilities ``(batch, classes)`` as
    targets, as ``nn.CrossEntropyLoss`` does. Metrics compare with the batch's own targets.

    Args:
        classes: How many classes there are.
        alpha: The larger, the nearer to a half; above 0.

    Raises:
        PluginError: An option is out of range; in a step: inputs are no floats, or targets neither labels nor
            probabilities.

    Source:
        Zhang, Cisse, Dauphin, Lopez-Paz, "mixup: Beyond Empirical Risk Minimization", 2018, section 2.

    Example::

        Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[Mixup(classes=10), Metrics(Accuracy())])
    """

    name = "mixup"

    def __init__(self, classes: int, alpha: float = 0.2) -> None:
        super().__init__(classes)
        checks.positive(type(self).__name__, alpha=alpha)
        self.alpha = float(alpha)
        self._beta = Beta(self.alpha, self.alpha)

    @hookimpl(phase="training", updates=("inputs", "targets", "rng", "step.own_targets"))
    def forward_begin(self, step: Any) -> None:
        """Mix; the batch's own tensors stay as they are."""
        inputs, targets = self._inputs(step, 1, "(batch, ...)"), self._probabilities(step)
        share = self._beta.sample()
        share = torch.maximum(share, 1 - share)
        other = torch.randperm(len(inputs), device=inputs.device)
        step.inputs = share * inputs + (1 - share) * inputs[other]
        step.targets = share * targets + (1 - share) * targets[other]


class CutMix(_SoftTargets):
    """Put a box of another image into each image; targets are shared by area.

    The box has about the share ``1 - a`` of the image, with ``a`` of ``Beta(alpha, alpha)``, and lies around any point;
    what would stand out is cut off. It is one for the batch. The loss must take probabilities ``(batch, classes)`` as
    targets, as ``nn.CrossEntropyLoss`` does. Metrics compare with the batch's own targets. With `Mixup` in the same
    list, both are applied, `Mixup` first.

    Args:
        classes: How many classes there are.
        alpha: 1 makes all sizes of the box equally likely; above 0.

    Raises:
        PluginError: An option is out of range; in a step: inputs are no float images ``(batch, ..., height, width)``,
            or targets neither labels nor probabilities.

    Source:
        Yun et al., "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features", 2019,
        equations 1 and 2.

    Example::

        Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[CutMix(classes=10)])
    """

    name = "cut_mix"
    after = ("mixup",)

    syncs = ("forward_begin",)  # it reads the numbers of the box, which are on the host

    def __init__(self, classes: int, alpha: float = 1.0) -> None:
        super().__init__(classes)
        checks.positive(type(self).__name__, alpha=alpha)
        self.alpha = float(alpha)
        self._beta = Beta(self.alpha, self.alpha)

    @hookimpl(phase="training", updates=("inputs", "targets", "rng", "step.own_targets"))
    def forward_begin(self, step: Any) -> None:
        """Cut and mix; the batch's own tensors stay as they are."""
        inputs, targets = self._inputs(step, 3, "(batch, ..., height, width)"), self._probabilities(step)
        side = (1 - self._beta.sample()).sqrt()
        rows, columns = (_within(length, side, inputs.device) for length in inputs.shape[-2:])
        box = rows[:, None] & columns
        share = 1 - box.to(targets.dtype).mean()
        other = torch.randperm(len(inputs), device=inputs.device)
        step.inputs = torch.where(box, inputs[other], inputs)
        step.targets = share * targets + (1 - share) * targets[other]


class LabelSmoothing(_SoftTargets):
    """Move a part of each target to all classes alike, only in training.

    Targets become ``(1 - smoothing) y + smoothing / classes``, after `Mixup` and `CutMix`. The loss must take
    probabilities ``(batch, classes)`` as targets, as ``nn.CrossEntropyLoss`` does; the loss then
    equals ``nn.CrossEntropyLoss(label_smoothing=smoothing)``, which would smooth in validation as well. Metrics compare
    with the batch's own targets.

    Args:
        classes: How many classes there are.
        smoothing: The part, above 0 and below 1.

    Raises:
        PluginError: An option is out of range; in a step: targets are neither labels nor probabilities.

    Source:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016, section 7.

    Example::

        Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=[LabelSmoothing(classes=10, smoothing=0.1)])
    """

    name = "label_smoothing"
    after = ("mixup", "cut_mix")

    def __init__(self, classes: int, smoothing: float = 0.1) -> None:
        super().__init__(classes)
        if not isinstance(smoothing, (int, float)) or not 0 < smoothing < 1:
            raise PluginError(f"LabelSmoothing(smoothing={smoothing!r}): it is a number above 0 and below 1")
        self.smoothing = smoothing

    @hookimpl(phase="training", updates=("targets", "step.own_targets"))
    def forward_begin(self, step: Any) -> None:
        """Smooth; the batch's own targets stay as they are."""
        step.targets = (1 - self.smoothing) * self._probabilities(step) + self.smoothing / self.classes


def _within(length: int, side: Tensor, device: torch.device) -> Tensor:
    """Which places of an axis lie in the box: ``side`` of its length, around any place."""
    middle, half = int(torch.randint(length, ())), int(length * side) // 2
    places = torch.arange(length, device=device)
    return (places >= middle - half) & (places < middle + half)
