from __future__ import annotations

import pytest
from loopkit.errors import PluginError
from loopkit.plugins import History
from loopkit_testing import plugin_contract, tiny_problem

from loopkit_my_name import MyName

test_contract = plugin_contract(MyName, name="my_name")


def test_my_name_is_the_largest_loss_of_each_epoch() -> None:
    problem, history = tiny_problem(), History(steps=True)
    learner = problem.learner(plugins=[MyName(), history], standard=False)
    result = learner.fit(problem.train, problem.val, epochs=2)
    last = [row for row in history.step_rows if row["epoch"] == history.step_rows[-1]["epoch"]]
    losses = [row["val/loss"] for row in last if "val/loss" in row]
    assert losses
    assert result.metrics["val/largest_loss"] == max(losses)


def test_my_name_takes_the_name_of_its_metric() -> None:
    problem = tiny_problem()
    learner = problem.learner(plugins=[MyName(metric="peak")], standard=False)
    assert set(learner.fit(problem.train, epochs=1).metrics) == {"train/peak"}


@pytest.mark.parametrize("metric", ["", "train/loss", "a.b"])
def test_my_name_refuses_a_bad_name(metric: str) -> None:
    with pytest.raises(PluginError, match="without slash and dot"):
        MyName(metric)
