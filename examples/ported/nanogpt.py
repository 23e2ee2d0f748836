"""A small GPT on the characters of Python's documentation: accumulation, bfloat16, clipping, warm-up, two optimizers.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Muon: Jordan et al. 2024.
"""

import math
from functools import cache
from pydoc_data import topics

import torch
from both import train_twice
from torch import nn

from loopkit import Learner
from loopkit.data import TensorLoader
from loopkit.plugins import ClipGradNorm, MixedPrecision, Schedule
from loopkit.schedules import cosine, warmup

CONTEXT, WIDTH, HEADS, LAYERS, WARM, ACCUMULATE = 32, 64, 4, 2, 5, 2


@cache
def tokens():
    text = "\n".join(topics.topics.values())
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        size = int(tokens().max()) + 1
        self.characters, self.positions = nn.Embedding(size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, size))
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):
        return self.head(self.blocks(self.characters(ids) + self.positions.weight[: ids.shape[1]]))


make = GPT


def windows(begin, rows):
    """A text in pieces of the context's length, and the same one character later."""
    part = tokens()[begin : begin + rows * CONTEXT + 1]
    return part[:-1].view(rows, CONTEXT), part[1:].view(rows, CONTEXT)


def data(steps=200):
    return TensorLoader(*windows(0, 32 * steps), batch_size=32, shuffle=True)


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizers(model):
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return {"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(others, lr=4e-3)}


def by_hand(model, data, epochs):
    both = optimizers(model)
    rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in both.items()}
    total = epochs * len(data) // ACCUMULATE
    for step, (x, y) in enumerate(batch for _ in range(epochs) for batch in data):
        update = step // ACCUMULATE
        fallen = 0.02 + 0.49 * (1 + math.cos(math.pi * (update - WARM) / (total - WARM)))
        share = (update + 1) / WARM if update < WARM else fallen
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model(x), y)
        (loss / ACCUMULATE).backward()
        if step % ACCUMULATE == ACCUMULATE - 1:
            for name, optimizer in both.items():
                optimizer.param_groups[0]["lr"] = share * rates[name]
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                optimizer.step()
                optimizer.zero_grad()


def with_loopkit(model, data, epochs, *plugins):
    own = [MixedPrecision("bfloat16"), ClipGradNorm(1.0), Schedule(warmup(WARM, then=cosine(end=0.02)))]
    learner = Learner(model, loss_fn, optimizers(model), plugins=[*own, *plugins], accumulate=ACCUMULATE)
    learner.fit(data, epochs=epochs)


def main():
    model = train_twice(make, data, by_hand, with_loopkit, epochs=1)
    inputs, targets = windows(400_000, 500)
    size, text = model.characters.num_embeddings, tokens()[:204_801]
    pairs = torch.bincount(text[:-1] * size + text[1:], minlength=size**2).view(size, size) + 1
    of_pairs = -(pairs / pairs.sum(1, keepdim=True)).log()[inputs, targets].mean()
    own = loss_fn(model(inputs), targets)
    print(f"held-out loss per character: {of_pairs:.3f} of a table of pairs, {own:.3f} of the GPT")


if __name__ == "__main__":
    main()
