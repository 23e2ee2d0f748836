from __future__ import annotations

import pytest
import torch
from helpers import on, raising

from loopkit.errors import PluginError
from loopkit.plugins.cudnn_benchmark import CudnnBenchmark
from loopkit.testing import tiny_problem


@pytest.fixture(autouse=True)
def _settings():
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
    torch.use_deterministic_algorithms(False)


def fit(*plugins):
    problem = tiny_problem()
    problem.learner(plugins=[CudnnBenchmark(), *plugins], standard=False).fit(problem.train, epochs=1)


@pytest.mark.parametrize("before", [False, True])
def test_search_is_on_during_the_fit_and_put_back(before):
    seen = []
    torch.backends.cudnn.benchmark = before
    fit(on("step_begin", lambda **given: seen.append(torch.backends.cudnn.benchmark)))
    assert seen == [True] * 4
    assert torch.backends.cudnn.benchmark is before


def test_setting_is_put_back_after_an_error():
    torch.backends.cudnn.benchmark = False
    with pytest.raises(RuntimeError, match="deliberate"):
        fit(raising("step_end", RuntimeError("deliberate")))
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize(
    "ask",
    [
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.use_deterministic_algorithms(True),
    ],
    ids=["cudnn", "all"],
)
def test_deterministic_algorithms_are_refused(ask):
    ask()
    torch.backends.cudnn.benchmark = False
    with pytest.raises(PluginError, match="deterministic"):
        fit()
    assert torch.backends.cudnn.benchmark is False
