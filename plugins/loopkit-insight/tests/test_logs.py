"""The plugins that log, together: the weights stay as they are, and a run that goes on logs what a whole one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import differences
from logs.together import FAILURES, fit, fit_in_two, trained

from loopkit.logs import read_log
from loopkit.plugins import LogTo
from loopkit_insight import LogGradients, LogHistograms, LogPredictions, LogResources


def logging(log: Path, every: float = 60) -> list[Any]:
    """All of them."""
    return [
        LogTo(log, every=3),
        LogHistograms(every=2, gradients=True),
        LogGradients(depth=1, ratio=True),
        LogPredictions(count=3),
        LogPredictions("table", count=2, worst=False, every=2, name="first_predictions"),
        LogResources(every=every),
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_weights_are_bitwise_those_without_logging(tmp_path: Path, dtype: str | None, accumulate: int) -> None:
    log = tmp_path / "log.jsonl"
    one, other = trained([], dtype, accumulate), trained(logging(log, every=0.001), dtype, accumulate)
    assert list(differences(one, other)) == []
    assert len(read_log(log).records) > 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return fit(tmp_path_factory.mktemp("whole"), logging)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_log_of_a_run_that_failed_and_goes_on_is_that_of_a_whole_one(
    tmp_path: Path, whole: list[Any], failure: tuple[str, int, int], saves: bool
) -> None:
    resumed, said = fit_in_two(tmp_path, logging, failure, saves)
    assert resumed == (saves or failure != ("train", 1, 1))
    assert said == whole
