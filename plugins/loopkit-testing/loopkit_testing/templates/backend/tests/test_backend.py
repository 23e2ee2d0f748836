from __future__ import annotations

from pathlib import Path

from loopkit.plugins import LogMetrics, Metrics
from loopkit_testing import backend_contract, tiny_problem

from loopkit_my_name import MyName, read

test_contract = backend_contract(lambda folder: MyName(folder / "log.tsv"), lambda folder: read(folder / "log.tsv"))


def test_my_name_can_be_named(tmp_path: Path) -> None:
    problem = tiny_problem()
    path = str(tmp_path / "log.tsv")
    plugins = [{"my_name": {"path": path}}, Metrics(), LogMetrics()]
    learner = problem.learner(plugins=plugins, standard=False)
    result = learner.fit(problem.train, problem.val, epochs=2)
    assert read(path)[-1][2] == result.metrics["val/loss"]
