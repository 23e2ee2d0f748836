"""Every plugin that ``loopkit.plugins`` exports keeps the contract, with its defaults and with typical options."""

import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import loopkit.plugins
from loopkit.events import EpochEnd, StepEnd
from loopkit.metrics import F1, Accuracy
from loopkit.plugins import (
    DDP,
    FSDP,
    AverageParameters,
    ChannelsLast,
    CudnnBenchmark,
    History,
    Metrics,
    Profile,
    Progress,
    SanityCheck,
    SkipSpikes,
    StopOnNonFinite,
    ToDevice,
    WeightAverage,
    call_on,
    throttle,
)
from loopkit.testing import CHECKS, check_plugin


def hits(outputs, targets):
    return outputs.argmax(1).eq(targets).float()


def note(learner, phase):
    """Does nothing."""


def count(step):
    """Does nothing."""


class Terminal(io.StringIO):
    def isatty(self):
        return True


PLUGINS = {
    "AverageParameters": AverageParameters,
    "ChannelsLast": ChannelsLast,
    "CudnnBenchmark": CudnnBenchmark,
    "DDP": DDP,
    "DDP(overlap=False, weighted=True)": lambda: DDP(overlap=False, weighted=True),
    "FSDP": FSDP,
    "FSDP(nn.Linear)": lambda: FSDP(nn.Linear, mixed_precision=torch.bfloat16),
    "History": History,
    "History(steps=True)": lambda: History(steps=True),
    "Metrics": Metrics,
    "Metrics(Accuracy(), F1(), hits)": lambda: Metrics(Accuracy(), F1("weighted"), hits),
    "Progress": lambda: Progress(file=io.StringIO()),
    "Progress(bar=True)": lambda: (Progress(bar=True, file=Terminal()), Metrics()),
    "Profile": lambda: Profile(range(1, 3), None, show=False),
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


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_keeps(name, check):
    check_plugin(PLUGINS[name], checks=[check])


def test_every_exported_plugin_is_checked():
    tested = {name.split("(")[0] for name in PLUGINS}
    for path in Path(__file__).parent.glob("test_*.py"):  # or in the tests of its own module
        text = path.read_text(encoding="utf-8")
        tested |= (
            set(re.findall(r"\w+", text)) if "check_plugin(" in text and path.name != Path(__file__).name else set()
        )
    assert [name for name in loopkit.plugins.__all__ if name not in tested] == []


def test_standard_plugins_keep_the_contract_on_double_outputs():
    def problem():
        from loopkit.testing import tiny_problem

        made = tiny_problem()
        made.model.double()
        made.train = [(inputs.double(), targets) for inputs, targets in made.train]
        made.val = [(inputs.double(), targets) for inputs, targets in made.val]
        return made

    assert next(problem().model.parameters()).dtype == torch.float64
    check_plugin(lambda: Metrics(Accuracy(), hits), problem=problem)
