"""Well-known programs of several processes, ported: with default options they end with the bits of the loop by hand.

The first is PyTorch's own first program with ``DistributedDataParallel``, with batch norm and dropout added; the second
is a small GPT that is trained as minGPT is: AdamW with two groups, clipping, a test after each epoch. Each keeps its
``DataLoader`` with a ``DistributedSampler``. With `Checkpoint` more than two processes end with other last bits, since
the reducer then keeps its order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from distributed.processes import run
from loopkit import Learner
from loopkit.distributed import join
from loopkit.plugins import DDP, ClipGradNorm

LIMIT = 100.0


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def seeded(rank):
    """Each process draws its own dropout."""
    torch.manual_seed(100 + rank)


# DistributedDataParallel


def toy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))


def toy_loader(rank, size):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(199, 20, generator=generator), torch.rand(199, 1, generator=generator))
    return DataLoader(data, batch_size=16, shuffle=False, sampler=DistributedSampler(data, size, rank))


def toy_by_hand(rank, size):
    model, loader = toy(), toy_loader(rank, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    seeded(rank)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(source), targets)
            loss.backward()
            optimizer.step()
    return bits(model)


def toy_here(rank, size):
    optimizer = torch.optim.SGD
    learner = Learner(toy(), nn.MSELoss(), lambda params: optimizer(params, lr=0.05), plugins=[DDP()])
    seeded(rank)
    learner.fit(toy_loader(rank, size), epochs=3)
    return bits(learner.model)


# A small GPT


@dataclass
class Config:
    words: int = 17
    context: int = 8
    width: int = 24
    heads: int = 3
    layers: int = 2
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)
        self.drop = nn.Dropout(config.dropout)
        wide = 4 * config.width
        self.mlp = nn.Sequential(nn.Linear(config.width, wide), nn.GELU(), nn.Linear(wide, config.width), self.drop)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.positions = nn.Parameter(torch.zeros(config.context, config.width))
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.layers)])
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.words, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.drop(self.words(ids) + self.positions))))


class Characters(Dataset[Any]):
    """Pieces of a text, and the same one character later."""

    def __init__(self, config: Config, begin: int, count: int):
        text = torch.randint(config.words, (400,), generator=torch.Generator().manual_seed(2))
        self.text, self.count, self.length = text[begin:], count, config.context

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        piece = self.text[index : index + self.length + 1]
        return piece[:-1], piece[1:]


def gpt():
    torch.manual_seed(0)
    return GPT(Config())


def characters(rank, size, train):
    data = Characters(Config(), 0, 100) if train else Characters(Config(), 200, 30)
    return DataLoader(data, batch_size=8, shuffle=False, sampler=DistributedSampler(data, size, rank))


def groups(model):
    """Matrices decay, and nothing else does."""
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def gpt_by_hand(rank, size):
    model = gpt()
    train, test = (characters(rank, size, training) for training in (True, False))
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.9, 0.95))
    wrapped = DistributedDataParallel(model) if size > 1 else model
    seeded(rank)
    for epoch in range(2):
        train.sampler.set_epoch(epoch)
        wrapped.train()
        for source, targets in train:
            loss = loss_of(wrapped(source), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
            optimizer.step()
        wrapped.eval()
        with torch.no_grad():
            for source, targets in test:
                loss_of(wrapped(source), targets)
    return bits(model)


def gpt_here(rank, size):
    model = gpt()
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.9, 0.95))
    learner = Learner(model, loss_of, optimizer, plugins=[DDP(), ClipGradNorm(1.0)])
    seeded(rank)
    learner.fit(characters(rank, size, True), characters(rank, size, False), epochs=2)
    return bits(learner.model)


def both(rank, size, by_hand, here):
    """The names of what differs."""
    join(timeout=LIMIT)
    expected, found = by_hand(rank, size), here(rank, size)
    assert expected.keys() == found.keys()
    return [name for name in expected if not torch.equal(expected[name], found[name])]


PROGRAMS = {"toy": (toy_by_hand, toy_here), "gpt": (gpt_by_hand, gpt_here)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) == ("gpt", 2) else pytest.mark.slow)
        for name in PROGRAMS
        for size in (1, 2, 3, 4)
    ],
)
def test_program_ends_with_the_bits_of_the_loop_by_hand(name, size):
    first, *others = run(both, size, size, *PROGRAMS[name], timeout=LIMIT)
    assert first == []
    running = {"1.running_mean", "1.running_var"}  # after an epoch all have those of rank 0, which the loop leaves
    assert [set(names) - running for names in others] == [set()] * (size - 1)
