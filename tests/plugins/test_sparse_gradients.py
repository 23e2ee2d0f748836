"""Sparse gradients: norms, clipping, noise and guards go by their values, each index once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from loopkit import Learner
from loopkit.plugins import ClipGradNorm, ClipGradValue, GradNoise, GradNorm, Metrics, StopOnNonFinite


class Bag(nn.Module):
    """Sums rows of a table, some of them twice; one part of it is dense."""

    def __init__(self, sparse, dense=True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 2, sparse=sparse)
        self.head = nn.Linear(2, 1) if dense else nn.Flatten(0)

    def forward(self, inputs):
        return self.head(self.table(inputs).sum(1))


def batches(count=3):
    generator = torch.Generator().manual_seed(0)
    return [(torch.tensor([[1, 1, 4], [4, 2, 1]]) + i, torch.randn(2, 1, generator=generator)) for i in range(count)]


def build(sparse, *plugins, dense=True, **options):
    optimizer = torch.optim.SGD
    return Learner(
        Bag(sparse, dense),
        nn.MSELoss() if dense else lambda outputs, targets: (outputs.sum() - targets.sum()) ** 2,
        lambda params: optimizer(params, lr=0.1),
        plugins=plugins,
        standard=False,
        **options,
    )


def fitted(sparse, *plugins, **options):
    learner = build(sparse, *plugins, **options)
    learner.fit(batches(), epochs=2)
    return [p.detach().clone() for p in learner.model.parameters()]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norm_of_sparse_gradients_is_the_norm_of_dense_ones(norm_type, dense):
    norms = []
    for sparse in (True, False):
        learner = build(sparse, GradNorm(norm_type), Metrics(), dense=dense)
        norms.append(learner.fit(batches(), epochs=1).metrics["train/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(
    "plugin",
    [
        lambda: ClipGradNorm(0.1),
        lambda: ClipGradNorm(0.1, math.inf),
        lambda: ClipGradNorm(0.1, over="all"),
        lambda: ClipGradValue(0.01),
        lambda: StopOnNonFinite("skip"),
        lambda: StopOnNonFinite("rollback"),
        lambda: StopOnNonFinite(gradients=True),
    ],
)
def test_sparse_gradients_train_as_dense_ones(plugin, dense):
    for one, other in zip(fitted(True, plugin(), dense=dense), fitted(False, plugin(), dense=dense), strict=True):
        torch.testing.assert_close(one, other)


def test_sparse_gradients_accumulate_as_dense_ones():
    for one, other in zip(fitted(True, accumulate=2), fitted(False, accumulate=2), strict=True):
        torch.testing.assert_close(one, other)


def test_noise_goes_to_the_values_of_sparse_gradients():
    quiet, noisy = fitted(True)[0], fitted(True, GradNoise(0.1))[0]
    assert not torch.equal(noisy[1:6], quiet[1:6])
    assert torch.equal(noisy[0], Bag(True).table.weight[0])
    assert torch.equal(noisy[7:], Bag(True).table.weight[7:])


@pytest.mark.parametrize("policy", ["skip", "rollback", "raise"])
def test_sparse_gradient_that_is_not_finite_is_found(policy):
    learner = build(True, StopOnNonFinite(policy, gradients=True))
    learner.model.table.weight.register_hook(lambda grad: grad * math.inf)
    words = "gradient of parameter 'table.weight' holds"
    if policy == "raise":
        with pytest.raises(ArithmeticError, match=words):
            learner.fit(batches(1), epochs=1)
    else:
        with pytest.warns(UserWarning, match=words):
            learner.fit(batches(1), epochs=1)
