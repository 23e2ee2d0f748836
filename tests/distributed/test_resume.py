"""A run of several processes is restarted, or goes on with another number of them, and ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from distributed.processes import run
from loopkit import Learner, TrainingPhase, every, hookimpl, metrics
from loopkit.data import TensorLoader
from loopkit.distributed.launch import launch
from loopkit.plugins import DDP, Checkpoint, ClipGradNorm, History, Metrics, Schedule
from loopkit.schedules import cosine, warmup

ROOT = Path(__file__).parents[2]


class KillsItself:
    """Ends rank 1 by a kill at a step of the first attempt; knows the step that this attempt began with."""

    def __init__(self, step):
        self.step, self.began = step, None

    @hookimpl
    def step_begin(self, learner, phase):
        if phase.training and self.began is None:
            self.began = learner.progress.steps

    @hookimpl
    def step_end(self, learner, phase):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and learner.world.rank == 1 and phase.training and learner.progress.steps == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def restartable(rank, directory, kill_at, fixed):
    """A run that saves as it goes, and goes on with what was saved."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(202, 6, generator=generator), torch.randint(0, 3, (202,), generator=generator)
    layers = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b)) for a, b in pairwise([6, 40, 40, 40, 3])]
    killer = KillsItself(kill_at)
    learner = Learner(
        nn.Sequential(*layers, nn.Dropout(0.2)),
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=0.01),
        plugins=[
            DDP(timeout=60, fixed_buckets=fixed, bucket_mb=0.01),
            Checkpoint(directory, save=every(updates=5), resume="auto"),
            ClipGradNorm(1.0),
            Metrics(metrics.Accuracy()),
            killer,
        ],
        standard=False,
    )
    size = 16 // learner.world.size
    torch.manual_seed(rank)
    result = learner.fit(
        TensorLoader(inputs, targets, batch_size=size, shuffle=True, seed=3),
        TensorLoader(inputs[:50], targets[:50], batch_size=size),
        epochs=2,
    )
    told = {"steps": result.steps, "metrics": result.metrics, "weights": learner.model.state_dict()}
    return {"restart": os.environ.get("TORCHELASTIC_RESTART_COUNT"), "began": killer.began, **told}


SCRIPT = """
import os
import sys
import torch
from distributed.test_resume import restartable

directory, kill_at, fixed = sys.argv[1:]
rank = int(os.environ["RANK"])
fixed = {"None": None, "False": False}[fixed]
torch.save(restartable(rank, directory, int(kill_at), fixed), f"{directory}-rank-{rank}.pt")
"""


def torchrun(directory, kill_at, processes, fixed):
    script = directory.parent / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    options = ["--nproc-per-node", str(processes), "--max-restarts", "2", "--monitor-interval", "0.1"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths}
    env = {key: value for key, value in env.items() if key not in ("RANK", "WORLD_SIZE")}
    given = [str(script), str(directory), str(kill_at), str(fixed)]
    done = subprocess.run([*command, *options, *given], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{directory}-rank-{rank}.pt") for rank in range(processes)], done.stderr


def is_equal(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def launched(directory, kill_at, fixed):
    return restartable(int(os.environ["RANK"]), directory, kill_at, fixed)


def check_restarted(whole, cut, processes):
    assert [told["restart"] for told in whole + cut] == [None] * processes + ["1"] * processes
    assert [told["began"] for told in whole + cut] == [0] * processes + [15] * processes
    assert all(told["steps"] == 26 for told in whole + cut)


@pytest.mark.parametrize(("processes", "fixed"), [pytest.param(2, False, marks=pytest.mark.slow), (4, None)])
def test_a_restarted_run_ends_with_the_same_bits(tmp_path, processes, fixed):
    whole = run(restartable, processes, tmp_path / "whole", -1, fixed)
    cut = launch(launched, tmp_path / "cut", 18, fixed, processes=processes, restarts=2, start="forkserver")
    check_restarted(whole, cut, processes)
    for one, other in zip(whole, cut, strict=True):
        assert is_equal(one["weights"], other["weights"])
        assert one["metrics"] == other["metrics"]


@pytest.mark.slow
def test_four_processes_end_with_other_bits_where_buckets_are_not_fixed(tmp_path):
    whole = run(restartable, 4, tmp_path / "whole", -1, False)
    cut = launch(launched, tmp_path / "cut", 18, False, processes=4, restarts=2, start="forkserver")
    check_restarted(whole, cut, 4)
    for one, other in zip(whole, cut, strict=True):
        # the reducer's buckets are others in the first step after a restart, and so are the last bits of its sums
        assert not is_equal(one["weights"], other["weights"])
        assert one["metrics"]["train/loss"] == pytest.approx(other["metrics"]["train/loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "fixed"), [(2, False), (4, None)])
def test_a_script_that_torchrun_restarts_ends_with_the_same_bits(tmp_path, processes, fixed):
    whole = run(restartable, processes, tmp_path / "whole", -1, fixed)
    cut, said = torchrun(tmp_path / "cut", 18, processes, fixed)
    assert "at step 15, after 1 epoch" in said
    check_restarted(whole, cut, processes)
    for one, other in zip(whole, cut, strict=True):
        assert is_equal(one["weights"], other["weights"])
        assert one["metrics"] == other["metrics"]


SAMPLES = 152
"""Not a multiple of the global batch, so that every epoch ends with a smaller one."""
GLOBAL = 16


class Seen:
    """Which samples each step took, by epoch."""

    def __init__(self):
        self.ids = {}

    @hookimpl(phase=TrainingPhase, reads=("inputs",))
    def step_end(self, learner, step):
        self.ids.setdefault(learner.progress.epochs, []).extend(step.inputs[:, 0].int().tolist())


class StopsAt:
    """Ends the run after so many updates, asked for on the last rank."""

    def __init__(self, count):
        self.count = count

    @hookimpl(phase=TrainingPhase)
    def step_end(self, learner):
        if learner.progress.updates == self.count and learner.world.rank == learner.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def labelled():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    inputs[:, 0] = torch.arange(SAMPLES)
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


def part(rank, processes, directory, stop, lr, epochs):
    """Go on with a run, until it is stopped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[:, 0] = 0  # the sample's number plays no part
    seen = Seen()
    plugins = [
        DDP(timeout=60),
        Checkpoint(directory, save=every(epochs=100), resume="auto"),
        Metrics(metrics.Accuracy(), metrics.F1(average="macro")),
        seen,
    ]
    if lr:
        plugins.append(Schedule(warmup(5, then=cosine())))
    if stop is not None:
        plugins.append(StopsAt(stop))
    learner = Learner(
        model,
        nn.CrossEntropyLoss(),
        lambda params: torch.optim.AdamW(params, lr=lr, weight_decay=0.0),
        plugins=plugins,
        standard=False,
    )
    begun = {}

    class Begun:
        @hookimpl(after=("ddp",))
        def epoch_begin(self, learner, phase):
            if not begun:
                begun["weights"] = [value.clone() for value in learner.model.state_dict().values()]
                states = learner.optimizer.state_dict()["state"].values()
                begun["moments"] = [value.clone() for state in states for value in state.values()]
                begun["lr"] = learner.optimizer.param_groups[0]["lr"]

    learner.add(Begun())
    data = TensorLoader(*labelled(), batch_size=GLOBAL // processes, shuffle=True, seed=3)
    result = learner.fit(data, epochs=epochs, on_interrupt="return")
    return {
        "ids": seen.ids,
        "begun": begun,
        "weights": list(learner.model.state_dict().values()),
        "metrics": result.metrics,
        "reason": result.reason,
        "counts": (result.epochs, result.steps, result.updates),
    }


def parts(directory, sizes, stops, lr=0.01, epochs=3):
    """A run by so many processes in turn; what each part did, on all ranks."""
    return [
        run(part, size, size, directory, stop, lr, epochs, timeout=60)
        for size, stop in zip(sizes, [*stops, None], strict=True)
    ]


def recorded(rank, directory, stop, epochs=2):
    """Go on with a run that keeps the loss of each step."""
    torch.manual_seed(0)
    history = History(steps=True)
    plugins = [DDP(timeout=60), Checkpoint(directory, save=every(epochs=100), resume="auto"), history]
    if stop is not None:
        plugins.append(StopsAt(stop))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, nn.CrossEntropyLoss(), optimizer, plugins=plugins, standard=False)
    data = TensorLoader(*labelled(), batch_size=40 // learner.world.size, shuffle=True, seed=3)
    learner.fit(data, epochs=epochs, on_interrupt="return")
    return history.step_rows


def test_each_process_keeps_the_steps_of_its_own(tmp_path):
    whole = run(recorded, 2, tmp_path / "whole", None)
    assert whole[0] != whole[1]
    run(recorded, 2, tmp_path / "cut", 1)  # wherever all have agreed
    assert run(recorded, 2, tmp_path / "cut", None) == whole


def test_steps_of_processes_that_are_no_more_are_kept(tmp_path):
    whole = run(recorded, 2, tmp_path / "whole", None)
    run(recorded, 2, tmp_path / "cut", None, 1)
    [rows] = run(recorded, 1, tmp_path / "cut", None)
    assert rows[:8] == [row for rank in whole for row in rank[:4]]
    assert [row["step"] for row in rows[8:]] == [0, 1, 2, 3]


def samples_of(told, epoch):
    return [sample for each in told for rank in each for sample in rank["ids"].get(epoch, [])]


def identical(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("sizes", "stops"),
    [
        ((1, 2, 1, 4), (2, 4, 9)),
        pytest.param((2, 1, 4, 2), (3, 12, 17), marks=pytest.mark.slow),
        ((2, 4, 1), (10, 20)),
    ],
    ids=["one_epoch", "several_epochs", "between_epochs"],
)
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, sizes, stops):
    told = parts(tmp_path, sizes, stops)
    for ranks in told:
        for rank in ranks[1:]:
            for what in ("weights", "moments"):
                assert identical(rank["begun"][what], ranks[0]["begun"][what])
            assert rank["begun"]["lr"] == ranks[0]["begun"]["lr"]
            assert identical(rank["weights"], ranks[0]["weights"])
            assert (rank["metrics"], rank["counts"]) == (ranks[0]["metrics"], ranks[0]["counts"])
    for before, after in pairwise(told):
        assert before[0]["reason"] == "signal"
        assert identical(after[0]["begun"]["weights"], before[0]["weights"])
    for epoch in range(3):
        assert sorted(samples_of(told, epoch)) == list(range(SAMPLES))
    assert told[-1][0]["reason"] == "epochs"
    assert told[-1][0]["counts"] == (3, 30, 30)


def test_metrics_of_an_epoch_that_changes_its_processes_are_those_of_one(tmp_path):
    [[alone]] = parts(tmp_path / "alone", (1,), (), lr=0.0, epochs=1)
    *_, ranks = parts(tmp_path / "changing", (1, 2, 1, 4), (2, 4, 9), lr=0.0, epochs=1)
    for rank in ranks:
        assert rank["metrics"].keys() == alone["metrics"].keys()
        assert rank["metrics"]["train/accuracy"] == alone["metrics"]["train/accuracy"]
        for name, value in alone["metrics"].items():
            assert rank["metrics"][name] == pytest.approx(value, rel=1e-6)  # sums of 150 terms in another order
