"""Every plugin that ``loopkit.plugins`` exports keeps the contract, with its defaults and with typical options."""

import io
import re
import tempfile
from pathlib import Path

import helpers
import pytest
import torch
from distributed.processes import run
from helpers import keeps_contract

import loopkit.plugins
from loopkit.events import EpochEnd, StepEnd, snake_case
from loopkit.metrics import F1, Accuracy
from loopkit.plugins import (
    DDP,
    ChannelsLast,
    History,
    LogMetrics,
    LogTo,
    Metrics,
    Progress,
    SanityCheck,
    SkipSpikes,
    StopOnNonFinite,
    ToDevice,
    WeightAverage,
    call_on,
    throttle,
)
from loopkit_testing import Case, check_plugin
from loopkit_testing.processes import compared, train_together


def hits(outputs, targets):
    return outputs.argmax(1).eq(targets).float()


def note(learner, phase):
    """Does nothing."""


def count(step):
    """Does nothing."""


LOGS = tempfile.TemporaryDirectory()


def fresh_log(ending="", **options):
    """A log that no other plugin has: a new run in the place of another would set that aside."""
    return LogTo(f"{tempfile.mkdtemp(dir=LOGS.name)}/log{ending}", **options)


class Terminal(io.StringIO):
    def isatty(self):
        return True


PLUGINS = {
    "ChannelsLast": ChannelsLast,
    "DDP": DDP,
    "DDP(overlap=False, weighted=True)": lambda: DDP(overlap=False, weighted=True),
    "History": History,
    "History(steps=True)": lambda: History(steps=True),
    "LogMetrics": LogMetrics,
    "LogMetrics(every=1)": lambda: (LogMetrics(every=1), Metrics(), fresh_log()),
    "LogTo": lambda: fresh_log(),
    "LogTo(every=1)": lambda: (fresh_log(".csv", every=1), LogMetrics(every=1), Metrics()),
    "Metrics": Metrics,
    "Metrics(Accuracy(), F1(), hits)": lambda: Metrics(Accuracy(), F1("weighted"), hits),
    "Progress": lambda: Progress(file=io.StringIO()),
    "Progress(bar=True)": lambda: (Progress(bar=True, file=Terminal()), Metrics()),
    "SanityCheck": SanityCheck,
    "StopOnNonFinite": StopOnNonFinite,
    "StopOnNonFinite(gradients=True)": lambda: StopOnNonFinite(gradients=True),
    "StopOnNonFinite(late=True)": lambda: StopOnNonFinite(late=True),
    "StopOnNonFinite('skip')": lambda: StopOnNonFinite("skip"),
    "StopOnNonFinite('rollback')": lambda: StopOnNonFinite("rollback", snapshot_every=2),
    "SkipSpikes": lambda: SkipSpikes(0.1, warmup=2),
    "ToDevice('cpu')": lambda: ToDevice("cpu"),
    "WeightAverage": WeightAverage,
    "WeightAverage(None, every='epoch')": lambda: WeightAverage(None, every="epoch"),
    "call_on(EpochEnd)": lambda: call_on(EpochEnd, note),
    "call_on(StepEnd)": lambda: call_on(StepEnd, count),
    "throttle(Metrics())": lambda: throttle(Metrics(Accuracy()), every=2),
    "throttle(History(steps=True), seconds=0)": lambda: throttle(History(steps=True), seconds=0),
}

ROWS = ["bounded_memory"]  # it keeps the loss of every step, until the pass ends
SKIPPED = {"History(steps=True)": ROWS, "throttle(History(steps=True), seconds=0)": ROWS}
"""What some cannot promise."""
RARE = {
    "ChannelsLast",
    "DDP(overlap=False, weighted=True)",
    "LogMetrics",
    "LogTo(every=1)",
    "Metrics",
    "Progress",
    "StopOnNonFinite(gradients=True)",
    "StopOnNonFinite('skip')",
    "WeightAverage",
    "call_on(StepEnd)",
    "throttle(History(steps=True), seconds=0)",
}
"""Those that differ from another one, here or in the tests of its own module, in an option or in the model."""
ALONE = {
    "History(steps=True)": "the rows of steps are those of each process; one that goes on gets those of rank 0",
    "throttle(History(steps=True), seconds=0)": "it refuses several processes, which have a clock each",
}
"""What is not for two processes, and why."""


def rarely(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in names]


@pytest.mark.parametrize("name", rarely(PLUGINS))
def test_plugin_keeps_the_contract(name):
    plugin = getattr(loopkit.plugins, name.split("(")[0])
    entry = snake_case(plugin.__name__) if isinstance(plugin, type) else None
    keeps_contract(PLUGINS[name], entry, skip=SKIPPED.get(name, ()))


@pytest.mark.parametrize("name", rarely(name for name in PLUGINS if name not in ALONE))
def test_plugin_keeps_in_two_processes(name):
    assert compared(run(lambda rank: train_together(Case(PLUGINS[name])), 2, timeout=60)) == []


def test_every_exported_plugin_is_checked():
    tested = {name.split("(")[0] for name in PLUGINS}
    for path in (Path(helpers.__file__).parent / "plugins").glob("test_*.py"):  # or in the tests of its own module
        text = path.read_text(encoding="utf-8")
        checks = "check_plugin(" in text or "keeps_contract(" in text
        tested |= set(re.findall(r"\w+", text)) if checks else set()
    assert [name for name in loopkit.plugins.__all__ if name not in tested] == []


def test_standard_plugins_keep_the_contract_on_double_outputs():
    def problem():
        from loopkit_testing import tiny_problem

        made = tiny_problem()
        made.model.double()
        made.train = [(inputs.double(), targets) for inputs, targets in made.train]
        made.val = [(inputs.double(), targets) for inputs, targets in made.val]
        return made

    assert next(problem().model.parameters()).dtype == torch.float64
    check_plugin(lambda: Metrics(Accuracy(), hits), problem=problem)
