"""Ten small models with tasks that they can learn, each in a size for a processor and one for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[nn.Module, Tensor, Tensor]
"""A model, and inputs and targets of some samples."""


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Args:
        make: Gives the model, and inputs and targets of so many samples.
        sizes: The options of ``make`` for each size, and its batch size as ``batch``.
        loss_fn: What is minimised.
        lr: The learning rate of Adam.
    """

    make: Callable[..., Made]
    sizes: Mapping[str, Mapping[str, int]]
    loss_fn: nn.Module
    lr: float = 1e-3

    def build(self, size: str, batches: int, seed: int = 0) -> tuple[Made, int]:
        """The model and its data, made from this seed, and the batch size."""
        options = dict(self.sizes[size])
        batch = options.pop("batch")
        torch.manual_seed(seed)
        return self.make(samples=batches * batch, **options), batch

    def constant(self, targets: Tensor) -> float:
        """The loss of the best answer that does not look at the inputs."""
        if isinstance(self.loss_fn, nn.MSELoss):
            return (targets - targets.mean(0)).square().mean().item()
        shares = targets.flatten().bincount().double() / targets.numel()
        return torch.special.entr(shares).sum().item()


def curve(samples: int, width: int) -> tuple[Tensor, Tensor]:
    """Vectors, and a smooth function of eight of their entries."""
    inputs = torch.randn(samples, width)
    return inputs, torch.tanh(inputs[:, :8] @ torch.randn(8, width) / 2)


def drift(samples: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Sequences, and a squashed sum of their parts so far, in which the past fades."""
    inputs, weights = torch.randn(samples, length, width), torch.randn(width, 4) / width**0.5
    state, states = torch.zeros(samples, 4), []
    for each in (inputs @ weights).unbind(1):
        state = 0.7 * state + each
        states.append(state.tanh())
    return inputs, torch.stack(states, 1)


def pictures(samples: int, side: int, channels: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures, each of one of ten smooth patterns, and which one it is."""
    labels = torch.randint(0, 10, (samples,))
    patterns = functional.interpolate(torch.randn(10, channels, 4, 4), size=(side, side), mode="bilinear")
    return patterns[labels] + 0.5 * torch.randn(samples, channels, side, side), labels


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, length: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, max(width // 64, 4)) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(x) + self.places))).transpose(1, 2)


def transformer(samples: int, width: int, depth: int, length: int, words: int) -> Made:
    """The next of some words, each of which follows from the one before it, seven times of eight."""
    follows, word, sequence = torch.randperm(words), torch.randint(0, words, (samples,)), []
    for _ in range(length + 1):
        sequence.append(word)
        word = torch.where(torch.rand(samples) < 0.875, follows[word], torch.randint(0, words, (samples,)))
    text = torch.stack(sequence, 1)
    return Transformer(width, depth, length, words), text[:, :-1].contiguous(), text[:, 1:].contiguous()


def mlp(samples: int, width: int, hidden: int, depth: int) -> Made:
    widths = [width, *[hidden] * depth]
    layers = [part for n, m in pairwise(widths) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(hidden, width)), *curve(samples, width)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(self.norm(x))))


def residual_tower(samples: int, width: int, depth: int) -> Made:
    return nn.Sequential(*(Residual(width) for _ in range(depth))), *curve(samples, width)


class Feedback(nn.Module):
    """One block that is applied to its own output, so many times."""

    def __init__(self, width: int, hidden: int, times: int) -> None:
        super().__init__()
        self.times, self.enter, self.back = times, nn.Linear(width, hidden), nn.Linear(hidden, hidden)
        self.norm, self.leave = nn.LayerNorm(hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        entered = state = self.enter(x)
        for _ in range(self.times):
            state = self.norm(torch.tanh(entered + self.back(state)))
        return self.leave(state)


def feedback_fixed(samples: int, width: int, hidden: int, times: int) -> Made:
    return Feedback(width, hidden, times), *curve(samples, width)


class Gated(nn.Module):
    """Experts whose outputs are mixed by a gate."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(1)
        return torch.stack([expert(x) for expert in self.experts], 2).matmul(shares.unsqueeze(2)).squeeze(2)


def gated_routing(samples: int, width: int, hidden: int, experts: int) -> Made:
    return Gated(width, hidden, experts), *curve(samples, width)


class Refine(nn.Module):
    """An answer that is corrected from itself and the inputs, so many times."""

    def __init__(self, width: int, hidden: int, times: int) -> None:
        super().__init__()
        self.times, self.guess = times, nn.Linear(width, width)
        self.correct = nn.Sequential(nn.Linear(2 * width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        answer = self.guess(x)
        for _ in range(self.times):
            answer = answer + self.correct(torch.cat([x, answer], 1))
        return answer


def iterative_refine(samples: int, width: int, hidden: int, times: int) -> Made:
    return Refine(width, hidden, times), *curve(samples, width)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM], width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.cells, self.head = kind(width, hidden, depth, batch_first=True), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.cells(x)
        return self.head(outputs)


def gru_seq(samples: int, width: int, hidden: int, depth: int, length: int) -> Made:
    return Recurrent(nn.GRU, width, hidden, depth), *drift(samples, length, width)


def lstm_seq(samples: int, width: int, hidden: int, depth: int, length: int) -> Made:
    return Recurrent(nn.LSTM, width, hidden, depth), *drift(samples, length, width)


def conv_autoenc(samples: int, side: int, channels: int) -> Made:
    inputs, _ = pictures(samples, side, 1)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * channels, channels, 2, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(channels, 1, 2, stride=2),
    )
    return model, inputs, inputs.clone()


def convnet(samples: int, side: int, channels: int) -> Made:
    def block(n: int, m: int) -> list[nn.Module]:
        return [nn.Conv2d(n, m, 3, padding=1, bias=False), nn.BatchNorm2d(m), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(3, channels), *block(channels, 2 * channels), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * channels, 10)), *pictures(samples, side, 3)


def sizes(cpu: dict[str, int], gpu: dict[str, int]) -> dict[str, Any]:
    return {"cpu": cpu, "gpu": gpu}


def recurrent(make: Callable[..., Made]) -> Task:
    return Task(
        make,
        sizes(
            {"batch": 16, "width": 16, "hidden": 32, "depth": 1, "length": 16},
            {"batch": 128, "width": 256, "hidden": 512, "depth": 2, "length": 128},
        ),
        nn.MSELoss(),
        3e-3,
    )


MSE = nn.MSELoss()
TASKS = {
    "transformer": Task(
        transformer,
        sizes(
            {"batch": 16, "width": 64, "depth": 2, "length": 16, "words": 32},
            {"batch": 32, "width": 512, "depth": 5, "length": 128, "words": 1000},
        ),
        nn.CrossEntropyLoss(),
    ),
    "mlp": Task(
        mlp,
        sizes(
            {"batch": 32, "width": 64, "hidden": 128, "depth": 4},
            {"batch": 256, "width": 512, "hidden": 2048, "depth": 4},
        ),
        MSE,
    ),
    "residual_tower": Task(
        residual_tower, sizes({"batch": 32, "width": 64, "depth": 6}, {"batch": 256, "width": 1024, "depth": 10}), MSE
    ),
    "feedback_fixed": Task(
        feedback_fixed,
        sizes(
            {"batch": 32, "width": 64, "hidden": 128, "times": 6},
            {"batch": 256, "width": 512, "hidden": 1024, "times": 10},
        ),
        MSE,
    ),
    "gated_routing": Task(
        gated_routing,
        sizes(
            {"batch": 32, "width": 64, "hidden": 64, "experts": 8},
            {"batch": 256, "width": 512, "hidden": 1024, "experts": 8},
        ),
        MSE,
    ),
    "iterative_refine": Task(
        iterative_refine,
        sizes(
            {"batch": 32, "width": 64, "hidden": 128, "times": 5},
            {"batch": 256, "width": 512, "hidden": 1024, "times": 8},
        ),
        MSE,
    ),
    "gru_seq": recurrent(gru_seq),
    "conv_autoenc": Task(
        conv_autoenc, sizes({"batch": 16, "side": 16, "channels": 8}, {"batch": 128, "side": 64, "channels": 64}), MSE
    ),
    "lstm_seq": recurrent(lstm_seq),
    "convnet": Task(
        convnet,
        sizes({"batch": 16, "side": 16, "channels": 8}, {"batch": 128, "side": 64, "channels": 64}),
        nn.CrossEntropyLoss(),
    ),
}
