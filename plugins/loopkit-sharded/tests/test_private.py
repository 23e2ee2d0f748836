"""What is used of torch that has no public name, and the versions in which that was seen."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from distributed.processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import loopkit_sharded
from loopkit.distributed import join
from loopkit_sharded import private
from loopkit_sharded.private import kept

HOME = Path(loopkit_sharded.__file__).parent


def test_version_of_torch_is_one_that_is_known():
    assert ".".join(torch.__version__.split(".")[:2]) in private.KNOWN


def test_private_names_of_others_are_in_one_file():
    found = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in HOME.glob("*.py")
        if path.name != "private.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls")
    ]
    assert found == []


def gradients(rank, policy):
    """Before and after a backward that sums nothing, and when they were dropped."""
    join(timeout=60)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    before = [each.own_grad for each in kept([model])]
    model(torch.ones(4, 3)).float().sum().backward()
    after = [each.own_grad.clone() for each in kept([model])]
    assert [each.param for each in kept([model])] == list(model.parameters())
    assert all(p.grad is None for p in model.parameters())
    for each in kept([model]):
        each.drop()
    return before, after, [each.own_grad for each in kept([model])]


def test_gradients_that_are_not_summed_are_where_they_are_looked_for():
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        [(before, after, dropped)] = run(gradients, 1, policy)
        assert before == dropped == [None, None]
        assert [grad.dtype for grad in after] == [torch.float32] * 2
        assert torch.equal(after[0], torch.full((2, 3), 4.0))
        assert torch.equal(after[1], torch.full((2,), 4.0))
