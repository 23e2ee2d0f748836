"""Facts: equal for equal things, in every process, and different for different ones."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import nn

from loopkit.facts import fact

PROGRAM = """
from loopkit.facts import fact

def loss(outputs, targets, kind="mse"):
    return kind in {"mse", "l2", "square"} and (outputs - targets).square().mean()

print(fact(loss))
"""


def test_function_has_one_fact_in_every_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    said = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said.add(subprocess.check_output([sys.executable, script], env=environment, text=True))
    assert len(said) == 1


def test_functions_that_compute_something_else_have_other_facts():
    assert fact(lambda o, t: (o - t).mean()) != fact(lambda o, t: (o + t).mean())
    assert fact(lambda o, t: (o - t).mean()) == fact(lambda o, t: (o - t).mean())


def test_modules_are_told_by_class_and_options():
    assert fact(nn.MSELoss()) != fact(nn.MSELoss(reduction="sum"))
    assert fact(nn.CrossEntropyLoss(torch.ones(3))) != fact(nn.CrossEntropyLoss(torch.arange(3.0)))
