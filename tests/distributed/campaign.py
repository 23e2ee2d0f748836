"""Failures of one process, made at random: ``python tests/distributed/campaign.py --trials 30`` prints a table."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from distributed.processes import Outcome, run
from loopkit import Learner, every, hookimpl, metrics
from loopkit.checkpoint import storage
from loopkit.checkpoint.bundle import read_state
from loopkit.data import TensorLoader
from loopkit.distributed import watch
from loopkit.errors import PeerError
from loopkit.plugins import DDP, Checkpoint, Metrics

TIMEOUT = 5.0
"""Seconds, of the DDP of trials in which it has to run out."""
PATIENT = 300.0
"""Seconds, of the others'."""
SLACK = 5.0
"""Seconds after the timeout within which every survivor ends."""
LOADED = 60.0
"""Seconds more that a machine may take which does other things, too."""
KINDS = ("kill", "raise", "hang", "short")
HOOKS = ("step_begin", "update_begin", "step_end", "epoch_begin", "epoch_end", "phase_end")
STEPS = 12
"""In a pass."""


@dataclass(frozen=True)
class Plan:
    """What happens to whom, and when."""

    kind: str
    victim: int
    processes: int = 2
    hook: str = "step_end"
    step: int = 7
    """Of the second epoch, for what happens in a step."""
    delay: float = 0.0
    """Seconds after the first step, for a kill."""
    options: dict[str, object] = field(default_factory=dict)


class Fails:
    """Fails in a hook, as planned."""

    def __init__(self, plan, told):
        self.plan, self.told = plan, told

    def _act(self, learner, hook, phase, index):
        plan = self.plan
        if learner.world.rank != plan.victim or not phase.training:
            return
        if plan.kind == "kill" and learner.progress.steps == 1 and hook == "step_end":
            threading.Timer(plan.delay, self._die).start()
        epochs = learner.progress.epochs - (hook == "phase_end")
        if hook == plan.hook and epochs == 1 and index in (None, plan.step):
            if plan.kind == "raise":
                self.told.write_text(str(time.time()))
                raise ValueError("the data is bad")
            if plan.kind == "hang":
                self.told.write_text(str(time.time()))
                time.sleep(600)

    def _die(self):
        self.told.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    @hookimpl
    def epoch_begin(self, learner, phase):
        self._act(learner, "epoch_begin", phase, None)

    @hookimpl
    def step_begin(self, learner, phase, step):
        self._act(learner, "step_begin", phase, step.index)

    @hookimpl
    def update_begin(self, learner, phase, step):
        self._act(learner, "update_begin", phase, step.index)

    @hookimpl
    def step_end(self, learner, phase, step):
        self._act(learner, "step_end", phase, step.index)

    @hookimpl
    def epoch_end(self, learner, phase):
        self._act(learner, "epoch_end", phase, None)

    @hookimpl
    def phase_end(self, learner, phase):
        self._act(learner, "phase_end", phase, None)


class Ends:
    """Notes that ``fit_end`` came."""

    reason = ""

    @hookimpl
    def fit_end(self, result):
        self.reason = result.reason


class Unsized:
    """Batches of a number that is not known before."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            yield torch.randn(2, 6, generator=generator), torch.randint(0, 3, (2,), generator=generator)


def data(plan, rank):
    if plan.kind == "short":
        return Unsized(STEPS - 5 * (rank == plan.victim))
    count = STEPS * plan.processes * 2
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return TensorLoader(inputs, targets, batch_size=2, shuffle=True, seed=3)


@contextlib.contextmanager
def noted(learner, entered):
    """Notes collectives that are entered after a process was found to be gone."""
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list")
    before = {name: getattr(dist, name) for name in names}

    def noting(name, fn):
        def call(*args, **kwargs):
            if learner.world.broken:
                entered.append(name)
            return fn(*args, **kwargs)

        return call

    for name, fn in before.items():
        setattr(dist, name, noting(name, fn))
    try:
        yield
    finally:
        for name, fn in before.items():
            setattr(dist, name, fn)


def train(rank, plan, directory):
    """One process of a trial; returns what came of it."""
    torch.manual_seed(0)
    ends, entered = Ends(), []
    learner = Learner(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        plugins=[
            DDP(
                timeout=TIMEOUT if plan.kind in ("hang", "short") else PATIENT,
                shard=plan.kind != "short",
                **plan.options,
            ),
            Checkpoint(directory, save=every(updates=5)),
            Metrics(metrics.Accuracy()),
            Fails(plan, directory.parent / "told"),
            ends,
        ],
        standard=False,
    )
    error = None
    if plan.kind == "short" and rank == plan.victim:
        (directory.parent / "told").write_text(str(time.time()))
    with noted(learner, entered):
        try:
            learner.fit(data(plan, rank), epochs=100000 if plan.kind == "kill" else 3)
        except Exception as caught:
            error = caught
            watch.leave()  # as at the end of an interpreter
            if rank == plan.victim:
                raise
    notes = getattr(error, "__notes__", [])
    return {
        "error": f"{type(error).__name__}: {error}",
        "peer": isinstance(error, PeerError),
        "notes": notes,
        "reason": ends.reason,
        "entered": entered,
        "steps": learner.progress.steps,
    }


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    survivors: list[Outcome]
    victim: Outcome
    seconds: float
    """From the failure to the end of the last survivor."""
    last: float
    """From the failure to the end of the last process."""
    saved: int
    """The step of the newest checkpoint; -1 if there is none."""

    def texts(self) -> list[str]:
        """What each survivor said of it: its error, or the last words of its watch."""
        return [each.value["error"] if each.value else each.output for each in self.survivors]

    def faults(self, plan: Plan) -> list[str]:
        """What is not as promised."""
        found = []
        if self.seconds > TIMEOUT + SLACK + LOADED:
            found.append(f"the last survivor ended {self.seconds:.1f} s after the failure")
        for each, text in zip(self.survivors, self.texts(), strict=True):
            if each.code is None:
                found.append(f"a survivor did not end: {text}")
            elif each.value is None and "has hung for" not in text:
                found.append(f"a survivor ended with {each.code}: {each.error}{text}")
            elif each.value is not None and not each.value["peer"]:
                found.append(f"a survivor raised no PeerError: {text}")
            elif each.value is not None and each.value["reason"] != "error":
                found.append(f"fit_end did not come: {text}")
            elif each.value is not None and each.value["entered"]:
                found.append(f"collectives were entered afterwards: {each.value['entered']}")
            if f"rank {plan.victim}" not in text:
                found.append(f"the rank is not named: {text}")
            if plan.kind == "raise" and "the data is bad" not in text:
                found.append(f"the error is not told: {text}")
            if plan.kind in ("raise", "hang") and plan.hook not in text:
                found.append(f"the hook is not named: {text}")
            if plan.kind in ("raise", "hang") and plan.hook in HOOKS[:3] and f"step {plan.step}" not in text:
                found.append(f"the step is not named: {text}")
            known = any(word in text for word in ("phase", "between two epochs", "fit_begin"))
            if plan.kind == "kill" and plan.delay > 1.0 and not known:  # a process tells where it is twice a second
                found.append(f"the place is not named: {text}")
        if plan.kind == "hang" and self.victim.code is None:
            found.append("the one that hung did not end")
        return found


def trial(plan: Plan) -> Ended:
    """Run the processes of a plan; all of them have ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="loopkit-trial-") as name:
        directory = Path(name, "saved")
        began = time.time()
        limit = TIMEOUT + SLACK + LOADED + plan.delay
        outcomes = run(train, plan.processes, plan, directory, timeout=limit, check=False)
        told = Path(name, "told")
        failed_at = float(told.read_text()) if told.exists() else began
        survivors = [each for rank, each in enumerate(outcomes) if rank != plan.victim]
        saved = -1
        found = storage.listing(directory) if directory.exists() else []
        for manifest in found:
            state = read_state(manifest)  # raises if a file is damaged
            assert all(torch.isfinite(value).all() for value in state["models"]["model"].values())
            saved = max(saved, state["progress"]["steps"])
        seconds, last = (began + max(each.seconds for each in these) - failed_at for these in (survivors, outcomes))
        return Ended(survivors, outcomes[plan.victim], seconds, last, saved)


def planned(seed: int, processes: int | None = None, kind: str | None = None) -> Plan:
    """A plan at random."""
    chance = random.Random(seed)
    kind = kind or chance.choice(KINDS[:3])
    processes = processes or chance.choice((2, 2, 4))
    hook, step = chance.choice(HOOKS), chance.randrange(STEPS)
    return Plan(kind, chance.randrange(processes), processes, hook, step, chance.uniform(0.0, 1.5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--processes", type=int, choices=(2, 3, 4))
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    print("trial  kind   procs  victim  hook          step  delay  seconds  saved  faults")
    for seed in range(options.seed, options.seed + options.trials):
        plan = planned(seed, options.processes, options.kind)
        ended = trial(plan)
        faults = ended.faults(plan)
        counts[plan.kind] += 1
        counts["faults"] += bool(faults)
        print(
            f"{seed:5}  {plan.kind:5}  {plan.processes:5}  {plan.victim:6}  {plan.hook:12}  {plan.step:4}  "
            f"{plan.delay:5.2f}  {ended.seconds:7.1f}  {ended.saved:5}  {len(faults)}",
            flush=True,
        )
        for fault in faults:
            print(f"       {fault}")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return 1 if counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
