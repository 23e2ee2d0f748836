"""Loss functions that torch does not have, and a mark for losses that are sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid

from loopkit.base import devices
from loopkit.base.words import takes

__all__ = ["focal_loss", "summed"]


def summed(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Mark a loss function as returning the sum over a batch's samples instead of their mean.

    With ``Learner(loss_fn=summed(fn))`` the gradient of an accumulation window is the sum of its steps' gradients, and
    ``train/loss`` is the sum of the losses, divided by the samples. Losses that have ``reduction="sum"``, such as
    torch's, and ``functools.partial(fn, reduction="sum")`` are recognised.

    Args:
        loss_fn: A function, or a module, whose parameters and buffers the result shares.

    Example::

        >>> loss_fn = summed(lambda outputs, targets: (outputs - targets).square().sum())
        >>> loss_fn(torch.tensor([1.0, 2.0]), torch.zeros(2)), loss_fn.reduction
        (tensor(5.), 'sum')
    """
    return _Summed(loss_fn)


class _Summed(nn.Module):
    reduction = "sum"

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.loss_fn(*args, **kwargs)


def is_sum(loss_fn: Any) -> bool:
    """Whether a loss function is marked as a sum over the samples: its ``reduction`` is ``"sum"``."""
    while isinstance(loss_fn, functools.partial):
        if "reduction" in loss_fn.keywords:
            return bool(loss_fn.keywords["reduction"] == "sum")
        loss_fn = loss_fn.func
    return bool(getattr(loss_fn, "reduction", None) == "sum")


__dir__ = __all__.copy


@takes()
def focal_loss(
    outputs: Tensor,
    targets: Tensor,
    gamma: float = 2.0,
    alpha: float | Sequence[float] | Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross entropy in which well classified samples count less: ``-alpha_t * (1 - p_t) ** gamma * log(p_t)``.

    The shape of the targets decides between two forms.

    - Binary, targets of the same shape as outputs (so ``(batch, 1)`` goes with ``(batch, 1)``): each output is the
      logit of one yes-or-no question. A target y between 0 and 1 gives y times the loss of 1 plus ``1 - y`` times
      the loss of 0.
    - Multi-class, outputs ``(batch, classes, ...)`` and targets ``(batch, ...)``: logits of at least two classes, and
      class numbers as integers.

    Args:
        outputs: Logits, floating point, any device. Half precision is computed in float32.
        targets: Binary: bool, integer or floating point, from 0 to 1. Multi-class: from 0 to ``classes - 1``. Values
            out of range are not looked for, as that would make the host wait for the device.
        gamma: How much less, from 0; 0 is cross entropy.
        alpha: Weights. Binary: a number from 0 to 1, the weight of target 1; target 0 has ``1 - alpha``.
            Multi-class: one number per class; as a tensor on the outputs' device it is not copied. None: 1 for all.
        reduction: ``"mean"`` over all elements (the weights do not enter the divisor), ``"sum"``, or ``"none"``, which
            gives a loss of the targets' shape.

    Raises:
        ValueError: The shapes or dtypes fit neither form, or an option is out of its range.

    Loss and gradient are finite for logits whose size, times ``2 + gamma``, is below the dtype's largest number.

    Source: Lin et al. 2017, eq. 5. With ``gamma=0`` equal to ``torch.nn.functional.cross_entropy`` and
    ``binary_cross_entropy_with_logits``, within rounding.

    >>> focal_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))  # 0.5 ** 2 * log(2)
    tensor(0.1733)
    >>> focal_loss(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0]), reduction="none")
    tensor([1.7329e-01, 1.0928e-04])
    """
    if not (math.isfinite(gamma) and gamma >= 0):
        raise ValueError(f"gamma is {gamma!r}: it must be a finite number from 0")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: it must be one of 'mean', 'sum', 'none'")
    if not outputs.is_floating_point():
        raise ValueError(f"outputs are {outputs.dtype}: they must be floating point logits")
    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()

    if outputs.shape == targets.shape:
        loss = _binary(outputs, targets, gamma, alpha)
    elif outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        loss = _multi_class(outputs, targets, gamma, alpha)
    else:
        raise ValueError(
            f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}: targets must have the "
            "same shape (binary), or outputs (batch, classes, ...) and targets (batch, ...) (multi-class)"
        )
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _binary(outputs: Tensor, targets: Tensor, gamma: float, alpha: object) -> Tensor:
    targets = targets.to(outputs.dtype)
    # Powers of 1 - p are taken as exp(gamma * log(1 - p)): exact for p near 1, and no infinite gradient at p = 1.
    log_yes = logsigmoid(outputs)
    log_no = logsigmoid(-outputs)
    yes = -targets * torch.exp(gamma * log_no) * log_yes
    no = -(1 - targets) * torch.exp(gamma * log_yes) * log_no
    if alpha is None:
        return yes + no
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha!r}: for binary targets it must be a number from 0 to 1")
    return alpha * yes + (1 - alpha) * no


def _multi_class(
    outputs: Tensor, targets: Tensor, gamma: float, alpha: float | Sequence[float] | Tensor | None
) -> Tensor:
    classes = outputs.shape[1]
    if classes < 2:
        raise ValueError(
            f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}, so there is only one class: "
            "for binary targets give both the same shape"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets are {targets.dtype}: with outputs (batch, classes, ...) they are class numbers")
    index = targets.long().unsqueeze(1)
    log_probs = log_softmax(outputs, dim=1)
    log_target = log_probs.gather(1, index).squeeze(1)
    # log(1 - p_t) is the sum over the other classes: 1 - p_t itself would lose its digits for p_t near 1.
    log_others = log_probs.scatter(1, index, -math.inf).logsumexp(dim=1)
    loss = -torch.exp(gamma * log_others) * log_target
    if alpha is None:
        return loss
    weights = devices.to_device(torch.as_tensor(alpha, dtype=outputs.dtype), outputs.device)
    if weights.shape != (classes,):
        raise ValueError(f"alpha is {alpha!r}: for {classes} classes it must be {classes} numbers")
    return weights[targets.long()] * loss
