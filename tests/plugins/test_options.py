"""`options_of` tells every option that a standard plugin was made with."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch

import loopkit.plugins
from loopkit import every, hookimpl, schedules
from loopkit.base.options import options_of
from loopkit.criteria import Patience
from loopkit.hooks import implemented
from loopkit.logs import Csv, JsonLines
from loopkit.metrics import Accuracy
from loopkit.plugin import unwrapped
from loopkit.plugins import SaveOptions, throttle


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def trend(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def hits(outputs, targets):
    return outputs.argmax(1).eq(targets).float()


LINEAR = schedules.linear(10)
MEMBER = {"shard": False, "tail": "drop", "backend": "gloo", "timeout": 9.0}
ACCURACY, HITS = Accuracy(), hits
GIVEN = {
    "Checkpoint": [
        {
            "directory": Path("/tmp/runs/a"),
            "save": every(updates=3),
            "keep": 3,
            "best": "val/loss",
            "mode": "max",
            "resume": "auto",
            "options": SaveOptions(background=True),
            "name": "saver",
        },
        {"directory": Path("/tmp/runs/a"), "overwrite": True, "weights_only": True, "data": "warn"},
    ],
    "ClipGradNorm": [{"max_norm": 0.5, "norm_type": 1.0, "over": "all", "name": "clip"}],
    "ClipGradValue": [{"max_value": 0.5, "name": "clip"}],
    "Compile": [{"dynamic": True, "mode": "default", "backend": "eager", "fullgraph": True}],
    "DDP": [
        {
            "overlap": False,
            "weighted": True,
            "compression": "bf16",
            "bucket_mb": 3.0,
            "find_unused_parameters": True,
            "fixed_buckets": True,
            "sync_batch_norm": True,
            "broadcast_buffers": False,
            **MEMBER,
        },
        {"bucket_views": True},
        {"static_graph": True},
    ],
    "EarlyStopping": [
        {
            "monitor": "val/accuracy",
            "patience": 7,
            "mode": "max",
            "min_delta": 0.1,
            "restore_best": True,
            "training": "train/accuracy",
            "best_device": "cpu",
            "name": "stopping",
        },
        {"criterion": Patience(3)},
    ],
    "EvalMode": [{"patterns": ("0", "1"), "name": "still"}],
    "Freeze": [{"patterns": ("0", {"1": 3}), "thaw_at": 2, "norms": False, "saved": False, "name": "frozen"}],
    "GradNoise": [{"std": 0.2, "decay": 0.5, "seed": 3}],
    "GradNorm": [{"norm_type": 1.0, "clipped": True, "name": "norms"}],
    "History": [{"steps": True}],
    "LogHyperparameters": [{"values": {"a": 1, "width": 3}}],
    "LogMetrics": [{"every": 5, "name": "values"}],
    "LogTo": [{"backends": (JsonLines("a"), Csv("b")), "every": 7, "seconds": 3.0, "name": "logs"}],
    "Metrics": [{"metrics": (ACCURACY,), "hits": HITS}, {"metrics": (ACCURACY,), "phase": "val"}],
    "MixedPrecision": [
        {
            "dtype": torch.float16,
            "scaling": True,
            "init_scale": 1024.0,
            "growth_factor": 3.0,
            "backoff_factor": 0.25,
            "growth_interval": 7,
            "min_scale": 2.0,
        },
        {"dtype": torch.bfloat16},
    ],
    "Plateau": [
        {"monitor": "val/accuracy", "mode": "max", "optimizer": "a", "name": "flat", "factor": 0.5, "patience": 2}
    ],
    "Progress": [{"bar": False, "file": sys.stderr, "every": 5, "chart": True}],
    "SanityCheck": [{"checks": (print,)}],
    "Schedule": [
        {
            "schedule": LINEAR,
            "key": "betas[0]",
            "optimizer": "a",
            "groups": "b",
            "every": "epoch",
            "absolute": True,
            "start": 3,
            "name": "momentum",
        },
        {"schedule": LINEAR, "attribute": "*.dropout.p", "name": "dropout"},
    ],
    "SkipSpikes": [{"threshold": 3.0, "window": 7, "warmup": 5, "max_skips": 2, "wait": True}],
    "StopOnNonFinite": [
        {"policy": "rollback", "gradients": True, "max_skips": 2, "max_rollbacks": 1, "snapshot_every": 7},
        {"gradients": True, "late": False},
    ],
    "ToDevice": [{"device": torch.device("cpu")}],
    "TorchSchedule": [{"scheduler": trend, "optimizer": "a", "every": "epoch", "name": "steps"}],
    "WeightAverage": [
        {
            "decay": 0.5,
            "warmup": True,
            "start_update": 3,
            "start_epoch": 1,
            "every": 2,
            "use_buffers": True,
            "update_bn": None,
            "phases": ("val",),
            "name": "average",
        }
    ],
    "ChannelsLast": [{}],
}
"""Options by class: each that it has, with another value than the default."""
CLASSES = {name: getattr(loopkit.plugins, name) for name in loopkit.plugins.__all__}
CASES = [pytest.param(CLASSES[name], given, id=f"{name}-{i}") for name in GIVEN for i, given in enumerate(GIVEN[name])]


def made(cls, given):
    """The plugin, where options may be given by position alone, or by names of their own."""
    kinds = {p.name: p.kind for p in inspect.signature(cls).parameters.values()}
    spread = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL), None)
    return cls(*given.get(spread, ()), **{name: value for name, value in given.items() if name != spread})


def test_table_holds_every_standard_plugin_with_every_option():
    plugins = {name for name, cls in CLASSES.items() if inspect.isclass(cls) and implemented(cls)}
    assert GIVEN.keys() == plugins
    for name in plugins:
        parameters = inspect.signature(CLASSES[name]).parameters.values()
        known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        assert known - {"args"} <= {option for given in GIVEN[name] for option in given}, name


@pytest.mark.parametrize(("cls", "given"), CASES)
def test_options_of_a_standard_plugin_are_those_that_it_was_made_with(cls, given):
    found = options_of(made(cls, given))
    assert {name: found[name] for name in given} == given
    defaults = {
        p.name: p.default
        for p in inspect.signature(cls).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in given
    }
    assert {name: found[name] for name in defaults} == defaults


class Tells:
    """Keeps nothing under the name of an option, but tells."""

    def __init__(self, much):
        self.value = 2 * much

    def options(self):
        return {"much": self.value // 2}

    @hookimpl
    def step_end(self):
        """Does nothing."""


class Hides:
    def __init__(self, kept, lost, _function, step_end=None, **more):
        self._kept = kept
        self._function = _function
        self.more = more

    @hookimpl
    def step_end(self):
        """Has the name of an option, and is none."""


def test_options_are_what_the_plugin_tells():
    assert options_of(Tells(3)) == {"much": 3}


def test_options_that_are_not_kept_are_left_out():
    assert options_of(Hides(1, 2, hits, rate=3)) == {"kept": 1, "_function": hits, "rate": 3}


def test_options_of_a_wrapped_plugin_are_those_of_the_plugin():
    assert options_of(unwrapped(throttle(Tells(3), every=2))) == {"much": 3}
