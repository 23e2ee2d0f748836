"""Run a learner and the script that it is ejected to, and compare every bit."""

from __future__ import annotations

import copy
import io
import struct
import subprocess
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopkit import Learner
from loopkit_files import eject

SAMPLES = 31  # in batches of 4: 8 steps, the last with 3 samples; windows of 3 leave a tail of two


def network(seed: int = 1) -> nn.Sequential:
    """Dropout draws random numbers, batch norm has buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def loaders(seed: int = 2, classes: bool = True) -> tuple[Any, Any]:
    """Training data in an order of torch's global generator, and validation data."""
    generator = torch.Generator().manual_seed(seed)
    x, v = torch.randn(SAMPLES, 5, generator=generator), torch.randn(10, 5, generator=generator)
    if classes:
        y = torch.randint(3, (SAMPLES,), generator=generator), torch.randint(3, (10,), generator=generator)
    else:
        y = torch.randn(SAMPLES, 3, generator=generator), torch.randn(10, 3, generator=generator)
    train = DataLoader(TensorDataset(x, y[0]), batch_size=4, shuffle=True)
    return train, DataLoader(TensorDataset(v, y[1]), batch_size=4)


def run(source: str) -> dict[str, Any]:
    """The names that a script defines."""
    names: dict[str, Any] = {"__name__": "ejected"}
    exec(compile(source, "ejected.py", "exec"), names)
    return names


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def compare(
    *plugins: Any,
    fit: dict[str, Any],
    val: bool = True,
    model: Any = network,
    optimizer: Any = sgd,
    loss_fn: Any = None,
    data: Any = loaders,
    standard: bool = True,
    **options: Any,
) -> tuple[str, Any]:
    """Both runs from the same bits; returns the script and loopkit's result."""
    loss_fn = loss_fn or nn.CrossEntropyLoss()
    ours, theirs = model(), model()
    learner = Learner(ours, loss_fn, optimizer, plugins=plugins, standard=standard, **options)
    source = eject(learner, fit, val=val)
    train, valid = data()
    torch.manual_seed(3)
    with redirect_stdout(io.StringIO()):
        result = learner.fit(train, valid if val else None, **fit)
    after = torch.get_rng_state()
    made = optimizer(theirs.parameters())
    train, valid = data()
    torch.manual_seed(3)
    printed = io.StringIO()
    function = run(source)["train"]
    with redirect_stdout(printed):
        history = function(theirs, train, *([valid] if val else []), made, copy.deepcopy(loss_fn))
    assert torch.get_rng_state().equal(after), "the random numbers that were drawn"
    same(ours.state_dict(), theirs.state_dict(), "model")
    same(learner.optimizer.state_dict(), made.state_dict(), "optimizer")
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
        assert p.grad is None or q.grad is not None
    same_metrics(result, history, printed.getvalue(), "validate" in fit and fit["validate"].updates is not None)
    return source, result


def same_metrics(result: Any, history: list[dict[str, float]], printed: str, within: bool) -> None:
    """Assert that each epoch has loopkit's metrics, and that its line shows them."""
    epochs: list[dict[str, float]] = [{} for row in result.history if row["phase"] == "train"]
    for row in result.history:
        of = row["epoch"] - 1
        epochs[of].update({name: value for name, value in row.items() if "/" in name})
    assert len(history) == len(epochs)
    lines = printed.splitlines()
    assert len(lines) == len(epochs)
    for line, mine, theirs in zip(lines, history, epochs, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            same(value, mine[name], name)
            assert f"  {name} {value:.6g}" in line


def same(one: Any, other: Any, path: str) -> None:
    """Assert that two states are bitwise the same."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, (dict, list, tuple)):
        assert len(one) == len(other), path
        if isinstance(one, dict):
            assert list(one) == list(other), path
        for key in one if isinstance(one, dict) else range(len(one)):
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other), path
    else:
        assert one == other, path


def lint(sources: list[str], directory: Any) -> str:
    """What ruff would change or complains of, with lines of 88 and of 120 characters."""
    paths = []
    for i, source in enumerate(sources):
        path = directory / f"ejected_{i}.py"
        path.write_text(source)
        paths.append(str(path))
    out = ""
    for width in ("88", "120"):
        options = ["--isolated", f"--config=line-length={width}", *paths]
        for words in (["format", "--diff"], ["check", "--select", "E,F,I,W,B,UP,RUF,SIM,C4", "--ignore", "B905"]):
            done = subprocess.run(
                ["ruff", *words, *options], capture_output=True, text=True, timeout=60, check=False, cwd=directory
            )
            out += "" if done.returncode == 0 else done.stdout + done.stderr
    return out
