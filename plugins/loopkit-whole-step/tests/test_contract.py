"""The plugin keeps the contract of plugins."""

import pytest
from loopkit_testing import plugin_contract, tiny_problem

from loopkit_whole_step import WholeStep


def make() -> WholeStep:
    return WholeStep("always", backend="none", show=False)


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> None:
    """The first trace of a process imports what registers functions for its end, which is no plugin's doing."""
    problem = tiny_problem()
    problem.learner(plugins=[make()]).fit(problem.train, epochs=2)


test_contract = plugin_contract(
    make,
    name="whole_step",
    skip={"two_processes": "with several processes every step stays eager"},
)
