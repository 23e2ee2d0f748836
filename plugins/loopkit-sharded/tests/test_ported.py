"""A program in the shape of PyTorch's example of FSDP2, ported: with default options it ends with the same bits.

A transformer whose layers are sharded one by one, then the rest; Adam, clipping by the norm of the whole, and batches
that are drawn in each step.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # fully_shard does, which takes seconds in each process
from distributed.processes import run
from distributed.test_ported import GPT, Block, Config, gpt, seeded
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from loopkit import Learner
from loopkit.distributed import join
from loopkit.plugins import ClipGradNorm
from loopkit.sharded import whole
from loopkit_sharded import FSDP

LIMIT = 100.0
STEPS = 5


def drawn():
    """The batches of an epoch."""
    for _ in range(STEPS):
        yield torch.randint(Config.words, (4, Config.context))


def bits(model):
    return {name: value.clone() for name, value in whole(dict(model.state_dict())).items()}


def by_hand(rank, policy):
    model = gpt()
    given = {} if policy is None else {"mp_policy": policy}
    for layer in model.blocks:
        fully_shard(layer, **given)
    fully_shard(model, **given)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seeded(rank)
    for x in drawn():
        loss = model(x).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return bits(model)


def here(rank, policy):
    plugins = [FSDP(wrap=Block, mixed_precision=policy, shard=False), ClipGradNorm(1.0)]
    learner = Learner(
        gpt(), lambda outputs, _: outputs.sum(), lambda params: torch.optim.Adam(params, lr=1e-2), plugins=plugins
    )
    seeded(rank)
    learner.fit(lambda: ((x, x) for x in drawn()), epochs=1)
    return bits(learner.model)


def both(rank, policy):
    join(timeout=LIMIT)
    expected, found = by_hand(rank, policy), here(rank, policy)
    assert expected.keys() == found.keys() == GPT(Config()).state_dict().keys()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.parametrize(
    ("size", "policy"),
    [
        (1, None),
        (2, None),
        pytest.param(3, None, marks=pytest.mark.slow),
        pytest.param(4, None, marks=pytest.mark.slow),
        pytest.param(2, MixedPrecisionPolicy(torch.bfloat16, torch.float32), marks=pytest.mark.slow),
    ],
)
def test_program_ends_with_the_bits_of_the_loop_by_hand(size, policy):
    assert run(both, size, policy, timeout=LIMIT) == [[]] * size
