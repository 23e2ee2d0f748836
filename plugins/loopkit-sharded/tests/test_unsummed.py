"""Gradients that are not summed are found without a private name of torch, and are those of ``fully_shard`` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from distributed.processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import loopkit_sharded
from loopkit.distributed import join
from loopkit_sharded.unsummed import wholes

HOME = Path(loopkit_sharded.__file__).parent
WIDE = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
POLICIES = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16), WIDE]


def test_no_private_name_of_others_is_used():
    found = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in HOME.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls")
    ]
    assert found == []


class Twice(nn.Module):
    """Its weight gets two gradients in a backward; its bias is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.layer.bias.requires_grad = False

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def made(policy):
    model = Twice()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def backward(model, seed):
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(4, 16, generator=generator)).float().pow(2).sum().backward()


def gradients(rank):
    """Of each policy: what was seen before and after each of two backwards, and of fully_shard with and without."""
    join(timeout=60)
    seen = []
    for policy in POLICIES:
        model, plain = made(policy), made(policy)
        found = wholes([model.layer, model], policy.reduce_dtype)
        assert [whole.part for whole in found] == list(model.parameters())
        told = []
        for step, due in enumerate((False, False, True, True)):
            for each in (model, plain):
                each.set_requires_gradient_sync(due)
            for whole in found:
                whole.set_syncing(due)
            told.append([None if whole.grad is None else whole.grad.clone() for whole in found])
            backward(model, step)
            backward(plain, step)
        told.append([whole.grad for whole in found])
        assert not found[1].part.requires_grad
        seen.append((told, *(each.layer.weight.grad.full_tensor() for each in (model, plain))))
    model = made(WIDE)
    found = wholes([model.layer], WIDE.reduce_dtype)
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    for whole in found:
        whole.drop()
    assert [whole.grad for whole in found] == [None, None]
    return seen


def by_hand(dtype):
    """The sum of the gradients of the first two backwards."""
    model = Twice() if dtype is None else Twice().to(dtype)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 16, generator=generator)
        model(x if dtype is None else x.to(dtype)).float().pow(2).sum().backward()
        yield model.layer.weight.grad
        model.layer.weight.grad = None


@pytest.mark.timeout(120)
def test_gradients_that_are_not_summed_are_seen_and_change_nothing():
    [seen] = run(gradients, 1)
    for policy, (told, mine, plain) in zip(POLICIES, seen, strict=True):
        assert torch.equal(mine, plain)
        first, second = by_hand(policy.param_dtype)
        dtype = policy.reduce_dtype or first.dtype
        assert told[0] == told[-1] == [None, None]
        for grads, expected in ((told[1], first.to(dtype)), (told[2], first.to(dtype) + second)):
            assert grads[1] is None
            assert grads[0].dtype == dtype
            assert torch.equal(grads[0], expected)
