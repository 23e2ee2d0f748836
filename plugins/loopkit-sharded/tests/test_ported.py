"""PyTorch's example of FSDP2, ported: it has the bits of the loop by hand, in each step.

A transformer on the meta device whose layers are sharded one by one, then the rest, and which is filled as it is
sharded; Adam, clipping by the norm of the whole, and batches that are drawn in each step. Width, heads and batches have
the example's sizes; its ten layers and ten steps are the slow cases.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # fully_shard does, which takes seconds in each process
import torch.distributed as dist
from distributed.processes import run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from loopkit import Learner, hookimpl
from loopkit.base.sharded import whole
from loopkit.plugins import ClipGradNorm
from loopkit_sharded import FSDP

LIMIT = 100.0
WORDS, CONTEXT, BATCH = 1024, 64, 32
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass
class Case:
    """What a program is started with."""

    layers: int = 2
    steps: int = 5
    policy: MixedPrecisionPolicy | None = None


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(0.0)
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        parts = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.queries, self.keys, self.values))
        mixed = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        return self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, wide = nn.LayerNorm(width), 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.Dropout(0.0))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int = 16, heads: int = 4):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids):
        x = self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)).float()

    def reset_parameters(self):
        """Fill all, from the first module to the last."""
        for module in self.modules():
            if module is not self:
                reset(module)


def reset(module):
    """Fill a module's own parameters."""
    if any(True for _ in module.parameters(recurse=False)):
        module.reset_parameters()


def on_meta(case):
    with torch.device("meta"):
        return Transformer(case.layers)


def sharded(case):
    """A model on the meta device, in parts."""
    model, given = on_meta(case), {} if case.policy is None else {"mp_policy": case.policy}
    for layer in model.layers:
        fully_shard(layer, **given)
    return fully_shard(model, **given)


def filled(case):
    """Its parts, filled in each process: the example does that."""
    model = sharded(case)
    model.to_empty(device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support on cpu")
        model.reset_parameters()
    return model


def loaded(case, values):
    """Its parts, of whole tensors: the example does that where it finds a checkpoint."""
    model = sharded(case)
    empty = model.state_dict()
    parts = {
        name: nn.Parameter(distribute_tensor(value, empty[name].device_mesh, empty[name].placements))
        for name, value in values.items()
    }
    model.load_state_dict(parts, assign=True)
    return model


def drawn(case):
    for _ in range(case.steps):
        yield torch.randint(WORDS, (BATCH, CONTEXT))


def bits(model):
    return {name: value.clone() for name, value in whole(dict(model.state_dict())).items()}


@dataclass
class Ended:
    """How a program ended in one process."""

    losses: list[float]
    begin: dict[str, torch.Tensor]
    """Its parameters before the first step, whole."""
    end: dict[str, torch.Tensor]


def by_hand(rank, case, values):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = filled(case) if values is None else loaded(case, values)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, begin = [], bits(model)
    for x in drawn(case):
        loss = model(x).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Ended(losses, begin, bits(model))


class Losses:
    def __init__(self):
        self.losses = []

    @hookimpl
    def step_end(self, step):
        self.losses.append(step.loss.item())


def here(rank, case):
    """The lines that make the model stay."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, losses = filled(case), Losses()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    learner = Learner(model, total, optimizer, plugins=[FSDP(shard=False), ClipGradNorm(1.0), losses])
    begin = bits(model)
    learner.fit(lambda: ((x, x) for x in drawn(case)), epochs=1)
    return Ended(losses.losses, begin, bits(model))


def filled_here(rank, case):
    """The plugin shards and fills the model."""
    losses = Losses()
    plugins = [FSDP(wrap=Block, init=reset, mixed_precision=case.policy, shard=False), ClipGradNorm(1.0), losses]
    learner = Learner(on_meta(case), total, lambda params: torch.optim.Adam(params, lr=1e-2), plugins=plugins)
    begin = bits(learner.model)
    torch.manual_seed(0)
    learner.fit(lambda: ((x, x) for x in drawn(case)), epochs=1)
    return Ended(losses.losses, begin, bits(learner.model))


def total(outputs, targets):
    return outputs.sum()


def same(ranks, others):
    for one, other in zip(ranks, others, strict=True):
        assert one.losses == other.losses
        for ours, theirs in ((one.begin, other.begin), (one.end, other.end)):
            assert ours.keys() == theirs.keys()
            assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


EXAMPLE = [(1, Case(10, 10)), (2, Case(10, 10)), (3, Case(10, 10)), (4, Case(10, 10)), (2, Case(10, 10, HALF))]
CASES = [(1, Case()), (2, Case()), *[pytest.param(*case, marks=pytest.mark.slow) for case in EXAMPLE]]


@pytest.mark.parametrize(("size", "case"), CASES)
def test_program_ends_with_the_bits_of_the_loop_by_hand(size, case):
    same(run(here, size, case, timeout=LIMIT), run(by_hand, size, case, None, timeout=LIMIT))


@pytest.mark.parametrize(("size", "case"), CASES)
def test_program_that_the_plugin_fills_ends_with_the_bits_of_the_loop_by_hand(size, case):
    ranks = run(filled_here, size, case, timeout=LIMIT)
    same(ranks, run(by_hand, size, case, ranks[0].begin, timeout=LIMIT))
