"""A training step as one compiled graph against a loop by hand that leaves nothing to win around the step.

    pip install -e . -e plugins/loopkit-whole-step
    python benchmarks/whole_step.py [--only MODEL] [--rounds 5] [--runs 5] [--json FILE]

All sides in one process, in turn, torch on one thread, after compiling, in epochs of 100 steps. The loop by hand
has a fused optimizer, clips by one foreach call, sets the learning rate itself, and keeps its metrics on the device.
``whole`` is loopkit with `WholeStep`, ``loopkit`` without, and ``short`` a whole fit of 200 to 1,000 steps with it,
which are too few to repay compiling. The process ends with 1 if a model with it is beyond its bound, or a short fit;
or, without it, one of five models beyond 1.02, or the median of the five beyond 1.00.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sides import interleaved, machine
from torch import Tensor, nn

from loopkit import Learner
from loopkit.metrics import Accuracy
from loopkit.plugins import ClipGradNorm, Metrics, Schedule
from loopkit.schedules import cosine

TOTAL = 10**6
SHORT = 1.02
"""What a fit may take that is too short to repay compiling."""
FIVE = ("MLP", "LeNet", "conv autoencoder", "LSTM", "GPT")
EACH, MEDIAN = 1.02, 1.00
"""What these may take without the plugin."""
RATE = 1e-3


class Block(nn.Module):
    """A block of a transformer in which each place sees those before it alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mixed(self.one(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.wide(self.two(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)).mean(1))


class GPT(nn.Module):
    def __init__(self, words: int = 65, length: int = 32, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(2)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.blocks(self.words(x) + self.places))).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner, self.last = kind(16, 64, batch_first=True), nn.Linear(64, 10)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def conv(inner: int, outer: int) -> list[nn.Module]:
    return [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]


def cnn() -> nn.Module:
    pooled = [*conv(1, 16), *conv(16, 16), nn.MaxPool2d(2), *conv(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*pooled, nn.Linear(32, 10))


def autoencoder() -> nn.Module:
    down = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    up = [nn.ConvTranspose2d(32, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 1, 2, 2)]
    return nn.Sequential(*down, *up)


def lenet() -> nn.Module:
    first = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    rest = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, *rest)


def classes(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.randint(0, 10, shape[:1])


def images() -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 1, 16, 16)
    return x, x


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 65, (16, 32)), torch.randint(0, 65, (16, 32))


# model, batch, loss, whether there are classes, what it may take
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], nn.Module, bool, float]] = {
    "MLP": (mlp, lambda: classes(32, 64), nn.CrossEntropyLoss(), True, 0.40),
    "encoder transformer": (Encoder, lambda: classes(32, 16, 16), nn.CrossEntropyLoss(), True, 0.75),
    "CNN with BatchNorm": (cnn, lambda: classes(32, 1, 16, 16), nn.CrossEntropyLoss(), True, 0.80),
    "conv autoencoder": (autoencoder, images, nn.MSELoss(), False, 0.88),
    "GPT": (GPT, words, nn.CrossEntropyLoss(), True, 0.90),
    "LeNet": (lenet, lambda: classes(32, 1, 28, 28), nn.CrossEntropyLoss(), True, 0.92),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: classes(32, 24, 16), nn.CrossEntropyLoss(), True, 0.50),
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: classes(32, 16, 16), nn.CrossEntropyLoss(), True, 1.02),
}


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, **options)


def strong(model: nn.Module, loss_fn: nn.Module, batches: list[Any], accuracy: bool) -> Callable[[], Any]:
    """A loop by hand with every trick."""
    optimizer = optimizer_of(model, fused=True)
    params, (group,) = list(model.parameters()), optimizer.param_groups
    updates = 0

    def run() -> Any:
        nonlocal updates
        total, correct, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long), 0
        for inputs, targets in batches:
            for p in params:
                p.grad = None
            outputs = model(inputs)
            loss = loss_fn(outputs, targets)
            loss.backward()
            grads = [p.grad for p in params]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, norm.add(1e-6).reciprocal_().clamp_(max=1.0))
            optimizer.step()
            updates += 1
            group["lr"] = RATE * (0.5 * (1 + math.cos(math.pi * updates / TOTAL)))
            total.add_(loss.detach(), alpha=len(targets))
            if accuracy:
                correct.add_(outputs.argmax(1).eq(targets).sum())
            count += targets.numel()
        return total.item() / count, correct.item() / count

    return run


def learner_of(model: nn.Module, loss_fn: nn.Module, accuracy: bool, *more: Any) -> Learner:
    from loopkit.groups import auto_fused

    metrics = Metrics(Accuracy(axis=1)) if accuracy else Metrics()
    stack = [metrics, ClipGradNorm(1.0), Schedule(cosine(TOTAL)), *more]
    return Learner(
        model, loss_fn, auto_fused(torch.optim.AdamW, lr=RATE, weight_decay=0.01), plugins=stack, standard=False
    )


class Sides:
    """The sides of one model: an epoch of 100 steps by hand, with the plugin and without; and short fits.

    Args:
        name: The model's.
    """

    def __init__(self, name: str) -> None:
        from loopkit_whole_step import WholeStep

        make, batch, loss_fn, accuracy, self.bound = MODELS[name]
        torch.manual_seed(0)
        self.batches = [batch() for _ in range(10)] * 10

        def fresh() -> nn.Module:
            torch.manual_seed(1)
            return make()

        self.plugin = WholeStep("always", show=False)
        learner = learner_of(fresh(), loss_fn, accuracy, self.plugin)
        plain = learner_of(fresh(), loss_fn, accuracy)
        brief = learner_of(fresh(), loss_fn, accuracy, WholeStep(show=False))
        self.epochs: dict[str, Callable[[], Any]] = {
            "strong": strong(fresh(), loss_fn, self.batches, accuracy),
            "whole": lambda: learner.run("train", self.batches),
            "loopkit": lambda: plain.run("train", self.batches),
        }
        self.epochs["strong"]()
        started = time.thread_time()
        self.epochs["strong"]()
        several = self.batches * max(2, min(10, int(0.2 / (time.thread_time() - started))))
        self.fits: dict[str, Callable[[], Any]] = {
            "strong": strong(fresh(), loss_fn, several, accuracy),
            "short": lambda: brief.fit(several, epochs=1),
        }

    def compile(self) -> float:
        """Three epochs, after which the step is compiled; returns their seconds."""
        started = time.perf_counter()
        for _ in range(3):
            self.epochs["whole"]()
        return time.perf_counter() - started


def measured(name: str, rounds: int, runs: int) -> dict[str, Any]:
    made = Sides(name)
    batches, sides, fits, whole, bound = made.batches, made.epochs, made.fits, made.plugin, made.bound
    seconds = made.compile()
    ratios: dict[str, list[float]] = {"whole": [], "loopkit": [], "short": []}
    each = []
    for _ in range(runs):
        timed = interleaved(sides, rounds, time.thread_time)
        for side in ("whole", "loopkit"):
            ratios[side].append(statistics.median(timed[side]) / statistics.median(timed["strong"]))
        long = interleaved(fits, max(rounds // 2, 1), time.thread_time)
        ratios["short"].append(statistics.median(long["short"]) / statistics.median(long["strong"]))
        each.append(statistics.median(timed["strong"]) / len(batches) * 1e6)
    (shape,) = whole.shapes.values()
    ratio = statistics.median(ratios["whole"])
    print(
        f"{name:22} {ratio:5.2f}  (at most {bound:.2f}; runs {min(ratios['whole']):.2f} to {max(ratios['whole']):.2f}; "
        f"without it {statistics.median(ratios['loopkit']):.3f}; a short fit {statistics.median(ratios['short']):.3f}; "
        f"by hand {statistics.median(each):.0f} us a step; "
        f"{shape.mode}, compiled in {shape.seconds:.1f} s{', because ' + shape.reason if shape.reason else ''})",
        flush=True,
    )
    return {"ratio": ratio, "runs": ratios, "us": each, "bound": bound, "compiling": shape.seconds, "first": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {name: measured(name, arguments.rounds, arguments.runs) for name in arguments.only or MODELS}
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": machine(), "figures": figures}, indent=1) + "\n")
    sys.exit("; ".join(beyond(figures)) or None)


def beyond(figures: dict[str, dict[str, Any]]) -> list[str]:
    """What is beyond its bound, in words."""
    said = [f"{name}: {each['ratio']:.3f}" for name, each in figures.items() if each["ratio"] > each["bound"]]
    for name, each in figures.items():
        if (short := statistics.median(each["runs"]["short"])) > SHORT:
            said.append(f"{name}, a short fit: {short:.3f}")
    plain = {name: statistics.median(figures[name]["runs"]["loopkit"]) for name in FIVE if name in figures}
    said += [f"{name}, without it: {ratio:.3f}" for name, ratio in plain.items() if ratio > EACH]
    if len(plain) == len(FIVE) and (median := statistics.median(plain.values())) > MEDIAN:
        said.append(f"the five without it: {median:.3f}")
    return said


if __name__ == "__main__":
    main()
