"""``LogHistograms``: which parameters and gradients are counted, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import batches, keeps_contract, on
from torch import nn

from loopkit import Learner
from loopkit.errors import PluginError
from loopkit.logs import Histogram
from loopkit.plugins import ClipGradNorm
from loopkit_insight import LogHistograms


def test_plugin_keeps_the_contract() -> None:
    keeps_contract(lambda: LogHistograms(every=2), "log_histograms")
    keeps_contract(lambda: LogHistograms(every=3, gradients=True))


def run(*plugins: Any, steps: int = 6, model: Any = None) -> tuple[list[tuple[str, int]], dict[str, Histogram], Any]:
    """The names and updates of what is logged, the last value of each name, and the learner."""
    names: list[tuple[str, int]] = []
    values: dict[str, Histogram] = {}

    def note(record: Any, **given: Any) -> None:
        names.append((record.name, record.update))
        values[record.name] = record.value

    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    learner = Learner(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        plugins=[*plugins, on("log_value", note)],
        standard=False,
    )
    learner.fit(batches(steps), epochs=1)
    return names, values, learner


def test_log_histograms_are_those_of_the_parameters_after_the_update() -> None:
    names, values, learner = run(LogHistograms(every=3))
    each = ["parameters/0.weight", "parameters/0.bias", "parameters/2.weight", "parameters/2.bias"]
    assert names == [(name, update) for update in (3, 6) for name in each]
    for name, parameter in learner.model.named_parameters():
        found = values[f"parameters/{name}"]
        assert sum(found.counts) == parameter.numel()
        assert (found.edges[0], found.edges[-1]) in [(parameter.min().item(), parameter.max().item())] or (
            parameter.numel() == 1
        )


def test_log_histograms_of_a_pattern() -> None:
    names, *_ = run(LogHistograms(every=6, parameters="0|*.bias"))
    assert names == [("parameters/0.weight", 6), ("parameters/0.bias", 6), ("parameters/2.bias", 6)]


def test_log_histograms_of_gradients_are_those_that_the_optimizer_gets() -> None:
    kept: dict[str, torch.Tensor] = {}
    spy = on(
        "update_begin",
        lambda learner, **given: kept.update({n: p.grad.clone() for n, p in learner.model.named_parameters()}),
        "spy",
        reads=("grads",),
    )
    names, values, _ = run(LogHistograms(every=6, gradients=True), ClipGradNorm(1e-3), spy)
    assert [name for name, _ in names if name.startswith("gradients/")] == [f"gradients/{name}" for name in kept]
    for name, gradient in kept.items():
        assert values[f"gradients/{name}"].counts == Histogram.counted(gradient).counts


def test_log_histograms_leaves_out_what_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    names, *_ = run(LogHistograms(every=6, gradients=True), model=model)
    assert [name for name, _ in names if name.startswith("gradients/")] == ["gradients/1.weight", "gradients/1.bias"]


def test_log_histograms_of_a_shared_parameter_come_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].weight = model[0].weight
    names, *_ = run(LogHistograms(every=6, parameters="*.weight"), model=model)
    assert [name for name, _ in names] == ["parameters/0.weight", "parameters/2.weight"]


def test_log_histograms_leaves_out_skipped_updates() -> None:
    skip = on("update_begin", lambda step, **given: step.skip_update("test") if step.index % 2 else None, "skip")
    names, *_ = run(LogHistograms(every=1, gradients=True, parameters="0.bias"), skip)
    assert names == [(name, update) for update in (1, 2, 3) for name in ("parameters/0.bias", "gradients/0.bias")]


def test_log_histograms_without_gradients_does_not_listen_to_update_begin() -> None:
    _, _, learner = run(LogHistograms())
    assert "update_begin" not in str(learner.explain("train"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, r"LogHistograms: every is 0: it is a whole number, from 1"),
        ({"bins": 0}, "LogHistograms: bins is 0"),
        ({"parameters": ""}, r"LogHistograms\(parameters=''\): it is a pattern"),
        ({"parameters": ("*",)}, r"it is a pattern"),
    ],
)
def test_log_histograms_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        LogHistograms(**options)


def test_log_histograms_refuses_a_pattern_of_nothing() -> None:
    with pytest.raises(PluginError, match=r"'0.wieght' has no match \(did you mean '0.weight'"):
        run(LogHistograms(parameters="0.wieght"))
