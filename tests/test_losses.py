from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from loopkit.losses import focal_loss

GAMMAS = [0.0, 0.5, 1.0, 2.0, 5.0]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * 3


def eq5(p_t: float, gamma: float, alpha_t: float = 1.0) -> float:
    return -alpha_t * (1 - p_t) ** gamma * math.log(p_t)


def binary_by_hand(logits: Tensor, targets: Tensor, gamma: float, alpha: float | None) -> Tensor:
    losses = []
    for x, y in zip(logits.tolist(), targets.tolist(), strict=True):
        p = 1 / (1 + math.exp(-x))
        yes, no = (1.0, 1.0) if alpha is None else (alpha, 1 - alpha)
        losses.append(y * eq5(p, gamma, yes) + (1 - y) * eq5(1 - p, gamma, no))
    return torch.tensor(losses, dtype=torch.float64)


def multi_class_by_hand(logits: Tensor, targets: Tensor, gamma: float, alpha: list[float] | None) -> Tensor:
    losses = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        exps = [math.exp(x) for x in row]
        losses.append(eq5(exps[target] / sum(exps), gamma, 1.0 if alpha is None else alpha[target]))
    return torch.tensor(losses, dtype=torch.float64)


# The formula by hand computes 1 - p_t, which here is down to 1e-5 and so loses up to five of sixteen digits.
BY_HAND = {"rtol": 1e-10, "atol": 0.0}


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("alpha", [None, 0.0, 0.25, 1.0])
@pytest.mark.parametrize("soft", [False, True])
def test_focal_loss_binary_equals_the_formula(gamma: float, alpha: float | None, soft: bool) -> None:
    logits = normal(200)
    targets = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = targets if soft else targets.round()
    got = focal_loss(logits, targets, gamma, alpha, "none")
    torch.testing.assert_close(got, binary_by_hand(logits, targets, gamma, alpha), **BY_HAND)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("alpha", [None, [0.1, 0.2, 0.3, 4.0, 0.0]])
def test_focal_loss_multi_class_equals_the_formula(gamma: float, alpha: list[float] | None) -> None:
    logits, targets = normal(200, 5), torch.arange(200) % 5
    got = focal_loss(logits, targets, gamma, alpha, "none")
    torch.testing.assert_close(got, multi_class_by_hand(logits, targets, gamma, alpha), **BY_HAND)


def test_focal_loss_defaults_are_gamma_two_no_alpha_and_the_mean() -> None:
    logits, targets = normal(10), (torch.arange(10) % 2).double()
    assert torch.equal(focal_loss(logits, targets), focal_loss(logits, targets, 2.0, None, "mean"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_focal_loss_with_gamma_zero_is_binary_cross_entropy(dtype: torch.dtype, reduction: Any) -> None:
    logits = normal(64, dtype=dtype)
    targets = torch.rand(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = focal_loss(logits, targets, gamma=0.0, reduction=reduction)
    # torch writes the same sum as (1 - y) * x - log(p): each form rounds a few times at the size of the logit, up to
    # 12; sums of 64 round up to 64 times more.
    bound = 8 * torch.finfo(dtype).eps * 12 * (64 if reduction == "sum" else 1)
    torch.testing.assert_close(
        got, binary_cross_entropy_with_logits(logits, targets, reduction=reduction), rtol=0.0, atol=bound
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_focal_loss_with_gamma_zero_is_cross_entropy(dtype: torch.dtype) -> None:
    logits, targets = normal(64, 5, dtype=dtype), torch.arange(64) % 5
    got = focal_loss(logits, targets, gamma=0.0, reduction="none")
    assert torch.equal(got, cross_entropy(logits, targets, reduction="none"))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_focal_loss_with_gamma_zero_is_cross_entropy_reduced(reduction: Any) -> None:
    logits, targets = normal(64, 5), torch.arange(64) % 5
    got = focal_loss(logits, targets, gamma=0.0, reduction=reduction)
    # the same 64 numbers added in another order: at most 64 roundings
    torch.testing.assert_close(got, cross_entropy(logits, targets, reduction=reduction), rtol=64 * 2.3e-16, atol=0.0)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_focal_loss_of_one_logit_equals_that_of_two_classes(gamma: float) -> None:
    logits, targets = normal(50), torch.arange(50) % 2
    two = torch.stack([torch.zeros_like(logits), logits], dim=1)
    torch.testing.assert_close(
        focal_loss(logits, targets, gamma, reduction="none"),
        focal_loss(two, targets, gamma, reduction="none"),
        rtol=4 * 2.3e-16 / math.exp(-9),  # log_softmax rounds log(p_t) as if it were 1; here it is down to exp(-9)
        atol=0.0,
    )


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("alpha", [None, 0.25])
def test_focal_loss_binary_gradient_equals_numerical(gamma: float, alpha: float | None) -> None:
    logits = normal(12).requires_grad_()
    targets = torch.linspace(0, 1, 12, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: focal_loss(x, targets, gamma, alpha), (logits,))


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("alpha", [None, [0.2, 0.3, 0.5]])
def test_focal_loss_multi_class_gradient_equals_numerical(gamma: float, alpha: list[float] | None) -> None:
    logits = normal(6, 3).requires_grad_()
    targets = torch.arange(6) % 3
    assert torch.autograd.gradcheck(lambda x: focal_loss(x, targets, gamma, alpha), (logits,))


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("target", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_focal_loss_binary_is_finite_for_extreme_logits(gamma: float, target: float, dtype: torch.dtype) -> None:
    size = torch.finfo(dtype).max / (2 + gamma) / 2
    logits = torch.tensor([0.0, 90.0, -90.0, 800.0, -800.0, 1e30, -1e30, size, -size], dtype=dtype, requires_grad=True)
    losses = focal_loss(logits, torch.full((9,), target), gamma, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert bool(losses.isfinite().all())
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("target", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_focal_loss_multi_class_is_finite_for_extreme_logits(gamma: float, target: int, dtype: torch.dtype) -> None:
    rows = [[0.0, 0.0, 0.0], [90.0, -90.0, 0.0], [800.0, -800.0, 0.0], [1e30, 0.0, -1e30], [-1e30, -1e30, -1e30]]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    losses = focal_loss(logits, torch.full((5,), target), gamma, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert bool(losses.isfinite().all())
    assert bool(gradient.isfinite().all())


def test_focal_loss_binary_keeps_its_digits_where_the_answer_is_almost_certain() -> None:
    got = focal_loss(torch.tensor([40.0], dtype=torch.float64), torch.ones(1)).item()
    # 1 - p is exp(-40), within a factor of 1 + exp(-40), and so is -log(p): a plain 1 - p would give a loss of 0
    assert got == pytest.approx(math.exp(-120.0), rel=1e-13, abs=0.0)  # the rounding of exponents of size 120


def test_focal_loss_wrong_and_certain_costs_as_much_as_cross_entropy() -> None:
    assert focal_loss(torch.tensor([-200.0]), torch.ones(1)).item() == 200.0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_focal_loss_binary_takes_targets_of_any_dtype(dtype: torch.dtype) -> None:
    logits, targets = normal(10), torch.arange(10) % 2
    assert torch.equal(focal_loss(logits, targets.to(dtype)), focal_loss(logits, targets.double()))


@pytest.mark.parametrize("shape", [(6, 1), (2, 3), (1, 2, 3)])
def test_focal_loss_binary_is_elementwise(shape: tuple[int, ...]) -> None:
    logits, targets = normal(6), torch.arange(6) % 2
    got = focal_loss(logits.view(shape), targets.view(shape), alpha=0.25, reduction="none")
    assert torch.equal(got, focal_loss(logits, targets, alpha=0.25, reduction="none").view(shape))


def test_focal_loss_multi_class_takes_classes_from_dimension_one() -> None:
    logits, targets, alpha = normal(2, 5, 3, 4), torch.arange(24).view(2, 3, 4) % 5, [0.1, 0.2, 0.3, 0.4, 0.5]
    got = focal_loss(logits, targets, alpha=alpha, reduction="none")
    flat = focal_loss(logits.movedim(1, -1).reshape(-1, 5), targets.flatten(), alpha=alpha, reduction="none")
    # log_softmax over a strided dimension adds the classes in another order
    torch.testing.assert_close(got, flat.view(2, 3, 4), rtol=1e-14, atol=1e-17)


def test_focal_loss_multi_class_takes_any_integer_targets() -> None:
    logits, targets = normal(10, 5), torch.arange(10) % 5
    assert torch.equal(focal_loss(logits, targets.to(torch.uint8)), focal_loss(logits, targets))


def test_focal_loss_takes_alpha_as_a_tensor() -> None:
    logits, targets, alpha = normal(10, 3), torch.arange(10) % 3, [0.2, 0.3, 0.5]
    got = focal_loss(logits, targets, alpha=torch.tensor(alpha, dtype=torch.float64))
    assert torch.equal(got, focal_loss(logits, targets, alpha=alpha))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_focal_loss_computes_half_precision_in_float32(dtype: torch.dtype) -> None:
    logits, targets = normal(10, dtype=dtype), (torch.arange(10) % 2).to(dtype)
    got = focal_loss(logits, targets)
    assert got.dtype == torch.float32
    assert torch.equal(got, focal_loss(logits.float(), targets.float()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_focal_loss_reduces_over_all_elements(reduction: str) -> None:
    logits, targets, alpha = normal(10, 3), torch.arange(10) % 3, [0.2, 0.3, 0.5]
    losses = focal_loss(logits, targets, alpha=alpha, reduction="none")
    want = losses.sum() if reduction == "sum" else losses.mean()
    assert torch.equal(focal_loss(logits, targets, alpha=alpha, reduction=reduction), want)  # type: ignore[arg-type]


LOGITS, LABELS = torch.zeros(4), torch.zeros(4)
ROWS, CLASSES = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((LOGITS, LABELS), {"gamma": -1.0}, r"gamma is -1\.0: it must be a finite number from 0"),
        ((LOGITS, LABELS), {"gamma": math.nan}, "gamma is nan: it must be a finite number from 0"),
        ((LOGITS, LABELS), {"gamma": math.inf}, "gamma is inf: it must be a finite number from 0"),
        ((LOGITS, LABELS), {"reduction": "avg"}, "reduction is 'avg': it must be one of 'mean', 'sum', 'none'"),
        ((LOGITS, LABELS), {"alpha": 1.5}, r"alpha is 1\.5: for binary targets it must be a number from 0 to 1"),
        ((LOGITS, LABELS), {"alpha": -0.1}, r"alpha is -0\.1: for binary"),
        ((LOGITS, LABELS), {"alpha": math.nan}, "alpha is nan: for binary"),
        ((LOGITS, LABELS), {"alpha": True}, "alpha is True: for binary"),
        ((LOGITS, LABELS), {"alpha": [0.5, 0.5]}, r"alpha is \[0\.5, 0\.5\]: for binary"),
        ((ROWS, CLASSES), {"alpha": 0.25}, r"alpha is 0\.25: for 3 classes it must be 3 numbers"),
        ((ROWS, CLASSES), {"alpha": [0.5, 0.5]}, r"alpha is \[0\.5, 0\.5\]: for 3 classes it must be 3 numbers"),
        ((CLASSES, LABELS), {}, r"outputs are torch\.int64: they must be floating point logits"),
        ((ROWS, LABELS), {}, r"targets are torch\.float32: .* they are class numbers"),
        ((ROWS, LABELS.bool()), {}, r"targets are torch\.bool: .* they are class numbers"),
        ((LOGITS[:, None], CLASSES), {}, r"shape \(4, 1\), targets \(4,\), so there is only one class"),
        ((LOGITS[:, None], LABELS), {}, r"shape \(4, 1\), targets \(4,\), so there is only one class"),
        ((LOGITS, LABELS[:, None]), {}, r"outputs have shape \(4,\) and targets \(4, 1\)"),
        ((ROWS, CLASSES[:3]), {}, r"outputs have shape \(4, 3\) and targets \(3,\)"),
        ((LOGITS, CLASSES[0]), {}, r"outputs have shape \(4,\) and targets \(\)"),
    ],
)
def test_focal_loss_refuses(arguments: tuple[Tensor, Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        focal_loss(*arguments, **options)
