"""Both keep the contract of plugins, alone and in two processes."""

import pytest
from distributed.processes import run
from loopkit_testing import Case, plugin_contract
from loopkit_testing.processes import compared, train_together

from loopkit_sam import ASAM, SAM

FORKED = {"two_processes": "it is test_plugin_keeps_in_two_processes, which starts them faster"}

test_sam = plugin_contract(SAM, name="sam", skip=FORKED)
test_asam = plugin_contract(ASAM, name="asam", skip=FORKED)


@pytest.mark.parametrize("plugin", [SAM, ASAM])
def test_plugin_keeps_in_two_processes(plugin):
    assert compared(run(lambda rank: train_together(Case(plugin)), 2, timeout=60)) == []
