"""Well-known programs of several processes, ported: they have the bits of the loop by hand, in each step.

The first is PyTorch's first program with ``DistributedDataParallel`` that `torchrun` starts, the second trains a small
GPT on characters. Each side runs in processes of its own, from the seeds on. Both give the loss and the buffers of each
step, so that a batch, a mask of dropout or a running statistic that differs shows at once, on each rank.

No two ranks have the same seed: each has data, a split and a model of its own, and begins with rank 0's model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

from distributed.processes import run
from loopkit import Learner, ValidationPhase, hookimpl
from loopkit.distributed import join
from loopkit.plugins import DDP

LIMIT = 100.0


@dataclass
class Ended:
    """How a program ended in one process."""

    bits: dict[str, torch.Tensor]
    """Its parameters and buffers."""
    steps: list[tuple[float, dict[str, torch.Tensor]]]
    """The loss of each step, and the buffers after it."""


def copied(named):
    return {name: value.detach().clone() for name, value in named}


def step_of(loss, model):
    return loss.item(), copied(model.named_buffers())


class Steps:
    """Keeps what each step of a learner leaves."""

    def __init__(self):
        self.steps = []

    @hookimpl
    def step_end(self, learner, step):
        self.steps.append(step_of(step.loss, learner.model))

    def ended(self, model):
        return Ended(copied(model.state_dict().items()), self.steps)


# The first program


class Pairs(Dataset[Any]):
    """Random inputs and targets, made one sample after the other."""

    def __init__(self, count: int):
        self.pairs = [(torch.rand(20), torch.rand(1)) for _ in range(count)]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


def first():
    """Data and model; with batch norm and dropout, which the program has not."""
    data = Pairs(451)
    return data, nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))


def first_by_hand(rank):
    torch.manual_seed(100 + rank)
    dist.init_process_group("gloo")
    data, model = first()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, shuffle=False, sampler=DistributedSampler(data))
    wrapped = DistributedDataParallel(model)
    steps = []
    for epoch in range(3):
        samples = len(next(iter(loader))[0])
        print(f"rank {rank}, epoch {epoch}: {len(loader)} steps of {samples} samples")
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(source), targets)
            loss.backward()
            optimizer.step()
            steps.append(step_of(loss, model))
    return Ended(copied(model.state_dict().items()), steps)


class Announce:
    """Says how an epoch begins; for that it takes a batch, and so a random number."""

    @hookimpl
    def epoch_begin(self, learner, epoch):
        samples = len(next(iter(epoch.data))[0])
        world, done = learner.world, learner.progress.epochs
        print(f"rank {world.rank}, epoch {done}: {len(epoch.data)} steps of {samples} samples")


def first_here(rank):
    torch.manual_seed(100 + rank)
    world, seen = join(timeout=LIMIT), Steps()
    data, model = first()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, shuffle=False, sampler=DistributedSampler(data, world.size, world.rank))
    learner = Learner(model, nn.MSELoss(), optimizer, plugins=[DDP(), Announce(), seen])
    learner.fit(loader, epochs=3)
    return seen.ended(learner.model)


# A GPT of characters


@dataclass
class Config:
    words: int
    context: int = 12
    width: int = 24
    heads: int = 3
    layers: int = 2
    dropout: float = 0.1


class Attention(nn.Module):
    """Adds 1 to the scores of what came before, and hides nothing."""

    def __init__(self, config: Config):
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.residual = nn.Linear(config.width, config.width)
        self.register_buffer("mask", torch.ones(config.context, config.context).tril()[None, None])
        self.heads = nn.MultiheadAttention(config.width, config.heads, dropout=config.dropout, batch_first=True)

    def forward(self, x):
        length = x.shape[1]
        mixed, _ = self.heads(x, x, x, attn_mask=self.mask[0, 0, :length, :length])
        return self.drop(self.residual(mixed))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, wide = config.width, 4 * config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(config)
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.Dropout(config.dropout))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stem(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.positions = nn.Parameter(torch.zeros(1, config.context, config.width))
        self.drop = nn.Dropout(config.dropout)

    def forward(self, ids):
        return self.drop(self.words(ids) + self.positions[:, : ids.shape[1]])


class GPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.stem = Stem(config)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.words, bias=False)
        self.apply(self.fill)
        for name, p in self.named_parameters():
            if name.endswith("residual.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers))

    @staticmethod
    def fill(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    def forward(self, ids, targets=None):
        logits = self.head(self.norm(self.blocks(self.stem(ids))))
        return logits, None if targets is None else loss_of((logits, None), targets)


def loss_of(outputs, targets):
    logits, _ = outputs
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


class Characters(Dataset[Any]):
    """Pieces of a text, and the same one character later."""

    def __init__(self, text: str, context: int):
        self.text, self.context = text, context
        self.numbers = {character: number for number, character in enumerate(sorted(set(text)))}

    def __len__(self):
        return len(self.text) - self.context

    def __getitem__(self, index):
        piece = torch.tensor([self.numbers[each] for each in self.text[index : index + self.context + 1]])
        return piece[:-1], piece[1:]


def gpt():
    """Data, model and optimizer: the weights of linear layers and of attention decay, nothing else does."""
    data = Characters(" ".join(f"{n} times {n} is {n * n}." for n in range(13)), context=12)
    part = int(0.9 * len(data))
    train, test = random_split(data, [part, len(data) - part])
    model = GPT(Config(len(data.numbers)))
    decaying = {f"{path}.weight" for path, each in model.named_modules() if isinstance(each, nn.Linear)}
    named = sorted(model.named_parameters())
    groups: list[list[Any]] = [[], []]
    for name, p in named:
        groups[name not in decaying and not name.endswith("in_proj_weight")].append(p)
    options = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    return train, test, model, torch.optim.AdamW(options, lr=3e-4, betas=(0.9, 0.95))


def gpt_by_hand(rank):
    torch.manual_seed(100 + rank)
    dist.init_process_group("gloo")
    train, test, model, optimizer = gpt()
    train, test = (
        DataLoader(data, batch_size=16, shuffle=False, sampler=DistributedSampler(data)) for data in (train, test)
    )
    wrapped = DistributedDataParallel(model)
    steps = []
    for epoch in (1, 2):
        train.sampler.set_epoch(epoch)
        for loader in (train, test):
            for source, targets in loader:
                with torch.set_grad_enabled(loader is train):
                    _, loss = wrapped(source, targets)
                if loader is train:
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
                    optimizer.step()
                steps.append(step_of(loss, model))
    return Ended(copied(model.state_dict().items()), steps)


class FromOne(DistributedSampler[Any]):
    """Its first epoch is 1."""

    def set_epoch(self, epoch):
        super().set_epoch(epoch + 1)


class Test(ValidationPhase):
    """Leaves dropout on, as the program does."""

    __test__ = False

    def step(self, learner, step):
        learner.model.train()
        super().step(learner, step)


class Clip:
    """Takes the norm over the model's parameters in their order; that of the optimizer's groups is another one."""

    @hookimpl(updates=("grads",))
    def update_begin(self, learner):
        nn.utils.clip_grad_norm_(learner.model.parameters(), 1.0)


def gpt_here(rank):
    torch.manual_seed(100 + rank)
    world, seen = join(timeout=LIMIT), Steps()
    train, test, model, optimizer = gpt()
    train, test = (
        DataLoader(data, batch_size=16, shuffle=False, sampler=kind(data, world.size, world.rank))
        for data, kind in ((train, FromOne), (test, DistributedSampler))
    )
    learner = Learner(model, loss_of, optimizer, phases=[Test()], plugins=[DDP(shard=False), Clip(), seen])
    learner.fit(train, test, epochs=2)
    return seen.ended(learner.model)


PROGRAMS = {"first": (first_by_hand, first_here), "gpt": (gpt_by_hand, gpt_here)}


def differing(one, other):
    """The names of what is not the same in every bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_ends_with_the_bits_of_the_loop_by_hand(name, size):
    by_hand, here = (run(program, size, timeout=LIMIT) for program in PROGRAMS[name])
    for expected, found in zip(by_hand, here, strict=True):
        assert [loss for loss, _ in found.steps] == [loss for loss, _ in expected.steps]
        for (_, buffers), (_, others) in zip(found.steps, expected.steps, strict=True):
            assert differing(buffers, others) == []
        # all parameters, and the buffers of rank 0: the loop leaves to each other rank those of its own last batch
        assert differing(found.bits, by_hand[0].bits) == []
        assert all("running" in name for name in differing(expected.bits, by_hand[0].bits))
