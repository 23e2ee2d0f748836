"""The plugin keeps the contract of plugins, alone and in two processes."""

from distributed.processes import run
from loopkit_testing import Case, plugin_contract
from loopkit_testing.processes import compared, train_together

from loopkit_local import AverageParameters, EverySteps

FORKED = {"two_processes": "it is test_plugin_keeps_in_two_processes, which starts them faster"}

test_contract = plugin_contract(lambda: AverageParameters(EverySteps(2)), name="average_parameters", skip=FORKED)


def test_plugin_keeps_in_two_processes():
    assert compared(run(lambda rank: train_together(Case(AverageParameters)), 2, timeout=60)) == []
