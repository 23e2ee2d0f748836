"""Epochs without training against raw loops that do the same, on the models of ``whole_step.py``.

    python benchmarks/evaluation.py [--rounds 20] [--runs 3] [--only MODEL] [--compiled] [--json FILE]

The validation epoch and ``evaluate`` take the mean loss and the accuracy; ``predict`` collects the outputs on the CPU.
The raw loops do so, too, and put the mode back. Both run in one process, in turn, on one thread, by the processor.
``--compiled`` compares `WholeStep("always")` with a learner without it instead, in the steady state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from overhead import ratio_of_medians
from sides import interleaved, machine
from torch import Tensor, nn
from whole_step import MODELS

from loopkit import Learner
from loopkit.metrics import Accuracy
from loopkit.plugins import Metrics

BATCHES = 60
BOUND = 1.02


def validated(model: nn.Module, loss_fn: nn.Module, batches: list[Any], accuracy: bool) -> tuple[float, float]:
    """The mean loss and the accuracy, by hand."""
    before = model.training
    model.eval()
    total, correct, samples, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.long), 0, 0
    with torch.no_grad():
        for inputs, targets in batches:
            outputs = model(inputs)
            total.add_(loss_fn(outputs, targets), alpha=len(targets))
            samples += len(targets)
            if accuracy:
                correct.add_(outputs.argmax(1).eq(targets).sum())
                count += targets.numel()
    model.train(before)
    return total.item() / samples, correct.item() / max(count, 1)


def predicted(model: nn.Module, batches: list[Any]) -> Tensor:
    """The outputs of all batches on the CPU, by hand."""
    before = model.training
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(inputs).to("cpu") for inputs, _ in batches])
    model.train(before)
    return outputs


def measured(name: str, rounds: int, runs: int) -> dict[str, Any]:
    make, batch, loss_fn, accuracy, _ = MODELS[name]
    torch.manual_seed(0)
    batches, model = [batch() for _ in range(10)] * (BATCHES // 10), make()
    learner = Learner(model, loss_fn, plugins=[Metrics(Accuracy(axis=1)) if accuracy else Metrics()], standard=False)
    by_hand = lambda: validated(model, loss_fn, batches, accuracy)  # noqa: E731
    pairs = {
        "validation": (lambda: learner.run("val", batches), by_hand),
        "evaluate": (lambda: learner.evaluate(batches), by_hand),
        "predict": (lambda: learner.predict(batches), lambda: predicted(model, batches)),
    }
    figures: dict[str, Any] = {}
    for what, (ours, theirs) in pairs.items():
        ratios, beyond, each = [], [], []
        for _ in range(runs):
            seconds = interleaved({"ours": ours, "theirs": theirs}, rounds, time.thread_time)
            ratios.append(ratio_of_medians(seconds))
            median = statistics.median(seconds["theirs"])
            beyond.append((statistics.median(seconds["ours"]) - median) / BATCHES * 1e6)
            each.append(median / BATCHES * 1e6)
        figures[what] = {"ratio": statistics.median(ratios), "runs": ratios, "us": each, "beyond_us": beyond}
    said = "  ".join(f"{figures[what]['ratio']:6.3f} {statistics.median(figures[what]['us']):7.0f}" for what in pairs)
    print(f"{name:22} {said}", flush=True)
    return figures


def learners_of(name: str) -> list[Learner]:
    """An eager learner of a model, and one whose steps are compiled."""
    from loopkit_whole_step import WholeStep

    make, _, loss_fn, accuracy, _ = MODELS[name]
    torch.manual_seed(0)
    model, metrics = make(), [Accuracy(axis=1)] if accuracy else []
    stacks = [[Metrics(*metrics)], [Metrics(*metrics), WholeStep("always", show=False)]]
    return [Learner(model, loss_fn, plugins=stack, standard=False) for stack in stacks]


def compiled(name: str, rounds: int, runs: int) -> dict[str, Any]:
    """The ratios of compiled epochs to eager ones."""
    eager, whole = learners_of(name)
    batches = [MODELS[name][1]() for _ in range(10)] * (BATCHES // 10)
    figures: dict[str, Any] = {}
    for what in ("evaluate", "predict"):
        sides = {side: getattr(learner, what) for side, learner in {"whole": whole, "eager": eager}.items()}
        taken = {side: (lambda call=call: call(batches)) for side, call in sides.items()}
        found = [interleaved(taken, rounds, time.thread_time) for _ in range(runs)]
        ratios = [ratio_of_medians({"ours": each["whole"], "theirs": each["eager"]}) for each in found]
        least = [min(each["eager"]) / BATCHES * 1e6 for each in found]
        figures[what] = {"ratio": statistics.median(ratios), "runs": ratios, "us": least}
        print(f"{name:22} {what:10} {figures[what]['ratio']:.3f} of {min(least):.0f} us", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.only or list(MODELS)
    if arguments.compiled:
        figures = {name: compiled(name, arguments.rounds, arguments.runs) for name in names}
        if arguments.json:
            arguments.json.write_text(json.dumps({"about": machine(), "figures": figures}, indent=1) + "\n")
        return
    print(f"{'':22} validation      evaluate        predict: the ratio, and us a batch by hand")
    figures = {name: measured(name, arguments.rounds, arguments.runs) for name in names}
    for what in ("validation", "evaluate", "predict"):
        ratios = [figure[what]["ratio"] for figure in figures.values()]
        print(f"{what:22} median {statistics.median(ratios):.3f}, at most {max(ratios):.3f} (aim {BOUND})")
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": machine(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
