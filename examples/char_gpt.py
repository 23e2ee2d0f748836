"""A small GPT on the characters of Python's own documentation: accumulation, warm-up, clipping, bfloat16.

It must predict text that it has not seen better than a table of all character triples.
"""

from pydoc_data import topics

import torch
from torch import nn

from loopkit import Learner, data, plugins
from loopkit.schedules import cosine, warmup

CONTEXT, WIDTH, HEADS, LAYERS = 32, 128, 4, 2

torch.manual_seed(0)
text = "\n".join(topics.topics.values())
vocabulary = sorted(set(text))
tokens = torch.tensor([vocabulary.index(character) for character in text])
size, cut = len(vocabulary), len(tokens) * 9 // 10


def windows(part):
    """A text in pieces of the context's length, and the same one character later."""
    rows = (len(part) - 1) // CONTEXT
    return part[: rows * CONTEXT].view(rows, CONTEXT), part[1 : rows * CONTEXT + 1].view(rows, CONTEXT)


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
        self.characters, self.positions = nn.Embedding(size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, size))
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):
        return self.head(self.blocks(self.characters(ids) + self.positions.weight[: ids.shape[1]]))


def loss_fn(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = GPT()
# Two optimizers over one model: Muon for the matrices of the blocks, AdamW for everything else
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
learner = Learner(
    model,
    loss_fn,
    {"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95))},
    plugins=[
        plugins.MixedPrecision("bfloat16"),
        plugins.ClipGradNorm(1.0),
        plugins.Schedule(warmup(40, then=cosine(end=0.02))),
    ],
    accumulate=2,
)
train = data.TensorLoader(*windows(tokens[:cut]), batch_size=32, shuffle=True)
val = data.TensorLoader(*windows(tokens[cut:]), batch_size=128)
result = learner.fit(train, val, epochs=1)
print(result)

# The table: how often each character followed each two, smoothed with the pairs, these with the single characters
counts = torch.zeros(size, size, size).index_put_(
    (tokens[: cut - 2], tokens[1 : cut - 1], tokens[2:cut]), torch.ones(()), accumulate=True
)
one = (counts.sum((0, 1)) + 1) / (cut - 2 + size)
two = (counts.sum(0) + 5 * one) / (counts.sum((0, 2)).unsqueeze(-1) + 5)
three = (counts + 5 * two) / (counts.sum(2, keepdim=True) + 5)
table = -three[tokens[cut:-2], tokens[cut + 1 : -1], tokens[cut + 2 :]].log().mean().item()
print(f"held-out loss per character: {table:.3f} of the table, {result.metrics['val/loss']:.3f} of the GPT")
assert result.metrics["val/loss"] < table - 0.1, "the GPT should beat the table clearly"
