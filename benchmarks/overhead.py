"""What loopkit adds to a training step: each line runs both sides in this process, interleaved.

    python benchmarks/overhead.py [--rounds 60] [--runs 5] [--only PART] [--json FILE]

Peers are measured, too, after ``pip install -c constraints.txt -e . -r benchmarks/requirements-peers.txt``.

The work: digits in batches of 32 that are cut beforehand, an MLP 64-64-10, SGD with momentum, torch on one thread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from peers import found
from sides import BATCH, Screen, Work, digits, interleaved, machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from loopkit import Learner, Phase, hookimpl
from loopkit.checkpoint import save_weights
from loopkit.data import TensorLoader
from loopkit.engine.kept.witness.root import Root
from loopkit.engine.kept.witness.witness import Witness
from loopkit.groups import auto_fused
from loopkit.metrics import Accuracy
from loopkit.plugins import Metrics, MixedPrecision, Progress
from loopkit.plugins.gradients import ClipGradNorm
from loopkit.plugins.schedule import Schedule
from loopkit.schedules import cosine


def problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def ratio_of_medians(seconds: dict[str, list[float]]) -> float:
    return statistics.median(seconds["ours"]) / statistics.median(seconds["theirs"])


class Report:
    def __init__(self, rounds: int, runs: int) -> None:
        self.rounds, self.runs = rounds, runs
        self.figures: dict[str, Any] = {}

    def ratio(self, title: str, ours: Work, theirs: Work, bound: float, steps: int) -> None:
        """Print ours / theirs: per run the ratio of medians and of minima; the median and the worst of all runs."""
        medians, minima, each = [], [], []
        for _ in range(self.runs):
            seconds = interleaved({"ours": ours, "theirs": theirs}, self.rounds)
            medians.append(ratio_of_medians(seconds))
            minima.append(min(seconds["ours"]) / min(seconds["theirs"]))
            each.append(statistics.median(seconds["theirs"]) / steps * 1e6)
        median, low = statistics.median(medians), statistics.median(minima)
        limit = "no bound" if bound == math.inf else f"at most {bound:.2f}"
        print(
            f"{title:62} {median:6.3f}  (worst run {max(medians):.3f}; of minima {low:.3f}; {limit}; "
            f"theirs {statistics.median(each):.0f} us a step)",
            flush=True,
        )
        self.figures[title] = {
            "median": median,
            "runs": medians,
            "minima": minima,
            "bound": None if bound == math.inf else bound,
            "us": each,
        }

    def value(self, title: str, value: float, unit: str, bound: float | None = None) -> None:
        limit = "" if bound is None else f"  (at most {bound:g})"
        print(f"{title:62} {value:6.2f} {unit}{limit}", flush=True)
        self.figures[title] = {"value": value, "unit": unit, "bound": bound}


def bare(report: Report, batches: list[Any]) -> None:
    loss_fn = nn.CrossEntropyLoss()
    model, optimizer = problem()
    cached_model, cached_optimizer = problem()
    params = list(cached_model.parameters())
    learner = Learner(*_with_loss(problem(), loss_fn), standard=False)

    def raw() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()

    def raw_cached() -> None:
        for inputs, targets in batches:
            for p in params:
                p.grad = None
            loss = loss_fn(cached_model(inputs), targets)
            loss.backward()
            cached_optimizer.step()

    def engine() -> None:
        learner.run("train", batches)

    report.ratio("bare engine / raw loop with zero_grad()", engine, raw, 1.00, len(batches))
    report.ratio("bare engine / raw loop with cached p.grad = None", engine, raw_cached, 1.03, len(batches))

    def epochs_of_one_step() -> None:
        for batch in batches:
            learner.run("train", [batch])

    report.ratio("bare engine, epochs of one step / as many steps", epochs_of_one_step, engine, 1.40, len(batches))


def _with_loss(made: tuple[nn.Module, torch.optim.Optimizer], loss_fn: nn.Module) -> tuple[Any, Any, Any]:
    return made[0], loss_fn, made[1]


def with_metrics(report: Report, batches: list[Any]) -> None:
    loss_fn = nn.CrossEntropyLoss()
    model, optimizer = problem()
    small = Learner(
        *_with_loss(problem(), loss_fn),
        plugins=[Metrics(Accuracy()), Progress(file=Screen())],
        standard=False,
    )
    default = Learner(*_with_loss(problem(), loss_fn), plugins=[Metrics(Accuracy()), Progress(file=Screen())])
    screen = Screen()

    def raw() -> tuple[float, float]:
        total = torch.zeros(())
        correct = torch.zeros((), dtype=torch.long)
        count = 0
        for inputs, targets in tqdm(batches, file=screen, leave=False):
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = loss_fn(outputs, targets)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(targets)
            correct += (outputs.argmax(1) == targets).sum()
            count += len(targets)
        return total.item() / count, correct.item() / count

    report.ratio(
        "loss, accuracy, bar / raw loop doing the same with tqdm",
        lambda: small.run("train", batches),
        raw,
        1.00,
        len(batches),
    )
    report.ratio(
        "default learner with accuracy / the same raw loop",
        lambda: default.run("train", batches),
        raw,
        1.05,
        len(batches),
    )


def standard_stack(report: Report, batches: list[Any]) -> None:
    """Loss, accuracy, norm clipping, a cosine schedule per update and a bar, against two raw loops."""
    loss_fn = nn.CrossEntropyLoss()
    total = 10**6
    base = 0.05

    def learner(optimizer: Any = None, *more: Any) -> Learner:
        model, given = problem()
        stack = [Metrics(Accuracy()), ClipGradNorm(1.0), Schedule(cosine(total)), Progress(file=Screen()), *more]
        return Learner(model, loss_fn, optimizer or given, plugins=stack, standard=False)

    screen = Screen()

    def by_hand(narrow: bool = False) -> Callable[[], tuple[float, float]]:
        model, optimizer = problem()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)

        def run() -> tuple[float, float]:
            total_loss = torch.zeros(())
            correct = torch.zeros((), dtype=torch.long)
            count = 0
            for inputs, targets in tqdm(batches, file=screen, leave=False):
                optimizer.zero_grad()
                if narrow:
                    with torch.autocast("cpu", torch.bfloat16):
                        outputs = model(inputs)
                        loss = loss_fn(outputs, targets)
                else:
                    outputs = model(inputs)
                    loss = loss_fn(outputs, targets)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                total_loss += loss.detach() * len(targets)
                correct += (outputs.argmax(1) == targets).sum()
                count += len(targets)
            return total_loss.item() / count, correct.item() / count

        return run

    idiomatic = by_hand()
    tuned_model, tuned_optimizer = problem()
    params = list(tuned_model.parameters())
    group = tuned_optimizer.param_groups[0]
    updates = 0

    def tuned() -> tuple[float, float]:
        nonlocal updates
        total_loss = torch.zeros((), dtype=torch.float64)
        correct = torch.zeros((), dtype=torch.long)
        count = 0
        bar = tqdm(total=len(batches), file=screen, leave=False, mininterval=0)
        shown = 0.0
        for number, (inputs, targets) in enumerate(batches, 1):
            for p in params:
                p.grad = None
            outputs = tuned_model(inputs)
            loss = loss_fn(outputs, targets)
            loss.backward()
            grads = [p.grad for p in params]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, norm.add(1e-6).reciprocal_().mul_(1.0).clamp_(max=1.0))
            tuned_optimizer.step()
            updates += 1
            group["lr"] = base * (0.5 * (1 + math.cos(math.pi * updates / total)))
            samples = len(targets)
            total_loss.add_(loss.detach(), alpha=samples)
            correct.add_(outputs.argmax(1).eq(targets).sum())
            count += samples
            now = time.monotonic()
            if now >= shown + 0.1:
                shown = now
                bar.n = number
                bar.refresh()
        bar.close()
        return total_loss.item() / count, correct.item() / count

    ours = learner()
    title = "standard stack"
    report.ratio(f"{title} / idiomatic raw loop", lambda: ours.run("train", batches), idiomatic, 0.85, len(batches))
    report.ratio(
        f"{title} / raw loop with the same tricks", lambda: ours.run("train", batches), tuned, 1.06, len(batches)
    )
    narrow = learner(None, MixedPrecision("bfloat16"))
    report.ratio(
        f"{title}, bfloat16 / idiomatic raw loop in bfloat16",
        lambda: narrow.run("train", batches),
        by_hand(narrow=True),
        1.00,
        len(batches),
    )
    fused = learner(auto_fused(torch.optim.SGD, lr=base, momentum=0.9))
    report.ratio(
        f"{title}, fused optimizer / idiomatic raw loop",
        lambda: fused.run("train", batches),
        idiomatic,
        0.85,
        len(batches),
    )


def evaluation(report: Report, batches: list[Any]) -> None:
    """Epochs without training, against raw loops that do the same; the aim of all is 1.02."""
    loss_fn = nn.CrossEntropyLoss()
    model, optimizer = problem()
    ours = Learner(model, loss_fn, optimizer, plugins=[Metrics(Accuracy())], standard=False)
    inputs_alone = [inputs for inputs, _ in batches]

    def validation() -> tuple[float, float]:
        model.eval()
        total = torch.zeros((), dtype=torch.float64)
        correct = torch.zeros((), dtype=torch.long)
        count = 0
        with torch.no_grad():
            for inputs, targets in batches:
                outputs = model(inputs)
                total += loss_fn(outputs, targets) * len(targets)
                correct += (outputs.argmax(1) == targets).sum()
                count += len(targets)
        model.train()
        return total.item() / count, correct.item() / count

    def prediction() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([model(inputs) for inputs in inputs_alone])
        model.train()
        return outputs

    steps = len(batches)
    title = "validation epoch / raw loop doing the same"
    report.ratio(title, lambda: ours.run("val", batches), validation, 1.10, steps)
    report.ratio("evaluate / the same raw loop", lambda: ours.evaluate(batches), validation, 1.10, steps)
    report.ratio("predict / raw loop of forwards and cat", lambda: ours.predict(inputs_alone), prediction, 1.35, steps)


class Nothing(Phase):
    """A phase whose step does nothing."""

    name = "nothing"
    training = True

    def step(self, learner: Any, step: Any) -> None:
        pass


class Listener:
    def __init__(self, number: int) -> None:
        self.name = f"listener_{number}"

    @hookimpl
    def step_end(self, step: Any) -> None:
        pass


class EpochListener(Listener):
    @hookimpl
    def step_end(self, epoch: Any, step: Any) -> None:
        pass


def dispatch(report: Report, batches: list[Any]) -> None:
    model, optimizer = problem()
    many = [batches[0]] * 20_000
    listeners = {str(count): [Listener(i) for i in range(count)] for count in (0, 1, 2, 9)}
    learners = {
        name: Learner(model, None, optimizer, plugins=each, phases=[Nothing()], standard=False)
        for name, each in {**listeners, "epoch": [EpochListener(0)]}.items()
    }
    seconds = interleaved({name: (lambda it=it: it.run("nothing", many)) for name, it in learners.items()}, 15)
    cost = {name: min(values) / len(many) * 1e6 for name, values in seconds.items()}
    listener = Listener(0)
    call = listener.step_end
    loops = 200_000

    def calls() -> None:
        for _ in range(loops):
            call(None)

    def no_calls() -> None:
        for _ in range(loops):
            pass

    timed = interleaved({"calls": calls, "none": no_calls}, 9)
    method = (min(timed["calls"]) - min(timed["none"])) / loops * 1e6
    report.value("an empty step", cost["0"], "us", 0.6)
    report.value("the first listener of an event", cost["1"] - cost["0"], "us", 0.4)
    report.value("the first listener, which asks for the epoch", cost["epoch"] - cost["0"], "us", 0.2)
    report.value("each further no-op listener", (cost["9"] - cost["2"]) / 7, "us", 2 * method)
    report.value("a plain method call", method, "us")


def loaders(report: Report, batches: list[Any]) -> None:
    x, y = torch.randn(100_000, 64), torch.randint(0, 10, (100_000,))
    ours = TensorLoader(x, y, batch_size=BATCH, shuffle=True)
    theirs = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    rounds, runs = report.rounds, report.runs
    report.rounds, report.runs = 3, 1
    count = len(ours)
    report.ratio(
        "TensorLoader / DataLoader, 100,000 x 64",
        lambda: sum(1 for _ in ours),
        lambda: sum(1 for _ in theirs),
        0.1,
        count,
    )
    report.rounds, report.runs = rounds, runs

    loss_fn = nn.CrossEntropyLoss()
    model, optimizer = problem()
    learner = Learner(*_with_loss(problem(), loss_fn), standard=False)
    images, labels = digits()
    resident = TensorLoader(images, labels, batch_size=BATCH, shuffle=True)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)

    def raw() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()

    report.ratio(
        "digits epoch with TensorLoader / raw loop on a DataLoader",
        lambda: learner.run("train", resident),
        raw,
        0.75,
        57,
    )


FIRST = """
import sys, time
sys.path.insert(0, {here!r})
import overhead
from torch import nn
overhead.torch.set_num_threads(1)
images, labels = overhead.digits()
batch = images[:32], labels[:32]
model, optimizer = overhead.problem()
loss_fn = nn.CrossEntropyLoss()
start = time.perf_counter()
if {engine}:
    overhead.Learner(model, loss_fn, optimizer).run("train", [batch])
else:
    loss_fn(model(batch[0]), batch[1]).backward()
    optimizer.step()
print(time.perf_counter() - start)
"""


def start_up(report: Report, batches: list[Any]) -> None:
    def printed(code: str) -> float:
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    code = "import gc, torch, pluggy, time; {}; t = time.perf_counter(); import loopkit; print(time.perf_counter() - t)"
    for what, collector, bound in (("", "gc.disable()", 30), (", with garbage collections", "0", None)):
        seconds = min(printed(code.format(collector)) for _ in range(5))
        report.value(f"import loopkit beyond import torch, pluggy{what}", seconds * 1e3, "ms", bound)

    here = str(Path(__file__).parent)
    pairs = [[printed(FIRST.format(here=here, engine=engine)) for engine in (True, False)] for _ in range(5)]
    more = statistics.median(engine - raw for engine, raw in pairs)
    report.value("Learner(...) and its first step beyond the raw loop's", more * 1e3, "ms", 5)


PEAK = """
import re, sys
sys.path.insert(0, {here!r})
import overhead
from torch import nn
overhead.torch.set_num_threads(1)
x, y = overhead.digits()
batches = list(zip(x.split(32), y.split(32)))
model, optimizer = overhead.problem()
loss_fn = nn.CrossEntropyLoss()
learner = overhead.Learner(model, loss_fn, optimizer, standard=False)

def run():
    if {engine}:
        learner.run("train", batches)
    else:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()

def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # from here on VmHWM is the peak, not that of the imports
for _ in range(20):
    run()
print(memory("VmHWM") - before)
"""


class Block(nn.Module):
    """One of a deep model: five modules, with options in plain attributes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.scale = width, width**-0.5
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def witness(report: Report, batches: list[Any]) -> None:
    """What it costs to look at a model when a fit begins, and at each save of its weights, the smallest there is."""
    for blocks, bound in ((40, 1.0), (660, 40.0)):
        model = nn.Sequential(*(Block(64) for _ in range(blocks)))
        roots = Given([Root("model 'model'", model, "", lambda found: False)])
        watching = Witness(partial(Given, roots))

        def begin(watching: Witness = watching) -> None:
            watching.begin()
            watching.look()

        def save(model: nn.Module = model) -> None:
            with tempfile.TemporaryDirectory() as directory:
                save_weights(model, Path(directory) / "weights.safetensors")

        seconds = interleaved({"begin": begin, "compare": watching.warn, "save": save}, 9)
        cost = {name: statistics.median(values) for name, values in seconds.items()}
        modules = f"{5 * blocks + 1:,} modules"
        report.value(f"the witness as a fit begins, {modules}", cost["begin"] * 1e3, "ms", bound)
        report.value(f"the witness at a save, {modules}", 100 * cost["compare"] / cost["save"], "% of a save", 1.0)


class Given(list[Root]):
    """Roots, of which no tensor is saved elsewhere."""

    def saved(self) -> tuple[torch.Tensor, ...]:
        return ()


def memory(report: Report, batches: list[Any]) -> None:
    here = str(Path(__file__).parent)

    def peak(engine: bool) -> float:
        command = [sys.executable, "-c", PEAK.format(here=here, engine=engine)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pairs = [(peak(True), peak(False)) for _ in range(5)]
    more = statistics.median(engine - raw for engine, raw in pairs)
    report.value("peak memory of a fit beyond the raw loop's", more, "MiB", 1)

    tiny = nn.Linear(2, 2)
    learner = Learner(tiny, nn.MSELoss(), torch.optim.SGD(tiny.parameters(), lr=1e-3), standard=False)
    batches = [(torch.ones(1, 2), torch.zeros(1, 2))] * 10_000
    process = psutil.Process()
    for _ in range(3):
        learner.run("train", batches)
    before = process.memory_info().rss
    for _ in range(30):
        learner.run("train", batches)
    report.value("growth of RSS over 300,000 tiny steps", (process.memory_info().rss - before) / 2**20, "MiB", 1)


def peers(report: Report, batches: list[Any]) -> None:
    """Other engines against the raw loop with ``zero_grad()``, those that ``requirements-peers.txt`` has installed."""
    loss_fn = nn.CrossEntropyLoss()
    raw_model, raw_optimizer = problem()

    def raw() -> None:
        for inputs, targets in batches:
            raw_optimizer.zero_grad()
            loss = loss_fn(raw_model(inputs), targets)
            loss.backward()
            raw_optimizer.step()

    for name, make in found(("accelerate", "ignite", "lightning")).items():
        title = f"peer: {name} / raw loop with zero_grad()"
        report.ratio(title, make(*problem(), loss_fn, batches), raw, math.inf, len(batches))


def gpu(report: Report, batches: list[Any]) -> None:
    """An epoch with the standard plugins in which any wait for the device inside a step is an error."""
    if not torch.cuda.is_available():
        print("no CUDA device: the epoch under set_sync_debug_mode('error') was not run")
        return
    model, _ = problem()

    class NoSync:
        name = "no_sync_allowed"

        @hookimpl(before=("metrics", "progress", "history", "sanity_check", "non_finite"))
        def step_begin(self) -> None:
            torch.cuda.set_sync_debug_mode("error")

        @hookimpl
        def epoch_end(self) -> None:
            torch.cuda.set_sync_debug_mode("default")

    on_device = [(x.cuda(), y.cuda()) for x, y in batches]
    learner = Learner(
        model.cuda(),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        plugins=[Metrics(Accuracy()), Progress(file=Screen()), NoSync()],
        order=["no_sync_allowed", "metrics"],
    )
    learner.fit(on_device, epochs=2)
    report.value("GPU: waits for the device inside a step", 0, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each run")
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--only", help="the name of one part, such as bare or standard_stack")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = digits()
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    report = Report(arguments.rounds, arguments.runs)
    about = machine()
    print(f"{datetime.date.today()}, {about}; {report.runs} runs of {report.rounds} rounds\n")
    for part in (
        bare,
        with_metrics,
        standard_stack,
        evaluation,
        dispatch,
        loaders,
        start_up,
        witness,
        memory,
        gpu,
        peers,
    ):
        if arguments.only in (None, part.__name__):
            part(report, batches)
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": about, "figures": report.figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
